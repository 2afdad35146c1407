"""A `hopper_ws` kernel as its template reads it: decisions as fields, and names and statements that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import getsource

from tilecast.codegen.gluon import OUTPUT_ARGUMENTS, OUTPUTS, GluonKernel, in_lines, sizes_statement
from tilecast.codegen.host import SMS_STATEMENT, WINDOW_STATEMENTS, Host, box_statements
from tilecast.model.chip.programs import most_keys, programs_and_turns, start_keys
from tilecast.model.kernel import e4m3
from tilecast.model.kernel.variants.fa3 import E4M3_PART

#: Columns of V from which on registers are scarce: O takes half as many in each thread.
WIDE = 192
#: From `pid` and the sizes to the work tile of a turn, for schedulers whose programs stay.
_WORK_TILE = {
    "persistent": (
        "tile = turn * programs + pid",
        "head = tile // query_blocks",
        "block = tile % query_blocks",
        "exists = tile < query_blocks * problem.heads",
    ),
    "longest-first": (
        "# Programs take turns forwards and backwards, which evens out their loads.",
        "tile = turn * programs + gl.where(turn % 2 == 0, pid, programs - 1 - pid)",
        "head = tile % problem.heads",
        "block = query_blocks - 1 - tile // problem.heads",
        "exists = tile < query_blocks * problem.heads",
    ),
    "paired": (
        "# An even number of turns: a long and a short query block of one head make a pair; all pairs are the same work and share K and V",
        "# in L2.  An odd number: blocks one by one, the longest of all heads first.  One turn: a program to each block, head by head.",
        "alone = problem.turns % 2 == 1",
        "across = alone & (problem.turns > 1)",
        "trip = gl.where(alone, turn, turn // 2)",
        "place = trip * programs + gl.where(trip % 2 == 0, pid, programs - 1 - pid)",
        "row_length = gl.where(across, problem.heads, gl.where(alone, query_blocks, (query_blocks + 1) // 2))",
        "outer, inner = place // row_length, place % row_length",
        "head, short = gl.where(across, inner, outer), gl.where(across, outer, inner)",
        "long = query_blocks - 1 - short",
        "is_long = alone | (turn % 2 == 0)",
        "block = gl.where(is_long, long, short)",
        "exists = (head < problem.heads) & (short < query_blocks) & (is_long | (short != long))",
    ),
}


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
class Descriptor:
    """A tensor descriptor of the kernel: its name, the tensor it is of, and its box of ``rows`` (a constant) x columns."""

    name: str
    tensor: str
    rows: str
    columns: int


@dataclass(frozen=True, slots=True)
class HopperKernel(GluonKernel):
    """Everything `TEMPLATE` reads except the header; its ``k``."""

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
        dealt = () if self.scheduler == "grid" else ("heads", "turns")
        factors = ("factors",) if self.fp8 else ()
        return ("seqlen_q", "seqlen_k", *window, "heads_q", "group", "query_blocks", *dealt, *factors)

    @property
    def wide(self) -> bool:
        """Whether O leaves so few registers that what can be computed again must not be kept."""
        return self.head_dim_v > WIDE

    @property
    def short_of_registers(self) -> bool:
        """Whether the assembler has to be asked for its best allocation, which releases of Triton differ in."""
        return self.wide or self.in_words

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        """Tensor descriptors in the order of the kernel's arguments, one to a piece."""
        found = []
        for tensor, parts, rows in (("q", self.qk_pieces, "ROWS"), ("k", self.qk_pieces, "TILE_N"), ("v", self.v_pieces, "TILE_N")):  # fmt: skip
            names = [f"{tensor}_desc_{i}" for i in range(len(parts))] if self.several else [f"{tensor}_desc"]
            found += [Descriptor(name, tensor, rows, part.width) for name, part in zip(names, parts, strict=True)]
        return tuple(found)

    @property
    def several(self) -> bool:
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
        elif self.counts_programs:
            lines += [
                SMS_STATEMENT,
                f"together = batch * heads_kv * seqlen_k <= {self.most_keys}  # L2 keeps what all heads read",
                "programs, turns = programs_and_turns(",
                f"    seqlen_q, seqlen_k, heads, together, sms, TILE_M.value, TILE_N.value, {self.start_keys}",
                ")",
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
        elif self.scheduler == "persistent" and not self.masked:
            lines += [
                SMS_STATEMENT,
                "turns = triton.cdiv(query_blocks * heads, sms)",
                "programs = triton.cdiv(query_blocks * heads, turns)  # no more than all turns need",
            ]
        else:
            lines += [
                SMS_STATEMENT,
                "programs = min(sms, query_blocks * heads)",
                "turns = triton.cdiv(query_blocks * heads, programs)",
            ]
        values = ("heads_q // heads_kv" if name == "group" else name for name in self.sizes)
        lines += [sizes_statement(values)]
        return Host(self.mask, self.head_dim_qk, self.head_dim_v, tuple(lines), OUTPUT_ARGUMENTS)

    @property
    def counts_programs(self) -> bool:
        """Whether the host counts what is done sooner: pairs of blocks, the longest first, or a program to each."""
        return self.scheduler == "paired" and self.mask == "causal"

    @property
    def start_keys(self) -> int:
        """Keys that the start of a program costs where it counts."""
        return start_keys(self.head_dim_qk, self.head_dim_v)

    @property
    def most_keys(self) -> int:
        """Keys of all heads up to which they may take turns at tiles."""
        return most_keys(self.head_dim_qk, self.head_dim_v, 1 if self.fp8 else 2)

    @property
    def programs_text(self) -> str:
        """The function by which it counts, which the forecast calls too."""
        return getsource(programs_and_turns)

    def descriptors_of(self, tensor: str) -> str:
        """The descriptors of q, k or v as the roles take them: one, or a tuple."""
        names = [made.name for made in self.descriptors if made.tensor == tensor]
        return f"({', '.join(names)}{',' * (len(names) == 1)})" if self.several else names[0]

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
        return self.masked and self.warpgroups > 1

    @property
    def counted(self) -> bool:
        """Whether roles count work tiles: a turn may be without one, or its number no tensor."""
        return self.scheduler in ("grid", "paired")

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

    # -- statements ----------------------------------------------------------------------------------------------------

    @property
    def work_tile_statements(self) -> tuple[str, ...]:
        """From `pid` and `query_blocks` to `head`, `block` and `exists`."""
        if self.scheduler == "grid":
            block = (
                "query_blocks - 1 - pid % query_blocks  # the longest first" if self.masked else "pid % query_blocks"
            )
            return ("head = pid // query_blocks", f"block = {block}", "exists = turn == 0")
        return ("programs = own_copy(gl.num_programs(0))", *_WORK_TILE[self.scheduler])

    @property
    def counters(self) -> tuple[str, ...]:
        """What the load role counts."""
        return (
            "n = 0  # key blocks so far",
            *(("tiles = 0  # work tiles so far",) if self.counted else ()),
        )

    @property
    def consumer_counters(self) -> tuple[str, ...]:
        """What a consumer starts with."""
        turns = "turns = Turns(turn_barriers.index(g), turn_barriers.index((g + 1) % WARPGROUPS))"
        return (*((turns,) if self.ping_pong else ()), *self.counters)

    @property
    def next_tile(self) -> str:
        """Counts a work tile."""
        return "tiles += 1" if self.counted else ""

    @property
    def row_statements(self) -> tuple[str, ...]:
        """The rows of a warpgroup and their key blocks, past those that only later rows need."""
        own = ("row += g * ROWS", "first, end = key_blocks(problem, row, ROWS)")
        if not self.uneven:
            return own
        turns = f", turns, {self.tile_number}" if self.ping_pong else ""
        return (
            "cta_first, cta_end = key_blocks(problem, row, TILE_M)",
            *own,
            f"n = pass_blocks(n, cta_end - end, k, v{turns})",
        )

    @property
    def end_statements(self) -> tuple[str, ...]:
        """The end of a work tile: past the key blocks that only earlier rows need."""
        lines = ["n += 1"]
        if self.uneven and self.mask == "window":
            turns = f", turns, {self.tile_number} + 1" if self.ping_pong else ""
            lines.append(f"n = pass_blocks(n, first - cta_first, k, v{turns})")
        return (*lines, *((self.next_tile,) if self.counted else ()), *self.store_statements)

    @property
    def store_statements(self) -> tuple[str, ...]:
        """Stores of O, one to a piece."""
        if self.o_pieces == 1:
            return ("store_rows(problem, o, inverse, batch, head, row)",)
        return tuple(
            f"store_rows(problem, o[{i}], inverse, batch, head, row, {piece.offset})"
            for i, piece in enumerate(self.o_columns)
        )

    def own(self, size: str) -> str:
        """A size for masks: where registers are scarce, an own copy, so that roles share nothing that is made of it."""
        return f"own_copy({size})" if self.wide else size

    @property
    def query_tile_fields(self) -> tuple[str, ...]:
        """Fields of `QueryTile`."""
        masked = ("row", *(("last",) if self.gives_q_early else ())) if self.masked else ()
        return ("q", "k", "v", "q_number", *masked, "problem", *(("turns", "tiles") if self.ping_pong else ()))

    @property
    def query_tile_text(self) -> str:
        """What they are."""
        last = ", number of the last key block" if self.gives_q_early else ""
        masked = f", first row{last}" if self.masked else ""
        turns = ", work tiles before" if self.ping_pong else ""
        return f"ROWS query rows of a work tile: rings, number of Q in its ring{masked}, problem{turns}."

    @property
    def tile_rows(self) -> str:
        """What a `QueryTile` is given of them where there is a mask."""
        last = "n + end - 1 - first, " if self.gives_q_early else ""
        return f"row, {last}" if self.masked else ""

    @property
    def zeros(self) -> str:
        """O before any key."""
        if self.o_pieces == 1:
            return "gl.zeros([ROWS, HEAD_DIM_V], gl.float32, layout=accumulator(HEAD_DIM_V))"
        widths = ", ".join(str(piece.width) for piece in self.o_columns)
        return f"[gl.zeros([ROWS, width], gl.float32, layout=accumulator(width)) for width in ({widths})]"

    @property
    def scaled_o(self) -> str:
        """O times the factor of a step."""
        return "scaled(o, factor)" if self.o_pieces == 1 else "[scaled(piece, factor) for piece in o]"

    @property
    def rescaled_o(self) -> str:
        """O brought to the reference of a step."""
        return "rescaled(o, factor)" if self.rescale == "conditional" else self.scaled_o

    @property
    def qk_products(self) -> tuple[str, ...]:
        """Products that add up to S, for heads in pieces."""
        return tuple(
            f"s = warpgroup_mma(q[{i}], k[{i}].permute((1, 0)), s, use_acc={i > 0}, is_async=True)"
            for i in range(len(self.qk_pieces))
        )

    @property
    def pv_products(self) -> tuple[str, ...]:
        """Products of P and the pieces of V."""
        return tuple(
            f"warpgroup_mma(gl.convert_layout(p, left_operand(o[{i}])), v[{i}], o[{i}], is_async=True),"
            for i in range(self.o_pieces)
        )

    @property
    def _finish_qk(self) -> tuple[str, str]:
        pending = self.o_pieces if self.overlap else 0
        return f"s = warpgroup_mma_wait({pending}, deps=[s])", "release(tile.k, n + 1)"

    @property
    def _finish_pv(self) -> tuple[str, str]:
        if self.promoted:
            return "part = warpgroup_mma_wait(0, deps=[part])", "release(tile.v, n)"
        return f"o = warpgroup_mma_wait(0, deps={self.o_deps})", "release(tile.v, n)"

    @property
    def last_pv(self) -> str:
        """The statement that issues the product of the last block."""
        if self.in_parts:
            return "part = issue_pv(left_operand(p), tile_at(v, n), 0)"
        if self.fp8:
            return f"{'part' if self.promoted else 'o'} = issue_pv(left_operand(p), tile_at(v, n){'' if self.promoted else ', o'})"
        return "o = issue_pv(p.to(dtype), tile_at(v, n), o)"

    @property
    def finish_last_pv(self) -> tuple[str, ...]:
        """Statements that wait for it."""
        if self.in_parts:
            return (
                "left = scaled(o[0], statistics.factor) + warpgroup_mma_wait(0, deps=[part])",
                "part = issue_pv(left_operand(p), tile_at(v, n), 1)",
                "o = (left, scaled(o[1], statistics.factor) + warpgroup_mma_wait(0, deps=[part]))",
            )
        if self.promoted:
            return ("o = scaled(o, statistics.factor) + warpgroup_mma_wait(0, deps=[part])",)
        return (f"o = warpgroup_mma_wait(0, deps={self.o_deps})",)

    @property
    def product_statements(self) -> tuple[str, ...]:
        """The matrix products of an iteration, in the order of the pipeline, until S is there."""
        number = "own_copy(tile.q_number)" if self.wide else "tile.q_number"
        qk: tuple[str, ...] = (
            "wait(tile.k, n + 1)",
            f"s = issue_qk(tile_at(tile.q, {number}), tile_at(tile.k, n + 1))",
        )
        result, before = ("part", "") if self.promoted else ("o", ", o")
        pv: tuple[str, ...] = ("wait(tile.v, n)", f"{result} = issue_pv(operand, tile_at(tile.v, n){before})")
        order = self.issue_order
        if not self.overlap:
            qk, pv = (*qk, *self._finish_qk), (*pv, *self._finish_pv)
            if self.promoted:
                # O takes the product in before S is made: they never need registers at the same time.
                pv, order = (*pv, "o = scaled(o, statistics.factor) + part"), ("pv", "qk")
            if self.in_parts:
                pv = self._pv_in_parts
        lines = [line for product in order for line in (qk if product == "qk" else pv)]
        if self.ping_pong:
            lines = ["take_turn(tile.turns, n - tile.tiles)", *lines, "pass_turn(tile.turns)"]
        return (*lines, *(self._finish_qk if self.overlap else ()))

    @property
    def _pv_in_parts(self) -> tuple[str, ...]:
        """P V of wide heads: half of the columns after half of them, so that registers hold one half's product beside O."""
        return (
            "wait(tile.v, n)",
            "part = warpgroup_mma_wait(0, deps=[issue_pv(operand, tile_at(tile.v, n), 0)])",
            "left = scaled(o[0], statistics.factor) + part",
            "part = warpgroup_mma_wait(0, deps=[issue_pv(operand, tile_at(tile.v, n), 1)])",
            "release(tile.v, n)",
            "o = (left, scaled(o[1], statistics.factor) + part)",
        )

    @property
    def first_softmax(self) -> str:
        """The first step of the softmax, and O before it."""
        words = "p = in_words(p)\n" if self.in_words else ""
        return f"""row_max = {self.row_max}
reference = reference_of(row_max, problem)
p = {self.exp2}(s * problem.scale_log2 - reference[:, None])
statistics = Statistics(row_max, partial_sums(p), reference{", gl.full([ROWS], 1.0, gl.float32, layout=SCORE_ROWS)" if self.promoted else ""})
{words}o = {self.zeros}"""

    @property
    def release_single(self) -> str:
        """The end of Q where all blocks of a window were one."""
        return "release(q, q_number)"

    @property
    def early_release_of_q(self) -> str:
        """The end of Q in a masked loop."""
        if not self.gives_q_early:
            return ""
        return """# After the last block would do, but then ptxas converts P behind the wait for V and not under Q K^T.
    if n + 1 == tile.last:
        release(tile.q, tile.q_number)
    """

    @property
    def late_release_of_q(self) -> str:
        """The end of Q behind it."""
        return f"if end - 1 == first:\n    {self.release_single}" if self.gives_q_early else "release(q, q_number)"

    @property
    def softmax_statements(self) -> tuple[str, ...]:
        """The softmax of an iteration, and the end of its P V."""
        fixed = (
            f"p = {self.exp2}(s * tile.problem.scale_log2 - statistics.reference[:, None])",
            "sums = partial_sums(p)",
            "vote(sums, OUTGROWN)",
        )
        move = (
            "if some_above():",
            "    p, sums, statistics, factor = moved(s, p, sums, statistics, tile.problem)",
            f"    o = {self.scaled_o}",
            "statistics = Statistics(statistics.row_max, statistics.row_sums + sums, statistics.reference)",
        )
        online = "p, statistics, factor = online_softmax(s, statistics, tile.problem)"
        if self.promoted and not self.overlap:
            return (online.replace("factor", "_"), *(("p = in_words(p)",) if self.in_words else ()))
        if self.promoted:
            # The O there is was last brought to the reference before this block's: one FFMA adds and rescales.
            due = "due = statistics.factor"
            return (due, online.replace("factor", "_"), *self._finish_pv, "o = scaled(o, due) + part")
        rescale = f"o = {self.rescaled_o}"
        finish = self._finish_pv if self.overlap else ()
        if self.both:
            both = ("if RESCALE:", f"    {online}", "else:", *(f"    {line}" for line in fixed))
            return (*both, *finish, "if RESCALE:", f"    {rescale}", "else:", *(f"    {line}" for line in move))
        return (*fixed, *finish, *move) if self.anchored else (online, *finish, rescale)

    @property
    def online(self) -> bool:
        """Whether an iteration has a step of the online softmax."""
        return any("online_softmax" in line for line in self.softmax_statements)

    @property
    def row_results(self) -> tuple[str, ...]:
        """The end of the function that says what a row's statistics come to."""
        if not self.masked:
            return ("return 1.0 / row_sum, lse",)
        seen: tuple[str, ...] = ("empty = keys_seen(problem, row) < 0",)
        if self.mask == "window":
            seen = ("first, last = keys_seen(problem, row)", "empty = last < first")
        return (*seen, 'return gl.where(empty, 0.0, 1.0 / row_sum), gl.where(empty, float("-inf"), lse)')

    # -- e4m3 ----------------------------------------------------------------------------------------------------------

    @property
    def instruction_depth(self) -> int:
        """K of one matrix instruction: 32 bytes of a row."""
        return 32 if self.fp8 else 16

    @property
    def in_words(self) -> bool:
        """Whether P becomes words of four bytes right behind its exponentials, and row maxima come from several chains: where two
        warpgroups take all there is, nobody else fills the gaps; of three, with an eighth more time, others do (measured at head_dim 64)."""
        return self.promoted and not self.overlap and self.warpgroups < 3

    @property
    def gives_q_early(self) -> bool:
        """Whether a masked loop gives Q back in its last block and not behind it, for the sake of where P is converted: in words that is
        settled, and the branch would cost some 40 registers, which loops of 256 keys or of wide heads do not have."""
        return not self.in_words

    @property
    def row_max(self) -> str:
        """The largest score of each row."""
        return "largest(s)" if self.in_words else "gl.max(s, 1)"

    @property
    def in_parts(self) -> bool:
        """Whether P V comes in two parts of its columns."""
        return self.promoted and self.o_pieces > 1

    @property
    def octaves(self) -> int:
        """Power of two that exponentials reach in e4m3: 8, less what a row may outgrow its reference by."""
        return e4m3.OCTAVES - (int(self.rescale_threshold) if self.rescale == "conditional" else 0)

    @property
    def problem_of_head(self) -> str:
        """The statement that makes the problem of a launch that of a head."""
        values = (f"launched.{name}" for name in (*OUTPUTS, *self.sizes))
        return in_lines(", ".join((*values, "scale_log2")), "return Problem(", ")", 116)

    @property
    def launched(self) -> str:
        """What consumers call the problem of the launch: in e4m3 each head has a scale of its own."""
        return "launched" if self.fp8 else "problem"

    @property
    def consumer_turns(self) -> str:
        """`turns` in a consumer."""
        return self.turns.replace("problem", self.launched)

    @property
    def consumer_roles(self) -> tuple[str, ...]:
        """Partitions of the consumers."""
        extra = "turn_barriers, " if self.ping_pong else ""
        return tuple(f"(consumer_role, ({g}, {extra}q, k, v, problem))," for g in range(self.warpgroups))
