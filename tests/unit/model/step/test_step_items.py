"""Items of a serving kernel: what they cover, how they are split, against brute force and against the generated kernels' own words."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paths import ROOT

from tilecast.codegen.portable.serving import context
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.variants.hopper.prefill import HopperPrefillVariant
from tilecast.model.kernel.variants.hopper.serving import HopperServingVariant
from tilecast.model.kernel.variants.serving import ServingVariant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.step.batch import Batch, parse_requests
from tilecast.model.step.costs.around import POINTERS, Around
from tilecast.model.step.evaluate import evaluate_step
from tilecast.model.step.forecast import named_pair, shipped_pair
from tilecast.model.step.items import batch_items, of_sequence, sequence_items
from tilecast.model.step.launches.dealing import Dealing
from tilecast.model.step.launches.variant import dealing

HEADS = Workload(heads_q=32, heads_kv=8, seqlen_q=1, head_dim_qk=128, mask="causal")
DECODES, PREFILLS = (
    ServingVariant(),
    ServingVariant(tile_m=128, warps=8, split_keys=2048, most_splits=32, programs=1),
)
DECODE, PREFILL = (dealing(variant, HEADS) for variant in (DECODES, PREFILLS))
FAR = 1 << 29


@given(
    seqlen_q=st.integers(1, 40), more=st.integers(0, 300), group=st.integers(1, 8), left=st.sampled_from([FAR, 0, 7, 64]),
    right=st.sampled_from([0, 3, FAR]), tile_m=st.sampled_from([16, 32]), most=st.sampled_from([1, 4, 128]), even=st.booleans(),
)  # fmt: skip
def test_every_visible_key_of_a_row_is_in_exactly_one_item(
    seqlen_q, more, group, left, right, tile_m, most, even
) -> None:
    seqlen_k, tile_n, split = seqlen_q + more, 16, 32
    dealt = Dealing(1, FAR, tile_m, tile_n, split, 0, most, even, 1, 1, 4, False, POINTERS)
    one = sequence_items(seqlen_q, seqlen_k, group, left, right, dealt)
    assert len(one.blocks) == one.tiles * one.splits
    # Where the items begin, as the kernel says it: splits one after another from the first key that any row sees.
    first = max(seqlen_k - seqlen_q - left, 0) // tile_n * tile_n
    for row in range(0, seqlen_q * group, max(1, seqlen_q * group // 7)):
        query, tile = row // group, row // tile_m
        visible = range(max(0, query + more - left), min(seqlen_k, query + more + right + 1))
        place = one.tiles - 1 - tile
        keys = one.keys[place * one.splits : (place + 1) * one.splits]
        low = tile * tile_m // group
        begin = max(max(low + more - left, 0) // tile_n * tile_n, first)
        # Items of a tile lie one after another, without a gap.
        assert begin <= (visible[0] if visible else begin)
        assert keys.sum() >= (visible[-1] + 1 - begin if visible else 0)
    assert (one.blocks * tile_n >= one.keys).all() and ((one.blocks - 1) * tile_n < one.keys).all()
    assert one.splits <= max(1, most)


def test_splits_are_of_fixed_length_and_longer_where_there_would_be_too_many() -> None:
    def shape(keys: int) -> tuple[int, int]:
        one = of_sequence(DECODE, HEADS, 1, keys)
        return one.splits, one.split_keys

    assert shape(512) == (1, 512)
    assert shape(513) == (2, 512)
    assert shape(8192) == (16, 512)
    assert shape(65536) == (128, 512)
    assert shape(65537) == (65, 1024)
    assert shape(131072) == (128, 1024)


def test_more_rows_than_a_tile_are_not_split() -> None:
    one = of_sequence(PREFILL, HEADS, 512, 4096)
    assert (one.tiles, one.splits) == (512 * 4 // 128, 1)
    # Late rows come first and see the most keys; a tile has 32 queries.
    assert one.keys.tolist() == [4096 - 32 * tile for tile in range(16)]


def test_items_of_a_sequence_do_not_depend_on_its_company() -> None:
    alone = batch_items(Batch(((1, 5000),), HEADS), DECODE)
    company = batch_items(Batch(((1, 77), (1, 5000), (1, 130000)), HEADS), DECODE)
    assert alone is not None and company is not None
    first = 8  # items of 77 keys: one a head
    assert company.blocks[first : first + alone.count].tolist() == alone.blocks.tolist()


def test_a_kernel_takes_its_sequences_only() -> None:
    batch = Batch(parse_requests("2x8192,1x512:512,1x4:100"), HEADS)
    decode, prefill = batch_items(batch, DECODE), batch_items(batch, PREFILL)
    assert decode is not None and prefill is not None
    assert (decode.sequences, prefill.sequences) == (3, 1)
    assert batch_items(Batch(((1, 8),), HEADS), PREFILL) is None
    # 16 splits of each long one, whose 4 rows every split leaves for the last.
    assert decode.partial_rows == 2 * 8 * 16 * 4
    assert decode.span == (2 * 8192 + 100) * 8


def test_a_window_reads_what_it_sees() -> None:
    heads = Workload(heads_q=8, heads_kv=8, seqlen_q=1, head_dim_qk=64, mask="window", window=(100, 0))
    one = of_sequence(DECODE, heads, 1, 10_000)
    # The last query sees keys 9899 to 9999; reading begins at a whole block.
    assert int(one.keys.sum()) == 10_000 - 9899 // 64 * 64
    assert one.splits == 1


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("variant", [DECODES, PREFILLS, ServingVariant(warps=8), ServingVariant(most_splits=2)])
def test_merging_counts_as_the_generated_kernel_does(dim: int, variant: ServingVariant) -> None:
    kernel = context(variant, Workload(head_dim_qk=dim, head_dim_v=dim))
    around = Around(load_machine("h200-sxm"), POINTERS, variant.tile_m, variant.warps, variant.most_splits)
    assert (around.merged_rows, around.merged_splits(dim)) == (kernel.merged_rows, kernel.merged)


def test_hopper_s_splits_are_fixed_and_even_where_there_would_be_too_many() -> None:
    dealt = dealing(HopperServingVariant(), HEADS)
    assert (
        dealt.split_keys == 1024
        and dealt.most_splits == 16
        and dealing(HopperServingVariant(), replace(HEADS, heads_kv=1)).split_keys == 512
    )

    def shape(keys: int) -> tuple[int, list[int]]:
        one = of_sequence(dealt, HEADS, 1, keys)
        return one.splits, sorted(set(one.keys.tolist()), reverse=True)

    assert shape(1024) == (1, [1024])
    assert shape(1025) == (2, [1024, 1])
    assert shape(8192) == (8, [1024])
    # 16 splits of 64, 65 or 66 blocks of 64 keys; the last block has one.
    splits, keys = shape(66_561)
    assert splits == 16 and sum(of_sequence(dealt, HEADS, 1, 66_561).keys) == 66_561 and keys[0] - 64 <= keys[-2]


def test_hopper_s_two_kernels_take_every_sequence_once() -> None:
    decode, prefill = dealing(HopperServingVariant(), HEADS), dealing(HopperPrefillVariant(), HEADS)
    assert [decode.takes(n) + prefill.takes(n) for n in (1, 64, 65, 1 << 20)] == [1] * 4


@pytest.mark.parametrize("requests", ["1x8192", "64x1000", "200x3000", "7x2:513"])
@pytest.mark.parametrize("family", ["hopper", "triton"])
def test_programs_are_those_of_the_generated_launch(requests: str, family: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    if family == "hopper":
        from tilecast.kernels.generated import hopper_serve_d128_runs as module
    else:
        from tilecast.kernels.generated import triton_serve_decode_d128 as module

    lengths, machine = parse_requests(requests), load_machine("h200-sxm")
    batch = Batch(lengths, HEADS, page=64)
    pair = named_pair("family=serving", batch, machine) if family == "triton" else shipped_pair(batch, machine)
    queries, longest = lengths[0][0], max(keys for _, keys in lengths)

    def meta(*shape: int, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k = meta(len(lengths), queries, 32, 128), meta(4, 64, 8, 128)
    lists = (None, None, meta(len(lengths), dtype=torch.int32), meta(len(lengths), 4, dtype=torch.int32), *[None] * 4)
    grid, _, _ = module.plan(q, k, k, q, None, lists, queries, longest, (-1, 0), False, (1, 16), (None,) * 2, 132)
    assert evaluate_step(batch, machine, pair, "short").launches[0].programs == math.prod(grid)


def test_the_kernels_of_a_step_are_those_that_ship() -> None:
    from tilecast.model.kernel.header import read_header

    machine = load_machine("h200-sxm")
    for dims in ((64, 64), (128, 128), (192, 128), (256, 256)):
        heads = replace(HEADS, head_dim_qk=dims[0], head_dim_v=dims[1])
        name = "d" + "_".join(map(str, dict.fromkeys(dims)))
        names = (f"serve_{name}_runs", f"prefill_{name}_few", f"prefill_{name}")
        for kind, variant in zip(names, shipped_pair(Batch(((1, 8),), heads), machine), strict=True):
            file = ROOT / "kernels" / "generated" / f"hopper_{kind}.py"
            header = read_header(file.read_text(encoding="utf-8"), file)
            assert header["variant"] == variant_text(variant)
