"""Causal attention backward on Hopper for head_dim 192/128: five products, the same bits every run.

Query i sees keys up to i + seqlen_k - seqlen_q; only blocks on that diagonal are masked. Programs of gradients have 128
keys of one head and walk over 64 queries at a time, from the last to the first: a load warp copies Q, dO and two
numbers of each row, two warpgroups of 64 keys compute S^T, dP^T and what dV and dK grow by, put dS into shared memory
for each other and make a part of dQ each, and a last warp adds that to a float32 sum in global memory.  Programs add to
a block of dQ in the order of their keys, which a counter tells, so sums do not depend on who comes first, unless a
launch leaves it to them.  row_terms goes before, round_dq after. Runs on sm_90a with triton and torch alone.
"""

TILECAST = {
    "tilecast": "0.1.0", "family": "hopper_bwd", "machine": "h200-sxm", "targets": ["sm_90a"],
    "pass": "bwd",
    "variant": "family=fa3_bwd,tile_m=64,dq_slots=1,heads_abreast=16,dk_first=true,adders=2,ahead=false,fragments=true,folded=none,held=false,persistent=true",
    "workload": {"batch": 4, "heads_q": 16, "heads_kv": 16, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim_qk": 192, "head_dim_v": 128, "mask": "causal", "window": None, "dtype": "bf16"},
}  # fmt: skip

from collections import namedtuple
from functools import lru_cache

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@builtin
def _add_tile(desc, coord, source, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, source.handle)


# Names in Triton 3.6, which can add tiles but does not say how.
copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
add_tile = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _add_tile

REINTERPRET_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # not in Triton 3.6
COLUMNS, FIRST_COLUMNS = gl.constexpr(64), gl.constexpr(128)  # of the last tile of Q and K, and the first
COLUMNS_V = gl.constexpr(128)  # of a tile of V and dO
TILES = gl.constexpr(3)  # of COLUMNS that dQ leaves in
THIRD_ROWS = gl.constexpr(128)  # of one of them in its workspace
TILE_M = gl.constexpr(64)  # query rows of a step
TILE_N = gl.constexpr(128)  # keys of a program
KEYS = gl.constexpr(64)  # keys of a warpgroup: the M of wgmma
STAGES = gl.constexpr(2)  # tiles of Q, and of dS
ADDERS = gl.constexpr(2)  # warps that add up dQ, tiles by turns
DEALT = gl.constexpr(2)  # items that a program was dealt and not all roles have taken
Q_FULL = gl.constexpr(0)
Q_EMPTY = gl.constexpr(2)
DOUT_FULL = gl.constexpr(4)
DOUT_EMPTY = gl.constexpr(5)
DQ_FULL = gl.constexpr(6)
DQ_EMPTY = gl.constexpr(12)
DS_FULL = gl.constexpr(15)
DEALT_FULL = gl.constexpr(17)
DEALT_EMPTY = gl.constexpr(19)
KV_FULL = gl.constexpr(21)
KV_EMPTY = gl.constexpr(22)
BARRIERS = gl.constexpr(23)
SUM_ROWS, SUM_COLUMNS = gl.constexpr(384), gl.constexpr(32)  # of a tile of dQ in its workspace
# Heads whose blocks of keys programs take by turns, of which a problem may want more; and where programs do not wait for each other.
HEADS_ABREAST, ANY_ORDER_ABREAST = 16, 8
ROWS = gl.constexpr(32)  # rows of a program of row_terms
PADDED = gl.constexpr(64)  # terms and sums of a head are there for a multiple of so many rows
LOG2E = gl.constexpr(1.4426950408889634)
DTYPES = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16, "torch.float32": gl.float32}
OPTIONS = (  # of the kernels, in the order of their launches; level 2 of the register allocation spills
    {"num_warps": 4, "enable_fp_fusion": True},
    {
        "num_warps": 4,
        "maxnreg": 168,
        "enable_fp_fusion": True,
        "launch_pdl": True,
        "ptx_options": "--regAllocOptLevel=4",
    },
    {"num_warps": 4, "enable_fp_fusion": True},
    {"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True},
)


@gluon.jit
def own_copy(x):
    """``x``, opaque to the compiler: what roles compute alike, it would compute once before they part, and spill."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def accumulator(columns):
    """wgmma accumulator of 64 x columns: a row lives in the four lanes of a quad."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def barriers(made, FIRST: gl.constexpr, SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """Sets up barriers that complete a phase with every ``ARRIVALS`` arrivals."""
    for i in gl.static_range(SLOTS):
        mbarrier.init(made.index(FIRST + i), count=ARRIVALS)


# One launch, and what of it lies in shared memory: tiles; barriers that tell that tiles of a step are there or may be
# overwritten.
Problem = namedtuple(
    "Problem", "terms counters seqlen_q seqlen_k heads_q group part heads abreast padded chains scale_log2 scale"
)
Shared = namedtuple("Shared", "q q_last dout k k_last v ds dq dealt lse2 delta barriers")


# -- work --------------------------------------------------------------------------------------------------------------
@gluon.jit
def blocks_of_keys(problem):
    """Blocks of keys of a head."""
    return gl.cdiv(own_copy(problem.seqlen_k), TILE_N)


@gluon.jit
def work_item(problem, item):
    """(batch, head of dK and dV, block of keys) of an item: a key/value head has one for each part of its query heads.

    Blocks of a head are dealt in their order, so an item only ever waits for items that were dealt before it.  Some heads take turns.
    """
    key_blocks, most = blocks_of_keys(problem), own_copy(problem.abreast)
    first_head = item // (most * key_blocks) * most
    abreast = gl.minimum(most, problem.heads - first_head)
    place = item - first_head * key_blocks
    head = first_head + place % abreast
    sums = problem.heads_q // problem.group * parts_of(problem)
    return head // sums, head % sums, place // abreast


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
def query_blocks(problem, block):
    """Blocks of queries that see keys of a block: the first, the first from which on no key must be hidden, the end."""
    seqlen_q = own_copy(problem.seqlen_q)
    seqlen_k = own_copy(problem.seqlen_k)
    end = gl.cdiv(seqlen_q, TILE_M)
    # Keys past the end: their P would not be 0, and might be infinite.
    partial = (block + 1) * TILE_N > seqlen_k
    diagonal = seqlen_k - seqlen_q
    first = gl.maximum(block * TILE_N - diagonal, 0) // TILE_M
    whole = gl.cdiv(gl.maximum(block * TILE_N + TILE_N - 1 - diagonal, 0), TILE_M)
    return gl.minimum(first, end), gl.where(partial, end, gl.minimum(whole, end)), end


@gluon.jit
def hide_keys(problem, p, key, row):
    """P^T, keys down and queries across, with zeros where a query does not see a key."""
    keys = key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, p.type.layout))
    last_key = problem.seqlen_k - 1
    rows = row + problem.seqlen_k - problem.seqlen_q + gl.arange(0, p.shape[1], layout=gl.SliceLayout(0, p.type.layout))
    keys = gl.where(keys <= last_key, keys, 2**30)
    return gl.where(keys[:, None] <= rows[None, :], p, 0.0)


# -- the load warp -----------------------------------------------------------------------------------------------------
@gluon.jit
def deal(shared, problem, i):
    """The next item that no program has, told to the other roles as this program's number ``i`` after its first."""
    slot = i % DEALT
    # A float32, as everything in its tensor: exact up to 2^24 items, whose K and V no GPU can hold.
    item = gl.num_programs(0) + gl.atomic_add(problem.counters, 1.0, sem="relaxed").to(gl.int32)
    mbarrier.wait(shared.barriers.index(DEALT_EMPTY + slot), i // DEALT & 1 ^ 1)
    shared.dealt.index(slot).store(item + gl.zeros([1], gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(shared.barriers.index(DEALT_FULL + slot), count=1)
    return item


@gluon.jit
def next_item(shared, i, WARPS: gl.constexpr):
    """What the load warp was dealt as number ``i``."""
    slot = i % DEALT
    mbarrier.wait(shared.barriers.index(DEALT_FULL + slot), i // DEALT & 1)
    item = gl.max(shared.dealt.index(slot).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    mbarrier.arrive(shared.barriers.index(DEALT_EMPTY + slot), count=1)
    return item


@gluon.jit
def load_role(q_desc, q_last_desc, dout_desc, k_desc, k_last_desc, v_desc, shared, problem):
    """Copies K and V of each item, then Q with its LSE and dO with its D, blocks of queries from the last to the first."""
    rows = gl.arange(0, TILE_M, layout=gl.BlockedLayout([TILE_M // 32], [32], [1], [0]))
    items = blocks_of_keys(problem) * own_copy(problem.heads)
    item = gl.program_id(0)
    i = 0
    n = 0
    while item < items:
        batch, sum_head, block = work_item(problem, item)
        head_kv = sum_head // parts_of(problem)
        first_head, heads = query_heads(problem, sum_head)
        first, _, end = query_blocks(problem, block)
        key = block * TILE_N
        kv_full = shared.barriers.index(KV_FULL)
        mbarrier.wait(shared.barriers.index(KV_EMPTY), i & 1 ^ 1)
        mbarrier.expect(kv_full, k_desc.block_type.nbytes + k_last_desc.block_type.nbytes + v_desc.block_type.nbytes)
        copy_tile(k_desc, [batch, head_kv, key, 0], kv_full, shared.k.index(0))
        copy_tile(k_last_desc, [batch, head_kv, key, FIRST_COLUMNS], kv_full, shared.k_last.index(0))
        copy_tile(v_desc, [batch, head_kv, key, 0], kv_full, shared.v.index(0))
        for head in range(first_head, first_head + heads):
            terms = problem.terms + (batch * problem.heads_q + head).to(gl.int64) * 2 * problem.padded
            for step in range(end - first):
                row = (end - 1 - step) * TILE_M
                slot = n % STAGES
                full = shared.barriers.index(Q_FULL + slot)
                mbarrier.wait(shared.barriers.index(Q_EMPTY + slot), n // STAGES & 1 ^ 1)
                mbarrier.expect(full, q_desc.block_type.nbytes + q_last_desc.block_type.nbytes)
                copy_tile(q_desc, [batch, head, row, 0], full, shared.q.index(slot))
                copy_tile(q_last_desc, [batch, head, row, FIRST_COLUMNS], full, shared.q_last.index(slot))
                if n == 0:  # what comes from here on row_terms makes
                    gdc_wait()
                # The bulk copy engine would want a descriptor for these few numbers.
                shared.lse2.index(slot).store(gl.load(terms + row + rows))
                mbarrier.arrive(full, count=1)
                dout_full = shared.barriers.index(DOUT_FULL)
                mbarrier.wait(shared.barriers.index(DOUT_EMPTY), n & 1 ^ 1)
                mbarrier.expect(dout_full, dout_desc.block_type.nbytes)
                copy_tile(dout_desc, [batch, head, row, 0], dout_full, shared.dout.index(0))
                shared.delta.index(0).store(gl.load(terms + problem.padded + row + rows))
                mbarrier.arrive(dout_full, count=1)
                n += 1
        item = deal(shared, problem, i)
        i += 1


# -- the warps that add up dQ -----------------------------------------------------------------------------------------
@gluon.jit
def wait_for_turn(counter, turn):
    """Until as many programs have added to a block of dQ as go before this one."""
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred early;
            .reg .s32 count;
        again:
            ld.acquire.gpu.global.s32 count, [$1];
            setp.lt.s32 early, count, $2;
            @early bra again;
            fence.proxy.async.global;
            mov.s32 $0, count;
        }
        """, "=r,l,r", [counter, turn], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def pass_turn(counter):
    """Wait until the tile is added, and let the next program add."""
    # The wait tells this thread that the tile is added, a release whoever sees the count. With a relaxed addition a tile was lost, or
    # added out of turn, in 2 to 5 of 1,000 passes over 1,024 causal tokens on an H100.
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred first;
            .reg .u32 lane;
            cp.async.bulk.wait_group 0;
            mov.u32 lane, %laneid;
            setp.eq.u32 first, lane, 0;
            @first red.release.gpu.global.add.s32 [$1], 1;
            mov.u32 $0, lane;
        }
        """, "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def sums_in(shared, desc, third):
    """A third of a tile on its way out as two tiles of ``desc``."""
    tile = shared.dq.index(third)
    reinterpret: gl.constexpr = tile.reinterpret if REINTERPRET_IS_PUBLIC else tile._reinterpret
    return reinterpret(desc.dtype, [2] + desc.block_type.shape, desc.layout)


@gluon.jit
def chains_of(problem):
    """Chains of a head's blocks of keys; where sums may have any order the number has the other sign."""
    chains = own_copy(problem.chains)
    return gl.where(chains > 0, chains, -chains)


@gluon.jit
def wait_for_third(shared, third, t):
    """Until a third of tile ``t`` is there."""
    mbarrier.wait(shared.barriers.index(DQ_FULL + third * STAGES + t % STAGES), t // STAGES & 1)


@gluon.jit
def give_back(shared, COPIES: gl.constexpr):
    """Each third once it has been read; of each that comes after it so many copies are under way."""
    for u in gl.static_range(TILES):
        tma.store_wait((TILES - 1 - u) * COPIES)
        mbarrier.arrive(shared.barriers.index(DQ_EMPTY + u), count=1)


@gluon.jit
def add_role(w: gl.constexpr, sums_desc, dk_desc, dv_desc, shared, problem):
    """Adds every other tile of dQ to its sum in global memory, which the first block of keys writes; in its turn, or in any order."""
    gdc_wait()  # for row_terms, which sets counters to zero
    items = blocks_of_keys(problem) * own_copy(problem.heads)
    item = gl.program_id(0)
    i = 0
    t = 0
    while item < items:
        batch, sum_head, block = work_item(problem, item)
        first_head, heads = query_heads(problem, sum_head)
        in_order = own_copy(problem.chains) > 0
        # Programs of a chain, as many blocks of keys apart as there are chains, add to one sum.
        turn = block // chains_of(problem)
        turn = gl.where(in_order, turn, gl.minimum(turn, 1))
        first, _, end = query_blocks(problem, block)
        for head in range(first_head, first_head + heads):
            chains, tiles = chains_of(problem), problem.padded // TILE_M
            first_tile = block % chains * tiles
            heads_before = batch * own_copy(problem.heads_q) + head
            counters = problem.counters + (heads_before.to(gl.int64) * (chains * tiles) + first_tile + 1)
            for step in range(end - first):
                m = end - 1 - step
                if t % ADDERS == w:
                    wait_for_turn(counters + m, turn)
                    row = (first_tile + m) * SUM_ROWS
                    for u in gl.static_range(TILES):
                        wait_for_third(shared, u, t)
                        if turn == 0:
                            store_tile(sums_desc, [batch, head, row + u * THIRD_ROWS, 0], shared.dq.index(u))
                        else:
                            add_tile(sums_desc, [batch, head, row + u * THIRD_ROWS, 0], shared.dq.index(u))
                    # Read, the tile may be overwritten; whoever adds after it must wait until it is added.
                    give_back(shared, 1)
                    if in_order | (turn == 0):
                        pass_turn(counters + m)
                t += 1
        key = block * TILE_N
        if t % ADDERS == w:
            for u in gl.static_range(TILES):
                wait_for_third(shared, u, t)
            for g in gl.static_range(2):
                for c in gl.static_range(2):
                    store_tile(
                        dv_desc, [batch, sum_head, key + g * KEYS, c * COLUMNS], sums_in(shared, dv_desc, g).index(c)
                    )
            give_back(shared, 0)
        t += 1
        if t % ADDERS == w:
            for u in gl.static_range(TILES):
                wait_for_third(shared, u, t)
                for g in gl.static_range(2):
                    store_tile(
                        dk_desc, [batch, sum_head, key + g * KEYS, u * COLUMNS], sums_in(shared, dk_desc, u).index(g)
                    )
            give_back(shared, 2)
        t += 1
        item = next_item(shared, i, 1)
        i += 1


# -- the warpgroups that multiply --------------------------------------------------------------------------------------
@gluon.jit
def matrix(tiles, i):
    """A tile as a matrix."""
    return tiles.index(i).reshape([tiles.shape[3], tiles.shape[4]])


@gluon.jit
def of_item(tiles):
    """K or V, found again in each step: the compiler would keep where each product finds its part, and spill."""
    return matrix(tiles, own_copy(0))


@gluon.jit
def issue_dq(shared, n, keys):
    """Columns of dQ = dS K of step n, asynchronous."""
    zero = gl.zeros([64, COLUMNS], gl.float32, layout=accumulator(COLUMNS))
    return warpgroup_mma(shared.ds.index(n % STAGES).permute((1, 0)), keys, zero, use_acc=False, is_async=True)


@gluon.jit
def wait_for_slot(shared, third, t):
    """Until a third of tile ``t`` may be written."""
    mbarrier.wait(shared.barriers.index(DQ_EMPTY + third), t & 1 ^ 1)


@gluon.jit
def tell(shared, third, t, ARRIVALS: gl.constexpr):
    """A third of tile ``t`` is there, or of two parts of it one."""
    fence_async_shared()
    mbarrier.arrive(shared.barriers.index(DQ_FULL + third * STAGES + t % STAGES), count=ARRIVALS)


@gluon.jit
def put_dq(third, shared, dq, t):
    """Columns of dQ into shared memory, as part of tile ``t``."""
    wait_for_slot(shared, third, t)
    # Four elements of a thread side by side, and those of eight lanes: the copy engine does not care what they are.
    dq = dq.reshape([4, 2, 4, 2, 8, 4, 2]).permute((0, 4, 2, 3, 5, 1, 6)).reshape([THIRD_ROWS, SUM_COLUMNS])
    shared.dq.index(third).reshape([THIRD_ROWS, SUM_COLUMNS]).store(dq)
    tell(shared, third, t, 2)


@gluon.jit
def issue_scores(left, right, s, FIRST: gl.constexpr):
    """left right^T, asynchronous, added to ``s`` where it is not the first."""
    return warpgroup_mma(left, right.permute((1, 0)), s, use_acc=not FIRST, is_async=True)


@gluon.jit
def work_step(g: gl.constexpr, shared, problem, n, t, key, row, masked, dk, dk_last, dv):
    """What the queries of step n add: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q, dQ = dS K."""
    dtype: gl.constexpr = shared.k.dtype
    layout: gl.constexpr = accumulator(64)
    slot, phase = n % STAGES, n // STAGES & 1
    mbarrier.wait(shared.barriers.index(Q_FULL + slot), phase)
    q, q_last, dout = matrix(shared.q, slot), matrix(shared.q_last, slot), of_item(shared.dout)
    zero = gl.zeros([KEYS, 64], gl.float32, layout=layout)
    s = issue_scores(of_item(shared.k).slice(g * KEYS, KEYS, dim=0), q, zero, True)
    s = issue_scores(of_item(shared.k_last).slice(g * KEYS, KEYS, dim=0), q_last, s, False)
    s = warpgroup_mma_wait(0, deps=[s])
    # Terms of rows only once they are needed: they are as many registers as P for the product.
    lse2 = shared.lse2.index(slot).load(gl.SliceLayout(0, layout))
    p = gl.exp2(s * problem.scale_log2 - lse2[None, :])
    if masked:
        p = hide_keys(problem, p, key, row)
    mbarrier.wait(shared.barriers.index(DOUT_FULL), n & 1)
    # Not beside S, nor beside dV: there would be no registers for what runs, and the compiler would run all products one by one.
    dp = issue_scores(of_item(shared.v).slice(g * KEYS, KEYS, dim=0), dout, zero, True)
    dp = warpgroup_mma_wait(0, deps=[dp])
    delta = shared.delta.index(0).load(gl.SliceLayout(0, layout))
    # dK takes it from shared memory as well: beside dQ it would be too many registers.
    ds = shared.ds.index(n % STAGES).slice(g * KEYS, KEYS, dim=0)
    ds.store((p * (dp - delta[None, :])).to(dtype))
    fence_async_shared()
    mbarrier.arrive(shared.barriers.index(DS_FULL + n % STAGES), count=1)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator(COLUMNS_V), k_width=2)
    dv = warpgroup_mma(gl.convert_layout(p.to(dtype), operand), dout, dv, is_async=True)
    dk = warpgroup_mma(ds, q, dk, is_async=True)
    dk_last = warpgroup_mma(ds, q_last, dk_last, is_async=True)
    mbarrier.wait(shared.barriers.index(DS_FULL + n % STAGES), phase)
    dq = issue_dq(shared, n, of_item(shared.k).slice(g * COLUMNS, COLUMNS, dim=1))
    dv = warpgroup_mma_wait(3, deps=[dv])
    mbarrier.arrive(shared.barriers.index(DOUT_EMPTY), count=1)
    dk, dk_last = warpgroup_mma_wait(1, deps=[dk, dk_last])
    mbarrier.arrive(shared.barriers.index(Q_EMPTY + slot), count=1)
    dq = warpgroup_mma_wait(0, deps=[dq])
    put_dq(g, shared, dq, t)
    # The last columns by turns: half of them would read all of dS, as all do.
    if (n + g) % 2 == 0:
        dq = issue_dq(shared, n, of_item(shared.k_last))
        dq = warpgroup_mma_wait(0, deps=[dq])
        put_dq(TILES - 1, shared, dq, t)
    return dk, dk_last, dv


@gluon.jit
def halves_of(total, dtype: gl.constexpr):
    """Columns of a sum, rounded: 64, and 64."""
    return total.to(dtype).reshape([KEYS, 2, COLUMNS]).permute((0, 2, 1)).split()


@gluon.jit
def put_sum(shared, desc, third, i, total):
    """64 columns of dV or dK of a warpgroup into half of a third of a tile on its way out."""
    sums_in(shared, desc, third).index(i).reshape([KEYS, COLUMNS]).store(total)


@gluon.jit
def product_role(g: gl.constexpr, dk_desc, dv_desc, shared, problem):
    """The products of KEYS keys of each item with all queries of all heads that share them."""
    items = blocks_of_keys(problem) * own_copy(problem.heads)
    item = gl.program_id(0)
    i = 0
    n = 0
    while item < items:
        _, sum_head, block = work_item(problem, item)
        _, heads = query_heads(problem, sum_head)
        first, whole, end = query_blocks(problem, block)
        key = block * TILE_N + g * KEYS
        dk = gl.zeros([KEYS, FIRST_COLUMNS], gl.float32, layout=accumulator(FIRST_COLUMNS))
        dk_last = gl.zeros([KEYS, COLUMNS], gl.float32, layout=accumulator(COLUMNS))
        dv = gl.zeros([KEYS, COLUMNS_V], gl.float32, layout=accumulator(COLUMNS_V))
        m = end - 1
        steps = heads * (end - first)
        gl.assume(steps > 0)
        # One loop: with one each for masked and whole blocks, sums would change registers in between, and the compiler spills.
        mbarrier.wait(shared.barriers.index(KV_FULL), i & 1)
        for step in range(n, n + steps):
            # An item has two tiles more than steps.
            dk, dk_last, dv = work_step(
                g, shared, problem, step, step + 2 * i, key, m * TILE_M, m < whole, dk, dk_last, dv
            )
            m = gl.where(m == first, end - 1, m - 1)
        n += steps
        mbarrier.arrive(shared.barriers.index(KV_EMPTY), count=1)
        t = n + 2 * i
        wait_for_slot(shared, g, t)
        left, right = halves_of(dv, dv_desc.dtype)
        put_sum(shared, dv_desc, g, 0, left)
        put_sum(shared, dv_desc, g, 1, right)
        tell(shared, g, t, 2)
        # dV takes two thirds, and the last is as full as it becomes.
        if g == 0:
            wait_for_slot(shared, TILES - 1, t)
            tell(shared, TILES - 1, t, 2)
        left, right = halves_of(dk * problem.scale, dk_desc.dtype)
        for u in gl.static_range(TILES):
            wait_for_slot(shared, u, t + 1)
            columns = left if u == 0 else right if u == 1 else (dk_last * problem.scale).to(dk_desc.dtype)
            put_sum(shared, dk_desc, u, g, columns)
            tell(shared, u, t + 1, 1)
        item = next_item(shared, i, 4)
        i += 1


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
@triton.jit(do_not_specialize=range(6, 18))
def row_terms(out_ptr, dout_ptr, lse_ptr, dlse_ptr, terms_ptr, counters_ptr, stride_ob, stride_oh, stride_os, stride_db,
              stride_dh, stride_ds, heads_q, seqlen_q, padded, dlse_rows, chains, eighths_v):  # fmt: skip
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
    if row % TILE_M == 0:
        for chain in range(chains):
            tl.store(counters_ptr + 1 + ((batch_head * chains + chain) * padded + row) // TILE_M, 0.0)
    if tl.program_id(0) == 0:  # how many items were dealt
        tl.store(counters_ptr, 0.0)


@gluon.jit(do_not_specialize=range(11, 20))
def gradients(q_desc, q_last_desc, dout_desc, k_desc, k_last_desc, v_desc, sums_desc, dk_desc, dv_desc, terms, counters,
              seqlen_q, seqlen_k, heads_q, group, part, heads, abreast, padded, chains, scale_log2, scale):  # fmt: skip
    """Allocate, set up the barriers, and start the roles: dK and dV of TILE_N keys, and what they add to dQ."""
    problem = Problem(terms, counters, seqlen_q, seqlen_k, heads_q, group, part, heads, abreast, padded, chains,
                  scale_log2, scale)  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    q_last = gl.allocate_shared_memory(dtype, [STAGES] + q_last_desc.block_type.shape, q_last_desc.layout)
    dout = gl.allocate_shared_memory(dtype, [1] + dout_desc.block_type.shape, dout_desc.layout)
    k = gl.allocate_shared_memory(dtype, [1] + k_desc.block_type.shape, k_desc.layout)
    k_last = gl.allocate_shared_memory(dtype, [1] + k_last_desc.block_type.shape, k_last_desc.layout)
    v = gl.allocate_shared_memory(dtype, [1] + v_desc.block_type.shape, v_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_N, 64], dtype)
    ds = gl.allocate_shared_memory(dtype, [STAGES, TILE_N, 64], ds_layout)
    dq = gl.allocate_shared_memory(gl.float32, [TILES] + sums_desc.block_type.shape, sums_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dealt = gl.allocate_shared_memory(gl.int32, [DEALT, 1], plain)
    lse2 = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], plain)
    delta = gl.allocate_shared_memory(gl.float32, [1, TILE_M], plain)
    made = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    barriers(made, Q_FULL, STAGES, 2)
    barriers(made, Q_EMPTY, STAGES, 2)
    barriers(made, DOUT_FULL, 1, 2)
    barriers(made, DOUT_EMPTY, 1, 2)
    barriers(made, DQ_FULL, STAGES * TILES, 2)
    barriers(made, DQ_EMPTY, TILES, 1)
    barriers(made, DS_FULL, STAGES, 2)
    barriers(made, DEALT_FULL, DEALT, 1)
    barriers(made, DEALT_EMPTY, DEALT, 4)
    barriers(made, KV_FULL, 1, 1)
    barriers(made, KV_EMPTY, 1, 2)
    shared = Shared(q, q_last, dout, k, k_last, v, ds, dq, dealt, lse2, delta, made)
    fence_async_shared()
    gl.warp_specialize([
        (product_role, (0, dk_desc, dv_desc, shared, problem)),
        (product_role, (1, dk_desc, dv_desc, shared, problem)),
        (load_role, (q_desc, q_last_desc, dout_desc, k_desc, k_last_desc, v_desc, shared, problem)),
        (add_role, (0, sums_desc, dk_desc, dv_desc, shared, problem)),
        (add_role, (1, sums_desc, dk_desc, dv_desc, shared, problem)),
    ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip


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
    # Who waits for this launch waits for the one before as well, beside which it began.
    gdc_wait()


@triton.jit(do_not_specialize=range(3, 11))
def round_dq(sums_ptr, dq_ptr, counters_ptr, stride_dqb, stride_dqh, stride_dqs, heads_q, seqlen_q, padded, chains,
             eighths, scale_log2, scale):  # fmt: skip
    """dQ from its sums: scaled and rounded; zero for blocks of queries that see no key, to which nothing was added."""
    gdc_launch_dependents()  # sums of parts, which are there as well
    blocks = padded // TILE_M
    # From the last to the first: L2 has what was added last.
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    third = place % TILES
    block = place // TILES % blocks
    batch_head = (place // TILES // blocks).to(tl.int64)
    row = block * TILE_M
    batch, head = batch_head // heads_q, batch_head % heads_q
    sums = tl.zeros([THIRD_ROWS, SUM_COLUMNS], tl.float32)
    for chain in range(chains):
        at = (batch_head * chains + chain) * blocks + block
        added = tl.load(counters_ptr + 1 + at).to(tl.int32, bitcast=True)
        of_chain = sums_ptr + (at * SUM_ROWS + third * THIRD_ROWS) * SUM_COLUMNS
        sums += load_rows(of_chain, SUM_COLUMNS // 8, tl.where(added > 0, THIRD_ROWS, 0), THIRD_ROWS, SUM_COLUMNS, True)
    sums = tl.permute(sums.reshape([4, 8, 4, 2, 4, 2, 2]), (0, 5, 2, 3, 1, 4, 6)).reshape([TILE_M, COLUMNS])
    dq = (sums * scale).to(dq_ptr.dtype.element_ty)
    dq_ptr += (batch * stride_dqb + head * stride_dqh + row.to(tl.int64) * stride_dqs) * 8 + third * COLUMNS
    rows = tl.arange(0, TILE_M)[:, None]
    pointers = dq_ptr + rows * (stride_dqs * 8) + tl.arange(0, COLUMNS)[None, :]
    there = row + rows < seqlen_q
    if eighths is not None:
        there = there & (third * 8 + tl.arange(0, COLUMNS)[None, :] // 8 < eighths)
    tl.store(pointers, dq, mask=there)


def dq_chains(heads: int, steps: int, key_blocks: int) -> int:
    """Chains of a head's blocks of keys, dealt to them in turn: the programs of each add to a sum of dQ of their own, in order.

    Not in the batch at hand, on which no bit of dQ may depend: `heads` of dK and dV are those of one sequence, `steps` those of a program.
    The next program of a chain adds some two steps later, so 132 SMs are at work from 264 chains over two more than the steps on
    (`heads_abreast`).  A chain has 8 blocks at least: its sum is written and read once more.
    """
    return max(1, min(264 // ((steps + 2) * heads), key_blocks // 8))


def dq_sums(chains: int, heads: int, steps: int, key_blocks: int, seen_by_all: int) -> int:
    """Sums of a block of dQ: one for each chain; where there is one chain, one for each block of keys if programs would wait for each other.

    The sums of blocks are added up in the order of the blocks and have the bits of programs that add in turn, so the batch may decide:
    `heads` of dK and dV are all of a launch.  Nobody waits then, and each sum is written and read once more.  With a causal mask programs of
    later keys have fewer steps and wait for nothing; `seen_by_all`: blocks of keys that all queries see.
    """
    waits = 2 * seen_by_all >= key_blocks and 264 // ((steps + 2) * heads) > 1
    return key_blocks if chains == 1 and waits else chains


def heads_abreast(
    most: int,
    rows: int,
    seqlen_q: int,
    steps: int,
    group: int,
    key_blocks: int,
    heads: int,
    causal: bool,
    in_order: bool,
) -> int:
    """Heads of dK and dV, of `heads`, whose blocks of keys programs take by turns (all numbers measured, docs/notes/backward-kernels.md).

    The fewer programs of one head run together, the less they wait at its first block of dQ; the more heads, the less L2 has for each.
    `most`: of a variant, or where sums may have any order, for which nobody waits; `rows`: queries of all heads abreast for which L2 has room, 0: any; `steps`: of a program for a block without a mask; `group`:
    query heads that share keys; `in_order`: whether sums of dQ wait for each other.
    """
    if in_order and rows:
        most = max(min(most, rows // seqlen_q), 16)
    if in_order and steps <= 4:
        # The next program of a head waits longer for its turn than its own item takes.
        most = max(most, 264 // (steps + 2))
    if causal and group > 1:
        # Items of several query heads are few and long: with few heads abreast the last ones dealt are the longest of their head.
        most = max(most, 32 if key_blocks <= 16 else 16 if key_blocks <= 48 else 0)
        # Nor may a few heads come last, with their longest blocks.
        most = max(most, heads) if heads < 2 * most else most
    return most


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

    dK and dV of parts of the query heads that share a key/value head, None where a program takes them all; sums of dQ and 4 bytes to each block of queries to count in, both once for each chain, and 4 more.
    """
    (batch, heads_q, seqlen_q, _), (_, heads_kv, seqlen_k, _), parts = q.shape, k.shape, 1
    if q.device.type == "cuda" and q.numel() and k.numel():
        parts = query_head_parts(heads_q // heads_kv, heads_kv, seqlen_q, seqlen_k, -1, 0, TILE_N.value, 96, 0.0,
                         multiprocessors(q.device.index))  # fmt: skip
    rows = (batch, heads_kv * parts, seqlen_k)
    dk_parts, dv_parts = (q.new_empty((*rows, width)) if parts > 1 else None for width in (192, 128))
    padded = terms.shape[3]
    blocks = padded // TILE_M.value
    if heads_kv:
        sizes = blocks * triton.cdiv(heads_q // heads_kv, parts), triton.cdiv(seqlen_k, TILE_N.value)
        chains = dq_chains(heads_kv * parts, *sizes)
        blocks *= dq_sums(chains, batch * heads_kv * parts, *sizes, max(seqlen_k - seqlen_q, 0) // TILE_N.value)
    sums = terms.new_empty((batch, heads_q, blocks * SUM_ROWS.value, SUM_COLUMNS.value))
    counters = terms.new_empty((batch * heads_q * blocks + 1,))
    return dk_parts, dv_parts, sums, counters


def plan(q, k, v, out, lse, dout, dlse, dq, dk, dv, terms, dk_parts, dv_parts, sums, counters, window_left,
         window_right, deterministic=True):  # fmt: skip
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
    for x, count, columns in ((q, TILE_M, FIRST_COLUMNS), (q, TILE_M, COLUMNS), (dout, TILE_M, COLUMNS_V), (k, TILE_N,
                              FIRST_COLUMNS), (k, TILE_N, COLUMNS), (v, TILE_N, COLUMNS_V), (sums, THIRD_ROWS,
                              SUM_COLUMNS), (made_dk, KEYS, COLUMNS), (made_dv, KEYS, COLUMNS)):  # fmt: skip
        block = [1, 1, count.value, columns.value]
        layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[str(x.dtype)])
        boxes.append(TensorDescriptor.from_tensor(x, block, layout))
    chains = sums.shape[2] // (padded // TILE_M.value * SUM_ROWS.value)
    for_rows = (out, dout, lse, dlse_or_any, terms, counters, *(n // 8 for x in (out, dout) for n in x.stride()[:3]))
    for_rows += (heads_q, seqlen_q, padded, 0 if dlse is None else seqlen_q, chains, eighths_v)
    key_blocks, heads = triton.cdiv(seqlen_k, TILE_N.value), batch * sum_heads
    steps = triton.cdiv(seqlen_q, TILE_M.value) * part
    most = HEADS_ABREAST if deterministic else ANY_ORDER_ABREAST
    abreast = heads_abreast(most, 0, seqlen_q, steps, group, key_blocks, heads, True, deterministic)
    in_order = chains * (1 if deterministic else -1)
    sizes = (seqlen_q, seqlen_k, heads_q, group, part, heads, abreast, padded, in_order)
    row_blocks = padded // ROWS.value * batch * heads_q
    dq_blocks = padded // TILE_M.value * batch * heads_q
    for_dq = (sums, dq, counters, *(n // 8 for n in dq.stride()[:3]), heads_q, seqlen_q, padded, chains, eighths)
    of_dq = (round_dq, (TILES.value * dq_blocks, 1, 1), for_dq)
    return (
        (row_terms, (row_blocks, 1, 1), for_rows),
        (
            gradients,
            (min(key_blocks * heads, multiprocessors(q.device.index)), 1, 1),
            (*boxes, terms, counters, *sizes),
        ),
        of_dq,
        *last,
    )


def launch(q, k, v, out, lse, dout, dq, dk, dv, scale, window_left=-1, window_right=-1, dlse=None, terms=None,
           deterministic=True):  # fmt: skip
    """Write the gradients of launch(q, k, v, out, lse, scale) of the forward pass to `dq`, `dk` and `dv`.

    q, dq, out, dout: (batch, heads_q, seqlen_q, 192 or 128); k, v, dk, dv: (batch, heads_kv, seqlen_k, 192 or 128); all bf16 or all fp16, unit
    last stride, rows that start at 16 bytes; or with fewer columns, a multiple of 8.  lse, as the forward pass wrote it, and dlse, its gradient where it has one:
    (batch, heads_q, seqlen_q), float32, contiguous.  terms: (batch, heads_q, 2, seqlen_q rounded up to PADDED), float32:
    written here, allocated where it is None, as the sums of dQ are: 4 bytes for each element.  deterministic: whether programs add
    to dQ in the order of their keys, so that every run has the same bits.
    """
    if not 0.0 < scale <= 2.0e38:  # times log2(e), 2e38 is still a float32
        raise ValueError(f"scale: expected a number above 0 and at most 2e+38, got {scale:g}")
    if terms is None:
        padded = triton.cdiv(q.shape[2], PADDED.value) * PADDED.value
        terms = lse.new_empty((*q.shape[:2], 2, padded))
    more = workspaces(q, k, v, terms, window_left, window_right)
    launches = plan(q, k, v, out, lse, dout, dlse, dq, dk, dv, terms, *more, window_left, window_right, deterministic)
    for (kernel, grid, arguments), options in zip(launches, OPTIONS):
        scales = () if kernel is row_terms else (max(scale * LOG2E.value, 1e-37), scale)  # the first as in the forward
        kernel[grid](*arguments, *scales, **options)
    if not launches:
        for gradient in (dq, dk, dv):
            gradient.zero_()
