"""Predicted against measured, point by point: the forecast of the compiled kernel and the one made before it exists.

Times are compared in SM cycles, so that neither the clock nor the power limit enters; the measured clock is only used
to convert what is given in seconds (memory, launch).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilecast.base.data import MEASURED
from tilecast.base.pool import spread
from tilecast.base.progress import Progress, reported, silent
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.compiled.code import CodeError, CodeKey, KernelCode
from tilecast.model.compiled.forecast import forecast
from tilecast.model.families import parse_variant
from tilecast.model.forecast.answer import BEFORE, COMPILED
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.validation.lab.measure.records import Measured, RecordError, read
from tilecast.validation.measured.kept import AGAIN, Pick, as_written_now, kept_profiles, picks_of
from tilecast.validation.measured.recorded import Row, generated_runs, read_profiles
from tilecast.validation.measured.settled import SettledRow, settled_rows
from tilecast.validation.statistics import ErrorSummary, grouped, rank_correlation, summarise

DATA = MEASURED
TABLE = DATA / "h200_points.csv"
CODES = DATA / "h200_code.txt"
SUSTAINED = DATA / "h200_sustained.csv"


@dataclass(frozen=True, slots=True)
class Choice:
    """How well a forecast chooses between the variants of one shape."""

    label: str
    role: str
    variants: int
    tau: float
    #: Time of the forecast's first pick over the best measured time, less one.
    regret: float


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices over all shapes."""

    shapes: tuple[Choice, ...]

    @property
    def median_tau(self) -> float:
        """Median Kendall tau over shapes."""
        return statistics.median(c.tau for c in self.shapes) if self.shapes else 0.0

    @property
    def median_regret(self) -> float:
        """Median loss of the first pick."""
        return statistics.median(c.regret for c in self.shapes) if self.shapes else 0.0

    @property
    def worst_regret(self) -> float:
        """Largest loss of the first pick."""
        return max((c.regret for c in self.shapes), default=0.0)


@dataclass(frozen=True, slots=True)
class MeasuredReport:
    """Everything `validate measured` shows."""

    table: str
    rows: tuple[Row, ...]
    refused: tuple[Row, ...]
    #: level -> role -> summary, of the rows that have a forecast of that level
    headline: dict[str, dict[str, ErrorSummary]]
    #: grouping -> group -> summary, each row by its best level
    groups: dict[str, dict[str, ErrorSummary]]
    choices: dict[str, dict[str, Choices]]
    settled: tuple[SettledRow, ...]
    #: Whether machine code is that of the loops at hand; then the same rows before compilation, and what each level would
    #: have picked.
    kept: bool = False
    same_rows: ErrorSummary | None = None
    picks: tuple[Pick, ...] = ()


LEVELS = (COMPILED, BEFORE)


def run_measured(
    table: Path = TABLE,
    codes: Path = CODES,
    machine: str | None = None,
    sustained: Path | None = None,
    kept: bool = False,
    progress: Progress = silent,
) -> MeasuredReport:
    """Forecast every short-run row of ``table`` that is a kernel of ours, and the clock of sustained runs in either table.

    With ``kept`` machine code is that of the loops at hand (`--level kept`), not of each kernel's own profile in ``codes``, and what
    was measured again as it is written now stands for what the tables here had of it.
    Raises RecordError and CodeError for files that are something else.
    """
    measured = read(table)
    points = generated_runs(measured)
    if not points:
        raise RecordError(
            f"{table}: holds no short runs of generated kernels: measure some with tilecast measure PLAN.toml"
        )
    if kept and table.resolve().parent == DATA.resolve():
        points = as_written_now(points, read(AGAIN))
    profiles = kept_profiles(points, machine) if kept else read_profiles(codes)
    rows = forecast_rows(points, profiles, machine, progress)
    usable = tuple(row for row in rows if not row.refused)
    roles = sorted({row.point.role for row in usable})
    by_role = {
        level: {role: [r for r in usable if r.point.role == role and level in r.cycles] for role in roles}
        for level in LEVELS
    }
    headline = {
        level: {role: summarise(r.error(level) for r in found) for role, found in parts.items() if found}
        for level, parts in by_role.items()
    }
    choices = {
        level: {role: choices_of(found, level) for role, found in parts.items() if found}
        for level, parts in by_role.items()
    }
    return MeasuredReport(
        str(table), usable, tuple(row for row in rows if row.refused), headline, _groups(usable), choices,
        settled_rows([*measured, *(read(sustained) if sustained else ())], profiles, machine),
        kept,
        summarise(r.error(BEFORE) for r in usable if COMPILED in r.cycles) if kept and profiles else None,
        picks_of(usable) if kept else (),
    )  # fmt: skip


def forecast_rows(
    points: Sequence[Measured], profiles: Mapping[CodeKey, KernelCode], machine: str | None, progress: Progress
) -> tuple[Row, ...]:
    """Forecasts of all points, in their order; kernels are simulated in as many processes as there are cores."""
    groups: dict[CodeKey, list[int]] = {}
    for i, p in enumerate(points):
        groups.setdefault(p.code_key(), []).append(i)
    jobs = [([points[i] for i in members], profiles.get(key), machine) for key, members in groups.items()]
    # A process takes a second to start, as long as some twenty points take.
    found = reported(spread(_kernel_rows, jobs, 0 if len(points) > 50 else 1), "forecast", len(jobs), progress)
    ordered: dict[int, Row] = {}
    for members, made in zip(groups.values(), found, strict=True):
        ordered.update(zip(members, made, strict=True))
    return tuple(ordered[i] for i in range(len(points)))


def _kernel_rows(job: tuple[list[Measured], KernelCode | None, str | None]) -> list[Row]:
    points, code, machine = job
    return [_row(point, code, load_machine(machine or point.machine)) for point in points]


def _row(point: Measured, code: KernelCode | None, machine: Machine) -> Row:
    work = point.workload()
    try:
        answer = predict(
            work, machine, parse_variant(point.variant), clock=point.effective_mhz, interval=False, compiler=None
        )
        cycles = {BEFORE: answer.time_ms * point.effective_mhz * 1e3}
        if code is not None:
            cycles[COMPILED] = forecast(code, work, machine, point.effective_mhz).cycles
    except (CodeError, PredictError, VariantError) as error:
        return Row(point, {}, str(error))
    return Row(point, cycles)


def _groups(rows: Sequence[Row]) -> dict[str, dict[str, ErrorSummary]]:
    def error(row: Row) -> float:
        return row.error(row.level)

    return {
        "kernel": grouped(rows, lambda r: r.point.kernel, error),
        "kernel, head_dim, mask": grouped(rows, lambda r: f"{r.point.kernel} {r.point.head_dim_qk} {r.point.mask}", error),
        "kernel, seqlen": grouped(rows, lambda r: f"{r.point.kernel} {r.point.seqlen_q:6d}", error),
        "kernel, scheduler": grouped(rows, lambda r: f"{r.point.kernel} {_knob(r.point, 'scheduler')}", error),
        "hopper_ws, warpgroups and rescale": grouped(
            [r for r in rows if r.point.kernel == "hopper_ws"],
            lambda r: f"{_knob(r.point, 'warpgroups')} {_knob(r.point, 'rescale')}", error,
        ),
    }  # fmt: skip


def _knob(point: Measured, name: str) -> str:
    pairs = dict(part.split("=") for part in point.variant.split(","))
    return pairs.get(name, "")


def choices_of(rows: Iterable[Row], level: str) -> Choices:
    """Rank correlation and what the first pick costs, for every shape and family with at least three variants."""
    shapes: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        shapes.setdefault((row.point.kernel, row.point.workload()), []).append(row)
    found = []
    for (kernel, work), members in shapes.items():
        if len(members) < 3:
            continue
        forecasts = [r.cycles[level] for r in members]
        # Variants of a shape are compared in time at one clock: that they were measured in turns.
        times = [r.point.cycles for r in members]
        pick = times[forecasts.index(min(forecasts))]
        label = f"{kernel} {work.label()}"  # type: ignore[attr-defined]
        found.append(
            Choice(
                label, members[0].point.role, len(members), rank_correlation(forecasts, times), pick / min(times) - 1
            )
        )
    return Choices(tuple(found))
