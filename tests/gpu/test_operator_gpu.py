"""The shipped kernels on a GPU, through the operator: accuracy, and everything that must not change the result.

Accuracy is judged as the FlashAttention test-suite does: the largest error against float64 may be twice that of PyTorch's
own attention at the same dtype, or about one step of the dtype at the largest output, whichever is more.
"""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from support.attention import exact, plain  # noqa: E402
from support.problems import DIMS, DTYPES, MASKS, NAMES, NARROWER, POISON, bits, inputs, kernel_for, window_of  # noqa: E402
from support.sanitizer import assert_memcheck_finds_nothing  # noqa: E402

from tilecast.kernels import UnsupportedError, attention, registry  # noqa: E402
from tilecast.kernels.fallback import sdpa_attention, visible_keys  # noqa: E402

LENGTHS = [1, 7, 127, 129, 1000, 4097]
LSE_TOLERANCE = 5e-4


def check(q, k, v, window, record=None, kind="randn", scale=None):
    """Run, compare with float64 and with SDPA, record; returns (out, lse)."""
    entry = kernel_for(q, k, v, window)
    out, lse = attention(q, k, v, window=window, scale=scale, return_lse=True)
    expected, expected_lse = exact(q, k, v, window, scale)
    group = q.shape[1] // k.shape[1]
    # Repeated heads, so that SDPA takes a fused kernel also where it has a mask.
    wide_k, wide_v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    peer, _ = sdpa_attention(q, wide_k, wide_v, scale, *window, False)
    assert out.dtype == q.dtype and out.isfinite().all()
    error = (out.double() - expected).abs().max().item()
    peer_error = (peer.double() - expected).abs().max().item()
    # The FlashAttention test-suite's yardstick, kept for the record.
    plain_error = (plain(q, k, v, window, scale).double() - expected).abs().max().item()
    seen = expected_lse > -math.inf
    assert torch.equal(lse > -math.inf, seen)
    lse_error = (lse.double() - expected_lse)[seen].abs().max().item() if seen.any() else 0.0
    if record is not None:
        record(
            kernel=entry.module, head_dim=q.shape[3], head_dim_v=v.shape[3], dtype=NAMES[q.dtype],
            window_left=window[0], window_right=window[1], batch=q.shape[0], heads_q=q.shape[1], heads_kv=k.shape[1],
            seqlen_q=q.shape[2], seqlen_k=k.shape[2], inputs=kind, max_error=error, sdpa_max_error=peer_error,
            ratio=error / peer_error if peer_error else None, plain_max_error=plain_error, lse_max_error=lse_error,
        )  # fmt: skip
    step = torch.finfo(q.dtype).eps * expected.abs().max().item()
    assert error <= max(2 * peer_error, step), f"{entry.module}: error {error:.3g}, SDPA's own {peer_error:.3g}"
    assert lse_error <= LSE_TOLERANCE, f"{entry.module}: lse error {lse_error:.3g}"
    # A row that sees nothing gives exactly nothing.
    assert not out[~seen].any()
    return out, lse


# --- accuracy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seqlen", LENGTHS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_accuracy(dims, dtype, mask, seqlen, record) -> None:
    batch, heads, heads_kv = (2, 4, 2) if seqlen <= 1000 else (1, 2, 1)
    check(*inputs(batch, heads, heads_kv, seqlen, seqlen, *dims, dtype), window_of(mask, seqlen), record)


@pytest.mark.parametrize("seqlen", [7, 129, 1000, 2049])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("dims", NARROWER, ids=str)
def test_accuracy_of_narrower_heads(dims, dtype, mask, seqlen) -> None:
    """Columns beyond a head are NaN, and stay what they are."""
    tensors = inputs(2, 4, 2, seqlen, seqlen, *dims, dtype)
    window = window_of(mask, seqlen)
    out, lse = check(*tensors, window)
    wide = []
    for x in tensors:
        wide.append(x.new_full((*x.shape[:3], x.shape[3] + 16), math.nan))
        wide[-1][..., : x.shape[3]] = x
    again, sums = attention(*(x[..., : x.shape[3] - 16] for x in wide), window=window, return_lse=True)
    assert torch.equal(bits(again), bits(out)) and torch.equal(sums, lse)
    assert all(x[..., -16:].isnan().all() for x in wide)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("rows", "keys"), [(1, 512), (1, 8193), (5, 3001), (16, 640)])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_accuracy_of_few_queries(dims, rows, keys, mask) -> None:
    """These run on the serving kernels; heads last and heads first, and the bits of a sequence alone."""
    q, k, v = inputs(3, 8, 2, rows, keys, *dims, torch.bfloat16)
    window = window_of(mask, keys)
    out, lse = check(q, k, v, window)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    again, sums = attention(*turned, window=window, return_lse=True)
    alone, its_lse = attention(q[1:2], k[1:2], v[1:2], window=window, return_lse=True)
    assert torch.equal(bits(again), bits(out)) and torch.equal(sums, lse)
    assert torch.equal(bits(alone), bits(out[1:2])) and torch.equal(its_lse, lse[1:2])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [(22, 22), (50, 50), (16, 1687), (165, 512), (200, 77), (3, 1)], ids=str)
@pytest.mark.parametrize("dims", [*DIMS, (80, 80)], ids=str)
def test_accuracy_of_short_sequences_whose_heads_share_tiles(dims, lengths, mask) -> None:
    q, k, v = inputs(3, 32, 2, *lengths, *dims, torch.bfloat16)
    window = window_of(mask, max(lengths))
    out, lse = check(q, k, v, window)
    alone, its_lse = attention(q[1:2], k[1:2], v[1:2], window=window, return_lse=True)
    assert torch.equal(bits(alone), bits(out[1:2])) and torch.equal(its_lse, lse[1:2])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "lengths",
    [(1, 1), (7, 7), (2, 40), (50, 50), (256, 64), (20, 130), (60, 256), (9, 511), (5, 3), (20, 30), (40, 1500)],
    ids=str,
)
@pytest.mark.parametrize("heads", [(32, 2), (5, 5)], ids=str)
@pytest.mark.parametrize("dims", [*DIMS, (80, 80), (248, 248), (40, 24)], ids=str)
def test_accuracy_and_bits_of_short_sequences(dims, heads, lengths, mask) -> None:
    """Short sequences have kernels of their own on Hopper."""
    q, k, v = inputs(7, *heads, *lengths, *dims, torch.float16 if lengths[1] % 2 else torch.bfloat16)
    window = window_of(mask, max(lengths))
    out, lse = check(q, k, v, window)
    few, its_lse = attention(q[5:7], k[5:7], v[5:7], window=window, return_lse=True)
    assert torch.equal(bits(few), bits(out[5:7])) and torch.equal(its_lse, lse[5:7])
    turned, sums = attention(
        *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)), window=window, return_lse=True
    )
    assert torch.equal(bits(turned), bits(out)) and torch.equal(sums, lse)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [(20, 17), (50, 50), (60, 130), (33, 256)], ids=str)
@pytest.mark.parametrize("dims", [(256, 256), (240, 240), (192, 128)], ids=str)
def test_forms_of_many_programs_have_the_bits_of_few(dims, lengths, mask) -> None:
    """Kernels of short sequences of wide heads take less of an SM where programs are many."""
    q, k, v = inputs(60, 16, 4, *lengths, *dims, torch.bfloat16)
    window = window_of(mask, max(lengths))
    out, lse = check(q, k, v, window)
    for part in (slice(0, 1), slice(7, 15)):
        few, its_lse = attention(q[part], k[part], v[part], window=window, return_lse=True)
        assert torch.equal(bits(few), bits(out[part])) and torch.equal(its_lse, lse[part])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", [(64, 64), (40, 24), (128, 128), (96, 96)], ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "lengths"),
    [
        (70, (8, 1), (49, 1500)), (70, (16, 4), (20, 1337)), (70, (5, 5), (17, 1497)), (70, (8, 2), (90, 700)),
        (70, (6, 2), (25, 4200)), (70, (14, 2), (33, 2600)), (22, (20, 20), (18, 3700)), (50, (4, 1), (3, 600)), (50, (8, 1), (9, 5000)),
    ],
    ids=str,
)  # fmt: skip
def test_parts_of_keys_have_the_bits_of_all_in_turn(batch, heads, lengths, dims, mask) -> None:
    """Of few sequences the parts of the keys have programs of their own, of many a program takes them in turn, of some both."""
    q, k, v = inputs(batch, *heads, *lengths, *dims, torch.float16 if lengths[1] % 2 else torch.bfloat16)
    window = window_of(mask, max(lengths))
    out, lse = check(q, k, v, window)
    for part in (slice(0, 1), slice(batch - 1, batch), slice(7, 10), slice(2, 20)):
        few, its_lse = attention(q[part], k[part], v[part], window=window, return_lse=True)
        assert torch.equal(bits(few), bits(out[part])) and torch.equal(its_lse, lse[part])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("ratio", [1, 4, 8, 16])
def test_accuracy_of_grouped_heads(ratio, mask, record) -> None:
    check(*inputs(2, 16, 16 // ratio, 257, 257, 128, 128, torch.bfloat16, seed=ratio), window_of(mask, 257), record)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
@pytest.mark.parametrize(
    "lengths", [(1, 1000), (2, 129), (7, 4097), (127, 1000), (129, 64), (300, 7), (1000, 1), (1000, 127)], ids=str
)
def test_accuracy_of_unequal_lengths_and_empty_rows(dims, lengths, mask, record) -> None:
    check(*inputs(2, 4, 2, *lengths, *dims, torch.bfloat16), window_of(mask, max(lengths)), record)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (0, 0)], ids=str)
@pytest.mark.parametrize(("batch", "lengths"), [(2, (0, 5)), (2, (5, 0)), (2, (0, 700)), (0, (5, 5))], ids=str)
def test_empty_tensors(batch, lengths, heads, dims, mask) -> None:
    """A query that sees no key has a result of 0, and the logarithm of a sum of nothing."""
    q, k, v = inputs(batch, *heads, *lengths, *dims, torch.bfloat16)
    out, lse = attention(q, k, v, window=window_of(mask, 5), return_lse=True)
    assert out.shape == (*q.shape[:3], dims[1]) and lse.shape == q.shape[:3]
    assert bool((out == 0).all()) and bool((lse == float("-inf")).all())


@pytest.mark.parametrize(
    "window", [(0, 0), (1, 1), (64, 0), (300, 0), (-1, 5), (17, -1), (0, 200), (128, 128)], ids=str
)
@pytest.mark.parametrize("lengths", [(1000, 1000), (200, 1000), (700, 300)], ids=str)
def test_accuracy_of_windows(window, lengths, record) -> None:
    check(*inputs(1, 4, 2, *lengths, 128, 128, torch.bfloat16), window, record)


@pytest.mark.parametrize("kind", ["large", "rising"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_accuracy_of_peaked_scores(dims, mask, kind, record) -> None:
    check(*inputs(1, 4, 2, 1000, 1000, *dims, torch.bfloat16, kind=kind), window_of(mask, 1000), record, kind)


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_accuracy_of_other_scales(scale, record) -> None:
    check(*inputs(1, 4, 2, 300, 300, 128, 128, torch.bfloat16), (-1, 0), record, f"scale {scale}", scale=scale)


def test_every_shipped_kernel_of_this_gpu_is_covered_here() -> None:
    mine = [e for e in registry.shipped() if "bf16" in e.dtypes and e.runs_on(torch.cuda.get_device_capability())]
    assert mine, "no kernel ships for this GPU"
    assert {(e.head_dim_qk, e.head_dim_v) for e in mine} <= {*DIMS, *NARROWER}


# --- what must not leak ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_bad_query_row_stays_in_its_row(dims, mask, value) -> None:
    q, k, v = inputs(2, 4, 2, 300, 300, *dims, torch.bfloat16)
    window = window_of(mask, 300)
    kernel_for(q, k, v, window)
    clean = attention(q, k, v, window=window, return_lse=True)
    q[1, 2, 200, 5] = value
    dirty = attention(q, k, v, window=window, return_lse=True)
    for a, b in zip(clean, dirty, strict=True):
        same = torch.ones_like(a, dtype=torch.bool)
        same[1, 2, 200] = False
        assert torch.equal(a[same], b[same])
    # Scores of +-infinity leave no finite softmax unless they all are -infinity on keys that then do not count.
    assert not dirty[0][1, 2, 200].isfinite().any()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_bad_key_reaches_only_the_rows_that_see_it(dims, mask) -> None:
    q, k, v = inputs(2, 4, 2, 300, 300, *dims, torch.bfloat16)
    window = window_of(mask, 300)
    kernel_for(q, k, v, window)
    clean = attention(q, k, v, window=window)
    k[1, 0, 170] = math.nan
    dirty = attention(q, k, v, window=window)
    visible = visible_keys(300, 300, *window, "cuda")
    reached = torch.zeros(2, 4, 300, dtype=torch.bool, device="cuda")
    reached[1, :2] = True if visible is None else visible[:, 170]
    assert torch.equal(clean[~reached], dirty[~reached])
    assert dirty[reached].isnan().all()


@pytest.mark.parametrize("mask", MASKS)
def test_bad_value_reaches_no_other_head_and_no_far_row(mask) -> None:
    q, k, v = inputs(2, 4, 2, 1000, 1000, 128, 128, torch.bfloat16)
    window = window_of(mask, 1000)
    kernel_for(q, k, v, window)
    clean = attention(q, k, v, window=window)
    v[1, 0, 600] = math.nan
    dirty = attention(q, k, v, window=window)
    visible = visible_keys(1000, 1000, *window, "cuda")
    sees = torch.ones(1000, dtype=torch.bool, device="cuda") if visible is None else visible[:, 600]
    assert dirty[1, :2, sees].isnan().all()
    # Zero times NaN is NaN: rows that share a tile with a row that sees the key may be reached, further ones not.
    near = torch.nn.functional.max_pool1d(sees[None].float(), 513, 1, 256)[0] > 0
    reached = torch.zeros(2, 4, 1000, dtype=torch.bool, device="cuda")
    reached[1, :2] = near
    assert torch.equal(clean[~reached], dirty[~reached])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("lengths", [(129, 257), (257, 129), (1, 7)], ids=str)
def test_memory_around_the_tensors_is_neither_read_nor_written(dims, mask, lengths) -> None:
    d, dv = dims
    window = window_of(mask, max(lengths))
    q, k, v = inputs(2, 4, 2, *lengths, d, dv, torch.bfloat16)
    here, (_, left, right) = torch.cuda.get_device_capability(), registry.reduce_mask(*window, *lengths)
    shorts = registry.candidates(here, "bf16", d, dv, "window", registry.shipped_short())

    def framed(tensor_shape):
        batch, heads, seqlen, width = tensor_shape
        frame = torch.empty(batch, heads + 2, seqlen + 8, width + 8, dtype=torch.bfloat16, device="cuda")
        frame.view(torch.int16).fill_(POISON)
        return frame, frame[:, 1:-1, 4:-4, :width]

    views = []
    for tensor in (q, k, v):
        _, view = framed(tensor.shape)
        view.copy_(tensor)
        views.append(view)
    for entry in (kernel_for(q, k, v, window), *shorts):
        launch, limits = registry.launcher(entry), (left, right) if entry.mask == "window" else ()
        expected, expected_lse = q.new_empty(2, 4, lengths[0], dv), torch.empty(q.shape[:3], device="cuda")
        launch(q, k, v, expected, expected_lse, d**-0.5, *limits)
        frame, out = framed((2, 4, lengths[0], dv))
        sums = torch.full((expected_lse.numel() + 64,), math.nan, device="cuda")
        launch(*views, out, lse := sums[32:-32].view(expected_lse.shape), d**-0.5, *limits)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse), entry.module
        out.view(torch.int16).fill_(POISON)
        assert (frame.view(torch.int16) == POISON).all(), entry.module
        assert sums[:32].isnan().all() and sums[-32:].isnan().all(), entry.module


# --- what must not change the result ---------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_same_bits_every_run(dims, mask) -> None:
    q, k, v = inputs(3, 8, 2, 1000, 1000, *dims, torch.bfloat16)
    kernel_for(q, k, v, window_of(mask, 1000))
    first = attention(q, k, v, window=window_of(mask, 1000), return_lse=True)
    for _ in range(20):
        again = attention(q, k, v, window=window_of(mask, 1000), return_lse=True)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("lengths", [(1, 777), (300, 300)], ids=str)
def test_same_bits_whatever_else_is_in_the_batch(dims, mask, lengths) -> None:
    window = window_of(mask, max(lengths))
    q, k, v = inputs(40, 8, 2, *lengths, *dims, torch.bfloat16)
    kernel_for(q, k, v, window)
    together = attention(q, k, v, window=window)
    for part in (slice(0, 1), slice(17, 18), slice(5, 38), slice(39, 40)):
        assert torch.equal(bits(attention(q[part], k[part], v[part], window=window)), bits(together[part]))
    one_group = attention(q[:, 4:8], k[:, 1:], v[:, 1:], window=window)
    assert torch.equal(bits(one_group), bits(together[:, 4:8]))
    alone = attention(q[:, 6:7], k[:, 1:], v[:, 1:], window=window)
    assert torch.equal(bits(alone), bits(together[:, 6:7]))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_same_bits_for_every_layout(dims) -> None:
    d, dv = dims
    q, k, v = inputs(2, 4, 2, 300, 300, d, dv, torch.bfloat16)
    kernel_for(q, k, v, (-1, 0))
    expected, expected_lse = attention(q, k, v, causal=True, return_lse=True)
    swapped = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    out, lse = attention(*swapped, causal=True, layout="bshd", return_lse=True)
    assert out.is_contiguous() and torch.equal(out.transpose(1, 2), expected) and torch.equal(lse, expected_lse)
    packed = torch.cat([t.flatten(2) for t in swapped], dim=-1)
    views = packed.split([4 * d, 2 * d, 2 * dv], dim=-1)
    views = [t.unflatten(-1, (-1, width)).transpose(1, 2) for t, width in zip(views, (d, d, dv), strict=True)]
    assert torch.equal(attention(*views, causal=True), expected)
    odd_address = torch.cat([q.flatten()[:1], q.flatten()])[1:].view(q.shape)
    odd_rows = torch.nn.functional.pad(q, (0, 3))[..., :d]
    columns = q.transpose(2, 3).contiguous().transpose(2, 3)
    for other in (odd_address, odd_rows, columns):
        assert torch.equal(other, q) and torch.equal(attention(other, k, v, causal=True), expected)
    # Heads that are the same memory.
    one_k, one_v = k[:, :1], v[:, :1]
    spread = attention(q, one_k.expand(-1, 4, -1, -1), one_v.expand(-1, 4, -1, -1), causal=True)
    assert torch.equal(spread, attention(q, one_k, one_v, causal=True))


@pytest.mark.parametrize("mask", MASKS)
def test_torch_compile(mask) -> None:
    window = window_of(mask, 300)

    def layer(q, k, v):
        return attention(q + 0, k, v, window=window) * 2

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    for seqlen in (300, 301, 417):
        tensors = inputs(2, 4, 2, seqlen, seqlen, 128, 128, torch.bfloat16, seed=seqlen)
        kernel_for(*tensors, window)
        assert torch.equal(compiled(*tensors), layer(*tensors))


@pytest.mark.parametrize("mask", MASKS)
def test_cuda_graph(mask) -> None:
    window = window_of(mask, 300)
    q, k, v = inputs(2, 4, 2, 300, 300, 128, 128, torch.bfloat16)
    kernel_for(q, k, v, window)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attention(q, k, v, window=window)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attention(q, k, v, window=window, return_lse=True)
    for seed in (1, 2):
        for kept, new in zip((q, k, v), inputs(2, 4, 2, 300, 300, 128, 128, torch.bfloat16, seed), strict=True):
            kept.copy_(new)
        graph.replay()
        again = attention(q, k, v, window=window, return_lse=True)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


# --- beyond 32 bits --------------------------------------------------------------------------------------------


def test_more_elements_than_32_bits_count() -> None:
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    batch, heads, seqlen = 33, 64, 8192
    q = torch.empty(batch, heads, seqlen, 128, dtype=torch.bfloat16, device="cuda")
    assert q.numel() > 2**31
    q.normal_(generator=torch.Generator("cuda").manual_seed(0))
    _, k, v = inputs(batch, 1, 8, 1, seqlen, 128, 128, torch.bfloat16)
    kernel_for(q, k, v, (-1, 0))
    out = attention(q, k, v, causal=True)
    for b, h, rows in (
        (0, 0, slice(0, 64)),
        (31, 63, slice(8000, 8192)),
        (32, 0, slice(64, 128)),
        (32, 63, slice(8100, 8192)),
    ):
        # A cut of rows sees the keys up to its own end.
        part = [q[b : b + 1, h : h + 1, rows]] + [t[b : b + 1, h // 8 : h // 8 + 1, : rows.stop] for t in (k, v)]
        expected, _ = exact(*part, (-1, 0))
        peer, _ = sdpa_attention(*part, None, -1, 0, False)
        error, peer_error = (
            (x.double() - expected).abs().max().item() for x in (out[b : b + 1, h : h + 1, rows], peer)
        )
        assert error <= max(2 * peer_error, torch.finfo(q.dtype).eps * expected.abs().max().item())


def test_strides_beyond_32_bits() -> None:
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    q, k, v = inputs(2, 4, 4, 200, 200, 128, 128, torch.bfloat16)
    kernel_for(q, k, v, (-1, 0))
    storage = torch.empty(2, 2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    far = []
    for number, tensor in enumerate((q, k, v)):
        size = tensor[0].numel()
        begin = storage.shape[1] - (number + 1) * size
        far.append(storage[:, begin : begin + size].view(tensor.shape).copy_(tensor))
        assert far[-1].stride(0) > 2**31
    assert torch.equal(attention(*far, causal=True), attention(q, k, v, causal=True))


def test_refusals_on_the_gpu() -> None:
    q, k, v = inputs(1, 2, 2, 5, 5, 64, 64, torch.bfloat16)
    with pytest.raises(UnsupportedError, match="expected dtype"):
        attention(q.float(), k.float(), v.float())
    with pytest.raises(UnsupportedError, match="head_dim: expected at most that of a shipped kernel"):
        attention(*[torch.zeros(1, 2, 5, 264, device="cuda", dtype=torch.bfloat16)] * 3)
    with pytest.raises(ValueError, match="k: expected device cuda:0 as q has, got cpu"):
        attention(q, k.cpu(), v)
    assert attention(q.float(), k.float(), v.float(), fallback="sdpa").dtype == torch.float32


# --- the second launch of a shape ------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
def test_second_launch_of_a_shape_takes_the_new_tensors_scale_and_window(mask) -> None:
    shape = (2, 4, 2, 300, 300, 128, 128, torch.bfloat16)
    window = window_of(mask, 300)
    for seed, scale in ((1, None), (2, 0.3), (3, 0.05)):
        check(*inputs(*shape, seed=seed), window, scale=scale)
        q, k, v = inputs(*shape, seed=seed)
        assert torch.equal(attention(q, k, v, window=window), attention(q, k, v, window=window, return_lse=True)[0])
    if mask == "window":
        check(*inputs(*shape), (5, 100))
    # The same sizes in another memory order.
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs(*shape))
    check(q, k, v, window)


# --- memory errors ---------------------------------------------------------------------------------------------

SMALL_SHAPES = """
import torch, tilecast
torch.manual_seed(0)
for d, dv in {dims}:
    for window in ((-1, -1), (-1, 0), (17, 3)):
        for seqlen_q, seqlen_k, factor in ((129, 129, 30.0), (7, 130, 1.0)):
            q = factor * torch.randn(1, 2, seqlen_q, d, device="cuda")
            k, v = torch.randn(1, 1, seqlen_k, d, device="cuda"), torch.randn(1, 1, seqlen_k, dv, device="cuda")
            tilecast.attention(*(x.to(torch.bfloat16) for x in (q, k, v)), window=window, return_lse=True)
            torch.cuda.synchronize()
"""


def test_compute_sanitizer_finds_nothing() -> None:
    served = registry.head_dims(torch.cuda.get_device_capability(), "bf16", "none")
    # Scores 30 times larger than usual move references of the Hopper kernels, also by scores that overflow.
    assert_memcheck_finds_nothing(SMALL_SHAPES.format(dims=[pair for pair in DIMS if pair in served]))


# --- every kernel, also those that a better one hides ----------------------------------------------------------


def here(shipped=registry.shipped):
    """Entries that run on this GPU; none without one (tests are collected everywhere)."""
    if not torch.cuda.is_available():
        return []
    return [
        entry for entry in shipped() if "bf16" in entry.dtypes and entry.runs_on(torch.cuda.get_device_capability())
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("entry", [*here(), *here(registry.shipped_short)], ids=lambda entry: entry.module)
def test_every_kernel_at_odd_lengths(entry, dtype) -> None:
    launch = registry.launcher(entry)
    window = {"none": (-1, -1), "causal": (-1, 0), "window": (3, 2)}[entry.mask]
    for seqlen_q, seqlen_k in ((256, 256), (129, 129), (7, 7), (1, 1), (1, 300), (300, 130)):
        # Which lengths a kernel of short sequences is given is not its own to say: it computes all.
        if entry.direction == "fwd" and not entry.seqlen_q_min <= seqlen_q <= entry.seqlen_q_max:
            continue
        q, k, v = inputs(2, 4, 2, seqlen_q, seqlen_k, entry.head_dim_qk, entry.head_dim_v, dtype)
        expected, _ = exact(q, k, v, window)
        out = torch.empty(expected.shape, dtype=dtype, device="cuda")
        for lse in (torch.empty(expected.shape[:3], device="cuda"), None):
            launch(q, k, v, out, lse, q.shape[3] ** -0.5, *(window if entry.mask == "window" else ()))
            bound = 4 * torch.finfo(dtype).eps * expected.abs().max().item()
            assert (out.double() - expected).abs().max().item() <= bound, (seqlen_q, seqlen_k)
