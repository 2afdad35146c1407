"""What users get of a tuning run: the audit trail, which can show itself."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.codegen.tune.render import as_dict, as_html, as_text
from tilecast.codegen.tune.trail import Trail
from tilecast.model.kernel.variant import short_text


@dataclass(frozen=True, slots=True, repr=False)
class Tuning(Trail):
    """The audit trail of one tuning run."""

    def text(self) -> str:
        """The report for people."""
        return as_text(self)

    def to_dict(self) -> dict[str, object]:
        """The documented, stable keys of --json and --audit."""
        return as_dict(self)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return (
            f"Tuning({self.family} for {self.workload.label()} on {self.machine.name}: {short_text(self.winner.variant)} "
            f"of {len(self.candidates)} variants, by {self.by})"
        )

    def _repr_html_(self) -> str:
        return as_html(self)
