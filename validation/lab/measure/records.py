"""Measured points: one row each, appended to a tidy CSV as soon as it is known, and read back without torch.

A row is complete in itself: what ran (kernel, variant, shape), on what (GPU, driver, versions), how (mode, launches,
rounds, L2) and what came out (cycles, milliseconds, clocks, power), so that tables of several machines concatenate.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_type_hints

from tilecast.base.text_file import read_text
from tilecast.model.compiled.code import CodeKey
from tilecast.model.kernel.workload import Workload

MODES = ("short", "sustained")


class RecordError(ValueError):
    """A table of measurements that cannot be read or appended to: file, line, field, expected, got."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One kernel at one shape.  Cycles and milliseconds are per launch, back to back in one stream."""

    gpu: str
    machine: str
    date: str
    driver: str
    torch: str
    triton: str
    tilecast: str
    #: Kernel family ("hopper_ws", "triton"), or the name of a kernel that is not ours ("cudnn", "flash-attn-4").
    kernel: str
    #: Knobs as `--variant` takes them; the version for a kernel that is not ours.
    variant: str
    #: First 16 hex digits of SHA-256 of the kernel's source; "" for a kernel that is not ours.
    source_sha: str
    mode: str
    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim_qk: int
    head_dim_v: int
    mask: str
    window_left: int
    window_right: int
    #: What this shape is kept for: "build" (seen while the model was made) or "held-out".
    role: str
    #: Median over rounds of SM cycles per launch, with its 95 % interval.
    cycles: float
    cycles_low: float
    cycles_high: float
    ms: float
    ms_low: float
    ms_high: float
    #: SM cycles per second while it ran, from the cycle counter; what NVML said meanwhile (0: too short to sample).
    effective_mhz: float
    nvml_mhz: float
    power_w: float
    temperature_c: float
    throttle: str
    rounds: int
    launches_per_round: int
    #: Copies of the inputs the launches rotate through; 1 when one set exceeds L2 by itself.
    input_copies: int
    #: Relative error against float64 on sampled rows, ||out - ref|| / ||ref||.
    error: float
    command: str

    def code_key(self) -> CodeKey:
        """Key of the profile (`KernelCode.key`) of a generated kernel."""
        return (self.kernel, self.variant, self.head_dim_qk, self.head_dim_v, self.mask, self.dtype)

    def workload(self) -> Workload:
        """The shape as the model knows it."""
        window = (self.window_left, self.window_right) if self.mask == "window" else None
        return Workload(
            self.batch, self.heads_q, self.heads_kv, self.seqlen_q, self.seqlen_k, self.head_dim_qk, self.head_dim_v,
            self.mask, window, self.dtype,
        )  # fmt: skip

    def key(self) -> tuple[object, ...]:
        """What makes a point the same point: GPU, kernel, shape and mode; never when or with which driver."""
        return (self.gpu, self.kernel, self.variant, self.mode, self.workload())


_TYPES = get_type_hints(Measured)
COLUMNS = tuple(field.name for field in fields(Measured))
_DIGITS = {"cycles", "cycles_low", "cycles_high", "ms", "ms_low", "ms_high", "effective_mhz", "nvml_mhz", "power_w",
           "temperature_c", "error"}  # fmt: skip


def shape_fields(workload: Workload) -> dict[str, object]:
    """The columns that say what was computed."""
    left, right = workload.limits
    return {
        "dtype": workload.dtype, "batch": workload.batch, "heads_q": workload.heads_q, "heads_kv": workload.heads_kv,
        "seqlen_q": workload.seqlen_q, "seqlen_k": workload.seqlen_k, "head_dim_qk": workload.head_dim_qk,
        "head_dim_v": workload.head_dim_v, "mask": workload.mask, "window_left": left, "window_right": right,
    }  # fmt: skip


def append(path: Path, rows: Iterable[Measured]) -> None:
    """Add rows to the table and force them to disk; the header comes with the first.  RecordError on another table.

    A last line that a crash cut off goes: what follows it would be lost with it.
    """
    new = not path.exists() or path.stat().st_size == 0
    if not new:
        with path.open(newline="", encoding="utf-8") as file:
            header = tuple(next(csv.reader(file), ()))
        if header != COLUMNS:
            raise RecordError(
                f"{path}: not a table of measurements: expected the columns {', '.join(COLUMNS[:4])}, ..."
            )
        new = _drop_cut_line(path) == 0
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow([_cell(name, getattr(row, name)) for name in COLUMNS])
        file.flush()
        os.fsync(file.fileno())


def _drop_cut_line(path: Path) -> int:
    """Shorten the file to its whole lines; returns the bytes that remain."""
    with path.open("r+b") as file:
        return file.truncate(file.read().rfind(b"\n") + 1)


def _cell(name: str, value: object) -> object:
    return f"{value:.6g}" if name in _DIGITS else value


def read(path: Path) -> list[Measured]:
    """All rows of a table; a last line cut off by a crash is dropped, any other damage is a RecordError."""
    text = read_text(path, "the measurements", RecordError)
    # Not splitlines: a command may hold line breaks, and what Unicode takes for one.
    rows = list(csv.reader(io.StringIO(text, newline="")))
    if not rows or tuple(rows[0]) != COLUMNS:
        raise RecordError(f"{path}: not a table of measurements: expected the columns {', '.join(COLUMNS[:4])}, ...")
    out = []
    for number, cells in enumerate(rows[1:], start=2):
        if number == len(rows) and not text.endswith("\n"):
            break
        if len(cells) != len(COLUMNS):
            raise RecordError(f"{path}: line {number}: expected {len(COLUMNS)} fields, got {len(cells)}")
        out.append(_row(path, number, cells))
    return out


def _row(path: Path, number: int, cells: list[str]) -> Measured:
    values: dict[str, object] = {}
    for name, text in zip(COLUMNS, cells, strict=True):
        try:
            values[name] = _TYPES[name](text)
        except ValueError:
            kind = _TYPES[name].__name__
            raise RecordError(f"{path}: line {number}: field '{name}' takes {kind}, got '{text}'") from None
    return Measured(**values)  # type: ignore[arg-type]
