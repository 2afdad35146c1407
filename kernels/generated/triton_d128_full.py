"""Attention forward for head_dim 128: FlashAttention-2 in plain Triton.

Every query sees every key.  A program owns 64 query rows of one head and takes in 64 keys at a time.  Only the block
that reaches over the last key is masked.
"""

TILECAST = {
    "tilecast": "0.1.0", "family": "triton", "machine": "a100", "targets": ["sm_80", "sm_90a", "sm_100a", "sm_103a"],
    "variant": "family=fa2,tile_m=64,tile_n=64,warps=4,kv_stages=2,scheduler=grid",
    "workload": {"batch": 4, "heads_q": 16, "heads_kv": 16, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim_qk": 128, "head_dim_v": 128, "mask": "none", "window": None, "dtype": "bf16"},
}  # fmt: skip

import triton
import triton.language as tl

TILE_M = tl.constexpr(64)  # query rows of a program
TILE_N = tl.constexpr(64)  # keys of a block
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite, so that a row that saw no key yet never computes inf - inf
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = 1.4426950408889634
DTYPES = ("torch.bfloat16", "torch.float16")
OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}


@triton.jit
def load_rows(ptr, stride, valid, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHECKED: tl.constexpr):
    """ROWS x COLUMNS of a row-major matrix at `ptr`; if CHECKED, rows from `valid` on read as zero."""
    rows = tl.arange(0, ROWS)[:, None]
    pointers = ptr + rows * stride + tl.arange(0, COLUMNS)[None, :]
    return tl.load(pointers, mask=rows < valid, other=0.0) if CHECKED else tl.load(pointers)


@triton.jit
def attend(q, kv, key, seqlen_k, scale_log2, state, MASKED: tl.constexpr):
    """Take in the keys of one block: S = Q K^T, online softmax in base 2, O = O * correction + P V."""
    k_ptr, v_ptr, stride_ks, stride_vs = kv
    row_max, row_sum, o = state
    k_block = k_ptr + tl.cast(key, tl.int64) * stride_ks
    v_block = v_ptr + tl.cast(key, tl.int64) * stride_vs
    k = load_rows(k_block, stride_ks, seqlen_k - key, TILE_N, 128, MASKED)
    s = tl.dot(q, k.T)
    if MASKED:
        keys = key + tl.arange(0, TILE_N)[None, :]
        s = tl.where(keys < seqlen_k, s, float("-inf"))

    new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
    p = tl.math.exp2(s * scale_log2 - new_max[:, None])
    correction = tl.math.exp2(row_max - new_max)
    row_sum = row_sum * correction + tl.sum(p, 1)
    v = load_rows(v_block, stride_vs, seqlen_k - key, TILE_N, 128, MASKED)
    o = tl.dot(p.to(v.dtype), v, o * correction[:, None])
    return new_max, row_sum, o


# Lengths and head counts vary from call to call: without this each new divisibility by 16 would recompile.
@triton.jit(do_not_specialize=["heads_q", "group", "seqlen_q", "seqlen_k"])
def attention(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
              stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os, heads_q, group, seqlen_q, seqlen_k,
              scale_log2):  # fmt: skip
    """TILE_M query rows of one head."""
    query_blocks = tl.cdiv(seqlen_q, TILE_M)
    batch_head = tl.program_id(0) // query_blocks
    row = tl.program_id(0) % query_blocks * TILE_M
    rows = row + tl.arange(0, TILE_M)
    batch, head = batch_head // heads_q, batch_head % heads_q
    head_kv = head // group
    # 64 bits: a tensor may hold more than 2^31 elements.
    q_ptr += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + row.to(tl.int64) * stride_qs
    k_ptr += batch.to(tl.int64) * stride_kb + head_kv.to(tl.int64) * stride_kh
    v_ptr += batch.to(tl.int64) * stride_vb + head_kv.to(tl.int64) * stride_vh
    out_ptr += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + row.to(tl.int64) * stride_os
    q = load_rows(q_ptr, stride_qs, seqlen_q - row, TILE_M, 128, True)
    kv = (k_ptr, v_ptr, stride_ks, stride_vs)
    row_max = tl.full([TILE_M], LOWEST, tl.float32)  # in base 2: max over keys of s * scale_log2
    row_sum = tl.zeros([TILE_M], tl.float32)
    state = (row_max, row_sum, tl.zeros([TILE_M, 128], tl.float32))

    full_end = seqlen_k // TILE_N * TILE_N
    for key in tl.range(0, full_end, TILE_N):
        state = attend(q, kv, key, seqlen_k, scale_log2, state, MASKED=False)
    # At most once: the block that reaches over the last key.
    for key in tl.range(full_end, seqlen_k, TILE_N, num_stages=1):
        state = attend(q, kv, key, seqlen_k, scale_log2, state, MASKED=True)

    # A row that saw no key has row_sum 0: its output is 0, its lse log2(0) = -inf.
    row_max, row_sum, o = state
    empty, inverse = (row_sum == 0.0)[:, None], (1.0 / row_sum)[:, None]
    valid = rows < seqlen_q
    out_rows = out_ptr + tl.arange(0, TILE_M)[:, None] * stride_os
    out = tl.where(empty, 0.0, o * inverse).to(out_ptr.dtype.element_ty)
    tl.store(out_rows + tl.arange(0, 128)[None, :], out, mask=valid[:, None])
    lse = (row_max + tl.math.log2(row_sum)) * LN2
    tl.store(lse_ptr + batch_head.to(tl.int64) * seqlen_q + rows, lse, mask=valid)


def plan(q, k, v, out, lse, window_left, window_right):
    """Grid and arguments but the scale, () for empty tensors; ValueError for what the kernel does not take."""
    if (window_left, window_right) not in ((-1, -1),):
        raise ValueError(f"window: this kernel has no window, got ({window_left}, {window_right})")
    if len(q.shape) != 4 or len(k.shape) != 4 or q.shape[1] != q.shape[1] // max(k.shape[1], 1) * k.shape[1]:
        raise ValueError(f"q, k: expected 4 extents, heads of q a multiple of k's, got {[*q.shape]}, {[*k.shape]}")
    (batch, heads_q, seqlen_q, _), (_, heads_kv, seqlen_k, _) = q.shape, k.shape
    rows, keys = (batch, heads_q, seqlen_q), (batch, heads_kv, seqlen_k)
    shapes = {"q": (*rows, 128), "k": (*keys, 128), "v": (*keys, 128), "out": (*rows, 128)}
    for x, (name, shape) in zip((q, k, v, out), shapes.items()):
        want = shape, str(q.dtype) if str(q.dtype) in DTYPES else "bf16 or fp16", q.device, [0, 0, 0], (1,), 0
        got = tuple(x.shape), str(x.dtype), x.device, [n % 8 for n in x.stride()[:3]], x.stride()[3:], x.data_ptr() % 16
        if got != want:
            raise ValueError(f"{name}: expected {want}, got {got}: shape, dtype, device, strides % 8, last, start % 16")
    if (tuple(lse.shape), str(lse.dtype), lse.device) != (rows, "torch.float32", q.device) or not lse.is_contiguous():
        raise ValueError(f"lse: expected contiguous float32 {rows}, got {lse.dtype} {tuple(lse.shape)} on {lse.device}")
    if q.numel() == 0 or k.numel() == 0:  # the copy engine knows no empty tensors
        return ()
    programs = triton.cdiv(seqlen_q, TILE_M.value) * batch * heads_q
    sizes = (heads_q, heads_q // heads_kv, seqlen_q, seqlen_k)
    return (programs, 1, 1), (q, k, v, out, lse, *(n for x in (q, k, v, out) for n in x.stride()[:3]), *sizes)


def launch(q, k, v, out, lse, scale, window_left=-1, window_right=-1):
    """Write softmax(scale * q k^T) v to `out` and the logarithm of the row sums to `lse`, unless that is None.

    q, k: (batch, heads_q | heads_kv, seqlen_q | seqlen_k, 128); v, out: the same with 128; all bf16 or all fp16,
    unit last stride, rows that start at 16 bytes.  lse: (batch, heads_q, seqlen_q), float32, contiguous.
    """
    if not 0.0 < scale <= 2.0e38:  # the row maximum is taken before scaling; times log2(e), 2e38 is still a float32
        raise ValueError(f"scale: expected a number above 0 and at most 2e+38, got {scale:g}")
    if lse is None:
        import torch

        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if planned := plan(q, k, v, out, lse, window_left, window_right):
        grid, arguments = planned
        attention[grid](*arguments, max(scale * LOG2E, 1e-37), **OPTIONS)  # a hidden score, -inf, times 0 would be NaN
    else:
        out.zero_()
        lse.fill_(float("-inf"))
