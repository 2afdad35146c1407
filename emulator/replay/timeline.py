"""What a replay finds: when each operation of a program ran, the loop's pace, and the picture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from tilecast.base import chrome_trace as traces

_LAP = 4


@dataclass(frozen=True, slots=True)
class Span:
    """One operation on the timeline: cycles from the start of the program, and its line."""

    lane: str
    name: str
    start: float
    end: float
    line: int
    kind: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """One program on one SM."""

    program: int
    spans: tuple[Span, ...]
    cycles: float

    def ii_cycles(self) -> float:
        """Cycles per iteration in the steady state: between executions of the product that ran most; 0 for short ones."""
        ends: dict[tuple[str, int, str], list[float]] = {}
        for span in self.spans:
            if span.kind == "product":  # one line may issue several products: operands and extents tell them apart
                ends.setdefault((span.lane, span.line, span.name), []).append(span.end)
        times = max(ends.values(), key=len, default=[])
        if len(times) < 8:
            return 0.0
        # The median keeps the change from tile to tile out; four at a time, because loops may alternate.
        laps = [(b - a) / _LAP for a, b in zip(times[2:-1], times[2 + _LAP : -1], strict=False)]
        return median(laps) if laps else 0.0


def chrome_trace(timelines: Iterable[Timeline]) -> str:
    """Chrome-trace JSON (`base.chrome_trace`): a process for each program, a lane for each role."""
    events: list[traces.Event] = []
    for timeline in timelines:
        program = timeline.program
        events.append(traces.process_name(program, f"program {program}"))
        names = dict.fromkeys(span.lane for span in timeline.spans)
        lanes = {name: traces.Lane(program, i) for i, name in enumerate(names, 1)}
        events += [traces.lane_name(lane, name) for name, lane in lanes.items()]
        for number, span in enumerate(timeline.spans):
            where = (lanes[span.lane], span.kind, span.name, span.start, span.end)
            args = {"line": span.line, "cycles": round(span.end - span.start, 1)}
            if span.kind in ("copy", "product"):
                # Work on an engine overlaps its role's next steps.
                events += traces.overlapping_bar(*where, args, f"{program}.{number}")
            else:
                events += traces.bar(*where, args)
    return traces.trace_text(events)
