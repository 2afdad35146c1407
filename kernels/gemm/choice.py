"""How a product of whole tiles runs on Hopper: which kernel, in how many parts of k, from copies of which of A and B.

It goes by times that were measured, on an H100 for 126 problems (h100_gemm_choice.csv) and on an H200 by parts of k (h200_gemm_by_parts.csv), whose
SMs and L2 are the same; never by the simulator (docs/gemm.md).  205 problems on an H200 that no term was fitted to (h200_gemm_first_copies.csv,
h200_gemm_few_waves.csv) said which tiles are kept for few waves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

from tilecast.kernels.gemm.registry import MOST_PARTS, SMALL, GemmEntry

#: k of a step of all kernels here.
TILE_K = 64
#: Microseconds of a k-step's products of a tile of 128 x 128 while every SM has a tile; the share that SMs without one save, as the clock
#: is held by power; and of the copies of its 256 rows of A and B, by the largest power of two bytes, up to a line of L2, at which those start.
_PRODUCTS_US, _IDLE, _COPIES_US = 0.33, 0.31, {128: 0.27, 64: 0.35, 32: 0.36, 16: 0.54}
#: An epilogue of 128 x 128 that nothing hides: the last one where two warpgroups take turns, each tile's otherwise; and how much longer one of
#: float32 takes.
_TURN_US, _TILE_US, _WIDE = 1.5, 1.2, 2.6
#: What every tile of 192 rows or columns takes longer whose warpgroups take turns, as it is made of pieces.
_PIECES_US = 0.4
#: Bytes a microsecond of A, B, C and D; the launch that adds up parts, and each part's sums.
_MEMORY_BYTES, _MERGE_US, _PART_US = 3.6e6, 0.9, 0.15
#: A launch of copies, and an element.
_COPY_US, _ELEMENT_US = 2.0, 1.1e-6
#: Waves of tiles up to which small ones and parts of k are looked at, and the k up to which of equals those are the first.
_FEW_WAVES, _SHORT_K = 2, 703
#: k up to which a product in one wave begins before its copies have ended: programs that find their SMs one by one share less of a long one.
_EARLY_K = 1024
#: Sums of a thread up to which a tile is taken where it has a C ahead besides that the copy engine does not bring.
_AHEAD_SUMS = 128
#: Another kernel than the first is taken where it ends so much earlier: less, and repeats differ by more.
_EARLIER = 0.993


class Tiles(NamedTuple):
    """What of a kernel the time goes by."""

    rows: int
    columns: int
    #: Whether an epilogue runs beside the products of the next tile.
    turns: bool
    #: Whether it is kept for few tiles.
    few: bool = False

    @property
    def sums(self) -> int:
        """That a thread has: of a tile that one warpgroup multiplies or two do."""
        return self.rows * self.columns // (128 if self.turns or self.rows == 64 else 256)

    def of(self, m: int, n: int) -> int:
        """Tiles of an (m, n) result."""
        return -(-m // self.rows) * -(-n // self.columns)


def tiles_of(entries: Iterable[GemmEntry]) -> tuple[Tiles, ...]:
    """Those of kernels that tell them."""
    return tuple(Tiles(*e.tile, e.accumulators == 2, e.use == SMALL) for e in entries if e.tile is not None)


class Choice(NamedTuple):
    """How a product runs."""

    #: Whether A and B are copied first, into rows that start at whole lines.
    copies: tuple[bool, bool]
    #: Number of the kernel among those that were to choose from; -1: the one that parts k.
    kernel: int
    parts: int
    #: Whether the launch begins before that of the copies has ended.
    early: bool


def product_us(
    tiles: Tiles, m: int, n: int, k: int, starts: tuple[int, int], c_bytes: int, sms: int, parts: int = 1, merged: bool = False
) -> float:  # fmt: skip
    """Microseconds of an (m, n, k) product beyond what every launch takes: of ``parts`` of k, or ``merged``, with the launch that adds up
    their sums.  starts: of rows of A and B, in bytes (`_COPIES_US`)."""
    count, merged = tiles.of(m, n) * parts, merged or parts > 1
    steps = -(-k // TILE_K)
    waves, steps, whole = -(-count // sms), -(-steps // parts), tiles.rows * tiles.columns
    size = whole / 128**2
    products = _PRODUCTS_US * size * (1 - _IDLE * (1 - count / (waves * sms)))
    copies = (tiles.rows * _COPIES_US[starts[0]] + tiles.columns * _COPIES_US[starts[1]]) / 256
    # The longer of both, and what they hinder each other where they are about as long.
    pace = math.sqrt(math.hypot(products**2, copies**2))
    epilogue = size * (_TURN_US if tiles.turns else waves * _TILE_US) * (_WIDE if c_bytes == 4 or merged else 1)
    epilogue += waves * _PIECES_US if tiles.turns and whole & whole - 1 else 0.0
    memory = (2 * k * (m + n) + 2 * c_bytes * m * n) / _MEMORY_BYTES
    return max(waves * steps * pace + epilogue, memory) + merged * (_MERGE_US + parts * _PART_US)


def choose(
    kernels: tuple[Tiles, ...], parted: Tiles | None, m: int, n: int, k: int, starts: tuple[tuple[int, int], tuple[int, int]],
    c_bytes: int, sms: int, merged: bool = False, ahead: bool = False,
) -> Choice:  # fmt: skip
    """The choice that ends first, the first kernel among about equals.

    kernels: those of a whole k; ``parted``: the one that parts k, if there is one, which ``merged`` asks for.  starts: of A and B the bytes at
    which rows start, 0 where the copy engine does not read them, and those of a copy's.  ``ahead``: whether threads ask for C themselves.
    """
    best, least = None, float("inf")
    # What cannot be read is copied, what lies no better in a copy is not.
    asked_a, asked_b = (
        (True,) if not lies else (False, True) if copied > lies else (False,) for lies, copied in starts
    )
    for copies in itertools.product(asked_a, asked_b):
        lie = starts[0][copies[0]], starts[1][copies[1]]
        elements = copies[0] * m * k + copies[1] * n * k
        before = _COPY_US + elements * _ELEMENT_US if elements else 0.0
        ordered = sorted(enumerate(kernels), key=lambda kernel: kernel[1].few != (k <= _SHORT_K))
        found = [
            (product_us(tiles, m, n, k, lie, c_bytes, sms), i, 1, tiles)
            for i, tiles in ordered
            if not merged
            and not (tiles.few and tiles.of(m, n) > _FEW_WAVES * sms)
            and not (ahead and tiles.sums > _AHEAD_SUMS)
        ]
        if parted is not None:
            most = min(MOST_PARTS, -(-k // TILE_K), _FEW_WAVES * sms // parted.of(m, n))
            for parts in range(1 if merged else 2, max(merged, most) + 1):
                found.append((product_us(parted, m, n, k, lie, c_bytes, sms, parts, merged), -1, parts, parted))
        for us, kernel, parts, tiles in found:
            us += before
            if us < least * (1.0 if best is None else _EARLIER):
                early = elements > 0 and k <= _EARLY_K and tiles.of(m, n) * parts <= sms
                best, least = Choice(copies, kernel, parts, early), us
    assert best is not None
    return best
