"""Lists of answers that know what was asked: a tuple with a text, plain values for JSON, and a table for notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from tilecast.base.html_table import html_table
from tilecast.model.kernel.variant import Variant, variant_text
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

_Row = TypeVar("_Row")


class Rows(tuple[_Row, ...]):
    """Rows about one kernel of ``workload`` on ``machine`` at ``clock`` ("sustained", "short" or MHz)."""

    machine: Machine
    workload: Workload
    variant: Variant
    clock: str | float

    def __new__(
        cls, rows: Iterable[_Row], machine: Machine, workload: Workload, variant: Variant, clock: str | float
    ) -> Rows[_Row]:
        """A tuple of ``rows``."""
        made = super().__new__(cls, rows)
        made.machine, made.workload, made.variant, made.clock = machine, workload, variant, clock
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (tuple(self), self.machine, self.workload, self.variant, self.clock)

    def clock_words(self) -> str:
        """The clock for headlines."""
        return self.clock if isinstance(self.clock, str) else f"{self.clock:g} MHz"

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
            "machine": self.machine.name, "workload": self.workload.as_dict(), "variant": variant_text(self.variant),
            "clock": self.clock, "facts": rows,
        }  # fmt: skip

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} facts, {self.machine.name}, {self.workload.label()}, {self.clock_words()} clock)"

    def _repr_html_(self) -> str:
        header, rows = self.columns()
        return html_table(f"{self.machine.title}: {self.workload.label()}, {self.clock_words()} clock", header, rows)
