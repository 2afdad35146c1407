"""Chrome-trace JSON of a simulated tile of each kernel: a lane for every role and every unit."""

from __future__ import annotations

from collections.abc import Iterable

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
from tilecast.model.forecast.answer import Explained, KernelAnswer
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.sm.events import Event
from tilecast.model.sm.fair_share import fair_speeds, unit_use
from tilecast.model.sm.simulate import drawn

#: Processes of a kernel: its roles, and after them its units.
_EACH = 2


def trace_json(*answers: Explained) -> str:
    """The simulated window of one tile of every kernel of the ``answers`` as a JSON string."""
    named = [(kernel, answer.machine.name) for answer in answers for kernel in answer.kernels]
    alone = len(named) == 1
    events: list[chrome_trace.Event] = []
    for number, (kernel, machine) in enumerate(named):
        events += _kernel_events(kernel, 1 + _EACH * number, "" if alone else f"{kernel.name}, ", machine)
    return trace_text(events)


def _kernel_events(p: KernelAnswer, process: int, title: str, machine: str) -> Iterable[chrome_trace.Event]:
    """A kernel's tile: roles as ``process``, units as the next one."""
    events: list[chrome_trace.Event] = [
        process_name(process, f"{title}roles: {p.pipeline.name} on {machine}"),
        process_name(process + 1, f"{title}units (busy share)"),
    ]
    roles = {role.name: Lane(process, i) for i, role in enumerate(p.pipeline.roles, 1)}
    units = {unit: Lane(process + 1, i) for i, unit in enumerate(p.pipeline.demand(), 1)}
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
    for unit, changes in _load_changes(p.pipeline, simulated).items():
        events += busy_share(units[unit], unit, changes)
    return events


def _load_changes(p: Pipeline, simulated: tuple[Event, ...]) -> dict[str, list[tuple[float, float]]]:
    """By unit: (cycle, change of its busy share), from the fair speeds of the operations that run at a time."""
    starts_and_ends = sorted({moment for event in simulated for moment in (event.start, event.end)})
    changes: dict[str, list[tuple[float, float]]] = {unit: [] for unit in p.demand()}
    begun = 0
    running: list[Event] = []
    by_start = sorted(simulated, key=lambda event: event.start)
    before = dict.fromkeys(changes, 0.0)
    for moment in starts_and_ends:
        while begun < len(by_start) and by_start[begun].start <= moment:
            running.append(by_start[begun])
            begun += 1
        running = [event for event in running if event.end > moment]
        ops = tuple(p.op(event.op) for event in running)
        load = dict.fromkeys(changes, 0.0)
        for op, speed in zip(ops, fair_speeds(ops), strict=True):
            for unit, share in unit_use(op).items():
                load[unit] += speed * share
        for unit, share in load.items():
            if share != before[unit]:
                changes[unit].append((moment, share - before[unit]))
        before = load
    return changes
