"""`tilecast validate gemm`: forecasts of GEMM kernels against a table of measured ones, shape by shape."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from tilecast.base.csv_file import read_rows
from tilecast.base.progress import Progress, reported, silent
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.gemm.evaluate import evaluate_gemm
from tilecast.model.gemm.families import legality
from tilecast.model.gemm.variant import GemmVariant, gemm_variant_text, parse_gemm_variant
from tilecast.model.gemm.workload import Gemm
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.validation.measured.run import DATA
from tilecast.validation.statistics import ErrorSummary, rank_correlation, summarise

TABLE = DATA / "h200_gemm_variants.csv"
#: Time of an empty kernel measured as the rows are: one launch between two events, in a CUDA graph (H200, median of 15).
EMPTY_US = 2.78
_COLUMNS = ("m", "n", "k", "c_dtype", "in_place", "variant", "us")


@dataclass(frozen=True, slots=True)
class GemmRow:
    """One measured kernel and its forecast, both in microseconds without the launch."""

    gemm: Gemm
    variant: GemmVariant
    measured_us: float
    forecast_us: float

    @property
    def error(self) -> float:
        """Forecast over measured, less 1."""
        return self.forecast_us / self.measured_us - 1.0


@dataclass(frozen=True, slots=True)
class GemmShape:
    """All variants of one problem."""

    gemm: Gemm
    rows: tuple[GemmRow, ...]

    @property
    def summary(self) -> ErrorSummary:
        """Errors of its variants."""
        return summarise(row.error for row in self.rows)

    @property
    def tau(self) -> float:
        """Kendall's rank correlation of forecast and measured times."""
        return rank_correlation([row.forecast_us for row in self.rows], [row.measured_us for row in self.rows])

    @property
    def first_pick(self) -> float:
        """How far the variant forecast to be fastest is behind the fastest."""
        pick = min(self.rows, key=lambda row: row.forecast_us)
        return pick.measured_us / min(row.measured_us for row in self.rows) - 1.0

    def buffer_gains(self) -> list[tuple[GemmVariant, float, float]]:
        """(variant, forecast gain, measured gain) of the second accumulator, all other knobs alike."""
        known = {row.variant: row for row in self.rows}
        pairs = [(row, known.get(replace(v, accumulators=1))) for v, row in known.items() if v.accumulators == 2]
        return [
            (two.variant, one.forecast_us / two.forecast_us, one.measured_us / two.measured_us)
            for two, one in pairs
            if one is not None
        ]


def run_gemm(
    table: Path = TABLE, machine: str | None = None, every: int = 1, progress: Progress = silent
) -> list[GemmShape]:
    """Every ``every``-th row of the table by shape; VariantError for a table that is something else."""
    chip = load_machine(machine or "h200-sxm")
    raw = read_rows(table, "the measured kernels", VariantError)
    if not raw or any(name not in raw[0] for name in _COLUMNS):
        raise VariantError(f"{table}: not a table of GEMM kernels: expected the columns {', '.join(_COLUMNS)}")
    shapes: dict[Gemm, list[GemmRow]] = {}
    kept = [row for row in raw if row["variant"]][::every]
    for number, row in enumerate(reported(kept, "forecast", len(kept), progress), start=1):
        found = _row(row, chip, f"{table}, row {number}")
        shapes.setdefault(found.gemm, []).append(found)
    return [GemmShape(gemm, tuple(rows)) for gemm, rows in shapes.items()]


def _row(row: dict[str, str], chip: Machine, where: str) -> GemmRow:
    try:
        wide = row["c_dtype"]
        gemm = Gemm(
            int(row["m"]), int(row["n"]), int(row["k"]), c_dtype=wide, d_dtype=wide, in_place=row["in_place"] == "1"
        )
        family = row["variant"].partition(",")[0].removeprefix("family=")
        variant, us = parse_gemm_variant(row["variant"], GemmVariant(family)), float(row["us"]) - EMPTY_US
    except ValueError as error:
        raise VariantError(f"{where}: {error}") from None
    if us <= 0.0:
        raise VariantError(f"{where}: us: expected more than the {EMPTY_US} us of an empty kernel, got {row['us']}")
    verdict = legality(variant, gemm, chip)
    if not verdict.legal:
        raise PredictError(f"{where}: {verdict.sentence()}")
    run = evaluate_gemm(gemm, variant, chip, "short")
    return GemmRow(gemm, variant, us, (run.seconds - run.launch_seconds) * 1e6)


def report_text(shapes: list[GemmShape]) -> str:
    """One line a shape, and all of them."""
    every = summarise(row.error for shape in shapes for row in shape.rows)
    picks = [shape.first_pick for shape in shapes]
    lines = [
        f"{every.count} kernels on {len(shapes)} problems, launch left out: forecast off by {every.mean:.1%} in the mean, {every.p90:.1%} at p90, bias {every.bias:+.1%}",
        f"kernel forecast to be fastest: {statistics.median(picks):.1%} behind the fastest in the median, {max(picks):.1%} at most",
        "",
        "    m     n     k  C       kernels   mean    bias   tau  first pick  second accumulator, forecast / measured",
    ]
    for shape in shapes:
        g, s = shape.gemm, shape.summary
        lines.append(
            f"{g.m:5} {g.n:5} {g.k:5}  {g.c_dtype:<5} {s.count:9} {s.mean:6.1%} {s.bias:+7.1%} {shape.tau:5.2f} {shape.first_pick:+10.1%}  {_best_gain(shape)}".rstrip()
        )
    return "\n".join(lines)


def _best_gain(shape: GemmShape) -> str:
    """Gain of the second accumulator of the fastest kernel that has a twin with one."""
    gains = {v: (forecast, measured) for v, forecast, measured in shape.buffer_gains()}
    fastest = [row for row in sorted(shape.rows, key=lambda row: row.measured_us) if row.variant in gains]
    if not fastest:
        return ""
    forecast, measured = gains[fastest[0].variant]
    return f"{forecast:.3f}x / {measured:.3f}x"


def report_dict(shapes: list[GemmShape]) -> dict[str, object]:
    """The report as JSON takes it."""
    return {
        "shapes": [
            {
                "gemm": shape.gemm.as_dict(), "kernels": shape.summary.count, "mean": shape.summary.mean, "bias": shape.summary.bias,
                "tau": shape.tau, "first_pick": shape.first_pick,
                "rows": [
                    {"variant": gemm_variant_text(row.variant), "measured_us": row.measured_us, "forecast_us": row.forecast_us}
                    for row in shape.rows
                ],
            }
            for shape in shapes
        ]
    }  # fmt: skip
