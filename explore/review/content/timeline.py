"""The simulated tile as bars on lanes: roles and engines with what they wait for, units with how busy they are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from tilecast.explore.review.content.content import Bar, Timeline
from tilecast.model.forecast.answer import KernelAnswer
from tilecast.model.pipeline.graph import Op, Pipeline
from tilecast.model.sm.events import Event
from tilecast.model.sm.simulate import SmTrace, drawn

#: Waits shorter than this (cycles) are hand-overs that no picture can show.
_SHORTEST_WAIT = 4.0
_ENGINES = {"tensor": "matrix engine", "tma": "copies", "async": "copies"}


def timeline(p: KernelAnswer, title: str) -> Timeline:
    """The whole simulated window of ``p``; the view is two periods of its steady state."""
    trace, pipeline = drawn(p.trace), p.pipeline
    view = _view(trace)
    # One period beyond the view is enough to look ahead: the loop repeats.
    last = view[1] + trace.ii_cycles
    events = sorted((e for e in trace.events if e.start < last), key=lambda e: (e.start, e.end, e.op))
    roles = [bar for event in events for bar in _role_bars(event, pipeline)]
    engines = _engine_bars(events, pipeline, view[0])
    units = [bar for unit in pipeline.demand() for bar in _unit_bars(unit, events, pipeline)]
    held = {bar.lane for bar in roles}
    lanes = [role.name for role in pipeline.roles if role.name in held]
    lanes += list(dict.fromkeys(sorted((bar.lane for bar in engines), key=_engine_order)))
    demand = sorted(pipeline.demand().items(), key=lambda item: -item[1])
    return Timeline(
        title=title, lanes=tuple(lanes), unit_lanes=tuple(_unit_lane(unit) for unit, _ in demand),
        bars=(*roles, *engines, *units), view=view, ii_cycles=trace.ii_cycles, periodic=trace.periodic,
        waits=_waits(p), critical=tuple((s.op, s.why, s.alone_cycles, s.contention_cycles, s.wait_cycles) for s in p.critical),
    )  # fmt: skip


def _view(trace: SmTrace) -> tuple[float, float]:
    ends = trace.iteration_end
    first = min(max(trace.settled_at, 1), max(0, len(ends) - 3))
    start = ends[first]
    return start, min(start + 2 * trace.ii_cycles, ends[-1])


def _engine_order(lane: str) -> tuple[bool, str]:
    """The matrix engine before the copies."""
    return lane.startswith(_ENGINES["tma"]), lane


def _role_bars(event: Event, pipeline: Pipeline) -> Iterator[Bar]:
    """A synchronous operation on its role's lane, with the wait before it."""
    op = pipeline.op(event.op)
    if op.engine:
        return
    wait = event.start - event.role_free
    if wait >= _SHORTEST_WAIT:
        lines = (
            f"{event.role} waits {wait:.0f} cycles",
            f"for {_released_by(event)}",
            f"before {event.op} of block {event.iteration}",
        )
        yield Bar(event.role, "", "wait", event.role_free, wait, 1.0, lines)
    yield _bar(event.role, event, op)


def _bar(lane: str, event: Event, op: Op) -> Bar:
    return Bar(lane, op.name, op.kind, event.start, event.end - event.start, 1.0, _lines(event, op))


def _lines(event: Event, op: Op) -> tuple[str, ...]:
    cycles = event.end - event.start
    shared = cycles - op.min_cycles
    units = ", ".join(f"{unit} {busy:.0f}" for unit, busy in op.demand) or "none"
    longer = f", {shared:.0f} more by sharing units" if shared >= 0.5 else ""
    where = {
        "": event.role,
        "tensor": f"matrix engine, issued by {event.role}",
        "tma": f"copy engine, issued by {event.role}",
        "async": f"asynchronous copies, issued by {event.role}",
    }
    lines = [
        f"{op.name} ({op.kind}) of block {event.iteration}, on {where[op.engine]}",
        f"{cycles:.0f} cycles, from {event.start:.0f} to {event.end:.0f}; {op.min_cycles:.0f} alone{longer}",
        f"busy cycles by unit: {units}",
    ]
    waited = event.start - event.role_free
    if event.cause and not op.engine and waited >= 0.5:
        lines.append(f"waited {waited:.0f} cycles for {_released_by(event)}")
    elif event.cause:
        lines.append(f"released by {_released_by(event)}")
    else:
        lines.append("first of the tile: waits for nothing")
    return tuple(lines)


def _released_by(event: Event) -> str:
    return f"{event.cause} of block {event.cause_iteration} ({event.cause_why})" if event.cause else event.cause_why


def _engine_bars(events: list[Event], pipeline: Pipeline, settled: float) -> list[Bar]:
    """Asynchronous work: one lane for the matrix engine, as many for copies as are in flight side by side from
    ``settled`` on; the burst of copies at the start of a tile overlaps on the last of them."""
    bars: list[Bar] = []
    for engine in dict.fromkeys(op.engine for op in pipeline.ops if op.engine):
        mine = [event for event in events if pipeline.op(event.op).engine == engine]
        most = max(1, _side_by_side([event for event in mine if event.end > settled]))
        free: list[float] = []
        for event in mine:
            row = next((i for i, until in enumerate(free) if event.start >= until - 1e-6), len(free))
            row = min(row, most - 1)
            if row == len(free):
                free.append(0.0)
            free[row] = max(free[row], event.end)
            name = _ENGINES.get(engine, engine)
            bars.append(_bar(name if not row else f"{name} {row + 1}", event, pipeline.op(event.op)))
    return bars


def _side_by_side(events: list[Event]) -> int:
    """The most that are in flight at one time."""
    return max((sum(other.start <= event.start < other.end - 1e-6 for other in events) for event in events), default=0)


def _unit_lane(unit: str) -> str:
    return f"unit {unit}"


def _unit_bars(unit: str, events: list[Event], pipeline: Pipeline) -> Iterator[Bar]:
    """How busy ``unit`` is, piecewise: every moment at which who runs on it changes begins a new bar."""
    uses = []
    for event in events:
        cycles = pipeline.op(event.op).cycles(unit)
        length = event.end - event.start
        if cycles > 0 and length > 0:
            uses.append((event.start, event.end, cycles / length, event))
    moments = sorted({round(t, 3) for start, end, _, _ in uses for t in (start, end)})
    for begin, end in pairwise(moments):
        middle = 0.5 * (begin + end)
        here = [(share, event) for start, stop, share, event in uses if start < middle < stop]
        busy = min(1.0, sum(share for share, _ in here))
        if busy <= 0 or end - begin < 0.5:
            continue
        who = tuple(f"{event.op} of block {event.iteration}: {share:.0%}" for share, event in here)
        lines = (f"{unit} {busy:.0%} busy for {end - begin:.0f} cycles, from {begin:.0f} to {end:.0f}", *who)
        yield Bar(_unit_lane(unit), here[0][1].op if len(here) == 1 else "", "unit", begin, end - begin, busy, lines)


def _waits(p: KernelAnswer) -> tuple[tuple[str, str, float], ...]:
    rows = [
        (role, cause, cycles)
        for role, causes in p.trace.stalls().items()
        for cause, cycles in causes.items()
        if cycles >= _SHORTEST_WAIT
    ]
    return tuple(sorted(rows, key=lambda row: (row[0], -row[2], row[1])))
