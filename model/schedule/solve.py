"""Proven-optimal modulo schedule of a pipeline's loop, or a bound and a gap when stopped early.

The initiation interval is minimised first: the lower bound is tried, then the interval between what is proven
impossible and what is known to work is halved.  Then, at that II, the time one iteration spends in flight is
minimised.  The solver (OR-tools CP-SAT, one worker, fixed seed, hence deterministic unless the clock stops
it) only decides in which order operations take turns; times follow exactly (`tilecast.model.schedule.problem`).

What is exclusive: the matrix engine (in order of issue), every role (a warpgroup does one thing at a time),
and the units in ``exclusive``, each held in one piece for the operation's cycles of it.  Hardware shares a
unit more finely than that; with ``exclusive=()`` such units only bound II by their demand, which is the
bound no sharing can beat.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Buffer, Pipeline
from tilecast.model.schedule import problem as modulo
from tilecast.model.schedule.windows import windows

_BYTES_PER_COLUMN = 512
_SEED = 1
#: Effort of one attempt to shorten the iteration once II is settled, in CP-SAT's deterministic time (about a
#: second each): counted in work and not by the clock, so that the same question keeps the same answer.
_SPAN_EFFORT = 0.1


@dataclass(frozen=True, slots=True)
class Storage:
    """What a CTA may use: 32-bit registers, shared memory, and tensor memory where the machine has any."""

    registers: int
    smem_bytes: int
    tmem_columns: int = 0


def storage_of(machine: Machine) -> Storage:
    """The storage of ``machine``: a CTA may have all registers of the SM."""
    return Storage(
        int(machine["reg.file_bytes"]) // 4, int(machine["smem.per_cta_bytes"]), int(machine.get("tmem.columns", 0.0))
    )


@dataclass(frozen=True, slots=True)
class Limit:
    """Storage the loop needs against what there is; ``lever`` says how to need less."""

    resource: str
    demand: int
    limit: int
    unit: str
    lever: str

    @property
    def holds(self) -> bool:
        """Whether the demand fits."""
        return self.demand <= self.limit

    def sentence(self) -> str:
        """One sentence for people."""
        text = f"{self.resource} needs {self.demand} {self.unit} of {self.limit}"
        return text if self.holds else f"{text} (over by {self.demand - self.limit}): {self.lever}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """When each operation of iteration 0 starts; iteration i is the same, ``i * ii_cycles`` later.

    ``status`` is "optimal" (no smaller II exists in whole cycles), "feasible" (stopped early: II lies between
    ``bound`` and ``ii_cycles``, ``gap`` = 1 - bound / II) or "infeasible" (storage does not fit: see
    ``limits``; there are no times).  Cycles are whole SM clocks.
    """

    pipeline: str
    status: str
    ii_cycles: int
    #: Start on the engine or in the role; asynchronous operations may be issued earlier (``issues``).
    starts: dict[str, int]
    issues: dict[str, int]
    #: unit -> operation -> start of the one piece of time in which it holds that exclusive unit.
    holds: dict[str, dict[str, int]]
    #: Iterations in flight at once, and cycles one iteration spends from first start to last end.
    overlap_depth: int
    span_cycles: int
    #: Order on the matrix engine, on each exclusive unit and in each role within one II.
    order_per_unit: dict[str, tuple[str, ...]]
    bound: int
    gap: float
    limits: tuple[Limit, ...]
    program_order: bool
    keep_chains: bool
    solve_seconds: float = field(compare=False)

    @property
    def reason(self) -> str:
        """Why it is infeasible, one sentence per overflowing resource; empty when it is not."""
        return "; ".join(limit.sentence() for limit in self.limits if not limit.holds)


def storage_limits(pipeline: Pipeline, storage: Storage) -> tuple[Limit, ...]:
    """Demand of buffers and roles against ``storage``, also where it fits; tensor memory where there is any or any is used."""

    def largest(space: str) -> str:
        def size(buffer: Buffer) -> int:
            return buffer.bytes_per_slot * buffer.depth

        mine = [buffer for buffer in pipeline.buffers if buffer.space == space]
        if not mine:
            return "nothing to reduce"
        worst = max(mine, key=size)
        fewer = "fewer slots or " if worst.depth > 1 else ""
        return f"{fewer}a smaller tile for '{worst.name}' ({worst.depth} x {worst.bytes_per_slot} bytes)"

    columns = sum(-(-b.bytes_per_slot // _BYTES_PER_COLUMN) * b.depth for b in pipeline.buffers if b.space == "tmem")
    shared = sum(b.bytes_per_slot * b.depth for b in pipeline.buffers if b.space == "smem")
    registers = sum(role.registers_per_thread * role.warps * 32 for role in pipeline.roles)
    heavy = max(pipeline.roles, key=lambda role: role.registers_per_thread * role.warps, default=None)
    fewer = f"fewer registers per thread or warps in role '{heavy.name}'" if heavy else "nothing to reduce"
    tensor = Limit("tensor memory", columns, storage.tmem_columns, "columns", largest("tmem"))
    return (
        *((tensor,) if columns or storage.tmem_columns else ()),
        Limit("shared memory", shared, storage.smem_bytes, "bytes", largest("smem")),
        Limit("register file", registers, storage.registers, "registers", fewer),
    )


def optimal_schedule(
    pipeline: Pipeline,
    *,
    time_limit_s: float = 10.0,
    storage: Storage | None = None,
    respect_program_order: bool = False,
    keep_chains: bool = True,
    exclusive: Sequence[str] = ("tensor", "mufu"),
) -> Schedule:
    """The schedule with the smallest II, then the shortest iteration.

    ``storage`` is what the loop's buffers and registers must fit (None: no limit).  ``respect_program_order`` keeps every role's program
    as given instead of letting the solver reorder it.  ``keep_chains`` (free order only) keeps each tile's
    synchronous work, and the parts of one of its GEMMs, in the role's order within a block, because pipelines
    leave those dependences to the program; without it only the edges count.  Not fitting is a result
    ("infeasible"); only a deadlocked pipeline raises PipelineError.
    """
    began = time.perf_counter()
    limits = storage_limits(pipeline, storage) if storage is not None else ()
    if not all(limit.holds for limit in limits):
        return Schedule(
            pipeline.name, "infeasible", 0, {}, {}, {}, 0, 0, {}, 0, 0.0, limits,
            respect_program_order, keep_chains, time.perf_counter() - began,
        )  # fmt: skip
    problem = modulo.build(pipeline, exclusive, respect_program_order, keep_chains)
    deadline = began + time_limit_s
    ii, times, bound = _smallest_ii(problem, deadline)
    ii, times = _shortest_iteration(problem, ii, times, deadline)
    return replace(
        _present(pipeline, problem, ii, times, bound),
        limits=limits,
        program_order=respect_program_order,
        keep_chains=keep_chains,
        solve_seconds=time.perf_counter() - began,
    )


def _smallest_ii(problem: modulo.Problem, deadline: float) -> tuple[int, tuple[int, ...], int]:
    """(II, times, proven bound); the bound equals II when optimal.

    Halving is sound because a choice of turns that works at some II works at every larger one.
    """
    ii, times = modulo.settle(problem, modulo.laps(problem, problem.easy_times, problem.easy_ii))
    lower, probe = problem.lower, problem.lower
    while lower < ii:
        answer = _solve(problem, probe, deadline - time.perf_counter())
        if answer is None:
            break
        if answer:
            ii, times = modulo.settle(problem, modulo.laps(problem, answer, probe))
        else:
            lower = probe + 1
        probe = (lower + ii - 1) // 2
    return ii, times, lower


def _solve(problem: modulo.Problem, ii: int, seconds: float, shorten_to: int = 0) -> tuple[int, ...] | None:
    """Times at this II; () when proven impossible, None when time ran out.

    With ``shorten_to`` the time from first start to last end is minimised below that many cycles, and the
    best times found so far come back when time runs out.
    """
    if seconds <= 0:
        return None
    ends = list(zip(problem.start, problem.duration, strict=True))
    caps = [(moment, shorten_to - duration) for moment, duration in ends] if shorten_to else []
    window = windows(len(problem.moments), problem.arcs, problem.pairs, ii, caps)
    if window is None:
        return ()
    if not shorten_to and all(low == high for low, high in window.laps):
        return window.earliest
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    t: list[Any] = [
        model.new_int_var(low, high, name)
        for low, high, name in zip(window.earliest, window.latest, problem.moments, strict=True)
    ]
    for src, dst, weight, distance in problem.arcs:
        model.add(t[dst] - t[src] >= weight - distance * ii)
    for pair, (low, high) in zip(problem.pairs, window.laps, strict=True):
        chosen = [model.new_bool_var("") for _ in range(low, high + 1)]
        model.add_exactly_one(chosen)
        for k, choice in enumerate(chosen, start=low):
            for a, b, hold_a, hold_b in pair.entries:
                model.add(t[b] - t[a] >= hold_a - k * ii).only_enforce_if(choice)
                model.add(t[b] - t[a] <= ii - hold_b - k * ii).only_enforce_if(choice)
    if shorten_to:
        span = model.new_int_var(0, shorten_to, "span")
        for moment, duration in ends:
            model.add(span >= t[moment] + duration)
        # Among equals, the pipeline's first operation comes first: symmetric tiles then keep their names'
        # order.
        model.minimize(span * (shorten_to + 1) + t[problem.start[0]])
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = _SEED
    solver.parameters.max_time_in_seconds = seconds
    if shorten_to:
        solver.parameters.max_deterministic_time = _SPAN_EFFORT
    status = solver.solve(model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return tuple(int(solver.value(variable)) for variable in t)
    return () if status == cp_model.INFEASIBLE else None


def _span(problem: modulo.Problem, times: Sequence[int]) -> int:
    return max(times[m] + d for m, d in zip(problem.start, problem.duration, strict=True))


def _shortest_iteration(
    problem: modulo.Problem, ii: int, times: tuple[int, ...], deadline: float
) -> tuple[int, tuple[int, ...]]:
    """Times that keep an iteration in flight as briefly as the remaining time lets us find.

    The II stays, or improves by luck when the search for it was stopped early.
    """
    window = windows(len(problem.moments), problem.arcs, problem.pairs, ii)
    known = _span(problem, times)
    least = _span(problem, window.earliest) if window else known
    # Short iterations first: a tight cap leaves few choices, and most loops need one II more than their chain.
    for more in (1, 2, 4, 8):
        cap = min(known, least + more * ii)
        answer = _solve(problem, ii, deadline - time.perf_counter(), cap)
        if answer:
            return modulo.settle(problem, modulo.laps(problem, answer, ii))
        if cap == known:
            break
    return ii, times


def _present(pipeline: Pipeline, problem: modulo.Problem, ii: int, times: Sequence[int], bound: int) -> Schedule:
    """The schedule without what only the caller knows (limits, switches, seconds)."""
    origin = min(times[m] for m in problem.start)
    starts = {name: times[m] - origin for name, m in zip(problem.ops, problem.start, strict=True)}
    issues = {name: times[m] - origin for name, m in zip(problem.ops, problem.issue, strict=True)}
    holds: dict[str, dict[str, int]] = {}
    for unit, name, moment in problem.holds:
        holds.setdefault(unit, {})[name] = times[moment] - origin
    ends = [start + d for start, d in zip(starts.values(), problem.duration, strict=True)]
    span = max(ends)
    return Schedule(
        pipeline=pipeline.name,
        status="optimal" if bound >= ii else "feasible",
        ii_cycles=ii,
        starts=starts,
        issues=issues,
        holds=holds,
        overlap_depth=-(-span // ii),
        span_cycles=span,
        order_per_unit=_orders(pipeline, ii, starts, issues, holds),
        bound=min(bound, ii),
        gap=max(0.0, 1.0 - bound / ii),
        limits=(),
        program_order=False,
        keep_chains=False,
        solve_seconds=0.0,
    )


def _orders(
    pipeline: Pipeline,
    ii: int,
    starts: dict[str, int],
    issues: dict[str, int],
    holds: dict[str, dict[str, int]],
) -> dict[str, tuple[str, ...]]:
    def around(times: dict[str, int]) -> tuple[str, ...]:
        return tuple(sorted(times, key=lambda name: (times[name] % ii, name)))

    matrix = {op.name: starts[op.name] for op in pipeline.ops if op.engine == "tensor"}
    matrix.update(holds.get("tensor", {}))
    orders = {"tensor": around(matrix)} if matrix else {}
    orders.update({unit: around(held) for unit, held in holds.items() if unit != "tensor"})
    for role in pipeline.roles:
        orders[f"role {role.name}"] = around({step.op: issues[step.op] for step in role.program})
    return orders
