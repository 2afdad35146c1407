"""Forecasts of backward passes against those timed on an H200, whole and loop by loop; no constant was fitted on them.

A row is forecast at the SM clock sampled while it ran (what NVML reports, of which an SM executes `power.tensor_clock_share` under
matrix work).  Loops alone are those of the portable passes; kernels that spill, which no forecast before compilation knows, and
variants that the class refuses by now are counted, not compared, and so are sums in any order and products that ran ahead.  Passes of the Hopper classes are forecast from machine code as
well: that of today's templates, by the Triton with which they were measured (`backward_code`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from tilecast.base.csv_file import read_rows
from tilecast.base.data import MEASURED
from tilecast.base.progress import Progress, silent
from tilecast.model.backward import (
    TRITON_BACKWARD,
    BackwardVariant,
    build_backward,
    family_of,
    named_in,
    parse_backward,
)
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.model.training.evaluate import evaluate_backward
from tilecast.model.training.launch import run_loop
from tilecast.validation.measured.backward_code import RecordedLoops, recorded_loops
from tilecast.validation.published.points import machine_of
from tilecast.validation.statistics import (
    ErrorSummary,
    grouped,
    median_noise,
    rank_correlation,
    repeated_rank_correlation,
    summarise,
)

PASSES, LOOPS = MEASURED / "h200_backward_kernels.csv", MEASURED / "h200_backward_sweep.csv"
#: The same passes on an H100.
H100_PASSES = MEASURED / "h100_backward_kernels.csv"
COLUMNS = ("head_dim", "head_dim_v", "mask", "batch", "heads", "seqlen", "kernel", "knobs", "ms", "ms_low", "ms_high", "spilled", "sm_clock_mhz", "note", "gpu", "date", "driver")  # fmt: skip
#: What tells one shape's rows from the next one's.
_SHAPE = ("date", "head_dim", "head_dim_v", "mask", "batch", "heads", "seqlen")
_LOOP_KERNELS = ("key_gradients", "value_gradients", "query_gradients")
#: Variants of a shape from which their order says something.
_LEAST_RANKED = 4
#: Rounds that a row is the median of, and the standard deviation of rounding to the tables' last digit.
_ROUNDS, _ROUNDED_MS = 7, 1e-4 / math.sqrt(12.0)


class BackwardTableError(ValueError):
    """A table that cannot be compared; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class BackwardRow:
    """One measured pass, or loop of one, and its forecast."""

    #: "pass" or "loop".
    kind: str
    name: str
    workload: Workload
    knobs: str
    clock_mhz: float
    measured_ms: float
    predicted_ms: float
    #: Number of the block of rows of one shape in the file, which were timed in turns.
    turn: int = 0
    #: The forecast from machine code; None where none is recorded.
    code_ms: float | None = None
    #: Standard deviation of the median measured, from the range of its rounds.
    noise_ms: float = 0.0

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_ms / self.measured_ms - 1.0


@dataclass(frozen=True, slots=True)
class BackwardReport:
    """All rows of both tables, and how many were left out for what reason."""

    machine: str
    rows: tuple[BackwardRow, ...]
    left_out: tuple[tuple[str, int], ...]

    def of(self, kind: str) -> ErrorSummary:
        """Errors of passes or of loops."""
        return summarise(row.error for row in self.rows if row.kind == kind)

    def coded(self) -> BackwardReport:
        """The passes that are forecast from machine code, with that forecast in place of the one before compilation."""
        found = (replace(row, predicted_ms=row.code_ms) for row in self.rows if row.code_ms is not None)
        return replace(self, rows=tuple(found), left_out=())

    def before(self) -> BackwardReport:
        """The same passes as `coded`, before compilation."""
        return replace(self, rows=tuple(row for row in self.rows if row.code_ms is not None), left_out=())

    def groups(self) -> dict[str, ErrorSummary]:
        """Errors by class or loop, and head dimension."""
        return grouped(
            self.rows, lambda row: f"{row.kind} {row.name}, head_dim {_dims(row.workload)}", lambda row: row.error
        )

    def tau(self, kind: str, in_turns: bool = False) -> float:
        """Mean rank correlation of the variants of one shape, over shapes with some; with ``in_turns`` only rows that were timed in
        turns are compared (runs of one kernel on different days differ by up to a tenth)."""
        return _mean(
            rank_correlation([r.predicted_ms for r in rows], [r.measured_ms for r in rows])
            for rows in self._ranked(kind, in_turns)
        )

    def tau_beyond_noise(self, kind: str) -> float:
        """The same in turns, of pairs that differ by more than twice the standard deviation of their difference."""
        return _mean(
            rank_correlation([r.predicted_ms for r in rows], [r.measured_ms for r in rows], [r.noise_ms for r in rows])
            for rows in self._ranked(kind, True)
        )

    def tau_repeated(self, kind: str) -> float:
        """What the same measurements would reach, in turns, were they repeated."""
        return _mean(
            repeated_rank_correlation([r.measured_ms for r in rows], [r.noise_ms for r in rows])
            for rows in self._ranked(kind, True)
        )

    def _ranked(self, kind: str, in_turns: bool) -> Iterator[list[BackwardRow]]:
        """Rows of each shape of which there are some."""

        def place(row: BackwardRow) -> tuple[str, int]:
            return _place(row), row.turn if in_turns else 0

        for _, rows in groupby(sorted((r for r in self.rows if r.kind == kind), key=place), key=place):
            listed = list(rows)
            if len(listed) >= _LEAST_RANKED:
                yield listed


def _mean(found: Iterable[float]) -> float:
    """Of those that are numbers; nan where none is."""
    numbers = [one for one in found if not math.isnan(one)]
    return sum(numbers) / len(numbers) if numbers else math.nan


def _dims(w: Workload) -> str:
    return f"{w.head_dim_qk}" if w.head_dim_qk == w.head_dim_v else f"{w.head_dim_qk}/{w.head_dim_v}"


def _place(row: BackwardRow) -> str:
    """What makes rows comparable: loops by name, passes of all classes together."""
    return f"{row.name if row.kind == 'loop' else ''} {row.workload.label()}"


def run_backward(
    passes: Path = PASSES, loops: Path = LOOPS, machine: str = "h200-sxm", progress: Progress = silent
) -> BackwardReport:
    """Forecast every row of both tables."""
    chip = load_machine(machine)
    recorded = recorded_loops(chip)
    rows: list[BackwardRow] = []
    left: dict[str, int] = {}
    tables = [("pass", row) for row in _read(passes)] + [("loop", row) for row in _read(loops)]
    turn = 0
    before: tuple[str, ...] = ()
    for done, (kind, row) in enumerate(tables):
        progress("forecast", done, len(tables), row["kernel"])
        shape: tuple[str, ...] = (kind, *(row[name] for name in _SHAPE), row["note"].partition(";")[2])
        turn, before = turn + (shape != before), shape
        found = _pass(row, chip, recorded) if kind == "pass" else _loop(row, chip)
        if isinstance(found, BackwardRow):
            rows.append(replace(found, turn=turn))
        elif found:
            left[found] = left.get(found, 0) + 1
    return BackwardReport(chip.name, tuple(rows), tuple(sorted(left.items())))


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """A whole pass of ours as measured: where, which, and the row of the table."""

    machine: str
    workload: Workload
    kernel: str
    date: str
    driver: str
    row: Mapping[str, str]


def fastest_passes(path: Path = PASSES) -> tuple[MeasuredPass, ...]:
    """Our fastest pass of every machine and shape; BackwardTableError for a file that is no such table."""
    best: dict[tuple[str, Workload], MeasuredPass] = {}
    for row in _read(path):
        if not row["ms"] or named_in(row["knobs"]) is None or _not_forecast(row):
            continue
        machine = machine_of(row["gpu"].removeprefix("NVIDIA "))
        found = MeasuredPass(machine, _workload(row), row["kernel"], row["date"], row["driver"], row)
        before = best.get((machine, found.workload))
        if machine and (before is None or float(row["ms"]) < float(before.row["ms"])):
            best[machine, found.workload] = found
    return tuple(best.values())


def forecast_pass(measured: MeasuredPass, machine: Machine) -> BackwardRow | str:
    """The row and its forecast; why there is none for a variant that is refused by now."""
    return _pass(measured.row, machine)


def _read(path: Path) -> list[dict[str, str]]:
    rows = read_rows(path, "the backward passes", BackwardTableError)
    missing = [name for name in COLUMNS if not rows or name not in rows[0]]
    if missing:
        raise BackwardTableError(f"{path}: not a table of backward passes: no column {', '.join(missing)}")
    return rows


def _workload(row: Mapping[str, str]) -> Workload:
    heads = int(row["heads"])
    kv = int(row["note"].partition(";")[2].split()[0]) if "key heads" in row["note"] else heads
    return Workload(
        int(row["batch"]),
        heads,
        kv,
        int(row["seqlen"]),
        int(row["seqlen"]),
        int(row["head_dim"]),
        int(row["head_dim_v"]),
        row["mask"],
    )


def _clock(row: Mapping[str, str], machine: Machine) -> float:
    """The clock executed; the top one where none was sampled."""
    seen = float(row["sm_clock_mhz"])
    return (machine["chip.clock_max_mhz"] if math.isnan(seen) else seen) * machine["power.tensor_clock_share"]


def measured_variants(machine: Machine, path: Path = PASSES) -> Iterator[tuple[Workload, BackwardVariant]]:
    """Shape and variant of every measured pass of ours that can still run."""
    for row in _read(path):
        variant = _variant(row)
        if variant is not None and family_of(variant).legality(variant, _workload(row), machine).legal:
            yield _workload(row), variant


def _not_forecast(row: Mapping[str, str]) -> str:
    """Passes that are not forecast, which a row is one of: programs added to dQ as they came, or products of `fa3_bwd_apart` ran into the
    next step, as they did until 2026-11-27; "" where it is."""
    if "any order" in row["note"]:
        return "passes with sums in any order"
    return "passes whose products ran ahead" if "products ahead" in row["note"] else ""


def _variant(row: Mapping[str, str]) -> BackwardVariant | None:
    """The variant of a measured pass; None for a kernel that is not ours."""
    named = named_in(row["knobs"])
    if named is None or not row["ms"]:
        return None
    return parse_backward(row["knobs"], named.variant())


def _pass(row: Mapping[str, str], machine: Machine, recorded: RecordedLoops | None = None) -> BackwardRow | str:
    """A whole pass; "" for a kernel that is not ours."""
    variant = _variant(row)
    if variant is None:
        return ""
    if why := _not_forecast(row):
        return why
    record, work, clock = family_of(variant), _workload(row), _clock(row, machine)
    if not record.legality(variant, work, machine).legal:
        return "passes of variants that are refused"
    seconds = evaluate_backward(work, machine, variant, clock).seconds
    noise = max(_ROUNDED_MS, median_noise(float(row["ms_low"]), float(row["ms_high"]), _ROUNDS))
    found = BackwardRow("pass", record.name, work, row["knobs"], clock, float(row["ms"]), seconds * 1e3, noise_ms=noise)
    loops = tuple(loop.name for loop in build_backward(work, variant, machine).loops)
    codes = recorded.codes(work, variant, loops) if recorded is not None else ()
    if not codes:
        return found
    return replace(found, code_ms=evaluate_backward(work, machine, variant, clock, codes).seconds * 1e3)


def _loop(row: dict[str, str], machine: Machine) -> BackwardRow | str:
    """One loop of a portable pass; "" for whole passes and other libraries'."""
    if row["kernel"] not in _LOOP_KERNELS or not row["ms"]:
        return ""
    work, clock = _workload(row), _clock(row, machine)
    loop = "dkv" if "dkv_" in row["knobs"] else "dq"
    # `loads` is the loop's own.
    text = ",".join(f"{loop}_{part}" if part.startswith("loads") else part for part in row["knobs"].split(","))
    variant = parse_backward(text, TRITON_BACKWARD.chosen(work, machine))
    if (
        not TRITON_BACKWARD.legality(variant, work, machine).legal
        or not TRITON_BACKWARD.writable(variant, work, machine).legal
    ):
        return "loops of variants that are refused"
    if float(row["spilled"] or 0):
        return "loops that spill"
    name = row["kernel"].replace("_", " ")
    kernel = next(one for one in build_backward(work, variant, machine).loops if one.name == name)
    run = run_loop(kernel, work, machine)
    seconds = max(run.cycles() / (clock * 1e6), run.chip.hbm_seconds) + machine["launch.kernel_us"] * 1e-6
    return BackwardRow("loop", name, work, row["knobs"], clock, float(row["ms"]), seconds * 1e3)


def worst(rows: Iterable[BackwardRow]) -> list[BackwardRow]:
    """Rows, the farthest off first."""
    return sorted(rows, key=lambda row: -abs(row.error))
