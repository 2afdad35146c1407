"""Run the steady loops of warp roles against each other, instruction by instruction, on one sub-partition of an SM.

The sub-partition is that of the warp which issues the matrix products; single warps on other sub-partitions run beside it
and share nothing with it but barriers, tensor core and copies.  The rules:

- one instruction a cycle; a warp's next waits for the stall count of its last and the counters in its wait mask;
- a pipe is occupied for `RoleCosts.occupies` cycles, tensor memory's port by the bytes that a warp moves through it;
- the tensor core takes products in the order of their issue; a commit completes with the last product before it;
- the n-th wait of a warp at a ring of s barriers passes when the (n + 1 - s f)-th phase of the ring is complete, where f is 1
  if the barrier lets the first wait pass; a phase is complete when all who arrive at it have;
- where everybody waits in their first iteration, a wait under a branch is passed over: it concerns the iteration before;
- an arrival is seen `handover` cycles later, what engines complete when it is complete; a wait takes `poll` cycles at least.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from tilecast.model.compiled.code import CodeError
from tilecast.model.compiled.costs import PARTITIONS
from tilecast.model.compiled.roles.code import PIPES, KernelRoles, RoleCode, RoleInstruction
from tilecast.model.compiled.roles.costs import RoleCosts

#: Iterations of the matrix role: until the loops have found their rhythm, and those that are averaged.
_SETTLING, _AVERAGED = 8, 16


@dataclass(frozen=True, slots=True)
class RolesRun:
    """A steady state."""

    #: Cycles of an iteration of the matrix role.
    cycles: float
    #: Cycles by pipe and of "issue" on the sub-partition in an iteration; "tensor" of the SM's tensor core.
    busy: dict[str, float]
    #: (role, barrier) -> cycles an iteration that the role stands at it beyond a poll.
    waits: dict[tuple[str, str], float]


class _Prepared(NamedTuple):
    """An instruction with its costs looked up."""

    code: RoleInstruction
    waits: tuple[int, ...]
    taken: float
    latency: float
    product: tuple[float, float]


class _Warp:
    __slots__ = (
        "arrivals", "counters", "free", "index", "issue", "laps", "last", "left", "name", "passed", "pc", "program", "skipped",
        "standing",
    )  # fmt: skip

    def __init__(
        self, index: int, role: RoleCode, issue: int, costs: RoleCosts, table: dict[RoleInstruction, _Prepared]
    ) -> None:
        self.index, self.name, self.issue, self.free = index, role.name, issue, 0.0
        for one in {*role.ahead, *role.loop} - table.keys():
            table[one] = _prepare(one, costs)
        #: What it runs now, and the loop while that is still to come.
        self.program = [table[one] for one in role.ahead or role.loop]
        self.left = [table[one] for one in role.loop] if role.ahead else []
        self.pc = self.last = 0
        self.laps: list[float] = []
        self.counters = [0.0] * 6
        self.passed: Counter[int] = Counter()
        self.arrivals: Counter[tuple[int, str]] = Counter()
        self.standing: defaultdict[int, float] = defaultdict(float)
        self.skipped: set[RoleInstruction] = set()

    def advance(self, now: float) -> None:
        """Go on to the next instruction; a loop begins again."""
        self.pc += 1
        if self.pc >= len(self.program):
            if not self.left:
                self.laps.append(now)
            else:
                self.program, self.left = self.left, []
            self.pc = 0


def _prepare(one: RoleInstruction, costs: RoleCosts) -> _Prepared:
    return _Prepared(
        one, tuple(bit for bit in range(6) if one.waits >> bit & 1), costs.occupies(one), costs.latency[one.latency],
        costs.product(one) if one.kind == "matrix" else (0.0, 0.0),
    )  # fmt: skip


class _State:
    """Everything that changes during a run."""

    def __init__(self, kernel: KernelRoles, costs: RoleCosts) -> None:
        self.kernel, self.costs = kernel, costs
        table: dict[RoleInstruction, _Prepared] = {}
        partition = kernel.roles[kernel.matrix].warp % PARTITIONS
        self.warps = [
            _Warp(index, role, 0 if role.warp % PARTITIONS == partition else index + 1, costs, table)
            for index, role in enumerate(kernel.roles)
        ]
        #: Barrier -> party -> when it arrived, phase by phase.
        self.arrived: list[dict[tuple[int, str], list[float]]] = [
            {(role, kind): [] for role, kind, _ in barrier.parties} for barrier in kernel.barriers
        ]
        self.per_phase = [{(role, kind): n for role, kind, n in barrier.parties} for barrier in kernel.barriers]
        self.issue_free = [0.0] * (len(kernel.roles) + 1)
        self.pipe_free = dict.fromkeys(PIPES, 0.0)
        self.busy = dict.fromkeys((*PIPES, "issue"), 0.0)
        self.tensor_free = self.copy_free = 0.0
        #: Cycles from the end of the product issued last until its commit is seen.
        self.completion = 0.0

    def complete(self, barrier: int, phase: int) -> float | None:
        """When the ``phase``-th phase (from 1) of a ring is complete; None while that is unknown."""
        if phase <= 0:
            return 0.0
        at = 0.0
        for times in self.arrived[barrier].values():
            if len(times) < phase:
                return None
            at = max(at, times[phase - 1])
        return at

    def opens(self, warp: _Warp, one: RoleInstruction, at: float) -> float | None:
        """When what a wait waits for is there, of a warp that gets to it at ``at``."""
        if one.barrier < 0:
            return 0.0
        barrier = self.kernel.barriers[one.barrier]
        if one.kind == "wait":
            return self.complete(one.barrier, warp.passed[one.barrier] + 1 - barrier.stages * one.amount)
        # Who waits at a named barrier has arrived there.
        met = warp.passed[one.barrier]
        if warp.arrivals[one.barrier, one.kind] == met:
            self.arrive(warp, one, one.kind, at + self.costs.named)
        others = [times for (role, _), times in self.arrived[one.barrier].items() if role != warp.index]
        return max((times[met] for times in others), default=0.0) if all(len(t) > met for t in others) else None

    def arrive(self, warp: _Warp, one: RoleInstruction, kind: str, at: float) -> None:
        if one.barrier < 0:
            return
        party = (one.barrier, kind)
        warp.arrivals[party] += 1
        if warp.arrivals[party] % self.per_phase[one.barrier][warp.index, kind] == 0:
            self.arrived[one.barrier][warp.index, kind].append(at)

    def skip_guarded(self) -> bool:
        """Where everybody waits: let a warp past a wait under a branch, which the first iteration may do without, once."""
        for warp in self.warps:
            one = warp.program[warp.pc].code
            if one.guarded and not warp.laps and one not in warp.skipped:
                warp.skipped.add(one)
                warp.advance(warp.free)
                return True
        return False

    def ready(self, warp: _Warp) -> float | None:
        """Earliest issue of the warp's next instruction; None while it waits for something unknown."""
        prepared = warp.program[warp.pc]
        one = prepared.code
        at = warp.free
        for bit in prepared.waits:
            at = max(at, warp.counters[bit])
        if one.kind in ("wait", "named_wait"):
            opens = self.opens(warp, one, at)
            if opens is None:
                return None
            if one.kind == "named_wait":
                at = max(at, opens)
        if warp.issue == 0:
            at = max(at, self.pipe_free[one.pipe])
        return max(at, self.issue_free[warp.issue])

    def issue(self, warp: _Warp, now: float) -> None:
        """Effects of the warp's next instruction, issued at ``now``."""
        prepared, costs = warp.program[warp.pc], self.costs
        one = prepared.code
        self.issue_free[warp.issue] = now + 1.0
        result, release, after = now + prepared.latency, now + costs.operand_release, now + one.stall
        start = now
        if warp.issue == 0:
            self.busy["issue"] += 1.0
            if one.kind != "matrix":
                start = max(self.pipe_free[one.pipe], now)
                self.pipe_free[one.pipe] = start + prepared.taken
                self.busy[one.pipe] += prepared.taken
        if one.kind in ("tensor_load", "tensor_store"):
            result = release = start + prepared.taken + costs.tensor_memory
        elif one.kind == "wait":
            opens = self.opens(warp, one, now) or 0.0
            result = max(now + costs.poll, opens)
            warp.standing[one.barrier] += max(0.0, opens - now - costs.poll)
            warp.passed[one.barrier] += 1
        elif one.kind == "named_wait":
            after = max(after, now + costs.named)
            warp.standing[one.barrier] += max(0.0, now - warp.free)
            warp.passed[one.barrier] += 1
        elif one.kind == "named_arrive":
            self.arrive(warp, one, one.kind, now + costs.named)
        elif one.kind == "arrive":
            self.arrive(warp, one, one.kind, now + (costs.remote if one.pair else costs.handover))
        elif one.kind == "matrix":
            cycles, self.completion = prepared.product
            self.tensor_free = max(self.tensor_free, now) + cycles
            self.busy["tensor"] += cycles
        elif one.kind == "commit":
            self.arrive(warp, one, one.kind, max(self.tensor_free, now) + self.completion)
        elif one.kind == "copy":
            self.copy_free = max(self.copy_free, now) + one.amount / costs.copy_bytes
            self.arrive(warp, one, one.kind, self.copy_free + costs.copy_latency)
        elif one.kind == "fence":
            result = max(result, now + costs.fence)
        counters = warp.counters
        if one.write_counter < 6:
            counters[one.write_counter] = max(counters[one.write_counter], result)
        if one.read_counter < 6:
            counters[one.read_counter] = max(counters[one.read_counter], release)
        warp.free = after
        warp.advance(now)


def run_roles(kernel: KernelRoles, costs: RoleCosts) -> RolesRun:
    """The steady state of ``kernel``; CodeError when its roles wait for something that never comes."""
    state = _State(kernel, costs)
    matrix = state.warps[kernel.matrix]
    at: dict[str, float] = {}
    begun: list[dict[int, float]] = []
    count = 0
    while len(matrix.laps) < _SETTLING + _AVERAGED:
        if not begun and len(matrix.laps) == _SETTLING:
            at, begun = dict(state.busy), [dict(warp.standing) for warp in state.warps]
        chosen, best = None, math.inf
        for warp in state.warps:
            ready = state.ready(warp)
            if ready is not None and (
                ready < best or (ready == best and chosen is not None and warp.last < chosen.last)
            ):
                chosen, best = warp, ready
        if chosen is None and state.skip_guarded():
            continue
        if chosen is None:
            raise CodeError(
                f"{kernel.kernel}: its roles wait for each other: {_standing(state)}; the reading of the code is wrong"
            )
        count += 1
        chosen.last = count
        state.issue(chosen, best)
    laps = matrix.laps
    waits = {
        (warp.name, kernel.barriers[barrier].name): (cycles - before.get(barrier, 0.0)) / _AVERAGED
        for warp, before in zip(state.warps, begun, strict=True)
        for barrier, cycles in warp.standing.items()
    }
    busy = {name: (cycles - at[name]) / _AVERAGED for name, cycles in state.busy.items()}
    # Products that nobody waits for are issued ahead of the tensor core, but not for ever.
    return RolesRun(max((laps[-1] - laps[_SETTLING - 1]) / _AVERAGED, busy["tensor"]), busy, waits)


def _standing(state: _State) -> str:
    """Who waits where."""
    found = []
    for warp in state.warps:
        one = warp.program[warp.pc].code
        where = state.kernel.barriers[one.barrier].name if one.barrier >= 0 else one.kind
        found.append(f"{warp.name} at {where}")
    return ", ".join(found)
