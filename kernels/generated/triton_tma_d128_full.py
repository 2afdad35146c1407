"""Attention forward for head_dim 128: FlashAttention-2 in plain Triton.

Every query sees every key.
A program owns 64 query rows of one head and takes in 64 keys at a time.
Only the block that reaches over the last key is masked.
"""

TILECAST = {
    "tilecast": "0.1.0", "family": "triton", "machine": "h200-sxm", "targets": ["sm_90a", "sm_100a", "sm_103a"],
    "variant": "family=fa2,tile_m=64,tile_n=64,warps=4,stages=3,scheduler=grid",
    "workload": {"batch": 4, "heads_q": 16, "heads_kv": 16, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim_qk": 128, "head_dim_v": 128, "mask": "none", "window": None, "dtype": "bf16"},
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
def attend(q, kv, key_start, seqlen_k, scale_log2, state, MASKED: tl.constexpr):
    """Take in one block of keys: S = Q K^T, online softmax in base 2, O = O * correction + P V."""
    k_desc, v_desc, batch, kv_head = kv
    row_max, row_sum, acc = state

    k = k_desc.load([batch, kv_head, key_start, 0]).reshape([TILE_N, 128])
    s = tl.dot(q, k.T)
    if MASKED:
        keys = key_start + tl.arange(0, TILE_N)[None, :]
        s = tl.where(keys < seqlen_k, s, float("-inf"))

    new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
    p = tl.math.exp2(s * scale_log2 - new_max[:, None])
    correction = tl.math.exp2(row_max - new_max)
    row_sum = row_sum * correction + tl.sum(p, 1)

    v = v_desc.load([batch, kv_head, key_start, 0]).reshape([TILE_N, 128])
    acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None])
    return new_max, row_sum, acc


# Lengths and head counts vary from call to call: without this each new divisibility by 16 would recompile.
@triton.jit(do_not_specialize=["heads_q", "group_size", "seqlen_q", "seqlen_k"])
def attention_forward(
    q_desc,  # (batch, heads_q, seqlen_q, head_dim_qk)
    k_desc,  # (batch, heads_kv, seqlen_k, head_dim_qk)
    v_desc,  # (batch, heads_kv, seqlen_k, head_dim_v)
    out_desc,  # (batch, heads_q, seqlen_q, head_dim_v)
    lse_ptr,  # (batch, heads_q, seqlen_q) float32, or None
    scale_log2,  # softmax scale * log2(e), positive
    heads_q,
    group_size,  # query heads that share a key/value head
    seqlen_q,
    seqlen_k,
):
    blocks = tl.cdiv(seqlen_q, TILE_M)
    batch_head = tl.program_id(0) // blocks
    row_start = tl.program_id(0) % blocks * TILE_M
    rows = row_start + tl.arange(0, TILE_M)
    batch = batch_head // heads_q
    head = batch_head % heads_q
    kv_head = head // group_size

    q = q_desc.load([batch, head, row_start, 0]).reshape([TILE_M, 128])
    kv = (k_desc, v_desc, batch, kv_head)
    row_max = tl.full([TILE_M], LOWEST, tl.float32)  # in base 2: max over keys of s * scale_log2
    row_sum = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, 128], tl.float32)
    state = (row_max, row_sum, acc)

    full_end = seqlen_k // TILE_N * TILE_N
    for key_start in tl.range(0, full_end, TILE_N):
        state = attend(q, kv, key_start, seqlen_k, scale_log2, state, MASKED=False)
    # At most once: the block that reaches over the last key.
    for key_start in tl.range(full_end, seqlen_k, TILE_N, num_stages=1):
        state = attend(q, kv, key_start, seqlen_k, scale_log2, state, MASKED=True)

    # A row that saw no key has row_sum 0: its output is 0, its lse log2(0) = -inf.
    row_max, row_sum, acc = state
    empty = (row_sum == 0.0)[:, None]
    norm = (1.0 / row_sum)[:, None]
    out = tl.where(empty, 0.0, acc * norm).to(out_desc.dtype)
    out_desc.store([batch, head, row_start, 0], out.reshape([1, 1, TILE_M, 128]))
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
    if (window_left, window_right) != (-1, -1):
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
            k,
            v,
            out,
        )
        compiled[grid](*map(on, descriptors, tensors), lse, scale_log2, *sizes)
        return

    batch, heads_q, seqlen_q, _ = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    grid = (triton.cdiv(seqlen_q, TILE_M.value) * batch * heads_q, 1, 1)
    descriptors = (
        TensorDescriptor.from_tensor(q, [1, 1, TILE_M.value, 128]),
        TensorDescriptor.from_tensor(k, [1, 1, TILE_N.value, 128]),
        TensorDescriptor.from_tensor(v, [1, 1, TILE_N.value, 128]),
        TensorDescriptor.from_tensor(out, [1, 1, TILE_M.value, 128]),
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
