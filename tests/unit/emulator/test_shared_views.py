"""Shared memory in other orders, shapes and types, and by number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilecast
from tilecast.emulator.errors import AllocationError, BoundsError, RaceError, UnsupportedError

HEAD = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

WIDE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

@gluon.jit
def places(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))[:, None]
    return rows * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, WIDE))[None, :]

"""


def launch(tmp_path: Path, body: str, *args: Any, num_ctas: int = 1, **options: Any) -> None:
    """Run ``kernel`` of these lines on the arguments, named a, b, ..."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    path = tmp_path / "kernels.py"
    path.write_text(HEAD + f"@gluon.jit\ndef kernel({', '.join('abcdef'[: len(args)])}):\n{lines}\n")
    tilecast.emulated(path, **options).kernel[(1,)](*args, num_ctas=num_ctas)


def test_elements_are_gathered_scattered_and_combined_by_number(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x, numbers = random.standard_normal((32, 16), np.float32), random.integers(0, 32, (32, 16), dtype=np.int32)
    order = np.argsort(random.random((32, 16)), axis=0).astype(np.int32)
    out = [np.zeros((32, 16), np.float32) for _ in range(3)]
    body = """
at = places(32, 16)
slot = gl.allocate_shared_memory(gl.float32, [32, 16], gl.PaddedSharedLayout.with_identity_for([[16, 4]], [32, 16], [1, 0]))
slot.store(gl.load(a + at))
gl.store(d + at, slot.gather(gl.load(b + at), 0))
slot.scatter(gl.load(a + at), gl.load(c + at), 0)
gl.store(e + at, slot.load(WIDE))
slot.store(gl.zeros([32, 16], gl.float32, WIDE))
slot.atomic_scatter_add(gl.load(a + at), gl.load(b + at), axis=0, mask=gl.load(b + at) < 16)
gl.store(f + at, slot.load(WIDE))
"""
    launch(tmp_path, body, x, numbers, order, *out)
    assert (out[0] == np.take_along_axis(x, numbers, 0)).all()
    assert (np.take_along_axis(out[1], order, 0) == x).all()
    sums = np.zeros((32, 16))
    for (row, column), number in np.ndenumerate(numbers):
        sums[number, column] += x[row, column] if number < 16 else 0
    np.testing.assert_allclose(out[2], sums, rtol=1e-5, atol=1e-6)


def test_a_number_outside_and_padding_beyond_the_memory_are_named(tmp_path: Path) -> None:
    body = "slot = gl.allocate_shared_memory(gl.float32, [32, 16], PLAIN, gl.zeros([32, 16], gl.float32, WIDE))\n"
    with pytest.raises(BoundsError, match=r"slot.gather.*element 512 of slot along axis 0, which has 32"):
        launch(tmp_path, body + "slot.gather(places(32, 16) + 1, 0)", np.zeros(1))
    padded = "gl.allocate_shared_memory(gl.float32, [512, 64], gl.PaddedSharedLayout.with_identity_for([[{}, 32]], [512, 64], [1, 0]))"
    launch(tmp_path, padded.format(64), np.zeros(1))
    with pytest.raises(AllocationError, match="shared memory to 262016 bytes"):
        launch(tmp_path, padded.format(32), np.zeros(1))


def test_memory_is_seen_with_other_extents_and_as_another_type(tmp_path: Path) -> None:
    x, out, turned = (
        np.arange(512, dtype=np.int32).reshape(32, 16),
        np.zeros((64, 16), np.int16),
        np.zeros((16, 32), np.int32),
    )
    body = """
slot = gl.allocate_shared_memory(gl.int32, [2, 32, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).index(1)
slot.store(gl.load(a + places(32, 16)))
gl.store(b + places(64, 16), slot.reinterpret(gl.int16, [64, 16], PLAIN).load(WIDE))
gl.store(c + places(16, 32), slot.reshape([4, 8, 4, 4]).permute([1, 0, 2, 3]).reshape([16, 32]).load(WIDE))
"""
    launch(tmp_path, body, x, out, turned)
    assert (out == x.view(np.int16).reshape(64, 16)).all()
    assert (turned == x.reshape(4, 8, 4, 4).transpose(1, 0, 2, 3).reshape(16, 32)).all()


def test_panels_are_seen_side_by_side_as_one_wide_tile(tmp_path: Path) -> None:
    """What the copy engine brought in pieces as wide as the swizzle is one operand of the tensor core."""
    x, out = np.arange(4 * 16 * 64, dtype=np.float16).reshape(4, 16, 64), np.zeros((16, 128), np.float16)
    body = """
pieces = gl.allocate_shared_memory(gl.float16, [4, 16, 64], gl.NVMMASharedLayout(128, 16, 2))
wide = pieces.reinterpret(gl.float16, [2, 16, 128], gl.NVMMASharedLayout(128, 16, 2)).index(1)
for i in gl.static_range(4):
    pieces.index(i).store(gl.load(a + i * 1024 + places(16, 64)))
gl.store(b + places(16, 128), wide.load(WIDE))
"""
    launch(tmp_path, body, x, out)
    assert (out == np.hstack([x[2], x[3]])).all()
    with pytest.raises(UnsupportedError, match="each byte keeps its place"):
        launch(tmp_path, body.replace("[2, 16, 128]", "[4, 8, 128]").replace("(16, 128)", "(8, 128)"), x, out)


@pytest.mark.parametrize(("swizzle", "columns"), [(64, 64), (128, 128)])
def test_the_parts_of_a_pair_are_seen_by_another_division(tmp_path: Path, swizzle: int, columns: int) -> None:
    """What was rows of each CTA is columns of each: its bytes lie where the copy engine puts them, 16 at a time by the exclusive or of
    their place and their row."""
    x, out = np.arange(128 * columns, dtype=np.float16).reshape(128, columns), np.zeros((128, columns), np.float16)
    body = f"""
TILE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0], [[1, 0]])
rows = gl.arange(0, 128, layout=gl.SliceLayout(1, TILE))[:, None]
at = rows * {columns} + gl.arange(0, {columns}, layout=gl.SliceLayout(0, TILE))[None, :]
slots = gl.allocate_shared_memory(gl.float16, [2, 128, {columns}], gl.NVMMASharedLayout(128, 16, 2, cga_layout=[[1, 0]]))
seen = slots.reinterpret(layout=gl.NVMMASharedLayout({swizzle}, 16, 2, cga_layout=[[0, 1]]))
slots.index(1).store(gl.load(a + at))
gl.barrier(cluster=True)
gl.store(b + at, seen.index(1).load(TILE))
"""
    launch(tmp_path, body, x, out, num_ctas=2)
    there = np.zeros((2, 64 * columns), np.float16)
    for cta in range(2):
        for row in range(64):
            for column in range(columns):
                byte = column // 64 * 64 * 128 + row * 128 + column % 64 * 2
                there[cta, (byte ^ (row % 8) << 4) // 2] = x[64 * cta + row, column]
    expected = np.zeros_like(x)
    for row in range(128):
        for column in range(columns):
            cta, byte = divmod(column, columns // 2)[0], row * columns + column % (columns // 2) * 2
            expected[row, column] = there[cta, (byte ^ (byte >> 7 & swizzle // 16 - 1) << 4) // 2]
    assert (out == expected).all()


def test_a_type_that_would_move_swizzled_bytes_is_refused(tmp_path: Path) -> None:
    body = """
slot = gl.allocate_shared_memory(gl.float32, [32, 32], gl.NVMMASharedLayout(128, 32, 2))
slot.reinterpret(gl.float32, [64, 16], gl.NVMMASharedLayout(64, 32, 2))
"""
    with pytest.raises(UnsupportedError, match=r"slot with NVMMA layout .*as \[64, 16\].*each byte keeps its place"):
        launch(tmp_path, body, np.zeros(1))
    with pytest.raises(BoundsError, match=r"slot, \[32, 32\] of fp32, is too small for \[64, 32\]"):
        launch(tmp_path, body.replace("[64, 16]", "[64, 32]"), np.zeros(1))


def test_views_are_the_same_memory_to_the_search_for_races(tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(
        HEAD
        + """
@gluon.jit
def reader(slot, out_ptr):
    gl.store(out_ptr + places(16, 64), slot.reshape([16, 64]).load(WIDE))

@gluon.jit
def writer(slot):
    slot.slice(0, 8).store(gl.zeros([8, 32], gl.float32, gl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0])))

@gluon.jit
def kernel(out_ptr):
    slot = gl.allocate_shared_memory(gl.float32, [32, 32], PLAIN, gl.full([32, 32], 1.0, gl.float32, WIDE))
    gl.warp_specialize([(reader, (slot, out_ptr)), (writer, (slot,))], [1], [24])
"""
    )
    with pytest.raises(RaceError, match="race on shared memory slot"):
        tilecast.emulated(path).kernel[(1,)](np.zeros((16, 64), np.float32))


def test_functions_are_methods_of_tensors_and_of_several_at_once(tmp_path: Path) -> None:
    x, out = np.random.default_rng(1).standard_normal((8, 32), np.float32), np.zeros((3, 8), np.float32)
    path = tmp_path / "kernels.py"
    path.write_text(
        HEAD
        + """
@gluon.jit
def larger(p, at, q, beside):
    first = p > q
    return gl.where(first, p, q), gl.where(first, at, beside)

@gluon.jit
def kernel(x_ptr, out_ptr):
    x = gl.load(x_ptr + places(8, 32))
    rows = gl.arange(0, 8, layout=gl.SliceLayout(1, WIDE))
    columns = (gl.zeros([8, 32], gl.float32, WIDE) + gl.arange(0, 32, gl.SliceLayout(0, WIDE))[None, :].to(gl.float32))
    most, where = gl.reduce((x, columns), 1, larger)
    gl.store(out_ptr + rows, most)
    gl.store(out_ptr + 8 + rows, where)
    gl.store(out_ptr + 16 + rows, x.abs().sum(1).expand_dims(1).broadcast_to(8, 32).max(1))
"""
    )
    tilecast.emulated(path).kernel[(1,)](x, out)
    assert (out[0] == x.max(1)).all()
    assert (out[1] == x.argmax(1)).all()
    np.testing.assert_allclose(out[2], np.abs(x).sum(1), rtol=1e-6)
