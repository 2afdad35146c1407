"""No role can go on: which waits for what, in words."""

from __future__ import annotations

from collections.abc import Sequence

from tilecast.emulator.errors import BarrierError, DeadlockError
from tilecast.emulator.expressions import SILENT
from tilecast.emulator.hardware.role import Role
from tilecast.emulator.origins import by_turns
from tilecast.emulator.source import Source

#: Lines about loops that a message quotes, characters of each, and lines that one loop is followed back to.
_QUOTED, _WIDTH, _AROUND = 6, 100, 6
#: Lines that signal a barrier, and that one is followed back to; what a wait is followed back to.
_SIGNALS, _SLOTS = 10, 6
#: Lines that signal one barrier.
_EACH = 3
#: Calls of functions that signal, and statements that count.
_ASKED = 8
#: Lines about how barriers are made.
_MADE = 4


def deadlock(roles: Sequence[Role], source: Source, program: int, explained: bool) -> BarrierError | DeadlockError:
    """The error for a program whose roles all wait; of bytes that are expected and that no copy brings, a BarrierError.  ``explained``: with the
    lines that it may come from."""
    lines, short = [], []
    chains: list[list[int]] = []
    lacking: dict[str, None] = {}
    made: dict[int, None] = {}
    # Barriers that some have arrived at and others have not say most.
    for role in sorted(roles, key=_likely):
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
        # The helper that makes barriers says less than who asked it for these.
        made.update(dict.fromkeys(stuck.barrier.made[1:2] or stuck.barrier.made))
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
    if explained:
        lines += _made(list(lacking), list(made), source)
        lines += _signalled(list(lacking), chains, source)
        lines += _decided(chains, source)
    report = "\n".join([f"deadlock in program {program}: no role can go on", *lines])
    return BarrierError("; ".join(short) + "\n" + report) if short else DeadlockError(report)


def _likely(role: Role) -> int:
    """0 where a role waits for what is half done, 1 for others."""
    stuck = [one for one in role.waiting[0] if not one.passed(role.waiting[1])] if role.waiting is not None else []
    return int(not any(0 < one.pending < one.count for one in stuck))


def _made(names: Sequence[str], places: Sequence[int], source: Source) -> list[str]:
    """Where the barriers that a role waits for are made, with how many arrivals, and put beside others under a name."""
    found = [*places, *(line for name in names for line in source.dataflow.makers(name))]
    quoted = [f"               {source.quote(line)[:_WIDTH]}" for line in list(dict.fromkeys(found))[:_MADE]]
    return ["  these barriers are made at", *quoted] if quoted else []


def _signalled(names: Sequence[str], chains: Sequence[Sequence[int]], source: Source) -> list[str]:
    """Where the barriers are signalled that a role waits for, and what the slots and phases of both sides come from."""
    signals = {name: source.dataflow.given(name, SILENT) for name in names}
    # Who signals first; then what both sides are told of slots and phases.
    first = by_turns([[line for line, _ in of_name][:_EACH] for of_name in signals.values()])
    sides = [source.values(chain, _SLOTS, argument, counters=True) for chain in chains for argument in (0, 1)]
    sides += [
        source.values([line], _SLOTS, argument, counters=True)[1:]
        for of_name in signals.values()
        for line, argument in of_name
    ]
    waits = {chain[0] for chain in chains}
    found = [place for place in (*first, *by_turns(sides)) if place not in waits]
    quoted = [f"               {source.quote(line)[:_WIDTH]}" for line in list(dict.fromkeys(found))[:_SIGNALS]]
    asked = [line for place in first for line in source.dataflow.callers(place)]
    who = (
        [f"  who asks for these signals: {'; '.join(map(source.quote, dict.fromkeys(asked[:_ASKED])))}"]
        if asked
        else []
    )
    counts = source.dataflow.counts([place for chain in chains for place in chain[:2]])[:_ASKED]
    who += [f"  what counts: {'; '.join(map(source.quote, counts))}"] if counts else []
    return ["  slots and phases of the waits, and who signals these barriers", *quoted, *who] if quoted else who


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
