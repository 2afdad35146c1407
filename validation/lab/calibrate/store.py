"""The table of results: one tidy CSV, appended and flushed case by case, so that a crash loses nothing."""

from __future__ import annotations

import csv
import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tilecast.validation.lab.calibrate.cases import Reading, Value
from tilecast.validation.lab.calibrate.errors import CalibrateError

COLUMNS = (
    "group", "benchmark", "params", "quantity", "value", "unit", "low", "high", "repeats", "gpu", "driver", "clock_mhz",
    "date", "command", "source_sha",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One result: the median of its repeats, the lowest and highest, and where and how it was measured."""

    group: str
    benchmark: str
    params: str
    quantity: str
    value: float
    unit: str
    low: float
    high: float
    repeats: int
    gpu: str
    driver: str
    clock_mhz: float
    date: str
    command: str
    source_sha: str

    def parameters(self) -> dict[str, Value]:
        """The parameters as a dictionary."""
        return dict(json.loads(self.params))

    def key(self) -> tuple[str, ...]:
        """What makes a case the same case, whatever it found."""
        return (self.gpu, self.driver, self.group, self.benchmark, self.params, self.source_sha)


def params_text(params: Mapping[str, Value]) -> str:
    """Parameters as JSON with sorted keys: equal parameters give equal text."""
    return json.dumps(dict(params), sort_keys=True, separators=(",", ":"))


def rows_of(
    group: str, benchmark: str, params: Mapping[str, Value], readings: Mapping[str, Reading], *, gpu: str, driver: str,
    clock_mhz: float, date: str, command: str, source_sha: str,
) -> list[Row]:  # fmt: skip
    """One row for every quantity of a case."""
    text = params_text(params)
    return [
        Row(
            group, benchmark, text, name, statistics.median(r.samples), r.unit, min(r.samples), max(r.samples),
            len(r.samples), gpu, driver, clock_mhz, date, command, source_sha,
        )
        for name, r in readings.items()
    ]  # fmt: skip


def read_rows(path: str | Path) -> list[Row]:
    """All rows of a store, a torn last line left out; CalibrateError when it is not such a file."""
    where = Path(path)
    if not where.exists():
        return []
    with where.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames is None or tuple(reader.fieldnames) != COLUMNS:
            if reader.fieldnames is None:
                return []
            raise CalibrateError(f"{path}: not a calibrate table: expected columns {', '.join(COLUMNS)}")
        found = []
        for line in reader:
            if any(line[name] is None for name in COLUMNS):
                continue
            text = {name: line[name] for name in COLUMNS}
            found.append(
                Row(
                    text["group"], text["benchmark"], text["params"], text["quantity"], float(text["value"]), text["unit"],
                    float(text["low"]), float(text["high"]), int(text["repeats"]), text["gpu"], text["driver"],
                    float(text["clock_mhz"]), text["date"], text["command"], text["source_sha"],
                )
            )  # fmt: skip
    return found


def append_rows(path: str | Path, rows: list[Row]) -> None:
    """Append the rows of one case in one write, flushed to the disk."""
    where = Path(path)
    new = not where.exists() or where.stat().st_size == 0
    torn = not new and not where.read_bytes().endswith(b"\n")
    with where.open("a", newline="", encoding="utf-8") as file:
        if torn:  # a crash inside a line: what follows starts on its own
            file.write("\n")
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        writer.writerows([[_text(getattr(row, name)) for name in COLUMNS] for row in rows])
        file.flush()
        os.fsync(file.fileno())


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
