"""How much of the exhaustive best a tuner reaches that times only the first few: replayed on measured tables.

For every shape and family with enough measured variants the tuner's own stages and rules choose what it would have timed,
and the share is the best measured time over the best among those.  Nothing measured goes into the choice.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilecast.base.pool import spread
from tilecast.base.progress import Progress, reported, silent
from tilecast.codegen.tune.structure import Timed, diverse, pick_winner, structure, tile
from tilecast.codegen.tune.survey import COMPILED, COMPILED_PER_STRUCTURE, TIMED_PER_STRUCTURE, TIMED_PER_TILE
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.compiled.code import CodeError, KernelCode
from tilecast.model.compiled.forecast import forecast
from tilecast.model.families import parse_variant
from tilecast.model.forecast import answer as levels
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.validation.lab.measure.records import Measured, RecordError, read
from tilecast.validation.measured.recorded import generated_runs, read_profiles
from tilecast.validation.measured.run import CODES, TABLE

#: How many kernels are timed.
TIMED_COUNTS = (1, 3, 5)
#: A shape counts where at least this many variants of a family were measured.
LEAST_VARIANTS = 8
GOAL = 0.98
LEVELS = (levels.BEFORE, levels.COMPILED, "both stages")


@dataclass(frozen=True, slots=True)
class Entry:
    """One measured variant of a shape with its forecasts (seconds; infinite where there is none)."""

    point: Measured
    variant: Variant
    analytical_s: float
    compiled_s: float
    spill_bytes: int
    registers: int


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape and family: (level, timed) -> share of the exhaustive best, and the share of the tie rule's winner."""

    kernel: str
    workload: Workload
    role: str
    variants: int
    best_ms: float
    shares: dict[tuple[str, int], float]
    #: Share of the winner that the tie rule names among the most timed, all stages used.
    winner_share: float
    without_code: int


@dataclass(frozen=True, slots=True)
class TunerReport:
    """Everything `validate tuner` shows."""

    table: str
    gpus: tuple[str, ...]
    shapes: tuple[Shape, ...]

    def level(self, level: str, timed: int, role: str | None = None) -> list[float]:
        """Shares of all shapes (of a role)."""
        return [s.shares[level, timed] for s in self.shapes if role in (None, s.role)]


def run_tuner(
    table: Path = TABLE,
    codes: Path = CODES,
    machine: str | None = None,
    least: int = LEAST_VARIANTS,
    progress: Progress = silent,
) -> TunerReport:
    """Replay the tuner on ``table``; RecordError and CodeError for files that are something else."""
    rows = generated_runs(read(table))
    groups: dict[tuple[str, Workload], list[Measured]] = {}
    for row in rows:
        groups.setdefault((row.kernel, row.workload()), []).append(row)
    groups = {key: members for key, members in groups.items() if len(members) >= least}
    if not groups:
        raise RecordError(
            f"{table}: no shape has {least} measured variants of one family: measure more, or lower --least"
        )
    profiles = read_profiles(codes)
    jobs = []
    for members in groups.values():
        known = [profiles.get(p.code_key()) for p in members]
        jobs.append((members, known, machine))
    shapes = reported(spread(_shape, jobs), "forecast", len(jobs), progress)
    return TunerReport(str(table), tuple(sorted({row.gpu for row in rows})), tuple(shapes))


def _shape(job: tuple[list[Measured], list[KernelCode | None], str | None]) -> Shape:
    points, codes, name = job
    machine = load_machine(name or points[0].machine)
    entries = _entries(points, codes, machine)
    best = min(e.point.cycles for e in entries)
    orders = {level: rules(entries) for level, rules in _RULES.items()}
    shares = {
        (level, n): best / min(e.point.cycles for e in order(n))
        for level, order in orders.items()
        for n in TIMED_COUNTS
    }
    timed = orders["both stages"](TIMED_COUNTS[-1])
    marks = [
        Timed(e.variant, i, e.point.cycles, e.point.cycles_low, e.point.cycles_high, e.registers, e.spill_bytes)
        for i, e in enumerate(timed)
    ]
    winner = timed[pick_winner(marks)[0]]
    first = points[0]
    fastest = min(points, key=lambda p: p.cycles)
    return Shape(
        first.kernel, first.workload(), first.role, len(points), fastest.ms, shares, best / winner.point.cycles,
        sum(code is None for code in codes),
    )  # fmt: skip


def _entries(points: Sequence[Measured], codes: Sequence[KernelCode | None], machine: Machine) -> list[Entry]:
    """Forecasts as a tuner makes them: without a measured clock, all at that of the fastest by forecast."""
    work = points[0].workload()
    variants = [parse_variant(p.variant) for p in points]
    guesses: list[tuple[float, float]] = []
    for variant in variants:
        try:
            answer = predict(work, machine, variant, interval=False, compiler=None)
        except PredictError:
            guesses.append((float("inf"), 0.0))
        else:
            guesses.append((answer.time_ms / 1e3, answer.clock_mhz))
    mhz = min(guesses)[1]
    out = []
    for point, variant, code, (seconds, _) in zip(points, variants, codes, guesses, strict=True):
        compiled = float("inf")
        if code is not None and mhz:
            try:
                compiled = forecast(code, work, machine, mhz).cycles / (mhz * 1e6)
            except CodeError:
                compiled = float("inf")
        spills, registers = (code.stack_bytes, code.registers) if code else (0, 0)
        out.append(Entry(point, variant, seconds, compiled, spills, registers))
    return out


Order = Callable[[int], Sequence[Entry]]


def _before(entries: Sequence[Entry]) -> Order:
    ordered = sorted(entries, key=lambda e: e.analytical_s)
    return lambda n: diverse(ordered, lambda e: e.variant, n, tile, TIMED_PER_TILE)


def _from_code(entries: Sequence[Entry]) -> Order:
    ordered = sorted(entries, key=lambda e: (e.compiled_s, e.analytical_s))
    return lambda n: diverse(ordered, lambda e: e.variant, n, structure, TIMED_PER_STRUCTURE)


def _both(entries: Sequence[Entry]) -> Order:
    ordered = sorted(entries, key=lambda e: e.analytical_s)
    return _from_code(diverse(ordered, lambda e: e.variant, COMPILED, structure, COMPILED_PER_STRUCTURE))


_RULES: dict[str, Callable[[Sequence[Entry]], Order]] = dict(zip(LEVELS, (_before, _from_code, _both), strict=True))


def report_text(report: TunerReport, rows: bool) -> str:
    """Tables for people; every share is computed from the rows of the table."""
    lines = [
        f"{len(report.shapes)} shapes with {sum(s.variants for s in report.shapes)} measured variants ({', '.join(report.gpus)}; "
        f"{Path(report.table).name}): best time over best of those timed.",
        "",
        f"{'':<22}{'role':<10}{'timed':>6}{'shapes':>8}{'mean':>9}{'worst':>9}{f'>= {GOAL:.0%}':>9}",
    ]
    for level in LEVELS:
        for role in sorted({s.role for s in report.shapes}):
            for n in TIMED_COUNTS:
                found = report.level(level, n, role)
                lines.append(
                    f"{level:<22}{role:<10}{n:>6}{len(found):>8}{statistics.mean(found):>9.2%}{min(found):>9.2%}"
                    f"{sum(s >= GOAL for s in found):>9}"
                )
    won = [s.winner_share for s in report.shapes]
    lines += [
        "",
        f"Winner by the tie rule, both stages, {TIMED_COUNTS[-1]} timed: mean {statistics.mean(won):.2%}, worst {min(won):.2%}.",
    ]
    lost = sum(s.without_code for s in report.shapes)
    if lost:
        lines.append(f"{lost} variants have no profile of their machine code: never chosen from it.")
    if rows:
        n = TIMED_COUNTS[-1]
        lines += [
            "",
            f"{'variants':>8}{'best ms':>9}"
            + "".join(f"{f'{level[:7]} {k}':>11}" for level in LEVELS for k in (1, n))
            + "  shape",
        ]
        for s in sorted(report.shapes, key=lambda s: s.shares["both stages", n]):
            cells = "".join(f"{s.shares[level, k]:>11.2%}" for level in LEVELS for k in (1, n))
            lines.append(f"{s.variants:>8}{s.best_ms:>9.4g}{cells}  {s.kernel} {s.workload.label()} ({s.role})")
    return "\n".join(lines)


def report_dict(report: TunerReport) -> dict[str, object]:
    """The report with stable keys."""
    return {
        "table": report.table,
        "gpus": list(report.gpus),
        "shapes": [
            {
                "kernel": s.kernel, "workload": s.workload.as_dict(), "role": s.role, "variants": s.variants,
                "best_ms": s.best_ms, "winner_share": s.winner_share, "without_code": s.without_code,
                "shares": [{"level": level, "timed": n, "share": share} for (level, n), share in s.shares.items()],
            }
            for s in report.shapes
        ],
    }  # fmt: skip
