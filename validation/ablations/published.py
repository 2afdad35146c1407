"""Published ablations as typed cases, and their forecast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from tilecast.base.csv_file import Row, check_whole, numbered_rows
from tilecast.base.data import PUBLISHED
from tilecast.base.pool import spread
from tilecast.base.progress import Progress, reported, silent
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.families import parse_variant
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload, WorkloadError
from tilecast.model.machine.machine import Machine, MachineError, load_machine
from tilecast.validation.ablations.effects import Effect

TABLE = PUBLISHED / "ablations.csv"
COLUMNS = (
    "id", "gpu", "pass", "dtype", "head_dim", "mask", "shape", "from", "to", "ratio_low", "ratio_high", "source", "note",
    "quantity", "machine", "workload_dtype", "workload_mask", "batch", "heads_q", "heads_kv", "seqlen", "clock_mhz",
    "shape_is", "from_variant", "to_variant", "excluded",
)  # fmt: skip
#: Forecasts of a ratio: each side at the clock it settles at, and both at that of the side before.
FREE, ONE_CLOCK = "free clock", "one clock"
LEVELS = (FREE, ONE_CLOCK)


class AblationError(ValueError):
    """A table of published ablations that cannot be used: file, line, column, expected, got."""


@dataclass(frozen=True, slots=True)
class Line:
    """One shape of a case.  ``low`` and ``high`` are the published ratio of speed, to over from."""

    case: str
    gpu: str
    said_from: str
    said_to: str
    source: str
    note: str
    low: float
    high: float
    workload: Workload
    machine: str
    #: MHz the source locked the clock at; None where it ran free.
    clock_mhz: float | None
    #: Whether the source states the shape; else it is a common one of its benchmark.
    stated: bool
    variant_from: Variant
    variant_to: Variant


@dataclass(frozen=True, slots=True)
class Excluded:
    """A case without a forecast, and why."""

    case: str
    gpu: str
    said_from: str
    said_to: str
    reason: str
    source: str


@dataclass(frozen=True, slots=True)
class Case:
    """A published ablation: its lines, the ratios forecast for each, and its effect, the geometric mean over lines."""

    name: str
    lines: tuple[Line, ...]
    forecasts: tuple[dict[str, float], ...]
    effect: Effect


def load(path: Path = TABLE) -> tuple[list[Line], list[Excluded]]:
    """All lines of a table of published ablations, and the cases it excludes; AblationError for anything else."""
    lines: list[Line] = []
    excluded: list[Excluded] = []
    for number, row in _rows(path):
        if row["excluded"]:
            excluded.append(Excluded(row["id"], row["gpu"], row["from"], row["to"], row["excluded"], row["source"]))
        else:
            lines.append(_line(f"{path}: line {number}", row))
    return lines, excluded


def _rows(path: Path) -> list[tuple[int, Row]]:
    header, rows = numbered_rows(path, "the ablations", AblationError)
    if not rows or tuple(header) != COLUMNS:
        raise AblationError(
            f"{path}: not a table of published ablations: expected the columns {', '.join(COLUMNS[:4])}, ..."
        )
    check_whole(path, rows, AblationError)
    return rows


def _line(where: str, row: dict[str, str]) -> Line:
    low, high = (_number(where, name, row[name]) for name in ("ratio_low", "ratio_high"))
    if row["quantity"] not in ("speed", "time"):
        raise AblationError(f"{where}: column 'quantity': expected speed or time, got '{row['quantity']}'")
    if row["shape_is"] not in ("stated", "chosen"):
        raise AblationError(f"{where}: column 'shape_is': expected stated or chosen, got '{row['shape_is']}'")
    if row["quantity"] == "time":
        low, high = 1.0 / high, 1.0 / low
    if low > high:
        raise AblationError(f"{where}: column 'ratio_low': expected at most ratio_high, got {low:g} and {high:g}")
    if row["pass"] != "fwd":
        raise AblationError(f"{where}: column 'pass': expected fwd, or a reason in 'excluded', got '{row['pass']}'")
    head_dim, length = (_whole(where, name, row[name]) for name in ("head_dim", "seqlen"))
    batch, heads_q, heads_kv = (_whole(where, name, row[name]) for name in ("batch", "heads_q", "heads_kv"))
    try:
        work = Workload(
            batch,
            heads_q,
            heads_kv,
            length,
            length,
            head_dim,
            head_dim,
            row["workload_mask"],
            None,
            row["workload_dtype"],
        )
        load_machine(row["machine"])
        before, after = parse_variant(row["from_variant"]), parse_variant(row["to_variant"])
    except (WorkloadError, VariantError, MachineError) as error:
        raise AblationError(f"{where}: {error}") from None
    clock = _number(where, "clock_mhz", row["clock_mhz"]) if row["clock_mhz"] else None
    return Line(
        row["id"], row["gpu"], row["from"], row["to"], row["source"], row["note"], low, high, work, row["machine"], clock,
        row["shape_is"] == "stated", before, after,
    )  # fmt: skip


def _number(where: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise AblationError(f"{where}: column '{name}': expected a number above 0, got '{text}'")
    return value


def _whole(where: str, name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise AblationError(f"{where}: column '{name}': expected a whole number, got '{text}'") from None


def forecast_cases(lines: list[Line], regime: str = "short", progress: Progress = silent) -> tuple[Case, ...]:
    """The cases of ``lines`` in their order, forecast at the clock of ``regime`` ("short", "sustained").

    AblationError where a variant cannot run.
    """
    jobs = [(line, regime) for line in lines]
    ratios = list(reported(spread(_ratios, jobs, 1), "published", len(jobs), progress))
    grouped: dict[str, list[tuple[Line, dict[str, float]]]] = {}
    for line, found in zip(lines, ratios, strict=True):
        grouped.setdefault(line.case, []).append((line, found))
    return tuple(_case(name, members) for name, members in grouped.items())


def _case(name: str, members: list[tuple[Line, dict[str, float]]]) -> Case:
    lines = tuple(line for line, _ in members)
    forecasts = tuple(found for _, found in members)
    effect = Effect(
        geometric_mean(line.low for line in lines), geometric_mean(line.high for line in lines),
        {level: geometric_mean(found[level] for found in forecasts) for level in LEVELS},
    )  # fmt: skip
    return Case(name, lines, forecasts, effect)


def _ratios(job: tuple[Line, str]) -> dict[str, float]:
    line, regime = job
    machine = load_machine(line.machine)
    try:
        before, mhz = _seconds(line, machine, line.variant_from, regime)
        after, _ = _seconds(line, machine, line.variant_to, regime)
        fixed, _ = _seconds(line, machine, line.variant_to, mhz)
    except PredictError as error:
        raise AblationError(f"ablation {line.case}: {error}") from None
    return {FREE: before / after, ONE_CLOCK: before / fixed}


def _seconds(line: Line, machine: Machine, variant: Variant, clock: str | float) -> tuple[float, float]:
    """(seconds, MHz); a locked clock is a ceiling, the power limit still holds below it."""
    answer = predict(line.workload, machine, variant, clock=clock, interval=False, compiler=None)
    if line.clock_mhz is not None and answer.clock_mhz > line.clock_mhz:
        answer = predict(line.workload, machine, variant, clock=line.clock_mhz, interval=False, compiler=None)
    return answer.time_ms / 1e3, answer.clock_mhz
