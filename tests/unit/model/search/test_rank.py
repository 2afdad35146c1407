"""The whole space, and rankings that leave most of it out: the answer must be that of forecasting everything."""

from __future__ import annotations

from collections import Counter

import pytest

from tilecast.codegen.tune.structure import structure
from tilecast.model.chip.evaluate import evaluate_seconds
from tilecast.model.families import build_pipeline, knob_space, legal_space, legality, parse_variant
from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.search.best import best, search_space
from tilecast.model.search.loop_floor import loop_floor
from tilecast.model.search.rank import rank
from tilecast.model.sm.simulate import steady_state

H200, B200, A100 = (load_machine(name) for name in ("h200-sxm", "b200", "a100"))
FAMILY = {H200.name: "fa3", B200.name: "fa4", A100.name: "fa2"}


def shape(head_dim: int = 128, mask: str = "none", seqlen: int = 4096) -> Workload:
    window = (1024, 0) if mask == "window" else None
    return Workload(4, 16, 16, seqlen, seqlen, head_dim, head_dim, mask, window)


@pytest.mark.parametrize("machine", [H200, B200, A100], ids=lambda m: m.name)
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_the_space_is_legal_distinct_and_always_the_same(machine, mask) -> None:
    work = shape(mask=mask)
    space = legal_space(FAMILY[machine.name], work, machine)
    assert len(space) == len(set(space)) > (90 if machine is A100 else 1000)
    assert all(legality(v, work, machine).legal for v in space)
    assert space == legal_space(FAMILY[machine.name], work, machine)
    assert set(space) <= set(knob_space(FAMILY[machine.name], work, machine))


def test_knobs_that_cannot_matter_have_one_value() -> None:
    space = legal_space("fa3", shape(), H200)
    assert not any(v.ping_pong and v.warpgroups == 1 for v in space)
    assert {v.scheduler for v in space} == {"persistent", "grid"}
    assert {v.scheduler for v in legal_space("fa3", shape(mask="causal"), H200)} > {"paired", "longest-first"}
    assert all(v.poly_degree == 3 and v.rescale_threshold == 8.0 for v in space)


def test_an_unknown_family_names_the_nearest() -> None:
    with pytest.raises(VariantError, match="'fa5'; did you mean"):
        legal_space("fa5", shape(), H200)


def test_a_family_the_machine_cannot_run_has_an_empty_space() -> None:
    assert legal_space("fa4", shape(), H200) == ()


@pytest.mark.parametrize(
    ("machine", "mask", "step"), [(H200, "causal", 97), (H200, "none", 61), (B200, "none", 53), (A100, "causal", 7)]
)
def test_ranking_is_that_of_all_forecasts(machine, mask, step) -> None:
    work = shape(64 if machine is A100 else 128, mask)
    space = legal_space(FAMILY[machine.name], work, machine)[::step]
    times = sorted((round(evaluate_seconds(work, machine, v), 9), i) for i, v in enumerate(space))
    found = rank(space, work, machine, keep=5)
    assert [(r.seconds, r.order) for r in found.best] == times[:5]
    assert len(found.best) + len(found.behind) + len(found.dropped) == len(space)
    assert found.dropped or machine is A100
    grouped = rank(space, work, machine, keep=6, group=structure, per_group=1)
    seen: Counter[object] = Counter()
    expected = []
    for seconds, i in times:
        seen[structure(space[i])] += 1
        if seen[structure(space[i])] == 1:
            expected.append((seconds, i))
    assert [(r.seconds, r.order) for r in grouped.best] == expected[:6]


def test_the_floor_of_a_loop_holds_block_by_block() -> None:
    import numpy as np

    for text in (
        "family=fa3,rescale=always",
        "family=fa3,overlap=false,warpgroups=3,tile_n=64",
        "family=fa3,warpgroups=1",
    ):
        pipeline = build_pipeline(shape(), parse_variant(text), H200)
        trace = steady_state(pipeline)
        blocks = np.arange(0, 40)
        floor = loop_floor(pipeline).tile_cycles(blocks)
        assert floor[0] == 0
        assert all(floor[n] <= trace.tile_cycles(int(n)) + 1e-6 for n in blocks[1:])
        # And it is worth having: within a quarter of the simulation for long tiles.
        assert floor[-1] > 0.75 * trace.tile_cycles(39)


def test_variants_that_differ_around_the_loop_share_its_simulation() -> None:
    one, other = Fa3Variant(scheduler="grid"), Fa3Variant(scheduler="paired")
    assert build_pipeline(shape(), one, H200) is build_pipeline(shape(seqlen=512), other, H200)
    deep = build_pipeline(shape(64), Fa3Variant(tile_n=64, q_stages=2), H200)
    flat = build_pipeline(shape(64), Fa3Variant(tile_n=64, q_stages=1), H200)
    assert deep != flat
    assert steady_state(deep).events is steady_state(flat).events
    assert steady_state(deep).pipeline is deep


def test_a_ranking_keeps_something() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        rank([Fa3Variant()], shape(), H200, keep=0)


def test_what_the_memory_paces_is_told_by_the_order_without_simulating_all() -> None:
    """Q and O of 32768 queries on 64 keys: the forecasts of 1,296 variants are one time, that of the first."""
    machine = load_machine("gb300")
    work = Workload(8, 4, 4, 32768, 64, 128, 128, "causal")
    found = best(work, machine)
    space = search_space(work, machine, "fa4").variants
    alike = [v for v in space[::40] if round(evaluate_seconds(work, machine, v), 9) == round(found.seconds, 9)]
    assert len(alike) > 20
    assert space.index(found.variant) <= space.index(alike[0])
    assert found.simulated < 250
