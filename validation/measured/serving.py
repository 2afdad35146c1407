"""Forecasts of serving steps against steps timed on a GPU (`tools/time_batches.py`): errors by kind of batch, and splits by rank.

A measured time is that of a graph's replay between two events.  What those add is what a replay of a kernel that does nothing takes
beyond the forecast of its launch; it is the only number taken from the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from tilecast.base.csv_file import Row
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.model.step.batch import requests_text, shortened
from tilecast.model.step.evaluate import evaluate_step
from tilecast.model.step.launches.variant import dealing
from tilecast.validation.measured.serving_tables import NOTHING, Measured, ServingTableError, read_table, steps
from tilecast.validation.statistics import ErrorSummary, grouped, summarise

__all__ = ["TABLE", "ServingTableError", "run_serving"]

TABLE = Path(__file__).parents[2] / "data" / "measured" / "h200_serving_hopper.csv"
#: Names of GPUs, as drivers give them, by machine.
_MACHINES = {"NVIDIA H200": "h200-sxm", "NVIDIA H100 80GB HBM3": "h100-sxm"}
#: Measured times within this share of each other are equal.
_TIE = 0.02


@dataclass(frozen=True, slots=True)
class ServingRow:
    """One measured step and its forecast, in microseconds."""

    point: str
    requests: str
    heads: tuple[int, int]
    page: int
    #: Keys of a split of the kernel that decodes.
    split_keys: int
    measured_us: float
    predicted_us: float
    #: Whether the row was looked at to infer a constant.
    looked_at: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_us / self.measured_us - 1.0


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """One batch under several lengths of splits."""

    requests: str
    heads: tuple[int, int]
    #: (keys of a split, measured, predicted), by keys.
    times: tuple[tuple[int, float, float], ...]

    @property
    def measured_best(self) -> int:
        """Keys of the fastest split."""
        return min(self.times, key=lambda one: one[1])[0]

    @property
    def predicted_best(self) -> int:
        """Keys of the split that the forecast would take."""
        return min(self.times, key=lambda one: one[2])[0]

    @property
    def regret(self) -> float:
        """How much longer the forecast's choice takes than the fastest."""
        taken = next(us for keys, us, _ in self.times if keys == self.predicted_best)
        return taken / min(us for _, us, _ in self.times) - 1.0

    @property
    def tau(self) -> float:
        """Rank correlation of the predicted order with the measured one, over pairs that differ by more than measuring does."""
        signs = [
            _sign(a[1] - b[1]) * _sign(a[2] - b[2])
            for a, b in combinations(self.times, 2)
            if abs(a[1] - b[1]) > _TIE * min(a[1], b[1])
        ]
        return sum(signs) / len(signs) if signs else 1.0


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


@dataclass(frozen=True, slots=True)
class ServingReport:
    """All rows of a table."""

    table: str
    machine: str
    #: What events and replay add to every row, in microseconds.
    added_us: float
    rows: tuple[ServingRow, ...]
    splits: tuple[SplitChoice, ...]

    def by_point(self) -> dict[str, ErrorSummary]:
        """Errors of each kind of batch."""
        return grouped(self.rows, lambda row: row.point, lambda row: row.error)

    def held_out(self) -> ErrorSummary:
        """Errors of rows that no constant was inferred from."""
        return summarise(row.error for row in self.rows if not row.looked_at)

    def everything(self) -> ErrorSummary:
        """Errors of all rows."""
        return summarise(row.error for row in self.rows)


def run_serving(
    table: Path = TABLE, machine: str | None = None, progress: Callable[[str, int, int], None] | None = None
) -> ServingReport:
    """Forecast every row of ``table``; ServingTableError for what cannot be read."""
    raw = read_table(table)
    gpu = raw[0][1].get("gpu", "")
    if machine is None and gpu not in _MACHINES:
        raise ServingTableError(f"{table.name}: no machine is known for GPU '{gpu}': name one with --machine")
    chip = load_machine(machine or _MACHINES[gpu])
    found = list(steps(raw, chip, table.name))
    if not found:
        raise ServingTableError(
            f"{table.name}: expected some rows of kernels that are forecast, measured with L2 evicted by reading, got none"
        )
    # Tables without a kernel that does nothing were measured as those with one.
    nothing = _nothing_measured(raw) or _nothing_measured(read_table(TABLE))
    added = min(nothing) - _nothing_us(chip)
    rows = []
    for done, one in enumerate(found):
        if progress is not None:
            progress("forecast", done, len(found))
        rows.append(_row(one, chip, added))
    return ServingReport(table.name, chip.name, added, tuple(rows), _choices(rows))


def _nothing_measured(rows: Sequence[tuple[int, Row]]) -> list[float]:
    return [float(row["us"]) for _, row in rows if row.get("point") == NOTHING]


def _nothing_us(machine: Machine) -> float:
    """Forecast of a launch of one program that writes a number."""
    cycles = machine["launch.cta_start_cycles"] + machine["l2.latency_cycles"]
    return machine["launch.kernel_us"] + cycles / machine["chip.clock_max_mhz"]


def _row(one: Measured, machine: Machine, added: float) -> ServingRow:
    heads, seconds = one.batch.heads, evaluate_step(one.batch, machine, one.variants, "short", one.written).seconds
    return ServingRow(
        one.point,
        requests_text(one.batch.lengths),
        (heads.heads_q, heads.heads_kv),
        one.batch.page,
        dealing(one.variants[0], heads).split_keys,
        one.us,
        float(seconds) * 1e6 + added,
        one.looked_at,
    )


def _choices(rows: Sequence[ServingRow]) -> tuple[SplitChoice, ...]:
    found: dict[tuple[str, tuple[int, int]], list[tuple[int, float, float]]] = {}
    for row in rows:
        if row.point == "split":
            keys = row.split_keys
            found.setdefault((row.requests, row.heads), []).append((keys, row.measured_us, row.predicted_us))
    return tuple(SplitChoice(requests, heads, tuple(sorted(times))) for (requests, heads), times in found.items())


def as_dict(report: ServingReport) -> dict[str, object]:
    """Keys documented in docs/json.md."""

    def summary(s: ErrorSummary) -> dict[str, float]:
        return {name: getattr(s, name) for name in ("count", "mean", "median", "p90", "worst", "bias")}

    return {
        "table": report.table, "machine": report.machine, "added_us": report.added_us,
        "all": summary(report.everything()), "held_out": summary(report.held_out()),
        "by_point": {name: summary(s) for name, s in report.by_point().items()},
        "splits": [
            {"requests": c.requests, "heads": c.heads[0], "heads_kv": c.heads[1], "measured_best": c.measured_best,
             "predicted_best": c.predicted_best, "regret": c.regret, "tau": c.tau}
            for c in report.splits
        ],
        "rows": [
            {"point": r.point, "requests": r.requests, "heads": r.heads[0], "heads_kv": r.heads[1], "page": r.page,
             "split_keys": r.split_keys, "measured_us": r.measured_us, "predicted_us": r.predicted_us, "error": r.error}
            for r in report.rows
        ],
    }  # fmt: skip


def as_text(report: ServingReport, rows: bool = False) -> str:
    """The report `tilecast validate serving` prints."""
    lines = [
        f"{report.table} on {report.machine}: serving steps, forecast against measured (a replay and its events add {report.added_us:.1f} us)",
        "",
        f"{'':<34}{'rows':>6}{'mean':>8}{'median':>8}{'p90':>8}{'worst':>8}{'bias':>8}",
        *[_summary_line(name, s) for name, s in report.by_point().items()],
        _summary_line("all", report.everything()),
        _summary_line("no constant was inferred from", report.held_out()),
    ]
    if report.splits:
        lines += [
            "",
            f"{'Keys of a split: the fastest':<34}{'measured':>10}{'forecast':>10}{'slower by':>11}{'tau':>7}",
        ]
    for c in report.splits:
        name = f"{c.requests}, {c.heads[0]}/{c.heads[1]} heads"
        lines.append(f"{name:<34}{c.measured_best:>10}{c.predicted_best:>10}{c.regret:>11.1%}{c.tau:>7.2f}")
    if report.splits:
        worst, tau = max(c.regret for c in report.splits), sum(c.tau for c in report.splits) / len(report.splits)
        lines.append(f"{'worst, mean tau':<34}{'':>20}{worst:>11.1%}{tau:>7.2f}")
    if rows:
        lines += [
            "",
            f"{'requests':<48}{'heads':>7}{'page':>6}{'split':>7}{'measured':>10}{'forecast':>10}{'error':>8}",
        ]
        for r in sorted(report.rows, key=lambda row: -abs(row.error)):
            head = f"{shortened(r.requests, 30):<48}{r.heads[0]:>4}/{r.heads[1]:<2}{r.page:>6}{r.split_keys:>7}"
            lines.append(f"{head}{r.measured_us:>10.1f}{r.predicted_us:>10.1f}{r.error:>8.1%}")
    return "\n".join(lines)


def _summary_line(name: str, s: ErrorSummary) -> str:
    shares = "".join(f"{value:>8.1%}" for value in (s.mean, s.median, s.p90, s.worst, s.bias))
    return f"{name:<34}{s.count:>6}{shares}"
