"""What a sweep found, in a screenful of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Protocol

Row = Mapping[str, Any]
#: Lines of a list before it says how many more there are.
_MOST = 12
_SHAPE = ("dtype", "mask", "window_left", "window_right", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k",
          "head_dim_qk", "head_dim_v")  # fmt: skip


class Results(Protocol):
    """What there is to summarise: `table.SweepTable`, whose fields these are."""

    @property
    def rows(self) -> Sequence[Row]:
        """Of all items, in the order of the specification."""

    @property
    def columns(self) -> Sequence[str]:
        """Names of what rows have."""

    @property
    def title(self) -> str:
        """What was swept, in words."""

    @property
    def items(self) -> int:
        """How many were asked for."""

    @property
    def known(self) -> int:
        """How many of them the store had."""

    @property
    def computed(self) -> int:
        """How many were computed now."""

    @property
    def seconds(self) -> float:
        """How long that took."""

    @property
    def left_out(self) -> Sequence[str]:
        """What was not asked for, and why, in words."""

    def count(self, status: str) -> int:
        """Rows of a status: "ok", "infeasible" or "failed"."""


def summary(table: Results) -> str:
    """Counts; a line a machine; the best variant of each workload; why items were refused."""
    parts = [_head(table), *_machines(table), *_best(table), *_refused(table)]
    return "\n".join(part for part in parts if part is not None)


def _head(table: Results) -> str:
    ok, refused, failed = (table.count(status) for status in ("ok", "infeasible", "failed"))
    lines = [f"{table.title}" if table.title else "sweep"]
    rate = f" in {table.seconds:.1f} s ({table.computed / table.seconds:.0f}/s)" if table.computed else ""
    lines.append(f"  {table.items} items: {table.known} from the store, {table.computed} computed{rate}")
    rest = table.items - len(table.rows)
    lines.append(f"  {ok} ok, {refused} infeasible, {failed} failed" + (f", {rest} not computed yet" if rest else ""))
    return "\n".join(lines)


def _machines(table: Results) -> list[str]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in table.rows:
        if row["status"] == "ok":
            groups.setdefault((row["machine"], row.get("asked_clock", row.get("mode", ""))), []).append(row)
    if not groups:
        return []
    lines = []
    for (machine, clock), rows in groups.items():
        speeds = [row["throughput_tflops"] for row in rows]
        binds = Counter(_bound(row) for row in rows)
        what = ", ".join(f"{name} {count / len(rows):.0%}" for name, count in binds.most_common(4) if name)
        lines.append(
            [machine, clock, f"{len(rows)}", f"{min(speeds):.0f}", f"{median(speeds):.0f}", f"{max(speeds):.0f}", what]
        )
    header = ["machine", "clock" if "asked_clock" in table.columns else "mode", "items", "min", "median", "max TFLOP/s"]
    return ["", *_aligned([*header, "bound by" if any(line[-1] for line in lines) else ""], lines)]


def _bound(row: Row) -> str:
    """The unit, the memory, or that it is a recurrence (whose names differ from kernel to kernel)."""
    return "recurrence" if row.get("binding_kind") == "recurrence" else str(row.get("binding", ""))


def _best(table: Results) -> list[str]:
    """Per machine, clock and workload: the fastest of several variants; ties go to the earlier."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in table.rows:
        if row["status"] == "ok":
            who = (row["machine"], row.get("asked_clock", row.get("mode", "")))
            groups.setdefault((*who, *(row[name] for name in _SHAPE)), []).append(row)
    several = {group: rows for group, rows in groups.items() if len(rows) > 1}
    lines = []
    for group, rows in list(several.items())[:_MOST]:
        best = min(rows, key=lambda row: row["time_ms"])
        slowest = max(row["time_ms"] for row in rows)
        lines.append(
            [group[0], group[1], _shape(best), f"{best['time_ms']:.4g}", f"{best['throughput_tflops']:.0f}",
             f"{slowest / best['time_ms']:.2f}x", f"{len(rows)}", _knobs(best)]
        )  # fmt: skip
    if not lines:
        return []
    more = [f"  and {len(several) - _MOST} more workloads"] if len(several) > _MOST else []
    header = ["machine", "clock", "workload", "best ms", "TFLOP/s", "worst", "of", "variant"]
    return ["", *_aligned(header, lines), *more]


def _shape(row: Row) -> str:
    heads = f"{row['heads_q']}" if row["heads_q"] == row["heads_kv"] else f"{row['heads_q']}/{row['heads_kv']}"
    dim = row["head_dim_qk"]
    dims = f"{dim}" if dim == row["head_dim_v"] else f"{dim}/{row['head_dim_v']}"
    length = row["seqlen_q"]
    lengths = f"{length}" if length == row["seqlen_k"] else f"{length}x{row['seqlen_k']}"
    return f"{row['dtype']} {row['mask']} b{row['batch']} h{heads} s{lengths} d{dims}"


def _knobs(row: Row) -> str:
    """The kernel's name where the model has one, else its knobs."""
    text = str(row.get("pipeline") or f"{row.get('kernel', '')} {row['variant']}".strip())
    share = next((part for part in str(row["variant"]).split(",") if part.startswith("emulated_share=")), "")
    text = f"{text} {share}" if row.get("pipeline") and share and not share.endswith("=0") else text
    return text if len(text) <= 60 else text[:59] + "…"


def _refused(table: Results) -> list[str]:
    lines = []
    for status in ("infeasible", "failed"):
        reasons = Counter(_cause(row["reason"]) for row in table.rows if row["status"] == status)
        lines += [f"  {status} {count:>6} x  {reason}" for reason, count in reasons.most_common(5)]
        if len(reasons) > 5:
            lines.append(f"  {status}: {len(reasons) - 5} more reasons in the table")
    lines += [f"  left out: {text}" for text in table.left_out[:5]]
    if len(table.left_out) > 5:
        lines.append(f"  left out: {len(table.left_out) - 5} more")
    return ["", *lines] if lines else []


def _cause(reason: str) -> str:
    """The part of a refusal that does not name the shape, so that equal causes count together."""
    head, found, tail = reason.partition(": ")
    return tail if found and " cannot run " in head else reason


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns two spaces apart: numbers right, text left."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    numeric = [all(row[i].rstrip("x").replace(".", "", 1).isdigit() for row in rows) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        parts = (c.rjust(w) if right else c.ljust(w) for c, w, right in zip(cells, widths, numeric, strict=True))
        return "  " + "  ".join(parts).rstrip()

    return [line(header), *(line(row) for row in rows)]
