"""What the template of serving kernels needs to know: paged, packed and split attention in plain Triton.

Python decides here, `templates/triton_serving.py.j2` only writes.  The kernels run from sm_80 on and in Triton's interpreter.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import ClassVar

from tilecast.codegen.gluon import in_lines, quoted
from tilecast.codegen.masks import SEEN_OF_SEQUENCE
from tilecast.codegen.pieces import InPieces, Piece, pieces
from tilecast.model.kernel.header import dims_text
from tilecast.model.kernel.variants.serving import ServingVariant
from tilecast.model.kernel.workload import Workload

TEMPLATE = "triton_serving.py.j2"
_POINTERS = ("q_ptr", "k_ptr", "v_ptr", "out", "lse", "sinks", "cu_q", "cu_k", "used_k", "table", "slots", "k_scales",
             "v_scales", "partials", "arrived")  # fmt: skip
_NUMBERS = (
    *(f"stride_{tensor}{axis}" for tensor, axes in (("q", "bsh"), ("o", "bsh"), ("k", "psh"), ("v", "psh"), ("l", "bsh")) for axis in axes),
    "stride_table", "stride_kb", "stride_kg", "stride_vb", "stride_vg", "batch", "heads_kv", "group", "seqlen_q", "seqlen_k", "split_limit", "left", "right", "rows_min", "rows_max",
    "split_bound", "slot_rows", "split_tiles",
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
    whole_keys: int
    most_splits: int
    most_items: int
    #: Programs that an SM holds, and how many times as many a launch may have.
    programs: int
    waves: int
    #: Registers that a thread may have; 0: as many as the compiler likes.
    registers: int
    #: Whether each warp has keys of its own, so that no softmax waits for another warp.
    apart: bool
    #: Whether V is the first columns of K, which are loaded once for both.
    latent: bool
    #: Whether K and V are e4m3 bytes.
    narrow: bool
    qk_pieces: tuple[Piece, ...]
    #: Of a narrow cache, the even and the odd columns of each piece, one after the other.
    v_pieces: tuple[Piece, ...]

    #: Whether K and V come by tensor descriptors, and whether a sequence's keys are never split.
    described: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    #: Whether a launch may run beside one for other rows.
    beside: ClassVar[bool] = False
    #: Whether heads may have fewer columns than the kernel.
    narrower: ClassVar[bool] = False
    #: Whether programs take in runs of splits.
    runs: ClassVar[bool] = False
    #: Whether some launches have options of their own.
    own_options: ClassVar[str] = ""

    @property
    def one_loop(self) -> bool:
        """Whether every block is masked: where rows are few, one pipeline that never drains is worth more than the masks."""
        return self.tile_m == 16 or self.latent

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
        return 1 << max(0, min(fitting, self.most_splits, 16).bit_length() - 1)

    @property
    def first_merged(self) -> str:
        """O of merged rows before any split."""
        return ", ".join(f"tl.zeros([MERGED_ROWS, {piece.width}], tl.float32)" for piece in self.v_pieces)

    @property
    def q_statements(self) -> tuple[str, ...]:
        """Statements that load the Q tile."""
        lines = []
        for piece in self.qk_pieces:
            loaded = f"load_rows(q_ptr{piece.offset}, q_rows, valid, {piece.width}, True)"
            wide = f"tl.broadcast_to({loaded}[None, :, :], [WARPS, TILE_M, {piece.width}])"
            lines.append(f"q{piece.suffix} = {wide if self.apart else loaded}")
        return (*lines, f"q = ({self.q})") if self.q != "q" else tuple(lines)

    def load_block(self, tensor: str, piece: Piece) -> str:
        """A piece of a block of K or V."""
        return self._loaded(f"{tensor}_block{piece.offset}", f"{tensor}_rows", piece.width)

    def _loaded(self, start: str, rows: str, width: int) -> str:
        if self.apart:
            return f"load_keys({start}, {rows}, there, {width})"
        return f"load_rows({start}, {rows}, there, {width}, MASKED)"

    @property
    def block_keys(self) -> str:
        """Numbers of the keys of a block."""
        if self.apart:
            return "tl.arange(0, WARPS)[:, None] * KEYS + tl.arange(0, KEYS)[None, :]"
        return "tl.arange(0, TILE_N)"

    @property
    def rows_shape(self) -> str:
        """Shape of what a row has one of while keys are taken in."""
        return "WARPS, TILE_M" if self.apart else "TILE_M"

    @property
    def key_axis(self) -> int:
        """The axis of S that keys are on."""
        return 2 if self.apart else 1

    @property
    def of_keys(self) -> str:
        """Index that makes a row of S of what each key has."""
        return "[:, None, :]" if self.apart else "[None, :]"

    @property
    def of_rows(self) -> str:
        """Index that makes a column of S of what each row has."""
        return "[None, :, None]" if self.apart else "[:, None]"

    @property
    def widely(self) -> str:
        """Index that makes a column of what is of `rows_shape`."""
        return "[:, :, None]" if self.apart else "[:, None]"

    @property
    def first_o(self) -> str:
        """O before any key."""
        return ", ".join(f"tl.zeros([{self.rows_shape}, {piece.width}], tl.float32)" for piece in self.v_pieces)

    @property
    def gathered(self) -> tuple[str, ...]:
        """Statements that add up what the warps have."""
        return tuple(f"o{p.suffix} = tl.sum(o{p.suffix} * weight[:, :, None], 0)" for p in self.v_pieces)

    @property
    def flag(self) -> str:
        """The argument that says whether bytes are widened by assembly; "" where the cache has 16 bits."""
        return "ASSEMBLED, " if self.narrow else ""

    @property
    def flag_parameter(self) -> str:
        """The same as a parameter."""
        return "ASSEMBLED: tl.constexpr, " if self.narrow else ""

    @property
    def qk_products(self) -> tuple[str, ...]:
        """Statements that add up S of a key block."""
        lines = []
        for piece in self.qk_pieces:
            k, q, loaded = f"k{piece.suffix}", f"q{piece.suffix}", self.load_block("k", piece)
            turned = f"tl.permute({k}, (0, 2, 1))" if self.apart else f"{k}.T"
            lines.append(f"{k} = widened({loaded}, {q}.dtype, ASSEMBLED)" if self.narrow else f"{k} = {loaded}")
            lines.append(f"s = tl.dot({q}, {turned}{', s' if piece.start else ''})")
        return tuple(lines)

    @property
    def pv_statements(self) -> tuple[str, ...]:
        """Statements that add a key block to O."""
        q, lines, names = f"q{self.qk_pieces[0].suffix}", [], [f"v{piece.suffix}" for piece in self.v_pieces]
        if self.latent:
            # Pieces of V are the first of K.
            names = [f"k{piece.suffix}" for piece in self.qk_pieces[: len(self.v_pieces)]]
        if self.narrow:
            for low, (first, second) in zip(self.v_pieces[::2], zip(names[::2], names[1::2], strict=True), strict=True):
                words = self._loaded(f"v_block + {low.start // 2}" if low.start else "v_block", "v_rows", low.width)
                lines.append(f"{first}, {second} = widened_pairs({words}, {q}.dtype, ASSEMBLED)")
        for piece, v in zip(self.v_pieces, names, strict=True):
            o = f"o{piece.suffix}"
            lines += [] if self.narrow or self.latent else [f"{v} = {self.load_block('v', piece)}"]
            lines.append(f"{o} = tl.dot(p.to({q}.dtype), {v}, {o} * correction{self.widely})")
        return tuple(lines)

    @staticmethod
    def widening(kind: str, pairs: bool) -> str:
        """PTX that makes two words of ``kind`` from one of e4m3 bytes, as Python literals; a fused product with -0 as the sum exists
        from sm_80 on, and keeps subnormals."""
        shift, mask, factor = {"bf16x2": (4, "07f007f0", "7b807b80"), "f16x2": (1, "3f803f80", "5c005c00")}[kind]
        lines = [f"{{ .reg .b32 t, m, f, z; mov.b32 f, 0x{factor}; mov.b32 z, 0x80008000;"]
        for number, places in enumerate(("0x2404", "0x3414") if pairs else ("0x1404", "0x3424")):
            lines += [
                f"prmt.b32 t, $2, 0, {places}; shr.u32 m, t, {shift}; and.b32 m, m, 0x{mask};",
                f"lop3.b32 t, t, z, m, 0xea; fma.rn.{kind} ${number}, t, f, z;",
            ]
        return "\n    ".join([*(f'"{line} "' for line in lines), '"}"'])

    @property
    def rescaled(self) -> tuple[str, ...]:
        """Statements that scale O as V is."""
        return tuple(f"o{piece.suffix} = o{piece.suffix} * v_scale" for piece in self.v_pieces)

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
        for piece, columns in zip(self.v_pieces, self.out_columns, strict=True):
            made = f"tl.where(empty, 0.0, o{piece.suffix} * inverse).to(out.dtype.element_ty)"
            lines.append(f"tl.store(out_rows + {columns}[None, :], {made}, mask=valid[:, None])")
        return tuple(lines)

    @property
    def out_columns(self) -> tuple[str, ...]:
        """Where the columns of each piece of O belong."""
        if not self.narrow:
            return tuple(_columns(piece) for piece in self.v_pieces)
        firsts = [(low.start + odd, low.width) for low in self.v_pieces[::2] for odd in (0, 1)]
        return tuple(f"({first} + tl.arange(0, {width}) * 2)" for first, width in firsts)

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
            f"o{s} += tl.sum(weight[:, :, None] * part{s}, 0)" for s in (piece.suffix for piece in self.v_pieces)
        )

    @property
    def unspecialized(self) -> str:
        """Numbers that the compiled code must not depend on."""
        return quoted(_NUMBERS)

    @property
    def signature(self) -> str:
        """The head of the kernel."""
        names = [*_POINTERS, *_NUMBERS, "scale_log2", "cap_log2", "PAGE: tl.constexpr", "CAPPED: tl.constexpr"]
        names += ["ASSEMBLED: tl.constexpr"] if self.narrow else []
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
        whole_keys=variant.whole_keys,
        most_items=variant.most_items,
        most_splits=variant.most_splits,
        programs=variant.programs,
        waves=variant.waves,
        registers=variant.registers,
        qk_pieces=pieces(workload.head_dim_qk),
        apart=bool(variant.apart),
        latent=bool(variant.latent),
        narrow=variant.cache_bits == 8,
        v_pieces=_split_columns(pieces(workload.head_dim_v))
        if variant.cache_bits == 8
        else pieces(workload.head_dim_v),
    )


def _split_columns(whole: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Even and odd columns of each piece; they lie one after the other wherever only these kernels look."""
    return tuple(
        Piece(piece.start + odd * piece.width // 2, piece.width // 2, f"{piece.suffix}_{'odd' if odd else 'even'}")
        for piece in whole
        for odd in (0, 1)
    )


def _title(workload: Workload) -> str:
    return (
        f"Attention to serve with for head_dim {dims_text(workload)}: paged, packed, split over keys, in plain Triton"
    )


def _description(variant: ServingVariant) -> str:
    lines = [
        SEEN_OF_SEQUENCE,
        f"A program owns {variant.tile_m} rows, the query heads of one key head for consecutive queries, and takes in "
        f"{variant.tile_n} keys at a time.",
        f"Sequences of up to {variant.tile_m} rows are split every {variant.split_keys} keys, whatever else is in the batch, "
        "and the program that finishes a tile last merges its splits in their order: what a sequence gets depends on it alone.",
    ]
    return textwrap.fill("  ".join(lines), 120)
