"""Run Nsight Compute over a list of kernels and keep one tidy row a kernel and counter."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tilecast.model.kernel.workload import Workload
from tilecast.validation.lab.measure.bench import Failure
from tilecast.validation.lab.measure.plan import Item, PlanError, item_to
from tilecast.validation.lab.measure.records import shape_fields

#: Counter -> names it has had; the first that the installed Nsight Compute knows is used.  Shares are in percent.
METRICS: dict[str, tuple[str, ...]] = {
    "cycles": ("sm__cycles_elapsed.max",),
    "active_cycles": ("sm__cycles_active.avg",),
    "tensor_percent": (
        "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    ),
    "tensor_cycles_percent": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",),
    "xu_percent": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",),
    "fma_percent": ("sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",),
    "alu_percent": ("sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",),
    "issue_percent": ("sm__inst_issued.avg.pct_of_peak_sustained_active", "sm__issue_active.avg.pct_of_peak_sustained_active"),
    "xu_instructions": ("sm__inst_executed_pipe_xu.sum",),
    "fma_instructions": ("sm__inst_executed_pipe_fma.sum",),
    "alu_instructions": ("sm__inst_executed_pipe_alu.sum",),
    "instructions": ("sm__inst_executed.sum",),
    "smem_percent": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_active",),
    "l2_bytes": ("lts__t_bytes.sum",),
    "dram_bytes": ("dram__bytes.sum",),
}  # fmt: skip
#: Failures without a single success after which it is not the kernels that are at fault.
_GIVE_UP = 3
COLUMNS = ("gpu", "machine", "ncu", "kernel", "variant", *shape_fields(Workload()), "counter", "metric", "value")


def known_metrics(ncu: str) -> set[str]:
    """Base names of the metrics this Nsight Compute can collect on the GPU here."""
    done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, check=False)
    return {line.split()[0] for line in done.stdout.splitlines() if line and not line[0].isspace()}


def choose(known: set[str]) -> dict[str, str]:
    """Counter -> metric to ask for; counters this tool does not know are left out."""
    chosen = {}
    for counter, names in METRICS.items():
        for name in names:
            if name.split(".")[0] in known:
                chosen[counter] = name
                break
    return chosen


def collect(items: list[Item], version: str) -> tuple[list[dict[str, object]], list[Failure]]:
    """(rows of `COLUMNS`, what failed) of the items; PlanError when Nsight Compute is missing or may not read counters.

    A kernel that takes its process down costs itself: those after it are counted in another process.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise PlanError("counters need Nsight Compute: put ncu on the PATH (it comes with the CUDA toolkit)")
    chosen, number = choose(known_metrics(ncu)), _version(ncu)
    rows: list[dict[str, object]] = []
    failures: list[Failure] = []
    left = list(items)
    while left:
        table, fates, words = _run(ncu, left, version, chosen)
        counted = [item for item, fate in zip(left, fates, strict=False) if not fate]
        ended_early = len(fates) < len(left)
        # There may be a row of the launch that took the process down.
        if len(table) != len(counted) and not (ended_early and len(table) == len(counted) + 1):
            raise PlanError(f"ncu reported {len(table)} kernels for {len(counted)} items: {words}")
        rows += [row for item, found in zip(counted, table, strict=False) for row in _rows(item, found, chosen, number)]
        failures += [Failure(item, fate) for item, fate in zip(left, fates, strict=False) if fate]
        left = left[len(fates) :]
        if left:
            failures.append(Failure(left.pop(0), f"its process ended: {words}", fatal=True))
        if left and not rows and len(failures) >= _GIVE_UP:
            raise PlanError(f"ncu counted none of {len(failures)} kernels: {failures[-1].reason}")
    return rows, failures


def _run(
    ncu: str, items: list[Item], version: str, chosen: dict[str, str]
) -> tuple[list[dict[str, str]], list[str], str]:
    """(rows of ncu, "" or why not for every item that its process got through, the process's last words)."""
    with tempfile.TemporaryDirectory() as folder:
        listing, fates = Path(folder) / "items.json", Path(folder) / "fates.jsonl"
        listing.write_text(json.dumps([item_to(item) for item in items]), encoding="utf-8")
        command = [
            ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--profile-from-start",
            "off", "--metrics", ",".join(sorted(set(chosen.values()))), sys.executable, "-m",
            "tilecast.validation.lab.counters.target", str(listing), str(fates), version,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        known = fates.read_text(encoding="utf-8").splitlines() if fates.exists() else []
    words = " ".join((done.stderr or done.stdout).split())[-300:]
    return parse(done.stdout), [json.loads(line) for line in known], words


def _version(ncu: str) -> str:
    done = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=False)
    return next((line.split()[1] for line in done.stdout.splitlines() if line.startswith("Version")), "")


def _rows(item: Item, found: dict[str, str], chosen: dict[str, str], ncu: str) -> list[dict[str, object]]:
    about = {"gpu": found.get("device__attribute_display_name", ""), "machine": item.machine, "ncu": ncu, "kernel": item.kernel,
             "variant": item.variant, **shape_fields(item.workload)}  # fmt: skip
    out: list[dict[str, object]] = []
    for counter, metric in chosen.items():
        text = found.get(metric, "").replace(",", "")
        if text and text.lower() != "n/a":
            out.append({**about, "counter": counter, "metric": metric, "value": float(text)})
    return out


def parse(text: str) -> list[dict[str, str]]:
    """Rows of Nsight Compute's raw CSV page, one a kernel, without its row of units.

    A launch may hold helper kernels of the library; only the attention kernels count.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    return [row for row in rows if row["ID"].strip() and "attention" in (row.get("Kernel Name") or "")]


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Write the table."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
