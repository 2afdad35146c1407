"""The closed forms of `tilecast.model.demand` as text for people and as plain values for --json."""

from __future__ import annotations

from typing import Any

from tilecast.model.demand import UNIT_TITLES, BreakEven, Demand, DemandReport
from tilecast.model.traffic import Traffic


def as_text(report: DemandReport) -> str:
    """Sections: forward, break-even points, backward, memory traffic."""
    s, w = report.shape, report.workload
    dims = f"{s.head_dim_qk}" if s.head_dim_qk == s.head_dim_v else f"{s.head_dim_qk}/{s.head_dim_v}"
    parts = [
        f"Demand of one {s.tile_m} x {s.tile_n} score tile, head_dim {dims}, {s.dtype}, "
        f"on one SM of {report.machine} (cycles are SM clocks)",
        _demand_text(report.forward),
        "break-even points\n" + "\n".join(_break_even_text(b) for b in report.break_evens),
        *(_demand_text(d) for d in report.backward),
        f"memory traffic: {w.label()}",
        *(_traffic_text(t, report.hbm_tbps) for t in report.traffic),
        _bound_text(report),
    ]
    return "\n\n".join(parts)


def _demand_text(demand: Demand) -> str:
    top = demand.cycles(demand.binding)
    lines = [demand.title]
    for unit in demand.units:
        cycles = demand.cycles(unit)
        lines.append(f"  {UNIT_TITLES[unit]:<20} {cycles:8.6g}  {cycles / top:6.1%}  {demand.expression(unit)}")
        items = [item for item in demand.items if item.unit == unit]
        if len(items) > 1:
            for item in items:
                note = "" if item.counted else "  (not in the paper's total)"
                lines.append(f"    {item.name:<26} {item.cycles:8.6g}  {item.expression}{note}")
    rest = sorted((u for u in demand.units if u != demand.binding), key=demand.cycles, reverse=True)
    if demand.cycles(rest[0]) == top:
        lines.append(f"  binding: {UNIT_TITLES[demand.binding]} and {UNIT_TITLES[rest[0]]}, {top:.6g} cycles each")
    else:
        slack = top / demand.cycles(rest[0]) - 1
        lines.append(
            f"  binding: {UNIT_TITLES[demand.binding]}, {top:.6g} cycles, "
            f"{slack:.1%} more than {UNIT_TITLES[rest[0]]}"
        )
    return "\n".join(lines)


def _break_even_text(point: BreakEven) -> str:
    answer = f"{point.value:.4g}" if point.value is not None else point.remark
    solved = "" if point.expression is None else f"   [{point.symbol} = {point.expression}]"
    return f"  {point.statement}: {answer}{solved}"


def _bytes_text(count: float) -> str:
    for limit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.4g} {name}"
    return f"{count:.0f} B"


def _traffic_text(traffic: Traffic, tbps: float) -> str:
    lines = []
    for level in ("hbm", "l2"):
        parts = [t for t in traffic.transfers if t.level == level]
        if not parts:
            continue
        total = traffic.total_bytes(level)
        time = f", {total / tbps / 1e9:.4g} ms at {tbps:g} TB/s" if level == "hbm" and tbps else ""
        lines.append(f"{traffic.title}, {level.upper()}: {_bytes_text(total)}{time}")
        lines.append(f"  = {traffic.total_expression(level)}")
        lines += [f"    {t.name:<24} {_bytes_text(t.bytes):>10}  {t.expression}" for t in parts]
    return "\n".join(lines)


def _bound_text(report: DemandReport) -> str:
    b = report.bound
    return (
        "FlashAttention-1's bound (constants dropped)\n"
        f"  unfused {_bytes_text(b.unfused_bytes):>10}  {b.unfused_expression}\n"
        f"  fused   {_bytes_text(b.fused_bytes):>10}  {b.fused_expression}\n"
        f"  they meet at {b.break_even_elements:.6g} elements on chip   [M_sram = {b.break_even_expression}]"
    )


def as_dict(report: DemandReport) -> dict[str, Any]:
    """Plain values; expressions are text that sympy reads back."""
    s = report.shape
    return {
        "machine": report.machine,
        "workload": report.workload.as_dict(),
        "tile": {"m": s.tile_m, "n": s.tile_n, "head_dim_qk": s.head_dim_qk, "head_dim_v": s.head_dim_v,
                 "dtype": s.dtype},
        "forward": _demand_dict(report.forward),
        "backward": [_demand_dict(d) for d in report.backward],
        "break_even": [
            {"statement": b.statement, "symbol": b.symbol, "expression": _text(b.expression), "value": b.value,
             "remark": b.remark}
            for b in report.break_evens
        ],
        "traffic": [_traffic_dict(t) for t in report.traffic],
        "flash_attention_1": {
            "unfused": {"expression": _text(report.bound.unfused_expression), "bytes": report.bound.unfused_bytes},
            "fused": {"expression": _text(report.bound.fused_expression), "bytes": report.bound.fused_bytes},
            "break_even_elements": report.bound.break_even_elements,
        },
    }  # fmt: skip


def _text(expression: Any) -> str | None:
    return None if expression is None else str(expression)


def _demand_dict(demand: Demand) -> dict[str, Any]:
    return {
        "title": demand.title,
        "binding": demand.binding,
        "units": {u: {"expression": str(demand.expression(u)), "cycles": demand.cycles(u)} for u in demand.units},
        "items": [
            {"name": i.name, "unit": i.unit, "expression": str(i.expression), "cycles": i.cycles, "counted": i.counted}
            for i in demand.items
        ],
    }


def _traffic_dict(traffic: Traffic) -> dict[str, Any]:
    return {
        "title": traffic.title,
        "hbm_bytes": traffic.total_bytes("hbm"),
        "l2_bytes": traffic.total_bytes("l2"),
        "transfers": [
            {"name": t.name, "level": t.level, "expression": str(t.expression), "bytes": t.bytes}
            for t in traffic.transfers
        ],
    }
