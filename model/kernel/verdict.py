"""Whether something can be done, and when not, why and what would help: a result, not an exception."""

from __future__ import annotations

from dataclasses import dataclass


class VariantError(ValueError):
    """An unknown knob, a value it cannot take, or a family that does not exist; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Legal, or the reason and the lever that mends it."""

    reason: str = ""
    lever: str = ""

    @property
    def legal(self) -> bool:
        """Whether nothing stands against it."""
        return not self.reason

    def sentence(self) -> str:
        """One sentence for people; empty when legal."""
        return f"{self.reason}: {self.lever}" if self.reason else ""


LEGAL = Verdict()


def over_limit(resource: str, demand: float, limit: float, unit: str, lever: str) -> Verdict:
    """A resource of which ``demand`` is needed and ``limit`` is there."""
    return Verdict(f"{resource} needs {demand:g} {unit} but the limit is {limit:g} (over by {demand - limit:g})", lever)
