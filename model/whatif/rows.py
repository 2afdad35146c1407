"""Lists of answers that know what was asked: a tuple with a text, plain values for JSON, and a table for notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from tilecast.base.html_table import html_table
from tilecast.model.forecast.answer import BEFORE
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.passes import FORWARD, Pass
from tilecast.model.whatif.answers import BreakEven, Sensitivity
from tilecast.model.whatif.render_rows import break_evens_text, sensitivities_text

_Row = TypeVar("_Row")


class Rows(tuple[_Row, ...]):
    """Rows about one kernel of ``workload`` on ``machine`` at ``clock`` ("sustained", "short" or MHz)."""

    machine: Machine
    workload: Workload
    variant: Any
    clock: str | float
    #: What every row was made from (`forecast.level`).
    level: str
    #: What was asked about: its kernels are those of this pass.
    asked_pass: Pass

    def __new__(
        cls,
        rows: Iterable[_Row],
        machine: Machine,
        workload: Workload,
        variant: Any,
        clock: str | float,
        level: str = BEFORE,
        asked_pass: Pass = FORWARD,
    ) -> Rows[_Row]:
        """A tuple of ``rows``."""
        made = super().__new__(cls, rows)
        made.machine, made.workload, made.variant, made.clock, made.level = machine, workload, variant, clock, level
        made.asked_pass = asked_pass
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (tuple(self), self.machine, self.workload, self.variant, self.clock, self.level, self.asked_pass)

    def clock_words(self) -> str:
        """The clock for headlines."""
        return self.clock if isinstance(self.clock, str) else f"{self.clock:g} MHz"

    def subject(self) -> str:
        """The pass and the shape, for headlines."""
        return f"{self.asked_pass.words}{self.workload.label()}"

    def _words(self) -> str:
        """The clock, and the level where it is not before compilation, for headlines."""
        return f"{self.clock_words()} clock" + ("" if self.level == BEFORE else f", {self.level}")

    def text(self, width: int = 120) -> str:
        """The rows for people, in lines of at most ``width`` characters where that is possible."""
        raise NotImplementedError

    def columns(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and rows of a small table."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Keys documented in docs/json.md."""
        rows = [row.to_dict() for row in self]  # type: ignore[attr-defined]
        return {
            **({} if self.asked_pass is FORWARD else {"pass": self.asked_pass.name}),
            "machine": self.machine.name, "workload": self.workload.as_dict(), "variant": variant_text(self.variant),
            "clock": self.clock, "level": self.level, "facts": rows,
        }  # fmt: skip

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} facts, {self.machine.name}, {self.subject()}, {self.clock_words()} clock)"

    def _repr_html_(self) -> str:
        header, rows = self.columns()
        return html_table(f"{self.machine.title}: {self.subject()}, {self.clock_words()} clock", header, rows)


class Sensitivities(Rows[Sensitivity]):
    """Every fact that matters, largest first, for one machine, workload, kernel and clock."""

    def text(self, width: int = 120) -> str:
        """The table with bars, as `tilecast sensitivity` prints it."""
        return sensitivities_text(self, self.machine, self.subject(), self._words(), width)

    def columns(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and rows of a small table."""
        header = ("fact", "value", "unit", "kernel kept", "chosen again")
        return header, [(r.fact, f"{r.value:g}", r.unit, f"{r.fixed:+.3f}", f"{r.reoptimised:+.3f}") for r in self]


class BreakEvens(Rows[BreakEven]):
    """Break-even points of some facts for one machine, workload, kernel and clock."""

    def text(self, width: int = 120) -> str:
        """What `tilecast breakeven` prints."""
        return break_evens_text(self, self.machine, self.subject(), self._words(), width, self.level)

    def columns(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and rows of a small table."""
        header = (
            "fact",
            "value",
            "unit",
            "bound by now",
            "busiest until",
            "binds until",
            "useful until",
            "saves at most",
        )
        return header, [
            (r.fact, f"{r.value:g}", r.unit, r.bound_now, f"{r.solved.value:.5g}" if r.solved else "-",
             f"{r.simulated.value:.5g}" if r.simulated else "-",
             "-" if r.useful_until is None else f"{r.useful_until:.5g}", f"{r.at_most_percent:.1f} %")
            for r in self
        ]  # fmt: skip
