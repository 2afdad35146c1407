"""Pairs of tiles, the longest first, or a program to each: the choice against all three replayed tile by tile, and in the files that
ask for it."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast.codegen.generate import generate
from tilecast.model.chip.dealing import dealing, dealt, in_pairs, launched, rounds_of_pairs
from tilecast.model.chip.launch import makespan_cycles, run_chip
from tilecast.model.chip.programs import finer_launch, most_keys, sms_abreast, soonest_launch, start_keys
from tilecast.model.chip.tiles import head_tiles
from tilecast.model.compiled.counts import key_blocks, program_tiles
from tilecast.model.families import build_pipeline, find_family
from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

H200 = load_machine("h200")
SMS = 132


@pytest.mark.parametrize(
    ("heads", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "launch"),
    [
        (32, 8, 512, 57344, 128, (128, 1)),  # an SM for each of 128 blocks
        (32, 8, 1280, 8192, 128, (107, 3)),  # 3 turns of tiles, where 160 pairs take 2, which is 4 tiles
        (32, 32, 1408, 65536, 256, (352, 1)),  # the same, but L2 does not keep what all heads read
        (32, 8, 896, 32768, 256, (128, 2)),  # 224 tiles take 2 turns either way: programs that stay start once
        (64, 64, 4096, 4096, 128, (128, 16)),  # 1024 pairs to 132 SMs: 8 turns, which 128 programs do as well
        (32, 8, 4096, 4096, 128, (132, 9)),  # 1024 tiles, the last of 8 turns short ones; a ninth is empty
        (32, 32, 16384, 16384, 128, (4096, 1)),  # the last of 32 turns is half empty, and tiles are long
        (16, 16, 16384, 16384, 128, (132, 17)),  # half as many key heads are read by SMs side by side
        (8, 8, 65536, 65536, 256, (132, 33)),
        (1024, 1024, 512, 512, 64, (128, 32)),  # short tiles: starts would cost more than the last turn
    ],
)
def test_launches(
    heads: int, heads_kv: int, seqlen_q: int, seqlen_k: int, head_dim: int, launch: tuple[int, int]
) -> None:
    work = Workload(1, heads, heads_kv, seqlen_q, seqlen_k, head_dim, mask="causal")
    assert in_pairs(work, 128, 64, SMS) == launch


def test_the_start_of_a_program_is_worth_fewer_keys_of_wide_heads() -> None:
    assert [start_keys(*dims) for dims in ((64, 64), (128, 128), (192, 128), (256, 256))] == [192, 192, 153, 96]


def test_l2_keeps_as_many_bytes_of_any_head() -> None:
    assert [most_keys(128, 128, 2), most_keys(128, 128, 1), most_keys(256, 256, 2)] == [78125, 156250, 39062]


def test_sms_of_a_key_head() -> None:
    assert [sms_abreast(size) for size in (1, 2)] == [3, 5]


@settings(max_examples=300)
@given(
    st.integers(1, 900), st.integers(1, 900), st.integers(1, 9), st.integers(1, 24),
    st.sampled_from((64, 128, 192)), st.sampled_from((32, 64, 128)), st.integers(0, 300), st.integers(0, 5000), st.integers(1, 9),
)  # fmt: skip
def test_the_launch_that_is_over_first(
    seqlen_q: int, seqlen_k: int, heads: int, sms: int, rows: int, keys: int, start: int, kept: int, abreast: int
) -> None:
    work = Workload(1, heads, heads, seqlen_q, seqlen_k, 64, mask="causal")
    blocks = -(-seqlen_q // rows)
    length = [keys + keys * key_blocks(work, block * rows, rows, keys)[1] for block in range(blocks)]
    most, programs, turns = soonest_launch(seqlen_q, seqlen_k, heads, heads, sms, rows, keys, start, kept, abreast)
    if blocks * heads <= sms:
        assert (most, programs, turns) == (max(length), blocks * heads, 1)
        return
    everything = [(block, head) for block in range(blocks) for head in range(heads)]
    if blocks * heads > 64 * sms:
        dealt = list(program_tiles("paired", blocks, heads, programs))
        assert sorted(tile for tiles in dealt for tile in tiles) == everything
        assert programs <= sms and turns % 2 == 0 and max(map(len, dealt)) <= turns
        longest = max(sum(length[block] for block, _ in tiles) for tiles in dealt)
        assert most <= longest and longest <= 1.05 * sum(length) * heads / sms + max(length)
        return

    def staying(scheduler: str, count: int) -> tuple[int, int, int]:
        """(keys of the longest program, programs, turns) of ``count`` pairs or tiles."""
        trips = -(-count // sms)
        found = []
        for some in (-(-count // trips), sms):
            dealt = list(program_tiles(scheduler, blocks, heads, some))
            assert sorted(tile for tiles in dealt for tile in tiles) == everything
            turn = 2 * trips if scheduler == "paired" else trips
            assert max(map(len, dealt)) <= turn
            found.append((max(sum(length[block] for block, _ in tiles) for tiles in dealt), some, turn))
        return found[0] if found[0][0] <= 1.02 * found[1][0] else found[1]

    free = [0] * sms
    for _ in range(heads):
        for block in reversed(range(blocks)):
            heapq.heapreplace(free, free[0] + length[block] + start)
    launches = {"paired": staying("paired", (blocks + 1) // 2 * heads), "grid": (max(free), blocks * heads, 1)}
    if heads * seqlen_k <= kept or abreast * heads <= sms:
        longest, some, turn = staying("longest-first", blocks * heads)
        launches["longest-first"] = (longest, some, turn | 1)
    kind = "grid" if turns == 1 else "longest-first" if turns % 2 else "paired"
    assert launches[kind] == (most, programs, turns)
    assert most == min(keys for keys, _, _ in launches.values())


@settings(max_examples=300)
@given(
    st.integers(1, 900), st.integers(1, 900), st.integers(1, 12), st.integers(1, 4), st.integers(1, 24),
    st.sampled_from((64, 128, 192)), st.sampled_from((32, 64, 128)), st.integers(0, 300), st.integers(0, 5000), st.integers(1, 9),
)  # fmt: skip
def test_pairs_of_the_first_heads_and_then_tiles(
    seqlen_q: int, seqlen_k: int, heads_kv: int, group: int, sms: int, rows: int, keys: int, start: int, kept: int, abreast: int
) -> None:  # fmt: skip
    heads = heads_kv * group
    asked = (seqlen_q, seqlen_k, heads, heads_kv, sms, rows, keys, start, kept, abreast)
    most, programs, turns, pair_turns = finer_launch(*asked)
    base = soonest_launch(*asked)
    if base[2] % 2:
        assert (most, programs, turns, pair_turns) == (*base, 0)
        return
    if turns == pair_turns:
        assert (most, programs, turns) == base
        return
    assert programs == sms and pair_turns % 2 == 0 and most <= base[0] - base[0] // 100
    work = Workload(1, heads, heads_kv, seqlen_q, seqlen_k, 64, mask="causal")
    blocks, rounds = -(-seqlen_q // rows), pair_turns // 2
    length = [keys + keys * key_blocks(work, block * rows, rows, keys)[1] for block in range(blocks)]
    shared = list(program_tiles("paired", blocks, heads, sms, rounds))
    assert sorted(itertools.chain(*shared)) == sorted(itertools.product(range(blocks), range(heads)))
    assert max(map(len, shared)) <= turns
    assert max(sum(length[block] for block, _ in tiles) for tiles in shared) == most
    # What heads that are left read stays in L2, or few of them share all SMs.
    left = heads_kv - rounds * sms // ((blocks + 1) // 2) // group
    assert left * seqlen_k <= kept or abreast * left <= sms
    # The makespan of tiles that take as long as their keys.
    tiles = head_tiles(work, rows, keys)
    deal = replace(dealing("fa3", "paired"), rounds=rounds)
    (found,) = makespan_cycles(np.array([length], dtype=float), tiles, heads, sms, deal)
    assert found == most or len(set(length)) == 1


def test_8_bit_kernels_deal_so_where_l2_does_not_keep_all_heads() -> None:
    short = Workload(4, 16, 16, 4096, 4096, 128, mask="causal", dtype="fp8")
    asked = ("fa3", "paired", short, 128, 128, SMS)
    assert launched(*asked) == "paired" and rounds_of_pairs(*asked) == dealt(*asked).rounds == 4
    long = replace(short, batch=1, seqlen_q=16384, seqlen_k=16384)
    asked = ("fa3", "paired", long, 128, 128, SMS)
    assert launched(*asked) == "longest-first" and rounds_of_pairs(*asked) is None
    assert rounds_of_pairs("fa3", "paired", replace(short, dtype="bf16"), 128, 128, SMS) is None
    spans = [
        run_chip(short, v, build_pipeline(short, v, H200), H200)
        for v in (Fa3Variant(tile_n=128, kv_stages=3, q_stages=2, overlap=False, rescale="always", scheduler="paired"),)
    ]
    assert all(run.makespan_cycles < 1.02 * run.mean_cycles for run in spans)


def test_files_ask_the_same_function() -> None:
    variant = Fa3Variant(tile_n=64, kv_stages=3, q_stages=2, ping_pong=False, rescale="anchored", scheduler="paired")
    work = Workload(1, 32, 8, 1280, 8192, 128, mask="causal")
    source = generate(work, H200, find_family("fa3"), variant, compiler=None).source
    begin, end = source.index("@lru_cache"), source.index("def plan(")
    found: dict[str, object] = {}
    exec(
        "from functools import lru_cache\nfrom heapq import heapreplace\nfrom types import SimpleNamespace\n"
        "TILE_M, TILE_N = SimpleNamespace(value=128), SimpleNamespace(value=64)\n" + source[begin:end],
        found,
    )
    assert found["launch_of"](1, 32, 32, 1280, 8192, SMS)[1:] == (320, 1)  # type: ignore[operator]
    assert found["launch_of"](1, 32, 8, 1280, 8192, SMS)[1:] == in_pairs(work, 128, 64, SMS)  # type: ignore[operator]
    assert "_, programs, turns = launch_of(batch, heads_q, heads_kv, seqlen_q, seqlen_k, sms)" in source


def test_the_forecast_is_of_the_launch_that_runs() -> None:
    names = ("paired", "grid", "longest-first")
    variants = [Fa3Variant(tile_n=64, kv_stages=2, q_stages=1, scheduler=name) for name in names]

    def spans(work: Workload) -> dict[str, float]:
        found = [run_chip(work, v, build_pipeline(work, v, H200), H200).makespan_cycles for v in variants]
        return dict(zip(names, found, strict=True))

    chunk = Workload(1, 32, 32, 1408, 65536, 256, mask="causal")
    assert launched("fa3", "paired", chunk, 128, 64, SMS) == "grid"
    assert spans(chunk)["paired"] == spans(chunk)["grid"]
    near = Workload(1, 32, 8, 1280, 8192, 128, mask="causal")
    assert launched("fa3", "paired", near, 128, 64, SMS) == "longest-first"
    assert spans(near)["paired"] == spans(near)["longest-first"]
    whole = Workload(4, 16, 16, 4096, 4096, 128, mask="causal")
    assert launched("fa3", "paired", whole, 128, 64, SMS) == "paired"
    assert spans(whole)["paired"] < spans(whole)["grid"]
    # Others have no pairs to give up.
    assert launched("fa3", "persistent", chunk, 128, 64, SMS) == "persistent"
    assert launched("fa4", "paired", chunk, 128, 64, SMS) == "paired"
