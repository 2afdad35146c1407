"""Layouts that Triton's compiler takes and does not take; each case was compiled by Triton 3.9 for sm_90 (2026-11-26)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilecast
from tilecast.emulator.errors import LayoutError
from tilecast.emulator.values.layouts import BlockedLayout, DistributedLinearLayout, SliceLayout
from tilecast.emulator.values.memory_layouts import (
    NvmmaSharedLayout,
    PaddedSharedLayout,
    SharedLinearLayout,
    SwizzledSharedLayout,
)
from tilecast.emulator.values.wellformed import wrong_rank, wrong_registers, wrong_shared

SHAPE = (64, 64)
COLUMNS, ROWS = [[0, 1 << bit] for bit in range(6)], [[1 << bit, 0] for bit in range(6)]
OFFSETS = COLUMNS + ROWS
REGISTERS, LANES, WARPS = [*COLUMNS[:3], *ROWS[4:]], [*COLUMNS[3:], *ROWS[:2]], ROWS[2:4]


def changed(bases: list[list[int]], place: int, basis: list[int]) -> list[list[int]]:
    return [basis if number == place else one for number, one in enumerate(bases)]


def linear(registers: Any = REGISTERS, lanes: Any = LANES, warps: Any = WARPS, shape: Any = SHAPE) -> Any:
    return DistributedLinearLayout(registers, lanes, warps, [], shape)


@pytest.mark.parametrize(
    "layout",
    [
        SharedLinearLayout(OFFSETS),
        SharedLinearLayout(changed(OFFSETS, 3, [0, 9])),
        SharedLinearLayout(changed(OFFSETS, 3, [0, 10])),
        SharedLinearLayout(changed(OFFSETS, 6, [1, 8])),
        SwizzledSharedLayout(4, 1, 8, [1, 0]),
        SwizzledSharedLayout(3, 3, 9, [0, 1]),
        PaddedSharedLayout.with_identity_for([[64, 8]], SHAPE, [1, 0]),
        NvmmaSharedLayout(128, 16, 2),
    ],
)
def test_shared_memory_that_the_compiler_takes(layout: Any) -> None:
    assert not wrong_shared(layout, SHAPE)
    # Slots of a ring come before the dimensions of the layout.
    assert not wrong_shared(layout, (3, *SHAPE))


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (SharedLinearLayout(changed(OFFSETS, 3, [0, 4])), "do not reach every element"),
        (SharedLinearLayout(changed(OFFSETS, 3, [0, 0])), "do not reach every element"),
        (SharedLinearLayout(OFFSETS[:-1]), r"make up \[32, 64\], not \[64, 64\]"),
        (SharedLinearLayout([*OFFSETS, [64, 0]]), r"make up \[128, 64\], not \[64, 64\]"),
        (SharedLinearLayout(OFFSETS, [], 24), "alignment is a power of two, got 24"),
        (SwizzledSharedLayout(1, 1, 1, [1, 1]), "names each of 2 dimensions once"),
        (SwizzledSharedLayout(1, 1, 1, [2, 1, 0]), r"has 3 dimensions, the memory \[64, 64\]"),
        (PaddedSharedLayout.with_identity_for([[9, 8]], SHAPE, [1, 0]), "intervals and paddings are powers of two"),
        (PaddedSharedLayout([[64, 8]], changed(OFFSETS, 3, [0, 9]), None, SHAPE), r"\[0, 9\] is not one power of two"),
        (PaddedSharedLayout([[64, 8]], changed(OFFSETS, 6, [1, 8]), None, SHAPE), r"\[1, 8\] is not one power of two"),
        (PaddedSharedLayout.with_identity_for([[64, 8]], (64, 32), [1, 0]), r"make up \[64, 32\], not \[64, 64\]"),
        (NvmmaSharedLayout(128, 16, 3), "has 3 dimensions"),
    ],
)
def test_shared_memory_that_the_compiler_refuses(layout: Any, said: str) -> None:
    assert re.search(said, wrong_shared(layout, list(SHAPE)))


@pytest.mark.parametrize(
    "layout",
    [
        BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]),
        linear(),
        linear(lanes=changed(LANES, 0, [0, 9])),
        linear(warps=changed(WARPS, 0, [4, 8])),
        linear(registers=[*REGISTERS, [0, 0]]),
        linear(registers=[*REGISTERS, [0, 0], [0, 0]]),
        linear(registers=[*REGISTERS, LANES[0]]),
    ],
)
def test_registers_that_the_compiler_takes(layout: Any) -> None:
    assert not wrong_registers(layout)
    assert not wrong_registers(SliceLayout(0, layout))
    assert not wrong_rank(layout, SHAPE)
    assert not wrong_rank(SliceLayout(0, layout), SHAPE[1:])


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (BlockedLayout([1, 3], [4, 8], [4, 1], [1, 0]), "must be powers of two"),
        (BlockedLayout([1, 0], [4, 8], [4, 1], [1, 0]), "must be powers of two"),
        (BlockedLayout([1, 8], [4, 8], [4, 1], [0, 0]), "names each of 2 dimensions once"),
        (linear(registers=changed(REGISTERS, 1, [0, 3])), r"register basis \[0, 3\] is no power of two"),
        (linear(registers=changed(REGISTERS, 3, [16, 1])), r"register basis \[16, 1\] moves in more than one"),
        (linear(registers=changed(REGISTERS, 4, [64, 0])), r"register basis \[64, 0\] leads out of \[64, 64\]"),
        (linear(registers=changed(REGISTERS, 4, [16, 0])), "do not reach every element"),
        (linear(registers=[*REGISTERS, REGISTERS[0]]), r"register basis \[0, 1\] is there twice"),
        (linear(lanes=changed(LANES, 1, [0, 0])), "do not reach every element"),
        (linear(shape=(64, 128)), r"do not reach every element of \[64, 128\]"),
    ],
)
def test_registers_that_the_compiler_refuses(layout: Any, said: str) -> None:
    assert re.search(said, wrong_registers(layout))
    assert wrong_registers(SliceLayout(0, layout)) == wrong_registers(layout)


def test_a_tensor_has_as_many_dimensions_as_its_layout() -> None:
    said = wrong_rank(BlockedLayout([1, 8, 1], [4, 8, 1], [4, 1, 1], [2, 1, 0]), SHAPE)
    assert said.endswith("has 3 dimensions, the tensor [64, 64]")


KERNEL = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BASES = [[0, 1], [0, 2], [0, 4], [0, {step}], [0, 16], [0, 32], [1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [32, 0]]
SHARED = gl.constexpr(gl.PaddedSharedLayout([[64, 8]], BASES, [], [64, 64]))
BLOCKED = gl.constexpr(gl.BlockedLayout([1, {columns}], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def kernel(p):
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, BLOCKED))
    places = p + rows[:, None] * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, BLOCKED))[None, :]
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], SHARED)
    tile.store(gl.load(places))
    gl.store(places, tile.load(BLOCKED) + 1)
"""


@pytest.mark.parametrize(
    ("step", "columns", "said"),
    [
        (9, 8, r"line 14: tile = .*: tile: the offset basis \[0, 9\] is not one power of two"),
        (8, 6, r"line 12: rows = .*elements, threads and warps along each dimension must be powers of two"),
        (8, 8, ""),
    ],
)
def test_a_kernel_with_such_a_layout(tmp_path: Path, step: int, columns: int, said: str) -> None:
    path, x = tmp_path / "kernel.py", np.zeros((64, 64), np.float16)
    path.write_text(KERNEL.format(step=step, columns=columns), encoding="utf-8")
    launch = tilecast.emulated(path, machine="h200").kernel[(1,)]
    if said:
        with pytest.raises(LayoutError, match=said):
            launch(x)
    else:
        launch(x)
        assert (x == 1).all()


RING = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCKED = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 4, 8], [1, 4, 1], [2, 1, 0]))
PLANE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SHARED = gl.constexpr({layout})


@gluon.jit
def kernel(p):
    ring = gl.allocate_shared_memory(gl.float16, [2, 64, 64], SHARED)
    x = gl.full([2, 64, 64], 1.0, gl.float16, layout=BLOCKED)
    if {whole}:
        ring.store(x)
    else:
        ring.index(0).store(gl.full([64, 64], 1.0, gl.float16, layout=PLANE))
"""


@pytest.mark.parametrize(
    ("layout", "whole", "right"),
    [
        ("gl.SwizzledSharedLayout(1, 1, 1, [1, 0])", True, False),
        ("gl.NVMMASharedLayout(128, 16, 2)", True, False),
        ("gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])", True, True),
        ("gl.SwizzledSharedLayout(1, 1, 1, [1, 0])", False, True),
    ],
)
def test_all_slots_of_a_ring_are_not_stored_at_once(tmp_path: Path, layout: str, whole: bool, right: bool) -> None:
    path = tmp_path / "kernel.py"
    path.write_text(RING.format(layout=layout, whole=whole), encoding="utf-8")
    launch = tilecast.emulated(path, machine="h200").kernel[(1,)]
    if right:
        launch(np.zeros(1, np.float16))
    else:
        with pytest.raises(LayoutError, match=r"line 15: ring\.store.*one slot of it can be loaded or stored"):
            launch(np.zeros(1, np.float16))
