"""The audit trail of a tuning run: every candidate, what is known of it, and its fate.  Values only."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.search.rank import DIGITS

#: What can become of a candidate, in the order in which it can happen.
FATES = (
    "illegal",
    "not writable",
    "fewer stages",
    "floor",
    "forecast",
    "compile",
    "machine code",
    "measured",
    "winner",
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One variant and what is known of it; times in seconds, None where a stage never looked."""

    variant: Variant
    #: Position in the space: the order of preference among equals.
    order: int
    fate: str
    reason: str
    #: Whether it is still in the running after the last stage.
    kept: bool = False
    floor_s: float | None = None
    forecast_s: float | None = None
    compiled_s: float | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    measured_s: float | None = None
    measured_low_s: float | None = None
    measured_high_s: float | None = None

    @property
    def best_guess_s(self) -> float | None:
        """The most that is known: measured, else from machine code, else the forecast before compilation."""
        known = (self.measured_s, self.compiled_s, self.forecast_s)
        return next((s for s in known if s is not None), None)


@dataclass(frozen=True, slots=True)
class Trail:
    """One tuning run; ``candidates`` in the order of the space."""

    workload: Workload
    machine: Machine
    family: str
    clock: str | float
    budget: int
    #: What the last stage compared by: "forecast", "machine code" or "measured".
    by: str
    candidates: tuple[Candidate, ...]
    #: Sentences on how far the run could go ("no CUDA GPU here: forecast only").
    notes: tuple[str, ...] = ()

    @property
    def winner(self) -> Candidate:
        """The candidate chosen."""
        return next(c for c in self.candidates if c.fate == "winner")

    @property
    def shortlist(self) -> tuple[Candidate, ...]:
        """Those still in the running after the last stage, best first."""
        return tuple(sorted((c for c in self.candidates if c.kept), key=by_guess))

    def counts(self) -> dict[str, int]:
        """How many candidates met each fate."""
        return {fate: n for fate in FATES if (n := sum(c.fate == fate for c in self.candidates))}


def by_guess(c: Candidate) -> tuple[float, int]:
    """Order by the most that is known; equals by their place in the space."""
    guess = c.best_guess_s
    # Rounded as the search compares times, so that equals go by their order in the space here too.
    return (float("inf") if guess is None else round(guess, DIGITS), c.order)
