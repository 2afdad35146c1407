"""`tilecast validate counters`: what the model says each unit does, beside hardware counters, kernel by kernel."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from tilecast.base.csv_file import Row, check_whole, number_in, numbered_rows, whole_in
from tilecast.base.progress import Progress, reported, silent
from tilecast.model.compiled.code import CodeError, KernelCode
from tilecast.model.compiled.forecast import forecast
from tilecast.model.compiled.shares import executed
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.validation.measured.recorded import read_profiles
from tilecast.validation.measured.run import CODES as CODES
from tilecast.validation.measured.run import DATA

TABLE = DATA / "h200_counters.csv"
#: Unit -> counter that measures its busy share in percent of active cycles.
SHARES = {
    "tensor": "tensor_cycles_percent",
    "xu": "xu_percent",
    "issue": "issue_percent",
    "fma": "fma_percent",
    "alu": "alu_percent",
}
#: Columns of the table: the problem's sizes, named as in `Workload`, and all that are read.
_SIZES = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim_qk", "head_dim_v")
_COLUMNS = (
    "machine", "kernel", "variant", "dtype", *_SIZES, "mask", "window_left", "window_right", "counter", "value",
)  # fmt: skip
#: Counters that every kernel has: elapsed cycles, and those in which an SM holds warps.
_CLOCKS = ("cycles", "active_cycles")
#: Differences beyond this many points are a disagreement that names the unit.
POINTS = 5.0
#: SM clock of the profiler's runs, for what the model holds in seconds; the profiler leaves the clock alone.
_MHZ = 1755.0


@dataclass(frozen=True, slots=True)
class CounterRow:
    """One kernel: predicted and measured percent by unit, and bytes."""

    kernel: str
    variant: str
    workload: Workload
    predicted: dict[str, float]
    measured: dict[str, float]
    memory_gb: tuple[float, float]
    cycles: tuple[float, float]

    def differences(self) -> dict[str, float]:
        """Predicted minus measured, in points."""
        return {unit: self.predicted[unit] - self.measured[unit] for unit in self.measured}


def load(table: Path = TABLE, codes: Path = CODES, progress: Progress = silent) -> list[CounterRow]:
    """Rows of the table whose machine code is profiled; CodeError when files are missing or are something else."""
    header, raw = numbered_rows(table, "the counters", CodeError)
    profiles = read_profiles(codes)
    if not raw or any(name not in header for name in _COLUMNS):
        raise CodeError(f"{table}: not a table of counters: expected the columns {', '.join(_COLUMNS)}")
    check_whole(table, raw, CodeError)
    kernels: dict[tuple[str, str, Workload, str], dict[str, float]] = {}
    for line, row in raw:
        try:
            key, value = (row["kernel"], row["variant"], _workload(row), row["machine"]), number_in(row, "value")
        except ValueError as error:
            raise CodeError(f"{table}: line {line}: {error}") from None
        kernels.setdefault(key, {})[row["counter"]] = value
    found = []
    steps = reported(kernels.items(), "forecast", len(kernels), progress)
    for (kernel, variant, work, machine), counters in steps:
        code = profiles.get((kernel, variant, work.head_dim_qk, work.head_dim_v, work.mask, work.dtype))
        if code is None:
            continue
        if any(counters.get(name, 0.0) <= 0.0 for name in _CLOCKS):
            raise CodeError(f"{table}: {kernel} {variant}: expected the counters {' and '.join(_CLOCKS)}, each above 0")
        found.append(_row(code, work, machine, counters))
    return found


def _workload(row: Row) -> Workload:
    """The problem of a row; ValueError names the column that is wrong."""
    window = (whole_in(row, "window_left"), whole_in(row, "window_right")) if row["mask"] == "window" else None
    sizes = {name: whole_in(row, name) for name in _SIZES}
    return Workload(**sizes, mask=row["mask"], window=window, dtype=row["dtype"])


def _row(code: KernelCode, work: Workload, machine: str, counters: dict[str, float]) -> CounterRow:
    chip = load_machine(machine)
    answer = forecast(code, work, chip, _MHZ)
    # Counters are shares of the cycles in which an SM holds warps: launch and the last wave's idle SMs are not in them.
    active = (answer.cycles - answer.launch_cycles) * counters["active_cycles"] / counters["cycles"]
    shares = executed(code, work, chip).shares(chip, active)
    measured = {unit: counters[name] for unit, name in SHARES.items() if name in counters}
    return CounterRow(
        code.family, code.variant, work, {unit: 100 * share for unit, share in shares.items()}, measured,
        (answer.memory_bytes / 1e9, counters.get("dram_bytes", 0.0) / 1e9), (answer.cycles, counters["cycles"]),
    )  # fmt: skip


def report_dict(rows: list[CounterRow]) -> list[dict[str, object]]:
    """Keys documented in docs/json.md."""
    return [
        {"kernel": r.kernel, "variant": r.variant, "workload": r.workload.as_dict(), "predicted": r.predicted,
         "measured": r.measured, "memory_gb": r.memory_gb, "cycles": r.cycles}
        for r in rows
    ]  # fmt: skip


def report_text(rows: list[CounterRow], every: bool) -> str:
    """Summary by unit, then the disagreements (or every kernel), worst first."""
    units = [unit for unit in SHARES if all(unit in row.measured for row in rows)]
    lines = [
        f"{len(rows)} kernels, busy share of each unit in percent of active cycles: predicted (from machine code) minus measured",
        "", f"{'unit':<10}{'mean |diff|':>12}{'bias':>8}{'worst':>8}{f'within {POINTS:g} points':>20}",
    ]  # fmt: skip
    for unit in units:
        found = [row.differences()[unit] for row in rows]
        close = sum(abs(d) <= POINTS for d in found)
        lines.append(
            f"{unit:<10}{statistics.fmean(map(abs, found)):>12.1f}{statistics.fmean(found):>+8.1f}{max(found, key=abs):>+8.1f}"
            f"{f'{close} of {len(found)}':>20}"
        )
    three = [r for r in rows if all(abs(r.differences().get(u, 99.0)) <= POINTS for u in ("tensor", "xu", "issue"))]
    lines.append(f"tensor, xu and issue all within {POINTS:g} points: {len(three)} of {len(rows)} kernels")
    memory = [r.memory_gb[0] / r.memory_gb[1] - 1 for r in rows if r.memory_gb[1]]
    if memory:
        lines.append(
            f"bytes to and from memory: predicted over measured less one {statistics.fmean(memory):+.1%} on average, worst {max(memory, key=abs):+.1%}"
        )
    lines += [
        "",
        "Disagreements (unit, predicted, measured):" if not every else "Every kernel (unit, predicted, measured):",
    ]
    for row in sorted(rows, key=lambda r: -max(map(abs, r.differences().values()))):
        named = [
            f"{unit} {row.predicted[unit]:.0f} / {row.measured[unit]:.0f}"
            for unit in units
            if every or abs(row.differences()[unit]) > POINTS
        ]
        if named:
            lines.append(f"  {', '.join(named)}  {row.kernel} {row.variant} {row.workload.label()}")
    return "\n".join(lines)
