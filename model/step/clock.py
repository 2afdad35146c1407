"""The clock of a launch that waits for the memory at some clocks and for its programs at others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilecast.model.chip.evaluate import PredictError, settled_clock
from tilecast.model.chip.power import LOWEST_MHZ, Activity, Clock
from tilecast.model.machine.machine import Machine

#: From a clock in MHz to how many cycles a launch takes at it, and for how many of them it waits for the memory.
LengthAt = Callable[[float], tuple[float, float]]
#: How near a clock has to be to one that was looked at, and how many are looked at.
_SAME, _MOST = 2e-3, 8


def settled_by_length(machine: Machine, activity: Activity, length_at: LengthAt, clock: str | float) -> Clock:
    """The clock of ``activity`` at a regime or in MHz; PredictError where none keeps within the limit.

    A launch that waits for the memory at the top clock waits for its programs at a low one, and draws less the longer it takes.  So its
    length is looked at where the clock settles, until that is a clock that was looked at: between two of those it lies on the line
    in the time of a cycle, and below the lowest it grows with what does not wait for the memory there.
    """
    known: dict[float, tuple[float, float]] = {}
    mhz = machine["chip.clock_max_mhz"]
    while True:
        known[mhz] = length_at(mhz)
        try:
            settled = settled_clock(machine, activity, _between(known), clock)
        except PredictError:
            if LOWEST_MHZ in known:
                raise
            mhz = LOWEST_MHZ
            continue
        if settled.bound != "power" or len(known) == _MOST or any(abs(settled.mhz / m - 1.0) < _SAME for m in known):
            return settled
        mhz = settled.mhz


def _between(known: dict[float, tuple[float, float]]) -> Callable[[float], float]:
    """Seconds as a function of the clock in GHz, from lengths at some clocks."""
    clocks = sorted(known, reverse=True)
    periods = np.array([1e-6 / mhz for mhz in clocks])
    seconds = np.array([known[mhz][0] * 1e-6 / mhz for mhz in clocks])
    cycles, waiting = known[clocks[-1]]

    def seconds_at(ghz: float) -> float:
        period = 1e-9 / ghz
        beyond = (cycles - waiting) * max(0.0, period - float(periods[-1]))
        return max(float(np.interp(period, periods, seconds)) + beyond, 1e-9)

    return seconds_at
