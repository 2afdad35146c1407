"""How much shared or tensor memory a program needs when what is not live any more is used again, as Triton's compiler does.

An allocation lives from its statement to its last use (Triton 3.6 and 3.9 alike, seen in what they allocate for small
kernels); what is alive when partitions start stays so until they end, and what they allocate lives as long.  Uses are
those of the run: a loop that runs once looks like no loop.  Memory that the compiler takes for itself, for conversions
and reductions, is not counted, nor are gaps.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Span:
    """One allocation: bytes or columns, when it began and was used last (None: for ever), its name and line, quoted."""

    size: int
    first: int
    last: int | None
    name: str
    here: str


class Liveness:
    """Allocations of one program and their uses, in the order of the program."""

    def __init__(self) -> None:
        self._now = 0
        self._spans: list[_Span] = []
        #: Where cells of allocations start, and the span of each.
        self._starts: list[int] = []
        self._owners: list[_Span] = []
        #: While partitions run: spans by what was running when they were allocated.
        self._inside: dict[Any, _Span] | None = None

    def allocate(self, size: int, name: str, here: str, place: Any, cell: int | None) -> None:
        """``size`` bytes or columns whose cells start at ``cell`` (None: barriers, which stay); ``place``: role, calls and loops that run."""
        span = None if self._inside is None else self._inside.get(place)
        if span is None:
            self._tick()
            span = _Span(size, self._now, self._now if cell is not None else None, name, here)
            self._spans.append(span)
            if self._inside is not None:
                self._inside[place] = span
        if cell is not None:
            self._starts.append(cell)
            self._owners.append(span)

    def more(self, size: int, cell: int) -> None:
        """As much again for the allocation before, whose cells start at ``cell``: one lives as long as the other."""
        self._owners[-1].size += size
        self._starts.append(cell)
        self._owners.append(self._owners[-1])

    def use(self, cell: int) -> None:
        """A role reads or writes a cell."""
        span = self._owners[bisect_right(self._starts, cell) - 1]
        self._tick()
        if span.last is not None:
            span.last = self._now

    def partitions(self, run: bool) -> None:
        """Partitions start, or have ended: what they do meanwhile is done at one time."""
        self._now += 1
        self._inside = {} if run else None

    def _tick(self) -> None:
        if self._inside is None:
            self._now += 1

    def over(self, limit: int) -> tuple[int, str, str] | None:
        """(bytes or columns, name and quoted line of the allocation that brings it there) of the first that exceeds ``limit``; None without."""
        if sum(span.size for span in self._spans) <= limit:
            return None
        for span in self._spans:
            alive = sum(
                one.size
                for one in self._spans
                if one.first <= span.first and (one.last is None or one.last >= span.first)
            )
            if alive > limit:
                return alive, span.name, span.here
        return None
