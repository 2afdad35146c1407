"""Attention forward of short sequences for head_dim 64 in plain Triton.

Query i sees keys from window_left before to window_right after position i + seqlen_k - seqlen_q.  A program owns 64
rows, the query heads of one key head for consecutive queries, and takes in 64 keys at a time; every block that a row
does not see whole is masked, and where all keys are one block there is no loop.  Parts of 256 keys have programs of
their own where tiles are few, and a second launch joins them.  Runs on Hopper with triton and torch alone.  Generated
by tilecast: regenerate it instead of editing it.
"""

TILECAST = {
    "tilecast": "0.1.0", "family": "triton_short", "machine": "h200-sxm", "targets": ["sm_90a"],
    "pass": "short",
    "variant": "family=fa2,tile_m=64,tile_n=64,warps=4,kv_stages=3,scheduler=grid",
    "workload": {"batch": 16, "heads_q": 128, "heads_kv": 32, "seqlen_q": 64, "seqlen_k": 1024, "head_dim_qk": 64, "head_dim_v": 64, "mask": "none", "window": None, "dtype": "bf16"},
}  # fmt: skip

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

TILE_M = tl.constexpr(64)  # rows of a program: the query heads that share a key head, for each query
TILE_N = tl.constexpr(64)  # keys of a block
PART = tl.constexpr(
    256
)  # keys whose result is made apart from others' and joined with theirs in their order, whoever makes it
QK_COLUMNS, V_COLUMNS = tl.constexpr(64), tl.constexpr(64)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite, so that a row that saw no key yet never computes inf - inf
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = 1.4426950408889634
DTYPES = ("torch.bfloat16", "torch.float16")
OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
JOINED, AHEAD = (
    tl.constexpr(16),
    tl.constexpr(8),
)  # rows of a program that joins parts, and parts that it has asked for at a time
JOIN_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
APART = 66  # most tiles whose parts have programs of their own: of more a program takes all parts, with the same bits
HELD = 32  # numbers of O that a thread holds
ENDED = tl.constexpr("wgmma.wait_group.sync.aligned 0; " + " ".join(f"mov.b32 ${i}, ${i + HELD};" for i in range(HELD)))
ALL_HELD = tl.constexpr(",".join(["=r"] * HELD + ["r"] * HELD))


@triton.jit
def load_rows(ptr, offsets, eighths, COLUMNS: tl.constexpr):
    """Rows at `offsets` from `ptr`, which are all there; columns that a head does not have (`eighths` of 8 columns, None: all) read as zero."""
    pointers = ptr + (offsets[:, None] + tl.arange(0, COLUMNS)[None, :])
    if eighths is None:
        loaded = tl.load(pointers)
    else:
        loaded = tl.load(pointers, mask=(tl.arange(0, COLUMNS) // 8 < eighths)[None, :], other=0.0)
    return loaded


@triton.jit
def seen_scores(q, k, keys, first_key, last_key, whole):
    """S = Q K^T, -inf where a row does not see a key; `whole`: every row sees them all."""
    s = tl.dot(q, k.T)
    if not whole:
        s = hidden(s, keys, first_key, last_key)
    return s


@triton.jit
def hidden(s, keys, first_key, last_key):
    """Scores, -inf where a row does not see a key."""
    seen = keys[None, :] <= last_key[:, None]
    if first_key is not None:
        seen = seen & (keys[None, :] >= first_key[:, None])
    return tl.where(seen, s, float("-inf"))


@triton.jit
def joined(state, other):
    """What rows have of some keys and of the part behind these, together; what is added to a product is said, so that every form has the same bits."""
    row_max, row_sum, o = state
    other_max, other_sum, other_o = other
    new_max = tl.maximum(row_max, other_max)
    kept, taken = tl.math.exp2(row_max - new_max), tl.math.exp2(other_max - new_max)
    row_sum = tl.fma(other_sum, taken, row_sum * kept)
    o = tl.fma(other_o, tl.broadcast_to(taken[:, None], other_o.shape), o * kept[:, None])
    return new_max, row_sum, o


@triton.jit
def ended(o):
    """O once the product that adds to it has ended: Triton 3.6 lets that run on beside the next scores, and does not wait for it under an `if`."""
    return tl.inline_asm_elementwise(ENDED, ALL_HELD, [o], dtype=tl.float32, is_pure=False, pack=32)


@triton.jit
def zeros_like(o):
    """Zeros that the compiler does not know to be zeros: such it would select outside of the `if`, where it has to wait for O."""
    return tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [o], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def attend(q, kv, key, last, first_key, last_key, scale_log2, state, whole):
    """Take in the keys of one block: S = Q K^T, online softmax in base 2, O = O * correction + P V; state None: there were none before."""
    k_ptr, v_ptr, stride_ks, stride_vs, eighths_qk, eighths_v = kv
    keys = key + tl.arange(0, TILE_N)
    # In place of keys behind the last that a row of the tile sees it is read again, and hidden: no load asks what is there.
    there = tl.minimum(keys, last)
    k = load_rows(k_ptr, there * stride_ks, eighths_qk, QK_COLUMNS)
    v = load_rows(v_ptr, there * stride_vs, eighths_v, V_COLUMNS)
    s = seen_scores(q, k, keys, first_key, last_key, whole)
    new_max = tl.max(s, 1) * scale_log2
    if state is None:
        new_max = tl.maximum(new_max, LOWEST)
        p = tl.math.exp2(s * scale_log2 - new_max[:, None])
        row_sum = tl.sum(p, 1)
        o = tl.dot(p.to(v.dtype), v)
    else:
        row_max, row_sum, o = state
        new_max = tl.maximum(row_max, new_max)
        p = tl.math.exp2(s * scale_log2 - new_max[:, None])
        correction = tl.math.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.sum(p, 1)
        o = tl.dot(p.to(v.dtype), v, o * correction[:, None])
    return new_max, row_sum, o


@triton.jit
def write(state, out_ptr, out_rows, eighths, valid, FIRST: tl.constexpr, COLUMNS: tl.constexpr):
    """Write COLUMNS of rows of the output from FIRST on; a row that saw no key has row_sum 0, and gives 0."""
    _, row_sum, o = state
    out = tl.where((row_sum == 0.0)[:, None], 0.0, o * (1.0 / row_sum)[:, None]).to(out_ptr.dtype.element_ty)
    columns = tl.arange(0, COLUMNS) + FIRST
    stored = valid[:, None]
    if eighths is not None:
        stored = stored & (columns // 8 < eighths)[None, :]
    tl.store(out_ptr + (out_rows[:, None] + columns[None, :]), out, mask=stored)


@triton.jit
def in_elements(stride, far):
    """A stride in units of 16 bytes in elements; 64 bits where tiles or keys reach as `far`."""
    return stride * 8 if far is None else tl.cast(stride, tl.int64) * 8


# Lengths, strides and head counts vary from call to call: without this each new divisibility by 16 would recompile.
@triton.jit(
    do_not_specialize=[
        "stride_qb",
        "stride_qh",
        "stride_qs",
        "stride_kb",
        "stride_kh",
        "stride_ks",
        "stride_vb",
        "stride_vh",
        "stride_vs",
        "stride_ob",
        "stride_oh",
        "stride_os",
        "heads_kv",
        "group",
        "inverse",
        "seqlen_q",
        "seqlen_k",
        "window_right",
        "window_left",
        "eighths_qk",
        "eighths_v",
        "several",
        "far",
        "parts",
        "follows",
    ]
)
def attention(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, partials, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh,
              stride_ks, stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os, heads_kv, group, inverse,
              seqlen_q, seqlen_k, window_right, window_left, eighths_qk, eighths_v, several, far, parts, follows,
              scale_log2):  # fmt: skip
    """TILE_M rows of the heads that share a key head; strides come in units of 16 bytes, so that the compiler knows how rows are aligned.

    What a launch of few programs takes is above all what it takes to read their instructions once: a tile has one pointer of 64 bits to
    each tensor, and no thread divides.
    """
    tiles = tl.cdiv(seqlen_q * group, TILE_M)
    # Programs of their own have the parts of a tile's keys, or one has all of them in turn.
    number = tl.program_id(0)
    if partials is not None:
        number, part = tl.program_id(0) // parts, tl.program_id(0) % parts
        if follows is not None:
            gdc_launch_dependents()
    place, first = number // tiles, number % tiles * TILE_M
    # 64 bits: a tensor may hold more than 2^31 elements.
    batch, head_kv = (place // heads_kv).to(tl.int64) * 8, place % heads_kv
    first_query = first // group
    wide_query, wide_head_kv = tl.cast(first_query, tl.int64) * 8, tl.cast(head_kv, tl.int64) * 8
    wide_head = wide_head_kv * group
    q_ptr += batch * stride_qb + wide_head * stride_qh + wide_query * stride_qs
    k_ptr += batch * stride_kb + wide_head_kv * stride_kh
    v_ptr += batch * stride_vb + wide_head_kv * stride_vh
    out_ptr += batch * stride_ob + wide_head * stride_oh + wide_query * stride_os

    # Row i of the tile: how many queries after its first one, and which head.
    rows = first - first_query * group + tl.arange(0, TILE_M)
    # rows // group: exact where 2^30 is more than (TILE_M + group) * group
    later = tl.umulhi(rows * 4, inverse) if far is None else rows // group
    head = rows - later * group
    query = first_query + later
    valid = query < seqlen_q
    # In place of rows that are not there the last query's are computed again, and not stored.
    later_there = tl.minimum(later, seqlen_q - 1 - first_query)
    q_rows = head * in_elements(stride_qh, far) + later_there * in_elements(stride_qs, far)
    q = load_rows(q_ptr, q_rows, eighths_qk, QK_COLUMNS)
    kv = (k_ptr, v_ptr, in_elements(stride_ks, far), in_elements(stride_vs, far), eighths_qk, eighths_v)

    # Row i sees keys i + diagonal - window_left to i + diagonal + window_right.
    diagonal = seqlen_k - seqlen_q
    first_key = None if window_left is None else query + diagonal - window_left
    last_key = tl.minimum(query + diagonal + window_right, seqlen_k - 1)
    last_query = tl.minimum((first + TILE_M - 1) // group, seqlen_q - 1)
    last = tl.minimum(last_query + diagonal + window_right, seqlen_k - 1)
    if several is None:  # all keys are one block: no loop, no pipeline
        state = attend(q, kv, 0, tl.maximum(last, 0), first_key, last_key, scale_log2, None, False)
    else:
        row_max = tl.full([TILE_M], LOWEST, tl.float32)  # in base 2: max over keys of s * scale_log2
        row_sum = tl.zeros([TILE_M], tl.float32)
        state = (row_max, row_sum, tl.zeros([TILE_M, V_COLUMNS], tl.float32))
        begin, end = 0, last + 1
        if window_left is not None:
            begin = tl.maximum(first_query + diagonal - window_left, 0) // TILE_N * TILE_N
        # Blocks of these keys every row sees whole.
        all_from = 0 if window_left is None else last_query + diagonal - window_left
        all_to = tl.minimum(first_query + diagonal + window_right + 1, seqlen_k)
        if partials is not None:
            begin, end = tl.maximum(begin, part * PART), tl.minimum(end, (part + 1) * PART)
        if parts is not None and partials is None:
            before = state
            for key in tl.range(begin, end, TILE_N):
                whole = (key >= all_from) & (key + TILE_N <= all_to)
                state = attend(q, kv, key, last, first_key, last_key, scale_log2, state, whole)
                # At the end of a block: at its head the next scores would wait for O, in every block.
                if (key + TILE_N) % PART.value == 0:
                    part_max, part_sum, o = state
                    o = ended(o)
                    before = joined(before, (part_max, part_sum, o))
                    state = (row_max, row_sum, zeros_like(o))
            state = joined(before, state)
        else:
            for key in tl.range(begin, end, TILE_N):
                whole = (key >= all_from) & (key + TILE_N <= all_to)
                state = attend(q, kv, key, last, first_key, last_key, scale_log2, state, whole)
    if partials is None:
        out_rows = head * in_elements(stride_oh, far) + later_there * in_elements(stride_os, far)
        write(state, out_ptr, out_rows, eighths_v, valid, 0, V_COLUMNS)
        row_max, row_sum, _ = state
        lse = (row_max + tl.math.log2(row_sum)) * LN2  # of a row that saw no key log2(0) = -inf
        lse_ptr += tl.cast(place, tl.int64) * group * seqlen_q + first_query
        tl.store(lse_ptr + (tl.cast(head, tl.int64) * seqlen_q + later), lse, mask=valid)
    else:
        row_max, row_sum, o = state
        places = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
        sums = partials + tl.num_programs(0) * (TILE_M * V_COLUMNS)
        tl.store(sums + places, row_max)
        tl.store(sums + tl.num_programs(0) * TILE_M + places, row_sum)
        tl.store(partials + (places[:, None] * V_COLUMNS + tl.arange(0, V_COLUMNS)[None, :]), o, mask=valid[:, None])


@triton.jit(
    do_not_specialize=[
        "stride_ob",
        "stride_oh",
        "stride_os",
        "heads_kv",
        "group",
        "seqlen_q",
        "seqlen_k",
        "window_right",
        "window_left",
        "eighths_v",
        "parts",
        "slots",
        "follows",
    ]
)
def attention_join(partials, out_ptr, lse_ptr, stride_ob, stride_oh, stride_os, heads_kv, group, seqlen_q, seqlen_k,
                   window_right, window_left, eighths_v, parts, slots, follows):  # fmt: skip
    """Join what programs have left of the parts of some rows' keys, in the order of the keys, and write the rows."""
    tiles = tl.cdiv(seqlen_q * group, TILE_M)
    number, row = tl.program_id(0) // (TILE_M // JOINED), tl.program_id(0) % (TILE_M // JOINED) * JOINED
    place, first = number // tiles, number % tiles * TILE_M
    rows = first + row + tl.arange(0, JOINED)
    query, head = rows // group, place % heads_kv * group + rows % group
    valid = query < seqlen_q
    # The parts that the tile has.
    diagonal = seqlen_k - seqlen_q
    last_query = tl.minimum((first + TILE_M - 1) // group, seqlen_q - 1)
    last = tl.minimum(last_query + diagonal + window_right, seqlen_k - 1)
    begin, end = 0, tl.maximum(last, 0) // PART + 1
    if window_left is not None:
        begin = tl.maximum(first // group + diagonal - window_left, 0) // PART
    places = number * parts * TILE_M + row + tl.arange(0, JOINED)
    columns = tl.arange(0, V_COLUMNS)
    state = (
        tl.full([JOINED], LOWEST, tl.float32),
        tl.zeros([JOINED], tl.float32),
        tl.zeros([JOINED, V_COLUMNS], tl.float32),
    )
    if follows is not None:
        gdc_wait()  # nothing so far is of the launch before
    sums = partials + slots * (TILE_M * V_COLUMNS)
    for done in range(begin, end, AHEAD):
        found = ()
        for i in tl.static_range(AHEAD):
            at = places + tl.minimum(done + i, end - 1) * TILE_M
            # .cg: the L1 cache knows nothing of what other programs write.
            row_max = tl.load(sums + at, cache_modifier=".cg")
            row_sum = tl.load(sums + slots * TILE_M + at, cache_modifier=".cg")
            o = tl.load(
                partials + (at[:, None] * V_COLUMNS + columns[None, :]),
                mask=valid[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            found = found + (row_max, row_sum, o)
        for i in tl.static_range(AHEAD):
            if done + i < end:
                state = joined(state, (found[3 * i], found[3 * i + 1], found[3 * i + 2]))
    batch = (place // heads_kv).to(tl.int64) * 8
    out_rows = head.to(tl.int64) * (stride_oh.to(tl.int64) * 8) + query.to(tl.int64) * (stride_os.to(tl.int64) * 8)
    write(state, out_ptr + batch * stride_ob, out_rows, eighths_v, valid, 0, V_COLUMNS)
    row_max, row_sum, _ = state
    sums = lse_ptr + (tl.cast(place // heads_kv * heads_kv * group, tl.int64) + head) * seqlen_q + query
    tl.store(sums, (row_max + tl.math.log2(row_sum)) * LN2, mask=valid)


def scratch(q, k, *_):
    """float32 numbers that a launch works in; 0: none."""
    (batch, heads_q, seqlen_q, _), (_, heads_kv, seqlen_k, _) = q.shape, k.shape
    if not (q.numel() and k.numel()):
        return 0
    tiles = triton.cdiv(seqlen_q * (heads_q // heads_kv), TILE_M.value) * batch * heads_kv
    parts = triton.cdiv(seqlen_k, PART.value)
    return tiles * parts * TILE_M.value * (V_COLUMNS.value + 2) if parts > 1 and tiles <= APART else 0


def room(q, k):
    """These numbers; None: none."""
    import torch

    floats = scratch(q, k)
    return q.new_empty((floats,), dtype=torch.float32) if floats else None


def plan(q, k, v, out, lse, window_left, window_right, partials=None, follows=None):
    """Grid and arguments but the scale, () for empty tensors; ValueError for what the kernel does not take."""
    if min(window_left, window_right) < -1:
        raise ValueError(f"window: expected limits of at least -1 (none), got ({window_left}, {window_right})")
    if len(q.shape) != 4 or len(k.shape) != 4 or q.shape[1] != q.shape[1] // max(k.shape[1], 1) * k.shape[1]:
        raise ValueError(f"q, k: expected 4 extents, heads of q a multiple of k's, got {[*q.shape]}, {[*k.shape]}")
    (batch, heads_q, seqlen_q, _), (_, heads_kv, seqlen_k, _) = q.shape, k.shape
    rows, keys = (batch, heads_q, seqlen_q), (batch, heads_kv, seqlen_k)
    taken = "a multiple of 8 up to 64"
    head_dim, head_dim_v = (n if n in range(8, 65, 8) else taken for n in (q.shape[-1], v.shape[-1]))
    shapes = {"q": (*rows, head_dim), "k": (*keys, head_dim), "v": (*keys, head_dim_v), "out": (*rows, head_dim_v)}
    for x, (name, shape) in zip((q, k, v, out), shapes.items()):
        want = shape, str(q.dtype) if str(q.dtype) in DTYPES else "bf16 or fp16", q.device, [0, 0, 0], (1,), 0
        got = tuple(x.shape), str(x.dtype), x.device, [n % 8 for n in x.stride()[:3]], x.stride()[3:], x.data_ptr() % 16
        if got != want:
            raise ValueError(f"{name}: expected {want}, got {got}: shape, dtype, device, strides % 8, last, start % 16")
    if (tuple(lse.shape), str(lse.dtype), lse.device) != (rows, "torch.float32", q.device) or not lse.is_contiguous():
        raise ValueError(f"lse: expected contiguous float32 {rows}, got {lse.dtype} {tuple(lse.shape)} on {lse.device}")
    if q.numel() == 0 or k.numel() == 0:  # the copy engine knows no empty tensors
        return ()
    no_limit = seqlen_q + seqlen_k
    window_left = no_limit if window_left < 0 else min(window_left, no_limit)
    window_right = no_limit if window_right < 0 else min(window_right, no_limit)
    group = heads_q // heads_kv
    programs = triton.cdiv(seqlen_q * group, TILE_M.value) * batch * heads_kv
    eighths = None if head_dim == 64 else head_dim // 8, None if head_dim_v == 64 else head_dim_v // 8
    several = seqlen_k if seqlen_k > TILE_N.value else None
    # Rows of a tile and keys lie at 32-bit offsets, and rows are divided by multiplying, where they do not reach far.
    tall = min(seqlen_q, TILE_M.value)
    reach = (group * x.stride(1) + tall * x.stride(2) for x in (q, out))
    far = 1 if max(*reach, *(seqlen_k * x.stride(2) for x in (k, v))) >= 2**31 or group > 16384 else None
    left = window_left if window_left < no_limit else None
    parts = triton.cdiv(seqlen_k, PART.value) if seqlen_k > PART.value else None
    programs *= 1 if partials is None else parts
    sizes = (
        heads_kv,
        group,
        -(-(1 << 30) // group),
        seqlen_q,
        seqlen_k,
        window_right,
        left,
        *eighths,
        several,
        far,
        parts,
        follows,
    )
    of_join = (heads_kv, group, seqlen_q, seqlen_k, window_right, left, eighths[1], parts, programs, follows)
    joins = programs // (parts or 1) * TILE_M.value // JOINED.value
    joined = (
        ()
        if partials is None
        else (((joins, 1, 1), (partials, out, lse, *(n // 8 for n in out.stride()[:3]), *of_join)),)
    )
    return (
        (programs, 1, 1),
        (q, k, v, out, lse, partials, *(n // 8 for x in (q, k, v, out) for n in x.stride()[:3]), *sizes),
        *joined,
    )


def launch(q, k, v, out, lse, scale, window_left=-1, window_right=-1):
    """Write softmax(scale * q k^T) v to `out` and the logarithm of the row sums to `lse`, unless that is None.

    q, k: (batch, heads_q | heads_kv, seqlen_q | seqlen_k, 64); v, out: the same with 64; all bf16 or all fp16,
    unit last stride, rows that start at 16 bytes.  lse: (batch, heads_q, seqlen_q), float32, contiguous.
    Or q and k, or v and out, with fewer columns, a multiple of 8.
    window_left, window_right: keys before and after the diagonal that a row sees, -1 for no limit.
    """
    if not 0.0 < scale <= 2.0e38:  # the row maximum is taken before scaling; times log2(e), 2e38 is still a float32
        raise ValueError(f"scale: expected a number above 0 and at most 2e+38, got {scale:g}")
    if lse is None:
        import torch

        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if planned := plan(q, k, v, out, lse, window_left, window_right, room(q, k)):
        grid, arguments, *joined = planned
        attention[grid](*arguments, max(scale * LOG2E, 1e-37), **OPTIONS)  # a hidden score, -inf, times 0 would be NaN
        for grid, arguments in joined:
            attention_join[grid](*arguments, **JOIN_OPTIONS)
    else:
        out.zero_()
        lse.fill_(float("-inf"))
