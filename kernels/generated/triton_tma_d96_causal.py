"""Causal attention forward for head_dim 96: FlashAttention-2 in plain Triton.

Query i sees keys up to i + seqlen_k - seqlen_q.
A program owns 64 query rows of one head and takes in 64 keys at a time.
Only blocks on the diagonal are masked.
Programs of a head start with its last rows, which see the most keys.
Triton's blocks are powers of two: head_dim 96 goes as 64 + 32, nothing is padded.
"""

TILECAST = {
    "tilecast": "0.1.0", "family": "triton", "machine": "h200-sxm", "targets": ["sm_90a", "sm_100a", "sm_103a"],
    "variant": "family=fa2,tile_m=64,tile_n=64,warps=4,stages=3,scheduler=longest-first",
    "workload": {"batch": 4, "heads_q": 16, "heads_kv": 16, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim_qk": 96, "head_dim_v": 96, "mask": "causal", "window": None, "dtype": "bf16"},
}  # fmt: skip

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

TILE_M = tl.constexpr(64)  # query rows of a program
TILE_N = tl.constexpr(64)  # keys of a block
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite, so that a row that saw no key yet never computes inf - inf
LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
PLANS = {}  # what a launch works out for a shape; the second one of that shape takes half the time on the host


@triton.jit
def attend(q, kv, key_start, last_key, scale_log2, state, MASKED: tl.constexpr):
    """Take in one block of keys: S = Q K^T, online softmax in base 2, O = O * correction + P V."""
    q_0, q_64 = q
    k_desc_0, k_desc_64, v_desc_0, v_desc_64, batch, kv_head = kv
    row_max, row_sum, acc_0, acc_64 = state

    k_0 = k_desc_0.load([batch, kv_head, key_start, 0]).reshape([TILE_N, 64])
    s = tl.dot(q_0, k_0.T)
    k_64 = k_desc_64.load([batch, kv_head, key_start, 64]).reshape([TILE_N, 32])
    s = tl.dot(q_64, k_64.T, s)
    if MASKED:
        keys = key_start + tl.arange(0, TILE_N)[None, :]
        s = tl.where(keys <= last_key[:, None], s, float("-inf"))

    new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
    p = tl.math.exp2(s * scale_log2 - new_max[:, None])
    correction = tl.math.exp2(row_max - new_max)
    row_sum = row_sum * correction + tl.sum(p, 1)

    v_0 = v_desc_0.load([batch, kv_head, key_start, 0]).reshape([TILE_N, 64])
    acc_0 = tl.dot(p.to(v_0.dtype), v_0, acc_0 * correction[:, None])
    v_64 = v_desc_64.load([batch, kv_head, key_start, 64]).reshape([TILE_N, 32])
    acc_64 = tl.dot(p.to(v_64.dtype), v_64, acc_64 * correction[:, None])
    return new_max, row_sum, acc_0, acc_64


# Lengths and head counts vary from call to call: without this each new divisibility by 16 would recompile.
@triton.jit(do_not_specialize=["heads_q", "group_size", "seqlen_q", "seqlen_k"])
def attention_forward(
    q_desc_0,
    q_desc_64,  # (batch, heads_q, seqlen_q, head_dim_qk)
    k_desc_0,
    k_desc_64,  # (batch, heads_kv, seqlen_k, head_dim_qk)
    v_desc_0,
    v_desc_64,  # (batch, heads_kv, seqlen_k, head_dim_v)
    out_desc_0,
    out_desc_64,  # (batch, heads_q, seqlen_q, head_dim_v)
    lse_ptr,  # (batch, heads_q, seqlen_q) float32, or None
    scale_log2,  # softmax scale * log2(e), positive
    heads_q,
    group_size,  # query heads that share a key/value head
    seqlen_q,
    seqlen_k,
):
    blocks = tl.cdiv(seqlen_q, TILE_M)
    batch_head = tl.program_id(0) // blocks
    row_start = (blocks - 1 - tl.program_id(0) % blocks) * TILE_M
    rows = row_start + tl.arange(0, TILE_M)
    batch = batch_head // heads_q
    head = batch_head % heads_q
    kv_head = head // group_size

    q_0 = q_desc_0.load([batch, head, row_start, 0]).reshape([TILE_M, 64])
    q_64 = q_desc_64.load([batch, head, row_start, 64]).reshape([TILE_M, 32])
    q = (q_0, q_64)
    kv = (k_desc_0, k_desc_64, v_desc_0, v_desc_64, batch, kv_head)
    row_max = tl.full([TILE_M], LOWEST, tl.float32)  # in base 2: max over keys of s * scale_log2
    row_sum = tl.zeros([TILE_M], tl.float32)
    acc_0 = tl.zeros([TILE_M, 64], tl.float32)
    acc_64 = tl.zeros([TILE_M, 32], tl.float32)
    state = (row_max, row_sum, acc_0, acc_64)

    # Row i sees keys up to i + diagonal: blocks that all rows see, then blocks on the diagonal.
    diagonal = seqlen_k - seqlen_q
    last_key = rows + diagonal
    full_end = tl.maximum(row_start + diagonal + 1, 0) // TILE_N * TILE_N
    end = tl.minimum(row_start + TILE_M + diagonal, seqlen_k)
    for key_start in tl.range(0, full_end, TILE_N):
        state = attend(q, kv, key_start, last_key, scale_log2, state, MASKED=False)
    for key_start in tl.range(full_end, end, TILE_N):
        state = attend(q, kv, key_start, last_key, scale_log2, state, MASKED=True)

    # A row that saw no key has row_sum 0: its output is 0, its lse log2(0) = -inf.
    row_max, row_sum, acc_0, acc_64 = state
    empty = (row_sum == 0.0)[:, None]
    norm = (1.0 / row_sum)[:, None]
    out_0 = tl.where(empty, 0.0, acc_0 * norm).to(out_desc_0.dtype)
    out_desc_0.store([batch, head, row_start, 0], out_0.reshape([1, 1, TILE_M, 64]))
    out_64 = tl.where(empty, 0.0, acc_64 * norm).to(out_desc_64.dtype)
    out_desc_64.store([batch, head, row_start, 64], out_64.reshape([1, 1, TILE_M, 32]))
    if lse_ptr is not None:
        lse = (row_max + tl.math.log2(row_sum)) * LN_2
        tl.store(lse_ptr + batch_head.to(tl.int64) * seqlen_q + rows, lse, mask=rows < seqlen_q)


def on(descriptor, tensor):
    """The descriptor of another tensor with the same shape, strides and alignment, which are all that is checked."""
    copy = object.__new__(TensorDescriptor)
    copy.__dict__.update(descriptor.__dict__)
    copy.base = tensor
    return copy


def launch(q, k, v, out, lse, scale, window_left=-1, window_right=-1):
    """Write softmax(scale * q k^T) v to `out` and the logarithm of the row sums to `lse`, unless that is None.

    q, out: (batch, heads_q, seqlen_q, head_dim); k, v: (batch, heads_kv, seqlen_k, head_dim); bf16 or fp16, unit last
    stride, 16-byte aligned.  lse: (batch, heads_q, seqlen_q), float32, contiguous.
    """
    if (window_left, window_right) not in ((-1, -1), (-1, 0)):
        raise ValueError(f"this kernel has no window, got ({window_left}, {window_right})")
    if q.numel() == 0 or k.numel() == 0:  # a descriptor cannot be empty
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    if scale < 0.0:  # the kernel takes the maximum before it scales
        q, scale = -q, -scale
    scale_log2 = max(scale * LOG2_E, 1e-37)  # a masked score is -inf, which times 0 would be nan
    address = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | (0 if lse is None else lse.data_ptr())
    # Everything that compiled code and arguments depend on, but addresses and scale.
    key = (
        q.dtype,
        q.device,
        q.shape,
        q.stride(),
        k.shape,
        k.stride(),
        v.stride(),
        out.stride(),
        lse is None,
        address % 16,
        window_left,
        window_right,
    )
    plan = PLANS.get(key)
    if plan is not None:
        compiled, grid, descriptors, sizes = plan
        tensors = (
            q,
            q,
            k,
            k,
            v,
            v,
            out,
            out,
        )
        compiled[grid](*map(on, descriptors, tensors), lse, scale_log2, *sizes)
        return

    batch, heads_q, seqlen_q, _ = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    grid = (triton.cdiv(seqlen_q, TILE_M.value) * batch * heads_q, 1, 1)
    descriptors = (
        TensorDescriptor.from_tensor(q, [1, 1, TILE_M.value, 64]),
        TensorDescriptor.from_tensor(q, [1, 1, TILE_M.value, 32]),
        TensorDescriptor.from_tensor(k, [1, 1, TILE_N.value, 64]),
        TensorDescriptor.from_tensor(k, [1, 1, TILE_N.value, 32]),
        TensorDescriptor.from_tensor(v, [1, 1, TILE_N.value, 64]),
        TensorDescriptor.from_tensor(v, [1, 1, TILE_N.value, 32]),
        TensorDescriptor.from_tensor(out, [1, 1, TILE_M.value, 64]),
        TensorDescriptor.from_tensor(out, [1, 1, TILE_M.value, 32]),
    )
    sizes = (
        heads_q,
        heads_q // heads_kv,
        seqlen_q,
        seqlen_k,
    )
    compiled = attention_forward[grid](
        *descriptors,
        lse,
        scale_log2,
        *sizes,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=True,
    )
    if compiled is None:  # the interpreter has run it
        return
    if len(PLANS) >= 256:
        PLANS.clear()
    PLANS[key] = compiled, grid, tuple(on(descriptor, None) for descriptor in descriptors), sizes
