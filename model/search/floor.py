"""Times that no forecast of a variant goes below, without simulating it, for many variants at once.

`Floors` has them in four strengths, each as good as the one before or better and dearer: from the demand that many
variants share, from the recurrences of the loosest of the variants with the same operations, from the variant's own
loop, and from that with its tiles dealt as its scheduler does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilecast.model.chip.dealing import dealing, launched
from tilecast.model.chip.evaluate import evaluate_seconds, launch_activity
from tilecast.model.chip.launch import edge_memory_cycles, l2_bytes_per_clk, makespan_cycles, traffic
from tilecast.model.chip.power import Activity, settled_mhz
from tilecast.model.chip.tiles import HeadTiles, head_tiles
from tilecast.model.families import build_pipeline, family_of, loop_shape
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.search.groups import Costs, Groups, Level, groups_of
from tilecast.model.search.loop_floor import least_cycles

#: Floors and forecasts round differently.
_ROUNDING = 1 - 1e-9

Orders = Sequence[int] | NDArray[np.int64]


def unmasked_seconds(workload: Workload, machine: Machine, variant: Variant, clock: str | float) -> float:
    """Seconds if masked blocks cost like plain ones, from the plain simulation; 0 where that is no floor or the forecast."""
    if not family_of(variant).fused:
        return 0.0
    pipeline = build_pipeline(loop_shape(workload), variant, machine)
    if not _compare_unmasked(workload, pipeline.rows_per_cta * pipeline.cta_group, pipeline.keys_per_iteration):
        return 0.0
    return evaluate_seconds(workload, machine, variant, clock, masks=False)


@lru_cache(maxsize=256)
def _compare_unmasked(workload: Workload, rows: int, keys: int) -> bool:
    """Whether a forecast with plain blocks alone is another one, and no longer than with masked ones."""
    tiles = head_tiles(workload, rows, keys)
    if not tiles.masked.any():
        return False
    # Tiles alike fill whole waves, tiles that are not are estimated: the two do not compare.
    return not (np.ptp(tiles.iterations) == 0 and np.ptp(tiles.masked) > 0)


def floor_seconds(workload: Workload, machine: Machine, variant: Variant, clock: str | float = "sustained") -> float:
    """Seconds that no forecast of ``variant`` goes below; no simulation.  0 for the unfused family, which has no loop."""
    return float(Floors((variant,), workload, machine, clock).dealt((0,))[0])


@dataclass(frozen=True, slots=True)
class _Tiling:
    """What launches share whose tiles and slots are the same."""

    tiles: HeadTiles
    #: Query rows of a tile, and keys of a block.
    rows: int
    keys: int
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
    def turns(self) -> int:
        """Tiles of the busiest slot if all take the same time."""
        return -(-self.count // self.slots)

    @property
    def share(self) -> float:
        """Tiles of a slot on average, for every tile listed."""
        return self.tiles.weight * self.heads / self.slots


@dataclass(frozen=True, slots=True)
class _Launches:
    """What the launches of one workload cost, a number to each of the demands of `Groups`."""

    tilings: tuple[_Tiling, ...]
    #: Which tiling a demand has.
    tiling: NDArray[np.int64]
    activity: Activity
    l2_cycles: NDArray[np.float64]
    hbm_seconds: NDArray[np.float64]


class Floors:
    """Floors of variants of one class for one workload, machine and clock, in seconds; 0 for the unfused family.

    Every method takes the positions of variants among those given and returns a floor for each.
    """

    def __init__(self, variants: tuple[Variant, ...], workload: Workload, machine: Machine, clock: str | float) -> None:
        self.workload, self.machine, self.clock = workload, machine, clock
        self._played: dict[tuple[int, str, bytes], float] = {}
        self.family = variants[0].family if variants else ""
        self.fused = not variants or family_of(variants[0]).fused
        if self.fused:
            self.groups = groups_of(variants, loop_shape(workload), machine)
            self.launches = _launches(self.groups, workload, machine)

    def of_demand(self, orders: Orders) -> NDArray[np.float64]:
        """Floors by demand, the same for all variants that share it and their scheduler."""
        return self._seconds(self.groups.demand, orders) if self.fused else np.zeros(len(orders))

    def of_operations(self, orders: Orders) -> NDArray[np.float64]:
        """Floors by demand and by the recurrences of the variant with the same operations that waits least."""
        return self._seconds(self.groups.operations, orders) if self.fused else np.zeros(len(orders))

    def own(self, orders: Orders) -> NDArray[np.float64]:
        """Floors by demand and by the recurrences of a variant's own loop."""
        return self._seconds(self.groups.loop, orders) if self.fused else np.zeros(len(orders))

    def dealt(self, orders: Orders) -> NDArray[np.float64]:
        """`own`, with tiles of unlike length dealt as the variant's scheduler does."""
        return self._seconds(self.groups.loop, orders, dealt=True) if self.fused else np.zeros(len(orders))

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

    def _seconds(self, level: Level, orders: Orders, dealt: bool = False) -> NDArray[np.float64]:
        index = np.asarray(orders, dtype=np.int64)
        launches, launch = self.launches, self.groups.demand.number[index]
        costs, numbers = level.costs(index), launches.tiling[launch]
        cycles = np.empty(len(index))
        for number in np.unique(numbers):
            here = np.flatnonzero(numbers == number)
            tiling = launches.tilings[number]
            schedulers = [self._launched(self.groups.schedulers[order], tiling) for order in index[here]]
            cycles[here] = self._sm_cycles(tiling, costs.of(here), schedulers, dealt)
        cycles = np.maximum(cycles, launches.l2_cycles[launch])
        hbm = launches.hbm_seconds[launch]
        if isinstance(self.clock, str):
            activity = _of(launches.activity, launch)
            mhz: float | NDArray[np.float64] = settled_mhz(self.machine, activity, cycles, hbm, self.clock)
        else:
            mhz = float(self.clock)
        floors: NDArray[np.float64] = _ROUNDING * np.maximum(cycles / (mhz * 1e6), hbm)
        return floors + self.machine["launch.kernel_us"] * 1e-6

    def _launched(self, scheduler: str, tiling: _Tiling) -> str:
        return launched(self.family, scheduler, self.workload, tiling.rows, tiling.keys, tiling.slots)

    def _sm_cycles(self, tiling: _Tiling, costs: Costs, schedulers: list[str], dealt: bool) -> NDArray[np.float64]:
        """Cycles of all tiles on the machine's SMs if their loops take what ``costs`` say, for each variant."""
        deals = [dealing(self.family, scheduler) for scheduler in schedulers]
        persistent = np.array([deal.stays for deal in deals])
        both = costs.start + costs.finish
        rates = costs.read_shared, costs.write_shared, costs.read_alone, costs.write_alone
        memory = edge_memory_cycles(rates, tiling.count, tiling.slots, persistent, costs.overlap)
        # Around the loop of every tile, and of the launch: what no loop hides.
        turn = np.where(costs.overlap, 0.0, costs.finish - self.machine["tma.latency_l2_cycles"])
        edge = np.where(persistent, turn, both)[:, None]
        once = np.where(persistent, both, 0.0) + memory
        blocks = tiling.blocks[None, :]
        loose, laps, cycles = costs.loose[:, None], costs.laps[:, None], costs.cycles[:, None]
        unit_cycles, around = costs.unit_cycles[:, None], (costs.before + costs.after)[:, None]
        loops = least_cycles(blocks, unit_cycles, cycles, laps, loose, around)
        # The start of a tile's loop hides under the end of the one before: at most one iteration and the fill.
        inner = np.maximum(blocks - loose - 1, 0) // laps * cycles
        hidden = (persistent & costs.overlap)[:, None]
        per_tile = np.maximum(np.where(hidden, inner, loops + edge), blocks * unit_cycles)
        longest = per_tile.max(axis=1)
        if tiling.alike:
            waves: NDArray[np.float64] = tiling.turns * longest + once
            return waves
        # However tiles are dealt, the last slot is done no sooner than all on average, nor than its longest tile.
        floors: NDArray[np.float64] = np.maximum(per_tile @ tiling.times * tiling.share, longest)
        # Floors that are alike would say nothing about how forecasts that are not fill the last wave.
        for i in np.flatnonzero(longest - per_tile.min(axis=1) > 1.0) if dealt else ():
            # Knobs that do not hold the loop up leave its tiles as long as they were.
            alike = (id(tiling), schedulers[i], per_tile[i].tobytes())
            if alike not in self._played:
                listed = per_tile[i, tiling.kind]
                self._played[alike] = makespan_cycles(listed, tiling.tiles, tiling.heads, tiling.slots, deals[i])
            floors[i] = self._played[alike]
        total: NDArray[np.float64] = floors + once
        return total


@lru_cache(maxsize=8)
def _launches(groups: Groups, workload: Workload, machine: Machine) -> _Launches:
    """The launches of every demand, whatever the clock: the next clock asks again."""
    tilings: dict[tuple[int, int, int], _Tiling] = {}
    numbers, activities, l2, hbm = [], [], [], []
    memory = machine["hbm.tbps_achieved"] * 1e12
    for pipeline in groups.pipelines:
        pair = pipeline.cta_group
        slots = int(machine["chip.sm_count"]) // pair * pipeline.ctas_per_sm
        size = pipeline.rows_per_cta * pair, pipeline.keys_per_iteration, slots
        tiling = tilings.get(size)
        if tiling is None:
            tiling = tilings[size] = _tiling(workload, pipeline, machine, slots)
        iterations = tiling.tiles.total_iterations * tiling.heads
        activities.append(launch_activity(workload, machine, pipeline, iterations, tiling.l2_bytes, tiling.hbm_bytes))
        numbers.append(list(tilings).index(size))
        l2.append(tiling.l2_bytes / l2_bytes_per_clk(workload, tiling.tiles, machine))
        hbm.append(tiling.hbm_bytes / memory)
    return _Launches(
        tuple(tilings.values()), np.array(numbers, dtype=np.int64), _together(activities), np.array(l2), np.array(hbm)
    )


def _tiling(workload: Workload, pipeline: Pipeline, machine: Machine, slots: int) -> _Tiling:
    pair = pipeline.cta_group
    rows, keys = pipeline.rows_per_cta * pair, pipeline.keys_per_iteration
    tiles = head_tiles(workload, rows, keys)
    blocks, kind, times = np.unique(tiles.iterations, return_inverse=True, return_counts=True)
    alike = len(blocks) == 1 and bool(np.ptp(tiles.masked) == 0)
    heads = workload.batch * workload.heads_q
    l2, hbm = traffic(workload, pipeline, machine, tiles, heads, pair, slots)
    return _Tiling(tiles, rows, keys, blocks, times, kind, alike, heads, slots, l2, hbm)


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


def _of(activity: Activity, index: NDArray[np.int64]) -> Activity:
    """Some of the launches of `_together`."""
    many: Any = activity
    units = tuple((unit, cycles[index]) for unit, cycles in many.unit_cycles)
    return Activity(many.tensor_flop[index], activity.dtype, units, many.l2_bytes[index], many.hbm_bytes[index])
