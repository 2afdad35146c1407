"""Nobody can go on: who waits for what, in words."""

from __future__ import annotations

from collections.abc import Sequence

from tilecast.emulator.errors import BarrierError, DeadlockError
from tilecast.emulator.hardware.role import Role
from tilecast.emulator.source import Source

#: Lines about loops that a message quotes, characters of each, and lines that one loop is followed back to.
_QUOTED, _WIDTH, _AROUND = 12, 100, 6


def deadlock(roles: Sequence[Role], source: Source, program: int) -> BarrierError | DeadlockError:
    """The error for a program whose roles all wait; of bytes that are expected and that no copy brings, a BarrierError."""
    lines, short = [], []
    chains: list[list[int]] = []
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
    report = "\n".join([f"deadlock in program {program}: nobody can go on", *lines, *_decided(chains, source)])
    return BarrierError("; ".join(short) + "\n" + report) if short else DeadlockError(report)


def _decided(chains: Sequence[Sequence[int]], source: Source) -> list[str]:
    """What decides how often the roles wait, as lines of a message: loops and conditions around, and what those read."""
    # Of each role by turns, the outermost call first: there the loops are.
    slices = [
        source.values(chain[level:], _AROUND, "around") for chain in chains for level in range(len(chain) - 1, -1, -1)
    ]
    found = [one[i] for i in range(_AROUND) for one in slices if i < len(one)]
    quoted = [f"               {source.quote(line)[:_WIDTH]}" for line in list(dict.fromkeys(found))[:_QUOTED]]
    return ["  how often they wait is decided at", *quoted] if quoted else []
