"""Results as a tidy table: one row an item, one value a cell, units in the column names."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilecast.base.html_table import html_table
from tilecast.explore.sweep.errors import SweepError
from tilecast.explore.sweep.summary import summary
from tilecast.model.kernel.workload import Workload
from tilecast.validation.lab.measure.records import shape_fields

#: Endings of files that `SweepTable.encoded` writes.
FORMATS = (".csv", ".json", ".parquet")
_FIRST = ("machine", "pass", "kernel", "mode", *shape_fields(Workload()), "asked_variant", "asked_clock", "status", "variant", "pipeline",
          "time_ms", "time_low_ms", "time_high_ms", "throughput_tflops", "throughput_low_tflops", "throughput_high_tflops",
          "clock_mhz", "clock_bound", "power_w", "binding_kind", "binding")  # fmt: skip
_LAST = ("reason", "outside_calibrated_range", "command", "key")
_RENAMED = {"tflops": "throughput_tflops", "tflops_low": "throughput_low_tflops", "tflops_high": "throughput_high_tflops",
            "ms": "time_ms", "ms_low": "time_low_ms", "ms_high": "time_high_ms", "cycles": "launch_cycles",
            "cycles_low": "launch_low_cycles", "cycles_high": "launch_high_cycles", "error": "relative_error"}  # fmt: skip
#: Fields of a result that say nothing a row needs.
_HIDDEN = ("busy", "lost", "role")


#: Columns and rows that a notebook shows: `SweepTable.to_pandas` has the others.
_SHOWN = ("machine", "pass", "kernel", "dtype", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim_qk", "mask",
          "asked_variant", "asked_clock", "status", "time_ms", "throughput_tflops", "binding_kind", "reason")  # fmt: skip
_MOST_SHOWN = 50


@dataclass(frozen=True, repr=False)
class SweepTable:
    """Rows in the order of the specification; a list of dictionaries in all but name."""

    rows: tuple[Mapping[str, Any], ...]
    #: Items that were asked for, were in the store already, and were computed now.
    items: int
    known: int
    computed: int
    seconds: float = 0.0
    left_out: tuple[str, ...] = ()
    title: str = ""
    columns: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = dict.fromkeys(name for row in self.rows for name in row)
        head, tail = ([name for name in some if name in names] for some in (_FIRST, _LAST))
        rest = [name for name in names if name not in head and name not in tail]
        object.__setattr__(self, "columns", (*head, *rest, *tail))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.rows[index]

    def count(self, status: str) -> int:
        """Rows of a status: "ok", "infeasible" or "failed"."""
        return sum(row["status"] == status for row in self.rows)

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame``; SweepError when pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise SweepError(f"tables need pandas ({error}): pip install 'tilecast[report]'") from None
        return pandas.DataFrame([dict(row) for row in self.rows], columns=list(self.columns))

    def text(self) -> str:
        """The summary for people."""
        return summary(self)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<SweepTable of {len(self.rows)} rows, {len(self.columns)} columns: {self.count('ok')} ok>"

    def _repr_html_(self) -> str:
        """The rows a notebook shows, by the columns that say what was asked and how fast it is."""
        names = [name for name in _SHOWN if name in self.columns]
        cells = [[_cell(row.get(name)) for name in names] for row in self.rows[:_MOST_SHOWN]]
        more = len(self.rows) - len(cells)
        title = self.title or f"{len(self.rows)} rows"
        return html_table(f"{title}, the first {len(cells)}" if more else title, names, cells)

    def encoded(self, ending: str) -> bytes:
        """The table as the content of a file with one of FORMATS; absent cells are empty (CSV) or null."""
        if ending == ".csv":
            memory = io.StringIO(newline="")
            writer = csv.DictWriter(memory, self.columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
            return memory.getvalue().encode()
        if ending == ".json":
            return (json.dumps([dict(row) for row in self.rows], indent=1, ensure_ascii=False) + "\n").encode()
        memory_bytes = io.BytesIO()
        try:
            self.to_pandas().to_parquet(memory_bytes, index=False)
        except ImportError as error:
            raise SweepError(f"Parquet needs pyarrow ({error}): pip install 'tilecast[report]'") from None
        return memory_bytes.getvalue()


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def table_row(item: Mapping[str, Any], result: Mapping[str, Any], key: str) -> dict[str, Any]:
    """One row from an item and its result."""
    busy = {f"busy_{unit}_share": share for unit, share in sorted(result.get("busy", {}).items())}
    plain = {_RENAMED.get(name, name): value for name, value in result.items() if name not in _HIDDEN}
    shape = shape_fields(Workload.from_dict(item["workload"]))
    if item["do"] == "measure":
        head = {"machine": item["machine"], **shape, "kernel": item["kernel"], "mode": item["mode"]}
        return {**head, "variant": item["variant"], **plain, "key": key}
    clock = item["clock"]
    head = {
        "machine": item["machine"], **({"pass": item["pass"]} if "pass" in item else {}), **shape, "asked_variant": item["variant"],
        # Text in every row, so that the column has one type: "1500" is a locked clock in MHz.
        "asked_clock": clock if isinstance(clock, str) else f"{clock:g}",
    }  # fmt: skip
    return {**head, **plain, **busy, "key": key}


def rows_of(texts: Sequence[tuple[str, str]], results: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows of the (key, item text) pairs that have a result, in order."""
    for key, text in texts:
        if key in results:
            yield table_row(json.loads(text), results[key], key)
