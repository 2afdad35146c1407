"""Gradients of the operator on a GPU: accuracy, and everything that must not change them.

Accuracy is judged as the FlashAttention test-suite does: the largest error against float64 may be twice that of the same
attention in PyTorch operations at the same dtype, and about one step of the dtype at the largest gradient.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import random

import pytest

torch = pytest.importorskip("torch")

from support.problems import DIMS, DTYPES, MASKS, NAMES, NARROWER, POISON, bits, entry_of, inputs, kernel_for, window_of  # noqa: E402
from support.sanitizer import assert_memcheck_finds_nothing  # noqa: E402

from tilecast.kernels import attention, registry  # noqa: E402
from tilecast.kernels.fallback import visible_keys  # noqa: E402


def in_operations(q, k, v, dout, dlse, window, scale, dtype):
    """(dq, dk, dv) of attention in PyTorch operations at ``dtype``; a row that sees no key gives nothing."""
    inputs_ = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (t.repeat_interleave(group, dim=1) for t in inputs_[1:])
    scores = inputs_[0] @ wide_k.mT * scale
    seen = visible_keys(q.shape[2], k.shape[2], *window, q.device)
    empty = torch.zeros(q.shape[2], 1, dtype=torch.bool, device=q.device)
    if seen is not None:
        empty = ~seen.any(-1, keepdim=True)
        scores = scores.masked_fill(~(seen | empty), -math.inf)
    out = torch.softmax(scores, -1).masked_fill(empty, 0.0) @ wide_v
    total = (out * dout.to(dtype)).sum()
    if dlse is not None:
        sums = torch.logsumexp(scores.to(torch.float32) if dtype != torch.float64 else scores, -1)
        total = total + (sums * dlse).masked_fill(empty[:, 0], 0.0).sum()
    return torch.autograd.grad(total, inputs_)


def check(q, k, v, window, *, scale=None, with_lse=False, record=None, kind="randn", deterministic=True):
    """Gradients against float64 and against PyTorch operations; returns them."""
    entry = backward_for(q, k, v, window)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = attention(*leaves, window=window, scale=scale, return_lse=True, deterministic=deterministic)
    generator = torch.Generator("cuda").manual_seed(9)
    dout = torch.randn(out.shape, generator=generator, device="cuda").to(q.dtype)
    dlse = torch.randn(lse.shape, generator=generator, device="cuda") if with_lse else None
    if with_lse:
        found = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    else:
        found = torch.autograd.grad(out, leaves, dout)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    expected = in_operations(q, k, v, dout, dlse, window, factor, torch.float64)
    peer = in_operations(q, k, v, dout, dlse, window, factor, q.dtype)
    rounding = cancelled(q, k, v, dout, factor)
    for name, mine, true, theirs in zip(("dq", "dk", "dv"), found, expected, peer, strict=True):
        assert mine.dtype == q.dtype and mine.isfinite().all(), f"{entry.module}: {name} is not finite"
        error = (mine.double() - true).abs().max().item()
        peer_error = (theirs.double() - true).abs().max().item()
        step = torch.finfo(q.dtype).eps * true.abs().max().item() + rounding * (name != "dv")
        if record is not None:
            record(
                kernel=entry.module, gradient=name, head_dim=q.shape[3], head_dim_v=v.shape[3], dtype=NAMES[q.dtype],
                window_left=window[0], window_right=window[1], batch=q.shape[0], heads_q=q.shape[1],
                heads_kv=k.shape[1], seqlen_q=q.shape[2], seqlen_k=k.shape[2], inputs=kind, max_error=error,
                plain_max_error=peer_error, ratio=error / peer_error if peer_error else None,
            )  # fmt: skip
        assert error <= 2 * peer_error + step, (
            f"{entry.module}: {name} {error:.3g}, PyTorch operations {peer_error:.3g}"
        )
    seen = visible_keys(q.shape[2], k.shape[2], *window, q.device)
    if seen is not None:
        # Exactly nothing, not almost.
        assert not found[0][:, :, ~seen.any(1)].any()
        assert not found[1][:, :, ~seen.any(0)].any() and not found[2][:, :, ~seen.any(0)].any()
    return found


def cancelled(q, k, v, dout, scale):
    """What is left of dS where dP equals D, as for a row that sees one key: the float32 rounding of two sums of dO V, times
    what it is multiplied with."""
    group = q.shape[1] // k.shape[1]
    sums = dout.float().abs() @ v.float().abs().repeat_interleave(group, dim=1).mT
    return torch.finfo(torch.float32).eps * sums.max().item() * max(q.abs().max(), k.abs().max()).item() * scale


def backward_for(q, k, v, window):
    """The backward pass that will run, or skip."""
    kernel_for(q, k, v, window)
    entry = entry_of(q, k, v, window, registry.shipped_backward())
    assert entry is not None, "a forward kernel without a backward pass"
    return entry


# --- accuracy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seqlen", [1, 7, 127, 129, 1000, 2049])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_accuracy(dims, dtype, mask, seqlen, record) -> None:
    batch, heads, heads_kv = (2, 4, 2) if seqlen <= 1000 else (1, 2, 1)
    check(*inputs(batch, heads, heads_kv, seqlen, seqlen, *dims, dtype), window_of(mask, seqlen), record=record)


@pytest.mark.parametrize("lengths", [(77, 300), (300, 77), (640, 640)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", NARROWER, ids=str)
def test_accuracy_of_narrower_heads(dims, mask, lengths) -> None:
    check(*inputs(2, 6, 2, *lengths, *dims, torch.bfloat16), window_of(mask, max(lengths)), with_lse=True)


@pytest.mark.parametrize("heads", [(7, 1), (12, 2), (16, 1), (48, 8)], ids=str)
@pytest.mark.parametrize("lengths", [(2048, 2048), (2778, 77), (700, 1500)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_accuracy_where_programs_take_parts_of_a_group(dims, mask, lengths, heads) -> None:
    tensors = inputs(1, *heads, *lengths, *dims, torch.bfloat16)
    found = check(*tensors, window_of(mask, max(lengths)))
    assert same_bits(found, check(*tensors, window_of(mask, max(lengths))))


@pytest.mark.parametrize("lengths", [(77, 300), (300, 77), (640, 640)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_accuracy_of_those_that_the_registry_prefers_for_other_lengths(dims, mask, lengths, monkeypatch) -> None:
    q, k, v = inputs(2, 4, 2, *lengths, *dims, torch.bfloat16)
    window = window_of(mask, max(lengths))
    entry = backward_for(q, k, v, window)
    known = registry.shipped_backward()
    best = max((e for e in known if e.covers(torch.cuda.get_device_capability(), "bf16", *dims, entry.mask)
                and lengths[0] <= e.seqlen_q_max and lengths[1] <= e.seqlen_k_max and lengths[0] * 4 // 2 <= e.rows_max),
               key=lambda e: (e.preference, e.mask == entry.mask))  # fmt: skip
    if best.module == entry.module:
        pytest.skip(f"{entry.module} runs all lengths")
    monkeypatch.setattr(registry, "shipped_backward", lambda: (dataclasses.replace(best, seqlen_q_min=0),))
    monkeypatch.setattr("tilecast.kernels.gradients.backward_kernels", {})
    monkeypatch.setattr("tilecast.kernels.selection.backward_kernels", {})
    check(q, k, v, window, with_lse=True)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("lengths", [(1, 1000), (129, 64), (300, 7), (1000, 127), (127, 1000)], ids=str)
def test_accuracy_of_unequal_lengths_empty_rows_and_unseen_keys(dims, lengths, mask) -> None:
    check(*inputs(2, 4, 2, *lengths, *dims, torch.bfloat16), window_of(mask, max(lengths)), with_lse=True)


@pytest.mark.parametrize("heads", [(71, 1), (12, 2), (5, 5)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_accuracy_of_one_query_whose_heads_are_rows(dims, mask, heads) -> None:
    """In any layout: the bits of one sequence are those of a batch, and those of the heads as queries of one."""
    q, k, v = inputs(3, *heads, 1, 300, *dims, torch.bfloat16)
    window = window_of(mask, 300)
    check(q, k, v, window, with_lse=True)
    dout = torch.randn_like(q[..., : v.shape[3]])
    whole = gradients(q, k, v, window, dout)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert same_bits(whole, gradients(*swapped, window, dout))
    assert same_bits([x[1:2] for x in whole], gradients(q[1:2], k[1:2], v[1:2], window, dout[1:2]))


@pytest.mark.parametrize("heads", [(7, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 65), (4, 3001), (9, 64), (64, 700), (9, 5), (24, 300)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", [*DIMS, (72, 72), (40, 40)], ids=str)
def test_accuracy_and_bits_of_few_queries(dims, mask, lengths, heads) -> None:
    """Of all heads that share keys in one tile, or of other kernels where there are more: the bits of a sequence are those of a batch."""
    q, k, v = inputs(3, *heads, *lengths, *dims, torch.bfloat16)
    window = window_of(mask, max(lengths))
    check(q, k, v, window, with_lse=True)
    dout = torch.randn_like(q[..., : v.shape[3]])
    whole = gradients(q, k, v, window, dout)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert same_bits(whole, gradients(*swapped, window, dout))
    for _ in range(5):
        assert same_bits(whole, gradients(q, k, v, window, dout))
    assert same_bits([x[1:2] for x in whole], gradients(q[1:2], k[1:2], v[1:2], window, dout[1:2]))


@pytest.mark.parametrize("heads", [(4, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("lengths", [(100, 5000), (300, 4096), (2048, 2048), (3000, 2900)], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 96)], ids=str)
def test_accuracy_and_bits_where_sums_go_by_chains(dims, mask, lengths, heads) -> None:
    """Few heads on many keys: so do those of one sequence whatever else is in the batch, in order or in any."""
    q, k, v = inputs(2, *heads, *lengths, *dims, torch.bfloat16)
    window = window_of(mask, max(lengths))
    check(q, k, v, window, with_lse=True)
    check(q, k, v, window, deterministic=False)
    dout = torch.randn_like(q[..., : v.shape[3]])
    whole = gradients(q, k, v, window, dout)
    for _ in range(20):
        assert same_bits(whole, gradients(q, k, v, window, dout))
    assert same_bits([x[1:2] for x in whole], gradients(q[1:2], k[1:2], v[1:2], window, dout[1:2]))


@pytest.mark.parametrize("lengths", [(100, 600), (70, 1900), (513, 1100)], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128)], ids=str)
def test_few_sequences_whose_blocks_have_sums_of_their_own_have_the_bits_of_many(dims, mask, lengths) -> None:
    """In a large batch blocks of keys add to dQ in turn, in a small one each has a sum: numbers that float32 hardly holds too."""
    q, k, v = inputs(48, 4, 2, *lengths, *dims, torch.bfloat16)
    window = window_of(mask, max(lengths))
    check(q[:2], k[:2], v[:2], window, with_lse=True)
    for size in (1.0, 2.0**-125):
        dout = size * torch.randn_like(q[..., : v.shape[3]])
        whole = gradients(q, k, v, window, dout)
        for batch in (slice(0, 1), slice(5, 8), slice(40, 48)):
            part = gradients(q[batch], k[batch], v[batch], window, dout[batch])
            assert same_bits([x[batch] for x in whole], part)


@pytest.mark.parametrize("heads", [(8, 1), (28, 4), (96, 8)], ids=str)
@pytest.mark.parametrize("seqlen", [80, 256, 500])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_accuracy_and_bits_of_short_sequences_whose_heads_share_keys(dims, mask, seqlen, heads) -> None:
    """Programs take parts of the heads, whatever else is in the batch."""
    q, k, v = inputs(3, *heads, seqlen, seqlen, *dims, torch.bfloat16)
    window = window_of(mask, seqlen)
    check(q, k, v, window, with_lse=True)
    dout = torch.randn_like(q[..., : v.shape[3]])
    whole = gradients(q, k, v, window, dout)
    for _ in range(20):
        assert same_bits(whole, gradients(q, k, v, window, dout))
    assert same_bits([x[1:2] for x in whole], gradients(q[1:2], k[1:2], v[1:2], window, dout[1:2]))


@pytest.mark.parametrize("ratio", [1, 4, 8, 16])
@pytest.mark.parametrize("mask", MASKS)
def test_accuracy_of_grouped_heads(ratio, mask) -> None:
    check(
        *inputs(2, 16, 16 // ratio, 257, 257, 128, 128, torch.bfloat16, seed=ratio), window_of(mask, 257), with_lse=True
    )


@pytest.mark.parametrize(
    "window", [(0, 0), (1, 1), (64, 0), (300, 0), (-1, 5), (17, -1), (0, 200), (128, 128)], ids=str
)
@pytest.mark.parametrize("lengths", [(1000, 1000), (200, 1000), (700, 300)], ids=str)
def test_accuracy_of_windows(window, lengths) -> None:
    check(*inputs(1, 4, 2, *lengths, 128, 128, torch.bfloat16), window, with_lse=True)


@pytest.mark.parametrize("kind", ["large", "rising"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_accuracy_of_peaked_scores(dims, mask, kind, record) -> None:
    check(*inputs(1, 4, 2, 500, 500, *dims, torch.bfloat16, kind=kind), window_of(mask, 500), record=record, kind=kind)


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_accuracy_of_other_scales(scale) -> None:
    check(*inputs(1, 4, 2, 300, 300, 128, 128, torch.bfloat16), (-1, 0), scale=scale)


@pytest.mark.parametrize("seed", range(100))
def test_random_problems(seed) -> None:
    draw = random.Random(seed)
    dims, dtype, mask = draw.choice(DIMS), draw.choice(DTYPES), draw.choice(MASKS)
    kv, group = draw.randint(1, 3), draw.choice([1, 1, 2, 3, 5])
    lengths = draw.randint(1, 700), draw.randint(1, 700)
    window = {"none": (-1, -1), "causal": (-1, 0)}.get(mask, (draw.randint(-1, 300), draw.randint(-1, 300)))
    check(
        *inputs(draw.randint(1, 3), kv * group, kv, *lengths, *dims, dtype, seed=seed), window, with_lse=bool(seed % 2)
    )


# --- what must not leak ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("lengths", [(129, 257), (257, 129), (1, 7)], ids=str)
def test_memory_around_the_tensors_is_neither_read_nor_written(dims, mask, lengths) -> None:
    d, dv = dims
    window = window_of(mask, max(lengths))
    q, k, v = inputs(2, 4, 2, *lengths, d, dv, torch.bfloat16)
    entry = backward_for(q, k, v, window)
    out, lse = attention(q, k, v, window=window, return_lse=True)
    dout = torch.randn_like(out)
    _, left, right = registry.reduce_mask(*window, *lengths)
    given = (left, right) if entry.mask == "window" else (-1, -1)
    launch = registry.launcher(entry)
    expected = [torch.empty_like(t) for t in (q, k, v)]
    launch(q, k, v, out, lse, dout, *expected, d**-0.5, *given)

    def framed(tensor):
        batch, heads, seqlen, width = tensor.shape
        frame = torch.empty(batch, heads + 2, seqlen + 8, width + 8, dtype=torch.bfloat16, device="cuda")
        frame.view(torch.int16).fill_(POISON)
        return frame, frame[:, 1:-1, 4:-4, :width].copy_(tensor)

    views = [framed(t)[1] for t in (q, k, v, out, dout)]
    frames = [framed(t) for t in (q, k, v)]
    sums = torch.full((lse.numel() + 64,), math.nan, device="cuda")
    padded = sums[32:-32].view(lse.shape).copy_(lse)
    launch(*views[:4], padded, views[4], *[view for _, view in frames], d**-0.5, *given)
    for (frame, view), true in zip(frames, expected, strict=True):
        assert torch.equal(view, true)
        view.view(torch.int16).fill_(POISON)
        assert (frame.view(torch.int16) == POISON).all()


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_a_bad_query_row_reaches_no_other_row_of_dq_and_no_other_head(dims) -> None:
    q, k, v = (t.requires_grad_() for t in inputs(2, 4, 2, 300, 300, *dims, torch.bfloat16))
    out = attention(q, k, v, causal=True)
    dout = torch.randn_like(out)
    clean = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    dout[1, 2, 200, 5] = math.nan
    dirty = torch.autograd.grad(out, (q, k, v), dout)
    same = torch.ones_like(clean[0], dtype=torch.bool)
    same[1, 2, 200] = False
    assert torch.equal(clean[0][same], dirty[0][same]) and dirty[0][1, 2, 200].isnan().all()
    for a, b in zip(clean[1:], dirty[1:], strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1, 0], b[1, 0]) and torch.equal(a[1, 1, 256:], b[1, 1, 256:])


@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (20, 20)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 300), (129, 129), (1000, 1000), (300, 2049), (2049, 300)], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_sums_of_any_order_are_as_accurate(dims, mask, lengths, heads) -> None:
    tensors, window = inputs(2, *heads, *lengths, *dims, torch.bfloat16), window_of(mask, max(lengths))
    found = check(*tensors, window, deterministic=False)
    # Of dK and dV every program has a part of its own.
    assert same_bits(found[1:], check(*tensors, window)[1:])


# --- what must not change the result -----------------------------------------------------------------------------------


def gradients(q, k, v, window, dout=None, **options):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = attention(*leaves, window=window, **options)
    if dout is None:
        dout = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(3), device="cuda").to(out.dtype)
    return torch.autograd.grad(out, leaves, dout)


def same_bits(a, b):
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_same_bits_in_100_runs(dims, mask) -> None:
    tensors = inputs(3, 8, 2, 1000, 1000, *dims, torch.bfloat16)
    first = gradients(*tensors, window_of(mask, 1000))
    for _ in range(100):
        assert same_bits(first, gradients(*tensors, window_of(mask, 1000)))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("lengths", [(1, 777), (300, 300), (1200, 1200)], ids=str)
def test_same_bits_whatever_else_is_in_the_batch(dims, mask, lengths) -> None:
    window = window_of(mask, max(lengths))
    q, k, v = inputs(40, 8, 2, *lengths, *dims, torch.bfloat16)
    dout = torch.randn(40, 8, lengths[0], dims[1], device="cuda").to(torch.bfloat16)
    together = gradients(q, k, v, window, dout)
    for part in (slice(0, 1), slice(17, 18), slice(5, 38)):
        assert same_bits(gradients(q[part], k[part], v[part], window, dout[part]), [t[part] for t in together])
    if lengths[0] > 1:
        return  # where a model of one key head may have programs take smaller parts of a group than one of two has
    dq, dk, dv = gradients(q[:, 4:8], k[:, 1:], v[:, 1:], window, dout[:, 4:8])
    assert same_bits((dk, dv), (together[1][:, 1:], together[2][:, 1:]))
    # dQ adds up parts of the keys, whose length may go by the number of key heads too.
    kernel = importlib.import_module(f"{registry.PACKAGE}.{backward_for(q, k, v, window).module}")
    tile = kernel.TILE_N.value, kernel.COLUMNS.value, kernel.multiprocessors(q.device.index)
    one, two = (kernel.part_keys(heads_kv, 4, lengths[1], *tile) for heads_kv in (1, 2))
    assert one != two or same_bits((dq,), (together[0][:, 4:8],))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_same_bits_for_every_layout(dims) -> None:
    q, k, v = inputs(2, 4, 2, 300, 300, *dims, torch.bfloat16)
    dout = torch.randn(2, 4, 300, dims[1], device="cuda").to(torch.bfloat16)
    expected = gradients(q, k, v, (-1, 0), dout)
    swapped = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    found = gradients(*swapped, (-1, 0), dout.transpose(1, 2), layout="bshd")
    assert all(t.is_contiguous() for t in found) and same_bits([t.transpose(1, 2) for t in found], expected)
    odd = torch.cat([dout.flatten()[:1], dout.flatten()])[1:].view(dout.shape)
    columns = dout.transpose(2, 3).contiguous().transpose(2, 3)
    for other in (odd, columns):
        assert same_bits(gradients(q, k, v, (-1, 0), other), expected)
    # Rows at whole 16 bytes, but not 32: Triton could read those another way.
    apart = [torch.nn.functional.pad(t, (0, 8))[..., : t.shape[3]] for t in (q, k, v, dout)]
    assert same_bits(gradients(*apart[:3], (-1, 0), apart[3]), expected)
    ones = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(dout.shape)
    assert same_bits(gradients(q, k, v, (-1, 0), ones), gradients(q, k, v, (-1, 0), ones.contiguous()))
    # Rows that start anywhere are copied, once for both passes, and gradients lie as their tensors do.
    wide = [torch.nn.functional.pad(t.transpose(1, 2), (0, 3))[..., : t.shape[3]] for t in (q, k, v)]
    for _ in range(2):  # as it is met, and as it is remembered
        found = gradients(*wide, (-1, 0), dout.transpose(1, 2), layout="bshd")
        assert all(t.is_contiguous() for t in found) and same_bits([t.transpose(1, 2) for t in found], expected)
    # Heads that are the same memory: TMA reads them through a stride of zero.
    spread = [t[:, :1].expand(-1, 4, -1, -1) for t in (k, v)]
    assert same_bits(
        gradients(q, *spread, (-1, 0), dout), gradients(q, *[t.contiguous() for t in spread], (-1, 0), dout)
    )


# --- with the rest of PyTorch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
def test_torch_compile(mask) -> None:
    window = window_of(mask, 300)

    def layer(q, k, v):
        out, lse = attention(q * 2, k, v, window=window, return_lse=True)
        return out.float().square().sum() + lse.sum()

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    for seqlen in (300, 301, 417):
        leaves = [t.requires_grad_() for t in inputs(2, 4, 2, seqlen, seqlen, 128, 128, torch.bfloat16, seed=seqlen)]
        found = torch.autograd.grad(compiled(*leaves), leaves)
        expected = torch.autograd.grad(layer(*leaves), leaves)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def test_activation_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    tensors = inputs(2, 4, 2, 300, 300, 128, 128, torch.bfloat16)
    expected = gradients(*tensors, (-1, 0), torch.ones(2, 4, 300, 128, device="cuda", dtype=torch.bfloat16))
    for reentrant in (False, True):
        leaves = [t.detach().requires_grad_() for t in tensors]
        checkpoint(lambda *t: attention(*t, causal=True), *leaves, use_reentrant=reentrant).sum().backward()
        assert same_bits([t.grad for t in leaves], expected)


def test_cuda_graph_of_forward_and_backward() -> None:
    leaves = [t.requires_grad_() for t in inputs(2, 4, 2, 300, 300, 128, 128, torch.bfloat16)]
    dout = torch.randn(2, 4, 300, 128, device="cuda").to(torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(attention(*leaves, causal=True), leaves, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(attention(*leaves, causal=True), leaves, dout)
    for seed in (1, 2):
        with torch.no_grad():
            for kept, new in zip(leaves, inputs(2, 4, 2, 300, 300, 128, 128, torch.bfloat16, seed), strict=True):
                kept.copy_(new)
        graph.replay()
        assert same_bits(found, torch.autograd.grad(attention(*leaves, causal=True), leaves, dout))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_the_workspace_is_terms_of_the_rows_and_the_sums_of_dq(dims) -> None:
    leaves = [t.requires_grad_() for t in inputs(2, 8, 8, 4096, 4096, *dims, torch.bfloat16)]
    entry = backward_for(*leaves, (-1, 0))
    out = attention(*leaves, causal=True)
    dout = torch.randn_like(out)
    torch.autograd.grad(out, leaves, dout, retain_graph=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made = torch.autograd.grad(out, leaves, dout)
    torch.cuda.synchronize()
    results = sum(t.numel() * t.element_size() for t in made)
    # Of a row two numbers; of hopper_bwd 16 pieces of them, at head_dim 128 D once more, its sums in float32, and less than a byte
    # of counters.
    own = 32 + 4 * (dims[0] == 128) + 4 * dims[0] + 1
    row = own if entry.family == "hopper_bwd" else 8
    assert torch.cuda.max_memory_allocated() - before - results <= row * 2 * 8 * 4096 + 4096


# --- beyond 32 bits, memory errors --------------------------------------------------------------------------------------


def test_strides_beyond_32_bits() -> None:
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    q, k, v = inputs(2, 4, 4, 200, 200, 128, 128, torch.bfloat16)
    dout = torch.randn(2, 4, 200, 128, device="cuda").to(torch.bfloat16)
    expected = gradients(q, k, v, (-1, 0), dout)
    storage = torch.empty(2, 2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    far = []
    for number, tensor in enumerate((q, k, v, dout)):
        begin = storage.shape[1] - (number + 1) * tensor[0].numel()
        far.append(storage[:, begin : begin + tensor[0].numel()].view(tensor.shape).copy_(tensor))
    assert same_bits(gradients(*far[:3], (-1, 0), far[3]), expected)


SMALL = """
import torch, tilecast
torch.manual_seed(0)
for d, dv in {dims}:
    for window in ((-1, -1), (-1, 0), (17, 3)):
        for seqlen_q, seqlen_k in ((129, 129), (7, 130)):
            q = torch.randn(1, 2, seqlen_q, d, device="cuda").to(torch.bfloat16).requires_grad_()
            k, v = (torch.randn(1, 1, seqlen_k, w, device="cuda").to(torch.bfloat16).requires_grad_() for w in (d, dv))
            tilecast.attention(q, k, v, window=window).sum().backward()
            torch.cuda.synchronize()
"""


def test_compute_sanitizer_finds_nothing() -> None:
    served = registry.head_dims(torch.cuda.get_device_capability(), "bf16", "none", registry.shipped_backward())
    assert_memcheck_finds_nothing(SMALL.format(dims=[pair for pair in DIMS if pair in served]))
