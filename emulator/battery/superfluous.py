"""Waits that nothing needed: left out, one at a time, none of the problems noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilecast.base.progress import Progress
from tilecast.emulator.battery.benches import bench_for
from tilecast.emulator.battery.launches import AnyBench, Labelled
from tilecast.emulator.errors import EmulationError
from tilecast.emulator.source import Source
from tilecast.model.machine.machine import Machine


@dataclass(frozen=True, slots=True)
class Superfluous:
    """A wait that was left out and not missed."""

    barrier: str
    line: int
    code: str
    #: The line that called the function it stands in; 0 without one.
    caller: int
    caller_code: str


@dataclass(frozen=True, slots=True)
class Waits:
    """How many places wait, in how many problems each was left out, and those that no problem missed."""

    places: int
    problems: int
    superfluous: tuple[Superfluous, ...]


def superfluous_waits(
    source: Source, machine: str | Machine | None, chosen: Callable[[Labelled], bool], progress: Progress
) -> Waits:
    """Leave out every wait of a kernel that is right; of a wait in a function, each call counts for itself.

    Not in problems that are about lengths, windows and scales alone: they synchronise like others.
    """
    bench = bench_for(source, machine)
    session = bench.kernel.session
    telling = [one for one in bench.todo() if chosen(one) and bench.synchronises(one)]
    session.waits = {}
    for problem in telling:
        bench.solve(problem)
    places, session.waits = dict(session.waits), None
    found = []
    for number, (place, barrier) in enumerate(places.items()):
        progress("leaving out waits", number, len(places), source.quote(place[0]))
        session.left_out = place
        if _noticed(bench, telling):
            continue
        caller = place[1] if len(place) > 1 else 0
        code = source.quote(caller) if caller else ""
        found.append(Superfluous(barrier, place[0], source.quote(place[0]), caller, code))
    progress("leaving out waits", len(places), len(places))
    return Waits(len(places), len(telling), tuple(found))


def _noticed(bench: AnyBench, telling: Sequence[Labelled]) -> bool:
    for problem in telling:
        try:
            bench.solve(problem)
        except EmulationError:
            return True
    return False
