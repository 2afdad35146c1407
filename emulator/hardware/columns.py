"""Where allocations of tensor memory lie: each has columns of its own, and what a loop allocates again is where it was.

The compiler uses columns again when what was there is not live any more; whether all fit is `liveness`'s to say.
"""

from __future__ import annotations

from collections.abc import Hashable


class Columns:
    """The allocator of a program's tensor memory, alike in each CTA."""

    def __init__(self, room: int) -> None:
        self._room, self._used = room, 0
        #: First columns of what a loop allocates, by what was running and the number of the buffer.
        self._at: dict[Hashable, int] = {}

    def again(self, place: Hashable) -> int | None:
        """Where what is allocated at ``place`` was the last time; None the first time."""
        return self._at.get(place)

    def take(self, columns: int, place: Hashable) -> int | None:
        """The first of so many columns for ``place``; None where the emulator has no room for them."""
        if self._used + columns > self._room:
            return None
        first = self._at[place] = self._used
        self._used += columns
        return first

    def with_more(self, columns: int) -> int:
        """How many are taken with so many more."""
        return self._used + columns
