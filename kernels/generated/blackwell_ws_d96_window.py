"""Sliding-window attention forward for head_dim 96 on Blackwell: FlashAttention-4 in Gluon.

Query i sees keys from window_left before to window_right after position i + seqlen_k - seqlen_q.  A unit of work is two
tiles of 128 query rows; each has a softmax group of four warps, and they share K and V.  One warp loads, one issues
matrix products, four warps correct the output and store it.  S, P and O stay in tensor memory; keys go from the last
block to the first, masked blocks first.  0.125 of the exponentials run on the FMA pipe, degree 3.  One program a unit,
the longest units first.
"""

TILECAST = {
    "tilecast": "0.1.0", "family": "blackwell_ws", "machine": "b200", "targets": ["sm_100a", "sm_103a"],
    "variant": "family=fa4,tile_m=128,tile_n=128,softmax_tiles=2,split=q,kv_stages=0,cta_group=1,emulated_share=0.125,poly_degree=3,rescale_threshold=8,split_p=true,stats_slots=1,load_max=false,mask_home=tmem,scheduler=longest-first",
    "workload": {"batch": 4, "heads_q": 16, "heads_kv": 16, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim_qk": 96, "head_dim_v": 96, "mask": "window", "window": [1024, 0], "dtype": "bf16"},
}  # fmt: skip

from collections import namedtuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory, mbarrier
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_commit, tcgen05_mma, tensor_memory_descriptor
from triton.experimental.gluon.language.nvidia.blackwell import tma
from triton.experimental.gluon.nvidia.blackwell import TensorDescriptor

copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its name in Triton 3.6
REINTERPRET_IS_PUBLIC = gl.constexpr(hasattr(tensor_memory_descriptor, "reinterpret"))  # not in Triton 3.6

TILE_M = gl.constexpr(256)  # query rows of a work tile
ROWS = gl.constexpr(128)  # query rows of a softmax group
TILE_N = gl.constexpr(128)  # keys of a block
HEAD_DIM_V = gl.constexpr(96)  # columns of V and O
QUARTER = gl.constexpr(32)  # columns of S and P worked on at a time
KV_STAGES = gl.constexpr(7)  # K and V blocks in flight; they take turns in one ring
STATS_SLOTS = gl.constexpr(1)  # row factors on their way from a softmax group to the correction role
MAX_GROWTH = gl.constexpr(8.0)  # a row maximum may grow by this many powers of two before O is rescaled
RESCALE_COLUMNS = gl.constexpr(16)  # columns of O the correction role takes into registers at a time
STORE_COLUMNS = gl.constexpr(16)  # the same when it stores O: one 32-byte sector a row
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = 1.4426950408889634
DTYPES = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16}
# Every fused multiply-add is written as one; register allocation at level 2, which Triton 3.9 asks for, spills.
OPTIONS = {"maxnreg": 128, "enable_fp_fusion": False, "ptx_options": "--regAllocOptLevel=4", "num_warps": 4}


# -- arithmetic: a thread owns a row and works on two neighbouring columns at a time -----------------------------------
@gluon.constexpr_function
def row_per_thread(columns):
    """Register layout of [ROWS, columns]: lane l of warp w owns row 32 w + l, as tcgen05.ld and tcgen05.st have it."""
    registers, lanes = [[0, 1 << bit] for bit in range(columns.bit_length() - 1)], [[1 << bit, 0] for bit in range(5)]
    return gl.DistributedLinearLayout(registers, lanes, [[32, 0], [64, 0]], [], [128, columns])


@gluon.constexpr_function
def one_per_thread(columns):
    """Register layout of a column of row statistics that go with `row_per_thread(columns)`."""
    return gl.SliceLayout(1, row_per_thread(columns))


@gluon.jit
def fma2(a, b, c):
    """a * b + c."""
    FMA2: gl.constexpr = """{ .reg .b64 a, b, c; mov.b64 a, {$2, $3}; mov.b64 b, {$4, $5}; mov.b64 c, {$6, $7};
        fma.rn.ftz.f32x2 a, a, b, c; mov.b64 {$0, $1}, a; }"""
    return gl.inline_asm_elementwise(FMA2, "=r,=r,r,r,r,r,r,r", [a, b, c], gl.float32, is_pure=True, pack=2)


@gluon.jit
def packed(OPERATION: gl.constexpr, a, b):
    """add or mul."""
    PTX: gl.constexpr = "{ .reg .b64 a, b; mov.b64 a, {$2, $3}; mov.b64 b, {$4, $5}; " + OPERATION
    PACKED: gl.constexpr = PTX + ".rn.ftz.f32x2 a, a, b; mov.b64 {$0, $1}, a; }"
    return gl.inline_asm_elementwise(PACKED, "=r,=r,r,r,r,r", [a, b], gl.float32, is_pure=True, pack=2)


@gluon.jit
def max3(a, b, c):
    """The largest of three; NaN if one is NaN, so that a NaN score turns its row, and only its row, into NaN."""
    return gl.inline_asm_elementwise(
        "max.NaN.ftz.f32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def halves(x):
    """The left and the right half of the columns; registers get new names, nothing moves."""
    COLUMNS: gl.constexpr = x.shape[1] // 2
    left, right = x.reshape([ROWS, 2, COLUMNS]).permute(0, 2, 1).split()
    left = gl.convert_layout(left, row_per_thread(COLUMNS), assert_trivial=True)
    return left, gl.convert_layout(right, row_per_thread(COLUMNS), assert_trivial=True)


@gluon.jit
def row_maximum(a, b, c, rest, start):
    """The largest of `start` and the four quarters of a row."""
    most = max3(a, b, c)
    for _ in gl.static_range(5):
        most_left, most_right = halves(most)
        rest_left, rest = halves(rest)
        most = max3(most_left, most_right, rest_left)
    most = gl.convert_layout(most.reshape([ROWS]), start.type.layout, assert_trivial=True)
    return max3(most, gl.convert_layout(rest.reshape([ROWS]), start.type.layout, assert_trivial=True), start)


@gluon.jit
def row_total(a, b, c, d):
    """[ROWS, 2] sums over the even and the odd columns of the four quarters of a row."""
    total = packed("add", packed("add", a, b), packed("add", c, d))
    for _ in gl.static_range(4):
        left, right = halves(total)
        total = packed("add", left, right)
    return total


def exp2_ptx(columns):
    """PTX for 2^x of 32 neighbouring columns: those in `columns` on the FMA pipe, in pairs, the others on MUFU."""
    # x = n + f with n = floor(x): adding 1.5 * 2^23 and rounding down leaves n in the low bits of the sum.  The bits of
    # 2^f, with n added to the exponent field, are 2^x; arguments below -127 give 0.  FlashAttention-4's polynomial:
    # 2^f = 1 + 0.6951461 f + 0.2275644 f^2 + 0.07711909 f^3
    ptx = """{ .reg .b32 x0, x1, n0, n1, p0, p1; .reg .b64 x, n, f, p, up, down, c<4>;
        mov.b64 up, 0x4b4000004b400000; mov.b64 down, 0xcb400000cb400000; mov.b64 c0, 0x3f8000003f800000;
        mov.b64 c1, 0x3f31f5193f31f519; mov.b64 c2, 0x3e6906a43e6906a4; mov.b64 c3, 0x3d9df09d3d9df09d;"""
    for column in range(0, 32, 2):
        out0, out1, in0, in1 = (f"${column + i}" for i in (0, 1, 32, 33))
        if column not in columns:
            ptx += f"ex2.approx.ftz.f32 {out0}, {in0}; ex2.approx.ftz.f32 {out1}, {in1};"
        else:
            ptx += f"""max.ftz.f32 x0, {in0}, 0fC2FE0000; max.ftz.f32 x1, {in1}, 0fC2FE0000; mov.b64 x, {{x0, x1}};
                add.rm.ftz.f32x2 n, x, up; add.rn.ftz.f32x2 f, n, down; sub.rn.ftz.f32x2 f, x, f; mov.b64 p, c3;
                fma.rn.ftz.f32x2 p, p, f, c2; fma.rn.ftz.f32x2 p, p, f, c1; fma.rn.ftz.f32x2 p, p, f, c0;
                mov.b64 {{n0, n1}}, n; mov.b64 {{p0, p1}}, p; shl.b32 n0, n0, 23; shl.b32 n1, n1, 23;
                add.s32 {out0}, n0, p0; add.s32 {out1}, n1, p1;"""
    return ptx + "}"


# 16 of the 128 columns of a row bypass the special function unit (MUFU).
EXP2 = gl.constexpr(exp2_ptx((12, 14, 28, 30)))
EXP2_OPERANDS = gl.constexpr(",".join(["=r"] * 32 + ["r"] * 32))


@gluon.jit
def exp2_mixed(x, PTX: gl.constexpr):
    """2^x of a quarter of a row, some of it on the FMA pipe."""
    return gl.inline_asm_elementwise(PTX, EXP2_OPERANDS, [x], gl.float32, is_pure=True, pack=QUARTER)


# -- what the roles share ----------------------------------------------------------------------------------------------
@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers that complete a phase with every `ARRIVALS` arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


# Tiles on their way through shared memory, in slots that take turns; a tile is in pieces of power-of-two columns.
# A place is a slot and the phase of its barriers, which flips when the ring starts over.
Ring = namedtuple("Ring", "tiles full empty")


@gluon.jit
def after(ring, slot, phase):
    """The next place."""
    last = slot == ring.full.shape[0] - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def load(ring, place, descs, batch, head, row):
    """Copy the tile that starts at `row` of a head, once its slot is free; the next place."""
    slot, phase = place
    full = ring.full.index(slot)
    mbarrier.wait(ring.empty.index(slot), phase ^ 1)
    mbarrier.expect(full, tile_bytes(descs))
    for i in gl.static_range(len(descs)):
        copy_tile(descs[i], [batch, head, row, first_column(descs, i)], full, ring.tiles[i].index(slot))
    return after(ring, slot, phase)


@gluon.jit
def take(ring, place):
    """Wait until a tile has landed; its slot, and the next place."""
    slot, phase = place
    mbarrier.wait(ring.full.index(slot), phase)
    return slot, after(ring, slot, phase)


@gluon.jit
def tile_at(ring, slot):
    """The tile in a slot as matrices."""
    return [piece.index(slot).reshape([piece.shape[3], piece.shape[4]]) for piece in ring.tiles]


@gluon.constexpr_function
def tile_bytes(descs):
    """Bytes of the pieces of a tile."""
    return sum([desc.block_type.nbytes for desc in descs])


@gluon.constexpr_function
def first_column(descs, piece):
    """Column of the head at which a piece of a tile begins."""
    return sum([desc.block_type.shape[3] for desc in descs[:piece]])


@gluon.jit
def make_ring(descs, SLOTS: gl.constexpr):
    """An empty ring for the tiles of some descriptors."""
    tiles = [gl.allocate_shared_memory(d.dtype, [SLOTS] + d.block_type.shape, d.layout) for d in descs]
    full = barriers(SLOTS, 1)
    empty = barriers(SLOTS, 1)
    return Ring(tiles, full, empty)


@gluon.jit
def own_copy(x):
    """``x``, opaque to the compiler: what roles compute alike, it would compute once before they part, and spill."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def program_number():
    """Number of this program, read by every role for itself: one read would hold a register through all of them."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %ctaid.x;", "=r,r", [gl.to_tensor(0)], gl.int32, is_pure=False, pack=1
    )


# One launch: outputs (strides in units of 8 elements), sizes, and how work is dealt to programs.
Problem = namedtuple("Problem", "out lse stride_b stride_h stride_s heads_q group seqlen_q seqlen_k window_left "
                     "window_right query_blocks heads heads_at_once scale_log2")  # fmt: skip


@gluon.jit
def own(problem):
    """A role's own copy of the sizes: work that the roles share, the compiler does before they part, and spills."""
    return Problem(*problem[:5], *[own_copy(size) for size in problem[5:-1]], problem.scale_log2)


@gluon.jit
def work_tile(problem, tile):
    """Batch, query head, key/value head, first row, first key of the last key block, number of blocks."""
    # Last rows first, because they see the most keys; a few heads at a time, so that their K and V stay in L2.
    first_head = tile // (problem.heads_at_once * problem.query_blocks) * problem.heads_at_once
    heads_here = gl.minimum(problem.heads_at_once, problem.heads - first_head)
    tile = tile - first_head * problem.query_blocks
    head = first_head + tile % heads_here
    row = (problem.query_blocks - 1 - tile // heads_here) * TILE_M
    batch, head = head // problem.heads_q, head % problem.heads_q
    head_kv = head // problem.group
    # The first row sees the first key, the last row the last one.  A tile that sees none still takes a masked block.
    diagonal = row + problem.seqlen_k - problem.seqlen_q
    first = gl.maximum(diagonal - problem.window_left, 0) // TILE_N
    stop = gl.minimum(diagonal + gl.minimum(TILE_M, problem.seqlen_q - row) + problem.window_right, problem.seqlen_k)
    blocks = gl.maximum(gl.cdiv(stop, TILE_N) - first, 1)
    return batch, head, head_kv, row, (first + blocks - 1) * TILE_N, blocks


@gluon.jit
def store_rows(problem, softmax, total, maximum, batch, head, row):
    """Write the logarithms of the row sums, then O over these; each thread writes its row."""
    # Own copies: what the stores of two groups have in common would hold registers through the first of them.
    batch, head, row = own_copy(batch), own_copy(head), own_copy(row)
    rows = row + gl.arange(0, ROWS, total.type.layout)
    empty = total == 0.0
    valid = rows < problem.seqlen_q
    lse = gl.where(empty, float("-inf"), (maximum * problem.scale_log2 + gl.log2(total)) * LN2)
    gl.store(problem.lse + (batch * problem.heads_q + head).to(gl.int64) * problem.seqlen_q + rows, lse, mask=valid)
    inverse = gl.where(empty, 0.0, 1.0 / total)
    head_start = batch.to(gl.int64) * problem.stride_b + head.to(gl.int64) * problem.stride_h
    out = (problem.out + 8 * (head_start + rows.to(gl.int64) * problem.stride_s))[:, None]
    columns = gl.arange(0, STORE_COLUMNS, gl.SliceLayout(0, row_per_thread(STORE_COLUMNS)))[None, :]
    for start in gl.static_range(0, HEAD_DIM_V, STORE_COLUMNS):
        o = o_columns(softmax, start, STORE_COLUMNS).load(row_per_thread(STORE_COLUMNS))
        o = gl.where(empty[:, None], 0.0, packed("mul", o, inverse[:, None])).to(out.dtype.element_ty)
        gl.store(out + (start + columns), o, mask=valid[:, None])


@gluon.constexpr_function
def accumulator(columns):
    """Layout of [ROWS, columns] of float32 in tensor memory."""
    return TensorMemoryLayout((128, columns), col_stride=1)


# A softmax group: S and O in tensor memory; barriers: S complete, three quarters of P stored and O rescaled, last
# quarter stored, O complete; for the correction role: rows (in turn factors of blocks, sums, maxima), written, read.
Softmax = namedtuple("Softmax", "s o s_full p_ready p_rest o_full rows rows_full rows_empty")


@gluon.jit
def p_of(softmax, dtype: gl.constexpr):
    """P in tensor memory: the right half of the columns of S, which are free once S is in registers."""
    right = softmax.s.slice(TILE_N // 2, TILE_N // 2)
    reinterpret: gl.constexpr = right.reinterpret if REINTERPRET_IS_PUBLIC else right._reinterpret
    return reinterpret(dtype, [ROWS, TILE_N], accumulator(TILE_N))


@gluon.jit
def o_columns(softmax, start: gl.constexpr, COLUMNS: gl.constexpr):
    """Some columns of O."""
    if start >= 64:
        return softmax.o[1].slice(start - 64, COLUMNS)
    else:
        return softmax.o[0].slice(start, COLUMNS)


@gluon.jit
def issue_qk(softmax, q, k):
    """S = Q K^T."""
    for i in gl.static_range(len(q)):
        tcgen05_mma(q[i], k[i].permute((1, 0)), softmax.s, use_acc=i > 0)
    tcgen05_commit(softmax.s_full)


@gluon.jit
def issue_pv(softmax, v, phase, use_acc):
    """O += P V, on three quarters of P while the softmax group works on the last one."""
    p = p_of(softmax, v[0].dtype)
    mbarrier.wait(softmax.p_ready, phase)
    for i in gl.static_range(len(v)):
        tcgen05_mma(p.slice(0, 64), v[i].slice(0, 64), softmax.o[i], use_acc=use_acc)
    for i in gl.static_range(len(v)):
        tcgen05_mma(p.slice(64, 32), v[i].slice(64, 32), softmax.o[i], use_acc=True)
    mbarrier.wait(softmax.p_rest, phase)
    for i in gl.static_range(len(v)):
        tcgen05_mma(p.slice(96, 32), v[i].slice(96, 32), softmax.o[i], use_acc=True)


@gluon.jit
def hide_keys(softmax, first, stop):
    """Scores of keys outside [first, stop), counted from the start of the block, become -inf."""
    # In tensor memory: few blocks need it, and this way the code of all the others stays as it is.
    for start in gl.static_range(0, TILE_N, QUARTER):
        columns = start + gl.arange(0, QUARTER, gl.SliceLayout(0, row_per_thread(QUARTER)))[None, :]
        # One bit a column, made for 16 columns at a time: cheaper than a comparison for each.
        chunk = columns & -16
        seen = (1 << gl.minimum(gl.maximum(stop[:, None] - chunk, 0), 16)) - 1
        seen = seen & -(1 << gl.minimum(gl.maximum(first[:, None] - chunk, 0), 16))
        s = softmax.s.slice(start, QUARTER).load(row_per_thread(QUARTER))
        softmax.s.slice(start, QUARTER).store(gl.where((seen & (1 << (columns & 15))) != 0, s, float("-inf")))


@gluon.jit
def read(softmax, n, released):
    """The n-th numbers of rows; a slot of the `released` group is free then."""
    mbarrier.wait(softmax.rows_full.index(0), n & 1)
    values = softmax.rows.index(0).load(one_per_thread(STORE_COLUMNS))
    mbarrier.arrive(released.rows_empty.index(0))
    return values


@gluon.jit
def correct(softmax, n, later, released):
    """Take in the row factors of a block: rescale O, unless this is its first block or no maximum has moved."""
    factor = read(softmax, n, released)
    if later & (gl.max((factor != 1.0).to(gl.int32), 0) != 0):
        factors = gl.convert_layout(factor, one_per_thread(RESCALE_COLUMNS), assert_trivial=True)[:, None]
        for start in gl.static_range(0, HEAD_DIM_V, RESCALE_COLUMNS):
            o = o_columns(softmax, start, RESCALE_COLUMNS)
            o.store(packed("mul", o.load(row_per_thread(RESCALE_COLUMNS)), factors))
    mbarrier.arrive(softmax.p_ready)


@gluon.jit
def make_softmax():
    """Memory and barriers of a softmax group."""
    s = allocate_tensor_memory(gl.float32, [ROWS, TILE_N], accumulator(TILE_N))
    o = (
        allocate_tensor_memory(gl.float32, [ROWS, 64], accumulator(64)),
        allocate_tensor_memory(gl.float32, [ROWS, 32], accumulator(32)),
    )
    rows = gl.allocate_shared_memory(gl.float32, [STATS_SLOTS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rows_full = barriers(STATS_SLOTS, 1)
    rows_empty = barriers(STATS_SLOTS, 1)
    s_full = barriers(1, 1)
    o_full = barriers(1, 1)
    p_ready = barriers(1, 2)  # a softmax group and the correction role arrive
    p_rest = barriers(1, 1)
    return Softmax(s, o, s_full.index(0), p_ready.index(0), p_rest.index(0), o_full.index(0), rows, rows_full,
                   rows_empty)  # fmt: skip


# -- the roles ---------------------------------------------------------------------------------------------------------
@gluon.jit
def load_role(descs, q, kv, problem):
    """One warp: copies Q, K and V into shared memory, in the order in which the tensor core wants them."""
    q_desc, k_desc, v_desc = descs
    problem = own(problem)
    zero = gl.to_tensor(0)
    q_at, kv_at = (zero, zero), (zero, zero)
    batch, head, head_kv, row, key, blocks = work_tile(problem, program_number())
    kv_at = load(kv, kv_at, k_desc, batch, head_kv, key)
    q_at = load(q, q_at, q_desc, batch, head, row)
    q_at = load(q, q_at, q_desc, batch, head, row + ROWS)
    for _ in range(blocks - 1):
        kv_at = load(kv, kv_at, v_desc, batch, head_kv, key)
        kv_at = load(kv, kv_at, k_desc, batch, head_kv, key - TILE_N)
        key -= TILE_N
    kv_at = load(kv, kv_at, v_desc, batch, head_kv, key)


@gluon.jit
def mma_role(q, kv, softmax0, softmax1, problem):
    """One warp: matrix products.  First QK0 QK1; in the loop PV0 QK0 PV1 QK1, QK of the next block; then PV0 PV1."""
    problem = own(problem)
    zero = gl.to_tensor(0)
    q_at, kv_at = (zero, zero), (zero, zero)
    p_phase = 0
    batch, head, head_kv, row, key, blocks = work_tile(problem, program_number())
    q0, q_at = take(q, q_at)
    k_slot, kv_at = take(kv, kv_at)
    issue_qk(softmax0, tile_at(q, q0), tile_at(kv, k_slot))
    q1, q_at = take(q, q_at)
    issue_qk(softmax1, tile_at(q, q1), tile_at(kv, k_slot))
    tcgen05_commit(kv.empty.index(k_slot))
    for step in range(blocks - 1):
        v_slot, kv_at = take(kv, kv_at)
        issue_pv(softmax0, tile_at(kv, v_slot), p_phase, step != 0)
        k_slot, kv_at = take(kv, kv_at)
        issue_qk(softmax0, tile_at(q, q0), tile_at(kv, k_slot))
        issue_pv(softmax1, tile_at(kv, v_slot), p_phase, step != 0)
        tcgen05_commit(kv.empty.index(v_slot))
        issue_qk(softmax1, tile_at(q, q1), tile_at(kv, k_slot))
        tcgen05_commit(kv.empty.index(k_slot))
        p_phase = p_phase ^ 1
    v_slot, kv_at = take(kv, kv_at)
    issue_pv(softmax0, tile_at(kv, v_slot), p_phase, blocks != 1)
    tcgen05_commit(softmax0.o_full)
    issue_pv(softmax1, tile_at(kv, v_slot), p_phase, blocks != 1)
    tcgen05_commit(softmax1.o_full)
    tcgen05_commit(kv.empty.index(v_slot))


@gluon.jit
def softmax_role(GROUP: gl.constexpr, LAG: gl.constexpr, softmax, problem):
    """Four warps, one row to a thread: P = 2^(scale S - max), the row maximum and the row sum."""
    ROW: gl.constexpr = one_per_thread(QUARTER)
    dtype: gl.constexpr = problem.out.dtype.element_ty
    problem = own(problem)
    scale_log2 = problem.scale_log2
    p = p_of(softmax, dtype)
    # Numbers n wait for release n - LAG, made while the other group is served: that keeps the groups apart.
    s_phase = 0
    n = 0  # numbers of a row published so far
    batch, head, head_kv, row, key, blocks = work_tile(problem, program_number())
    row += GROUP * ROWS
    diagonal = row + problem.seqlen_k - problem.seqlen_q
    row_diagonal = diagonal + own_copy(gl.arange(0, ROWS, ROW))
    row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    row_sum = gl.full([ROWS, 2], 0.0, gl.float32, row_per_thread(2))
    mbarrier.wait(softmax.rows_empty.index(0), n - LAG & 1)
    for _ in range(blocks):
        mbarrier.wait(softmax.s_full, s_phase)
        s_phase = s_phase ^ 1
        first_row_stop = gl.minimum(diagonal + problem.window_right + 1, problem.seqlen_k)
        if (key + TILE_N > first_row_stop) | (key < diagonal + ROWS - 1 - problem.window_left):
            stop = gl.minimum(row_diagonal + problem.window_right + 1, problem.seqlen_k)
            hide_keys(softmax, row_diagonal - problem.window_left - key, stop - key)
        left, right = halves(softmax.s.load(row_per_thread(TILE_N)))
        a, b = halves(left)
        c, d = halves(right)
        key -= TILE_N
        new_max = row_maximum(a, b, c, d, row_max)
        # Small growth is left to the range of P and of the sums.  A NaN is not small: the row becomes NaN.
        next_max = gl.where((new_max - row_max) * scale_log2 <= MAX_GROWTH, row_max, new_max)
        base = gl.where(next_max == float("-inf"), 0.0, next_max)  # no visible key yet: any finite base will do
        factor = gl.exp2((row_max - base) * scale_log2)
        row_max = next_max
        softmax.rows.index(0).store(factor)
        mbarrier.arrive(softmax.rows_full.index(0))
        n += 1

        minus_base = ((base - base) - base * scale_log2)[:, None]  # base - base is NaN for an infinite score
        a = gl.exp2(fma2(a, scale_log2, minus_base))
        p.slice(0, QUARTER).store(a.to(dtype))
        b = exp2_mixed(fma2(b, scale_log2, minus_base), EXP2)
        p.slice(32, QUARTER).store(b.to(dtype))
        c = exp2_mixed(fma2(c, scale_log2, minus_base), EXP2)
        p.slice(64, QUARTER).store(c.to(dtype))
        mbarrier.arrive(softmax.p_ready)
        d = gl.exp2(fma2(d, scale_log2, minus_base))
        p.slice(96, QUARTER).store(d.to(dtype))
        mbarrier.arrive(softmax.p_rest)

        # The rest is off the path from S to P.
        mbarrier.wait(softmax.rows_empty.index(0), n - LAG & 1)
        rescale = gl.convert_layout(factor, one_per_thread(2), assert_trivial=True)
        row_sum = fma2(row_sum, rescale[:, None], row_total(a, b, c, d))
    even, odd = row_sum.split()
    total = gl.convert_layout(even + odd, ROW, assert_trivial=True)
    softmax.rows.index(0).store(total)
    mbarrier.arrive(softmax.rows_full.index(0))
    n += 1
    mbarrier.wait(softmax.rows_empty.index(0), n - LAG & 1)
    softmax.rows.index(0).store(row_max)
    mbarrier.arrive(softmax.rows_full.index(0))


@gluon.jit
def correction_role(softmax0, softmax1, problem):
    """Four warps: rescale O when a row maximum has moved; at the end divide by the row sums and store."""
    problem = own(problem)
    n = 0  # numbers of a row read so far, from each group
    batch, head, head_kv, row, key, blocks = work_tile(problem, program_number())
    for step in range(blocks):
        correct(softmax0, n, step != 0, softmax1)
        correct(softmax1, n, step != 0, softmax0)
        n += 1
    total0 = read(softmax0, n, softmax1)
    total1 = read(softmax1, n, softmax0)
    n += 1
    maximum0 = read(softmax0, n, softmax1)
    maximum1 = read(softmax1, n, softmax0)
    mbarrier.wait(softmax0.o_full, 0)
    store_rows(problem, softmax0, total0, maximum0, batch, head, row)
    mbarrier.wait(softmax1.o_full, 0)
    store_rows(problem, softmax1, total1, maximum1, batch, head, row + ROWS)


# Sizes vary from call to call: specialised on them, the kernel would be compiled anew for many.
@gluon.jit(do_not_specialize=range(8, 20))
def attention(q_desc_0, q_desc_64, k_desc_0, k_desc_64, v_desc_0, v_desc_64, out, lse, stride_b, stride_h, stride_s,
              heads_q, group, seqlen_q, seqlen_k, window_left, window_right, query_blocks, heads, heads_at_once,
              scale_log2):  # fmt: skip
    """Allocate, set up the barriers, and start the roles."""
    problem = Problem(out, lse, stride_b, stride_h, stride_s, heads_q, group, seqlen_q, seqlen_k, window_left,
                      window_right, query_blocks, heads, heads_at_once, scale_log2)  # fmt: skip
    q = make_ring((q_desc_0, q_desc_64), 2)
    kv = make_ring((k_desc_0, k_desc_64), KV_STAGES)
    # Tensor memory, 448 of 512 columns: S0 at 0, O0 at 128, S1 at 224, O1 at 352.
    softmax0 = make_softmax()
    softmax1 = make_softmax()
    gl.warp_specialize([
        (correction_role, (softmax0, softmax1, problem)),
        (softmax_role, (0, 1, softmax0, problem)),
        (softmax_role, (1, 0, softmax1, problem)),
        (mma_role, (q, kv, softmax0, softmax1, problem)),
        (load_role, (((q_desc_0, q_desc_64), (k_desc_0, k_desc_64), (v_desc_0, v_desc_64)), q, kv, problem)),
    ], [4, 4, 1, 1], [192, 192, 48, 48])  # fmt: skip


def plan(q, k, v, out, lse, window_left, window_right):
    """Grid and arguments but the scale, () for empty tensors; ValueError for what the kernel does not take."""
    if min(window_left, window_right) < -1:
        raise ValueError(f"window: expected limits of at least -1 (none), got ({window_left}, {window_right})")
    if len(q.shape) != 4 or len(k.shape) != 4 or q.shape[1] != q.shape[1] // max(k.shape[1], 1) * k.shape[1]:
        raise ValueError(f"q, k: expected 4 extents, heads of q a multiple of k's, got {[*q.shape]}, {[*k.shape]}")
    (batch, heads_q, seqlen_q, _), (_, heads_kv, seqlen_k, _) = q.shape, k.shape
    rows, keys = (batch, heads_q, seqlen_q), (batch, heads_kv, seqlen_k)
    shapes = {"q": (*rows, 96), "k": (*keys, 96), "v": (*keys, 96), "out": (*rows, 96)}
    for x, (name, shape) in zip((q, k, v, out), shapes.items()):
        want = shape, str(q.dtype) if str(q.dtype) in DTYPES else "bf16 or fp16", q.device, [0, 0, 0], (1,), 0
        got = tuple(x.shape), str(x.dtype), x.device, [n % 8 for n in x.stride()[:3]], x.stride()[3:], x.data_ptr() % 16
        if got != want:
            raise ValueError(f"{name}: expected {want}, got {got}: shape, dtype, device, strides % 8, last, start % 16")
    if (tuple(lse.shape), str(lse.dtype), lse.device) != (rows, "torch.float32", q.device) or not lse.is_contiguous():
        raise ValueError(f"lse: expected contiguous float32 {rows}, got {lse.dtype} {tuple(lse.shape)} on {lse.device}")
    if q.numel() == 0 or k.numel() == 0:  # the copy engine knows no empty tensors
        return ()
    descriptors = [
        TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, DTYPES[str(q.dtype)]))
        for x, count in ((q, ROWS), (k, TILE_N), (v, TILE_N))
        for block in ([1, 1, count.value, 64], [1, 1, count.value, 32])
    ]
    no_limit = seqlen_q + seqlen_k
    window_left = no_limit if window_left < 0 else min(window_left, no_limit)
    window_right = no_limit if window_right < 0 else min(window_right, no_limit)
    query_blocks, heads = triton.cdiv(seqlen_q, TILE_M.value), batch * heads_q
    programs = query_blocks * heads
    # As many heads at a time as have their K and V in 50 MB of L2.
    fitting = max(50 * 2**20 // (384 * seqlen_k), 1)
    heads_at_once = min(2 ** (fitting.bit_length() - 1) * (heads_q // heads_kv), heads)
    sizes = (heads_q, heads_q // heads_kv, seqlen_q, seqlen_k, window_left, window_right, query_blocks, heads,
             heads_at_once)  # fmt: skip
    return (programs, 1, 1), (*descriptors, out, lse, *(n // 8 for n in out.stride()[:3]), *sizes)


def launch(q, k, v, out, lse, scale, window_left=-1, window_right=-1):
    """Write softmax(scale * q k^T) v to `out` and the logarithm of the row sums to `lse`, unless that is None.

    q, k: (batch, heads_q | heads_kv, seqlen_q | seqlen_k, 96); v, out: the same with 96; all bf16 or all fp16,
    unit last stride, rows that start at 16 bytes.  lse: (batch, heads_q, seqlen_q), float32, contiguous.
    window_left, window_right: keys before and after the diagonal that a row sees, -1 for no limit.
    """
    if not 0.0 < scale <= 2.0e38:  # the row maximum is taken before scaling; times log2(e), 2e38 is still a float32
        raise ValueError(f"scale: expected a number above 0 and at most 2e+38, got {scale:g}")
    if lse is None:
        import torch

        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if planned := plan(q, k, v, out, lse, window_left, window_right):
        grid, arguments = planned
        attention[grid](*arguments, max(scale * LOG2E, 1e-37), **OPTIONS)  # a hidden score, -inf, times 0 would be NaN
    else:
        out.zero_()
        lse.fill_(float("-inf"))
