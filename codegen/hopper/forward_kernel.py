"""A `hopper_ws` kernel as its template reads it: the statements that follow from what it is (`forward_form`)."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.codegen.gluon import OUTPUTS, in_lines
from tilecast.codegen.hopper.forward_form import HopperForm
from tilecast.model.kernel import e4m3

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
    "finer": (
        "# First a long and a short query block of one head make a pair; all pairs are the same work and share K and V in L2.  Behind",
        "# `pair_turns` the blocks of the heads that are left, the longest of all first, but of the first of these what pairs have taken.",
        "# One turn: a program to each block, head by head.",
        "paired, pairs = turn < problem.pair_turns, (query_blocks + 1) // 2",
        "taken = problem.pair_turns // 2 * programs",
        "first, gone = taken // pairs, taken % pairs",
        "by_head = paired | (problem.turns == 1)",
        "trip = gl.where(paired, turn // 2, turn - problem.pair_turns)",
        "place = trip * programs + gl.where(trip % 2 == 0, pid, programs - 1 - pid)",
        "row_length = gl.where(paired, pairs, gl.where(by_head, query_blocks, problem.heads - first))",
        "outer, inner = place // row_length, place % row_length",
        "head, short = gl.where(by_head, outer, first + inner), gl.where(by_head, inner, outer)",
        "long = query_blocks - 1 - short",
        "is_long = (turn >= problem.pair_turns) | (turn % 2 == 0)",
        "block = gl.where(is_long, long, short)",
        "exists = (head < problem.heads) & (short < query_blocks) & (is_long | (short != long))",
        "exists = exists & (paired | (head > first) | (gl.minimum(short, long) >= gone))",
    ),
}


@dataclass(frozen=True, slots=True)
class HopperKernel(HopperForm):
    """Everything `TEMPLATE` reads except the header; its ``k``."""

    @property
    def row_store_statements(self) -> tuple[str, ...]:
        """Statements that store rows of O, as many columns as there are."""
        rows = "(rows < problem.seqlen_q)[:, None]"
        if not self.partly_there:
            return (f"gl.store(pointers, gl.convert_layout(o, layout), mask={rows})",)
        return (
            f"there = {rows}",
            "if problem.eighths is not None:  # heads of fewer columns than the kernel's",
            "    there = there & (columns // 8 < problem.eighths)[None, :]",
            "gl.store(pointers, gl.convert_layout(o, layout), mask=there)",
        )

    @property
    def work_tile_statements(self) -> tuple[str, ...]:
        """From `pid` and `query_blocks` to `head`, `block` and `exists`."""
        if self.scheduler == "grid":
            block = (
                "query_blocks - 1 - pid % query_blocks  # the longest first" if self.masked else "pid % query_blocks"
            )
            return ("head = pid // query_blocks", f"block = {block}", "exists = turn == 0")
        order = "finer" if self.deals_finer else self.scheduler
        return ("programs = own_copy(gl.num_programs(0))", *_WORK_TILE[order])

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
        if self.halves:
            return ("last, count, half = walk(problem, row)", "row += g * ROWS")
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
    def load_statements(self) -> tuple[str, ...]:
        """The head of the load role's loop, which has ``step`` and ``key``."""
        if self.halves:
            return "key, count, half = walk(problem, row)", "for step in range(count + half):"
        return (
            "first, end = key_blocks(problem, row, TILE_M)",
            "for step in range(end - first):",
            "    key = (end - 1 - step) * TILE_N",
        )

    @property
    def half_product_statements(self) -> tuple[str, ...]:
        """`product_statements` where S is of half a block."""
        number = "own_copy(tile.q_number)" if self.wide else "tile.q_number"
        zero = "zero = gl.zeros([ROWS, HALF_N], gl.float32, layout=accumulator(HALF_N))"
        keys = "keys = tile_at(tile.k, n + 1).slice(0, HALF_N).permute((1, 0))"
        own = zero, keys, f"s = warpgroup_mma(tile_at(tile.q, {number}), keys, zero, use_acc=False, is_async=True)"
        return tuple(
            line for made in self.product_statements for line in (own if made.startswith("s = issue_qk(") else (made,))
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
        masked, last = ("row",) if self.masked else (), ("last",) if self.gives_q_early else ()
        return ("q", "k", "v", "q_number", *masked, *last, "problem", *(("turns", "tiles") if self.ping_pong else ()))

    @property
    def query_tile_text(self) -> str:
        """What they are."""
        last = ", number of the last key block" if self.gives_q_early else ""
        masked = f", first row{last}" if self.masked else last
        turns = ", work tiles before" if self.ping_pong else ""
        return f"ROWS query rows of a work tile: rings, number of Q in its ring{masked}, problem{turns}."

    @property
    def tile_rows(self) -> str:
        """What a `QueryTile` is given of them, and of the last block."""
        last = "n + end - 1 - first, " if self.gives_q_early else ""
        return f"row, {last}" if self.masked else last

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
    def _release_of_q(self) -> tuple[str, str]:
        return "if n + 1 == tile.last:", "    release(tile.q, tile.q_number)"

    @property
    def early_release_of_q(self) -> str:
        """The end of Q in a loop, where that is not behind the exponentials."""
        if not self.gives_q_early or self.gives_q_behind_exponentials:
            return ""
        lines = (
            "# After the last block would do, but then ptxas converts P behind the wait for V and not under Q K^T.",
            *self._release_of_q,
        )
        return "".join(f"{line}\n    " for line in lines)

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
        if self.gives_q_early and self.gives_q_behind_exponentials:
            finish = (*self._release_of_q, *finish)
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
    def gives_q_early(self) -> bool:
        """Whether a loop gives Q back in its last block and not behind it, for the sake of where P is converted: in words that is
        settled, and the branch would cost some 40 registers, which loops of 256 keys or of wide heads do not have.  Of loops without a mask
        those of three warpgroups and 96 columns, where the wait for P V would come among the exponentials; of 128 they would spill."""
        if self.masked:
            return not self.in_words
        return self.warpgroups == 3 and self.columns_v > self.head_dim_v

    @property
    def gives_q_behind_exponentials(self) -> bool:
        """Whether a loop that gives Q back in its last block does so behind the exponentials and not behind S."""
        return not self.masked

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
