"""Prefill on Hopper for head_dim 64: attention to paged, packed or cached keys, many rows to a sequence.

Query i of a sequence sees keys from left before to right after position i + keys - queries.  One warp takes tiles, the
next one that no program has, and copies Q, another blocks of 64 keys into rings in shared memory, 4 of K and of V
ahead; 3 consumer warpgroups of 64 rows, queries of all heads that share a key head, read them.  Anchored softmax: the
row maximum of the first blocks is the reference of all exponentials, until a row outgrows it.  Keys of a sequence whose
tiles leave SMs idle are parted, by its own lengths and heads alone; parts are merged in one order, whether programs
take one each or a program those of a tile: what a sequence gets depends on it alone.  Runs on sm_90a with triton and
torch alone.
"""

TILECAST = {
    "tilecast": "0.1.0", "family": "hopper_prefill", "machine": "h200-sxm", "targets": ["sm_90a"],
    "pass": "serve",
    "variant": "family=prefill-hopper,warpgroups=3,tile_n=64,kv_stages=4,planned=32,part_keys=768",
    "workload": {"batch": 4, "heads_q": 128, "heads_kv": 32, "seqlen_q": 512, "seqlen_k": 4096, "head_dim_qk": 64, "head_dim_v": 64, "mask": "causal", "window": None, "dtype": "bf16"},
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

WARPGROUPS = gl.constexpr(3)
ROWS = gl.constexpr(
    64
)  # rows of a warpgroup: the M of wgmma; a row is a query of one of the heads that share a key head
TILE_M = gl.constexpr(192)  # rows of a tile
TILE_N = gl.constexpr(64)  # keys of a block
HEAD_DIM_V = gl.constexpr(64)  # columns of V and O
SLOTS = gl.constexpr(4)  # blocks of K and V that are in flight
Q_STAGES = gl.constexpr(2)  # tiles of Q that are there
# Tiles of which it is known what they are: one whose Q has no room yet, and one whose Q is read no more, but whose results are not written.
TOLD = gl.constexpr(Q_STAGES.value + 2)
ASKING = gl.constexpr(3)  # blocks of a tile whose copies are still to be asked for when the next tile is taken
COLUMNS = gl.constexpr(64)  # columns of a piece of a block: 128 bytes, the widest row that shared memory swizzles
QK_PIECES, V_PIECES = gl.constexpr(1), gl.constexpr(1)
Q_ROWS = gl.constexpr(16)  # rows of Q that are copied at a time
PLANNED = gl.constexpr(32)  # sequences that a program looks at together to find its work
APART = gl.constexpr(200)  # nanoseconds that a warpgroup begins a tile after the one before
JOIN_PLANNED = gl.constexpr(128)  # the same of one that merges parts: a thread has one
SMS = gl.constexpr(132)  # what the parts of a sequence alone are to fill
PART_KEYS, MOST_PARTS = gl.constexpr(768), gl.constexpr(32)  # fewest keys of a part, parts of a sequence
JOINED = gl.constexpr(64)  # columns that are merged at a time
JOINED_APART, AHEAD = gl.constexpr(32), gl.constexpr(8)  # the same in a launch of its own, and parts on their way there
UNIT = gl.constexpr(
    ROWS.value * (HEAD_DIM_V.value + 2)
)  # numbers that a warpgroup leaves of a part: O, references and sums of rows
MOST_MERGED = 4  # parts of a tile that its last program merges; of more, a launch of its own
MOST_NUMBERS = 33554432  # of a launch
# Where a program takes in the parts of a tile one after the other, those of tiles of more than CHAIN times its share of all blocks are dealt
# out, while there are PLACES for what they leave; CHAINED of a program, for what its tile has so far.
CHAIN, CHAINED = gl.constexpr(1.25), gl.constexpr(0)
PLACES = gl.constexpr(min(1024, MOST_NUMBERS // (WARPGROUPS.value * UNIT.value)))
MOST_GROUP = 512  # query heads that share a key head
FACTS = gl.constexpr(11)  # numbers that roles tell each other of a tile and a part of its keys
FAR = gl.constexpr(1 << 29)  # more keys than a sequence has, more pages than a pool
GONE = gl.constexpr(1 << 29)  # a number that no tile has
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
KINDS = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16}
# Level 2 of the register allocation, which Triton 3.9 asks for, spills.
OPTIONS = {"num_warps": 4, "maxnreg": 128, "enable_fp_fusion": True, "ptx_options": "--regAllocOptLevel=4"}
JOIN_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
#: Programs that an SM holds at once: as many as are launched where there is work for more.
PROGRAMS = 1
#: Whether a launch may let the one for other rows that comes after begin before it ends, and may begin before the one before has ended.
LEADS, FOLLOWS = True, True


@gluon.jit
def own_copy(x):
    """``x``, opaque to the compiler: what roles compute alike, it would compute once before they part, and spill."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def within(there, columns, eighths):
    """Which columns of rows are there: of rows that are, all, or the first ``eighths`` times 8 of heads with fewer than the kernel's."""
    found = there[:, None]
    if eighths is not None:
        found = found & (columns // 8 < eighths)[None, :]
    return found


@gluon.constexpr_function
def accumulator(columns):
    """wgmma accumulator of ROWS x columns: a row lives in the four lanes of a quad."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def store_layout(columns):
    """Eight neighbouring columns to a thread, so that stores are 16 bytes wide; the exchange stays inside quads."""
    wide = [[0, 32 << bit] for bit in range((columns // 32).bit_length() - 1)]
    registers, lanes = [[0, 1], [0, 2], [0, 4], *wide, [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns])


SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, accumulator(TILE_N)))  # a number to each row of S
OUTGROWN = gl.constexpr(64.0)  # of a thread's keys of a block: 4 x the sum where all are at the reference
LOST = gl.constexpr(2.0**120)  # sums above may be infinite: scaling does not bring them back
# 16 bytes to a thread: rows of Q that a warp copies, and the block of V whose end must be cleared.
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))
COPIED_ROWS = gl.constexpr(gl.SliceLayout(1, COPIED))
LOADED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
LOADED_ROWS = gl.constexpr(gl.SliceLayout(1, LOADED))
# A fact of a tile on its way from role to role, in every thread.
FACT = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
FACT_READ = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

# The sequences of a launch; its tensors of rows (strides in units of 8 elements), and of those Q.
Batch = namedtuple(
    "Batch",
    "cu_q cu_k used_k table slots stride_table count heads_kv group inverse seqlen_q seqlen_k left right rows_min rows_max",
)
Rows = namedtuple(
    "Rows",
    "out lse sinks k_scales v_scales partials arrived stride_ob stride_os stride_oh stride_lb stride_ls stride_lh stride_kb stride_kg stride_vb stride_vg scale_log2 cap_log2 eighths",
)
Queries = namedtuple("Queries", "q stride_b stride_s stride_h eighths")
# A tile: its sequence (-1: there is no other tile), key head, how many rows there are from its first one on, of that row the query
# among all, its position among the keys, and its head in the group; the keys of the sequence.
Item = namedtuple("Item", "b head_kv rows query position head k_len")
# Where the keys of a tile are parted: the first block of the first part, blocks of a part, which one this is, and where the tile's first
# one is kept.
Part = namedtuple("Part", "origin each number slot")
# What is known of a sequence to a thread: its lengths, row tiles, the item after its last one, parts that are dealt out, the first block of
# the first part, blocks of a part, and the place after the last one that its parts have.
Found = namedtuple("Found", "b q_len k_len tiles ends parts origin each places")
# What all rows of an item share: results, keys, what scores are multiplied by and capped at (None: they are not).
Problem = namedtuple("Problem", "out seqlen_k left right scale_log2 raw_log2 cap_log2")
# Positions among the keys of the first and the last of a warpgroup's rows, and of each.
Positions = namedtuple("Positions", "low high each")


# -- shared memory -----------------------------------------------------------------------------------------------------
@gluon.jit
def barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers that complete a phase with every ``ARRIVALS`` arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


# Tiles on their way through shared memory, a buffer to a piece of power-of-two columns: number n in slot n % slots; a lap flips
# phases.  The same memory as tiles, which are multiplied, and as boxes of a page or a part of it, which are copied.
Ring = namedtuple("Ring", "tiles boxes full empty")
# Tiles of rows on their way: what they are, and whether V's rows beyond the keys are cleared.
Items = namedtuple("Items", "facts full asked clean")


@gluon.jit
def tile_at(ring, n):
    """The pieces of tile n as matrices."""
    slots: gl.constexpr = ring.full.shape[0]
    count: gl.constexpr = ring.tiles.shape[0] // slots
    pieces = ()
    for i in gl.static_range(count):
        piece = ring.tiles.index(n % slots * count + i)
        if len(ring.tiles.shape) > 3:
            piece = piece.reshape([TILE_N, HEAD_DIM_V])
        pieces = pieces + (piece,)
    return pieces


@gluon.jit
def wait(ring, n):
    """Until tile n has landed."""
    slots: gl.constexpr = ring.full.shape[0]
    mbarrier.wait(ring.full.index(n % slots), n // slots & 1)


@gluon.jit
def release(ring, n):
    """Tile n is not read again."""
    mbarrier.arrive(ring.empty.index(n % ring.full.shape[0]), count=1)


@gluon.jit
def allocate_blocks(desc, PIECES: gl.constexpr):
    """(tiles, boxes) of SLOTS blocks; a block is PIECES tiles, a tile the boxes of its pages, one after the other."""
    box: gl.constexpr = desc.block_type.shape[2]
    boxes = gl.allocate_shared_memory(desc.dtype, [SLOTS * PIECES * (TILE_N // box), 1, 1, box, COLUMNS], desc.layout)
    reinterpret: gl.constexpr = boxes.reinterpret if REINTERPRET_IS_PUBLIC else boxes._reinterpret
    return reinterpret(desc.dtype, [SLOTS * PIECES, TILE_N, COLUMNS], gl.NVMMASharedLayout(128, 16, 2)), boxes


@gluon.jit
def make_ring(desc, PIECES: gl.constexpr):
    """A ring of blocks of K or V, which all warpgroups release; a block of V that is one box is one tile, multiplied at once."""
    if desc.block_type.shape[3] > COLUMNS:
        boxes = gl.allocate_shared_memory(desc.dtype, [SLOTS, 1, 1, TILE_N, HEAD_DIM_V], desc.layout)
        tiles = boxes
    else:
        tiles, boxes = allocate_blocks(desc, PIECES)
    return Ring(tiles, boxes, barriers(SLOTS, 1), barriers(SLOTS, WARPGROUPS))


@gluon.jit
def make_q_ring(dtype: gl.constexpr):
    """A ring of Q_STAGES tiles, each the rows of its warpgroups; a thread of the warp that copies arrives when its copies have landed."""
    count: gl.constexpr = Q_STAGES * WARPGROUPS
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    boxes = gl.allocate_shared_memory(dtype, [count * QK_PIECES * (ROWS // Q_ROWS), Q_ROWS, COLUMNS], layout)
    reinterpret: gl.constexpr = boxes.reinterpret if REINTERPRET_IS_PUBLIC else boxes._reinterpret
    tiles = reinterpret(dtype, [count * QK_PIECES, ROWS, COLUMNS], layout)
    return Ring(tiles, boxes, barriers(count, 32), barriers(count, 1))


# -- matrix products ---------------------------------------------------------------------------------------------------
@gluon.jit
def issue_qk(q, k):
    """S = Q K^T, asynchronous."""
    s = gl.zeros([ROWS, TILE_N], gl.float32, layout=accumulator(TILE_N))
    for i in gl.static_range(QK_PIECES):
        s = warpgroup_mma(q[i], k[i].permute((1, 0)), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def first_o(v):
    """O before any key, in pieces as wide as V's."""
    columns: gl.constexpr = v.tiles.shape[len(v.tiles.shape) - 1]
    o = ()
    for _ in gl.static_range(HEAD_DIM_V // columns):
        o = o + (gl.zeros([ROWS, columns], gl.float32, layout=accumulator(columns)),)
    return o


@gluon.constexpr_function
def left_operand(o):
    """Layout of P for a product into ``o``: in registers, the same elements in the same threads as in the accumulator."""
    return gl.DotOperandLayout(operand_index=0, parent=o.type.layout, k_width=2)


@gluon.jit
def issue_pv(p, v, o):
    """O += P V, asynchronous."""
    made = ()
    for i in gl.static_range(len(o)):
        made = made + (warpgroup_mma(gl.convert_layout(p, left_operand(o[i])), v[i], o[i], is_async=True),)
    return made


@gluon.jit
def finished(o):
    """O when its products are done."""
    if len(o) == 1:
        made = (warpgroup_mma_wait(0, deps=[o[0]]),)
    else:
        made = warpgroup_mma_wait(0, deps=o)
    return made


# -- work --------------------------------------------------------------------------------------------------------------
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
def parts_of(batch, q_len, k_len):
    """(parts, first block, blocks of a part) of the keys of a sequence: parts that fill the SMs once, or twice where that leaves
    fewer of them idle and keys are enough, from the sequence's own lengths and heads alone."""
    first = gl.maximum(k_len - q_len - batch.left, 0) // TILE_N
    blocks = gl.maximum((k_len + (TILE_N - 1)) // TILE_N - first, 1)
    tiles = gl.maximum((q_len * batch.group + (TILE_M - 1)) // TILE_M, 1) * batch.heads_kv
    twice = 2 * SMS // tiles
    once = twice // 2
    most = gl.minimum(blocks * TILE_N // PART_KEYS, MOST_PARTS)
    parts = gl.minimum(gl.where((twice > 2 * once) & (twice <= most), twice, once), most)
    each = (blocks + gl.maximum(parts, 1) - 1) // gl.maximum(parts, 1)
    return (blocks + each - 1) // each, first, each


@gluon.jit
def shares(batch, q_len, k_len, PARTS: gl.constexpr):
    """(row tiles, parts that are dealt out, 0) of a sequence, from its own lengths alone; no tiles where another kernel takes it."""
    rows = q_len * batch.group
    tiles = gl.where((rows >= batch.rows_min) & (rows <= batch.rows_max), (rows + TILE_M - 1) // TILE_M, 0)
    parts = 1
    if PARTS == 2:
        parts, _, _ = parts_of(batch, q_len, k_len)
    return tiles, parts, 0


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def ends_of(batch, first, done, PLANNED: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr):
    """Of each of PLANNED sequences, the number of the item after its last one."""
    layout: gl.constexpr = gl.BlockedLayout([max(1, PLANNED // (32 * WARPS))], [32], [WARPS], [0])
    b = first + gl.arange(0, PLANNED, layout=layout)
    q_len, k_len = lengths(batch, b, b < batch.count)
    tiles, splits, _ = shares(batch, q_len, k_len, PARTS)
    return done + gl.associative_scan(tiles * splits * batch.heads_kv, 0, plus)


@gluon.jit
def found_from(batch, first, done, place, most, PARTS: gl.constexpr):
    """What is to be known of each of PLANNED sequences from ``first`` on, and blocks of all their tiles.  PARTS 3: parts of longer tiles than ``most`` blocks
    are dealt out, while there are places for what they leave, of which those before have had ``place``."""
    b = first + gl.arange(0, PLANNED, layout=gl.BlockedLayout([max(1, PLANNED // 32)], [32], [1], [0]))
    q_len, k_len = lengths(batch, b, b < batch.count)
    tiles, _, _ = shares(batch, q_len, k_len, 0)
    origin, each, places, blocks = b, b, b, 0.0
    parts = gl.full_like(b, 1)
    if PARTS > 0:
        every, origin, each = parts_of(batch, q_len, k_len)
        if PARTS == 2:
            parts = every
        if PARTS == 3:
            length = (every * each).to(gl.float32)
            blocks = gl.sum(tiles.to(gl.float32) * length, 0)
            parts = gl.where(length > most, every, 1)
            each = gl.where(every > 1, each, FAR)  # tiles of one part are done as where no sequence has any
            places = place + gl.associative_scan(gl.where(parts > 1, tiles * parts * batch.heads_kv, 0), 0, plus)
            parts = gl.where(places <= PLACES + gl.num_programs(0) * CHAINED, parts, 1)
    ends = done + gl.associative_scan(tiles * parts * batch.heads_kv, 0, plus)
    return Found(b, q_len, k_len, tiles, ends, parts, origin, each, places), blocks


@gluon.jit
def tile_of(batch, b, head_kv, q_len, k_len, row):
    """The tile of a sequence and key head that begins with a row."""
    query, start = row // batch.group, 0
    if batch.cu_q is not None:
        start = gl.load(batch.cu_q + b)
    head = row - query * batch.group
    return Item(b, head_kv, q_len * batch.group - row, start + query, query + k_len - q_len, head, k_len)


@gluon.jit
def asked(x, here):
    """What the one thread has that is ``here``."""
    return gl.sum(gl.where(here, x, 0), 0)


@gluon.jit
def item_of(batch, found, done, number, PARTS: gl.constexpr):
    """(item, part of its keys) of a number: heads of a token are neighbours in memory and in the order, and late rows, which see most,
    come first.  What was found out of its sequence is asked of the thread that has it: to find it out again takes a hundred instructions
    more, which no cache near the SM has when a program begins."""
    before = found.ends <= number
    here = gl.min(gl.where(before, FAR, found.b), 0) == found.b
    b, q_len, k_len, tiles = (
        asked(found.b, here),
        asked(found.q_len, here),
        asked(found.k_len, here),
        asked(found.tiles, here),
    )
    index = number - gl.max(gl.where(before, found.ends, done), 0)
    place = index
    head_kv, index = index % batch.heads_kv, index // batch.heads_kv
    part = Part(number, number, number, number)
    if PARTS > 0:
        which = gl.to_tensor(0)
        if PARTS >= 2:
            parts = asked(found.parts, here)
            which, index = index % parts, index // parts
        if PARTS == 2:
            place = number
        if PARTS == 3:
            place += asked(
                gl.where(found.parts > 1, found.places - found.tiles * found.parts * batch.heads_kv, 0), here
            )
        place -= which * batch.heads_kv
        if PARTS == 3:
            which = gl.where(parts > 1, which, -1)
        part = Part(asked(found.origin, here), asked(found.each, here), which, place)
    return tile_of(batch, b, head_kv, q_len, k_len, (tiles - 1 - index) * TILE_M), part


@gluon.jit
def queries_and_heads(batch, item, row):
    """(how many queries after that of an item's first row, query head) of its rows ``row``, fewer than TILE_M."""
    row += item.head
    later = row * batch.inverse >> 20  # row // group, exact: (TILE_M + group) * group < 1 << 20
    return later, item.head_kv * batch.group + row - later * batch.group


@gluon.jit
def start_of(item, stride_b, stride_s):
    """Where an item's first query begins, 64 bits: a tensor may hold more than 2^31 elements."""
    return item.b.to(gl.int64) * stride_b + item.query.to(gl.int64) * stride_s


# -- keys --------------------------------------------------------------------------------------------------------------
@gluon.jit
def edges(batch, item, row, COUNT: gl.constexpr):
    """Positions among the keys of the first and the last of COUNT rows from an item's row ``row`` on."""
    first = item.head + row
    return item.position + (first * batch.inverse >> 20), item.position + ((first + (COUNT - 1)) * batch.inverse >> 20)


@gluon.jit
def key_blocks(batch, item, low, high):
    """The first and the one after the last block of keys that rows at positions ``low`` to ``high`` see, at least one."""
    end = gl.maximum(gl.minimum(high + own_copy(batch.right) + 1, item.k_len), 1)
    end = (end + (TILE_N - 1)) // TILE_N
    return gl.minimum(gl.maximum(low - own_copy(batch.left), 0) // TILE_N, end - 1), end


@gluon.jit
def blocks_of_part(part, number, first, end):
    """The first and the one after the last block of part ``number`` of a tile's blocks; none where the first is not before that."""
    begin = part.origin + number * part.each
    return gl.maximum(first, begin), gl.minimum(end, begin + part.each)


@gluon.jit
def whole_blocks(problem, row):
    """The first and the one after the last block of keys that a warpgroup's rows see whole, before its first row's last key."""
    # The block with that key is done first, whole or not, so that each row has a maximum by then.
    end = gl.maximum(gl.minimum(row.low + problem.right, problem.seqlen_k - 1), 0)
    first = gl.maximum(row.high - problem.left, 0)
    return (first + (TILE_N - 1)) // TILE_N, end // TILE_N


@gluon.jit
def keys_seen(problem, row):
    """The first and the last key that each of ROWS rows sees; last < first: none."""
    return gl.maximum(row.each - problem.left, 0), gl.minimum(row.each + problem.right, problem.seqlen_k - 1)


@gluon.jit
def hide_keys(problem, s, key, row):
    """Scores of keys that a row does not see become -inf; ``key`` is the key of column 0."""
    keys = key + gl.arange(0, TILE_N, layout=gl.SliceLayout(0, s.type.layout))
    first, last = keys_seen(problem, row)
    return gl.where((keys[None, :] >= first[:, None]) & (keys[None, :] <= last[:, None]), s, float("-inf"))


@gluon.jit
def clear_rows(tiles, count):
    """Zeros for the rows of a block of V from ``count`` on, which hold anything: 0 times NaN is NaN."""
    rows = gl.arange(0, TILE_N, layout=LOADED_ROWS)
    for i in gl.static_range(len(tiles)):
        values = tiles[i].load(LOADED)
        tiles[i].store(gl.where((rows < count)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def clear_end(g: gl.constexpr, items, turn, v, n, missing, opens):
    """Clear V's rows beyond the keys in block n, the tile's last: only the last warpgroup surely needs that one, so it does it, and
    says so in every tile, in the part that ``opens`` it."""
    if g == WARPGROUPS - 1:
        if missing > 0:
            wait(v, n)
            clear_rows(tile_at(v, n), TILE_N - missing)
            meet()  # all threads have stored before one of them says so
        if opens:
            mbarrier.arrive(items.clean.index(turn % items.clean.shape[0]), count=1)
    elif missing > 0:
        mbarrier.wait(items.clean.index(turn % items.clean.shape[0]), turn // items.clean.shape[0] & 1)


# -- softmax -----------------------------------------------------------------------------------------------------------
@gluon.jit
def mufu_exp2(x):
    """2^x on the special function unit."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


# Of ROWS query rows: largest score, sums of exponentials (ROWS x 4: lanes only meet at the end), subtracted exponent.
Statistics = namedtuple("Statistics", "row_max row_sums reference")


@gluon.jit
def partial_sums(p):
    """Sums over the columns that one thread holds."""
    return gl.sum(gl.sum(gl.reshape(p, [ROWS, TILE_N // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def reference_of(row_max, problem):
    """What is subtracted in the exponent: for a row without a key so little that its first score outgrows it."""
    return gl.where(row_max == float("-inf"), -1e30, row_max * problem.scale_log2)


@gluon.jit
def online_softmax(s, before, problem):
    """A step of the online softmax: (P, statistics, factor for the O there is)."""
    row_max = gl.maximum(before.row_max, gl.max(s, 1))
    reference = reference_of(row_max, problem)
    shift = reference_of(before.row_max, problem) - reference
    factor = mufu_exp2(gl.where(before.row_max == float("-inf"), float("-inf"), shift))
    p = mufu_exp2(s * problem.scale_log2 - reference[:, None])
    return p, Statistics(row_max, scaled(before.row_sums, factor) + partial_sums(p), reference), factor


@gluon.jit
def scaled(o, factor):
    """O times a number per row."""
    return o * gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout))[:, None]


@gluon.jit
def scaled_pieces(o, factor):
    """O times a number per row."""
    made = ()
    for i in gl.static_range(len(o)):
        made = made + (scaled(o[i], factor),)
    return made


# Gluon's reductions meet all warps at a barrier.  What one warp finds out travels in a PTX register of its own instead.
DECLARE = gl.constexpr(".reg .b32 within; mov.b32 $0, 0;")
VOTE = gl.constexpr("""{ .reg .pred above; setp.gt.f32 above, $2, $4; setp.gt.or.f32 above, $3, $5, above;
vote.sync.any.pred above, above, -1; selp.b32 within, 0, 1, above; mov.b32 $0, $2; mov.b32 $1, $3; }""")
READ = gl.constexpr("mov.b32 $0, within;")


@gluon.jit
def vote(sums, LIMIT: gl.constexpr):
    """Ask the threads of a warp whether one of their sums (ROWS x 4) is above a limit."""
    gl.inline_asm_elementwise(VOTE, "=r,=r,f,f,f,f", [sums, LIMIT], dtype=gl.int32, is_pure=False, pack=2)


@gluon.jit
def some_above():
    """Outcome of this warp's latest vote."""
    return gl.inline_asm_elementwise(READ, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1) == 0


@gluon.jit
def moved(s, p, sums, before, problem):
    """(P, its sums, statistics, factor for O) with the block's maximum as the reference of rows that outgrew theirs."""
    # Row by row, so that a row's result does not depend on its neighbours.
    largest = gl.convert_layout(gl.max(sums, 1), SCORE_ROWS)
    reference = gl.where(largest > OUTGROWN, reference_of(gl.max(s, 1), problem), before.reference)
    factor = mufu_exp2(before.reference - reference)
    p, new_sums, row_sums = scaled(p, factor), scaled(sums, factor), scaled(before.row_sums, factor)
    vote(sums, LOST)
    if some_above():
        lost = largest > LOST
        p = gl.where(lost[:, None], mufu_exp2(s * problem.scale_log2 - reference[:, None]), p)
        lost = gl.convert_layout(lost, gl.SliceLayout(1, sums.type.layout))
        new_sums = gl.where(lost[:, None], partial_sums(p), new_sums)
    return p, new_sums, Statistics(before.row_max, row_sums, reference), factor


@gluon.jit
def mufu_tanh(x):
    """tanh(x) on the special function unit, within 2^-11 of it."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def capped(s, problem):
    """Scores as exponents of 2 that a soft cap has bent, where there is one: cap * tanh(score / cap)."""
    if problem.cap_log2 is not None:
        s = problem.cap_log2 * mufu_tanh(s * (problem.raw_log2 * (0.5 * LN2)))
    return s


@gluon.jit
def row_results(reference, row_sum, row, problem, sinks, heads, there):
    """(inverse of the row sum, log-sum-exp) of ROWS rows: one that saw no key gives 0 and -inf, or its sink."""
    log_sum = reference + gl.log2(row_sum)
    first, last = keys_seen(problem, row)
    empty = last < first
    inverse, log_sum = gl.where(empty, 0.0, 1.0 / row_sum), gl.where(empty, float("-inf"), log_sum)
    if sinks is not None:
        sink = gl.load(sinks + heads, mask=there, other=0.0).to(gl.float32) * LOG2E
        most = gl.maximum(log_sum, sink)
        share = mufu_exp2(log_sum - most)
        total = share + mufu_exp2(sink - most)
        inverse, log_sum = inverse * (share / total), most + gl.log2(total)
    return inverse, log_sum * LN2


# -- load role ---------------------------------------------------------------------------------------------------------
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
def load_tile(desc, boxes, slot, full, pages, head, token, PIECES: gl.constexpr):
    """Copy a block of K or V to a slot: a box of each page and piece."""
    per: gl.constexpr = len(pages)
    mbarrier.expect(full, PIECES * TILE_N * COLUMNS * 2)
    for piece in gl.static_range(PIECES):
        for i in gl.static_range(per):
            box = boxes.index((slot * PIECES + piece) * per + i)
            copy_tile(desc, [pages[i], head, token, piece * COLUMNS], full, box)


@gluon.jit
def load_block(ring, n, desc, pages, head, token, PIECES: gl.constexpr):
    """Copy a block of K or V as number n, once its slot is free."""
    slot = n % SLOTS
    mbarrier.wait(ring.empty.index(slot), n // SLOTS & 1 ^ 1)
    if desc.block_type.shape[3] > COLUMNS:
        mbarrier.expect(ring.full.index(slot), desc.block_type.nbytes)
        copy_tile(desc, [pages[0], head, token, 0], ring.full.index(slot), ring.boxes.index(slot))
    else:
        load_tile(desc, ring.boxes, slot, ring.full.index(slot), pages, head, token, PIECES)


@gluon.jit
def load_q(q, number, item, row, queries, batch):
    """Copy ROWS rows of Q from an item's row ``row`` on as tile ``number``; rows that are none become zeros."""
    slot = number % q.full.shape[0]
    mbarrier.wait(q.empty.index(slot), number // q.full.shape[0] & 1 ^ 1)
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, COPIED))
    first = queries.q + start_of(item, queries.stride_b * 8, queries.stride_s * 8)
    for part in range(ROWS // Q_ROWS):
        each = row + part * Q_ROWS + gl.arange(0, Q_ROWS, layout=COPIED_ROWS)
        there = each < item.rows
        later, head = queries_and_heads(batch, item, each)
        offsets = later * (queries.stride_s * 8) + head * (queries.stride_h * 8)
        for piece in gl.static_range(QK_PIECES):
            box = q.boxes.index((slot * QK_PIECES + piece) * (ROWS // Q_ROWS) + part)
            copy_rows(
                box,
                first + (offsets[:, None] + (piece * COLUMNS + columns)[None, :]),
                mask=within(there, piece * COLUMNS + columns, queries.eighths),
            )
    async_copy.mbarrier_arrive(q.full.index(slot), increment_count=False)


@gluon.jit
def tell(items, turn, item, part, PARTS: gl.constexpr):
    """Say what the tile of a turn is: its Q comes when there is room, its K and V may come before."""
    slot = turn % TOLD
    for i in gl.static_range(len(item)):
        items.facts.index(slot * FACTS + i).store(gl.full([1], item[i], gl.int32, layout=FACT))
    if PARTS > 0:
        for i in gl.static_range(len(part)):
            items.facts.index(slot * FACTS + (len(item) + i)).store(gl.full([1], part[i], gl.int32, layout=FACT))
    meet()  # all threads have stored before one of them says so
    mbarrier.arrive(items.full.index(slot), count=1)


@gluon.jit
def told(items, turn, PARTS: gl.constexpr, READ: gl.constexpr):
    """What the tile of a turn is, and the part of its keys, as a role that has facts in layout ``READ``."""
    mbarrier.wait(items.full.index(turn % TOLD), turn // TOLD & 1)
    return recalled(items, turn, PARTS, READ)


@gluon.jit
def recalled(items, turn, PARTS: gl.constexpr, READ: gl.constexpr):
    """The same, told before: what is read again needs no registers in between."""
    slot = turn % TOLD
    facts = ()
    for i in gl.static_range(FACTS if PARTS > 0 else 7):
        facts = facts + (gl.sum(items.facts.index(slot * FACTS + i).load(READ), 0),)
    part = Part(facts[0], facts[0], facts[0], facts[0])
    if PARTS > 0:
        part = Part(facts[7], facts[8], facts[9], facts[10])
    return Item(facts[0], facts[1], facts[2], facts[3], facts[4], facts[5], facts[6]), part


@gluon.jit
def blocks_of(batch, item, part, PARTS: gl.constexpr):
    """The first and the one after the last block of keys of a tile, or of a part of them; none where the first is not before that."""
    low, high = edges(batch, item, 0, TILE_M)
    begin, end = key_blocks(batch, item, low, high)
    if PARTS == 2:
        begin, end = blocks_of_part(part, part.number, begin, end)
    if PARTS == 3:
        if part.number >= 0:
            begin, end = blocks_of_part(part, part.number, begin, end)
    return begin, end


@gluon.jit
def hand_out(item, part, turn, q, items, queries, batch, PARTS: gl.constexpr):
    """Says what the tile of a turn is and copies its Q."""
    tell(items, turn, item, part, PARTS)
    for g in gl.static_range(WARPGROUPS):
        load_q(q, turn * WARPGROUPS + g, item, g * ROWS, queries, batch)


@gluon.jit
def take_item(item, part, turn, q, items, queries, batch, PARTS: gl.constexpr):
    """Hands out a tile, or nothing where it has no key of a part: the number of the next turn."""
    if PARTS >= 2:
        begin, end = blocks_of(batch, item, part, PARTS)
        if begin < end:
            hand_out(item, part, turn, q, items, queries, batch, PARTS)
        turn = gl.where(begin < end, turn + 1, turn)
    else:
        hand_out(item, part, turn, q, items, queries, batch, PARTS)
        turn += 1
    return turn


@gluon.jit
def load_item(item, part, n, k_desc, v_desc, k, v, items, batch, PAGE: gl.constexpr, PARTS: gl.constexpr):
    """Copies K and V of a tile, key blocks from the last to the first; asks for the next tile when ASKING of them are still to come."""
    begin, end = blocks_of(batch, item, part, PARTS)
    key = (end - 1) * TILE_N
    asking = gl.minimum(begin + ASKING, end - 1) * TILE_N
    if PAGE > 0:
        pages, start = find_pages(batch.table + item.b.to(gl.int64) * batch.stride_table, key, item.k_len, PAGE), 0
    else:
        page, start = first_pages(batch, item, PAGE)
        pages = (page,)
    for _ in range(end - begin):
        token = start + key
        if PAGE > 0:
            token = key % PAGE if PAGE > TILE_N else 0
        load_block(k, n, k_desc, pages, item.head_kv, token, QK_PIECES)
        mbarrier.arrive(items.asked.index(0), count=1, pred=key == asking)
        ahead = pages
        key -= TILE_N
        if PAGE > 0:
            # The pages of the next block, if there is one, are on their way while this one is.
            table = batch.table + item.b.to(gl.int64) * batch.stride_table
            ahead = find_pages(table, gl.maximum(key, begin * TILE_N), item.k_len, PAGE)
        load_block(v, n, v_desc, pages, item.head_kv, token, V_PIECES)
        pages = ahead
        n += 1
    return n


@gluon.jit
def load_role(k_desc, v_desc, k, v, items, batch, PAGE: gl.constexpr, PARTS: gl.constexpr):
    """Copies K and V of every tile that this program takes into shared memory."""
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
        own_copy(batch.inverse),
        own_copy(batch.seqlen_q),
        own_copy(batch.seqlen_k),
        own_copy(batch.left),
        own_copy(batch.right),
        own_copy(batch.rows_min),
        own_copy(batch.rows_max),
    )
    n, turn = 0, 0
    item, part = told(items, turn, PARTS, FACT)
    while item.b >= 0:
        n = load_item(item, part, n, k_desc, v_desc, k, v, items, batch, PAGE, PARTS)
        turn += 1
        item, part = told(items, turn, PARTS, FACT)


@gluon.jit
def take_role(q, items, queries, batch, taken, BESIDE: gl.constexpr, PARTS: gl.constexpr):
    """Takes tiles until there are none, and copies Q of them into shared memory: while it looks for one, keys of the tile before are on
    their way."""
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
        own_copy(batch.inverse),
        own_copy(batch.seqlen_q),
        own_copy(batch.seqlen_k),
        own_copy(batch.left),
        own_copy(batch.right),
        own_copy(batch.rows_min),
        own_copy(batch.rows_max),
    )
    queries = Queries(
        queries.q, own_copy(queries.stride_b), own_copy(queries.stride_s), own_copy(queries.stride_h), queries.eighths
    )
    # Beside the launch before, programs begin when there is room: none has a first tile that waits for it.
    dealt = 0 if BESIDE >= 2 else gl.num_programs(0)
    turn, done, number = 0, 0, gl.atomic_add(taken, 1, sem="relaxed") if BESIDE >= 2 else own_copy(gl.program_id(0))
    count, most, place, again = batch.count, 0.0, gl.num_programs(0) * CHAINED, 0
    if BESIDE >= 2:
        count = gl.where(number < GONE, count, 0)  # who comes when tiles have run out looks for none
    if PARTS == 3:
        # All are gone through twice by the same code, which no cache near the SM has when a program begins: first their blocks are counted.
        again = (count + (PLANNED - 1)) // PLANNED * PLANNED
    for step in range(0, count + again, PLANNED):
        first = step
        if PARTS == 3:
            counting = step < again
            first = gl.where(counting, step, step - again)
            found, blocks = found_from(batch, first, done, place, gl.where(counting, float("inf"), most), PARTS)
            # One program does all parts of a tile of up to CHAIN times what a program has on average.
            most += gl.where(counting, blocks * (CHAIN * batch.heads_kv) / gl.num_programs(0), 0.0)
            place = gl.max(found.places, 0)
            total = gl.where(counting, 0, gl.max(found.ends, 0))
        else:
            found, _ = found_from(batch, first, done, place, most, PARTS)
            total = gl.max(found.ends, 0)
        while number < total:
            item, part = item_of(batch, found, done, number, PARTS)
            turn = take_item(item, part, turn, q, items, queries, batch, PARTS)
            # Who is done takes the next: tiles differ in how many keys they see.  One that is taken before it is asked for would wait here
            # while other programs have none.
            mbarrier.wait(items.asked.index(0), turn - 1 & 1)
            number = dealt + gl.atomic_add(taken, 1, sem="relaxed")
        done = total
    if BESIDE >= 2:
        gl.atomic_xchg(taken, GONE, sem="relaxed")
    none = gl.to_tensor(-1)
    tell(items, turn, Item(none, none, none, none, none, none, none), Part(none, none, none, none), PARTS)
    # The last program sets the counters back for the next launch.
    last = gl.atomic_add(taken + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1
    if last:
        gl.atomic_xchg(taken, 0, sem="relaxed")
        gl.atomic_xchg(taken + 1, 0, sem="relaxed")
    if BESIDE >= 2:
        # Who waits for this launch waits for the one before as well, beside which it began; but for this program all leave their SMs.
        if last:
            gl.inline_asm_elementwise(
                "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
            )


# -- consumers ---------------------------------------------------------------------------------------------------------
# ROWS query rows of a work tile: rings, number of Q in its ring, first row, number of the last key block, problem.
QueryTile = namedtuple("QueryTile", "q k v q_number row last problem")


@gluon.jit
def key_block(tile, n, p, statistics, o, key=None, RESCALE: gl.constexpr = True):
    """One iteration: the next block's S and this block's P V together, then the softmax of the next block."""
    # ``key`` is the first key of the next block, or None where every row sees it whole.
    operand = p.to(tile.problem.out.dtype.element_ty)
    wait(tile.k, n + 1)
    s = issue_qk(tile_at(tile.q, tile.q_number), tile_at(tile.k, n + 1))
    wait(tile.v, n)
    o = issue_pv(operand, tile_at(tile.v, n), o)
    s = warpgroup_mma_wait(len(o), deps=[s])
    release(tile.k, n + 1)
    s = capped(s, tile.problem)
    if key is not None:
        s = hide_keys(tile.problem, s, key, tile.row)
    if RESCALE:
        p, statistics, factor = online_softmax(s, statistics, tile.problem)
    else:
        p = mufu_exp2(s * tile.problem.scale_log2 - statistics.reference[:, None])
        sums = partial_sums(p)
        vote(sums, OUTGROWN)
    if n + 1 == tile.last:
        release(tile.q, tile.q_number)
    o = finished(o)
    release(tile.v, n)
    if RESCALE:
        o = scaled_pieces(o, factor)
    else:
        if some_above():
            p, sums, statistics, factor = moved(s, p, sums, statistics, tile.problem)
            o = scaled_pieces(o, factor)
        statistics = Statistics(statistics.row_max, statistics.row_sums + sums, statistics.reference)
    return n + 1, p, statistics, o


@gluon.jit
def pass_blocks(n, count, k, v):
    """Gives back ``count`` key blocks that only other warpgroups of this CTA need."""
    for _ in range(count):
        # Waiting first keeps this warpgroup from running a lap ahead of the others.
        wait(k, n)
        release(k, n)
        wait(v, n)
        release(v, n)
        n += 1
    return n


@gluon.jit
def store_lse(rows, lse, item, later, head, there):
    """Log-sum-exp of ROWS rows."""
    stride_s = own_copy(rows.stride_ls)
    first = rows.lse + start_of(item, own_copy(rows.stride_lb), stride_s)
    gl.store(first + (later * stride_s + head.to(gl.int64) * own_copy(rows.stride_lh)), lse, mask=there)


@gluon.jit
def store_rows(rows, batch, pieces, factor, item, row, column):
    """O times a number per row, columns from ``column`` on."""
    width: gl.constexpr = pieces[0].shape[1]
    layout: gl.constexpr = store_layout(width)
    each = own_copy(row) + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    later, head = queries_and_heads(batch, item, each)
    stride_s = own_copy(rows.stride_os) * 8
    offsets = later * stride_s + head * (own_copy(rows.stride_oh) * 8)
    columns = gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    at = rows.out + start_of(item, own_copy(rows.stride_ob) * 8, stride_s) + (offsets[:, None] + columns[None, :])
    there = each < item.rows
    for i in gl.static_range(len(pieces)):
        o = scaled(pieces[i], factor).to(rows.out.dtype.element_ty)
        found = within(there, column + i * width + columns, rows.eighths)
        gl.store(at + (column + i * width), gl.convert_layout(o, layout), mask=found)


@gluon.jit
def begin_apart(g: gl.constexpr):
    """Warpgroups begin a tile one after the other: those that begin it together multiply together, and wait for each other's exponentials, to
    its end."""
    if g > 0:
        gl.inline_asm_elementwise(
            "nanosleep.u32 $1; mov.b32 $0, $1;", "=r,r", [APART * g], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def attend_blocks(
    g: gl.constexpr, items, turn, n, q, k, v, q_number, row, problem, k_len, first, end, last, opens, closes
):
    """Softmax and both matrix products of ROWS rows and blocks ``end`` - 1 to ``first``, the last P V of which runs on: (number of
    that block, statistics, O).  ``last``: number of the tile's last block; opens, closes: whether the tile's first block and that
    one are here."""
    # The first block has no P V to go with.
    dtype: gl.constexpr = problem.out.dtype.element_ty
    tile = QueryTile(q, k, v, q_number, row, last, problem)
    wait(k, n)
    begin_apart(g)
    s = warpgroup_mma_wait(0, deps=[issue_qk(tile_at(q, q_number), tile_at(k, n))])
    release(k, n)
    s = capped(s, problem)
    whole_first, whole_end = whole_blocks(problem, row)
    if (end > whole_end) | (whole_first > end - 1):
        s = hide_keys(problem, s, (end - 1) * TILE_N, row)
    row_max = gl.max(s, 1)
    reference = reference_of(row_max, problem)
    p = mufu_exp2(s * problem.scale_log2 - reference[:, None])
    statistics = Statistics(row_max, partial_sums(p), reference)
    o = first_o(v)
    clear_end(g, items, turn, v, n, end * TILE_N - k_len, opens)

    # Key blocks from the last to the first: those on the right edge of the mask, which keep an online softmax,
    # then the whole ones, then those on its left edge;
    # from here on the reference stays: no row maximum, no rescaling of O.
    edge = gl.maximum(gl.minimum(end - 1, whole_end), first)
    for step in range(end - 1 - edge):
        n, p, statistics, o = key_block(tile, n, p, statistics, o, key=(end - 2 - step) * TILE_N)
    inner = gl.maximum(gl.minimum(edge, whole_first), first)
    for _ in range(edge - inner):
        n, p, statistics, o = key_block(tile, n, p, statistics, o, RESCALE=False)
    for step in range(inner - first):
        n, p, statistics, o = key_block(tile, n, p, statistics, o, key=(inner - 1 - step) * TILE_N, RESCALE=False)
    if end - 1 == first:
        if closes:
            release(q, q_number)
    wait(v, n)
    o = issue_pv(p.to(dtype), tile_at(v, n), o)
    return n, statistics, o


@gluon.jit
def sum_of(statistics):
    """Sums of ROWS rows."""
    return gl.convert_layout(gl.sum(statistics.row_sums, 1), SCORE_ROWS)


@gluon.jit
def finish(g, reference, row_sum, item, row, problem, batch, rows, writes):
    """What O of ROWS rows is to be multiplied by; who ``writes`` it writes their log-sum-exp."""
    each = own_copy(g * ROWS) + gl.arange(0, ROWS, layout=SCORE_ROWS)
    later, head = queries_and_heads(batch, item, each)
    there = each < item.rows
    inverse, lse = row_results(reference, row_sum, row, problem, rows.sinks, head, there)
    if rows.v_scales is not None:
        inverse *= gl.load(rows.v_scales + item.b * rows.stride_vb + item.head_kv * rows.stride_vg)
    if rows.lse is not None:
        store_lse(rows, lse, item, later, head, there & writes)
    return inverse


@gluon.jit
def scale_of(item, rows):
    """What scores are multiplied by, for exponents of 2."""
    scale_log2 = rows.scale_log2
    if rows.k_scales is not None:
        scale_log2 *= gl.load(rows.k_scales + item.b * rows.stride_kb + item.head_kv * rows.stride_kg)
    return scale_log2


@gluon.jit
def seen_by(g, item, batch):
    """(positions of a warpgroup's rows, first and end of the key blocks of the tile, of the warpgroup) of an item."""
    low, high = edges(batch, item, 0, TILE_M)
    cta_first, cta_end = key_blocks(batch, item, low, high)
    low, high = edges(batch, item, g * ROWS, ROWS)
    first, end = key_blocks(batch, item, low, high)
    later, _ = queries_and_heads(batch, item, g * ROWS + gl.arange(0, ROWS, layout=SCORE_ROWS))
    return Positions(low, high, item.position + later), cta_first, cta_end, first, end


@gluon.jit
def attend_item(g: gl.constexpr, item, turn, n, q, k, v, items, batch, rows, CAPPED: gl.constexpr):
    """Softmax and both matrix products for ROWS rows of a tile."""
    scale = scale_of(item, rows)
    problem = Problem(
        rows.out,
        item.k_len,
        batch.left,
        batch.right,
        1.0 if CAPPED else scale,
        scale,
        rows.cap_log2 if CAPPED else None,
    )
    row, cta_first, cta_end, first, end = seen_by(g, item, batch)
    n = pass_blocks(n, cta_end - end, k, v)
    q_number = own_copy(turn * WARPGROUPS + g)
    wait(q, q_number)
    fence_async_shared()  # threads copied it, not the copy engine
    last = n + end - 1 - first
    n, statistics, o = attend_blocks(
        g, items, turn, n, q, k, v, q_number, row, problem, item.k_len, first, end, last, True, True
    )
    # Results of the rows while the last P V runs.
    inverse = finish(g, statistics.reference, sum_of(statistics), item, row, problem, batch, rows, True)
    o = finished(o)
    release(v, n)
    n = pass_blocks(n + 1, first - cta_first, k, v)
    store_rows(rows, batch, o, inverse, item, g * ROWS, 0)
    return n


# -- parts -------------------------------------------------------------------------------------------------------------
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


@gluon.constexpr_function
def parked(columns):
    """Numbers of a warpgroup's accumulator as they are kept, 16 bytes to a thread: rows and columns of a pair, then each 8 columns' 512."""
    registers = [[1], [2]] + [[512 << bit] for bit in range((columns // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, [[4], [8], [16], [32], [64]], [[128], [256]], [], [64 * columns])


@gluon.jit
def used(numbers, rows):
    """Which numbers are of warps that have any of the first ``rows`` rows: a warp has 16."""
    return numbers // 128 % 4 * 16 < rows


@gluon.jit
def in_order(o):
    """Columns of O as they are kept."""
    count: gl.constexpr = ROWS * o.shape[1]
    layout: gl.constexpr = parked(o.shape[1])
    o = gl.permute(gl.reshape(o, [4, 2, 8, count // 512, 4, 2]), [3, 0, 2, 4, 1, 5])
    return gl.convert_layout(gl.reshape(o, [count]), layout)


@gluon.jit
def as_accumulator(numbers, COLUMNS: gl.constexpr):
    """Columns of O that were kept."""
    o = gl.permute(gl.reshape(numbers, [ROWS * COLUMNS // 512, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    return gl.convert_layout(gl.reshape(o, [ROWS, COLUMNS]), accumulator(COLUMNS))


@gluon.jit
def park(o, at, rows):
    """Columns of O, of the first ``rows`` rows at least, to memory."""
    numbers = gl.arange(0, ROWS * o.shape[1], layout=parked(o.shape[1]))
    gl.store(at + numbers, in_order(o), mask=used(numbers, rows))


@gluon.jit
def unpark(at, rows, COLUMNS: gl.constexpr):
    """Columns of O back from memory."""
    # .cg: other programs may have written these, and the L1 cache knows nothing of it.
    numbers = gl.arange(0, ROWS * COLUMNS, layout=parked(COLUMNS))
    return as_accumulator(gl.load(at + numbers, mask=used(numbers, rows), other=0.0, cache_modifier=".cg"), COLUMNS)


@gluon.jit
def kept(rows, slot, g: gl.constexpr):
    """Where a warpgroup leaves what it has of a part."""
    return rows.partials + (slot * WARPGROUPS + g).to(gl.int64) * UNIT


@gluon.jit
def keep_sums(at, reference, row_sum):
    """Leave references and sums of ROWS rows."""
    sums = at + ROWS * HEAD_DIM_V + gl.arange(0, ROWS, layout=SCORE_ROWS)
    gl.store(sums, reference)
    gl.store(sums + ROWS, row_sum)


@gluon.jit
def keep(at, reference, row_sum, o, rows):
    """Leave the state of ROWS rows, of which ``rows`` are there."""
    for i in gl.static_range(len(o)):
        park(o[i], at + i * (ROWS * o[0].shape[1]), rows)
    keep_sums(at, reference, row_sum)


@gluon.jit
def kept_sums(at):
    """(reference, sum) of ROWS rows as they were left."""
    sums = at + ROWS * HEAD_DIM_V + gl.arange(0, ROWS, layout=SCORE_ROWS)
    return gl.load(sums, cache_modifier=".cg"), gl.load(sums + ROWS, cache_modifier=".cg")


@gluon.jit
def per_row(factor, o):
    """A number to each row of ``o``."""
    return gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout))[:, None]


@gluon.jit
def arrived_last(counter, count):
    """Whether all others of ``count`` have been here before; then the counter is set back for the next launch."""
    meet()  # all threads have stored before one of them says so
    last = gl.atomic_add(counter, 1, sem="release") == count - 1
    if last:
        gl.atomic_xchg(counter, 0, sem="acquire")
    meet()
    return last


@gluon.jit
def with_part(reference, row_sum, o, part_reference, part_sum, taken):
    """The state of rows from theirs and that of one part more."""
    reference, before, after = weights(reference, part_reference)
    return reference, blend(row_sum, before, part_sum, after), blend(o, per_row(before, o), taken, per_row(after, o))


@gluon.jit
def merged(g, part, lowest, highest, column, item, batch, rows, COLUMNS: gl.constexpr, AHEAD: gl.constexpr):
    """(references, sums, O of COLUMNS columns from ``column`` on) of a warpgroup's rows of a tile from those of its parts, AHEAD of which
    are on their way at a time."""
    first = kept(rows, part.slot + highest * batch.heads_kv, g)
    step = batch.heads_kv.to(gl.int64) * (0 - WARPGROUPS * UNIT)
    reference, row_sum = kept_sums(first)
    there, count = item.rows - g * ROWS, highest - lowest
    o = unpark(first + column * ROWS, there, COLUMNS)
    for done in range(0, count, AHEAD):
        taken = ()
        for i in gl.static_range(AHEAD):
            at = first + step * gl.minimum(done + (1 + i), count)
            part_reference, part_sum = kept_sums(at)
            taken = taken + (part_reference, part_sum, unpark(at + column * ROWS, there, COLUMNS))
        for i in gl.static_range(AHEAD):
            if i == 0:
                reference, row_sum, o = with_part(reference, row_sum, o, taken[0], taken[1], taken[2])
            else:
                if done + i < count:
                    reference, row_sum, o = with_part(
                        reference, row_sum, o, taken[3 * i], taken[3 * i + 1], taken[3 * i + 2]
                    )
    return reference, row_sum, o


@gluon.jit
def merge(g: gl.constexpr, part, lowest, highest, item, row, problem, batch, rows):
    """Merge what a warpgroup of several programs has left of the parts of a tile, and write it."""
    for column in gl.static_range(0, HEAD_DIM_V, JOINED):
        reference, row_sum, o = merged(g, part, lowest, highest, column, item, batch, rows, JOINED, 1)
        inverse = finish(g, reference, row_sum, item, row, problem, batch, rows, True)
        store_rows(rows, batch, (o,), inverse, item, g * ROWS, column)


@gluon.jit
def parts_there(part, cta_first, cta_end):
    """Numbers of the first and the last part that a tile has."""
    return (cta_first - part.origin) // part.each, (cta_end - 1 - part.origin) // part.each


@gluon.jit
def attend_part(
    g: gl.constexpr,
    turn,
    n,
    number,
    opens,
    closes,
    q,
    k,
    v,
    items,
    batch,
    rows,
    CAPPED: gl.constexpr,
    PARTS: gl.constexpr,
):
    """A warpgroup's share of part ``number`` of a tile, at least one block: (n, reference, sums, O)."""
    item, part = recalled(items, turn, PARTS, FACT_READ)
    scale = scale_of(item, rows)
    problem = Problem(
        rows.out,
        item.k_len,
        batch.left,
        batch.right,
        1.0 if CAPPED else scale,
        scale,
        rows.cap_log2 if CAPPED else None,
    )
    row, cta_first, cta_end, first, end = seen_by(g, item, batch)
    begin, stop = blocks_of_part(part, number, cta_first, cta_end)
    end = gl.minimum(gl.maximum(end, begin + 1), stop)
    first = gl.minimum(gl.maximum(first, begin), end - 1)
    n = pass_blocks(n, stop - end, k, v)
    last = gl.where(closes, n + end - 1 - first, -1)
    q_number = own_copy(turn * WARPGROUPS + g)
    n, statistics, o = attend_blocks(
        g, items, turn, n, q, k, v, q_number, row, problem, item.k_len, first, end, last, opens, closes
    )
    row_sum = sum_of(statistics)
    o = finished(o)
    release(v, n)
    return pass_blocks(n + 1, first - begin, k, v), statistics.reference, row_sum, o


@gluon.jit
def leave(
    g: gl.constexpr,
    turn,
    reference,
    row_sum,
    o,
    items,
    batch,
    rows,
    CAPPED: gl.constexpr,
    PARTS: gl.constexpr,
    JOINS: gl.constexpr,
):
    """What a warpgroup has of a tile: all, or one part of several, which the launch that follows merges where it JOINS them, otherwise the
    last to have done its rows of one."""
    item, part = recalled(items, turn, 2, FACT_READ)
    scale = scale_of(item, rows)
    problem = Problem(
        rows.out,
        item.k_len,
        batch.left,
        batch.right,
        1.0 if CAPPED else scale,
        scale,
        rows.cap_log2 if CAPPED else None,
    )
    row, cta_first, cta_end, _, _ = seen_by(g, item, batch)
    alone = True
    if PARTS >= 2:
        lowest, highest = parts_there(part, cta_first, cta_end)
        if (highest > lowest) & (part.number >= 0):
            alone = False
            keep(kept(rows, part.slot + part.number * batch.heads_kv, g), reference, row_sum, o, item.rows - g * ROWS)
            if not JOINS:
                if arrived_last(rows.arrived + (2 + part.slot * WARPGROUPS + g), highest - lowest + 1):
                    merge(g, part, lowest, highest, item, row, problem, batch, rows)
    if alone:
        inverse = finish(g, reference, row_sum, item, row, problem, batch, rows, True)
        store_rows(rows, batch, o, inverse, item, g * ROWS, 0)


@gluon.jit
def attend_dealt(g: gl.constexpr, turn, n, q, k, v, items, batch, rows, CAPPED: gl.constexpr, JOINS: gl.constexpr):
    """The part of a tile that is this item."""
    _, part = recalled(items, turn, 2, FACT_READ)
    wait(q, turn * WARPGROUPS + g)
    fence_async_shared()  # threads copied it, not the copy engine
    n, reference, row_sum, o = attend_part(g, turn, n, part.number, True, True, q, k, v, items, batch, rows, CAPPED, 2)
    leave(g, turn, reference, row_sum, o, items, batch, rows, CAPPED, 2, JOINS)
    return n


@gluon.jit
def attend_chained(g: gl.constexpr, turn, n, q, k, v, items, batch, rows, CAPPED: gl.constexpr, PARTS: gl.constexpr):
    """All parts of a tile, merged as if programs had done them one by one; or one of them, where those of some tiles are dealt out."""
    item, part = recalled(items, turn, 1, FACT_READ)
    _, cta_first, cta_end, _, _ = seen_by(g, item, batch)
    lowest, highest = parts_there(part, cta_first, cta_end)
    if PARTS == 3:
        if part.number >= 0:
            lowest, highest = part.number, part.number
    wait(q, turn * WARPGROUPS + g)
    fence_async_shared()  # threads copied it, not the copy engine
    total_reference, total_sum = (
        gl.zeros([ROWS], gl.float32, layout=SCORE_ROWS),
        gl.zeros([ROWS], gl.float32, layout=SCORE_ROWS),
    )
    total = first_o(v)
    for done in range(highest - lowest + 1):
        n, reference, row_sum, o = attend_part(
            g, turn, n, highest - done, done == 0, done == highest - lowest, q, k, v, items, batch, rows, CAPPED, 1
        )
        if done > 0:
            reference, before, after = weights(total_reference, reference)
            row_sum = blend(total_sum, before, row_sum, after)
            made = ()
            for i in gl.static_range(len(o)):
                made = made + (blend(total[i], per_row(before, o[i]), o[i], per_row(after, o[i])),)
            o = made
        total_reference, total_sum, total = reference, row_sum, o
    leave(g, turn, total_reference, total_sum, total, items, batch, rows, CAPPED, PARTS, False)
    return n


@gluon.jit
def consumer_role(
    g: gl.constexpr, q, k, v, items, batch, rows, CAPPED: gl.constexpr, PARTS: gl.constexpr, JOINS: gl.constexpr
):
    """Every tile that this program takes."""
    n, turn = 0, 0
    item, part = told(items, turn, PARTS, FACT_READ)
    while item.b >= 0:
        if PARTS == 0:
            n = attend_item(g, item, turn, n, q, k, v, items, batch, rows, CAPPED)
        elif PARTS == 2:
            n = attend_dealt(g, turn, n, q, k, v, items, batch, rows, CAPPED, JOINS)
        elif PARTS == 1:
            n = attend_chained(g, turn, n, q, k, v, items, batch, rows, CAPPED, PARTS)
        elif part.each == FAR:
            n = attend_item(g, item, turn, n, q, k, v, items, batch, rows, CAPPED)
        else:
            n = attend_chained(g, turn, n, q, k, v, items, batch, rows, CAPPED, PARTS)
        turn += 1
        item, part = told(items, turn, PARTS, FACT_READ)


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
        "inverse",
        "seqlen_q",
        "seqlen_k",
        "left",
        "right",
        "rows_min",
        "rows_max",
        "eighths_qk",
        "eighths_v",
    ]
)
def attention(q_ptr, k_desc, v_desc, out, lse, sinks, cu_q, cu_k, used_k, table, slots, k_scales,
              v_scales, partials, arrived, stride_qb, stride_qs, stride_qh, stride_ob, stride_os,
              stride_oh, stride_lb, stride_ls, stride_lh, stride_table, stride_kb, stride_kg, stride_vb,
              stride_vg, count, heads_kv, group, inverse, seqlen_q, seqlen_k, left, right, rows_min,
              rows_max, eighths_qk, eighths_v, scale_log2, cap_log2, PAGE: gl.constexpr, CAPPED:
              gl.constexpr, BESIDE: gl.constexpr, PARTS: gl.constexpr, JOINS: gl.constexpr):  # fmt: skip
    """Allocate, set up the barriers, and start the roles."""
    if BESIDE % 2 == 1:
        # The launch after this one, for other rows or to merge parts, may begin where there is room.
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
        inverse,
        seqlen_q,
        seqlen_k,
        left,
        right,
        rows_min,
        rows_max,
    )
    rows = Rows(
        out,
        lse,
        sinks,
        k_scales,
        v_scales,
        partials,
        arrived,
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
        eighths_v,
    )
    queries = Queries(q_ptr, stride_qb, stride_qs, stride_qh, eighths_qk)
    gl.inline_asm_elementwise(DECLARE, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
    q = make_q_ring(k_desc.dtype)
    k = make_ring(k_desc, QK_PIECES)
    v = make_ring(v_desc, V_PIECES)
    facts = gl.allocate_shared_memory(gl.int32, [TOLD * FACTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # The last warpgroup is at most Q_STAGES tiles ahead of the others.
    items = Items(facts, barriers(TOLD, 1), barriers(1, 1), barriers(2 * Q_STAGES, 1))
    fence_async_shared()
    gl.warp_specialize([
        (consumer_role, (0, q, k, v, items, batch, rows, CAPPED, PARTS, JOINS)),
        (consumer_role, (1, q, k, v, items, batch, rows, CAPPED, PARTS, JOINS)),
        (consumer_role, (2, q, k, v, items, batch, rows, CAPPED, PARTS, JOINS)),
        (load_role, (k_desc, v_desc, k, v, items, batch, PAGE, PARTS)),
        (take_role, (q, items, queries, batch, arrived, BESIDE, PARTS)),
    ], [4, 4, 1, 1], [152, 152, 56, 56])  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "stride_ob",
        "stride_os",
        "stride_oh",
        "stride_lb",
        "stride_ls",
        "stride_lh",
        "stride_vb",
        "stride_vg",
        "count",
        "heads_kv",
        "group",
        "inverse",
        "seqlen_q",
        "seqlen_k",
        "left",
        "right",
        "rows_min",
        "rows_max",
        "eighths_v",
    ]
)
def attention_join(out, lse, sinks, cu_q, cu_k, used_k, v_scales, partials, stride_ob, stride_os, stride_oh, stride_lb,
                   stride_ls, stride_lh, stride_vb, stride_vg, count, heads_kv, group, inverse, seqlen_q, seqlen_k,
                   left, right, rows_min, rows_max, eighths_v):  # fmt: skip
    """Merge the parts of tiles that the launch before has left: a program has JOINED_APART columns of a warpgroup's rows of a tile."""
    batch = Batch(
        cu_q,
        cu_k,
        used_k,
        None,
        None,
        None,
        count,
        heads_kv,
        group,
        inverse,
        seqlen_q,
        seqlen_k,
        left,
        right,
        rows_min,
        rows_max,
    )
    rows = Rows(
        out,
        lse,
        sinks,
        None,
        v_scales,
        partials,
        None,
        stride_ob,
        stride_os,
        stride_oh,
        stride_lb,
        stride_ls,
        stride_lh,
        None,
        None,
        stride_vb,
        stride_vg,
        None,
        None,
        eighths_v,
    )
    number = gl.program_id(0)
    g, column = gl.program_id(1) % WARPGROUPS, gl.program_id(1) // WARPGROUPS * JOINED_APART
    # The sequence of the tile, its number among those of the sequence, and where the sequence's first one was kept.
    b, index, place, done, kept_so_far = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), 0, 0
    for first in range(0, count, JOIN_PLANNED):
        ends, places = (
            ends_of(batch, first, done, JOIN_PLANNED, 4, 1),
            ends_of(batch, first, kept_so_far, JOIN_PLANNED, 4, 2),
        )
        before, total = ends <= number, gl.max(ends, 0)
        here = (number >= done) & (number < total)
        b = gl.where(here, first + gl.sum(before.to(gl.int32), 0), b)
        index = gl.where(here, number - gl.max(gl.where(before, ends, done), 0), index)
        place = gl.where(here, gl.max(gl.where(before, places, kept_so_far), 0), place)
        done, kept_so_far = total, gl.max(places, 0)
    q_len, k_len = lengths(batch, b, b >= 0)
    tiles, _, _ = shares(batch, q_len, k_len, 1)
    parts, origin, each = parts_of(batch, q_len, k_len)
    head_kv, index = index % heads_kv, index // heads_kv
    item = tile_of(batch, b, head_kv, q_len, k_len, (tiles - 1 - index) * TILE_M)
    part = Part(origin, each, 0, place + index * parts * heads_kv + head_kv)
    row, cta_first, cta_end, _, _ = seen_by(g, item, batch)
    lowest, highest = parts_there(part, cta_first, cta_end)
    # Nothing so far is of the launch before.
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )
    if (number < done) & (highest > lowest):
        problem = Problem(out, item.k_len, batch.left, batch.right, 1.0, 1.0, None)
        reference, row_sum, o = merged(g, part, lowest, highest, column, item, batch, rows, JOINED_APART, AHEAD)
        factor = finish(g, reference, row_sum, item, row, problem, batch, rows, column == 0)
        store_rows(rows, batch, (o,), factor, item, g * ROWS, column)


def parts(seqlen_q, seqlen_k, group, heads_kv, left=-1):
    """Parts of the keys of a sequence, from its own lengths and heads alone, as programs find them; left: of the window, -1 for none."""
    first = max(seqlen_k - seqlen_q - left, 0) // TILE_N.value if left >= 0 else 0
    blocks = max(-(-seqlen_k // TILE_N.value) - first, 1)
    each = -(-blocks // _wanted(-(-seqlen_q * group // TILE_M.value) * heads_kv, blocks * TILE_N.value))
    return -(-blocks // each)


def _wanted(tiles, keys):
    """Parts of so many keys that a sequence of so many tiles wants: those that fill the SMs once, or twice where that leaves fewer of them
    idle and keys are enough."""
    once, twice, most = SMS.value // tiles, 2 * SMS.value // tiles, min(keys // PART_KEYS.value, MOST_PARTS.value)
    return max(1, min(twice if 2 * once < twice <= most else once, most))


def _dealing(batch, heads_kv, group, seqlen_q, seqlen_k, sms, tokens, least, left, alike=False):
    """(how parts are taken in, places for what they leave, most tiles, most parts of one): 0, no sequence has any; 1, a program those of a tile one after the other;
    2, programs one each; 3, those of far longer tiles than others one each.  All give the same bits.  alike: each sequence has as many keys as queries.
    """
    keys = -(-seqlen_k // TILE_N.value) * TILE_N.value
    if left >= 0:
        keys = min(keys, seqlen_q + left + 2 * TILE_N.value)
    tiles = -(-(seqlen_q if tokens is None else min(seqlen_q, tokens)) * group // TILE_M.value)
    # Parts of a sequence of so many tiles, which hold all its queries.
    wanted = {}
    for count in (tiles,) if tokens is None else (*range(1, min(tiles, SMS.value) + 1), tiles):
        own = -(-(count * TILE_M.value // group) // TILE_N.value) * TILE_N.value if alike else keys
        wanted[count] = _wanted(count * heads_kv, min(keys, own))
    most, total = wanted[tiles], batch * tiles
    if tokens is not None and batch > 1:
        # Sequences of any lengths up to the longest, fewest rows and in all as many queries.
        most = max(wanted.values())
        total = min(total, tokens * group // TILE_M.value + batch, tokens * group // least)
    total *= heads_kv
    if most < 2:
        return 0, 0, total, 1
    slots = total * most
    few = 3 * -(-total // sms) * most <= 4 * -(-slots // sms)
    if batch == 1:
        # One sequence is taken to have all of q's queries; where its list says fewer there is room for what it leaves.
        slots = max(count * parts for count, parts in wanted.items()) * heads_kv
    if few or slots * WARPGROUPS.value * UNIT.value > MOST_NUMBERS:
        how = 1 if batch == 1 else 3
        return how, CHAINED.value * sms + (min(PLACES.value, slots) if how == 3 else 0), total, most
    return 2, slots, total, most


def _room(how, slots, *_):
    """Numbers that parts leave, and counters: what has been taken, who is done, and who has left a part of a tile."""
    return max(1, slots * WARPGROUPS.value * UNIT.value), 2 + (slots * WARPGROUPS.value if how >= 2 else 0)


def scratch(batch, heads_kv, group, seqlen_q, seqlen_k, sms, tokens=None, least=1, left=-1, alike=False):
    """(float32 of partial outputs with their maxima and sums, int32 of counters) that a launch works in on a device of `sms`.

    The counters must be 0 before the first launch; every launch leaves them so.  tokens: of all sequences, where they differ in length; least:
    rows of a sequence that the launch works on; left: of the window; alike: as of `plan`.
    """
    return _room(*_dealing(batch, heads_kv, group, seqlen_q, seqlen_k, sms, tokens, least, left, alike))


def plan(q, k, v, out, lse, lists, seqlen_q, seqlen_k, window, capped, rows, work, sms, beside=0, alike=False):
    """Grid, arguments but the two scales, flags, grid and arguments of the launch that merges (None: nothing is merged there); ValueError for what the kernel does not take.

    lists: cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, cache_batch_idx, sinks, k_descale, v_descale, each a tensor or None; seqlen_q,
    seqlen_k: no sequence has more; window: (left, right), -1 for no limit; capped: whether there is a softcap; rows: (fewest, most) rows of the sequences to
    work on; work: the tensors of `scratch`; sms: of the device; beside: 1 where the next launch, for other rows, may begin
    before this one ends, and 2 where this one may before the one before has, added up; alike: whether
    each sequence surely has as many keys as queries.
    """
    cu_q, cu_k, used_k, table, slots, sinks, k_scales, v_scales = lists
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if (
        q.shape[-1] != k.shape[-1]
        or out.shape[-1] != v.shape[-1]
        or max(q.shape[-1], v.shape[-1]) > 64
        or (q.shape[-1] | v.shape[-1]) % 8
        or heads_q % heads_kv
        or heads_q > MOST_GROUP * heads_kv
    ):
        raise ValueError(
            f"q, k, v: expected head_dim of at most 64, a multiple of 8, the same of q and k and of v and out, and heads of q a multiple of k's, at most {MOST_GROUP} times, got {[*q.shape]}, {[*k.shape]}, {[*v.shape]}"
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
    tile_m = TILE_M.value
    # No more than the rows of all fill, nor than all sequences of as many as the launch takes: programs without one would take SMs from the launch after.
    tiles = q.shape[0] * (1 if cu_q is not None else seqlen_q) * group // tile_m + batch
    tiles = min(tiles, batch * -(-min(seqlen_q * group, rows[1]) // tile_m))
    items = heads_kv * tiles
    how, places, most_tiles, most = _dealing(
        batch,
        heads_kv,
        group,
        seqlen_q,
        seqlen_k,
        sms,
        None if cu_q is None else q.shape[0],
        max(rows[0], 1),
        window[0],
        alike,
    )
    need, room = _room(how, places), [x.shape[0] for x in work]
    if room[0] < need[0] or room[1] < need[1]:
        raise ValueError(f"work: expected room for {need} numbers, as scratch says, got {room}")
    items = max(items, places) if how >= 2 else items
    q_strides, out_strides = ([0, *x.stride()[:-1]][-3:] for x in (q, out))
    if reason := refusal(k, v):
        raise ValueError(reason)
    box = [1, 1, min(page, TILE_N.value) if page else TILE_N.value, COLUMNS.value]
    layout = gl.NVMMASharedLayout.get_default_for(box, KINDS[str(q.dtype)])
    v_box = [*box[:3], HEAD_DIM_V.value] if box[2] == TILE_N.value else box
    k_boxes, v_boxes = (_descriptor(x, box, layout) for x, box in ((k, box), (v, v_box)))
    lse_strides = (
        (0, 0, 0) if lse is None else (0, 1, lse.stride(0)) if cu_q is not None else (lse.stride(0), 1, lse.stride(1))
    )
    arguments = (
        q, k_boxes, v_boxes, out, lse, sinks, cu_q, cu_k, used_k, table, slots, k_scales, v_scales, *work,
        *(n // 8 for n in (*q_strides, *out_strides)),
        *lse_strides, 0 if table is None else table.stride(0), 
        *(n for x in (k_scales, v_scales) for n in ((0, 0) if x is None else x.stride())), batch, heads_kv, group, (1 << 20) // group + 1, seqlen_q, min(seqlen_k, FAR.value), left, right,
        max(rows[0], 1), min(rows[1], FAR.value),
        *(None if n == 64 else n // 8 for n in (q.shape[-1], v.shape[-1])),
    )  # fmt: skip
    joined = None
    if joins := how == 2 and most > MOST_MERGED:
        beside |= 1  # the launch that merges may be there when this one ends
        joined = (
            (most_tiles, WARPGROUPS.value * HEAD_DIM_V.value // JOINED_APART.value, 1),
            (
                out,
                lse,
                sinks,
                cu_q,
                cu_k,
                used_k,
                v_scales,
                work[0],
                *(n // 8 for n in out_strides),
                *lse_strides,
                *((0, 0) if v_scales is None else v_scales.stride()),
                batch,
                heads_kv,
                group,
                (1 << 20) // group + 1,
                seqlen_q,
                min(seqlen_k, FAR.value),
                left,
                right,
                max(rows[0], 1),
                min(rows[1], FAR.value),
                None if v.shape[-1] == 64 else v.shape[-1] // 8,
            ),
        )
    return (max(1, min(items, PROGRAMS * sms * 1)), 1, 1), arguments, (page, capped, beside, how, joins), joined


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

    q, out: (batch, seqlen_q, heads_q, 64 | 64), or (total, heads_q, ...) with cu_seqlens_q.  k, v: (batch, seqlen_k, heads_kv,
    64 | 64), or heads of fewer columns, a multiple of 8, with block_table (batch, pages of a sequence) instead (pages, page size, heads_kv, ...), with cu_seqlens_k (total,
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
    alike = (
        cu_seqlens_q is not None and cu_seqlens_q is cu_seqlens_k and seqused_k is None and max_seqlen_k <= max_seqlen_q
    )
    if work is None:
        import torch

        sizes = scratch(
            batch,
            k.shape[-2],
            q.shape[-2] // k.shape[-2],
            max_seqlen_q,
            max_seqlen_k,
            sms,
            None if cu_seqlens_q is None else q.shape[0],
            max(rows[0], 1),
            window[0],
            alike,
        )
        kinds = (torch.float32, torch.int32)
        work = [torch.zeros(n, dtype=kind, device=q.device) for n, kind in zip(sizes, kinds)]
    lists = (cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, cache_batch_idx, sinks, k_descale, v_descale)
    grid, arguments, flags, joined = plan(
        q, k, v, out, lse, lists, max_seqlen_q, max_seqlen_k, window, softcap != 0.0, rows, work, sms, alike=alike
    )
    attention[grid](*arguments, *scales(scale, softcap), *flags, **OPTIONS)
    if joined:
        attention_join[joined[0]](*joined[1], **JOIN_OPTIONS)
