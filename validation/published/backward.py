"""Published backward passes: the fastest kernel of every shape, and what the best variant is forecast to take there.

Deterministic kernels, examples and 8-bit passes are left out.  FlashAttention-2 is forecast as the portable class, everything
else as the class built for the machine.  Lengths below 2048 are mostly start and launch: they are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tilecast.base.data import PUBLISHED
from tilecast.base.progress import Progress, silent
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.training.evaluate import FLOP_RATIO, evaluate_backward
from tilecast.model.training.forecast import best_backward
from tilecast.validation.published.points import Excluded, machine_of, pass_rows, row_workload, unmasked_entries
from tilecast.validation.published.run import EXAMPLES
from tilecast.validation.statistics import ErrorSummary, grouped, summarise

TABLES = (PUBLISHED / "points.csv", PUBLISHED / "backward_points.csv")
LEAST_LENGTH = 2048
_PORTABLE = ("fa2", "pytorch-sdpa-flash(fa2)")


@dataclass(frozen=True, slots=True)
class FastestBackward:
    """The fastest published backward pass of one shape on one machine."""

    machine: str
    workload: Workload
    kernel: str
    source: str
    measured_ms: float


@dataclass(frozen=True, slots=True)
class PublishedBackward:
    """The fastest published backward pass of one shape on one machine, and the forecast."""

    machine: str
    workload: Workload
    kernel: str
    source: str
    measured_ms: float
    predicted_ms: float
    variant: str

    @property
    def error(self) -> float:
        """Of the forecast TFLOP/s: predicted over measured, less 1."""
        return self.measured_ms / self.predicted_ms - 1.0

    @property
    def region(self) -> str:
        """Blackwell or Hopper."""
        return "Hopper" if self.machine.startswith("h") else "Blackwell"


def run_published_backward(clock: str = "short", progress: Progress = silent) -> tuple[PublishedBackward, ...]:
    """Forecast the fastest kernel of every shape at ``clock``."""
    fastest = fastest_published()
    found = []
    for done, row in enumerate(fastest):
        progress("published", done, len(fastest), f"{row.machine} {row.workload.label()}")
        found.append(forecast_published(row, clock))
    return tuple(found)


def forecast_published(row: FastestBackward, clock: str) -> PublishedBackward:
    """The best variant's forecast for a published row."""
    machine = load_machine(row.machine)
    family = "fa2_bwd" if row.kernel in _PORTABLE else None
    variant, _ = best_backward(row.workload, machine, family, clock, published=True)
    seconds = evaluate_backward(row.workload, machine, variant, clock).seconds
    return PublishedBackward(
        row.machine, row.workload, row.kernel, row.source, row.measured_ms, seconds * 1e3, variant.family
    )


@lru_cache(maxsize=1)
def fastest_published() -> tuple[FastestBackward, ...]:
    """The fastest row of every machine and shape."""
    best: dict[tuple[str, Workload], tuple[float, str, str]] = {}
    for path in TABLES:
        for number, row in pass_rows(path, "bwd"):
            kernel, machine = row["kernel"], machine_of(row["gpu"])
            if not machine or kernel.endswith("-det") or kernel.startswith((*EXAMPLES, "triton-")):
                continue
            work = row_workload(number, row)
            if isinstance(work, Excluded) or row["dtype"] not in ("bf16", "fp16", "fp16/bf16"):
                continue
            ms = _milliseconds(row, work)
            if min(work.seqlen_q, work.seqlen_k) < LEAST_LENGTH or ms is None:
                continue
            if ms < best.get((machine, work), (float("inf"), "", ""))[0]:
                best[machine, work] = (ms, kernel, f"{row['source']}: {row['source_ref']}")
    return tuple(
        FastestBackward(machine, work, kernel, source, ms) for (machine, work), (ms, kernel, source) in best.items()
    )


def _milliseconds(row: dict[str, str], work: Workload) -> float | None:
    """As printed, or from the throughput by the row's own way to count: 2.5 times the forward, or unmasked entries."""
    if row["time_ms"]:
        return float(row["time_ms"])
    if not row["tflops"]:
        return None
    flop = FLOP_RATIO * work.flops
    if unmasked_entries(row):
        flop = 2.0 * work.batch * work.heads_q * (3 * work.head_dim_qk + 2 * work.head_dim_v) * work.exact_pairs()
    return flop / float(row["tflops"]) / 1e9


def by_machine(rows: tuple[PublishedBackward, ...]) -> dict[str, ErrorSummary]:
    """Errors by machine, and of Blackwell and Hopper."""
    out = grouped(rows, lambda row: row.machine, lambda row: row.error)
    for region in ("Blackwell", "Hopper"):
        out[region] = summarise(row.error for row in rows if row.region == region)
    return out
