"""What a design review says, as values: every number that a page, a table or a chart of the report shows.

Made by `build.report`; the page, the Markdown twin and the charts only lay it out.  Shares are 0..1, changes are
relative (0.05 is 5 %), ``tflops`` is 10^12 FLOP/s counted as the FlashAttention papers count.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.forecast.answer import WaterfallStep
from tilecast.model.whatif.answers import BreakEven, Sensitivity
from tilecast.model.whatif.asymmetry import AsymmetryMap
from tilecast.validation.statistics import ErrorSummary


@dataclass(frozen=True, slots=True)
class Regime:
    """The forecast at one clock; the interval is that of the ranged machine facts."""

    name: str
    time_ms: float
    tflops: float
    low: float
    high: float
    clock_mhz: float
    clock_reason: str


@dataclass(frozen=True, slots=True)
class Ceiling:
    """TFLOP/s the workload would reach if only this unit had to work; cycles of one SM and loop iteration."""

    unit: str
    #: What the unit is and its rate on this machine.
    about: str
    #: None for what is not counted per iteration (L2, HBM).
    cycles: float | None
    #: Share of the kernel's time the unit is busy.
    busy: float
    tflops: float


@dataclass(frozen=True, slots=True)
class Launch:
    """One of several launches: its time with what it takes to start it, its share of the whole, bytes from and to memory."""

    name: str
    time_ms: float
    share: float
    hbm_bytes: float


@dataclass(frozen=True, slots=True)
class Bar:
    """One operation (or wait) on one lane of the timeline, in cycles from the start of the tile."""

    lane: str
    name: str
    kind: str
    start: float
    cycles: float
    #: Height of the bar on its lane: 1 for operations, the busy share for units.
    share: float
    #: Lines of the tooltip: operation, units, cycles, what it waits for.
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The simulated tile: lanes for roles, engines and units; ``view`` is the steady state to look at first."""

    title: str
    lanes: tuple[str, ...]
    unit_lanes: tuple[str, ...]
    bars: tuple[Bar, ...]
    view: tuple[float, float]
    ii_cycles: float
    periodic: bool
    #: Waits in the steady state: (role, for what, cycles per iteration).
    waits: tuple[tuple[str, str, float], ...]
    #: The recurrence that sets the period: (operation, after, alone, sharing, hand-over cycles per iteration).
    critical: tuple[tuple[str, str, float, float, float], ...]


@dataclass(frozen=True, slots=True)
class Assumption:
    """A machine fact the forecast rests on, and what its range does to the answer."""

    fact: str
    meaning: str
    value: float
    unit: str
    kind: str
    source: str
    low: float | None
    high: float | None
    #: TFLOP/s with the fact at its low and its high end; None without a range.
    tflops_low: float | None
    tflops_high: float | None
    #: Largest relative change of TFLOP/s inside the range.
    effect: float


@dataclass(frozen=True, slots=True)
class Considered:
    """A variant that was looked at: how it differs from the chosen one, and what speaks for or against it."""

    change: str
    variant: str
    #: "chosen", "tie", "slower", "faster" (where the user fixed the variant, or it was not among those compared) or "refused".
    verdict: str
    tflops: float | None
    #: Time over the chosen variant's, less one.
    slower: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Variants:
    """The chosen variant beside its alternatives."""

    chosen: str
    rows: tuple[Considered, ...]
    space: int
    legal: int
    #: What was forecast of them, in words.
    compared: str


@dataclass(frozen=True, slots=True)
class Point:
    """A measured point near the question, with the model's answer for that very point."""

    machine: str
    kernel: str
    shape: str
    measured: float
    predicted: float
    source: str

    @property
    def error(self) -> float:
        """Signed relative error of TFLOP/s."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class Region(ErrorSummary):
    """How well the model did near the question: who measured, how near, how many, how far off."""

    #: "published" or "own kernels".
    kind: str
    nearness: str
    points: tuple[Point, ...]
    #: What is compared, in a sentence; why there is nothing, when count is 0.
    note: str


@dataclass(frozen=True, slots=True)
class Risk:
    """Something that may make the forecast wrong or the design fragile; ``weight`` orders them (share of the answer)."""

    title: str
    sentence: str
    weight: float


@dataclass(frozen=True, slots=True)
class Tornado:
    """Percent of time per percent of each fact (`model.sensitivity`), largest first, and what was left out."""

    step: float
    rows: tuple[Sensitivity, ...]
    #: Facts that move the time by less than `LEAST` percent per percent, by name.
    without_effect: tuple[str, ...]
    break_evens: tuple[BreakEven, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """The forecast before or after a change of the machine."""

    title: str
    time_ms: float
    tflops: float
    clock_mhz: float
    binding: str
    variant: str
    waterfall: tuple[WaterfallStep, ...]
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Change:
    """A what-if: the changed facts, the forecast before, after, and what re-optimising the kernel adds."""

    changes: tuple[tuple[str, float, float, str], ...]
    before: Side
    after: Side
    speed_up: float
    #: With the variant of before on the changed machine; 0 where that is not legal, and then why.
    speed_up_kept: float
    kept_refused: str
    knobs: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Provenance:
    """How to get the same report again."""

    command: str
    version: str
    source: str
    date: str
    machine_digest: str


@dataclass(frozen=True, slots=True)
class ReviewContent:
    """The whole review; every chart has its numbers here and in a table."""

    title: str
    #: Value of ``--pass``.
    asked_pass: str
    machine: str
    workload: str
    question: str
    verdict: tuple[str, str]
    regimes: tuple[Regime, ...]
    kernel: str
    variant: str
    binding: str
    peak_share: float
    waterfall: tuple[WaterfallStep, ...]
    ceilings: tuple[Ceiling, ...]
    timeline: Timeline
    #: Of the kernels that take less time than that of ``timeline``, where there are several.
    other_timelines: tuple[Timeline, ...]
    #: Where there are several.
    launches: tuple[Launch, ...]
    tornado: Tornado
    map: AsymmetryMap
    variants: Variants
    regions: tuple[Region, ...]
    assumptions: tuple[Assumption, ...]
    conditions: tuple[str, ...]
    risks: tuple[Risk, ...]
    change: Change | None
    provenance: Provenance

    @property
    def whole(self) -> str:
        """What the causes of the waterfall add up to."""
        return "time of all launches" if self.launches else "time of the kernel"
