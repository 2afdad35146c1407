"""Simulate one SM running a pipeline: in-order roles, asynchronous engines, fluidly shared units.

Every running operation advances at a speed between 0 and 1 of what it would reach alone.  At each event the
speeds are the max-min fair shares of the units the operations draw on: all speeds rise together until a unit is
full, the operations on that unit freeze there, the others go on.  The matrix engine serves one operation at a
time in issue order; copies run side by side.

The loop body repeats, so after a few iterations the simulation is periodic; `steady_state` finds the period and
`SmTrace.tile_cycles` extends it, so that a tile of a million keys costs no more than one of eight thousand.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from functools import lru_cache

from tilecast.model.pipeline.graph import Edge, Op, Pipeline, PipelineError, Role, Step
from tilecast.model.sm.fair_share import share_units, unit_use
from tilecast.model.sm.fluid import EPS_CYCLES as _EPS
from tilecast.model.sm.fluid import advance

#: Iterations simulated before the steady state is read off; `_steady_loop` asks for more when it has not settled.
_FIRST_WINDOW = 12
_LONGEST_WINDOW = 96


@dataclass(frozen=True, slots=True)
class Event:
    """One executed operation: when it ran, what it waited for, and how much longer it took than alone."""

    op: str
    role: str
    iteration: int
    start: float
    end: float
    #: Name of the operation whose end let this one start ("" for the first), and why ("role", "engine", edge).
    cause: str
    cause_iteration: int
    cause_why: str
    #: When the role was free to start the operation: start - role_free is the stall.
    role_free: float


@dataclass(frozen=True, slots=True)
class SmTrace:
    """What one SM did for one tile of a pipeline."""

    pipeline: Pipeline
    events: tuple[Event, ...]
    #: End time of the last operation of every iteration (cycles from the start of the tile).
    iteration_end: tuple[float, ...]
    #: Cycles per iteration in the periodic steady state, and after how many iterations it holds.
    ii_cycles: float
    settled_at: int
    #: True when the period was verified; False when it was averaged because the loop did not settle.
    periodic: bool
    masked_iterations: int = 0

    def tile_cycles(self, iterations: int) -> float:
        """Cycles from the first operation to the last of a tile with ``iterations`` blocks (>= 1)."""
        if iterations < 1:
            raise ValueError(f"a tile has at least one block, got {iterations}")
        known = len(self.iteration_end)
        if iterations <= known:
            return self.iteration_end[iterations - 1]
        return self.iteration_end[-1] + (iterations - known) * self.ii_cycles

    def unit_shares(self) -> dict[str, float]:
        """Busy share (0..1) of every unit in the steady state."""
        return {unit: cycles / self.ii_cycles for unit, cycles in self.pipeline.demand().items()}

    def stalls(self) -> dict[str, dict[str, float]]:
        """Cycles per iteration each role waits in the steady state, by the operation it waits for."""
        last = len(self.iteration_end)
        first = max(self.settled_at, last - 4)
        span = max(1, last - first)
        out: dict[str, dict[str, float]] = {}
        for event in self.events:
            if first <= event.iteration < last and event.start - event.role_free > _EPS:
                role = out.setdefault(event.role, {})
                key = f"{event.cause} ({event.cause_why})" if event.cause else event.cause_why
                role[key] = role.get(key, 0.0) + (event.start - event.role_free) / span
        return out


def _with_mask(pipeline: Pipeline) -> dict[str, Op]:
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
            op.engine, op.issue_cycles, op.tile, op.instructions,
        )  # fmt: skip
    return masked


@dataclass(slots=True)
class _Running:
    """An operation in flight, or waiting for the matrix engine: what is left of it and what released it."""

    left: float
    op: Op
    iteration: int
    start: float
    role: int
    cause: str
    cause_iteration: int
    why: str
    role_free: float


class _Known:
    """What all simulations of one loop share: its operations plain and masked, and the fair speeds found so far."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.ops = {op.name: op for op in pipeline.ops}
        self.masked_ops = _with_mask(pipeline)
        # By identity, which is stable as long as this object holds the operations.
        self.uses = {id(op): unit_use(op) for op in (*self.ops.values(), *self.masked_ops.values())}
        self.speeds: dict[tuple[int, ...], tuple[float, ...]] = {}


class _Run:
    """State of one simulation; the only mutable object of the model, never seen outside this module."""

    def __init__(
        self, pipeline: Pipeline, iterations: int, masked_iterations: int, known: _Known | None = None
    ) -> None:
        self.pipeline = pipeline
        self.n = iterations
        self.masked = masked_iterations
        known = known or _Known(pipeline)
        self.ops, self.masked_ops = known.ops, known.masked_ops
        self.uses, self.speed_memo = known.uses, known.speeds
        self.sources: dict[str, list[tuple[str, int, float, str]]] = {op.name: [] for op in pipeline.ops}
        for edge in pipeline.edges:
            self.sources[edge.dst].append((edge.src, edge.distance, edge.latency_cycles, edge.why or edge.kind))
        self.ends: dict[tuple[str, int], float] = {}
        self.programs = [self._program(role.program) for role in pipeline.roles]
        self.role_names = [role.name for role in pipeline.roles]
        self.next_step = [0] * len(self.programs)
        self.role_free = [0.0] * len(self.programs)
        self.role_last: list[tuple[str, int]] = [("", -1)] * len(self.programs)
        self.role_busy = [False] * len(self.programs)
        self.known_ready: list[tuple[float, str, int, str] | None] = [None] * len(self.programs)
        #: The operation that has not ended and that a role's next one waits for: no need to ask again before it has.
        self.awaited: list[tuple[str, int] | None] = [None] * len(self.programs)
        self.queue: deque[_Running] = deque()
        self.engine_last: tuple[str, int] = ("", -1)
        self.engine_free = 0.0
        self.engine_busy = False
        self.active: list[_Running] = []
        self.events: list[Event] = []

    def _program(self, steps: tuple[Step, ...]) -> list[tuple[str, int]]:
        shifts = [step.shift for step in steps]
        out: list[tuple[str, int]] = []
        for j in range(-max(shifts), self.n - min(shifts)):
            out.extend((step.op, j + step.shift) for step in steps if 0 <= j + step.shift < self.n)
        return out

    def ready(self, role: int, name: str, iteration: int) -> tuple[float, str, int, str] | None:
        """When ``name`` may start and because of what; None while a source has not ended."""
        best = self.role_free[role]
        cause, cause_it, why = (*self.role_last[role], "role")
        for src, distance, latency, reason in self.sources[name]:
            source_it = iteration - distance
            if source_it < 0 or source_it >= self.n:
                continue
            end = self.ends.get((src, source_it))
            if end is None:
                self.awaited[role] = (src, source_it)
                return None
            if end + latency > best + _EPS:
                best, cause, cause_it, why = end + latency, src, source_it, reason
        return best, cause, cause_it, why

    def start_everything(self, now: float) -> float:
        """Start what can start at ``now``; returns the next known time at which something may (inf if none)."""
        upcoming = float("inf")
        moved = True
        while moved:
            upcoming, moved = self._start_roles(now)
            moved = self._start_engine(now) or moved
        return upcoming

    def _start_roles(self, now: float) -> tuple[float, bool]:
        upcoming, moved = float("inf"), False
        for role, program in enumerate(self.programs):
            if self.role_busy[role] or self.next_step[role] >= len(program):
                continue
            awaited = self.awaited[role]
            if awaited is not None and awaited not in self.ends:
                continue
            name, iteration = program[self.next_step[role]]
            # Once every source has ended the answer is final: remember it until the operation starts.
            ready = self.known_ready[role]
            if ready is None:
                self.awaited[role] = None
                ready = self.known_ready[role] = self.ready(role, name, iteration)
                if ready is None:
                    continue
            when, cause, cause_it, why = ready
            if when > now + _EPS:
                upcoming = min(upcoming, when)
                continue
            masked = iteration < self.masked and name in self.masked_ops
            op = self.masked_ops[name] if masked else self.ops[name]
            entry = _Running(op.min_cycles, op, iteration, now, role, cause, cause_it, why, self.role_free[role])
            self.next_step[role] += 1
            self.known_ready[role] = None
            moved = True
            if op.engine == "tensor":
                self.queue.append(entry)
            else:
                self.active.append(entry)
            if op.engine:
                self.role_free[role] = now + op.issue_cycles
                self.role_last[role] = (name, iteration)
            else:
                self.role_busy[role] = True
        return upcoming, moved

    def _start_engine(self, now: float) -> bool:
        """Hand the oldest waiting operation to the matrix engine when it is free."""
        if not self.queue or self.engine_busy:
            return False
        entry = self.queue.popleft()
        if self.engine_free > entry.start + _EPS:
            entry.cause, entry.cause_iteration, entry.why = (*self.engine_last, "matrix engine")
        entry.start = now
        self.active.append(entry)
        self.engine_busy = True
        return True

    def speeds(self) -> tuple[float, ...]:
        """Fair speeds of the running operations, remembered by who is running."""
        key = tuple([id(entry.op) for entry in self.active])
        found = self.speed_memo.get(key)
        if found is None:
            found = share_units(tuple(entry.op for entry in self.active), [self.uses[i] for i in key])
            self.speed_memo[key] = found
        return found

    def finish(self, entry: _Running, now: float) -> None:
        """Record the end of an operation and free its role or engine."""
        name = (entry.op.name, entry.iteration)
        self.ends[name] = now
        self.events.append(
            Event(
                entry.op.name, self.role_names[entry.role], entry.iteration, entry.start, now, entry.cause,
                entry.cause_iteration, entry.why, entry.role_free,
            )
        )  # fmt: skip
        if entry.op.engine == "tensor":
            self.engine_busy = False
            self.engine_free = now
            self.engine_last = name
        elif not entry.op.engine:
            self.role_busy[entry.role] = False
            self.role_free[entry.role] = now
            self.role_last[entry.role] = name

    def run(self) -> None:
        """Advance from event to event until every program is done; PipelineError on deadlock."""
        now = 0.0
        total = sum(len(program) for program in self.programs)
        while len(self.events) < total:
            upcoming = self.start_everything(now)
            if not self.active and upcoming == float("inf"):
                waiting = [p[i] for p, i in zip(self.programs, self.next_step, strict=True) if i < len(p)]
                raise PipelineError(
                    f"pipeline {self.pipeline.name} deadlocks: "
                    + ", ".join(f"{name} of block {it}" for name, it in waiting)
                    + " wait for each other"
                )
            step, ended = advance(self.active, self.speeds(), upcoming - now)
            now += step
            if ended:
                self.active = [entry for entry in self.active if entry.left > _EPS]
                for entry in ended:
                    self.finish(entry, now)


def _iteration_ends(events: list[Event], iterations: int) -> list[float]:
    ends = [0.0] * iterations
    for event in events:
        ends[event.iteration] = max(ends[event.iteration], event.end)
    # An iteration's last operation may end before the previous one's when roles drift: keep ends monotone.
    for i in range(1, iterations):
        ends[i] = max(ends[i], ends[i - 1])
    return ends


def _period(ends: list[float], start: int) -> tuple[float, bool]:
    """Cycles per iteration over the tail of ``ends`` and whether it repeats with a period of 1 to 4."""
    gaps = [ends[i] - ends[i - 1] for i in range(max(1, start), len(ends) - 1)]
    for period in (1, 2, 3, 4):
        tail = gaps[-2 * period :]
        if len(tail) == 2 * period and all(
            abs(tail[i] - tail[i + period]) <= 1e-3 * max(1.0, tail[i]) for i in range(period)
        ):
            return sum(tail) / len(tail), True
    half = gaps[len(gaps) // 2 :] or gaps or [ends[-1]]
    return sum(half) / len(half), False


def simulate(pipeline: Pipeline, iterations: int, masked_iterations: int = 0) -> SmTrace:
    """Run ``iterations`` blocks of one tile; the first ``masked_iterations`` cross a mask boundary.

    Raises PipelineError when the roles deadlock, naming what waits for what.
    """
    return _simulate(pipeline, iterations, masked_iterations, _Known(pipeline))


def _simulate(pipeline: Pipeline, iterations: int, masked_iterations: int, known: _Known) -> SmTrace:
    run = _Run(pipeline, iterations, masked_iterations, known)
    run.run()
    ends = _iteration_ends(run.events, iterations)
    ii, periodic = _period(ends, masked_iterations + 1) if iterations > 3 else (ends[-1] / iterations, False)
    # Averages over a finite window may undershoot the busiest unit by a rounding error; no loop can.
    ii = max([ii, *pipeline.demand().values()])
    events = tuple(sorted(run.events, key=lambda e: (e.start, e.end)))
    return SmTrace(
        pipeline, events, tuple(ends), ii, min(masked_iterations + 3, iterations - 1), periodic, masked_iterations
    )


@dataclass(frozen=True, slots=True)
class _Loop:
    """What a simulation reads of a pipeline: pipelines that differ only around their loop share one."""

    name: str
    ops: tuple[Op, ...]
    edges: tuple[Edge, ...]
    roles: tuple[Role, ...]
    mask_demand: tuple[tuple[str, tuple[tuple[str, float], ...]], ...]
    pipeline: Pipeline = field(compare=False)


@lru_cache(maxsize=8192)
def steady_state(pipeline: Pipeline, masked_iterations: int = 0) -> SmTrace:
    """Simulate until the loop is periodic; the trace then answers for any number of blocks."""
    p = pipeline
    trace = _steady_loop(_Loop(p.name, p.ops, p.edges, p.roles, p.mask_demand, p), masked_iterations)
    return trace if trace.pipeline is pipeline else replace(trace, pipeline=pipeline)


@lru_cache(maxsize=8)
def _known(loop: _Loop) -> _Known:
    return _Known(loop.pipeline)


@lru_cache(maxsize=4096)
def _steady_loop(loop: _Loop, masked_iterations: int) -> SmTrace:
    pipeline, known = loop.pipeline, _known(loop)
    window = _FIRST_WINDOW + masked_iterations
    while True:
        trace = _simulate(pipeline, window, masked_iterations, known)
        if trace.periodic or window >= _LONGEST_WINDOW:
            return trace
        window *= 2


@dataclass(frozen=True, slots=True)
class CriticalStep:
    """One link of the critical recurrence, in cycles per iteration."""

    op: str
    why: str
    #: Time the operation needs alone, time it lost to sharing, and hand-over latency before it started.
    alone_cycles: float
    contention_cycles: float
    wait_cycles: float


def critical_recurrence(trace: SmTrace) -> tuple[CriticalStep, ...]:
    """The chain of operations that sets the period: walk back from a late operation to itself one lap earlier.

    Each event knows what released it, so the walk needs no search; it is the answer to "why not faster?".
    """
    by_key = {(e.op, e.iteration): e for e in trace.events}
    last = len(trace.iteration_end)
    tail = [e for e in trace.events if e.iteration == last - 2]
    if not tail:
        return ()
    event = max(tail, key=lambda e: e.end)
    seen: dict[str, int] = {}
    chain: list[tuple[Event, Event | None]] = []
    while event.op not in seen:
        seen[event.op] = len(chain)
        before = by_key.get((event.cause, event.cause_iteration))
        chain.append((event, before))
        if before is None:
            return ()
        event = before
    lap = chain[seen[event.op] :]
    iterations = max(1, lap[0][0].iteration - event.iteration)
    steps = []
    for item, before in reversed(lap):
        op = trace.pipeline.op(item.op)
        duration = item.end - item.start
        alone = min(duration, op.min_cycles)
        wait = max(0.0, item.start - before.end) if before is not None else 0.0
        steps.append(
            CriticalStep(
                item.op, item.cause_why, alone / iterations, (duration - alone) / iterations, wait / iterations
            )
        )
    return tuple(steps)
