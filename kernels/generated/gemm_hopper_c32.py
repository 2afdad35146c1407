"""D = alpha A B + beta C on Hopper: tiles of 128 x 128, C and D in 32 bit.

A warp copies k-steps of 64 of A and B through a ring of 3 slots, another copies tiles of C ahead. Two warpgroups take
turns: one multiplies a tile while the other adds C to the last one, rounds, and hands D to the copy engine. Programs
stay and take every n-th tile, 8 rows of tiles column by column. Runs on sm_90a with triton and torch alone.  Generated
by tilecast: regenerate it instead of editing it.
"""

TILECAST = {
    "tilecast": "0.1.0", "family": "gemm_hopper", "machine": "h200-sxm", "targets": ["sm_90a"],
    "pass": "gemm",
    "variant": "family=gemm_hopper,tile_m=128,tile_n=128,tile_k=64,stages=3,accumulators=2,c_stages=2,group_m=8,cta_group=1,warps=8",
    "workload": {"m": 8192, "n": 8192, "k": 512, "dtype": "bf16", "c_dtype": "fp32", "d_dtype": "fp32", "alpha": 1.0, "beta": 1.0, "in_place": False},
}  # fmt: skip

from collections import namedtuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Names in Triton 3.6.
copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

TILE_M = gl.constexpr(128)  # rows of a tile of D
TILE_N = gl.constexpr(128)  # and its columns
TILE_K = gl.constexpr(64)  # of a k-step
STAGES = gl.constexpr(3)  # k-steps of A and B in flight
PIECE_M = gl.constexpr(128)  # rows of one warpgroup
A_PIECES = gl.constexpr(1)  # boxes that a k-step of A comes in
C_PARTS = gl.constexpr(1)  # boxes that C and D of a warpgroup move in
PART_N = gl.constexpr(128)  # and their columns
SLOTS = gl.constexpr(1)  # of C and D, for each warpgroup
GROUP_M = gl.constexpr(8)  # rows of tiles that are walked column by column
OPTIONS = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": True}


@gluon.jit
def barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers that complete a phase with every ``ARRIVALS`` arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


# One launch: sizes in tiles, factors.  Tiles of A and B on their way: number n lies in slot n % STAGES; a lap flips the phase
# of the barriers.  Tiles of C on their way in, and of D on their way out, lie in slots of their own.
Problem = namedtuple("Problem", "rows columns steps alpha beta")
Ring = namedtuple("Ring", "a b full empty")
Slots = namedtuple("Slots", "tiles full empty")


# -- work --------------------------------------------------------------------------------------------------------------
@gluon.jit
def tile_count(problem):
    """Tiles of this program, which takes every n-th of n programs."""
    return (problem.rows * problem.columns - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def tile_at(problem, turn):
    """(first row, first column) of the turn-th tile: GROUP_M rows of tiles column by column, so that B stays in L2."""
    number = gl.program_id(0) + turn * gl.num_programs(0)
    first = number // (GROUP_M * problem.columns) * GROUP_M
    rows = gl.minimum(problem.rows - first, GROUP_M)
    place = number - first * problem.columns
    return (first + place % rows) * TILE_M, place // rows * TILE_N


# -- the warps that copy -----------------------------------------------------------------------------------------------
@gluon.jit
def load_role(a_desc, b_desc, ring, problem, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr):
    """Copies tiles of A and B, k-step by k-step, once their slots are free."""
    n = 0
    for turn in range(tile_count(problem)):
        row, column = tile_at(problem, turn)
        for step in range(problem.steps):
            slot = n % STAGES
            full = ring.full.index(slot)
            mbarrier.wait(ring.empty.index(slot), n // STAGES & 1 ^ 1)
            mbarrier.expect(full, A_PIECES * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            k = step * TILE_K
            for piece in gl.static_range(A_PIECES):
                first = row + piece * PIECE_M
                copy_tile(a_desc, [first, k] if A_ROWS else [k, first], full, ring.a.index(slot * A_PIECES + piece))
            copy_tile(b_desc, [k, column] if B_ROWS else [column, k], full, ring.b.index(slot))
            n += 1


@gluon.jit
def load_c_role(c_desc, slots, problem):
    """Copies tiles of C ahead, once what lay in their slots has been stored."""
    for turn in range(tile_count(problem)):
        row, column = tile_at(problem, turn)
        g, j = turn % 2, turn // 2
        load_c(c_desc, slots, row, column, g * SLOTS + j % SLOTS, j // SLOTS)


@gluon.jit
def load_c(c_desc, slots, row, column, slot, lap):
    """Copy a tile of C into a slot that has been used ``lap`` times."""
    full = slots.full.index(slot)
    mbarrier.wait(slots.empty.index(slot), lap & 1 ^ 1)
    mbarrier.expect(full, C_PARTS * c_desc.block_type.nbytes)
    for part in gl.static_range(C_PARTS):
        copy_tile(c_desc, [row, column + part * PART_N], full, slots.tiles.index(slot * C_PARTS + part))


@gluon.jit
def sum_of(products, c, problem, ADD_C: gl.constexpr, SCALED: gl.constexpr):
    """alpha times the products plus beta times C, in float32; factors of 1 cost nothing."""
    if SCALED:
        products = products * problem.alpha
    if ADD_C:
        c = c.to(gl.float32)
        products += c * problem.beta if SCALED else c
    return products


# -- the warpgroups ----------------------------------------------------------------------------------------------------
@gluon.jit
def issue(ring, n, sums, USE_SUMS: gl.constexpr, g: gl.constexpr, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr):
    """Adds the products of k-step n, once it has landed; asynchronous."""
    slot = n % STAGES
    mbarrier.wait(ring.full.index(slot), n // STAGES & 1)
    a, b = ring.a.index(slot), ring.b.index(slot)
    a = a if A_ROWS else a.permute((1, 0))
    b = b if B_ROWS else b.permute((1, 0))
    return warpgroup_mma(a, b, sums, use_acc=USE_SUMS, is_async=True)


@gluon.jit
def product_role(
    g: gl.constexpr, d_desc, turns, ring, slots, problem, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, ADD_C: gl.constexpr,
    SCALED: gl.constexpr,
):  # fmt: skip
    """Every second tile: its products while the other warpgroup writes, then its D."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N, 16])
    j = 0
    for turn in range(g, tile_count(problem), 2):
        row, column = tile_at(problem, turn)
        n = turn * problem.steps
        zero = gl.zeros([PIECE_M, TILE_N], gl.float32, layout=layout)
        # Every k-step of the tile before has landed: without that, a wait could take an older lap of the ring for its own.
        mbarrier.wait(turns.index(g), j & 1)
        sums = issue(ring, n, zero, False, g, A_ROWS, B_ROWS)
        if j > 0:
            give_back(slots, g * SLOTS + (j - 1) % SLOTS)
        for step in range(1, problem.steps):
            sums = issue(ring, n + step, sums, True, g, A_ROWS, B_ROWS)
            # The k-step before this one has been multiplied.
            sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))
            mbarrier.arrive(ring.empty.index((n + step - 1) % STAGES), count=1)
        mbarrier.arrive(turns.index(1 - g), count=1)
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(ring.empty.index((n + problem.steps - 1) % STAGES), count=1)

        slot = g * SLOTS + j % SLOTS
        tile = slots.tiles.index(slot)
        c = sums
        if ADD_C:
            mbarrier.wait(slots.full.index(slot), j // SLOTS & 1)
            c = tile.load(layout)
        tile.store(sum_of(sums, c, problem, ADD_C, SCALED).to(d_desc.dtype))
        fence_async_shared()
        store_tile(d_desc, [row, column], tile)
        j += 1
    tma.store_wait(0)


@gluon.jit
def give_back(slots, slot):
    """The slot of the last tile, once its D has been read from it: by now it has, and products run meanwhile."""
    tma.store_wait(0)
    mbarrier.arrive(slots.empty.index(slot), count=1)


# Sizes vary from call to call: specialised on them, the kernel would be compiled anew for many.
@gluon.jit(do_not_specialize=range(4, 9))
def multiply(
    a_desc, b_desc, c_desc, d_desc, rows, columns, steps, alpha, beta, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr,
    ADD_C: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Allocate, set up the barriers, and start the roles."""
    problem = Problem(rows, columns, steps, alpha, beta)
    gl.assume(steps > 0)
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES * A_PIECES] + a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    ring = Ring(a, b, barriers(STAGES, 1), barriers(STAGES, 1))
    tiles = gl.allocate_shared_memory(d_desc.dtype, [2 * SLOTS] + d_desc.block_type.shape, d_desc.layout)
    slots = Slots(tiles, barriers(2 * SLOTS, 1), barriers(2 * SLOTS, 1))
    turns = barriers(2, 1)
    mbarrier.arrive(turns.index(0), count=1)  # the first turn
    fence_async_shared()
    if ADD_C:
        gl.warp_specialize([
            (product_role, (gl.constexpr(0), d_desc, turns, ring, slots, problem, A_ROWS, B_ROWS, ADD_C, SCALED)),
            (product_role, (gl.constexpr(1), d_desc, turns, ring, slots, problem, A_ROWS, B_ROWS, ADD_C, SCALED)),
            (load_role, (a_desc, b_desc, ring, problem, A_ROWS, B_ROWS)),
            (load_c_role, (c_desc, slots, problem)),
        ], [4, 1, 1], [232, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (product_role, (gl.constexpr(0), d_desc, turns, ring, slots, problem, A_ROWS, B_ROWS, ADD_C, SCALED)),
            (product_role, (gl.constexpr(1), d_desc, turns, ring, slots, problem, A_ROWS, B_ROWS, ADD_C, SCALED)),
            (load_role, (a_desc, b_desc, ring, problem, A_ROWS, B_ROWS)),
        ], [4, 1], [232, 24])  # fmt: skip


DTYPES = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16, "torch.float32": gl.float32}
C_BYTES = 4  # of an element of C and D: what the slots have room for


def plan(a, b, c, d, alpha, beta, sms=None):
    """Grid and arguments, () where D has no element; ValueError for what the kernel does not take."""
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0] or a.shape[1] == 0:
        raise ValueError(f"a, b: expected (m, k) and (k, n) with a k of 1 or more, got {[*a.shape]}, {[*b.shape]}")
    shape = a.shape[0], b.shape[1]
    if str(a.dtype) not in ("torch.bfloat16", "torch.float16"):
        raise ValueError(f"a: expected bf16 or fp16, got {a.dtype}")
    adds = c is not None and beta != 0
    for name, x in (("b", b), ("c", c), ("d", d)):
        if x is None or (name == "c" and not adds):
            continue
        want = (str(d.dtype), *shape) if name != "b" else (str(a.dtype), *b.shape)
        if (str(x.dtype), *x.shape) != want or x.device != a.device:
            raise ValueError(f"{name}: expected {want} on {a.device}, got {(str(x.dtype), *x.shape)} on {x.device}")
    if str(d.dtype) not in DTYPES or d.element_size() > C_BYTES:
        raise ValueError(f"d: expected bf16, fp16{' or fp32' if C_BYTES == 4 else ''}, got {d.dtype}")
    for name, x in (("a", a), ("b", b), ("c", c), ("d", d)):
        if x is None or (name == "c" and not adds):
            continue
        rows = x.stride(1) == 1 or name in "cd"
        if x.stride(1 if rows else 0) != 1 or x.stride(0 if rows else 1) * x.element_size() % 16 or x.data_ptr() % 16:
            raise ValueError(
                f"{name}: expected rows{' or columns' if name in 'ab' else ''} without gaps that start at 16 bytes, got strides {[*x.stride()]}"
            )
    if d.numel() == 0:  # the copy engine knows no empty tensors
        return ()
    a_rows, b_rows = a.stride(1) == 1, b.stride(1) == 1
    boxes = (
        (a if a_rows else a.t(), [PIECE_M.value, TILE_K.value] if a_rows else [TILE_K.value, PIECE_M.value]),
        (b if b_rows else b.t(), [TILE_K.value, TILE_N.value] if b_rows else [TILE_N.value, TILE_K.value]),
        (c if adds else d, [PIECE_M.value, PART_N.value]),
        (d, [PIECE_M.value, PART_N.value]),
    )
    descriptors = [
        TensorDescriptor.from_tensor(x, box, gl.NVMMASharedLayout.get_default_for(box, DTYPES[str(x.dtype)]))
        for x, box in boxes
    ]
    rows, columns = -(-shape[0] // TILE_M.value), -(-shape[1] // TILE_N.value)
    if sms is None:
        sms = triton.runtime.driver.active.utils.get_device_properties(a.device.index)["multiprocessor_count"]
    sizes = rows, columns, -(-a.shape[1] // TILE_K.value), float(alpha), float(beta)
    return (min(rows * columns, sms), 1, 1), (
        *descriptors,
        *sizes,
        a_rows,
        b_rows,
        adds,
        alpha != 1 or beta not in (0, 1),
    )


def launch(a, b, c, d, alpha=1.0, beta=1.0):
    """Write alpha a b + beta c to `d`, which may be `c`; `c` is not read where beta is 0.

    a: (m, k), b: (k, n), both bf16 or both fp16, with rows or columns without gaps; c, d: (m, n), of one dtype (bf16, fp16 or fp32), with
    rows without gaps; all start and step at multiples of 16 bytes.  Sums are float32 and in a fixed order.
    """
    if planned := plan(a, b, c, d, alpha, beta):
        grid, arguments = planned
        multiply[grid](*arguments, **OPTIONS)
