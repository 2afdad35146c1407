"""Decoding on Hopper for few rows, e4m3 caches, head_dim 192 (queries, keys) and 128 (values): attention to paged, packed or cached keys, split over keys.

Query i of a sequence sees keys from left before to right after position i + keys - queries.  A program copies blocks of
64 keys into rings in shared memory, 3 of K and of V ahead, 2 programs to an SM; four warps own 16 rows, the query heads
of one key head for consecutive queries, and take a fourth of a block's keys each, bytes of e4m3, which they make
float16 in registers, as Q is, in bfloat16 by a power of two for each row.  Where there are more splits than that, an SM
has one program, with 6 blocks ahead, which takes runs of a sequence's splits until there are none.  Sequences of up to
16 rows are split, whatever else is in the batch, and the program that finishes a tile last merges its splits in their
order: what a sequence gets depends on it alone.  Runs on sm_90a with triton and torch alone.
"""

TILECAST = {
    "tilecast": "0.1.0", "family": "hopper_serving_runs_e4m3", "machine": "h200-sxm", "targets": ["sm_90a"],
    "pass": "serve",
    "variant": "family=serving-hopper-runs-e4m3,tile_n=64,kv_stages=3,split_keys=1024,split_keys_of_many=1024,many_heads=8,whole_keys=1024,most_splits=128,most_items=132,merged=16,planned=128,programs=2,dealt_stages=6,beside_stages=1,shrinks=false,cache_bits=8",
    "workload": {"batch": 2, "heads_q": 64, "heads_kv": 16, "seqlen_q": 1, "seqlen_k": 8192, "head_dim_qk": 192, "head_dim_v": 128, "mask": "causal", "window": None, "dtype": "bf16"},
}  # fmt: skip

from collections import namedtuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its name in Triton 3.6
copy_rows = (
    async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
)  # the same
meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # the same
REINTERPRET_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # not in Triton 3.6

TILE_M = gl.constexpr(16)  # rows of a tile: the query heads that share a key head, for each query; the M of mma.sync
TILE_N = gl.constexpr(64)  # keys of a block
SLOTS = gl.constexpr(3)  # blocks of K and V that are in flight
DEALT_SLOTS = gl.constexpr(6)  # the same where a program takes items in turn
Q_SLOTS = gl.constexpr(4)  # items of which the load warp has told, with their Q, and no warp has read
FACTS = gl.constexpr(7)  # numbers that it tells of an item
COLUMNS = gl.constexpr(64)  # columns of a piece of a block: 128 bytes, the widest row that shared memory swizzles
QK_PIECES, V_PIECES = gl.constexpr(3), gl.constexpr(2)
SPLIT, SPLIT_OF_MANY = 1024, 1024  # keys of a split; where key heads are many; more where splits would be too many
MANY_HEADS = 8
WHOLE = gl.constexpr(1024)  # keys up to which a sequence is not split
MOST_SPLITS = gl.constexpr(128)  # of a sequence
MOST_ITEMS = gl.constexpr(132)  # splits of a sequence times key heads, unless the heads are more
# Splits are added up in groups of FOLD, those in groups of FOLD, and what is left then: a program takes in a split, a group or a group
# of groups, which changes no bit.
FOLD, FOLD_LOG2 = gl.constexpr(4), gl.constexpr(2)
MERGED = gl.constexpr(16)  # splits that are merged at a time
SLOT_ROWS = 4, 8, TILE_M.value  # of a slot: the fewest that hold what a sequence has at most
MANY_MERGED = gl.constexpr(8)  # rows that are merged at a time, or those of a slot
FEW_PLANNED, MANY_PLANNED = 32, 128  # sequences that a program looks at together to find its work
FAR = gl.constexpr(1 << 29)  # more keys than a sequence has, more pages than a pool
LOWEST = gl.constexpr(-3.4028234663852886e38)  # finite, so that a row that saw no key yet never computes inf - inf
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
KINDS = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16}
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True, "maxnreg": 248}
#: Programs that an SM holds at once, where each has one item, and their options: a thread then has fewer registers.
PROGRAMS = 2
DIRECT_OPTIONS = {**OPTIONS, "maxnreg": 128}
#: Whether a launch may let the one for other rows that comes after begin before it ends.
LEADS = True

# Keys of a block are dealt to the WARPS of a warpgroup, which multiply them apart (mma.sync): warp, row, key or column.
WARPS, WARP_KEYS = gl.constexpr(4), gl.constexpr(16)
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=SCORES, k_width=2))
RIGHT = gl.constexpr(gl.DotOperandLayout(operand_index=1, parent=SCORES, k_width=2))
WARP_ROWS = gl.constexpr(gl.SliceLayout(2, SCORES))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(0, WARP_ROWS))
# A product sums over columns in any order that both its sides have, and sums stand in any order: each thread reads 16 or 8 bytes of a key at
# a time from where they lie, and they are what mma.sync wants of it, once the columns (of Q and K) and the keys are renumbered.
K_BYTES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [TILE_N, COLUMNS],
    )
)
V_BYTES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [1, 0], [8, 0]],
        [[2, 0], [4, 0], [0, 8], [0, 16], [0, 32]],
        [[16, 0], [32, 0]],
        [],
        [TILE_N, COLUMNS],
    )
)
Q_READ = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[0, 0], [0, 0]],
        [],
        [TILE_M, COLUMNS],
    )
)
Q_READ_ROWS = gl.constexpr(gl.SliceLayout(1, Q_READ))
V_BYTES_ROWS = gl.constexpr(gl.SliceLayout(1, V_BYTES))
# Warps, rows, columns of what the warps have made: a thread has all warps' parts of its elements.
PARTS = gl.constexpr(gl.BlockedLayout([4, 1, 4], [1, 2, 16], [1, 4, 1], [2, 1, 0]))
PARTS_ROWS = gl.constexpr(gl.SliceLayout(2, PARTS))
OUT_ROWS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(0, PARTS)))
# 16 bytes to a thread: rows of Q that the load warp copies; a number that it tells, and that all read.
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))
FACT = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
FACT_READ = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# Rows and columns of a merge.
MERGING = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
MERGING_ROWS = gl.constexpr(gl.SliceLayout(1, MERGING))

# The sequences of a launch; its tensors of rows (strides in units of 8 elements); where splits leave what they have.
Batch = namedtuple(
    "Batch",
    "cu_q cu_k used_k table slots stride_table count heads_kv group seqlen_q seqlen_k split_bits split_log2 left right rows_min rows_max sms",
)
Rows = namedtuple(
    "Rows",
    "q out lse sinks k_scales v_scales stride_qb stride_qs stride_qh stride_ob stride_os stride_oh stride_lb stride_ls stride_lh stride_kb stride_kg stride_vb stride_vg scale_log2 cap_log2",
)
Scratch = namedtuple("Scratch", "partials arrived split_bound slot_rows split_tiles")
# Blocks on their way through shared memory: number n lies in slot n % SLOTS; a lap flips the barriers' phase.  The same memory
# as tiles of TILE_N keys, which are read, and as boxes of a page or a part of it, which are copied; what warps have made.
Ring = namedtuple("Ring", "k k_boxes v v_boxes full empty parts stats sums")
# Items that the load warp has taken: Q and facts, and whether they are there and have been read.
Items = namedtuple("Items", "q q_full q_empty facts told")
# Blocks of the launch for a key head, and whether items shrink towards its end.
Deal = namedtuple("Deal", "blocks shrinks")
# Splits `split` to `stop` of the keys, for one tile of rows of one key head of sequence `b`: keys from `begin` to `end`, of those
# between `least` and `most` that its rows see.
Item = namedtuple(
    "Item", "b head_kv tile split stop splits run q_len k_len low high first_key blocks least most begin end"
)


@gluon.jit
def own_copy(x):
    """``x``, opaque to the compiler: what roles compute alike, it would compute once before they part, and spill."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def mufu_exp2(x):
    """2^x on the special function unit."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


# -- shared memory
@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """Barriers that complete a phase with every ``ARRIVALS`` arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def wait(bars, n):
    """Until the slot of number n is as its n-th user wants it."""
    slots: gl.constexpr = bars.shape[0]
    mbarrier.wait(bars.index(n % slots), n // slots & 1)


@gluon.jit
def wait_empty(bars, n):
    """The same for a slot that is empty at the start."""
    slots: gl.constexpr = bars.shape[0]
    mbarrier.wait(bars.index(n % slots), n // slots & 1 ^ 1)


@gluon.jit
def arrive(bars, n):
    """The slot of number n is done with."""
    slots: gl.constexpr = bars.shape[0]
    mbarrier.arrive(bars.index(n % slots), count=1)


@gluon.jit
def allocate_blocks(desc, PIECES: gl.constexpr, SLOTS: gl.constexpr):
    """(tiles, boxes) of SLOTS blocks; a block is PIECES tiles, a tile the boxes of its pages, one after the other."""
    box: gl.constexpr = desc.block_type.shape[2]
    boxes = gl.allocate_shared_memory(desc.dtype, [SLOTS * PIECES * (TILE_N // box), 1, 1, box, COLUMNS], desc.layout)
    reinterpret: gl.constexpr = boxes.reinterpret if REINTERPRET_IS_PUBLIC else boxes._reinterpret
    return reinterpret(desc.dtype, [SLOTS * PIECES, TILE_N, COLUMNS], gl.NVMMASharedLayout(64, 8, 2)), boxes


# -- work
@gluon.jit
def lengths(batch, b, there):
    """(queries, keys) of sequence `b`, 0 where it is not `there`."""
    q_len = gl.where(there, batch.seqlen_q, 0)
    if batch.cu_q is not None:
        q_len = gl.load(batch.cu_q + b + 1, mask=there, other=0) - gl.load(batch.cu_q + b, mask=there, other=0)
    k_len = gl.where(there, batch.seqlen_k, 0)
    if batch.used_k is not None:
        k_len = gl.load(batch.used_k + b, mask=there, other=0)
    elif batch.cu_k is not None:
        k_len = gl.load(batch.cu_k + b + 1, mask=there, other=0) - gl.load(batch.cu_k + b, mask=there, other=0)
    return gl.minimum(gl.maximum(q_len, 0), batch.seqlen_q), gl.minimum(gl.maximum(k_len, 0), batch.seqlen_k)


@gluon.jit
def shares(batch, q_len, k_len):
    """(row tiles, splits, first key, blocks) of a sequence, from its own lengths alone; no tiles where another kernel takes it."""
    rows = q_len * batch.group
    tiles = gl.where((rows >= batch.rows_min) & (rows <= batch.rows_max), rows + TILE_M - 1 >> 4, 0)
    first = gl.maximum(k_len - q_len - batch.left, 0) & -TILE_N
    span = gl.maximum(k_len - first, 0)
    splits = gl.minimum(span + (1 << batch.split_log2) - 1 >> batch.split_log2, 1 << batch.split_bits)
    return tiles, gl.where((rows <= TILE_M) & (span > WHOLE), splits, 1), first, span + TILE_N - 1 >> 6


@gluon.jit
def blocks_of_split(batch, splits, blocks):
    """Blocks of the largest split of a sequence, without a division, which takes longer than all the rest of finding one's work."""
    each = gl.minimum(blocks, 1 << batch.split_log2 - 6)
    each = gl.where(splits >> batch.split_bits == 1, blocks + (1 << batch.split_bits) - 1 >> batch.split_bits, each)
    return gl.where(splits == 1, blocks, each)


@gluon.jit
def run_of(batch, splits, blocks, still):
    """(log2 of the splits that a program takes in one after the other, their blocks): as many as have no more than a fair share, and a
    sixteenth, of the blocks that are `still` to be taken in."""
    share, each = still * batch.heads_kv * 17, gl.minimum(blocks_of_split(batch, splits, blocks), FAR >> 16)
    group, groups = gl.minimum(splits, FOLD) * each, gl.minimum(splits, MERGED) * each
    run = gl.where(group * (16 * batch.sms) <= share, FOLD_LOG2, 0)
    taken = gl.where(group * (16 * batch.sms) <= share, group, each)
    fits = groups * (16 * batch.sms) <= share
    return gl.where(fits, 2 * FOLD_LOG2, run), gl.where(fits, groups, taken)


@gluon.jit
def deal_of(batch, PLANNED: gl.constexpr, WARPS: gl.constexpr):
    """What the launch has to deal out.  Where rounds of its largest item are nearly full, all sequences have runs as large as the first one,
    otherwise no runs: nothing counts as still to be taken in."""
    layout: gl.constexpr = gl.BlockedLayout([max(1, PLANNED // (32 * WARPS))], [32], [WARPS], [0])
    total = 0
    for first in range(0, batch.count, PLANNED):
        b = first + gl.arange(0, PLANNED, layout=layout)
        q_len, k_len = lengths(batch, b, b < batch.count)
        tiles, _, _, blocks = shares(batch, q_len, k_len)
        total += gl.sum(tiles * blocks, 0)
    total = gl.minimum(total, (1 << 26) // batch.heads_kv)  # whatever it is, what is compared is below 2^31
    items, largest = 0, 0
    for first in range(0, batch.count, PLANNED):
        b = first + gl.arange(0, PLANNED, layout=layout)
        q_len, k_len = lengths(batch, b, b < batch.count)
        tiles, splits, _, blocks = shares(batch, q_len, k_len)
        run, taken = run_of(batch, splits, blocks, total)
        items += gl.sum(tiles * (splits + (1 << run) - 1 >> run), 0)
        largest = gl.maximum(largest, gl.max(gl.where(tiles > 0, taken, 0), 0))
    rounds = (items * batch.heads_kv + batch.sms - 1) // batch.sms
    full = 16 * (total * batch.heads_kv // batch.sms) >= 15 * gl.minimum(rounds * largest, 1 << 26)
    return Deal(gl.where(full, total, 0), gl.to_tensor(0))


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def ends_of(batch, first, done, begun, deal, PLANNED: gl.constexpr, WARPS: gl.constexpr):
    """Of each of PLANNED sequences, the number of the item after its last one, and the blocks of a key head up to its last one; `done`
    and `begun` of the sequences before."""
    layout: gl.constexpr = gl.BlockedLayout([max(1, PLANNED // (32 * WARPS))], [32], [WARPS], [0])
    b = first + gl.arange(0, PLANNED, layout=layout)
    q_len, k_len = lengths(batch, b, b < batch.count)
    tiles, splits, _, blocks = shares(batch, q_len, k_len)
    after = begun + gl.associative_scan(tiles * blocks, 0, plus)
    run, _ = run_of(batch, splits, blocks, deal.blocks - deal.shrinks * (after - tiles * blocks))
    return done + gl.associative_scan(tiles * (splits + (1 << run) - 1 >> run) * batch.heads_kv, 0, plus), after


@gluon.jit
def edge(batch, item_splits, blocks, split):
    """The block that a split begins with: splits have as many as each other, or, where they are as many as there may be, even shares."""
    at = gl.minimum(split << batch.split_log2 - 6, blocks)
    at = gl.where(item_splits >> batch.split_bits == 1, split * blocks >> batch.split_bits, at)
    return gl.where(split >= item_splits, blocks, at)


@gluon.jit
def item_at(batch, b, head_kv, tile, split, q_len, k_len, run, ONE: gl.constexpr):
    """The run of a sequence, a key head and a tile that begins with a split."""
    _, splits, first_key, blocks = shares(batch, q_len, k_len)
    if ONE:
        low, high = gl.to_tensor(0), gl.to_tensor(0)
    else:
        low = tile * TILE_M // batch.group
        high = gl.minimum((tile * TILE_M + TILE_M - 1) // batch.group, q_len - 1)
    stop = gl.minimum(split + (1 << run), splits)
    diagonal = k_len - q_len
    least = gl.maximum(low + diagonal - batch.left, 0) & -TILE_N
    most = gl.minimum(high + diagonal + batch.right + 1, k_len)
    begin = gl.maximum(least, first_key + edge(batch, splits, blocks, split) * TILE_N)
    end = gl.maximum(gl.minimum(most, first_key + edge(batch, splits, blocks, stop) * TILE_N), begin)
    return Item(
        b, head_kv, tile, split, stop, splits, run, q_len, k_len, low, high, first_key, blocks, least, most, begin, end
    )


@gluon.jit
def item_from(batch, b, head_kv, index, q_len, k_len, run, ONE: gl.constexpr):
    """Run number ``index`` of a sequence and key head: late rows come first."""
    if ONE:
        number, tile = index, gl.to_tensor(0)
    else:
        _, splits, _, _ = shares(batch, q_len, k_len)
        runs = splits + (1 << run) - 1 >> run
        tiles = q_len * batch.group + TILE_M - 1 >> 4
        number, tile = index % runs, tiles - 1 - index // runs
    return item_at(batch, b, head_kv, tile, number << run, q_len, k_len, run, ONE)


@gluon.jit
def keys_of_split(batch, item, split):
    """(first key, key after the last) of a split."""
    begin = gl.maximum(item.least, item.first_key + edge(batch, item.splits, item.blocks, split) * TILE_N)
    end = gl.minimum(item.most, item.first_key + edge(batch, item.splits, item.blocks, split + 1) * TILE_N)
    return begin, end


@gluon.jit
def item_of(batch, first, ends, after, done, begun, deal, number, ONE: gl.constexpr):
    """The item of a number: heads of a token are neighbours in memory and in the order."""
    b = first + gl.sum((ends <= number).to(gl.int32), 0)
    index = number - gl.max(gl.where(ends <= number, ends, done), 0)
    still = deal.blocks - deal.shrinks * gl.max(gl.where(ends <= number, after, begun), 0)
    q_len, k_len = lengths(batch, b, b >= 0)
    _, splits, _, blocks = shares(batch, q_len, k_len)
    run, _ = run_of(batch, splits, blocks, still)
    return item_from(batch, b, index % batch.heads_kv, index // batch.heads_kv, q_len, k_len, run, ONE)


@gluon.jit
def direct_item(batch, ONE: gl.constexpr, DIRECT: gl.constexpr):
    """(the item of a program of its own, whether there is one): each sequence and key head has as many programs as splits at the most."""
    head_kv, run, b = own_copy(gl.program_id(0)), own_copy(gl.program_id(1)), own_copy(gl.program_id(2))
    q_len, k_len = lengths(batch, b, b >= 0)
    tiles, splits, _, _ = shares(batch, q_len, k_len)
    run_log2 = gl.to_tensor(FOLD_LOG2 * (DIRECT - 1))
    return item_from(batch, b, head_kv, run, q_len, k_len, run_log2, ONE), (tiles > 0) & (run << run_log2 < splits)


@gluon.jit
def queries_and_heads(batch, item, row, ONE: gl.constexpr):
    """(query, query head) of rows of an item's tile."""
    if ONE:
        query, head = gl.zeros_like(row), item.head_kv * batch.group + row
    else:
        number = item.tile * TILE_M + row
        query, head = number // batch.group, item.head_kv * batch.group + number % batch.group
    return query, head


# -- load role
@gluon.jit
def find_pages(table, key, k_len, PAGE: gl.constexpr):
    """Pages of the block of keys from `key` on; of those that have no key one that is nowhere, which reads as zeros."""
    pages = ()
    step: gl.constexpr = min(PAGE, TILE_N)
    for i in gl.static_range(TILE_N // step):
        at = key + i * step
        pages = pages + (gl.load(table + at // PAGE, mask=at < k_len, other=FAR),)
    return pages


@gluon.jit
def load_tile(desc, boxes, slot, full, pages, head, token, PIECES: gl.constexpr):
    """Copy a block of K or V to a slot: a box of each page and piece."""
    per: gl.constexpr = len(pages)
    mbarrier.expect(full, PIECES * TILE_N * COLUMNS)
    for piece in gl.static_range(PIECES):
        for i in gl.static_range(per):
            box = boxes.index((slot * PIECES + piece) * per + i)
            copy_tile(desc, [pages[i], head, token, piece * COLUMNS], full, box)


@gluon.jit
def load_block(ring, n, k_desc, v_desc, pages, head, token):
    """Copy a block of keys and values as number n, once its slot is free."""
    wait_empty(ring.empty, n)
    slot = n % ring.empty.shape[0]
    load_tile(k_desc, ring.k_boxes, slot, ring.full.index(slot), pages, head, token, QK_PIECES)
    load_tile(v_desc, ring.v_boxes, slot, ring.full.index(slot), pages, head, token, V_PIECES)


@gluon.jit
def first_pages(batch, item, PAGE: gl.constexpr):
    """Pages of an item's first block; of a cache without pages (its row, the first token of the sequence in it)."""
    if PAGE > 0:
        pages = find_pages(batch.table + item.b.to(gl.int64) * batch.stride_table, item.begin, item.k_len, PAGE)
    elif batch.cu_k is not None:
        pages = (gl.to_tensor(0), gl.load(batch.cu_k + item.b))
    elif batch.slots is not None:
        pages = (gl.load(batch.slots + item.b), gl.to_tensor(0))
    else:
        pages = (item.b, gl.to_tensor(0))
    return pages


@gluon.jit
def load_item(item, pages, n, k_desc, v_desc, ring, batch, PAGE: gl.constexpr):
    """Copies the key blocks of an item, whose first pages are known."""
    if PAGE > 0:
        table = batch.table + item.b.to(gl.int64) * batch.stride_table
        for key in range(item.begin, item.end, TILE_N):
            ahead = find_pages(table, key + TILE_N, item.k_len, PAGE)
            token = key % PAGE if PAGE > TILE_N else 0
            load_block(ring, n, k_desc, v_desc, pages, item.head_kv, token)
            pages = ahead
            n += 1
    else:
        page, start = pages
        for key in range(item.begin, item.end, TILE_N):
            load_block(ring, n, k_desc, v_desc, (page,), item.head_kv, start + key)
            n += 1
    return n


@gluon.jit
def early_pages(batch, item, PAGE: gl.constexpr, ONE: gl.constexpr):
    """`first_pages`, looked up before the length of the sequence is known: where a sequence as long as may be begins its split."""
    if PAGE > 0:
        guess = item_from(
            batch, item.b, item.head_kv, item.split, gl.to_tensor(1), batch.seqlen_k, gl.to_tensor(0), ONE
        )
        table = batch.table + item.b.to(gl.int64) * batch.stride_table
        guessed = find_pages(table, guess.begin, batch.seqlen_k, PAGE)
        if item.begin != guess.begin:
            guessed = find_pages(table, item.begin, batch.seqlen_k, PAGE)
        pages = ()
        for i in gl.static_range(len(guessed)):
            pages = pages + (gl.where(item.begin + i * min(PAGE, TILE_N) < item.k_len, guessed[i], FAR),)
    else:
        pages = first_pages(batch, item, PAGE)
    return pages


@gluon.jit
def load_q(items, turn, item, rows, batch, ONE: gl.constexpr, Q_ROWS: gl.constexpr):
    """Copy Q of an item as number ``turn``; rows that are none become zeros."""
    row = gl.arange(0, Q_ROWS, layout=gl.SliceLayout(1, COPIED))
    there = item.tile * TILE_M + row < item.q_len * batch.group
    query, head = queries_and_heads(batch, item, row, ONE)
    start = item.b.to(gl.int64) * (rows.stride_qb * 8)
    if batch.cu_q is not None:
        start = gl.load(batch.cu_q + item.b).to(gl.int64) * (rows.stride_qs * 8)
    offsets = query.to(gl.int64) * (rows.stride_qs * 8) + head * (rows.stride_qh * 8)
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, COPIED))
    wait_empty(items.q_empty, turn)
    for piece in gl.static_range(QK_PIECES):
        at = rows.q + start + (offsets[:, None] + (piece * COLUMNS + columns)[None, :])
        copy_rows(items.q.index(turn % Q_SLOTS * QK_PIECES + piece).slice(0, Q_ROWS), at, mask=there[:, None])
    async_copy.mbarrier_arrive(items.q_full.index(turn % Q_SLOTS), increment_count=False)


@gluon.jit
def tell(items, turn, facts):
    """Say which item is that of a turn: its sequence (-1: there are no more), key head, tile, first split, queries, keys, and run."""
    wait_empty(items.q_empty, turn)
    for i in gl.static_range(FACTS):
        items.facts.index(turn % Q_SLOTS * FACTS + i).store(gl.full([1], facts[i], gl.int32, layout=FACT))
    meet()  # all threads have stored before one of them says so
    arrive(items.told, turn)


@gluon.jit
def told(items, turn, batch, ONE: gl.constexpr):
    """(the item of a turn, whether there is one)."""
    wait(items.told, turn)
    facts = ()
    for i in gl.static_range(FACTS):
        facts = facts + (gl.sum(items.facts.index(turn % Q_SLOTS * FACTS + i).load(FACT_READ), 0),)
    return item_at(batch, facts[0], facts[1], facts[2], facts[3], facts[4], facts[5], facts[6], ONE), facts[0] >= 0


@gluon.jit
def load_role(
    k_desc,
    v_desc,
    ring,
    items,
    rows,
    batch,
    taken,
    PAGE: gl.constexpr,
    ONE: gl.constexpr,
    PLANNED: gl.constexpr,
    DIRECT: gl.constexpr,
    BESIDE: gl.constexpr,
):
    """Copies K and V of every item of this program into shared memory, and Q where it takes items in turn."""
    batch = Batch(
        batch.cu_q,
        batch.cu_k,
        batch.used_k,
        batch.table,
        batch.slots,
        own_copy(batch.stride_table),
        own_copy(batch.count),
        own_copy(batch.heads_kv),
        own_copy(batch.group),
        own_copy(batch.seqlen_q),
        own_copy(batch.seqlen_k),
        own_copy(batch.split_bits),
        own_copy(batch.split_log2),
        own_copy(batch.left),
        own_copy(batch.right),
        own_copy(batch.rows_min),
        own_copy(batch.rows_max),
        own_copy(batch.sms),
    )
    n = gl.to_tensor(0)
    if DIRECT:
        item, there = direct_item(batch, ONE, DIRECT)
        pages = early_pages(batch, item, PAGE, ONE)
        if there:
            load_item(item, pages, n, k_desc, v_desc, ring, batch, PAGE)
    else:
        turn, done, begun, number, programs = gl.to_tensor(0), 0, 0, own_copy(gl.program_id(0)), gl.num_programs(0)
        rows = Rows(
            rows.q,
            rows.out,
            rows.lse,
            rows.sinks,
            rows.k_scales,
            rows.v_scales,
            own_copy(rows.stride_qb),
            own_copy(rows.stride_qs),
            own_copy(rows.stride_qh),
            own_copy(rows.stride_ob),
            own_copy(rows.stride_os),
            own_copy(rows.stride_oh),
            own_copy(rows.stride_lb),
            own_copy(rows.stride_ls),
            own_copy(rows.stride_lh),
            own_copy(rows.stride_kb),
            own_copy(rows.stride_kg),
            own_copy(rows.stride_vb),
            own_copy(rows.stride_vg),
            rows.scale_log2,
            rows.cap_log2,
        )
        deal = deal_of(batch, PLANNED, 1)
        for first in range(0, batch.count, PLANNED):
            ends, after = ends_of(batch, first, done, begun, deal, PLANNED, 1)
            total = gl.max(ends, 0)
            if number < total:
                item = item_of(batch, first, ends, after, done, begun, deal, number, ONE)
                pages = first_pages(batch, item, PAGE)
                while number < total:
                    tell(items, turn, (item.b, item.head_kv, item.tile, item.split, item.q_len, item.k_len, item.run))
                    load_q(items, turn, item, rows, batch, ONE, TILE_M)
                    turn += 1
                    # Who is done takes the next.  Its pages are on their way while the blocks of this one are.
                    number = programs + gl.atomic_add(taken, 1, sem="relaxed")
                    following, ahead = item, pages
                    if number < total:
                        following = item_of(batch, first, ends, after, done, begun, deal, number, ONE)
                        ahead = first_pages(batch, following, PAGE)
                    n = load_item(item, pages, n, k_desc, v_desc, ring, batch, PAGE)
                    item, pages = following, ahead
            done, begun = total, gl.max(after, 0)
        none = gl.to_tensor(0)
        tell(items, turn, (gl.to_tensor(-1), none, none, none, none, none, none))
        # The last program sets the counters back for the next launch.
        last = gl.atomic_add(taken + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1
        if last:
            gl.atomic_xchg(taken, 0, sem="relaxed")
            gl.atomic_xchg(taken + 1, 0, sem="relaxed")


# -- softmax role
@gluon.jit
def read_q(item, rows, batch, ONE: gl.constexpr):
    """Q of an item, in pieces; rows that are none are zeros."""
    row = gl.arange(0, TILE_M, layout=Q_READ_ROWS)
    there = item.tile * TILE_M + row < item.q_len * batch.group
    query, head = queries_and_heads(batch, item, row, ONE)
    start = item.b.to(gl.int64) * (rows.stride_qb * 8)
    if batch.cu_q is not None:
        start = gl.load(batch.cu_q + item.b).to(gl.int64) * (rows.stride_qs * 8)
    offsets = query.to(gl.int64) * (rows.stride_qs * 8) + head * (rows.stride_qh * 8)
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, Q_READ))
    made = ()
    for piece in gl.static_range(QK_PIECES):
        at = rows.q + start + (offsets[:, None] + (piece * COLUMNS + columns)[None, :])
        made = made + (gl.load(at, mask=there[:, None], other=0.0),)
    return made


# -- columns and keys as mma.sync numbers them
@gluon.jit
def query_columns(q):
    """Rows of Q with the columns in the order in which a thread multiplies them."""
    q = gl.reshape(q, [TILE_M, 4, 4, 2, 2])  # by 16, 4, 2, 1
    return gl.reshape(gl.permute(q, (0, 2, 3, 1, 4)), [TILE_M, COLUMNS])


@gluon.jit
def keys_of_warps(x):
    """Tile of K as (warp, column, key): columns as `query_columns` has them."""
    x = gl.reshape(x, [WARPS, WARP_KEYS, 4, 4, 2, 2])
    x = gl.permute(x, (0, 3, 4, 2, 5, 1))
    return gl.convert_layout(gl.reshape(x, [WARPS, COLUMNS, WARP_KEYS]), RIGHT)


@gluon.jit
def values_of_warps(x):
    """Tile of V as (warp, key, column): keys in their order, columns as `output_columns` takes them."""
    x = gl.reshape(x, [WARPS, WARP_KEYS, 8, 8])  # columns by 8, 1
    x = gl.permute(x, (0, 1, 3, 2))
    return gl.convert_layout(gl.reshape(x, [WARPS, WARP_KEYS, COLUMNS]), RIGHT)


@gluon.jit
def output_columns(o):
    """(warp, row, column) with the columns in their own order."""
    o = gl.permute(gl.reshape(o, [WARPS, TILE_M, 8, 8]), (0, 1, 3, 2))
    return gl.reshape(o, [WARPS, TILE_M, COLUMNS])


@gluon.jit
def key_numbers(layout: gl.constexpr):
    """Of the keys of a warp, which one of its own keys each is."""
    key = gl.arange(0, WARP_KEYS, layout=layout)
    return key


# -- blocks
@gluon.jit
def widened(x):
    """e4m3 bytes as float16, which holds each of their values exactly; one instruction makes two."""
    return x.to(gl.float8e4nv, bitcast=True).to(gl.float16)


@gluon.jit
def clear_rows(ring, n, count):
    """Zeros for the rows of V from ``count`` on, which hold anything: 0 times NaN is NaN."""
    rows = gl.arange(0, TILE_N, layout=V_BYTES_ROWS)
    for piece in gl.static_range(V_PIECES):
        tile = ring.v.index(n % ring.full.shape[0] * V_PIECES + piece)
        values = tile.load(V_BYTES)
        tile.store(gl.where((rows < count)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    meet()


@gluon.jit
def queries(read):
    """(pieces of Q in float16 for each warp, what their rows were divided by, a power of two)."""
    largest = gl.zeros([TILE_M], gl.float32, layout=Q_READ_ROWS)
    for i in gl.static_range(QK_PIECES):
        largest = gl.maximum(largest, gl.max(gl.abs(read[i].to(gl.float32)), 1))
    # The largest of a row to between 2^14 and 2^15, by exponent bits: nothing overflows, and no digit is lost that counts.
    bits = gl.minimum(gl.maximum(268 - (largest.to(gl.int32, bitcast=True) >> 23), 1), 253)
    factor = (bits << 23).to(gl.float32, bitcast=True)[:, None]
    made = ()
    for i in gl.static_range(QK_PIECES):
        x = read[i]
        if x.dtype != gl.float16:
            x = (x.to(gl.float32) * factor).to(gl.float16)
        x = gl.expand_dims(gl.convert_layout(query_columns(x), gl.SliceLayout(0, LEFT)), 0)
        made = made + (gl.broadcast(x, gl.zeros([WARPS, TILE_M, COLUMNS], gl.float16, layout=LEFT))[0],)
    divisor = (254 - bits << 23).to(gl.float32, bitcast=True)
    if read[0].dtype == gl.float16:
        divisor = gl.full_like(divisor, 1.0)
    return made, gl.convert_layout(divisor, SCORE_ROWS)


@gluon.jit
def partial_sums(p):
    """Sums over the keys that one thread holds."""
    return gl.sum(gl.sum(gl.reshape(p, [WARPS, TILE_M, WARP_KEYS // 8, 4, 2]), axis=4), axis=2)


@gluon.jit
def attend(
    q,
    ring,
    n,
    key,
    item,
    state,
    first_key,
    last_key,
    whole_begin,
    whole_end,
    scale_log2,
    cap_log2,
    CAPPED: gl.constexpr,
    ONE: gl.constexpr,
):
    """Take in the keys of one block, each warp its own: S = Q K^T, online softmax in base 2, O = O * correction + P V."""
    row_max, row_sums, o = state
    slots: gl.constexpr = ring.full.shape[0]
    wait(ring.full, n)
    if key + TILE_N > item.k_len:
        clear_rows(ring, n, item.k_len - key)
    s = gl.zeros([WARPS, TILE_M, WARP_KEYS], gl.float32, layout=SCORES)
    for i in gl.static_range(QK_PIECES):
        x = ring.k.index(n % slots * QK_PIECES + i).load(K_BYTES)
        s = mma_v2(q[i], keys_of_warps(widened(x)), s)
    values = ()
    for i in gl.static_range(V_PIECES):
        values = values + (ring.v.index(n % slots * V_PIECES + i).load(V_BYTES),)
    if CAPPED:
        s = cap_log2 - 2.0 * cap_log2 / (gl.exp2(s * scale_log2[None, :, None]) + 1.0)  # cap * tanh(score / cap)
        factor = gl.full_like(scale_log2, 1.0)
    else:
        factor = scale_log2
    if (key < whole_begin) | (key + TILE_N > whole_end):
        keys = key + gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, SCORES)))[:, None, None] * WARP_KEYS
        keys += key_numbers(gl.SliceLayout(0, gl.SliceLayout(1, SCORES)))[None, None, :]
        if ONE:
            s = gl.where((keys >= first_key) & (keys <= last_key), s, float("-inf"))
        else:
            s = gl.where((keys >= first_key[None, :, None]) & (keys <= last_key[None, :, None]), s, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(s, 2) * factor[None, :])
    p = mufu_exp2(s * factor[None, :, None] - new_max[:, :, None])
    correction = mufu_exp2(row_max - new_max)
    sums = partial_sums(p)
    row_sums = row_sums * gl.convert_layout(correction, gl.SliceLayout(2, row_sums.type.layout))[:, :, None] + sums
    p = gl.convert_layout(p.to(gl.float16), LEFT)
    fence_async_shared()
    meet()  # all threads have read before one of them says so
    arrive(ring.empty, n)
    made = ()
    for i in gl.static_range(V_PIECES):
        made = made + (mma_v2(p, values_of_warps(widened(values[i])), o[i] * correction[:, :, None]),)
    return new_max, row_sums, made


@gluon.jit
def together(state, ring):
    """The state of a tile from those of its warps, always in their order."""
    row_max, row_sums, o = state
    ring.stats.index(0).store(row_max)
    ring.stats.index(1).store(gl.sum(row_sums, 2))
    for i in gl.static_range(V_PIECES):
        ring.parts.index(i).store(output_columns(o[i]))
    maxima = ring.stats.index(0).load(gl.SliceLayout(2, PARTS))
    new_max = gl.max(maxima, 0)
    weight = mufu_exp2(maxima - new_max[None, :])
    row_sum = gl.sum(ring.stats.index(1).load(gl.SliceLayout(2, PARTS)) * weight, 0)
    made = ()
    for i in gl.static_range(V_PIECES):
        made = made + (gl.sum(ring.parts.index(i).load(PARTS) * weight[:, :, None], 0),)
    return gl.convert_layout(new_max, OUT_ROWS), gl.convert_layout(row_sum, OUT_ROWS), made


# -- states of rows
@gluon.jit
def blend(x, a, y, b):
    """x a + y b, rounded alike wherever it stands."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.rn.f32 t, $3, $4; fma.rn.f32 $0, $1, $2, t; }",
        "=f,f,f,f,f",
        [x, a, y, b],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def weights(before, after):
    """(maximum, weight before, weight after) of rows with these maxima."""
    row_max = gl.maximum(before, after)
    return row_max, mufu_exp2(before - row_max), mufu_exp2(after - row_max)


@gluon.jit
def folded(before, after):
    """The state of rows from those of keys before and after."""
    row_max, a, b = weights(before[0], after[0])
    row_sum = blend(before[1], a, after[1], b)
    made = ()
    for i in gl.static_range(len(after[2])):
        made = made + (blend(before[2][i], a[:, None], after[2][i], b[:, None]),)
    return row_max, row_sum, made


@gluon.jit
def put(sums, level, state):
    """Keep O of a state in shared memory, where it takes no registers from the loop; its maxima and sums."""
    for i in gl.static_range(V_PIECES):
        sums.index(level * V_PIECES + i).store(state[2][i])
    return state[0], state[1]


@gluon.jit
def got(sums, level, kept):
    """The state that `put` has kept."""
    o = ()
    for i in gl.static_range(V_PIECES):
        o = o + (sums.index(level * V_PIECES + i).load(gl.SliceLayout(0, PARTS)),)
    return kept[0], kept[1], o


@gluon.jit
def put_nothing(sums, level):
    """Keep the state of rows of no keys."""
    o = ()
    for _ in gl.static_range(V_PIECES):
        o = o + (gl.zeros([TILE_M, COLUMNS], gl.float32, layout=gl.SliceLayout(0, PARTS)),)
    lowest = gl.full([TILE_M], LOWEST, gl.float32, layout=OUT_ROWS)
    return put(sums, level, (lowest, gl.zeros([TILE_M], gl.float32, layout=OUT_ROWS), o))


@gluon.jit
def store_rows(pointer, piece, o, offsets, there):
    """A piece of O."""
    columns = piece * COLUMNS + gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, o.type.layout))
    gl.store(pointer + (offsets[:, None] + columns[None, :]), o.to(pointer.dtype.element_ty), mask=there[:, None])


@gluon.jit
def normal(row_max, row_sum, head, there, rows):
    """(factor of O, log-sum-exp, ) of rows: one that saw no key gives 0 and -inf, or its sink."""
    weight = gl.full_like(row_sum, 1.0)
    if rows.sinks is not None:
        sink = gl.load(rows.sinks + head, mask=there, other=0.0).to(gl.float32) * LOG2E
        new_max = gl.maximum(row_max, sink)
        weight = mufu_exp2(row_max - new_max)
        row_sum = row_sum * weight + mufu_exp2(sink - new_max)
        row_max = new_max
    factor = gl.where(row_sum == 0.0, 0.0, weight / row_sum)
    return factor, (row_max + gl.log2(row_sum)) * LN2


@gluon.jit
def tile_of(scratch, item, batch):
    """Number of an item's tile among those that are split."""
    return (item.b * batch.heads_kv + item.head_kv) * scratch.split_tiles + item.tile


@gluon.jit
def first_slot(scratch, item, batch):
    """First slot of the partial results of an item's tile."""
    tile = tile_of(scratch, item, batch)
    groups = (scratch.split_bound + MERGED - 1) // MERGED
    return tile * (scratch.split_bound + groups)


@gluon.jit
def part_of(scratch, slot):
    """Where O of a slot's rows is; their maxima follow it, and their sums those."""
    return scratch.partials + slot.to(gl.int64) * (scratch.slot_rows * (V_PIECES * COLUMNS + 2))


@gluon.jit
def arrived_last(scratch, counter, count):
    """Whether all others of ``count`` have been here before; then the counter is set back for the next launch."""
    last = gl.atomic_add(scratch.arrived + counter, 1, sem="acq_rel") == count - 1
    if last:
        gl.store(scratch.arrived + counter, 0)
    meet()
    return last


@gluon.jit
def keep(scratch, slot, state, row, there):
    """Leave the state of some rows of a tile in a slot."""
    row_max, row_sum, o = state
    at = part_of(scratch, slot)
    sums = at + scratch.slot_rows * (V_PIECES * COLUMNS)
    gl.store(sums + row, row_max, mask=there)
    gl.store(sums + (scratch.slot_rows + row), row_sum, mask=there)
    across: gl.constexpr = gl.SliceLayout(1, o[0].type.layout)
    rows = gl.convert_layout(row, across) * (V_PIECES * COLUMNS)
    there = gl.convert_layout(there, across)
    for i in gl.static_range(len(o)):
        store_rows(at, i, o[i], rows, there)


@gluon.jit
def finish(state, row, there, item, batch, rows, ONE: gl.constexpr):
    """Write rows of a tile."""
    row_max, row_sum, o = state
    query, head = queries_and_heads(batch, item, row, ONE)
    factor, log_sum = normal(row_max, row_sum, head, there, rows)
    # 64 bits to where a sequence begins: a tensor may hold more than 2^31 elements.
    b_long = item.b.to(gl.int64)
    start = b_long * (rows.stride_ob * 8)
    if batch.cu_q is not None:
        q_start = gl.load(batch.cu_q + item.b).to(gl.int64)
        start = q_start * (rows.stride_os * 8)
    if rows.lse is not None:
        at = b_long * rows.stride_lb
        if batch.cu_q is not None:
            at = q_start * rows.stride_ls
        places = query.to(gl.int64) * rows.stride_ls + head.to(gl.int64) * rows.stride_lh
        gl.store(rows.lse + at + places, log_sum, mask=there)
    offsets = query.to(gl.int64) * (rows.stride_os * 8) + head * (rows.stride_oh * 8)
    across: gl.constexpr = gl.SliceLayout(1, o[0].type.layout)
    offsets, there = gl.convert_layout(offsets, across), gl.convert_layout(there, across)
    factor = gl.convert_layout(factor, across)[:, None]
    for i in gl.static_range(len(o)):
        store_rows(rows.out + start, i, o[i] * factor, offsets, there)


@gluon.jit
def merged(scratch, slot, count, run, row, rows_there, ROWS: gl.constexpr):
    """The state of ROWS rows of ``count`` splits from the slots of their runs' first ones, added up as one run would."""
    mine = row + gl.arange(0, ROWS, layout=MERGING_ROWS)
    first = part_of(scratch, slot)
    sums = first + (scratch.slot_rows * (V_PIECES * COLUMNS) + mine)
    columns = gl.arange(0, V_PIECES * COLUMNS, layout=gl.SliceLayout(0, MERGING))
    at = first + (mine[:, None] * (V_PIECES * COLUMNS) + columns[None, :])
    step: gl.constexpr = scratch.slot_rows * (V_PIECES * COLUMNS + 2)
    states = ()
    for i in gl.static_range(MERGED):
        there = (mine < rows_there) & (i < count) & (i & (1 << run) - 1 == 0)
        # .cg: other programs wrote these, and the L1 cache knows nothing of it.
        split_max = gl.load(sums, mask=there, other=LOWEST, cache_modifier=".cg")
        split_sum = gl.load(sums + scratch.slot_rows, mask=there, other=0.0, cache_modifier=".cg")
        part = gl.load(at, mask=there[:, None], other=0.0, cache_modifier=".cg")
        sums += step
        at += step
        states = states + ((split_max, split_sum, (part,)),)
    found = states[0]
    for group in gl.static_range(FOLD):
        state = states[group * FOLD]
        for i in gl.static_range(1, FOLD):
            state = folded(state, states[group * FOLD + i])
        if group == 0:
            found = state
        else:
            found = folded(found, state)
    return found


@gluon.jit
def merge(scratch, item, batch, rows, ONE: gl.constexpr, ROWS: gl.constexpr):
    """The last program of MERGED splits merges them, and the last of those the groups: always in the order of the keys."""
    slot = first_slot(scratch, item, batch)
    counter = tile_of(scratch, item, batch) * ((scratch.split_bound + MERGED - 1) // MERGED + 1)
    count = gl.minimum(item.q_len * batch.group - item.tile * TILE_M, TILE_M)
    group, groups = item.split // MERGED, (item.splits + MERGED - 1) // MERGED
    members = gl.minimum(item.splits - group * MERGED, MERGED)
    end = ROWS if scratch.slot_rows == ROWS else count  # so that one turn is no loop
    if arrived_last(scratch, counter + 1 + group, members + (1 << item.run) - 1 >> item.run):
        for row in range(0, end, ROWS):
            mine = row + gl.arange(0, ROWS, layout=MERGING_ROWS)
            state = merged(scratch, slot + group * MERGED, members, item.run, row, count, ROWS)
            if groups > 1:
                keep(scratch, slot + scratch.split_bound + group, state, mine, mine < count)
            else:
                finish(state, mine, mine < count, item, batch, rows, ONE)
        if groups > 1:
            meet()  # all threads have stored before one of them says so
            if arrived_last(scratch, counter, groups):
                for row in range(0, end, ROWS):
                    mine = row + gl.arange(0, ROWS, layout=MERGING_ROWS)
                    state = merged(scratch, slot + scratch.split_bound, groups, 0, row, count, ROWS)
                    finish(state, mine, mine < count, item, batch, rows, ONE)


@gluon.jit
def attend_split(
    q,
    ring,
    n,
    item,
    split,
    first_key,
    last_key,
    whole_begin,
    whole_end,
    scale_log2,
    batch,
    rows,
    CAPPED: gl.constexpr,
    ONE: gl.constexpr,
):
    """(the state of rows of the keys of one split, number of the next block)."""
    row_max = gl.full([WARPS, TILE_M], LOWEST, gl.float32, layout=WARP_ROWS)  # in base 2, of the keys of each warp
    row_sums = partial_sums(gl.zeros([WARPS, TILE_M, WARP_KEYS], gl.float32, layout=SCORES))
    o = ()
    for _ in gl.static_range(V_PIECES):
        o = o + (gl.zeros([WARPS, TILE_M, COLUMNS], gl.float32, layout=SCORES),)
    state = (row_max, row_sums, o)
    begin, end = keys_of_split(batch, item, split)
    for key in range(begin, end, TILE_N):
        state = attend(
            q,
            ring,
            n,
            key,
            item,
            state,
            first_key,
            last_key,
            whole_begin,
            whole_end,
            scale_log2,
            rows.cap_log2,
            CAPPED,
            ONE,
        )
        n += 1
    row_max, row_sum, o = together(state, ring)
    if rows.v_scales is not None:
        v_scale = gl.load(rows.v_scales + item.b * rows.stride_vb + item.head_kv * rows.stride_vg)
        made = ()
        for i in gl.static_range(V_PIECES):
            made = made + (o[i] * v_scale,)
        o = made
    return (row_max, row_sum, o), n


@gluon.jit
def attend_item(
    item,
    read,
    n,
    ring,
    batch,
    rows,
    scratch,
    CAPPED: gl.constexpr,
    ONE: gl.constexpr,
    DIRECT: gl.constexpr,
    ROWS: gl.constexpr,
):
    """One item from its Q, which has been read, to its results, or its part of them."""
    scale_log2 = rows.scale_log2
    if rows.k_scales is not None:
        scale_log2 *= gl.load(rows.k_scales + item.b * rows.stride_kb + item.head_kv * rows.stride_kg)
    diagonal = item.k_len - item.q_len
    if ONE:
        query = 0
    else:
        query, _ = queries_and_heads(batch, item, gl.arange(0, TILE_M, layout=SCORE_ROWS), ONE)
    first_key = query + diagonal - batch.left
    last_key = gl.minimum(query + diagonal + batch.right, item.k_len - 1)
    # Keys that all rows see.
    whole_begin = item.high + diagonal - batch.left
    whole_end = gl.minimum(item.low + diagonal + batch.right + 1, item.k_len)
    q, divisor = queries(read)
    # Above 0, for -inf times 0 is NaN.
    scale_log2 = gl.maximum(divisor * scale_log2, 1e-37)

    if DIRECT == 1:
        found, n = attend_split(
            q,
            ring,
            n,
            item,
            item.split,
            first_key,
            last_key,
            whole_begin,
            whole_end,
            scale_log2,
            batch,
            rows,
            CAPPED,
            ONE,
        )
    else:
        whole = put_nothing(ring.sums, 0)
        for group in range(item.split, item.stop, FOLD):
            of_group = put_nothing(ring.sums, 1)
            for split in range(group, gl.minimum(group + FOLD, item.stop)):
                state, n = attend_split(
                    q,
                    ring,
                    n,
                    item,
                    split,
                    first_key,
                    last_key,
                    whole_begin,
                    whole_end,
                    scale_log2,
                    batch,
                    rows,
                    CAPPED,
                    ONE,
                )
                of_group = put(ring.sums, 1, folded(got(ring.sums, 1, of_group), state))
            whole = put(ring.sums, 0, folded(got(ring.sums, 0, whole), got(ring.sums, 1, of_group)))
        found = got(ring.sums, 0, whole)
    row = gl.arange(0, TILE_M, layout=OUT_ROWS)
    there = item.tile * TILE_M + row < item.q_len * batch.group
    if item.stop - item.split == item.splits:
        finish(found, row, there, item, batch, rows, ONE)
    else:
        keep(scratch, first_slot(scratch, item, batch) + item.split, found, row, there)
        meet()  # all threads have stored before one of them says so
        merge(scratch, item, batch, rows, ONE, ROWS)
    return n


@gluon.jit
def attend_role(
    ring, items, batch, rows, scratch, CAPPED: gl.constexpr, ONE: gl.constexpr, DIRECT: gl.constexpr, ROWS: gl.constexpr
):
    """Softmax, both matrix products and merges of every item of this program."""
    n = gl.to_tensor(0)
    if DIRECT:
        item, there = direct_item(batch, ONE, DIRECT)
        if there:
            attend_item(item, read_q(item, rows, batch, ONE), n, ring, batch, rows, scratch, CAPPED, ONE, DIRECT, ROWS)
    else:
        turn = gl.to_tensor(0)
        item, there = told(items, turn, batch, ONE)
        while there:
            wait(items.q_full, turn)
            read = ()
            for i in gl.static_range(QK_PIECES):
                read = read + (items.q.index(turn % Q_SLOTS * QK_PIECES + i).load(Q_READ),)
            meet()  # all threads have read before one of them says so
            arrive(items.q_empty, turn)
            n = attend_item(item, read, n, ring, batch, rows, scratch, CAPPED, ONE, DIRECT, ROWS)
            turn += 1
            item, there = told(items, turn, batch, ONE)


# Lengths, strides and head counts vary from call to call: without this each new divisibility by 16 would recompile.
@gluon.jit(
    do_not_specialize=[
        "stride_qb",
        "stride_qs",
        "stride_qh",
        "stride_ob",
        "stride_os",
        "stride_oh",
        "stride_lb",
        "stride_ls",
        "stride_lh",
        "stride_table",
        "stride_kb",
        "stride_kg",
        "stride_vb",
        "stride_vg",
        "count",
        "heads_kv",
        "group",
        "seqlen_q",
        "seqlen_k",
        "split_bits",
        "split_log2",
        "left",
        "right",
        "rows_min",
        "rows_max",
        "split_bound",
        "split_tiles",
        "sms",
    ]
)
def attention(q_ptr, k_desc, v_desc, out, lse, sinks, cu_q, cu_k, used_k, table, slots, k_scales, v_scales, partials,
              arrived, stride_qb, stride_qs, stride_qh, stride_ob, stride_os, stride_oh, stride_lb, stride_ls,
              stride_lh, stride_table, stride_kb, stride_kg, stride_vb, stride_vg, count, heads_kv, group, seqlen_q,
              seqlen_k, split_bits, split_log2, left, right, rows_min, rows_max, split_bound, split_tiles, sms,
              scale_log2, cap_log2, PAGE: gl.constexpr, CAPPED: gl.constexpr, ONE: gl.constexpr, PLANNED: gl.constexpr,
              DIRECT: gl.constexpr, MOST: gl.constexpr, BESIDE: gl.constexpr):  # fmt: skip
    """Allocate, set up the barriers, and start the roles: of DIRECT launches a program has the item with its number, if there is one,
    otherwise takes items of the batch until there are none."""
    if BESIDE % 2 == 1:
        # The launch after this one, for other rows, may begin where there is room.
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
        )
    batch = Batch(
        cu_q,
        cu_k,
        used_k,
        table,
        slots,
        stride_table,
        count,
        heads_kv,
        group,
        seqlen_q,
        seqlen_k,
        split_bits,
        split_log2,
        left,
        right,
        rows_min,
        rows_max,
        sms,
    )
    rows = Rows(
        q_ptr,
        out,
        lse,
        sinks,
        k_scales,
        v_scales,
        stride_qb,
        stride_qs,
        stride_qh,
        stride_ob,
        stride_os,
        stride_oh,
        stride_lb,
        stride_ls,
        stride_lh,
        stride_kb,
        stride_kg,
        stride_vb,
        stride_vg,
        scale_log2,
        cap_log2,
    )
    scratch = Scratch(partials, arrived, split_bound, MOST, split_tiles)
    ROWS: gl.constexpr = MOST if MOST < MANY_MERGED else MANY_MERGED
    in_flight: gl.constexpr = SLOTS if DIRECT else DEALT_SLOTS
    k, k_boxes = allocate_blocks(k_desc, QK_PIECES, in_flight)
    v, v_boxes = allocate_blocks(v_desc, V_PIECES, in_flight)
    # Rows of 16-byte units that rows of a tile turn, so that threads of a warp write to different banks.
    parts = gl.allocate_shared_memory(
        gl.float32, [V_PIECES, WARPS, TILE_M, COLUMNS], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    )
    stats = gl.allocate_shared_memory(gl.float32, [2, WARPS, TILE_M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    # What a program has of all its splits, and of a group of them.
    sums = gl.allocate_shared_memory(
        gl.float32, [2 * V_PIECES, TILE_M, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    # Copies of K and of V say each of a slot what is to come.
    ring = Ring(k, k_boxes, v, v_boxes, barriers(in_flight, 2), barriers(in_flight), parts, stats, sums)
    if DIRECT:
        items = ring  # no role takes any
    else:
        q = gl.allocate_shared_memory(
            q_ptr.dtype.element_ty, [Q_SLOTS * QK_PIECES, TILE_M, COLUMNS], gl.NVMMASharedLayout(128, 16, 2)
        )
        facts = gl.allocate_shared_memory(gl.int32, [Q_SLOTS * FACTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        # A thread of the load warp arrives when its copies of Q have landed.
        items = Items(q, barriers(Q_SLOTS, 32), barriers(Q_SLOTS), facts, barriers(Q_SLOTS))
    # After the counters of tiles: how many items have been taken beside the first ones, and how many programs are done.
    taken = arrived + count * heads_kv * split_tiles * ((split_bound + MERGED - 1) // MERGED + 1)
    fence_async_shared()
    registers: gl.constexpr = 72 if DIRECT else 104  # of the load warp
    gl.warp_specialize([
        (attend_role, (ring, items, batch, rows, scratch, CAPPED, ONE, DIRECT, ROWS)),
        (load_role, (k_desc, v_desc, ring, items, rows, batch, taken, PAGE, ONE, PLANNED, DIRECT, BESIDE)),
    ], [1], [registers])  # fmt: skip


def _slot_rows(most):
    """Rows of the slots of sequences of `most` rows."""
    return next((rows for rows in SLOT_ROWS if most <= rows), SLOT_ROWS[-1])


def scratch(batch, heads_kv, group, seqlen_q, seqlen_k, sms):
    """(float32 of partial outputs with their maxima and sums, int32 of counters) that a launch works in on a device of `sms`.

    The counters must be 0 before the first launch; every launch leaves them so.
    """
    tiles = batch * heads_kv * _split_tiles(seqlen_q, group)
    # Splits, and groups of them that are merged first; a counter for each group, and one for all; two for items.
    splits = _split_bound(seqlen_k, heads_kv)
    groups = -(-splits // MERGED.value)
    slots = tiles * (splits + groups) * _slot_rows(seqlen_q * group)
    return max(1, slots * 130), tiles * (groups + 1) + 2


def _split_limit(heads_kv):
    """Splits that a sequence may have, a power of two."""
    return 1 << max(1, min(MOST_SPLITS.value, MOST_ITEMS.value // heads_kv)).bit_length() - 1


def _split_keys(heads_kv):
    """Keys of a split: sequences of many key heads are work enough in fewer."""
    return SPLIT_OF_MANY if heads_kv >= MANY_HEADS else SPLIT


def _split_tiles(seqlen_q, group):
    """Tiles of a sequence and key head that may be split."""
    return 1


def _split_bound(seqlen_k, heads_kv):
    """Splits that a sequence of up to seqlen_k keys has at most."""
    return 1 if seqlen_k <= WHOLE.value else min(_split_limit(heads_kv), -(-seqlen_k // _split_keys(heads_kv)))


def plan(q, k, v, out, lse, lists, seqlen_q, seqlen_k, window, capped, rows, work, sms, beside=0):
    """Grid, arguments but the two scales, flags; ValueError for what the kernel does not take.

    lists: cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, cache_batch_idx, sinks, k_descale, v_descale, each a tensor or None; seqlen_q,
    seqlen_k: no sequence has more; window: (left, right), -1 for no limit; capped: whether there is a softcap; rows: (fewest, most) rows of the sequences to
    work on; work: the tensors of `scratch`; sms: of the device; beside: 1 where the next launch, for other rows, may begin
    before this one ends, and 2 where this one may before the one before has, added up.
    """
    cu_q, cu_k, used_k, table, slots, sinks, k_scales, v_scales = lists
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if q.shape[-1] != 192 or k.shape[-1] != 192 or v.shape[-1] != 128 or heads_q % heads_kv:
        raise ValueError(
            f"q, k, v: expected head_dim 192, 192, 128 and heads of q a multiple of k's, got {[*q.shape]}, {[*k.shape]}, {[*v.shape]}"
        )
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        kind, unit = ("torch.uint8", 16) if name in "kv" else (str(q.dtype), 8)
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
    if reason := refusal(k, v):
        raise ValueError(reason)
    box = [1, 1, min(page, TILE_N.value) if page else TILE_N.value, COLUMNS.value]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.uint8)
    k_boxes, v_boxes = (_descriptor(x, box, layout) for x in (k, v))
    lse_strides = (
        (0, 0, 0) if lse is None else (0, 1, lse.stride(0)) if cu_q is not None else (lse.stride(0), 1, lse.stride(1))
    )
    arguments = (
        q, k_boxes, v_boxes, out, lse, sinks, cu_q, cu_k, used_k, table, slots, k_scales, v_scales, *work,
        *(n // 8 for n in (*q_strides, *out_strides)),
        *lse_strides, 0 if table is None else table.stride(0), 
        *(n for x in (k_scales, v_scales) for n in ((0, 0) if x is None else x.stride())), batch, heads_kv, group, seqlen_q, min(seqlen_k, FAR.value, FAR.value if table is None else table.shape[1] * page), _split_limit(heads_kv).bit_length() - 1, _split_keys(heads_kv).bit_length() - 1, left, right,
        max(rows[0], 1), min(rows[1], FAR.value), splits, _split_tiles(seqlen_q, group), sms,
    )  # fmt: skip
    # Where no launch of these extents has more splits than there are programs at once, each has a program of its own.
    one = seqlen_q == 1 and group <= tile_m
    alone = seqlen_q * group <= tile_m
    direct, runs = int(alone and batch * heads_kv * splits <= PROGRAMS * sms), splits
    planned = FEW_PLANNED if direct or batch <= FEW_PLANNED else MANY_PLANNED
    flags = page, capped, one, planned, direct, _slot_rows(seqlen_q * group), beside
    return (heads_kv, runs, batch) if direct else (max(1, min(items, sms)), 1, 1), arguments, flags


def options_of(flags):
    """Options of a launch with these flags."""
    return DIRECT_OPTIONS if flags[4] else OPTIONS


def refusal(k, v):
    """Why the copy engine does not take tensors of keys and values like these; "" where it does."""
    for name, x in (("k", k), ("v", v)):
        if min(x.shape) < 1 or any(n <= 0 for n, extent in zip(x.stride(), x.shape) if extent > 1):
            return f"{name}: expected some elements and strides above 0, got {[*x.shape]}, strides {[*x.stride()]}"
        if max(x.shape) > FAR.value:
            return f"{name}: expected at most {FAR.value} pages, rows of a cache or tokens, got {[*x.shape]}"
    return ""


def _descriptor(x, box, layout):
    """Boxes of the tokens of a head of x: (pages or rows of a cache, tokens, heads, columns), or (tokens, heads, columns)."""
    pages, tokens, heads, columns = (1, *x.shape)[-4:]
    # A stride that is never taken may be anything.
    steps = zip((0, *x.stride())[-4:-1], (pages, tokens, heads))
    page, token, head = (n if extent > 1 else columns for n, extent in steps)
    return TensorDescriptor(x, [pages, heads, tokens, columns], [page, head, token, 1], box, layout)


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

    q, out: (batch, seqlen_q, heads_q, 192 | 128), or (total, heads_q, ...) with cu_seqlens_q.  k, v: (batch, seqlen_k, heads_kv,
    192 | 128), with block_table (batch, pages of a sequence) instead (pages, page size, heads_kv, ...), with cu_seqlens_k (total,
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
    attention[grid](*arguments, *scales(scale, softcap), *flags, **options_of(flags))
