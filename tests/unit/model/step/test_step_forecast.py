"""A step's time: closed forms of the play, parts that add up, what more requests, bandwidth and splits do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast.model.chip.evaluate import PredictError
from tilecast.model.chip.memory import memory_seconds
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload, WorkloadError
from tilecast.model.machine.machine import load_machine, machine_names
from tilecast.model.pipeline.serving.portable import build
from tilecast.model.sm.bounds import bounds
from tilecast.model.sm.simulate import steady_state
from tilecast.model.step.batch import Batch, parse_requests
from tilecast.model.step.decoder import decoder_floor, decoders
from tilecast.model.step.forecast import forecast_step, named_pair
from tilecast.model.step.items import Items
from tilecast.model.step.play import Costs, nothing, play

HEADS = Workload(heads_q=32, heads_kv=8, seqlen_q=1, head_dim_qk=128, mask="causal")
H200 = load_machine("h200-sxm")
COSTS = Costs(
    sms=4, per_sm=2, programs=10_000, first_start=100.0, later_start=50.0, next_item=20.0, finish=10.0, hand_over=30.0,
    merge=lambda splits, there: 5.0 * splits, periods=(20.0, 30.0), memory_block=0.0,
)  # fmt: skip

ONE_SLOT = replace(COSTS, sms=1, per_sm=1, programs=1, periods=(20.0,))


def items(blocks: list[int], tile: list[int] | None = None) -> Items:
    """Items of so many blocks; ``tile``: which are splits of one."""
    of = np.array([-1] * len(blocks) if tile is None else tile)
    counts = np.bincount(of[of >= 0]) if (of >= 0).any() else np.array([], dtype=np.int64)
    b = np.array(blocks)
    return Items(b, b * 64, of, counts, 1, 1, int(counts.max(initial=1)), int(b.sum()) * 64, 0, 1, 1)


def test_one_item_starts_streams_and_ends() -> None:
    assert play(items([7]), COSTS).end == pytest.approx(100 + 7 * 20 + 10)


def test_a_tile_waits_for_the_load_warp_where_that_is_slower() -> None:
    """Three items of one block: the load warp has each next one ready so long after the first block of the one before."""
    three = items([1, 1, 1])
    costs = replace(ONE_SLOT, load_item=5000.0, load_block=100.0, ring=4)
    assert play(three, costs).end == pytest.approx(
        costs.first_start + 2 * (100.0 + 5000.0) + costs.periods[0] + costs.finish
    )
    assert play(three, replace(costs, load_item=1.0, load_block=1.0)).end == play(three, ONE_SLOT).end
    # Behind a longer tile it has had time: four blocks before the end it asked for the last one.
    longer, costs = items([100, 1]), replace(costs, load_block=1.0, asking=0)
    behind = costs.first_start + 100 * costs.periods[0] - 4 * costs.periods[0] + 5000.0
    assert play(longer, costs).end == pytest.approx(max(behind, costs.first_start + 100 * costs.periods[0] + costs.finish + costs.next_item) + costs.periods[0] + costs.finish)  # fmt: skip


def test_a_tile_is_asked_for_when_some_blocks_of_the_one_before_are_still_to_be_copied() -> None:
    """What it is has to be known and the last copy before it asked for before its own; its Q waits for the first of both alone."""
    costs = replace(ONE_SLOT, load_block=1.0, ring=4, asking=3, take_item=2500.0, load_item=700.0, load_queries=600.0)
    end, period = 1e6, costs.periods[0]
    asked = end - (4 + 3) * period
    assert costs.ready(0.0, end, 100) == asked + 2500.0 + 700.0
    assert replace(costs, take_item=period).ready(0.0, end, 100) == end - 4 * period + 700.0
    assert replace(costs, load_queries=900.0).ready(0.0, end, 100) == asked + 2500.0 + 900.0
    # Of two blocks one is still to come when the next tile is asked for.
    assert replace(costs, periods=(1e9,)).ready(50.0, end, 2) == 50.0 + 1.0 + 2500.0 + 700.0


def test_programs_begin_where_another_launch_leaves_and_where_it_ends() -> None:
    """Of two SMs one is free when the other launch has said which it needs, the other when that ends: each program's code comes from far."""
    costs = replace(COSTS, sms=2, per_sm=1, periods=(20.0,), late=1, early_at=30.0, free_at=1000.0)
    alone = replace(costs, late=0, sms=1)
    assert play(items([5]), replace(alone, early_at=0.0)).end + 30.0 == play(items([5]), alone).end
    several = play(items([5] * 9), costs)
    early = 30 + 100 + 5 * 20 + 10 + 7 * (costs.later_start + 5 * 20 + 10)
    assert several.end == pytest.approx(max(early, 1000 + 100 + 5 * 20 + 10))


def test_programs_that_do_not_wait_for_the_memory_are_played_one_by_one() -> None:
    """Of few rounds of tiles of unequal length the steady rate of most would be wrong: the last one would begin anew."""
    many = items([9, 8, 7, 6, 5])
    one_by_one = play(many, ONE_SLOT)
    assert not ONE_SLOT.held
    whole = ONE_SLOT.first_start + 35 * ONE_SLOT.periods[0] + 4 * ONE_SLOT.next_item + 5 * ONE_SLOT.finish
    assert one_by_one.end == pytest.approx(whole)


def test_what_is_around_a_tile_s_loop_hides_under_other_warpgroups_products() -> None:
    one, costs = items([10]), replace(ONE_SLOT, finish=700.0)
    plain = play(one, costs).end
    assert play(one, replace(costs, around=500.0, slack=30.0)).end == pytest.approx(plain - 300.0)
    assert play(one, replace(costs, around=500.0, slack=90.0)).end == pytest.approx(plain - 500.0)
    masked = replace(one, masked=np.array([2]))
    assert play(masked, replace(costs, masked=150.0)).end == pytest.approx(plain + 300.0)


def test_programs_on_an_sm_share_it() -> None:
    assert play(items([7] * 4), COSTS).end == pytest.approx(100 + 7 * 20 + 10)
    assert play(items([7] * 8), COSTS).end == pytest.approx(100 + 7 * 30 + 10)


def test_an_item_more_than_slots_comes_after() -> None:
    assert play(items([7] * 8 + [3]), COSTS).end == pytest.approx(100 + 7 * 30 + 10 + 50 + 3 * 20 + 10)
    few = replace(COSTS, programs=8)
    assert play(items([7] * 8 + [3]), few).end == pytest.approx(100 + 7 * 30 + 10 + 20 + 3 * 20 + 10)


def test_the_memory_binds_when_it_is_slower() -> None:
    found = play(items([7] * 8), replace(COSTS, memory_block=10.0))
    assert found.end == pytest.approx(100 + 8 * 7 * 10 + 10)
    assert found.memory_bound == pytest.approx(8 * 7 * 10)


def test_the_last_split_merges_once() -> None:
    found = play(items([7, 7, 7], [0, 0, 0]), COSTS)
    assert found.end == pytest.approx(100 + 7 * 20 + 30 + 5 * 3)
    assert found.merging == pytest.approx(15)
    # The longest split decides, not the last in the order.
    assert play(items([9, 1, 1], [0, 0, 0]), COSTS).end == pytest.approx(100 + 9 * 20 + 30 + 15)


def test_items_without_a_block_are_written_all_the_same() -> None:
    assert play(items([0]), COSTS).end == pytest.approx(100 + 10)


def test_programs_without_an_item_take_their_time() -> None:
    busy = replace(COSTS, idle_programs=80, idle_program=40.0, idle_first=90.0)
    assert nothing(busy).end == pytest.approx(90 + 72 * 40 / 8)  # those of the first round come by code that is far
    found = play(items([7]), busy)
    assert found.end == pytest.approx(max(250, (250 + 80 * 40) / 8))
    assert found.idle == pytest.approx(found.end - 250)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.floats(0.0, 20.0))
def test_no_launch_is_faster_than_memory_or_programs_allow(blocks: list[int], memory: float) -> None:
    found = play(items(blocks), replace(COSTS, memory_block=memory))
    work = sum(blocks)
    assert found.end >= work * memory - 1e-6
    assert found.end >= work * 30 / 8 - 1e-6
    assert found.end >= 100 + max(blocks) * 20 + 10 - 1e-6


def test_many_items_take_the_memory_s_time() -> None:
    found = play(items([8] * 5000), replace(COSTS, memory_block=25.0))
    assert found.end == pytest.approx(5000 * 8 * 25, rel=0.01)


# --- the loop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["h200-sxm", "b200", "a100"])
@pytest.mark.parametrize("page", [0, 16, 64])
def test_programs_on_one_sm_take_longer_each_and_less_a_block(machine: str, page: int) -> None:
    chip = load_machine(machine)
    decode, _ = named_pair("family=serving", Batch(((1, 8),), HEADS), chip)
    loops = [build(HEADS, decode, chip, page, count) for count in (1, 2, 3)]
    periods = [steady_state(loop).ii_cycles for loop in loops]
    assert all(period >= bounds(loop).ii_lower - 1e-6 for period, loop in zip(periods, loops, strict=True))
    assert periods == sorted(periods)
    assert periods[2] / 3 < periods[1] / 2 < periods[0]


def test_smaller_pages_cost_instructions() -> None:
    decode, _ = named_pair("family=serving", Batch(((1, 8),), HEADS), H200)
    issue = {page: build(HEADS, decode, H200, page, 1).demand()["issue"] for page in (16, 64, 256)}
    # 379 and 485 in the machine code of Triton 3.6.
    assert issue[64] == pytest.approx(379, rel=0.1) and issue[16] == pytest.approx(485, rel=0.1)
    assert issue[256] == issue[64]


# --- the answer ---------------------------------------------------------------------------------------------------

BATCHES = ["1x8192", "64x2048", "8x8192,1x512:512", "4x1024:1024", "32x4:4096", "1x100,1x5000,1x70000"]


@pytest.mark.parametrize("requests", BATCHES)
def test_parts_add_up(requests: str) -> None:
    found = forecast_step(Batch(parse_requests(requests), HEADS), H200)
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.seconds)
    assert min(part.seconds for part in found.parts) >= -1e-12
    assert found.run.hbm_bytes / found.seconds <= H200["hbm.tbps_achieved"] * 1e12


@pytest.mark.parametrize("name", machine_names())
def test_every_machine_answers_and_none_beats_its_memory(name: str) -> None:
    chip = load_machine(name)
    batch = Batch(parse_requests("16x8192"), HEADS)
    found = forecast_step(batch, chip)
    assert found.seconds > batch.cache_bytes / (chip["hbm.tbps_achieved"] * 1e12)


def test_a_large_batch_is_bound_by_memory_and_a_short_one_by_its_start() -> None:
    assert forecast_step(Batch(parse_requests("128x4096"), HEADS), H200).binding[0] == "memory"
    assert forecast_step(Batch(parse_requests("4x128"), HEADS), H200).binding[0] == "start"


def test_more_bandwidth_is_never_slower() -> None:
    batch = Batch(parse_requests("32x8192"), HEADS)
    times = [
        forecast_step(batch, H200.with_facts({"hbm.tbps_achieved": rate}), clock=1900.0).seconds
        for rate in (3.0, 4.2, 6.0)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] / times[1] == pytest.approx(4.2 / 3.0, rel=0.05)


def test_heads_that_share_keys_cost_no_bytes() -> None:
    many = Batch(parse_requests("32x8192"), replace(HEADS, heads_q=64))
    few = Batch(many.lengths, HEADS)
    assert forecast_step(many, H200).seconds < 1.15 * forecast_step(few, H200).seconds


def test_splits_are_ranked_and_what_is_given_is_among_them() -> None:
    found = forecast_step(Batch(parse_requests("1x8192"), HEADS), H200, compare_splits=True)
    times = {one.split_keys: one.seconds for one in found.splits}
    assert times[512] == found.seconds
    assert [one.seconds for one in found.splits] == sorted(times.values())
    # One sequence on 8 key heads: splits too long leave SMs idle.
    assert times[4096] > 2 * times[512]
    assert forecast_step(Batch(parse_requests("1x512:512"), HEADS), H200, compare_splits=True).splits == ()


def test_the_next_request_costs_the_difference() -> None:
    batch, more = Batch(parse_requests("32x8192"), HEADS), ((1, 8192),)
    found = forecast_step(batch, H200, decoder=decoders()["llama3-8b"], next_request=more)
    grown = forecast_step(batch.with_requests(more), H200, decoder=decoders()["llama3-8b"])
    assert found.next_request is not None and found.step_seconds is not None and grown.step_seconds is not None
    assert found.next_request.attention_seconds == pytest.approx(grown.seconds - found.seconds)
    assert found.next_request.step_seconds == pytest.approx(grown.step_seconds - found.step_seconds)
    assert found.next_request.cache_bytes == 8192 * 8 * 256 * 2


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    batch, more = Batch(parse_requests("8x8192"), HEADS), ((1, 8192),)
    decoder = decoders()["llama3-8b"]
    found = forecast_step(batch, H200, decoder=decoder, next_request=more, within_seconds=0.008).largest
    assert found is not None and found.count > 0 and found.limit == "latency"
    at = [
        forecast_step(batch.with_requests(more * n), H200, decoder=decoder).step_seconds
        for n in (found.count, found.count + 1)
    ]
    assert at[0] is not None and at[1] is not None and at[0] <= 0.008 < at[1]


def test_the_memory_may_be_full_before_the_time_is_up() -> None:
    batch = Batch(parse_requests("1x100000"), HEADS)
    decoder = decoders()["llama3-70b"]
    heads = replace(HEADS, heads_q=64)
    found = forecast_step(
        Batch(batch.lengths, heads), H200, decoder=decoder, next_request=((1, 100000),), within_seconds=9.0
    ).largest
    assert found is not None and found.limit == "memory"
    assert found.count == 0


def test_floor_of_a_decoder_counts_its_weights() -> None:
    decoder = decoders()["llama3-8b"]
    # 8.03e9 parameters, less the embedding of the input (525e6).
    assert decoder.weight_bytes(HEADS) / 2 == pytest.approx(8.03e9 - 525e6, rel=0.002)
    floor = decoder_floor(decoder, Batch(parse_requests("1x128"), HEADS), H200)
    launches = (4 * 32 + 1) * H200["launch.kernel_us"] * 1e-6
    assert floor.seconds == pytest.approx(memory_seconds(H200, floor.weight_bytes) + launches)
    # Of many tokens the FLOP bind.
    big = decoder_floor(decoder, Batch(parse_requests("1x8192:8192"), HEADS), H200)
    assert big.layers_seconds > 10 * floor.layers_seconds


def test_two_launches_beside_each_other_take_less_than_one_after_the_other() -> None:
    run = forecast_step(Batch(parse_requests("8x8192,1x512:512"), HEADS), H200).run
    decodes, chunk, *_ = run.launches
    # The chunk has some SMs at first, and the others when the decodes have ended: here it needs no more.
    assert decodes.dealt.some == chunk.costs.late == 99
    assert chunk.seconds < decodes.seconds
    assert decodes.seconds == pytest.approx(run.seconds, rel=0.05)
    # A longer one goes on with all: its tiles take five rounds then, however few SMs it has at first, so most of them decode.
    decodes, chunk, *_ = forecast_step(Batch(parse_requests("8x8192,1x2048:8192"), HEADS), H200).run.launches
    alone = forecast_step(Batch(parse_requests("1x2048:8192"), HEADS), H200).run.seconds
    assert decodes.dealt.some == chunk.costs.late == 92
    assert (
        max(alone, decodes.seconds) < chunk.seconds < alone + decodes.seconds
    )  # of 132 SMs 92 are the decodes' meanwhile
    portable = Batch(parse_requests("8x8192,1x512:512"), HEADS)
    assert forecast_step(portable, H200, named_pair("family=serving", portable, H200)).run.beside_seconds == 0.0
    with pytest.raises(
        VariantError, match="with families serving or serving-hopper or serving-hopper-runs, got 'mla-hopper'"
    ):
        named_pair("family=mla-hopper", portable, H200)


def test_refusals_are_sentences() -> None:
    with pytest.raises(
        PredictError, match=r"no serving kernel for .* on h200-sxm: family serving-hopper-runs is written for bf16"
    ):
        forecast_step(Batch(((1, 8),), replace(HEADS, dtype="fp8")), H200)
    with pytest.raises(PredictError, match="holds 141 GB: use fewer or shorter sequences"):
        forecast_step(Batch(parse_requests("100x536870912"), HEADS), H200)
    with pytest.raises(WorkloadError, match="within: expected a next request"):
        forecast_step(Batch(((1, 8),), HEADS), H200, within_seconds=1.0)


def test_programs_that_stay_pay_for_a_next_item_not_for_a_new_program() -> None:
    """Of very many items: those of few programs that take them in turn, and of as many programs."""
    stay, come = replace(COSTS, programs=8), COSTS
    assert play(items([7] * 4000), stay).end < play(items([7] * 4000), come).end
    # In step, they ask the memory for nothing while they look for their next item.
    held = replace(stay, memory_block=20.0)
    assert play(items([7] * 4000), held).end == pytest.approx(4000 * (7 * 20 + 20 / 8), rel=0.01)
