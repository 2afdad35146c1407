"""Nobody can go on: who waits for what, in words."""

from __future__ import annotations

from collections.abc import Sequence

from tilecast.emulator.errors import BarrierError, DeadlockError
from tilecast.emulator.expressions import SILENT
from tilecast.emulator.hardware.role import Role
from tilecast.emulator.origins import by_turns
from tilecast.emulator.source import Source

#: Lines about loops that a message quotes, characters of each, and lines that one loop is followed back to.
_QUOTED, _WIDTH, _AROUND = 12, 100, 6
#: Lines that signal a barrier, and that one is followed back to; what a wait is followed back to.
_SIGNALS, _SLOTS = 14, 6


def deadlock(roles: Sequence[Role], source: Source, program: int) -> BarrierError | DeadlockError:
    """The error for a program whose roles all wait; of bytes that are expected and that no copy brings, a BarrierError."""
    lines, short = [], []
    chains: list[list[int]] = []
    lacking: dict[str, None] = {}
    for role in roles:
        if role.done:
            continue
        if role.polls:
            lines.append(f"  {role.name} waits for {role.polls}; {source.quote(role.polls_at)}")
            continue
        if role.waiting is None:
            lines.append(f"  {role.name} waits for the other roles to end")
            continue
        instances, parity, line = role.waiting
        stuck = next(i for i in instances if not i.passed(parity))
        lacking[stuck.barrier.name.partition("[")[0]] = None
        missed = stuck.missed(role.agents[stuck.cta].index, parity)
        chains.append(source.calls(role.coroutine.gr_frame))
        callers = chains[-1][1:2]
        asked = "".join(f", from {source.quote(place)}" for place in callers)
        lines.append(f"  {role.name} waits for {stuck.status(parity)}; {source.quote(line)}{missed}{asked}")
        if stuck.pending == 0 and stuck.received < stuck.expected:
            short.append(
                f"{stuck.name} expects {stuck.expected} bytes in phase {stuck.completed} "
                f"({source.quote(stuck.expect_line)}), but copies bring only {stuck.received}"
            )
    report = "\n".join(
        [
            f"deadlock in program {program}: nobody can go on",
            *lines,
            *_signalled(list(lacking), chains, source),
            *_decided(chains, source),
        ]
    )
    return BarrierError("; ".join(short) + "\n" + report) if short else DeadlockError(report)


def _signalled(names: Sequence[str], chains: Sequence[Sequence[int]], source: Source) -> list[str]:
    """Where the barriers are signalled that somebody waits for, and what the slots and phases of both sides come from."""
    sides = [source.values(chain, _SLOTS, argument, counters=True) for chain in chains for argument in (0, 1)]
    for name in names:
        sides += [
            source.values([line], _SLOTS, argument, counters=True)
            for line, argument in source.dataflow.given(name, SILENT)
        ]
    waits = {chain[0] for chain in chains}
    found = [place for place in by_turns(sides) if place not in waits]
    quoted = [f"               {source.quote(line)[:_WIDTH]}" for line in list(dict.fromkeys(found))[:_SIGNALS]]
    return ["  slots and phases of the waits, and who signals these barriers", *quoted] if quoted else []


def _decided(chains: Sequence[Sequence[int]], source: Source) -> list[str]:
    """What decides how often the roles wait, as lines of a message: loops and conditions around, and what those read."""
    # Of each role by turns, the outermost call first: there the loops are.
    slices = [
        source.values(chain[level:], _AROUND, "around") for chain in chains for level in range(len(chain) - 1, -1, -1)
    ]
    quoted = [
        f"               {source.quote(line)[:_WIDTH]}" for line in list(dict.fromkeys(by_turns(slices)))[:_QUOTED]
    ]
    return ["  how often they wait is decided at", *quoted] if quoted else []
