"""The clock a compiled kernel settles at: the power balance with the instructions it executes."""

from __future__ import annotations

from tilecast.model.chip.power import Activity, Clock, busy_share, settle_clock
from tilecast.model.compiled.code import KernelCode
from tilecast.model.compiled.forecast import CompiledForecast, forecast
from tilecast.model.compiled.shares import executed
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: Lanes of a warp, and the fact with operations per clock of each pipe whose energy is known.
_LANES = 32
_RATES = {"mufu": "mufu.ex2_per_clk", "fma": "fma.lanes", "alu": "alu.lanes"}
#: A forecast is made again at the clock it settles at, until that moves by less than this.
_CLOSE_MHZ, _TRIES = 5.0, 6


def activity(code: KernelCode, work: Workload, machine: Machine, seen: CompiledForecast) -> Activity:
    """What a launch executes, as the power balance takes it; ``seen`` is its forecast, for the bytes it moves.

    Of the instructions those of the FMA, ALU and MUFU pipes count: the others move or wait, and are few.
    """
    done = executed(code, work, machine)
    cycles = tuple((pipe, done.instructions.get(pipe, 0.0) * _LANES / machine[rate]) for pipe, rate in _RATES.items())
    slots = int(machine["chip.sm_count"]) * seen.ctas_per_sm
    busy = float(busy_share(seen.mean_cycles, seen.span_cycles, seen.tiles, slots)) if seen.span_cycles else 1.0
    return Activity(done.flop, work.dtype, cycles, seen.l2_bytes, seen.memory_bytes, busy)


def clock_of(code: KernelCode, work: Workload, machine: Machine, seen: CompiledForecast, regime: str) -> Clock:
    """The clock of ``regime`` at which launches settle that take the cycles of ``seen``, whatever clock that was made at."""
    drawn = activity(code, work, machine, seen)
    return settle_clock(machine, drawn, seen.cycles, seen.memory_bytes / (machine["hbm.tbps_achieved"] * 1e12), regime)


def settled_clock(
    code: KernelCode, work: Workload, machine: Machine, regime: str = "sustained", cycles: float | None = None,
    near_mhz: float | None = None,
) -> Clock:  # fmt: skip
    """The clock of ``regime`` ("sustained" or "short") for launches back to back; CodeError as `forecast`.

    With ``cycles`` a launch takes those (measured ones, say) instead of what it is forecast to take.  ``near_mhz`` is where to
    begin: near the clock that is found a kernel is simulated once.
    """
    mhz = near_mhz or machine["chip.clock_max_mhz"] * machine["power.tensor_clock_share"]
    seen = forecast(code, work, machine, mhz)
    # What is executed and moved does not depend on the clock; only the cycles do.
    drawn = activity(code, work, machine, seen)
    hbm_seconds = seen.memory_bytes / (machine["hbm.tbps_achieved"] * 1e12)
    for _ in range(_TRIES):
        found = settle_clock(machine, drawn, cycles or seen.cycles, hbm_seconds, regime)
        if cycles or abs(found.mhz - mhz) < _CLOSE_MHZ:
            break
        mhz = found.mhz
        seen = forecast(code, work, machine, mhz)
    return found
