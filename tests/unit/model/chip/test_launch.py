"""Tiles dealt to SMs, against a plain replay of each scheduler; traffic against sums over tensors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tilecast.model.chip.launch import makespan_cycles, run_chip
from tilecast.model.chip.tiles import HeadTiles
from tilecast.model.families import build_pipeline
from tilecast.model.kernel.variants.fa4 import Fa4Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine


def listed(count: int) -> HeadTiles:
    ones = np.ones(count, dtype=np.int64)
    return HeadTiles(ones, 0 * ones, 1.0, count, ones)


def replay(lengths: list[float], heads: int, slots: int, scheduler: str) -> float:
    """The longest slot when tiles of ``heads`` equal heads are dealt one after the other, counted by hand."""
    if scheduler == "longest-first":
        order = sorted((length for length in lengths for _ in range(heads)), reverse=True)
    else:
        order = lengths * heads
    if scheduler == "paired":
        half = len(lengths) // 2
        pairs = [lengths[n] + lengths[-1 - n] for n in range(half)] + lengths[half : len(lengths) - half]
        order = pairs * heads
    free = [0.0] * slots
    for n, length in enumerate(order):
        slot = n % slots if scheduler in ("persistent", "paired") else min(range(slots), key=lambda s: free[s])
        free[slot] += length
    return max(free)


@settings(max_examples=150)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12), heads=st.integers(1, 9), slots=st.integers(1, 20),
    scheduler=st.sampled_from(("grid", "persistent", "longest-first", "work-stealing", "paired")),
)  # fmt: skip
def test_makespan_is_that_of_the_scheduler(lengths: list[int], heads: int, slots: int, scheduler: str) -> None:
    assume(scheduler != "paired" or len(set(lengths)) > 1)  # tiles that are all alike are dealt one by one
    times = [float(length) for length in lengths]
    found = makespan_cycles(np.array(times), listed(len(times)), heads, slots, scheduler)
    assert found == pytest.approx(replay(times, heads, slots, scheduler), rel=1e-12)


@pytest.mark.parametrize("scheduler", ["grid", "longest-first", "work-stealing"])
def test_many_tiles_are_estimated_to_within_a_tile(scheduler: str) -> None:
    lengths = [float(n) for n in range(1, 65)]
    heads, slots = 32, 132  # 2048 tiles, more than are played
    found = makespan_cycles(np.array(lengths), listed(64), heads, slots, scheduler)
    assert abs(found - replay(lengths, heads, slots, scheduler)) <= max(lengths)
    assert found >= sum(lengths) * heads / slots


@pytest.mark.parametrize(("heads", "slots"), [(512, 152), (128, 152), (300, 148), (77, 74)])
@pytest.mark.parametrize("scheduler", ["persistent", "paired"])
def test_dealt_tiles_are_counted_however_many(scheduler: str, heads: int, slots: int) -> None:
    """Causal tiles dealt to 152 SMs, 4 of a head: the same place of the head falls to an SM every time."""
    lengths = [2.0, 4.0, 6.0, 8.0]
    found = makespan_cycles(np.array(lengths), listed(4), heads, slots, scheduler)
    assert found == pytest.approx(replay(lengths, heads, slots, scheduler), rel=1e-12)


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
