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
from dataclasses import dataclass, replace

from tilecast.model.families import legality, native_family
from tilecast.model.forecast.brief import seconds_of
from tilecast.model.forecast.level import Compiler, at_hand, following, search_of, settled
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.changes import change_machine
from tilecast.model.machine.machine import Machine, machine_of
from tilecast.model.search.best import best
from tilecast.model.whatif.comparison import Comparison
from tilecast.model.whatif.render import as_dict, as_html, as_text


@dataclass(frozen=True, slots=True, repr=False)
class WhatIf(Comparison):
    """The answer of `what_if`."""

    def to_dict(self) -> dict[str, object]:
        """The documented, stable keys of --json."""
        return as_dict(self)

    def text(self, width: int = 120) -> str:
        """The comparison for people; the timelines share ``width`` characters."""
        return as_text(self, width)

    def _repr_html_(self) -> str:
        return as_html(self)

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        changes = ", ".join(f"{c.fact} {c.before:g} -> {c.after:g}" for c in self.changes)
        return f"<WhatIf {self.machine.name} {changes}: {self.speedup:.3f} times as fast>"


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
    compiler: Compiler | None = at_hand,
) -> WhatIf:
    """Forecast ``workload`` before and after ``changes`` (fact: value) and ``scales`` (fact or section: factor).

    ``variant`` is the kernel before (default: the best of its family); the kernel after is always chosen
    again.  ``clock`` and ``compiler`` as in `predict`, but before compilation where machine code does not follow what changes;
    ``interval`` adds the forecasts' intervals.  The machine given is not changed.
    Raises MachineError, PredictError or WorkloadError (all ValueError) with one sentence.
    """
    chip = machine_of(machine)
    changed, moved = change_machine(chip, changes, scales)
    compiler = following(compiler, changed)
    name = variant.family if variant is not None else family or native_family(chip).name
    before = predict(workload, chip, variant, family=name, clock=clock, interval=interval, compiler=compiler)
    work, old = before.workload, before.variant
    # What is compared stands on one level.
    level = settled(compiler, work, chip, old)
    search = search_of(level)
    found = search(work, changed, name, clock)
    again = found.variant
    verdict = legality(old, work, changed)
    kept = None
    if verdict.legal:
        kept = predict(work, changed, old, clock=clock, interval=interval, compiler=level)
        # A kernel given by hand may lie outside the space that the search covers.
        if seconds_of(work, changed, old, clock, level if search is not best else None) < found.seconds:
            again = old
    after = predict(work, changed, again, clock=clock, interval=interval, compiler=level)
    after = replace(after, variant_origin="as given, and faster than the search finds" if again is old != found.variant else found.scope)  # fmt: skip
    simulated, skipped = found.simulated, found.skipped
    if variant is None:
        first = search(work, chip, name, clock)
        simulated, skipped = simulated + first.simulated, skipped + first.skipped
    return WhatIf(work, chip, changed, moved, before, kept, verdict.sentence(), after, simulated, skipped)
