"""Parted prefill, e4m3 and latent caches in a step: dealt as the generated kernels deal them, and what follows from that."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tilecast.model.chip.evaluate import PredictError
from tilecast.model.compiled.units.fetch import far_cycles, near_cycles
from tilecast.model.kernel.variants.hopper import mla as hopper_mla
from tilecast.model.kernel.variants.hopper import prefill as hopper_prefill
from tilecast.model.kernel.variants.hopper.serving import (
    HopperRunsE4m3Variant,
    HopperRunsVariant,
    HopperServingE4m3Variant,
    HopperServingVariant,
)
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload, WorkloadError
from tilecast.model.machine.machine import load_machine
from tilecast.model.pipeline.serving import latent
from tilecast.model.sm.bounds import bounds
from tilecast.model.sm.simulate import steady_state
from tilecast.model.step.batch import Batch, parse_requests
from tilecast.model.step.costs.around import (
    COPY_ENGINE,
    COPY_ENGINE_HALF_RUNS,
    COPY_ENGINE_RUNS,
    COPY_ENGINE_SEVERAL,
    COPY_ENGINE_WIDE,
    LATENT,
    LATENT_RUNS,
    POINTERS,
    WARM,
    Around,
    Loops,
)
from tilecast.model.step.costs.runs import AroundRuns, shares_of
from tilecast.model.step.costs.tiles import (
    AROUND_PARTS,
    CHAINED,
    PARTED,
    PREFILL,
    AroundTiles,
    TileCounts,
    of_warpgroups,
)
from tilecast.model.step.evaluate import _loops, evaluate_step
from tilecast.model.step.forecast import forecast_step, named_pair, shipped_pair
from tilecast.model.step.items import batch_items, of_sequence
from tilecast.model.step.launches.dealing import Dealing
from tilecast.model.step.launches.variant import dealing, launched, loop
from tilecast.model.step.play import play

H200 = load_machine("h200-sxm")
HEADS = Workload(heads_q=32, heads_kv=8, seqlen_q=1, head_dim_qk=128, mask="causal")
MLA = Workload(heads_q=128, heads_kv=1, seqlen_q=1, head_dim_qk=576, head_dim_v=512, mask="causal")


def dense(requests: str, heads: Workload = HEADS) -> Batch:
    return Batch(parse_requests(requests), heads, 0)


def mla(requests: str, heads: int = 128) -> Batch:
    return Batch(parse_requests(requests), replace(MLA, heads_q=heads), 64, latent=True)


def generated(name: str):
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    import importlib

    return importlib.import_module(f"tilecast.kernels.generated.{name}")


def grid(module, batch: Batch, kind=None) -> int:
    """Programs of a generated launch."""
    import torch

    def meta(*shape: int, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    h, (queries, longest), count = batch.heads, batch.lengths[0], len(batch.lengths)
    q, out = meta(count, queries, h.heads_q, h.head_dim_qk), meta(count, queries, h.heads_q, h.head_dim_v)
    pages = (4, 64) if batch.page else (count, longest)
    k = meta(*pages, h.heads_kv, h.head_dim_qk, dtype=kind or torch.bfloat16)
    v = k[..., : h.head_dim_v] if batch.latent else meta(*k.shape[:-1], h.head_dim_v, dtype=k.dtype)
    table = meta(count, 4, dtype=torch.int32) if batch.page else None
    lists = (None, None, meta(count, dtype=torch.int32), table, *[None] * 4)
    work = (torch.empty(1 << 40, device="meta"), torch.empty(1 << 30, device="meta"))
    found, *_ = module.plan(q, k, v, out, None, lists, queries, longest, (-1, 0), False, (1, 1 << 29), work, 132)
    return math.prod(found)


# --- parted prefill ------------------------------------------------------------------------------------------------

SHAPES = ["1x128:32768", "1x256:32768", "1x64:8192", "16x128:16384", "3x200:5000", "1x2048:32768", "2x17:70000"]


def _how(dealt: Dealing) -> int:
    """How parts are taken in, as the generated kernel numbers it."""
    if dealt.parting is None:
        return 0
    return (3 if dealt.longer else 1) if dealt.chained else 2


@pytest.mark.parametrize("requests", SHAPES)
@pytest.mark.parametrize("heads", [(32, 8), (8, 1)])
def test_keys_are_parted_as_the_generated_kernel_does(requests: str, heads: tuple[int, int]) -> None:
    module = generated("hopper_prefill_d128")
    batch = dense(requests, replace(HEADS, heads_q=heads[0], heads_kv=heads[1]))
    queries, keys = batch.lengths[0]
    variant = shipped_pair(batch, H200)[-1]
    dealt = launched(variant, batch, 132)
    group, count = batch.heads.group_size, len(batch.lengths)
    how, places, *_ = module._dealing(count, heads[1], group, queries, keys, 132, None, 1, -1)
    assert _how(dealt) == how
    items = batch_items(batch, dealt)
    if items is None:  # few enough rows for the kernel that decodes
        assert queries * group <= 64
        return
    parts = module.parts(queries, keys, group, heads[1])
    assert how == 0 or max(items.most_splits, items.joins.max() + 1 if items.joins is not None else 1) == parts
    # Every block of every tile is in one item, in whichever program.
    whole = batch_items(batch, replace(dealt, parting=None, chained=False))
    assert whole is not None and items.blocks.sum() == whole.blocks.sum() and items.tiles == whole.tiles
    assert evaluate_step(batch, H200, (variant,), "short").launches[0].programs == grid(module, batch)
    assert how != 2 or items.count <= places


@pytest.mark.parametrize("rows", [20, 64])
@pytest.mark.parametrize("heads", [(32, 8), (16, 16), (4, 1)])
@pytest.mark.parametrize("sequences", [1, 4, 13, 64])
def test_few_rows_at_256_columns_are_parted_as_the_generated_kernel_does(
    sequences: int, heads: tuple[int, int], rows: int
) -> None:
    """Not up to 1024 keys, then in four and more parts of at least 256, one more for each 1024."""
    module = generated("hopper_prefill_d256_few")
    group = heads[0] // heads[1]
    of, queries = (
        Workload(heads_q=heads[0], heads_kv=heads[1], seqlen_q=1, head_dim_qk=256, mask="causal"),
        rows // group,
    )
    for keys in (700, 1024, 1025, 1500, 2048, 5000, 9000, 40000):
        batch = Batch(((queries, keys),) * sequences, of, 64)
        variant = shipped_pair(batch, H200)[1]
        dealt = launched(variant, batch, 132)
        how, places, *_ = module._dealing(sequences, heads[1], group, queries, keys, 132, None, 1, -1)
        assert _how(dealt) == how and (how < 2 or dealt.places == places)
        items, parts = batch_items(batch, dealt), module.parts(queries, keys, group, heads[1])
        assert items is not None and (parts == 1 or keys > 1024)
        assert not how or max(items.most_splits, items.joins.max() + 1 if items.joins is not None else 1) == parts


def test_constants_are_those_of_the_generated_kernels() -> None:
    module = generated("hopper_prefill_d256_few")
    assert module.MOST_MERGED == hopper_prefill.most_merged(1, 256) != hopper_prefill.most_merged(2, 256)
    module = generated("hopper_prefill_d128")
    assert module.MOST_NUMBERS == hopper_prefill.MOST_NUMBERS and module.MOST_MERGED == hopper_prefill.MOST_MERGED
    assert (module.JOINED_APART.value, module.AHEAD.value) == (hopper_prefill.JOIN_COLUMNS, hopper_prefill.JOIN_AHEAD)
    module = generated("hopper_mla_d576_512")
    assert module.SPLIT_QUERIES.value == hopper_mla.SPLIT_QUERIES
    assert generated("hopper_serve_d128_e4m3").SPLIT_ROWS.value == dealing(HopperServingE4m3Variant(), HEADS).split_rows


def test_parts_shorten_what_leaves_sms_idle() -> None:
    batch = Batch(((128, 32768),), HEADS, 64)
    parted = forecast_step(batch, H200)
    whole = forecast_step(
        batch,
        H200,
        tuple(replace(v, part_keys=1 << 29) if hasattr(v, "part_keys") else v for v in shipped_pair(batch, H200)),
    )
    assert parted.run.launches[0].items.most_splits == 4 and whole.run.launches[0].items.most_splits == 1  # type: ignore[union-attr]
    assert parted.seconds < 0.45 * whole.seconds
    assert "keys in parts of at least 768, at most 4" in parted.text()


@pytest.mark.parametrize("requests", ["1x128:32768,1x8:900", "3x100:9000,40x1:500", "2x512:2048,1x70:60000"])
def test_packed_sequences_are_parted_each_by_its_own_lengths(requests: str) -> None:
    module = generated("hopper_prefill_d128")
    batch = Batch(parse_requests(requests), HEADS, 64)
    dealt = launched(shipped_pair(batch, H200)[-1], batch, 132)
    work = batch.workload()
    how, places, *_ = module._dealing(
        len(batch.lengths), 8, 4, work.seqlen_q, work.seqlen_k, 132, batch.queries, 65, -1
    )
    assert _how(dealt) == how
    items = batch_items(batch, dealt)
    assert items is not None and (how < 2 or dealt.places == places) and (how != 2 or places >= items.count)
    parts = [module.parts(q, k, 4, 8) for q, k in batch.lengths if q * 4 > 64]
    assert how != 2 or items.most_splits == max(parts)


@pytest.mark.parametrize(("heads_q", "heads_kv", "how"), [(32, 8, 0), (4, 1, 3)])
def test_packed_sequences_of_as_many_keys_as_queries_are_parted_where_heads_are_few(
    heads_q: int, heads_kv: int, how: int
) -> None:
    module = generated("hopper_prefill_d128")
    heads = replace(HEADS, heads_q=heads_q, heads_kv=heads_kv)
    batch = Batch(((3000, 3000), (40, 40), (700, 700)), heads, page=0)
    dealt = launched(shipped_pair(batch, H200)[-1], batch, 132)
    found, places, *_ = module._dealing(3, heads_kv, heads_q // heads_kv, 3000, 3000, 132, 3740, 65, -1, True)
    assert found == how == _how(dealt) and (not how or places == dealt.places)
    # Two lists might say anything.
    assert module._dealing(3, heads_kv, heads_q // heads_kv, 3000, 3000, 132, 3740, 65, -1)[0] > 0


def test_parts_of_a_far_longer_sequence_than_others_are_dealt_out() -> None:
    """64 sequences of 80 rows and one of 262144 keys: on the H200 407 us where they were taken in one after the other, 2664."""
    lengths = ((20, 262144), *((20, 500 + 37 * i % 3500) for i in range(64)))
    batch = Batch(lengths, HEADS, 64)
    prefill = shipped_pair(batch, H200)[-1]
    dealt = launched(prefill, batch, 132)
    assert _how(dealt) == 3
    items, chained = batch_items(batch, dealt), batch_items(batch, replace(dealt, longer=0.0))
    assert items is not None and items.joins is not None and chained is not None
    # Of the long one 16 parts for each key head; of the others those whose tile has several are taken in one by one.
    assert items.most_splits == 16 and items.count == 8 * (16 + 64) and not items.joins[: 8 * 16].any()
    assert chained.blocks.sum() == items.blocks.sum() and chained.blocks.max() == 4096 == 16 * items.blocks.max()
    seconds = evaluate_step(batch, H200, (prefill,), "short").seconds
    assert 300e-6 < seconds < 500e-6


def test_heads_of_256_have_three_kernels_and_every_sequence_one() -> None:
    heads = Workload(heads_q=4, heads_kv=1, seqlen_q=1, head_dim_qk=256, mask="causal")
    run = forecast_step(Batch(parse_requests("2x900,1x8:900,1x100:900"), heads, 64), H200).run
    kernels = [(launch.variant.family, getattr(launch.variant, "warpgroups", 0)) for launch in run.launches]
    # Beside the one for the most rows those for the fewest are two: of rows that fill no more than half a tile, and of others.
    runs = ("serving-hopper-runs", 0)
    assert kernels == [runs, ("prefill-hopper", 2), ("prefill-hopper", 1), runs]
    assert [launch.items.sequences if launch.items else 0 for launch in run.launches] == [2, 1, 1, 0]


def test_a_tile_has_no_item_of_keys_that_it_does_not_see() -> None:
    """The first rows of a causal prompt see its first keys only."""
    batch = dense("1x2048:4096", replace(HEADS, heads_q=2, heads_kv=1))
    items = batch_items(batch, launched(shipped_pair(batch, H200)[-1], batch, 132))
    assert items is not None and (items.blocks > 0).all()
    seen = np.bincount(items.tile[items.tile >= 0])
    assert (seen == items.splits_of_tile).all() and seen.min() < seen.max()


# --- e4m3 caches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "name"),
    [("1x8192", "runs_e4m3"), ("64x1000", "runs_e4m3"), ("7x2:513", "runs_e4m3"), ("64x9000", "runs_e4m3"), ("3x8:70000", "e4m3")],
)  # fmt: skip
def test_e4m3_launches_are_those_of_the_generated_kernel(requests: str, name: str) -> None:
    module = generated(f"hopper_serve_d128_{name}")
    import torch

    batch = Batch(parse_requests(requests), HEADS, 64, cache="e4m3")
    (launch,) = evaluate_step(batch, H200, shipped_pair(batch, H200), "short").launches
    assert launch.programs == grid(module, batch, torch.uint8)


def test_a_byte_an_element_halves_the_bytes_and_almost_the_time() -> None:
    wide = Batch(parse_requests("128x4096"), HEADS, 64)
    narrow = replace(wide, cache="e4m3")
    assert 2 * narrow.cache_bytes == wide.cache_bytes
    ratio = forecast_step(wide, H200).seconds / forecast_step(narrow, H200).seconds
    assert 1.6 < ratio < 2.0


def test_two_tiles_of_a_split_are_neighbours_and_both_split() -> None:
    batch = Batch(((8, 8192),), HEADS, 64, cache="e4m3")
    items = batch_items(batch, dealing(HopperServingE4m3Variant(), HEADS))
    assert items is not None and items.count == 2 * 8 * 8 and items.tiles == 2 * 8
    # Of 8 heads: both tiles of a split before the next split's.
    assert items.tile[:16].tolist() == list(range(16)) and items.tile[16:32].tolist() == items.tile[:16].tolist()


def test_bytes_are_taken_in_by_runs_where_rounds_are_nearly_full_and_split_by_split_elsewhere() -> None:
    full, uneven = (
        launched(HopperRunsE4m3Variant(), Batch(parse_requests(requests), HEADS, 64, cache="e4m3"), 132)
        for requests in ("128x4096", "33x4096,21x70,5x9000")
    )
    assert full.runs is not None and full.runs.blocks == 128 * 32 and not full.runs.shrinks
    assert uneven.runs is not None and uneven.runs.blocks == 0


# --- runs of splits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "items", "blocks"),
    [
        ("1x8192", 8 * 16, 8),  # each split a program
        ("8x2048", 8 * 8 * 4, 8),
        ("8x8192", 8 * 8 * 4, 32),  # groups of four splits
        ("32x8192", 32 * 8, 128),  # groups of groups: whole sequences
        ("128x4096", 128 * 8, 64),
        ("1x65536,31x700", 8 * 16 + 31 * 8, 64),  # a long sequence among short ones is not left to one program
    ],
)
def test_programs_take_in_as_many_splits_as_are_a_fair_share(requests: str, items: int, blocks: int) -> None:
    batch = Batch(parse_requests(requests), HEADS, 64)
    dealt = launched(HopperRunsVariant(), batch, 132)
    found, single = batch_items(batch, dealt), batch_items(batch, replace(dealt, runs=None))
    assert found is not None and single is not None
    assert found.count == items and found.blocks.max() == blocks
    assert found.blocks.sum() == single.blocks.sum() and found.keys.sum() == single.keys.sum()
    assert dealt.programs == (2 if dealt.direct else 1) and dealt.direct == (single.count <= 264)


@given(
    keys=st.lists(st.integers(1, 30_000), min_size=20, max_size=60), heads=st.sampled_from([(32, 8), (8, 1), (32, 32)])
)
def test_runs_of_unequal_sequences_shrink_to_a_fair_share_of_what_is_left(keys, heads) -> None:
    """A run is a split, or no more than a fair share, and a sixteenth, of the blocks that are still to come; alike lengths are the exception."""
    batch = Batch(tuple((1, n) for n in keys), replace(HEADS, heads_q=heads[0], heads_kv=heads[1]), 64)
    dealt = launched(HopperRunsVariant(), batch, 132)
    assume(dealt.runs is not None)
    found, single = batch_items(batch, dealt), batch_items(batch, replace(dealt, runs=None))
    assert found is not None and single is not None and dealt.runs is not None
    assert found.blocks.sum() == single.blocks.sum() and found.keys.sum() == single.keys.sum()
    left = found.blocks[::-1].cumsum()[::-1]
    # Of a sequence's items the last ones come when less is left than when its share was counted: at most that sequence's own blocks.
    longest = -(-max(keys) // 64) * heads[1]
    share = left + longest if dealt.runs.shrinks else np.full(len(left), left[0])
    assert ((found.blocks <= single.blocks.max()) | (found.blocks * 16 * 132 <= share * 17)).all()
    if not dealt.runs.shrinks:
        rounds = -(-found.count // 132)
        assert 16 * (left[0] // 132) >= 15 * rounds * found.blocks.max()


def test_rows_between_go_to_the_kernel_between_and_its_launch_comes_last() -> None:
    run = forecast_step(Batch(parse_requests("4x900,2x3:900,1x8:900,1x100:900"), HEADS, 64), H200).run
    kernels = [(launch.variant.family, getattr(launch.variant, "warpgroups", 0)) for launch in run.launches]
    runs = ("serving-hopper-runs", 0)
    assert kernels == [runs, ("prefill-hopper", 2), ("prefill-hopper", 1), runs]
    assert [launch.items.sequences for launch in run.launches] == [4, 1, 1, 2]  # type: ignore[union-attr]
    # Rows of half a tile: what a launch of its own is for.
    assert [(one.dealt.least_rows, one.dealt.most_rows) for one in run.launches if one.variant.family == runs[0]] == [
        (1, 8),
        (9, 16),
    ]


# --- latent caches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", ["1x8192", "1x65536", "16x4096", "64x4096", "128x8192", "5x700", "3x2:9000"])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_latent_launches_are_dealt_as_the_generated_kernel_does(requests: str, heads: int) -> None:
    module = generated("hopper_mla_d576_512")
    batch = mla(requests, heads)
    (queries, keys), count = batch.lengths[0], len(batch.lengths)
    (variant,) = shipped_pair(batch, H200)
    dealt = launched(variant, batch, 132)
    assert module._parts(count, 1, heads, keys, 132) == (dealt.head_parts, heads // dealt.head_parts)
    assert module._chained(count, dealt.head_parts, heads // dealt.head_parts, queries, keys, 132) == dealt.chained
    assert evaluate_step(batch, H200, (variant,), "short").launches[0].programs == grid(module, batch)


@pytest.mark.parametrize(
    ("requests", "heads"),
    [
        ("70x8192", 128),
        ("140x8192", 16),
        ("140x8192", 192),
        ("300x700,20x30000,7x1", 16),
        ("40x700,30x30000", 192),
        ("90x2:5000", 128),
    ],
)
def test_latent_launches_share_splits_in_runs(requests: str, heads: int) -> None:
    """Every split once, in order, as many to each program but for one; what a tile's later splits see is joined to what its first ones had."""
    batch = mla(requests, heads)
    (variant,) = shipped_pair(batch, H200)
    dealt = launched(variant, batch, 132)
    assert dealt.chained
    runs, whole = batch_items(batch, dealt), batch_items(batch, replace(dealt, teams=0))
    splits = batch_items(batch, replace(dealt, teams=0, chained=False))
    assert runs is not None and whole is not None and splits is not None and whole.joins is not None
    parts = dealt.head_parts
    assert whole.count // parts > 132 // parts == dealt.teams == runs.count // parts
    assert runs.blocks.sum() == whole.blocks.sum() and runs.keys.sum() == whole.keys.sum()
    assert runs.joins is not None and runs.joins.sum() == whole.joins.sum()
    assert runs.pieces is not None and (runs.pieces >= 1).all()
    # Tiles that two programs share are pieces of both.
    tiles = runs.pieces.sum() // parts
    assert whole.count // parts <= tiles <= whole.count // parts + dealt.teams - 1
    # In order: what the first program has are the first splits.
    first = -(-(splits.count // parts) // dealt.teams)
    assert runs.blocks[0] == splits.blocks[::parts][:first].sum()
    assert len({*splits.blocks}) > 1 or {*(runs.blocks // splits.blocks[0] - first)} <= {0, -1}


def test_parts_of_query_heads_read_the_same_keys_once() -> None:
    few, many = (forecast_step(mla("64x4096", heads), H200) for heads in (64, 128))
    assert few.run.launches[0].items.span == many.run.launches[0].items.span == 64 * 4096  # type: ignore[union-attr]
    assert mla("1x1000").token_bytes == 2 * 576


# --- around the loop -----------------------------------------------------------------------------------------------


def test_groups_of_splits_are_merged_side_by_side() -> None:
    """Hopper's kernels merge 16 splits (8 of latent caches) by the last of their programs, and the groups then: two steps, however many
    groups there are.  The portable kernel's last program takes in all, one step after the other."""
    hopper, portable = (Around(H200, counts, 16) for counts in (COPY_ENGINE_RUNS, POINTERS))
    few, more, most = (hopper.merge(splits, 8, HEADS, 1) for splits in (16, 32, 256))
    assert more == most and 2.0 * few < most < 3.0 * few
    assert portable.merge(256, 8, HEADS, 1) > 1.9 * portable.merge(128, 8, HEADS, 1)
    latents = Around(H200, LATENT, 64)
    # 16 rows are 8 pieces, which the 8 programs of a group take at once, as those of all groups do.
    once, twice, again = (latents.merge(splits, 16, MLA, 1) for splits in (8, 16, 32))
    assert twice == again and once < twice < 2.0 * once
    assert latents.merge(4, 64, MLA, 1) > latents.merge(8, 64, MLA, 1) > once
    # Programs that know their shares need no counts for them.
    assert Around(H200, replace(LATENT, shares=True), 64).merge(8, 16, MLA, 1) < once


def test_runs_shorter_than_tiles_do_splits_apart() -> None:
    """Of 8 splits each of 60 tiles to 66 programs of each half of the heads: whole; of 30 tiles a run has 3 or 4, and the later ones of a
    tile wait for what the ones before do apart."""
    whole, shared = (launched(shipped_pair(mla(x), H200)[0], mla(x), 132) for x in ("60x8192", "30x8192"))
    assert whole.chained and not whole.teams and shared.teams == 66
    runs = batch_items(mla("30x8192"), shared)
    assert runs is not None and runs.apart is not None and runs.joins is not None
    # 42 runs of 4 splits: two to a tile.  Then 24 of 3: 3, 3, 2 | 1, 3, 3, 1 | 2, 3, 3.
    apart = runs.apart[::2].tolist()
    assert apart[:4] == [0, 4, 0, 4] and apart[42:50] == [0, 3, 5, 3, 6, 7, 3, 6]
    # In runs of whole tiles and more nothing is.
    more = launched(shipped_pair(mla("140x8192"), H200)[0], mla("140x8192"), 132)
    many = batch_items(mla("140x8192"), more)
    assert many is not None and many.apart is not None and not many.apart.any()
    # Dealt out they would leave more than L2 holds.  Of runs of 10 of 32 splits 10 to 15, 20 to 23 and 30 and 31 add to the groups of 8 that they go on
    # with; then each group, and before it those before it, comes back to join, one run after the other.
    long = launched(shipped_pair(mla("20x32768"), H200)[0], mla("20x32768"), 132)
    runs = batch_items(mla("20x32768"), long)
    assert long.chained and runs is not None and runs.apart is not None
    assert runs.apart[:10:2].tolist() == [0, 2, 4, 6, 2]
    assert not launched(shipped_pair(mla("20x8192"), H200)[0], mla("20x8192"), 132).chained


def test_a_join_moves_the_rows_that_are_there() -> None:
    """Warps without rows leave and fetch nothing; stores go at the rate of all SMs, what comes shares the port with the next keys; half of
    what leaves is waited for."""
    around = Around(H200, LATENT, 64, mhz=1980.0)
    rows = {count: around.left(512, count) for count in (16, 64)}
    assert rows[64] == 4.0 * rows[16]
    assert rows[64] * 4.65e12 / 132 / 1980e6 == pytest.approx(64 * 512 * 4)
    # L2 keeps its clock: fewer cycles of slower SMs.
    assert Around(H200, LATENT, 64, mhz=1485.0).left(512, 64) == pytest.approx(0.75 * rows[64])
    assert around.join(512, 1) == around.join(512, 16) < around.join(512, 17)
    assert around.join(512, 64) - around.join(512, 16) == pytest.approx((rows[64] - rows[16]) / 2.0)
    # What was done apart comes back, with nothing beside it.
    assert around.join_later(512, 64) - around.join_later(512, 16) == pytest.approx(around.back(512, 48, 0.0))
    assert (
        around.back(512, 64, 0.0)
        < around.back(512, 64, 1e4)
        < around.back(512, 64, 1e6)
        == 2.0 * around.back(512, 64, 0.0)
    )
    by_rows = [
        evaluate_step(mla("20x8192", heads), H200, shipped_pair(mla("20x8192", heads), H200), 1500.0).seconds
        for heads in (16, 64)
    ]
    assert by_rows[0] < by_rows[1]


def test_latent_results_take_the_store_path_of_float32() -> None:
    """By the rows of warps that have some; where results are not left between parts no store is waited for."""
    around = Around(H200, LATENT, 64)
    assert around.finish(512, 64) - around.finish(512, 16) == pytest.approx(around.left(512, 48))
    assert around.finish(512, 1) == around.finish(512, 16)
    assert Around(H200, COPY_ENGINE_RUNS, 16).finish(128, 16) == Around(H200, COPY_ENGINE_RUNS, 16).finish(512, 64)


def test_a_block_that_stands_alone_begins_the_next_one_earlier() -> None:
    """The scores of a latent block behind a join share the tensor core with no product of the block before."""
    (launch,) = evaluate_step(mla("60x8192"), H200, shipped_pair(mla("60x8192"), H200), 1500.0).launches
    alone = launch.costs.join - Around(H200, LATENT, 64, mhz=1500.0).join(512, 64)
    (product,) = (op.min_cycles for op in launch.pipeline.ops if op.name == "pv1")
    assert -1.5 * product < alone < -0.5 * product


def test_the_first_part_leaves_and_the_last_comes_alone() -> None:
    """Of a tile's parts the last one waits for what the others had, once a tile."""
    around = Around(H200, LATENT, 64)
    back, left = around.back(512, 64, 1e6), around.left(512, 64)
    assert around.join_ends(512, 64, 1e6) == back - left / 2.0 > 0.0
    (launch,) = evaluate_step(mla("60x8192"), H200, shipped_pair(mla("60x8192"), H200), 1500.0).launches
    costs, items = launch.costs, launch.items
    assert items is not None and items.joins is not None and costs.join_ends > 0.0
    without = play(items, replace(costs, join_ends=0.0))
    assert play(items, costs).end - without.end == pytest.approx(costs.join_ends)
    # Of the portable kernel and of parted prefill what is left is on its way meanwhile.
    assert (
        AroundTiles(H200, PARTED, 128).join_ends(128, 128, 1e6)
        == AroundTiles(H200, PARTED, 128).join_later(128, 128)
        == 0.0
    )


def test_roles_with_code_of_their_own_share_what_fetches_it() -> None:
    """Until the first copy the SM fetches the planning of all roles, later what is near; at an item's end that of both warpgroups."""
    for counts in (LATENT, LATENT_RUNS, of_warpgroups(PARTED, 2)):
        around = AroundTiles if isinstance(counts, TileCounts) else Around
        shared, alone = (
            around(H200, counts, 64, once=True),  # type: ignore[arg-type]
            around(H200, replace(counts, beside=0, finishers=1), 64, once=True),  # type: ignore[arg-type]
        )
        assert shared.plan(True) - alone.plan(True) == pytest.approx(counts.beside * far_cycles(H200))
        assert shared.plan(False) == alone.plan(False)
        if around is Around:  # of tiles: test_a_tile_of_prefill_runs_through_code
            assert shared.ended(512) - alone.ended(512) == pytest.approx(counts.finish * far_cycles(H200))
    again = Around(H200, LATENT, 64)
    assert again.ended(512) == Around(H200, replace(LATENT, finishers=1), 64).ended(512)
    # Between parts code comes from the next cache, the first time from far.
    slower = H200.with_facts({"code.fetch_cycles": 2.0 * H200["code.fetch_cycles"]})
    more = 2 * LATENT.added * H200["code.fetch_cycles"]
    assert Around(slower, LATENT, 64).join(512, 64) - again.join(512, 64) == pytest.approx(more)
    assert Around(slower, LATENT, 64).join_first() == again.join_first() > LATENT.joined * far_cycles(H200)


def test_a_tile_of_prefill_runs_through_code_that_loops_have_put_out_of_the_cache() -> None:
    """Of two warpgroups with code of their own no instruction comes faster than a dependent one, of three the fetches set the pace; the first time
    all comes from far, the loop of a window's left edge only where there is one."""
    two, three = (AroundTiles(H200, of_warpgroups(PREFILL, count), 64 * count) for count in (2, 3))
    code = PREFILL.item[0] + PREFILL.item[1] * 128
    assert two.part(128) == pytest.approx(code * max(H200["alu.latency_cycles"], 2 * near_cycles(H200)))
    assert three.part(128) == pytest.approx(code * 3 * near_cycles(H200))
    left = PREFILL.left[0] + PREFILL.left[1] * 128
    assert two.first_time(128, Loops(left=1.0)) - two.first_time(128, Loops()) == pytest.approx(
        2 * left * far_cycles(H200)
    )
    diagonal = PREFILL.diagonal[0] + PREFILL.diagonal[1] * 128
    assert two.first_time(128, Loops()) - two.first_time(128, Loops(diagonal=0.5)) == pytest.approx(
        diagonal * far_cycles(H200)
    )
    parted = AroundTiles(H200, of_warpgroups(PARTED, 2), 128)
    assert parted.ended(128) - two.ended(128) == pytest.approx(PARTED.around_parts * two.near())
    assert (
        Around(H200, COPY_ENGINE, 64).first_time(128, Loops(left=1.0))
        == Around(H200, COPY_ENGINE, 64).take_item()
        == Around(H200, COPY_ENGINE, 64).load_item(64)
        == Around(H200, COPY_ENGINE, 64).load_queries(128)
        == 0.0
    )


def test_a_program_of_prefill_looks_at_32_sequences_at_a_time_once_or_twice() -> None:
    """All but the first lap come by code that has come; where parts of longer tiles are dealt out all sequences are counted first."""
    few, more, twice = (
        AroundTiles(H200, replace(CHAINED, sequences=count, laps=laps), 128).plan(True)
        for count, laps in ((32, 1), (65, 1), (65, 2))
    )
    lap = CHAINED.lap * H200["alu.latency_cycles"] + H200["l2.latency_cycles"]
    assert more - few == pytest.approx(2 * lap) and twice - more == pytest.approx(3 * lap)
    assert lap < CHAINED.lap * far_cycles(H200) + H200["hbm.latency_cycles"]
    run = evaluate_step(dense("40x4096,1x512:4096"), H200, shipped_pair(dense("40x4096,1x512:4096"), H200), 1500.0)
    alone = evaluate_step(dense("8x4096,1x512:4096"), H200, shipped_pair(dense("8x4096,1x512:4096"), H200), 1500.0)
    first = [one.launches[1].costs.first_start for one in (run, alone)]
    assert first[0] - first[1] == pytest.approx(2 * lap)


def test_a_first_tile_fetches_the_loops_that_it_runs_through() -> None:
    """Its first block stands before them all; a window's left edge has a loop where some sequence has keys beyond it."""
    heads, found = replace(HEADS, mask="window", window=(1000, 0)), []
    for keys in (60, 900, 1400):
        batch = Batch(((20, keys),) * 4, heads, 64)
        dealt = replace(dealing(shipped_pair(batch, H200)[-1], heads), parting=None)
        found.append(_loops(batch, dealt, batch_items(batch, dealt)))
    assert found == [Loops(0.0, 0.0, 0.0), Loops(0.0, 1.0, 0.0), Loops(1.0, 1.0, 1.0)]


def test_kernels_of_few_rows_at_256_columns_fetch_code_of_their_own() -> None:
    """Q of 64 rows is copied by threads before the first keys, and the loop is three times as long as at 128."""
    dealt = [dealing(HopperServingVariant(), replace(HEADS, head_dim_qk=n, head_dim_v=n)) for n in (128, 256)]
    assert [d.counts for d in dealt] == [COPY_ENGINE, COPY_ENGINE_WIDE]
    narrow, wide = (Around(H200, counts, 64) for counts in (COPY_ENGINE, COPY_ENGINE_WIDE))
    assert wide.plan(True) + wide.set_up(16, True) > narrow.plan(True) + narrow.set_up(16, True) + 4000.0
    assert narrow.first_time(128, Loops()) == 0.0
    assert wide.first_time(256, Loops()) == pytest.approx(COPY_ENGINE_WIDE.looped * far_cycles(H200))


def test_programs_of_one_split_fetch_their_loop_and_look_longer_for_several_queries() -> None:
    one, several = (
        launched(HopperRunsVariant(), Batch(((queries, 900),) * 4, HEADS, 64), 132).counts for queries in (1, 3)
    )
    assert (one, several.looped) == (COPY_ENGINE_HALF_RUNS, COPY_ENGINE_RUNS.looped)
    assert several.set_up == one.set_up + COPY_ENGINE_SEVERAL


def test_power_holds_the_clock_of_a_short_launch_as_that_of_a_long_one() -> None:
    """Tiles of one round, of four and of sixteen: no block is multiplied at a higher clock because the launch is over sooner."""
    clocks = []
    for requests in ("1x512:12288", "1x2048:12288", "1x8192:12288"):
        batch = dense(requests)
        (launch,) = evaluate_step(batch, H200, shipped_pair(batch, H200), "short").launches
        clocks.append(launch.clock.mhz)
    assert max(clocks) < 1.03 * min(clocks) and max(clocks) < 0.85 * H200["chip.clock_max_mhz"]
    # Few SMs that multiply draw little, whatever each does.
    batch = Batch(((512, 12288),), replace(dense("1x1").heads, heads_q=4, heads_kv=1), 64)
    (launch,) = evaluate_step(replace(batch, lengths=((512, 700),)), H200, shipped_pair(batch, H200), "short").launches
    assert launch.clock.mhz > 1.1 * max(clocks)


def test_of_more_sequences_a_load_warp_adds_up_more_before_its_first_copy() -> None:
    """Further turns run through code that has come already, and wait for lengths from memory."""
    few, many, more, most = (AroundRuns(H200, shares_of(count), 16).plan(True) for count in (32, 33, 129, 257))
    assert shares_of(33) == shares_of(128) and few < many < more
    assert most - more == pytest.approx(more - many) and more - many < shares_of(129).turn * far_cycles(H200)
    assert more - many > H200["hbm.latency_cycles"]


def test_a_run_of_splits_sums_up_between_them() -> None:
    """A program that takes in four splits one after the other runs through the code behind a split three times more, and leaves one part."""
    batch = dense("64x8192")
    (launch,) = evaluate_step(batch, H200, (shipped_pair(batch, H200)[0],), 1500.0).launches
    items, costs = launch.items, launch.costs
    assert items is not None and items.joins is not None and int(items.joins.max()) == 15
    without = play(items, replace(costs, join=0.0))
    assert play(items, costs).end > without.end and costs.join < costs.finish < costs.hand_over


def test_a_merge_of_runs_takes_8_rows_at_a_time_or_4_in_all() -> None:
    around = AroundRuns(H200, shares_of(1), 16)
    four, eight, nine, sixteen = (around.merge(16, rows, HEADS, 1) for rows in (4, 8, 9, 16))
    assert four < eight < nine < sixteen
    back = 16 * 8 * 128 * 4 / H200["l2.bytes_per_clk_per_sm"]
    assert sixteen - nine == pytest.approx(back * 7 / 8)
    # Groups of 16 come side by side, and then they: what is merged again is short.
    assert around.merge(32, 8, HEADS, 1) == pytest.approx(around.merge(17, 8, HEADS, 1))
    assert eight < around.merge(32, 8, HEADS, 1) < 2.5 * eight


def test_prefill_takes_its_loop_from_machine_code_where_one_is_at_hand() -> None:
    """Three warpgroups at head_dim 64: longer than the fluid model's; a block at the diagonal has a loop of its own, which costs as much again
    as half a block."""
    batch = Batch(parse_requests("1x4096:4096"), replace(HEADS, head_dim_qk=64, head_dim_v=64))
    launch = evaluate_step(batch, H200, shipped_pair(batch, H200), 1500.0).launches[-1]
    assert launch.costs.periods[0] > 1.05 * launch.trace.ii_cycles
    assert 0.4 * launch.costs.periods[0] < launch.costs.masked < launch.costs.periods[0]


def test_forms_of_prefill_that_part_keys_have_loops_and_ends_of_their_own() -> None:
    """Dealt out, or in turn beside such as are: the compiler's other forms of the file, by how many warpgroups it has."""
    heads = replace(HEADS, head_dim_qk=64, head_dim_v=64)
    whole, dealt, chained = (
        next(launch for launch in run.launches if launch.items and getattr(launch.variant, "warpgroups", 0) == 3)
        for batch in (Batch(parse_requests(x), heads) for x in ("64x50:1000", "1x128:32768", "1x4096:4096,1x100:3000"))
        for run in [evaluate_step(batch, H200, shipped_pair(batch, H200), 1500.0)]
    )
    assert whole.dealt.parting is None and not dealt.dealt.chained and chained.dealt.chained
    period = whole.costs.periods[0]
    parted, in_turn = of_warpgroups(PARTED, 3), of_warpgroups(CHAINED, 3)
    assert dealt.costs.periods[0] == pytest.approx(period * parted.loop(64))
    assert chained.costs.periods[0] == pytest.approx(period * in_turn.loop(64))
    assert (
        1.05 < parted.loop(64) < in_turn.loop(64) < 1.2 and of_warpgroups(PREFILL, 3).loop(64) == in_turn.loop(4) == 1.0
    )
    # One warpgroup's loop is the same code; a launch of its own that merges leaves the others less of it.
    assert of_warpgroups(PARTED, 1).loop(64) == pytest.approx(1.0, abs=0.01)
    assert dealt.dealt.joined and dealt.dealt.counts.around_parts == AROUND_PARTS[64][1]
    assert chained.dealt.counts.around_parts == AROUND_PARTS[64][0]


def test_soft_caps_lengthen_blocks() -> None:
    for requests in ("64x8192", "1x4096:4096"):
        plain, bent = (
            evaluate_step(batch, H200, shipped_pair(batch, H200), 1500.0).launches[-1].costs.periods[0]
            for batch in (replace(dense(requests), capped=capped) for capped in (False, True))
        )
        assert bent > 1.05 * plain  # of few rows half a tile's are bent


def test_a_load_warp_copies_16_rows_of_q_at_a_time_and_a_box_of_a_page() -> None:
    around = AroundTiles(H200, PREFILL, 128)
    each = H200["alu.latency_cycles"]
    assert around.load_queries(256) - around.load_queries(128) == pytest.approx(8 * 2 * PREFILL.load_piece * each)
    assert around.load_item(64) - around.load_item(0) == pytest.approx(H200["hbm.latency_cycles"])
    # K and V of 128 columns: two boxes each for every page of a block.
    box = H200["tma.issue_cycles"]
    assert around.load_block(16, 64, 512) - around.load_block(64, 64, 512) == pytest.approx(3 * 4 * box)
    assert around.load_block(256, 64, 512) == around.load_block(0, 64, 512)
    # Beside nobody a load warp's instructions follow each other sooner; of bytes a box has twice as many columns.
    apart = Around(H200, COPY_ENGINE_RUNS, 16)
    assert apart.load_block(16, 64, 512) == pytest.approx(COPY_ENGINE_RUNS.load_block * WARM + 16 * box)
    assert apart.load_block(16, 64, 256) == pytest.approx(COPY_ENGINE_RUNS.load_block * WARM + 8 * box)
    assert Around(H200, COPY_ENGINE, 64).load_block(16, 64, 512) == 0.0


def test_small_pages_hold_up_what_few_programs_read() -> None:
    """A block of 64 keys takes 16 copies in pages of 16 and 4 in pages of 64 and more, which a program's products take longer than."""
    for requests, heads in (("1x2048:8192", HEADS), ("40x4096,1x2048:4096", HEADS)):
        paces = []
        for page in (16, 64, 128):
            batch = Batch(parse_requests(requests), heads, page)
            run = evaluate_step(batch, H200, shipped_pair(batch, H200), 1500.0)
            paces.append([launch.costs.periods[0] for launch in run.launches])
        assert all(small > usual for small, usual in zip(paces[0], paces[1], strict=True)) and paces[1] == paces[2]


@given(
    queries=st.integers(1, 90), more=st.integers(0, 700), group=st.sampled_from([1, 3, 4, 6, 16]), left=st.sampled_from([-1, 0, 63, 100, 300])
)  # fmt: skip
def test_masked_blocks_of_a_tile_are_those_that_its_last_warpgroup_sees_in_part(queries, more, group, left) -> None:
    keys = queries + more
    heads = replace(HEADS, heads_q=8 * group, heads_kv=8)
    if left >= 0:
        heads = replace(heads, mask="window", window=(left, 0))
    asked = Batch(((queries, keys),), heads, 64)
    prefill = replace(dealing(hopper_prefill.HopperPrefillVariant(), heads), parting=None)
    found = of_sequence(prefill, heads, *asked.lengths[0])
    expected = []
    rows = np.arange(queries * group)
    for tile in reversed(range(-(-len(rows) // prefill.tile_m))):
        mine = rows[tile * prefill.tile_m : (tile + 1) * prefill.tile_m]
        last = mine[(len(mine) - 1) // 64 * 64 :] // group + more
        seen = (np.arange(keys) <= last[:, None]) & ((left < 0) | (np.arange(keys) >= last[:, None] - left))
        blocks = [seen[:, at : at + 64] for at in range(0, int(last.max()) + 1, 64)]
        expected.append(sum(bool(block.any() and (not block.all() or block.shape[1] < 64)) for block in blocks))
    assert found.masked.tolist() == expected


def test_who_joins_what_was_done_apart_comes_to_that_code_for_the_first_time() -> None:
    """In turns: each program of a tile after the one before."""
    (launch,) = evaluate_step(mla("30x8192"), H200, shipped_pair(mla("30x8192"), H200), 1500.0).launches
    costs, items = launch.costs, launch.items
    assert items is not None and items.joining is not None and min(costs.join_again, costs.join_on) > 0.0
    # 42 runs of 4 splits, two to a tile; then 3, 3, 2 | 1, 3, 3, 1 | 2, 3, 3.
    assert items.joining[::2].tolist()[42:50] == [0, 1, 2, 1, 2, 3, 1, 2]
    # A run of 4 splits ends last, the second one of its tile; where each turn takes long, one that is the third.
    without, long = (play(items, replace(costs, join_on=each)).end for each in (0.0, 1e6))
    assert play(items, costs).end - without == pytest.approx(costs.join_on)
    assert 2e6 < long - without <= 3e6
    none = play(items, replace(costs, join_again=0.0))
    assert play(items, costs).end - none.end == pytest.approx(costs.join_again)


def test_code_behind_the_loop_is_fetched_from_far_where_no_program_comes_to_it_twice() -> None:
    once, again = (Around(H200, COPY_ENGINE_RUNS, 16, once=one) for one in (True, False))
    each = far_cycles(H200) - H200["alu.latency_cycles"]
    assert once.hand_over(128, 8) - again.hand_over(128, 8) == pytest.approx(COPY_ENGINE_RUNS.finish * each)
    assert once.merge(16, 8, HEADS, 1) - again.merge(16, 8, HEADS, 1) == pytest.approx(
        COPY_ENGINE_RUNS.merge_step * each
    )
    # Of several turns the first.
    assert once.merge(16, 64, HEADS, 1) - again.merge(16, 64, HEADS, 1) == pytest.approx(
        COPY_ENGINE_RUNS.merge_step * each
    )


def test_written_data_goes_back_as_reads_take_its_place() -> None:
    """Half of what L2 holds at most, however much is read; what reads nothing brings nothing back."""

    def more(requests: str) -> float:
        batch = dense(requests)
        pair = shipped_pair(batch, H200)
        return sum(
            s * evaluate_step(batch, H200, pair, "short", written).seconds for s, written in ((1, True), (-1, False))
        )

    whole = 0.5 * H200["l2.bytes"] / (H200["hbm.tbps_achieved"] * 1e12)
    assert more("64x8192") == pytest.approx(whole, rel=0.1) and more("64x16384") == pytest.approx(whole, rel=0.1)
    assert 0.0 < more("32x256") < 0.6 * whole


def test_a_first_block_comes_from_memory_by_maps_that_no_cache_holds() -> None:
    def cycles(batch: Batch, **facts: float) -> float:
        changed = H200.with_facts(
            {name.replace("__", "."): H200[name.replace("__", ".")] + more for name, more in facts.items()}
        )
        (launch,) = evaluate_step(batch, changed, shipped_pair(batch, H200)[:1], 1500.0).launches
        return launch.played.end

    # A map and keys; what waits for the memory in each of its blocks waits for keys there.
    latents, bytes_each = mla("1x1024"), replace(dense("1x16"), cache="e4m3")
    many, several = mla("64x1024"), mla("64x2:1024")
    assert cycles(many, tma__latency_hbm_cycles=100.0) - cycles(many) == pytest.approx(200.0)
    # Of few rows all parts of the heads ask for a block at the same time: those behind the first three wait as well, three at a time.
    assert cycles(latents, tma__latency_hbm_cycles=100.0) - cycles(latents) > 200.0
    assert cycles(bytes_each, tma__latency_hbm_cycles=100.0) - cycles(bytes_each) == pytest.approx(200.0)
    # Lengths of the sequences, and numbers of pages; Q is there before the first block, but of several queries in 64 rows after it.
    for batch, latencies in ((latents, 2), (many, 2), (several, 3)):
        assert cycles(batch, hbm__latency_cycles=100.0) - cycles(batch) == pytest.approx(100.0 * latencies)


def test_products_slow_the_clock_in_a_small_part_of_the_time() -> None:
    """Measured beside products plus C: nearly all of it from a tenth of the time on."""
    batch = mla("1x8192", 16)
    (light,) = evaluate_step(batch, H200, shipped_pair(batch, H200), "short").launches
    slowed = 1980.0 * H200["power.tensor_clock_share"]
    assert light.clock.bound == "boost" and slowed < light.clock.mhz < 1980.0
    (more,) = evaluate_step(mla("1x8192"), H200, shipped_pair(mla("1x8192"), H200), "short").launches
    assert more.clock.mhz == pytest.approx(slowed)


# --- loops and refusals --------------------------------------------------------------------------------------------


def test_loops_are_no_faster_than_their_bounds() -> None:
    """Machine code of the latent kernel, simulated (`tilecast forecast`): 3,107 cycles a block on 2026-11-27, and of 8, 16 and 32 rows 1,635,
    2,011 and 2,455 a day later."""
    of_latent = latent.build(MLA, hopper_mla.HopperMlaVariant(), H200)
    # Keys from L2, as the simulator of machine code has them.
    near = H200.with_facts({"tma.latency_hbm_cycles": H200["tma.latency_l2_cycles"]})
    of_few_rows = [
        latent.build_turned(MLA, hopper_mla.turned(hopper_mla.HopperMlaVariant(), rows, apart), near)
        for apart in (True, False)
        for rows in hopper_mla.TURNED_ROWS
    ]
    of_bytes = [loop(HEADS, HopperServingE4m3Variant(tile_n=n), H200, 1) for n in (64, 128)]
    for made in (of_latent, *of_few_rows, *of_bytes):
        assert steady_state(made).ii_cycles >= bounds(made).ii_lower - 1e-6
    assert steady_state(of_latent).ii_cycles == pytest.approx(3107, rel=0.01)
    for made, cycles in zip(of_few_rows, (1635, 2011, 2455), strict=False):
        assert steady_state(made).ii_cycles == pytest.approx(cycles, rel=0.06)
    # 481 instructions of a warp in the machine code of Triton 3.6, but for blocks at an edge.
    assert of_bytes[1].demand()["issue"] == pytest.approx(481, rel=0.05)
    short, long = (steady_state(made).ii_cycles for made in of_bytes)
    assert short < long < 2 * short


@pytest.mark.parametrize(
    ("batch", "machine", "sentence"),
    [
        (Batch(((1, 8),), HEADS, 64, cache="e4m3"), "b200", "e4m3 caches are forecast on H100 and H200 only"),
        (mla("1x8"), "a100", "latent caches are forecast on H100 and H200 only"),
        (Batch(((512, 4096),), HEADS, 64, cache="e4m3"), "h200", "sequences of 2048 rows .* expected at most 32"),
    ],
)
def test_what_is_not_forecast_is_refused(batch: Batch, machine: str, sentence: str) -> None:
    with pytest.raises(PredictError, match=sentence):
        forecast_step(batch, machine)


def test_requests_to_add_that_are_not_forecast_are_refused() -> None:
    with pytest.raises(PredictError, match=r"sequences of 2048 rows .* expected at most 32"):
        forecast_step(Batch(((1, 8),), HEADS, 64, cache="e4m3"), H200, next_request=((512, 512),))


def test_batches_that_make_no_sense() -> None:
    with pytest.raises(
        WorkloadError, match="cache: expected e4m3, or nothing for caches with the dtype of q, got 'int8'"
    ):
        Batch(((1, 8),), HEADS, cache="int8")
    with pytest.raises(
        WorkloadError,
        match="latent: expected one key head with the dtype of q and V as its first columns, as in 576/512, got 8 key heads",
    ):
        Batch(((1, 8),), HEADS, latent=True)
    with pytest.raises(VariantError, match="with families mla-hopper, got 'serving'"):
        named_pair("family=serving", mla("1x8"), H200)


def test_heads_of_fewer_columns_take_the_time_of_the_kernel_s_own_and_the_bytes_of_theirs() -> None:
    wide, narrow = (
        forecast_step(
            Batch(((1, 8192),) * 32 + ((300, 4000),), replace(HEADS, head_dim_qk=dim, head_dim_v=dim), 64), H200
        )
        for dim in (128, 96)
    )
    assert [launch.variant for launch in wide.run.launches] == [launch.variant for launch in narrow.run.launches]
    assert [launch.trace.ii_cycles for launch in wide.run.launches] == [
        launch.trace.ii_cycles for launch in narrow.run.launches
    ]
    assert 0.74 < narrow.run.hbm_bytes / wide.run.hbm_bytes < 0.77 and narrow.seconds < wide.seconds
