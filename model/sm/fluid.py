"""Fluid time: operations that run at their fair speeds, taken to the next moment at which something changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

#: Cycles within which two moments are one: what is left of an operation that has ended, but for rounding.
EPS_CYCLES = 1e-6


class Running(Protocol):
    """An operation in flight: ``left`` of it, in cycles at full speed."""

    left: float


_R = TypeVar("_R", bound=Running)


def advance(active: Sequence[_R], speeds: Sequence[float], most_cycles: float) -> tuple[float, list[_R]]:
    """Run ``active`` at ``speeds`` (0..1) until one ends, ``most_cycles`` at most.

    Returns the cycles that passed and what ended; ``left`` of every operation is updated.  Infinite cycles mean that nothing
    can end: all speeds are 0 and there is no other moment to wait for.
    """
    step = most_cycles
    for entry, speed in zip(active, speeds):  # noqa: B905 (as many speeds as operations; the hot loop)
        if speed > 0:
            alone = entry.left / speed
            if alone < step:
                step = alone
    ended = []
    for entry, speed in zip(active, speeds):  # noqa: B905
        left = entry.left - step * speed
        entry.left = left
        if left <= EPS_CYCLES:
            ended.append(entry)
    return step, ended
