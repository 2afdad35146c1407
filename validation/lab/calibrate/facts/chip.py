"""Rules for the facts outside the SM: copy engine, L2, memory, launch."""

from __future__ import annotations

from functools import partial

from tilecast.validation.lab.calibrate.facts.rule import Found, Rule, Table, line, spread
from tilecast.validation.lab.calibrate.store import Row


def by_value(rows: list[Row]) -> list[Row]:
    """Highest first."""
    return sorted(rows, key=lambda row: -row.value)


def _tile_latencies(table: Table, source: str) -> list[Row]:
    return table.all("tma/load_latency", "latency_cycles", source=source)


def _tma_latency(table: Table, source: str) -> Found | None:
    """What a tile copy takes beside its bytes: the latency line at zero bytes; the range from its 10 and 90 % ends."""
    ends: list[float] = []
    for quantity in ("latency_cycles", "latency_p10_cycles", "latency_p90_cycles"):
        rows = table.all("tma/load_latency", quantity, source=source)
        points = [(float(str(table.params(row)["tile_bytes"])), row.value) for row in rows]
        if len({x for x, _ in points}) < 2:
            return None
        ends.append(line(points)[0])
    # The ends' lines may cross near zero.
    return Found(ends[0], min(ends), max(ends), tuple(_tile_latencies(table, source)), "extrapolated to no bytes")


def _tma_rate(table: Table) -> Found | None:
    """Bytes a clock that a growing tile adds, from L2; the upper end is one SM with four 32 KB boxes in flight."""
    rows = _tile_latencies(table, "l2")
    points = [(float(str(table.params(row)["tile_bytes"])), row.value) for row in rows]
    if len({x for x, _ in points}) < 2:
        return None
    rate = 1 / line(points)[1]
    flights = [
        row.value
        for row in table.all("tma/load_bandwidth", "bytes_per_clk", sms="one", source="l2_private", in_flight=(3, 4))
    ]
    return Found(rate, min([rate, *flights]), max([rate, *flights]), tuple(rows))


def _tma_issue(table: Table) -> Found | None:
    """A second box's share of the issue: the first also pays the barrier's expectation."""
    one = table.one("tma/load_latency", "issue_cycles", source="l2", boxes=1, tile_bytes=32768)
    two = table.one("tma/load_latency", "issue_cycles", source="l2", boxes=2, tile_bytes=32768)
    if one is None or two is None:
        return None
    step = two.value - one.value
    return Found(step, min(step, one.value), max(step, one.value), (one, two), "high: with the barrier's expectation")


def _store_rate(table: Table) -> Found | None:
    rows = table.all("tma/store_bandwidth", "bytes_per_clk", sms="one", source="l2_private")
    return spread(by_value(rows)) if rows else None


def _reduce_rate(table: Table) -> Found | None:
    rows = table.all("reduce/add_bandwidth", "bytes_per_clk", sms="one", in_flight=4)
    return spread(by_value(rows)) if rows else None


def _reduce_latency(table: Table) -> Found | None:
    """What an addition takes beside its bytes when the next one waits for it: the line at zero bytes."""
    rows = table.all("reduce/add_bandwidth", "cycles_per_tile", sms="one", in_flight=1, by="tensor")
    points = [(float(str(table.params(row)["box_bytes"])), row.value) for row in rows]
    if len({x for x, _ in points}) < 2:
        return None
    ends = [
        line([(x, getattr(row, end)) for (x, _), row in zip(points, rows, strict=True)])[0]
        for end in ("value", "low", "high")
    ]
    return Found(ends[0], min(ends), max(ends), tuple(rows), "extrapolated to no bytes")


def _reduce_tbps(table: Table) -> Found | None:
    rows = table.all("reduce/add_bandwidth", "chip_tbps", sms="all")
    return spread(by_value(rows)) if rows else None


def _walk(table: Table, source: str) -> Found | None:
    middle, low, high = (
        table.one("memory/latency", f"latency_{name}cycles", source=source) for name in ("", "p10_", "p90_")
    )
    if middle is None or low is None or high is None:
        return None
    return Found(middle.value, low.value, high.value, (middle,), "median, 10 and 90 % of all SMs' loads")


def _l2_rate(table: Table) -> Found | None:
    """All SMs streaming from L2, each its own data or all the same at different times: mean of loads and tile copies."""
    rows = [
        *table.all("memory/bandwidth", "bytes_per_clk", sms="all", source=("l2_private", "l2_shared")),
        *table.all("tma/load_bandwidth", "bytes_per_clk", sms="all", source=("l2_private", "l2_shared"), in_flight=4),
    ]
    if not rows:
        return None
    values = [row.value for row in rows]
    return Found(sum(values) / len(values), min(values), max(values), tuple(rows))


def _l2_lockstep(table: Table) -> Found | None:
    rows = table.all("tma/load_bandwidth", "bytes_per_clk", sms="all", source="l2_lockstep", in_flight=4)
    return spread(by_value(rows)) if rows else None


def _hbm(table: Table) -> Found | None:
    """The driver's copy, read and write counted; the range over the benchmark's own read and copy."""
    copy = table.one("memory/driver_copy", "chip_tbps")
    others = table.all("memory/bandwidth", "chip_tbps", sms="all", source="hbm")
    return spread([copy, *others]) if copy is not None else None


def _read_ratio(table: Table) -> Found | None:
    """All SMs reading by the copy engine, with two tiles and more in flight, over the driver's copy: the mean."""
    copy = table.one("memory/driver_copy", "chip_tbps")
    reads = table.all("tma/load_bandwidth", "chip_tbps", sms="all", source="hbm", in_flight=(2, 3, 4))
    if copy is None or not reads:
        return None
    ratios = [row.value / copy.value for row in reads]
    return Found(sum(ratios) / len(ratios), min(ratios), max(ratios), tuple(reads))


def _graph_kernel(table: Table) -> Found | None:
    rows = table.all("launch/graph_kernel", "kernel_us", ctas="one per SM")
    usual = [row for row in rows if table.params(row)["body_cycles"]]
    return spread([*usual, *rows], note="kernels back to back in a graph") if usual else None


def _turnaround(table: Table) -> Found | None:
    rows = table.all("launch/cta_turnaround", "turnaround_cycles", threads=384)
    tails = table.all("launch/cta_turnaround", "turnaround_p90_cycles", threads=384)
    if not rows:
        return None
    usual = [row for row in rows if table.params(row)["setmaxnreg"]] or rows
    found = spread([*usual, *rows, *tails])
    return found and Found(
        found.value, found.low, found.high, tuple(rows), "last clock of a CTA to the first of its successor"
    )


#: Key of the machine file -> how it follows from the rows.
RULES: dict[str, Rule] = {
    "tma.latency_l2_cycles": partial(_tma_latency, source="l2"),
    "tma.latency_hbm_cycles": partial(_tma_latency, source="hbm"),
    "tma.bytes_per_clk": _tma_rate,
    "tma.issue_cycles": _tma_issue,
    "tma.store_bytes_per_clk": _store_rate,
    "tma.reduce_bytes_per_clk": _reduce_rate,
    "tma.reduce_latency_cycles": _reduce_latency,
    "l2.reduce_tbps": _reduce_tbps,
    "l2.latency_cycles": partial(_walk, source="l2"),
    "l2.bytes_per_clk_per_sm": _l2_rate,
    "l2.bytes_per_clk_per_sm_lockstep": _l2_lockstep,
    "hbm.tbps_achieved": _hbm,
    "hbm.read_ratio": _read_ratio,
    "hbm.latency_cycles": partial(_walk, source="hbm"),
    "launch.graph_kernel_us": _graph_kernel,
    "launch.kernel_us": _graph_kernel,
    "launch.cta_turnaround_cycles": _turnaround,
    "launch.cta_start_cycles": _turnaround,
}
