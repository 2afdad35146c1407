"""One run of a loop on one SM, from event to event: in-order roles, asynchronous engines, fluidly shared units.

Every running operation advances at a speed between 0 and 1 of what it would reach alone.  At each event the
speeds are the max-min fair shares of the units the operations draw on: all speeds rise together until a unit is
full, the operations on that unit freeze there, the others go on.  The matrix engine serves one operation at a
time in issue order; copies run side by side.

Operations go by number: that of the pipeline in a plain block, and count + that in a block with masks.
"""

from __future__ import annotations

from collections import deque
from math import inf
from operator import attrgetter, mul

from tilecast.model.pipeline.graph import Op, Pipeline, PipelineError
from tilecast.model.sm.fair_share import speed_of_each, use_of
from tilecast.model.sm.fluid import EPS_CYCLES as EPS

#: Two states of the loop repeat each other when their times differ by no more than this share of a lap.
SAME = 3e-4
_SYNC, _MATRIX, _COPY = range(3)
_shares = attrgetter("tensor", "shares", "fma", "hidden_fma")


def with_mask(pipeline: Pipeline) -> dict[str, Op]:
    """Operations as they run in a block that crosses a mask boundary."""
    masked: dict[str, Op] = {}
    for name, extra in pipeline.mask_demand:
        op = pipeline.op(name)
        demand = dict(op.demand)
        slower = 0.0
        for unit, cycles in extra:
            demand[unit] = demand.get(unit, 0.0) + cycles
            slower = max(slower, cycles)
        masked[name] = Op(
            op.name, op.kind, op.role, tuple(demand.items()), op.min_cycles + slower,
            op.engine, op.issue_cycles, op.tile, op.instructions, op.hidden_fma,
        )  # fmt: skip
    return masked


class Loop:
    """What all runs of one loop share: its operations by number, and the fair speeds found so far."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.name = pipeline.name
        plain, masked = pipeline.ops, with_mask(pipeline)
        number = {op.name: k for k, op in enumerate(plain)}
        self.names = tuple(number)
        self.count = len(plain)
        self.ops = (*plain, *(masked.get(op.name, op) for op in plain))
        self.alone = [op.min_cycles for op in self.ops]
        self.issue = [op.issue_cycles for op in plain]
        self.engine = [_MATRIX if op.engine == "tensor" else _COPY if op.engine else _SYNC for op in plain]
        self.sources: list[list[tuple[int, int, float]]] = [[] for _ in plain]
        self.reach = [0.0] * self.count
        for edge in pipeline.edges:
            src = number[edge.src]
            self.sources[number[edge.dst]].append((src, edge.distance, edge.latency_cycles))
            self.reach[src] = max(self.reach[src], edge.latency_cycles)
        self.programs = [[(number[step.op], step.shift) for step in role.program] for role in pipeline.roles]
        self.role_of = [0] * self.count
        for role, program in enumerate(self.programs):
            for op, _ in program:
                self.role_of[op] = role
        #: The role whose laps are watched for repetition: the one with most to do.
        self.pacer = max(range(len(self.programs)), key=lambda role: len(self.programs[role]))
        self._uses = [use_of(op) for op in self.ops]
        self._place = {use: place for place, use in enumerate(sorted(set(self._uses), key=_shares))}
        self._speeds: dict[tuple[int, ...], tuple[tuple[float, ...], tuple[float, ...]]] = {}

    def speeds(self, running: list[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Fair speeds of the ``running`` operations, and cycles they take for a cycle's work."""
        key = tuple(running)
        found = self._speeds.get(key)
        if found is None:
            uses = [self._uses[op] for op in key]
            of = speed_of_each(tuple(sorted(uses, key=self._place.__getitem__)))
            speeds = tuple([of[use] for use in uses])
            found = self._speeds[key] = speeds, tuple([1.0 / speed if speed > 0 else inf for speed in speeds])
        return found


class Run:
    """State of one run; mutable, and never seen outside `simulate`.

    ``issued``, ``started`` and ``ended`` hold the times of every operation block by block (a matrix operation is issued
    before it starts).  ``period`` is (laps, cycles) of the repetition found, None without one.
    """

    def __init__(self, loop: Loop, blocks: int, masked: int, *, stop_early: bool) -> None:
        self.loop, self.blocks, self.masked = loop, blocks, masked
        self.stop_early = stop_early
        self.now = 0.0
        self.issued: list[list[float]] = [[] for _ in range(loop.count)]
        self.started: list[list[float]] = [[] for _ in range(loop.count)]
        self.ended: list[list[float]] = [[] for _ in range(loop.count)]
        self.period: tuple[int, float] | None = None
        roles = range(len(loop.programs))
        self.lap = [-max(shift for _, shift in program) for program in loop.programs]
        self.step = [0 for _ in roles]
        #: Per role: its next operation (-1 when done) and that one's block, since when the role is free, when it may start.
        self.op, self.block = [-1 for _ in roles], [0 for _ in roles]
        self.free, self.ready = [0.0 for _ in roles], [inf for _ in roles]
        #: Per operation: roles that wait for its end.
        self.waiting: list[list[int]] = [[] for _ in range(loop.count)]
        #: Running operations and what is left of each; matrix operations in the queue.
        self.running: list[int] = []
        self.left: list[float] = []
        self.queue: deque[int] = deque()
        self.engine_busy = False
        self._seen: dict[tuple[object, ...], list[tuple[int, float, list[float]]]] = {}
        for role in roles:
            self._next(role)

    def run(self) -> None:
        """Advance from event to event until every program is done; PipelineError on deadlock."""
        pacer, lap = self.loop.pacer, self.lap[self.loop.pacer]
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
                    (self.loop.names[op], block) for op, block in zip(self.op, self.block, strict=True) if op >= 0
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
        program, step, lap = self.loop.programs[role], self.step[role], self.lap[role]
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
                number = op + loop.count if self.block[role] < self.masked else op
                kind = loop.engine[op]
                self.issued[op].append(now)
                if kind == _SYNC:
                    ready[role] = inf
                else:
                    self.free[role] = now + loop.issue[op]
                    self._next(role)
                if kind == _MATRIX:
                    self.queue.append(number)
                else:
                    self.started[op].append(now)
                    self.running.append(number)
                    self.left.append(loop.alone[number])
            upcoming = min(ready)
        if self.queue and not self.engine_busy:
            number = self.queue.popleft()
            self.started[number % loop.count].append(now)
            self.running.append(number)
            self.left.append(loop.alone[number])
            self.engine_busy = True
        return upcoming

    def _advance(self, upcoming: float) -> None:
        """Let time pass to the next event."""
        running = self.running
        speeds, slowness = self.loop.speeds(running)
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
                self._finish(number % self.loop.count)

    def _finish(self, op: int) -> None:
        self.ended[op].append(self.now)
        kind = self.loop.engine[op]
        if kind == _MATRIX:
            self.engine_busy = False
        elif kind == _SYNC:
            role = self.loop.role_of[op]
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
            tuple(self.running), tuple(self.queue), tuple([count - lap for count in ended]), tuple(recent),
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
