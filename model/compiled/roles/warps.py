"""Warps of roles as a run takes them: instructions with their costs looked up, and where each warp stands."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from tilecast.model.compiled.roles.code import MATRIX_KINDS, RoleCode, RoleInstruction
from tilecast.model.compiled.roles.costs import RoleCosts
from tilecast.model.compiled.units.prepared import port_hold

#: Kinds of instructions that wait for what other roles or engines do.
_ASKING = frozenset({"wait", "named_wait", "group_wait", "wgmma", "wgmma_wait", "fence", "shared_load", "shared_store"})
#: Accesses to shared memory by a warp's own instructions.
SHARED = ("shared_load", "shared_store")


class Prepared(NamedTuple):
    """An instruction with its costs looked up."""

    code: RoleInstruction
    waits: tuple[int, ...]
    taken: float
    #: Cycles before the same warp's next instruction.
    stall: int
    latency: float
    product: tuple[float, float]
    #: Cycles of the shared-memory port.
    port: float
    #: Beside wgmma: cycles of its pipe (of an access to shared memory: until its registers are moved), and until another FMA or ALU
    #: instruction may issue (0: it is none).
    beside: tuple[float, float]
    #: Cycles that it holds its warp beside a product that leaves nothing of the port.
    hold: float
    #: Its kind, where it waits for more than counters and pipes.
    asks: str


class Warp:
    """A warp that runs its role's code in the simulation: where it stands, what it waits for, and its cycles so far."""

    __slots__ = (
        "arrivals", "counters", "done", "expected", "free", "groups", "held", "index", "issue", "iterates", "known", "laps", "last", "left", "meeting",
        "multiplies", "name", "passed", "pc", "program", "reached", "skipped", "standing", "stored", "storing", "times", "under_way",
    )  # fmt: skip

    def __init__(
        self, index: int, name: str, issue: int, segments: Sequence[tuple[Sequence[RoleInstruction], float]], costs: RoleCosts,
        table: dict[RoleInstruction, Prepared],
    ) -> None:  # fmt: skip
        self.index, self.name, self.issue, self.free = index, name, issue, 0.0
        for one in {one for code, _ in segments for one in code} - table.keys():
            table[one] = _prepare(one, costs)
        #: What is still to run: pieces of code, how often, and whether a pass through one is an iteration.
        self.left = [
            ([table[one] for one in code], times, at == 1)
            for at, (code, times) in enumerate(segments)
            if code and times
        ]
        self.program, self.times, self.iterates = self.left.pop(0)
        self.pc = self.last = 0
        self.done = False
        self.multiplies = any(one.kind in MATRIX_KINDS for code, _ in segments for one in code)
        self.laps: list[float] = []
        self.counters = [0.0] * 6
        self.passed: Counter[int] = Counter()
        self.arrivals: Counter[tuple[int, str]] = Counter()
        self.standing: defaultdict[int, float] = defaultdict(float)
        #: When the groups of its copies are there, and the copies of the next one.
        self.groups: list[float] = []
        self.under_way = 0.0
        #: When its last store into shared memory is through the port.
        self.stored = 0.0
        #: Stores that wait for the port; by counter, accesses that do, and when what is known of it is clear.
        self.storing = 0
        self.expected = [0] * 6
        self.known = [0.0] * 6
        #: When it came to the named barrier where it stands.
        self.reached = 0.0
        #: Named barrier where it stands -> which of its meetings.
        self.meeting: dict[int, int] = {}
        self.skipped: set[RoleInstruction] = set()
        #: Until when what does not go through the port of shared memory waits.
        self.held = 0.0

    def expect(self, one: RoleInstruction) -> None:
        """An access to shared memory waits for the port: when the counter that it raises is clear is unknown."""
        self.storing += one.kind == "shared_store"
        if one.write_counter < 6:
            self.expected[one.write_counter] += 1
            self.counters[one.write_counter] = math.inf

    def through(self, one: RoleInstruction, at: float, result: float) -> None:
        """The access is through the port ``at``, and what it brings there at ``result``."""
        if one.kind == "shared_store":
            self.storing -= 1
            self.stored = max(self.stored, at)
        if one.write_counter < 6:
            self.expected[one.write_counter] -= 1
            self.clear(one.write_counter, result)

    def clear(self, counter: int, at: float) -> None:
        """A counter is clear no earlier than ``at``; until all accesses that raise it are through, nobody knows when."""
        self.known[counter] = max(self.known[counter], at)
        if not self.expected[counter]:
            self.counters[counter] = self.known[counter]

    def advance(self, now: float) -> None:
        """Go on to the next instruction, of the next pass or piece where this one is at its end."""
        self.pc += 1
        if self.pc < len(self.program):
            return
        self.pc = 0
        if self.iterates:
            self.laps.append(now)
        self.times -= 1
        if self.times <= 0:
            self.done = not self.left
            if self.left:
                self.program, self.times, self.iterates = self.left.pop(0)


def _prepare(one: RoleInstruction, costs: RoleCosts) -> Prepared:
    beside, stall = (0.0, 0.0), one.stall
    if costs.wgmma and one.kind != "mma_sync" and one.pipe in costs.wgmma.pipe:
        taken = costs.wgmma.pipe_under_mma[one.pipe]
        if one.kind in SHARED:
            taken = (costs.load_register if one.kind == "shared_load" else costs.store_register) * one.amount
        beside, stall = (taken, costs.wgmma.slot_under_mma[one.pipe]), max(stall, costs.wgmma.least_stall[one.pipe])
    product = costs.product(one) if one.kind in MATRIX_KINDS else (0.0, 0.0)
    taken = product[0] if one.kind == "mma_sync" else costs.occupies(one)
    port = costs.port(one) if one.kind in ("wgmma", *SHARED) else 0.0
    waits = tuple(bit for bit in range(6) if one.waits >> bit & 1)
    return Prepared(
        one,
        waits,
        taken,
        stall,
        costs.latency[one.latency],
        product,
        port,
        beside,
        port_hold(one.kind, one.latency, costs.wgmma.port_hold) if costs.wgmma else 0.0,
        one.kind if one.kind in _ASKING else "",
    )


def pieces(role: RoleCode, iterations: int | None, more: int) -> list[tuple[Sequence[RoleInstruction], float]]:
    """(code, how often) of a role; one that multiplies nothing goes round ``more`` often, for what others do outside of loops."""
    if iterations is None:
        return [(role.ahead, 1), (role.loop, math.inf)]
    multiplies = any(one.kind in MATRIX_KINDS for one in role.loop)
    return [(role.begin, 1), (role.loop, iterations + (0 if multiplies else more)), (role.end, 1)]
