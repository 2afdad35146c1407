"""Proven-optimal modulo schedule of a pipeline's loop, or a bound and a gap when stopped early.

The initiation interval is minimised first: the lower bound is tried, then the interval between what is proven
impossible and what is known to work is halved.  Then, at that II, the time one iteration spends in flight is
minimised.  The solver (OR-tools CP-SAT, one worker, fixed seed, hence deterministic unless the clock stops it)
only decides in which order operations take turns; times follow exactly (`tilecast.model.modulo`).

What is exclusive: the matrix engine (in order of issue), every role (a warpgroup does one thing at a time), and the
units in ``exclusive``, each held in one piece for the operation's cycles of it.  Hardware shares a unit more finely
than that; with ``exclusive=()`` such units only bound II by their demand, which is the bound no sharing can beat.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tilecast.model import modulo
from tilecast.model.graph import Buffer, Pipeline

#: 32-bit registers, tensor memory columns and shared memory bytes a CTA may use on sm_90/sm_100 (CUDA C++
#: Programming Guide, technical specifications per compute capability; tensor memory: PTX ISA, tcgen05.alloc).
REGISTERS_PER_SM = 65536
TMEM_COLUMNS = 512
SMEM_BYTES = 232448

_BYTES_PER_COLUMN = 512
_SEED = 1
#: Share of the remaining time that shortening the iteration may take once II is settled, and its ceiling.
_SPAN_SECONDS = 1.0


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
    ``bound`` and ``ii_cycles``, ``gap`` = 1 - bound / II) or "infeasible" (storage does not fit: see ``limits``;
    there are no times).  Cycles are whole SM clocks.
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
    solve_seconds: float = field(compare=False)

    @property
    def reason(self) -> str:
        """Why it is infeasible, one sentence per overflowing resource; empty when it is not."""
        return "; ".join(limit.sentence() for limit in self.limits if not limit.holds)


def storage_limits(
    pipeline: Pipeline, register_limit: int, tmem_columns: int, smem_bytes: int
) -> tuple[Limit, ...]:
    """Demand of buffers and roles against the limits given; always all three, also when they fit."""

    def largest(space: str) -> str:
        def size(buffer: Buffer) -> int:
            return buffer.bytes_per_slot * buffer.depth

        mine = [buffer for buffer in pipeline.buffers if buffer.space == space]
        if not mine:
            return "nothing to reduce"
        worst = max(mine, key=size)
        fewer = "fewer slots or " if worst.depth > 1 else ""
        return f"{fewer}a smaller tile for '{worst.name}' ({worst.depth} x {worst.bytes_per_slot} bytes)"

    columns = sum(
        -(-b.bytes_per_slot // _BYTES_PER_COLUMN) * b.depth for b in pipeline.buffers if b.space == "tmem"
    )
    shared = sum(b.bytes_per_slot * b.depth for b in pipeline.buffers if b.space == "smem")
    registers = sum(role.registers_per_thread * role.warps * 32 for role in pipeline.roles)
    heavy = max(pipeline.roles, key=lambda role: role.registers_per_thread * role.warps, default=None)
    fewer = f"fewer registers per thread or warps in role '{heavy.name}'" if heavy else "nothing to reduce"
    return (
        Limit("tensor memory", columns, tmem_columns, "columns", largest("tmem")),
        Limit("shared memory", shared, smem_bytes, "bytes", largest("smem")),
        Limit("register file", registers, register_limit, "registers", fewer),
    )


def optimal_schedule(
    pipeline: Pipeline,
    *,
    time_limit_s: float = 10.0,
    register_limit: int = REGISTERS_PER_SM,
    tmem_columns: int = TMEM_COLUMNS,
    smem_bytes: int = SMEM_BYTES,
    respect_program_order: bool = False,
    exclusive: Sequence[str] = ("tensor", "mufu"),
) -> Schedule:
    """The schedule with the smallest II, then the shortest iteration.

    ``register_limit`` counts 32-bit registers of the SM.  ``respect_program_order`` keeps every role's program as
    given instead of letting the solver reorder it.  Not fitting is a result ("infeasible"); only a deadlocked
    pipeline raises PipelineError.
    """
    began = time.perf_counter()
    limits = storage_limits(pipeline, register_limit, tmem_columns, smem_bytes)
    if not all(limit.holds for limit in limits):
        return Schedule(
            pipeline.name, "infeasible", 0, {}, {}, {}, 0, 0, {}, 0, 0.0, limits,
            respect_program_order, time.perf_counter() - began,
        )  # fmt: skip
    problem = modulo.build(pipeline, exclusive, respect_program_order)
    deadline = began + time_limit_s
    ii, times, bound = _smallest_ii(problem, deadline)
    ii, times = _shortest_iteration(problem, ii, times, deadline)
    return _present(pipeline, problem, ii, times, bound, limits, respect_program_order, began)


def _smallest_ii(problem: modulo.Problem, deadline: float) -> tuple[int, tuple[int, ...], int]:
    """(II, times, proven bound); the bound equals II when optimal.

    Halving is sound because a choice of turns that works at some II works at every larger one.
    """
    ii, times = modulo.settle(problem, modulo.laps(problem, problem.easy_times, problem.easy_ii))
    lower, probe = problem.lower, problem.lower
    while lower < ii:
        answer = _solve(problem, probe, deadline - time.perf_counter(), times)
        if answer is None:
            break
        if answer:
            ii, times = modulo.settle(problem, modulo.laps(problem, answer, probe))
        else:
            lower = probe + 1
        probe = (lower + ii - 1) // 2
    return ii, times, lower


def _horizon(problem: modulo.Problem, ii: int) -> int:
    """A time by which some schedule at this II has started everything: the longest chain, each link a lap late."""
    longest = [0] * len(problem.moments)
    for src, _, weight, _ in problem.arcs:
        longest[src] = max(longest[src], weight)
    return sum(-(-weight // ii) * ii + ii for weight in longest)


def _solve(
    problem: modulo.Problem, ii: int, seconds: float, hint: Sequence[int], shorten_to: int = 0
) -> tuple[int, ...] | None:
    """Times at this II; () when proven impossible, None when time ran out.

    With ``shorten_to`` the time from first start to last end is minimised below that many cycles, and the best
    times found so far come back when time runs out.
    """
    from ortools.sat.python import cp_model

    if seconds <= 0:
        return None
    model = cp_model.CpModel()
    horizon = shorten_to or _horizon(problem, ii)
    laps = horizon // ii + 1
    t: list[Any] = [model.new_int_var(0, horizon, name) for name in problem.moments]
    for src, dst, weight, distance in problem.arcs:
        model.add(t[dst] - t[src] >= weight - distance * ii)
    for pair in problem.pairs:
        k = model.new_int_var(-laps, laps, "")
        for a, b, hold_a, hold_b in pair.entries:
            model.add_linear_constraint(t[b] - t[a] + ii * k, hold_a, ii - hold_b)
    if shorten_to:
        span = model.new_int_var(0, shorten_to, "span")
        for moment, duration in zip(problem.start, problem.duration, strict=True):
            model.add(span >= t[moment] + duration)
        model.minimize(span)
        for variable, value in zip(t, hint, strict=True):
            model.add_hint(variable, value)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = _SEED
    solver.parameters.max_time_in_seconds = seconds
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
    seconds = min(_SPAN_SECONDS, deadline - time.perf_counter())
    answer = _solve(problem, ii, seconds, times, _span(problem, times))
    if not answer:
        return ii, times
    return modulo.settle(problem, modulo.laps(problem, answer, ii))


def _present(
    pipeline: Pipeline, problem: modulo.Problem, ii: int, times: Sequence[int], bound: int,
    limits: tuple[Limit, ...], program_order: bool, began: float,
) -> Schedule:  # fmt: skip
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
        limits=limits,
        program_order=program_order,
        solve_seconds=time.perf_counter() - began,
    )


def _orders(
    pipeline: Pipeline, ii: int, starts: dict[str, int], issues: dict[str, int], holds: dict[str, dict[str, int]]
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
