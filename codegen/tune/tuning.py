"""What users get of a tuning run: the audit trail, which can show itself."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.codegen.tune.render import as_dict, as_text
from tilecast.codegen.tune.trail import Trail


@dataclass(frozen=True, slots=True)
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
