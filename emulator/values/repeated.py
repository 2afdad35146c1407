"""Which columns of a tensor a thread computes once: a compiler does not repeat equal operations on equal operands.

Where a thread has a whole row, the numbers of columns are constants of its code.  What is computed from them alone is no instruction,
and what is computed from them and from a number a row is one instruction for all columns that the constants make alike: of
``min(stop - (columns & -16), 16)`` one in sixteen.  `emulator.replay` counts so.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from tilecast.emulator.values.layouts import DistributedLinearLayout, SliceLayout


class Columns(NamedTuple):
    """Kinds of the columns of a row, in the order of their first ones: columns of one kind hold the same by the same operations."""

    kinds: tuple[int, ...]
    #: Whether the compiler knows the values.
    known: bool

    @property
    def share(self) -> float:
        """Columns that are computed, of all."""
        return 0.0 if self.known else (max(self.kinds) + 1) / len(self.kinds)


def of_range(layout: Any, values: Any) -> Columns | None:
    """Of consecutive numbers along a row that a thread has whole; None of others."""
    if not isinstance(layout, SliceLayout) or layout.dim != 0 or not isinstance(layout.parent, DistributedLinearLayout):
        return None
    parent = layout.parent
    if any(basis[1] for bases in (parent.lane, parent.warp, parent.block) for basis in bases):
        return None
    return Columns(tuple(range(len(values))), True)


@lru_cache(maxsize=1024)
def _numbered(kinds: tuple[Any, ...], known: bool) -> Columns:
    numbers: dict[Any, int] = {}
    return Columns(tuple([numbers.setdefault(kind, len(numbers)) for kind in kinds]), known)


def together(first: Columns, second: Columns) -> Columns:
    """Of what is computed from two of them where one at least is not known: alike where both are."""
    return _numbered(tuple(zip(first.kinds, second.kinds, strict=True)), False)


def of_values(values: Any) -> Columns:
    """Of what is computed from known columns alone: alike where the values are."""
    return _numbered(tuple(values.reshape(-1).tolist()), True)
