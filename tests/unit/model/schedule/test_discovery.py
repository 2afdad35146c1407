"""The solver, told nothing about kernels, finds ping-pong on Blackwell and intra-warpgroup overlap on Hopper.

The first half runs on loops reduced to their skeleton; the second half asks the same of the pipelines that
the forecast uses.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import loops

from tilecast.model.machine.machine import load_machine
from tilecast.model.pipeline.graph import Pipeline, Step
from tilecast.model.schedule.check import check_schedule
from tilecast.model.schedule.gantt import text_gantt
from tilecast.model.schedule.patterns import (
    intra_warpgroup_overlap,
    is_ping_pong,
    matrix_issue_order,
    step_text,
    with_discovered_order,
)
from tilecast.model.schedule.solve import Schedule, optimal_schedule, storage_of
from tilecast.model.sm.bounds import bounds

B200 = storage_of(load_machine("b200"))


def _solve(loop: Pipeline) -> Schedule:
    schedule = optimal_schedule(loop)
    assert schedule.status == "optimal"
    assert check_schedule(loop, schedule) == []
    return schedule


# -- Blackwell -------------------------------------------------------------------------------------


def test_one_query_tile_cannot_overlap() -> None:
    """S and P share tensor memory, so QK, softmax and PV of one tile follow each other."""
    loop = loops.blackwell(1)
    schedule = _solve(loop)
    assert schedule.ii_cycles == 512 + 1024 + 512 + 8 + 2 * 2
    assert not is_ping_pong(schedule, loop).found


def test_two_query_tiles_ping_pong() -> None:
    loop = loops.blackwell(2)
    schedule = _solve(loop)
    assert 2048 <= schedule.ii_cycles <= 2048 * 1.01
    ping = is_ping_pong(schedule, loop)
    assert ping.found
    assert min(ping.under_others) > 0.95 and max(ping.under_own) < 0.05
    assert ping.matrix_hidden > 0.95
    per_tile_alone = _solve(loops.blackwell(1)).ii_cycles
    assert per_tile_alone / (schedule.ii_cycles / 2) == pytest.approx(2.0)


def test_the_issue_order_is_the_published_one() -> None:
    """FA4's matrix warp: PV of a tile, then QK of its next block, tile after tile (FA4C)."""
    loop = loops.blackwell(2)
    orders = matrix_issue_order(_solve(loop), loop)
    assert list(orders) == ["mma"]
    cycle = [step.op for step in orders["mma"]]
    start = cycle.index("pv0")
    assert cycle[start:] + cycle[:start] == ["pv0", "qk0", "pv1", "qk1"]


def test_latencies_return_once_the_recurrence_binds() -> None:
    """With realistic hand-over costs the tiles still ping-pong, but QK-softmax-PV itself is the limit."""
    loop = loops.blackwell(2, max_cycles=300.0, latency=100.0)
    schedule = _solve(loop)
    assert schedule.ii_cycles == 512 + 100 + 300 + 1024 + 100 + 512
    assert bounds(loop, with_roles=False).binding == "recurrence"
    assert is_ping_pong(schedule, loop).found
    # A second S/P slot per tile would take the recurrence out of the way: the units bind again.
    roomy = optimal_schedule(loops.blackwell(2, 300.0, 100.0, slots=2))
    assert roomy.status == "optimal" and roomy.ii_cycles < 2650


def test_the_discovered_order_works_in_order() -> None:
    """Written back as programs the order gives the same II in order; QK-then-PV costs twice as much."""
    loop = loops.blackwell(2)
    schedule = _solve(loop)
    programmed = with_discovered_order(schedule, loop)
    in_order = optimal_schedule(programmed, respect_program_order=True)
    assert in_order.ii_cycles == schedule.ii_cycles
    assert check_schedule(programmed, in_order) == []
    naive = optimal_schedule(loop, respect_program_order=True)
    assert naive.ii_cycles == 2 * 2060


# -- Hopper ----------------------------------------------------------------------------------------


def test_one_score_buffer_is_sequential() -> None:
    loop = loops.hopper(1)
    schedule = _solve(loop)
    sequential = 512 + 30 + 140 + 560 + 512
    assert schedule.ii_cycles >= sequential
    assert not intra_warpgroup_overlap(schedule, loop).found


def test_two_score_buffers_overlap_within_the_warpgroup() -> None:
    loop = loops.hopper(2)
    schedule = _solve(loop)
    overlap = intra_warpgroup_overlap(schedule, loop)
    assert overlap.found
    assert overlap.next_qk[0] > 0.5
    in_turn = optimal_schedule(loop, respect_program_order=True)
    assert schedule.ii_cycles < 0.7 * in_turn.ii_cycles
    order = matrix_issue_order(schedule, loop)["consumer"]
    assert sorted(order, key=lambda step: step.op) == [Step("pv", 0), Step("qk", 1)]


def test_hopper_order_works_in_order() -> None:
    loop = loops.hopper(2)
    schedule = _solve(loop)
    programmed = with_discovered_order(schedule, loop)
    assert optimal_schedule(programmed, respect_program_order=True).ii_cycles == schedule.ii_cycles


# -- what people see -------------------------------------------------------------------------------


def test_gantt_shows_every_lane_and_fits() -> None:
    loop = loops.blackwell(2)
    chart = text_gantt(loop, _solve(loop), width=80)
    assert all(len(line) <= 80 for line in chart.splitlines())
    assert [line.split()[0].split("|")[0] for line in chart.splitlines()] == [
        "cycles",
        "tensor",
        "softmax0",
        "softmax1",
    ]
    for name in ("qk0", "pv0", "qk1", "pv1", "exp0", "exp1"):
        assert name in chart
    assert text_gantt(loop, optimal_schedule(loop, storage=replace(B200, tmem_columns=1))).startswith(
        "tensor memory needs"
    )


def test_report_says_what_was_found() -> None:
    from tilecast.model.schedule.report import schedules_text, solve_both

    def text_of(loop: Pipeline) -> str:
        return schedules_text(loop, *solve_both(loop, B200))

    text = text_of(loops.blackwell(2))
    assert "II 2060 cycles (proven optimal)" in text
    assert "ping-pong between query tiles: yes" in text
    assert "reaches II 4120 (optimal), 100.0% more" in text
    assert "infeasible" in text_of(loops.blackwell(3))
    assert step_text(Step("qk", 1)) == "qk[j+1]"


# -- the pipelines of the forecast -------------------------------------------------------------------------


def _built(family: str, machine_name: str, **knobs: object) -> Pipeline:
    """A pipeline as the forecast builds it for bf16, head dimension 128, no mask."""
    from dataclasses import replace

    load_machine = getattr(pytest.importorskip("tilecast.model.machine.machine"), "load_machine", None)
    if load_machine is None:
        pytest.skip("no machine loader")
    machine = load_machine(machine_name)
    workload = pytest.importorskip("tilecast.model.kernel.workload").Workload(
        batch=4,
        heads_q=16,
        heads_kv=16,
        seqlen_q=8192,
        seqlen_k=8192,
        head_dim_qk=128,
        head_dim_v=128,
        mask="none",
        dtype="bf16",
    )
    from tilecast.model.families import build_pipeline, published_variant

    variant = replace(published_variant(family, workload, machine), **knobs)
    return build_pipeline(workload, variant, machine)


@pytest.mark.parametrize("cta_group", [1, 2])
def test_fa4_builder_ping_pongs_in_the_published_order(cta_group: int) -> None:
    """Free to reorder, the solver issues PV0 QK0 PV1 QK1 as FA4 does, and its own order costs nothing."""
    loop = _built("fa4", "b200", cta_group=cta_group)
    schedule = _solve(loop)
    assert is_ping_pong(schedule, loop).found
    # PV comes in two parts when the matrix role starts on the first three quarters of P.
    steps = [step.op.rstrip("ab") for step in matrix_issue_order(schedule, loop)["mma"]]
    cycle = [name for n, name in enumerate(steps) if name != steps[n - 1]]
    start = cycle.index("pv0")
    assert cycle[start:] + cycle[:start] == ["pv0", "qk0", "pv1", "qk1"]
    own = optimal_schedule(loop, respect_program_order=True)
    assert own.ii_cycles == pytest.approx(schedule.ii_cycles, rel=0.02)


def test_fa3_builder_overlaps() -> None:
    """On Hopper the best free order hides softmax: between warpgroups, within one, or both."""
    loop = _built("fa3", "h200-sxm")
    schedule = _solve(loop)
    assert is_ping_pong(schedule, loop).found or intra_warpgroup_overlap(schedule, loop).found
    assert schedule.ii_cycles <= optimal_schedule(loop, respect_program_order=True).ii_cycles


def test_fa3_builder_with_one_warpgroup_overlaps_within_it() -> None:
    """No second warpgroup to hide behind: FA3's overlapped order beats taking turns, and a free order beats both."""
    overlapped = _built("fa3", "h200-sxm", warpgroups=1, tile_n=64, ping_pong=False, overlap=True)
    in_turn = _built("fa3", "h200-sxm", warpgroups=1, tile_n=64, ping_pong=False, overlap=False)
    schedule = _solve(overlapped)
    assert intra_warpgroup_overlap(schedule, overlapped).found
    published = optimal_schedule(overlapped, respect_program_order=True)
    sequential = optimal_schedule(in_turn, respect_program_order=True)
    assert schedule.ii_cycles < published.ii_cycles < sequential.ii_cycles
