"""Attention forward for head_dim 64 on Blackwell: FlashAttention-4 in Gluon.

Every query sees every key.
A unit of work is two tiles of 256 query rows (128 in each of two CTAs that multiply together); each has a softmax group of four warps, and they share K and V.
One warp loads, one issues matrix products, four warps correct the output and store it.
S, P and O stay in tensor memory; keys go from the last block to the first, masked blocks first.
0.1875 of the exponentials run on the FMA pipe, degree 3.
Programs stay and take every n-th unit.
"""

TILECAST = {
    "tilecast": "0.1.0", "family": "blackwell_ws", "machine": "b200", "targets": ["sm_100a", "sm_103a"],
    "variant": "family=fa4,tile_m=128,tile_n=128,stages=2,split=q,kv_stages=0,cta_group=2,emulated_share=0.1875,poly_degree=3,rescale_threshold=8,split_p=true,stats_slots=1,load_max=false,scheduler=persistent",
    "workload": {"batch": 4, "heads_q": 32, "heads_kv": 32, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim_qk": 64, "head_dim_v": 64, "mask": "none", "window": None, "dtype": "bf16"},
}  # fmt: skip

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory, mbarrier
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_commit, tcgen05_mma, tensor_memory_descriptor
from triton.experimental.gluon.language.nvidia.blackwell import tma
from triton.experimental.gluon.nvidia.blackwell import TensorDescriptor

if not hasattr(mbarrier, "allocate_mbarrier"):
    raise ImportError("a pair of CTAs that multiplies together needs Triton 3.9 or later")

TILE_M = gl.constexpr(512)  # query rows of a work tile
ROWS = gl.constexpr(256)  # query rows of a softmax group, half of them in each CTA of the pair
TILE_N = gl.constexpr(128)  # keys of a block
HEAD_DIM_V = gl.constexpr(64)  # columns of V and O
QUARTER = gl.constexpr(32)  # columns of S and P worked on at a time
K_STAGES = gl.constexpr(12)  # K blocks in flight
V_STAGES = gl.constexpr(12)  # V blocks in flight
STATS_SLOTS = gl.constexpr(1)  # row factors on their way from a softmax group to the correction role
MAX_GROWTH = gl.constexpr(8.0)  # a row maximum may grow by this many powers of two before O is rescaled
RESCALE_COLUMNS = gl.constexpr(16)  # columns of O the correction role takes into registers at a time
STORE_COLUMNS = gl.constexpr(16)  # the same when it stores O: one 32-byte sector a row
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = 1.4426950408889634
DTYPES = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16}
# Every fused multiply-add is written as one; register allocation at level 2, which Triton 3.9 asks for, spills.
OPTIONS = {"maxnreg": 128, "enable_fp_fusion": False, "ptx_options": "--regAllocOptLevel=4", "num_warps": 4, "num_ctas": 2}  # fmt: skip
PLANS = {}  # what a launch works out for a shape: the second one of that shape takes half the time on the host


# -- arithmetic: a thread owns a row and works on two neighbouring columns at a time -----------------------------------
@gluon.constexpr_function
def row_per_thread(columns):
    """Register layout of [ROWS, columns]: lane l of warp w owns row 32 w + l, as tcgen05.ld and tcgen05.st have it."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1 << bit] for bit in range(columns.bit_length() - 1)],
        lane_bases=[[1 << bit, 0] for bit in range(5)],
        warp_bases=[[32, 0], [64, 0]],
        block_bases=[[128, 0]],
        shape=[256, columns],
    )


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
    MAX3: gl.constexpr = "max.NaN.ftz.f32 $0, $1, $2, $3;"
    return gl.inline_asm_elementwise(MAX3, "=r,r,r,r", [a, b, c], gl.float32, is_pure=True, pack=1)


@gluon.jit
def halves(x):
    """The left and the right half of the columns; registers get new names, nothing moves."""
    COLUMNS: gl.constexpr = x.shape[1] // 2
    left, right = x.reshape([ROWS, 2, COLUMNS]).permute(0, 2, 1).split()
    left = gl.convert_layout(left, row_per_thread(COLUMNS), assert_trivial=True)
    return left, gl.convert_layout(right, row_per_thread(COLUMNS), assert_trivial=True)


@gluon.jit
def row_maximum(a, b, c, d, start):
    """The largest of `start` and the four quarters of a row."""
    most = max3(a, b, c)
    rest = d
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
    """PTX for 2^x of 32 neighbouring columns: those in `columns` on the FMA pipe, in pairs, the others on MUFU.

    x = n + f with n = floor(x): adding 1.5 * 2^23 and rounding down leaves n in the low bits of the sum.  The bits of
    2^f (FlashAttention-4's polynomial of degree 3), with n added to the exponent field, are 2^x.  Arguments below -127
    give 0.
    """
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


# 24 of the 128 columns of a row bypass the special function unit (MUFU).
EXP2 = gl.constexpr(exp2_ptx((6, 8, 16, 18, 26, 28)))
EXP2_OPERANDS = gl.constexpr(",".join(["=r"] * 32 + ["r"] * 32))


@gluon.jit
def exp2_mixed(x, PTX: gl.constexpr):
    """2^x of a quarter of a row, some of it on the FMA pipe."""
    return gl.inline_asm_elementwise(PTX, EXP2_OPERANDS, [x], gl.float32, is_pure=True, pack=QUARTER)


# -- what the roles share ----------------------------------------------------------------------------------------------
@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr, BY_PAIR: gl.constexpr):
    """Barriers that complete a phase with every `ARRIVALS` arrivals; one for both CTAs, or one in each."""
    made = mbarrier.allocate_mbarrier(COUNT, two_ctas=BY_PAIR)
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.aggregate
class Ring:
    """Tiles on their way through shared memory, in slots that take turns.

    A place is a slot and the phase of its barriers, which flips when the ring starts over.
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def after(self, slot, phase):
        """The next place."""
        last = slot == self.full.shape[0] - 1
        return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)

    @gluon.jit
    def load(self, place, desc, batch, head, row):
        """Copy the tile that starts at `row` of a head, once its slot is free; the next place."""
        slot, phase = place
        full = self.full.index(slot)
        mbarrier.wait(self.empty.index(slot), phase ^ 1)
        mbarrier.expect(full, desc.nbytes_per_cta)
        tma.async_load(desc, [batch, head, row, 0], full, self.tiles.index(slot))
        return self.after(slot, phase)

    @gluon.jit
    def take(self, place):
        """Wait until a tile has landed; its slot, and the next place."""
        slot, phase = place
        mbarrier.wait(self.full.index(slot), phase)
        return slot, self.after(slot, phase)

    @gluon.jit
    def tile(self, slot):
        """The tile in a slot as a matrix."""
        return self.tiles.index(slot).reshape([self.tiles.shape[3], self.tiles.shape[4]])

    @gluon.jit
    def release(self, slot):
        """Give a slot back when the matrix products so far are done."""
        tcgen05_commit(self.empty.index(slot))


@gluon.jit
def make_ring(desc, SLOTS: gl.constexpr):
    """An empty ring for the tiles of a descriptor."""
    tiles = gl.allocate_shared_memory(desc.dtype, [SLOTS] + desc.block_type.shape, desc.layout)
    full = barriers(SLOTS, 1, True)
    empty = barriers(SLOTS, 1, False)
    return Ring(tiles, full, empty)


@gluon.jit
def own_copy(x):
    """``x``, opaque to the compiler: what roles compute alike, it would compute once before they part, and spill."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def program_number():
    """Number of this program, read by every role for itself: one read for all would hold a register through all of them."""
    NUMBER: gl.constexpr = "mov.u32 $0, %clusterid.x;"
    return gl.inline_asm_elementwise(NUMBER, "=r,r", [gl.to_tensor(0)], gl.int32, is_pure=False, pack=1)


@gluon.aggregate
class Problem:
    """One launch: outputs (strides in units of 8 elements), sizes, and how work is dealt to programs."""

    out: gl.tensor
    lse: gl.tensor
    stride_b: gl.tensor
    stride_h: gl.tensor
    stride_s: gl.tensor
    heads_q: gl.tensor
    group: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    query_blocks: gl.tensor
    heads: gl.tensor
    programs: gl.tensor
    scale_log2: gl.tensor

    @gluon.jit
    def own(self):
        """A role's own copy of the sizes: work that the roles share, the compiler does before they part, and spills."""
        return Problem(
            self.out, self.lse, self.stride_b, self.stride_h, self.stride_s, own_copy(self.heads_q),
            own_copy(self.group), own_copy(self.seqlen_q), own_copy(self.seqlen_k), own_copy(self.query_blocks),
            own_copy(self.heads), own_copy(self.programs), self.scale_log2,
        )  # fmt: skip

    @gluon.jit
    def work_tile(self, tile):
        """Batch, query head and first query row of a work tile."""
        head = tile // self.query_blocks
        row = tile % self.query_blocks * TILE_M
        return head // self.heads_q, head % self.heads_q, row

    @gluon.jit
    def key_blocks(self, row):
        """First key of the last key block that a work tile sees, and how many blocks there are."""
        blocks = gl.cdiv(self.seqlen_k, TILE_N)
        return (blocks - 1) * TILE_N, blocks

    @gluon.jit
    def store_rows(self, softmax, total, maximum, batch, head, row):
        """Write the logarithms of the row sums, then O over these; each thread writes its row."""
        # Own copies: what the stores of two groups have in common would hold registers through the first of them.
        batch, head, row = own_copy(batch), own_copy(head), own_copy(row)
        rows = row + gl.arange(0, ROWS, total.type.layout)
        empty = total == 0.0
        valid = rows < self.seqlen_q
        lse = gl.where(empty, float("-inf"), (maximum * self.scale_log2 + gl.log2(total)) * LN2)
        gl.store(self.lse + (batch * self.heads_q + head).to(gl.int64) * self.seqlen_q + rows, lse, mask=valid)
        inverse = gl.where(empty, 0.0, 1.0 / total)
        head_start = batch.to(gl.int64) * self.stride_b + head.to(gl.int64) * self.stride_h
        out = (self.out + 8 * (head_start + rows.to(gl.int64) * self.stride_s))[:, None]
        columns = gl.arange(0, STORE_COLUMNS, gl.SliceLayout(0, row_per_thread(STORE_COLUMNS)))[None, :]
        for start in gl.static_range(0, HEAD_DIM_V, STORE_COLUMNS):
            o = softmax.o.slice(start, STORE_COLUMNS).load(row_per_thread(STORE_COLUMNS))
            o = gl.where(empty[:, None], 0.0, packed("mul", o, inverse[:, None])).to(out.dtype.element_ty)
            gl.store(out + (start + columns), o, mask=valid[:, None])


@gluon.constexpr_function
def accumulator(columns):
    """Layout of [ROWS, columns] of float32 in tensor memory."""
    return TensorMemoryLayout((128, columns), col_stride=1, cga_layout=[[1, 0]], two_ctas=True)


@gluon.aggregate
class Softmax:
    """What a softmax group works on, and its barriers with the matrix role and the correction role."""

    s: tensor_memory_descriptor
    o: tensor_memory_descriptor
    s_full: gl.shared_memory_descriptor  # S is complete
    p_ready: gl.shared_memory_descriptor  # three quarters of P are stored, and O is rescaled
    p_rest: gl.shared_memory_descriptor  # the last quarter of P is stored
    o_full: gl.shared_memory_descriptor  # O is complete
    rows: gl.shared_memory_descriptor  # for the correction role: in turn factors of blocks, row sums, row maxima
    stats_full: gl.shared_memory_descriptor
    stats_empty: gl.shared_memory_descriptor

    @gluon.jit
    def p(self, dtype: gl.constexpr):
        """P in tensor memory: the right half of the columns of S, which are free once S is in registers."""
        right = self.s.slice(TILE_N // 2, TILE_N // 2)
        return right.reinterpret(dtype, [ROWS, TILE_N], accumulator(TILE_N))

    @gluon.jit
    def qk(self, q, k):
        """S = Q K^T."""
        tcgen05_mma(q, k.permute((1, 0)), self.s, use_acc=False)
        tcgen05_commit(self.s_full)

    @gluon.jit
    def pv(self, v, phase, use_acc):
        """O += P V, on three quarters of P while the softmax group works on the last one."""
        p = self.p(v.dtype)
        mbarrier.wait(self.p_ready, phase)
        tcgen05_mma(p.slice(0, 64), v.slice(0, 64), self.o, use_acc=use_acc)
        tcgen05_mma(p.slice(64, 32), v.slice(64, 32), self.o, use_acc=True)
        mbarrier.wait(self.p_rest, phase)
        tcgen05_mma(p.slice(96, 32), v.slice(96, 32), self.o, use_acc=True)

    @gluon.jit
    def hide_keys(self, stop):
        """Scores of keys outside [0, stop), counted from the start of the block, become -inf.

        In tensor memory: few blocks need it, and this way the code of all the others stays as it is.
        """
        for start in gl.static_range(0, TILE_N, QUARTER):
            columns = start + gl.arange(0, QUARTER, gl.SliceLayout(0, row_per_thread(QUARTER)))[None, :]
            # One bit a column, made for 16 columns at a time: cheaper than a comparison for each.
            chunk = columns & -16
            seen = (1 << gl.minimum(gl.maximum(stop - chunk, 0), 16)) - 1
            s = self.s.slice(start, QUARTER).load(row_per_thread(QUARTER))
            self.s.slice(start, QUARTER).store(gl.where((seen & (1 << (columns & 15))) != 0, s, float("-inf")))

    @gluon.jit
    def wait_empty(self, n):
        """Until release number n of a slot for numbers of rows has happened."""
        mbarrier.wait(self.stats_empty.index(0), n & 1)

    @gluon.jit
    def publish(self, n, values):
        """Write numbers of rows, the n-th ones."""
        self.rows.index(0).store(values)
        mbarrier.arrive(self.stats_full.index(0))

    @gluon.jit
    def read(self, n, released):
        """The n-th numbers of rows; a slot of the `released` group is free then."""
        mbarrier.wait(self.stats_full.index(0), n & 1)
        values = self.rows.index(0).load(one_per_thread(STORE_COLUMNS))
        mbarrier.arrive(released.stats_empty.index(0))
        return values

    @gluon.jit
    def correct(self, n, later, released):
        """Take in the row factors of a block: rescale O, unless this is its first block."""
        factor = self.read(n, released)
        if later:
            factors = gl.convert_layout(factor, one_per_thread(RESCALE_COLUMNS), assert_trivial=True)[:, None]
            for start in gl.static_range(0, HEAD_DIM_V, RESCALE_COLUMNS):
                o = self.o.slice(start, RESCALE_COLUMNS)
                o.store(packed("mul", o.load(row_per_thread(RESCALE_COLUMNS)), factors))
        mbarrier.arrive(self.p_ready)


@gluon.jit
def make_softmax():
    """Memory and barriers of a softmax group."""
    s = allocate_tensor_memory(gl.float32, [ROWS, TILE_N], accumulator(TILE_N))
    o = allocate_tensor_memory(gl.float32, [ROWS, 64], accumulator(64))
    ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=[[1]])
    rows = gl.allocate_shared_memory(gl.float32, [STATS_SLOTS, ROWS], ONE)
    stats_full = barriers(STATS_SLOTS, 1, False)
    stats_empty = barriers(STATS_SLOTS, 1, False)
    s_full = barriers(1, 1, False)
    o_full = barriers(1, 1, False)
    p_ready = barriers(1, 2, True)  # a softmax group and the correction role arrive
    p_rest = barriers(1, 1, True)
    return Softmax(
        s, o, s_full.index(0), p_ready.index(0), p_rest.index(0), o_full.index(0), rows, stats_full, stats_empty,
    )  # fmt: skip


# -- the roles ---------------------------------------------------------------------------------------------------------
@gluon.jit
def load_role(descs, rings, problem):
    """One warp: copies Q, K and V into shared memory, in the order in which the tensor core wants them."""
    q_desc, k_desc, v_desc = descs
    q, k, v = rings
    problem = problem.own()
    zero = gl.to_tensor(0)
    q_at, k_at, v_at = (zero, zero), (zero, zero), (zero, zero)
    for tile in range(program_number(), problem.query_blocks * problem.heads, problem.programs):
        batch, head, row = problem.work_tile(tile)
        head_kv = head // problem.group
        key, blocks = problem.key_blocks(row)
        k_at = k.load(k_at, k_desc, batch, head_kv, key)
        q_at = q.load(q_at, q_desc, batch, head, row)
        q_at = q.load(q_at, q_desc, batch, head, row + ROWS)
        for _ in range(blocks - 1):
            v_at = v.load(v_at, v_desc, batch, head_kv, key)
            k_at = k.load(k_at, k_desc, batch, head_kv, key - TILE_N)
            key -= TILE_N
        v_at = v.load(v_at, v_desc, batch, head_kv, key)


@gluon.jit
def mma_role(rings, softmaxes, problem):
    """One warp: issues the matrix products; the tensor core runs them in this order.

    Before the loop QK0 QK1; in it PV0 QK0 PV1 QK1, QK of the next block; after it PV0 PV1.
    """
    q, k, v = rings
    softmax0, softmax1 = softmaxes
    problem = problem.own()
    zero = gl.to_tensor(0)
    q_at, k_at, v_at = (zero, zero), (zero, zero), (zero, zero)
    p_phase = 0
    for tile in range(program_number(), problem.query_blocks * problem.heads, problem.programs):
        batch, head, row = problem.work_tile(tile)
        key, blocks = problem.key_blocks(row)
        q0, q_at = q.take(q_at)
        k_slot, k_at = k.take(k_at)
        softmax0.qk(q.tile(q0), k.tile(k_slot))
        q1, q_at = q.take(q_at)
        softmax1.qk(q.tile(q1), k.tile(k_slot))
        k.release(k_slot)
        for step in range(blocks - 1):
            v_slot, v_at = v.take(v_at)
            softmax0.pv(v.tile(v_slot), p_phase, step != 0)
            k_slot, k_at = k.take(k_at)
            softmax0.qk(q.tile(q0), k.tile(k_slot))
            softmax1.pv(v.tile(v_slot), p_phase, step != 0)
            v.release(v_slot)
            softmax1.qk(q.tile(q1), k.tile(k_slot))
            k.release(k_slot)
            p_phase = p_phase ^ 1
        # Every QK of this work tile has been issued: when they are done, Q may be overwritten.
        q.release(q0)
        q.release(q1)
        v_slot, v_at = v.take(v_at)
        softmax0.pv(v.tile(v_slot), p_phase, blocks != 1)
        tcgen05_commit(softmax0.o_full)
        softmax1.pv(v.tile(v_slot), p_phase, blocks != 1)
        tcgen05_commit(softmax1.o_full)
        v.release(v_slot)
        p_phase = p_phase ^ 1


@gluon.jit
def softmax_role(GROUP: gl.constexpr, LAG: gl.constexpr, softmax, problem):
    """Four warps, one row to a thread: P = 2^(scale S - max), the row maximum and the row sum.

    Row statistics number n wait for release number n - LAG, which the correction role makes while it serves the other group:
    that keeps the groups apart.
    """
    ROW: gl.constexpr = one_per_thread(QUARTER)
    dtype: gl.constexpr = problem.out.dtype.element_ty
    problem = problem.own()
    scale_log2 = problem.scale_log2
    p = softmax.p(dtype)
    s_phase = 0
    n = 0  # numbers of a row published so far
    for tile in range(program_number(), problem.query_blocks * problem.heads, problem.programs):
        batch, head, row = problem.work_tile(tile)
        key, blocks = problem.key_blocks(row)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        row_sum = gl.full([ROWS, 2], 0.0, gl.float32, row_per_thread(2))
        softmax.wait_empty(n - LAG)
        for _ in range(blocks):
            mbarrier.wait(softmax.s_full, s_phase)
            s_phase = s_phase ^ 1
            if key + TILE_N > problem.seqlen_k:
                softmax.hide_keys(problem.seqlen_k - key)
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
            softmax.publish(n, factor)
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
            softmax.wait_empty(n - LAG)
            rescale = gl.convert_layout(factor, one_per_thread(2), assert_trivial=True)
            row_sum = fma2(row_sum, rescale[:, None], row_total(a, b, c, d))
        even, odd = row_sum.split()
        softmax.publish(n, gl.convert_layout(even + odd, ROW, assert_trivial=True))
        n += 1
        softmax.wait_empty(n - LAG)
        softmax.publish(n, row_max)
        n += 1


@gluon.jit
def correction_role(softmaxes, problem):
    """Four warps: rescale O when a row maximum has moved; at the end divide by the row sums and store."""
    softmax0, softmax1 = softmaxes
    problem = problem.own()
    n = 0  # numbers of a row read so far, from each group
    o_phase = 0
    for tile in range(program_number(), problem.query_blocks * problem.heads, problem.programs):
        batch, head, row = problem.work_tile(tile)
        key, blocks = problem.key_blocks(row)
        for step in range(blocks):
            softmax0.correct(n, step != 0, softmax1)
            softmax1.correct(n, step != 0, softmax0)
            n += 1
        total0 = softmax0.read(n, softmax1)
        total1 = softmax1.read(n, softmax0)
        n += 1
        maximum0 = softmax0.read(n, softmax1)
        maximum1 = softmax1.read(n, softmax0)
        n += 1
        mbarrier.wait(softmax0.o_full, o_phase)
        problem.store_rows(softmax0, total0, maximum0, batch, head, row)
        mbarrier.wait(softmax1.o_full, o_phase)
        problem.store_rows(softmax1, total1, maximum1, batch, head, row + ROWS)
        o_phase = o_phase ^ 1


# Sizes vary from call to call: specialised on them, the kernel would be compiled anew for many.
@gluon.jit(do_not_specialize=range(5, 15))
def attention(
    q_desc, k_desc, v_desc, out, lse, stride_b, stride_h, stride_s, heads_q, group, seqlen_q, seqlen_k, query_blocks,
    heads, programs, scale_log2,
):  # fmt: skip
    """Allocate, set up the barriers, and start the roles."""
    problem = Problem(
        out, lse, stride_b, stride_h, stride_s, heads_q, group, seqlen_q, seqlen_k, query_blocks, heads, programs,
        scale_log2,
    )  # fmt: skip
    descs = (q_desc, k_desc, v_desc)
    q = make_ring(descs[0], 2)
    k = make_ring(descs[1], K_STAGES)
    v = make_ring(descs[2], V_STAGES)
    rings = (q, k, v)
    # Tensor memory, 384 of 512 columns: S0 at 0, O0 at 128, S1 at 192, O1 at 320.
    softmax0 = make_softmax()
    softmax1 = make_softmax()
    gl.warp_specialize([
        (correction_role, ((softmax0, softmax1), problem)),
        (softmax_role, (0, 1, softmax0, problem)),
        (softmax_role, (1, 0, softmax1, problem)),
        (mma_role, (rings, (softmax0, softmax1), problem)),
        (load_role, (descs, rings, problem)),
    ], [4, 4, 1, 1], [200, 200, 48, 48])  # fmt: skip


# -- host --------------------------------------------------------------------------------------------------------------
def on(descriptor, tensor):
    """The descriptor of another tensor with the same shape, strides and alignment, which are all that is checked."""
    copy = object.__new__(TensorDescriptor)
    copy.__dict__.update(descriptor.__dict__, base=tensor)
    return copy


def prepare(q, k, v, out, lse, window_left, window_right):
    """What launches of one shape share, or () for empty tensors; ValueError for what this kernel does not take."""
    if (window_left, window_right) not in ((-1, -1),):
        raise ValueError(f"window: this kernel has no window, got ({window_left}, {window_right})")
    if len(q.shape) != 4 or len(k.shape) != 4:
        raise ValueError(f"q, k: expected (batch, heads, seqlen, head_dim), got {tuple(q.shape)}, {tuple(k.shape)}")
    (batch, heads_q, seqlen_q, _), (_, heads_kv, seqlen_k, _) = q.shape, k.shape
    if heads_q != heads_q // max(heads_kv, 1) * heads_kv:
        raise ValueError(f"q: expected heads a multiple of the {heads_kv} key/value heads, got {heads_q}")
    rows, keys = (batch, heads_q, seqlen_q), (batch, heads_kv, seqlen_k)
    shapes = {"q": (*rows, 64), "k": (*keys, 64), "v": (*keys, 64), "out": (*rows, 64)}
    for tensor, (name, shape) in zip((q, k, v, out), shapes.items()):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
        if str(tensor.dtype) not in DTYPES or tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(f"{name}: expected bf16 or fp16 on one device as q, got {tensor.dtype} on {tensor.device}")
        if tensor.stride(3) != 1 or any(s % 8 for s in tensor.stride()[:3]) or tensor.data_ptr() % 16:
            raise ValueError(f"{name}: expected gapless rows that start at 16 bytes, got strides {tensor.stride()}")
    if tuple(lse.shape) != rows or str(lse.dtype) != "torch.float32" or not lse.is_contiguous():
        raise ValueError(f"lse: expected contiguous float32 {rows}, got {lse.dtype} {tuple(lse.shape)}")
    if q.numel() == 0 or k.numel() == 0:  # the copy engine knows no empty tensors
        return ()
    descriptors = []
    for tensor, row_count, split, columns in (
        (q, ROWS, [0, 0, 1, 0], 64),
        (k, TILE_N, [0, 0, 1, 0], 64),
        (v, TILE_N, [0, 0, 0, 1], 64),
    ):
        block = [1, 1, row_count.value, columns]
        layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[str(q.dtype)], cga_layout=[split])
        descriptors.append(TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout))
    query_blocks, heads = triton.cdiv(seqlen_q, TILE_M.value), batch * heads_q
    programs = query_blocks * heads
    sms = triton.runtime.driver.active.utils.get_device_properties(q.device.index)["multiprocessor_count"]
    programs = min(programs, sms // 2)
    strides = (stride // 8 for stride in out.stride()[:3])
    numbers = (*strides, heads_q, heads_q // heads_kv, seqlen_q, seqlen_k, query_blocks, heads, programs)
    # An interpreter compiles nothing.
    kernel = attention.warmup(*descriptors, out, lse, *numbers, 1.0, grid=(programs,), **OPTIONS) or attention
    return kernel, (programs, 1, 1), [on(made, None) for made in descriptors], numbers


def launch(q, k, v, out, lse, scale, window_left=-1, window_right=-1):
    """Write softmax(scale * q k^T) v to `out` and the logarithm of the row sums to `lse`, unless that is None.

    q, k: (batch, heads_q | heads_kv, seqlen_q | seqlen_k, 64); v, out: the same with 64; all bf16 or all fp16,
    unit last stride, rows that start at 16 bytes.  lse: (batch, heads_q, seqlen_q), float32, contiguous.
    """
    if not 0.0 < scale <= 2.0e38:  # the row maximum is taken before scaling; times log2(e), 2e38 is still a float32
        raise ValueError(f"scale: expected a number above 0 and at most 2e+38, got {scale:g}")
    scale_log2 = max(scale * LOG2E, 1e-37)  # a hidden score is -inf, which times 0 would be NaN
    if lse is None:
        import torch

        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    # All that compiled code, its arguments and the checks depend on, but addresses and scale.
    tensors = [(t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in (q, k, v, out, lse)]
    key = (q.device, *tensors, window_left, window_right)
    plan = PLANS.get(key)
    if plan is None:
        if len(PLANS) >= 256:
            PLANS.clear()
        plan = PLANS[key] = prepare(q, k, v, out, lse, window_left, window_right)
    if plan:
        kernel, grid, descriptors, numbers = plan
        kernel[grid](*map(on, descriptors, (q, k, v)), out, lse, *numbers, scale_log2)
    else:
        out.zero_()
        lse.fill_(float("-inf"))
