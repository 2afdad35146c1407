"""The clock the power limit allows.

Board power of a kernel is idle power, the clock tree and schedulers of active SMs, and the energy of every
operation at its rate.  On-chip energy per operation grows with the supply voltage and so with the clock:
``e(f) = e(1 GHz) * f ** exponent``, with an exponent of its own for bytes from L2 where one was measured.  The voltage
follows the clock that is set (what NVML reports): under matrix work an SM executes ``power.tensor_clock_share`` of it, so
f is the executed clock over that share.  The clock settles where power meets the limit, or at the boost clock.

Energy terms come from matrix products, arithmetic streams and copies, never from attention kernels
(`tilecast calibrate` on the H200; published GEMM rows for Blackwell, see the machine files).

Two regimes exist and are both predicted.  *Sustained* is seconds of back-to-back work: the board limit holds.
*Short* is what benchmark harnesses publish, tens of milliseconds: the limiter lets power overshoot for a while,
by the amount the same boards show for short matrix products (``power.short_run_w``).  That limiter goes by what is drawn within some
20 us, not by a launch's mean: while all SMs work the clock is that of their power, from a launch's begin on and however long it is, and
where the last wave leaves SMs idle it rises at once (data/measured/h200_clock_in_launch.csv).  Work that begins at rest and lasts
between the two ("300ms") runs as in a short run until the limiter reacts (``power.reaction_s``, measured:
data/measured/h200_settling.csv) and then at the settled clock; its clock is the mean over that time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilecast.model.machine.machine import Machine

#: Units of demand that cost energy per operation: (unit, fact with pJ at 1 GHz, fact with operations per clock).
_UNIT_ENERGY = (
    ("mufu", "power.mufu_pj_per_op", "mufu.ex2_per_clk"),
    ("fma", "power.fma_pj_per_op", "fma.lanes"),
    ("alu", "power.alu_pj_per_op", "alu.lanes"),
)
#: Clocks are looked for from here up, to within this.
LOWEST_MHZ, _SAME_MHZ = 100.0, 1e-7
#: How long work lasts, as a clock.
_LASTING = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")


@dataclass(frozen=True, slots=True)
class Activity:
    """What a kernel does in all, on all SMs: the input of the power balance."""

    tensor_flop: float
    dtype: str
    #: Cycles of demand per unit, summed over SMs (unit name -> cycles).
    unit_cycles: tuple[tuple[str, float], ...]
    l2_bytes: float
    hbm_bytes: float
    #: SMs at work over the most that work at a time, in the mean over the launch (`busy_share`): less than 1 by its last wave.
    busy: float = 1.0


@dataclass(frozen=True, slots=True)
class Clock:
    """A settled clock and why it is what it is."""

    mhz: float
    power_w: float
    limit_w: float
    #: "boost" when the clock is at its maximum, "power" when the limit holds it, "fixed" when the user set it.
    bound: str

    def words(self, machine: Machine, regime: str) -> str:
        """Why the clock of ``regime`` is what it is, for people."""
        if self.bound == "power":
            limit = "that short runs draw" if regime == "short" else "limit"
            return f"held by the {self.limit_w:.0f} W {limit}"
        drawn = f"{self.power_w:.0f} W of {self.limit_w:.0f} W"
        if self.bound == "fixed":
            above = f", above the {self.limit_w:.0f} W limit" if self.power_w > self.limit_w else ""
            return f"fixed by you, would draw {self.power_w:.0f} W{above}"
        top = machine["chip.clock_max_mhz"]
        slowed = f" beside matrix products ({top:.0f} MHz without)" if round(self.mhz) < round(top) else ""
        return f"top clock{slowed}, {drawn}"


def energy_joule_at_1ghz(machine: Machine, activity: Activity) -> dict[str, float]:
    """On-chip energy of the kernel by consumer, at a set clock of 1 GHz."""
    key = "fp8" if activity.dtype == "fp8" else "bf16"
    out = {"tensor": activity.tensor_flop * machine[f"power.tensor_pj_per_flop_{key}"] * 1e-12}
    cycles = dict(activity.unit_cycles)
    for unit, energy, rate in _UNIT_ENERGY:
        out[unit] = cycles.get(unit, 0.0) * machine[rate] * machine[energy] * 1e-12
    out["l2"] = activity.l2_bytes * machine["power.l2_pj_per_byte"] * 1e-12
    return out


#: Seconds of a kernel as a function of the executed clock in GHz.
Length = Callable[[float], float]


def length(busy_cycles: float, hbm_seconds: float) -> Length:
    """A kernel of ``busy_cycles`` clocks that its memory traffic keeps for at least ``hbm_seconds``."""
    return lambda ghz: max(busy_cycles / (ghz * 1e9), hbm_seconds, 1e-12)


def power_at(machine: Machine, activity: Activity, busy_cycles: float, hbm_seconds: float, ghz: float) -> float:
    """Board watts when the kernel executes at ``ghz``; ``busy_cycles`` is its length in clocks, HBM time a floor."""
    return float(_power_curve(machine, activity, length(busy_cycles, hbm_seconds))(ghz))


def _power_curve(machine: Machine, activity: Activity, seconds_at: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Board watts as a function of the executed clock in GHz: what does not depend on it is worked out once."""
    exponent = machine["power.energy_exponent"]
    l2_exponent = machine.get("power.l2_energy_exponent", exponent)
    share = machine["power.tensor_clock_share"]
    energy = energy_joule_at_1ghz(machine, activity)
    alike = l2_exponent == exponent
    l2 = energy.pop("l2")
    joule = sum(energy.values())
    hbm = activity.hbm_bytes * machine["power.hbm_pj_per_byte"] * 1e-12
    active, idle = machine["power.active_w_at_1ghz"], machine["power.idle_w"]

    def watts(ghz: Any) -> Any:
        seconds = seconds_at(ghz)
        set_ghz = ghz / share
        tree = active * set_ghz ** (1 + exponent)
        rise = set_ghz**exponent
        l2_rise = rise if alike else set_ghz**l2_exponent
        return idle + tree + (joule * rise + l2 * l2_rise + hbm) / seconds

    return watts


def settle_clock(machine: Machine, activity: Activity, busy_cycles: float, hbm_seconds: float, regime: str) -> Clock:
    """The clock of ``regime`` ("sustained" or "short"): the highest at which power stays within its limit."""
    return settle(machine, activity, length(busy_cycles, hbm_seconds), regime)


def lasting_seconds(clock: str) -> float | None:
    """Seconds of "300ms" or "2s", for work that lasts so long from a rest on; None for a regime by name."""
    found = _LASTING.fullmatch(clock)
    return None if found is None else float(found.group(1)) * (1e-3 if found.group(2) == "ms" else 1.0)


def _short_share(machine: Machine, clock: str) -> float | None:
    """Share of the time before the limiter reacts, of work that lasts; None for a regime by name."""
    held = lasting_seconds(clock)
    return None if held is None else min(1.0, machine["power.reaction_s"] / held)


def _range(machine: Machine, regime: str) -> tuple[float, float, float]:
    """(limit in watts, lowest and highest clock in MHz) of a regime."""
    limit = machine["chip.tdp_w"] if regime == "sustained" else machine["power.short_run_w"]
    return limit, LOWEST_MHZ, machine["chip.clock_max_mhz"] * machine["power.tensor_clock_share"]


def busy_share(mean_cycles: Any, longest_cycles: Any, tiles: int, slots: int) -> Any:
    """`Activity.busy` of a launch of ``tiles`` for so many ``slots``, whose mean slot has work for ``mean_cycles`` and whose last is done
    after ``longest_cycles``: slots that never get a tile are not idle by its last wave."""
    return np.minimum(1.0, mean_cycles / longest_cycles / min(1.0, tiles / slots))


def _mean_of_phases(busy: Any, full_mhz: Any, tail_mhz: Any) -> Any:
    """Mean clock over a launch with that clock while all SMs work and another one while its last wave is under way, where its SMs leave it
    one after the other: half of them work then."""
    tail = np.minimum(1.0, 2.0 * (1.0 - busy))
    return 1.0 / ((1.0 - tail) / full_mhz + tail / tail_mhz)


def _tail(activity: Activity) -> Activity:
    """What is done in the last wave, for the length in which all SMs work: half of it."""
    units = tuple((unit, 0.5 * cycles) for unit, cycles in activity.unit_cycles)
    flop, l2_bytes, hbm_bytes = (0.5 * each for each in (activity.tensor_flop, activity.l2_bytes, activity.hbm_bytes))
    return Activity(flop, activity.dtype, units, l2_bytes, hbm_bytes)


def _in_phases(machine: Machine, activity: Activity, seconds_at: Length) -> Clock:
    """The short clock of a launch whose last wave does not fill the SMs: the mean of the clocks while all work and in that wave, and no
    more than its mean power allows."""
    busy, whole = activity.busy, replace(activity, busy=1.0)
    mean = settle(machine, whole, seconds_at, "short")

    def at_work(ghz: float) -> float:
        return busy * seconds_at(ghz)

    full, tail = (settle(machine, each, at_work, "short") for each in (whole, _tail(whole)))
    if full.bound == "boost":
        return mean
    mhz = float(_mean_of_phases(busy, full.mhz, tail.mhz))
    return replace(full, mhz=mhz) if mhz < mean.mhz else mean


def settle(machine: Machine, activity: Activity, seconds_at: Length, regime: str) -> Clock:
    """`settle_clock` for work of any length; at 100 MHz where even that draws more than the limit."""
    share = _short_share(machine, regime)
    if regime == "short" and activity.busy < 1.0:
        return _in_phases(machine, activity, seconds_at)
    if share is not None:
        short, settled = (settle(machine, activity, seconds_at, name) for name in ("short", "sustained"))
        mhz, power = (
            share * a + (1.0 - share) * b for a, b in ((short.mhz, settled.mhz), (short.power_w, settled.power_w))
        )
        return Clock(mhz, power, settled.limit_w, settled.bound)
    limit, low, high = _range(machine, regime)
    watts = _power_curve(machine, activity, seconds_at)
    drawn = watts(high / 1e3)
    if drawn <= limit:
        return Clock(high, drawn, limit, "boost")
    # Power rises with the clock: the line through two points of the curve (regula falsi, Illinois) finds the limit fast.
    over, under = drawn - limit, watts(low / 1e3) - limit
    if under >= 0.0:
        return Clock(low, under + limit, limit, "power")
    kept = 0
    while high - low > _SAME_MHZ:
        middle = min(max((low * over - high * under) / (over - under), low + _SAME_MHZ / 2), high - _SAME_MHZ / 2)
        excess = watts(middle / 1e3) - limit
        if excess > 0.0:
            high, over = middle, excess
            under, kept = (under / 2 if kept > 0 else under), 1
        else:
            low, under = middle, excess
            over, kept = (over / 2 if kept < 0 else over), -1
    return Clock(low, watts(low / 1e3), limit, "power")


def settled_mhz(
    machine: Machine,
    activity: Activity,
    busy_cycles: NDArray[np.float64],
    hbm_seconds: NDArray[np.float64],
    regime: str,
) -> NDArray[np.float64]:
    """Clocks of `settle_clock` for many kernels at once: the numbers of ``activity`` are arrays too."""
    share = _short_share(machine, regime)
    if share is not None:
        short, settled = (
            settled_mhz(machine, activity, busy_cycles, hbm_seconds, name) for name in ("short", "sustained")
        )
        return share * short + (1.0 - share) * settled
    limit, low, high = _range(machine, regime)
    busy = np.broadcast_to(np.asarray(activity.busy, dtype=np.float64), busy_cycles.shape)
    if regime == "short" and (busy < 1.0).any():
        # As `_in_phases`, each for itself.
        whole = replace(activity, busy=1.0)
        mean = settled_mhz(machine, whole, busy_cycles, hbm_seconds, regime)
        full, tail = (
            settled_mhz(machine, each, busy * busy_cycles, busy * hbm_seconds, regime) for each in (whole, _tail(whole))
        )
        phases = _mean_of_phases(busy, full, tail)
        return np.where((busy < 1.0) & (full < high), np.minimum(phases, mean), mean)

    least = np.maximum(hbm_seconds, 1e-12)

    def seconds_at(ghz: Any) -> Any:
        return np.maximum(busy_cycles / (ghz * 1e9), least)

    watts = _power_curve(machine, activity, seconds_at)
    lows, highs = np.full(len(busy_cycles), low), np.full(len(busy_cycles), high)
    under, over = watts(lows / 1e3) - limit, watts(highs / 1e3) - limit
    held, stopped = over > 0.0, under >= 0.0
    kept = np.zeros(len(busy_cycles))
    # As `settle` does, each for itself; the upper end is kept.
    while True:
        wide = held & ~stopped & (highs - lows > _SAME_MHZ)
        if not wide.any():
            return np.where(held, np.where(stopped, low, highs), high)
        crossing = (lows * over - highs * under) / (over - under)
        middle = np.minimum(np.maximum(crossing, lows + _SAME_MHZ / 2), highs - _SAME_MHZ / 2)
        excess = watts(middle / 1e3) - limit
        above = wide & (excess > 0.0)
        below = wide & ~above
        under[above & (kept > 0)] *= 0.5
        over[below & (kept < 0)] *= 0.5
        for here, ends, excesses, side in ((above, highs, over, 1.0), (below, lows, under, -1.0)):
            np.copyto(ends, middle, where=here)
            np.copyto(excesses, excess, where=here)
            kept[here] = side


def fixed_clock(machine: Machine, activity: Activity, busy_cycles: float, hbm_seconds: float, mhz: float) -> Clock:
    """A clock the user locked; the power it would need is reported beside it."""
    return fixed(machine, activity, length(busy_cycles, hbm_seconds), mhz)


def fixed(machine: Machine, activity: Activity, seconds_at: Length, mhz: float) -> Clock:
    """`fixed_clock` for work of any length."""
    return Clock(mhz, _power_curve(machine, activity, seconds_at)(mhz / 1e3), machine["chip.tdp_w"], "fixed")
