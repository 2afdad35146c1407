"""Run the steady loops of warp roles against each other, instruction by instruction, on one sub-partition of an SM.

The sub-partition is that of the warp which issues the matrix products; single warps on other sub-partitions run beside it
and share nothing with it but barriers, tensor core and copies.  The rules:

- one instruction a cycle; a warp's next waits for the stall count of its last and the counters in its wait mask;
- a pipe is occupied for `RoleCosts.occupies` cycles, tensor memory's port by the bytes that a warp moves through it;
- the tensor core takes products of tcgen05 in the order of their issue; a commit completes with the last product before it;
- products of wgmma are queued and served as `WgmmaQueue` says, and while one runs arithmetic takes longer and shares the
  register ports, as in `model.compiled.sm`; mma.sync occupies its sub-partition's tensor core like any pipe;
- beside wgmma the port of shared memory is the SM's: loads and stores of warps, and copies out, take from the product in service what it does
  not leave of the port; copies in hardly touch it (a product beside them takes 5 % longer; measured: `tilecast calibrate`,
  smem/beside_mma); beside a product they wait for their turn at it, and loads for the registers they write;
- copies by lanes come from L2 at the rate of all SMs together, and a group of them is there when its last is;
- the n-th wait of a warp at a ring of s barriers passes when the (n + 1 - s f)-th phase of the ring is complete, where f is 1
  if the barrier lets the first wait pass; a phase is complete when all who arrive at it have;
- where everybody waits in their first iteration, a wait under a branch is passed over: it concerns the iteration before;
- an arrival is seen `handover` cycles later, what engines complete when it is complete; a wait takes `poll` cycles at least;
  who waits at a named barrier goes on `named` cycles after the last other arrival, and `met` after its own.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tilecast.model.compiled.code import CodeError
from tilecast.model.compiled.costs import PARTITIONS
from tilecast.model.compiled.roles.code import (
    MATRIX_KINDS,
    PIPES,
    Barrier,
    KernelRoles,
    RoleCode,
    RoleInstruction,
    together,
)
from tilecast.model.compiled.roles.costs import RoleCosts
from tilecast.model.compiled.units.wgmma import WgmmaQueue

#: Iterations of the matrix role: until the loops have found their rhythm, and those that are averaged.
_SETTLING, _AVERAGED = 8, 16
#: Kinds of instructions that wait for what other roles or engines do.
_ASKING = frozenset({"wait", "named_wait", "group_wait", "wgmma", "wgmma_wait"})
#: Passes through their loops that roles which only move data are ahead of those that multiply, at most.
_MOST_AHEAD = 2
_SHARED = ("shared_load", "shared_store")
#: How often all loops' instructions may be issued between two iterations of the matrix role before it waits for what never comes.
_PATIENCE = 100


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
    #: Cycles of the shared-memory port.
    port: float
    #: Beside wgmma: cycles of its pipe, of the register ports, and of a gap after it.
    beside: tuple[float, float, float]
    #: Its kind, where it waits for more than counters and pipes.
    asks: str


class _Warp:
    __slots__ = (
        "arrivals", "counters", "done", "free", "groups", "index", "issue", "iterates", "laps", "last", "left", "meeting", "multiplies", "name", "passed",
        "pc", "program", "reached", "skipped", "standing", "stored", "times", "under_way",
    )  # fmt: skip

    def __init__(
        self, index: int, name: str, issue: int, segments: Sequence[tuple[Sequence[RoleInstruction], float]], costs: RoleCosts,
        table: dict[RoleInstruction, _Prepared],
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
        #: When it came to the named barrier where it stands.
        self.reached = 0.0
        #: Named barrier where it stands -> which of its meetings.
        self.meeting: dict[int, int] = {}
        self.skipped: set[RoleInstruction] = set()

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


def _prepare(one: RoleInstruction, costs: RoleCosts) -> _Prepared:
    beside = (0.0, 0.0, 0.0)
    if costs.wgmma and one.kind != "mma_sync" and one.pipe in costs.wgmma.pipe:
        taken = costs.wgmma.pipe_under_mma[one.pipe]
        if one.kind == "shared_load":
            taken = costs.load_register * one.amount
        beside = (taken, costs.wgmma.ports_under_mma[one.pipe], costs.wgmma.gap_under_mma[one.pipe])
    product = costs.product(one) if one.kind in MATRIX_KINDS else (0.0, 0.0)
    taken = product[0] if one.kind == "mma_sync" else costs.occupies(one)
    port = costs.port(one) if one.kind in ("wgmma", *_SHARED) else 0.0
    waits = tuple(bit for bit in range(6) if one.waits >> bit & 1)
    return _Prepared(
        one, waits, taken, costs.latency[one.latency], product, port, beside, one.kind if one.kind in _ASKING else ""
    )


@dataclass(slots=True)
class _Meeting:
    """Threads that come to a named barrier until it opens."""

    #: (time, role).
    arrivals: list[tuple[float, int]]
    threads: int
    complete: bool


def _pieces(role: RoleCode, iterations: int | None, more: int) -> list[tuple[Sequence[RoleInstruction], float]]:
    """(code, how often) of a role; one that multiplies nothing goes round ``more`` often, for what others do outside of loops."""
    if iterations is None:
        return [(role.ahead, 1), (role.loop, math.inf)]
    multiplies = any(one.kind in MATRIX_KINDS for one in role.loop)
    return [(role.begin, 1), (role.loop, iterations + (0 if multiplies else more)), (role.end, 1)]


def _threads(one: RoleInstruction) -> int:
    """Threads that come to a named barrier with one role; where a file of loops does not say, all roles count alike."""
    return one.shape[0] or 1


class _State:
    """Everything that changes during a run."""

    def __init__(self, kernel: KernelRoles, costs: RoleCosts, iterations: int | None = None, more: int = 0) -> None:
        """Loops for ever where ``iterations`` is None, otherwise a tile of so many, and ``more`` of what multiplies nothing."""
        self.kernel, self.costs = kernel, costs
        table: dict[RoleInstruction, _Prepared] = {}
        partition = kernel.roles[kernel.matrix].warp % PARTITIONS
        self.warps = [
            _Warp(
                index,
                role.name,
                0 if role.warp % PARTITIONS == partition else index + 1,
                _pieces(role, iterations, more),
                costs,
                table,
            )
            for index, role in enumerate(kernel.roles)
        ]
        #: Barrier -> party -> when it arrived, phase by phase.
        self.arrived: list[dict[tuple[int, str], list[float]]] = [
            {(role, kind): [] for role, kind, _ in barrier.parties} for barrier in kernel.barriers
        ]
        self.per_phase = [{(role, kind): n for role, kind, n in barrier.parties} for barrier in kernel.barriers]
        #: Named barriers: their meetings, and the threads of all roles that ever come to one.
        self.meetings: list[list[_Meeting]] = [[] for _ in kernel.barriers]
        self.everybody = [0] * len(kernel.barriers)
        for role in kernel.roles:
            brought: dict[int, int] = {}
            for one in (*role.begin, *role.loop, *role.end):
                if one.kind in ("named_wait", "named_arrive") and one.barrier >= 0:
                    brought[one.barrier] = max(_threads(one), brought.get(one.barrier, 0))
            for barrier, threads in brought.items():
                self.everybody[barrier] += threads
        self.issue_free = [0.0] * (len(kernel.roles) + 1)
        self.pipe_free = dict.fromkeys(PIPES, 0.0)
        self.busy = dict.fromkeys((*PIPES, "issue", "port"), 0.0)
        self.tensor_free = self.copy_free = self.out_free = self.ports_free = self.port_free = 0.0
        #: Barriers of which any arrivals complete a phase: when they came, in their order.
        self.came: list[list[float]] = [[] for _ in kernel.barriers]
        hopper = costs.wgmma
        self.queue = (
            WgmmaQueue(len(self.warps), hopper.mma_queue, hopper.mma_latency, hopper.mma_hidden_fma) if hopper else None
        )
        #: Cycles from the end of the product issued last until its commit is seen.
        self.completion = 0.0
        #: Instructions issued so far.
        self.count = 0

    def complete(self, barrier: int, phase: int) -> float | None:
        """When the ``phase``-th phase (from 1) of a ring is complete; None while that is unknown."""
        if phase <= 0:
            return 0.0
        if count := self.kernel.barriers[barrier].anyone:
            came = self.came[barrier]
            return max(came[: phase * count]) if len(came) >= phase * count else None
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
        # Who waits at a named barrier has arrived there; it counts threads, whoever brings them.
        if one.barrier not in warp.meeting:
            warp.reached = at
            warp.meeting[one.barrier] = self.meet(warp, one, at)
        meeting = self.meetings[one.barrier][warp.meeting[one.barrier]]
        if not meeting.complete:
            return None
        return (
            max((time for time, role in meeting.arrivals if role != warp.index), default=-math.inf) + self.costs.named
        )

    def meet(self, warp: _Warp, one: RoleInstruction, at: float) -> int:
        """Arrive at a named barrier; which of its meetings that is."""
        meetings = self.meetings[one.barrier]
        if not meetings or meetings[-1].complete:
            meetings.append(_Meeting([], 0, False))
        meeting = meetings[-1]
        meeting.arrivals.append((at, warp.index))
        meeting.threads += _threads(one)
        meeting.complete = meeting.threads >= (one.amount if one.amount > 0 else self.everybody[one.barrier])
        return len(meetings) - 1

    def arrive(self, warp: _Warp, one: RoleInstruction, at: float) -> None:
        if one.barrier < 0:
            return
        if self.kernel.barriers[one.barrier].anyone:
            self.came[one.barrier].append(at)
            return
        party = (one.barrier, one.kind)
        warp.arrivals[party] += 1
        if warp.arrivals[party] % self.per_phase[one.barrier][warp.index, one.kind] == 0:
            self.arrived[one.barrier][warp.index, one.kind].append(at)

    def skip_guarded(self) -> bool:
        """Where everybody waits: let a warp past a wait under a branch, which the first iteration may do without, once."""
        for warp in self.warps:
            if warp.done:
                continue
            one = warp.program[warp.pc].code
            if one.guarded and not warp.laps and one not in warp.skipped:
                warp.skipped.add(one)
                warp.advance(warp.free)
                return True
        return False

    def open_meeting(self) -> bool:
        """Where everybody waits: open a named barrier outside of the loops, to which others come than could be told."""
        for warp in self.warps:
            if not warp.done and not warp.iterates:
                for barrier, at in warp.meeting.items():
                    meeting = self.meetings[barrier][at]
                    if not meeting.complete:
                        meeting.complete = True
                        return True
        return False

    def leave(self) -> bool:
        """Where all that multiply are through: let others go, who wait for what only a next tile would bring.

        A role that brings two blocks an iteration is then ahead of those that take one.
        """
        waiting = [warp for warp in self.warps if not warp.done]
        if any(warp.left or warp.iterates for warp in waiting if warp.multiplies):
            return False
        for warp in waiting:
            warp.done = True
        return bool(waiting)

    def ready(self, warp: _Warp) -> float | None:
        """Earliest issue of the warp's next instruction; None while it waits for something unknown."""
        prepared = warp.program[warp.pc]
        at, counters = warp.free, warp.counters
        for bit in prepared.waits:
            if counters[bit] > at:
                at = counters[bit]
        asks = prepared.asks
        if asks:
            known = self.answered(warp, prepared.code, at)
            if known is None:
                return None
            at = known
        if warp.issue == 0 and asks != "wgmma":
            taken = self.pipe_free[prepared.code.pipe]
            if taken > at:
                at = taken
            if prepared.beside[1] and self.ports_free > at:
                at = self.ports_free
        free = self.issue_free[warp.issue]
        return free if free > at else at

    def answered(self, warp: _Warp, one: RoleInstruction, at: float) -> float | None:
        """When a warp that could go on ``at`` may do so for what others do; None while that is unknown."""
        if one.kind in ("wait", "named_wait"):
            opens = self.opens(warp, one, at)
            if opens is None:
                return None
            return max(at, opens) if one.kind == "named_wait" else at
        if one.kind == "group_wait":
            return max(at, warp.groups[-1 - one.amount]) if len(warp.groups) > one.amount else at
        if self.queue is None:
            return at
        return self.queue.room(at) if one.kind == "wgmma" else self.queue.through(warp.index, one.amount, at)

    def occupy(self, prepared: _Prepared, now: float) -> tuple[float, float]:
        """(cycles of its pipe, cycles beyond its stall) of an instruction that is issued at ``now``."""
        queue = self.queue
        if queue is None or not queue.runs(now):
            return prepared.taken, 0.0
        if prepared.code.pipe == "fma" and now < queue.free:
            # A matrix instruction that does not advance does not slow others either.
            hides = queue.hidden > 0.0
            queue.steal()
            if not hides:
                return prepared.taken, 0.0
        taken, ports, gap = prepared.beside
        if prepared.code.kind in _SHARED:
            taken = max(taken, queue.through_port(prepared.port))
        self.ports_free = max(self.ports_free, now) + ports
        return taken, gap

    def issue(self, warp: _Warp, now: float) -> None:
        """Effects of the warp's next instruction, issued at ``now``."""
        prepared, costs = warp.program[warp.pc], self.costs
        one = prepared.code
        self.issue_free[warp.issue] = now + 1.0
        result, release, after = now + prepared.latency, now + costs.operand_release, now + one.stall
        start = now
        if warp.issue == 0:
            self.busy["issue"] += 1.0
            if one.kind not in ("matrix", "wgmma"):
                taken, gap = self.occupy(prepared, now)
                after += gap
                start = max(self.pipe_free[one.pipe], now)
                self.pipe_free[one.pipe] = start + taken
                self.busy[one.pipe] += prepared.taken
        if one.kind in ("tensor_load", "tensor_store"):
            result = release = start + prepared.taken + costs.tensor_memory
        elif one.kind in _SHARED and self.queue:
            self.port_free = max(self.port_free, start) + prepared.port
            self.busy["port"] += prepared.port
            # Accesses go through the port in order, and the next one waits for it.
            self.pipe_free[one.pipe] = max(self.pipe_free[one.pipe], self.port_free)
            result = self.pipe_free[one.pipe] + prepared.latency
            if one.kind == "shared_store":
                warp.stored = self.pipe_free[one.pipe]
            self.queue.take_port(start, prepared.port)
        elif one.kind == "wait":
            opens = self.opens(warp, one, now) or 0.0
            result = max(now + costs.poll, opens)
            warp.standing[one.barrier] += max(0.0, opens - now - costs.poll)
            warp.passed[one.barrier] += 1
        elif one.kind == "named_wait":
            after = max(after, warp.reached + costs.met)
            warp.standing[one.barrier] += max(0.0, now - warp.free)
            warp.meeting.pop(one.barrier, None)
            warp.passed[one.barrier] += 1
        elif one.kind == "named_arrive":
            if one.barrier >= 0:
                self.meet(warp, one, now)
        elif one.kind == "arrive":
            self.arrive(warp, one, now + (costs.remote if one.pair else costs.handover))
        elif one.kind == "matrix":
            cycles, self.completion = prepared.product
            self.tensor_free = max(self.tensor_free, now) + cycles
            self.busy["tensor"] += cycles
        elif one.kind == "wgmma" and self.queue:
            self.queue.issue(warp.index, now, prepared.product[0], bool(one.amount), prepared.port)
            self.busy["tensor"] += prepared.product[0]
            self.busy["port"] += prepared.port
        elif one.kind == "group_copy":
            # 32 lanes of a warp on each of the sub-partitions.
            self.copy_free = max(self.copy_free, now) + 32 * PARTITIONS * one.amount / costs.lane_bytes
            warp.under_way = self.copy_free + costs.lane_latency
        elif one.kind == "group":
            warp.groups.append(max(warp.under_way, now))
        elif one.kind == "commit":
            self.arrive(warp, one, max(self.tensor_free, now) + self.completion)
        elif one.kind == "copy":
            self.copy_free = max(self.copy_free, now) + one.amount / costs.copy_bytes
            self.arrive(warp, one, self.copy_free + costs.copy_latency)
        elif one.kind == "copy_out":
            begin = max(self.out_free, now)
            rate = costs.add_bytes if one.source == "add" else costs.out_bytes
            self.out_free = begin + one.amount / rate
            warp.under_way = self.out_free + costs.out_latency
            if self.queue:
                self.busy["port"] += one.amount / costs.port_bytes
                self.queue.stream(begin, self.out_free, rate / costs.port_bytes)
        elif one.kind == "fence":
            result = max(result, now + costs.fence, warp.stored)
            release = max(release, warp.stored)
        counters = warp.counters
        if one.write_counter < 6:
            counters[one.write_counter] = max(counters[one.write_counter], result)
        if one.read_counter < 6:
            counters[one.read_counter] = max(counters[one.read_counter], release)
        warp.free = after
        warp.advance(now)


def _step(state: _State) -> None:
    """Issue the next instruction; CodeError where everybody waits for something that never comes."""
    while True:
        chosen, best = None, math.inf
        for warp in state.warps:
            # A warp is ready no earlier than it is free; who stands at a named barrier is counted there when asked.
            if warp.done or (warp.free > best and warp.program[warp.pc].asks != "named_wait"):
                continue
            ready = state.ready(warp)
            if ready is not None and (
                ready < best or (ready == best and chosen is not None and warp.last < chosen.last)
            ):
                chosen, best = warp, ready
        if state.queue and (service := state.queue.next_service()) <= best and service < math.inf:
            state.queue.serve(service)
        elif chosen is not None:
            state.count += 1
            chosen.last = state.count
            state.issue(chosen, best)
            return
        elif all(warp.done for warp in state.warps):
            return
        elif not (state.skip_guarded() or state.open_meeting() or state.leave()):
            raise CodeError(
                f"{state.kernel.kernel}: its roles wait for each other: {_standing(state)}; the reading of the code is wrong"
            )


def run_roles(kernel: KernelRoles, costs: RoleCosts, ctas: int = 1) -> RolesRun:
    """The steady state of ``ctas`` CTAs on an SM; CodeError when roles wait for something that never comes."""
    kernel = together(kernel, ctas)
    state = _State(kernel, costs)
    matrix = state.warps[kernel.matrix]
    at: dict[str, float] = {}
    begun: list[dict[int, float]] = []
    patience = _PATIENCE * sum(len(role.loop) for role in kernel.roles)
    seen, since = 0, 0
    while len(matrix.laps) < _SETTLING + _AVERAGED:
        if not begun and len(matrix.laps) == _SETTLING:
            at, begun = dict(state.busy), [dict(warp.standing) for warp in state.warps]
        _step(state)
        if len(matrix.laps) > seen:
            seen, since = len(matrix.laps), state.count
        elif state.count - since > patience:
            raise CodeError(
                f"{kernel.kernel}: {matrix.name} waits while other roles go round: {_standing(state)}; the reading of the code is wrong"
            )
    laps, averaged = matrix.laps, _AVERAGED * kernel.unrolled
    waits = {
        (warp.name, kernel.barriers[barrier].name): (cycles - before.get(barrier, 0.0)) / averaged
        for warp, before in zip(state.warps, begun, strict=True)
        for barrier, cycles in warp.standing.items()
    }
    busy = {name: (cycles - at[name]) / averaged for name, cycles in state.busy.items()}
    # Products that nobody waits for are issued ahead of the tensor core, but not for ever.
    return RolesRun(max((laps[-1] - laps[_SETTLING - 1]) / averaged, busy["tensor"]), busy, waits)


def tile_cycles(kernel: KernelRoles, costs: RoleCosts, iterations: int, ctas: int = 1) -> float:
    """Cycles from the first instruction of ``ctas`` CTAs, begun together, to the last of a tile of ``iterations`` each, which its
    unrolled loops divide.

    CodeError when roles wait for something that never comes, or the kernel comes without the code around its loops.
    """
    if not all(role.begin for role in kernel.roles):
        raise CodeError(f"{kernel.kernel}: expected the code around its loops, got the loops alone")
    kernel = together(kernel, ctas)
    for more in range(_MOST_AHEAD + 1):
        state = _State(kernel, costs, iterations // kernel.unrolled, more)
        try:
            while not all(warp.done for warp in state.warps):
                _step(state)
        except CodeError:
            # What multiplies takes more blocks than iterations of its loop: some before it, or outside.
            if more == _MOST_AHEAD:
                raise
            continue
        return max(warp.free for warp in state.warps)
    raise AssertionError("unreachable")


def pass_cycles(code: Sequence[RoleInstruction], costs: RoleCosts, beside: Sequence[RoleInstruction] = ()) -> float:
    """Cycles of a warp that runs ``code`` once and finds every mbarrier open, while another goes round the loop ``beside``."""
    roles = [RoleCode("beside", 0, (), _open(beside))] if beside else []
    roles.append(RoleCode("code", 0, _open(code), ()))
    numbers = {one.barrier for role in roles for one in (*role.ahead, *role.loop)}
    named = tuple(Barrier(f"#{number}", 1, True, ()) for number in range(max(numbers, default=-1) + 1))
    state = _State(KernelRoles("", "", tuple(roles), named), costs)
    while not state.warps[-1].done:
        _step(state)
    return state.warps[-1].free


def _open(code: Sequence[RoleInstruction]) -> tuple[RoleInstruction, ...]:
    """The same, in which mbarriers are nobody's."""
    return tuple(one if one.kind in ("named_wait", "named_arrive") else one._replace(barrier=-1) for one in code)


def _standing(state: _State) -> str:
    """Who waits where."""
    found = []
    for warp in state.warps:
        if not warp.done:
            one = warp.program[warp.pc].code
            where = state.kernel.barriers[one.barrier].name if one.barrier >= 0 else one.kind
            found.append(f"{warp.name} at {where}")
    return ", ".join(found)
