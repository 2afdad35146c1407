"""Chrome-trace JSON of one simulated tile: a lane for every role and every unit."""

from __future__ import annotations

from tilecast.base.chrome_trace import (
    Event,
    Lane,
    bar,
    busy_share,
    lane_name,
    overlapping_bar,
    process_name,
    trace_text,
)
from tilecast.model.forecast.answer import Forecast
from tilecast.model.sm.simulate import drawn

_ROLES, _UNITS = 1, 2


def trace_json(p: Forecast) -> str:
    """The simulated window of the prediction's tile as a JSON string."""
    events: list[Event] = [
        process_name(_ROLES, f"roles: {p.pipeline.name} on {p.machine.name}"),
        process_name(_UNITS, "units (busy share while the operation runs)"),
    ]
    roles = {role.name: Lane(_ROLES, i) for i, role in enumerate(p.pipeline.roles, 1)}
    units = {unit: Lane(_UNITS, i) for i, unit in enumerate(p.pipeline.demand(), 1)}
    events += [lane_name(lane, name) for name, lane in (*roles.items(), *units.items())]
    level: dict[str, list[tuple[float, float]]] = {unit: [] for unit in units}
    for event in drawn(p.trace).events:
        op = p.pipeline.op(event.op)
        length = event.end - event.start
        args = {
            "block": event.iteration,
            "cycles": round(length, 1),
            "alone_cycles": round(op.min_cycles, 1),
            "released_by": f"{event.cause} of block {event.cause_iteration} ({event.cause_why})" if event.cause else "",
            "waited_cycles": round(event.start - event.role_free, 1),
            "demand_cycles": {unit: round(cycles, 1) for unit, cycles in op.demand},
        }
        lane = roles[event.role]
        if op.engine:
            # Work on an engine overlaps its role's next steps.
            ident = f"{event.op}.{event.iteration}"
            events += overlapping_bar(lane, op.kind, event.op, event.start, event.end, args, ident)
        else:
            events += bar(lane, op.kind, event.op, event.start, event.end, args)
        for unit, cycles in op.demand:
            level[unit] += [(event.start, cycles / max(length, 1e-9)), (event.end, -cycles / max(length, 1e-9))]
    for unit, changes in level.items():
        events += busy_share(units[unit], unit, changes)
    return trace_text(events)
