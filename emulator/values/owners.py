"""Which warp of a role holds each element of a register tensor, by its layout."""

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
    TmemRegisterLayout,
    rank_of,
)

#: Several warps hold the element.
SEVERAL = -1
#: Rows of an accumulator of wgmma that one warp holds, and lanes of tensor memory that it reaches.
_WGMMA_ROWS, _LANES = 16, 32


def warps_of(layout: Any, shape: Sequence[int]) -> Any:
    """int8 of ``shape``: the warp, or SEVERAL; None for layouts that are not followed."""
    return _warps_of(layout, tuple(int(n) for n in shape))


@lru_cache(maxsize=1024)
def _warps_of(layout: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(layout, SliceLayout):
        # A slice lies where any element of the dimension that is gone lies: one period of it stands for all.
        period = _period(layout.parent, layout.dim)
        if period is None or len(shape) + 1 != rank_of(layout.parent):
            return None
        whole = _warps_of(layout.parent, (*shape[: layout.dim], period, *shape[layout.dim :]))
        if whole is None:
            return None
        low, high = whole.min(axis=layout.dim), whole.max(axis=layout.dim)
        return np.where(low == high, low, SEVERAL).astype(np.int8)
    if isinstance(layout, BlockedLayout):
        per_warp = tuple(s * t for s, t in zip(layout.size_per_thread, layout.threads_per_warp, strict=True))
        return _tiled(shape, per_warp, layout.warps_per_cta, layout.order)
    if isinstance(layout, NvmmaDistributedLayout) and len(shape) == rank_of(layout):
        order = range(len(shape))
        return _tiled(shape, _warp_tile(layout), layout.warps_per_cta, order if layout.version[0] == 3 else order[::-1])
    if isinstance(layout, DotOperandLayout) and _mma_sync(layout.parent, shape):
        return _operand(layout, shape)
    if isinstance(layout, TmemRegisterLayout) and layout.variant == "32x32b" and shape == layout.shape:
        return _tiled(shape, (_LANES, shape[1]), (4, 1), (0, 1)) if (layout.num_warps, shape[0]) == (4, 128) else None
    if isinstance(layout, DistributedLinearLayout) and layout.shape == shape and not any(map(any, layout.block)):
        return _linear(layout)
    return None


def _warp_tile(layout: NvmmaDistributedLayout) -> tuple[int, ...]:
    """What one instruction makes of a warp's accumulator: of wgmma a quarter of its rows, of mma.sync all."""
    return (_WGMMA_ROWS, layout.instr_shape[1]) if layout.version[0] == 3 else layout.instr_shape


def _mma_sync(layout: Any, shape: tuple[int, ...]) -> bool:
    """Whether accumulators of this layout and rank are those of mma.sync."""
    return isinstance(layout, NvmmaDistributedLayout) and layout.version[0] == 2 and rank_of(layout) == len(shape)


def _operand(layout: DotOperandLayout, shape: tuple[int, ...]) -> Any:
    """Warps of an operand of mma.sync: those along the dimension that it does not have hold the same."""
    parent = layout.parent
    gone = len(shape) - 1 - layout.operand_index
    if parent.warps_per_cta[gone] > 1:
        return np.full(shape, SEVERAL, np.int8)
    tile = [shape[d] if d == gone else n for d, n in enumerate(parent.instr_shape)]
    return _tiled(shape, tile, parent.warps_per_cta, range(len(shape))[::-1])


def _period(layout: Any, dim: int) -> int | None:
    """Extent along a dimension after which the warps repeat."""
    if isinstance(layout, BlockedLayout):
        return layout.size_per_thread[dim] * layout.threads_per_warp[dim] * layout.warps_per_cta[dim]
    if isinstance(layout, NvmmaDistributedLayout):
        return _warp_tile(layout)[dim] * layout.warps_per_cta[dim]
    if isinstance(layout, (DistributedLinearLayout, TmemRegisterLayout)):
        return layout.shape[dim]
    if isinstance(layout, SliceLayout):
        return _period(layout.parent, dim + (dim >= layout.dim))
    return None


def _tiled(shape: Sequence[int], per_warp: Sequence[int], warps: Sequence[int], order: Sequence[int]) -> Any:
    """Warps in a grid over tiles of ``per_warp`` elements that repeats; ``order``: dimensions, fastest first."""
    if len(shape) != len(per_warp):
        return None
    owner = np.zeros(shape, np.int64)
    step = 1
    for dim in order:
        if shape[dim] < per_warp[dim] * warps[dim] and warps[dim] > 1:
            # The tensor is smaller than the grid, which then holds it more than once.
            return np.full(shape, SEVERAL, np.int8)
        place = np.arange(shape[dim]) // per_warp[dim] % warps[dim]
        owner = owner + step * place.reshape([-1 if d == dim else 1 for d in range(len(shape))])
        step *= warps[dim]
    return owner.astype(np.int8)


def _linear(layout: DistributedLinearLayout) -> Any:
    if any(not any(basis) for basis in layout.warp):
        return np.full(layout.shape, SEVERAL, np.int8)
    steps = [math.prod(layout.shape[d + 1 :]) for d in range(len(layout.shape))]

    def places(bases: Any) -> Any:
        found = np.zeros(1, np.int64)
        for basis in bases:
            found = np.concatenate([found, found ^ sum(b * s for b, s in zip(basis, steps, strict=True))])
        return found

    owner = np.full(math.prod(layout.shape), SEVERAL, np.int8)
    inside = places(layout.reg)[:, None] ^ places(layout.lane)[None, :]
    for warp, first in enumerate(places(layout.warp)):
        owner[(inside ^ first).reshape(-1)] = warp
    return owner.reshape(layout.shape)
