"""The operations that a run executed, each with what it waited for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilecast.model.pipeline.graph import Edge, Pipeline
from tilecast.model.sm.fluid import EPS_CYCLES as EPS
from tilecast.model.sm.run import Ran

#: Engines that serve one operation at a time, and what an operation waits for that they have not come to.
_IN_ORDER = {"tensor": "matrix engine", "memory": "copies before it", "l2": "copies before it"}


@dataclass(frozen=True, slots=True)
class Event:
    """One executed operation: when it ran, what it waited for, and how much longer it took than alone."""

    op: str
    role: str
    iteration: int
    start: float
    end: float
    #: Name of the operation whose end let this one start ("" for the first), and why ("role", "engine", edge).
    cause: str
    cause_iteration: int
    cause_why: str
    #: When the role was free to start the operation: start - role_free is the stall.
    role_free: float


def events_of(pipeline: Pipeline, run: Ran) -> tuple[Event, ...]:
    """Every operation of a finished run by start and end; its cause is the last of its role, sources and engine."""
    issues, starts, ends = run.issued, run.started, run.ended
    number = {name: k for k, name in enumerate(run.names)}
    sources: dict[str, list[Edge]] = {op.name: [] for op in pipeline.ops}
    for edge in pipeline.edges:
        sources[edge.dst].append(edge)
    events: list[Event] = []
    #: By engine: what it served in order, by start.
    served: dict[str, list[tuple[float, float, int]]] = {engine: [] for engine in _IN_ORDER}
    for role in pipeline.roles:
        free, last = 0.0, ("", -1)
        laps = range(-max(step.shift for step in role.program), run.blocks - min(step.shift for step in role.program))
        for name, block in ((step.op, lap + step.shift) for lap in laps for step in role.program):
            if not 0 <= block < run.blocks:
                continue
            k, op = number[name], pipeline.op(name)
            ready, cause = free, (*last, "role")
            for edge in sources[name]:
                if block >= edge.distance:
                    handed = ends[number[edge.src]][block - edge.distance] + edge.latency_cycles
                    if handed > ready + EPS:
                        ready, cause = handed, (edge.src, block - edge.distance, edge.why or edge.kind)
            issued, start, end = issues[k][block], starts[k][block], ends[k][block]
            if op.engine in served:
                served[op.engine].append((start, issued, len(events)))
            events.append(Event(name, role.name, block, start, end, *cause, role_free=free))
            free, last = (issued + op.issue_cycles if op.engine else end), (name, block)
    for engine, operations in served.items():
        before: Event | None = None
        for _, issued, at in sorted(operations):
            if before is not None and before.end > issued + EPS:
                events[at] = replace(
                    events[at], cause=before.op, cause_iteration=before.iteration, cause_why=_IN_ORDER[engine]
                )
            before = events[at]
    return tuple(sorted(events, key=lambda e: (e.start, e.end)))
