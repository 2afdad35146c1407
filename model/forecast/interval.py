"""How far the ranges of machine facts move a forecast."""

from __future__ import annotations

from functools import lru_cache

from tilecast.model.chip.evaluate import Evaluation, evaluate
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline


def uncertain_facts(machine: Machine, pipeline: Pipeline, dtype: str) -> tuple[str, ...]:
    """Facts with a range that the forecast rests on: those of the pipeline and those of the clock and memory."""
    energy = "power.tensor_pj_per_flop_fp8" if dtype == "fp8" else "power.tensor_pj_per_flop_bf16"
    names = (*pipeline.facts_used, energy, "chip.tdp_w", "l2.bytes_per_clk_per_sm", "hbm.tbps_achieved")
    return tuple(n for n in names if machine.has(n) and machine.fact(n).low is not None)


def interval(
    workload: Workload, machine: Machine, variant: Variant, clock: str | float, answer: Evaluation
) -> tuple[float, float]:
    """TFLOP/s interval: every ranged fact moved to its ends in turn, the changes added in quadrature."""
    up = down = 0.0
    for name in uncertain_facts(machine, answer.pipeline, workload.dtype):
        fact = machine.fact(name)
        ends = [e for e in (fact.low, fact.high) if e is not None and e != fact.value]
        changes = []
        for end in ends:
            other = evaluate(workload, _moved(machine, name, float(end)), variant, clock)
            changes.append(other.tflops - answer.tflops)
        up += max([0.0, *changes]) ** 2
        down += min([0.0, *changes]) ** 2
    return answer.tflops - down**0.5, answer.tflops + up**0.5


@lru_cache(maxsize=4096)
def _moved(machine: Machine, name: str, value: float) -> Machine:
    return machine.with_facts({name: value})
