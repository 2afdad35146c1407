"""Columns of tensor memory: which are taken, and which nobody holds any more."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import numpy as np


class Columns:
    """The allocator of a program's tensor memory, alike in each CTA."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        #: First columns of what a loop allocates, by what was running and the number of the buffer.
        self._at: dict[Hashable, int] = {}
        #: (who holds them, first, number) of all columns that were allocated.
        self._held: list[tuple[weakref.ref[Any], int, int]] = []

    def again(self, place: Hashable) -> int | None:
        """Where what is allocated at ``place`` was the last time; None the first time."""
        return self._at.get(place)

    def take(self, columns: int, place: Hashable) -> int | None:
        """The first of so many columns for ``place``; None where there are not as many."""
        first = self._used if self._used + columns <= self._limit else self._given_back(columns)
        if first is not None:
            self._used = max(self._used, first + columns)
            self._at[place] = first
        return first

    def with_more(self, columns: int) -> int:
        """How many are taken with so many more."""
        return self._used + columns

    def keep(self, first: int, columns: int, holder: Any) -> None:
        """Columns belong to an allocation while somebody holds it: the compiler, too, uses again what is out of scope."""
        self._held.append((weakref.ref(holder), first, columns))

    def _given_back(self, columns: int) -> int | None:
        """The first of so many neighbouring columns that nobody holds any more; None where there are none."""
        free = np.ones(self._limit, bool)
        for holder, first, count in self._held:
            if holder() is not None:
                free[first : first + count] = False
        self._at = {place: first for place, first in self._at.items() if not free[first]}
        fits = [n for n in range(self._limit - columns + 1) if free[n : n + columns].all()]
        return fits[0] if fits else None
