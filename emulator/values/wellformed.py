"""What Triton's compiler would not take for a layout at all: extents that are no powers of two, orders that are none, steps that
miss elements or lead out of the tensor.

Read off what Triton 3.9 says, or aborts with, of each (compiled offline for sm_90, 2026-11-26).  Each function returns the
complaint, empty where there is none; layouts that are not followed are not complained about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from tilecast.emulator.values.layouts import (
    BlockedLayout,
    DistributedLinearLayout,
    DotOperandLayout,
    SliceLayout,
    rank_of,
)
from tilecast.emulator.values.memory_layouts import (
    NvmmaSharedLayout,
    PaddedSharedLayout,
    SharedLinearLayout,
    SwizzledSharedLayout,
)

Steps = Sequence[Sequence[int]]


@lru_cache(maxsize=4096)
def wrong_registers(layout: Any) -> str:
    """Whether a register layout is none, whatever it is used for."""
    if isinstance(layout, (SliceLayout, DotOperandLayout)):
        return wrong_registers(layout.parent)
    if isinstance(layout, BlockedLayout):
        if not all(_is_power(n) for counts in layout.key[:3] for n in counts):
            return f"{layout!r}: elements, threads and warps along each dimension must be powers of two"
        return _wrong_order(layout.order)
    if not isinstance(layout, DistributedLinearLayout):
        return ""
    for name, bases in (
        ("register", layout.reg),
        ("lane", layout.lane),
        ("warp", layout.warp),
        ("block", layout.block),
    ):
        for basis in bases:
            if name != "warp" and sum(step != 0 for step in basis) > 1:
                return f"{layout!r}: the {name} basis {list(basis)} moves in more than one dimension"
            if name == "register" and not all(step == 0 or _is_power(step) for step in basis):
                return f"{layout!r}: the register basis {list(basis)} is no power of two"
            if any(not 0 <= step < extent for step, extent in zip(basis, layout.shape, strict=False)):
                return f"{layout!r}: the {name} basis {list(basis)} leads out of {list(layout.shape)}"
    if not _reaches((*layout.reg, *layout.lane, *layout.warp, *layout.block), layout.shape):
        return f"{layout!r}: the bases do not reach every element of {list(layout.shape)}"
    twice = next((basis for n, basis in enumerate(layout.reg) if any(basis) and basis in layout.reg[:n]), None)
    if twice is not None:
        return f"{layout!r}: the register basis {list(twice)} is there twice"
    return ""


def wrong_rank(layout: Any, shape: Sequence[int]) -> str:
    """Whether a register layout has another number of dimensions than a tensor of ``shape``."""
    rank = rank_of(layout)
    if rank is None or rank == len(shape):
        return ""
    return f"{layout!r} has {rank} dimension{'s' * (rank != 1)}, the tensor {[int(n) for n in shape]}"


def wrong_shared(layout: Any, shape: Sequence[int]) -> str:
    """Whether shared memory of ``shape`` cannot have a layout, which may leave the first dimension, of slots, out."""
    if isinstance(layout, SharedLinearLayout):
        if not _is_power(layout.alignment):
            return f"an alignment is a power of two, got {layout.alignment}"
        return _wrong_offsets((*layout.offset_bases, *layout.block_bases), shape)
    if isinstance(layout, PaddedSharedLayout):
        return _wrong_padding(layout, shape)
    if isinstance(layout, SwizzledSharedLayout) and layout.order:
        return _wrong_order(layout.order) or _wrong_slots(len(layout.order), shape)
    if isinstance(layout, NvmmaSharedLayout):
        return _wrong_slots(layout.rank, shape)
    return ""


def has_slots(layout: Any, shape: Sequence[int]) -> bool:
    """Whether the first dimension of shared memory is one that its layout leaves out: only its slots can be loaded and stored."""
    if isinstance(layout, SwizzledSharedLayout):
        rank = len(layout.order) or len(shape)
    elif isinstance(layout, (SharedLinearLayout, NvmmaSharedLayout)):
        rank = layout.rank
    else:
        rank = len(layout.offset_bases[0]) if isinstance(layout, PaddedSharedLayout) else len(shape)
    return rank == len(shape) - 1


def _wrong_padding(layout: PaddedSharedLayout, shape: Sequence[int]) -> str:
    pairs = [number for pair in layout.interval_padding_pairs for number in pair]
    if not all(_is_power(number) for number in pairs):
        return f"intervals and paddings are powers of two, got {[list(pair) for pair in layout.interval_padding_pairs]}"
    for basis in layout.offset_bases:
        if sum(step != 0 for step in basis) > 1 or not all(step == 0 or _is_power(step) for step in basis):
            return f"the offset basis {list(basis)} is not one power of two"
    # Of a cluster the bases are those of one CTA's part.
    return "" if layout.cga else _wrong_offsets(layout.offset_bases, shape)


def _wrong_offsets(bases: Steps, shape: Sequence[int]) -> str:
    """Whether offsets and CTAs do not make up a tensor of ``shape``, or of its last dimensions."""
    rank = len(bases[0])
    reached = [1 << max(basis[dim] for basis in bases).bit_length() for dim in range(rank)]
    wrong = _wrong_slots(rank, shape)
    if not wrong and reached != list(shape[len(shape) - rank :]):
        wrong = f"the bases make up {reached}, not {list(shape[len(shape) - rank :])}"
    if wrong or _reaches(bases, reached):
        return wrong
    return f"the bases {[list(basis) for basis in bases]} do not reach every element of {reached}"


def _wrong_slots(rank: int, shape: Sequence[int]) -> str:
    if rank in (len(shape), len(shape) - 1):
        return ""
    return f"the layout has {rank} dimension{'s' * (rank != 1)}, the memory {list(shape)}"


def _wrong_order(order: Sequence[int]) -> str:
    if sorted(order) == list(range(len(order))):
        return ""
    return f"an order names each of {len(order)} dimensions once, got {list(order)}"


def _is_power(number: int) -> bool:
    return number > 0 and not number & (number - 1)


def _reaches(bases: Iterable[Sequence[int]], shape: Sequence[int]) -> bool:
    """Whether exclusive ors of some of ``bases`` make every element of ``shape`` (powers of two)."""
    widths = [int(extent).bit_length() - 1 for extent in shape]
    shifts = [sum(widths[dim + 1 :]) for dim in range(len(widths))]
    # Gaussian elimination over bits: highest bit -> the basis that has it.
    pivots: dict[int, int] = {}
    for basis in bases:
        rest = sum(step << shift for step, shift in zip(basis, shifts, strict=True))
        while rest and rest.bit_length() in pivots:
            rest ^= pivots[rest.bit_length()]
        if rest:
            pivots[rest.bit_length()] = rest
    return 1 << len(pivots) == math.prod(shape)
