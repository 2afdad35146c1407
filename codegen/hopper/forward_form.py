"""What a `hopper_ws` kernel is: decisions as fields, and what follows from them; its statements are `forward_kernel`'s."""

from __future__ import annotations

from dataclasses import dataclass, replace
from inspect import getsource

from tilecast.codegen.gluon import OUTPUT_ARGUMENTS, GluonKernel, sizes_statement
from tilecast.codegen.host import SMS_STATEMENT, WINDOW_STATEMENTS, Descriptor, Host, box_statements
from tilecast.model.chip.programs import finer_launch, most_keys, sms_abreast, soonest_launch, start_keys
from tilecast.model.kernel.variants.fa3 import E4M3_PART, WIDE, ends_in_halves, in_words


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns [offset, offset + width) of a head: Triton's tensors have power-of-two extents, heads of 96 do not."""

    offset: int
    width: int


def pieces(width: int) -> tuple[Piece, ...]:
    """``width`` columns as power-of-two pieces of at most 256, widest first."""
    out: list[Piece] = []
    offset = 0
    while offset < width:
        size = min(256, 1 << ((width - offset).bit_length() - 1))
        out.append(Piece(offset, size))
        offset += size
    return tuple(out)


@dataclass(frozen=True, slots=True)
class HopperForm(GluonKernel):
    """What was decided of a kernel, and what follows from that: sizes, descriptors, the host side, questions that statements ask."""

    title: str
    #: Paragraphs, wrapped.
    description: str
    mask: str
    #: Consumer warpgroups of a CTA, and query rows of each.
    warpgroups: int
    rows: int
    #: Query rows of a CTA and keys of a block.
    tile_m: int
    tile_n: int
    kv_stages: int
    q_stages: int
    head_dim_qk: int
    head_dim_v: int
    qk_pieces: tuple[Piece, ...]
    v_pieces: tuple[Piece, ...]
    rescale: str
    #: Powers of two that a row maximum may grow by before O is rescaled ("conditional").
    rescale_threshold: float
    scheduler: str
    overlap: bool
    ping_pong: bool
    issue_order: tuple[str, ...]
    #: Of eight exponentials, how many are polynomials, and PTX literals of its coefficients, lowest power first.
    emulated_eighths: int
    polynomial: tuple[str, ...]
    #: Of the partitions after the default one.
    worker_warps: list[int]
    worker_registers: list[int]
    registers_at_launch: int
    #: Whether q, k and v are e4m3, and whether P V of each block is added to O in float32.
    fp8: bool = False
    promoted: bool = False
    #: Whether heads of fewer columns are taken as well, for which the copy engine brings zeros.
    narrow_heads: bool = False

    @property
    def exp2(self) -> str:
        """Function for the exponentials of scores."""
        return "exp2" if self.emulated_eighths else "mufu_exp2"

    @property
    def turns(self) -> str:
        """Over which turns a program loops: a grid gives each program one tile."""
        return "gl.static_range(1)" if self.scheduler == "grid" else "range(problem.turns)"

    @property
    def sizes(self) -> tuple[str, ...]:
        """Numbers that vary from call to call, in the order of the kernel's tuple of them."""
        window = ("window_left", "window_right") if self.mask == "window" else ()
        dealt = () if self.scheduler == "grid" else ("heads", "turns", *(("pair_turns",) if self.deals_finer else ()))
        factors = ("factors",) if self.fp8 else ()
        eighths = ("eighths",) if self.partly_there else ()
        return ("seqlen_q", "seqlen_k", *window, "heads_q", "group", "query_blocks", *dealt, *factors, *eighths)

    @property
    def wide(self) -> bool:
        """Whether O leaves so few registers that what can be computed again must not be kept."""
        return self.head_dim_v > WIDE

    @property
    def in_words(self) -> bool:
        """Whether P becomes words of four bytes right behind its exponentials."""
        return in_words(self.promoted, self.overlap, self.warpgroups)

    @property
    def short_of_registers(self) -> bool:
        """Whether the assembler has to be asked for its best allocation, which releases of Triton differ in: where a thread has few, of
        bytes where words are made of them, where a block's scores and O take most, and of 160 where O takes 64."""
        three = self.warpgroups == 3 and self.columns_v > 64
        return self.wide or self.fp8 or three or self.tile_n + self.columns_v >= 256

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        """Tensor descriptors in the order of the kernel's arguments, one to a piece."""
        found = []
        for tensor, parts, rows in (("q", self.qk_pieces, "ROWS"), ("k", self.qk_pieces, "TILE_N"), ("v", self.v_pieces, "TILE_N")):  # fmt: skip
            names = [f"{tensor}_desc_{i}" for i in range(len(parts))] if self.in_pieces else [f"{tensor}_desc"]
            found += [Descriptor(name, tensor, rows, part.width) for name, part in zip(names, parts, strict=True)]
        return tuple(found)

    @property
    def in_pieces(self) -> bool:
        """Whether tiles are tuples of pieces."""
        return len(self.qk_pieces) > 1 or len(self.v_pieces) > 1

    @property
    def host(self) -> Host:
        """The host side."""
        boxes = (
            () if self.fp8 else box_statements([(made.tensor, made.rows, made.columns) for made in self.descriptors])
        )
        lines = [*boxes]
        lines += WINDOW_STATEMENTS if self.mask == "window" else ()
        lines += ["query_blocks, heads = triton.cdiv(seqlen_q, TILE_M.value), batch * heads_q"]
        if self.scheduler == "grid":
            lines += ["programs = query_blocks * heads"]
        elif self.launch_of:
            lines += [
                SMS_STATEMENT,
                f"_, programs, turns{', pair_turns' if self.deals_finer else ''} = launch_of(batch, heads_q, heads_kv, seqlen_q, seqlen_k, sms)",
            ]
        elif self.scheduler == "paired":
            lines += [
                SMS_STATEMENT,
                "pairs = (query_blocks + 1) // 2 * heads",
                "programs = min(sms, pairs)",
                "turns = 2 * triton.cdiv(pairs, programs)",
                "if query_blocks * heads <= sms:  # a program to each block",
                "    programs, turns = query_blocks * heads, 1",
            ]
        else:
            lines += [
                SMS_STATEMENT,
                "programs = min(sms, query_blocks * heads)",
                "turns = triton.cdiv(query_blocks * heads, programs)",
            ]
        made = Host(self.mask, self.head_dim_qk, self.head_dim_v, (), OUTPUT_ARGUMENTS, narrower=self.narrow_heads)
        if self.partly_there:
            lines += [
                f"eighths = {made.columns[1]} // 8"
                if self.columns_v > self.head_dim_v
                else f"eighths = {made.eighths('v')}"
            ]
        lines += [sizes_statement("heads_q // heads_kv" if name == "group" else name for name in self.sizes)]
        return replace(made, statements=tuple(lines))

    @property
    def counts_programs(self) -> bool:
        """Whether the host counts what is done sooner: pairs of blocks, the longest first, or a program to each."""
        return self.scheduler == "paired" and self.mask == "causal"

    @property
    def deals_finer(self) -> bool:
        """Whether behind pairs of the first heads the tiles of the others may come one by one: 8-bit kernels gain by it, those of 16 bits
        whose tiles take as long, but under the power limit, do not (data/measured/h200_pairs_then_tiles.csv)."""
        return self.counts_programs and self.fp8

    @property
    def launch_of(self) -> tuple[str, ...]:
        """What the first number is that the file's `launch_of` gives, and the lines of its body; nothing where it has none.

        Of `soonest_launch` two more numbers are the kernel's: keys that the start of a program costs, and when heads may take turns at tiles.
        """
        if self.counts_programs:
            bytes_each = 1 if self.fp8 else 2
            most = most_keys(self.head_dim_qk, self.head_dim_v, bytes_each)
            limits = f"{start_keys(self.head_dim_qk, self.head_dim_v)}, {most}, {sms_abreast(bytes_each)}"
            return (
                "keys",
                f"heads, limits = (batch * heads_q, batch * heads_kv), ({limits})",
                f"return {'finer' if self.deals_finer else 'soonest'}_launch(seqlen_q, seqlen_k, *heads, sms, TILE_M.value, TILE_N.value, *limits)",
            )
        if self.scheduler == "persistent" and not self.masked:
            return (
                "tiles",
                "tiles = triton.cdiv(seqlen_q, TILE_M.value) * batch * heads_q",
                "turns = triton.cdiv(tiles, sms)",
                "return turns, triton.cdiv(tiles, turns), turns  # no more programs than all turns need",
            )
        return ()

    @property
    def programs_text(self) -> str:
        """The functions by which it counts, which the forecast calls too."""
        counting = (soonest_launch, finer_launch) if self.deals_finer else (soonest_launch,)
        return "\n\n".join(map(getsource, counting))

    # -- what follows from mask and variant ----------------------------------------------------------------------------

    @property
    def masked(self) -> bool:
        """Whether some rows see fewer keys than others."""
        return self.mask != "none"

    @property
    def anchored(self) -> bool:
        """Whether the reference of the exponentials stays."""
        return self.rescale == "anchored"

    @property
    def both(self) -> bool:
        """Whether the softmax is online on the edge of the mask and anchored inside."""
        return self.anchored and self.masked

    @property
    def uneven(self) -> bool:
        """Whether warpgroups of one CTA see different key blocks."""
        return self.masked and self.warpgroups > 1 and not self.halves

    @property
    def halves(self) -> bool:
        """Whether causal tiles end in blocks that are counted from the diagonal by halves."""
        return ends_in_halves(self.mask, self.in_words, self.warpgroups, self.tile_n)

    @property
    def hides(self) -> bool:
        """Whether the loop's blocks may have keys that rows do not see."""
        return self.masked and not self.halves

    def keys_of(self, scores: str) -> str:
        """How many keys a tensor of scores has."""
        return f"{scores}.shape[1]" if self.halves else "TILE_N"

    @property
    def counted(self) -> bool:
        """Whether roles count work tiles: a turn may be without one, or its number no tensor."""
        return self.scheduler in ("grid", "paired")

    @property
    def head_columns(self) -> tuple[int, ...]:
        """Columns of the tiles that are a head."""
        return tuple(piece.width for piece in self.v_pieces)

    @property
    def columns_v(self) -> int:
        """Columns of V's tiles and of O."""
        return sum(self.head_columns)

    @property
    def partly_there(self) -> bool:
        """Whether tiles may have columns that heads do not."""
        return self.narrow_heads or self.columns_v > self.head_dim_v

    @property
    def o_pieces(self) -> int:
        """Tensors that O consists of."""
        return len(self.o_columns)

    @property
    def o_columns(self) -> tuple[Piece, ...]:
        """Their columns: those of V's tiles; in e4m3 as many as a block's product is added for at a time."""
        if not self.promoted:
            return self.v_pieces
        width = min(self.head_dim_v, E4M3_PART)
        return tuple(Piece(offset, width) for offset in range(0, self.head_dim_v, width))

    @property
    def tile_number(self) -> str:
        """Number of the work tile among those of this program."""
        return "tiles" if self.counted else "turn"

    @property
    def reference_stays(self) -> str:
        """Half a sentence on the softmax of whole blocks, in a comment that has room for it in all loops but the window's."""
        joint = ";\n# " if self.mask == "window" else "; "
        return f"{joint}from here on the reference stays: no row maximum, no rescaling of O" if self.anchored else ""

    @property
    def stays(self) -> str:
        """Argument of `key_block` for whole blocks."""
        return ", RESCALE=False" if self.both else ""

    @property
    def o_deps(self) -> str:
        """O as a wait wants it."""
        return "o" if self.o_pieces > 1 else "[o]"
