"""What the copy engine does beside tiles: rows by number, columns of convolutions, reductions, maps that kernels make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilecast
from tilecast.emulator.errors import BoundsError, IntegerError, LayoutError, RaceError, RequestError, UninitializedError

HEAD = """
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor, TensorDescriptorIm2Col

WIDE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
ROWS: gl.constexpr = gl.SliceLayout(1, WIDE)

def tiles(x, box):
    kind = gl.int32 if x.dtype == "int32" else gl.float32
    return TensorDescriptor.from_tensor(x, box, gl.NVMMASharedLayout.get_default_for(box, kind))

@gluon.jit
def ready():
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    return bar
"""

GATHER = """
@gluon.jit
def picked(x_desc, out_desc, numbers_ptr):
    numbers = gl.load(numbers_ptr + gl.arange(0, 16, ROWS))
    bar = ready()
    slot = gl.allocate_shared_memory(gl.float32, [16, 32], x_desc.layout)
    mbarrier.expect(bar, 16 * x_desc.block_type.nbytes)
    tma.async_gather(x_desc, numbers, 8, bar, slot)
    mbarrier.wait(bar, 0)  # landed
    tma.async_scatter(out_desc, (numbers + 1) % 64, 0, slot)
    tma.store_wait(0)
    mbarrier.invalidate(bar)

def launch(x, out, numbers):
    picked[(1,)](tiles(x, [1, 32]), tiles(out, [1, 32]), numbers)
"""


def module(tmp_path: Path, body: str, **options: Any) -> Any:
    path = tmp_path / "kernels.py"
    path.write_text(HEAD + body)
    return tilecast.emulated(path, **options)


def normal(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


@pytest.mark.parametrize(("mode", "seed"), [("late", 0), ("random", 1)])
def test_rows_are_gathered_and_scattered_by_number_with_zeros_outside(tmp_path: Path, mode: str, seed: int) -> None:
    x, out = normal(40, 64), np.zeros((64, 64), np.float32)
    numbers = np.arange(16, dtype=np.int32) * 3
    module(tmp_path, GATHER, mode=mode, seed=seed).launch(x, out, numbers)
    wanted = np.zeros((64, 64), np.float32)
    for number in numbers:
        wanted[number + 1, :32] = x[number, 8:40] if number < 40 else 0
    assert (out == wanted).all()


def test_a_gather_that_nobody_waits_for_is_a_race(tmp_path: Path) -> None:
    found = module(tmp_path, GATHER.replace("    mbarrier.wait(bar, 0)  # landed\n", ""))
    with pytest.raises((RaceError, UninitializedError), match=r"slot\[0\]"):
        found.launch(normal(40, 64), np.zeros((64, 64), np.float32), np.arange(16, dtype=np.int32))


def test_rows_by_number_need_boxes_of_one_row_and_numbers_that_are_not_negative(tmp_path: Path) -> None:
    found = module(tmp_path, GATHER.replace("tiles(x, [1, 32])", "tiles(x, [16, 32])"))
    with pytest.raises(LayoutError, match=r"boxes of one row, got \[16, 32\]"):
        found.launch(normal(40, 64), np.zeros((64, 64), np.float32), np.zeros(16, np.int32))
    found = module(tmp_path, GATHER.replace("(numbers + 1) % 64", "numbers - 1"))
    with pytest.raises(BoundsError, match=r"async_scatter.*a scatter to row -1"):
        found.launch(normal(40, 64), np.zeros((64, 64), np.float32), np.zeros(16, np.int32))


@pytest.mark.parametrize(("name", "combine"), [("add", np.add), ("max", np.maximum), ("min", np.minimum)])
def test_a_tile_is_combined_with_what_is_in_global_memory(tmp_path: Path, name: str, combine: Any) -> None:
    body = f"""
@gluon.jit
def kernel(x_desc, out_desc):
    at = gl.program_id(0) * 16
    bar = ready()
    slot = gl.allocate_shared_memory(gl.float32, [16, 32], x_desc.layout)
    mbarrier.expect(bar, x_desc.nbytes_per_cta)
    tma.async_load(x_desc, [at, 0], bar, slot)
    mbarrier.wait(bar, 0)
    tma.async_atomic_{name}(out_desc, [0, 0], slot)
    tma.store_wait(0)

def launch(x, out):
    kernel[(4,)](tiles(x, [16, 32]), tiles(out, [16, 32]))
"""
    x, out = normal(64, 32), np.zeros((16, 32), np.float32)
    wanted = out.copy()
    for tile in x.reshape(4, 16, 32):
        wanted = combine(wanted, tile)
    module(tmp_path, body).launch(x, out)
    np.testing.assert_allclose(out, wanted, rtol=1e-6, atol=1e-6)


def test_columns_of_a_convolution_run_through_the_box_from_image_to_image(tmp_path: Path) -> None:
    body = """
@gluon.jit
def kernel(x_desc, out_desc, h, w):
    bar = ready()
    slot = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_shape, x_desc.layout)
    mbarrier.expect(bar, x_desc.block_type.nbytes)
    tma.async_load_im2col(x_desc, [0, h, w, 0], [1, 2], bar, slot)
    mbarrier.wait(bar, 0)
    tma.async_store(out_desc, [0, 0], slot)
    tma.store_wait(0)

def launch(x, out, low, high):
    layout = gl.NVMMASharedLayout.get_default_for([32, 32], gl.float32)
    x_desc = TensorDescriptorIm2Col.from_tensor(
        x, [32, 32], layout, element_strides=[1, 2, 1, 1], pixel_box_lower_corner=low, pixel_box_upper_corner=high
    )
    kernel[(1,)](x_desc, tiles(out, [32, 32]), low[0], low[1])
"""
    x, out = normal(3, 6, 5, 32), np.zeros((32, 32), np.float32)
    low, high = (-1, -2), (-1, -1)
    module(tmp_path, body).launch(x, out, low, high)
    pixels = [(n, h, w) for n in range(4) for h in range(low[0], 6 + high[0], 2) for w in range(low[1], 5 + high[1])][
        :32
    ]
    for row, (n, h, w) in enumerate(pixels):
        inside = n < 3 and 0 <= h + 1 < 6 and 0 <= w + 2 < 5
        assert (out[row] == (x[n, h + 1, w + 2] if inside else 0)).all()


def test_a_kernel_makes_its_own_tensor_map_of_a_part(tmp_path: Path) -> None:
    body = """
@gluon.jit
def kernel(x_ptr, out_ptr, rows):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, 32], gl.float32)
    x_desc = tma.make_tensor_descriptor(x_ptr + 64, [rows, 32], [64, 1], [16, 32], layout)
    out_desc = tma.make_tensor_descriptor(out_ptr, [16, 32], [32, 1], [16, 32], layout)
    bar = ready()
    slot = gl.allocate_shared_memory(gl.float32, [16, 32], layout)
    mbarrier.expect(bar, x_desc.block_type.nbytes)
    tma.async_load(x_desc, [2, 0], bar, slot)
    mbarrier.wait(bar, 0)
    tma.async_store(out_desc, [0, 0], slot)
    tma.store_wait(0)
"""
    x, out = normal(20, 64), np.ones((16, 32), np.float32)
    module(tmp_path, body).kernel[(1,)](x, out, 10)
    assert (out[:8] == x[3:11, :32]).all()
    assert (out[8:] == 0).all()


CP_ASYNC = """
@gluon.jit
def kernel(x_ptr, out_ptr):
    at = gl.arange(0, 16, ROWS)[:, None] * 32 + gl.arange(0, 32, gl.SliceLayout(0, WIDE))[None, :]
    slot = gl.allocate_shared_memory(gl.float32, [16, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    bar = ready()
    async_copy.async_load(slot, x_ptr + at)
    async_copy.mbarrier_arrive(bar)  # arrive
    mbarrier.arrive(bar, count=1)
    mbarrier.wait(bar, 0)
    gl.store(out_ptr + at, slot.load(WIDE))
"""


@pytest.mark.parametrize(("mode", "seed"), [("late", 0), ("random", 2)])
def test_a_barrier_waits_for_cp_async(tmp_path: Path, mode: str, seed: int) -> None:
    x, out = normal(16, 32), np.zeros((16, 32), np.float32)
    module(tmp_path, CP_ASYNC, mode=mode, seed=seed).kernel[(1,)](x, out)
    assert (out == x).all()
    missing = CP_ASYNC.replace("    async_copy.mbarrier_arrive(bar)  # arrive\n", "")
    with pytest.raises((RaceError, UninitializedError), match=r"shared memory slot"):
        module(tmp_path, missing, mode=mode, seed=seed).kernel[(1,)](x, out)


FENCED = """
@gluon.jit
def kernel(out_desc):
    value = gl.full([16, 32], 2.0, gl.float32, WIDE)
    slot = gl.allocate_shared_memory(gl.float32, [16, 32], out_desc.layout, value)
    tma.async_store(out_desc, [0, 0], slot)
    tma.store_wait(0)

def launch(out):
    kernel[(1,)](tiles(out, [16, 32]))
"""


def test_a_fence_that_a_release_adds_counts_where_that_release_is_asked_for(tmp_path: Path) -> None:
    # Triton 3.9 compiles this kernel with fence.proxy.async before the copy, Triton 3.6 without.
    for options in ({}, {"triton": "3.6"}):
        with pytest.raises(RaceError, match=r"fence_async_shared\(\) is missing"):
            module(tmp_path, FENCED, **options).launch(np.zeros((16, 32), np.float32))
    out = np.zeros((16, 32), np.float32)
    module(tmp_path, FENCED, triton="3.9").launch(out)
    assert (out == 2).all()
    with pytest.raises(RequestError, match=r"triton: expected 3\.6 or 3\.9, got '4'"):
        module(tmp_path, FENCED, triton="4")


ROLES = """
@gluon.jit
def writer(desc, slot, bar):
    slot.store(gl.full([16, 32], 2.0, gl.float32, WIDE))
    mbarrier.arrive(bar, count=1)

@gluon.jit
def sender(desc, slot, bar):
    mbarrier.wait(bar, 0)
    tma.async_store(desc, [0, 0], slot)
    tma.store_wait(0)

@gluon.jit
def kernel(desc):
    slot = gl.allocate_shared_memory(gl.float32, [16, 32], desc.layout)
    bar = ready()
    gl.warp_specialize([(writer, (desc, slot, bar)), (sender, (desc, slot, bar))], [1], [24])

def launch(out):
    kernel[(1,)](tiles(out, [16, 32]))
"""


def test_no_release_adds_fences_between_partitions(tmp_path: Path) -> None:
    with pytest.raises(RaceError, match=r"fence_async_shared\(\) is missing"):
        module(tmp_path, ROLES, triton="3.9").launch(np.zeros((16, 32), np.float32))


BY_FLAG = """
@gluon.jit
def writer(x_ptr, flag, desc, out_ptr, slot, bar):
    columns = gl.arange(0, 32, gl.SliceLayout(0, WIDE))[None, :]
    gl.store(x_ptr + gl.arange(0, 16, ROWS)[:, None] * 32 + columns, gl.full([16, 32], 2.0, gl.float32, WIDE))
    gl.barrier()
    gl.atomic_add(flag, 1, sem="release")

@gluon.jit
def reader(x_ptr, flag, desc, out_ptr, slot, bar):
    gl.inline_asm_elementwise(
        \"\"\"{
            .reg .pred early;
            .reg .s32 count;
        again:
            ld.acquire.gpu.global.s32 count, [$1];
            setp.lt.s32 early, count, 1;
            @early bra again;
            fence.proxy.async;
            mov.s32 $0, count;
        }\"\"\", "=r,l", [flag], dtype=gl.int32, is_pure=False, pack=1,
    )
    mbarrier.expect(bar, 2048)
    tma.async_load(desc, [0, 0], bar, slot)
    mbarrier.wait(bar, 0)
    at = gl.arange(0, 16, ROWS)[:, None] * 32 + gl.arange(0, 32, gl.SliceLayout(0, WIDE))[None, :]
    gl.store(out_ptr + at, slot.load(WIDE))

@gluon.jit
def kernel(x_ptr, flag, desc, out_ptr):
    slot, bar = gl.allocate_shared_memory(gl.float32, [16, 32], desc.layout), ready()
    fence_async_shared()
    roles = (x_ptr, flag, desc, out_ptr, slot, bar)
    gl.warp_specialize([(writer, roles), (reader, roles)], [4], [64])

def launch(x, flag, out):
    kernel[(1,)](x, flag, tiles(x, [16, 32]), out)
"""


@pytest.mark.parametrize("mode", ["late", "random"])
def test_a_flag_of_global_memory_orders_roles_of_one_program(tmp_path: Path, mode: str) -> None:
    def run(text: str) -> Any:
        out = np.zeros((16, 32), np.float32)
        module(tmp_path, text, mode=mode, seed=0).launch(np.zeros((16, 32), np.float32), np.zeros(1, np.int32), out)
        return out

    assert (run(BY_FLAG) == 2).all()
    with pytest.raises(RaceError, match="and nothing orders the two"):
        run(BY_FLAG.replace("ld.acquire.gpu", "ld.relaxed.gpu"))
    with pytest.raises(RaceError, match=r"fence\.proxy\.async is missing"):
        run(BY_FLAG.replace("            fence.proxy.async;\n", ""))


DIVIDED = """
@gluon.jit
def kernel(x_ptr, out_ptr, n, unused):
    size = n // 4
    place = 7 % size
    at = gl.arange(0, 32, gl.BlockedLayout([1], [32], [4], [0]))
    if unused == 0:
        gl.store(out_ptr + at, gl.load(x_ptr + at))
    else:
        gl.store(out_ptr + at, gl.load(x_ptr + place + at))
"""


def test_a_quotient_by_zero_is_wrong_where_something_depends_on_it(tmp_path: Path) -> None:
    x, out = normal(64), np.zeros(64, np.float32)
    found = module(tmp_path, DIVIDED)
    found.kernel[(1,)](x, out, 3, 0)
    assert (out[:32] == x[:32]).all()
    with pytest.raises(
        IntegerError, match=r"place = 7 % size: integer division by zero; .*x_ptr \+ place \+ at.* depends on it"
    ):
        found.kernel[(1,)](x, out, 3, 1)
