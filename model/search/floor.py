"""Times that no forecast of a variant goes below, for many variants at once.

`Floors` has them in five strengths, each dearer than the one before: from the demand that many variants share, from the
recurrences of the loosest of the variants with the same operations, from these with tiles dealt as the scheduler does,
from the variant's own loop as simulated if all blocks were plain ones, and with those blocks that are masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilecast.model.chip.dealing import Dealing, dealt
from tilecast.model.chip.evaluate import launch_activity
from tilecast.model.chip.launch import (
    edge_memory_cycles,
    l2_bytes_per_clk,
    late_query,
    loops_after_the_first,
    makespan_cycles,
    plain_cycles,
    traffic,
    whole_tiles,
)
from tilecast.model.chip.power import Activity, busy_share, settled_mhz
from tilecast.model.chip.tiles import HeadTiles, head_tiles
from tilecast.model.families import family_of, loop_shape
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.search.groups import Around, Costs, Groups, Level, Loops, groups_of
from tilecast.model.search.loop_floor import least_cycles

#: Tiles of a launch beyond which the last turn hardly shows.
_MANY = 4096
#: Floors and forecasts round differently.
_ROUNDING = 1 - 1e-9

Orders = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Tiling:
    """What launches share whose tiles and slots are the same."""

    tiles: HeadTiles
    #: Query rows of a tile, and keys of a block.
    rows: int
    keys: int
    #: The kinds of tiles: blocks of each, those with masks among them, loops beside the first, how many tiles of a head are of it;
    #: and which kind each listed tile is.
    blocks: NDArray[np.int64]
    masked: NDArray[np.int64]
    more_loops: NDArray[np.float64]
    times: NDArray[np.int64]
    kind: NDArray[np.int64]
    #: Whether all tiles take the same time, masked blocks included; and whether a forecast with plain blocks alone is no longer
    #: than with masked ones: tiles alike fill whole waves, tiles that are not are estimated, and the two do not compare.
    alike: bool
    compares: bool
    heads: int
    slots: int
    l2_bytes: float
    #: Bytes from the chip's memory, and where the longest tiles of all heads go first.
    hbm_bytes: tuple[float, float]

    @property
    def count(self) -> int:
        """Tiles of the launch."""
        return self.tiles.count * self.heads

    def spread(self, per_tile: NDArray[np.float64]) -> NDArray[np.float64]:
        """Cycles of the slot that is done last, at least, for rows of cycles by kind of tile: however they are dealt."""
        longest: NDArray[np.float64] = per_tile.max(axis=1)
        if self.alike:
            return -(-self.count // self.slots) * longest
        # It is done no sooner than all are on average, nor than the longest tile.
        return np.maximum(self.average(per_tile), longest)

    def average(self, per_tile: NDArray[np.float64]) -> NDArray[np.float64]:
        """Cycles of a slot in the mean, for rows of cycles by kind of tile."""
        found: NDArray[np.float64] = per_tile @ self.times * (self.tiles.weight * self.heads / self.slots)
        return found


@dataclass(frozen=True, slots=True)
class _Launches:
    """What the launches of one workload cost, a number to each of the demands of `Groups`."""

    tilings: tuple[_Tiling, ...]
    #: Which tiling a demand has.
    tiling: NDArray[np.int64]
    #: What it does, the bytes from the chip's memory apart: see `_Tiling.hbm_bytes`, [which, demand].
    activity: Activity
    l2_cycles: NDArray[np.float64]
    hbm_bytes: NDArray[np.float64]


#: (tiling, variants by position, how each deals) -> cycles of their tiles on the machine's SMs, and SMs at work over all (`Activity.busy`).
_SmCycles = Callable[
    [_Tiling, NDArray[np.int64], list[Dealing]], tuple[NDArray[np.float64], float | NDArray[np.float64]]
]


class Floors:
    """Floors of variants of one class for one workload, machine and clock, in seconds; 0 for the unfused family.

    Every method takes the positions of variants among those given and returns a floor for each.
    """

    def __init__(self, variants: tuple[Variant, ...], workload: Workload, machine: Machine, clock: str | float) -> None:
        self.workload, self.machine, self.clock = workload, machine, clock
        self._deals: dict[tuple[str, int], Dealing] = {}
        self.family = variants[0].family if variants else ""
        self.fused = not variants or family_of(variants[0]).fused
        if self.fused:
            self.groups = groups_of(variants, loop_shape(workload), machine)
            self.launches = _launches(self.groups, workload, machine)

    def of_demand(self, orders: Orders) -> NDArray[np.float64]:
        """Floors by demand, the same for all variants that share it and their scheduler."""
        return self._seconds(orders, lambda *launch: self._on_average(self.groups.demand, *launch))

    def of_operations(self, orders: Orders) -> NDArray[np.float64]:
        """Floors by demand and by the recurrences of the variant with the same operations that waits least."""
        return self._seconds(orders, lambda *launch: self._on_average(self.groups.operations, *launch))

    def dealt(self, orders: Orders) -> NDArray[np.float64]:
        """`of_operations`, with tiles of unlike length dealt as the variant's scheduler does."""
        return self._seconds(orders, self._dealt)

    def simulated(self, orders: Orders) -> NDArray[np.float64]:
        """Forecasts if masked blocks cost like plain ones, from a variant's own loop as simulated; of memory alone where that is no floor."""
        return self._seconds(orders, self._simulated)

    def masked(self, orders: Orders) -> NDArray[np.float64]:
        """`simulated`, with masked blocks as they are: forecasts but for rounding where tiles are dealt in turns."""
        return self._seconds(orders, lambda *launch: self._simulated(*launch, masks=True))

    def by_demand(self, orders: Sequence[int]) -> list[list[int]]:
        """``orders`` in groups whose floors `of_demand` are one."""
        return self._apart(self.groups.demand, orders) if self.fused else [[order] for order in orders]

    def by_operations(self, orders: Sequence[int]) -> list[list[int]]:
        """``orders`` in groups whose floors `of_operations` are one."""
        return self._apart(self.groups.operations, orders) if self.fused else [[order] for order in orders]

    def _apart(self, level: Level, orders: Sequence[int]) -> list[list[int]]:
        """Groups of a level by scheduler, which deals the tiles and so changes every floor."""
        found: dict[tuple[int, str], list[int]] = {}
        for order, number in zip(orders, level.number[orders].tolist(), strict=True):
            found.setdefault((number, self.groups.schedulers[order]), []).append(order)
        return list(found.values())

    def _seconds(self, orders: Orders, sm_cycles: _SmCycles) -> NDArray[np.float64]:
        if not self.fused:
            return np.zeros(len(orders))
        index = np.asarray(orders, dtype=np.int64)
        launches, launch = self.launches, self.groups.demand.number[index]
        numbers = launches.tiling[launch]
        deals = [
            self._deal(self.groups.schedulers[order], number) for order, number in zip(index, numbers, strict=True)
        ]
        cycles = np.empty(len(index))
        busy: Any = np.ones(len(index))
        for number in np.unique(numbers):
            here = np.flatnonzero(numbers == number)
            cycles[here], busy[here] = sm_cycles(launches.tilings[number], index[here], [deals[i] for i in here])
        cycles = np.maximum(cycles, launches.l2_cycles[launch])
        hbm_bytes = launches.hbm_bytes[[int(deal.order == "longest") for deal in deals], launch]
        hbm = hbm_bytes / (self.machine["hbm.tbps_achieved"] * 1e12)
        if isinstance(self.clock, str):
            activity = replace(_of(launches.activity, launch, hbm_bytes), busy=busy)
            mhz: float | NDArray[np.float64] = settled_mhz(self.machine, activity, cycles, hbm, self.clock)
        else:
            mhz = float(self.clock)
        floors: NDArray[np.float64] = _ROUNDING * np.maximum(cycles / (mhz * 1e6), hbm)
        return floors + self.machine["launch.kernel_us"] * 1e-6

    def _deal(self, scheduler: str, number: int) -> Dealing:
        """How the tiles of a tiling are dealt."""
        deal = self._deals.get((scheduler, number))
        if deal is None:
            t = self.launches.tilings[number]
            deal = dealt(self.family, scheduler, self.workload, t.rows, t.keys, t.slots)
            self._deals[scheduler, number] = deal
        return deal

    def _on_average(
        self, level: Level, tiling: _Tiling, orders: NDArray[np.int64], deals: list[Dealing]
    ) -> tuple[NDArray[np.float64], float]:
        """Cycles of all tiles on the machine's SMs at least, however they are dealt."""
        per_tile, once = self._least(tiling, Costs.read(level.rows(orders)), deals)
        return tiling.spread(per_tile) + once, 1.0

    def _dealt(
        self, tiling: _Tiling, orders: NDArray[np.int64], deals: list[Dealing]
    ) -> tuple[NDArray[np.float64], float]:
        """The same as they are dealt."""
        per_tile, once = self._least(tiling, Costs.read(self.groups.operations.rows(orders)), deals)
        cycles = tiling.spread(per_tile)
        # Floors that are alike would say nothing about how forecasts that are not fill the last wave.
        unlike = per_tile.max(axis=1) - per_tile.min(axis=1) > 1.0
        if not tiling.alike and unlike.any():
            cycles[unlike] = self._makespans(tiling, per_tile[unlike], list(compress(deals, unlike)))
        return cycles + once, 1.0

    def _least(self, tiling: _Tiling, costs: Costs, deals: list[Dealing]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:  # fmt: skip
        """Cycles of each kind of tile if the loops take what ``costs`` say, and what the launch takes besides."""
        around = costs.around
        stays, once = self._once(tiling, around, deals)
        # Around the loop of every tile: what no loop hides.
        turn = np.where(around.overlap, 0.0, around.finish - self.machine["tma.latency_l2_cycles"])
        edge = np.where(stays, turn, around.start + around.finish)[:, None]
        blocks = tiling.blocks[None, :]
        loose, laps, cycles = costs.loose[:, None], costs.laps[:, None], costs.cycles[:, None]
        unit_cycles, inside = costs.unit_cycles[:, None], (costs.before + costs.after)[:, None]
        loops = least_cycles(blocks, unit_cycles, costs.idle[:, None], cycles, laps, loose, inside)
        # The start of a tile's loop hides under the end of the one before: at most one iteration and the fill.
        inner = np.maximum(blocks - loose - 1, 0) // laps * cycles
        hidden = (stays & around.overlap)[:, None]
        return np.maximum(np.where(hidden, inner, loops + edge), blocks * unit_cycles), once

    def _simulated(
        self, tiling: _Tiling, orders: NDArray[np.int64], deals: list[Dealing], *, masks: bool = False
    ) -> tuple[NDArray[np.float64], float | NDArray[np.float64]]:
        """Cycles of all tiles, without ``masks`` if all blocks were plain ones: on average where those as dealt say nothing of masked ones,
        and where dealing them takes longer than simulating the loop."""
        loops = Loops.read(self.groups.loop.rows(orders))
        around = loops.around
        stays, once = self._once(tiling, around, deals)
        cycles = plain_cycles(loops.ends, loops.known, loops.period, tiling.blocks)
        if masks and tiling.masked.any():
            cycles += self.groups.masks.rows(orders) * tiling.masked
        cycles += loops.restart[:, None] * tiling.more_loops
        ending = np.where(around.overlap, 0.0, around.finish)
        late = late_query(
            self.machine, around.late, around.rates, min(tiling.slots, tiling.count), loops.period, ending
        )
        columns = (around.start, around.finish, loops.turnaround, loops.busiest, late)
        per_tile = whole_tiles(cycles, tiling.blocks, stays[:, None], *(column[:, None] for column in columns))
        if not masks and (not tiling.compares or tiling.count > _MANY):
            return tiling.spread(per_tile) + once, 1.0
        longest = self._makespans(tiling, per_tile, deals) + once
        if not masks:
            return longest, 1.0
        started = once * min(1.0, tiling.count / tiling.slots)
        at_work = busy_share(tiling.average(per_tile) + started, longest, tiling.count, tiling.slots)
        # Where tiles go to the slot that is free first the longest is not known.
        return longest, np.where([deal.hand == "free" for deal in deals], 1.0, at_work)

    def _once(self, tiling: _Tiling, around: Around, deals: list[Dealing]) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:  # fmt: skip
        """Whether programs stay, and what the launch takes beside its tiles."""
        stays = np.array([deal.stays for deal in deals])
        memory = edge_memory_cycles(around.rates, tiling.count, tiling.slots, stays, around.overlap)
        return stays, np.where(stays, around.start + around.finish, 0.0) + memory

    def _makespans(self, tiling: _Tiling, per_tile: NDArray[np.float64], deals: list[Dealing]) -> NDArray[np.float64]:
        """Cycles of the slot that is done last, for rows of cycles by kind of tile; at least, where tiles go to the slot that is free first."""
        found = np.empty(len(per_tile))
        for deal in set(deals):
            here = [i for i, other in enumerate(deals) if other == deal]
            if deal.hand == "free":
                # Forecasts play that, tile by tile.
                found[here] = tiling.spread(per_tile[here])
            else:
                listed = per_tile[here][:, tiling.kind]
                found[here] = makespan_cycles(listed, tiling.tiles, tiling.heads, tiling.slots, deal)
        return found


@lru_cache(maxsize=8)
def _launches(groups: Groups, workload: Workload, machine: Machine) -> _Launches:
    """The launches of every demand, whatever the clock: the next clock asks again."""
    tilings: dict[tuple[int, int, int, bool], _Tiling] = {}
    numbers, activities, l2, hbm = [], [], [], []
    for pipeline in groups.pipelines:
        pair = pipeline.cta_group
        slots = int(machine["chip.sm_count"]) // pair * pipeline.ctas_per_sm
        size = pipeline.rows_per_cta * pair, pipeline.keys_per_iteration, slots, pipeline.first_block_masked
        tiling = tilings.get(size)
        if tiling is None:
            tiling = tilings[size] = _tiling(workload, pipeline, machine, slots)
        iterations = tiling.tiles.total_iterations * tiling.heads
        activities.append(launch_activity(workload, machine, pipeline, iterations, tiling.l2_bytes, 0.0))
        numbers.append(list(tilings).index(size))
        l2.append(tiling.l2_bytes / l2_bytes_per_clk(workload, tiling.tiles, machine))
        hbm.append(tiling.hbm_bytes)
    return _Launches(
        tuple(tilings.values()), np.array(numbers, dtype=np.int64), _together(activities), np.array(l2), np.array(hbm).T
    )


def _tiling(workload: Workload, pipeline: Pipeline, machine: Machine, slots: int) -> _Tiling:
    pair = pipeline.cta_group
    rows, keys = pipeline.rows_per_cta * pair, pipeline.keys_per_iteration
    tiles = head_tiles(workload, rows, keys, first_masked=pipeline.first_block_masked)
    heads = workload.batch * workload.heads_q
    more = loops_after_the_first(workload, tiles.iterations, tiles.masked)
    _, first, kind, times = np.unique(
        tiles.iterations * (tiles.masked.max() + 1) + tiles.masked,
        return_index=True, return_inverse=True, return_counts=True,
    )  # fmt: skip
    same = np.ptp(tiles.iterations) == 0
    masked = np.ptp(tiles.masked) > 0
    (l2, hbm), (_, longest) = (
        traffic(workload, pipeline, machine, tiles, heads, pair, slots, order) for order in ("rows", "longest")
    )
    return _Tiling(
        tiles, rows, keys, tiles.iterations[first], tiles.masked[first], more[first], times, kind, bool(same and not masked),
        not (same and masked),
        heads, slots, l2, (hbm, longest),
    )  # fmt: skip


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


def _of(activity: Activity, index: NDArray[np.int64], hbm_bytes: NDArray[np.float64]) -> Activity:
    """Some of the launches of `_together`, with so many bytes from the chip's memory."""
    many: Any = activity
    units = tuple((unit, cycles[index]) for unit, cycles in many.unit_cycles)
    return Activity(many.tensor_flop[index], activity.dtype, units, many.l2_bytes[index], hbm_bytes)  # type: ignore[arg-type]
