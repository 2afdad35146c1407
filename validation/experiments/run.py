"""Natural experiments: two GPUs that differ in little, as a test of the what-if.

NVIDIA made the experiments itself: GB200 -> GB300 and B200 -> B300 double the ex2 rate of one SM design, H100 -> H200
changes the memory of one.  The forecast changes only that fact (and chooses the kernel again); beside it stands the
ratio of the two machine files, where SM count, clock, power and latencies differ as well.  The measured ratio is that
of one library version, kernel and shape on both GPUs, so that the software is the same.  Nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median

from tilecast.base.progress import Progress, reported, silent
from tilecast.model.forecast.brief import brief
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.validation.published.points import CyclePoint, PublishedPoint, load_cycles, load_points
from tilecast.validation.published.run import EXAMPLES, cycles_of, published_kernel

#: Percentage points of ratio within which a forecast counts as right.
WITHIN = 6.0
#: Shorter sequences are launch and library overheads (docs/accuracy.md).
SHORTEST = 2048


#: Forecasts of a ratio, from the fewest facts of the newer machine to all of them.
FORECASTS = ("only_facts", "one_clock", "with_power", "whole_file")
_POWER = ("chip.tdp_w", "power.short_run_w", "power.idle_w")
#: Names of one kernel in different tables.
_SAME_KERNEL = {"pytorch-sdpa-flash(fa2)": "fa2"}


@dataclass(frozen=True, slots=True)
class Experiment:
    """Two machines, and the facts of the newer one that the what-if takes over into the older one.

    ``any_version`` also pairs different library versions and fp16 with bf16, because no version ran on both; such
    rows hold the software's progress as well, and say so.
    """

    name: str
    old: str
    new: str
    facts: tuple[str, ...]
    says: str
    any_version: bool = False


EXPERIMENTS = (
    Experiment("GB200 -> GB300", "gb200", "gb300", ("mufu.ex2_per_clk",), "ex2 rate doubled"),
    Experiment("B200 -> B300", "b200", "b300", ("mufu.ex2_per_clk",), "ex2 rate doubled"),
    Experiment(
        "H100 -> H200", "h100-sxm", "h200-sxm", ("hbm.tbps_spec", "hbm.tbps_achieved"), "HBM bandwidth", any_version=True
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RatioRow:
    """One kernel and shape on both GPUs: throughput (or, for counters, inverse cycles) new over old.

    Four forecasts, each with more of the newer machine in the older one: ``only_facts`` the what-if, the power limit as
    it was; ``one_clock`` the same with both sides at the older machine's clock, what the cycles alone would give;
    ``with_power`` the facts and the newer board's power; ``whole_file`` the two machine files as they are.
    ``old_clock`` and ``new_clock`` are the forecast's clocks (MHz) of the two files.
    """

    experiment: str
    kernel: str
    version: str
    dtype: str
    workload: Workload
    measured: float
    only_facts: float
    one_clock: float
    with_power: float
    whole_file: float
    old_clock: float
    new_clock: float

    def points(self, forecast: str) -> float:
        """Forecast (a name in `FORECASTS`) minus measured ratio, percentage points."""
        return 100.0 * (float(getattr(self, forecast)) - self.measured)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one set of rows came out for one forecast."""

    rows: int
    within: float
    median_error: float
    bias: float
    #: Share of rows whose gain or loss beyond 2 points has the right sign (rows inside are not counted), and of how many.
    sign: float
    sign_rows: int


@dataclass(frozen=True, slots=True)
class Order:
    """Whether fp8 gains more than bf16 as measured: pairs of one kernel, version and shape, and the medians.

    ``clear`` pairs are those whose measured gains differ by more than 2 points; ``agree`` is the share of them that a
    forecast orders alike.
    """

    pairs: int
    clear: int
    agree: dict[str, float]
    #: (bf16, fp8) median ratios over the pairs, measured and by forecast.
    medians: dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class ExperimentReport:
    """Everything `validate experiments` shows about one experiment; ``spread`` is how far library versions of one
    shape and kernel disagree about the measured ratio (median over shapes of max - min, points): no forecast of the
    hardware can do better than that."""

    experiment: Experiment
    regime: str
    rows: tuple[RatioRow, ...]
    spread: float
    spread_shapes: int
    spread_worst: float


def outcome(rows: Iterable[RatioRow], forecast: str) -> Outcome:
    """Summary of one of `FORECASTS` against the measured ratios; zeros for no rows."""
    chosen = tuple(rows)
    if not chosen:
        return Outcome(0, 0.0, 0.0, 0.0, 0.0, 0)
    errors = [row.points(forecast) for row in chosen]
    clear = [row for row in chosen if abs(row.measured - 1.0) > 0.02]
    right = [row for row in clear if (float(getattr(row, forecast)) - 1.0) * (row.measured - 1.0) > 0]
    return Outcome(
        len(chosen), sum(abs(e) <= WITHIN for e in errors) / len(errors), median(abs(e) for e in errors),
        sum(errors) / len(errors), len(right) / len(clear) if clear else 0.0, len(clear),
    )  # fmt: skip


def order(rows: Iterable[RatioRow]) -> Order | None:
    """fp8 against bf16 of one shape; None without pairs."""
    by_key: dict[tuple[str, str, Workload], dict[str, RatioRow]] = {}
    for row in rows:
        key = (row.kernel, row.version, replace(row.workload, dtype="bf16"))
        by_key.setdefault(key, {})[row.dtype] = row
    pairs = [(found["16 bit"], found["fp8"]) for found in by_key.values() if {"16 bit", "fp8"} <= set(found)]
    if not pairs:
        return None
    clear = [(a, b) for a, b in pairs if abs(b.measured - a.measured) > 0.02]

    def gain(forecast: str) -> list[float]:
        return [float(getattr(b, forecast)) - float(getattr(a, forecast)) for a, b in clear]

    measured = gain("measured")
    agree = {
        name: sum(x * y > 0 for x, y in zip(gain(name), measured, strict=True)) / len(clear) if clear else 0.0
        for name in FORECASTS
    }
    medians = {
        name: (median(getattr(a, name) for a, _ in pairs), median(getattr(b, name) for _, b in pairs))
        for name in ("measured", *FORECASTS)
    }
    return Order(len(pairs), len(clear), agree, medians)


def told_by_others(rows: Iterable[RatioRow]) -> tuple[int, int]:
    """(rows right, rows judged) when a row is foretold by the median *measured* ratio of the other rows of its dtype,
    head dimensions and mask.  A row alone in its group is not judged.

    Nothing is modelled here: what is missing to all is what kernels and library versions of one kind do differently.
    """
    groups: dict[tuple[object, ...], list[float]] = {}
    for row in rows:
        work = row.workload
        groups.setdefault((row.dtype, work.head_dim_qk, work.head_dim_v, work.mask), []).append(row.measured)
    right = judged = 0
    for ratios in groups.values():
        for i, measured in enumerate(ratios):
            others = ratios[:i] + ratios[i + 1 :]
            if others:
                judged += 1
                right += 100.0 * abs(median(others) - measured) <= WITHIN
    return right, judged


def run_experiments(
    regime: str = "short", points: list[PublishedPoint] | None = None, progress: Progress = silent
) -> tuple[ExperimentReport, ...]:
    """All experiments at the clock of ``regime``; ``points`` replaces the published table (tests)."""
    known = points if points is not None else load_points()[0]
    steps = reported(EXPERIMENTS, "experiments", len(EXPERIMENTS), progress)
    return tuple(_run(experiment, regime, known) for experiment in steps)


def _run(experiment: Experiment, regime: str, points: list[PublishedPoint]) -> ExperimentReport:
    rows = [_row(experiment, old, new, regime) for old, new in matched(experiment, points)]
    spread = _spreads(rows)
    return ExperimentReport(
        experiment, regime, tuple(rows), median(spread) if spread else 0.0, len(spread), max(spread, default=0.0)
    )


def matched(experiment: Experiment, points: list[PublishedPoint]) -> list[tuple[PublishedPoint, PublishedPoint]]:
    """(old, new) rows of one kernel, version, dtype and shape, the faster where one was run twice; sequences of
    2048 and more, kernels written to be fast, block scales (mxfp8) and locked clocks left out.  With ``any_version``
    every version on the new GPU meets the fastest on the old one."""

    loose = experiment.any_version

    def usable(point: PublishedPoint) -> bool:
        return (
            point.workload.seqlen_q >= SHORTEST and point.kernel not in EXAMPLES
            and (loose or point.family != "fa2")
            and point.dtype_class in ("16 bit", "fp8") and point.clock_mhz is None
        )  # fmt: skip

    def key(point: PublishedPoint) -> tuple[object, ...]:
        kernel = _SAME_KERNEL.get(point.kernel, point.kernel)
        if not loose:
            return (kernel, point.version, point.dtype_class, point.workload)
        return (kernel, point.dtype_class, replace(point.workload, dtype="bf16"))

    def fastest(machine: str, by_version: bool) -> dict[tuple[object, ...], PublishedPoint]:
        best: dict[tuple[object, ...], PublishedPoint] = {}
        for point in points:
            if point.machine == machine and usable(point):
                name = (*key(point), point.version if by_version else "")
                if name not in best or point.tflops > best[name].tflops:
                    best[name] = point
        return best

    old = {name[:-1]: point for name, point in fastest(experiment.old, by_version=False).items()}
    new = fastest(experiment.new, by_version=True)
    pairs = [(old[name[:-1]], point) for name, point in new.items() if name[:-1] in old]
    return sorted(pairs, key=lambda pair: (pair[0].row, pair[1].row))


def _row(experiment: Experiment, old: PublishedPoint, new: PublishedPoint, regime: str) -> RatioRow:
    before, after = load_machine(experiment.old), load_machine(experiment.new)
    changed = _with(before, after, experiment.facts)
    powered = _with(before, after, (*experiment.facts, *_POWER))
    base, clock = _seconds(old, before, regime)
    newest, new_clock = _seconds(new, after, regime)
    versions = old.version if old.version == new.version else f"{old.version} / {new.version}"
    return RatioRow(
        experiment.name, old.kernel, versions, old.dtype_class, old.workload, new.tflops / old.tflops,
        base / _seconds(old, changed, regime)[0],
        _seconds(old, before, clock)[0] / _seconds(old, changed, clock)[0],
        base / _seconds(old, powered, regime)[0], base / newest, clock, new_clock,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _with(old: Machine, new: Machine, facts: tuple[str, ...]) -> Machine:
    """The older machine with ``facts`` of the newer one."""
    return old.with_facts({key: new[key] for key in facts})


def _seconds(point: PublishedPoint, machine: Machine, clock: str | float) -> tuple[float, float]:
    """(seconds, MHz) of the row's kernel as `validate published` takes it, chosen again on each machine."""
    variant = published_kernel(point.workload, machine, point.family, point.emulated_share, clock)
    found = brief(point.workload, machine, variant, clock)
    return found.seconds, found.clock_mhz


def _spreads(rows: list[RatioRow]) -> list[float]:
    """Max - min of the measured ratio over versions, in points, for every kernel and shape with at least two."""
    by_shape: dict[tuple[str, str, Workload], list[float]] = {}
    for row in rows:
        by_shape.setdefault((row.kernel, row.dtype, row.workload), []).append(row.measured)
    return [100.0 * (max(found) - min(found)) for found in by_shape.values() if len(found) > 1]


@dataclass(frozen=True, slots=True)
class CycleRatio:
    """B200 over B300 cycles of one kernel and dtype (Nsight Compute counters), free of clock, power and SM count."""

    kernel: str
    dtype: str
    head_dim: int
    measured: float
    only_facts: float
    whole_file: float


def cycle_ratios() -> tuple[CycleRatio, ...]:
    """Pairs of `cycles.csv` whose kernel and shape ran on B200 and B300; the kernel as its authors set it on each."""
    rows = load_cycles()
    out = []
    for old in rows:
        for new in rows:
            same = (old.kernel, old.dtype, old.head_dim, old.mask) == (new.kernel, new.dtype, new.head_dim, new.mask)
            if old.machine == "b200" and new.machine == "b300" and same:
                out.append(_cycle_ratio(old, new))
    return tuple(out)


def _cycle_ratio(old: CyclePoint, new: CyclePoint) -> CycleRatio:
    before, after = load_machine("b200"), load_machine("b300")
    changed = _with(before, after, ("mufu.ex2_per_clk",))
    base = cycles_of(old, before)
    return CycleRatio(
        old.kernel, old.dtype, old.head_dim, old.cycles / new.cycles, base / cycles_of(new, changed),
        base / cycles_of(new, after),
    )  # fmt: skip
