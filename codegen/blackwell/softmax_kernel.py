"""The softmax role of a `blackwell_ws` kernel as its template reads it: row statistics, masks, exponentials on two pipes."""

from __future__ import annotations

import struct
import textwrap
from collections.abc import Iterable

from tilecast.codegen.blackwell.dtype import TypedKernel
from tilecast.codegen.exp2 import COEFFICIENTS
from tilecast.codegen.gluon import in_lines


class SoftmaxKernel(TypedKernel):
    """Names and expressions of the softmax groups."""

    __slots__ = ()

    mask: str
    by_keys: bool
    cta_group: int
    tile_n: int
    split_p: bool
    stats_slots: int
    poly_degree: int
    #: Per quarter of a row, the columns whose exponentials go to the FMA pipe.
    emulated: tuple[tuple[int, ...], ...]

    @property
    def pair(self) -> bool:
        """Whether two CTAs multiply together."""
        return self.cta_group == 2

    @property
    def quarter(self) -> int:
        """Columns of a quarter of a key block."""
        return self.tile_n // 4

    @property
    def softmax_fields(self) -> tuple[str, ...]:
        """Fields of `Softmax`."""
        rest = ("p_rest",) if self.split_p else ()
        others = ("running_max", "max_full") if self.by_keys else ()
        return ("s", "o", "s_full", "p_ready", *rest, "o_full", "rows", "rows_full", "rows_empty", *others)

    @property
    def softmax_text(self) -> str:
        """A comment on these fields."""
        p = (
            "three quarters of P stored and O rescaled, last quarter stored"
            if self.split_p
            else "P stored and O rescaled"
        )
        o = "O with a block taken in" if self.by_keys else "O complete"
        passed = "; for the group with the next key block: row maxima, written" if self.by_keys else ""
        text = (
            f"A softmax group: S and O in tensor memory; barriers: S complete, {p}, {o}; for the correction role: rows "
            f"(in turn factors of blocks, sums, maxima), written, read{passed}."
        )
        return textwrap.fill(text, 118, initial_indent="# ", subsequent_indent="# ")

    @property
    def stats_slot(self) -> str:
        """Slot of row statistics number n."""
        return "0" if self.stats_slots == 1 else "n & 1"

    @property
    def stats_phase(self) -> str:
        """Phase of that slot's barriers."""
        return "n & 1" if self.stats_slots == 1 else "(n >> 1) & 1"

    @property
    def wait_for_slot(self) -> str:
        """Waits until the slot for a softmax group's numbers n is free."""
        slot, phase = ("0", "n - LAG & 1") if self.stats_slots == 1 else ("n - LAG & 1", "(n - LAG >> 1) & 1")
        return f"mbarrier.wait(softmax.rows_empty.index({slot}), {phase})"

    def publish(self, values: str) -> tuple[str, ...]:
        """Statements that hand the correction role a softmax group's numbers n."""
        slot = self.stats_slot
        return (f"softmax.rows.index({slot}).store({values})", f"mbarrier.arrive(softmax.rows_full.index({slot}))")

    @property
    def new_softmax(self) -> str:
        """Makes a softmax group of what is allocated."""
        single = ("s_full", "p_ready", "p_rest", "o_full", "max_full")
        return in_lines(
            ", ".join(f"{name}.index(0)" if name in single else name for name in self.softmax_fields),
            "return Softmax(",
            ")",
            116,
        )

    @property
    def new_rows(self) -> tuple[str, ...]:
        """Statements that allocate a softmax group's numbers for the correction role, with a layout that others use too."""
        layout = f"gl.SwizzledSharedLayout(1, 1, 1, [0]{', cga_layout=[[1]]' if self.pair else ''})"
        short = not (self.pair or self.by_keys)
        made = f"rows = gl.allocate_shared_memory(gl.float32, [STATS_SLOTS, ROWS], {layout if short else 'ONE'})"
        return (made,) if short else (f"ONE: gl.constexpr = {layout}", made)

    @property
    def first_statements(self) -> tuple[str, ...]:
        """Statements that say which key the rows of a softmax group end at, and their maximum before any key."""
        row_max = 'row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)'
        if self.mask == "none":
            return (row_max,)
        diagonal = "diagonal = row + problem.seqlen_k - problem.seqlen_q"
        return (diagonal, "row_diagonal = diagonal + own_copy(gl.arange(0, ROWS, ROW))", row_max)

    @property
    def mask_statements(self) -> tuple[str, ...]:
        """Statements that hide keys of the block at hand."""
        if self.mask == "none":
            return ("if key + TILE_N > problem.seqlen_k:", "    hide_keys(softmax, problem.seqlen_k - key)")
        if self.mask == "causal":
            return ("if key + TILE_N > diagonal + 1:", "    hide_keys(softmax, row_diagonal + 1 - key)")
        return (
            "first_row_stop = gl.minimum(diagonal + problem.window_right + 1, problem.seqlen_k)",
            "if (key + TILE_N > first_row_stop) | (key < diagonal + ROWS - 1 - problem.window_left):",
            "    stop = gl.minimum(row_diagonal + problem.window_right + 1, problem.seqlen_k)",
            "    hide_keys(softmax, row_diagonal - problem.window_left - key, stop - key)",
        )

    @property
    def correct_parameters(self) -> str:
        """What the correction role passes on for a block."""
        return "later, released, o_full, o_phase" if self.by_keys else "later, released"

    @property
    def emulated_count(self) -> int:
        """Columns of a key block whose exponentials go to the FMA pipe."""
        return 2 * sum(map(len, self.emulated))

    @property
    def exp2_columns(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(constant, columns) of the different mixes of exponentials that quarters have."""
        mixes = sorted({columns for columns in self.emulated if columns})
        return tuple((f"EXP2_{n}" if len(mixes) > 1 else "EXP2", columns) for n, columns in enumerate(mixes))

    @property
    def _polynomial(self) -> tuple[float, ...]:
        """Coefficients of 2^f, lowest power first."""
        return (1.0, *COEFFICIENTS[self.poly_degree])

    @property
    def polynomial_text(self) -> str:
        """The polynomial as a comment."""
        powers = ("", " f", *(f" f^{power}" for power in range(2, self.poly_degree + 1)))
        return "2^f = " + " + ".join(f"{c:.7g}{power}" for c, power in zip(self._polynomial, powers, strict=True))

    @property
    def polynomial_constants(self) -> tuple[str, ...]:
        """PTX that sets what the exponentials share, each number twice."""
        numbers = {"up": 1.5 * 2**23, "down": -1.5 * 2**23, **{f"c{i}": c for i, c in enumerate(self._polynomial)}}
        return _in_lines(
            f"mov.b64 {name}, 0x{2 * struct.pack('>f', number).hex()};" for name, number in numbers.items()
        )

    @property
    def polynomial_steps(self) -> tuple[str, ...]:
        """PTX of the polynomial after its highest coefficient."""
        return _in_lines(f"fma.rn.ftz.f32x2 p, p, f, c{power};" for power in range(self.poly_degree - 1, -1, -1))

    @property
    def exponentials(self) -> tuple[str, ...]:
        """Statements that make P, quarter by quarter, and announce it."""
        constants = {columns: name for name, columns in self.exp2_columns}
        ready = ("", "", "p_ready" if self.split_p else "", "p_rest" if self.split_p else "p_ready")
        lines = []
        for n, (name, columns, barrier) in enumerate(zip("abcd", self.emulated, ready, strict=True)):
            exponent = f"fma2({name}, scale_log2, minus_base)"
            lines.append(
                f"{name} = exp2_mixed({exponent}, {constants[columns]})" if columns else f"{name} = gl.exp2({exponent})"
            )
            lines.append(f"p.slice({n * self.quarter}, QUARTER).store({name}.to(dtype))")
            lines += [f"mbarrier.arrive(softmax.{barrier})"] if barrier else []
        return tuple(lines)


def _in_lines(statements: Iterable[str], each: int = 3) -> tuple[str, ...]:
    """PTX statements, ``each`` to a line."""
    left = list(statements)
    return tuple(" ".join(left[i : i + each]) for i in range(0, len(left), each))
