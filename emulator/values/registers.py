"""Which element each register of each thread holds: layouts as linear ones, and tensors taken apart by register and put together again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tilecast.emulator.values.layouts import (
    BlockedLayout,
    DistributedLinearLayout,
    DotOperandLayout,
    NvmmaDistributedLayout,
    SliceLayout,
    blocked_bases,
    fitted,
)

#: Lanes along columns and rows of an accumulator's 8 x 8 piece, rows of a warp.
_COLUMN_LANES, _ROW_LANES = 4, 8
_REGISTER, _LANE, _WARP = range(3)


@lru_cache(maxsize=1024)
def linear_of(layout: Any, shape: tuple[int, ...]) -> DistributedLinearLayout | None:
    """The bases of a layout for a tensor of ``shape``, as Triton's to_linear_layout gives them; None for layouts that are not followed."""
    if isinstance(layout, DistributedLinearLayout):
        return fitted(layout, shape)
    if isinstance(layout, BlockedLayout):
        return blocked_bases(layout, shape)
    if isinstance(layout, SliceLayout):
        parent = linear_of(layout.parent, (*shape[: layout.dim], 1, *shape[layout.dim :]))
        return None if parent is None else _sliced(parent, layout.dim)
    if isinstance(layout, NvmmaDistributedLayout) and len(shape) == 2:
        return _accumulator(layout, shape, 2, layout.instr_shape[1])
    if isinstance(layout, DotOperandLayout) and layout.operand_index == 0 and len(shape) == 2:
        parent_ = layout.parent
        if isinstance(parent_, NvmmaDistributedLayout) and parent_.version[0] == 3:
            return _accumulator(parent_, shape, layout.k_width, 2 * _COLUMN_LANES * layout.k_width)
    return None


def _sliced(parent: DistributedLinearLayout, dim: int) -> DistributedLinearLayout:
    """Without a dimension; registers that would repeat an element are gone."""

    def left(basis: Sequence[int]) -> list[int]:
        return [step for place, step in enumerate(basis) if place != dim]

    registers = [left(basis) for basis in parent.reg]
    lanes, warps, blocks = ([left(basis) for basis in bases] for bases in (parent.lane, parent.warp, parent.block))
    return DistributedLinearLayout([one for one in registers if any(one)], lanes, warps, blocks, left(parent.shape))


def _accumulator(
    layout: NvmmaDistributedLayout, shape: tuple[int, ...], neighbours: int, columns: int
) -> DistributedLinearLayout:
    """Of wgmma and mma.sync: pieces of 8 x 4 lanes with ``neighbours`` columns each, the rows 8 further, then columns."""
    found: tuple[list[list[int]], ...] = ([], [], [])
    done = [1, 1]

    def add(kind: int, dim: int, count: int) -> None:
        for _ in range(count.bit_length() - 1):
            inside = done[dim] < shape[dim]
            found[kind].append([done[dim] if inside and d == dim else 0 for d in range(2)])
            done[dim] *= 2 if inside else 1

    add(_REGISTER, 1, neighbours)
    add(_LANE, 1, _COLUMN_LANES)
    add(_LANE, 0, _ROW_LANES)
    add(_REGISTER, 0, 2)
    add(_REGISTER, 1, columns // (neighbours * _COLUMN_LANES))
    for dim in (0, 1) if layout.version[0] == 3 else (1, 0):
        add(_WARP, dim, layout.warps_per_cta[dim])
    for dim in (1, 0):
        add(_REGISTER, dim, shape[dim] // done[dim])
    return DistributedLinearLayout(found[_REGISTER], found[_LANE], found[_WARP], [], shape)


def stays_in_threads(a: Any, b: Any, shape: tuple[int, ...]) -> bool:
    """Whether a conversion of a tensor of ``shape`` leaves every element in its thread; of layouts that are not followed it may."""
    one, two = (None if layout is None else linear_of(layout, tuple(shape)) for layout in (a, b))
    return one is None or two is None or (one.lane, one.warp, one.block) == (two.lane, two.warp, two.block)


@lru_cache(maxsize=256)
def places_of(layout: DistributedLinearLayout) -> Any:
    """int64 [registers, threads] of one CTA: the element, in row-major order."""
    steps = [math.prod(layout.shape[d + 1 :]) for d in range(len(layout.shape))]

    def places(bases: Any) -> Any:
        found = np.zeros(1, np.int64)
        for basis in bases:
            found = np.concatenate([found, found ^ sum(b * s for b, s in zip(basis, steps, strict=True))])
        return found

    threads = places((*layout.lane, *layout.warp))
    return places(layout.reg)[:, None] ^ threads[None, :]
