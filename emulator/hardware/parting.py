"""The warps of a role as more than one: what they do between two meetings, which nothing orders among them.

Triton orders most of it: its compiler puts a barrier of the role between accesses to shared memory that conflict, those
of the copy engine, of the tensor core and of barriers included, and before every arrival (seen in the PTX of Triton 3.6
and 3.9).  It does not so for global memory, nor, before 3.9, before an atomic that releases, which one thread issues, or between
a load of tensor memory and a product that overwrites it; and no barrier helps where a warp decides by itself whether to come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tilecast.emulator.errors import BarrierError, RaceError
from tilecast.emulator.values.owners import SEVERAL

#: Accesses to global memory that a role remembers at most between two meetings.
_REMEMBERED = 64


class Unmet:
    """Accesses of one role to global memory since its warps last met, and conditions that each warp decides by itself."""

    def __init__(self) -> None:
        #: (tensor, sorted elements, the warp of each, line, whether they are stored).
        self._accesses: deque[tuple[Any, Any, Any, int, bool]] = deque(maxlen=_REMEMBERED)
        #: Places of the conditions.
        self.alone: set[int] = set()
        #: Whether a barrier got an arrival, or a promise of one.
        self.signalled = False

    def meet(self) -> None:
        """Whatever the warps did is ordered before what they do from now on."""
        self._accesses.clear()
        self.signalled = False

    def stored_by_others(self) -> int:
        """Line of the latest store by another warp than the first; 0 without one."""
        lines = (line for _, _, warps, line, stored in reversed(self._accesses) if stored and (warps > 0).any())
        return next(lines, 0)

    def access(
        self, memory: Any, places: Any, warps: Any, line: int, stores: bool, quote: Callable[[int], str]
    ) -> None:
        """A load or store of ``places`` by ``warps`` each; RaceError after another warp's access, one of the two a store."""
        order = np.argsort(places, kind="stable")
        places, warps = places[order], warps[order]
        for other, their_places, their_warps, their_line, stored in self._accesses:
            if other is not memory or not (stores or stored) or not _meet(places, their_places):
                continue
            both, mine, theirs = np.intersect1d(places, their_places, return_indices=True)
            # Of several that hold an element, one stores it and all load it.
            a, b = warps[mine], their_warps[theirs]
            several = ((a == SEVERAL) & (not stores)) | ((b == SEVERAL) & (not stored))
            apart = np.where((a != SEVERAL) & (b != SEVERAL), a != b, several & ((a == SEVERAL) != (b == SEVERAL)))
            if apart.any():
                first = int(both[apart.argmax()])
                words = ["loads", "stores"]
                raise RaceError(
                    f"race on element {first} of {memory.name} between warps of one role: one {words[stores]} it at {quote(line)}; "
                    f"another {words[stored]} it at {quote(their_line)}, and nothing makes the warps meet in between: gl.barrier()"
                )
        self._accesses.append((memory, places, warps, line, stores))

    def all_come(self, here: str, conditions: Iterable[int], quote: Callable[[int], str], role: str) -> None:
        """BarrierError where the statement that runs ``here``, under these conditions, is not for all warps."""
        for condition in conditions:
            if condition in self.alone:
                raise BarrierError(
                    f"{here}: the warps of {role} meet at a barrier here, under a condition that each of them decides by itself, "
                    f"{quote(condition)}: those that go past it never come"
                )


def _meet(some: Any, others: Any) -> bool:
    """Whether two sorted arrays have an element in common."""
    if not (some.size and others.size) or some[-1] < others[0] or others[-1] < some[0]:
        return False
    at = np.minimum(np.searchsorted(others, some), others.size - 1)
    return bool((others[at] == some).any())
