"""The search against brute force: same variant, same time to the last digit, over samples of every space."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tilecast.model.chip.evaluate import evaluate_seconds
from tilecast.model.families import (
    build_pipeline,
    family_of,
    find_family,
    knob_space,
    legality,
    native_family,
    writable,
)
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine, machine_names
from tilecast.model.search.best import best, search_space
from tilecast.model.search.floor import Floors
from tilecast.model.search.rank import DIGITS, rank

MACHINES = [load_machine(name) for name in machine_names()]


@st.composite
def questions(draw) -> tuple:
    machine = draw(st.sampled_from(MACHINES))
    qk, v = draw(st.sampled_from([(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]))
    queries, more = draw(st.sampled_from([128, 1000, 2048, 4096, 16384])), draw(st.sampled_from([0, 0, 777]))
    mask = draw(st.sampled_from(["none", "causal", "window"]))
    work = Workload(
        draw(st.integers(1, 5)), 8, 4, queries, queries + more, qk, v, mask, (300, 0) if mask == "window" else None
    )
    clock = draw(st.sampled_from(["sustained", "short", 900.0]))
    return work.reduced(), machine, clock


@seed(20261122)
@settings(max_examples=25, deadline=None)
@given(questions(), st.integers(0, 10_000))
def test_the_ranking_is_that_of_brute_force(question, start) -> None:
    work, machine, clock = question
    space = search_space(work, machine, native_family(machine).name).variants
    step = max(1, len(space) // 24)
    sample = tuple(islice(space, start % step, None, step))
    times = [(round(evaluate_seconds(work, machine, v, clock), DIGITS), i) for i, v in enumerate(sample)]
    found = rank(sample, work, machine, clock=clock, keep=1)
    assert [(r.seconds, r.order, r.variant) for r in found.best] == [(*min(times), sample[min(times)[1]])]
    kept = rank(sample, work, machine, clock=clock, keep=4)
    assert [(r.seconds, r.order) for r in kept.best] == sorted(times)[:4]
    everything = (*kept.best, *kept.behind, *kept.dropped)
    assert sorted(r.order for r in everything) == list(range(len(sample)))


@seed(20261123)
@settings(max_examples=40, deadline=None)
@given(questions(), st.integers(0, 100_000))
def test_each_floor_is_no_higher_than_the_next_and_none_than_the_forecast(question, pick) -> None:
    work, machine, clock = question
    space = search_space(work, machine, native_family(machine).name).variants
    variant = space[pick % len(space)]
    floors = Floors((variant,), work, machine, clock)
    by_demand, by_operations, dealt, plain, masked = (stage([0])[0] for stage in _stages(floors))
    seconds = evaluate_seconds(work, machine, variant, clock)
    assert by_demand <= by_operations * (1 + 1e-9)
    assert by_operations <= dealt * (1 + 1e-9)
    assert max(dealt, plain) <= masked * (1 + 1e-9)
    assert masked <= seconds
    if variant.scheduler == "persistent":
        assert masked == pytest.approx(seconds, rel=2e-9)
    # Tiles that go to the slot that is free first take less than twice the mean of all slots and the longest of them.
    assert masked > 0.5 * seconds


def _stages(floors: Floors) -> tuple:
    return floors.of_demand, floors.of_operations, floors.dealt, floors.simulated, floors.masked


def test_floors_of_many_variants_at_once_are_those_of_each() -> None:
    work, machine = Workload(2, 8, 4, 1000, 3000, mask="causal"), load_machine("b200")
    space = search_space(work, machine, "fa4").variants[::67]
    for clock in ("sustained", "short", 1300.0):
        together = Floors(space, work, machine, clock)
        for number, stage in enumerate(_stages(together)):
            # The last first: what is kept for one variant must not be taken for another.
            backwards = stage(range(len(space))[::-1])[::-1]
            alone = [_stages(Floors((v,), work, machine, clock))[number]([0])[0] for v in space]
            assert backwards.tolist() == pytest.approx(alone, rel=1e-9)
            assert len(set(alone)) > 10


@pytest.mark.parametrize(("machine", "family"), [("h200-sxm", "fa3"), ("b300", "fa4"), ("a100", "fa2")])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_knobs_leave_alone_what_their_family_says(machine, family, mask) -> None:
    from dataclasses import replace

    chip, work = load_machine(machine), Workload(mask=mask)
    alike = find_family(family).alike
    legal: dict[object, object] = {}
    written: dict[object, object] = {}
    for variant in knob_space(family, work, chip)[::29]:
        verdict = legality(variant, work, chip)
        assert legal.setdefault(tuple(getattr(variant, name) for name in alike.fit), verdict) == verdict
        if not verdict.legal:
            continue
        verdict = writable(variant, work, chip)
        assert written.setdefault(tuple(getattr(variant, name) for name in alike.written), verdict) == verdict
        own = build_pipeline(work, variant, chip)
        assert own == find_family(family).build(work, variant, chip)
        common = build_pipeline(work, replace(variant, **alike.same_demand), chip)
        loosest = build_pipeline(work, replace(variant, **alike.least_waiting), chip)
        assert common.demand() == pytest.approx(own.demand(), rel=1e-12)
        for name in (
            "rows_per_cta",
            "keys_per_iteration",
            "ctas_per_sm",
            "cta_group",
            "tiles_overlap",
            "epilogue_cycles",
        ):
            assert getattr(common, name) == getattr(own, name)
        assert common.prologue_cycles <= own.prologue_cycles
        assert loosest.ops == own.ops
        assert loosest.roles == own.roles
        tighter = {(e.src, e.dst, e.why): e for e in own.edges}
        assert all(e.distance >= tighter[e.src, e.dst, e.why].distance for e in loosest.edges if e.kind == "order")
        assert family_of(variant).alike is alike


def test_a_machine_goes_by_name_and_brings_its_family() -> None:
    work = Workload(mask="causal", seqlen_q=1000, seqlen_k=1000)
    for name in ("h200", "b200", "a100"):
        chip = load_machine(name)
        assert best(work, name) == best(work, chip, native_family(chip).name)
