"""A backward pass on machines that do not exist: before and after a change, and how the time moves with each fact.

As `whatif.what_if` and `whatif.sensitivity` do it for a forward pass; both kernels are chosen by the same search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tilecast.base.progress import Progress, reported, silent
from tilecast.model.backward import BackwardVariant, family_of
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.changes import Change, change_machine
from tilecast.model.machine.machine import Machine, machine_of
from tilecast.model.machine.schema import KEYS
from tilecast.model.training.evaluate import evaluate_backward, refuse
from tilecast.model.training.forecast import BackwardPrediction, best_backward, predict_backward
from tilecast.model.training.passes import BACKWARD
from tilecast.model.whatif.answers import Sensitivity
from tilecast.model.whatif.comparison import KnobChange, knob_changes
from tilecast.model.whatif.rows import Sensitivities
from tilecast.model.whatif.sensitivity import MAIN, NOTHING, WHOLE, WORTH, check_step, ends_of, group_of


@dataclass(frozen=True, slots=True)
class BackwardWhatIf:
    """A backward pass before and after a change; ``kept`` is None where the old variant is not legal any more."""

    changes: tuple[Change, ...]
    before: BackwardPrediction
    kept: BackwardPrediction | None
    after: BackwardPrediction
    #: Why the old variant is not legal any more.
    kept_refused: str = ""

    @property
    def knob_changes(self) -> tuple[KnobChange, ...]:
        """What the kernels change between before and after."""
        return knob_changes(self.before.variant, self.after.variant)

    @property
    def speedup(self) -> float:
        """Time before over time after, the kernel chosen again."""
        return self.before.time_ms / self.after.time_ms

    @property
    def speedup_kept(self) -> float:
        """Time before over time with the same variant; 0 where that is not legal."""
        return self.before.time_ms / self.kept.time_ms if self.kept is not None else 0.0

    def to_dict(self) -> dict[str, object]:
        """Keys documented in docs/json.md."""
        return {
            "pass": "bwd",
            "changes": [{"fact": c.fact, "before": c.before, "after": c.after} for c in self.changes],
            "speedup": self.speedup,
            "speedup_kept": self.speedup_kept,
            "before": self.before.to_dict(),
            "kept": None if self.kept is None else self.kept.to_dict(),
            "after": self.after.to_dict(),
        }

    def text(self) -> str:
        """The comparison for people."""
        before, after = self.before, self.after
        lines = [
            f"{before.machine.title}: backward pass of {before.workload.label()}",
            *(f"  {c.fact} {c.before:g} -> {c.after:g}" for c in self.changes),
            "",
            f"  before  {before.time_ms:.4g} ms   {before.tflops:.4g} TFLOP/s   {before.clock_mhz:.0f} MHz   bound by {before.main.binding.name}",
        ]
        if self.kept is not None:
            kept = self.kept
            lines.append(
                f"  kept    {kept.time_ms:.4g} ms   {kept.tflops:.4g} TFLOP/s   {kept.clock_mhz:.0f} MHz   bound by {kept.main.binding.name}   {self.speedup_kept:.3f}x"
            )
        lines.append(
            f"  after   {after.time_ms:.4g} ms   {after.tflops:.4g} TFLOP/s   {after.clock_mhz:.0f} MHz   bound by {after.main.binding.name}   {self.speedup:.3f}x"
        )
        lines.append(f"  variant {variant_text(before.variant)}")
        if after.variant != before.variant:
            lines.append(f"       -> {variant_text(after.variant)}")
        lines += ["", "From peak to achieved, share of the time before and after"]
        for old, new in zip(before.waterfall, after.waterfall, strict=True):
            if max(abs(old.share), abs(new.share)) >= 0.0005:
                lines.append(f"  {old.cause:<72}{old.share:7.1%} -> {new.share:6.1%}")
        return "\n".join(lines)


def backward_what_if(
    workload: Workload, machine: Machine | str, changes: Mapping[str, float] | None = None,
    scales: Mapping[str, float] | None = None, *, variant: BackwardVariant | None = None, family: str | None = None,
    clock: str | float = "sustained", interval: bool = False,
) -> BackwardWhatIf:  # fmt: skip
    """Forecast the backward pass before and after ``changes`` (fact: value) and ``scales``; arguments and errors as `what_if`."""
    chip = machine_of(machine)
    changed, moved = change_machine(chip, changes, scales)
    before = predict_backward(workload, chip, variant, family=family, clock=clock, interval=interval)
    name, work = before.variant.family, before.workload
    kept = None
    verdict = family_of(before.variant).legality(before.variant, work, changed)
    if verdict.legal:
        kept = predict_backward(work, changed, before.variant, clock=clock, interval=interval)
    again, _ = best_backward(work, changed, name, clock)
    after = predict_backward(work, changed, again, clock=clock, interval=interval)
    # A variant given by hand may lie outside the space that the search covers.
    if kept is not None and kept.time_ms < after.time_ms:
        after = kept
    return BackwardWhatIf(moved, before, kept, after, verdict.sentence())


def backward_sensitivities(
    workload: Workload, machine: Machine | str, variant: BackwardVariant | None = None, *, family: str | None = None,
    clock: str | float = "sustained", step: float = 0.05, progress: Progress = silent,
) -> Sensitivities:  # fmt: skip
    """Percent of the backward pass's time per percent of every fact, kernel kept and chosen again; as `sensitivities`."""
    check_step(step)
    chip = machine_of(machine)
    work = workload.reduced()
    if variant is None:
        variant, _ = best_backward(work, chip, family, clock)
    refuse(work, chip, variant, clock)
    base = evaluate_backward(work, chip, variant, clock).seconds
    rows = []
    for key in reported(list(chip), "facts", len(chip.facts), progress):
        if key in MAIN or key == f"tensor.{work.dtype}_flop_per_clk" or KEYS[key].unit not in WHOLE:
            row = _row(work, chip, variant, key, clock, step, base)
            if row is not None:
                rows.append(row)
    ordered = sorted(rows, key=lambda r: (-max(abs(r.fixed), abs(r.reoptimised)), r.fact))
    return Sensitivities(ordered, chip, work, variant, clock, asked_pass=BACKWARD)


def _row(
    work: Workload, machine: Machine, variant: BackwardVariant, key: str, clock: str | float, step: float, base: float
) -> Sensitivity | None:
    fact = machine.fact(key)
    ends = ends_of(key, fact, step)
    if ends is None:
        return None
    machines = tuple(machine.with_facts({key: value}) for value in ends)
    if not all(family_of(variant).legality(variant, work, m).legal for m in machines):
        return None
    fixed = tuple(evaluate_backward(work, m, variant, clock).seconds for m in machines)
    span = math.log(ends[1] / ends[0])
    slope = math.log(fixed[1] / fixed[0]) / span
    free = fixed
    if abs(slope) >= WORTH:
        found = (best_backward(work, m, variant.family, clock)[0] for m in machines)
        free = tuple(
            min(seconds, evaluate_backward(work, m, v, clock).seconds)
            for m, v, seconds in zip(machines, found, fixed, strict=True)
        )
    free_slope = math.log(free[1] / free[0]) / span
    if key not in MAIN and max(abs(slope), abs(free_slope)) < NOTHING:
        return None
    return Sensitivity(
        key, KEYS[key].meaning, group_of(key), fact.value, fact.unit, fact.kind, slope, free_slope, base * 1e3, *ends,
        fixed[0] * 1e3, fixed[1] * 1e3, free[0] * 1e3, free[1] * 1e3,
    )  # fmt: skip
