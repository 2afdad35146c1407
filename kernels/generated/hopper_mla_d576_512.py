"""Latent attention (MLA) on Hopper for head_dim 576 (queries, keys) and 512 (values): decoding with one key head, split over keys.

Query i of a sequence sees keys from left before to right after position i + keys - queries.  A load warp copies blocks
of 64 latent keys, 2 at a time; a warpgroup makes the scores of 64 rows and the left half of O, another one the right
half, and a third one merges splits.  Where splits are dealt out and have up to 32 rows, keys are the M of the products:
one warpgroup makes the scores, another one O, and where each split has a program of its own the one that merges does
the softmax.  Sequences of up to 4 queries are split, whatever else is in the batch, and when the splits of a tile are
done their programs merge them, a share each, in the order of the keys.  In larger batches programs take runs of splits,
one after the other, and merge as they go; where a run ends inside a tile another program goes on with it.  What a
sequence gets depends on it alone.  Runs on sm_90a with triton and torch alone.
"""

TILECAST = {
    "tilecast": "0.1.0", "family": "hopper_mla", "machine": "h200-sxm", "targets": ["sm_90a"],
    "pass": "serve",
    "variant": "family=mla-hopper,kv_stages=2,split_keys=1024,split_keys_of_many=1024,many_heads=65,whole_keys=1024,most_splits=32,merged=8,planned=32",
    "workload": {"batch": 2, "heads_q": 64, "heads_kv": 1, "seqlen_q": 1, "seqlen_k": 8192, "head_dim_qk": 576, "head_dim_v": 512, "mask": "causal", "window": None, "dtype": "bf16"},
}  # fmt: skip

from collections import namedtuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its name in Triton 3.6
copy_rows = (
    async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
)  # the same
meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # the same
REINTERPRET_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # not in Triton 3.6

TILE_M = gl.constexpr(64)  # rows of a tile: query heads, for each query; the M of wgmma
TILE_N = gl.constexpr(64)  # keys of a block
TURNED_ROWS = (8, 16, 32)  # rows of a tile where splits are dealt out and have no more: the N of wgmma
FEWEST_TURNED, MOST_TURNED = gl.constexpr(8), gl.constexpr(32)
SLOTS, TURNED_SLOTS = (
    gl.constexpr(2),
    gl.constexpr(3),
)  # blocks that are in flight or being multiplied; of the fewest rows, whose Q leaves room
Q_SLOTS, LEFT_SLOTS = gl.constexpr(1), gl.constexpr(4)  # tiles of Q that are there, items that wait to be merged
COLUMNS = gl.constexpr(64)  # columns of a piece of a block: 128 bytes, the widest row that shared memory swizzles
QK_PIECES, V_PIECES = gl.constexpr(9), gl.constexpr(8)
TAIL_PIECES = gl.constexpr(1)  # pieces of a key that are no value
HALF_PIECES, HALF = gl.constexpr(4), gl.constexpr(256)  # of V and O: what one warpgroup has
SPLIT, SPLIT_OF_MANY = 1024, 1024  # keys of a split or chunk; of many heads; more if too many
MANY_HEADS = 65
SPLIT_QUERIES = gl.constexpr(4)  # queries up to which a sequence is split; more are work enough
WHOLE = gl.constexpr(1024)  # keys up to which a sequence is not split
MOST_SPLITS = gl.constexpr(32)  # of a sequence; a power of two
MERGED, MERGED_ROWS = (
    gl.constexpr(8),
    gl.constexpr(4),
)  # splits, then groups of them, and rows that are merged at a time,
MERGED_COLUMNS, FEW_COLUMNS = gl.constexpr(256), gl.constexpr(128)  # and columns; of few rows
LEFT_TO_LAST = gl.constexpr(
    1 << MERGED.value.bit_length()
)  # of a count of splits that are done: this and more says what is left to the last one
MOST_APART = gl.constexpr(8)  # chunks of a program that are done apart, where tiles are more than programs
LOOKS = gl.constexpr(
    24
)  # how often a program that could help to merge looks whether all splits are done: about a microsecond each
MOST_LEFT = 25600  # rows that splits of a launch leave in L2
FEW_PLANNED, MANY_PLANNED = 32, 32  # sequences that a program looks at together to find its work
FEW_ROWS = 16  # rows of Q that are loaded where no sequence has more
FAR = gl.constexpr(1 << 29)  # more keys than a sequence has, more pages than a pool
LOWEST = gl.constexpr(-3.4028234663852886e38)  # finite, so that a row that saw no key yet never computes inf - inf
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
KINDS = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16}
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True, "maxnreg": 128}
#: The same where programs take in splits one after the other, and a warpgroup less runs, for nothing is merged: a thread then has more registers.
CHAINED_OPTIONS = {**OPTIONS, "maxnreg": 168}
#: Programs that an SM holds at once: as many as are launched where there is work for more.
PROGRAMS = 1

# A row of an accumulator lives in the four lanes of a quad.
ACCUMULATOR = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
# Where splits have few rows these are the N of wgmma, and keys, then columns of O, its M, of which none is wasted: (key or column, row).  Every
# sum has its terms in the same order, so a row has the same bits.  Softmax has (row, key) as SCORES deals them out; 8 rows are those of each warp.
TURNED_8 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16]))
TURNED_SCORES_8 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], *([0, 8 << i] for i in range(3))],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[0, 0], [0, 0]],
        [],
        [8, TILE_N],
    )
)
TURNED_16 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16]))
TURNED_SCORES_16 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], *([0, 8 << i] for i in range(3))],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [0, 0]],
        [],
        [16, TILE_N],
    )
)
TURNED_32 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16]))
TURNED_SCORES_32 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], *([0, 8 << i] for i in range(3))],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]],
        [],
        [32, TILE_N],
    )
)
SCORE_ROWS, ROWS_OF_O = gl.constexpr(gl.SliceLayout(1, SCORES)), gl.constexpr(gl.SliceLayout(1, ACCUMULATOR))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
# 16 bytes to a thread: rows of Q that the load warp copies, and the block of V whose end must be cleared.
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))
LOADED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
LOADED_ROWS = gl.constexpr(gl.SliceLayout(1, LOADED))
# Rows and some columns of a merge: a warp has a row.
MERGING = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
MERGING_ROWS = gl.constexpr(gl.SliceLayout(1, MERGING))
# What is blended at a time: some columns of half of O, of which two parts are on their way.
PART = gl.constexpr(64)
PARTS = gl.constexpr(HALF // PART)
PART_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PART, 16]))
# A part as it leaves for a while: each thread's 2 rows and 2 columns of 8 side by side, so that 16 bytes move at a time.
PARKED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1], [2], [512], [1024], [2048]], [[4], [8], [16], [32], [64]], [[128], [256]], [], [TILE_M * PART]
    )
)

# Gluon's reductions meet all warps at a barrier.  What one warp finds out travels in a PTX register of its own instead.
DECLARE = gl.constexpr(".reg .b32 within; mov.b32 $0, 0;")
VOTE = gl.constexpr("""{ .reg .pred above; setp.gt.f32 above, $2, $4; setp.gt.or.f32 above, $3, $5, above;
vote.sync.any.pred above, above, -1; selp.b32 within, 0, 1, above; mov.b32 $0, $2; mov.b32 $1, $3; }""")
RESET, READ = gl.constexpr("mov.b32 within, 1; mov.b32 $0, 0;"), gl.constexpr("mov.b32 $0, within;")
VOTE_MORE = gl.constexpr("""{ .reg .pred above; .reg .b32 none; setp.gt.f32 above, $2, $4; setp.gt.or.f32 above, $3, $5, above;
vote.sync.any.pred above, above, -1; selp.b32 none, 0, 1, above; and.b32 within, within, none; mov.b32 $0, $2; mov.b32 $1, $3; }""")
# A reference moves where what it should be has grown by more than $6.  All references of a warp are known before the first of them is
# used: one chain of maxima after the other, the compiler would leave the special function unit waiting between them.
MOVE = gl.constexpr("""{ .reg .pred some, own; .reg .f32 low, high; sub.rn.f32 low, $2, $4; sub.rn.f32 high, $3, $5;
setp.gt.f32 some, low, $6; setp.gt.or.f32 some, high, $6, some; vote.sync.any.pred some, some, -1; selp.b32 within, 0, 1, some;
setp.gt.and.f32 own, low, $6, some; selp.b32 $0, $2, $4, own; setp.gt.and.f32 own, high, $6, some; selp.b32 $1, $3, $5, own; }""")
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
# Blocks on their way through shared memory: number n lies in slot `slot_of` n; a lap flips the barriers' phase.  The same memory
# as boxes of a page or a part of it, which are copied, as pieces of keys, and as halves of values.  The tail of a key that is no
# value comes and goes with the right half.
Ring = namedtuple(
    "Ring", "boxes pieces halves tail_boxes tail left_full right_full left_empty right_empty tail_full tail_empty"
)
# Items on their way from role to role: Q, as pieces, as halves and as boxes of rows, and what a split has left; and the maxima (0) and sums (1) of the
# rows of a group of chunks, and those of all groups before (2, 3).
Items = namedtuple("Items", "q q_halves q_boxes q_full q_empty left left_empty stats")
# What the left warpgroup tells the right one: for each block a factor of each row of O, and P; then factors as chunks and items end.
Link = namedtuple("Link", "factors p told taken scores scored weighed")
# A split of the keys for one tile of rows; `head_kv` is a part of the query heads, which share one key head.
Item = namedtuple("Item", "b head_kv tile split splits q_len k_len low high begin end")
# Where splits are taken in one after the other: a program's run of units, [low, high) of `total`; some chunks of an item, which has the
# keys of those; and the place in memory where what it has waits between them.
Deal = namedtuple("Deal", "team each more whole total low high apart grouped")
# Whether some chunks may be done apart, which join the others when all else is done; how many of an item, and the first slot that they wait in.
# Of those that are in a group that began before the piece each waits for itself, the others with their group: that has the same bits wherever it is.
# Units of the run before, and from a slot to that of the run before's chunk as far from its end.  Whether it is a part of one group, which comes to lie in one
# place, and the slot of a tile's first group; and whether it is the first piece of its tile that this program does, which needs Q, and the last one.
Piece = namedtuple(
    "Piece",
    "item low from_chunk to_chunk chunks first blocks place apart slot run_before back grouped first_group fresh over",
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
def barriers(COUNT: gl.constexpr):
    """Barriers that are to be `set_up`."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit
def set_up(bars, slot: gl.constexpr, ALL: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """The barrier of a slot, if there is one, or ALL, complete a phase with every ``ARRIVALS`` arrivals.  Slot by slot is sooner done: between
    two barriers of one array the compiler has all threads meet.  Where programs run long other registers of theirs count for more."""
    slots: gl.constexpr = bars.shape[0]
    for i in gl.static_range(slots):
        if ALL or i == slot:
            mbarrier.init(bars.index(i), count=ARRIVALS)


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
    tiles = gl.where((rows >= batch.rows_min) & (rows <= batch.rows_max), rows + TILE_M - 1 >> 6, 0)
    first = gl.maximum(k_len - q_len - batch.left, 0) & -TILE_N
    span = gl.maximum(k_len - first, 0)
    splits = gl.minimum(span + (1 << batch.split_log2) - 1 >> batch.split_log2, 1 << batch.split_bits)
    return tiles, gl.where((q_len <= SPLIT_QUERIES) & (span > WHOLE), splits, 1), first


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
    return item_at(batch, b, index, ONE)


@gluon.jit
def item_at(batch, b, index, ONE: gl.constexpr):
    """An item of a sequence."""
    q_len, k_len = lengths(batch, b, b >= 0)
    return item_at_length(batch, b, index, q_len, k_len, ONE)


@gluon.jit
def item_at_length(batch, b, index, q_len, k_len, ONE: gl.constexpr):
    """An item of a sequence of these lengths."""
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


@gluon.jit
def own_item(batch, scratch, ONE: gl.constexpr):
    """(the item of a program of its own, whether there is one): each sequence and part of the heads has as many programs as splits at the most."""
    of_sequence = batch.heads_kv * scratch.split_bound
    number = own_copy(gl.program_id(0))
    item = item_at(batch, number // of_sequence, number % of_sequence, ONE)
    return item, (item.q_len > 0) & (item.split < item.splits)


# -- chunks
@gluon.jit
def chunks_of(batch, q_len, k_len):
    """(chunks, first key, blocks) where nothing is dealt out in splits: an item takes in what would be its splits, one after the
    other, and merges them as they would be: a sequence gets the same bits either way."""
    first = gl.maximum(k_len - q_len - batch.left, 0) & -TILE_N
    span = gl.maximum(k_len - first, 0)
    chunks = gl.minimum(span + (1 << batch.split_log2) - 1 >> batch.split_log2, MOST_SPLITS)
    several = (q_len <= SPLIT_QUERIES) & (span > WHOLE)
    return gl.where(several, chunks, 1), first, span + TILE_N - 1 >> 6


@gluon.jit
def chunk_of(batch, item, chunks, first, blocks, number):
    """(first key, end) of a chunk, as `item_of` finds them of a split."""
    each = 1 << batch.split_log2 - 6
    begin, end = number * each, gl.minimum((number + 1) * each, blocks)
    if chunks == MOST_SPLITS:
        begin, end = number * blocks >> 5, (number + 1) * blocks >> 5
    begin, end = gl.maximum(item.begin, first + begin * TILE_N), gl.minimum(item.end, first + end * TILE_N)
    if chunks == 1:
        begin, end = item.begin, item.end
    return begin, gl.maximum(begin, end)


# -- pieces: which chunks of which tiles are whose, where programs take them in one after the other
@gluon.jit
def units_of(batch, b, there, whole):
    """(row tiles, what each counts for) of sequence `b`: its chunks, or 1 where tiles are dealt `whole`."""
    q_len, k_len = lengths(batch, b, there)
    tiles, _, _ = shares(batch, q_len, k_len)
    chunks, _, _ = chunks_of(batch, q_len, k_len)
    return tiles, gl.where(whole, 1, chunks)


@gluon.jit
def units_from(batch, first, whole, PLANNED: gl.constexpr, WARPS: gl.constexpr):
    """The same of each of PLANNED sequences from ``first`` on."""
    b = first + gl.arange(0, PLANNED, layout=gl.BlockedLayout([max(1, PLANNED // (32 * WARPS))], [32], [WARPS], [0]))
    return units_of(batch, b, b < batch.count, whole)


@gluon.jit
def ends_before(batch, first, after, whole, PLANNED: gl.constexpr, WARPS: gl.constexpr):
    """(of each of PLANNED sequences, the unit after its last one; the unit of the first of them), where those behind begin at `after`."""
    tiles, units = units_from(batch, first, whole, PLANNED, WARPS)
    ends = gl.associative_scan(tiles * units, 0, plus)
    before = after - gl.max(ends, 0)
    return before + ends, before


@gluon.jit
def deal_of(batch, scratch, PLANNED: gl.constexpr, WARPS: gl.constexpr):
    """What a program does: a share of all units, in one run, the same one as the programs of the other heads of these sequences.

    A run may begin and end inside a tile.  It is done from its last tile to its first: the chunks at its end, which a tile begins
    with, before all others, and those at its beginning, which go on from what another program has of their tile, last.  Where runs
    are shorter than tiles, that other program is not done then: such chunks are done apart, and join what it has afterwards.  Runs that are no shorter
    than a group of chunks are done by groups, from the last one to the first: then the group that a run ends in is there when the next program, with the
    last of its run, comes to go on with it.
    """
    tiles, units, most = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    for first in range(0, batch.count, PLANNED):
        of_each, chunks = units_from(batch, first, False, PLANNED, WARPS)
        tiles += gl.sum(of_each, 0)
        units += gl.sum(of_each * chunks, 0)
        most = gl.maximum(most, gl.max(gl.where(of_each > 0, chunks, 0), 0))
    teams, team = gl.num_programs(0) // batch.heads_kv, gl.program_id(0) // batch.heads_kv
    # A shared tile takes about a chunk's time more, and an eighth of one for each chunk that is handed over or joins.
    whole = (tiles <= teams) & ((units + teams - 1) // teams + 1 + most // 8 >= most)
    total = gl.where(whole, tiles, units)
    each, more = total // teams, total % teams
    low = each * team + gl.minimum(team, more)
    high = low + each + gl.where(team < more, 1, 0)
    apart = (whole == 0) & (each + 1 < most) & ((each < MOST_APART) | (batch.count * scratch.split_tiles <= teams))
    return Deal(team, each, more, whole, total, low, gl.where(team < teams, high, low), apart, apart & (each >= MERGED))


@gluon.jit
def piece_of(batch, deal, first, ends, before, high, ONE: gl.constexpr, CUT: gl.constexpr):
    """The piece that ends before unit `high`; CUT: where chunks are done by groups, no more of it than those of a group."""
    unit = high - 1
    b = first + gl.sum((ends <= unit).to(gl.int32), 0)
    begin = gl.max(gl.where(ends <= unit, ends, before), 0)
    _, units = units_of(batch, b, b >= 0, deal.whole)
    tile = (unit - begin) // units
    start = begin + tile * units
    item = item_at(batch, b, tile * batch.heads_kv + gl.program_id(0) % batch.heads_kv, ONE)
    chunks, first_key, blocks = chunks_of(batch, item.q_len, item.k_len)
    grouped = deal.grouped & (deal.each + 1 < chunks)
    tile_low = gl.maximum(deal.low, start)
    low = tile_low
    if CUT:
        low = gl.where(grouped, gl.maximum(low, start + (unit - start) // MERGED * MERGED), low)
    from_chunk, to_chunk = gl.maximum(low - start, 0), gl.where(deal.whole, chunks, gl.minimum(high - start, chunks))
    key, _ = chunk_of(batch, item, chunks, first_key, blocks, from_chunk)
    _, end = chunk_of(batch, item, chunks, first_key, blocks, to_chunk - 1)
    item = Item(
        item.b,
        item.head_kv,
        item.tile,
        item.split,
        item.splits,
        item.q_len,
        item.k_len,
        item.low,
        item.high,
        key,
        gl.maximum(key, end),
    )
    # What waits between chunks lies with the program whose run the tile begins in: where others go on, apart from what it has of later tiles.
    owner = gl.where(
        start < (deal.each + 1) * deal.more,
        start // (deal.each + 1),
        deal.more + (start - (deal.each + 1) * deal.more) // gl.maximum(deal.each, 1),
    )
    place = 2 * (gl.program_id(0) + (owner - deal.team) * batch.heads_kv) + 1
    place = gl.where((from_chunk > 0) | (to_chunk < chunks), place, 2 * gl.program_id(0))
    apart = gl.where(((from_chunk > 0) & (deal.each + 1 < chunks) & deal.apart) | grouped, to_chunk - from_chunk, 0)
    run_before = deal.each + gl.where(deal.team - 1 < deal.more, 1, 0)
    back = run_before - batch.heads_kv * (deal.each + 1)
    # Where chunks are done by groups: of the tile's first chunk as if it were this program's, or, of a piece of one group, of the group's.
    slot = gl.program_id(0) * (deal.each + 1) + gl.where(grouped, start - deal.low, 0)
    if CUT:
        slot += gl.where(grouped, from_chunk // MERGED * MERGED + gl.where(from_chunk % MERGED > 0, back, 0), 0)
    first_group = (
        (gl.program_id(0) + (owner - deal.team) * batch.heads_kv) * (deal.each + 1)
        + start
        - (deal.each * owner + gl.minimum(owner, deal.more))
    )
    fresh, over = (high == deal.high) | (high == start + units), low == tile_low
    return Piece(
        item,
        low,
        from_chunk,
        to_chunk,
        chunks,
        first_key,
        blocks,
        place,
        apart,
        slot,
        run_before,
        back,
        grouped,
        first_group,
        fresh,
        over,
    )


@gluon.jit
def whole_piece(item):
    """An item that is a split of its own."""
    none, one = gl.to_tensor(0), gl.to_tensor(1)
    return Piece(
        item, none, none, one, one, none, none, none, none, none, none, none, none == one, none, one == one, one == one
    )


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
def load_q_boxes(items, turn, item, batch, q_desc, Q_ROWS: gl.constexpr):
    """The same by the copy engine, of one query a sequence: the heads of an item, and what lies behind them."""
    first, token = item.b, gl.to_tensor(0)
    if batch.cu_q is not None:
        first, token = token, gl.load(batch.cu_q + item.b)
    wait_empty(items.q_empty, turn)
    full = items.q_full.index(turn % Q_SLOTS)
    mbarrier.expect(full, QK_PIECES * q_desc.block_type.nbytes)
    for piece in gl.static_range(QK_PIECES):
        box = items.q_boxes.index((turn % Q_SLOTS * QK_PIECES + piece) * (items.q.shape[1] // Q_ROWS))
        copy_tile(q_desc, [first, item.head_kv * batch.group, token, piece * COLUMNS], full, box)


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
def early_pages(batch, item, PAGE: gl.constexpr, ONE: gl.constexpr):
    """`first_pages`, looked up before the length of the sequence is known: where a split of the longest one begins."""
    if PAGE > 0:
        guess = item_at_length(batch, item.b, item.split * batch.heads_kv, gl.to_tensor(1), batch.seqlen_k, ONE)
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
def bring_q(items, turn, item, rows, batch, q_desc, ONE: gl.constexpr, Q_ROWS: gl.constexpr, BOXED: gl.constexpr):
    """Q of an item, in boxes or row by row."""
    if BOXED:
        load_q_boxes(items, turn, item, batch, q_desc, Q_ROWS)
    else:
        load_q(items, turn, item, rows, batch, ONE, Q_ROWS)


@gluon.jit
def load_pieces(desc, boxes, first, full, pages, token, FIRST: gl.constexpr, PIECES: gl.constexpr):
    """Copy ``PIECES`` pieces of a block from piece ``FIRST`` of the keys on: a box of each page and piece."""
    per: gl.constexpr = len(pages)
    for piece in gl.static_range(PIECES):
        for i in gl.static_range(per):
            copy_tile(
                desc, [pages[i], 0, token, (FIRST + piece) * COLUMNS], full, boxes.index((first + piece) * per + i)
            )


@gluon.jit
def slot_of(ring, n):
    """The slot of block number n."""
    slots: gl.constexpr = ring.left_full.shape[0]
    return n % slots


@gluon.jit
def load_block(ring, n, k_desc, pages, token):
    """Copy a block of keys as number n, each half once what was there is done with."""
    slot = slot_of(ring, n)
    box_bytes: gl.constexpr = TILE_N * COLUMNS * 2
    wait_empty(ring.left_empty, n)
    full = ring.left_full.index(slot)
    mbarrier.expect(full, HALF_PIECES * box_bytes)
    load_pieces(k_desc, ring.boxes, slot * V_PIECES, full, pages, token, 0, HALF_PIECES)
    wait_empty(ring.right_empty, n)
    full = ring.right_full.index(slot)
    mbarrier.expect(full, (HALF_PIECES if ring.tail_full is not None else HALF_PIECES + TAIL_PIECES) * box_bytes)
    load_pieces(k_desc, ring.boxes, slot * V_PIECES + HALF_PIECES, full, pages, token, HALF_PIECES, HALF_PIECES)
    if ring.tail_full is not None:
        wait_empty(ring.tail_empty, n)
        slot = n % SLOTS
        full = ring.tail_full.index(slot)
        mbarrier.expect(full, TAIL_PIECES * box_bytes)
    load_pieces(k_desc, ring.tail_boxes, slot * TAIL_PIECES, full, pages, token, V_PIECES, TAIL_PIECES)


@gluon.jit
def load_item(
    item,
    pages,
    turn,
    n,
    k_desc,
    q_desc,
    ring,
    items,
    rows,
    batch,
    PAGE: gl.constexpr,
    ONE: gl.constexpr,
    Q_ROWS: gl.constexpr,
    BOXED: gl.constexpr,
    fresh,
):
    """Copies Q, where what is there is not ``fresh``, and the key blocks of an item, whose first pages are known: the first block before Q, whose slot is free later."""
    table = batch.table
    if PAGE > 0:
        table += item.b.to(gl.int64) * batch.stride_table
    for key in range(item.begin, item.end, TILE_N):
        if PAGE > 0:
            ahead = find_pages(table, key + TILE_N, item.k_len, PAGE)
            token = key % PAGE if PAGE > TILE_N else 0
            load_block(ring, n, k_desc, pages, token)
            pages = ahead
        else:
            page, start = pages
            load_block(ring, n, k_desc, (page,), start + key)
        if (key == item.begin) & fresh:
            bring_q(items, turn, item, rows, batch, q_desc, ONE, Q_ROWS, BOXED)
        n += 1
    if (item.begin >= item.end) & fresh:
        bring_q(items, turn, item, rows, batch, q_desc, ONE, Q_ROWS, BOXED)
    return n


@gluon.jit
def load_role(
    k_desc,
    q_desc,
    ring,
    items,
    rows,
    batch,
    scratch,
    PAGE: gl.constexpr,
    ONE: gl.constexpr,
    PLANNED: gl.constexpr,
    Q_ROWS: gl.constexpr,
    CHAINED: gl.constexpr,
    BOXED: gl.constexpr,
):
    """Copies Q and K of every item of this program into shared memory."""
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
    n, turn = gl.to_tensor(0), gl.to_tensor(0)
    # The pages of the next item, if there is one, are on their way while the blocks of this one are.
    if CHAINED:
        deal = deal_of(batch, scratch, PLANNED, 1)
        high, after = deal.high, deal.total
        for back in range(0, batch.count, PLANNED):
            first = (batch.count - 1) // PLANNED * PLANNED - back
            ends, before = ends_before(batch, first, after, deal.whole, PLANNED, 1)
            low = gl.maximum(deal.low, before)
            if high > low:
                piece = piece_of(batch, deal, first, ends, before, high, ONE, True)
                pages = first_pages(batch, piece.item, PAGE)
                while high > low:
                    high = piece.low
                    following, ahead = piece, pages
                    if high > low:
                        following = piece_of(batch, deal, first, ends, before, high, ONE, True)
                        ahead = first_pages(batch, following.item, PAGE)
                    n = load_item(
                        piece.item,
                        pages,
                        turn,
                        n,
                        k_desc,
                        q_desc,
                        ring,
                        items,
                        rows,
                        batch,
                        PAGE,
                        ONE,
                        Q_ROWS,
                        BOXED,
                        piece.fresh,
                    )
                    turn += gl.where(piece.over, 1, 0)
                    piece, pages = following, ahead
            after = before
    elif PLANNED == 0:
        item, there = own_item(batch, scratch, ONE)
        pages = early_pages(batch, item, PAGE, ONE)
        if there:
            load_item(
                item, pages, turn, n, k_desc, q_desc, ring, items, rows, batch, PAGE, ONE, Q_ROWS, BOXED, turn == 0
            )
    else:
        done, number = 0, own_copy(gl.program_id(0))
        for first in range(0, batch.count, PLANNED):
            ends = ends_of(batch, first, done, PLANNED, 1)
            total = gl.max(ends, 0)
            if number < total:
                item = item_of(batch, first, ends, done, number, ONE)
                pages = first_pages(batch, item, PAGE)
                while number < total:
                    number += gl.num_programs(0)
                    following, ahead = item, pages
                    if number < total:
                        following = item_of(batch, first, ends, done, number, ONE)
                        ahead = first_pages(batch, following, PAGE)
                    n = load_item(
                        item,
                        pages,
                        turn,
                        n,
                        k_desc,
                        q_desc,
                        ring,
                        items,
                        rows,
                        batch,
                        PAGE,
                        ONE,
                        Q_ROWS,
                        BOXED,
                        turn >= 0,
                    )
                    item, pages = following, ahead
                    turn += 1
            done = total


# -- blocks
@gluon.jit
def clear_rows(ring, n, count, FIRST: gl.constexpr):
    """Zeros for the rows of half of V from ``count`` on, which hold anything: 0 times NaN is NaN."""
    rows = gl.arange(0, TILE_N, layout=LOADED_ROWS)
    for piece in gl.static_range(HALF_PIECES):
        tile = ring.pieces.index(slot_of(ring, n) * V_PIECES + FIRST + piece)
        values = tile.load(LOADED)
        tile.store(gl.where((rows < count)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def partial_sums(p):
    """Sums over the columns that one thread holds."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], TILE_N // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def some_moved():
    """Whether a row of a warp was found not to be within its bounds."""
    return gl.inline_asm_elementwise(READ, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1) == 0


@gluon.jit
def some_below(factors):
    """Whether one of the rows of a warp has a factor below 1."""
    gl.inline_asm_elementwise(VOTE, "=r,=r,f,f,f,f", [1.0 - factors, 0.0], dtype=gl.int32, is_pure=False, pack=2)
    return some_moved()


@gluon.jit
def some_of_many_below(factors):
    """The same of rows of which a thread has more than two."""
    gl.inline_asm_elementwise(RESET, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise(VOTE_MORE, "=r,=r,f,f,f,f", [1.0 - factors, 0.0], dtype=gl.int32, is_pure=False, pack=2)
    return some_moved()


@gluon.jit
def rescaled(o, factors):
    """Half of O times a factor for each row, by the warps that have rows whose maximum has moved."""
    if some_below(factors):
        o = o * factors[:, None]
    return o


@gluon.jit
def tell(link, m, factors):
    """Hand the right warpgroup factors of each row, as message ``m``, once it has done what the one before was for."""
    wait_empty(link.taken, m)
    for i in gl.static_range(len(factors)):
        link.factors.index(i).store(factors[i])
    meet()
    arrive(link.told, m)


@gluon.jit
def told(link, m, COUNT: gl.constexpr):
    """The factors of message ``m``, where they are all of it."""
    wait(link.told, m)
    factors = ()
    for i in gl.static_range(COUNT):
        factors = factors + (link.factors.index(i).load(ROWS_OF_O),)
    meet()  # all threads have read before one of them says so
    arrive(link.taken, m)
    return factors


# -- what chunks have
@gluon.jit
def blend(x, a, y, b):
    """x a + y b, rounded alike wherever it stands, and as L2 adds, which takes a subnormal number for 0."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.rn.ftz.f32 t, $3, $4; fma.rn.ftz.f32 $0, $1, $2, t; }",
        "=f,f,f,f,f",
        [x, a, y, b],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def weights(before, after):
    """(reference, weight before, weight after) of rows with these: it only moves where it has to by more than 2^8, so that what
    was before mostly stays as it is."""
    row_max = gl.where(after - before > 8.0, after, before)
    return row_max, mufu_exp2(before - row_max), mufu_exp2(after - row_max)


@gluon.jit
def joins(number, chunks, level):
    """Whether what a chunk has joins, at level 0, that of the chunks of its group before it, and then, at level 1, of groups before."""
    ends = (number % MERGED == MERGED - 1) | (number + 1 == chunks)
    return gl.where(level == 0, number % MERGED > 0, ends & (number >= MERGED))


@gluon.jit
def level_of(number):
    """Where it waits for the next chunk: with its group, or, if that ends here, with all groups so far."""
    return (number % MERGED + 1) // MERGED


@gluon.jit
def starts(number, chunks):
    """Whether a chunk is the first of its group, or ends the first group, and others follow: what it has waits as it is."""
    return ((number % MERGED == 0) | (number + 1 == MERGED)) & (number + 1 < chunks)


@gluon.jit
def goes_on(number, chunks, level):
    """Whether a chunk that joins at ``level`` goes on with all that was there: with its group to the next level, or to the results."""
    return (number + 1 == chunks) | ((level == 0) & (number % MERGED == MERGED - 1))


@gluon.jit
def first_together(piece, number):
    """The first chunk of those done apart that a chunk waits together with."""
    group = number // MERGED * MERGED
    return gl.where(group < piece.from_chunk, number, group)


@gluon.jit
def last_together(piece, first):
    """The last one of those that begin with a chunk, in whose slot they wait."""
    return gl.where(first % MERGED > 0, first, gl.minimum(first + MERGED, piece.to_chunk) - 1)


@gluon.jit
def ends_group(piece, number):
    """Whether a chunk is the last one of its group."""
    return (number % MERGED == MERGED - 1) | (number + 1 == piece.chunks)


@gluon.jit
def leaves_group(piece):
    """Whether a piece whose chunks are done apart ends in the middle of a group that began in it."""
    return (
        (piece.apart > 0)
        & (ends_group(piece, piece.to_chunk - 1) == 0)
        & (first_together(piece, piece.to_chunk - 1) % MERGED == 0)
    )


@gluon.jit
def groups_until(piece):
    """Groups of a tile that are there when a piece is done."""
    return gl.where(piece.to_chunk < piece.chunks, piece.to_chunk // MERGED, (piece.chunks + MERGED - 1) // MERGED)


@gluon.jit
def first_joined(piece):
    """The first group that ends in a piece and joins those before it."""
    return gl.maximum(piece.from_chunk // MERGED, 1)


@gluon.jit
def joins_groups(piece):
    """Whether a group that ends in a piece joins others, or all of them become results."""
    return (first_joined(piece) < groups_until(piece)) | (piece.to_chunk == piece.chunks)


@gluon.jit
def follows_apart(piece):
    """Whether the program before has its chunks of the tile apart, too."""
    return piece.from_chunk > piece.run_before


@gluon.jit
def parked(scratch, place, level, SIDE: gl.constexpr):
    """Where half of O waits between chunks: behind the maxima and sums of all programs."""
    programs = own_copy(gl.num_programs(0))
    return scratch.partials + programs * (4 * TILE_M) + ((level * (2 * programs) + place) * 2 + SIDE) * (TILE_M * HALF)


@gluon.jit
def kept_apart(scratch, piece, number, SIDE: gl.constexpr):
    """Where half of O of a chunk that is done apart waits, or its group: behind all that waits between chunks; at side 2 its rows' maxima and sums."""
    return in_slot(scratch, piece.slot + gl.where(piece.grouped, 0, number - piece.from_chunk), SIDE)


@gluon.jit
def group_before(scratch, piece, SIDE: gl.constexpr):
    """Where the program before left the first chunks of the group that a piece begins in the middle of; at side 2 their maxima and sums."""
    apart, place = (
        in_slot(scratch, piece.slot + piece.back - 1, SIDE),
        parked(scratch, piece.place, 0, SIDE) if SIDE < 2 else sums_parked(scratch, piece.place, 0),
    )
    return gl.where(follows_apart(piece), apart, place)


@gluon.jit
def group_at(scratch, piece, group, SIDE: gl.constexpr):
    """Where a group lies that ends in a piece; at side 2 its rows' maxima and sums."""
    return in_slot(
        scratch, piece.slot + group * MERGED + gl.where(group * MERGED < piece.from_chunk, piece.back, 0), SIDE
    )


@gluon.jit
def groups_at(scratch, piece, SIDE: gl.constexpr):
    """Where all groups lie before those that end in a piece: joined, or the first one of a tile as it is; at side 2 their maxima and sums."""
    first = in_slot(scratch, piece.first_group, SIDE)
    return gl.where(
        first_joined(piece) == 1,
        first,
        parked(scratch, piece.place, 1, SIDE) if SIDE < 2 else sums_parked(scratch, piece.place, 2),
    )


@gluon.jit
def in_slot(scratch, slot, SIDE: gl.constexpr):
    """Half of O in a slot of what is done apart; at side 2 maxima and sums of its rows."""
    programs, levels = own_copy(gl.num_programs(0)), gl.where(scratch.split_bound > MERGED, 2, 1)
    return (
        scratch.partials
        + programs * (4 * TILE_M)
        + levels * programs * (4 * TILE_M * HALF)
        + slot * (TILE_M * (2 * HALF + 2))
        + SIDE * (TILE_M * HALF)
    )


@gluon.jit
def sums_parked(scratch, place, number):
    """Where the maxima (0) and sums (1) of a group's rows and those of all groups (2, 3) wait for another program."""
    return scratch.partials + (place // 2 * 4 + number) * TILE_M


@gluon.jit
def hand_over(scratch, SIDE: gl.constexpr, WHAT: gl.constexpr = 0):
    """Say that another program may go on with the tile; WHAT 1: with the group of chunks that it is in the middle of."""
    meet()  # all threads have stored before one of them says so
    gl.atomic_xchg(
        scratch.arrived + (2 * (WHAT * own_copy(gl.num_programs(0)) + gl.program_id(0)) + SIDE), 1, sem="release"
    )


@gluon.jit
def take_over(scratch, batch, SIDE: gl.constexpr, WHAT: gl.constexpr = 0):
    """Until the program whose run ends where this one's begins has said so."""
    at = scratch.arrived + (2 * (WHAT * own_copy(gl.num_programs(0)) + gl.program_id(0) - batch.heads_kv) + SIDE)
    there = gl.atomic_add(at, 0, sem="acquire")
    while there == 0:
        there = gl.atomic_add(at, 0, sem="acquire")
    gl.atomic_xchg(at, 0, sem="relaxed")  # for the next launch
    meet()


@gluon.jit
def parts_of(o):
    """Half of O in parts."""
    parts = (o,)
    for _ in gl.static_range(2):
        halves = ()
        for i in gl.static_range(len(parts)):
            low, high = gl.split(gl.permute(gl.reshape(parts[i], [TILE_M, 2, parts[i].shape[1] // 2]), [0, 2, 1]))
            halves = halves + (low, high)
        parts = halves
    return parts


@gluon.jit
def whole_of(parts):
    """Half of O of its parts."""
    for _ in gl.static_range(2):
        pairs = ()
        for i in gl.static_range(len(parts) // 2):
            both = gl.permute(gl.join(parts[2 * i], parts[2 * i + 1]), [0, 2, 1])
            pairs = pairs + (gl.reshape(both, [TILE_M, 2 * parts[0].shape[1]]),)
        parts = pairs
    return gl.convert_layout(parts[0], ACCUMULATOR)


@gluon.jit
def parking(at, part, count):
    """(where part ``part`` of half of O lies, whether a warp with some of the first ``count`` rows has it)."""
    places = gl.arange(0, TILE_M * PART, layout=PARKED)
    return at + (part * (TILE_M * PART) + places), places // 128 % 4 * 16 < count


@gluon.jit
def as_parked(o):
    """A part as it lies in memory: a thread's numbers, in another order."""
    o = gl.permute(gl.reshape(o, [4, 2, 8, PART // 8, 4, 2]), [3, 0, 2, 4, 1, 5])
    return gl.convert_layout(gl.reshape(o, [TILE_M * PART]), PARKED)


@gluon.jit
def park(o, at, part, count):
    """A part to memory, of the warps that have some of ``count`` rows, from the threads that will want it back."""
    places, there = parking(at, part, count)
    gl.store(places, as_parked(o), mask=there, eviction_policy="evict_last")


@gluon.jit
def park_all(o, at, count):
    """All parts."""
    parts = parts_of(o)
    for i in gl.static_range(PARTS):
        park(gl.convert_layout(parts[i], PART_LAYOUT), at, i, count)


@gluon.jit
def unpark(at, part, count):
    """A part back from where the same threads left it."""
    places, there = parking(at, part, count)
    o = gl.load(places, mask=there, other=0.0, eviction_policy="evict_last")
    o = gl.permute(gl.reshape(o, [PART // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    return gl.convert_layout(gl.reshape(o, [TILE_M, PART]), PART_LAYOUT)


@gluon.jit
def first_parked(at, count):
    """The parts that are asked for before it is known what they are multiplied with."""
    known = ()
    for i in gl.static_range(min(PARTS, 2)):
        known = known + (unpark(at, i, count),)
    return known


@gluon.jit
def unparked(known, at, count):
    """Half of O, of ``count`` rows that wait in ``at``, whose first parts are ``known``."""
    for i in gl.static_range(len(known), PARTS):
        known = known + (unpark(at, i, count),)
    return whole_of(known)


@gluon.jit
def joined(known, at, count, o, before, after, LATER: gl.constexpr = False):
    """Half of O with what waits in ``at``, of ``count`` rows, whose first parts are ``known``: chunks before it, or a later one."""
    parts = parts_of(o)
    before = gl.convert_layout(before, gl.SliceLayout(1, PART_LAYOUT))[:, None]
    after = gl.convert_layout(after, gl.SliceLayout(1, PART_LAYOUT))[:, None]
    done = ()
    for i in gl.static_range(PARTS):
        part = gl.convert_layout(parts[i], PART_LAYOUT)
        done = done + (blend(part, before, known[i], after) if LATER else blend(known[i], before, part, after),)
        if i + 2 < PARTS:
            known = known + (unpark(at, i + 2, count),)
    return whole_of(done)


@gluon.jit
def added(o, at, count, before, after):
    """What a chunk has joins ``count`` rows that wait in ``at``, where L2 adds it to them: nothing is waited for.  Warps with rows
    whose maximum has moved fetch theirs, and leave them again."""
    moved = some_below(before)
    parts = parts_of(o)
    before = gl.convert_layout(before, gl.SliceLayout(1, PART_LAYOUT))[:, None]
    after = gl.convert_layout(after, gl.SliceLayout(1, PART_LAYOUT))[:, None]
    for i in gl.static_range(PARTS):
        part = gl.convert_layout(parts[i], PART_LAYOUT)
        if moved:
            park(blend(unpark(at, i, count), before, part, after), at, i, count)
        else:
            places, there = parking(at, i, count)
            gl.atomic_add(places, as_parked(part * after), mask=there, sem="relaxed")


@gluon.jit
def halves_of(s):
    """Scores of the first and of the second half of a block's keys."""
    return gl.split(gl.permute(gl.reshape(s, [TILE_M, 2, TILE_N // 2]), [0, 2, 1]))


@gluon.jit
def attend(
    items,
    turn,
    ring,
    link,
    n,
    m,
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
    """Take in the keys of one block: S = Q K^T, online softmax in base 2, the left half of O = O * correction + P V."""
    row_max, row_sums, o = state
    s = gl.zeros([TILE_M, TILE_N], gl.float32, layout=SCORES)
    none = own_copy(0)  # addresses are made where they are used: kept over the loop, they would spill
    slot = slot_of(ring, n) + none
    wait(ring.left_full, n)
    s = warpgroup_mma(
        items.q_halves.index(none), ring.halves.index(slot * 2).permute((1, 0)), s, use_acc=False, is_async=True
    )
    wait(ring.right_full, n)
    s = warpgroup_mma(items.q_halves.index(none + 1), ring.halves.index(slot * 2 + 1).permute((1, 0)), s, is_async=True)
    for i in gl.static_range(TAIL_PIECES):
        tile = ring.tail.index(slot * TAIL_PIECES + i).permute((1, 0))
        s = warpgroup_mma(items.q.index(none + V_PIECES + i), tile, s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
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
    # The reference of a row only moves when it has to by more than 2^8: O keeps its scale in most blocks, so exponentials of half the keys go by the
    # reference of before while the maxima are found.  Those of the other half are made while the first half is multiplied.
    first_s, second_s = halves_of(s)
    across: gl.constexpr = gl.SliceLayout(1, first_s.type.layout)
    first = mufu_exp2(first_s * factor - gl.convert_layout(row_max, across)[:, None])
    grown = gl.maximum(row_max, gl.max(s, 1) * factor)
    new_max = gl.inline_asm_elementwise(
        MOVE, "=f,=f,f,f,f,f,f,f", [grown, row_max, 8.0], dtype=gl.float32, is_pure=False, pack=2
    )
    correction = mufu_exp2(row_max - new_max)
    reference = gl.convert_layout(new_max, across)[:, None]
    if key + TILE_N > item.k_len:
        clear_rows(ring, n, item.k_len - key, 0)
        meet()  # here, or all blocks would
    if some_moved():
        first = mufu_exp2(first_s * factor - reference)
        o = o * gl.convert_layout(correction, ROWS_OF_O)[:, None]
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACCUMULATOR, k_width=2)
    values = ring.halves.index(slot_of(ring, n) * 2)
    some: gl.constexpr = TILE_N // 2
    o = warpgroup_mma(gl.convert_layout(first.to(link.p.dtype), operand), values.slice(0, some), o, is_async=True)
    second = mufu_exp2(second_s * factor - reference)
    o = warpgroup_mma(gl.convert_layout(second.to(link.p.dtype), operand), values.slice(some, some), o, is_async=True)
    p = gl.convert_layout(gl.reshape(gl.permute(gl.join(first, second), [0, 2, 1]), [TILE_M, TILE_N]), SCORES)
    sums = partial_sums(p)
    row_sums = row_sums * gl.convert_layout(correction, gl.SliceLayout(1, row_sums.type.layout))[:, None] + sums
    p = p.to(link.p.dtype)
    wait_empty(link.taken, m)
    link.factors.index(0).store(correction)
    link.p.store(p)
    fence_async_shared()
    meet()
    arrive(link.told, m)
    o = warpgroup_mma_wait(0, deps=[o])
    arrive(ring.left_empty, n)
    return new_max, row_sums, o


@gluon.jit
def scores_turned(items, ring, n):
    """S = Q K^T of a block, asked for as (key, row)."""
    held: gl.constexpr = items.q.shape[1]
    s = gl.zeros([TILE_N, held], gl.float32, layout=TURNED_8 if held == 8 else TURNED_16 if held == 16 else TURNED_32)
    slot = slot_of(ring, n)
    wait(ring.left_full, n)
    for i in gl.static_range(HALF_PIECES):
        q = items.q_halves.index(i).permute((1, 0))
        s = warpgroup_mma(ring.pieces.index(slot * V_PIECES + i), q, s, use_acc=i > 0, is_async=True)
    wait(ring.right_full, n)
    for i in gl.static_range(HALF_PIECES, V_PIECES):
        q = items.q_halves.index(i).permute((1, 0))
        s = warpgroup_mma(ring.pieces.index(slot * V_PIECES + i), q, s, is_async=True)
    if ring.tail_full is not None:
        wait(ring.tail_full, n)
    for i in gl.static_range(TAIL_PIECES):
        q = items.q_halves.index(V_PIECES + i).permute((1, 0))
        s = warpgroup_mma(ring.tail.index(n % SLOTS * TAIL_PIECES + i), q, s, is_async=True)
    return s


@gluon.jit
def weigh_turned(
    s,
    link,
    m,
    key,
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
    """Softmax of a block's scores as `attend` does it, and P for the right warpgroup, which has all of O."""
    row_max, row_sums = state
    if CAPPED:
        s = cap_log2 - 2.0 * cap_log2 / (gl.exp2(s * scale_log2) + 1.0)  # cap * tanh(score / cap)
        factor = 1.0
    else:
        factor = scale_log2
    if (key < whole_begin) | (key + TILE_N > whole_end):
        keys = key + gl.arange(0, TILE_N, layout=gl.SliceLayout(0, s.type.layout))
        if ONE:
            s = gl.where(((keys >= first_key) & (keys <= last_key))[None, :], s, float("-inf"))
        else:
            s = gl.where((keys[None, :] >= first_key[:, None]) & (keys[None, :] <= last_key[:, None]), s, float("-inf"))
    grown = gl.maximum(row_max, gl.max(s, 1) * factor)
    new_max = gl.where(grown - row_max > 8.0, grown, row_max)
    correction = mufu_exp2(row_max - new_max)
    p = mufu_exp2(s * factor - new_max[:, None])
    sums = partial_sums(p)
    row_sums = row_sums * gl.convert_layout(correction, gl.SliceLayout(1, row_sums.type.layout))[:, None] + sums
    wait_empty(link.taken, m)
    link.factors.index(m % 2).store(correction)
    link.p.index(m % 2).store(p.to(link.p.dtype))
    fence_async_shared()
    meet()
    arrive(link.told, m)
    return new_max, row_sums


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
def merge_role(
    ring,
    link,
    items,
    batch,
    rows,
    scratch,
    CAPPED: gl.constexpr,
    ONE: gl.constexpr,
    PLANNED: gl.constexpr,
    TURNS: gl.constexpr,
):
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
    if PLANNED == 0:
        item, there = own_item(batch, scratch, ONE)
        if there:
            if TURNS:
                none = gl.to_tensor(0)
                attend_turned(item, none, none, none, ring, link, items, batch, rows, scratch, CAPPED, ONE)
            wait(items.left, gl.to_tensor(0))
            if item.splits > 1:
                merge(scratch, item, batch, rows, items, ONE, PLANNED, TURNS)
    else:
        turn, done, number = 0, 0, own_copy(gl.program_id(0))
        for first in range(0, batch.count, PLANNED):
            ends = ends_of(batch, first, done, PLANNED, 4)
            total = gl.max(ends, 0)
            while number < total:
                item = item_of(batch, first, ends, done, number, ONE)
                wait(items.left, turn)
                if item.splits > 1:
                    merge(scratch, item, batch, rows, items, ONE, PLANNED, TURNS)
                arrive(items.left_empty, turn)
                turn += 1
                number += gl.num_programs(0)
            done = total


@gluon.jit
def merge_piece(scratch, slot, members, kept, item, piece, count, batch, rows, ONE: gl.constexpr, WIDTH: gl.constexpr):
    """Merge ``members`` slots of MERGED_ROWS rows and WIDTH columns in their order, as the chunks of an item are: to slot ``kept``,
    or, at -1, as results."""
    across: gl.constexpr = V_PIECES * COLUMNS // WIDTH
    row, part = piece // across * MERGED_ROWS, piece % across
    # .cg: other programs wrote these, and the L1 cache knows nothing of it.
    mine = row + gl.arange(0, MERGED_ROWS, layout=MERGING_ROWS)
    there = mine < count
    total_max = gl.full([MERGED_ROWS], LOWEST, gl.float32, layout=MERGING_ROWS)
    total_sum = gl.zeros([MERGED_ROWS], gl.float32, layout=MERGING_ROWS)
    stats = ()
    for i in gl.static_range(MERGED):
        sums = sums_of(scratch, slot + i) + mine
        known = there & (i < members)
        row_max = gl.load(sums, mask=known, other=LOWEST, cache_modifier=".cg")
        stats = stats + ((row_max, gl.load(sums + scratch.slot_rows, mask=known, other=0.0, cache_modifier=".cg")),)
    at = scratch.partials + slot * scratch.slot_rows * (V_PIECES * COLUMNS) + mine[:, None] * (V_PIECES * COLUMNS)
    step = scratch.slot_rows * (V_PIECES * COLUMNS)
    query, head = queries_and_heads(batch, item, mine, ONE)
    columns = part * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, MERGING))
    parts = ()
    for i in gl.static_range(MERGED):
        known = (there & (i < members))[:, None]
        parts = parts + (gl.load(at + i * step + columns[None, :], mask=known, other=0.0, cache_modifier=".cg"),)
    total_max, total_sum = stats[0]
    o = parts[0]
    for i in gl.static_range(1, MERGED):
        split_max, split_sum = stats[i]
        # A split that is none has a weight of 0, and that of what was before is 1.
        total_max, before, after = weights(total_max, split_max)
        total_sum = blend(total_sum, before, split_sum, after)
        o = blend(o, before[:, None], parts[i], after[:, None])
    if kept < 0:
        finish_part(total_max, total_sum, o, part, query, head, there, item, batch, rows, WIDTH)
    else:
        keep_part(scratch, kept, total_max, total_sum, o, part, mine, there, WIDTH)


@gluon.jit
def keep_part(scratch, slot, row_max, row_sum, o, part, row, there, WIDTH: gl.constexpr):
    """Leave some columns of rows in a slot, and with the first of them their maxima and sums."""
    if part == 0:
        sums = sums_of(scratch, slot)
        gl.store(sums + row, row_max, mask=there)
        gl.store(sums + (scratch.slot_rows + row), row_sum, mask=there)
    at = scratch.partials + slot * scratch.slot_rows * (V_PIECES * COLUMNS)
    store_rows(at, part * (WIDTH // COLUMNS), o, row * (V_PIECES * COLUMNS), there)


@gluon.jit
def store_log_sum(log_sum, query, head, there, item, batch, rows):
    """Write the log-sum-exp of rows, where it is asked for."""
    if rows.lse is not None:
        at = item.b.to(gl.int64) * rows.stride_lb
        if batch.cu_q is not None:
            at = gl.load(batch.cu_q + item.b).to(gl.int64) * rows.stride_ls
        places = query.to(gl.int64) * rows.stride_ls + head.to(gl.int64) * rows.stride_lh
        gl.store(rows.lse + at + places, log_sum, mask=there)


@gluon.jit
def out_places(query, head, item, batch, rows):
    """(where the results of a sequence begin, and those of rows from there on)."""
    start = item.b.to(gl.int64) * (rows.stride_ob * 8)
    if batch.cu_q is not None:
        start = gl.load(batch.cu_q + item.b).to(gl.int64) * (rows.stride_os * 8)
    return start, query.to(gl.int64) * (rows.stride_os * 8) + head * (rows.stride_oh * 8)


@gluon.jit
def finish_part(row_max, row_sum, o, part, query, head, there, item, batch, rows, WIDTH: gl.constexpr):
    """Write some columns of rows, and with the first of them their log-sum-exp."""
    factor, log_sum = normal(row_max, row_sum, head, there, rows)
    if part == 0:
        store_log_sum(log_sum, query, head, there, item, batch, rows)
    start, offsets = out_places(query, head, item, batch, rows)
    store_rows(rows.out + start, part * (WIDTH // COLUMNS), o * factor[:, None], offsets, there)


@gluon.jit
def complete(counter, count, before):
    """Whether all ``count`` have been counted, ``before`` of them when this program's were; if not, it looks again a few times: the one
    that comes last finds all there and need not wait, so none has to."""
    seen, looks = before, 0
    while (seen < count) & (looks < LOOKS):
        seen = gl.atomic_add(counter, 0, sem="acquire")
        looks += 1
    meet()
    return seen >= count


@gluon.jit
def pieces_of(count, WIDTH: gl.constexpr):
    """Pieces of MERGED_ROWS rows and WIDTH columns that so many rows have."""
    return (count + MERGED_ROWS - 1) // MERGED_ROWS * (V_PIECES * COLUMNS // WIDTH)


@gluon.jit
def merge_some(scratch, claims, first, members, kept, item, count, batch, rows, ONE: gl.constexpr, WIDTH: gl.constexpr):
    """Merge pieces of a tile until there are none that another program has not begun; how many that were."""
    pieces = pieces_of(count, WIDTH)
    done, piece = gl.to_tensor(0), gl.atomic_add(claims, 1, sem="relaxed")
    while piece < pieces:
        merge_piece(scratch, first, members, kept, item, piece, count, batch, rows, ONE, WIDTH)
        done += 1
        piece = gl.atomic_add(claims, 1, sem="relaxed")
    meet()  # all threads have stored before one of them says so
    return done, pieces


@gluon.jit
def set_back(scratch, item, batch):
    """The last program that has looked at the counters of splits that are one group sets them back for the next launch."""
    bound = (scratch.split_bound + MERGED - 1) // MERGED
    counters = scratch.arrived + tile_of(scratch, item, batch) * (2 * bound + 3)
    if gl.atomic_add(counters, 1, sem="relaxed") == item.splits - 1:
        gl.atomic_xchg(counters + 1, 0, sem="relaxed")
        gl.atomic_xchg(counters, 0, sem="relaxed")
    meet()


@gluon.jit
def merge_group(scratch, item, batch, rows, items, ONE: gl.constexpr, PLANNED: gl.constexpr, WIDTH: gl.constexpr):
    """Splits that are one group: each of their programs merges its share of the pieces once all are done.

    It looks for the others some times, then leaves its share to the last one and says so where it counts: of that one number what is
    there and what was left to it come in one piece, so whoever finds all there before it has said so merges its share after all.
    """
    count = gl.minimum(item.q_len * batch.group - item.tile * TILE_M, TILE_M)
    bound = (scratch.split_bound + MERGED - 1) // MERGED
    counters = scratch.arrived + tile_of(scratch, item, batch) * (2 * bound + 3)
    before = gl.atomic_add(counters + 1, 1, sem="acq_rel")
    done, left, looks = before % LEFT_TO_LAST + 1, gl.to_tensor(0), 0
    share = gl.where(done == item.splits, before // LEFT_TO_LAST, 0) | (1 << item.split)
    while (done < item.splits) & (left == 0):
        if looks < LOOKS:
            done = gl.atomic_add(counters + 1, 0, sem="acquire") % LEFT_TO_LAST
        else:
            done = gl.atomic_add(counters + 1, LEFT_TO_LAST << item.split, sem="acq_rel") % LEFT_TO_LAST
            left = gl.where(done < item.splits, 1, 0)
        looks += 1
    if PLANNED == 0:
        arrive(
            items.left_empty, gl.to_tensor(0)
        )  # the warpgroup of the scores, which has nothing else to do, sets back
    else:
        meet()
    if left == 0:
        first = first_slot(scratch, item, batch)
        for piece in range(pieces_of(count, WIDTH)):
            if (share >> piece % item.splits) & 1 > 0:
                merge_piece(scratch, first, item.splits, -1, item, piece, count, batch, rows, ONE, WIDTH)
    if PLANNED > 0:
        set_back(scratch, item, batch)


@gluon.jit
def merge_groups(scratch, item, batch, rows, ONE: gl.constexpr, WIDTH: gl.constexpr):
    """The programs of MERGED splits of a tile that are there when all of these are done merge them, and then the groups: always in the
    order of the keys, a piece of the tile each."""
    count = gl.minimum(item.q_len * batch.group - item.tile * TILE_M, TILE_M)
    group, groups = item.split // MERGED, (item.splits + MERGED - 1) // MERGED
    bound = (scratch.split_bound + MERGED - 1) // MERGED
    # How many programs are done with the tile, how many of its pieces are merged of all groups, and how many are begun; for each group,
    # how many of its splits are done, and how many of its pieces are begun.
    counters = scratch.arrived + tile_of(scratch, item, batch) * (2 * bound + 3)
    slot, of_group = first_slot(scratch, item, batch), counters + 3 + 2 * group
    members = gl.minimum(item.splits - group * MERGED, MERGED)
    if complete(of_group, members, gl.atomic_add(of_group, 1, sem="acq_rel") + 1):
        kept = gl.where(groups > 1, slot + scratch.split_bound + group, -1)
        done, pieces = merge_some(
            scratch, of_group + 1, slot + group * MERGED, members, kept, item, count, batch, rows, ONE, WIDTH
        )
        if groups > 1:
            if complete(counters + 1, groups * pieces, gl.atomic_add(counters + 1, done, sem="acq_rel") + done):
                merge_some(
                    scratch, counters + 2, slot + scratch.split_bound, groups, -1, item, count, batch, rows, ONE, WIDTH
                )
    # Set back for the next launch by the last program that looks at them: what each has looked at it has seen by then.
    if gl.atomic_add(counters, 1, sem="relaxed") == item.splits - 1:
        for i in range(3 + 2 * groups):
            gl.atomic_xchg(counters + i, 0, sem="relaxed")
    meet()


@gluon.jit
def merge(scratch, item, batch, rows, items, ONE: gl.constexpr, PLANNED: gl.constexpr, TURNS: gl.constexpr):
    """Splits of a tile become results, in their order."""
    if TURNS:
        if item.splits <= MERGED:
            merge_group(scratch, item, batch, rows, items, ONE, PLANNED, FEW_COLUMNS)
        else:
            merge_groups(scratch, item, batch, rows, ONE, FEW_COLUMNS)
    else:
        merge_groups(scratch, item, batch, rows, ONE, MERGED_COLUMNS)


# -- softmax role
@gluon.jit
def with_chunks_before(piece, number, row_max, row_sum, o, m, row, count, link, items, batch, scratch):
    """(maxima, sums, left half of O, next message) of a chunk and those before it of its group, or of all; what waits for the next one."""
    chunks = piece.chunks
    if (number == piece.from_chunk) & (number > 0):
        take_over(scratch, batch, 0)
        for i in gl.static_range(4):
            items.stats.index(i).store(gl.load(sums_parked(scratch, piece.place, i) + row))
    for level in range(2):
        if joins(number, chunks, level):
            row_max, before, after = weights(items.stats.index(2 * level).load(SCORE_ROWS), row_max)
            row_sum = blend(items.stats.index(2 * level + 1).load(SCORE_ROWS), before, row_sum, after)
            at = parked(scratch, piece.place, level, 0)
            if goes_on(number, chunks, level):
                known = first_parked(at, count)
                tell(link, m, (before, after))
                o = joined(known, at, count, o, before, after)
            else:
                added(o, at, count, before, after)
                tell(link, m, (before, after))  # afterwards: the right half leaves while the next scores are made
            m += 1
    items.stats.index(2 * level_of(number)).store(row_max)
    items.stats.index(2 * level_of(number) + 1).store(row_sum)
    if starts(number, chunks):
        park_all(o, parked(scratch, piece.place, level_of(number), 0), count)
        tell(link, m, ())
        m += 1
    return row_max, row_sum, o, m


@gluon.jit
def wait_apart(piece, number, row_max, row_sum, o, m, row, count, link, items, batch, scratch):
    """The next message, once what a chunk has waits apart, alone or with those before it of its group."""
    first = first_together(piece, number)
    last = last_together(piece, first)
    at, sums, later = kept_apart(scratch, piece, last, 0), kept_apart(scratch, piece, last, 2) + row, number > first
    if piece.grouped:
        later = number % MERGED > 0
        if later & (number == piece.from_chunk):
            take_over(scratch, batch, 0, 1)
            items.stats.index(0).store(gl.load(sums))
            items.stats.index(1).store(gl.load(sums + TILE_M))
    if later:
        row_max, before, after = weights(items.stats.index(0).load(SCORE_ROWS), row_max)
        row_sum = blend(items.stats.index(1).load(SCORE_ROWS), before, row_sum, after)
        added(o, at, count, before, after)
        tell(link, m, (before, after))
    else:
        park_all(o, at, count)
        tell(link, m, ())
    items.stats.index(0).store(row_max)
    items.stats.index(1).store(row_sum)
    gl.store(sums, row_max)
    gl.store(sums + TILE_M, row_sum)
    return m + 1


@gluon.jit
def end_item(
    piece, row_max, row_sum, o, m, link, items, batch, rows, scratch, ONE: gl.constexpr, CHAINED: gl.constexpr
):
    """The next message, once the left half of an item has become results, or waits for another program."""
    item = piece.item
    row = gl.arange(0, TILE_M, layout=SCORE_ROWS)
    there = item.tile * TILE_M + row < item.q_len * batch.group
    _, head = queries_and_heads(batch, item, row, ONE)
    factor, _ = normal(row_max, row_sum, head, there, rows)
    state = (row_max, row_sum, (o,))
    if piece.to_chunk < piece.chunks:
        if CHAINED:
            for i in gl.static_range(4):
                gl.store(sums_parked(scratch, piece.place, i) + row, items.stats.index(i).load(SCORE_ROWS))
            hand_over(scratch, 0)
    else:
        tell(link, m, (factor,))
        m += 1
        if CHAINED:
            finish(state, row, there, item, batch, rows, ONE)
        elif item.splits == 1:
            finish(state, row, there, item, batch, rows, ONE)
        else:
            keep(scratch, first_slot(scratch, item, batch) + item.split, state, row, there)
    return m


@gluon.jit
def attend_item(
    piece,
    turn,
    n,
    m,
    ring,
    link,
    items,
    batch,
    rows,
    scratch,
    CAPPED: gl.constexpr,
    ONE: gl.constexpr,
    CHAINED: gl.constexpr,
):
    """One piece from its Q to the left half of its results, or of its part of them."""
    item = piece.item
    scale_log2 = rows.scale_log2
    if rows.k_scales is not None:
        scale_log2 *= gl.load(rows.k_scales + item.b * rows.stride_kb)
    row = gl.arange(0, TILE_M, layout=SCORE_ROWS)
    diagonal = item.k_len - item.q_len
    query, _ = queries_and_heads(batch, item, row, ONE)
    if ONE:
        query = 0
    first_key = query + diagonal - batch.left
    last_key = gl.minimum(query + diagonal + batch.right, item.k_len - 1)
    # Keys that all rows see.
    whole_begin = item.high + diagonal - batch.left
    whole_end = gl.minimum(item.low + diagonal + batch.right + 1, item.k_len)

    row_max = gl.full([TILE_M], LOWEST, gl.float32, layout=SCORE_ROWS)  # in base 2
    row_sum = gl.zeros([TILE_M], gl.float32, layout=SCORE_ROWS)
    total = gl.zeros([TILE_M, HALF], gl.float32, layout=ACCUMULATOR)
    chunks = piece.chunks
    count = item.q_len * batch.group - item.tile * TILE_M
    wait(items.q_full, turn)
    fence_async_shared()  # the load warp's copies are not the copy engine's
    for number in range(piece.from_chunk, piece.to_chunk):
        begin, end = chunk_of(batch, item, chunks, piece.first, piece.blocks, number)
        row_max = gl.full([TILE_M], LOWEST, gl.float32, layout=SCORE_ROWS)
        row_sums = partial_sums(gl.zeros([TILE_M, TILE_N], gl.float32, layout=SCORES))
        state = (row_max, row_sums, gl.zeros([TILE_M, HALF], gl.float32, layout=ACCUMULATOR))
        for key in range(begin, end, TILE_N):
            state = attend(
                items,
                turn,
                ring,
                link,
                n,
                m,
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
            m += 1
        if (number + 1 == piece.to_chunk) & piece.over:
            arrive(items.q_empty, turn)  # here: in the loop over blocks all of them would meet for it
        row_max, row_sums, o = state
        row_sum = gl.convert_layout(gl.sum(row_sums, 1), SCORE_ROWS)
        if rows.v_scales is not None:
            o = o * gl.load(rows.v_scales + item.b * rows.stride_vb)
        if CHAINED:
            if piece.apart > 0:
                m = wait_apart(piece, number, row_max, row_sum, o, m, row, count, link, items, batch, scratch)
            else:
                row_max, row_sum, o, m = with_chunks_before(
                    piece, number, row_max, row_sum, o, m, row, count, link, items, batch, scratch
                )
        total = o
    if CHAINED:
        if leaves_group(piece):
            hand_over(scratch, 0, 1)
    if piece.apart == 0:
        m = end_item(piece, row_max, row_sum, total, m, link, items, batch, rows, scratch, ONE, CHAINED)
    if not CHAINED:
        wait_empty(items.left_empty, turn)
        meet()  # all threads have stored before one of them says so
        arrive(items.left, turn)
    return n, m


@gluon.jit
def score_turned(item, turn, n, ring, link, items, batch, scratch):
    """Scores of a split of few rows, as (key, row), for the warpgroup that merges; then what that one's counters need."""
    wait(items.q_full, turn)
    fence_async_shared()  # the load warp's copies are not the copy engine's
    for _ in range(item.begin, item.end, TILE_N):
        # Not the next block's scores under this one's softmax: its slot is free only once this one's values are multiplied.
        s = warpgroup_mma_wait(0, deps=[scores_turned(items, ring, n)])
        if ring.tail_empty is not None:
            arrive(ring.tail_empty, n)
        wait_empty(link.weighed, n)
        link.scores.index(n % 2).store(s)
        meet()
        arrive(link.scored, n)
        n += 1
    arrive(items.q_empty, turn)
    wait_empty(items.left_empty, turn)
    arrive(items.left, turn)
    if (item.splits > 1) & (item.splits <= MERGED):
        wait(items.left_empty, turn)
        set_back(scratch, item, batch)
    return n


@gluon.jit
def attend_turned(item, turn, n, m, ring, link, items, batch, rows, scratch, CAPPED: gl.constexpr, ONE: gl.constexpr):
    """Scores and softmax of a split of few rows; what its rows have left of maxima and sums."""
    scale_log2 = rows.scale_log2
    if rows.k_scales is not None:
        scale_log2 *= gl.load(rows.k_scales + item.b * rows.stride_kb)
    held: gl.constexpr = items.q.shape[1]
    scores: gl.constexpr = TURNED_SCORES_8 if held == 8 else TURNED_SCORES_16 if held == 16 else TURNED_SCORES_32
    score_rows: gl.constexpr = gl.SliceLayout(1, scores)
    row = gl.arange(0, held, layout=score_rows)
    there = item.tile * TILE_M + row < item.q_len * batch.group
    diagonal = item.k_len - item.q_len
    query, head = queries_and_heads(batch, item, row, ONE)
    seen = gl.to_tensor(0) if ONE else query
    first_key = seen + diagonal - batch.left
    last_key = gl.minimum(seen + diagonal + batch.right, item.k_len - 1)
    whole_begin = item.high + diagonal - batch.left
    whole_end = gl.minimum(item.low + diagonal + batch.right + 1, item.k_len)
    row_max = gl.full([held], LOWEST, gl.float32, layout=score_rows)
    state = row_max, partial_sums(gl.zeros([held, TILE_N], gl.float32, layout=scores))
    if link.scores is None:
        wait(items.q_full, turn)
        fence_async_shared()  # the load warp's copies are not the copy engine's
    for key in range(item.begin, item.end, TILE_N):
        # Not the next block's scores under this one's softmax: its slot is free only once this one's values are multiplied.
        if link.scores is None:
            s = warpgroup_mma_wait(0, deps=[scores_turned(items, ring, n)])
            if ring.tail_empty is not None:
                arrive(ring.tail_empty, n)
            s = gl.convert_layout(gl.permute(s, (1, 0)), scores)
        else:
            wait(link.scored, n)
            s = link.scores.index(n % 2).permute((1, 0)).load(scores)
            arrive(link.weighed, n)
        state = weigh_turned(
            s,
            link,
            m,
            key,
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
        m += 1
    if link.scores is None:
        arrive(items.q_empty, turn)
    row_max, row_sums = state
    row_sum = gl.convert_layout(gl.sum(row_sums, 1), score_rows)
    factor, log_sum = normal(row_max, row_sum, head, there, rows)
    wait_empty(link.taken, m)
    link.factors.index(m % 2).store(factor)
    meet()
    arrive(link.told, m)
    m += 1
    if item.splits == 1:
        store_log_sum(log_sum, query, head, there, item, batch, rows)
    else:
        sums = sums_of(scratch, first_slot(scratch, item, batch) + item.split)
        gl.store(sums + row, row_max, mask=there)
        gl.store(sums + (scratch.slot_rows + row), row_sum, mask=there)
    if link.scores is None:
        wait_empty(items.left_empty, turn)
        meet()  # all threads have stored before one of them says so
        arrive(items.left, turn)
    return n, m


@gluon.jit
def groups_before(piece, row, items, batch, scratch, waited):
    """Once the program before has joined its groups, maxima and sums of all groups so far."""
    if waited == 0:
        take_over(scratch, batch, 0)
        for i in gl.static_range(2, 4):
            items.stats.index(i).store(gl.load(sums_parked(scratch, piece.place, i) + row))


@gluon.jit
def join_item(piece, turn, n, m, link, items, batch, rows, scratch, ONE: gl.constexpr):
    """The chunks of a piece that were done apart join what other programs have of their tile: those of a group that began before the piece
    what the program before has of it, as soon as that has done its chunks; then each group those before it, one program after the other."""
    row = gl.arange(0, TILE_M, layout=SCORE_ROWS)
    chunks, count = piece.chunks, piece.item.q_len * batch.group - piece.item.tile * TILE_M
    if piece.grouped:
        ended = groups_until(piece)
        if piece.from_chunk >= MERGED:
            take_over(scratch, batch, 0)
        if joins_groups(piece):
            sums = groups_at(scratch, piece, 2) + row
            row_max, row_sum = gl.load(sums), gl.load(sums + TILE_M)
            o = unparked((), groups_at(scratch, piece, 0), count)
            for group in range(first_joined(piece), ended):
                at, sums = group_at(scratch, piece, group, 0), group_at(scratch, piece, group, 2) + row
                known = first_parked(at, count)
                row_max, before, after = weights(row_max, gl.load(sums))
                row_sum = blend(row_sum, before, gl.load(sums + TILE_M), after)
                tell(link, m, (before, after))
                m += 1
                o = joined(known, at, count, o, before, after, True)
            if piece.to_chunk < chunks:
                items.stats.index(2).store(row_max)
                items.stats.index(3).store(row_sum)
                park_all(o, parked(scratch, piece.place, 1, 0), count)
            m = end_item(piece, row_max, row_sum, o, m, link, items, batch, rows, scratch, ONE, True)
        elif ended > 0:
            hand_over(scratch, 0)
    elif piece.apart > 0:
        within, waited = piece.from_chunk % MERGED > 0, gl.where(follows_apart(piece), 0, 1)
        if waited > 0:
            groups_before(piece, row, items, batch, scratch, 0)
        elif within:
            take_over(scratch, batch, 0, 1)
        sums = group_before(scratch, piece, 2) + row
        begun = row < gl.where(within, TILE_M, 0)
        row_max, row_sum = gl.load(sums, mask=begun, other=0.0), gl.load(sums + TILE_M, mask=begun, other=0.0)
        o = unparked((), group_before(scratch, piece, 0), gl.where(within, count, 0))
        number = piece.from_chunk
        while number < piece.to_chunk:
            last = last_together(piece, number)
            ends = ends_group(piece, last)
            if (number % MERGED > 0) | ends:
                at = kept_apart(scratch, piece, last, 0)
                known, sums = first_parked(at, count), kept_apart(scratch, piece, last, 2) + row
                chunk_max, chunk_sum = gl.load(sums), gl.load(sums + TILE_M)
                if number % MERGED > 0:
                    row_max, before, after = weights(row_max, chunk_max)
                    row_sum = blend(row_sum, before, chunk_sum, after)
                    tell(link, m, (before, after))
                    m += 1
                    o = joined(known, at, count, o, before, after, True)
                else:
                    row_max, row_sum, o = chunk_max, chunk_sum, unparked(known, at, count)
            if ends:
                groups_before(piece, row, items, batch, scratch, waited)
                waited = 1
                if last >= MERGED:
                    row_max, before, after = weights(items.stats.index(2).load(SCORE_ROWS), row_max)
                    row_sum = blend(items.stats.index(3).load(SCORE_ROWS), before, row_sum, after)
                    at = parked(scratch, piece.place, 1, 0)
                    known = first_parked(at, count)
                    tell(link, m, (before, after))
                    m += 1
                    o = joined(known, at, count, o, before, after)
                if last + 1 < chunks:
                    items.stats.index(2).store(row_max)
                    items.stats.index(3).store(row_sum)
                    park_all(o, parked(scratch, piece.place, 1, 0), count)
            number = last + 1
        if (ends_group(piece, piece.to_chunk - 1) == 0) & (leaves_group(piece) == 0):
            sums = kept_apart(scratch, piece, piece.to_chunk - 1, 2) + row
            gl.store(sums, row_max)
            gl.store(sums + TILE_M, row_sum)
            park_all(o, kept_apart(scratch, piece, piece.to_chunk - 1, 0), count)
            hand_over(scratch, 0, 1)
        groups_before(piece, row, items, batch, scratch, waited)
        m = end_item(piece, row_max, row_sum, o, m, link, items, batch, rows, scratch, ONE, True)
    return n, m


@gluon.jit
def attend_role(
    ring,
    link,
    items,
    batch,
    rows,
    scratch,
    CAPPED: gl.constexpr,
    ONE: gl.constexpr,
    PLANNED: gl.constexpr,
    CHAINED: gl.constexpr,
    TURNS: gl.constexpr,
):
    """Scores, softmax and the left half of O of every item of this program."""
    n, m, turn = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    if CHAINED:
        deal = deal_of(batch, scratch, PLANNED, 4)
        high, after = deal.high, deal.total
        for back in range(0, batch.count, PLANNED):
            first = (batch.count - 1) // PLANNED * PLANNED - back
            ends, before = ends_before(batch, first, after, deal.whole, PLANNED, 4)
            while high > gl.maximum(deal.low, before):
                piece = piece_of(batch, deal, first, ends, before, high, ONE, True)
                n, m = attend_item(piece, turn, n, m, ring, link, items, batch, rows, scratch, CAPPED, ONE, CHAINED)
                turn += gl.where(piece.over, 1, 0)
                high = piece.low
            after = before
        if deal.apart:
            deal = deal_of(batch, scratch, PLANNED, 4)
            high, after = deal.high, deal.total
            for back in range(0, batch.count, PLANNED):
                first = (batch.count - 1) // PLANNED * PLANNED - back
                ends, before = ends_before(batch, first, after, deal.whole, PLANNED, 4)
                while high > gl.maximum(deal.low, before):
                    piece = piece_of(batch, deal, first, ends, before, high, ONE, False)
                    n, m = join_item(piece, turn, n, m, link, items, batch, rows, scratch, ONE)
                    turn += gl.where(piece.over, 1, 0)
                    high = piece.low
                after = before
    elif PLANNED == 0:
        item, there = own_item(batch, scratch, ONE)
        if there:
            if TURNS:
                score_turned(item, turn, n, ring, link, items, batch, scratch)
            else:
                attend_item(
                    whole_piece(item), turn, n, m, ring, link, items, batch, rows, scratch, CAPPED, ONE, CHAINED
                )
    else:
        done, number = 0, own_copy(gl.program_id(0))
        for first in range(0, batch.count, PLANNED):
            ends = ends_of(batch, first, done, PLANNED, 4)
            total = gl.max(ends, 0)
            while number < total:
                item = item_of(batch, first, ends, done, number, ONE)
                if TURNS:
                    n, m = attend_turned(item, turn, n, m, ring, link, items, batch, rows, scratch, CAPPED, ONE)
                else:
                    n, m = attend_item(
                        whole_piece(item), turn, n, m, ring, link, items, batch, rows, scratch, CAPPED, ONE, CHAINED
                    )
                turn += 1
                number += gl.num_programs(0)
            done = total


# -- right role
@gluon.jit
def right_with_chunks_before(piece, number, o, m, count, link, batch, scratch):
    """(right half of O, next message) as the left warpgroup has the left half."""
    chunks = piece.chunks
    if (number == piece.from_chunk) & (number > 0):
        take_over(scratch, batch, 1)
    for level in range(2):
        if joins(number, chunks, level):
            at = parked(scratch, piece.place, level, 1)
            if goes_on(number, chunks, level):
                known = first_parked(at, count)
                before, after = told(link, m, 2)
                o = joined(known, at, count, o, before, after)
            else:
                before, after = told(link, m, 2)
                added(o, at, count, before, after)
            m += 1
    if starts(number, chunks):
        told(link, m, 0)
        m += 1
        park_all(o, parked(scratch, piece.place, level_of(number), 1), count)
    return o, m


@gluon.jit
def wait_apart_right(piece, number, o, m, count, link, batch, scratch):
    """The same of the right half of O."""
    first = first_together(piece, number)
    at, later = kept_apart(scratch, piece, last_together(piece, first), 1), number > first
    if piece.grouped:
        later = number % MERGED > 0
        if later & (number == piece.from_chunk):
            take_over(scratch, batch, 1, 1)
    if later:
        before, after = told(link, m, 2)
        added(o, at, count, before, after)
    else:
        told(link, m, 0)
        park_all(o, at, count)
    return m + 1


@gluon.jit
def end_right(piece, o, m, link, batch, rows, scratch, ONE: gl.constexpr, CHAINED: gl.constexpr):
    """The next message, once the right half of an item has become results, or waits for another program."""
    item = piece.item
    row = gl.arange(0, TILE_M, layout=ROWS_OF_O)
    there = item.tile * TILE_M + row < item.q_len * batch.group
    if piece.to_chunk < piece.chunks:
        if CHAINED:
            hand_over(scratch, 1)
    else:
        (factor,) = told(link, m, 1)
        m += 1
        if CHAINED:
            finish_half(o * factor[:, None], row, there, item, batch, rows, ONE)
        elif item.splits == 1:
            finish_half(o * factor[:, None], row, there, item, batch, rows, ONE)
        else:
            slot = first_slot(scratch, item, batch) + item.split
            at = scratch.partials + slot * scratch.slot_rows * (V_PIECES * COLUMNS)
            store_rows(at, HALF_PIECES, o, row * (V_PIECES * COLUMNS), there)
    return m


@gluon.jit
def right_item(piece, turn, n, m, ring, link, items, batch, rows, scratch, ONE: gl.constexpr, CHAINED: gl.constexpr):
    """The right half of one piece's O: rescaled, multiplied and merged as the left warpgroup tells."""
    item = piece.item
    total = gl.zeros([TILE_M, HALF], gl.float32, layout=ACCUMULATOR)
    chunks = piece.chunks
    count = item.q_len * batch.group - item.tile * TILE_M
    for number in range(piece.from_chunk, piece.to_chunk):
        begin, end = chunk_of(batch, item, chunks, piece.first, piece.blocks, number)
        o = gl.zeros([TILE_M, HALF], gl.float32, layout=ACCUMULATOR)
        for key in range(begin, end, TILE_N):
            wait(link.told, m)
            o = rescaled(o, link.factors.index(0).load(ROWS_OF_O))
            wait(ring.right_full, n)
            if key + TILE_N > item.k_len:
                clear_rows(ring, n, item.k_len - key, HALF_PIECES)
                meet()  # here, or all blocks would
            o = warpgroup_mma(link.p, ring.halves.index(slot_of(ring, n) * 2 + 1), o, is_async=True)
            o = warpgroup_mma_wait(0, deps=[o])
            arrive(ring.right_empty, n)
            arrive(link.taken, m)
            n += 1
            m += 1
        if rows.v_scales is not None:
            o = o * gl.load(rows.v_scales + item.b * rows.stride_vb)
        if CHAINED:
            if piece.apart > 0:
                m = wait_apart_right(piece, number, o, m, count, link, batch, scratch)
            else:
                o, m = right_with_chunks_before(piece, number, o, m, count, link, batch, scratch)
        total = o
    if CHAINED:
        if leaves_group(piece):
            hand_over(scratch, 1, 1)
    if piece.apart == 0:
        m = end_right(piece, total, m, link, batch, rows, scratch, ONE, CHAINED)
    if not CHAINED:
        wait_empty(items.left_empty, turn)
        meet()
        arrive(items.left, turn)
    return n, m


@gluon.jit
def right_turned(item, turn, n, m, ring, link, items, batch, rows, scratch, ONE: gl.constexpr):
    """O of a split of few rows, as (column, row)."""
    held: gl.constexpr = items.q.shape[1]
    turned: gl.constexpr = TURNED_8 if held == 8 else TURNED_16 if held == 16 else TURNED_32
    low = gl.zeros([HALF, held], gl.float32, layout=turned)
    high = gl.zeros([HALF, held], gl.float32, layout=turned)
    for key in range(item.begin, item.end, TILE_N):
        wait(link.told, m)
        factors = link.factors.index(m % 2).load(gl.SliceLayout(0, turned))
        below = some_below(factors) if held == FEWEST_TURNED else some_of_many_below(factors)
        if below:
            low, high = low * factors[None, :], high * factors[None, :]
        wait(ring.left_full, n)
        wait(ring.right_full, n)
        if key + TILE_N > item.k_len:
            clear_rows(ring, n, item.k_len - key, 0)
            clear_rows(ring, n, item.k_len - key, HALF_PIECES)
        p = link.p.index(m % 2).permute((1, 0))
        low = warpgroup_mma(ring.halves.index(slot_of(ring, n) * 2).permute((1, 0)), p, low, is_async=True)
        high = warpgroup_mma(ring.halves.index(slot_of(ring, n) * 2 + 1).permute((1, 0)), p, high, is_async=True)
        low = warpgroup_mma_wait(1, deps=[low])
        arrive(ring.left_empty, n)
        high = warpgroup_mma_wait(0, deps=[high])
        arrive(ring.right_empty, n)
        arrive(link.taken, m)
        n += 1
        m += 1
    if rows.v_scales is not None:
        v_scale = gl.load(rows.v_scales + item.b * rows.stride_vb)
        low, high = low * v_scale, high * v_scale
    wait(link.told, m)
    factor = link.factors.index(m % 2).load(gl.SliceLayout(0, turned))
    meet()  # all threads have read before one of them says so
    arrive(link.taken, m)
    m += 1
    row = gl.arange(0, held, layout=gl.SliceLayout(0, turned))
    there = item.tile * TILE_M + row < item.q_len * batch.group
    if item.splits == 1:
        query, head = queries_and_heads(batch, item, row, ONE)
        start, offsets = out_places(query, head, item, batch, rows)
        store_turned(rows.out + start, 0, low * factor[None, :], offsets, there)
        store_turned(rows.out + start, HALF, high * factor[None, :], offsets, there)
    else:
        at = scratch.partials + (first_slot(scratch, item, batch) + item.split) * scratch.slot_rows * (
            V_PIECES * COLUMNS
        )
        store_turned(at, 0, low, row * (V_PIECES * COLUMNS), there)
        store_turned(at, HALF, high, row * (V_PIECES * COLUMNS), there)
    wait_empty(items.left_empty, turn)
    meet()  # all threads have stored before one of them says so
    arrive(items.left, turn)
    return n, m


@gluon.jit
def store_turned(pointer, first, o, offsets, there):
    """Half of O, of (column, row)."""
    columns = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, o.type.layout))
    gl.store(pointer + (offsets[None, :] + columns[:, None]), o.to(pointer.dtype.element_ty), mask=there[None, :])


@gluon.jit
def join_right(piece, turn, n, m, link, batch, rows, scratch, ONE: gl.constexpr):
    """The right half of what `join_item` joins."""
    chunks, count = piece.chunks, piece.item.q_len * batch.group - piece.item.tile * TILE_M
    if piece.grouped:
        ended = groups_until(piece)
        if piece.from_chunk >= MERGED:
            take_over(scratch, batch, 1)
        if joins_groups(piece):
            o = unparked((), groups_at(scratch, piece, 1), count)
            for group in range(first_joined(piece), ended):
                at = group_at(scratch, piece, group, 1)
                known = first_parked(at, count)
                before, after = told(link, m, 2)
                m += 1
                o = joined(known, at, count, o, before, after, True)
            if piece.to_chunk < chunks:
                park_all(o, parked(scratch, piece.place, 1, 1), count)
            m = end_right(piece, o, m, link, batch, rows, scratch, ONE, True)
        elif ended > 0:
            hand_over(scratch, 1)
    elif piece.apart > 0:
        within, waited = piece.from_chunk % MERGED > 0, gl.where(follows_apart(piece), 0, 1)
        if waited > 0:
            take_over(scratch, batch, 1)
        elif within:
            take_over(scratch, batch, 1, 1)
        o = unparked((), group_before(scratch, piece, 1), gl.where(within, count, 0))
        number = piece.from_chunk
        while number < piece.to_chunk:
            last = last_together(piece, number)
            ends = ends_group(piece, last)
            if (number % MERGED > 0) | ends:
                at = kept_apart(scratch, piece, last, 1)
                known = first_parked(at, count)
                if number % MERGED > 0:
                    before, after = told(link, m, 2)
                    m += 1
                    o = joined(known, at, count, o, before, after, True)
                else:
                    o = unparked(known, at, count)
            if ends:
                if waited == 0:
                    take_over(scratch, batch, 1)
                waited = 1
                if last >= MERGED:
                    at = parked(scratch, piece.place, 1, 1)
                    known = first_parked(at, count)
                    before, after = told(link, m, 2)
                    m += 1
                    o = joined(known, at, count, o, before, after)
                if last + 1 < chunks:
                    park_all(o, parked(scratch, piece.place, 1, 1), count)
            number = last + 1
        if (ends_group(piece, piece.to_chunk - 1) == 0) & (leaves_group(piece) == 0):
            park_all(o, kept_apart(scratch, piece, piece.to_chunk - 1, 1), count)
            hand_over(scratch, 1, 1)
        if waited == 0:
            take_over(scratch, batch, 1)
        m = end_right(piece, o, m, link, batch, rows, scratch, ONE, True)
    return n, m


@gluon.jit
def finish_half(o, row, there, item, batch, rows, ONE: gl.constexpr):
    """Write the right half of rows of a tile."""
    query, head = queries_and_heads(batch, item, row, ONE)
    start, offsets = out_places(query, head, item, batch, rows)
    store_rows(rows.out + start, HALF_PIECES, o, offsets, there)


@gluon.jit
def right_role(
    ring,
    link,
    items,
    batch,
    rows,
    scratch,
    ONE: gl.constexpr,
    PLANNED: gl.constexpr,
    CHAINED: gl.constexpr,
    TURNS: gl.constexpr,
):
    """The right half of O of every item of this program."""
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
    n, m, turn = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    if CHAINED:
        deal = deal_of(batch, scratch, PLANNED, 4)
        high, after = deal.high, deal.total
        for back in range(0, batch.count, PLANNED):
            first = (batch.count - 1) // PLANNED * PLANNED - back
            ends, before = ends_before(batch, first, after, deal.whole, PLANNED, 4)
            while high > gl.maximum(deal.low, before):
                piece = piece_of(batch, deal, first, ends, before, high, ONE, True)
                n, m = right_item(piece, turn, n, m, ring, link, items, batch, rows, scratch, ONE, CHAINED)
                turn += gl.where(piece.over, 1, 0)
                high = piece.low
            after = before
        if deal.apart:
            deal = deal_of(batch, scratch, PLANNED, 4)
            high, after = deal.high, deal.total
            for back in range(0, batch.count, PLANNED):
                first = (batch.count - 1) // PLANNED * PLANNED - back
                ends, before = ends_before(batch, first, after, deal.whole, PLANNED, 4)
                while high > gl.maximum(deal.low, before):
                    piece = piece_of(batch, deal, first, ends, before, high, ONE, False)
                    n, m = join_right(piece, turn, n, m, link, batch, rows, scratch, ONE)
                    turn += gl.where(piece.over, 1, 0)
                    high = piece.low
                after = before
    elif PLANNED == 0:
        item, there = own_item(batch, scratch, ONE)
        if there:
            if TURNS:
                right_turned(item, turn, n, m, ring, link, items, batch, rows, scratch, ONE)
            else:
                right_item(whole_piece(item), turn, n, m, ring, link, items, batch, rows, scratch, ONE, CHAINED)
    else:
        done, number = 0, own_copy(gl.program_id(0))
        for first in range(0, batch.count, PLANNED):
            ends = ends_of(batch, first, done, PLANNED, 4)
            total = gl.max(ends, 0)
            while number < total:
                item = item_of(batch, first, ends, done, number, ONE)
                if TURNS:
                    n, m = right_turned(item, turn, n, m, ring, link, items, batch, rows, scratch, ONE)
                else:
                    n, m = right_item(
                        whole_piece(item), turn, n, m, ring, link, items, batch, rows, scratch, ONE, CHAINED
                    )
                turn += 1
                number += gl.num_programs(0)
            done = total


@gluon.jit
def wide(pieces, COUNT: gl.constexpr):
    """Pieces as halves of V's columns."""
    reinterpret: gl.constexpr = pieces.reinterpret if REINTERPRET_IS_PUBLIC else pieces._reinterpret
    return reinterpret(pieces.dtype, [COUNT, TILE_N, HALF], SWIZZLED)


@gluon.jit
def in_boxes(pieces, desc, ROWS: gl.constexpr):
    """Pieces of Q as boxes of some rows."""
    reinterpret: gl.constexpr = pieces.reinterpret if REINTERPRET_IS_PUBLIC else pieces._reinterpret
    return reinterpret(
        pieces.dtype, [Q_SLOTS * QK_PIECES * (pieces.shape[1] // ROWS), 1, ROWS, 1, COLUMNS], desc.layout
    )


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
def attention(q_ptr, k_desc, q_desc, out, lse, sinks, cu_q, cu_k, used_k, table, slots, k_scales, v_scales, partials,
              arrived, stride_qb, stride_qs, stride_qh, stride_ob, stride_os, stride_oh, stride_lb, stride_ls,
              stride_lh, stride_table, stride_kb, stride_kg, stride_vb, stride_vg, count, heads_kv, group, seqlen_q,
              seqlen_k, split_bits, split_log2, left, right, rows_min, rows_max, split_bound, slot_rows, split_tiles,
              scale_log2, cap_log2, PAGE: gl.constexpr, CAPPED: gl.constexpr, ONE: gl.constexpr, PLANNED: gl.constexpr,
              Q_ROWS: gl.constexpr, CHAINED: gl.constexpr, BOXED: gl.constexpr):  # fmt: skip
    """Allocate, set up the barriers, and start the roles; every program takes each num_programs-th item of the batch, or a run of chunks."""
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
    gl.inline_asm_elementwise(DECLARE, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
    # Few rows of splits that are dealt out: what their Q leaves room for is one more block.
    turns: gl.constexpr = Q_ROWS <= MOST_TURNED and not CHAINED
    held: gl.constexpr = Q_ROWS if turns else TILE_M
    q = gl.allocate_shared_memory(k_desc.dtype, [QK_PIECES, held, COLUMNS], SWIZZLED)
    if Q_ROWS < TILE_M and not turns:
        for i in gl.static_range(QK_PIECES):
            q.index(i).store(gl.zeros([TILE_M, COLUMNS], k_desc.dtype, layout=LOADED))
    stats = None
    if CHAINED:
        stats = gl.allocate_shared_memory(gl.float32, [4, TILE_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        for i in gl.static_range(4):
            stats.index(i).store(gl.zeros([TILE_M], gl.float32, layout=SCORE_ROWS))
    # Chunks leave nothing: the compiler would give barriers that nobody waits at the memory of a block, where a barrier that was never invalidated is
    # still one to the GPU when it puts the kernel aside for another process.
    left_slots: gl.constexpr = 1 if PLANNED == 0 else LEFT_SLOTS
    left, left_empty = None, None
    if not CHAINED:
        left, left_empty = barriers(left_slots), barriers(left_slots)
    items = Items(
        q,
        q if turns else wide(q, 2),
        in_boxes(q, q_desc, Q_ROWS) if BOXED else q,
        barriers(Q_SLOTS),
        barriers(Q_SLOTS),
        left,
        left_empty,
        stats,
    )
    # V's columns of all slots before the tails, of which two are enough: scores are all that needs them.
    in_flight: gl.constexpr = TURNED_SLOTS if turns and Q_ROWS == FEWEST_TURNED else SLOTS
    pieces, boxes = allocate_blocks(k_desc, V_PIECES, in_flight)
    tail, tail_boxes = allocate_blocks(k_desc, TAIL_PIECES, SLOTS)
    tail_full, tail_empty = None, None
    if in_flight > SLOTS:
        tail_full, tail_empty = barriers(SLOTS), barriers(SLOTS)
    ring = Ring(
        boxes,
        pieces,
        wide(pieces, in_flight * 2),
        tail_boxes,
        tail,
        barriers(in_flight),
        barriers(in_flight),
        barriers(in_flight),
        barriers(in_flight),
        tail_full,
        tail_empty,
    )
    factors = gl.allocate_shared_memory(gl.float32, [2, held], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    messages: gl.constexpr = 2 if turns else 1
    p = gl.allocate_shared_memory(k_desc.dtype, [2, held, TILE_N] if turns else [held, TILE_N], SWIZZLED)
    scores, scored, weighed = None, None, None
    if turns and PLANNED == 0:
        scores = gl.allocate_shared_memory(gl.float32, [2, TILE_N, held], gl.SwizzledSharedLayout(2, 1, 8, [1, 0]))
        scored, weighed = barriers(2), barriers(2)
    link = Link(factors, p, barriers(messages), barriers(messages), scores, scored, weighed)
    # A thread of the load warp arrives when its copies of Q have landed, or one for the copy engine; both warpgroups when they have left what an item has.
    rounds: gl.constexpr = 1 if CHAINED else LEFT_SLOTS
    for slot in gl.static_range(rounds):
        set_up(items.q_full, slot, CHAINED, 1 if BOXED else 32)
        set_up(items.q_empty, slot, CHAINED)
        if not CHAINED:
            set_up(left, slot, CHAINED, 2)
            set_up(left_empty, slot, CHAINED)
        if in_flight > SLOTS:
            set_up(tail_full, slot, CHAINED)
            set_up(tail_empty, slot, CHAINED)
        set_up(ring.left_full, slot, CHAINED)
        set_up(ring.right_full, slot, CHAINED)
        set_up(ring.left_empty, slot, CHAINED)
        set_up(ring.right_empty, slot, CHAINED)
        if scores is not None:
            set_up(scored, slot, CHAINED)
            set_up(weighed, slot, CHAINED)
        set_up(link.told, slot, CHAINED)
        set_up(link.taken, slot, CHAINED)
    fence_async_shared()
    if CHAINED:
        gl.warp_specialize([
            (attend_role, (ring, link, items, batch, rows, scratch, CAPPED, ONE, PLANNED, CHAINED, turns)),
            (right_role, (ring, link, items, batch, rows, scratch, ONE, PLANNED, CHAINED, turns)),
            (load_role, (k_desc, q_desc, ring, items, rows, batch, scratch, PAGE, ONE, PLANNED, Q_ROWS, CHAINED, BOXED)),
        ], [4, 1], [224, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (attend_role, (ring, link, items, batch, rows, scratch, CAPPED, ONE, PLANNED, CHAINED, turns)),
            (right_role, (ring, link, items, batch, rows, scratch, ONE, PLANNED, CHAINED, turns)),
            (merge_role, (ring, link, items, batch, rows, scratch, CAPPED, ONE, PLANNED, turns)),
            (load_role, (k_desc, q_desc, ring, items, rows, batch, scratch, PAGE, ONE, PLANNED, Q_ROWS, CHAINED, BOXED)),
        ], [4, 4, 1], [160, 104, 40])  # fmt: skip


def scratch(batch, heads_kv, group, seqlen_q, seqlen_k, sms):
    """(float32 of partial outputs with their maxima and sums, int32 of counters) that a launch works in on a device of `sms`.

    The counters must be 0 before the first launch; every launch leaves them so.
    """
    heads_kv, group = _parts(batch, heads_kv, group, seqlen_k, sms)
    if _chained(
        batch, heads_kv, group, seqlen_q, seqlen_k, sms
    ):  # what waits between chunks, and between groups of them; chunks done apart
        levels = 1 + (_split_bound(seqlen_k, heads_kv * group) > MERGED.value)
        return sms * TILE_M.value * (
            4 + 2 * levels * 512 + _apart(batch, heads_kv, group, seqlen_q, seqlen_k, sms) * 514
        ), 4 * sms
    tiles = batch * heads_kv * _split_tiles(seqlen_q, group)
    # Splits, and groups of them that are merged first; two counters for each group, and three for all.
    splits = _split_bound(seqlen_k, heads_kv * group)
    groups = -(-splits // MERGED.value)
    slots = tiles * (splits + groups) * min(TILE_M.value, seqlen_q * group)
    return max(1, slots * 514), max(1, tiles * (2 * groups + 3))


def _split_limit(heads_kv):
    """Splits that a sequence may have."""
    return MOST_SPLITS.value


def _parts(batch, heads_kv, group, seqlen_k, sms):
    """(key heads, group) as the kernel sees them: query heads of a key head in parts that read the same keys, at most a tile each,
    and smaller where a batch leaves SMs idle.  A row gets the same bits in any part."""
    fitting = [p for p in range(1, group + 1) if group % p == 0 and group // p <= TILE_M.value]
    work = batch * heads_kv * _split_bound(seqlen_k, heads_kv * group)
    parts = max((p for p in fitting if work * p <= sms and group // p >= 8), default=fitting[0])
    return heads_kv * parts, group // parts


def _chained(batch, heads_kv, group, seqlen_q, seqlen_k, sms):
    """Whether programs take in the splits of a tile one after the other, in runs: where dealing splits out, each of which leaves what it
    has and is merged, takes longer, or leaves more than L2 holds."""
    tiles, splits = batch * heads_kv * _split_tiles(seqlen_q, group), _split_bound(seqlen_k, heads_kv * group)
    rounds = -(-tiles * splits // sms)
    rows = min(TILE_M.value, seqlen_q * group)
    few = 128 * max(splits, rounds) > (128 + 3 * rows) * rounds and tiles * splits * rows <= MOST_LEFT
    return splits > 1 and heads_kv <= sms and not few


def _apart(batch, heads_kv, group, seqlen_q, seqlen_k, sms):
    """Chunks of a program that are done apart at most: all of a run that is shorter than a tile."""
    tiles, splits = batch * _split_tiles(seqlen_q, group), _split_bound(seqlen_k, heads_kv * group)
    units = max(tiles * splits, batch * -(-seqlen_q * group // TILE_M.value))
    teams = min(sms, units * heads_kv) // heads_kv
    return min(splits - 1, units // teams + 1, FAR.value if tiles <= teams else MOST_APART.value)


def _split_keys(heads):
    """Keys of a split: sequences of many query heads are work enough in fewer."""
    return SPLIT_OF_MANY if heads >= MANY_HEADS else SPLIT


def _split_tiles(seqlen_q, group):
    """Tiles of a sequence and key head that may be split."""
    return -(-min(seqlen_q, SPLIT_QUERIES.value) * group // TILE_M.value)


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
    if q.shape[-1] != 576 or k.shape[-1] != 576 or v.shape[-1] != 512 or heads_q % heads_kv:
        raise ValueError(
            f"q, k, v: expected head_dim 576, 576, 512 and heads of q a multiple of k's, got {[*q.shape]}, {[*k.shape]}, {[*v.shape]}"
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
    if heads_kv != 1 or v.data_ptr() != k.data_ptr() or v.stride() != k.stride():
        raise ValueError("k, v: expected one key head, and v the first columns of k")
    heads_kv, group = _parts(batch, heads_kv, group, seqlen_k, sms)
    page = 0 if table is None else k.shape[1]
    if page and (page & (page - 1) or not 16 <= page <= 256):
        raise ValueError(f"k: expected pages of 16, 32, 64, 128 or 256 tokens, got {page}")
    left, right = (FAR.value if limit < 0 else min(limit, FAR.value) for limit in window)
    splits, tile_m = _split_bound(seqlen_k, heads_kv * group), TILE_M.value
    # No more than the rows of all fill, nor than all sequences of as many as the launch takes: programs without one would take SMs from the launch after.
    tiles = q.shape[0] * (1 if cu_q is not None else seqlen_q) * group // tile_m + batch
    tiles = min(tiles, batch * -(-min(seqlen_q * group, rows[1]) // tile_m))
    items = heads_kv * max(tiles, batch * splits)
    q_strides, out_strides = ([0, *x.stride()[:-1]][-3:] for x in (q, out))
    if reason := refusal(k, v):
        raise ValueError(reason)
    box = [1, 1, min(page, TILE_N.value) if page else TILE_N.value, COLUMNS.value]
    layout = gl.NVMMASharedLayout.get_default_for(box, KINDS[str(q.dtype)])
    k_boxes = q_boxes = _descriptor(k, box, layout)
    chained = _chained(batch, heads_kv, group, seqlen_q, seqlen_k, sms)
    one, q_rows = (
        seqlen_q == 1 and group <= tile_m,
        next((n for n in ((FEW_ROWS,) if chained else TURNED_ROWS) if seqlen_q * group <= n), tile_m),
    )
    boxed = one and all(n > 0 for n, extent in zip(q.stride(), q.shape) if extent > 1)
    if boxed:
        q_box = [1, q_rows, 1, COLUMNS.value]
        q_boxes = _descriptor(q, q_box, gl.NVMMASharedLayout.get_default_for(q_box, KINDS[str(q.dtype)]))
    lse_strides = (
        (0, 0, 0) if lse is None else (0, 1, lse.stride(0)) if cu_q is not None else (lse.stride(0), 1, lse.stride(1))
    )
    arguments = (
        q, k_boxes, q_boxes, out, lse, sinks, cu_q, cu_k, used_k, table, slots, k_scales, v_scales, *work,
        *(n // 8 for n in (*q_strides, *out_strides)),
        *lse_strides, 0 if table is None else table.stride(0), 
        *(n for x in (k_scales, v_scales) for n in ((0, 0) if x is None else x.stride())), batch, heads_kv, group, seqlen_q, min(seqlen_k, FAR.value), 0 if chained else MOST_SPLITS.value.bit_length() - 1, _split_keys(heads_kv * group).bit_length() - 1, left, right,
        max(rows[0], 1), min(rows[1], FAR.value), splits, min(tile_m, seqlen_q * group), _split_tiles(seqlen_q, group),
    )  # fmt: skip
    planned = FEW_PLANNED if batch <= FEW_PLANNED else MANY_PLANNED
    if own := one and not chained and batch * heads_kv * splits <= sms:
        planned = 0  # each split has a program of its own
    flags = page, capped, one, planned, q_rows, chained, boxed
    return (batch * heads_kv * splits if own else max(1, min(items, PROGRAMS * sms)), 1, 1), arguments, flags


def options_of(flags):
    """Options of a launch with these flags."""
    return CHAINED_OPTIONS if flags[5] else OPTIONS


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

    q, out: (batch, seqlen_q, heads_q, 576 | 512), or (total, heads_q, ...) with cu_seqlens_q.  k, v: (batch, seqlen_k, heads_kv,
    576 | 512), with block_table (batch, pages of a sequence) instead (pages, page size, heads_kv, ...), with cu_seqlens_k (total,
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
