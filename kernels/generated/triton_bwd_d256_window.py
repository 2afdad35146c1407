"""Sliding-window attention backward for head_dim 256: FlashAttention-2 in plain Triton, the same bits every run.

Query i sees keys from window_left before to window_right after position i + seqlen_k - seqlen_q; only blocks on the two
edges of that band are masked. No atomics: row_terms makes two numbers of each query row, programs of key_gradients keep
dK and dV of 32 keys and walk over 16 queries at a time, query_gradients keeps dQ of 64 queries and walks over 16 keys
at a time. Each computes what it needs of S and dP: seven matrix products in place of five, and no sum of several
programs.
"""

TILECAST = {
    "tilecast": "0.1.0", "family": "triton_bwd", "machine": "a100", "targets": ["sm_80", "sm_90a", "sm_100a", "sm_103a"],
    "pass": "bwd",
    "variant": "family=fa2_bwd,dkv_tile_m=16,dkv_tile_n=32,dkv_warps=8,dkv_stages=2,dq_tile_m=64,dq_tile_n=16,dq_warps=8,dq_stages=2,dkv_loads=pointers,dq_loads=pointers,dkv_apart=false",
    "workload": {"batch": 4, "heads_q": 8, "heads_kv": 8, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim_qk": 256, "head_dim_v": 256, "mask": "window", "window": [1024, 0], "dtype": "bf16"},
}  # fmt: skip

from functools import lru_cache

import triton
import triton.language as tl

DKV_TILE_M = tl.constexpr(16)  # query rows of a step of programs that own keys
DKV_TILE_N = tl.constexpr(32)  # keys of such programs
DQ_TILE_M = tl.constexpr(64)  # query rows of programs of query_gradients
DQ_TILE_N = tl.constexpr(16)  # keys of their steps
ROWS = tl.constexpr(16)  # rows of programs of row_terms
PADDED = tl.constexpr(64)  # the terms of a head are there for a multiple of so many rows
LOG2E = tl.constexpr(1.4426950408889634)
DTYPES = ("torch.bfloat16", "torch.float16")
OPTIONS = (  # of the kernels, in the order of their launches
    {"num_warps": 4, "enable_fp_fusion": True},
    {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True},
    {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True},
    {"num_warps": 4, "enable_fp_fusion": True},
)


@triton.jit
def load_rows(ptr, stride, valid, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHECKED: tl.constexpr):
    """ROWS x COLUMNS of a matrix with rows 8 `stride` apart at `ptr`; if CHECKED, rows from `valid` on read as zero."""
    rows = tl.arange(0, ROWS)[:, None]
    pointers = ptr + rows * (stride * 8) + tl.arange(0, COLUMNS)[None, :]
    return tl.load(pointers, mask=rows < valid, other=0.0) if CHECKED else tl.load(pointers)


@triton.jit
def store_rows(ptr, stride, valid, values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first `valid` rows of ROWS x COLUMNS to a matrix with rows 8 `stride` apart at `ptr`."""
    rows = tl.arange(0, ROWS)[:, None]
    pointers = ptr + rows * (stride * 8) + tl.arange(0, COLUMNS)[None, :]
    tl.store(pointers, values.to(ptr.dtype.element_ty), mask=rows < valid)


# Numbers vary from call to call: without this their divisibility by 16 would recompile.  Strides, which are whole 8
# elements, come in that unit, so that rows are always read 16 bytes at a time and added up in the same order.
@triton.jit(do_not_specialize=range(5, 15))
def row_terms(out_ptr, dout_ptr, lse_ptr, dlse_ptr, terms_ptr, stride_ob, stride_oh, stride_os, stride_db, stride_dh,
              stride_ds, heads_q, seqlen_q, padded, dlse_rows):  # fmt: skip
    """Two numbers of each query row: its LSE in base 2, and D = sum(dO * O) - dLSE, which every dS of the row subtracts.

    Rows past the end, and rows that saw no key, get an LSE of +inf: exp2(anything - inf) is 0, so P is, and with D = 0 dS.
    """
    blocks = padded // ROWS
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * ROWS
    rows = row + tl.arange(0, ROWS)
    batch, head = batch_head // heads_q, batch_head % heads_q
    out_ptr += (batch * stride_ob + head * stride_oh + row.to(tl.int64) * stride_os) * 8
    dout_ptr += (batch * stride_db + head * stride_dh + row.to(tl.int64) * stride_ds) * 8
    delta = tl.zeros([ROWS], tl.float32)
    out = load_rows(out_ptr, stride_os, seqlen_q - row, ROWS, 256, True).to(tl.float32)
    dout = load_rows(dout_ptr, stride_ds, seqlen_q - row, ROWS, 256, True).to(tl.float32)
    delta += tl.sum(out * dout, 1)
    lse = tl.load(lse_ptr + batch_head * seqlen_q + rows, mask=rows < seqlen_q, other=float("-inf"))
    delta -= tl.load(dlse_ptr + batch_head * seqlen_q + rows, mask=rows < dlse_rows, other=0.0)
    empty = lse == float("-inf")
    terms_ptr += batch_head * 2 * padded
    tl.store(terms_ptr + rows, tl.where(empty, float("inf"), lse * LOG2E))
    tl.store(terms_ptr + padded + rows, tl.where(empty, 0.0, delta))


@triton.jit
def add_queries(kv, queries, row, keys, diagonal, window_left, window_right, scale_log2, state, MASKED: tl.constexpr):
    """What the queries of one block add: S^T = K Q^T, dV += P^T dO, dP^T = V dO^T, dK += dS^T Q."""
    k, v = kv
    q_head, dout_head, stride_qs, stride_ds, seqlen_q, terms_head, padded = queries
    dk, dv = state
    q_block = q_head + tl.cast(row, tl.int64) * stride_qs * 8
    dout_block = dout_head + tl.cast(row, tl.int64) * stride_ds * 8
    q = load_rows(q_block, stride_qs, seqlen_q - row, DKV_TILE_M, 256, True)
    s = tl.dot(k, q.T)
    rows = row + tl.arange(0, DKV_TILE_M)
    p = tl.math.exp2(s * scale_log2 - tl.load(terms_head + rows)[None, :])
    if MASKED:
        at = (rows + diagonal)[None, :]
        p = tl.where((keys[:, None] >= at - window_left) & (keys[:, None] <= at + window_right), p, 0.0)
    dout = load_rows(dout_block, stride_ds, seqlen_q - row, DKV_TILE_M, 256, True)
    dv = tl.dot(p.to(dout.dtype), dout, dv)
    dp = tl.dot(v, dout.T)
    ds = (p * (dp - tl.load(terms_head + padded + rows)[None, :])).to(q.dtype)
    dk = tl.dot(ds, q, dk)
    return dk, dv


@triton.jit(do_not_specialize=range(7, 33))
def key_gradients(q_ptr, dout_ptr, k_ptr, v_ptr, dk_ptr, dv_ptr, terms_ptr, stride_qb, stride_qh, stride_qs, stride_db,
                  stride_dh, stride_ds, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, stride_dkb,
                  stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs, heads_q, group, part, seqlen_q, seqlen_k,
                  padded, window_left, window_right, scale_log2, scale):  # fmt: skip
    """dK and dV of DKV_TILE_N keys of one key/value head, from a part of the query heads that share it, one after the other."""
    key_blocks = tl.cdiv(seqlen_k, DKV_TILE_N)
    batch_head = tl.program_id(0) // key_blocks
    key = tl.program_id(0) % key_blocks * DKV_TILE_N
    keys = key + tl.arange(0, DKV_TILE_N)
    heads_kv = heads_q // group
    batch, head_kv = batch_head // heads_kv, batch_head % heads_kv
    first_head = head_kv * group + tl.program_id(1) * part
    # 64 bits: a tensor may hold more than 2^31 elements.
    k_ptr += (batch.to(tl.int64) * stride_kb + head_kv.to(tl.int64) * stride_kh + key.to(tl.int64) * stride_ks) * 8
    v_ptr += (batch.to(tl.int64) * stride_vb + head_kv.to(tl.int64) * stride_vh + key.to(tl.int64) * stride_vs) * 8
    k = load_rows(k_ptr, stride_ks, seqlen_k - key, DKV_TILE_N, 256, True)
    v = load_rows(v_ptr, stride_vs, seqlen_k - key, DKV_TILE_N, 256, True)
    kv = (k, v)
    state = (tl.zeros([DKV_TILE_N, 256], tl.float32), tl.zeros([DKV_TILE_N, 256], tl.float32))

    # Row i sees keys i + diagonal - window_left to i + diagonal + window_right: blocks on the upper edge of that band, blocks
    # of which all rows see all keys, blocks on the lower edge.
    diagonal = seqlen_k - seqlen_q
    begin = tl.maximum(key - diagonal - window_right, 0) // DKV_TILE_M * DKV_TILE_M
    end = tl.minimum(key + DKV_TILE_N - diagonal + window_left, seqlen_q)
    full_begin = tl.cdiv(tl.maximum(key + DKV_TILE_N - 1 - diagonal - window_right, 0), DKV_TILE_M) * DKV_TILE_M
    full_end = tl.maximum(tl.minimum(key - diagonal + window_left + 1, seqlen_q), 0) // DKV_TILE_M * DKV_TILE_M
    full_stop = tl.maximum(full_begin, full_end)
    # One loop for both edges: each body costs registers, compile time and room in the instruction cache.
    upper = tl.maximum(tl.cdiv(tl.minimum(full_begin, end) - begin, DKV_TILE_M), 0)
    lower = tl.maximum(tl.cdiv(end - full_stop, DKV_TILE_M), 0)
    for head in tl.range(first_head, tl.minimum(first_head + part, head_kv * group + group)):
        terms_head = terms_ptr + tl.cast(batch * heads_q + head, tl.int64) * 2 * padded
        q_head = q_ptr + (batch.to(tl.int64) * stride_qb + tl.cast(head, tl.int64) * stride_qh) * 8
        dout_head = dout_ptr + (batch.to(tl.int64) * stride_db + tl.cast(head, tl.int64) * stride_dh) * 8
        queries = (q_head, dout_head, stride_qs, stride_ds, seqlen_q, terms_head, padded)
        for step in tl.range(0, upper + lower):
            row = tl.where(step < upper, begin + step * DKV_TILE_M, full_stop + (step - upper) * DKV_TILE_M)
            state = add_queries(
                kv, queries, row, keys, diagonal, window_left, window_right, scale_log2, state, MASKED=True
            )
        for row in tl.range(full_begin, full_end, DKV_TILE_M):
            state = add_queries(
                kv, queries, row, keys, diagonal, window_left, window_right, scale_log2, state, MASKED=False
            )

    dk, dv = state
    sum_head = head_kv * tl.num_programs(1) + tl.program_id(1)
    dk_ptr += (batch.to(tl.int64) * stride_dkb + sum_head.to(tl.int64) * stride_dkh + key.to(tl.int64) * stride_dks) * 8
    dv_ptr += (batch.to(tl.int64) * stride_dvb + sum_head.to(tl.int64) * stride_dvh + key.to(tl.int64) * stride_dvs) * 8
    store_rows(dk_ptr, stride_dks, seqlen_k - key, dk * scale, DKV_TILE_N, 256)
    store_rows(dv_ptr, stride_dvs, seqlen_k - key, dv, DKV_TILE_N, 256)


@triton.jit
def add_keys(queries, kv, key, first_key, last_key, seqlen_k, scale_log2, state, MASKED: tl.constexpr):
    """What the keys of one block add: S = Q K^T, dP = dO V^T, dQ += dS K."""
    q, dout, lse2, delta = queries
    k_ptr, v_ptr, stride_ks, stride_vs = kv
    dq = state
    k_block = k_ptr + tl.cast(key, tl.int64) * stride_ks * 8
    v_block = v_ptr + tl.cast(key, tl.int64) * stride_vs * 8
    k = load_rows(k_block, stride_ks, seqlen_k - key, DQ_TILE_N, 256, MASKED)
    s = tl.dot(q, k.T)
    p = tl.math.exp2(s * scale_log2 - lse2[:, None])
    if MASKED:
        keys = key + tl.arange(0, DQ_TILE_N)[None, :]
        p = tl.where((keys >= first_key[:, None]) & (keys <= last_key[:, None]), p, 0.0)
    v = load_rows(v_block, stride_vs, seqlen_k - key, DQ_TILE_N, 256, MASKED)
    dp = tl.dot(dout, v.T)
    ds = (p * (dp - delta[:, None])).to(k.dtype)
    dq = tl.dot(ds, k, dq)
    return dq


@triton.jit(do_not_specialize=range(6, 29))
def query_gradients(k_ptr, v_ptr, q_ptr, dout_ptr, dq_ptr, terms_ptr, stride_kb, stride_kh, stride_ks, stride_vb,
                    stride_vh, stride_vs, stride_qb, stride_qh, stride_qs, stride_db, stride_dh, stride_ds, stride_dqb,
                    stride_dqh, stride_dqs, heads_q, group, part, seqlen_q, seqlen_k, padded, window_left, window_right,
                    scale_log2, scale):  # fmt: skip
    """dQ of DQ_TILE_M query rows of one head."""
    query_blocks = tl.cdiv(seqlen_q, DQ_TILE_M)
    batch_head = tl.program_id(0) // query_blocks
    row = (query_blocks - 1 - tl.program_id(0) % query_blocks) * DQ_TILE_M
    rows = row + tl.arange(0, DQ_TILE_M)
    batch, head = batch_head // heads_q, batch_head % heads_q
    head_kv = head // group
    q_ptr += (batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + row.to(tl.int64) * stride_qs) * 8
    dout_ptr += (batch.to(tl.int64) * stride_db + head.to(tl.int64) * stride_dh + row.to(tl.int64) * stride_ds) * 8
    dq_ptr += (batch.to(tl.int64) * stride_dqb + head.to(tl.int64) * stride_dqh + row.to(tl.int64) * stride_dqs) * 8
    k_ptr += (batch.to(tl.int64) * stride_kb + head_kv.to(tl.int64) * stride_kh) * 8
    v_ptr += (batch.to(tl.int64) * stride_vb + head_kv.to(tl.int64) * stride_vh) * 8
    q = load_rows(q_ptr, stride_qs, seqlen_q - row, DQ_TILE_M, 256, True)
    dout = load_rows(dout_ptr, stride_ds, seqlen_q - row, DQ_TILE_M, 256, True)
    terms_ptr += batch_head.to(tl.int64) * 2 * padded
    lse2, delta = tl.load(terms_ptr + rows), tl.load(terms_ptr + padded + rows)
    queries = (q, dout, lse2, delta)
    kv = (k_ptr, v_ptr, stride_ks, stride_vs)
    dq = tl.zeros([DQ_TILE_M, 256], tl.float32)

    diagonal = seqlen_k - seqlen_q
    first_key = rows + diagonal - window_left
    last_key = tl.minimum(rows + diagonal + window_right, seqlen_k - 1)
    begin = tl.maximum(row + diagonal - window_left, 0) // DQ_TILE_N * DQ_TILE_N
    end = tl.minimum(row + DQ_TILE_M + diagonal + window_right, seqlen_k)
    full_begin = tl.cdiv(tl.maximum(row + DQ_TILE_M - 1 + diagonal - window_left, 0), DQ_TILE_N) * DQ_TILE_N
    full_end = tl.maximum(tl.minimum(row + diagonal + window_right + 1, seqlen_k), 0) // DQ_TILE_N * DQ_TILE_N
    full_stop = tl.maximum(full_begin, full_end)
    left = tl.maximum(tl.cdiv(tl.minimum(full_begin, end) - begin, DQ_TILE_N), 0)
    right = tl.maximum(tl.cdiv(end - full_stop, DQ_TILE_N), 0)
    for step in tl.range(0, left + right):
        key = tl.where(step < left, begin + step * DQ_TILE_N, full_stop + (step - left) * DQ_TILE_N)
        dq = add_keys(queries, kv, key, first_key, last_key, seqlen_k, scale_log2, dq, MASKED=True)
    for key in tl.range(full_begin, full_end, DQ_TILE_N):
        dq = add_keys(queries, kv, key, first_key, last_key, seqlen_k, scale_log2, dq, MASKED=False)

    store_rows(dq_ptr, stride_dqs, seqlen_q - row, dq * scale, DQ_TILE_M, 256)


@triton.jit
def add_up(parts_ptr, part_rows, parts, out_ptr, stride, valid, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """ROWS x COLUMNS of dK or dV: what ``parts``, each ``part_rows`` rows of WIDTH after the one before, add up to, in that order.

    Four are asked for at a time: one that is not there adds zeros.
    """
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    step = tl.cast(part_rows, tl.int64) * WIDTH
    for part in range(0, parts, 4):
        part_ptr = parts_ptr + part * step
        first = load_rows(part_ptr, WIDTH // 8, valid, ROWS, COLUMNS, True)
        second = load_rows(part_ptr + step, WIDTH // 8, tl.where(part + 1 < parts, valid, 0), ROWS, COLUMNS, True)
        third = load_rows(part_ptr + 2 * step, WIDTH // 8, tl.where(part + 2 < parts, valid, 0), ROWS, COLUMNS, True)
        fourth = load_rows(part_ptr + 3 * step, WIDTH // 8, tl.where(part + 3 < parts, valid, 0), ROWS, COLUMNS, True)
        total += first.to(tl.float32)
        total += second.to(tl.float32)
        total += third.to(tl.float32)
        total += fourth.to(tl.float32)
    rows = tl.arange(0, ROWS)[:, None]
    pointers = out_ptr + rows * (stride * 8) + tl.arange(0, COLUMNS)[None, :]
    tl.store(pointers, total.to(out_ptr.dtype.element_ty), mask=rows < valid)


@triton.jit(do_not_specialize=range(4, 13))
def sum_parts(dk_parts_ptr, dv_parts_ptr, dk_ptr, dv_ptr, stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh,
              stride_dvs, heads_kv, seqlen_k, parts, scale_log2, scale):  # fmt: skip
    """dK, or dV, of ROWS keys of a head, from those of the parts of its query heads."""
    blocks = tl.cdiv(seqlen_k, ROWS)
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * ROWS
    batch, head, valid = batch_head // heads_kv, batch_head % heads_kv, seqlen_k - row
    first_row = batch_head * parts * seqlen_k + row
    if tl.program_id(1) == 0:
        dk = dk_ptr + (batch * stride_dkb + head * stride_dkh + row.to(tl.int64) * stride_dks) * 8
        dk_parts = dk_parts_ptr + first_row * 256
        add_up(dk_parts, seqlen_k, parts, dk, stride_dks, valid, 256, 256)
    if tl.program_id(1) == 1:
        dv = dv_ptr + (batch * stride_dvb + head * stride_dvh + row.to(tl.int64) * stride_dvs) * 8
        dv_parts = dv_parts_ptr + first_row * 256
        add_up(dv_parts, seqlen_k, parts, dv, stride_dvs, valid, 256, 256)


@lru_cache(maxsize=256)
def query_head_parts(
    group: int,
    heads_kv: int,
    seqlen_q: int,
    seqlen_k: int,
    left: int,
    right: int,
    block: int,
    once: int,
    beside: float,
    sms: int,
) -> int:
    """Parts of `group` query heads that take least time in the mean over batches of 1, 2, 4 and so on up to 16k tokens.

    Not in the batch at hand, on which no sequence's dK and dV may depend: the more parts, the sooner few sequences are done, whose
    programs do not fill the SMs, and the more bytes of dK and dV go to memory and back for many.  `left` and `right`: keys beside the
    diagonal that a query sees, -1: no limit; `block`: keys of a program; `once`: query rows that take as long as what each more
    program does once; `beside`: time of programs that run on SMs which these leave, over that of these.
    """
    rows = min(seqlen_q, seqlen_k) if right >= 0 else seqlen_q  # that a block sees at most, and in the mean
    mean = rows - rows * rows / (2 * seqlen_k) if right >= 0 else rows
    if left >= 0:
        rows = mean = min(rows, left + max(right, 0) + block)
    programs = heads_kv * -(-seqlen_k // block)
    batches = [1 << i for i in range(14) if not i or max(seqlen_q, seqlen_k) << i <= 16384]

    def time(heads: int, batch: int) -> float:
        """Of a pass, in rows of a program's loop; all numbers of an H200."""
        longest, parts = heads * rows + once, -(-group // heads)
        if rows == mean and not beside:  # all alike
            on_sms: float = -(-batch * programs * parts // sms) * longest
        else:
            work = group * mean * (1 + beside) + parts * once
            on_sms = max(longest, batch * programs * work / sms + longest / 4)
        # A row of Q, dO, O and dQ takes memory as long as 2.5 blocks of keys take the SMs; dK and dV of a part are 0.4 of a row.
        moved = group * seqlen_q + (0.4 * parts * seqlen_k if parts > 1 else 0)
        return max(on_sms, 2.5 * batch * heads_kv * moved / sms) + 500  # what starts and ends a pass

    times: dict[int, float] = {}
    for heads in range(group, 0, -1):
        times[heads] = 1.0
        for batch in batches:
            times[heads] *= time(heads, batch)
    least = min(times.values())
    # The fewest parts that are about as good.
    return -(-group // next(heads for heads in times if times[heads] <= 1.03 ** len(batches) * least))


@lru_cache(maxsize=16)
def multiprocessors(device):
    """SMs of a GPU."""
    return triton.runtime.driver.active.utils.get_device_properties(device)["multiprocessor_count"]


def workspaces(q, k, v, terms, window_left, window_right):
    """What launches need beside terms.

    dK and dV of parts of the query heads that share a key/value head, None where a program takes them all.
    """
    (batch, heads_q, seqlen_q, _), (_, heads_kv, seqlen_k, _), parts = q.shape, k.shape, 1
    if q.device.type == "cuda" and q.numel() and k.numel():
        parts = query_head_parts(heads_q // heads_kv, heads_kv, seqlen_q, seqlen_k, window_left, window_right,
                         DKV_TILE_N.value, 80, 0.0, multiprocessors(q.device.index))  # fmt: skip
    rows = (batch, heads_kv * parts, seqlen_k)
    dk_parts, dv_parts = (q.new_empty((*rows, width)) if parts > 1 else None for width in (256, 256))
    return dk_parts, dv_parts


def plan(q, k, v, out, lse, dout, dlse, dq, dk, dv, terms, dk_parts, dv_parts, window_left, window_right):
    """(kernel, grid, arguments but the scales) of the launches, () for empty tensors; ValueError for what they do not take."""
    if min(window_left, window_right) < -1:
        raise ValueError(f"window: expected limits of at least -1 (none), got ({window_left}, {window_right})")
    if len(q.shape) != 4 or len(k.shape) != 4 or q.shape[1] != q.shape[1] // max(k.shape[1], 1) * k.shape[1]:
        raise ValueError(f"q, k: expected 4 extents, heads of q a multiple of k's, got {[*q.shape]}, {[*k.shape]}")
    (batch, heads_q, seqlen_q, _), (_, heads_kv, seqlen_k, _) = q.shape, k.shape
    rows, keys = (batch, heads_q, seqlen_q), (batch, heads_kv, seqlen_k)
    dtype = str(q.dtype) if str(q.dtype) in DTYPES else "bf16 or fp16"
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
    for name, x in tensors.items():
        extents = keys if name[-1] in "kv" else rows
        width = 256 if name[-1] in "qk" else 256
        want = (*extents, width), dtype, q.device, [0, 0, 0], (1,), 0
        got = tuple(x.shape), str(x.dtype), x.device, [n % 8 for n in x.stride()[:3]], x.stride()[3:], x.data_ptr() % 16
        if got != want:
            raise ValueError(f"{name}: expected {want}, got {got}: shape, dtype, device, strides % 8, last, start % 16")
    padded = triton.cdiv(seqlen_q, PADDED.value) * PADDED.value
    dlse_or_any = lse if dlse is None else dlse
    for name, x in (("lse", lse), ("dlse", dlse_or_any), ("terms", terms)):
        want = (*rows[:2], 2, padded) if name == "terms" else rows
        if (tuple(x.shape), str(x.dtype), x.device) != (want, "torch.float32", q.device) or not x.is_contiguous():
            raise ValueError(
                f"{name}: expected contiguous float32 {want}, got {x.dtype} {tuple(x.shape)} on {x.device}"
            )
    if q.numel() == 0 or k.numel() == 0:  # the copy engine knows no empty tensors
        return ()
    group, last = heads_q // heads_kv, ()
    part, sum_heads, made_dk, made_dv = group, heads_kv, dk, dv
    if dk_parts is not None:
        sum_heads, made_dk, made_dv = dk_parts.shape[1], dk_parts, dv_parts
        part = triton.cdiv(group, sum_heads // heads_kv)
        for_sums = (dk_parts, dv_parts, dk, dv, *(n // 8 for x in (dk, dv) for n in x.stride()[:3]))
        blocks = triton.cdiv(seqlen_k, ROWS.value) * batch * heads_kv
        last = ((sum_parts, (blocks, 2, 1), (*for_sums, heads_kv, seqlen_k, sum_heads // heads_kv)),)
    no_limit = seqlen_q + seqlen_k
    window_left = no_limit if window_left < 0 else min(window_left, no_limit)
    window_right = no_limit if window_right < 0 else min(window_right, no_limit)
    sizes = (heads_q, group, part, seqlen_q, seqlen_k, padded, window_left, window_right)
    for_rows = (out, dout, lse, dlse_or_any, terms, *(n // 8 for x in (out, dout) for n in x.stride()[:3]))
    for_rows += (heads_q, seqlen_q, padded, 0 if dlse is None else seqlen_q)
    for_key_gradients = (
        q,
        dout,
        k,
        v,
        made_dk,
        made_dv,
        terms,
        *(n // 8 for x in (q, dout, k, v, made_dk, made_dv) for n in x.stride()[:3]),
        *sizes,
    )
    for_queries = (k, v, q, dout, dq, terms, *(n // 8 for x in (k, v, q, dout, dq) for n in x.stride()[:3]), *sizes)
    return (
        (row_terms, (padded // ROWS.value * batch * heads_q, 1, 1), for_rows),
        (
            key_gradients,
            (triton.cdiv(seqlen_k, DKV_TILE_N.value) * batch * heads_kv, sum_heads // heads_kv, 1),
            for_key_gradients,
        ),
        (query_gradients, (triton.cdiv(seqlen_q, DQ_TILE_M.value) * batch * heads_q, 1, 1), for_queries),
        *last,
    )


def launch(q, k, v, out, lse, dout, dq, dk, dv, scale, window_left=-1, window_right=-1, dlse=None, terms=None):
    """Write the gradients of launch(q, k, v, out, lse, scale) of the forward pass to `dq`, `dk` and `dv`.

    q, dq, k, dk: (batch, heads_q | heads_kv, seqlen_q | seqlen_k, 256); v, dv, out, dout: the same with 256; all bf16 or all
    fp16, unit last stride, rows that start at 16 bytes.  lse, as the forward pass wrote it, and dlse, its gradient where it
    has one: (batch, heads_q, seqlen_q), float32, contiguous.  terms: (batch, heads_q, 2, seqlen_q rounded up to PADDED),
    float32, all that is needed beside: written here, allocated where it is None.
    window_left, window_right: keys before and after the diagonal that a row sees, -1 for no limit.
    """
    if not 0.0 < scale <= 2.0e38:  # times log2(e), 2e38 is still a float32
        raise ValueError(f"scale: expected a number above 0 and at most 2e+38, got {scale:g}")
    if terms is None:
        terms = lse.new_empty((*q.shape[:2], 2, triton.cdiv(q.shape[2], PADDED.value) * PADDED.value))
    more = workspaces(q, k, v, terms, window_left, window_right)
    launches = plan(q, k, v, out, lse, dout, dlse, dq, dk, dv, terms, *more, window_left, window_right)
    for (kernel, grid, arguments), options in zip(launches, OPTIONS):
        scales = () if kernel is row_terms else (max(scale * LOG2E.value, 1e-37), scale)  # the first as in the forward
        kernel[grid](*arguments, *scales, **options)
    if not launches:
        for gradient in (dq, dk, dv):
            gradient.zero_()
