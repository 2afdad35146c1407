"""Published measurements as typed points: which machine, which kernel, which convention, or why not usable."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tilecast.base.csv_file import Row, check_whole, numbered_rows, read_rows
from tilecast.base.data import PUBLISHED
from tilecast.model.kernel.workload import Workload, WorkloadError

_FOLDER = PUBLISHED

#: Beginning of the csv's gpu column -> machine file; order matters.
_MACHINES = (
    ("GB300", "gb300"),
    ("GB200", "gb200"),
    ("B300", "b300"),
    ("B200", "b200"),
    ("H200", "h200-sxm"),
    ("H100 PCIe", ""),
    ("H100", "h100-sxm"),
)
#: That of FlashAttention-2's own kernels, which multiply by mma.sync on every GPU; those that Triton compiles are of the same class.
MMA_SYNC_FAMILY = "fa2"
#: csv kernel -> family predicted with its published variant; kernels not listed are closed.
_FAMILIES = {"fa2": MMA_SYNC_FAMILY, "pytorch-sdpa-flash(fa2)": MMA_SYNC_FAMILY, "fa3": "fa3", "fa4": "own"}
#: The family of FlashAttention-4's kernel for Hopper: the class is FlashAttention-3's, what it ships is its own.
FA4_ON_HOPPER = "fa3 by fa4"


#: cudnn-frontend artifacts whose causal rows halve S^2: time x throughput says so, their note says S (S + 1) / 2.
_HALVED = ("f937055efc", "9793df569c", "0b1577c8c8")
#: Text of kernel_version -> emulated share; freq 16 from fragment 1 is 12.5 %, freq 8 is 25 %.
_SHARES = (
    ("emulation OFF", 0.0),
    ("no exp2 emulation", 0.0),
    ("32 of 128 exp2 on FMA", 0.25),
    ("ex2_emu_freq=16", 0.125),
    ("ex2_emu_freq=8", 0.25),
)


@dataclass(frozen=True, slots=True)
class PublishedPoint:
    """One measured forward row; ``family`` is "" for closed kernels."""

    row: int
    machine: str
    gpu_as_written: str
    kernel: str
    version: str
    family: str
    dtype_as_written: str
    workload: Workload
    tflops: float
    #: Share of emulated exponentials where the source states it.
    emulated_share: float | None
    #: "fa" (causal halves) or "exact" (unmasked entries), and the FLOP it implies.
    convention: str
    flop: float
    #: A clock the source says was locked; None when it ran free.
    clock_mhz: float | None
    #: Power limit of the board where the source states it; None: the machine file's.
    board_power_w: float | None
    source: str

    @property
    def shape(self) -> tuple[object, ...]:
        """What makes rows comparable: machine, dtype as written (mxfp8 is not fp8) and the problem."""
        return (self.machine, self.dtype_class, self.workload)

    @property
    def dtype_class(self) -> str:
        """bf16 and fp16 are one class; fp8 and mxfp8 are two."""
        return "16 bit" if self.dtype_as_written in ("bf16", "fp16", "fp16/bf16") else self.dtype_as_written


@dataclass(frozen=True, slots=True)
class Excluded:
    """A forward row that cannot be predicted, and why."""

    row: int
    reason: str


@dataclass(frozen=True, slots=True)
class CyclePoint:
    """A row in cycles, free of the clock; shares are percent, None where not published."""

    machine: str
    kernel: str
    dtype: str
    head_dim: int
    mask: str
    emulated_share: float
    cycles: float
    shares: dict[str, float]
    source: str


class PublishedError(ValueError):
    """A file that is not a table of published points; the message says what is missing."""


#: What a row says, as in data/published/points.csv, which also has `_POWER`.
COLUMNS = (
    "source", "source_ref", "gpu", "kernel", "kernel_version", "dtype", "pass", "causal", "batch", "heads_q", "heads_kv",
    "seqlen_q", "seqlen_k", "head_dim_qk", "head_dim_v", "time_ms", "tflops", "precision_note",
)  # fmt: skip


#: Column that a table may lack.
_POWER = "board_power_w"


def _machine(gpu: str) -> str:
    return next((name for start, name in _MACHINES if gpu.startswith(start)), "")


def _convention(note: str, source_ref: str) -> str:
    """cudnn-frontend's tables count unmasked entries and say so; everything else halves causal work."""
    if source_ref.rpartition("@")[2] in _HALVED:
        return "fa"
    return "exact" if "nnz=S(S+1)/2" in note else "fa"


def _emulated_share(version: str) -> float | None:
    """Share of exponentials on the FMA pipe where the source states it (FA4C); None: the kernel's own."""
    return next((share for text, share in _SHARES if text in version), None)


def _locked_clock(row: dict[str, str]) -> float | None:
    """Clocks the sources locked: PR #2605's GB300 rows (1965 set, 1957 effective) and B200 rows, and PR #488's NCU runs (845).

    PR #2605 says that clocks were locked; for its B200 (driver 580.159.03, CUDA 13.1, torch 2.11.0a0+eb65b36914) the value is from the same
    author's issue #2569, a fortnight before with the same driver, CUDA and torch build: 1755.
    """
    if "#2605" in row["source_ref"]:
        return 1957.0 if row["gpu"].startswith("GB300") else 1755.0
    if "#488" in row["source_ref"]:
        return 845.0
    return None


def load_points(path: Path | None = None) -> tuple[list[PublishedPoint], list[Excluded]]:
    """All forward rows of a table of published points (default: ours): usable ones, and the others with their reasons.

    PublishedError for a file that is not such a table.
    """
    points: list[PublishedPoint] = []
    excluded: list[Excluded] = []
    for number, row in pass_rows(path or _FOLDER / "points.csv", "fwd"):
        made = _point(number, row)
        if isinstance(made, Excluded):
            excluded.append(made)
        else:
            points.append(made)
    return points, excluded


def pass_rows(path: Path, direction: str) -> list[tuple[int, Row]]:
    """(line, row) of every row of a table that is of one pass, "fwd" or "bwd"."""
    return [(number, row) for number, row in _table(path) if row["pass"] == direction]


def machine_of(gpu: str) -> str:
    """The machine file of a GPU as sources write it; "" where there is none."""
    return _machine(gpu)


def unmasked_entries(row: dict[str, str]) -> bool:
    """Whether a row counts the FLOP of unmasked entries; others halve causal work."""
    return _convention(row["precision_note"], row["source_ref"]) == "exact"


def row_workload(number: int, row: dict[str, str]) -> Workload | Excluded:
    """The problem of a row, or why there is none."""
    missing = [name for name in ("batch", "heads_q", "heads_kv", "causal") if not row[name]]
    if missing:
        return Excluded(number, f"the source does not give {', '.join(missing)}")
    dtype = {"mxfp8": "fp8", "fp16/bf16": "bf16"}.get(row["dtype"], row["dtype"])
    try:
        return Workload(
            int(row["batch"]), int(row["heads_q"]), int(row["heads_kv"]), int(row["seqlen_q"]), int(row["seqlen_k"]),
            int(row["head_dim_qk"]), int(row["head_dim_v"]), "causal" if row["causal"] == "1" else "none", None, dtype,
        )  # fmt: skip
    except (ValueError, WorkloadError) as error:
        return Excluded(number, f"not a workload: {error}")


def _table(path: Path) -> list[tuple[int, Row]]:
    """(line, row) of a csv file with the columns of our table, in any order; more columns do no harm."""
    header, rows = numbered_rows(path, "the points", PublishedError)
    missing = [name for name in COLUMNS if not rows or name not in header]
    if missing:
        found = "no rows" if not rows else f"no column {', '.join(missing)}"
        raise PublishedError(f"{path}: not a table of published points: expected {', '.join(COLUMNS)}; got {found}")
    check_whole(path, rows, PublishedError)
    return rows


def _point(number: int, row: dict[str, str]) -> PublishedPoint | Excluded:
    machine = _machine(row["gpu"])
    if not machine:
        return Excluded(number, f"no machine file for '{row['gpu']}'")
    workload = row_workload(number, row)
    if isinstance(workload, Excluded):
        return workload
    convention = _convention(row["precision_note"], row["source_ref"])
    flop = workload.flops_exact if convention == "exact" else workload.flops
    try:
        tflops = float(row["tflops"]) if row["tflops"] else flop / float(row["time_ms"] or "nan") / 1e9
    except (ValueError, ZeroDivisionError):
        return Excluded(number, "time or throughput is not a number above 0")
    if math.isnan(tflops):
        return Excluded(number, "neither time nor throughput")
    power = row.get(_POWER, "")
    try:
        watts = float(power) if power else None
    except ValueError:
        return Excluded(number, f"{_POWER} takes watts or nothing, got '{power}'")
    family = _FAMILIES.get(row["kernel"], "")
    if family == "own":
        family = FA4_ON_HOPPER if machine in ("h100-sxm", "h200-sxm") else "fa4"
    return PublishedPoint(
        number, machine, row["gpu"], row["kernel"], row["kernel_version"], family, row["dtype"], workload, tflops,
        _emulated_share(row["kernel_version"]), convention, flop, _locked_clock(row), watts,
        f"{row['source']}: {row['source_ref']}",
    )  # fmt: skip


def load_cycles() -> list[CyclePoint]:
    """The cycle-level rows (NCU unit shares and fixed-clock runs)."""
    out = []
    for row in read_rows(_FOLDER / "cycles.csv", "the cycles", PublishedError):
        shares = {
            name: float(row[f"{name}_pct"]) for name in ("tensor", "xu", "fma", "alu", "issue") if row[f"{name}_pct"]
        }
        out.append(
            CyclePoint(row["machine"], row["kernel"], row["dtype"], int(row["head_dim"]), row["mask"],
                       float(row["emulated_share"]), float(row["cycles_per_128x128_tile"]), shares, row["source"])
        )  # fmt: skip
    return out


def reasons(excluded: list[Excluded]) -> dict[str, int]:
    """How many rows each reason excludes."""
    return dict(Counter(e.reason for e in excluded).most_common())


def best_per_shape(points: list[PublishedPoint]) -> list[PublishedPoint]:
    """The fastest kernel of every shape."""
    best: dict[tuple[object, ...], PublishedPoint] = {}
    for point in points:
        held = best.get(point.shape)
        if held is None or point.tflops > held.tflops:
            best[point.shape] = point
    return list(best.values())
