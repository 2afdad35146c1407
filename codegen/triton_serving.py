"""What the template of serving kernels needs to know: paged, packed and split attention in plain Triton.

Python decides here, `templates/triton_serving.py.j2` only writes.  The kernels run from sm_80 on and in Triton's interpreter.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from tilecast.codegen.gluon import in_lines
from tilecast.codegen.pieces import InPieces, Piece, pieces
from tilecast.model.kernel.variants.serving import ServingVariant
from tilecast.model.kernel.workload import Workload

TEMPLATE = "triton_serving.py.j2"
_POINTERS = ("q_ptr", "k_ptr", "v_ptr", "out", "lse", "sinks", "cu_q", "cu_k", "used_k", "table", "slots",
             "partials", "sums", "arrived")  # fmt: skip
_NUMBERS = (
    *(f"stride_{tensor}{axis}" for tensor, axes in (("q", "bsh"), ("o", "bsh"), ("k", "psh"), ("v", "psh"), ("l", "bsh")) for axis in axes),
    "stride_table", "batch", "heads_kv", "group", "seqlen_q", "seqlen_k", "left", "right", "rows_min", "rows_max",
    "split_bound", "slot_rows",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServingKernel(InPieces):
    """Everything `TEMPLATE` reads except the header, as ``k``."""

    title: str
    description: str
    head_dim_qk: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    warps: int
    kv_stages: int
    split_keys: int
    most_splits: int
    #: Programs that an SM holds, and how many times as many a launch may have.
    programs: int
    waves: int
    #: Registers that a thread may have; 0: as many as the compiler likes.
    registers: int
    qk_pieces: tuple[Piece, ...]
    v_pieces: tuple[Piece, ...]

    @property
    def one_loop(self) -> bool:
        """Whether every block is masked: where rows are few, one pipeline that never drains is worth more than the masks."""
        return self.tile_m == 16

    @property
    def register_option(self) -> str:
        """What the options of a launch say about registers."""
        return f', "maxnreg": {self.registers}' if self.registers else ""

    @property
    def merged_rows(self) -> int:
        """Rows merged at a time: those of one query of most models, and more where a tile has more."""
        return 4 if self.tile_m == 16 else 16

    @property
    def merged(self) -> int:
        """Splits merged at a time, as many as 32 registers of a thread hold."""
        widest = sum(piece.width for piece in self.v_pieces)
        fitting = 32 * 32 * self.warps // (self.merged_rows * widest)
        return 1 << max(0, min(fitting, self.most_splits).bit_length() - 1)

    @property
    def first_merged(self) -> str:
        """O of merged rows before any split."""
        return ", ".join(f"tl.zeros([MERGED_ROWS, {piece.width}], tl.float32)" for piece in self.v_pieces)

    @property
    def q_statements(self) -> tuple[str, ...]:
        """Statements that load the Q tile."""
        lines = [
            f"q{piece.suffix} = load_rows(q_ptr{piece.offset}, q_rows, valid, {piece.width}, True)"
            for piece in self.qk_pieces
        ]
        return (*lines, f"q = ({self.q})") if self.q != "q" else tuple(lines)

    def load_block(self, tensor: str, piece: Piece) -> str:
        """A piece of a block of K or V."""
        return f"load_rows({tensor}_block{piece.offset}, {tensor}_rows, there, {piece.width}, MASKED)"

    @property
    def qk_statements(self) -> tuple[str, ...]:
        """Statements for S of a key block."""
        return self.qk_products

    @property
    def corrections(self) -> tuple[str, ...]:
        """Statements that bring O to another maximum."""
        return tuple(f"o{piece.suffix} = o{piece.suffix} * correction[:, None]" for piece in self.v_pieces)

    @property
    def store_statements(self) -> tuple[str, ...]:
        """Statements that write O."""
        lines = []
        for piece in self.v_pieces:
            made = f"tl.where(empty, 0.0, o{piece.suffix} * inverse).to(out.dtype.element_ty)"
            lines.append(f"tl.store(out_rows + {_columns(piece)}[None, :], {made}, mask=valid[:, None])")
        return tuple(lines)

    @property
    def keep_statements(self) -> tuple[str, ...]:
        """Statements that keep O of a split."""
        return tuple(
            f"tl.store(at + {_columns(piece)}[None, :], o{piece.suffix}, mask=valid[:, None])"
            for piece in self.v_pieces
        )

    @property
    def merge_loads(self) -> tuple[str, ...]:
        """Statements that load the outputs of some splits."""
        return tuple(
            f"part{piece.suffix} = tl.load(at + {_columns(piece)}[None, None, :], mask=known[:, :, None], other=0.0, "
            'cache_modifier=".cg")'
            for piece in self.v_pieces
        )

    @property
    def merge_statements(self) -> tuple[str, ...]:
        """Statements that add them."""
        return tuple(
            f"o{s} = o{s} * correction[:, None] + tl.sum(weight[:, :, None] * part{s}, 0)"
            for s in (piece.suffix for piece in self.v_pieces)
        )

    @property
    def unspecialized(self) -> str:
        """Numbers that the compiled code must not depend on."""
        return "[" + ", ".join(f'"{name}"' for name in _NUMBERS) + "]"

    @property
    def signature(self) -> str:
        """The head of the kernel."""
        names = [*_POINTERS, *_NUMBERS, "scale_log2", "cap_log2", "PAGE: tl.constexpr", "CAPPED: tl.constexpr"]
        return in_lines(", ".join(names), "def attention(", "):")


def _columns(piece: Piece) -> str:
    return (
        f"tl.arange({piece.start}, {piece.start + piece.width})"
        if not piece.start
        else f"({piece.start} + tl.arange(0, {piece.width}))"
    )


def context(variant: ServingVariant, workload: Workload) -> ServingKernel:
    """The kernel of a legal variant."""
    return ServingKernel(
        title=_title(workload),
        description=_description(variant),
        head_dim_qk=workload.head_dim_qk,
        head_dim_v=workload.head_dim_v,
        tile_m=variant.tile_m,
        tile_n=variant.tile_n,
        warps=variant.warps,
        kv_stages=variant.kv_stages,
        split_keys=variant.split_keys,
        most_splits=variant.most_splits,
        programs=variant.programs,
        waves=variant.waves,
        registers=variant.registers,
        qk_pieces=pieces(workload.head_dim_qk),
        v_pieces=pieces(workload.head_dim_v),
    )


def _title(workload: Workload) -> str:
    dims = f"{workload.head_dim_qk}"
    if workload.head_dim_v != workload.head_dim_qk:
        dims += f" (queries, keys) and {workload.head_dim_v} (values)"
    return f"Attention to serve with for head_dim {dims}: paged, packed, split over keys, in plain Triton"


def _description(variant: ServingVariant) -> str:
    lines = [
        "Query i of a sequence sees keys from left before to right after position i + keys - queries.",
        f"A program owns {variant.tile_m} rows, the query heads of one key head for consecutive queries, and takes in "
        f"{variant.tile_n} keys at a time.",
        f"Sequences of up to {variant.tile_m} rows are split every {variant.split_keys} keys, whatever else is in the batch, "
        "and the program that finishes a tile last merges its splits in their order: what a sequence gets depends on it alone.",
    ]
    return textwrap.fill("  ".join(lines), 120)
