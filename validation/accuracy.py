"""Error of forecasts by GPU and dtype, for every forecast to quote: `python -m tilecast.validation.accuracy` writes it.

Two tables are summed up, each with the kernel that ran: published kernels of a class that tilecast knows, as their
authors ship them, at the short-run clock; and generated kernels as measured, at the clock they ran at.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from tilecast.base.data import MEASURED, MODEL_ERROR
from tilecast.base.files import write_text_atomically
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.families import parse_variant
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.machine.machine import load_machine
from tilecast.validation.lab.measure.records import read
from tilecast.validation.published.points import load_points
from tilecast.validation.published.run import EXAMPLES, default_predictor
from tilecast.validation.statistics import summarise

#: Kernels, machine, dtype class, signed error of the forecast throughput.
Checked = tuple[str, str, str, float]
_FEWEST = 5
COLUMNS = ("kernels", "machine", "dtype", "rows", "mean_percent", "p90_percent", "bias_percent")


def published() -> list[Checked]:
    """Forecasts of published kernels whose class is known."""
    out: list[Checked] = []
    for point in load_points()[0]:
        if not point.family or point.kernel in EXAMPLES or point.dtype_as_written == "mxfp8":
            continue
        try:
            answer = default_predictor(point, "short")
        except ValueError:
            continue
        error = point.flop / (answer.time_ms * 1e9) / point.tflops - 1.0
        out.append(("published kernels", point.machine, point.dtype_class, error))
    return out


def measured() -> list[Checked]:
    """Forecasts of generated kernels in the table of measurements."""
    out: list[Checked] = []
    for row in read(MEASURED / "h200_points.csv"):
        if not row.source_sha or row.mode != "short" or row.kernel == "file":
            continue
        work = row.workload()
        try:
            answer = predict(work, row.machine, parse_variant(row.variant), clock=row.effective_mhz, interval=False)
        except (PredictError, VariantError):
            continue
        error = row.cycles / (answer.time_ms * row.effective_mhz * 1e3) - 1.0
        out.append(("measured kernels", row.machine, "fp8" if work.dtype == "fp8" else "16 bit", error))
    return out


def table(checked: Iterable[Checked]) -> str:
    """CSV of every region with at least five rows."""
    regions: dict[tuple[str, str, str], list[float]] = {}
    for kernels, machine, dtype, error in checked:
        kind = f"any {load_machine(machine).tensor_kind}"
        for region in ((kernels, machine, dtype), (kernels, kind, dtype), (kernels, kind, "any")):
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
    write_text_atomically(MODEL_ERROR, table([*published(), *measured()]))
