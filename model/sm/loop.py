"""A loop as runs of it take it: operations by number, what waits for what, and how they share the units.

Operations go by number: that of the pipeline in a plain block, and count + that in a block with masks.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from math import inf
from operator import attrgetter

from tilecast.base.same import Same
from tilecast.model.pipeline.graph import MaskDemand, Op, Pipeline, Role
from tilecast.model.sm.fair_share import speed_of_each, use_of

#: How an operation runs: it holds its role, waits its turn on the matrix engine, goes beside all others, or waits its turn among
#: what the chip's memory serves in order, or what L2 does.
SYNC, MATRIX, COPY, MEMORY, L2 = range(5)
_KINDS = {"": SYNC, "tensor": MATRIX, "memory": MEMORY, "l2": L2}
_shares = attrgetter("tensor", "shares", "fma", "hidden_fma", "most_beside_mma")


def with_mask(ops: tuple[Op, ...], masks: MaskDemand) -> dict[str, Op]:
    """Operations as they run in a block that crosses a mask boundary, those whose demand that changes."""
    masked: dict[str, Op] = {}
    named = {op.name: op for op in ops}
    for name, extra in masks:
        op = named[name]
        demand = dict(op.demand)
        slower = 0.0
        waits = 0.0
        for unit, cycles in extra:
            if not unit:
                waits += cycles
                continue
            demand[unit] = demand.get(unit, 0.0) + cycles
            slower = max(slower, cycles)
        slower += waits
        masked[name] = Op(
            op.name, op.kind, op.role, tuple(demand.items()), op.min_cycles + slower,
            op.engine, op.issue_cycles, op.tile, op.instructions, op.hidden_fma,
            op.beside_mma_cycles + slower if op.beside_mma_cycles else 0.0,
        )  # fmt: skip
    return masked


class Body:
    """What loops with the same operations in the same order share: operations by number, and the fair speeds found so far."""

    def __init__(self, ops: tuple[Op, ...], roles: tuple[Role, ...], masked: dict[str, Op]) -> None:
        self.number = {op.name: k for k, op in enumerate(ops)}
        self.names = tuple(self.number)
        self.count = len(ops)
        self.ops = (*ops, *(masked.get(op.name, op) for op in ops))
        self.alone = [op.min_cycles for op in self.ops]
        self.issue = [op.issue_cycles for op in ops]
        self.engine = [_KINDS.get(op.engine, COPY) for op in ops]
        self.programs = [[(self.number[step.op], step.shift) for step in role.program] for role in roles]
        self.role_of = [0] * self.count
        for role, program in enumerate(self.programs):
            for op, _ in program:
                self.role_of[op] = role
        #: The role whose laps are watched for repetition: the one with most to do.
        self.pacer = max(range(len(self.programs)), key=lambda role: len(self.programs[role]))
        own = [use_of(op) for op in self.ops]
        #: How operations draw on units, in the order in which shares are added up, and which of them each operation has.
        self.uses = tuple(sorted(set(own), key=_shares))
        place = {use: at for at, use in enumerate(self.uses)}
        self.use_of = [place[use] for use in own]
        self._speeds: dict[tuple[int, ...], tuple[tuple[float, ...], tuple[float, ...]]] = {}

    def speeds(self, running: list[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Fair speeds of the ``running`` operations, and cycles they take for a cycle's work."""
        key = tuple(running)
        found = self._speeds.get(key)
        if found is None:
            uses = [self.use_of[op] for op in key]
            of = speed_of_each(tuple([self.uses[use] for use in sorted(uses)]))
            speeds = tuple([of[self.uses[use]] for use in uses])
            found = self._speeds[key] = speeds, tuple([1.0 / speed if speed > 0 else inf for speed in speeds])
        return found


@lru_cache(maxsize=1024)
def _body(ops: Same[tuple[Op, ...]], roles: Same[tuple[Role, ...]], masks: MaskDemand) -> Body:
    return Body(ops.value, roles.value, with_mask(ops.value, masks))


class Loop:
    """What all runs of one loop share: its body, and what waits for what."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.name = pipeline.name
        self.body = _body(Same(pipeline.ops), Same(pipeline.roles), pipeline.mask_demand)
        number = self.body.number.__getitem__
        #: Of each edge: source and destination by number, iterations between them and cycles of hand-over.
        self.src: tuple[int, ...]
        self.dst: tuple[int, ...]
        self.back: tuple[int, ...]
        self.latency: tuple[float, ...]
        src, dst, self.back, self.latency, _, _ = zip(*pipeline.edges, strict=True) if pipeline.edges else ((),) * 6
        self.src, self.dst = tuple(map(number, src)), tuple(map(number, dst))

    @cached_property
    def sources(self) -> list[list[tuple[int, int, float]]]:
        """By operation: what it waits for, from how many iterations ago, with how many cycles of hand-over."""
        found: list[list[tuple[int, int, float]]] = [[] for _ in self.body.names]
        for src, dst, back, latency in zip(self.src, self.dst, self.back, self.latency, strict=True):
            found[dst].append((src, back, latency))
        return found

    @cached_property
    def reach(self) -> list[float]:
        """By operation: for how many cycles after its end something may still wait for its hand-over."""
        found = [0.0] * self.body.count
        for src, latency in zip(self.src, self.latency, strict=True):
            found[src] = max(found[src], latency)
        return found
