"""Layouts of register tensors, shared memory and tensor memory: values that compare equal when Gluon's would."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tilecast.emulator.errors import LayoutError

Basis = tuple[tuple[int, ...], ...]


def _frozen(bases: Any) -> Basis:
    return tuple(tuple(int(x) for x in basis) for basis in bases or ())


class DistributedLinearLayout:
    """Which element each register, lane, warp and CTA holds, by the bases of their bits."""

    def __init__(self, reg_bases: Any, lane_bases: Any, warp_bases: Any, block_bases: Any, shape: Any) -> None:
        self.reg, self.lane = _frozen(reg_bases), _frozen(lane_bases)
        self.warp, self.block = _frozen(warp_bases), _frozen(block_bases)
        self.shape = tuple(int(n) for n in shape)
        self._hash = hash(self._key())

    def _key(self) -> Any:
        return (self.reg, self.lane, self.warp, self.block, self.shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DistributedLinearLayout) and self._key() == other._key()

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"linear layout of {list(self.shape)} (lanes {list(self.lane)}, warps {list(self.warp)})"


@dataclass(frozen=True)
class SliceLayout:
    """What is left of ``parent`` when dimension ``dim`` is reduced away."""

    dim: int
    parent: Any


class BlockedLayout:
    """Triton's ordinary layout."""

    def __init__(
        self, size_per_thread: Any, threads_per_warp: Any, warps_per_cta: Any, order: Any, **_cga: Any
    ) -> None:
        self.key = tuple(tuple(map(int, x)) for x in (size_per_thread, threads_per_warp, warps_per_cta, order))
        self.size_per_thread, self.threads_per_warp, self.warps_per_cta, self.order = self.key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockedLayout) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"blocked layout {self.key}"


@dataclass(frozen=True)
class NvmmaDistributedLayout:
    """Accumulator of wgmma."""

    version: tuple[int, ...]
    warps_per_cta: tuple[int, ...]
    instr_shape: tuple[int, ...]

    @staticmethod
    def make(version: Any, warps_per_cta: Any, instr_shape: Any, **_cga: Any) -> NvmmaDistributedLayout:
        """From lists, as kernels write them."""
        lists = (version, warps_per_cta, instr_shape)
        return NvmmaDistributedLayout(*(tuple(int(x) for x in values) for values in lists))


@dataclass(frozen=True)
class DotOperandLayout:
    """Left operand of wgmma in registers."""

    operand_index: int
    parent: Any
    k_width: int


class SharedLayout:
    """Any layout of shared memory; only how a pair of CTAs divides the tile is kept."""

    def __init__(self, *_swizzle: Any, cga_layout: Any = None, **_more: Any) -> None:
        self.cga = _frozen(cga_layout)

    def split_dim(self, rank: int) -> int | None:
        """Dimension of a ``rank``-dimensional tensor that the two CTAs divide; None when each has its own copy."""
        for basis in self.cga:
            for place, step in enumerate(basis):
                if step:
                    return rank - len(basis) + place
        return None


class NvmmaSharedLayout(SharedLayout):
    """What the copy engine writes and the tensor core reads; a swizzle moves no values here, but must be a possible one."""

    def __init__(
        self, swizzle_byte_width: Any = 0, element_bitwidth: Any = 0, rank: Any = 2, transposed: Any = False, fp4_padded: Any = False,
        cga_layout: Any = None, **_more: Any,
    ) -> None:  # fmt: skip
        super().__init__(cga_layout=cga_layout)
        #: Bytes; bits of an element (0: not known).
        self.swizzle, self.bits = int(swizzle_byte_width), int(element_bitwidth)
        self.transposed, self.fp4_padded = bool(transposed), bool(fp4_padded)

    def __repr__(self) -> str:
        turned = ", transposed" if self.transposed else ""
        return f"NVMMA layout ({self.swizzle}-byte swizzle, {self.bits}-bit elements{turned}, CTAs {list(self.cga)})"

    def pattern(self) -> tuple[Any, ...]:
        """What a tensor map must share with the memory that it writes, whatever the rank."""
        return (self.swizzle, self.bits, self.transposed, self.fp4_padded, tuple(b for b in self.cga if any(b)))

    def shape_per_cta(self, shape: Sequence[int]) -> list[int]:
        """Extents of the part of each CTA."""
        split = self.split_dim(len(shape))
        return [int(n) // (2 if d == split else 1) for d, n in enumerate(shape)]

    @staticmethod
    def get_default_for(
        block_shape: Sequence[int], dtype: Any, transposed: Any = False, fp4_padded: Any = False, cga_layout: Any = None
    ) -> SharedLayout:
        """The widest swizzle that the rows of a CTA's part divide into."""
        extents = NvmmaSharedLayout(cga_layout=cga_layout).shape_per_cta(block_shape)
        if transposed:
            extents = extents[1:] + extents[:1]
        inner = extents[-1] * (2 if fp4_padded else 1) * dtype.primitive_bitwidth // 8
        outer = math.prod(extents[:-1])
        swizzle = next((width for width in (128, 64, 32) if inner % width == 0), 0)
        # A pattern has eight rows.
        if len(extents) < 2 or outer < 8:
            swizzle = 0
        return NvmmaSharedLayout(
            swizzle, dtype.primitive_bitwidth, len(extents), transposed, fp4_padded, cga_layout=cga_layout
        )


class TensorMemoryLayout:
    """Rows are lanes, columns are columns; only the 32-bit packed form with unit stride."""

    def __init__(
        self, block: Any, col_stride: Any = 1, cga_layout: Any = None, two_ctas: bool = False, unpacked: Any = True, **_: Any
    ) -> None:  # fmt: skip
        self.block = tuple(int(x) for x in block)
        self.col_stride, self.cga, self.two_ctas = int(col_stride), _frozen(cga_layout), bool(two_ctas)
        if self.col_stride != 1:
            raise LayoutError(f"tensor memory with a column stride of {self.col_stride}: only 1 is emulated")

    def splits_rows(self) -> bool:
        """Whether the two CTAs of a pair divide the rows."""
        return any(basis[0] for basis in self.cga)


@dataclass(frozen=True)
class TmemRegisterLayout:
    """A row of tensor memory to a lane, as Gluon's helpers choose it for a shape and a number of warps."""

    shape: tuple[int, ...]
    num_warps: int


_LANES = ((1, 0), (2, 0), (4, 0), (8, 0), (16, 0))


def row_per_lane(layout: Any, shape: Sequence[int]) -> str:
    """Empty when ``layout`` holds rows of ``shape`` as tcgen05.ld and .st move them; otherwise what is wrong."""
    if layout is None:
        return ""
    if isinstance(layout, TmemRegisterLayout):
        return (
            "" if layout.shape == tuple(shape) else f"needs a layout of {list(shape)}, got one of {list(layout.shape)}"
        )
    if not isinstance(layout, DistributedLinearLayout):
        return f"needs a linear layout with a row to a lane, got {layout!r}"
    if layout.shape != tuple(shape):
        return f"needs a layout of {list(shape)}, got one of {list(layout.shape)}"
    if layout.lane != _LANES or layout.warp[:2] != ((32, 0), (64, 0)):
        return f"lane l of warp w must hold row 32 w + l, got {layout!r}"
    return ""


def expanded(layout: Any, dim: int) -> Any:
    """Layout after a new dimension ``dim`` of one element; LayoutError when the slice was another one's."""
    if layout is None:
        return None
    if not isinstance(layout, SliceLayout) or layout.dim != dim:
        raise LayoutError(f"a new dimension {dim} needs a SliceLayout({dim}, ...), got {layout!r}")
    return layout.parent


# -- what reshape, permute and split make of a linear layout; None where a layout is not followed ----------------------


def linear(layout: Any) -> DistributedLinearLayout | None:
    """A linear layout, or a slice of one, as a linear layout; None for other kinds."""
    if isinstance(layout, DistributedLinearLayout):
        return layout
    parent = linear(layout.parent) if isinstance(layout, SliceLayout) else None
    if parent is None or not isinstance(layout, SliceLayout):
        return None
    return _mapped(parent, lambda basis: _without(basis, layout.dim), _without(parent.shape, layout.dim))


def _without(values: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return values[:dim] + values[dim + 1 :]


def _mapped(
    layout: DistributedLinearLayout, place: Callable[[tuple[int, ...]], tuple[int, ...]], shape: Sequence[int]
) -> DistributedLinearLayout:
    """Every basis moved; registers that would repeat an element are dropped."""
    reg, lane, warp, block = (
        [place(basis) for basis in bases] for bases in (layout.reg, layout.lane, layout.warp, layout.block)
    )
    return DistributedLinearLayout([basis for basis in reg if any(basis)], lane, warp, block, shape)


@lru_cache(maxsize=4096)
def reshaped(layout: Any, old: tuple[int, ...], new: tuple[int, ...]) -> DistributedLinearLayout | None:
    """After a reshape, elements in row-major order."""
    known = linear(layout)
    if known is None or known.shape != old:
        return None
    steps = [math.prod(old[d + 1 :]) for d in range(len(old))]

    def place(basis: tuple[int, ...]) -> tuple[int, ...]:
        rest = sum(b * s for b, s in zip(basis, steps, strict=True))
        out = []
        for extent in reversed(new):
            rest, digit = divmod(rest, extent)
            out.append(digit)
        return tuple(reversed(out))

    return _mapped(known, place, new)


@lru_cache(maxsize=4096)
def permuted(layout: Any, order: tuple[int, ...]) -> DistributedLinearLayout | None:
    """After a permutation of the dimensions."""
    known = linear(layout)
    if known is None:
        return None
    return _mapped(known, lambda basis: tuple(basis[d] for d in order), [known.shape[d] for d in order])


@lru_cache(maxsize=4096)
def halved(layout: Any) -> DistributedLinearLayout | None:
    """Of the two parts of a last dimension of 2; LayoutError when they sit in different threads."""
    known = linear(layout)
    if known is None:
        return None
    last = (0,) * (len(known.shape) - 1) + (1,)
    if last not in known.reg:
        raise LayoutError(f"split needs both parts in the same thread, got {known!r}")
    return _mapped(known, lambda basis: basis[:-1], known.shape[:-1])


@lru_cache(maxsize=4096)
def same_threads(a: Any, b: Any) -> bool:
    """Whether a conversion only renames registers; layouts that are not followed may."""
    one, two = linear(a), linear(b)
    if one is None or two is None:
        return a is None or b is None or a == b
    return (one.lane, one.warp, one.block, set(one.reg)) == (two.lane, two.warp, two.block, set(two.reg))
