"""`tilecast validate gemm`: forecasts of GEMM kernels against a table of measured ones, problem by problem.

Both forecasts are held against every row: before compilation, and from machine code where the file of kept code has the kernel's.
Where a row tells the clock that the SMs ran at the forecasts are made at it, otherwise at that of short runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from tilecast.base.csv_file import check_whole, number_in, numbered_rows, whole_in
from tilecast.base.progress import Progress, reported, silent
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.compiled.roles.code import KernelRoles
from tilecast.model.gemm.code import code_cycles
from tilecast.model.gemm.evaluate import evaluate_gemm
from tilecast.model.gemm.families import legality
from tilecast.model.gemm.variant import GemmVariant, gemm_variant_text, parse_gemm_variant
from tilecast.model.gemm.workload import Gemm
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.validation.loops_file import read_roles
from tilecast.validation.measured.run import DATA
from tilecast.validation.statistics import (
    ErrorSummary,
    median_noise,
    rank_correlation,
    repeated_rank_correlation,
    summarise,
)

TABLE = DATA / "h200_gemm_variants.csv"
#: Machine code of the kernels of all tables, by the dtype of C and the variant (`dump_roles`; Triton 3.6).
CODES = DATA / "gemm_code.txt"
#: Time of an empty kernel measured as the rows are: one launch between two events, in a CUDA graph (H200, median of 15).
EMPTY_US = 2.78
#: Rounds that a row is the median of (tools/h200_gemm_variants.py), and the standard deviation of rounding to 0.01 us.
_ROUNDS, _ROUNDED_US = 9, 1e-2 / math.sqrt(12.0)
#: Levels of a forecast, as the report names them.
BEFORE, COMPILED = "before compilation", "from machine code"
_COLUMNS = ("m", "n", "k", "c_dtype", "in_place", "variant", "us")
#: Whose rows a table holds, by what `gpu` says; without one an H200's.
_MACHINES = (("H100", "h100-sxm"), ("H200", "h200-sxm"))


@dataclass(frozen=True, slots=True)
class GemmRow:
    """One measured kernel and its forecasts, in microseconds without the launch."""

    gemm: Gemm
    variant: GemmVariant
    measured_us: float
    #: Before compilation.
    forecast_us: float
    #: None where no machine code of the kernel is kept.
    code_us: float | None = None
    #: Standard deviation of the median measured, from the range of its rounds; nan where the table has no range.
    noise_us: float = math.nan

    def at(self, level: str) -> float:
        """The forecast of a level; before compilation where there is no other."""
        return self.forecast_us if level == BEFORE or self.code_us is None else self.code_us

    def error(self, level: str = BEFORE) -> float:
        """Forecast over measured, less 1."""
        return self.at(level) / self.measured_us - 1.0


@dataclass(frozen=True, slots=True)
class GemmShape:
    """All variants of one problem."""

    gemm: Gemm
    rows: tuple[GemmRow, ...]

    def summary(self, level: str = BEFORE) -> ErrorSummary:
        """Errors of its variants."""
        return summarise(row.error(level) for row in self.rows)

    def tau(self, level: str = BEFORE) -> float:
        """Kendall's rank correlation of forecast and measured times."""
        return rank_correlation([row.at(level) for row in self.rows], [row.measured_us for row in self.rows])

    def tau_beyond_noise(self, level: str = BEFORE) -> float:
        """The same of pairs that differ by more than twice the standard deviation of their difference; nan where that is not known."""
        if not self._noise:
            return math.nan
        return rank_correlation(
            [row.at(level) for row in self.rows], [row.measured_us for row in self.rows], self._noise
        )

    def tau_repeated(self) -> float:
        """What the same measurements would reach were they repeated in the same run; nan where their noise is not known."""
        return repeated_rank_correlation([row.measured_us for row in self.rows], self._noise) if self._noise else math.nan  # fmt: skip

    @property
    def _noise(self) -> list[float]:
        """Of every row; of none where one has no range or there is nothing to compare."""
        found = [row.noise_us for row in self.rows]
        return found if len(found) > 1 and not any(map(math.isnan, found)) else []

    def first_pick(self, level: str = BEFORE) -> float:
        """How far the variant forecast to be fastest is behind the fastest."""
        pick = min(self.rows, key=lambda row: row.at(level))
        return pick.measured_us / min(row.measured_us for row in self.rows) - 1.0

    def buffer_gains(self, level: str = BEFORE) -> list[tuple[GemmVariant, float, float]]:
        """(variant, forecast gain, measured gain) of the second accumulator, all other knobs alike."""
        known = {row.variant: row for row in self.rows}
        pairs = [(row, known.get(replace(v, accumulators=1))) for v, row in known.items() if v.accumulators == 2]
        return [
            (two.variant, one.at(level) / two.at(level), one.measured_us / two.measured_us)
            for two, one in pairs
            if one is not None
        ]


@lru_cache(maxsize=4)
def kept_codes(path: Path = CODES) -> Mapping[str, KernelRoles]:
    """Machine code of measured kernels, by `code_name`; CodeError for a file that is something else, none where there is no file."""
    return read_roles(path) if path.is_file() else {}


def code_name(wide: str, variant: GemmVariant) -> str:
    """What the code of a kernel is kept under, whose name is of before there were two ways of first copies."""
    return f"{wide} {gemm_variant_text(variant).removesuffix(f',early={variant.early}')}"


def run_gemm(
    table: Path = TABLE, machine: str | None = None, every: int = 1, progress: Progress = silent
) -> list[GemmShape]:
    """Every ``every``-th row of the table by shape; VariantError for a table that is something else."""
    header, raw = numbered_rows(table, "the measured kernels", VariantError)
    if not raw or any(name not in header for name in _COLUMNS):
        raise VariantError(f"{table}: not a table of GEMM kernels: expected the columns {', '.join(_COLUMNS)}")
    check_whole(table, raw, VariantError)
    chip = load_machine(machine or _machine_of(raw[0][1].get("gpu", "")))
    shapes: dict[Gemm, list[GemmRow]] = {}
    kept = [(number, row) for number, row in raw if row["variant"]][::every]
    for number, row in reported(kept, "forecast", len(kept), progress):
        found = _row(row, chip, f"{table}: line {number}")
        shapes.setdefault(found.gemm, []).append(found)
    return [GemmShape(gemm, tuple(rows)) for gemm, rows in shapes.items()]


def _machine_of(gpu: str) -> str:
    return next((name for part, name in _MACHINES if part in gpu), "h200-sxm")


def _row(row: dict[str, str], chip: Machine, where: str) -> GemmRow:
    try:
        wide = row["c_dtype"]
        gemm = Gemm(
            whole_in(row, "m"), whole_in(row, "n"), whole_in(row, "k"), c_dtype=wide, d_dtype=wide,
            in_place=row["in_place"] == "1",
        )  # fmt: skip
        family = row["variant"].partition(",")[0].removeprefix("family=")
        # Tables that do not say so are of kernels that order their first copies in the warp that copies.
        variant, us = parse_gemm_variant(row["variant"], GemmVariant(family, early=0)), number_in(row, "us") - EMPTY_US
        told = float(row.get("effective_mhz") or 0.0)
        low, high = (float(row.get(name) or "nan") for name in ("low_us", "high_us"))
    except ValueError as error:
        raise VariantError(f"{where}: {error}") from None
    if us <= 0.0:
        raise VariantError(f"{where}: us: expected more than the {EMPTY_US} us of an empty kernel, got {row['us']}")
    verdict = legality(variant, gemm, chip)
    if not verdict.legal:
        raise PredictError(f"{where}: {verdict.sentence()}")
    clock: str | float = told or "short"
    kernel = kept_codes().get(code_name(wide, variant))
    code = code_cycles(kernel, variant, chip) if kernel is not None else None
    levels = [evaluate_gemm(gemm, variant, chip, clock, cycles) for cycles in (None, *([code] if code else []))]
    before, *compiled = ((run.seconds - run.launch_seconds) * 1e6 for run in levels)
    # Of a table without a range max keeps nan, which is first.
    noise = max(median_noise(low, high, _ROUNDS), _ROUNDED_US)
    return GemmRow(gemm, variant, us, before, compiled[0] if compiled else None, noise)


def report_text(shapes: list[GemmShape]) -> str:
    """What each level is off by, and one line a problem."""
    rows = [row for shape in shapes for row in shape.rows]
    levels = [level for level in (COMPILED, BEFORE) if level == BEFORE or any(row.code_us is not None for row in rows)]
    lines = [
        f"{len(rows)} kernels on {len(shapes)} problems, launch left out",
        "",
        "                     kernels   mean  median    p90    bias    tau  first pick behind the fastest",
    ]
    for level in levels:
        told = [row for row in rows if level == BEFORE or row.code_us is not None]
        s = summarise(row.error(level) for row in told)
        picks = [shape.first_pick(level) for shape in shapes]
        tau = statistics.mean(shape.tau(level) for shape in shapes)
        lines.append(
            f"{level:<20} {s.count:7} {s.mean:6.1%} {s.median:7.1%} {s.p90:6.1%} {s.bias:+7.1%} {tau:6.2f}  {statistics.median(picks):.1%} in the median, {max(picks):.1%} at most"
        )
    repeated = _mean(shape.tau_repeated() for shape in shapes)
    if not math.isnan(repeated):
        beyond = ", ".join(
            f"{level} {_mean(shape.tau_beyond_noise(level) for shape in shapes):.2f}" for level in levels
        )
        lines += [
            "",
            f"tau of the measurements with themselves, drawn again with the noise of their medians: {repeated:.2f}",
            f"tau of pairs that differ by more than twice that noise: {beyond}",
        ]
    lines += [
        "",
        f"    m     n     k  C       kernels   mean    bias   tau  of itself  first pick  second accumulator, forecast / measured   ({levels[0]})",
    ]
    for shape in shapes:
        g, s = shape.gemm, shape.summary(levels[0])
        lines.append(
            f"{g.m:5} {g.n:5} {g.k:5}  {g.c_dtype:<5} {s.count:9} {s.mean:6.1%} {s.bias:+7.1%} {shape.tau(levels[0]):5.2f} {_or_dash(shape.tau_repeated()):>10} {shape.first_pick(levels[0]):+11.1%}  {_best_gain(shape, levels[0])}".rstrip()
        )
    return "\n".join(lines)


def _mean(found: Iterable[float]) -> float:
    """Of those that are numbers; nan where none is."""
    numbers = [one for one in found if not math.isnan(one)]
    return statistics.fmean(numbers) if numbers else math.nan


def _or_dash(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:.2f}"


def _best_gain(shape: GemmShape, level: str) -> str:
    """Gain of the second accumulator of the fastest kernel that has a twin with one."""
    gains = {v: (forecast, measured) for v, forecast, measured in shape.buffer_gains(level)}
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
                "gemm": shape.gemm.as_dict(), "kernels": len(shape.rows), "mean": shape.summary().mean, "bias": shape.summary().bias,
                "tau": shape.tau(), "first_pick": shape.first_pick(),
                "code_mean": shape.summary(COMPILED).mean, "code_tau": shape.tau(COMPILED),
                "tau_repeated": None if math.isnan(shape.tau_repeated()) else shape.tau_repeated(),
                "rows": [
                    {"variant": gemm_variant_text(row.variant), "measured_us": row.measured_us, "forecast_us": row.forecast_us, "code_us": row.code_us}
                    for row in shape.rows
                ],
            }
            for shape in shapes
        ]
    }  # fmt: skip
