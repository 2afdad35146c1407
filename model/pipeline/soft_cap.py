"""What a soft cap adds to a loop: scores are bent by a tangent before their exponentials."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import softmax_cost as common
from tilecast.model.pipeline.graph import Op, Pipeline


class SoftCap(NamedTuple):
    """Instructions of a score: special functions, multiplications and additions, others."""

    mufu: float
    fma: float
    other: float


#: By tanh.approx, between two multiplications; and by an exponential and a division, whose reciprocal is refined (loops of
#: `hopper_prefill_d64.py` and `hopper_serve_d128_runs.py`, with and without a cap).
TANGENT, DIVISION = SoftCap(1.0, 2.0, 0.0), SoftCap(2.0, 4.0, 2.0)


def with_cap(pipeline: Pipeline, machine: Machine, cap: SoftCap) -> Pipeline:
    """``pipeline``, whose exponentials are all the special function unit's, with scores that are bent before."""
    ops = tuple(_bent(op, machine, cap) if op.kind == "exp" and op.cycles("mufu") else op for op in pipeline.ops)
    return replace(pipeline, ops=ops)


def _bent(op: Op, m: Machine, cap: SoftCap) -> Op:
    scores = op.cycles("mufu") * m["mufu.ex2_per_clk"]
    counts = {"mufu": cap.mufu * scores / 128.0, "fma": cap.fma * scores / 128.0, "other": cap.other * scores / 128.0}
    cycles = {"mufu": cap.mufu * scores / m["mufu.ex2_per_clk"], "fma": cap.fma * scores / m["fma.lanes"]}
    added = common.work(m, cycles, counts)
    both = common.add(common.Work(op.demand, op.instructions), added)
    longer = added.busiest()
    beside = op.beside_mma_cycles and op.beside_mma_cycles * (op.min_cycles + longer) / op.min_cycles
    return op._replace(
        demand=both.cycles, instructions=both.instructions, min_cycles=op.min_cycles + longer, beside_mma_cycles=beside
    )
