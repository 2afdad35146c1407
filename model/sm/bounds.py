"""Lower bounds on the initiation interval of a pipeline: the busiest unit and the heaviest recurrence.

``II >= max(ResMII, RecMII)`` for every schedule of the loop (Rau, "Iterative modulo scheduling", MICRO 1994).
ResMII is the largest demand on one unit; RecMII is the maximum over dependence cycles of latency over
distance, found exactly in rational arithmetic by Dinkelbach's method: take any cycle, and while one with a
larger ratio exists, move to it.  Pure Python, no solver; a pipeline of twenty operations takes about a
millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from tilecast.model.pipeline.graph import Edge, Op, Pipeline, PipelineError, Role

#: One constraint of a timed graph by node numbers: t[dst] >= t[src] + weight - distance * II.
Arc = tuple[int, int, int, int]

_TIE = 1e-9
#: Weights of the exact search are whole numbers of cycles / _SCALE.
_SCALE = 1 << 20


def _scaled(cycles: float) -> int:
    return round(cycles * _SCALE)


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


class _Link(NamedTuple):
    """A timed dependence between graph nodes; ``ops`` are what a reader should see of it (None: internal).

    ``weight`` is in cycles / _SCALE, so that sums and comparisons are exact.
    """

    src: str
    dst: str
    weight: int
    distance: int
    ops: tuple[str, str] | None = None
    #: The pipeline's edge; None for links that order imposes, which say so in ``why``.
    edge: Edge | None = None
    why: str = ""

    def shown(self) -> Edge | None:
        """The edge that a reader should see."""
        if self.edge is not None or self.ops is None:
            return self.edge
        return Edge(*self.ops, self.distance, 0.0, "order", self.why)


def _runs(op: Op) -> str:
    """Node of the moment the operation starts to execute; the plain name is the moment it is issued."""
    return f"{op.name}@run" if op.engine == "tensor" else op.name


def _links(pipeline: Pipeline, with_roles: bool) -> list[_Link]:
    """Every timed dependence.  Matrix operations have two nodes: they queue between issue and start."""
    links = [_Link(op.name, _runs(op), 0, 0) for op in pipeline.ops if op.engine == "tensor"]
    for edge in pipeline.edges:
        src = pipeline.op(edge.src)
        weight = _scaled(src.min_cycles) + _scaled(edge.latency_cycles)
        links.append(_Link(_runs(src), edge.dst, weight, edge.distance, (edge.src, edge.dst), edge, edge.why))
    if with_roles:
        links += _order_links(pipeline.ops, pipeline.roles)
    return links


@lru_cache(maxsize=1024)
def _order_links(ops: tuple[Op, ...], roles: tuple[Role, ...]) -> tuple[_Link, ...]:
    """In-order recurrences: a step after the one before it, the first of the next lap after the last of this.

    Step (b, sb) behind step (a, sa): b of block j+sb waits for a of block j+sa, which is distance sb - sa.
    Matrix operations of one role also execute in the order of issue.
    """
    named = {op.name: op for op in ops}
    links: list[_Link] = []
    for role in roles:
        matrix = tuple(step for step in role.program if named[step.op].engine == "tensor")
        for steps, why in ((role.program, f"role {role.name} in order"), (matrix, "matrix engine in order")):
            for at, step in enumerate(steps):
                following = steps[(at + 1) % len(steps)]
                wrap = 1 if at + 1 == len(steps) else 0
                distance = following.shift - step.shift + wrap
                a, b = named[step.op], named[following.op]
                pair = a.name, b.name
                if steps is matrix:
                    links.append(_Link(_runs(a), _runs(b), _scaled(a.min_cycles), distance, pair, None, why))
                else:
                    links.append(_Link(*pair, _scaled(held_cycles(a)), distance, pair, None, why))
    return tuple(links)


def positive_cycle(nodes: int, arcs: Sequence[Arc], weights: Sequence[int]) -> list[int] | None:
    """Indices of the arcs of some cycle with positive total weight, in walking order; None when there is
    none.

    Longest-path Bellman-Ford from all nodes at once, looking for a cycle among the predecessors after every
    round.
    """
    value = [0] * nodes
    pred = [-1] * nodes
    for _ in range(nodes + 1):
        changed = False
        for index, (src, dst, _, _) in enumerate(arcs):
            reached = value[src] + weights[index]
            if reached > value[dst]:
                value[dst] = reached
                pred[dst] = index
                changed = True
        if not changed:
            return None
        cycle = _predecessor_cycle(nodes, arcs, pred)
        if cycle is not None:
            return cycle
    raise AssertionError("Bellman-Ford kept improving without a cycle")  # impossible: n rounds imply one


def _predecessor_cycle(nodes: int, arcs: Sequence[Arc], pred: Sequence[int]) -> list[int] | None:
    mark = [-1] * nodes
    for start in range(nodes):
        node = start
        while mark[node] < 0 and pred[node] >= 0:
            mark[node] = start
            node = arcs[pred[node]][0]
        if mark[node] == start and pred[node] >= 0:
            cycle, at = [], node
            while True:
                cycle.append(pred[at])
                at = arcs[pred[at]][0]
                if at == node:
                    return cycle[::-1]
    return None


def deadlock_cycle(nodes: int, arcs: Sequence[Arc]) -> list[int] | None:
    """Arc indices of a cycle whose distances sum to zero or less (it could never start); None when sound."""
    return positive_cycle(nodes, arcs, [1 - (nodes + 1) * distance for _, _, _, distance in arcs])


def max_cycle_ratio(nodes: int, arcs: Sequence[Arc], start: Sequence[int] = ()) -> tuple[Fraction, list[int]]:
    """Largest weight over distance of any cycle and the arcs of one that has it; (0, []) without cycles.

    ``start`` names the arcs of a cycle that is known to be heavy: the search begins there.  Requires that no cycle has
    distance <= 0 and positive weight (see `deadlock_cycle`).
    """
    best = list(start)
    ratio = Fraction(sum(arcs[i][2] for i in best), sum(arcs[i][3] for i in best)) if best else Fraction(0)
    while True:
        p, q = ratio.numerator, ratio.denominator
        cycle = positive_cycle(nodes, arcs, [w * q - p * h for _, _, w, h in arcs])
        if cycle is None:
            return ratio, best
        best = cycle
        ratio = Fraction(sum(arcs[i][2] for i in cycle), sum(arcs[i][3] for i in cycle))


def rec_mii(pipeline: Pipeline, *, with_roles: bool = True, guess: RecMii | None = None) -> RecMii:
    """The heaviest recurrence over data, buffer and order edges and, ``with_roles``, the in-order programs.

    ``guess`` is the recurrence of a similar pipeline: where this one has it too, the search begins with it.
    Raises PipelineError when operations wait for each other with no iteration in between, naming them.
    """
    links = _links(pipeline, with_roles)
    numbers: dict[str, int] = {}
    for op in pipeline.ops:
        numbers.setdefault(op.name, len(numbers))
        numbers.setdefault(_runs(op), len(numbers))
    arcs = [(numbers[link.src], numbers[link.dst], link.weight, link.distance) for link in links]
    stuck = deadlock_cycle(len(numbers), arcs)
    if stuck is not None:
        raise PipelineError(f"pipeline {pipeline.name} deadlocks: {_walk(links, stuck)}")
    ratio, cycle = max_cycle_ratio(len(numbers), arcs, _found_in(links, guess) if guess else ())
    edges = tuple(shown for i in cycle if (shown := links[i].shown()) is not None)
    return RecMii(
        float(ratio / _SCALE),
        tuple(edge.src for edge in edges),
        sum(links[i].weight for i in cycle) / _SCALE,
        sum(links[i].distance for i in cycle),
        edges,
    )


def _found_in(links: Sequence[_Link], guess: RecMii) -> list[int]:
    """Which of ``links`` make up the recurrence of another pipeline; none where one of them is missing."""
    number = {(link.ops, link.distance, link.why): i for i, link in enumerate(links)}
    found = [number.get(((edge.src, edge.dst), edge.distance, edge.why)) for edge in guess.edges]
    return [i for i in found if i is not None] if None not in found else []


def _walk(links: Sequence[_Link], cycle: Sequence[int]) -> str:
    edges = [shown for i in cycle if (shown := links[i].shown()) is not None]
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
