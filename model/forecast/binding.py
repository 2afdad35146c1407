"""What a forecast waits for, in the words that every verb prints."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.chip.evaluate import Evaluation
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.sm.simulate import SmTrace, critical_recurrence

#: A loop within this of its busiest unit is bound by the unit, else by the recurrence.
_UNIT_BOUND = 1.02
#: Matrix time beyond this multiple of the array's own is operand fetch: the shared-memory port binds, not the array.
_OPERAND_FETCH_MARGIN = 1.02


@dataclass(frozen=True, slots=True)
class Binding:
    """What the time sits on.

    ``kind`` is "unit", "recurrence", "memory", "power" (memory and SMs as slow as each other at the clock the limit allows), or, where the loop is not what the launch spends its time on, "launch",
    "start" or "occupancy"; ``name`` the unit of the SM ("smem" also where matrix instructions wait for their operands),
    "recurrence", "HBM bandwidth", "L2 bandwidth", or the kind in words; ``chain`` the operations of the recurrence that
    holds the loop, ``slack`` the idle share (0..1) of every unit.
    """

    kind: str
    name: str
    chain: tuple[str, ...] = ()
    slack: tuple[tuple[str, float], ...] = ()

    def of_loop(self, other: Binding) -> Binding:
        """This binding, but where the loop binds, with what ``other`` says holds it."""
        loops = ("unit", "recurrence")
        if self.kind in loops and other.kind in loops:
            return Binding(other.kind, other.name, other.chain, self.slack)
        return self

    def as_dict(self) -> dict[str, object]:
        """Keys of --json."""
        name = " -> ".join(self.chain) or "not periodic" if self.kind == "recurrence" else self.name
        return {"kind": self.kind, "name": name, "slack": dict(self.slack)}


#: Share of the time that the SMs need by themselves from which a launch held by memory and power is held by power.
POWER_BOUND = 0.8
#: Kinds of binding that say that the loop hardly matters.
OUTSIDE_LOOP = ("launch", "start", "occupancy")


def binding(workload: Workload, machine: Machine, answer: Evaluation, flop_per_score: float | None = None) -> Binding:
    """The binding of a launch: of the parts of its time, what the longest sits on.

    ``flop_per_score``: FLOP of its products for an element of the score tile, where they are not those of a forward pass.
    """
    chip = answer.chip
    body = answer.seconds - answer.launch_seconds
    slack = tuple((unit, 1.0 - share) for unit, share in answer.trace.unit_shares().items())
    if answer.launch_seconds > body:
        return Binding("launch", "kernel launch", (), slack)
    on_sms = chip.makespan_cycles / (answer.clock.mhz * 1e6)
    if answer.clock.bound == "power" and chip.hbm_seconds > 0.5 * body and on_sms > POWER_BOUND * body:
        # Memory traffic takes the power that the SMs' clock would need: more bandwidth or faster units meet the same limit.
        return Binding("power", "power limit", (), slack)
    if answer.memory_seconds > 0.5 * body:
        return Binding("memory", "HBM bandwidth")
    if chip.l2_floor_cycles > chip.makespan_cycles:
        return Binding("memory", "L2 bandwidth")
    if chip.edge_cycles + chip.fill_cycles > chip.loop_cycles + chip.mask_cycles:
        return Binding("start", "start, fill and end of tiles", (), slack)
    bound = loop_bound(answer.pipeline, answer.trace.ii_cycles, workload, machine, flop_per_score)
    chain = tuple(step.op for step in critical_recurrence(answer.trace)) if bound == "recurrence" else ()
    # Twice the tiles would find idle SMs, and memory with time to spare.
    if 2 * chip.tiles <= chip.slots and chip.hbm_seconds <= 0.5 * body:
        return Binding("occupancy", "idle SMs", chain, slack)
    return Binding("recurrence" if bound == "recurrence" else "unit", bound, chain, slack)


def loop_bound(
    pipeline: Pipeline, ii_cycles: float, workload: Workload, machine: Machine, flop_per_score: float | None = None
) -> str:
    """What a loop of ``ii_cycles`` waits for: a unit, or "recurrence" where none is full."""
    demand = pipeline.demand()
    unit = max(demand, key=lambda name: demand[name])
    if ii_cycles > _UNIT_BOUND * demand[unit]:
        return "recurrence"
    return _fed_by(pipeline, workload, machine, flop_per_score) if unit == "tensor" else unit


def _fed_by(pipeline: Pipeline, workload: Workload, machine: Machine, flop_per_score: float | None) -> str:
    """ "smem" when the matrix unit's time is operand fetch beyond what its array needs, else "tensor"."""
    # Legacy mma.sync paths run below the machine's rate without waiting for operands.
    if machine.tensor_kind == "mma_sync" or pipeline.legacy_matrix_path:
        return "tensor"
    scores = pipeline.rows_per_cta * pipeline.keys_per_iteration * pipeline.ctas_per_sm
    flop = scores * (flop_per_score or 2.0 * (workload.head_dim_qk + workload.head_dim_v))
    array = flop / machine[f"tensor.{workload.dtype}_flop_per_clk"]
    return "smem" if pipeline.demand()["tensor"] > _OPERAND_FETCH_MARGIN * array else "tensor"


def critical_unit(trace: SmTrace) -> str:
    """What the critical recurrence spends most cycles on: a unit, or "hand-over"; "" when the loop does not repeat.

    An operation counts for the unit it occupies longest; an exponential of which most is emulated counts for FMA.
    """
    spent: dict[str, float] = {}
    for step in critical_recurrence(trace):
        op = trace.pipeline.op(step.op)
        unit = max(op.demand, key=lambda pair: pair[1])[0] if op.demand else op.role
        spent[unit] = spent.get(unit, 0.0) + step.alone_cycles + step.contention_cycles
        spent["hand-over"] = spent.get("hand-over", 0.0) + step.wait_cycles
    return max(spent, key=lambda unit: spent[unit]) if spent else ""
