"""Chrome-trace JSON with one microsecond for a cycle: what ui.perfetto.dev and chrome://tracing open.

Chrome traces count microseconds, so a cycle is drawn as one: read "1 us" as "1 cycle".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Event = dict[str, Any]


class Lane(NamedTuple):
    """Where an event is drawn: a thread of a process."""

    process: int
    thread: int


def process_name(process: int, name: str) -> Event:
    """The title over the lanes of a process."""
    return {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}


def lane_name(lane: Lane, name: str) -> Event:
    """The label of a lane."""
    return {"name": "thread_name", "ph": "M", "pid": lane.process, "tid": lane.thread, "args": {"name": name}}


def bar(lane: Lane, kind: str, name: str, start: float, end: float, args: Mapping[str, Any]) -> list[Event]:
    """A bar from ``start`` to ``end``; bars of one lane must not overlap unless one lies inside another."""
    return [{**_shared(lane, kind, name), "ph": "X", "ts": start, "dur": end - start, "args": dict(args)}]


def overlapping_bar(
    lane: Lane, kind: str, name: str, start: float, end: float, args: Mapping[str, Any], ident: str
) -> list[Event]:
    """A bar that may overlap others of its lane, such as work on an engine; ``ident`` is unique in its process."""
    shared = {**_shared(lane, kind, name), "id": ident}
    return [{**shared, "ph": "b", "ts": start, "args": dict(args)}, {**shared, "ph": "e", "ts": end}]


def busy_share(lane: Lane, name: str, changes: Iterable[tuple[float, float]]) -> list[Event]:
    """A counter of busy percent over time from (time, change of the share) in any order."""
    out: list[Event] = []
    load = 0.0
    for time, step in sorted(changes):
        load += step
        args = {"busy %": round(100 * load, 2)}
        sample = {"name": name, "ph": "C", "ts": time, "pid": lane.process, "tid": lane.thread, "args": args}
        if out and out[-1]["ts"] == time:
            out[-1] = sample
        else:
            out.append(sample)
    return out


def trace_text(events: Iterable[Event]) -> str:
    """The whole trace as JSON."""
    return json.dumps(
        {"traceEvents": list(events), "displayTimeUnit": "ns", "otherData": {"clock": "1 us = 1 SM cycle"}}
    )


def _shared(lane: Lane, kind: str, name: str) -> Event:
    return {"cat": kind, "name": name, "pid": lane.process, "tid": lane.thread}
