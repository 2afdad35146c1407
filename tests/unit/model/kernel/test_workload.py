"""Workloads: validation, masks against brute force, FLOP conventions; presets and CSV files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast.model.chip.tiles import head_tiles
from tilecast.model.kernel.presets import preset, preset_names
from tilecast.model.kernel.shapes_csv import read_shapes
from tilecast.model.kernel.workload import Workload, WorkloadError


def brute_mask(w: Workload) -> np.ndarray:
    """Visible pairs of one head, from the definition."""
    i = np.arange(w.seqlen_q)[:, None] + w.seqlen_k - w.seqlen_q
    k = np.arange(w.seqlen_k)[None, :]
    visible = np.ones((w.seqlen_q, w.seqlen_k), dtype=bool)
    left, right = (-1, 0) if w.mask == "causal" else w.window or (-1, -1)
    if right >= 0:
        visible &= k <= i + right
    if left >= 0:
        visible &= k >= i - left
    return visible


masks = st.one_of(
    st.just(("none", None)),
    st.just(("causal", None)),
    st.tuples(st.just("window"), st.tuples(st.integers(-1, 40), st.integers(-1, 40))),
)
lengths = st.integers(1, 70)


@settings(max_examples=300, deadline=None)
@given(lengths, lengths, masks)
def test_pairs_equal_brute_force(sq: int, sk: int, mask: tuple) -> None:
    w = Workload(seqlen_q=sq, seqlen_k=sk, mask=mask[0], window=mask[1])
    assert w.exact_pairs() == int(brute_mask(w).sum())


@settings(max_examples=200, deadline=None)
@given(lengths, lengths, masks, st.sampled_from([8, 16]), st.sampled_from([8, 16]))
def test_tiles_cover_exactly_the_visible_blocks(sq: int, sk: int, mask: tuple, rows: int, keys: int) -> None:
    w = Workload(seqlen_q=sq, seqlen_k=sk, mask=mask[0], window=mask[1])
    tiles = head_tiles(w, rows, keys)
    visible = brute_mask(w)
    for index, (blocks, masked) in enumerate(zip(tiles.iterations, tiles.masked, strict=True)):
        part = visible[index * rows : (index + 1) * rows]
        columns = np.flatnonzero(part.any(axis=0))
        need = 0 if not columns.size else columns[-1] // keys - columns[0] // keys + 1
        assert blocks >= need  # never too few blocks: a visible key outside would be lost
        assert blocks - need <= 1
        whole = 0
        for block in range(-(-sk // keys)):
            piece = part[:, block * keys : (block + 1) * keys]
            whole += piece.shape[1] == keys and bool(piece.all())
        assert blocks - masked <= whole  # every block not entirely visible is treated as masked


@settings(max_examples=100, deadline=None)
@given(lengths, lengths, masks, st.integers(0, 69), st.integers(1, 70))
def test_key_range_is_the_hull_of_visible_keys(sq: int, sk: int, mask: tuple, low: int, count: int) -> None:
    w = Workload(seqlen_q=sq, seqlen_k=sk, mask=mask[0], window=mask[1])
    low = min(low, sq - 1)
    high = min(sq, low + count)
    columns = np.flatnonzero(brute_mask(w)[low:high].any(axis=0))
    first, last = w.key_range(low, high)
    if columns.size:
        assert first <= columns[0]
        assert last >= columns[-1] + 1


def test_flop_conventions() -> None:
    full = Workload(batch=2, heads_q=4, heads_kv=4, seqlen_q=1024, seqlen_k=1024)
    assert full.flops == 4 * 2 * 4 * 1024 * 1024 * 128
    causal = Workload(batch=2, heads_q=4, heads_kv=4, seqlen_q=1024, seqlen_k=1024, mask="causal")
    assert causal.flops == full.flops / 2
    assert causal.flops_exact == 4 * 2 * 4 * (1024 * 1025 // 2) * 128
    mla = Workload(heads_q=1, heads_kv=1, seqlen_q=16, seqlen_k=16, head_dim_qk=192, head_dim_v=128)
    assert mla.flops == 2 * 16 * 16 * 320


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch": 0}, "batch: expected at least 1, got 0"),
        ({"seqlen_q": -5}, "seqlen_q: expected at least 1, got -5"),
        ({"seqlen_k": 1.5}, "seqlen_k: expected a whole number, got 1.5"),
        ({"heads_q": 10, "heads_kv": 4}, "10 query heads do not divide among 4"),
        ({"dtype": "bf61"}, "got 'bf61'; did you mean bf16"),
        ({"mask": "casual"}, "did you mean causal"),
        ({"head_dim_qk": 130}, "head_dim_qk: expected a multiple of 8"),
        ({"mask": "window"}, "window: mask 'window' and window None"),
        ({"mask": "window", "window": (-2, 0)}, "two numbers of at least -1"),
    ],
)
def test_nonsense_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        Workload(**fields)


def test_dictionary_round_trip() -> None:
    w = Workload(mask="window", window=(127, 0), dtype="fp8", heads_q=8, heads_kv=2)
    assert Workload.from_dict(w.as_dict()) == w
    with pytest.raises(WorkloadError, match="unknown field 'heads'"):
        Workload.from_dict({"heads": 3})


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_workloads_with_a_source(name: str) -> None:
    p = preset(name)
    w = Workload(1, p.heads_q, p.heads_kv, p.seqlen, p.seqlen, p.head_dim_qk, p.head_dim_v, p.mask, p.window)
    assert w.flops > 0
    assert p.source


def test_known_presets() -> None:
    assert (preset("llama3-8b").heads_q, preset("llama3-8b").heads_kv, preset("llama3-8b").head_dim_qk) == (32, 8, 128)
    assert (preset("deepseek-v3").head_dim_qk, preset("deepseek-v3").head_dim_v) == (192, 128)
    with pytest.raises(WorkloadError, match=r"unknown preset 'lama3-8b'; did you mean llama3-8b"):
        preset("lama3-8b")


def test_csv_of_shapes(tmp_path: Path) -> None:
    path = tmp_path / "shapes.csv"
    path.write_text(
        'heads,seqlen,head_dim,causal,window,dtype,preset\n16,4096,128,1,,bf16,\n,2048,,,,fp8,llama3-8b\n8,512,64,,"127,0",,\n'
    )
    first, second, third = read_shapes(path)
    assert (first.mask, first.seqlen_k, first.heads_kv) == ("causal", 4096, 16)
    assert (second.heads_q, second.heads_kv, second.dtype, second.mask) == (32, 8, "fp8", "causal")
    assert (third.mask, third.window) == ("window", (127, 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heads,seqlen,head_dim\n16,4096,128\n16,x,128\n", "row 3: column 'seqlen': expected a whole number, got 'x'"),
        ("heads,seqlen,head_dim\n16,4096\n", "row 2: expected 3 fields, got 2"),
        ("heads,seqlen,head_dim,heads_kv\n10,64,64,3\n", "row 2: column 'heads': 10 query heads do not divide"),
        ("heads,sequence,head_dim\n1,1,1\n", "row 1: .*unknown column 'sequence'"),
        ("heads,seqlen,head_dim\n", "at least one row"),
        ("seqlen,preset\n512,nope\n", "row 2: unknown preset 'nope'"),
    ],
)
def test_bad_csv_rows_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "shapes.csv"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        read_shapes(path)


def test_missing_csv(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot read the shapes"):
        read_shapes(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("dtype", "text"), [("e5m2", "both 8-bit types are fp8"), ("mxfp8", "scales of blocks are neither")]
)
def test_other_names_of_8_bits_are_explained(dtype: str, text: str) -> None:
    with pytest.raises(WorkloadError, match=f"dtype: expected bf16, fp16, fp8, got '{dtype}': {text}"):
        Workload(dtype=dtype)
