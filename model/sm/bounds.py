"""Lower bounds on the initiation interval of a pipeline: the busiest unit and the heaviest recurrence.

``II >= max(ResMII, RecMII)`` for every schedule of the loop (Rau, "Iterative modulo scheduling", MICRO 1994).
ResMII is the largest demand on one unit; RecMII is the maximum over dependence cycles of latency over
distance, found exactly (`recurrences`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from tilecast.base.same import Same
from tilecast.model.pipeline.graph import Edge, Op, Pipeline, PipelineError, Role, Step
from tilecast.model.sm.native.recurrences import heaviest_cycle, longest_paths
from tilecast.model.sm.recurrences import Arc, Stuck

_TIE = 1e-9
#: Weights of the exact search are whole numbers of cycles / _SCALE.
_SCALE = 1 << 20


@dataclass(frozen=True, slots=True)
class ResMii:
    """Resource bound: ``unit`` is busiest with ``cycles`` an iteration.

    ``per_role`` is how long each role's instruction stream is held in one iteration (its synchronous
    operations in full, asynchronous ones for their issue); it is a bound too, because a role does one thing
    at a time.
    """

    unit: str
    cycles: float
    per_unit: dict[str, float]
    per_role: dict[str, float]


@dataclass(frozen=True, slots=True)
class RecMii:
    """Recurrence bound: the dependence cycle with the largest latency over distance.

    ``edges`` walk the cycle; links that only the in-order roles and the in-order matrix engine impose have
    kind "order" and say so in ``why`` (their distance may be negative).  Without any cycle everything is
    empty or zero.
    """

    cycles: float
    ops_on_cycle: tuple[str, ...]
    latency: float
    distance: int
    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bound on II (cycles), what sets it, and how far everything else is from it.

    ``binding`` and the keys of ``slack`` are unit names, "role <name>" or "recurrence"; ``slack`` is in
    cycles per iteration, ``slack_fraction`` the same as a share (0..1) of ``ii_lower``.
    """

    ii_lower: float
    res: ResMii
    rec: RecMii
    binding: str
    slack: dict[str, float]
    slack_fraction: dict[str, float]


def role_busy_cycles(pipeline: Pipeline, role: Role) -> float:
    """Cycles per iteration in which the role's stream is held: synchronous work plus issue of others."""
    ops = [pipeline.op(step.op) for step in role.program]
    return sum(held_cycles(op) for op in ops)


def held_cycles(op: Op) -> float:
    """Cycles an operation holds its role: all of them when synchronous, only the issue otherwise."""
    return op.issue_cycles if op.engine else op.min_cycles


def res_mii(pipeline: Pipeline) -> ResMii:
    """The busiest unit; ("", 0) for a pipeline that uses none."""
    demand = pipeline.demand()
    unit = max(demand, key=lambda name: demand[name], default="")
    roles = {role.name: role_busy_cycles(pipeline, role) for role in pipeline.roles}
    return ResMii(unit, demand.get(unit, 0.0), demand, roles)


class _Graph:
    """Timed dependences between moments of operations, all but those of a pipeline's edges.

    Matrix operations have two nodes: they queue between issue and start.  Arcs are in three parts: from issue to start, a
    pipeline's edges, and what order imposes.
    """

    def __init__(self, ops: tuple[tuple[str, bool], ...], roles: tuple[Role, ...]) -> None:
        matrix = {name for name, on_engine in ops if on_engine}
        #: By operation: the node of its issue, and that of its start.
        self.issue: dict[str, int] = {}
        self.runs: dict[str, int] = {}
        self.nodes = 0
        for name, on_engine in ops:
            self.issue[name] = self.nodes
            self.nodes += on_engine
            self.runs[name] = self.nodes
            self.nodes += 1
        self.queued: list[Arc] = [(self.issue[name], self.runs[name], 0, 0) for name, on_engine in ops if on_engine]
        #: What order imposes: nodes, the operation that holds the second one up, whether by holding its role, and the distance.
        self.order: list[tuple[int, int, str, bool, int]] = []
        #: What a reader should see of it.
        self.ordered: list[Edge] = []
        for role in roles:
            products = tuple(step for step in role.program if step.op in matrix)
            self._in_order(role.program, f"role {role.name} in order", self.issue, held=True)
            self._in_order(products, "matrix engine in order", self.runs, held=False)
        #: For the paths of one iteration: operations by number, and what a role keeps in order.
        self.number = {name: at for at, (name, _) in enumerate(ops)}
        self.steps = [
            (first.op, second.op)
            for role in roles for first, second in pairwise(role.program) if first.shift == second.shift
        ]  # fmt: skip

    def _in_order(self, steps: Sequence[Step], why: str, node: dict[str, int], *, held: bool) -> None:
        """In-order recurrences: a step after the one before it, the first of the next lap after the last of this.

        Step (b, sb) behind step (a, sa): b of block j+sb waits for a of block j+sa, which is distance sb - sa.
        Matrix operations of one role also execute in the order of issue.
        """
        for at, step in enumerate(steps):
            following = steps[(at + 1) % len(steps)]
            distance = following.shift - step.shift + (at + 1 == len(steps))
            self.order.append((node[step.op], node[following.op], step.op, held, distance))
            self.ordered.append(Edge(step.op, following.op, distance, 0.0, "order", why))

    def arcs(self, ops: Sequence[Op], edges: Sequence[Edge]) -> list[Arc]:
        """Every timed dependence of a pipeline with these ``ops`` and ``edges``, in whole numbers of cycles / _SCALE."""
        issue, runs = self.issue, self.runs
        alone = {op.name: round(op.min_cycles * _SCALE) for op in ops}
        held = {op.name: round(op.issue_cycles * _SCALE) if op.engine else alone[op.name] for op in ops}
        of_edges = [
            (runs[src], issue[dst], alone[src] + round(late * _SCALE), back) for src, dst, back, late, _, _ in edges
        ]
        in_order = [(a, b, (held if holds else alone)[op], back) for a, b, op, holds, back in self.order]
        return [*self.queued, *of_edges, *in_order]

    def seen(self, edges: Sequence[Edge], cycle: Sequence[int]) -> tuple[Edge, ...]:
        """What a reader should see of the arcs of a cycle; from issue to start: nothing."""
        known = (*edges, *self.ordered)
        return tuple(known[i - len(self.queued)] for i in cycle if i >= len(self.queued))


def _graph_of(pipeline: Pipeline, *, with_roles: bool = True) -> _Graph:
    ops = tuple([(op.name, op.engine == "tensor") for op in pipeline.ops])
    return _graph(ops, Same(pipeline.roles if with_roles else ()))


@lru_cache(maxsize=1024)
def _graph(ops: tuple[tuple[str, bool], ...], roles: Same[tuple[Role, ...]]) -> _Graph:
    return _Graph(ops, roles.value)


def rec_mii(pipeline: Pipeline, *, with_roles: bool = True) -> RecMii:
    """The heaviest recurrence over data, buffer and order edges and, ``with_roles``, the in-order programs.

    Raises PipelineError when operations wait for each other with no iteration in between, naming them.
    """
    graph = _graph_of(pipeline, with_roles=with_roles)
    arcs = graph.arcs(pipeline.ops, pipeline.edges)
    try:
        cycle = heaviest_cycle(graph.nodes, arcs)
    except Stuck as stuck:
        raise PipelineError(
            f"pipeline {pipeline.name} deadlocks: {_walk(graph.seen(pipeline.edges, stuck.cycle))}"
        ) from None
    edges = graph.seen(pipeline.edges, cycle)
    weight, distance = sum(arcs[i][2] for i in cycle), sum(arcs[i][3] for i in cycle)
    return RecMii(
        weight / (distance * _SCALE) if cycle else 0.0,
        tuple(edge.src for edge in edges), weight / _SCALE, distance, edges,
    )  # fmt: skip


def around(pipeline: Pipeline) -> tuple[list[float], list[float]]:
    """Of each operation: cycles before it can start in the first block, and from its start to the end of the last; other operations
    and hand-overs of the same block alone are waited for."""
    graph = _graph_of(pipeline)
    number = graph.number
    alone = [op.min_cycles for op in pipeline.ops]
    links = [
        (number[src], number[dst], alone[number[src]] + late)
        for src, dst, back, late, _, _ in pipeline.edges
        if not back
    ]
    held = [held_cycles(op) for op in pipeline.ops]
    steps = [(number[first], number[second], held[number[first]]) for first, second in graph.steps]
    return longest_paths(alone, links + steps)


def _walk(edges: Sequence[Edge]) -> str:
    path = " -> ".join([edge.src for edge in edges] + [edges[0].src])
    total = sum(edge.distance for edge in edges)
    return f"{path} wait for each other (total distance {total}, must be at least 1)"


def bounds(pipeline: Pipeline, *, with_roles: bool = True) -> Bounds:
    """Both bounds, what binds, and the slack of everything else.

    ``with_roles=False`` drops the programs' order (a schedule may then reorder each role) but keeps that a
    role does one thing at a time.  Raises PipelineError on a deadlock.
    """
    res, rec = res_mii(pipeline), rec_mii(pipeline, with_roles=with_roles)
    candidates = dict(res.per_unit)
    candidates.update({f"role {name}": cycles for name, cycles in res.per_role.items() if cycles > 0})
    if rec.edges:
        candidates["recurrence"] = rec.cycles
    lower = max(candidates.values(), default=0.0)
    # First on a tie: a unit explains more than the role or the cycle that happens to be as long.
    binding = next((name for name, c in candidates.items() if c >= lower * (1 - _TIE)), "")
    slack = {name: lower - cycles for name, cycles in candidates.items()}
    fraction = {name: cycles / lower if lower > 0 else 0.0 for name, cycles in slack.items()}
    return Bounds(lower, res, rec, binding, slack, fraction)
