"""Error of forecasts by GPU and dtype, for every forecast to quote: `python -m tilecast.validation.accuracy` writes it.

Published and measured kernels are summed up, each with the kernel that ran: the fastest published kernel of every shape among
those of a class that tilecast knows, as its authors ship it, at the short-run clock; and generated kernels as measured, in 16
bits on an H200 and in e4m3 on an H100, at the clock they ran at.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from tilecast.base.data import MEASURED, MODEL_ERROR
from tilecast.base.files import write_text_atomically
from tilecast.base.progress import Progress, silent
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.families import parse_variant
from tilecast.model.forecast.answer import BEFORE, COMPILED
from tilecast.model.forecast.checked_range import AT_HAND
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.validation.lab.measure.records import Measured, read
from tilecast.validation.measured.kept import AGAIN, as_written_now, kept_profiles
from tilecast.validation.measured.recorded import generated_runs, read_profiles
from tilecast.validation.measured.run import CODES, TABLE, forecast_rows
from tilecast.validation.published.points import best_per_shape, load_points
from tilecast.validation.published.run import EXAMPLES, default_predictor, fluid_predictor
from tilecast.validation.statistics import summarise

#: Kernels, level, machine, dtype class, signed error of the forecast throughput.
Checked = tuple[str, str, str, str, float]
_FEWEST = 5
#: Short runs of generated kernels: 16 bits, e4m3.
TABLES = (TABLE, MEASURED / "h100_fp8_points.csv")
COLUMNS = ("kernels", "level", "machine", "dtype", "rows", "mean_percent", "p90_percent", "bias_percent")


def published() -> list[Checked]:
    """Forecasts of the fastest published kernels whose class, or whose share of emulated exponentials, is known."""
    known = [p for p in load_points()[0] if p.kernel not in EXAMPLES and p.dtype_as_written != "mxfp8"]
    known = [p for p in known if p.family or p.emulated_share is not None]
    out: list[Checked] = []
    for point in best_per_shape(known):
        for predictor in (fluid_predictor, default_predictor):
            try:
                answer = predictor(point, "short")
            except ValueError:
                continue
            if predictor is fluid_predictor or answer.level == COMPILED:
                error = point.flop / (answer.time_ms * 1e9) / point.tflops - 1.0
                out.append(("published kernels", answer.level, point.machine, point.dtype_class, error))
    return out


def _runs() -> list[Measured]:
    """Rows of the tables of measurements that are compared."""
    return [row for table in TABLES for row in generated_runs(read(table))]


def measured() -> list[Checked]:
    """Forecasts of generated kernels in the tables of measurements."""
    out: list[Checked] = []
    for row in _runs():
        work = row.workload()
        try:
            answer = predict(
                work, row.machine, parse_variant(row.variant), clock=row.effective_mhz, interval=False, compiler=None
            )
        except (PredictError, VariantError):
            continue
        error = row.cycles / (answer.time_ms * row.effective_mhz * 1e3) - 1.0
        out.append(("measured kernels", BEFORE, row.machine, _dtype_class(work), error))
    return out


def followed(progress: Progress = silent) -> list[Checked]:
    """Forecasts of those in 16 bits from their own machine code; minutes of every core."""
    rows = forecast_rows(generated_runs(read(TABLE)), read_profiles(CODES), None, progress)
    return [
        ("measured kernels", COMPILED, row.point.machine, "16 bit", row.point.cycles / row.cycles[COMPILED] - 1.0)
        for row in rows
        if COMPILED in row.cycles
    ]


def at_hand(progress: Progress = silent) -> list[Checked]:
    """Forecasts of the same kernels from the loops at hand, of those that have one, against measurements of them as they are written now."""
    points = as_written_now(_runs(), read(AGAIN))
    rows = forecast_rows(points, kept_profiles(points, None), None, progress)
    return [
        (
            "measured kernels",
            AT_HAND,
            row.point.machine,
            _dtype_class(row.point.workload()),
            row.point.cycles / row.cycles[COMPILED] - 1.0,
        )
        for row in rows
        if COMPILED in row.cycles
    ]


def _dtype_class(work: Workload) -> str:
    return "fp8" if work.dtype == "fp8" else "16 bit"


def table(checked: Iterable[Checked]) -> str:
    """CSV of every region with at least five rows."""
    regions: dict[tuple[str, str, str, str], list[float]] = {}
    for kernels, level, machine, dtype, error in checked:
        kind = f"any {load_machine(machine).tensor_kind}"
        for region in ((kernels, level, machine, dtype), (kernels, level, kind, dtype), (kernels, level, kind, "any")):
            regions.setdefault(region, []).append(error)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for region in sorted(regions):
        found = summarise(regions[region])
        if found.count >= _FEWEST:
            writer.writerow((*region, found.count, *(f"{100 * x:.1f}" for x in (found.mean, found.p90, found.bias))))
    return text.getvalue()


if __name__ == "__main__":
    write_text_atomically(MODEL_ERROR, table([*published(), *measured(), *followed(), *at_hand()]))
