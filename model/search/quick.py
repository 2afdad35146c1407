"""One forecast without its explanation: what searches, sensitivities and maps ask for by the hundred."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tilecast.model.forecast.predict import _UNIT_BOUND, _evaluate
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.sm.simulate import SmTrace, critical_recurrence

#: Matrix time beyond this multiple of the array's own is operand fetch: the shared-memory port binds, not the array.
_FED = 1.02


@dataclass(frozen=True, slots=True)
class Quick:
    """Time, throughput, clock, loop period, and one word for what binds.

    ``bound_by`` is a unit of the SM ("tensor", "mufu", ...), "smem" also where matrix instructions wait for their
    operands, "dependences" where no unit is full, "HBM" or "L2".  ``lap`` says what the loop's critical lap spends most
    cycles on: a unit, or "hand-over" (barriers and latencies between operations); with "dependences" it is the lever.
    """

    seconds: float
    tflops: float
    clock_mhz: float
    ii_cycles: float
    bound_by: str
    lap: str


@lru_cache(maxsize=65536)
def quick(workload: Workload, machine: Machine, variant: Variant, clock: str | float) -> Quick:
    """Forecast of a legal ``variant``; the numbers are those of `predict`."""
    answer = _evaluate(workload, machine, variant, clock)
    chip = answer.chip
    if chip.hbm_seconds > 0.9 * answer.seconds:
        bound = "HBM"
    elif chip.l2_floor_cycles > chip.makespan_cycles:
        bound = "L2"
    else:
        bound = loop_bound(answer.pipeline, answer.trace.ii_cycles, workload, machine)
    return Quick(answer.seconds, answer.tflops, answer.clock.mhz, answer.trace.ii_cycles, bound, lap_unit(answer.trace))


def lap_unit(trace: SmTrace) -> str:
    """What the critical lap of the loop spends most cycles on (see `Quick.lap`); "" when the loop does not repeat.

    An operation counts for the unit it occupies longest; an exponential of which most is emulated counts for FMA.
    """
    spent: dict[str, float] = {}
    for step in critical_recurrence(trace):
        op = trace.pipeline.op(step.op)
        unit = max(op.demand, key=lambda pair: pair[1])[0] if op.demand else op.role
        spent[unit] = spent.get(unit, 0.0) + step.alone_cycles + step.contention_cycles
        spent["hand-over"] = spent.get("hand-over", 0.0) + step.wait_cycles
    return max(spent, key=lambda unit: spent[unit]) if spent else ""


def loop_bound(pipeline: Pipeline, ii_cycles: float, workload: Workload, machine: Machine) -> str:
    """What a loop of ``ii_cycles`` waits for, in one word (see `Quick.bound_by`)."""
    demand = pipeline.demand()
    unit = max(demand, key=lambda name: demand[name])
    if ii_cycles > _UNIT_BOUND * demand[unit]:
        return "dependences"
    return fed_by(pipeline, workload, machine) if unit == "tensor" else unit


def fed_by(pipeline: Pipeline, workload: Workload, machine: Machine) -> str:
    """ "smem" when the matrix unit's time is operand fetch beyond what its array needs, else "tensor"."""
    scores = pipeline.rows_per_cta * pipeline.keys_per_iteration * pipeline.ctas_per_sm
    flop = 2.0 * scores * (workload.head_dim_qk + workload.head_dim_v)
    array = flop / machine[f"tensor.{workload.dtype}_flop_per_clk"]
    # Legacy mma.sync paths run below the machine's rate without waiting for operands.
    if machine.tensor_kind == "mma_sync" or pipeline.name.startswith(("fa2", "unfused")):
        return "tensor"
    return "smem" if pipeline.demand()["tensor"] > _FED * array else "tensor"
