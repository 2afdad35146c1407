"""Simulate one SM running a pipeline: in-order roles, asynchronous engines, fluidly shared units.

The loop body repeats: once it begins an iteration in a state in which it began an earlier one, everything repeats from
there.  `steady_state` runs no further than that and lets the tile end; `SmTrace.tile_cycles` extends the repetition, so
that a tile of a million keys costs no more than one of a thousand.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter

import numpy as np

from tilecast.model.pipeline.graph import Edge, MaskDemand, Op, Pipeline, Role
from tilecast.model.sm.bounds import rec_mii
from tilecast.model.sm.events import Event, events_of
from tilecast.model.sm.fluid import EPS_CYCLES as EPS
from tilecast.model.sm.loop import Loop
from tilecast.model.sm.native.run import run_loop
from tilecast.model.sm.run import Ran

#: Iterations after which a loop that has not repeated is taken at its average.
LONGEST_WINDOW = 48
#: Blocks of a tile that pictures show the middle of.
_DRAWN = 12


@dataclass(frozen=True, slots=True)
class SmTrace:
    """What one SM did for one tile of a pipeline."""

    pipeline: Pipeline
    #: End time of the last operation of every iteration (cycles from the start of the tile).
    iteration_end: tuple[float, ...]
    #: Cycles per iteration in the periodic steady state, and after how many iterations it holds.
    ii_cycles: float
    settled_at: int
    #: True when the loop was seen to repeat; False when it was averaged because it did not settle.
    periodic: bool
    masked_iterations: int = 0

    @property
    def events(self) -> tuple[Event, ...]:
        """Every operation executed, by start and end; worked out when asked for."""
        return _events(_loop_of(self.pipeline), len(self.iteration_end), self.masked_iterations)

    def block_ends(self, block: int) -> dict[str, float]:
        """When every operation of a block (from 0) ended, without what each waited for."""
        run = _ran(_loop_of(self.pipeline), len(self.iteration_end), self.masked_iterations)
        return dict(zip(run.names, run.table[2][:, block].tolist(), strict=True))

    def tile_cycles(self, iterations: int) -> float:
        """Cycles from the first operation to the last of a tile with ``iterations`` blocks (>= 1)."""
        if iterations < 1:
            raise ValueError(f"a tile has at least one block, got {iterations}")
        known = len(self.iteration_end)
        if iterations <= known:
            return self.iteration_end[iterations - 1]
        return self.iteration_end[-1] + (iterations - known) * self.ii_cycles

    def longer(self, extra: float) -> SmTrace:
        """The same tile with every iteration ``extra`` cycles longer (shorter where negative, never without time)."""
        extra = max(extra, 1.0 - min(self.ii_cycles, *self.iteration_end))
        ends = tuple(end + (i + 1) * extra for i, end in enumerate(self.iteration_end))
        return replace(self, iteration_end=ends, ii_cycles=self.ii_cycles + extra)

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
            if first <= event.iteration < last and event.start - event.role_free > EPS:
                role = out.setdefault(event.role, {})
                key = f"{event.cause} ({event.cause_why})" if event.cause else event.cause_why
                role[key] = role.get(key, 0.0) + (event.start - event.role_free) / span
        return out


def simulate(pipeline: Pipeline, iterations: int, masked_iterations: int = 0) -> SmTrace:
    """Run ``iterations`` blocks of one tile; the first ``masked_iterations`` cross a mask boundary.

    Raises PipelineError when the roles deadlock, naming what waits for what.
    """
    run = run_loop(Loop(pipeline), iterations, masked_iterations, stop_early=False)
    return _trace(pipeline, run)


def drawn(trace: SmTrace) -> SmTrace:
    """The same tile with blocks enough for a picture: a simulation stops where the loop repeats, which may be at once."""
    if len(trace.iteration_end) >= _DRAWN:
        return trace
    return simulate(trace.pipeline, _DRAWN, trace.masked_iterations)


def _trace(pipeline: Pipeline, run: Ran) -> SmTrace:
    ends = _iteration_ends(run)
    if run.period is not None:
        laps, cycles = run.period
        ii = cycles / laps
    else:
        # Averages over a finite window may undershoot what no loop can.
        ii = max(_average(ends, run.masked + 1), rec_mii(pipeline).cycles)
    ii = max([ii, *pipeline.demand().values()])
    settled = min(run.masked + 3, run.blocks - 1)
    return SmTrace(pipeline, ends, ii, settled, run.period is not None, run.masked)


def _iteration_ends(run: Ran) -> tuple[float, ...]:
    # An iteration's last operation may end before the previous one's when roles drift: keep ends monotone.
    return tuple(np.maximum.accumulate(run.table[2].max(axis=0)).tolist())


def _average(ends: tuple[float, ...], start: int) -> float:
    """Cycles per iteration over the later half of ``ends`` from ``start`` on, less the last iteration's drain."""
    if len(ends) <= 3:
        return ends[-1] / len(ends)
    gaps = [ends[i] - ends[i - 1] for i in range(max(1, start), len(ends) - 1)]
    half = gaps[len(gaps) // 2 :] or gaps or [ends[-1]]
    return sum(half) / len(half)


_alone = attrgetter("min_cycles")


@dataclass(frozen=True, slots=True)
class _Loop:
    """What a simulation reads of a pipeline: pipelines that differ only around their loop share one."""

    name: str
    ops: tuple[Op, ...]
    edges: tuple[Edge, ...]
    roles: tuple[Role, ...]
    mask_demand: MaskDemand
    pipeline: Pipeline = field(compare=False)

    def __hash__(self) -> int:
        # Hashing hundreds of values takes as long as a simulation, comparing a hundred loops that share a hash longer: those of a search
        # differ in their edges, in how long operations take, and in what masks add.
        return hash((self.edges, self.mask_demand, *map(_alone, self.ops)))


def _loop_of(pipeline: Pipeline) -> _Loop:
    p = pipeline
    return _Loop(p.name, p.ops, p.edges, p.roles, p.mask_demand, p)


@lru_cache(maxsize=1 << 15)
def steady_state(pipeline: Pipeline, masked_iterations: int = 0) -> SmTrace:
    """Simulate until the loop repeats; the trace then answers for any number of blocks.

    CTAs that share an SM (`Pipeline.in_step`) neither stay apart, as the simulation finds them, nor in step: half-way between.
    """
    trace = _steady_loop(_loop_of(pipeline), masked_iterations)
    if pipeline.in_step is not None:
        together = _steady_loop(_loop_of(pipeline.in_step), masked_iterations)
        trace = trace.longer(max(0.0, together.ii_cycles - trace.ii_cycles) / 2)
    return trace if trace.pipeline is pipeline else replace(trace, pipeline=pipeline)


@lru_cache(maxsize=1 << 15)
def _steady_loop(loop: _Loop, masked_iterations: int) -> SmTrace:
    run = run_loop(Loop(loop.pipeline), LONGEST_WINDOW + masked_iterations, masked_iterations, stop_early=True)
    return _trace(loop.pipeline, run)


@lru_cache(maxsize=64)
def _events(loop: _Loop, iterations: int, masked_iterations: int) -> tuple[Event, ...]:
    return events_of(loop.pipeline, _ran(loop, iterations, masked_iterations))


@lru_cache(maxsize=64)
def _ran(loop: _Loop, iterations: int, masked_iterations: int) -> Ran:
    return run_loop(Loop(loop.pipeline), iterations, masked_iterations, stop_early=False)


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
