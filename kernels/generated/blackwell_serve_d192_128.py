"""Decoding on Blackwell for head_dim 192 (queries, keys) and 128 (values): attention to paged, packed or cached keys, split over keys.

Query i of a sequence sees keys from left before to right after position i + keys - queries.  A load warp copies blocks
of 64 keys into rings in shared memory, 3 of K and of V ahead; a warp issues the products of 128 rows, the query heads
of one key head for consecutive queries; a warpgroup with a row to a thread takes their scores from tensor memory and
leaves P there; another one merges.  Sequences of up to 128 rows are split, whatever else is in the batch, and the
program that finishes a tile last merges its splits in their order: what a sequence gets depends on it alone.  Runs on
sm_100a and sm_103a with triton and torch alone.
"""

TILECAST = {
    "tilecast": "0.1.0", "family": "blackwell_serving", "machine": "b200", "targets": ["sm_100a", "sm_103a"],
    "pass": "serve",
    "variant": "family=serving-blackwell,tile_n=64,kv_stages=3,split_keys=512,split_keys_of_many=1024,many_heads=8,whole_keys=1024,most_splits=128,most_items=148,merged=16,planned=128",
    "workload": {"batch": 2, "heads_q": 64, "heads_kv": 16, "seqlen_q": 1, "seqlen_k": 8192, "head_dim_qk": 192, "head_dim_v": 128, "mask": "causal", "window": None, "dtype": "bf16"},
}  # fmt: skip

from collections import namedtuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory, mbarrier
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, tcgen05_commit, tcgen05_mma, tma
from triton.experimental.gluon.nvidia.blackwell import TensorDescriptor

copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its name in Triton 3.6
copy_rows = (
    async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
)  # the same
meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # the same
REINTERPRET_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # not in Triton 3.6

TILE_M = gl.constexpr(
    128
)  # rows of a tile: the query heads that share a key head, for each query; lanes of tensor memory
TILE_N = gl.constexpr(64)  # keys of a block
SLOTS = gl.constexpr(3)  # blocks of K and V that are in flight
Q_SLOTS, LEFT_SLOTS = gl.constexpr(2), gl.constexpr(4)  # tiles of Q that are there, items that wait to be merged
COLUMNS = gl.constexpr(64)  # columns of a piece of a block: 128 bytes, the widest row that shared memory swizzles
QK_PIECES, V_PIECES = gl.constexpr(3), gl.constexpr(2)
SPLIT, SPLIT_OF_MANY = 512, 1024  # keys of a split; where key heads are many; more where splits would be too many
MANY_HEADS = 8
WHOLE = gl.constexpr(1024)  # keys up to which a sequence is not split
MOST_SPLITS = gl.constexpr(128)  # of a sequence
MOST_ITEMS = gl.constexpr(148)  # splits of a sequence times key heads, unless the heads are more
MERGED, MERGED_ROWS = gl.constexpr(16), gl.constexpr(4)  # splits and rows that are merged at a time
FEW_PLANNED, MANY_PLANNED = 32, 128  # sequences that a program looks at together to find its work
FEW_ROWS = 16  # rows of Q that are loaded where no sequence has more
FAR = gl.constexpr(1 << 29)  # more keys than a sequence has, more pages than a pool
LOWEST = gl.constexpr(-3.4028234663852886e38)  # finite, so that a row that saw no key yet never computes inf - inf
MAX_GROWTH = gl.constexpr(8.0)  # a row maximum may grow by this many powers of two before O is rescaled
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
KINDS = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16}
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True, "maxnreg": 168}
#: Programs that an SM holds at once: as many as are launched where there is work for more.
PROGRAMS = 1


# A row to a thread: lane l of warp w owns row 32 w + l, as tcgen05.ld and tcgen05.st have it.
@gluon.constexpr_function
def row_per_thread(columns):
    """Register layout of [TILE_M, columns]."""
    registers, lanes = [[0, 1 << bit] for bit in range(columns.bit_length() - 1)], [[1 << bit, 0] for bit in range(5)]
    return gl.DistributedLinearLayout(registers, lanes, [[32, 0], [64, 0]], [], [128, columns])


SCORES, SUMS = gl.constexpr(row_per_thread(64)), gl.constexpr(row_per_thread(64))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, SCORES))
# 16 bytes to a thread: rows of Q that the load warp copies, and the block of V whose end must be cleared.
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))
LOADED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
LOADED_ROWS = gl.constexpr(gl.SliceLayout(1, LOADED))
# Splits, rows, columns of a merge: a thread has all splits of its elements, so that their loads are in flight together.
MERGING = gl.constexpr(gl.BlockedLayout([16, 1, 4], [1, 1, 32], [1, 4, 1], [2, 1, 0]))
MERGING_PAIRS = gl.constexpr(gl.SliceLayout(2, MERGING))
MERGING_ROWS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(0, MERGING)))
# Maxima and sums of its splits and rows, one to a thread.
PAIRS = gl.constexpr(gl.BlockedLayout([1, 1], [16, 2], [1, 4], [1, 0]))

# The sequences of a launch; its tensors of rows (strides in units of 8 elements); where splits leave what they have.
Batch = namedtuple(
    "Batch",
    "cu_q cu_k used_k table slots stride_table count heads_kv group seqlen_q seqlen_k split_bits split_log2 left right rows_min rows_max",
)
Rows = namedtuple(
    "Rows",
    "q out lse sinks k_scales v_scales stride_qb stride_qs stride_qh stride_ob stride_os stride_oh stride_lb stride_ls stride_lh stride_kb stride_kg stride_vb stride_vg scale_log2 cap_log2",
)
Scratch = namedtuple("Scratch", "partials arrived counters split_bound slot_rows split_tiles")
# Blocks on their way through shared memory: number n lies in slot n % SLOTS; a lap flips the barriers' phase.  The same memory
# as tiles of TILE_N keys, which are multiplied, and as boxes of a page or a part of it, which are copied.
Ring = namedtuple("Ring", "k k_boxes v v_boxes k_full v_full empty")
# Items on their way from role to role: Q, and what a split has left.
Items = namedtuple("Items", "q q_full q_empty left left_empty")
# Tensor memory: scores of two blocks, P of one, pieces of O; barriers: scores complete, P stored and O rescaled, O complete.
Sums = namedtuple("Sums", "s p o s_full p_ready o_full")
# A split of the keys for one tile of rows of one key head of sequence `b`.
Item = namedtuple("Item", "b head_kv tile split splits q_len k_len low high begin end")


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
def allocate_blocks(desc, PIECES: gl.constexpr):
    """(tiles, boxes) of SLOTS blocks; a block is PIECES tiles, a tile the boxes of its pages, one after the other."""
    box: gl.constexpr = desc.block_type.shape[2]
    boxes = gl.allocate_shared_memory(desc.dtype, [SLOTS * PIECES * (TILE_N // box), 1, 1, box, COLUMNS], desc.layout)
    reinterpret: gl.constexpr = boxes.reinterpret if REINTERPRET_IS_PUBLIC else boxes._reinterpret
    return reinterpret(desc.dtype, [SLOTS * PIECES, TILE_N, COLUMNS], gl.NVMMASharedLayout(128, 16, 2)), boxes


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
    """(row tiles, splits, first key) of a sequence, from its own lengths alone; no tiles where another kernel takes it."""
    rows = q_len * batch.group
    tiles = gl.where((rows >= batch.rows_min) & (rows <= batch.rows_max), rows + TILE_M - 1 >> 7, 0)
    first = gl.maximum(k_len - q_len - batch.left, 0) & -TILE_N
    span = gl.maximum(k_len - first, 0)
    splits = gl.minimum(span + (1 << batch.split_log2) - 1 >> batch.split_log2, 1 << batch.split_bits)
    return tiles, gl.where((rows <= TILE_M) & (span > WHOLE), splits, 1), first


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def ends_of(batch, first, done, PLANNED: gl.constexpr, WARPS: gl.constexpr):
    """Of each of PLANNED sequences, the number of the item after its last one."""
    layout: gl.constexpr = gl.BlockedLayout([max(1, PLANNED // (32 * WARPS))], [32], [WARPS], [0])
    b = first + gl.arange(0, PLANNED, layout=layout)
    q_len, k_len = lengths(batch, b, b < batch.count)
    tiles, splits, _ = shares(batch, q_len, k_len)
    return done + gl.associative_scan(tiles * splits * batch.heads_kv, 0, plus)


@gluon.jit
def item_of(batch, first, ends, done, number, ONE: gl.constexpr):
    """The item of a number: heads of a token are neighbours in memory and in the order, and late rows come first."""
    b = first + gl.sum((ends <= number).to(gl.int32), 0)
    index = number - gl.max(gl.where(ends <= number, ends, done), 0)
    q_len, k_len = lengths(batch, b, b >= 0)
    tiles, splits, first_key = shares(batch, q_len, k_len)
    head_kv, index = index % batch.heads_kv, index // batch.heads_kv
    if ONE:
        split, tile, low, high = index, gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    else:
        split, tile = index % splits, tiles - 1 - index // splits
        low = tile * TILE_M // batch.group
        high = gl.minimum((tile * TILE_M + TILE_M - 1) // batch.group, q_len - 1)
    # Blocks of the split: as many as each other's, but for the last, or, where splits are as many as there may be, even shares.
    blocks = gl.maximum(k_len - first_key, 0) + TILE_N - 1 >> 6
    each = 1 << batch.split_log2 - 6
    begin, end = split * each, gl.minimum((split + 1) * each, blocks)
    if splits >> batch.split_bits == 1:
        begin, end = split * blocks >> batch.split_bits, (split + 1) * blocks >> batch.split_bits
    if splits == 1:
        end = blocks
    diagonal = k_len - q_len
    begin = gl.maximum(gl.maximum(low + diagonal - batch.left, 0) & -TILE_N, first_key + begin * TILE_N)
    end = gl.minimum(gl.minimum(high + diagonal + batch.right + 1, k_len), first_key + end * TILE_N)
    return Item(b, head_kv, tile, split, splits, q_len, k_len, low, high, begin, gl.maximum(begin, end))


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
    mbarrier.expect(full, PIECES * TILE_N * COLUMNS * 2)
    for piece in gl.static_range(PIECES):
        for i in gl.static_range(per):
            box = boxes.index((slot * PIECES + piece) * per + i)
            copy_tile(desc, [pages[i], head, token, piece * COLUMNS], full, box)


@gluon.jit
def load_block(ring, n, k_desc, v_desc, pages, head, token):
    """Copy a block of keys and values as number n, once its slot is free."""
    wait_empty(ring.empty, n)
    slot = n % SLOTS
    load_tile(k_desc, ring.k_boxes, slot, ring.k_full.index(slot), pages, head, token, QK_PIECES)
    load_tile(v_desc, ring.v_boxes, slot, ring.v_full.index(slot), pages, head, token, V_PIECES)


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
def load_role(
    k_desc,
    v_desc,
    ring,
    items,
    rows,
    batch,
    PAGE: gl.constexpr,
    ONE: gl.constexpr,
    PLANNED: gl.constexpr,
    Q_ROWS: gl.constexpr,
):
    """Copies Q, K and V of every item of this program into shared memory."""
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
    )
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
    n, turn, done, number = 0, 0, 0, own_copy(gl.program_id(0))
    for first in range(0, batch.count, PLANNED):
        ends = ends_of(batch, first, done, PLANNED, 1)
        total = gl.max(ends, 0)
        if number < total:
            item = item_of(batch, first, ends, done, number, ONE)
            pages = first_pages(batch, item, PAGE)
            while number < total:
                load_q(items, turn, item, rows, batch, ONE, Q_ROWS)
                # The pages of the next item, if there is one, are on their way while the blocks of this one are.
                number += gl.num_programs(0)
                following, ahead = item, pages
                if number < total:
                    following = item_of(batch, first, ends, done, number, ONE)
                    ahead = first_pages(batch, following, PAGE)
                n = load_item(item, pages, n, k_desc, v_desc, ring, batch, PAGE)
                item, pages = following, ahead
                turn += 1
        done = total


# -- matrix role
@gluon.jit
def issue_scores(q, turn, ring, n, sums):
    """S = Q K^T of block n, once its keys have landed."""
    wait(ring.k_full, n)
    for i in gl.static_range(QK_PIECES):
        tile = ring.k.index(n % SLOTS * QK_PIECES + i).permute((1, 0))
        tcgen05_mma(q.index(turn % Q_SLOTS * QK_PIECES + i), tile, sums.s.index(n % 2), use_acc=i > 0)
    tcgen05_commit(sums.s_full.index(n % 2))


@gluon.jit
def matrix_role(ring, items, sums, batch, ONE: gl.constexpr, PLANNED: gl.constexpr):
    """One warp: both matrix products of every item of this program; scores of the next block while this one's are worked on."""
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
    )
    n, turn, done, number = 0, 0, 0, own_copy(gl.program_id(0))
    for first in range(0, batch.count, PLANNED):
        ends = ends_of(batch, first, done, PLANNED, 1)
        total = gl.max(ends, 0)
        while number < total:
            item = item_of(batch, first, ends, done, number, ONE)
            wait(items.q_full, turn)
            fence_async_shared()  # the load warp's copies are not the copy engine's
            if item.begin < item.end:
                issue_scores(items.q, turn, ring, n, sums)
            for key in range(item.begin, item.end, TILE_N):
                # The place of scores n + 1 is free: P of block n - 1, whose scores were there, has been waited for.
                if key + TILE_N < item.end:
                    issue_scores(items.q, turn, ring, n + 1, sums)
                wait(ring.v_full, n)
                wait(sums.p_ready, n)
                for i in gl.static_range(V_PIECES):
                    tcgen05_mma(
                        sums.p, ring.v.index(n % SLOTS * V_PIECES + i), sums.o.index(i), use_acc=key != item.begin
                    )
                tcgen05_commit(sums.o_full.index(0))
                tcgen05_commit(ring.empty.index(n % SLOTS))
                n += 1
            tcgen05_commit(items.q_empty.index(turn % Q_SLOTS))
            turn += 1
            number += gl.num_programs(0)
        done = total


# -- blocks
@gluon.jit
def clear_rows(v, n, count):
    """Zeros for the rows of V from ``count`` on, which hold anything: 0 times NaN is NaN."""
    rows = gl.arange(0, TILE_N, layout=LOADED_ROWS)
    for piece in gl.static_range(V_PIECES):
        tile = v.index(n % SLOTS * V_PIECES + piece)
        values = tile.load(LOADED)
        tile.store(gl.where((rows < count)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def most_of(s):
    """The largest of each row, eight at a time: all of a row are one thread's, which would wait for each in turn."""
    most = gl.max(gl.max(gl.reshape(s, [TILE_M, 8, TILE_N // 8]), axis=2), axis=1)
    return gl.convert_layout(most, SCORE_ROWS, assert_trivial=True)


@gluon.jit
def sum_of(p):
    """The sum of each row in the same way."""
    total = gl.sum(gl.sum(gl.reshape(p, [TILE_M, 8, TILE_N // 8]), axis=2), axis=1)
    return gl.convert_layout(total, SCORE_ROWS, assert_trivial=True)


@gluon.jit
def attend(
    ring,
    sums,
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
    """Take in the keys of one block: online softmax in base 2 from S to P, O = O * correction where a maximum has grown."""
    row_max, row_sum = state
    wait(sums.s_full, n)
    s = sums.s.index(n % 2).load(SCORES)
    if CAPPED:
        s = cap_log2 - 2.0 * cap_log2 / (gl.exp2(s * scale_log2) + 1.0)  # cap * tanh(score / cap)
        factor = 1.0
    else:
        factor = scale_log2
    if (key < whole_begin) | (key + TILE_N > whole_end):
        keys = key + gl.arange(0, TILE_N, layout=gl.SliceLayout(0, SCORES))
        if ONE:
            s = gl.where(((keys >= first_key) & (keys <= last_key))[None, :], s, float("-inf"))
        else:
            s = gl.where((keys[None, :] >= first_key[:, None]) & (keys[None, :] <= last_key[:, None]), s, float("-inf"))
    new_max = gl.maximum(row_max, most_of(s) * factor)
    # Small growth is left to the range of P and of the sums: whether a row is rescaled depends on that row alone.
    new_max = gl.where(new_max - row_max <= MAX_GROWTH, row_max, new_max)
    p = mufu_exp2(s * factor - new_max[:, None])
    correction = mufu_exp2(row_max - new_max)
    row_sum = row_sum * correction + sum_of(p)
    p = p.to(ring.v.dtype)
    if key != item.begin:
        wait(sums.o_full, n - 1)  # O is complete, and P of the block before has been read
        if gl.max((correction != 1.0).to(gl.int32), 0) != 0:
            scaling = gl.convert_layout(correction, gl.SliceLayout(1, SUMS), assert_trivial=True)[:, None]
            for i in gl.static_range(V_PIECES):
                sums.o.index(i).store(sums.o.index(i).load(SUMS) * scaling)
    sums.p.store(p)
    if key + TILE_N > item.k_len:
        wait(ring.v_full, n)
        clear_rows(ring.v, n, item.k_len - key)
    arrive(sums.p_ready, n)
    return new_max, row_sum


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
    return (item.b.to(gl.int64) * batch.heads_kv + item.head_kv) * scratch.split_tiles + item.tile


@gluon.jit
def first_slot(scratch, item, batch):
    """First slot of the partial results of an item's tile."""
    tile = tile_of(scratch, item, batch)
    groups = (scratch.split_bound + MERGED - 1) // MERGED
    return tile * (scratch.split_bound + groups)


@gluon.jit
def sums_of(scratch, slot):
    """Where the maxima of the rows of a slot are; the sums follow."""
    groups = (scratch.split_bound + MERGED - 1) // MERGED
    slots = gl.to_tensor(scratch.counters).to(gl.int64) * (scratch.split_bound + groups)
    return scratch.partials + (slots * V_PIECES * COLUMNS + slot * 2) * scratch.slot_rows


@gluon.jit
def arrived_last(scratch, counter, count):
    """Whether all others of ``count`` have been here before; then the counter is set back for the next launch."""
    last = gl.atomic_add(scratch.arrived + counter, 1, sem="release") == count - 1
    if last:
        gl.atomic_xchg(scratch.arrived + counter, 0, sem="acquire")
    meet()
    return last


@gluon.jit
def merged(scratch, slot, count, row, rows_there):
    """The state of MERGED_ROWS rows from ``count`` slots, always in their order."""
    # .cg: other programs wrote these, and the L1 cache knows nothing of it.
    split = gl.arange(0, MERGED, layout=gl.SliceLayout(1, PAIRS))
    mine = row + gl.arange(0, MERGED_ROWS, layout=gl.SliceLayout(0, PAIRS))
    known = (split < count)[:, None] & (mine < rows_there)[None, :]
    sums = sums_of(scratch, slot) + (split[:, None] * (2 * scratch.slot_rows) + mine[None, :])
    split_max = gl.load(sums, mask=known, other=LOWEST, cache_modifier=".cg")
    split_sum = gl.load(sums + scratch.slot_rows, mask=known, other=0.0, cache_modifier=".cg")

    split = gl.arange(0, MERGED, layout=gl.SliceLayout(1, MERGING_PAIRS))
    mine = row + gl.arange(0, MERGED_ROWS, layout=gl.SliceLayout(0, MERGING_PAIRS))
    known = (split < count)[:, None] & (mine < rows_there)[None, :]
    places = (split[:, None] * scratch.slot_rows + mine[None, :]) * (V_PIECES * COLUMNS)
    columns = gl.arange(0, V_PIECES * COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, MERGING)))
    at = scratch.partials + slot * scratch.slot_rows * (V_PIECES * COLUMNS)
    at += places[:, :, None] + columns[None, None, :]
    parts = gl.load(at, mask=known[:, :, None], other=0.0, cache_modifier=".cg")

    row_max = gl.max(split_max, 0)
    weight = mufu_exp2(split_max - row_max[None, :])
    row_sum = gl.sum(weight * split_sum, 0)
    o = gl.sum(gl.convert_layout(weight, MERGING_PAIRS)[:, :, None] * parts, 0)
    return gl.convert_layout(row_max, MERGING_ROWS), gl.convert_layout(row_sum, MERGING_ROWS), (o,)


@gluon.jit
def keep(scratch, slot, state, row, there):
    """Leave the state of some rows of a tile in a slot."""
    row_max, row_sum, o = state
    sums = sums_of(scratch, slot)
    gl.store(sums + row, row_max, mask=there)
    gl.store(sums + (scratch.slot_rows + row), row_sum, mask=there)
    at = scratch.partials + slot * scratch.slot_rows * (V_PIECES * COLUMNS)
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
def merge(scratch, item, batch, rows, ONE: gl.constexpr):
    """The last program of MERGED splits merges them, and the last of those the groups: always in the order of the keys."""
    slot = first_slot(scratch, item, batch)
    counter = tile_of(scratch, item, batch) * ((scratch.split_bound + MERGED - 1) // MERGED + 1)
    count = gl.minimum(item.q_len * batch.group - item.tile * TILE_M, TILE_M)
    group, groups = item.split // MERGED, (item.splits + MERGED - 1) // MERGED
    members = gl.minimum(item.splits - group * MERGED, MERGED)
    if arrived_last(scratch, counter + 1 + group, members):
        for row in range(0, count, MERGED_ROWS):
            mine = row + gl.arange(0, MERGED_ROWS, layout=MERGING_ROWS)
            state = merged(scratch, slot + group * MERGED, members, row, count)
            if groups > 1:
                keep(scratch, slot + scratch.split_bound + group, state, mine, mine < count)
            else:
                finish(state, mine, mine < count, item, batch, rows, ONE)
        if groups > 1:
            meet()  # all threads have stored before one of them says so
            if arrived_last(scratch, counter, groups):
                for row in range(0, count, MERGED_ROWS):
                    mine = row + gl.arange(0, MERGED_ROWS, layout=MERGING_ROWS)
                    state = merged(scratch, slot + scratch.split_bound, groups, row, count)
                    finish(state, mine, mine < count, item, batch, rows, ONE)


@gluon.jit
def merge_role(items, batch, rows, scratch, ONE: gl.constexpr, PLANNED: gl.constexpr):
    """Counts the splits of this program in, and merges those that it finds complete: what waits for memory waits here."""
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
    )
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
    scratch = Scratch(
        scratch.partials,
        scratch.arrived,
        own_copy(scratch.counters),
        own_copy(scratch.split_bound),
        own_copy(scratch.slot_rows),
        own_copy(scratch.split_tiles),
    )
    turn, done, number = 0, 0, own_copy(gl.program_id(0))
    for first in range(0, batch.count, PLANNED):
        ends = ends_of(batch, first, done, PLANNED, 4)
        total = gl.max(ends, 0)
        while number < total:
            item = item_of(batch, first, ends, done, number, ONE)
            wait(items.left, turn)
            if item.splits > 1:
                merge(scratch, item, batch, rows, ONE)
            arrive(items.left_empty, turn)
            turn += 1
            number += gl.num_programs(0)
        done = total


# -- softmax role
@gluon.jit
def attend_item(item, turn, n, ring, items, sums, batch, rows, scratch, CAPPED: gl.constexpr, ONE: gl.constexpr):
    """One item from its scores to its results, or its part of them."""
    scale_log2 = rows.scale_log2
    if rows.k_scales is not None:
        scale_log2 *= gl.load(rows.k_scales + item.b * rows.stride_kb + item.head_kv * rows.stride_kg)
    row = gl.arange(0, TILE_M, layout=SCORE_ROWS)
    there = item.tile * TILE_M + row < item.q_len * batch.group
    diagonal = item.k_len - item.q_len
    if ONE:
        query = 0
    else:
        query, _ = queries_and_heads(batch, item, row, ONE)
    first_key = query + diagonal - batch.left
    last_key = gl.minimum(query + diagonal + batch.right, item.k_len - 1)
    # Keys that all rows see.
    whole_begin = item.high + diagonal - batch.left
    whole_end = gl.minimum(item.low + diagonal + batch.right + 1, item.k_len)

    state = (
        gl.full([TILE_M], LOWEST, gl.float32, layout=SCORE_ROWS),
        gl.zeros([TILE_M], gl.float32, layout=SCORE_ROWS),
    )
    for key in range(item.begin, item.end, TILE_N):
        state = attend(
            ring,
            sums,
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
    row_max, row_sum = state
    some = item.begin < item.end
    if some:
        wait(sums.o_full, n - 1)
    v_scale = 1.0
    if rows.v_scales is not None:
        v_scale = gl.load(rows.v_scales + item.b * rows.stride_vb + item.head_kv * rows.stride_vg)
    o = ()
    for i in gl.static_range(V_PIECES):
        o = o + (gl.where(some, sums.o.index(i).load(SUMS) * v_scale, 0.0),)  # without keys, O is another item's
    state = (row_max, row_sum, o)
    if item.splits == 1:
        finish(state, row, there, item, batch, rows, ONE)
    else:
        keep(scratch, first_slot(scratch, item, batch) + item.split, state, row, there)
    wait_empty(items.left_empty, turn)
    meet()  # all threads have stored before one of them says so
    arrive(items.left, turn)
    return n


@gluon.jit
def softmax_role(
    ring, items, sums, batch, rows, scratch, CAPPED: gl.constexpr, ONE: gl.constexpr, PLANNED: gl.constexpr
):
    """Four warps, one row to a thread: softmax and results of every item of this program."""
    n, turn, done, number = 0, 0, 0, own_copy(gl.program_id(0))
    for first in range(0, batch.count, PLANNED):
        ends = ends_of(batch, first, done, PLANNED, 4)
        total = gl.max(ends, 0)
        while number < total:
            item = item_of(batch, first, ends, done, number, ONE)
            n = attend_item(item, turn, n, ring, items, sums, batch, rows, scratch, CAPPED, ONE)
            turn += 1
            number += gl.num_programs(0)
        done = total


@gluon.constexpr_function
def in_columns(columns):
    """Layout of [TILE_M, columns] in tensor memory."""
    return TensorMemoryLayout((128, columns), col_stride=1)


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
        "slot_rows",
        "split_tiles",
    ]
)
def attention(q_ptr, k_desc, v_desc, out, lse, sinks, cu_q, cu_k, used_k, table, slots, k_scales, v_scales, partials,
              arrived, stride_qb, stride_qs, stride_qh, stride_ob, stride_os, stride_oh, stride_lb, stride_ls,
              stride_lh, stride_table, stride_kb, stride_kg, stride_vb, stride_vg, count, heads_kv, group, seqlen_q,
              seqlen_k, split_bits, split_log2, left, right, rows_min, rows_max, split_bound, slot_rows, split_tiles,
              scale_log2, cap_log2, PAGE: gl.constexpr, CAPPED: gl.constexpr, ONE: gl.constexpr, PLANNED: gl.constexpr,
              Q_ROWS: gl.constexpr):  # fmt: skip
    """Allocate, set up the barriers, and start the roles; every program takes each num_programs-th item of the batch."""
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
    scratch = Scratch(partials, arrived, count * heads_kv * split_tiles, split_bound, slot_rows, split_tiles)
    q = gl.allocate_shared_memory(
        k_desc.dtype, [Q_SLOTS * QK_PIECES, TILE_M, COLUMNS], gl.NVMMASharedLayout(128, 16, 2)
    )
    if Q_ROWS < TILE_M:
        for i in gl.static_range(Q_SLOTS * QK_PIECES):
            q.index(i).store(gl.zeros([TILE_M, COLUMNS], k_desc.dtype, layout=LOADED))
    # A thread of the load warp arrives when its copies of Q have landed.
    items = Items(q, barriers(Q_SLOTS, 32), barriers(Q_SLOTS), barriers(LEFT_SLOTS), barriers(LEFT_SLOTS))
    k, k_boxes = allocate_blocks(k_desc, QK_PIECES)
    v, v_boxes = allocate_blocks(v_desc, V_PIECES)
    ring = Ring(k, k_boxes, v, v_boxes, barriers(SLOTS), barriers(SLOTS), barriers(SLOTS))
    # Tensor memory, 288 of 512 columns.
    s = allocate_tensor_memory(gl.float32, [2, TILE_M, TILE_N], in_columns(TILE_N))
    p = allocate_tensor_memory(k_desc.dtype, [TILE_M, TILE_N], in_columns(TILE_N))
    o = allocate_tensor_memory(gl.float32, [V_PIECES, TILE_M, COLUMNS], in_columns(COLUMNS))
    sums = Sums(s, p, o, barriers(2), barriers(1), barriers(1))
    fence_async_shared()
    gl.warp_specialize([
        (softmax_role, (ring, items, sums, batch, rows, scratch, CAPPED, ONE, PLANNED)),
        (merge_role, (items, batch, rows, scratch, ONE, PLANNED)),
        (matrix_role, (ring, items, sums, batch, ONE, PLANNED)),
        (load_role, (k_desc, v_desc, ring, items, rows, batch, PAGE, ONE, PLANNED, Q_ROWS)),
    ], [4, 1, 1], [168, 104, 104])  # fmt: skip


def scratch(batch, heads_kv, group, seqlen_q, seqlen_k, sms):
    """(float32 of partial outputs with their maxima and sums, int32 of counters) that a launch works in on a device of `sms`.

    The counters must be 0 before the first launch; every launch leaves them so.
    """
    tiles = batch * heads_kv * _split_tiles(seqlen_q, group)
    # Splits, and groups of them that are merged first; a counter for each group, and one for all.
    splits = _split_bound(seqlen_k, heads_kv)
    groups = -(-splits // MERGED.value)
    slots = tiles * (splits + groups) * min(TILE_M.value, seqlen_q * group)
    return max(1, slots * 130), max(1, tiles * (groups + 1))


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


def plan(q, k, v, out, lse, lists, seqlen_q, seqlen_k, window, capped, rows, work, sms):
    """Grid, arguments but the two scales, flags; ValueError for what the kernel does not take.

    lists: cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, cache_batch_idx, sinks, k_descale, v_descale, each a tensor or None; seqlen_q,
    seqlen_k: no sequence has more; window: (left, right), -1 for no limit; capped: whether there is a softcap; rows: (fewest, most) rows of the sequences to
    work on; work: the tensors of `scratch`; sms: of the device.
    """
    cu_q, cu_k, used_k, table, slots, sinks, k_scales, v_scales = lists
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if q.shape[-1] != 192 or k.shape[-1] != 192 or v.shape[-1] != 128 or heads_q % heads_kv:
        raise ValueError(
            f"q, k, v: expected head_dim 192, 192, 128 and heads of q a multiple of k's, got {[*q.shape]}, {[*k.shape]}, {[*v.shape]}"
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
    if reason := refusal(k, v):
        raise ValueError(reason)
    box = [1, 1, min(page, TILE_N.value) if page else TILE_N.value, COLUMNS.value]
    layout = gl.NVMMASharedLayout.get_default_for(box, KINDS[str(q.dtype)])
    k_boxes, v_boxes = (_descriptor(x, box, layout) for x in (k, v))
    lse_strides = (
        (0, 0, 0) if lse is None else (0, 1, lse.stride(0)) if cu_q is not None else (lse.stride(0), 1, lse.stride(1))
    )
    arguments = (
        q, k_boxes, v_boxes, out, lse, sinks, cu_q, cu_k, used_k, table, slots, k_scales, v_scales, *work,
        *(n // 8 for n in (*q_strides, *out_strides)),
        *lse_strides, 0 if table is None else table.stride(0), 
        *(n for x in (k_scales, v_scales) for n in ((0, 0) if x is None else x.stride())), batch, heads_kv, group, seqlen_q, min(seqlen_k, FAR.value), _split_limit(heads_kv).bit_length() - 1, _split_keys(heads_kv).bit_length() - 1, left, right,
        max(rows[0], 1), min(rows[1], FAR.value), splits, min(tile_m, seqlen_q * group), _split_tiles(seqlen_q, group),
    )  # fmt: skip
    planned = FEW_PLANNED if batch <= FEW_PLANNED else MANY_PLANNED
    flags = (
        page,
        capped,
        seqlen_q == 1 and group <= tile_m,
        planned,
        FEW_ROWS if seqlen_q * group <= FEW_ROWS else tile_m,
    )
    return (max(1, min(items, PROGRAMS * sms)), 1, 1), arguments, flags


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
    attention[grid](*arguments, *scales(scale, softcap), *flags, **OPTIONS)
