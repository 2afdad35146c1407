"""What a design review asks of a pass: one record for the forward pass, one for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilecast.explore.review.content.content import Change, Launch, Region
from tilecast.model.forecast.answer import Explained
from tilecast.model.forecast.level import Compiler
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.passes import Pass
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.whatif.rows import Sensitivities


@dataclass(frozen=True, slots=True)
class Comparison:
    """A forecast before and after a change of the machine, as a review shows it."""

    facts: tuple[tuple[str, float, float, str], ...]
    before: Explained
    after: Explained
    speedup: float
    speedup_kept: float
    kept_refused: str
    knobs: tuple[tuple[str, object, object], ...]


def comparison(w: Any) -> Comparison:
    """The what-if of a pass as a review shows it."""
    return Comparison(
        tuple((c.fact, c.before, c.after, c.unit) for c in w.changes), w.before, w.after, w.speedup, w.speedup_kept,
        w.kept_refused, tuple((k.knob, k.before, k.after) for k in w.knob_changes),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reviewed:
    """A pass as a review sees it; variants are those of its kernel classes."""

    asked: Pass
    #: (workload, machine, variant, family, clock, interval, level) -> the forecast.
    predict: Callable[[Workload, Machine, Any, str | None, str | float, bool, Compiler | None], Explained]
    #: (workload, machine, changes, scales, variant, family, clock, level) -> before and after.
    what_if: Callable[..., Comparison]
    #: (workload, machine, variant, clock, step, level).
    sensitivities: Callable[[Workload, Machine, Any, str | float, float, Compiler | None], Sensitivities]
    #: (variant, workload, machine) -> every combination of knobs of its family; why one cannot run, and why tilecast does not
    #: write one that can ("": it can, it does); what the authors of its class ship, None where they ship none.
    space: Callable[[Any, Workload, Machine], tuple[Any, ...]]
    refusal: Callable[[Any, Workload, Machine], str]
    unwritten: Callable[[Any, Workload, Machine], str]
    shipped: Callable[[Any, Workload, Machine], Any]
    #: (variant, workload, machine, clock) -> name and variant of every other family.
    others: Callable[[Any, Workload, Machine, str | float], Iterable[tuple[str, Any]]]
    #: Name of the family that is taken where none is asked for.
    native: Callable[[Workload, Machine], str]
    #: The loops, each with the iterations of all SMs; the launches, where there are several.
    work: Callable[[Any], list[tuple[Pipeline, float]]]
    launches: Callable[[Any], tuple[Launch, ...]]
    #: How far the model was off near the question; the file is a table of measurements in place of ours.
    regions: Callable[[Explained, Path | None], tuple[Region, ...]]
    #: Refuses a file that is no such table.
    check_table: Callable[[Path], object]
    #: What alternatives are forecast, and how FLOP are counted, in words.
    compared: str
    counted: str


def as_change(found: Comparison, side: Callable[[Explained, str], Any], text: Callable[[object], str]) -> Change:
    """The values of a what-if; ``side`` makes those of a forecast, ``text`` that of a knob's value."""
    knobs = tuple((name, text(old), text(new)) for name, old, new in found.knobs)
    return Change(
        found.facts, side(found.before, "before"), side(found.after, "after"), found.speedup, found.speedup_kept,
        found.kept_refused, knobs,
    )  # fmt: skip
