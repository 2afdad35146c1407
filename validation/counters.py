"""`tilecast validate counters`: what the model says each unit does, beside hardware counters, kernel by kernel."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from tilecast.base.csv_file import read_rows
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
    raw = read_rows(table, "the counters", CodeError)
    profiles = read_profiles(codes)
    if not raw or "counter" not in raw[0]:
        raise CodeError(
            f"{table}: not a table of counters: expected the columns kernel, variant, ..., counter, metric, value"
        )
    kernels: dict[tuple[str, str, Workload, str], dict[str, float]] = {}
    for row in raw:
        mask = row["mask"]
        window = (int(row["window_left"]), int(row["window_right"])) if mask == "window" else None
        work = Workload(
            int(row["batch"]), int(row["heads_q"]), int(row["heads_kv"]), int(row["seqlen_q"]), int(row["seqlen_k"]),
            int(row["head_dim_qk"]), int(row["head_dim_v"]), mask, window, row["dtype"],
        )  # fmt: skip
        kernels.setdefault((row["kernel"], row["variant"], work, row["machine"]), {})[row["counter"]] = float(
            row["value"]
        )
    found = []
    steps = reported(kernels.items(), "forecast", len(kernels), progress)
    for (kernel, variant, work, machine), counters in steps:
        code = profiles.get((kernel, variant, work.head_dim_qk, work.head_dim_v, work.mask, work.dtype))
        if code is not None:
            found.append(_row(code, work, machine, counters))
    return found


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
