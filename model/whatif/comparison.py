"""A machine before and after a change, and what the kernel does on both: values, no rendering."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tilecast.model.forecast.predict import Prediction
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.changes import Change
from tilecast.model.machine.machine import Machine


@dataclass(frozen=True, slots=True)
class KnobChange:
    """One knob of the kernel that the new machine wants different."""

    knob: str
    before: object
    after: object


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answer: machine and forecast before and after; ``kept`` is None when the old variant is not legal any more.

    ``simulated`` and ``skipped`` count variants looked at and variants that could not win, both searches together.
    """

    workload: Workload
    machine: Machine
    changed: Machine
    changes: tuple[Change, ...]
    before: Prediction
    kept: Prediction | None
    kept_refused: str
    after: Prediction
    simulated: int
    skipped: int

    @property
    def speedup(self) -> float:
        """Time before over time after, the kernel chosen again."""
        return self.before.time_ms / self.after.time_ms

    @property
    def speedup_kept(self) -> float:
        """Time before over time with the same variant on the changed machine; 0 when it is not legal there."""
        return self.before.time_ms / self.kept.time_ms if self.kept is not None else 0.0

    @property
    def knob_changes(self) -> tuple[KnobChange, ...]:
        """What the kernel changes between before and after."""
        return knob_changes(self.before.variant, self.after.variant)


def knob_changes(old: Any, new: Any) -> tuple[KnobChange, ...]:
    """The knobs of variant ``old`` that ``new`` has different."""
    names = [f.name for f in fields(old)]
    return tuple(
        KnobChange(name, getattr(old, name), getattr(new, name, None))
        for name in names
        if getattr(old, name) != getattr(new, name, None)
    )
