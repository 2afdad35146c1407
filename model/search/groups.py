"""What many variants of one class share, and what the loops of each kind of them cost at least.

Nothing here depends on how long the sequences are: a search for another length finds it done.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilecast.base.same import Same
from tilecast.model.chip.launch import edge_memory_rates, tile_edges
from tilecast.model.families import build_pipeline, family_of
from tilecast.model.kernel.alike import key_without, with_knobs
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.search.loop_floor import LoopFloor, loop_of, unit_floor

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Costs:
    """Cycles of tiles, a number to each variant: the fields of `LoopFloor`, and what surrounds a tile's loop."""

    unit_cycles: Column
    cycles: Column
    laps: Column
    loose: Column
    before: Column
    after: Column
    #: See `tile_edges`.
    start: Column
    finish: Column
    #: See `edge_memory_rates`.
    read_shared: Column
    write_shared: Column
    read_alone: Column
    write_alone: Column
    #: Whether neighbouring tiles of one CTA overlap.
    overlap: NDArray[np.bool_]

    def of(self, index: NDArray[np.int64]) -> Costs:
        """Those of some of the variants."""
        columns: list[Any] = [getattr(self, f.name)[index] for f in fields(self)]
        return Costs(*columns)


class Level:
    """One way to group variants: the group of each, and the costs of a group's tiles, worked out when asked for."""

    def __init__(
        self, number: NDArray[np.int64], first: Sequence[int], cost: Callable[[int], tuple[float, ...]]
    ) -> None:
        self.number = number
        self._first, self._cost = first, cost
        self._table = np.empty((len(fields(Costs)), len(first)))
        self._known = np.zeros(len(first), dtype=bool)

    def costs(self, orders: NDArray[np.int64]) -> Costs:
        """A number of each kind to each of the variants at ``orders``."""
        groups = self.number[orders]
        for group in np.unique(groups[~self._known[groups]]):
            self._table[:, group] = self._cost(self._first[group])
            self._known[group] = True
        *numbers, overlap = self._table[:, groups]
        columns: list[Any] = [*numbers, overlap.astype(bool)]
        return Costs(*columns)


class Groups:
    """Variants of one fused class at one shape of the loop on one machine.

    ``demand``, ``operations`` and ``loop`` group them ever finer, whatever their scheduler, which deals tiles and leaves
    their loop alone.  ``pipelines`` has the pipeline of each demand that starts soonest.
    """

    def __init__(self, variants: tuple[Variant, ...], shape: Workload, machine: Machine) -> None:
        self.variants, self.shape, self.machine = variants, shape, machine
        self.schedulers = [variant.scheduler for variant in variants]
        alike = family_of(variants[0]).alike
        demand, first = self._numbers({*alike.same_demand, "scheduler"})
        self.pipelines = tuple(self._pipeline(order) for order in first)
        self.demand = Level(demand, first, self._cost_of_demand)
        self.operations = Level(*self._numbers({*alike.least_waiting, "scheduler"}), self._cost_of_operations)
        self.loop = Level(*self._numbers({"scheduler"}), self._cost_of_own)

    def _numbers(self, knobs: set[str]) -> tuple[NDArray[np.int64], list[int]]:
        """The group of each variant among those that differ in ``knobs`` alone, and the first member of each group."""
        key = key_without(type(self.variants[0]), knobs)
        groups: dict[Hashable, int] = {}
        first: list[int] = []
        numbers = np.empty(len(self.variants), dtype=np.int64)
        for order, variant in enumerate(self.variants):
            group = groups.setdefault(key(variant), len(groups))
            if group == len(first):
                first.append(order)
            numbers[order] = group
        return numbers, first

    def _pipeline(self, order: int) -> Pipeline:
        variant = self.variants[order]
        return build_pipeline(self.shape, with_knobs(variant, family_of(variant).alike.same_demand), self.machine)

    def _cost_of_demand(self, order: int) -> tuple[float, ...]:
        pipeline = self.pipelines[self.demand.number[order]]
        return _row(unit_floor(pipeline), pipeline, self.machine)

    def _cost_of_operations(self, order: int) -> tuple[float, ...]:
        variant = self.variants[order]
        loosest = with_knobs(variant, family_of(variant).alike.least_waiting)
        _, loop = loop_of(self.shape, loosest, self.machine)
        return _row(loop, self.pipelines[self.demand.number[order]], self.machine)

    def _cost_of_own(self, order: int) -> tuple[float, ...]:
        pipeline, loop = loop_of(self.shape, with_knobs(self.variants[order], {"scheduler": "grid"}), self.machine)
        return _row(loop, pipeline, self.machine)


def groups_of(variants: tuple[Variant, ...], shape: Workload, machine: Machine) -> Groups:
    """The groups of ``variants``; for the same tuple once: comparing thousands of them takes longer than what is kept for them."""
    return _groups(Same(variants), shape, machine) if len(variants) > 1 else Groups(variants, shape, machine)


@lru_cache(maxsize=64)
def _groups(same: Same[tuple[Variant, ...]], shape: Workload, machine: Machine) -> Groups:
    return Groups(same.value, shape, machine)


def _row(loop: LoopFloor, pipeline: Pipeline, machine: Machine) -> tuple[float, ...]:
    """What `Costs` has of one loop and the pipeline around it."""
    return (
        loop.unit_cycles, loop.cycles, loop.laps, loop.loose, loop.before, loop.after, *tile_edges(pipeline, machine),
        *edge_memory_rates(pipeline, machine), pipeline.tiles_overlap,
    )  # fmt: skip
