"""What changes while warp roles run against each other: barriers, queues, pipes, and what an instruction does to them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilecast.model.compiled.costs import PARTITIONS
from tilecast.model.compiled.roles.code import PIPES, KernelRoles, RoleInstruction
from tilecast.model.compiled.roles.costs import RoleCosts
from tilecast.model.compiled.roles.port import PortLine
from tilecast.model.compiled.roles.warps import SHARED, Prepared, Warp, pieces
from tilecast.model.compiled.units.wgmma import WgmmaQueue


@dataclass(slots=True)
class _Meeting:
    """Threads that come to a named barrier until it opens."""

    #: (time, role).
    arrivals: list[tuple[float, int]]
    threads: int
    complete: bool


def _threads(one: RoleInstruction) -> int:
    """Threads that come to a named barrier with one role; where a file of loops does not say, all roles count alike."""
    return one.shape[0] or 1


class State:
    """Everything that changes during a run."""

    def __init__(self, kernel: KernelRoles, costs: RoleCosts, iterations: int | None = None, more: int = 0) -> None:
        """Loops for ever where ``iterations`` is None, otherwise a tile of so many, and ``more`` of what multiplies nothing."""
        self.kernel, self.costs = kernel, costs
        table: dict[RoleInstruction, Prepared] = {}
        partition = kernel.roles[kernel.matrix].warp % PARTITIONS
        self.warps = [
            Warp(
                index,
                role.name,
                0 if role.warp % PARTITIONS == partition else index + 1,
                pieces(role, iterations, more),
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
        self.all_threads = [0] * len(kernel.barriers)
        for role in kernel.roles:
            brought: dict[int, int] = {}
            for one in (*role.begin, *role.loop, *role.end):
                if one.kind in ("named_wait", "named_arrive") and one.barrier >= 0:
                    brought[one.barrier] = max(_threads(one), brought.get(one.barrier, 0))
            for barrier, threads in brought.items():
                self.all_threads[barrier] += threads
        self.issue_free = [0.0] * (len(kernel.roles) + 1)
        self.pipe_free = dict.fromkeys(PIPES, 0.0)
        self.busy = dict.fromkeys((*PIPES, "issue", "port"), 0.0)
        self.tensor_free = self.copy_free = self.out_free = self.slot_free = 0.0
        #: Barriers of which any arrivals complete a phase: when they came, in their order.
        self.came: list[list[float]] = [[] for _ in kernel.barriers]
        hopper = costs.wgmma
        self.queue = (
            WgmmaQueue(len(self.warps), hopper.mma_queue, hopper.mma_latency, hopper.mma_fetch, hopper.mma_beside_copy)
            if hopper
            else None
        )
        self.line = PortLine(self.queue, costs) if self.queue else None
        #: Cycles from the end of the product issued last until its commit is seen.
        self.completion = 0.0
        #: Instructions issued so far.
        self.count = 0

    def complete(self, barrier: int, phase: int) -> float | None:
        """When the ``phase``-th phase (from 1) of a ring is complete; None while that is unknown."""
        if phase <= 0:
            return 0.0
        if count := self.kernel.barriers[barrier].arrivals_by_turns:
            came = self.came[barrier]
            return max(came[: phase * count]) if len(came) >= phase * count else None
        at = 0.0
        for times in self.arrived[barrier].values():
            if len(times) < phase:
                return None
            at = max(at, times[phase - 1])
        return at

    def opens(self, warp: Warp, one: RoleInstruction, at: float) -> float | None:
        """When what a wait waits for is there, of a warp that gets to it at ``at``."""
        if one.barrier < 0:
            return 0.0
        barrier = self.kernel.barriers[one.barrier]
        if one.kind == "wait":
            return self.complete(one.barrier, warp.passed[one.barrier] + 1 - barrier.stages * one.amount)
        # A warp that waits at a named barrier has arrived there; it counts threads of any warp.
        if one.barrier not in warp.meeting:
            warp.reached = at
            warp.meeting[one.barrier] = self.meet(warp, one, at)
        meeting = self.meetings[one.barrier][warp.meeting[one.barrier]]
        if not meeting.complete:
            return None
        return (
            max((time for time, role in meeting.arrivals if role != warp.index), default=-math.inf) + self.costs.named
        )

    def meet(self, warp: Warp, one: RoleInstruction, at: float) -> int:
        """Arrive at a named barrier; which of its meetings that is."""
        meetings = self.meetings[one.barrier]
        if not meetings or meetings[-1].complete:
            meetings.append(_Meeting([], 0, False))
        meeting = meetings[-1]
        meeting.arrivals.append((at, warp.index))
        meeting.threads += _threads(one)
        meeting.complete = meeting.threads >= (one.amount if one.amount > 0 else self.all_threads[one.barrier])
        return len(meetings) - 1

    def arrive(self, warp: Warp, one: RoleInstruction, at: float) -> None:
        """Counts an instruction of ``warp`` at time ``at`` (cycles) as an arrival at its barrier, if it has one."""
        if one.barrier < 0:
            return
        if self.kernel.barriers[one.barrier].arrivals_by_turns:
            self.came[one.barrier].append(at)
            return
        party = (one.barrier, one.kind)
        if (warp.index, one.kind) not in self.per_phase[one.barrier]:
            return  # once a tile, at a barrier whose phases are those of the loops' arrivals
        warp.arrivals[party] += 1
        if warp.arrivals[party] % self.per_phase[one.barrier][warp.index, one.kind] == 0:
            self.arrived[one.barrier][warp.index, one.kind].append(at)

    def skip_guarded(self) -> bool:
        """Where all warps wait: let a warp past a wait under a branch, which the first iteration may do without, once."""
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
        """Where all warps wait: open a named barrier outside of the loops, to which others come than could be told."""
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

    def ready(self, warp: Warp) -> float | None:
        """Earliest issue of the warp's next instruction; None while it waits for something unknown."""
        prepared = warp.program[warp.pc]
        at, counters = warp.free, warp.counters
        if not prepared.hold and warp.held > at:
            at = warp.held
        for bit in prepared.waits:
            if counters[bit] > at:
                at = counters[bit]
        if at == math.inf:
            return None
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
            if prepared.beside[1] and self.queue and self.slot_free > at:
                at = max(at, min(self.slot_free, self.queue.busy(at)))
        free = self.issue_free[warp.issue]
        return free if free > at else at

    def answered(self, warp: Warp, one: RoleInstruction, at: float) -> float | None:
        """When a warp that could go on ``at`` may do so for what others do; None while that is unknown."""
        if one.kind in ("wait", "named_wait"):
            opens = self.opens(warp, one, at)
            if opens is None:
                return None
            return max(at, opens) if one.kind == "named_wait" else at
        if one.kind == "group_wait":
            return max(at, warp.groups[-1 - one.amount]) if len(warp.groups) > one.amount else at
        if self.queue is None or self.line is None:
            return at
        if one.kind in SHARED:
            return self.line.room(at)
        if one.kind == "fence":
            # It waits for the warp's stores.
            return None if warp.storing else at
        return self.queue.room(at) if one.kind == "wgmma" else self.queue.through(warp.index, one.amount, at)

    def occupy(self, prepared: Prepared, now: float) -> float:
        """Cycles of its pipe that an instruction takes which is issued at ``now``."""
        if self.queue is None or not self.queue.runs(now):
            return prepared.taken
        taken, slot = prepared.beside
        if slot:
            self.slot_free = max(self.slot_free, now) + slot
        # What more an access to shared memory takes, it takes in line.
        return prepared.taken if prepared.code.kind in SHARED else taken

    def issue(self, warp: Warp, now: float) -> None:
        """Effects of the warp's next instruction, issued at ``now``."""
        prepared, costs = warp.program[warp.pc], self.costs
        one = prepared.code
        self.issue_free[warp.issue] = now + 1.0
        result, release, after = now + prepared.latency, now + costs.operand_release, now + prepared.stall
        start = now
        if prepared.hold and now >= warp.held and self.queue and self.queue.runs(now) and self.queue.holds(now):
            warp.held = now + prepared.hold
        if warp.issue == 0:
            self.busy["issue"] += 1.0
            if one.kind not in ("matrix", "wgmma"):
                taken = self.occupy(prepared, now)
                start = max(self.pipe_free[one.pipe], now)
                self.pipe_free[one.pipe] = start + taken
                self.busy[one.pipe] += prepared.taken
        if one.kind in ("tensor_load", "tensor_store"):
            result = release = start + prepared.taken + costs.tensor_memory
        elif one.kind in SHARED and self.line:
            self.busy["port"] += prepared.port
            self.line.enter(warp, prepared, start)
            result = 0.0
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
            self.queue.issue(
                warp.index, now, prepared.product[0], bool(one.amount), prepared.port, one.source == "smem"
            )
            self.busy["tensor"] += prepared.product[0]
            self.busy["port"] += prepared.port
        elif one.kind == "group_copy":
            # 32 lanes of a warp on each of the sub-partitions; what lanes bring into shared memory products pay for as for tiles.
            size = 32 * PARTITIONS * one.amount
            self.copy_free = max(self.copy_free, now) + size / costs.lane_bytes
            warp.under_way = self.copy_free + costs.lane_latency
            if self.queue:
                self.queue.copy(warp.under_way - size / costs.copy_bytes, warp.under_way)
        elif one.kind == "group":
            warp.groups.append(max(warp.under_way, now))
        elif one.kind == "commit":
            self.arrive(warp, one, max(self.tensor_free, now) + self.completion)
        elif one.kind == "copy":
            self.copy_free = max(self.copy_free, now) + one.amount / costs.copy_bytes
            landed = self.copy_free + costs.copy_latency
            if self.queue:
                self.queue.copy(landed - one.amount / costs.copy_bytes, landed)
            self.arrive(warp, one, landed)
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
            warp.clear(one.write_counter, result)
        if one.read_counter < 6:
            counters[one.read_counter] = max(counters[one.read_counter], release)
        warp.free = after
        warp.advance(now)
