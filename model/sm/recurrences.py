"""Cycles of timed graphs: one of positive weight, one that can never start, one with the largest weight over distance.

In exact integer arithmetic, by Dinkelbach's method: take any cycle, and while one with a larger ratio exists, move to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

#: One constraint of a timed graph by node numbers: t[dst] >= t[src] + weight - distance * II.
Arc = tuple[int, int, int, int]


class Stuck(Exception):  # noqa: N818 (what it says, not that it is an error)
    """Arcs of a timed graph wait for each other with no iteration in between; ``cycle`` has their indices in walking order."""

    def __init__(self, cycle: list[int]) -> None:
        super().__init__(cycle)
        self.cycle = cycle


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


def max_cycle_ratio(nodes: int, arcs: Sequence[Arc]) -> tuple[Fraction, list[int]]:
    """Largest weight over distance of any cycle and the arcs of one that has it; (0, []) without cycles.

    Requires that no cycle has distance <= 0 and positive weight (see `deadlock_cycle`).
    """
    best: list[int] = []
    ratio = Fraction(0)
    while True:
        p, q = ratio.numerator, ratio.denominator
        cycle = positive_cycle(nodes, arcs, [w * q - p * h for _, _, w, h in arcs])
        if cycle is None:
            return ratio, best
        best = cycle
        ratio = Fraction(sum(arcs[i][2] for i in cycle), sum(arcs[i][3] for i in cycle))


def heaviest_cycle(nodes: int, arcs: Sequence[Arc]) -> list[int]:
    """Indices of the arcs of a cycle with the largest weight over distance, none without cycles; `Stuck` on a deadlock."""
    stuck = deadlock_cycle(nodes, arcs)
    if stuck is not None:
        raise Stuck(stuck)
    return max_cycle_ratio(nodes, arcs)[1]


def longest_paths(alone: Sequence[float], links: Sequence[tuple[int, int, float]]) -> tuple[list[float], list[float]]:
    """Of every operation: cycles before it can start, and from its start to the end of the last.

    ``alone`` has their cycles, ``links`` (first, second, cycles between their starts); the links have no cycle.
    """
    before, after = [0.0] * len(alone), list(alone)
    # As many rounds as there are operations settle every path of a graph without cycles.
    for _ in alone:
        changed = False
        for src, dst, cycles in links:
            if before[src] + cycles > before[dst]:
                before[dst], changed = before[src] + cycles, True
            if after[dst] + cycles > after[src]:
                after[src], changed = after[dst] + cycles, True
        if not changed:
            break
    return before, after
