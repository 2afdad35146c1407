"""One run of a loop on one SM, from event to event: in-order roles, asynchronous engines, fluidly shared units.

Every running operation advances at a speed between 0 and 1 of what it would reach alone.  At each event the
speeds are the max-min fair shares of the units the operations draw on: all speeds rise together until a unit is
full, the operations on that unit freeze there, the others go on.  The matrix engine serves one operation at a
time in issue order, and so do the chip's memory and L2 the copies that go through their queues; others run side by side.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from operator import mul

import numpy as np
from numpy.typing import NDArray

from tilecast.model.pipeline.graph import PipelineError
from tilecast.model.sm.fluid import EPS_CYCLES as EPS
from tilecast.model.sm.loop import L2, MATRIX, MEMORY, SYNC, Loop

#: Two states of the loop repeat each other when their times differ by no more than this share of a lap.
SAME = 3e-4


@dataclass(frozen=True, slots=True)
class Ran:
    """A finished run: blocks run, how many of them with masks, and (laps, cycles) of the repetition found, None without one.

    ``table`` has when every operation was issued, started and ended, [3][operation][block]; a matrix operation is issued
    before it starts.
    """

    names: tuple[str, ...]
    blocks: int
    masked: int
    period: tuple[int, float] | None
    table: NDArray[np.float64]

    @property
    def issued(self) -> list[list[float]]:
        """By operation, block by block."""
        found: list[list[float]] = self.table[0].tolist()
        return found

    @property
    def started(self) -> list[list[float]]:
        """By operation, block by block."""
        found: list[list[float]] = self.table[1].tolist()
        return found

    @property
    def ended(self) -> list[list[float]]:
        """By operation, block by block."""
        found: list[list[float]] = self.table[2].tolist()
        return found


def run_loop(loop: Loop, blocks: int, masked: int, *, stop_early: bool) -> Ran:
    """Run ``blocks`` blocks, the first ``masked`` with masks; no more than repeat each other, with ``stop_early``.

    Raises PipelineError when the roles deadlock, naming what waits for what.
    """
    run = Run(loop, blocks, masked, stop_early=stop_early)
    run.run()
    return Ran(loop.body.names, run.blocks, masked, run.period, np.array([run.issued, run.started, run.ended]))


class Run:
    """State of one run; mutable, and never seen outside `run_loop`.

    ``issued``, ``started`` and ``ended`` hold the times of every operation block by block (a matrix operation is issued
    before it starts).  ``period`` is (laps, cycles) of the repetition found, None without one.
    """

    def __init__(self, loop: Loop, blocks: int, masked: int, *, stop_early: bool) -> None:
        self.loop, self.blocks, self.masked = loop, blocks, masked
        self.stop_early = stop_early
        self.now = 0.0
        self.issued: list[list[float]] = [[] for _ in range(loop.body.count)]
        self.started: list[list[float]] = [[] for _ in range(loop.body.count)]
        self.ended: list[list[float]] = [[] for _ in range(loop.body.count)]
        self.period: tuple[int, float] | None = None
        roles = range(len(loop.body.programs))
        self.lap = [-max(shift for _, shift in program) for program in loop.body.programs]
        self.step = [0 for _ in roles]
        #: Per role: its next operation (-1 when done) and that one's block, since when the role is free, when it may start.
        self.op, self.block = [-1 for _ in roles], [0 for _ in roles]
        self.free, self.ready = [0.0 for _ in roles], [inf for _ in roles]
        #: Per operation: roles that wait for its end.
        self.waiting: list[list[int]] = [[] for _ in range(loop.body.count)]
        #: Running operations and what is left of each; operations in the queues of the matrix engine, the memory and L2.
        self.running: list[int] = []
        self.left: list[float] = []
        self.queues: dict[int, deque[int]] = {MATRIX: deque(), MEMORY: deque(), L2: deque()}
        self.busy = dict.fromkeys(self.queues, False)
        self._seen: dict[tuple[object, ...], list[tuple[int, float, list[float]]]] = {}
        for role in roles:
            self._next(role)

    def run(self) -> None:
        """Advance from event to event until every program is done; PipelineError on deadlock."""
        pacer, lap = self.loop.body.pacer, self.lap[self.loop.body.pacer]
        while True:
            upcoming = self._start()
            if self.lap[pacer] != lap:
                lap = self.lap[pacer]
                if self.period is None:
                    self._compare(lap)
            if self.running:
                self._advance(upcoming)
            elif upcoming < inf:
                self.now = upcoming
            elif any(op >= 0 for op in self.op):
                waiting = [
                    (self.loop.body.names[op], block) for op, block in zip(self.op, self.block, strict=True) if op >= 0
                ]
                raise PipelineError(
                    f"pipeline {self.loop.name} deadlocks: "
                    + ", ".join(f"{name} of block {block}" for name, block in waiting)
                    + " wait for each other"
                )
            else:
                return

    def _next(self, role: int) -> None:
        """Move a role to its next operation; its program skips blocks that do not exist."""
        program, step, lap = self.loop.body.programs[role], self.step[role], self.lap[role]
        length, blocks = len(program), self.blocks
        while lap <= blocks:
            if step == length:
                step, lap = 0, lap + 1
            op, shift = program[step]
            step += 1
            if 0 <= lap + shift < blocks:
                self.step[role], self.lap[role], self.op[role], self.block[role] = step, lap, op, lap + shift
                self._look(role)
                return
        self.op[role], self.ready[role] = -1, inf

    def _look(self, role: int) -> None:
        """When a role's next operation may start; never, and a note to ask again, while a source has not ended."""
        op, block = self.op[role], self.block[role]
        when = self.free[role]
        for src, distance, latency in self.loop.sources[op]:
            at = block - distance
            if at < 0:
                continue
            ends = self.ended[src]
            if at >= len(ends):
                self.waiting[src].append(role)
                self.ready[role] = inf
                return
            if ends[at] + latency > when:
                when = ends[at] + latency
        self.ready[role] = when

    def _start(self) -> float:
        """Start what can start now; returns the next known time at which something may (inf if none)."""
        ready, loop, now = self.ready, self.loop, self.now
        soon = now + EPS
        upcoming = min(ready)
        while upcoming <= soon:
            for role, when in enumerate(ready):
                if when > soon:
                    continue
                op = self.op[role]
                number = op + loop.body.count if self.block[role] < self.masked else op
                kind = loop.body.engine[op]
                self.issued[op].append(now)
                if kind == SYNC:
                    ready[role] = inf
                else:
                    self.free[role] = now + loop.body.issue[op]
                    self._next(role)
                if kind in self.queues:
                    self.queues[kind].append(number)
                else:
                    self.started[op].append(now)
                    self.running.append(number)
                    self.left.append(loop.body.alone[number])
            upcoming = min(ready)
        for kind, queue in self.queues.items():
            if queue and not self.busy[kind]:
                number = queue.popleft()
                self.started[number % loop.body.count].append(now)
                self.running.append(number)
                self.left.append(loop.body.alone[number])
                self.busy[kind] = True
        return upcoming

    def _advance(self, upcoming: float) -> None:
        """Let time pass to the next event."""
        running = self.running
        speeds, slowness = self.loop.body.speeds(running)
        step = min(map(mul, self.left, slowness))
        if upcoming - self.now < step:
            step = upcoming - self.now
        self.now += step
        self.left = left = [rest - step * speed for rest, speed in zip(self.left, speeds)]  # noqa: B905 (the hot loop)
        if min(left) > EPS:
            return
        self.running = [op for op, rest in zip(running, left) if rest > EPS]  # noqa: B905
        self.left = [rest for rest in left if rest > EPS]
        for number, rest in zip(running, left):  # noqa: B905
            if rest <= EPS:
                self._finish(number % self.loop.body.count)

    def _finish(self, op: int) -> None:
        self.ended[op].append(self.now)
        kind = self.loop.body.engine[op]
        if kind in self.queues:
            self.busy[kind] = False
        elif kind == SYNC:
            role = self.loop.body.role_of[op]
            self.free[role] = self.now
            self._next(role)
        if self.waiting[op]:
            roles, self.waiting[op] = self.waiting[op], []
            for role in roles:
                self._look(role)

    def _compare(self, lap: int) -> None:
        """Look for an earlier lap that began in the same state, from which on everything repeats."""
        blocks = [block for op, block in zip(self.op, self.block, strict=True) if op >= 0]
        ended = [len(ends) for ends in self.ended]
        if min(ended) < self.masked or max(blocks, default=self.blocks) + 1 >= self.blocks:
            return
        now, times = self.now, list[float]()
        for when, free in zip(self.ready, self.free, strict=True):
            times.append(max(0.0, when - now) if when < inf else 0.0)
            times.append(max(0.0, free - now))
        recent = []
        for ends, reach in zip(self.ended, self.loop.reach, strict=True):
            count = 0
            # What ended so lately that its hand-over is still on the way.
            while count < len(ends) and ends[-1 - count] + reach > now + EPS:
                times.append(ends[-1 - count] - now)
                count += 1
            recent.append(count)
        times += self.left
        key = (
            tuple(self.step), tuple([at - lap for at in self.lap]), tuple([when == inf for when in self.ready]),
            tuple(self.running), *(tuple(queue) for queue in self.queues.values()), tuple([count - lap for count in ended]), tuple(recent),
        )  # fmt: skip
        earlier = self._seen.setdefault(key, [])
        for before, then, other in earlier:
            if all(abs(a - b) <= SAME * (now - then) / (lap - before) for a, b in zip(times, other, strict=True)):
                self.period = lap - before, now - then
                if self.stop_early:
                    # No role has come to a later block yet: the tile may end here as well.
                    self.blocks = max(blocks) + 1
                return
        earlier.append((lap, now, times))
