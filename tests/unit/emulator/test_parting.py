"""The warps of one role are not in step: what the compiler does not order among them, and what it does."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilecast
from tilecast.emulator.errors import AllocationError, BarrierError, RaceError
from tilecast.emulator.values.layouts import (
    BlockedLayout,
    DistributedLinearLayout,
    DotOperandLayout,
    NvmmaDistributedLayout,
    SliceLayout,
)
from tilecast.emulator.values.owners import SEVERAL, warps_of

IMPORTS = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout, allocate_tensor_memory, fence_async_shared, get_tmem_reg_layout, mbarrier, tcgen05_commit, tcgen05_mma,
)

FORWARD: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
# Four elements a thread: another warp's.
WIDE: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])


@gluon.jit
def both(a, b, c, d):
    return a + c, b + d


"""


def module(tmp_path: Path, body: str, **options: Any) -> types.ModuleType:
    path = tmp_path / "kernels.py"
    path.write_text(IMPORTS + body)
    found: types.ModuleType = tilecast.emulated(path, machine="b200", **options)
    return found


def run(tmp_path: Path, body: str, *, warps: int = 4, **options: Any) -> Any:
    out = np.zeros(1024, np.float32)
    kernel = "@gluon.jit\ndef kernel(out):\n" + "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    module(tmp_path, kernel, **options).kernel[(1,)](out, num_warps=warps)
    return out


GLOBAL = """
gl.store(out + gl.arange(0, 512, layout=FORWARD), gl.arange(0, 512, layout=FORWARD).to(gl.float32))
BETWEEN
gl.store(out + 512 + gl.arange(0, 512, layout=WIDE), gl.load(out + gl.arange(0, 512, layout=WIDE)))
"""


MEETINGS = pytest.mark.parametrize(
    "between",
    [
        "gl.barrier()",
        "gl.barrier(cluster=True)",
        "gl.sum(gl.arange(0, 512, layout=FORWARD), 0)",
        "gl.arange(0, 512, layout=FORWARD).sum(0)",
        "gl.reduce((gl.arange(0, 512, layout=FORWARD), gl.arange(0, 512, layout=FORWARD)), 0, both)",
    ],
)


def test_what_one_warp_stores_to_global_memory_another_may_load_too_early(tmp_path: Path) -> None:
    with pytest.raises(
        RaceError, match=r"another stores it at line \d+: gl.store\(out \+ gl.arange\(0, 512, layout=FOR"
    ):
        run(tmp_path, GLOBAL.replace("BETWEEN", ""))


@MEETINGS
def test_what_makes_the_warps_meet_orders_their_accesses(tmp_path: Path, between: str) -> None:
    assert (run(tmp_path, GLOBAL.replace("BETWEEN", between))[512:] == np.arange(512)).all()


def test_one_warp_is_in_step_with_itself(tmp_path: Path) -> None:
    one = GLOBAL.replace("BETWEEN", "").replace("FORWARD", "gl.BlockedLayout([1], [32], [1], [0])")
    run(tmp_path, one.replace("WIDE", "gl.BlockedLayout([4], [32], [1], [0])"), warps=1)


def test_elements_that_stay_with_their_warp_are_in_order(tmp_path: Path) -> None:
    run(tmp_path, GLOBAL.replace("BETWEEN", "").replace("WIDE", "FORWARD"))


def test_what_another_warp_still_loads_is_not_to_be_stored(tmp_path: Path) -> None:
    body = "x = gl.load(out + gl.arange(0, 512, layout=FORWARD))\ngl.store(out + 64 + gl.arange(0, 512, layout=FORWARD), x + 1)"
    with pytest.raises(RaceError, match=r"one stores it at .*; another loads it at"):
        run(tmp_path, body)


def test_a_scalar_that_the_first_warp_stores_is_not_there_for_the_others(tmp_path: Path) -> None:
    body = "gl.store(out, 1.0)\nBETWEEN\ngl.store(out + 1, gl.load(out))"
    with pytest.raises(RaceError, match="element 0 of"):
        run(tmp_path, body.replace("BETWEEN", ""))
    assert run(tmp_path, body.replace("BETWEEN", "gl.barrier()"))[1] == 1


PRODUCTS = """
@gluon.jit
def kernel(out):
    a = gl.allocate_shared_memory(gl.float16, [128, 64], gl.NVMMASharedLayout.get_default_for([128, 64], gl.float16))
    b = gl.allocate_shared_memory(gl.float16, [64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16))
    a.store(gl.full([128, 64], 1.0, gl.float16, layout=gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    b.store(gl.full([64, 64], 1.0, gl.float16, layout=gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    fence_async_shared()
    memory: gl.constexpr = TensorMemoryLayout([128, 64], col_stride=1)
    layout: gl.constexpr = get_tmem_reg_layout(gl.float32, [128, 64], memory, 4)
    acc = allocate_tensor_memory(gl.float32, [128, 64], memory)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    tcgen05_mma(a, b, acc, use_acc=False)
    tcgen05_commit(bars.index(0))
    mbarrier.wait(bars.index(0), 0)
    x = acc.load(layout)
    BETWEEN
    tcgen05_mma(a, b, acc, use_acc=True)
    tcgen05_commit(bars.index(1))
    mbarrier.wait(bars.index(1), 0)
    gl.store(out + gl.arange(0, 128, gl.SliceLayout(1, layout)), gl.max(acc.load(layout) - x, 1))
"""


def test_one_warp_issues_a_product_while_others_still_load_what_it_overwrites(tmp_path: Path) -> None:
    out = np.zeros(128, np.float32)
    with pytest.raises(RaceError, match=r"race on tensor memory acc: .* one warp issues it, .*Triton 3.6"):
        module(tmp_path, PRODUCTS.replace("BETWEEN", "")).kernel[(1,)](out)
    module(tmp_path, PRODUCTS.replace("BETWEEN", "gl.barrier()")).kernel[(1,)](out)
    assert (out == 64).all()


def test_the_compiler_that_is_counted_on_says_whether_warps_meet_before_a_product(tmp_path: Path) -> None:
    out = np.zeros(128, np.float32)
    module(tmp_path, PRODUCTS.replace("BETWEEN", ""), triton="3.9").kernel[(1,)](out)
    assert (out == 64).all()
    with pytest.raises(RaceError, match="one warp issues it"):
        module(tmp_path, PRODUCTS.replace("BETWEEN", ""), triton="3.6").kernel[(1,)](out)


VOTE = '''
DECLARE: gl.constexpr = ".reg .b32 mine; mov.b32 $0, 0;"
ASK: gl.constexpr = """{ .reg .pred above; setp.gt.f32 above, $1, 0f3f000000;
vote.sync.any.pred above, above, -1; selp.b32 mine, 1, 0, above; mov.b32 $0, $1; }"""


@gluon.jit
def kernel(out):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    gl.inline_asm_elementwise(DECLARE, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
    x = gl.arange(0, 512, layout=FORWARD).to(gl.float32)
    gl.inline_asm_elementwise(ASK, "=r,f", [x], dtype=gl.int32, is_pure=False, pack=1)
    if gl.inline_asm_elementwise("mov.b32 $0, mine;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1) == 1:
        x = x * 2
        INSIDE
    gl.barrier()
    gl.store(out + gl.arange(0, 512, layout=FORWARD), x)
'''


def test_where_each_warp_decides_by_itself_they_cannot_meet(tmp_path: Path) -> None:
    out = np.zeros(512, np.float32)
    module(tmp_path, VOTE.replace("INSIDE", "pass")).kernel[(1,)](out)
    assert (out == 2 * np.arange(512)).all()
    for inside in ("mbarrier.arrive(bar, count=1)", "gl.max(x, 0)", "gl.barrier()", "x = gl.convert_layout(x, WIDE)"):
        with pytest.raises(BarrierError, match="under a condition that each of them decides by itself, line"):
            module(tmp_path, VOTE.replace("INSIDE", inside)).kernel[(1,)](out)


def test_the_warp_of_each_element_follows_the_layout() -> None:
    blocked = BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = np.arange(64) // 4 % 4
    assert (warps_of(blocked, (64, 64)) == rows[:, None]).all()
    assert (warps_of(SliceLayout(1, blocked), (64,)) == rows).all()
    assert (warps_of(SliceLayout(0, blocked), (64,)) == SEVERAL).all()
    # The fastest dimension of the order counts the warps first.
    grid = warps_of(BlockedLayout([1, 1], [4, 8], [2, 2], [1, 0]), (8, 16))
    assert [grid[0, 0], grid[0, 8], grid[4, 0], grid[4, 8]] == [0, 1, 2, 3]
    wgmma = warps_of(NvmmaDistributedLayout([3, 0], [4, 1], [16, 64, 16]), (128, 64))
    assert (wgmma == (np.arange(128) // 16 % 4)[:, None]).all()
    # Of mma.sync an instruction is a warp's; an operand repeats along the dimension that it does not have.
    products = NvmmaDistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    for layout in (products, DotOperandLayout(0, products, 2), DotOperandLayout(1, products, 2)):
        assert (warps_of(layout, (8, 32, 64)) == (np.arange(8) % 4)[:, None, None]).all()
    assert (warps_of(SliceLayout(2, products), (4, 16)) == np.arange(4)[:, None]).all()
    columns = NvmmaDistributedLayout([2, 0], [1, 4], [16, 8])
    assert (warps_of(DotOperandLayout(1, columns, 2), (16, 64)) == np.arange(64) // 8 % 4).all()
    assert (warps_of(DotOperandLayout(0, columns, 2), (16, 64)) == SEVERAL).all()
    linear = DistributedLinearLayout([[0, 1]], [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [[32, 0]], [], [64, 2])
    assert (warps_of(linear, (64, 2)) == (np.arange(64) // 32)[:, None]).all()
    # Too small a tensor is held more than once; what is not followed is not known.
    assert (warps_of(blocked, (8, 64)) == SEVERAL).all()
    assert warps_of(None, (8,)) is None


SHARED_ALONE = """
@gluon.jit
def one(out, kept):
    own = gl.allocate_shared_memory(gl.float32, [128, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    own.store(gl.zeros([128, 128], gl.float32, gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])))


@gluon.jit
def other(out, kept):
    own = gl.allocate_shared_memory(gl.float32, [128, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    own.store(gl.zeros([128, 128], gl.float32, gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])))


@gluon.jit
def kernel(out):
    before = gl.allocate_shared_memory(gl.float32, [SIZE, 256], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    before.store(gl.zeros([SIZE, 256], gl.float32, gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])))
    kept = gl.allocate_shared_memory(gl.float32, [KEPT, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    kept.store(gl.zeros([KEPT, 128], gl.float32, gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])))
    gl.warp_specialize([(one, (out, kept)), (other, (out, kept))], [4], [64])
    kept.load(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
"""


def test_what_partitions_allocate_lives_as_long_as_they_do(tmp_path: Path) -> None:
    def sized(before: int, kept: int) -> Any:
        return module(tmp_path, SHARED_ALONE.replace("SIZE", str(before)).replace("KEPT", str(kept))).kernel[(1,)]

    # 64 KB in each role; 128 KB that is dead by then; and what is alive all the time.
    sized(128, 32)(np.zeros(1, np.float32))
    with pytest.raises(AllocationError, match="own brings shared memory to 262144 bytes"):
        sized(32, 256)(np.zeros(1, np.float32))


BARRIER_MEMORY = """
@gluon.jit
def kernel(out):
    memory = gl.allocate_shared_memory(gl.int64, [16384], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mbarrier.init(memory.slice(0, 1), count=1)
    FIRST
    more = gl.allocate_shared_memory(gl.float32, [128, 256], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    more.store(gl.zeros([128, 256], gl.float32, gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])))
    THEN
"""
SIGNAL = "mbarrier.arrive(memory.slice(0, 1), count=1)\n    mbarrier.wait(memory.slice(0, 1), 0)"


def test_a_barrier_in_memory_for_integers_keeps_that_alive_to_its_last_use(tmp_path: Path) -> None:
    out = np.zeros(1, np.float32)
    module(tmp_path, BARRIER_MEMORY.replace("FIRST", SIGNAL).replace("THEN", "pass")).kernel[(1,)](out)
    with pytest.raises(AllocationError, match="more brings shared memory to 262144 bytes"):
        module(tmp_path, BARRIER_MEMORY.replace("FIRST", "pass").replace("THEN", SIGNAL)).kernel[(1,)](out)
