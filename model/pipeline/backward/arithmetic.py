"""What a backward pass computes of a score tile beside its products: P = exp2(S c - LSE), dS = P (dP - D)."""

from __future__ import annotations

from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import softmax_cost as common


def probabilities(machine: Machine, workload: Workload, elements: float) -> common.Work:
    """Scale and subtract, exponentiate, pack: P of ``elements`` scores.  No backward pass emulates exponentials."""
    return common.exp_work(machine, workload, elements, 0.0, 3)


def differences(machine: Machine, workload: Workload, elements: float, steps: int = 2) -> common.Work:
    """Subtract, multiply, pack: dS of ``elements`` scores; with one of the ``steps``, the product has subtracted D."""
    once, count = common.fma_cost(machine, elements)
    packs = elements / 2.0
    return common.work(
        machine,
        {
            "fma": steps * once,
            "cvt": packs / machine[common.packing_fact(workload)],
            "alu": packs / machine["alu.lanes"],
        },
        {"fma": steps * count, "alu": packs / 128.0},
    )


def step_work(machine: Machine, alu: float, fma: float, others: float) -> common.Work:
    """Instructions of a step, a warp, that do not scale with its tile."""
    arithmetic = common.work(machine, {"fma": fma * 128 / machine["fma.lanes"]}, {"fma": fma, "other": others})
    return common.add(common.bookkeeping_work(machine, alu, alu), arithmetic)
