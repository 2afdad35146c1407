"""What if the machine were different?  Change facts, choose the kernel again, and compare.

    >>> from tilecast.model.whatif.what_if import what_if
    >>> from tilecast.model.kernel.workload import Workload
    >>> answer = what_if(Workload(seqlen_q=8192, seqlen_k=8192), "b200", {"mufu.ex2": 32})
    >>> answer.speedup >= answer.speedup_kept
    True

Three forecasts: *before* (the best variant of the machine as it is), *kept* (that same variant on the changed
machine) and *after* (chosen again for the changed machine).  Both choices are made by the same search, so that the
difference is the machine's and not the search's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from tilecast.model.families import legality, native_family
from tilecast.model.forecast.brief import brief
from tilecast.model.forecast.predict import Prediction, predict
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.changes import Change, change_machine
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.model.search.best import best


@dataclass(frozen=True, slots=True)
class KnobChange:
    """One knob of the kernel that the new machine wants different."""

    knob: str
    before: object
    after: object


@dataclass(frozen=True, slots=True, repr=False)
class WhatIf:
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

    def __repr__(self) -> str:
        facts = ", ".join(f"{c.fact} {c.before:g} -> {c.after:g}" for c in self.changes)
        return (
            f"WhatIf({self.machine.name}, {self.workload.label()}: {facts}: {self.before.time_ms:.4g} -> "
            f"{self.after.time_ms:.4g} ms, {self.speedup:.3f}x)"
        )

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
        old, new = self.before.variant, self.after.variant
        names = [f.name for f in fields(old)]
        return tuple(
            KnobChange(name, getattr(old, name), getattr(new, name, None))
            for name in names
            if getattr(old, name) != getattr(new, name, None)
        )

    def to_dict(self) -> dict[str, object]:
        """The documented, stable keys of --json."""
        from tilecast.model.whatif.render import as_dict

        return as_dict(self)

    def text(self, width: int = 120) -> str:
        """The comparison for people; the timelines share ``width`` characters."""
        from tilecast.model.whatif.render import as_text

        return as_text(self, width)

    def _repr_html_(self) -> str:
        from tilecast.model.whatif.render import as_html

        return as_html(self)

    def __str__(self) -> str:
        return self.text()


def what_if(
    workload: Workload,
    machine: Machine | str,
    changes: Mapping[str, float] | None = None,
    scales: Mapping[str, float] | None = None,
    *,
    variant: Variant | None = None,
    family: str | None = None,
    clock: str | float = "sustained",
    interval: bool = False,
) -> WhatIf:
    """Forecast ``workload`` before and after ``changes`` (fact: value) and ``scales`` (fact or section: factor).

    ``variant`` is the kernel before (default: the best of its family); the kernel after is always chosen
    again.  ``clock`` as in `predict`; ``interval`` adds the forecasts' intervals.  The machine given is not changed.
    Raises MachineError, PredictError or WorkloadError (all ValueError) with one sentence.
    """
    chip = load_machine(machine) if isinstance(machine, str) else machine
    changed, moved = change_machine(chip, changes, scales)
    name = variant.family if variant is not None else family or native_family(chip).name
    before = predict(workload, chip, variant, family=name, clock=clock, interval=interval)
    work, old = before.workload, before.variant
    found = best(work, changed, name, clock)
    again = found.variant
    verdict = legality(old, work, changed)
    kept = None
    if verdict.legal:
        kept = predict(work, changed, old, clock=clock, interval=interval)
        # A kernel given by hand may lie outside the space that the search covers.
        if brief(work, changed, old, clock).seconds < found.seconds:
            again = old
    after = predict(work, changed, again, clock=clock, interval=interval)
    after = replace(after, variant_origin="as given, and faster than the search finds" if again is old != found.variant else found.scope)  # fmt: skip
    simulated, skipped = found.simulated, found.skipped
    if variant is None:
        first = best(work, chip, name, clock)
        simulated, skipped = simulated + first.simulated, skipped + first.skipped
    return WhatIf(work, chip, changed, moved, before, kept, verdict.sentence(), after, simulated, skipped)
