"""Backward passes: demand in closed form, tiles seen from the keys, bounds and simulation, the launch, the answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tilecast.model.backward import (
    BACKWARD_FAMILIES,
    BLACKWELL_BACKWARD,
    HOPPER_BACKWARD,
    HOPPER_BACKWARD_APART,
    TRITON_BACKWARD,
    BackwardVariant,
    build_backward,
    family_of,
)
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.chip.tiles import HeadTiles
from tilecast.model.closed_forms import backward_forms, values_for
from tilecast.model.kernel.variants.blackwell.backward import Fa4BackwardVariant
from tilecast.model.kernel.variants.fa2_backward import Fa2BackwardVariant
from tilecast.model.kernel.variants.fa3_backward import Fa3BackwardVariant
from tilecast.model.kernel.variants.fa3_backward_apart import Fa3BackwardApartVariant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.pipeline.backward import fa3
from tilecast.model.pipeline.backward.kernels import LoopKernel, RowKernel, seen_from_keys
from tilecast.model.schedule.report import solve_both
from tilecast.model.schedule.solve import storage_of
from tilecast.model.sm.bounds import bounds
from tilecast.model.sm.simulate import steady_state
from tilecast.model.training.evaluate import backward_flops, evaluate_backward
from tilecast.model.training.forecast import best_backward, predict_backward, predict_training
from tilecast.model.training.launch import _makespan, run_loop, tiles_of
from tilecast.model.training.whatif import backward_what_if

H200, B200 = load_machine("h200"), load_machine("b200")
PAPER = Workload(batch=4, heads_q=16, seqlen_q=4096)
FIVE = Fa3BackwardVariant(fragments=False, folded="none")
SHAPES = (
    PAPER,
    Workload(2, 32, 8, 2048, 3000, 64, mask="causal"),
    Workload(1, 8, 8, 4096, head_dim_qk=256),
    Workload(1, 16, 16, 1500, head_dim_qk=192, head_dim_v=128, mask="causal"),
    Workload(2, 16, 2, 2048, head_dim_qk=96, window=(300, 0)),
)


def loops(work: Workload, variant: BackwardVariant) -> tuple[LoopKernel, ...]:
    return build_backward(work, variant, H200).loops


@pytest.mark.parametrize("dim", [64, 128])
def test_demand_of_five_products_in_closed_form(dim: int) -> None:
    """backward.md's port model: operands, dS and dQ through shared memory, what is copied in, LSE and D of every thread."""
    m, n = 8192 // dim, 128
    (kernel,) = loops(Workload(head_dim_qk=dim), replace(FIVE, tile_m=m))
    demand = kernel.pipeline.demand()
    assert demand["tensor"] == pytest.approx(2 * m * n * 5 * dim / 4096)
    assert demand["mufu"] == pytest.approx(m * n / 16)
    assert kernel.flop_per_score == 10 * dim
    # A wgmma reads 64 rows of its left operand, unless that is in registers, and all columns of its right one.
    scores = 2 * (n // 64) * (m // 64) * (64 + 64) * dim * 2
    sums = 2 * (n // 64) * (m // 64) * dim * 64 * 2
    queries = 2 * (64 + 64) * n * 2
    moved = m * n * 2 + 2 * 4 * m * dim + 2 * 2 * m * dim
    terms = 2 * (n // 64) * (m // 64) * 4 * 8 * 128
    # In rows, eight bytes of a thread at a time, dQ goes to every bank twice; as registers hold it, once.
    assert demand["smem"] == pytest.approx((scores + sums + queries + moved + terms + 4 * m * dim) / 128)
    (kernel,) = loops(Workload(head_dim_qk=dim), replace(FIVE, tile_m=m, fragments=True))
    assert kernel.pipeline.demand()["smem"] == pytest.approx((scores + sums + queries + moved + terms) / 128)
    # The port has more to do than the tensor core.
    assert bounds(kernel.pipeline).res.unit == "smem"


@pytest.mark.parametrize(
    ("dim", "m", "folded", "held"), [(64, 128, "lse", True), (64, 128, "both", True), (128, 64, "lse", False)]
)
def test_numbers_in_products_and_operands_in_registers_relieve_the_port(dim, m, folded, held) -> None:  # type: ignore[no-untyped-def]
    """By hand: a product that subtracts a number reads 16 columns more of bf16; one whose left operand is held, 64 rows of it less."""
    n, halves = 128, 2 * (m // 64)
    before, after = (
        loops(Workload(head_dim_qk=dim), replace(FIVE, tile_m=m, fragments=True, ahead=held, folded=f, held=h))[0].pipeline.demand()
        for f, h in (("none", False), (folded, held))
    )  # fmt: skip
    subtracting = 2 if folded == "both" else 1
    more = halves * subtracting * (64 + 64 * (not held)) * 16 * 2 + m * 32
    less = halves * subtracting * 4 * 8 * 128 + halves * 2 * held * 64 * dim * 2
    assert after["smem"] - before["smem"] == pytest.approx((more - less) / 128)
    assert after["tensor"] - before["tensor"] == pytest.approx(2 * m * n * 16 * subtracting / 4096)
    # D that a product has subtracted is no instruction's.
    subtractions = m * n / 128 if folded == "both" else 0.0
    assert before["fma"] - after["fma"] == pytest.approx(subtractions)


@pytest.mark.parametrize(("pair", "dim"), [(1, 128), (2, 128), (1, 64)])
def test_demand_on_blackwell_is_the_papers(pair: int, dim: int) -> None:
    """FlashAttention-4's itemised shared-memory traffic (closed forms), and beside it copies in, LSE and D."""
    work = Workload(head_dim_qk=dim)
    (kernel,) = build_backward(work, Fa4BackwardVariant(cta_group=pair, q_stages=3 - pair), B200).loops
    demand = kernel.pipeline.demand()
    forms = {form.name: form for form in backward_forms(cta_pair=pair == 2)}
    values = values_for(B200, work, 128, 128)
    copies, terms = 2 * 2 * 128 * dim, 2 * 2 * 4 * 16 * 128
    assert demand["smem"] == pytest.approx(forms["T_SMEM"].evaluate(values) + (copies + terms) / 128)
    assert demand["mufu"] == pytest.approx(forms["T_EXP"].evaluate(values))
    if pair == 1 and dim == 128:
        assert demand["tensor"] == pytest.approx(forms["T_MMA"].evaluate(values))
    assert demand["tmem_read"] == pytest.approx((2 * 4 * 128 * 128 + 4 * 128 * dim / pair) / 512)


def test_what_fits_a_blackwell_sm() -> None:
    def legal(dim: int, dim_v: int, **knobs: object) -> bool:
        variant = Fa4BackwardVariant(**knobs)  # type: ignore[arg-type]
        return BLACKWELL_BACKWARD.legality(variant, Workload(head_dim_qk=dim, head_dim_v=dim_v), B200).legal

    assert legal(128, 128) and legal(128, 128, cta_group=2, q_stages=1) and legal(64, 64, order="own slots")
    assert not legal(128, 128, order="own slots")  # 640 columns
    assert not legal(192, 128, cta_group=2, q_stages=1) and legal(192, 128, cta_group=2, q_stages=1, order="serial")
    assert legal(256, 256, cta_group=2, q_stages=1, apart=True) and not legal(256, 256)
    # The next S is issued while dK still reads this step's Q.
    assert not legal(128, 128, q_stages=1) and legal(128, 128, q_stages=1, order="serial")


@pytest.mark.parametrize("apart", [False, True])
def test_query_heads_apart_are_more_programs_and_their_sums_are_launches(apart: bool) -> None:
    dim = 256 if apart else 128
    work = Workload(1, 64, 8, 2048, head_dim_qk=dim, head_dim_v=dim, mask="causal")
    through, heads = (
        build_backward(work, Fa4BackwardVariant(cta_group=2, q_stages=1, apart=apart, heads_apart=own), B200)
        for own in (False, True)
    )
    keys, own_keys = through.loops[-1], heads.loops[-1]
    tiles, count = tiles_of(keys, work)
    own_tiles, own_count = tiles_of(own_keys, work)
    assert (count, own_count) == (8, 64)
    assert 8 * own_tiles.total_iterations == tiles.total_iterations
    before = {kernel.name for kernel in through.launches}
    added = {k.name: k for k in heads.launches if isinstance(k, RowKernel) and k.name not in before}
    rows = 8 * 2048 * dim
    if apart:
        (total,) = added.values()
        assert (total.read_bytes, total.write_bytes) == (8 * 2 * rows * 2, 2 * rows * 2)
        assert own_keys.pipeline == keys.pipeline
    else:
        assert [(k.read_bytes, k.write_bytes) for k in added.values()] == [(0, 4 * rows)] * 2 + [
            (4 * rows, 2 * rows)
        ] * 2
        # A sum in float32 takes twice what a rounded tile does.
        assert own_keys.pipeline.edge_write_bytes == 2 * keys.pipeline.edge_write_bytes
    # 64 (of two kernels 128) pairs of CTAs for 74 places, of which the longest has twice the mean: a mask saves little.
    slower, faster = (
        run_loop(kernel, work, B200).chip.makespan_cycles / run_loop(kernel, replace(work, mask="none"), B200).chip.makespan_cycles
        for kernel in (keys, own_keys)
    )  # fmt: skip
    assert faster < min(0.72, slower - 0.1)


def test_what_is_shipped_has_query_heads_apart_in_one_kernel() -> None:
    shared, whole = Workload(1, 64, 8, 2048), Workload(1, 64, 64, 2048)
    assert BLACKWELL_BACKWARD.published is not None
    wide = replace(shared, head_dim_qk=256, head_dim_v=256)
    found = {
        w: {(v.apart, v.heads_apart) for v in BLACKWELL_BACKWARD.published(w, B200)} for w in (shared, whole, wide)
    }
    assert found == {
        shared: {(False, True), (True, False), (True, True)},
        whole: {(False, False), (True, False)},
        wide: {(True, False), (True, True)},
    }
    for work in (shared, whole, wide):
        assert BLACKWELL_BACKWARD.chosen(work, B200) in set(BLACKWELL_BACKWARD.published(work, B200))
    verdict = BLACKWELL_BACKWARD.legality(Fa4BackwardVariant(heads_apart=True), whole, B200)
    assert not verdict.legal and "heads_apart" in verdict.sentence()


@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_every_blackwell_variant_runs_within_its_bounds(dim: int, dim_v: int) -> None:
    work = Workload(head_dim_qk=dim, head_dim_v=dim_v)
    listed = list(BLACKWELL_BACKWARD.space(work, B200))
    assert BLACKWELL_BACKWARD.chosen(work, B200) in listed
    for variant in listed:
        for kernel in build_backward(work, variant, B200).loops:
            trace = steady_state(kernel.pipeline)
            assert trace.ii_cycles >= bounds(kernel.pipeline).ii_lower * (1 - 1e-9)
    answer = predict_backward(replace(work, seqlen_q=4096, batch=4), B200, interval=False)
    assert answer.variant.family == "fa4_bwd" and "not written" in answer.unwritten
    assert sum(step.share for step in answer.waterfall) == pytest.approx(1.0)


def test_pairs_and_orders_are_worth_what_was_published() -> None:
    """flash-attention #2280: a pair 1.08 to 1.09 times a CTA at head_dim 128; serial orders lose."""
    work = Workload(4, 16, 16, 8192)
    one, two, serial = (
        evaluate_backward(work, B200, Fa4BackwardVariant(cta_group=c, order=o, q_stages=3 - c), "short").seconds
        for c, o in ((1, "pipelined"), (2, "pipelined"), (2, "serial"))
    )
    assert 1.02 < one / two < 1.15 and serial > two


def test_two_kernels_multiply_seven_times() -> None:
    keys, queries = loops(Workload(head_dim_qk=256), Fa3BackwardApartVariant())
    assert (keys.flop_per_score, queries.flop_per_score) == (2 * 4 * 256, 2 * 3 * 256)
    assert keys.pipeline.demand()["tensor"] == pytest.approx(64 * 64 * keys.flop_per_score / 4096)
    # Scores of 64 columns take the port and the tensor core alike: half of what the array could do beside the port.
    assert queries.pipeline.demand()["tensor"] == pytest.approx(128 * 64 * queries.flop_per_score / 4096)
    portable = loops(PAPER, Fa2BackwardVariant(dkv_tile_m=64, dkv_warps=4, dkv_apart=True))
    assert [k.flop_per_score / 256 for k in portable] == [3, 2, 3]


@pytest.mark.parametrize("work", SHAPES, ids=Workload.label)
def test_seen_from_the_keys_the_same_pairs_are_visible(work: Workload) -> None:
    other = seen_from_keys(work)
    assert other.exact_pairs() == work.exact_pairs()
    assert seen_from_keys(other).exact_pairs() == work.exact_pairs()


@pytest.mark.parametrize("work", [Workload(1, 4, 2, 300, 420, mask="causal"), Workload(1, 2, 1, 500, 333, window=(70, 20)),
                                  Workload(1, 2, 2, 333, 130, mask="causal"), Workload(1, 2, 2, 200, 90)],
                         ids=Workload.label)  # fmt: skip
def test_steps_of_programs_are_the_blocks_that_see_something(work: Workload) -> None:
    for kernel in loops(work, Fa2BackwardVariant(dkv_tile_m=64, dkv_warps=4)):
        rows, step = kernel.pipeline.rows_per_cta, kernel.pipeline.keys_per_iteration
        tiles, heads = tiles_of(kernel, work)
        tile_m, tile_n = (step, rows) if kernel.owns == "keys" else (rows, step)
        seen: dict[int, int] = {}
        for q in range(0, work.seqlen_q, tile_m):
            low, high = work.key_range(q, min(q + tile_m, work.seqlen_q))
            # A band has no holes: blocks between the first key seen and the last.
            for k in range(low // tile_n, -(-high // tile_n)) if high > low else ():
                own = k if kernel.owns == "keys" else q // tile_m
                seen[own] = seen.get(own, 0) + (work.group_size // kernel.parts if kernel.owns == "keys" else 1)
        assert [seen.get(i, 0) for i in range(tiles.count)] == tiles.iterations.tolist()
        assert heads == (work.heads_kv * kernel.parts if kernel.owns == "keys" else work.heads_q)


@pytest.mark.parametrize("work", SHAPES, ids=Workload.label)
def test_no_simulation_beats_its_bounds_and_the_parts_add_up(work: Workload) -> None:
    for family in BACKWARD_FAMILIES:
        if not any(True for _ in family.space(work, H200)):
            continue
        variant = family.chosen(work, H200)
        answer = predict_backward(work, H200, variant, interval=False)
        assert sum(one.seconds for one in answer.run.launches) == pytest.approx(answer.run.seconds)
        assert sum(step.share for step in answer.waterfall) == pytest.approx(1.0)
        assert all(step.cycles >= -1e-6 * abs(answer.run.seconds * 1e9) for step in answer.waterfall)
        for kernel in answer.kernels:
            assert kernel.trace.ii_cycles >= kernel.bounds.ii_lower * (1 - 1e-9)
        # Not faster than the tensor cores are, whatever is counted.
        assert answer.tflops <= H200["tensor.bf16_flop_per_clk"] * 132 * answer.clock_mhz / 1e6


def test_bounds_schedule_and_simulation_in_their_order() -> None:
    keys, _ = loops(Workload(head_dim_qk=256), Fa3BackwardApartVariant())
    free, own = solve_both(keys.pipeline, storage_of(H200))
    assert bounds(keys.pipeline, with_roles=False).ii_lower <= free.ii_cycles + 1 <= own.ii_cycles + 1
    assert bounds(keys.pipeline).ii_lower <= own.ii_cycles + 1
    assert own.ii_cycles <= steady_state(keys.pipeline).ii_cycles + 1
    assert all(limit.holds for limit in free.limits)


def test_more_of_everything_is_no_slower() -> None:
    def seconds(**facts: float) -> float:
        machine = H200.with_facts({name.replace("__", "."): value for name, value in facts.items()})
        return evaluate_backward(PAPER, machine, FIVE, 1500.0).seconds

    base = seconds()
    times = [seconds(chip__sm_count=n) for n in (33, 66, 132, 264)]
    assert times == sorted(times, reverse=True) and times[0] > 3.5 * times[2]
    assert seconds(smem__bytes_per_clk=256.0) < base < seconds(smem__bytes_per_clk=96.0)
    assert seconds(hbm__tbps_achieved=2.0) > base


def test_what_knobs_are_worth_has_the_measured_sign() -> None:
    """h200_backward_kernels.csv: one slot for dQ costs a third, dK before dQ 4 to 8 %, dQ in rows 3 to 10 %.

    The next S^T under dQ's store gains 7 % where a step goes in halves (head_dim 64), less than 1 % where it does not.
    """
    base = steady_state(loops(PAPER, FIVE)[0].pipeline).ii_cycles
    one_slot = steady_state(loops(PAPER, replace(FIVE, dq_slots=1))[0].pipeline).ii_cycles
    dk_first = steady_state(loops(PAPER, replace(FIVE, dk_first=True))[0].pipeline).ii_cycles
    assert 1.2 < one_slot / base < 1.5
    assert 1.0 < dk_first / base < 1.12
    for dim, ahead_gains in ((64, (1.02, 1.12)), (128, (0.99, 1.02))):
        work, rows = Workload(4, 2048 // dim, 2048 // dim, 4096, 4096, dim, dim), replace(FIVE, tile_m=8192 // dim)
        stored = replace(rows, fragments=True)
        in_rows, as_held, ahead = (
            steady_state(loops(work, v)[0].pipeline).ii_cycles for v in (rows, stored, replace(stored, ahead=True))
        )
        assert 1.03 < in_rows / as_held < 1.1
        assert ahead_gains[0] < as_held / ahead < ahead_gains[1]


def test_grouped_heads_do_the_same_products_in_fewer_programs() -> None:
    grouped = replace(PAPER, heads_kv=4)
    for work, tiles in ((PAPER, 64 * 32), (grouped, 16 * 32)):
        run = evaluate_backward(work, H200, FIVE, 1500.0).main.loop
        assert run is not None
        assert run.chip.tiles == tiles
        assert run.chip.iterations == 64 * 32 * 64


def test_what_begins_beside_a_launch_takes_what_that_leaves_idle() -> None:
    """Of few programs of the keys one kernel, of many none can hide the other; parts do not cost and explain more than there is."""
    few, many = Workload(1, 16, 2, 1024, head_dim_qk=256, mask="causal"), Workload(16, 8, 8, 4096, head_dim_qk=256)
    for work, least, most in ((few, 0.5, 1.0), (many, 0.0, 0.1)):
        found = predict_backward(work, H200)
        rows, keys, queries, *_ = found.run.launches
        assert rows.hidden_cycles == keys.hidden_cycles == 0.0 and queries.launch_seconds == 0.0
        assert queries.loop is not None and keys.loop is not None
        assert least <= queries.hidden_cycles / queries.loop.cycles() <= most
        chip = keys.loop.chip
        assert queries.hidden_cycles <= chip.makespan_cycles - chip.mean_cycles + 1e-6
        assert min(step.cycles for step in found.waterfall) >= -1e-6
        assert sum(step.cycles for step in found.waterfall) == pytest.approx(
            found.run.seconds * found.run.clock.mhz * 1e6
        )


def test_query_heads_of_one_query_are_forecast_as_rows() -> None:
    asked = Workload(23, 71, 1, 1, 125, 64, mask="causal")
    found, rows = predict_backward(asked, H200), predict_backward(Workload(23, 1, 1, 71, 125, 64), H200)
    assert found.time_ms == rows.time_ms and found.workload == asked.reduced()
    hidden = Workload(23, 71, 1, 1, 125, 64, window=(30, 0))
    assert hidden.reduced().heads_as_rows() == hidden.reduced()
    assert predict_backward(hidden, H200).time_ms > 3 * found.time_ms


def test_the_best_variant_is_the_best_of_its_space() -> None:
    work = Workload(2, 8, 8, 1024, mask="causal")
    for family in (HOPPER_BACKWARD, TRITON_BACKWARD):
        found, said = best_backward(work, H200, family.name, "short")
        assert said.startswith("best of ") and "none" not in said
        listed = list(family.space(work, H200))[:: 97 if family is TRITON_BACKWARD else 7]
        least = evaluate_backward(work, H200, found, "short").seconds
        assert all(evaluate_backward(work, H200, v, "short").seconds >= least * (1 - 1e-9) for v in listed)
        assert family_of(found) is family


def test_each_shape_has_the_class_that_is_built_for_it() -> None:
    def family(work: Workload, machine: str = "h200") -> str:
        return predict_backward(work, machine, clock="short", interval=False).variant.family

    assert family(PAPER) == "fa3_bwd"
    assert family(Workload(1, 4, 4, 1024, head_dim_qk=256)) == "fa3_bwd_apart"
    wide = Workload(1, 4, 4, 1024, head_dim_qk=192, head_dim_v=128)
    assert family(wide) == "fa3_bwd" and family(replace(wide, mask="window", window=(64, 0))) == "fa3_bwd_apart"
    assert family(Workload(1, 4, 4, 1024, head_dim_qk=96)) == "fa2_bwd"
    assert family(Workload(1, 4, 4, 1024), "a100") == "fa2_bwd"
    with pytest.raises(PredictError, match=r"fa3_bwd_apart cannot run the backward pass .* on a100: .*wgmma"):
        predict_backward(PAPER, "a100", family="hopper_bwd_apart")


def test_both_passes_add_up() -> None:
    work = Workload(1, 16, 16, 2048)
    both = predict_training(work, "h200", clock="short", interval=False, compiler=None)
    assert both.time_ms == pytest.approx(both.forward.time_ms + both.backward.time_ms)
    assert both.tflops * both.time_ms == pytest.approx(3.5 * work.flops / 1e9)
    assert backward_flops(work) == 2.5 * work.flops
    assert both.to_dict()["backward"]["pass"] == "bwd"  # type: ignore[index]


def test_a_wider_port_is_what_the_loop_wants() -> None:
    answer = backward_what_if(PAPER, "h200", scales={"smem": 2.0}, variant=FIVE, clock=1500.0)
    assert answer.kept is not None and answer.speedup >= answer.speedup_kept > 1.1
    assert "smem.bytes_per_clk 128 -> 256" in answer.text()


def test_the_range_of_a_fact_shows() -> None:
    answer = predict_backward(PAPER, H200, FIVE)
    low, high = answer.tflops_interval
    assert low < answer.tflops < high
    assert any(effect.fact == "smem.store_bytes_per_clk_under_mma" for effect in answer.fact_effects)
    assert HOPPER_BACKWARD_APART.name in {f.name for f in BACKWARD_FAMILIES}


def _played(order: list[float], heads: int, slots: int, **kernel: object) -> tuple[float, float]:
    """Programs whose tiles take the cycles of ``order``, for each of ``heads``."""
    (loop,) = loops(PAPER, FIVE)
    count = len(order)
    tiles = HeadTiles(count=count, weight=1, iterations=np.ones(count, int), masked=np.zeros(count, int), inside=np.zeros(count, int))  # fmt: skip
    return _makespan(np.array(order), tiles, heads, slots, replace(loop, **{"heads_abreast": 1, **kernel}))  # type: ignore[arg-type]


def test_who_adds_in_turn_is_played_program_by_program() -> None:
    # Four programs of a head that begin together are a turn apart; in the mean a slot waits 1.5 turns.
    assert _played([100.0] * 4, 1, 4, turn_cycles=10.0) == (130.0, 15.0)
    # They are a turn apart for the next head already.
    assert _played([100.0] * 4, 2, 4, turn_cycles=10.0) == (230.0, 15.0)
    # With two heads abreast two programs of a head begin together.
    assert _played([100.0] * 2, 2, 4, turn_cycles=10.0, heads_abreast=2) == (110.0, 5.0)
    # Without turns no program waits.
    assert _played([100.0] * 4, 1, 4, turn_cycles=0.0) == (100.0, 0.0)
    # Shorter programs (a causal mask) end earlier by what they have less to do: from the last query on all keep pace.
    assert _played([400.0, 200.0], 1, 2, turn_cycles=10.0) == (400.0, 5.0)
    # Two query heads share the keys: who sees fewer queries waits at the second head for who sees more.
    assert _played([400.0, 200.0], 1, 2, turn_cycles=10.0, query_heads=2) == (400.0, (210.0 + 100.0 - 200.0) / 2)


def test_few_heads_abreast_cost_what_was_measured(monkeypatch) -> None:
    """h200_backward_kernels.csv, 32 query heads on 8, causal, 4096: 1 head abreast takes 1.437 times as long as 16, 4 1.354 times."""
    # Programs had all query heads of a key head then.
    monkeypatch.setattr(fa3, "parts_of", lambda *_: 1)
    build_backward.cache_clear()
    work = Workload(4, 32, 8, 4096, mask="causal")
    one, four, many = (
        evaluate_backward(work, H200, replace(FIVE, heads_abreast=h, fragments=True), 1600.0).seconds
        for h in (1, 4, 16)
    )
    build_backward.cache_clear()
    assert one / many == pytest.approx(1.437, abs=0.05) and four / many == pytest.approx(1.354, abs=0.05)
