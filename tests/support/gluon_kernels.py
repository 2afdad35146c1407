"""Small Gluon kernels that Triton compiles offline: what its compiler does about the warps of one role, and with shared memory."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

BY_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
BY_COLUMNS = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
OPERAND = gl.constexpr(gl.NVMMASharedLayout.get_default_for([128, 64], gl.float16))
OTHER = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16))
LANES = [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]]
ROW = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32]], LANES, [[32, 0], [64, 0]], [], [128, 64])
)  # fmt: skip
TENSOR = gl.constexpr(TensorMemoryLayout([128, 64], col_stride=1))


@gluon.jit
def tile(p, layout: gl.constexpr, height: gl.constexpr = 64):
    rows = gl.arange(0, height, layout=gl.SliceLayout(1, layout))
    return p + rows[:, None] * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def through_global_memory(p):
    gl.store(tile(p, BY_ROWS), gl.load(tile(p + 4096, BY_ROWS)))
    gl.store(tile(p + 4096, BY_COLUMNS), gl.load(tile(p, BY_COLUMNS)))


@gluon.jit
def counts_itself_in(p):
    gl.store(tile(p, BY_ROWS), gl.load(tile(p + 4096, BY_ROWS)))
    if gl.atomic_add(p.to(gl.pointer_type(gl.int32), bitcast=True) + 4096, 1, sem="release") == 3:
        gl.store(tile(p + 8192, BY_ROWS), gl.load(tile(p, BY_ROWS)))


@gluon.jit
def through_shared_memory(p):
    a = gl.allocate_shared_memory(gl.float16, [64, 64], PLAIN)
    a.store(gl.load(tile(p, BY_ROWS)))
    gl.store(tile(p, BY_COLUMNS), a.load(BY_COLUMNS))


@gluon.jit
def in_place_in_shared_memory(p):
    a = gl.allocate_shared_memory(gl.float16, [64, 64], PLAIN)
    a.store(gl.load(tile(p, BY_ROWS)))
    a.store(a.load(BY_ROWS) + 1.0)
    gl.store(tile(p, BY_ROWS), a.load(BY_ROWS))


@gluon.jit
def arrivals(p):
    bar = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bar.index(0), count=1)
    mbarrier.init(bar.index(1), count=1)
    x = gl.load(tile(p, BY_ROWS))
    mbarrier.wait(bar.index(0), 0)
    mbarrier.arrive(bar.index(1), count=1)
    gl.store(tile(p, BY_ROWS), x)


@gluon.jit
def overwritten_by_a_product(p):
    a = gl.allocate_shared_memory(gl.float16, [128, 64], OPERAND)
    b = gl.allocate_shared_memory(gl.float16, [64, 64], OTHER)
    acc = allocate_tensor_memory(gl.float32, [128, 64], TENSOR)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    tcgen05_mma(a, b, acc, use_acc=False)
    tcgen05_commit(bar)
    mbarrier.wait(bar, 0)
    x = acc.load(ROW)
    tcgen05_mma(a, b, acc, use_acc=True)
    tcgen05_commit(bar)
    mbarrier.wait(bar, 1)
    gl.store(tile(p, ROW, 128), (x + acc.load(ROW)).to(gl.float16))


@gluon.jit
def one_after_the_other(p):
    for i in gl.static_range(3):
        a = gl.allocate_shared_memory(gl.float16, [64, 64], PLAIN)
        a.store(gl.load(tile(p + i * 4096, BY_ROWS)))
        gl.store(tile(p, BY_COLUMNS), a.load(BY_COLUMNS))


@gluon.jit
def at_the_same_time(p):
    a = gl.allocate_shared_memory(gl.float16, [64, 64], PLAIN)
    b = gl.allocate_shared_memory(gl.float16, [64, 64], PLAIN)
    a.store(gl.load(tile(p, BY_ROWS)))
    gl.store(tile(p, BY_COLUMNS), a.load(BY_COLUMNS))
    b.store(gl.load(tile(p + 4096, BY_ROWS)))
    gl.store(tile(p, BY_COLUMNS), b.load(BY_COLUMNS))


def compiled(kernel: Any, capability: int) -> Any:
    """The kernel for sm_90 or sm_100, four warps."""
    source = GluonASTSource(kernel, {"p": "*fp16"}, {})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
