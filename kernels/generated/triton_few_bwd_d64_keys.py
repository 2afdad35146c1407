"""Attention backward for head_dim 64 and few keys, in plain Triton.

For sequences of few keys whose query heads that share a key/value head have more query rows together than a tile: a
program has all keys and walks over the rows, 64 at a time.  It makes LSE and D of its rows itself, keeps dK and dV, and
writes dQ of a step at once: one launch.  Any mask.  The same bits every run.
"""

TILECAST = {
    "tilecast": "0.1.0", "family": "triton_few_bwd", "machine": "h200-sxm", "targets": ["sm_90a"],
    "pass": "bwd",
    "variant": "family=few_bwd,rows=352,tile_n=64,warps=4,stages=1,step=64",
    "workload": {"batch": 341, "heads_q": 128, "heads_kv": 32, "seqlen_q": 48, "seqlen_k": 48, "head_dim_qk": 64, "head_dim_v": 64, "mask": "window", "window": [24, 0], "dtype": "bf16"},
}  # fmt: skip

import triton
import triton.language as tl

MOST_ROWS = 352  # query rows of the heads that share a key/value head, over which a program walks
TILE_N = tl.constexpr(64)  # keys of a program
STEP = tl.constexpr(64)  # query rows of a step
STAGES = tl.constexpr(1)  # tiles of Q, O and dO on their way
WARPS = 4
COLUMNS, COLUMNS_V = tl.constexpr(64), tl.constexpr(64)  # of a tile of Q and K, and of V and O
LOG2E = tl.constexpr(1.4426950408889634)
DTYPES = ("torch.bfloat16", "torch.float16")
OPTIONS = ({"num_warps": WARPS, "enable_fp_fusion": True},)


@triton.jit
def load_rows(ptr, stride, valid, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHECKED: tl.constexpr, eighths=None):
    """ROWS x COLUMNS of a matrix with rows 8 `stride` apart at `ptr`; if CHECKED, rows from `valid` on read as zero, and columns that are not there."""
    rows = tl.arange(0, ROWS)[:, None]
    pointers = ptr + rows * (stride * 8) + tl.arange(0, COLUMNS)[None, :]
    return tl.load(pointers, mask=within(rows < valid, COLUMNS, eighths), other=0.0) if CHECKED else tl.load(pointers)


@triton.jit
def within(there, COLUMNS: tl.constexpr, eighths):
    """Which columns of rows are there: of rows that are, all, or the first ``eighths`` times 8 of heads with fewer than the kernel's."""
    # In eights, so that it is plain that 16 bytes are there or not.
    return there if eighths is None else there & (tl.arange(0, COLUMNS)[None, :] // 8 < eighths)


@triton.jit
def rows_at(batch, heads, queries, stride_b, stride_h, stride_s, COLUMNS: tl.constexpr):
    """Where the rows of some queries of some heads are in a tensor, in elements."""
    at = (batch * stride_b + heads.to(tl.int64) * stride_h + queries.to(tl.int64) * stride_s) * 8
    return at[:, None] + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def terms(out, dout, lse, dlse):
    """Two numbers of each query row: its LSE in base 2, and D = sum(dO * O) - dLSE, which every dS of the row subtracts.

    Rows that are not there, and rows that saw no key, get an LSE of +inf: exp2(anything - inf) is 0, so P is, and with D = 0 dS.
    """
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1) - dlse
    empty = lse == float("-inf")
    return tl.where(empty, float("inf"), lse * LOG2E), tl.where(empty, 0.0, delta)


@triton.jit
def store_rows(ptr, stride, valid, values, ROWS: tl.constexpr, COLUMNS: tl.constexpr, eighths):
    """The first `valid` rows of ROWS x COLUMNS to a matrix with rows 8 `stride` apart at `ptr`."""
    rows = tl.arange(0, ROWS)[:, None]
    pointers = ptr + rows * (stride * 8) + tl.arange(0, COLUMNS)[None, :]
    tl.store(pointers, values.to(ptr.dtype.element_ty), mask=within(rows < valid, COLUMNS, eighths))


# Numbers vary from call to call: without this their divisibility by 16 would recompile.  Strides, which are whole 8
# elements, come in that unit, so that rows are always read 16 bytes at a time and added up in the same order.
@triton.jit(do_not_specialize=range(10, 43))
def gradients(q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, dq_ptr, dk_ptr, dv_ptr, lse_ptr, dlse_ptr, stride_qb, stride_qh,
              stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, stride_ob, stride_oh,
              stride_os, stride_db, stride_dh, stride_ds, stride_dqb, stride_dqh, stride_dqs, stride_dkb, stride_dkh,
              stride_dks, stride_dvb, stride_dvh, stride_dvs, heads_kv, group, seqlen_q, seqlen_k, dlse_rows,
              window_left, window_right, eighths, eighths_v, MASKED: tl.constexpr, scale_log2, scale):  # fmt: skip
    """dK and dV of a head's keys, and dQ of the query rows of all heads that share them, STEP at a time."""
    batch, head = (tl.program_id(0) // heads_kv).to(tl.int64), tl.program_id(0) % heads_kv
    # 64 bits: a tensor may hold more than 2^31 elements.
    k_ptr += (batch * stride_kb + head.to(tl.int64) * stride_kh) * 8
    v_ptr += (batch * stride_vb + head.to(tl.int64) * stride_vh) * 8
    dk_ptr += (batch * stride_dkb + head.to(tl.int64) * stride_dkh) * 8
    dv_ptr += (batch * stride_dvb + head.to(tl.int64) * stride_dvh) * 8
    k = load_rows(k_ptr, stride_ks, seqlen_k, TILE_N, COLUMNS, True, eighths)
    v = load_rows(v_ptr, stride_vs, seqlen_k, TILE_N, COLUMNS_V, True, eighths_v)
    keys = tl.arange(0, TILE_N)[:, None]
    dk = tl.zeros([TILE_N, COLUMNS], tl.float32)
    dv = tl.zeros([TILE_N, COLUMNS_V], tl.float32)
    for first in tl.range(0, group * seqlen_q, STEP, num_stages=STAGES):
        row = first + tl.arange(0, STEP)
        there = row < group * seqlen_q
        heads, queries = head * group + row // seqlen_q, row % seqlen_q
        q_at = rows_at(batch, heads, queries, stride_qb, stride_qh, stride_qs, COLUMNS)
        q = tl.load(q_ptr + q_at, mask=within(there[:, None], COLUMNS, eighths), other=0.0)
        out_at = rows_at(batch, heads, queries, stride_ob, stride_oh, stride_os, COLUMNS_V)
        out = tl.load(out_ptr + out_at, mask=within(there[:, None], COLUMNS_V, eighths_v), other=0.0)
        dout_at = rows_at(batch, heads, queries, stride_db, stride_dh, stride_ds, COLUMNS_V)
        dout = tl.load(dout_ptr + dout_at, mask=within(there[:, None], COLUMNS_V, eighths_v), other=0.0)
        number = (batch * heads_kv * group + heads) * seqlen_q + queries
        lse = tl.load(lse_ptr + number, mask=there, other=float("-inf"))
        dlse = tl.load(dlse_ptr + number, mask=there & (queries < dlse_rows), other=0.0)
        lse2, delta = terms(out, dout, lse, dlse)
        s = tl.dot(k, q.T)
        p = tl.math.exp2(s * scale_log2 - lse2[None, :])
        # Keys past the end: their P would not be 0, and might be infinite.
        seen = keys < seqlen_k
        if MASKED:
            diagonal = queries + seqlen_k - seqlen_q
            seen = seen & (keys >= (diagonal - window_left)[None, :]) & (keys <= (diagonal + window_right)[None, :])
        p = tl.where(seen, p, 0.0)
        dp = tl.dot(v, dout.T)
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        dv = tl.dot(p.to(q.dtype), dout, dv)
        dk = tl.dot(ds, q, dk)
        dq = tl.dot(ds.T, k)
        dq_at = rows_at(batch, heads, queries, stride_dqb, stride_dqh, stride_dqs, COLUMNS)
        tl.store(
            dq_ptr + dq_at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=within(there[:, None], COLUMNS, eighths)
        )
    store_rows(dv_ptr, stride_dvs, seqlen_k, dv, TILE_N, COLUMNS_V, eighths_v)
    store_rows(dk_ptr, stride_dks, seqlen_k, dk * scale, TILE_N, COLUMNS, eighths)


def workspaces(q, k, v, terms, window_left, window_right):
    """What launches need beside terms: nothing."""
    return ()


def plan(q, k, v, out, lse, dout, dlse, dq, dk, dv, terms, window_left, window_right):
    """(kernel, grid, arguments but the scales) of the launch, () for empty tensors; ValueError for what it does not take."""
    if min(window_left, window_right) < -1:
        raise ValueError(f"window: expected limits of at least -1 (none), got ({window_left}, {window_right})")
    if len(q.shape) != 4 or len(k.shape) != 4 or q.shape[1] != q.shape[1] // max(k.shape[1], 1) * k.shape[1]:
        raise ValueError(f"q, k: expected 4 extents, heads of q a multiple of k's, got {[*q.shape]}, {[*k.shape]}")
    (batch, heads_q, seqlen_q, _), (_, heads_kv, seqlen_k, _) = q.shape, k.shape
    rows, keys = (batch, heads_q, seqlen_q), (batch, heads_kv, seqlen_k)
    dtype = str(q.dtype) if str(q.dtype) in DTYPES else "bf16 or fp16"
    taken = "a multiple of 8 up to 64"
    head_dim, head_dim_v = (n if n in range(8, 65, 8) else taken for n in (q.shape[-1], v.shape[-1]))
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
    for name, x in tensors.items():
        extents = keys if name[-1] in "kv" else rows
        width = head_dim if name[-1] in "qk" else head_dim_v
        want = (*extents, width), dtype, q.device, [0, 0, 0], (1,), 0
        got = tuple(x.shape), str(x.dtype), x.device, [n % 8 for n in x.stride()[:3]], x.stride()[3:], x.data_ptr() % 16
        if got != want:
            raise ValueError(f"{name}: expected {want}, got {got}: shape, dtype, device, strides % 8, last, start % 16")
    group = heads_q // max(heads_kv, 1)
    if group * seqlen_q > MOST_ROWS:
        raise ValueError(f"q: expected up to {MOST_ROWS} rows of a key/value head, got {group * seqlen_q}")
    if seqlen_k > TILE_N.value:
        raise ValueError(f"k: expected up to {TILE_N.value} keys, got {seqlen_k}")
    dlse_or_any = lse if dlse is None else dlse
    for name, x in (("lse", lse), ("dlse", dlse_or_any)):
        if (tuple(x.shape), str(x.dtype), x.device) != (rows, "torch.float32", q.device) or not x.is_contiguous():
            raise ValueError(
                f"{name}: expected contiguous float32 {rows}, got {x.dtype} {tuple(x.shape)} on {x.device}"
            )
    if q.numel() == 0 or k.numel() == 0:
        return ()
    hides = window_left >= 0 or window_right >= 0
    no_limit = seqlen_q + seqlen_k
    window_left = no_limit if window_left < 0 else min(window_left, no_limit)
    window_right = no_limit if window_right < 0 else min(window_right, no_limit)
    eighths, eighths_v = (
        None if n == columns.value else n // 8 for n, columns in ((q.shape[3], COLUMNS), (v.shape[3], COLUMNS_V))
    )
    tensors = (q, k, v, out, dout, dq, dk, dv)
    arguments = (*tensors, lse, dlse_or_any, *(n // 8 for x in tensors for n in x.stride()[:3]))
    sizes = (heads_kv, group, seqlen_q, seqlen_k, 0 if dlse is None else seqlen_q, window_left, window_right)
    return ((gradients, (batch * heads_kv, 1, 1), (*arguments, *sizes, eighths, eighths_v, hides)),)


def launch(q, k, v, out, lse, dout, dq, dk, dv, scale, window_left=-1, window_right=-1, dlse=None, terms=None):
    """Write the gradients of launch(q, k, v, out, lse, scale) of the forward pass to `dq`, `dk` and `dv`.

    q, dq: (batch, heads_q, seqlen_q, 64), k, dk: (batch, heads_kv, seqlen_k, 64), heads_q / heads_kv * seqlen_q up to MOST_ROWS, seqlen_k up to TILE_N; v, dv, out, dout: the same
    with 64; all bf16 or all fp16, unit last stride, rows that start at 16 bytes; or with fewer columns, a multiple of 8.  lse, as the forward
    pass wrote it, and dlse, its gradient where it has one: (batch, heads_q, seqlen_q), float32, contiguous.  terms: not used.
    window_left, window_right: keys before and after the diagonal that a row sees, -1 for no limit.
    """
    if not 0.0 < scale <= 2.0e38:  # times log2(e), 2e38 is still a float32
        raise ValueError(f"scale: expected a number above 0 and at most 2e+38, got {scale:g}")
    more = workspaces(q, k, v, lse, window_left, window_right)
    launches = plan(q, k, v, out, lse, dout, dlse, dq, dk, dv, terms, *more, window_left, window_right)
    for (kernel, grid, arguments), options in zip(launches, OPTIONS):
        kernel[grid](*arguments, max(scale * LOG2E.value, 1e-37), scale, **options)  # the first scale as in the forward
    if not launches:
        for gradient in (dq, dk, dv):
            gradient.zero_()
