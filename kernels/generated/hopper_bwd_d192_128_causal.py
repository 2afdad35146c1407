"""Causal attention backward on Hopper for head_dim 192/128: two kernels, seven products, no sum of several programs.

Query i sees keys up to i + seqlen_k - seqlen_q; only tiles on that diagonal are masked. Programs of key_gradients have
128 keys of one head and walk over 64 queries at a time, from the last to the first, half of the keys in each warpgroup.
Programs of query_gradients have 128 queries, half of them in each warpgroup, and walk over 64 keys at a time.  Load
warps copy tiles.  row_terms goes before.  Runs on sm_90a with triton and torch alone.
"""

TILECAST = {
    "tilecast": "0.1.0", "family": "hopper_bwd_apart", "machine": "h200-sxm", "targets": ["sm_90a"],
    "pass": "bwd",
    "variant": "family=fa3_bwd_apart,heads_abreast=8",
    "workload": {"batch": 4, "heads_q": 16, "heads_kv": 16, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim_qk": 192, "head_dim_v": 128, "mask": "causal", "window": None, "dtype": "bf16"},
}  # fmt: skip

from collections import namedtuple
from functools import lru_cache

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Names in Triton 3.6.
copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

COLUMNS, COLUMNS_V = gl.constexpr(64), gl.constexpr(128)  # of a tile in shared memory: powers of two
TILES, TILES_V = gl.constexpr(3), gl.constexpr(1)  # tiles that are the columns of a head, of V and dO
TILE = gl.constexpr(64)  # rows of a warpgroup, and of every tile: the M of wgmma
KEYS = gl.constexpr(128)  # of a program of key_gradients
STAGES = gl.constexpr(2)  # tiles of Q and dO
KEY_STAGES, VALUE_STAGES = gl.constexpr(2), gl.constexpr(2)  # tiles of K, and of V
HEADS_ABREAST = gl.constexpr(8)  # heads whose blocks programs take by turns
ROWS = gl.constexpr(32)  # rows of programs of row_terms
PADDED = gl.constexpr(128)  # terms of a head are there for a multiple of so many rows
LOG2E = gl.constexpr(1.4426950408889634)
DTYPES = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16}
# Of the kernels, in the order of their launches; level 2 of the register allocation, which Triton 3.9 asks for, spills.
OPTIONS = (
    {"num_warps": 4, "enable_fp_fusion": True},
    {
        "num_warps": 4,
        "maxnreg": 168,
        "enable_fp_fusion": True,
        "launch_pdl": True,
        "ptx_options": "--regAllocOptLevel=4",
    },
    {
        "num_warps": 4,
        "maxnreg": 168,
        "enable_fp_fusion": True,
        "launch_pdl": True,
        "ptx_options": "--regAllocOptLevel=4",
    },
    {"num_warps": 4, "enable_fp_fusion": True},
)


@gluon.jit
def own_copy(x):
    """``x``, opaque to the compiler: what roles compute alike, it would compute once before they part, and spill."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def accumulator(columns):
    """wgmma accumulator of TILE x columns: a row lives in the four lanes of a quad."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers that complete a phase with every ``ARRIVALS`` arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


# One launch, and what of it lies in shared memory: tiles, and barriers that tell that they are there or may be overwritten.
Problem = namedtuple(
    "Problem", "terms seqlen_q seqlen_k heads_q group part key_blocks query_blocks heads padded scale_log2 scale"
)
ForKeys = namedtuple("ForKeys", "q dout k v lse2 delta kv_full q_full q_empty dout_full dout_empty")
ForQueries = namedtuple("ForQueries", "q dout k v rows_full k_full k_empty v_full v_empty")


# -- work --------------------------------------------------------------------------------------------------------------
@gluon.jit
def work_item(blocks, heads):
    """(head, block) of this program: heads take turns, HEADS_ABREAST of them at a time."""
    pid = gl.program_id(0)
    blocks = own_copy(blocks)
    first_head = pid // (HEADS_ABREAST * blocks) * HEADS_ABREAST
    abreast = gl.minimum(HEADS_ABREAST, heads - first_head)
    place = pid - first_head * blocks
    return first_head + place % abreast, place // abreast


@gluon.jit
def key_work(problem):
    """(batch, head of dK and dV, block of keys) of a program of key_gradients: with a mask, those with the most queries first.

    A key/value head has a head of dK and dV for each part of its query heads.
    """
    sum_heads = problem.heads_q // problem.group * parts_of(problem)
    head, block = work_item(problem.key_blocks, problem.heads // problem.heads_q * sum_heads)
    return head // sum_heads, head % sum_heads, block


@gluon.jit
def parts_of(problem):
    """Parts of the query heads that share a key/value head, each for a program."""
    return gl.cdiv(problem.group, problem.part)


@gluon.jit
def query_heads(problem, sum_head):
    """The first query head whose sums are in a head of dK and dV, and how many are."""
    parts = parts_of(problem)
    before = sum_head % parts * problem.part
    return sum_head // parts * problem.group + before, gl.minimum(problem.part, problem.group - before)


@gluon.jit
def query_work(problem):
    """(batch, query head, first row) of a program of query_gradients: with a mask, those with the most keys first."""
    head, block = work_item(problem.query_blocks, problem.heads)
    row = (own_copy(problem.query_blocks) - 1 - block) * (2 * TILE)
    return head // problem.heads_q, head % problem.heads_q, row


@gluon.jit
def tiles_of_queries(problem, block):
    """Tiles of queries that see keys of a block: the first, the first from which on no key must be hidden, the end."""
    seqlen_q = own_copy(problem.seqlen_q)
    seqlen_k = own_copy(problem.seqlen_k)
    end = gl.cdiv(seqlen_q, TILE)
    # Keys past the end: their P would not be 0, and might be infinite.
    partial = (block + 1) * KEYS > seqlen_k
    diagonal = seqlen_k - seqlen_q
    first = gl.maximum(block * KEYS - diagonal, 0) // TILE
    whole = gl.cdiv(gl.maximum(block * KEYS + KEYS - 1 - diagonal, 0), TILE)
    return gl.minimum(first, end), gl.where(partial, end, gl.minimum(whole, end)), end


@gluon.jit
def tiles_of_keys(problem, row):
    """Tiles of keys that rows from ``row`` on see: how many in which no key must be hidden, and how many; at least one."""
    seqlen_k = own_copy(problem.seqlen_k)
    last = row + seqlen_k - own_copy(problem.seqlen_q)  # key of the first row
    whole = gl.minimum(gl.maximum(last + 1, 0), seqlen_k) // TILE
    end = gl.minimum(gl.maximum(last + 2 * TILE, 1), seqlen_k)
    return whole, gl.cdiv(end, TILE)


@gluon.jit
def hide_keys(problem, p, keys, rows):
    """P with zeros where a query does not see a key; positions of both as the shape of P has them."""
    last_key = problem.seqlen_k - 1
    keys = gl.where(keys <= last_key, keys, 2**30)
    return gl.where(keys <= rows + (problem.seqlen_k - problem.seqlen_q), p, 0.0)


@gluon.jit
def matrix(tiles, i):
    """A tile as a matrix."""
    return tiles.index(i).reshape([TILE, tiles.shape[4]])


@gluon.jit
def copy_rows(desc, TILES: gl.constexpr, batch, head, row, full, tiles, slot):
    """Copies TILE rows of a head, all columns, into the tiles of a slot."""
    for i in gl.static_range(TILES):
        copy_tile(desc, [batch, head, row, i * desc.block_type.shape[3]], full, tiles.index(slot * TILES + i))


@gluon.jit
def issue_scores(left, left_slot, right, right_slot, TILES: gl.constexpr):
    """A tile of left right^T, asynchronous."""
    s = gl.zeros([TILE, TILE], gl.float32, layout=accumulator(TILE))
    for i in gl.static_range(TILES):
        rows = matrix(right, right_slot * TILES + i)
        s = warpgroup_mma(matrix(left, left_slot * TILES + i), rows.permute((1, 0)), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def issue_sum(scores, rows, total):
    """total += scores rows, asynchronous: the same elements in the same threads as in the accumulator."""
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=total.type.layout, k_width=2)
    return warpgroup_mma(gl.convert_layout(scores, operand), rows, total, is_async=True)


@gluon.jit
def store_sum(desc, tiles, i, total, batch, head, row, column):
    """Columns of a gradient, by way of a tile that no product reads any more."""
    matrix(tiles, i).store(total.to(desc.dtype))
    fence_async_shared()
    store_tile(desc, [batch, head, row, column], tiles.index(i))
    tma.store_wait(0)


@gluon.jit
def probabilities(problem, s, lse2, keys, rows, masked):
    """P^T of TILE keys and TILE queries, or P."""
    p = gl.exp2(s * problem.scale_log2 - lse2)
    if masked:
        p = hide_keys(problem, p, keys, rows)
    return p


@gluon.jit
def weights_of_keys(problem, s, lse2, key, m, masked):
    """P^T of TILE keys and tile m of queries."""
    layout: gl.constexpr = accumulator(TILE)
    keys = key + gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    rows = m * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
    return probabilities(problem, s, lse2[None, :], keys[:, None], rows[None, :], masked)


# -- dK and dV of KEYS keys: each warpgroup has its TILE ---------------------------------------------------------------
@gluon.jit
def load_queries_role(q_desc, dout_desc, k_desc, v_desc, shared, problem):
    """Copies K and V once, then Q with its LSE and dO with its D, tiles of queries from the last to the first."""
    batch, sum_head, block = key_work(problem)
    head_kv = sum_head // parts_of(problem)
    first_head, heads = query_heads(problem, sum_head)
    first, whole, end = tiles_of_queries(problem, block)
    mbarrier.expect(shared.kv_full, 2 * (TILES * k_desc.block_type.nbytes + TILES_V * v_desc.block_type.nbytes))
    for g in gl.static_range(2):
        copy_rows(k_desc, TILES, batch, head_kv, block * KEYS + g * TILE, shared.kv_full, shared.k, g)
        copy_rows(v_desc, TILES_V, batch, head_kv, block * KEYS + g * TILE, shared.kv_full, shared.v, g)
    rows = gl.arange(0, TILE, layout=gl.BlockedLayout([1], [32], [4], [0]))
    n = 0
    for head in range(first_head, first_head + heads):
        terms = problem.terms + (batch * problem.heads_q + head).to(gl.int64) * 2 * problem.padded
        for step in range(end - first):
            row = (end - 1 - step) * TILE
            slot, free = n % STAGES, n // STAGES & 1 ^ 1
            mbarrier.wait(shared.q_empty.index(slot), free)
            mbarrier.expect(shared.q_full.index(slot), TILES * q_desc.block_type.nbytes)
            copy_rows(q_desc, TILES, batch, head, row, shared.q_full.index(slot), shared.q, slot)
            # The bulk copy engine would want a descriptor for these few numbers.
            shared.lse2.index(slot).store(gl.load(terms + row + rows))
            mbarrier.arrive(shared.q_full.index(slot), count=1)
            mbarrier.wait(shared.dout_empty.index(slot), free)
            mbarrier.expect(shared.dout_full.index(slot), TILES_V * dout_desc.block_type.nbytes)
            copy_rows(dout_desc, TILES_V, batch, head, row, shared.dout_full.index(slot), shared.dout, slot)
            shared.delta.index(slot).store(gl.load(terms + problem.padded + row + rows))
            mbarrier.arrive(shared.dout_full.index(slot), count=1)
            n += 1


@gluon.jit
def own_keys_role(g: gl.constexpr, dk_desc, dv_desc, shared, problem):
    """dK and dV of TILE keys; the exponentials of one warpgroup run beside the products of the other."""
    layout: gl.constexpr = accumulator(TILE)
    dtype: gl.constexpr = shared.k.dtype
    batch, sum_head, block = key_work(problem)
    _, heads = query_heads(problem, sum_head)
    first, whole, end = tiles_of_queries(problem, block)
    key = block * KEYS + g * TILE
    dk_0 = gl.zeros([TILE, COLUMNS], gl.float32, layout=accumulator(COLUMNS))
    dk_1 = gl.zeros([TILE, COLUMNS], gl.float32, layout=accumulator(COLUMNS))
    dk_2 = gl.zeros([TILE, COLUMNS], gl.float32, layout=accumulator(COLUMNS))
    dv = gl.zeros([TILE, COLUMNS_V], gl.float32, layout=accumulator(COLUMNS_V))
    m = end - 1
    mbarrier.wait(shared.kv_full, 0)
    for n in range(heads * (end - first)):
        slot, phase = n % STAGES, n // STAGES & 1
        # Tiles that stay, by a number that might change: else their addresses would stay in registers too, and spill.
        still = own_copy(0)
        mbarrier.wait(shared.q_full.index(slot), phase)
        s = issue_scores(shared.k, g + still, shared.q, slot, TILES)
        s = warpgroup_mma_wait(0, deps=[s])
        # Terms of rows only once they are needed: they are as many registers as P for the product.
        lse2 = shared.lse2.index(slot).load(gl.SliceLayout(0, layout))
        p = weights_of_keys(problem, s, lse2, key, m, m < whole)
        mbarrier.wait(shared.dout_full.index(slot), phase)
        dp = issue_scores(shared.v, g + still, shared.dout, slot, TILES_V)
        dv = issue_sum(p.to(dtype), matrix(shared.dout, slot), dv)
        dp = warpgroup_mma_wait(1, deps=[dp])
        delta = shared.delta.index(slot).load(gl.SliceLayout(0, layout))
        ds = (p * (dp - delta[None, :])).to(dtype)
        # Not beside dK: there would be no registers for what runs, and the compiler would run all products one by one.
        dv = warpgroup_mma_wait(0, deps=[dv])
        mbarrier.arrive(shared.dout_empty.index(slot), count=1)
        dk_0 = issue_sum(ds, matrix(shared.q, slot * TILES), dk_0)
        dk_1 = issue_sum(ds, matrix(shared.q, slot * TILES + 1), dk_1)
        dk_2 = issue_sum(ds, matrix(shared.q, slot * TILES + 2), dk_2)
        dk_0, dk_1, dk_2 = warpgroup_mma_wait(0, deps=[dk_0, dk_1, dk_2])
        mbarrier.arrive(shared.q_empty.index(slot), count=1)
        m = gl.where(m == first, end - 1, m - 1)
    store_sum(dv_desc, shared.v, g, dv, batch, sum_head, key, 0)
    store_sum(dk_desc, shared.k, g * TILES, dk_0 * problem.scale, batch, sum_head, key, 0)
    store_sum(dk_desc, shared.k, g * TILES + 1, dk_1 * problem.scale, batch, sum_head, key, 1 * COLUMNS)
    store_sum(dk_desc, shared.k, g * TILES + 2, dk_2 * problem.scale, batch, sum_head, key, 2 * COLUMNS)


# -- dQ of 2 TILE queries: each warpgroup has its rows ---------------------------------------------------------------------
@gluon.jit
def load_keys_role(q_desc, dout_desc, k_desc, v_desc, shared, problem):
    """Copies Q and dO once, then tiles of K and V, first to last."""
    batch, head, row = query_work(problem)
    whole, end = tiles_of_keys(problem, row)
    head_kv = head // problem.group
    mbarrier.expect(shared.rows_full, 2 * (TILES * q_desc.block_type.nbytes + TILES_V * dout_desc.block_type.nbytes))
    for g in gl.static_range(2):
        copy_rows(q_desc, TILES, batch, head, row + g * TILE, shared.rows_full, shared.q, g)
        copy_rows(dout_desc, TILES_V, batch, head, row + g * TILE, shared.rows_full, shared.dout, g)
    for n in range(end):
        slot, slot_v = n % KEY_STAGES, n % VALUE_STAGES
        key = n * TILE
        mbarrier.wait(shared.k_empty.index(slot), n // KEY_STAGES & 1 ^ 1)
        mbarrier.expect(shared.k_full.index(slot), TILES * k_desc.block_type.nbytes)
        copy_rows(k_desc, TILES, batch, head_kv, key, shared.k_full.index(slot), shared.k, slot)
        mbarrier.wait(shared.v_empty.index(slot_v), n // VALUE_STAGES & 1 ^ 1)
        mbarrier.expect(shared.v_full.index(slot_v), TILES_V * v_desc.block_type.nbytes)
        copy_rows(v_desc, TILES_V, batch, head_kv, key, shared.v_full.index(slot_v), shared.v, slot_v)


@gluon.jit
def weights_of_rows(problem, s, lse2, n, row, masked):
    """P of TILE queries and tile n of keys."""
    layout: gl.constexpr = accumulator(TILE)
    keys = n * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
    rows = row + gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    return probabilities(problem, s, lse2[:, None], keys[None, :], rows[:, None], masked)


@gluon.jit
def query_role(g: gl.constexpr, dq_desc, shared, problem):
    """dQ of TILE queries; the exponentials of one warpgroup run beside the products of the other."""
    layout: gl.constexpr = accumulator(TILE)
    dtype: gl.constexpr = shared.k.dtype
    batch, head, row = query_work(problem)
    whole, end = tiles_of_keys(problem, row)
    row += g * TILE
    terms = problem.terms + (batch * problem.heads_q + head).to(gl.int64) * 2 * problem.padded
    rows = gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    lse2 = gl.load(terms + row + rows)
    delta = gl.load(terms + problem.padded + row + rows)
    dq_0 = gl.zeros([TILE, COLUMNS], gl.float32, layout=accumulator(COLUMNS))
    dq_1 = gl.zeros([TILE, COLUMNS], gl.float32, layout=accumulator(COLUMNS))
    dq_2 = gl.zeros([TILE, COLUMNS], gl.float32, layout=accumulator(COLUMNS))
    mbarrier.wait(shared.rows_full, 0)
    for n in range(end):
        slot, slot_v = n % KEY_STAGES, n % VALUE_STAGES
        # Tiles that stay, by a number that might change: else their addresses would stay in registers too, and spill.
        still = own_copy(0)
        mbarrier.wait(shared.k_full.index(slot), n // KEY_STAGES & 1)
        s = issue_scores(shared.q, g + still, shared.k, slot, TILES)
        mbarrier.wait(shared.v_full.index(slot_v), n // VALUE_STAGES & 1)
        dp = issue_scores(shared.dout, g + still, shared.v, slot_v, TILES_V)
        s = warpgroup_mma_wait(1, deps=[s])
        p = weights_of_rows(problem, s, lse2, n, row, n >= whole)
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.arrive(shared.v_empty.index(slot_v), count=1)
        ds = (p * (dp - delta[:, None])).to(dtype)
        dq_0 = issue_sum(ds, matrix(shared.k, slot * TILES), dq_0)
        dq_1 = issue_sum(ds, matrix(shared.k, slot * TILES + 1), dq_1)
        dq_2 = issue_sum(ds, matrix(shared.k, slot * TILES + 2), dq_2)
        dq_0, dq_1, dq_2 = warpgroup_mma_wait(0, deps=[dq_0, dq_1, dq_2])
        mbarrier.arrive(shared.k_empty.index(slot), count=1)
    store_sum(dq_desc, shared.q, g * TILES, dq_0 * problem.scale, batch, head, row, 0)
    store_sum(dq_desc, shared.q, g * TILES + 1, dq_1 * problem.scale, batch, head, row, 1 * COLUMNS)
    store_sum(dq_desc, shared.q, g * TILES + 2, dq_2 * problem.scale, batch, head, row, 2 * COLUMNS)


# -- kernels -----------------------------------------------------------------------------------------------------------
@triton.jit
def load_rows(
    ptr,
    stride,
    valid,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHECKED: tl.constexpr,
    eighths=None,
    START: tl.constexpr = 0,
):
    """ROWS x COLUMNS of a matrix with rows 8 `stride` apart at `ptr`; if CHECKED, rows from `valid` on read as zero, and columns that are not there."""
    rows = tl.arange(0, ROWS)[:, None]
    pointers = ptr + rows * (stride * 8) + tl.arange(0, COLUMNS)[None, :]
    return (
        tl.load(pointers, mask=within(rows < valid, COLUMNS, eighths, START), other=0.0)
        if CHECKED
        else tl.load(pointers)
    )


@triton.jit
def within(there, COLUMNS: tl.constexpr, eighths, START: tl.constexpr = 0):
    """Which columns of rows are there: of rows that are, all, or the first ``eighths`` times 8 of heads with fewer than the kernel's; of columns from START on."""
    # In eights, so that it is plain that 16 bytes are there or not.
    return there if eighths is None else there & (tl.arange(0, COLUMNS)[None, :] // 8 < eighths - START // 8)


# Numbers vary from call to call: without this their divisibility by 16 would recompile.  Strides, which are whole 8
# elements, come in that unit, so that rows are always read 16 bytes at a time and added up in the same order.
@triton.jit(do_not_specialize=range(5, 16))
def row_terms(out_ptr, dout_ptr, lse_ptr, dlse_ptr, terms_ptr, stride_ob, stride_oh, stride_os, stride_db, stride_dh,
              stride_ds, heads_q, seqlen_q, padded, dlse_rows, eighths_v):  # fmt: skip
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
    gdc_launch_dependents()
    out = load_rows(out_ptr, stride_os, seqlen_q - row, ROWS, 128, True, eighths_v).to(tl.float32)
    dout = load_rows(dout_ptr, stride_ds, seqlen_q - row, ROWS, 128, True, eighths_v).to(tl.float32)
    delta += tl.sum(out * dout, 1)
    lse = tl.load(lse_ptr + batch_head * seqlen_q + rows, mask=rows < seqlen_q, other=float("-inf"))
    delta -= tl.load(dlse_ptr + batch_head * seqlen_q + rows, mask=rows < dlse_rows, other=0.0)
    empty = lse == float("-inf")
    terms_ptr += batch_head * 2 * padded
    tl.store(terms_ptr + rows, tl.where(empty, float("inf"), lse * LOG2E))
    tl.store(terms_ptr + padded + rows, tl.where(empty, 0.0, delta))


@gluon.jit(do_not_specialize=range(7, 16))
def key_gradients(q_desc, dout_desc, k_desc, v_desc, dk_desc, dv_desc, terms, seqlen_q, seqlen_k, heads_q, group, part,
                  key_blocks, query_blocks, heads, padded, scale_log2, scale):  # fmt: skip
    """Allocate, set up the barriers, and start the roles: dK and dV of KEYS keys."""
    problem = Problem(terms, seqlen_q, seqlen_k, heads_q, group, part, key_blocks, query_blocks, heads, padded,
                  scale_log2, scale)  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [STAGES * TILES] + q_desc.block_type.shape, q_desc.layout)
    dout = gl.allocate_shared_memory(dtype, [STAGES * TILES_V] + dout_desc.block_type.shape, dout_desc.layout)
    k = gl.allocate_shared_memory(dtype, [2 * TILES] + k_desc.block_type.shape, k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [2 * TILES_V] + v_desc.block_type.shape, v_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse2 = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], plain)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], plain)
    kv_full = barriers(1, 1).index(0)
    q_full, q_empty = barriers(STAGES, 2), barriers(STAGES, 2)
    dout_full, dout_empty = barriers(STAGES, 2), barriers(STAGES, 2)
    shared = ForKeys(q, dout, k, v, lse2, delta, kv_full, q_full, q_empty, dout_full, dout_empty)
    fence_async_shared()
    gdc_wait()  # for row_terms
    # query_gradients takes the SMs that no program of this launch has or will have.
    gdc_launch_dependents()
    gl.warp_specialize([
        (load_queries_role, (q_desc, dout_desc, k_desc, v_desc, shared, problem)),
        (own_keys_role, (0, dk_desc, dv_desc, shared, problem)),
        (own_keys_role, (1, dk_desc, dv_desc, shared, problem)),
    ], [4, 4], [240, 240])  # fmt: skip


@gluon.jit(do_not_specialize=range(6, 15))
def query_gradients(q_desc, dout_desc, k_desc, v_desc, dq_desc, terms, seqlen_q, seqlen_k, heads_q, group, part,
                    key_blocks, query_blocks, heads, padded, scale_log2, scale):  # fmt: skip
    """Allocate, set up the barriers, and start the roles: dQ of 2 TILE queries."""
    problem = Problem(terms, seqlen_q, seqlen_k, heads_q, group, part, key_blocks, query_blocks, heads, padded,
                  scale_log2, scale)  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [2 * TILES] + q_desc.block_type.shape, q_desc.layout)
    dout = gl.allocate_shared_memory(dtype, [2 * TILES_V] + dout_desc.block_type.shape, dout_desc.layout)
    k = gl.allocate_shared_memory(dtype, [KEY_STAGES * TILES] + k_desc.block_type.shape, k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [VALUE_STAGES * TILES_V] + v_desc.block_type.shape, v_desc.layout)
    rows_full = barriers(1, 1).index(0)
    v_full, v_empty = barriers(VALUE_STAGES, 1), barriers(VALUE_STAGES, 2)
    k_full, k_empty = barriers(KEY_STAGES, 1), barriers(KEY_STAGES, 2)
    shared = ForQueries(q, dout, k, v, rows_full, k_full, k_empty, v_full, v_empty)
    fence_async_shared()
    gl.warp_specialize([
        # As the first role, a warpgroup that multiplies would keep addresses of tiles in registers, and spill.
        (load_keys_role, (q_desc, dout_desc, k_desc, v_desc, shared, problem)),
        (query_role, (0, dq_desc, shared, problem)),
        (query_role, (1, dq_desc, shared, problem)),
    ], [4, 4], [240, 240])  # fmt: skip
    # Who waits for this launch waits for the one before as well, beside which it began.
    gdc_wait()


@triton.jit
def add_up(
    parts_ptr,
    part_rows,
    parts,
    out_ptr,
    stride,
    valid,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    eighths,
    START: tl.constexpr = 0,
):
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
    tl.store(pointers, total.to(out_ptr.dtype.element_ty), mask=within(rows < valid, COLUMNS, eighths, START))


@triton.jit(do_not_specialize=range(4, 15))
def sum_parts(dk_parts_ptr, dv_parts_ptr, dk_ptr, dv_ptr, stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh,
              stride_dvs, heads_kv, seqlen_k, parts, eighths, eighths_v, scale_log2, scale):  # fmt: skip
    """dK, or dV, of ROWS keys of a head, from those of the parts of its query heads."""
    blocks = tl.cdiv(seqlen_k, ROWS)
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * ROWS
    batch, head, valid = batch_head // heads_kv, batch_head % heads_kv, seqlen_k - row
    first_row = batch_head * parts * seqlen_k + row
    if tl.program_id(1) == 0:
        dk = dk_ptr + (batch * stride_dkb + head * stride_dkh + row.to(tl.int64) * stride_dks) * 8
        dk_parts = dk_parts_ptr + first_row * 192
        add_up(dk_parts, seqlen_k, parts, dk, stride_dks, valid, 192, 128, eighths)
        add_up(dk_parts + 128, seqlen_k, parts, dk + 128, stride_dks, valid, 192, 64, eighths, 128)
    if tl.program_id(1) == 1:
        dv = dv_ptr + (batch * stride_dvb + head * stride_dvh + row.to(tl.int64) * stride_dvs) * 8
        dv_parts = dv_parts_ptr + first_row * 128
        add_up(dv_parts, seqlen_k, parts, dv, stride_dvs, valid, 128, 128, eighths_v)


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
        parts = query_head_parts(heads_q // heads_kv, heads_kv, seqlen_q, seqlen_k, -1, 0, KEYS.value, 160, 0.6,
                         multiprocessors(q.device.index))  # fmt: skip
    rows = (batch, heads_kv * parts, seqlen_k)
    dk_parts, dv_parts = (q.new_empty((*rows, width)) if parts > 1 else None for width in (192, 128))
    return dk_parts, dv_parts


def plan(q, k, v, out, lse, dout, dlse, dq, dk, dv, terms, dk_parts, dv_parts, window_left, window_right):
    """(kernel, grid, arguments but the scales) of the launches, () for empty tensors; ValueError for what they do not take."""
    if (window_left, window_right) not in ((-1, -1), (-1, 0)):
        raise ValueError(f"window: this kernel has no window, got ({window_left}, {window_right})")
    if len(q.shape) != 4 or len(k.shape) != 4 or q.shape[1] != q.shape[1] // max(k.shape[1], 1) * k.shape[1]:
        raise ValueError(f"q, k: expected 4 extents, heads of q a multiple of k's, got {[*q.shape]}, {[*k.shape]}")
    (batch, heads_q, seqlen_q, _), (_, heads_kv, seqlen_k, _) = q.shape, k.shape
    rows, keys = (batch, heads_q, seqlen_q), (batch, heads_kv, seqlen_k)
    dtype = str(q.dtype) if str(q.dtype) in DTYPES else "bf16 or fp16"
    head_dim = q.shape[-1] if q.shape[-1] in range(8, 193, 8) else "a multiple of 8 up to 192"
    head_dim_v = v.shape[-1] if v.shape[-1] in range(8, 129, 8) else "a multiple of 8 up to 128"
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
    for name, x in tensors.items():
        extents = keys if name[-1] in "kv" else rows
        width = head_dim if name[-1] in "qk" else head_dim_v
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
    eighths, eighths_v = None if head_dim == 192 else head_dim // 8, None if head_dim_v == 128 else head_dim_v // 8
    group, last = heads_q // heads_kv, ()
    part, sum_heads, made_dk, made_dv = group, heads_kv, dk, dv
    if dk_parts is not None:
        sum_heads, made_dk, made_dv = dk_parts.shape[1], dk_parts, dv_parts
        part = triton.cdiv(group, sum_heads // heads_kv)
        for_sums = (dk_parts, dv_parts, dk, dv, *(n // 8 for x in (dk, dv) for n in x.stride()[:3]))
        blocks = triton.cdiv(seqlen_k, ROWS.value) * batch * heads_kv
        last = (
            (sum_parts, (blocks, 2, 1), (*for_sums, heads_kv, seqlen_k, sum_heads // heads_kv, eighths, eighths_v)),
        )
    boxes = []
    for x, columns in ((q, COLUMNS), (dout, COLUMNS_V), (k, COLUMNS), (v, COLUMNS_V), (made_dk, COLUMNS), (made_dv,
                       COLUMNS_V), (dq, COLUMNS)):  # fmt: skip
        block = [1, 1, TILE.value, columns.value]
        layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[str(q.dtype)])
        boxes.append(TensorDescriptor.from_tensor(x, block, layout))
    for_rows = (out, dout, lse, dlse_or_any, terms, *(n // 8 for x in (out, dout) for n in x.stride()[:3]))
    for_rows += (heads_q, seqlen_q, padded, 0 if dlse is None else seqlen_q, eighths_v)
    query_blocks, key_blocks = triton.cdiv(seqlen_q, 2 * TILE.value), triton.cdiv(seqlen_k, KEYS.value)
    heads = batch * heads_q
    sizes = (seqlen_q, seqlen_k, heads_q, group, part, key_blocks, query_blocks, heads, padded)
    return (
        (row_terms, (padded // ROWS.value * heads, 1, 1), for_rows),
        (key_gradients, (key_blocks * batch * sum_heads, 1, 1), (*boxes[:6], terms, *sizes)),
        (query_gradients, (query_blocks * heads, 1, 1), (*boxes[:4], boxes[6], terms, *sizes)),
        *last,
    )


def launch(q, k, v, out, lse, dout, dq, dk, dv, scale, window_left=-1, window_right=-1, dlse=None, terms=None):
    """Write the gradients of launch(q, k, v, out, lse, scale) of the forward pass to `dq`, `dk` and `dv`.

    q, dq, out, dout: 192 or 128); k, v, dk, dv: (batch, heads_kv, seqlen_k, 192 or 128); all bf16 or all fp16, unit
    last stride, rows that start at 16 bytes; or with fewer columns, a multiple of 8.  lse, as the forward pass wrote it, and dlse, its gradient where it has one:
    (batch, heads_q, seqlen_q), float32, contiguous.  terms: (batch, heads_q, 2, seqlen_q rounded up to PADDED), float32:
    written here, allocated where it is None.
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
