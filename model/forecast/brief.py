"""One forecast without its explanation: what sensitivities and maps ask for by the hundred."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tilecast.model.forecast.binding import critical_unit
from tilecast.model.forecast.level import Compiler, at_hand, evaluated, launched
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine


@dataclass(frozen=True, slots=True)
class Brief:
    """Time, throughput, clock, loop period, and what binds (`Binding.name`).

    ``critical_unit`` is what the loop's critical recurrence spends most cycles on: a unit, or "hand-over" (barriers and
    latencies between operations); where a recurrence binds it is the lever.
    """

    seconds: float
    tflops: float
    clock_mhz: float
    ii_cycles: float
    bound_by: str
    critical_unit: str


@lru_cache(maxsize=65536)
def seconds_of(
    workload: Workload, machine: Machine, variant: Variant, clock: str | float, compiler: Compiler | None = at_hand
) -> float:
    """`Brief.seconds` alone: of what a time sits on nothing is worked out."""
    made = compiler(workload, machine, variant) if compiler is not None else None
    return launched(workload, machine, variant, clock, made).seconds


@lru_cache(maxsize=65536)
def brief(
    workload: Workload, machine: Machine, variant: Variant, clock: str | float, compiler: Compiler | None = at_hand
) -> Brief:
    """Forecast of a legal ``variant`` at a level (`forecast.level`); the numbers are those of `predict`."""
    made = compiler(workload, machine, variant) if compiler is not None else None
    answer, bound = evaluated(workload, machine, variant, clock, made)
    return Brief(
        answer.seconds, answer.tflops, answer.clock.mhz, answer.trace.ii_cycles, bound.name, critical_unit(answer.trace)
    )
