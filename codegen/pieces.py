"""Heads as plain Triton takes them: blocks are powers of two, so a head dimension goes as columns that are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from tilecast.model.kernel.variants.fa2 import SMALLEST_DOT, tile_widths
from tilecast.model.kernel.verdict import VariantError


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns of a head dimension that are one tl.dot: a power of two of them."""

    start: int
    width: int
    #: Distinguishes its variables in the kernel; empty where a head is one piece.
    suffix: str

    @property
    def offset(self) -> str:
        """What is added to an address of the head's first column; "" for the first piece."""
        return f" + {self.start}" if self.start else ""


def pieces(head_dim: int) -> tuple[Piece, ...]:
    """Powers of two, largest first, that add up to `head_dim`; each is one tl.dot."""
    widths = tile_widths(head_dim)
    if widths[-1] < SMALLEST_DOT:
        raise VariantError(f"triton: head_dim must be a multiple of {SMALLEST_DOT}, got {head_dim}")
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return tuple(
        Piece(start, width, f"_{start}" if len(widths) > 1 else "") for start, width in zip(starts, widths, strict=True)
    )


class InPieces(ABC):
    """The text that forward kernels share whose Q, K, V and O come in pieces."""

    __slots__ = ()

    qk_pieces: tuple[Piece, ...]
    v_pieces: tuple[Piece, ...]

    @abstractmethod
    def load_block(self, tensor: str, piece: Piece) -> str:
        """A piece of a block of K or V ("k", "v")."""

    @property
    def q(self) -> str:
        """All pieces of Q."""
        return ", ".join(f"q{piece.suffix}" for piece in self.qk_pieces)

    @property
    def o(self) -> str:
        """All pieces of O."""
        return ", ".join(f"o{piece.suffix}" for piece in self.v_pieces)

    @property
    def first_o(self) -> str:
        """O before any key."""
        return ", ".join(f"tl.zeros([TILE_M, {piece.width}], tl.float32)" for piece in self.v_pieces)

    @property
    def state(self) -> str:
        """What a loop over key blocks carries."""
        return f"row_max, row_sum, {self.o}"

    @property
    def qk_products(self) -> tuple[str, ...]:
        """Statements that add up S of a key block."""
        lines = []
        for piece in self.qk_pieces:
            name = f"k{piece.suffix}"
            lines.append(f"{name} = {self.load_block('k', piece)}")
            lines.append(f"s = tl.dot(q{piece.suffix}, {name}.T{', s' if piece.start else ''})")
        return tuple(lines)

    @property
    def pv_statements(self) -> tuple[str, ...]:
        """Statements that add a key block to O."""
        lines = []
        for piece in self.v_pieces:
            v, o = f"v{piece.suffix}", f"o{piece.suffix}"
            lines.append(f"{v} = {self.load_block('v', piece)}")
            lines.append(f"{o} = tl.dot(p.to({v}.dtype), {v}, {o} * correction[:, None])")
        return tuple(lines)
