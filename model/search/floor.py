"""Times that no forecast of a variant goes below, without simulating it.

`Floors` has them in three strengths, each as good as the one before or better and dearer: from the demand that many
variants share (all of them at once), from the recurrences of the loosest of the variants with the same operations, and
from the variant's own loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
from tilecast.model.search.loop_floor import LoopFloor, loop_of, unit_floor

#: Floors and forecasts round differently.
_ROUNDING = 1 - 1e-9


def unmasked_seconds(workload: Workload, machine: Machine, variant: Variant, clock: str | float) -> float:
    """Seconds if masked blocks cost like plain ones, from the plain simulation; 0 where that is no floor."""
    if not family_of(variant).fused:
        return 0.0
    pipeline = build_pipeline(loop_shape(workload), variant, machine)
    tiles = head_tiles(workload, pipeline.rows_per_cta * pipeline.cta_group, pipeline.keys_per_iteration)
    if np.ptp(tiles.iterations) == 0 and np.ptp(tiles.masked) > 0:
        return 0.0  # tiles alike fill whole waves, tiles that are not are estimated: the two do not compare
    return evaluate_seconds(workload, machine, variant, clock, masks=False)


def floor_seconds(workload: Workload, machine: Machine, variant: Variant, clock: str | float = "sustained") -> float:
    """Seconds that no forecast of ``variant`` goes below; no simulation.  0 for the unfused family, which has no loop."""
    return Floors(workload, machine, clock).own(variant)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """What launches share whose tiles and slots are the same."""

    tiles: HeadTiles
    #: How many blocks the tiles of a head have, how many tiles have so many, and which of the kinds each listed tile is.
    blocks: NDArray[np.int64]
    times: NDArray[np.int64]
    kind: NDArray[np.int64]
    #: Whether all tiles take the same time, masked blocks included.
    alike: bool
    heads: int
    slots: int
    l2_bytes: float
    hbm_bytes: float

    @property
    def count(self) -> int:
        """Tiles of the launch."""
        return self.tiles.count * self.heads

    @property
    def share(self) -> float:
        """Tiles of a slot on average, for every tile listed."""
        return self.tiles.weight * self.heads / self.slots


@dataclass(frozen=True, slots=True)
class _Launch:
    """What all variants with one demand share in one launch."""

    pipeline: Pipeline
    tiling: _Tiling
    activity: Activity
    l2_cycles: float
    hbm_seconds: float


class Floors:
    """Floors of variants of one class for one workload, machine and clock, in seconds; 0 for the unfused family."""

    def __init__(self, workload: Workload, machine: Machine, clock: str | float) -> None:
        self.machine, self.clock = machine, clock
        self.cycles = _cycles_of(workload, machine)
        self.launch_seconds = machine["launch.kernel_us"] * 1e-6

    def of_demand(self, variants: Sequence[Variant]) -> list[float]:
        """Floors by demand, of ``variants`` that differ in it or in their scheduler."""
        if not variants or not family_of(variants[0]).fused:
            return [0.0] * len(variants)
        launches = [self.cycles.launch(variant) for variant in variants]
        cycles = np.array([self.cycles.of_demand(variant) for variant in variants])
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
        return self._seconds(variant, self.cycles.of_operations(variant)) if family_of(variant).fused else 0.0

    def own(self, variant: Variant) -> float:
        """Floor by demand and by the recurrences of its own loop, with tiles of unlike length dealt as its scheduler does."""
        return self._seconds(variant, self.cycles.own(variant)) if family_of(variant).fused else 0.0

    def _seconds(self, variant: Variant, cycles: float) -> float:
        launch = self.cycles.launch(variant)
        if isinstance(self.clock, str):
            mhz = settle_clock(self.machine, launch.activity, cycles, launch.hbm_seconds, self.clock).mhz
        else:
            mhz = float(self.clock)
        return _ROUNDING * max(cycles / (mhz * 1e6), launch.hbm_seconds) + self.launch_seconds


class _Cycles:
    """Floors in cycles, whatever the clock: those of `Floors` before it settles; remembered, for the next clock asks again."""

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self.workload, self.machine = workload, machine
        self.shape = loop_shape(workload)
        self._launches: dict[object, _Launch] = {}
        self._tilings: dict[tuple[int, int, int], _Tiling] = {}
        self._operations: dict[Variant, float] = {}
        self._own: dict[Variant, float] = {}

    def of_demand(self, variant: Variant) -> float:
        """See `Floors.of_demand`."""
        launch = self.launch(variant)
        return max(self._unit_cycles(variant.scheduler, launch), launch.l2_cycles)

    def of_operations(self, variant: Variant) -> float:
        """See `Floors.of_operations`."""
        found = self._operations.get(variant)
        if found is None:
            loosest = with_knobs(variant, family_of(variant).alike.least_waiting)
            launch, (_, loop) = self.launch(variant), loop_of(self.shape, loosest, self.machine)
            cycles = self._loop_cycles(variant.scheduler, launch, launch.pipeline, loop)
            found = self._operations[variant] = max(cycles, launch.l2_cycles)
        return found

    def own(self, variant: Variant) -> float:
        """See `Floors.own`."""
        found = self._own.get(variant)
        if found is None:
            # The scheduler deals tiles and leaves their loop alone.
            launch, alone = self.launch(variant), with_knobs(variant, {"scheduler": "grid"})
            pipeline, loop = loop_of(self.shape, alone, self.machine)
            cycles = self._loop_cycles(variant.scheduler, launch, pipeline, loop, dealt=True)
            found = self._own[variant] = max(cycles, launch.l2_cycles)
        return found

    def launch(self, variant: Variant) -> _Launch:
        """What the variant's launch shares with all of one demand."""
        alike = family_of(variant).alike.same_demand
        key = key_without(type(variant), alike)(variant)
        found = self._launches.get(key)
        if found is None:
            pipeline = build_pipeline(self.shape, with_knobs(variant, alike), self.machine)
            found = self._launches[key] = self._launch_of(pipeline)
        return found

    def _launch_of(self, pipeline: Pipeline) -> _Launch:
        machine, tiling = self.machine, self._tiling(pipeline)
        iterations = tiling.tiles.total_iterations * tiling.heads
        activity = launch_activity(self.workload, machine, pipeline, iterations, tiling.l2_bytes, tiling.hbm_bytes)
        port = machine["l2.bytes_per_clk_per_sm"] * machine["chip.sm_count"]
        memory = machine["hbm.tbps_achieved"] * 1e12
        return _Launch(pipeline, tiling, activity, tiling.l2_bytes / port, tiling.hbm_bytes / memory)

    def _tiling(self, pipeline: Pipeline) -> _Tiling:
        pair = pipeline.cta_group
        rows, keys = pipeline.rows_per_cta * pair, pipeline.keys_per_iteration
        slots = int(self.machine["chip.sm_count"]) // pair * pipeline.ctas_per_sm
        found = self._tilings.get((rows, keys, slots))
        if found is None:
            tiles = head_tiles(self.workload, rows, keys)
            blocks, kind, times = np.unique(tiles.iterations, return_inverse=True, return_counts=True)
            alike = len(blocks) == 1 and bool(np.ptp(tiles.masked) == 0)
            heads = self.workload.batch * self.workload.heads_q
            l2, hbm = traffic(self.workload, pipeline, self.machine, tiles, heads, pair, slots)
            found = _Tiling(tiles, blocks, times, kind, alike, heads, slots, l2, hbm)
            self._tilings[rows, keys, slots] = found
        return found

    def _unit_cycles(self, scheduler: str, launch: _Launch) -> float:
        """Cycles of all tiles on the machine's SMs if their loops take no more than the busiest unit."""
        tiling, unit = launch.tiling, unit_floor(launch.pipeline).unit_cycles
        edge, once = self._edges(scheduler, launch, launch.pipeline)
        # No tile takes less than its blocks do.
        edge = max(0.0, edge)
        longest = float(tiling.blocks[-1]) * unit + edge
        if tiling.alike:
            return -(-tiling.count // tiling.slots) * longest + once
        tiles = tiling.tiles
        return (
            max((tiles.total_iterations / tiles.weight * unit + len(tiling.kind) * edge) * tiling.share, longest) + once
        )

    def _loop_cycles(
        self, scheduler: str, launch: _Launch, pipeline: Pipeline, loop: LoopFloor, dealt: bool = False
    ) -> float:  # fmt: skip
        """Cycles of all tiles on the machine's SMs if their loops take ``loop``; tile by tile if ``dealt`` and unlike."""
        tiling = launch.tiling
        blocks, tiles = tiling.blocks, tiling.tiles
        edge, once = self._edges(scheduler, launch, pipeline)
        if scheduler in PERSISTENT_SCHEDULERS and pipeline.tiles_overlap:
            # The start of a tile's loop hides under the end of the one before: at most one iteration and the fill.
            inner = np.maximum(blocks - loop.loose - 1, 0) // loop.laps * loop.cycles
            per_tile = np.maximum(blocks * loop.unit_cycles, inner)
        else:
            per_tile = np.maximum(loop.tile_cycles(blocks) + edge, blocks * loop.unit_cycles)
        longest = float(per_tile.max())
        if tiling.alike:
            return -(-tiling.count // tiling.slots) * longest + once
        if dealt and longest - float(per_tile.min()) > 1.0:
            # Floors that are alike would say nothing about how forecasts that are not fill the last wave.
            return makespan_cycles(per_tile[tiling.kind], tiles, tiling.heads, tiling.slots, scheduler) + once
        # Whoever deals the tiles, the last slot is done no sooner than all on average, nor than its longest tile.
        return max(float(per_tile @ tiling.times) * tiling.share, longest) + once

    def _edges(self, scheduler: str, launch: _Launch, pipeline: Pipeline) -> tuple[float, float]:
        """Cycles around the loop of every tile, and those of the launch that no loop hides."""
        machine, tiling = self.machine, launch.tiling
        start, finish = tile_edges(pipeline, machine)
        memory = edge_memory_cycles(pipeline, machine, tiling.count, tiling.slots)
        if scheduler not in PERSISTENT_SCHEDULERS:
            return start + finish, memory
        turn = 0.0 if pipeline.tiles_overlap else finish - machine["tma.latency_l2_cycles"]
        return turn, start + finish + memory


@lru_cache(maxsize=8)
def _cycles_of(workload: Workload, machine: Machine) -> _Cycles:
    return _Cycles(workload, machine)


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
