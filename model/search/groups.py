"""What many variants of one class share, and what the loops of each kind of them cost at least.

Nothing here depends on how long the sequences are: a search for another length finds it done.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tilecast.base.same import Same
from tilecast.model.chip.launch import (
    edge_memory_rates,
    fetches_query_late,
    masked_extra,
    tile_edges,
    tile_turnaround,
)
from tilecast.model.families import build_pipeline, family_of
from tilecast.model.kernel.alike import key_without, with_knobs
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.search.loop_floor import LoopFloor, loop_floor, unit_floor
from tilecast.model.sm.simulate import LONGEST_WINDOW, SmTrace, steady_state

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Around:
    """What surrounds the loops of tiles, a number to each variant."""

    #: See `tile_edges`.
    start: Column
    finish: Column
    #: See `edge_memory_rates`.
    rates: tuple[Column, Column, Column, Column]
    #: Whether neighbouring tiles of one CTA overlap, and whether its next Q comes late (`fetches_query_late`).
    overlap: NDArray[np.bool_]
    late: NDArray[np.bool_]

    @staticmethod
    def row(pipeline: Pipeline, machine: Machine) -> tuple[float, ...]:
        """Its numbers of one variant."""
        rates = edge_memory_rates(pipeline, machine)
        return (*tile_edges(pipeline, machine), *rates, pipeline.tiles_overlap, fetches_query_late(pipeline))


@dataclass(frozen=True, slots=True)
class Costs:
    """Cycles of tiles at least, a number to each variant: the fields of `LoopFloor`, and what surrounds a tile's loop."""

    unit_cycles: Column
    idle: Column
    cycles: Column
    laps: Column
    loose: Column
    before: Column
    after: Column
    around: Around

    @staticmethod
    def row(loop: LoopFloor, pipeline: Pipeline, machine: Machine) -> tuple[float, ...]:
        """Its numbers of one variant."""
        numbers = loop.unit_cycles, loop.idle, loop.cycles, loop.laps, loop.loose, loop.before, loop.after
        return *numbers, *Around.row(pipeline, machine)

    @classmethod
    def read(cls, rows: Column) -> Costs:
        """From rows of many variants, one below the other."""
        unit_cycles, idle, cycles, laps, loose, before, after = rows[:, :7].T
        return cls(unit_cycles, idle, cycles, laps, loose, before, after, _around(rows[:, 7:]))


@dataclass(frozen=True, slots=True)
class Loops:
    """The loops of tiles as simulated in blocks without masks, a number to each variant."""

    #: Cycles a block once it repeats, after how many blocks that is known, and cycles a block of the busiest unit.
    period: Column
    known: NDArray[np.int64]
    busiest: Column
    #: See `tile_turnaround`, and `Pipeline.restart_cycles`.
    turnaround: Column
    restart: Column
    around: Around
    #: End of each of the blocks known, [variant, block].
    ends: Column

    @staticmethod
    def row(trace: SmTrace, pipeline: Pipeline, machine: Machine) -> tuple[float, ...]:
        """Its numbers of one variant."""
        ends = trace.iteration_end
        known, busiest = len(ends), max(pipeline.demand().values(), default=0.0)
        turnaround = tile_turnaround(pipeline, machine, trace)
        numbers = trace.ii_cycles, known, busiest, turnaround, pipeline.restart_cycles
        return *numbers, *Around.row(pipeline, machine), *ends, *(LONGEST_WINDOW - known) * (0.0,)

    @classmethod
    def read(cls, rows: Column) -> Loops:
        """From rows of many variants, one below the other."""
        period, known, busiest, turnaround, restart = rows[:, :5].T
        return cls(period, known.astype(np.int64), busiest, turnaround, restart, _around(rows[:, 5:13]), rows[:, 13:])


def _around(rows: Column) -> Around:
    start, finish, *rates, overlap, late = rows.T
    return Around(start, finish, (rates[0], rates[1], rates[2], rates[3]), overlap.astype(bool), late.astype(bool))


class Level:
    """One way to group variants: the group of each, and a row of numbers to each group, worked out when asked for."""

    def __init__(
        self, number: NDArray[np.int64], first: Sequence[int], row: Callable[[int], tuple[float, ...]]
    ) -> None:
        self.number = number
        self._first, self._row = first, row
        self._place = np.full(len(first), -1)
        self._table: NDArray[np.float64] = np.empty((0, 0))
        self._known = 0

    def rows(self, orders: NDArray[np.int64]) -> Column:
        """The row of each of the variants at ``orders``."""
        groups = self.number[orders]
        asked = np.unique(groups[self._place[groups] < 0])
        if len(asked):
            found = np.array([self._row(self._first[group]) for group in asked.tolist()])
            begin, self._known = self._known, self._known + len(asked)
            if self._known > len(self._table):
                room = np.empty((min(2 * self._known, len(self._first)), found.shape[1]))
                room[:begin] = self._table[:begin] if begin else found[:0]
                self._table = room
            self._table[begin : self._known] = found
            self._place[asked] = np.arange(begin, self._known)
        rows: Column = self._table[self._place[groups]]
        return rows


class Groups:
    """Variants of one fused class at one shape of the loop on one machine.

    ``demand``, ``operations`` and ``loop`` group them ever finer, whatever their scheduler, which deals tiles and leaves
    their loop alone; ``masks`` has what a block with masks takes beyond a plain one (`masked_extra`).  ``pipelines`` has
    the pipeline of each demand that starts soonest.
    """

    def __init__(self, variants: tuple[Variant, ...], shape: Workload, machine: Machine) -> None:
        self.variants, self.shape, self.machine = variants, shape, machine
        self.schedulers = [variant.scheduler for variant in variants]
        alike = family_of(variants[0]).alike
        each = np.arange(len(variants)), list(range(len(variants)))
        loops = self._coarser(*each, {"scheduler"})
        operations = self._coarser(*loops, {*alike.least_waiting, "scheduler"})
        demand, first = self._coarser(*operations, {*alike.same_demand, "scheduler"})
        self.pipelines = tuple(self._pipeline(order) for order in first)
        self.demand = Level(demand, first, self._row_of_demand)
        self.operations = Level(*operations, self._row_of_operations)
        self.loop = Level(*loops, self._row_of_loop)
        self.masks = Level(*loops, self._row_of_masks)

    def _coarser(
        self, finer: NDArray[np.int64], members: list[int], knobs: set[str]
    ) -> tuple[NDArray[np.int64], list[int]]:
        """The group of each variant among those that differ in ``knobs`` alone, and the first member of each; from groups that
        differ in some of the knobs."""
        key = key_without(type(self.variants[0]), knobs)
        groups: dict[Hashable, int] = {}
        first: list[int] = []
        numbers = []
        for order in members:
            group = groups.setdefault(key(self.variants[order]), len(groups))
            if group == len(first):
                first.append(order)
            numbers.append(group)
        return np.array(numbers)[finer], first

    def _pipeline(self, order: int) -> Pipeline:
        variant = self.variants[order]
        return build_pipeline(self.shape, with_knobs(variant, family_of(variant).alike.same_demand), self.machine)

    def _row_of_demand(self, order: int) -> tuple[float, ...]:
        pipeline = self.pipelines[self.demand.number[order]]
        return Costs.row(unit_floor(pipeline), pipeline, self.machine)

    def _row_of_operations(self, order: int) -> tuple[float, ...]:
        variant = self.variants[order]
        loosest = build_pipeline(self.shape, with_knobs(variant, family_of(variant).alike.least_waiting), self.machine)
        return Costs.row(loop_floor(loosest), self.pipelines[self.demand.number[order]], self.machine)

    def _row_of_loop(self, order: int) -> tuple[float, ...]:
        pipeline = build_pipeline(self.shape, self.variants[order], self.machine)
        return Loops.row(steady_state(pipeline), pipeline, self.machine)

    def _row_of_masks(self, order: int) -> tuple[float, ...]:
        pipeline = build_pipeline(self.shape, self.variants[order], self.machine)
        return (masked_extra(steady_state(pipeline), steady_state(pipeline, 2)),)


def groups_of(variants: tuple[Variant, ...], shape: Workload, machine: Machine) -> Groups:
    """The groups of ``variants``; for the same tuple once: comparing thousands of them takes longer than what is kept for them."""
    return _groups(Same(variants), shape, machine) if len(variants) > 1 else Groups(variants, shape, machine)


@lru_cache(maxsize=64)
def _groups(same: Same[tuple[Variant, ...]], shape: Workload, machine: Machine) -> Groups:
    return Groups(same.value, shape, machine)
