"""The first kernel of every backward pass: two numbers of each query row.  Its text is `templates/backward/row_terms.j2`."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tilecast.codegen.gluon import in_lines
from tilecast.codegen.pieces import Piece

#: Elements of O that a program reads: enough to fill its warps, few enough for their registers.
_ELEMENTS = 4096
_TENSORS = ("out_ptr", "dout_ptr", "lse_ptr", "dlse_ptr", "terms_ptr")
_SIZES = ("heads_q", "seqlen_q", "padded", "dlse_rows")
#: Letters of the strides of a tensor.
STRIDE = {"q": "q", "k": "k", "v": "v", "dout": "d", "out": "o", "dq": "dq", "dk": "dk", "dv": "dv"}
#: Statements that collect its arguments on the host.
FOR_ROWS = (
    "for_rows = (out, dout, lse, dlse_or_any, terms, *(n // 8 for x in (out, dout) for n in x.stride()[:3]))",
    "for_rows += (heads_q, seqlen_q, padded, 0 if dlse is None else seqlen_q)",
)


def strides(tensors: tuple[str, ...]) -> list[str]:
    """Arguments of a kernel for the strides of batch, head and row of some tensors."""
    return [f"stride_{STRIDE[tensor]}{axis}" for tensor in tensors for axis in "bhs"]


class RowTerms(ABC):
    """What the text of the kernel asks of a backward pass."""

    __slots__ = ()

    head_dim_v: int
    v_pieces: tuple[Piece, ...]

    @property
    @abstractmethod
    def padded(self) -> int:
        """Rows that terms are padded to: what no loop reads beyond."""

    @property
    def counters(self) -> bool:
        """Whether it also sets the counters of blocks of queries to zero."""
        return False

    @property
    def rows(self) -> int:
        """Rows of a program."""
        return max(16, _ELEMENTS // (1 << (self.head_dim_v - 1).bit_length()))

    @property
    def delta_statements(self) -> tuple[str, ...]:
        """Statements that add up dO * O."""
        lines = []
        for piece in self.v_pieces:
            for name, stride in (("out", "stride_os"), ("dout", "stride_ds")):
                start = f" + {piece.start}" if piece.start else ""
                at = f"{name}_ptr{start}, {stride}, seqlen_q - row, ROWS, {piece.width}, True"
                lines.append(f"{name} = load_rows({at}).to(tl.float32)")
            lines.append("delta += tl.sum(out * dout, 1)")
        return tuple(lines)

    @property
    def _row_tensors(self) -> tuple[str, ...]:
        return (*_TENSORS, "counters_ptr") if self.counters else _TENSORS

    @property
    def unspecialized_rows(self) -> str:
        """Places of strides and sizes among the arguments."""
        first = len(self._row_tensors)
        return f"range({first}, {first + 6 + len(_SIZES)})"

    @property
    def row_terms_signature(self) -> str:
        """The head of the kernel."""
        text = ", ".join([*self._row_tensors, *strides(("out", "dout")), *_SIZES])
        return in_lines(text, "def row_terms(", "):")
