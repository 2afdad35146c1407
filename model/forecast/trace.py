"""Chrome-trace JSON of one simulated tile: a lane for every role and every unit, one microsecond per cycle.

Opens in ui.perfetto.dev.  Chrome traces count microseconds, so a cycle is drawn as one: read "1 us" as "1 cycle".
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilecast.model.forecast.predict import Prediction

_ROLES, _UNITS = 1, 2


def trace_json(p: Prediction) -> str:
    """The simulated window of the prediction's tile as a JSON string."""
    events: list[dict[str, object]] = [
        _name("process_name", _ROLES, 0, f"roles: {p.pipeline.name} on {p.machine.name}"),
        _name("process_name", _UNITS, 0, "units (busy share while the operation runs)"),
    ]
    roles = {role.name: i for i, role in enumerate(p.pipeline.roles, 1)}
    units = {unit: i for i, unit in enumerate(p.pipeline.demand(), 1)}
    events += [_name("thread_name", _ROLES, i, name) for name, i in roles.items()]
    events += [_name("thread_name", _UNITS, i, name) for name, i in units.items()]
    level: dict[str, list[tuple[float, float]]] = {unit: [] for unit in units}
    for event in p.trace.events:
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
        if op.engine:
            # Work on an engine overlaps its role's next steps: an asynchronous slice keeps lanes readable.
            ident = f"{event.op}.{event.iteration}"
            shared = {"cat": op.kind, "name": event.op, "id": ident, "pid": _ROLES, "tid": roles[event.role]}
            events.append({**shared, "ph": "b", "ts": event.start, "args": args})
            events.append({**shared, "ph": "e", "ts": event.end})
        else:
            events.append(
                {"cat": op.kind, "name": event.op, "ph": "X", "ts": event.start, "dur": length, "pid": _ROLES,
                 "tid": roles[event.role], "args": args}
            )  # fmt: skip
        for unit, cycles in op.demand:
            level[unit] += [(event.start, cycles / max(length, 1e-9)), (event.end, -cycles / max(length, 1e-9))]
    for unit, changes in level.items():
        events += _counter(unit, units[unit], changes)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"clock": "1 us = 1 SM cycle"}})


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _counter(unit: str, thread: int, changes: list[tuple[float, float]]) -> list[dict[str, object]]:
    """Busy percent over time as a counter track."""
    out: list[dict[str, object]] = []
    load = 0.0
    for time, step in sorted(changes):
        load += step
        sample = {
            "name": unit,
            "ph": "C",
            "ts": time,
            "pid": _UNITS,
            "tid": thread,
            "args": {"busy %": round(100 * load, 2)},
        }
        if out and out[-1]["ts"] == time:
            out[-1] = sample
        else:
            out.append(sample)
    return out
