"""How shared and tensor memory lay out tensors, and how the CTAs of a cluster divide them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

Basis = tuple[tuple[int, ...], ...]


def frozen(bases: Any) -> Basis:
    """Bases as tuples."""
    return tuple([tuple(map(int, basis)) for basis in bases or ()])


@lru_cache(maxsize=256)
def _parts_of(cga: Basis, rank: int) -> tuple[int, ...]:
    counts = [1] * rank
    for basis in cga:
        for place, step in enumerate(basis):
            if step:
                counts[rank - len(basis) + place] *= 2
    return tuple(counts)


@lru_cache(maxsize=4096)
def _part(cga: Basis, cta: int, shape: tuple[int, ...]) -> tuple[slice, ...]:
    rank = len(shape)
    at = [0] * rank
    for bit, basis in enumerate(cga):
        if cta >> bit & 1:
            for place, step in enumerate(basis):
                at[rank - len(basis) + place] ^= step
    sizes = [n // count for n, count in zip(shape, _parts_of(cga, rank), strict=True)]
    return tuple(slice(a * size, (a + 1) * size) for a, size in zip(at, sizes, strict=True))


class Constant:
    """A compile-time constant, which kernels may ask for its value."""

    @property
    def value(self) -> Any:
        """Itself."""
        return self


class Divided(Constant):
    """How the CTAs of a cluster divide a tensor: for each bit of a CTA's number the step that it makes, in parts."""

    #: Steps by dimension; all zeros where CTAs that differ in the bit have the same part.
    cga: Basis = ()

    @property
    def cga_layout(self) -> list[list[int]]:
        """Bases of the CTAs, as kernels ask for them."""
        return [list(basis) for basis in self.cga]

    def parts(self) -> int:
        """Into how many parts the CTAs divide a tensor; those that have the same part count once."""
        return math.prod(2 for basis in self.cga if any(basis))

    def parts_of(self, rank: int) -> list[int]:
        """Parts along each of ``rank`` dimensions; dimensions before those that the bases know are whole."""
        return list(_parts_of(self.cga, rank))

    def part(self, cta: int, shape: Sequence[int]) -> tuple[slice, ...]:
        """Index of the part of a CTA in a tensor of ``shape``."""
        return _part(self.cga, cta, tuple(map(int, shape)))

    def leader(self, cta: int) -> int:
        """The first of the CTAs that have the same part."""
        return sum(1 << bit for bit, basis in enumerate(self.cga) if cta >> bit & 1 and any(basis))

    def replica(self, cta: int) -> int:
        """Number of a CTA among those that have the same part."""
        alike = [bit for bit, basis in enumerate(self.cga) if not any(basis)]
        return sum(1 << place for place, bit in enumerate(alike) if cta >> bit & 1)

    def replicas(self) -> int:
        """How many CTAs have the same part."""
        return 1 << sum(not any(basis) for basis in self.cga)

    def divides(self, bit: int) -> int | None:
        """Dimension, of those that the bases know, along which CTAs that differ in ``bit`` part; None where they do not."""
        basis = self.cga[bit] if bit < len(self.cga) else ()
        return next((place for place, step in enumerate(basis) if step), None)


def cluster_bases(ctas: Sequence[int], split: Sequence[int], order: Sequence[int]) -> list[list[int]]:
    """Bases of CTAs by their count, and how many parts they make, along each dimension, the fastest one first."""
    bases = []
    for dim in order:
        parts = int(split[dim]).bit_length() - 1
        for bit in range(int(ctas[dim]).bit_length() - 1):
            bases.append([1 << bit if place == dim and bit < parts else 0 for place in range(len(ctas))])
    return bases


class SharedLayout(Divided):
    """Any layout of shared memory; only how the CTAs of a cluster divide the tile is kept."""

    def __init__(self, *_swizzle: Any, cga_layout: Any = None, **_more: Any) -> None:
        self.cga = frozen(cga_layout)


class SwizzledSharedLayout(SharedLayout):
    """Rows in an order, swizzled; a swizzle moves no values here."""

    def __init__(
        self, vec: Any = 1, per_phase: Any = 1, max_phase: Any = 1, order: Any = (), cga_layout: Any = None, **_more: Any
    ) -> None:  # fmt: skip
        super().__init__(cga_layout=cga_layout)
        self.vec, self.per_phase, self.max_phase = int(vec), int(per_phase), int(max_phase)
        self.order = tuple(int(n) for n in order)

    def __repr__(self) -> str:
        return f"swizzled layout ({self.vec}, {self.per_phase}, {self.max_phase}), order {list(self.order)}"

    def plain(self) -> bool:
        """Whether elements lie in row-major order."""
        return self.max_phase == 1 and self.order == tuple(range(len(self.order)))[::-1]


class PaddedSharedLayout(SharedLayout):
    """Padding after intervals of elements; where an element lies moves no values here."""

    def __init__(self, interval_padding_pairs: Any, offset_bases: Any, cga_layout: Any = None, shape: Any = ()) -> None:
        super().__init__(cga_layout=cga_layout)
        self.interval_padding_pairs, self.offset_bases = frozen(interval_padding_pairs), frozen(offset_bases)
        self.shape = tuple(int(n) for n in shape)

    @staticmethod
    def with_identity_for(pairs: Any, shape: Any, order: Any, cga_layout: Any = ()) -> PaddedSharedLayout:
        """Padding of elements in the order of the dimensions."""
        rank = len(shape)
        bases = [
            [1 << bit if place == dim else 0 for place in range(rank)]
            for dim in order
            for bit in range(int(shape[dim]).bit_length() - 1)
        ]
        return PaddedSharedLayout(pairs, bases, cga_layout, shape)

    def padded_bytes(self, elements: int, size: int) -> int:
        """Bytes of ``elements`` of ``size`` bytes with what is put between them."""
        padding = sum(
            (elements // interval - (elements % interval == 0)) * pad for interval, pad in self.interval_padding_pairs
        )
        return (elements + padding) * size


class SharedLinearLayout(SharedLayout):
    """Any linear order; where an element lies moves no values here."""

    def __init__(self, offset_bases: Any, block_bases: Any = None, alignment: Any = 16) -> None:
        self.offset_bases, self.alignment = frozen(offset_bases), int(alignment)
        self.block_bases = blocks = frozen(block_bases)
        # In parts, as other layouts tell it: a step of a part's extent is one.
        extents = [
            1 << max((basis[dim].bit_length() for basis in self.offset_bases), default=0) for dim in range(self.rank)
        ]
        super().__init__(cga_layout=[[s // n for s, n in zip(basis, extents, strict=True)] for basis in blocks])

    @property
    def rank(self) -> int:
        """Dimensions."""
        return len(self.offset_bases[0])

    def plain(self) -> bool:
        """Whether elements lie in row-major order."""
        strides = [max((b[dim] for b in self.offset_bases), default=0) for dim in range(self.rank)]
        expected = [
            tuple(1 << bit if place == dim else 0 for place in range(self.rank))
            for dim in reversed(range(self.rank))
            for bit in range(strides[dim].bit_length())
        ]
        return list(self.offset_bases) == expected


def same_places(one: Any, other: Any, shape: Sequence[int], new: Sequence[int], bits: int, new_bits: int) -> bool:
    """Whether the bytes of two layouts, taken in row-major order of their elements, are the same places of memory."""
    if all(isinstance(x, (SwizzledSharedLayout, SharedLinearLayout)) and x.plain() for x in (one, other)):
        return True
    if isinstance(one, NvmmaSharedLayout) and isinstance(other, NvmmaSharedLayout):
        # Rows of one width, in patterns of one width, lie alike whatever the elements are.
        alike = (one.swizzle, one.transposed, one.fp4_padded) == (other.swizzle, other.transposed, other.fp4_padded)
        return alike and not one.transposed and shape[-1] * bits == new[-1] * new_bits
    return type(one) is type(other) and list(shape) == list(new) and bits == new_bits


def panels_abreast(one: Any, other: Any, shape: Sequence[int], new: Sequence[int], bits: int, new_bits: int) -> int:
    """How many tiles of ``shape``, one after the other, are a tile of ``new``, which is as high: 0 where they are none.

    Rows wider than the swizzle lie in panels of its width, each with all rows.
    """
    if not (isinstance(one, NvmmaSharedLayout) and isinstance(other, NvmmaSharedLayout)):
        return 0
    alike = one.pattern() == other.pattern() and not one.transposed and bits == new_bits
    if not alike or len(shape) != 3 or len(new) != 3 or shape[1] != new[1] or shape[2] * bits != 8 * one.swizzle:
        return 0
    return 0 if new[2] % shape[2] else new[2] // shape[2]


def rearranged(one: Any, other: Any, shape: Sequence[int], bits: int) -> Any:
    """Of each element of a tile by the ``other`` layout, the number of the element by ``one`` that has its bytes; None where that is not known.

    For what the copy engine writes: panels as wide as the swizzle, one after the other, in which 16 bytes lie at the exclusive or of their
    place and their row (PTX ISA, "Swizzling modes"), each CTA its part.
    """
    layouts = (one, other)
    if len(shape) != 2 or bits < 8 or not all(isinstance(x, NvmmaSharedLayout) for x in layouts):
        return None
    if any(x.transposed or x.fp4_padded or not x.swizzle for x in layouts) or len(one.cga) != len(other.cga):
        return None
    numbers = np.arange(math.prod(shape)).reshape(shape)
    found = np.full(numbers.size, -1)
    for cta in range(1 << len(one.cga)):
        old, new = (numbers[x.part(cta, shape)] for x in layouts)
        if old.size != new.size:
            return None
        at_old, at_new = (
            _places(x.swizzle, part.shape, bits // 8) for x, part in zip(layouts, (old, new), strict=True)
        )
        if at_old is None or at_new is None:
            return None
        by_place = np.empty(old.size, int)
        by_place[at_old.reshape(-1)] = old.reshape(-1)
        found[new.reshape(-1)] = by_place[at_new.reshape(-1)]
    return found.reshape(shape)


def _places(swizzle: int, shape: Sequence[int], size: int) -> Any:
    """Where each element of a CTA's part lies, in elements of ``size`` bytes; None where rows are no whole panels."""
    rows, columns = shape
    if columns * size % swizzle:
        return None
    row, byte = np.arange(rows)[:, None], np.arange(columns)[None, :] * size
    at = byte // swizzle * (rows * swizzle) + row * swizzle + byte % swizzle
    return (at ^ (at >> 7 & swizzle // 16 - 1) << 4) // size


class MBarrierLayout(SharedLayout):
    """Barriers: one in each CTA, or one for those whose bits of the CTA's number the bases leave out."""

    def __init__(self, cga_layout: Any = None) -> None:
        super().__init__(cga_layout=cga_layout)

    @staticmethod
    def multicta(num_ctas: Any, two_cta: Any = False) -> MBarrierLayout:
        """One for each of ``num_ctas`` CTAs, or for each pair of them."""
        count = int(num_ctas) // (2 if two_cta else 1)
        return MBarrierLayout([[0]] * bool(two_cta) + [[1 << bit] for bit in range(count.bit_length() - 1)])


class NvmmaSharedLayout(SharedLayout):
    """What the copy engine writes and the tensor core reads; a swizzle moves no values here, but must be a possible one."""

    def __init__(
        self, swizzle_byte_width: Any = 0, element_bitwidth: Any = 0, rank: Any = 2, transposed: Any = False, fp4_padded: Any = False,
        cga_layout: Any = None, **_more: Any,
    ) -> None:  # fmt: skip
        super().__init__(cga_layout=cga_layout)
        #: Bytes; bits of an element (0: not known).
        self.swizzle_byte_width, self.element_bitwidth, self.rank = (
            int(swizzle_byte_width),
            int(element_bitwidth),
            int(rank),
        )
        self.transposed, self.fp4_padded = bool(transposed), bool(fp4_padded)

    @property
    def swizzle(self) -> int:
        """Bytes of the swizzle."""
        return self.swizzle_byte_width

    @property
    def bits(self) -> int:
        """Bits of an element; 0: not known."""
        return self.element_bitwidth

    def __repr__(self) -> str:
        turned = ", transposed" if self.transposed else ""
        return f"NVMMA layout ({self.swizzle}-byte swizzle, {self.bits}-bit elements{turned}, CTAs {list(self.cga)})"

    def pattern(self) -> tuple[Any, ...]:
        """What a tensor map must share with the memory that it writes, whatever the rank."""
        return (self.swizzle, self.bits, self.transposed, self.fp4_padded, tuple(b for b in self.cga if any(b)))

    def shape_per_cta(self, shape: Sequence[int]) -> list[int]:
        """Extents of the part of each CTA."""
        return [int(n) // count for n, count in zip(shape, self.parts_of(len(shape)), strict=True)]

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


class TensorMemoryLayout(Divided):
    """Rows are lanes, columns are columns, in blocks; ``col_stride`` of 32 / bits leaves each element a column of its own."""

    def __init__(
        self, block: Any, col_stride: Any = 1, cga_layout: Any = None, two_ctas: bool = False, unpacked: Any = True, **_: Any
    ) -> None:  # fmt: skip
        self.block = tuple(int(x) for x in block)
        self.col_stride, self.cga, self.two_ctas = int(col_stride), frozen(cga_layout), bool(two_ctas)


class TensorMemoryScalesLayout(Divided):
    """Scale factors of blocks, one for 16 or 32 elements along K."""

    two_ctas = False

    def __init__(self, cga_layout: Any = None, **_: Any) -> None:
        self.cga = frozen(cga_layout)
