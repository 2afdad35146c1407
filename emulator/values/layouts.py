"""Layouts of register tensors, shared memory and tensor memory: values that compare equal when Gluon's would."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tilecast.emulator.errors import LayoutError
from tilecast.emulator.values.memory_layouts import Basis, Constant, Divided, TensorMemoryLayout, frozen


class DistributedLinearLayout(Constant):
    """Which element each register, lane, warp and CTA holds, by the bases of their bits."""

    #: The lists as they were, and what `_key` made of them.
    _known: Any = None

    def __init__(self, reg_bases: Any, lane_bases: Any, warp_bases: Any, block_bases: Any, shape: Any) -> None:
        # Lists, for kernels' own functions change copies of layouts in place.
        self.reg_bases, self.lane_bases, self.warp_bases, self.block_bases = (
            [list(basis) for basis in frozen(bases)] for bases in (reg_bases, lane_bases, warp_bases, block_bases)
        )
        self.shape = tuple(int(n) for n in shape)

    @property
    def reg(self) -> Basis:
        """Bases of a thread's registers."""
        return self._key()[0][0]  # type: ignore[no-any-return]

    @property
    def lane(self) -> Basis:
        """Bases of the lanes of a warp."""
        return self._key()[0][1]  # type: ignore[no-any-return]

    @property
    def warp(self) -> Basis:
        """Bases of the warps."""
        return self._key()[0][2]  # type: ignore[no-any-return]

    @property
    def block(self) -> Basis:
        """Bases of the CTAs."""
        return self._key()[0][3]  # type: ignore[no-any-return]

    @property
    def rank(self) -> int:
        """Dimensions."""
        return len(self.shape)

    def _lists(self) -> tuple[list[list[int]], ...]:
        return self.reg_bases, self.lane_bases, self.warp_bases, self.block_bases

    def _key(self) -> tuple[tuple[Any, ...], int]:
        """The bases and the extents as tuples, and their hash: made anew where a kernel has changed the lists."""
        lists = self._lists()
        if self._known is None or self._known[0] != lists:
            key = (*(tuple(map(tuple, bases)) for bases in lists), self.shape)
            self._known = tuple([list(basis) for basis in bases] for bases in lists), (key, hash(key))
        found: tuple[tuple[Any, ...], int] = self._known[1]
        return found

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, DistributedLinearLayout):
            return self is other
        # Lists that a kernel has changed may hold tuples.
        return self.shape == other.shape and (self._lists() == other._lists() or self._key()[0] == other._key()[0])

    def __hash__(self) -> int:
        return self._key()[1]

    def __repr__(self) -> str:
        return f"linear layout of {list(self.shape)} (lanes {list(self.lane)}, warps {list(self.warp)})"


@dataclass(frozen=True)
class SliceLayout(Constant):
    """What is left of ``parent`` when dimension ``dim`` is reduced away; None where the parent is not known."""

    dim: int
    parent: Any

    def __new__(cls, dim: int, parent: Any) -> SliceLayout:
        """The layout, or None."""
        return None if parent is None else super().__new__(cls)  # type: ignore[return-value]


class BlockedLayout(Constant):
    """Triton's ordinary layout."""

    def __init__(
        self, size_per_thread: Any, threads_per_warp: Any, warps_per_cta: Any, order: Any, cga_layout: Any = ()
    ) -> None:
        self.key = tuple(tuple(map(int, x)) for x in (size_per_thread, threads_per_warp, warps_per_cta, order))
        self.size_per_thread, self.threads_per_warp, self.warps_per_cta, self.order = self.key
        self.cga_layout = [list(basis) for basis in frozen(cga_layout)]
        self.rank = len(self.order)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockedLayout) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"blocked layout {self.key}"


@dataclass(frozen=True, init=False)
class NvmmaDistributedLayout(Constant):
    """Accumulator of wgmma."""

    version: tuple[int, ...]
    warps_per_cta: tuple[int, ...]
    instr_shape: tuple[int, ...]

    def __init__(self, version: Any, warps_per_cta: Any, instr_shape: Any, **_cga: Any) -> None:
        """From lists, as kernels write them."""
        for name, values in (("version", version), ("warps_per_cta", warps_per_cta), ("instr_shape", instr_shape)):
            object.__setattr__(self, name, tuple(int(x) for x in values))


@dataclass(frozen=True)
class DotOperandLayout(Constant):
    """Left operand of wgmma in registers."""

    operand_index: int
    parent: Any
    k_width: int


@dataclass(frozen=True)
class TmemRegisterLayout(Constant):
    """A row of tensor memory to a lane, as Gluon's helpers choose it for a shape and a number of warps."""

    shape: tuple[int, ...]
    num_warps: int
    variant: str = "32x32b"


def rank_of(layout: Any) -> int | None:
    """Dimensions of a register layout; None where that is not known."""
    if isinstance(layout, SliceLayout):
        parent = rank_of(layout.parent)
        return None if parent is None else parent - 1
    if isinstance(layout, (BlockedLayout, DistributedLinearLayout)):
        return int(layout.rank)
    if isinstance(layout, TmemRegisterLayout):
        return len(layout.shape)
    return len(layout.warps_per_cta) if isinstance(layout, NvmmaDistributedLayout) else None


def tmem_registers(shape: Sequence[int], layout: Any, num_warps: int, variant: str) -> Any:
    """How an access of tensor memory hands rows and columns to threads: linear bases where blocks have 128 rows (32x32b)."""
    extents = tuple(int(n) for n in shape)
    plain = isinstance(layout, TensorMemoryLayout) and layout.block[0] == 128 and len(extents) == 2
    if not plain or not variant.startswith("32x32b") or num_warps < 4:
        return TmemRegisterLayout(extents, num_warps, variant)
    parts = layout.parts_of(2)
    rows, columns = (n // count for n, count in zip(extents, parts, strict=True))
    registers = [[0, 1 << bit] for bit in range(columns.bit_length() - 1)]
    registers += [[1 << bit, 0] for bit in range(7, rows.bit_length() - 1)]
    warps = [[32, 0], [64, 0]]
    for _ in range(num_warps.bit_length() - 3):
        warps.append(registers.pop() if registers else [0, 0])
    half = [0, columns // 2]
    if variant.endswith("splitn") and registers and registers[-1] != half and half in warps[2:]:
        place = warps.index(half)
        registers[-1], warps[place] = half, registers[-1]
    blocks = [[step * own for step, own in zip(basis, (rows, columns), strict=True)] for basis in layout.cga]
    return DistributedLinearLayout(registers, _LANES, warps, blocks, extents)


_LANES = ((1, 0), (2, 0), (4, 0), (8, 0), (16, 0))


@lru_cache(maxsize=4096)
def blocked_bases(layout: BlockedLayout, shape: tuple[int, ...]) -> DistributedLinearLayout:
    """A blocked layout of a tensor of ``shape`` by bases: what is more than the tensor repeats, what is less is in registers."""
    rank = len(shape)
    done = [1] * rank

    def bases(counts: Sequence[int]) -> list[list[int]]:
        found = []
        for dim in layout.order:
            for _ in range(int(counts[dim]).bit_length() - 1):
                inside = done[dim] < own[dim]
                found.append([done[dim] if inside and d == dim else 0 for d in range(rank)])
                done[dim] *= 2 if inside else 1
        return found

    parts = Divided()
    parts.cga = frozen(layout.cga_layout)
    own = [n // count for n, count in zip(shape, parts.parts_of(rank), strict=True)]
    registers, lanes, warps = (
        bases(counts) for counts in (layout.size_per_thread, layout.threads_per_warp, layout.warps_per_cta)
    )
    registers += bases([n // d for n, d in zip(own, done, strict=True)])
    blocks = [[step * n for step, n in zip(basis, own, strict=True)] for basis in parts.cga]
    return DistributedLinearLayout(registers, lanes, warps, blocks, shape)


def row_per_lane(layout: Any, shape: Sequence[int]) -> str:
    """Empty when ``layout`` holds rows of ``shape`` as tcgen05.ld and .st move them; otherwise what is wrong."""
    if layout is None:
        return ""
    if isinstance(layout, BlockedLayout) and len(shape) == 2:
        layout = blocked_bases(layout, tuple(shape))
    if isinstance(layout, TmemRegisterLayout):
        return (
            "" if layout.shape == tuple(shape) else f"needs a layout of {list(shape)}, got one of {list(layout.shape)}"
        )
    if not isinstance(layout, DistributedLinearLayout):
        return f"needs a linear layout with a row to a lane, got {layout!r}"
    if len(layout.shape) != len(shape) or layout.shape[0] != shape[0]:
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
    known = fitted(known, old) if known is not None else None
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


def fitted(layout: DistributedLinearLayout, shape: Sequence[int]) -> DistributedLinearLayout:
    """A linear layout on a tensor of another shape: steps beyond it lead to what is there already, more is in registers."""
    if tuple(shape) == layout.shape or len(shape) != len(layout.shape):
        return layout

    def inside(basis: tuple[int, ...]) -> tuple[int, ...]:
        return basis if all(step < n for step, n in zip(basis, shape, strict=True)) else (0,) * len(shape)

    made = _mapped(layout, inside, tuple(int(n) for n in shape))
    every = (*made.reg, *made.lane, *made.warp, *made.block)
    for dim, extent in enumerate(made.shape):
        covered = 2 * max((basis[dim] for basis in every), default=0) or 1
        while covered < extent:
            made.reg_bases.append([covered if place == dim else 0 for place in range(len(made.shape))])
            covered *= 2
    return made


def same_threads(a: Any, b: Any, shape: Sequence[int] | None = None) -> bool:
    """Whether a conversion of a tensor of ``shape`` only renames registers; layouts that are not followed may."""
    one, two = linear(a), linear(b)
    if one is None or two is None:
        return a is None or b is None or a == b
    if one == two:
        return True
    if shape is not None:
        one, two = fitted(one, shape), fitted(two, shape)
    return (one.lane, one.warp, one.block, set(one.reg)) == (two.lane, two.warp, two.block, set(two.reg))
