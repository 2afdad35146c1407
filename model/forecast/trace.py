"""Chrome-trace JSON of one simulated tile: a lane for every role and every unit."""

from __future__ import annotations

from tilecast.base import chrome_trace
from tilecast.base.chrome_trace import (
    Lane,
    bar,
    busy_share,
    lane_name,
    overlapping_bar,
    process_name,
    trace_text,
)
from tilecast.model.forecast.answer import Forecast
from tilecast.model.sm.events import Event
from tilecast.model.sm.fair_share import fair_speeds, unit_use
from tilecast.model.sm.simulate import drawn

_ROLES, _UNITS = 1, 2


def trace_json(p: Forecast) -> str:
    """The simulated window of the prediction's tile as a JSON string."""
    events: list[chrome_trace.Event] = [
        process_name(_ROLES, f"roles: {p.pipeline.name} on {p.machine.name}"),
        process_name(_UNITS, "units (busy share)"),
    ]
    roles = {role.name: Lane(_ROLES, i) for i, role in enumerate(p.pipeline.roles, 1)}
    units = {unit: Lane(_UNITS, i) for i, unit in enumerate(p.pipeline.demand(), 1)}
    events += [lane_name(lane, name) for name, lane in (*roles.items(), *units.items())]
    simulated = drawn(p.trace).events
    for event in simulated:
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
    for unit, changes in _load_changes(p, simulated).items():
        events += busy_share(units[unit], unit, changes)
    return trace_text(events)


def _load_changes(p: Forecast, simulated: tuple[Event, ...]) -> dict[str, list[tuple[float, float]]]:
    """By unit: (cycle, change of its busy share), from the fair speeds of the operations that run at a time."""
    starts_and_ends = sorted({moment for event in simulated for moment in (event.start, event.end)})
    changes: dict[str, list[tuple[float, float]]] = {unit: [] for unit in p.pipeline.demand()}
    begun = 0
    running: list[Event] = []
    by_start = sorted(simulated, key=lambda event: event.start)
    before = dict.fromkeys(changes, 0.0)
    for moment in starts_and_ends:
        while begun < len(by_start) and by_start[begun].start <= moment:
            running.append(by_start[begun])
            begun += 1
        running = [event for event in running if event.end > moment]
        ops = tuple(p.pipeline.op(event.op) for event in running)
        load = dict.fromkeys(changes, 0.0)
        for op, speed in zip(ops, fair_speeds(ops), strict=True):
            for unit, share in unit_use(op).items():
                load[unit] += speed * share
        for unit, share in load.items():
            if share != before[unit]:
                changes[unit].append((moment, share - before[unit]))
        before = load
    return changes
