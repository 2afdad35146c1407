"""Where the time of a launch goes: cycles of its longest program, and the lines that hold its roles longest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilecast.emulator.errors import EmulationError
from tilecast.emulator.replay.timeline import Timeline
from tilecast.emulator.replay.timing import replay
from tilecast.emulator.trace import ProgramTrace
from tilecast.model.machine.machine import Machine

#: Lines that are listed.
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Spent:
    """Time of the program that executed most operations, alone on an SM."""

    timeline: Timeline
    #: (line, what it does, cycles that it takes of the program, as one role sees it), the longest first.
    lines: tuple[tuple[int, str, float], ...]


def longest(traces: Sequence[ProgramTrace]) -> ProgramTrace:
    """The program with the most operations."""
    return max(traces, key=lambda trace: sum(len(role.events) for role in trace.roles))


def spent(traces: Sequence[ProgramTrace], machine: Machine) -> Spent:
    """Replay the longest of ``traces``; EmulationError where a product has no rate in the machine file."""
    timeline = replay(longest(traces), machine)
    held: dict[tuple[str, int, str], float] = {}
    for span in timeline.spans:
        if span.kind == "copy":
            # Copies are side by side: their times do not add up, and who needs one waits.
            continue
        key = (span.lane, span.line, span.kind)
        held[key] = held.get(key, 0.0) + span.end - span.start
    by_line: dict[tuple[int, str], float] = {}
    for (_, line, kind), cycles in held.items():
        # Roles that do the same do it at the same time.
        by_line[line, kind] = max(cycles, by_line.get((line, kind), 0.0))
    most = sorted(by_line.items(), key=lambda item: -item[1])[:_SHOWN]
    return Spent(timeline, tuple((line, kind, cycles) for (line, kind), cycles in most))


def described(
    traces: Sequence[ProgramTrace], machine: Machine, quote: Callable[[int], str]
) -> tuple[list[str], Timeline | None]:
    """Lines of a report, and the timeline of the longest program; None where it is not known."""
    try:
        found = spent(traces, machine)
    except EmulationError as error:
        return [f"  cycles     not replayed: {error}"], None
    timeline = found.timeline
    lines = [
        f"  cycles     {timeline.cycles:.0f} for the longest of {len(traces)} programs (number {timeline.program}), alone on an SM"
    ]
    for line, kind, cycles in found.lines:
        lines.append(f"             {cycles / timeline.cycles:4.0%} {kind:8s} {quote(line)}")
    return lines, timeline
