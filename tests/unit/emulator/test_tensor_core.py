"""Blackwell's tensor cores beside plain products: scaled blocks, copies to tensor memory, several blocks of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilecast
from tilecast.emulator.errors import AllocationError, EmulationError, LayoutError

HEAD = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout, TensorMemoryScalesLayout, allocate_tensor_memory, fence_async_shared, mbarrier, tcgen05_commit,
    tcgen05_copy, tcgen05_mma, tcgen05_mma_scaled,
)

WIDE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])

@gluon.jit
def places(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))[:, None]
    return rows * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, WIDE))[None, :]

@gluon.jit
def ready():
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    return bar

@gluon.jit
def shared(ptr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], ptr.dtype.element_ty)
    return gl.allocate_shared_memory(ptr.dtype.element_ty, [ROWS, COLUMNS], layout, gl.load(ptr + places(ROWS, COLUMNS)))
"""

SCALED = """
@gluon.jit
def kernel(a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, out_ptr, A: gl.constexpr, B: gl.constexpr, KA: gl.constexpr, KB: gl.constexpr, F: gl.constexpr):
    a, b = shared(a_ptr, 128, KA), shared(b_ptr, 32, KB)
    kind: gl.constexpr = a_scale_ptr.dtype.element_ty
    a_scale = allocate_tensor_memory(kind, [128, F], TensorMemoryScalesLayout())
    b_scale = allocate_tensor_memory(kind, [32, F], TensorMemoryScalesLayout())
    b_scale.store(gl.load(b_scale_ptr + places(32, F)))
    factors = shared(a_scale_ptr, 128, F)
    acc = allocate_tensor_memory(gl.float32, [128, 32], TensorMemoryLayout([128, 32], col_stride=1))
    bar = ready()
    fence_async_shared()
    tcgen05_copy(factors, a_scale)  # factors
    tcgen05_mma_scaled(a, b.permute((1, 0)), acc, a_scale, b_scale, A, B, use_acc=False)
    tcgen05_commit(bar)
    mbarrier.wait(bar, 0)  # done
    gl.store(out_ptr + places(128, 32), gl.convert_layout(acc.load(), WIDE))
"""

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def module(tmp_path: Path, body: str, **options: Any) -> Any:
    path = tmp_path / "kernels.py"
    path.write_text(HEAD + body)
    return tilecast.emulated(path, **options)


def operand(kind: str, rows: int, random: Any) -> tuple[Any, Any]:
    """(what the kernel gets, values): 128 elements a row."""
    if kind == "e2m1":
        codes = random.integers(0, 16, (rows, 128), dtype=np.uint8)
        return codes[:, ::2] | codes[:, 1::2] << 4, E2M1[codes]
    dtype = ml_dtypes.float8_e4m3fn if kind == "e4m3" else ml_dtypes.float8_e5m2
    values = random.standard_normal((rows, 128)).astype(dtype)
    return values, values.astype(np.float64)


def scaled(kinds: tuple[str, str], block: int) -> tuple[list[Any], Any]:
    """(arguments of the kernel, the product in float64)."""
    random = np.random.default_rng(block)
    operands, values = zip(
        *(operand(kind, rows, random) for kind, rows in zip(kinds, (128, 32), strict=True)), strict=True
    )
    shapes = [(128, 128 // block), (32, 128 // block)]
    if block == 16:
        factors: Any = [random.uniform(0.1, 2, shape).astype(ml_dtypes.float8_e4m3fn) for shape in shapes]
        exact = [f.astype(np.float64) for f in factors]
    else:
        factors = [random.integers(122, 130, shape, dtype=np.uint8) for shape in shapes]
        exact = [2.0 ** (f.astype(np.float64) - 127) for f in factors]
    a, b = (v * np.repeat(f, block, axis=1) for v, f in zip(values, exact, strict=True))
    return [*operands, *factors, np.zeros((128, 32), np.float32)], a @ b.T


@pytest.mark.parametrize(("kinds", "block"), [(("e2m1", "e2m1"), 16), (("e2m1", "e4m3"), 32), (("e5m2", "e4m3"), 32)])
def test_products_of_scaled_blocks_are_those_of_the_values_that_the_bytes_stand_for(
    tmp_path: Path, kinds: tuple[str, str], block: int
) -> None:
    arguments, wanted = scaled(kinds, block)
    lengths = [x.shape[1] for x in arguments[:2]]
    module(tmp_path, SCALED).kernel[(1,)](*arguments, *kinds, *lengths, 128 // block)
    np.testing.assert_allclose(arguments[-1], wanted, rtol=1e-4, atol=1e-4)


def test_scaled_products_are_waited_for_and_their_formats_and_factors_checked(tmp_path: Path) -> None:
    arguments, _ = scaled(("e4m3", "e4m3"), 32)
    for mode, seed in (("late", 0), ("random", 0)):
        found = module(tmp_path, SCALED.replace("    mbarrier.wait(bar, 0)  # done\n", ""), mode=mode, seed=seed)
        with pytest.raises(EmulationError, match=r"tensor memory acc"):
            found.kernel[(1,)](*arguments, "e4m3", "e4m3", 128, 128, 4)
    with pytest.raises(LayoutError, match="format e3m4: e2m1, e4m3 or e5m2"):
        module(tmp_path, SCALED).kernel[(1,)](*arguments, "e3m4", "e4m3", 128, 128, 4)
    wrong = [*arguments[:2], *(x[:, :2].copy() for x in arguments[2:4]), arguments[4]]
    with pytest.raises(LayoutError, match=r"scale factors of the left operand, uint8 \[128, 2\].*\[128, 4\]"):
        module(tmp_path, SCALED).kernel[(1,)](*wrong, "e4m3", "e4m3", 128, 128, 2)


COPIED = """
@gluon.jit
def kernel(x_ptr, out_ptr, ROWS: gl.constexpr, HIGH: gl.constexpr, VARIANT: gl.constexpr):
    x = shared(x_ptr, ROWS, 64)
    memory = allocate_tensor_memory(gl.float32, [ROWS, 64], TensorMemoryLayout([HIGH, 64], col_stride=1))
    bar = ready()
    fence_async_shared()
    tcgen05_copy(x, memory)
    tcgen05_commit(bar)
    mbarrier.wait(bar, 0)
    x.store(gl.zeros([ROWS, 64], gl.float32, WIDE))  # reuse
    values = memory.load(memory.get_reg_layout(instr_variant=VARIANT))
    gl.store(out_ptr + places(ROWS, 64), gl.convert_layout(values, WIDE))
"""


@pytest.mark.parametrize(("rows", "high", "variant"), [
    (64, 64, "16x256b"), (128, 128, "32x32b_splitn"), (128, 64, "32x32b"), (256, 128, "32x32b"), (256, 64, "16x64b"),
])  # fmt: skip
def test_tensor_memory_has_blocks_of_rows_in_every_way_of_loading(
    tmp_path: Path, rows: int, high: int, variant: str
) -> None:
    x, out = np.arange(rows * 64, dtype=np.float32).reshape(rows, 64), np.zeros((rows, 64), np.float32)
    module(tmp_path, COPIED).kernel[(1,)](x, out, rows, high, variant)
    assert (out == x).all()


def test_what_a_copy_to_tensor_memory_reads_is_not_overwritten_before_its_commit(tmp_path: Path) -> None:
    x, out = np.ones((128, 64), np.float32), np.zeros((128, 64), np.float32)
    body = COPIED.replace("    mbarrier.wait(bar, 0)\n", "")
    with pytest.raises(EmulationError, match=r"copy to tensor memory|tensor memory memory"):
        module(tmp_path, body).kernel[(1,)](x, out, 128, 128, "32x32b")


def test_a_variant_of_loading_that_there_is_not_is_named(tmp_path: Path) -> None:
    x, out = np.ones((128, 64), np.float32), np.zeros((128, 64), np.float32)
    with pytest.raises(LayoutError, match="in registers as 8x8b: one of 32x32b, "):
        module(tmp_path, COPIED).kernel[(1,)](x, out, 128, 128, "8x8b")


def test_columns_that_are_not_live_are_used_again_and_those_that_are_read_later_are_not(tmp_path: Path) -> None:
    body = """
@gluon.jit
def once(ptr):
    acc = allocate_tensor_memory(gl.float32, [128, 256], TensorMemoryLayout([128, 256], col_stride=1))
    acc.store(gl.full([128, 256], 1.0, gl.float32, acc.get_reg_layout()))
    gl.store(ptr + places(128, 256), gl.convert_layout(acc.load(), WIDE))
    return acc

@gluon.jit
def kernel(ptr, KEPT: gl.constexpr):
    first = once(ptr)
    second = once(ptr)
    third = once(ptr)
    if KEPT:
        gl.store(ptr + places(128, 256), gl.convert_layout(first.load() + second.load(), WIDE))
"""
    out = np.zeros((128, 256), np.float32)
    module(tmp_path, body).kernel[(1,)](out, False)
    assert (out == 1).all()
    with pytest.raises(AllocationError, match="third brings tensor memory to 768 columns, an SM has 512"):
        module(tmp_path, body).kernel[(1,)](out, True)
