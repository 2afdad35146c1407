"""Tiles dealt to SMs, against a plain replay of each scheduler; traffic against sums over tensors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tilecast.model.chip.dealing import Dealing, dealing
from tilecast.model.chip.launch import makespan_cycles, run_chip
from tilecast.model.chip.tiles import HeadTiles
from tilecast.model.compiled.counts import program_tiles
from tilecast.model.families import build_pipeline
from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.variants.fa4 import Fa4Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.sm.simulate import steady_state


def listed(count: int) -> HeadTiles:
    ones = np.ones(count, dtype=np.int64)
    return HeadTiles(ones, 0 * ones, 1.0, count, ones)


def replay(lengths: list[float], heads: int, slots: int, deal: Dealing) -> float:
    """The longest slot when tiles of ``heads`` equal heads are dealt, tile by tile, counted by hand."""
    one_head = {"rows": lengths, "last rows": lengths[::-1], "pairs": lengths}.get(deal.order, [])
    if deal.order == "pairs" and len(lengths) * heads > slots:
        half = len(lengths) // 2
        one_head = [lengths[n] + lengths[-1 - n] for n in range(half)] + lengths[half : len(lengths) - half]
    order = one_head * heads
    if deal.order.startswith("longest"):
        order = sorted((length for length in lengths for _ in range(heads)), reverse=True)
    free = [0.0] * slots
    for n, length in enumerate(order):
        turn, place = divmod(n, slots)
        if deal.hand == "free":
            place = min(range(slots), key=lambda s: free[s])
        elif deal.hand == "zigzag" and turn % 2:
            place = slots - 1 - place
        free[place] += length
    return max(free)


WAYS = [
    (family, scheduler)
    for family in ("fa2", "fa3", "fa4")
    for scheduler in ("grid", "persistent", "longest-first", "work-stealing", "paired")
]


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12), heads=st.integers(1, 9), slots=st.integers(1, 20),
    way=st.sampled_from(WAYS),
)  # fmt: skip
def test_makespan_is_that_of_the_scheduler(lengths: list[int], heads: int, slots: int, way: tuple[str, str]) -> None:
    deal = dealing(*way)
    assume(deal.order != "pairs" or len(set(lengths)) > 1)  # tiles that are all alike are dealt one by one
    times = [float(length) for length in lengths]
    found = makespan_cycles(np.array([times, times[::-1]]), listed(len(times)), heads, slots, deal)
    assert found.tolist() == pytest.approx([replay(row, heads, slots, deal) for row in (times, times[::-1])], rel=1e-12)


@pytest.mark.parametrize(("heads", "slots"), [(512, 152), (128, 152), (300, 148), (77, 74)])
@pytest.mark.parametrize("scheduler", ["persistent", "longest-first", "paired"])
def test_tiles_dealt_in_turns_are_those_of_hopper_programs(scheduler: str, heads: int, slots: int) -> None:
    """However many: with 4 tiles to a head and 152 SMs the same place of the head falls to an SM every time."""
    lengths = [2.0, 4.0, 6.0, 9.0]
    programs = program_tiles(scheduler, 4, heads, slots)
    longest = max(sum(lengths[block] for block, _ in tiles) for tiles in programs)
    (found,) = makespan_cycles(np.array([lengths]), listed(4), heads, slots, dealing("fa3", scheduler))
    assert found == pytest.approx(longest, rel=1e-12)


@pytest.mark.parametrize("way", [("fa4", "grid"), ("fa3", "grid"), ("fa4", "longest-first"), ("fa3", "work-stealing")])
def test_many_tiles_are_estimated_to_within_a_tile(way: tuple[str, str]) -> None:
    lengths = [float(n) for n in range(1, 65)]
    heads, slots = 32, 132  # 2048 tiles, more than are played
    (found,) = makespan_cycles(np.array([lengths]), listed(64), heads, slots, dealing(*way))
    assert abs(found - replay(lengths, heads, slots, dealing(*way))) <= max(lengths)
    assert found >= sum(lengths) * heads / slots


def edges(scheduler: str, head_dim: int, **knobs: int) -> float:
    """Cycles of a launch of unmasked tiles around their loops."""
    machine = load_machine("h200")
    variant = Fa3Variant(scheduler=scheduler, tile_n=64, kv_stages=2, **knobs)
    work = Workload(16, 16, 16, 1024, 1024, head_dim, head_dim)
    pipeline = build_pipeline(work, variant, machine)
    run = run_chip(work, variant, pipeline, machine)
    blocks = -(-run.tiles // run.slots) * 1024 / pipeline.keys_per_iteration
    return run.makespan_cycles - blocks * steady_state(pipeline).ii_cycles


def test_programs_that_stay_fetch_their_next_queries_under_the_loop() -> None:
    ahead, late = edges("persistent", 256, q_stages=2), edges("persistent", 256, q_stages=1)
    fresh = edges("grid", 256, q_stages=1)
    assert 0 < ahead < late < fresh


def test_longest_first_over_all_heads_reads_keys_again() -> None:
    """Where K and V of all heads exceed L2, the order that goes through all heads row by row loses them every time."""
    machine = load_machine("h200")
    work = Workload(batch=8, heads_q=32, heads_kv=32, seqlen_q=4096, seqlen_k=4096, mask="causal")
    found = {}
    for scheduler in ("longest-first", "paired", "work-stealing"):
        variant = Fa3Variant(scheduler=scheduler)
        found[scheduler] = run_chip(work, variant, build_pipeline(work, variant, machine), machine).hbm_bytes
    once = 4 * 8 * 32 * 4096 * 128 * 2
    assert found["paired"] == found["work-stealing"] == once
    assert found["longest-first"] > 3 * once


def test_traffic_of_full_attention() -> None:
    """Everything once from memory where L2 holds K and V; K and V once per query tile from L2."""
    machine = load_machine("b200")
    variant = Fa4Variant()
    work = Workload(batch=2, heads_q=8, heads_kv=2, seqlen_q=4096, seqlen_k=2048)
    found = run_chip(work, variant, build_pipeline(work, variant, machine), machine)
    queries, keys = 2 * 8 * 4096 * 128, 2 * 2 * 2048 * 128  # elements of Q (and O), of K (and V)
    assert found.hbm_bytes == 2 * (2 * queries) + 2 * (2 * keys)
    tiles_a_head = 4096 // 256
    assert found.tiles == 2 * 8 * tiles_a_head
    assert found.l2_bytes == 2 * (2 * queries) + found.tiles * 2048 * 2 * 128 * 2
    assert found.l2_floor_cycles == found.l2_bytes / (machine["l2.bytes_per_clk_per_sm"] * machine["chip.sm_count"])


def test_keys_that_l2_cannot_hold_come_again() -> None:
    machine = load_machine("b200")
    variant = Fa4Variant()
    small = Workload(heads_q=1, heads_kv=1, seqlen_q=1 << 16, seqlen_k=1 << 16)
    pipeline = build_pipeline(small, variant, machine)
    once = run_chip(small, variant, pipeline, machine).hbm_bytes
    assert once == 4 * small.seqlen_q * 128 * 2
    tight = machine.with_facts({"l2.bytes": 1 << 20})
    assert run_chip(small, variant, pipeline, tight).hbm_bytes > once
