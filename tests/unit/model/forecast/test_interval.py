"""The interval: every fact with a range, moved to its ends; held to one full evaluation a fact and end."""

from __future__ import annotations

import math

import pytest

from tilecast.model.chip.evaluate import evaluate
from tilecast.model.families import find_family, native_family
from tilecast.model.forecast.interval import FactEffect, fact_effects, interval
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

CAUSAL = Workload(batch=2, seqlen_q=2048, mask="causal")


@pytest.mark.parametrize(
    ("name", "family", "work", "clock"),
    [
        ("b200", "", CAUSAL, "sustained"),
        ("gb300", "", Workload(batch=4, seqlen_q=8192, dtype="fp8"), "short"),
        ("h200-sxm", "", CAUSAL, "short"),
        ("h200-sxm", "", Workload(head_dim_qk=64, seqlen_q=512, seqlen_k=4096), 1400.0),
        ("a100", "", CAUSAL, "sustained"),
        ("b200", "unfused", CAUSAL, "sustained"),
    ],
)
def test_every_fact_that_moves_a_full_evaluation_is_in_and_moves_it_as_far(
    name: str, family: str, work: Workload, clock: str | float
) -> None:
    machine = load_machine(name)
    variant = (find_family(family) if family else native_family(machine)).published(work, machine)
    answer = evaluate(work, machine, variant, clock)
    expected: dict[str, list[float | None]] = {}
    for key, fact in machine.facts.items():
        ends: list[float | None] = []
        for end in (fact.low, fact.high):
            moved = evaluate(work, machine.with_facts({key: end}), variant, clock).tflops if end is not None else None
            ends.append(None if moved is None or abs(moved / answer.tflops - 1) < 1e-9 else moved)
        if ends != [None, None]:
            expected[key] = ends
    effects = fact_effects(work, machine, variant, clock, answer)
    assert {e.fact: [e.at_low, e.at_high] for e in effects} == {
        key: [pytest.approx(end, rel=1e-9) if end is not None else None for end in ends]
        for key, ends in expected.items()
    }
    assert len(effects) >= 4
    sizes = [e.largest(answer.tflops) for e in effects]
    assert sizes == sorted(sizes, reverse=True)


def test_ratios_are_added_in_quadrature_of_logarithms() -> None:
    effects = (FactEffect("a", 50.0, 110.0), FactEffect("b", 50.0, None), FactEffect("c", 90.0, 80.0))
    low, high = interval(100.0, effects)
    assert low == pytest.approx(100.0 * math.exp(-math.sqrt(2 * math.log(2) ** 2 + math.log(0.8) ** 2)))
    assert high == pytest.approx(110.0)
    assert interval(100.0, ()) == (100.0, 100.0)


def test_what_is_given_is_certain_and_a_locked_clock_leaves_power_out() -> None:
    work = Workload(batch=4, seqlen_q=8192, mask="causal")
    rated, board, locked = predict(work, "b200"), predict(work, "b200", power=1000), predict(work, "b200", clock=1500.0)
    assert rated.fact_effects[0].fact == "chip.tdp_w"
    assert "chip.tdp_w" not in {e.fact for e in board.fact_effects}
    assert board.tflops_interval[0] > rated.tflops_interval[0] and board.tflops == rated.tflops
    assert not any(e.fact.startswith("power.") for e in locked.fact_effects)
    assert predict(work, "b200", interval=False).fact_effects == ()
    short = predict(work, "b200", clock="short")
    assert "power.short_run_w" in {e.fact for e in short.fact_effects} - {e.fact for e in rated.fact_effects}
