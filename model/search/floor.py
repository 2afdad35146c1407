"""Times that no forecast of a variant goes below, without simulating it.

`Floors` has them in three strengths, each as good as the one before or better and dearer: from the demand that many
variants share (all of them at once), from the recurrences of the loosest of the variants with the same operations, and
from the variant's own loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilecast.model.chip.evaluate import evaluate_seconds, launch_activity
from tilecast.model.chip.launch import (
    PERSISTENT_SCHEDULERS,
    edge_memory_cycles,
    makespan_cycles,
    tile_edges,
    traffic,
)
from tilecast.model.chip.power import Activity, settle_clock, settled_mhz
from tilecast.model.chip.tiles import HeadTiles, head_tiles
from tilecast.model.families import build_pipeline, family_of, loop_shape
from tilecast.model.kernel.alike import key_without, with_knobs
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.sm.bounds import held_cycles, rec_mii

#: A forecast takes nearly equal states for a repetition, so that its period may lie this far under the recurrence.
_RECURRENCE_MARGIN = 0.9995
#: Floors and forecasts round differently.
_ROUNDING = 1 - 1e-9


def unmasked_seconds(workload: Workload, machine: Machine, variant: Variant, clock: str | float) -> float:
    """Seconds if masked blocks cost like plain ones, from the plain simulation; 0 where that is no floor."""
    if not family_of(variant).fused:
        return 0.0
    pipeline = build_pipeline(loop_shape(workload), variant, machine)
    tiles = _tiles(workload, pipeline.rows_per_cta * pipeline.cta_group, pipeline.keys_per_iteration).tiles
    if np.ptp(tiles.iterations) == 0 and np.ptp(tiles.masked) > 0:
        return 0.0  # tiles alike fill whole waves, tiles that are not are estimated: the two do not compare
    return evaluate_seconds(workload, machine, variant, clock, masks=False)


def floor_seconds(workload: Workload, machine: Machine, variant: Variant, clock: str | float = "sustained") -> float:
    """Seconds that no forecast of ``variant`` goes below; no simulation.  0 for the unfused family, which has no loop."""
    return Floors(workload, machine, clock).own(variant)


@dataclass(frozen=True, slots=True)
class _Launch:
    """What all variants with one demand share in one launch."""

    pipeline: Pipeline
    activity: Activity
    l2_cycles: float
    hbm_seconds: float


class Floors:
    """Floors of variants of one class for one workload, machine and clock, in seconds; 0 for the unfused family."""

    def __init__(self, workload: Workload, machine: Machine, clock: str | float) -> None:
        self.workload, self.machine, self.clock = workload, machine, clock
        self.shape = loop_shape(workload)
        self.launch_seconds = machine["launch.kernel_us"] * 1e-6
        self._launches: dict[object, _Launch] = {}

    def of_demand(self, variants: Sequence[Variant]) -> list[float]:
        """Floors by demand, of ``variants`` that differ in it or in their scheduler."""
        if not variants or not family_of(variants[0]).fused:
            return [0.0] * len(variants)
        launches = [self._launch(variant) for variant in variants]
        cycles = np.array([
            max(self._cycles(variant.scheduler, launch.pipeline, unit_floor(launch.pipeline)), launch.l2_cycles)
            for variant, launch in zip(variants, launches, strict=True)
        ])  # fmt: skip
        hbm = np.array([launch.hbm_seconds for launch in launches])
        if isinstance(self.clock, str):
            mhz: float | NDArray[np.float64] = settled_mhz(
                self.machine, _together([x.activity for x in launches]), cycles, hbm, self.clock
            )
        else:
            mhz = float(self.clock)
        floors: list[float] = (_ROUNDING * np.maximum(cycles / (mhz * 1e6), hbm) + self.launch_seconds).tolist()
        return floors

    def of_operations(self, variant: Variant) -> float:
        """Floor by demand and by the recurrences of the variant with the same operations that waits least."""
        if not family_of(variant).fused:
            return 0.0
        loosest = with_knobs(variant, family_of(variant).alike.least_waiting)
        loop = loop_floor(build_pipeline(self.shape, loosest, self.machine))
        launch = self._launch(variant)
        return self._seconds(launch, self._cycles(variant.scheduler, launch.pipeline, loop))

    def own(self, variant: Variant) -> float:
        """Floor by demand and by the recurrences of its own loop."""
        if not family_of(variant).fused:
            return 0.0
        pipeline = build_pipeline(self.shape, variant, self.machine)
        cycles = self._cycles(variant.scheduler, pipeline, loop_floor(pipeline), played=True)
        return self._seconds(self._launch(variant), cycles)

    def _launch(self, variant: Variant) -> _Launch:
        alike = family_of(variant).alike.same_demand
        key = key_without(type(variant), alike)(variant)
        found = self._launches.get(key)
        if found is None:
            pipeline = build_pipeline(self.shape, with_knobs(variant, alike), self.machine)
            found = self._launches[key] = self._launch_of(pipeline)
        return found

    def _launch_of(self, pipeline: Pipeline) -> _Launch:
        machine, workload = self.machine, self.workload
        tiles = _tiles(workload, pipeline.rows_per_cta * pipeline.cta_group, pipeline.keys_per_iteration).tiles
        heads = workload.batch * workload.heads_q
        slots = int(machine["chip.sm_count"]) // pipeline.cta_group * pipeline.ctas_per_sm
        l2, hbm = traffic(workload, pipeline, machine, tiles, heads, pipeline.cta_group, slots)
        activity = launch_activity(workload, machine, pipeline, tiles.total_iterations * heads, l2, hbm)
        port = machine["l2.bytes_per_clk_per_sm"] * machine["chip.sm_count"]
        return _Launch(pipeline, activity, l2 / port, hbm / (machine["hbm.tbps_achieved"] * 1e12))

    def _seconds(self, launch: _Launch, loop_cycles: float) -> float:
        cycles = max(loop_cycles, launch.l2_cycles)
        if isinstance(self.clock, str):
            mhz = settle_clock(self.machine, launch.activity, cycles, launch.hbm_seconds, self.clock).mhz
        else:
            mhz = float(self.clock)
        return _ROUNDING * max(cycles / (mhz * 1e6), launch.hbm_seconds) + self.launch_seconds

    def _cycles(self, scheduler: str, pipeline: Pipeline, loop: LoopFloor, played: bool = False) -> float:
        """Cycles of all tiles on the machine's SMs if their loops take ``loop``; ``played`` tile by tile where that helps."""
        machine, pair = self.machine, pipeline.cta_group
        tiles = _tiles(self.workload, pipeline.rows_per_cta * pair, pipeline.keys_per_iteration)
        heads = self.workload.batch * self.workload.heads_q
        slots = int(machine["chip.sm_count"]) // pair * pipeline.ctas_per_sm
        start, finish = tile_edges(pipeline, machine)
        blocks = tiles.blocks
        if scheduler not in PERSISTENT_SCHEDULERS:
            per_tile, once = loop.tile_cycles(blocks) + start + finish, 0.0
        elif pipeline.tiles_overlap:
            # The start of a tile's loop hides under the end of the one before: at most one iteration and the fill.
            inner = np.maximum(blocks - loop.loose - 1, 0) // loop.laps * loop.cycles
            per_tile, once = np.maximum(blocks * loop.unit_cycles, inner), start + finish
        else:
            per_tile = loop.tile_cycles(blocks) + finish - machine["tma.latency_l2_cycles"]
            per_tile, once = np.maximum(per_tile, blocks * loop.unit_cycles), start + finish
        count = tiles.tiles.count * heads
        if tiles.alike:
            cycles = -(-count // slots) * float(per_tile[0])
        elif played and np.ptp(per_tile) > 1.0:
            # Floors that are alike would say nothing about how forecasts that are not fill the last wave.
            cycles = makespan_cycles(per_tile[tiles.kind], tiles.tiles, heads, slots, scheduler)
        else:
            # Whoever deals the tiles, the last slot is done no sooner than all on average, nor than its longest tile.
            cycles = max(float(per_tile @ tiles.times) * tiles.tiles.weight * heads / slots, float(per_tile.max()))
        return cycles + once + edge_memory_cycles(pipeline, machine, count, slots)


def _together(activities: Sequence[Activity]) -> Activity:
    """The activities of many launches as one whose numbers are arrays."""

    def column(values: Iterable[float]) -> Any:
        return np.fromiter(values, dtype=np.float64)

    cycles = [dict(a.unit_cycles) for a in activities]
    units = sorted({unit for one in cycles for unit in one})
    return Activity(
        column(a.tensor_flop for a in activities), activities[0].dtype,
        tuple((unit, column(one.get(unit, 0.0) for one in cycles)) for unit in units),
        column(a.l2_bytes for a in activities), column(a.hbm_bytes for a in activities),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The tiles of a head, and how many of them have how many blocks."""

    tiles: HeadTiles
    blocks: NDArray[np.int64]
    times: NDArray[np.int64]
    #: Per listed tile: which of ``blocks`` it has.
    kind: NDArray[np.int64]
    #: Whether all tiles take the same time, masked blocks included.
    alike: bool


@lru_cache(maxsize=1024)
def _tiles(workload: Workload, rows: int, keys: int) -> _Tiles:
    tiles = head_tiles(workload, rows, keys)
    blocks, kind, times = np.unique(tiles.iterations, return_inverse=True, return_counts=True)
    return _Tiles(tiles, blocks, times, kind, len(blocks) == 1 and bool(np.ptp(tiles.masked) == 0))


@dataclass(frozen=True, slots=True)
class LoopFloor:
    """What no simulation of a tile's loop goes below, in closed form.

    ``unit_cycles`` a block for the busiest unit; and a recurrence of ``cycles`` over ``laps`` blocks that holds for all
    but the first and last ``loose`` blocks, entered after ``before`` cycles and left ``after`` cycles before the end.
    """

    unit_cycles: float
    cycles: float
    laps: int
    loose: int
    before: float
    after: float

    def tile_cycles(self, iterations: NDArray[np.int64]) -> NDArray[np.float64]:
        """Least cycles of the loops of tiles with so many blocks; 0 for none."""
        times = np.where(iterations > self.loose, (iterations - self.loose - 1) // self.laps + 1, 0)
        chain = np.where(iterations > 0, times * self.cycles + self.before + self.after, 0.0)
        floor: NDArray[np.float64] = np.maximum(chain, iterations * self.unit_cycles)
        return floor


def unit_floor(pipeline: Pipeline) -> LoopFloor:
    """The floor of a pipeline's loop by its busiest unit alone."""
    return LoopFloor(max(pipeline.demand().values(), default=0.0), 0.0, 1, 0, 0.0, 0.0)


@lru_cache(maxsize=16384)
def loop_floor(pipeline: Pipeline) -> LoopFloor:
    """The floor of a pipeline's loop."""
    recurrence = rec_mii(pipeline)
    unit = unit_floor(pipeline).unit_cycles
    if not recurrence.edges:
        return unit_floor(pipeline)
    # Walking the recurrence once visits blocks this far behind and ahead of the one it began with.
    offsets = [0]
    for edge in recurrence.edges:
        offsets.append(offsets[-1] + edge.distance)
    before, after = _paths(pipeline)
    entry = recurrence.ops_on_cycle[0]
    return LoopFloor(
        unit, _RECURRENCE_MARGIN * recurrence.latency, max(1, recurrence.distance), max(offsets) - min(offsets),
        _RECURRENCE_MARGIN * before[entry], _RECURRENCE_MARGIN * after[entry],
    )  # fmt: skip


def _paths(pipeline: Pipeline) -> tuple[dict[str, float], dict[str, float]]:
    """Per operation: cycles before it can start in the first block, and from its start to the end of the last."""
    links = [
        (edge.src, edge.dst, pipeline.op(edge.src).min_cycles + edge.latency_cycles)
        for edge in pipeline.edges
        if edge.distance == 0
    ]
    for role in pipeline.roles:
        for first, second in pairwise(role.program):
            if first.shift == second.shift:
                links.append((first.op, second.op, held_cycles(pipeline.op(first.op))))
    before = {op.name: 0.0 for op in pipeline.ops}
    after = {op.name: op.min_cycles for op in pipeline.ops}
    # As many rounds as there are operations settle every path of a graph without cycles.
    for _ in pipeline.ops:
        changed = False
        for src, dst, cycles in links:
            if before[src] + cycles > before[dst]:
                before[dst], changed = before[src] + cycles, True
            if after[dst] + cycles > after[src]:
                after[src], changed = after[dst] + cycles, True
        if not changed:
            break
    return before, after
