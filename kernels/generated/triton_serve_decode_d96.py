"""Attention to serve with for head_dim 96: paged, packed, split over keys, in plain Triton.

Query i of a sequence sees keys from left before to right after position i + keys - queries.  A program owns 16 rows,
the query heads of one key head for consecutive queries, and takes in 64 keys at a time.  Sequences of up to 16 rows are
split every 512 keys, whatever else is in the batch, and the program that finishes a tile last merges its splits in
their order: what a sequence gets depends on it alone.
"""

TILECAST = {
    "tilecast": "0.1.0", "family": "triton_serving", "machine": "a100", "targets": ["sm_80", "sm_90a", "sm_100a", "sm_103a"],
    "pass": "serve",
    "variant": "family=serving,tile_m=16,tile_n=64,warps=4,kv_stages=3,split_keys=512,whole_keys=1024,most_splits=128,most_items=264,programs=3,waves=32,registers=168,cache_bits=16,apart=0,latent=0",
    "workload": {"batch": 2, "heads_q": 64, "heads_kv": 16, "seqlen_q": 1, "seqlen_k": 8192, "head_dim_qk": 96, "head_dim_v": 96, "mask": "causal", "window": None, "dtype": "bf16"},
}  # fmt: skip

import triton
import triton.language as tl

TILE_M = tl.constexpr(16)  # rows of a tile: the query heads that share a key head, for each query
TILE_N = tl.constexpr(64)  # keys of a block
SPLIT = tl.constexpr(512)  # keys of a split, or a multiple of it where a sequence would have too many splits
WHOLE = tl.constexpr(1024)  # keys up to which a sequence is not split
MOST_SPLITS = tl.constexpr(128)  # of a sequence; a power of two
MOST_ITEMS = tl.constexpr(264)  # splits of a sequence times key heads, unless the heads are more
MERGED, MERGED_ROWS = tl.constexpr(8), tl.constexpr(4)  # splits and rows that are merged at a time
PLANNED = tl.constexpr(256)  # sequences that a program looks at together to find its work
FAR = tl.constexpr(1 << 29)  # more keys than a sequence has
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite, so that a row that saw no key yet never computes inf - inf
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True, "maxnreg": 168}
#: Programs that an SM holds at once: as many as are launched where there is work for more.
PROGRAMS = 3


@triton.jit
def lengths(b, there, cu_q, cu_k, used_k, seqlen_q, seqlen_k):
    """(queries, keys) of sequence `b`, 0 where it is not `there`, and never more than `seqlen_q` and `seqlen_k`."""
    q_len = tl.where(there, seqlen_q, 0)
    if cu_q is not None:
        q_len = tl.load(cu_q + b + 1, mask=there, other=0) - tl.load(cu_q + b, mask=there, other=0)
    k_len = tl.where(there, seqlen_k, 0)
    if used_k is not None:
        k_len = tl.load(used_k + b, mask=there, other=0)
    elif cu_k is not None:
        k_len = tl.load(cu_k + b + 1, mask=there, other=0) - tl.load(cu_k + b, mask=there, other=0)
    return tl.minimum(tl.maximum(q_len, 0), seqlen_q), tl.minimum(tl.maximum(k_len, 0), seqlen_k)


@triton.jit
def shares(q_len, k_len, group, split_limit, left, rows_min, rows_max):
    """(row tiles, splits, keys of a split, first key) of a sequence, from its own lengths alone; no tiles where it has
    fewer rows than `rows_min` or more than `rows_max`: another kernel takes it."""
    rows = q_len * group
    tiles = tl.where((rows >= rows_min) & (rows <= rows_max), (rows + TILE_M - 1) // TILE_M, 0)
    first = tl.maximum(k_len - q_len - left, 0) // TILE_N * TILE_N
    span = tl.maximum(k_len - first, 0)
    most = SPLIT * split_limit
    keys = SPLIT * tl.maximum((span + most - 1) // most, 1)
    keys = tl.where((rows <= TILE_M) & (span > WHOLE), keys, FAR)  # more than one tile of rows is work enough
    return tiles, tl.maximum((span + keys - 1) // keys, 1), keys, first


@triton.jit
def load_rows(ptr, offsets, there, COLUMNS: tl.constexpr, CHECKED: tl.constexpr):
    """Rows at `offsets` from `ptr`; if CHECKED, those not `there` read as zero whatever is in memory."""
    pointers = ptr + (offsets[:, None] + tl.arange(0, COLUMNS)[None, :])
    return tl.load(pointers, mask=there[:, None], other=0.0) if CHECKED else tl.load(pointers)


@triton.jit
def block_keys():
    """Numbers of the keys of a block."""
    return tl.arange(0, TILE_N)


@triton.jit
def find_pages(table, key, k_len, PAGE: tl.constexpr):
    """Pages of the block of keys from `key` on: one, or where pages are smaller than a block that of each key.  They are
    looked up a block ahead, so that loads of keys never wait for them."""
    if PAGE == 0:
        page = key
    elif PAGE >= TILE_N:
        page = tl.load(table + key // PAGE, mask=key < k_len, other=0)
    else:
        keys = key + block_keys()
        page = tl.load(table + keys // PAGE, mask=keys < k_len, other=0)
    return page


@triton.jit
def attend(
    q, kv, key, k_len, first_key, last_key, scale_log2, cap_log2, state,
    PAGE: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take in the keys of one block: S = Q K^T, online softmax in base 2, O = O * correction + P V."""
    k_ptr, v_ptr, table, stride_kp, stride_ks, stride_vp, stride_vs = kv
    row_max, row_sum, o_0, o_64, page = state
    q_0, q_64 = q
    rows = block_keys()
    keys = key + rows
    there = keys < k_len
    # 64 bits to a block or a page: a cache may hold more than 2^31 elements.
    if PAGE == 0:
        k_block = k_ptr + tl.cast(key, tl.int64) * stride_ks
        v_block = v_ptr + tl.cast(key, tl.int64) * stride_vs
        k_rows = rows * stride_ks
        v_rows = rows * stride_vs
    elif PAGE >= TILE_N:
        k_block = k_ptr + page.to(tl.int64) * stride_kp + (key % PAGE) * stride_ks
        v_block = v_ptr + page.to(tl.int64) * stride_vp + (key % PAGE) * stride_vs
        k_rows = rows * stride_ks
        v_rows = rows * stride_vs
    else:
        k_block = k_ptr
        v_block = v_ptr
        k_rows = page.to(tl.int64) * stride_kp + (rows % PAGE) * stride_ks
        v_rows = page.to(tl.int64) * stride_vp + (rows % PAGE) * stride_vs
    page = find_pages(table, key + TILE_N, k_len, PAGE)
    k_0 = load_rows(k_block, k_rows, there, 64, MASKED)
    s = tl.dot(q_0, k_0.T)
    k_64 = load_rows(k_block + 64, k_rows, there, 32, MASKED)
    s = tl.dot(q_64, k_64.T, s)
    s = s * scale_log2
    if CAPPED:
        s = cap_log2 - 2.0 * cap_log2 / (tl.math.exp2(s) + 1.0)  # cap * tanh(score / cap)
    if MASKED:
        s = tl.where((keys[None, :] >= first_key[:, None]) & (keys[None, :] <= last_key[:, None]), s, float("-inf"))

    new_max = tl.maximum(row_max, tl.max(s, 1))
    p = tl.math.exp2(s - new_max[:, None])
    correction = tl.math.exp2(row_max - new_max)
    row_sum = row_sum * correction + tl.sum(p, 1)
    v_0 = load_rows(v_block, v_rows, there, 64, MASKED)
    o_0 = tl.dot(p.to(q_0.dtype), v_0, o_0 * correction[:, None])
    v_64 = load_rows(v_block + 64, v_rows, there, 32, MASKED)
    o_64 = tl.dot(p.to(q_0.dtype), v_64, o_64 * correction[:, None])
    return new_max, row_sum, o_0, o_64, page


@triton.jit
def finish(state, out, lse, sinks, head, query, valid, stride_os, stride_oh, stride_ls, stride_lh):
    """Write the rows of a tile: a row that saw no key gives 0 and an lse of -inf, or of its sink."""
    row_max, row_sum, o_0, o_64 = state
    if sinks is not None:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        new_max = tl.maximum(row_max, sink)
        correction = tl.math.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.math.exp2(sink - new_max)
        o_0 = o_0 * correction[:, None]
        o_64 = o_64 * correction[:, None]
        row_max = new_max
    empty, inverse = (row_sum == 0.0)[:, None], (1.0 / row_sum)[:, None]
    out_rows = out + query.to(tl.int64)[:, None] * stride_os + head[:, None] * stride_oh
    tl.store(
        out_rows + tl.arange(0, 64)[None, :],
        tl.where(empty, 0.0, o_0 * inverse).to(out.dtype.element_ty),
        mask=valid[:, None],
    )
    tl.store(
        out_rows + (64 + tl.arange(0, 32))[None, :],
        tl.where(empty, 0.0, o_64 * inverse).to(out.dtype.element_ty),
        mask=valid[:, None],
    )
    if lse is not None:
        lse_rows = lse + query.to(tl.int64) * stride_ls + head.to(tl.int64) * stride_lh
        tl.store(lse_rows, (row_max + tl.math.log2(row_sum)) * LN2, mask=valid)


@triton.jit
def merge(partials, sums, splits, rows, there, slot_rows):
    """The state of some rows of a tile from those of its splits, always in their order."""
    # .cg: other programs wrote these, and the L1 cache knows nothing of it.
    split = tl.arange(0, MOST_SPLITS)
    finished = (split < splits)[:, None] & there[None, :]
    places = sums + split[:, None] * (2 * slot_rows) + rows[None, :]
    split_max = tl.load(places, mask=finished, other=LOWEST, cache_modifier=".cg")
    split_sum = tl.load(places + slot_rows, mask=finished, other=0.0, cache_modifier=".cg")
    row_max = tl.max(split_max, 0)
    row_sum = tl.sum(tl.math.exp2(split_max - row_max[None, :]) * split_sum, 0)
    o_0, o_64 = (
        tl.zeros([MERGED_ROWS, 64], tl.float32),
        tl.zeros([MERGED_ROWS, 32], tl.float32),
    )
    for first in range(0, splits, MERGED):
        some = first + tl.arange(0, MERGED)
        known = (some < splits)[:, None] & there[None, :]
        slots = some[:, None] * slot_rows + rows[None, :]
        at = partials + slots[:, :, None] * 96
        part_0 = tl.load(at + tl.arange(0, 64)[None, None, :], mask=known[:, :, None], other=0.0, cache_modifier=".cg")
        part_64 = tl.load(
            at + (64 + tl.arange(0, 32))[None, None, :], mask=known[:, :, None], other=0.0, cache_modifier=".cg"
        )
        some_max = tl.load(sums + some[:, None] * slot_rows + slots, mask=known, other=LOWEST, cache_modifier=".cg")
        weight = tl.math.exp2(some_max - row_max[None, :])
        o_0 += tl.sum(weight[:, :, None] * part_0, 0)
        o_64 += tl.sum(weight[:, :, None] * part_64, 0)
    return row_max, row_sum, o_0, o_64


@triton.jit
def work_on(
    b, index, problem, queries, lookup, k, v, outputs, scratch, limits, scale_log2, cap_log2,
    PAGE: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """One item of sequence `b`: a split of the keys for one tile of rows of one key head."""
    cu_q, cu_k, used_k, seqlen_q, seqlen_k, heads_kv, group = problem
    q_ptr, sinks, stride_qb, stride_qs, stride_qh = queries
    table, slots, stride_table = lookup
    k_ptr, k_scales, stride_kb, stride_kg, stride_kp, stride_ks, stride_kh = k
    v_ptr, v_scales, stride_vb, stride_vg, stride_vp, stride_vs, stride_vh = v
    out, lse, stride_ob, stride_os, stride_oh, stride_lb, stride_ls, stride_lh = outputs
    partials, arrived, counters, split_bound, slot_rows, split_tiles = scratch
    split_limit, left, right, rows_min, rows_max = limits

    q_len, k_len = lengths(b, b >= 0, cu_q, cu_k, used_k, seqlen_q, seqlen_k)
    tiles, splits, split_keys, sequence_first = shares(q_len, k_len, group, split_limit, left, rows_min, rows_max)
    # Heads of a token are neighbours in memory; late rows, which see the most keys under a causal mask, go first.
    head_kv, index = index % heads_kv, index // heads_kv
    split, tile = index % splits, tiles - 1 - index // splits

    rows = tile * TILE_M + tl.arange(0, TILE_M)
    valid = rows < q_len * group
    query, head = rows // group, head_kv * group + rows % group
    diagonal = k_len - q_len
    first_key = query + diagonal - left
    last_key = tl.minimum(query + diagonal + right, k_len - 1)
    low, high = tile * TILE_M // group, tl.minimum((tile * TILE_M + TILE_M - 1) // group, q_len - 1)
    begin = tl.maximum(low + diagonal - left, 0) // TILE_N * TILE_N
    begin = tl.maximum(begin, sequence_first + split * split_keys)
    end = tl.minimum(tl.minimum(high + diagonal + right + 1, k_len), sequence_first + (split + 1) * split_keys)
    end = tl.maximum(begin, end)

    # Where the sequence begins; 64 bits, for a tensor may hold more than 2^31 elements.
    b_long = tl.cast(b, tl.int64)
    if cu_q is not None:
        q_start = tl.load(cu_q + b).to(tl.int64)
        q_ptr += q_start * stride_qs
        out += q_start * stride_os
        if lse is not None:
            lse += q_start * stride_ls
    else:
        q_ptr += b_long * stride_qb
        out += b_long * stride_ob
        if lse is not None:
            lse += b_long * stride_lb
    if k_scales is not None:
        scale_log2 *= tl.load(k_scales + b * stride_kb + head_kv * stride_kg)
    k_ptr += tl.cast(head_kv, tl.int64) * stride_kh
    v_ptr += tl.cast(head_kv, tl.int64) * stride_vh
    if PAGE > 0:
        table += b_long * stride_table
    elif cu_k is not None:
        k_start = tl.load(cu_k + b).to(tl.int64)
        k_ptr += k_start * stride_ks
        v_ptr += k_start * stride_vs
    else:
        slot = b_long
        if slots is not None:
            slot = tl.load(slots + b).to(tl.int64)
        k_ptr += slot * stride_kp
        v_ptr += slot * stride_vp

    q_rows = query.to(tl.int64) * stride_qs + head * stride_qh
    q_0 = load_rows(q_ptr, q_rows, valid, 64, True)
    q_64 = load_rows(q_ptr + 64, q_rows, valid, 32, True)
    q = (q_0, q_64)
    kv = (k_ptr, v_ptr, table, stride_kp, stride_ks, stride_vp, stride_vs)
    row_max = tl.full([TILE_M], LOWEST, tl.float32)  # in base 2
    row_sum = tl.zeros([TILE_M], tl.float32)
    state = (
        row_max,
        row_sum,
        tl.zeros([TILE_M, 64], tl.float32),
        tl.zeros([TILE_M, 32], tl.float32),
        find_pages(table, begin, k_len, PAGE),
    )
    for key in tl.range(begin, end, TILE_N):
        state = attend(q, kv, key, k_len, first_key, last_key, scale_log2, cap_log2, state, PAGE, CAPPED, MASKED=True)

    row_max, row_sum, o_0, o_64, _ = state
    if v_scales is not None:
        v_scale = tl.load(v_scales + b * stride_vb + head_kv * stride_vg)
        o_0 = o_0 * v_scale
        o_64 = o_64 * v_scale
    state = (row_max, row_sum, o_0, o_64)
    if splits == 1:
        finish(state, out, lse, sinks, head, query, valid, stride_os, stride_oh, stride_ls, stride_lh)
    else:
        counter = (b_long * heads_kv + head_kv) * split_tiles + tile
        first_slot = counter * split_bound
        sums = partials + tl.cast(counters, tl.int64) * split_bound * slot_rows * 96 + first_slot * 2 * slot_rows
        partials += first_slot * slot_rows * 96
        places = tl.arange(0, TILE_M)
        tl.store(sums + split * 2 * slot_rows + places, row_max, mask=valid)
        tl.store(sums + split * 2 * slot_rows + slot_rows + places, row_sum, mask=valid)
        at = partials + (split * slot_rows + places)[:, None] * 96
        tl.store(at + tl.arange(0, 64)[None, :], o_0, mask=valid[:, None])
        tl.store(at + (64 + tl.arange(0, 32))[None, :], o_64, mask=valid[:, None])
        # All threads have stored before one of them says so; who finds all others there merges, and sets the counter back
        # for the next launch.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + counter, 1, sem="release")
        if before == splits - 1:
            tl.atomic_xchg(arrived + counter, 0, sem="acquire")
            tl.debug_barrier()
            for row in range(0, tl.minimum(q_len * group - tile * TILE_M, TILE_M), MERGED_ROWS):
                mine = row + tl.arange(0, MERGED_ROWS)
                some = tile * TILE_M + mine
                there = some < q_len * group
                merged = merge(partials, sums, splits, mine, there, slot_rows)
                finish(
                    merged, out, lse, sinks, head_kv * group + some % group, some // group, there,
                    stride_os, stride_oh, stride_ls, stride_lh,
                )  # fmt: skip


# Lengths, strides and head counts vary from call to call: without this each new divisibility by 16 would recompile.
@triton.jit(
    do_not_specialize=[
        "stride_qb",
        "stride_qs",
        "stride_qh",
        "stride_ob",
        "stride_os",
        "stride_oh",
        "stride_kp",
        "stride_ks",
        "stride_kh",
        "stride_vp",
        "stride_vs",
        "stride_vh",
        "stride_lb",
        "stride_ls",
        "stride_lh",
        "stride_table",
        "stride_kb",
        "stride_kg",
        "stride_vb",
        "stride_vg",
        "batch",
        "heads_kv",
        "group",
        "seqlen_q",
        "seqlen_k",
        "split_limit",
        "left",
        "right",
        "rows_min",
        "rows_max",
        "split_bound",
        "slot_rows",
        "split_tiles",
    ]
)
def attention(q_ptr, k_ptr, v_ptr, out, lse, sinks, cu_q, cu_k, used_k, table, slots, k_scales, v_scales, partials,
              arrived, stride_qb, stride_qs, stride_qh, stride_ob, stride_os, stride_oh, stride_kp, stride_ks,
              stride_kh, stride_vp, stride_vs, stride_vh, stride_lb, stride_ls, stride_lh, stride_table, stride_kb,
              stride_kg, stride_vb, stride_vg, batch, heads_kv, group, seqlen_q, seqlen_k, split_limit, left, right,
              rows_min, rows_max, split_bound, slot_rows, split_tiles, scale_log2, cap_log2, PAGE: tl.constexpr, CAPPED:
              tl.constexpr):  # fmt: skip
    """Every program takes each num_programs-th item of the batch: sequences in order, of each its tiles, splits and heads."""
    # Strides come in units of 16 bytes, so that the compiler knows how rows are aligned.
    problem = (cu_q, cu_k, used_k, seqlen_q, seqlen_k, heads_kv, group)
    queries = (q_ptr, sinks, stride_qb * 8, stride_qs * 8, stride_qh * 8)
    lookup = (table, slots, stride_table)
    k = (k_ptr, k_scales, stride_kb, stride_kg, tl.cast(stride_kp, tl.int64) * 8, stride_ks * 8, stride_kh * 8)
    v = (v_ptr, v_scales, stride_vb, stride_vg, tl.cast(stride_vp, tl.int64) * 8, stride_vs * 8, stride_vh * 8)
    outputs = (out, lse, stride_ob * 8, stride_os * 8, stride_oh * 8, stride_lb, stride_ls, stride_lh)
    scratch = (partials, arrived, batch * heads_kv * split_tiles, split_bound, slot_rows, split_tiles)
    limits = (split_limit, left, right, rows_min, rows_max)
    programs = tl.num_programs(0)
    done = 0
    for first in range(0, batch, PLANNED):
        b = first + tl.arange(0, PLANNED)
        q_len, k_len = lengths(b, b < batch, cu_q, cu_k, used_k, seqlen_q, seqlen_k)
        tiles, splits, _, _ = shares(q_len, k_len, group, split_limit, left, rows_min, rows_max)
        ends = done + tl.cumsum(tiles * splits * heads_kv, 0)
        total = tl.max(ends, 0)
        start = done + (tl.program_id(0) + programs - done % programs) % programs
        for item in range(start, total, programs):
            place = tl.sum((ends <= item).to(tl.int32), 0)
            before = tl.max(tl.where(ends <= item, ends, done), 0)
            work_on(
                first + place, item - before, problem, queries, lookup, k, v, outputs, scratch, limits, scale_log2, cap_log2,
                PAGE, CAPPED,
            )  # fmt: skip
        done = total


def scratch(batch, heads_kv, group, seqlen_q, seqlen_k, sms):
    """(float32 of partial outputs with their maxima and sums, int32 of counters) that a launch works in on a device of `sms`.

    The counters must be 0 before the first launch; every launch leaves them so.
    """
    tiles = batch * heads_kv * _split_tiles(seqlen_q, group)
    slots = tiles * _split_bound(seqlen_k, heads_kv) * min(TILE_M.value, seqlen_q * group)
    return max(1, slots * 98), max(1, tiles)


def _split_limit(heads_kv):
    """Splits that a sequence may have."""
    return max(1, min(MOST_SPLITS.value, MOST_ITEMS.value // heads_kv))


def _split_tiles(seqlen_q, group):
    """Tiles of a sequence and key head that may be split."""
    return 1


def _split_bound(seqlen_k, heads_kv):
    """Splits that a sequence of up to seqlen_k keys has at most."""
    return 1 if seqlen_k <= WHOLE.value else min(_split_limit(heads_kv), -(-seqlen_k // SPLIT.value))


def plan(q, k, v, out, lse, lists, seqlen_q, seqlen_k, window, capped, rows, work, sms):
    """Grid, arguments but the two scales, flags; ValueError for what the kernel does not take.

    lists: cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, cache_batch_idx, sinks, k_descale, v_descale, each a tensor or None; seqlen_q,
    seqlen_k: no sequence has more; window: (left, right), -1 for no limit; capped: whether there is a softcap; rows: (fewest, most) rows of the sequences to
    work on; work: the tensors of `scratch`; sms: of the device.
    """
    cu_q, cu_k, used_k, table, slots, sinks, k_scales, v_scales = lists
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if q.shape[-1] != 96 or k.shape[-1] != 96 or v.shape[-1] != 96 or heads_q % heads_kv:
        raise ValueError(
            f"q, k, v: expected head_dim 96, 96, 96 and heads of q a multiple of k's, got {[*q.shape]}, {[*k.shape]}, {[*v.shape]}"
        )
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        kind, unit = (str(q.dtype), 8)
        want = (kind if str(q.dtype) in DTYPES else "bf16 or fp16", q.device, 1, [0] * (len(x.shape) - 1), 0)
        got = (str(x.dtype), x.device, x.stride()[-1], [n % unit for n in x.stride()[:-1]], x.data_ptr() % 16)
        if got != want:
            raise ValueError(
                f"{name}: expected {want}, got {got}: dtype, device, last stride, strides % {unit}, start % 16"
            )
        if name in ("q", "out") and max(x.stride()[0] if cu_q is None else 0, heads_q * x.stride()[-2]) >= 1 << 31:
            raise ValueError(
                f"{name}: expected less than 2^31 elements from a sequence to the next and over its heads, got strides {[*x.stride()]}"
            )
    if any(x is not None and str(x.dtype) != "torch.float32" for x in (k_scales, v_scales)):
        raise ValueError("k_descale, v_descale: expected torch.float32 (batch, heads of k)")
    group = heads_q // heads_kv
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    page = 0 if table is None else k.shape[1]
    if page and (page & (page - 1) or not 16 <= page <= 256):
        raise ValueError(f"k: expected pages of 16, 32, 64, 128 or 256 tokens, got {page}")
    left, right = (FAR.value if limit < 0 else min(limit, FAR.value) for limit in window)
    splits, tile_m = _split_bound(seqlen_k, heads_kv), TILE_M.value
    # No more than the rows of all fill, nor than all sequences of as many as the launch takes: programs without one would take SMs from the launch after.
    tiles = q.shape[0] * (1 if cu_q is not None else seqlen_q) * group // tile_m + batch
    tiles = min(tiles, batch * -(-min(seqlen_q * group, rows[1]) // tile_m))
    items = heads_kv * max(tiles, batch * splits)
    q_strides, out_strides = ([0, *x.stride()[:-1]][-3:] for x in (q, out))
    k_strides, v_strides = ([0, *x.stride()[:-1]][-3:] for x in (k, v))
    lse_strides = (
        (0, 0, 0) if lse is None else (0, 1, lse.stride(0)) if cu_q is not None else (lse.stride(0), 1, lse.stride(1))
    )
    arguments = (
        q, k, v, out, lse, sinks, cu_q, cu_k, used_k, table, slots, k_scales, v_scales, *work,
        *(n // 8 for n in (*q_strides, *out_strides)), *(n // 8 for n in (*k_strides, *v_strides)),
        *lse_strides, 0 if table is None else table.stride(0), 
        *(n for x in (k_scales, v_scales) for n in ((0, 0) if x is None else x.stride())), batch, heads_kv, group, seqlen_q, min(seqlen_k, FAR.value), _split_limit(heads_kv), left, right,
        max(rows[0], 1), min(rows[1], FAR.value), splits, min(tile_m, seqlen_q * group), _split_tiles(seqlen_q, group),
    )  # fmt: skip
    return (max(1, min(items, PROGRAMS * sms * 32)), 1, 1), arguments, (page, capped)


def scales(scale, softcap):
    """(scale of scores, cap), both for exponents of 2; a softcap of 0 is none."""
    if not 0.0 < scale <= 2.0e38:  # times log2(e), 2e38 is still a float32
        raise ValueError(f"scale: expected a number above 0 and at most 2e+38, got {scale:g}")
    scale_log2 = scale * LOG2E.value
    return (max(2.0 * scale_log2 / softcap, 1e-37), softcap * LOG2E.value) if softcap else (max(scale_log2, 1e-37), 0.0)


DTYPES = ("torch.bfloat16", "torch.float16")


def launch(
    q, k, v, out, lse, scale, cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None, block_table=None, cache_batch_idx=None,
    sinks=None, k_descale=None, v_descale=None, max_seqlen_q=None, max_seqlen_k=None, window=(-1, -1), softcap=0.0, rows=(1, 1 << 29), work=None, sms=None,
):  # fmt: skip
    """Write attention of every sequence with rows[0] to rows[1] rows (queries * heads_q / heads_kv) to `out`, and the
    logarithm of its row sums to `lse` unless that is None.

    q, out: (batch, seqlen_q, heads_q, 96 | 96), or (total, heads_q, ...) with cu_seqlens_q.  k, v: (batch, seqlen_k, heads_kv,
    96 | 96), with block_table (batch, pages of a sequence) instead (pages, page size, heads_kv, ...), with cu_seqlens_k (total,
    heads_kv, ...); all bf16 or all fp16, or k and v bytes of e4m3; unit last stride, rows that start at 16 bytes.  lse: float32 (batch, heads_q,
    seqlen_q) or (heads_q, total).  Lists are int32, sinks float32 or as q; k_descale, v_descale: float32 (batch, heads_kv),
    factors of what a cache holds.
    """
    if max_seqlen_q is None:
        max_seqlen_q = q.shape[0] if cu_seqlens_q is not None else q.shape[1]
    if max_seqlen_k is None:
        whole = k.shape[0] if cu_seqlens_k is not None else k.shape[1]
        max_seqlen_k = whole if block_table is None else whole * block_table.shape[1]
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if sms is None:
        import torch

        sms = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 2
    if work is None:
        import torch

        sizes = scratch(batch, k.shape[-2], q.shape[-2] // k.shape[-2], max_seqlen_q, max_seqlen_k, sms)
        kinds = (torch.float32, torch.int32)
        work = [torch.zeros(n, dtype=kind, device=q.device) for n, kind in zip(sizes, kinds)]
    lists = (cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, cache_batch_idx, sinks, k_descale, v_descale)
    grid, arguments, flags = plan(
        q, k, v, out, lse, lists, max_seqlen_q, max_seqlen_k, window, softcap != 0.0, rows, work, sms
    )
    attention[grid](*arguments, *scales(scale, softcap), *flags, **OPTIONS)
