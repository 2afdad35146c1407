"""The first kernel of every backward pass: two numbers of each query row.  Its text is `templates/backward/row_terms.j2`."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tilecast.codegen.gluon import in_lines
from tilecast.codegen.pieces import Piece
from tilecast.model.kernel.variants.fa3_backward import PIECES

#: Elements of O that a program reads: enough to fill its warps, few enough for their registers.
_ELEMENTS = 4096
_TENSORS = ("out_ptr", "dout_ptr", "lse_ptr", "dlse_ptr", "terms_ptr")
_SIZES = ("heads_q", "seqlen_q", "padded", "dlse_rows")
#: And of heads with fewer columns than the kernel's.
_EIGHTHS = ("eighths_v",)
#: And where sums of dQ go by chains.
_CHAINS = ("chains",)
_AS_NUMBERS = (
    "Two numbers of each query row: its LSE in base 2, and D = sum(dO * O) - dLSE, which every dS of the row subtracts.",
    "",
    "Rows past the end, and rows that saw no key, get an LSE of +inf: exp2(anything - inf) is 0, so P is, and with D = 0 dS.",
)
_IN_PIECES = (
    "Two numbers of each query row: LSE / scale, which is taken from its scores, and D = sum(dO * O) - dLSE, from its dP.",
    "",
)
_EMPTY = (
    "Rows past the end, and rows that saw no key, get 3e38 and D = 0: exp2 of a score less that is 0, so P is, and dS.",
)
#: Letters of the strides of a tensor.
STRIDE = {"q": "q", "k": "k", "v": "v", "dout": "d", "out": "o", "dq": "dq", "dk": "dk", "dv": "dv"}
#: Statements that collect its arguments on the host.
FOR_ROWS = (
    "for_rows = (out, dout, lse, dlse_or_any, terms, *(n // 8 for x in (out, dout) for n in x.stride()[:3]))",
    "for_rows += (heads_q, seqlen_q, padded, 0 if dlse is None else seqlen_q)",
)
#: The same of kernels that take heads of fewer columns.
FOR_NARROWER_ROWS = (FOR_ROWS[0], FOR_ROWS[1].replace("else seqlen_q)", "else seqlen_q, eighths_v)"))


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
    def in_pieces(self) -> bool:
        """Whether numbers of a row are three bf16 pieces each, in a row of `PIECES` that products add up."""
        return False

    @property
    def loaded_terms(self) -> int:
        """Numbers of a row that are loaded as float32."""
        return 2

    @property
    def pieces(self) -> int:
        """Pieces of a row: the K of a wgmma."""
        return PIECES

    @property
    def row_terms_text(self) -> tuple[str, ...]:
        """The docstring of the kernel, line by line."""
        if not self.in_pieces:
            return _AS_NUMBERS
        where = "Pieces of the first are 0 to 2 of a row, with the other sign; "
        return (
            *_IN_PIECES,
            where + ("D is a float32 of its own." if self.loaded_terms else "those of D 3 to 5."),
            *_EMPTY,
        )

    @property
    def row_terms_end(self) -> str:
        """The statements that store the numbers."""
        return f"backward/{'pieces' if self.in_pieces else 'numbers'}.j2"

    @property
    def keep_delta(self) -> str:
        """The statement that keeps D beside the pieces of LSE."""
        if self.loaded_terms:
            return "tl.store(deltas_ptr + batch_head * padded + rows, delta)"
        return "words = in_pieces(delta, 3, words)"

    @property
    def counters(self) -> bool:
        """Whether it also sets the counters of blocks of queries to zero."""
        return False

    @property
    def chained(self) -> bool:
        """Whether a block of queries has as many counters as there are chains of sums."""
        return False

    @property
    def counter_statements(self) -> tuple[str, ...]:
        """Statements that set the counters of a block of queries to zero."""
        if self.chained:
            place = "((batch_head * chains + chain) * padded + row) // TILE_M"
            return ("for chain in range(chains):", f"    tl.store(counters_ptr + 1 + {place}, 0.0)")
        return ("tl.store(counters_ptr + 1 + (batch_head * padded + row) // TILE_M, 0.0)",)

    @property
    def begins_early(self) -> bool:
        """Whether the launch after it may begin before it has ended, and waits where it needs what this one writes."""
        return False

    @property
    def rows(self) -> int:
        """Rows of a program."""
        return max(16, _ELEMENTS // (1 << (self.head_dim_v - 1).bit_length()))

    @property
    def delta_statements(self) -> tuple[str, ...]:
        """Statements that add up dO * O, behind the one that lets the launch after it begin."""
        lines = ["gdc_launch_dependents()"] if self.begins_early else []
        for piece in self.v_pieces:
            for name, stride in (("out", "stride_os"), ("dout", "stride_ds")):
                start = f" + {piece.start}" if piece.start else ""
                at = f"{name}_ptr{start}, {stride}, seqlen_q - row, ROWS, {piece.width}, True{self._ends(piece)}"
                lines.append(f"{name} = load_rows({at}).to(tl.float32)")
            lines.append("delta += tl.sum(out * dout, 1)")
        return tuple(lines)

    def _ends(self, piece: Piece) -> str:
        """Arguments that say where the columns of narrower heads end."""
        return (", eighths_v" + (f", {piece.start}" if piece.start else "")) if self.narrower else ""

    @property
    def narrower(self) -> bool:
        """Whether heads of fewer columns are taken as well."""
        return False

    @property
    def _row_sizes(self) -> tuple[str, ...]:
        return (*_SIZES, *(_CHAINS if self.chained else ()), *(_EIGHTHS if self.narrower else ()))

    @property
    def _row_tensors(self) -> tuple[str, ...]:
        more = ("deltas_ptr",) if self.in_pieces and self.loaded_terms else ()
        return (*_TENSORS, *more, *(("counters_ptr",) if self.counters else ()))

    @property
    def unspecialized_rows(self) -> str:
        """Places of strides and sizes among the arguments."""
        first = len(self._row_tensors)
        return f"range({first}, {first + 6 + len(self._row_sizes)})"

    @property
    def row_terms_signature(self) -> str:
        """The head of the kernel."""
        scales = ("scale_log2", "scale") if self.in_pieces else ()
        text = ", ".join([*self._row_tensors, *strides(("out", "dout")), *self._row_sizes, *scales])
        return in_lines(text, "def row_terms(", "):")
