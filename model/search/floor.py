"""Times that no forecast of a variant goes below, without simulating it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

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
from tilecast.model.chip.power import Activity, fixed_clock, settle_clock
from tilecast.model.chip.tiles import HeadTiles, head_tiles
from tilecast.model.families import build_pipeline, family_of, loop_shape
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.sm.bounds import held_cycles, rec_mii

#: A forecast reads the period off a finite window, where it may lie this far under the recurrence.
_RECURRENCE_MARGIN = 0.98


def unmasked_seconds(workload: Workload, machine: Machine, variant: Variant, clock: str | float) -> float:
    """Seconds if masked blocks cost like plain ones, from the plain simulation; 0 where that is no floor."""
    if not family_of(variant).fused:
        return 0.0
    pipeline = build_pipeline(loop_shape(workload), variant, machine)
    tiles = _tiles(workload, pipeline.rows_per_cta * pipeline.cta_group, pipeline.keys_per_iteration)
    if np.ptp(tiles.iterations) == 0 and np.ptp(tiles.masked) > 0:
        return 0.0  # tiles alike fill whole waves, tiles that are not are estimated: the two do not compare
    return evaluate_seconds(workload, machine, variant, clock, masks=False)


def floor_seconds(workload: Workload, machine: Machine, variant: Variant, clock: str | float = "sustained") -> float:
    """Seconds that no forecast of ``variant`` goes below; no simulation.  0 for the unfused family, which has no loop."""
    if not family_of(variant).fused:
        return 0.0
    pipeline = build_pipeline(loop_shape(workload), variant, machine)
    cycles, activity, hbm_seconds = _floor_cycles(workload, machine, variant, pipeline)
    if isinstance(clock, str):
        settled = settle_clock(machine, activity, cycles, hbm_seconds, clock)
    else:
        settled = fixed_clock(machine, activity, cycles, hbm_seconds, float(clock))
    return max(cycles / (settled.mhz * 1e6), hbm_seconds) + machine["launch.kernel_us"] * 1e-6


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


@lru_cache(maxsize=16384)
def loop_floor(pipeline: Pipeline) -> LoopFloor:
    """The floor of a pipeline's loop."""
    recurrence = rec_mii(pipeline)
    unit = max(pipeline.demand().values(), default=0.0)
    if not recurrence.edges:
        return LoopFloor(unit, 0.0, 1, 0, 0.0, 0.0)
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


def _floor_cycles(
    workload: Workload, machine: Machine, variant: Variant, pipeline: Pipeline
) -> tuple[float, Activity, float]:
    """(cycles the launch takes at least, what it does in all, seconds its memory traffic takes)."""
    pair = pipeline.cta_group
    tiles = _tiles(workload, pipeline.rows_per_cta * pair, pipeline.keys_per_iteration)
    heads = workload.batch * workload.heads_q
    slots = int(machine["chip.sm_count"]) // pair * pipeline.ctas_per_sm
    l2, hbm = traffic(workload, pipeline, machine, tiles, heads, pair, slots)
    loop = loop_floor(pipeline)
    start, finish = tile_edges(pipeline, machine)
    if variant.scheduler not in PERSISTENT_SCHEDULERS:
        per_tile, once = loop.tile_cycles(tiles.iterations) + start + finish, 0.0
    elif pipeline.tiles_overlap:
        # The start of a tile's loop hides under the end of the one before: at most one iteration and the fill.
        per_tile, once = np.maximum(tiles.iterations - 1, 0) * loop.unit_cycles, start + finish
        inner = np.maximum(tiles.iterations - loop.loose - 1, 0) // loop.laps * loop.cycles
        per_tile = np.maximum(per_tile, inner)
    else:
        per_tile = loop.tile_cycles(tiles.iterations) + finish - machine["tma.latency_l2_cycles"]
        once = start + finish
    alike = bool(np.ptp(tiles.iterations) == 0 and np.ptp(tiles.masked) == 0)
    if alike or np.ptp(per_tile) > 1.0:
        cycles = makespan_cycles(per_tile, tiles, heads, slots, variant.scheduler) + once
    else:
        # Floors that are alike say nothing about how forecasts that are not would fill the last wave.
        cycles = float(per_tile.sum()) * tiles.weight * heads / slots + once
    cycles += edge_memory_cycles(pipeline, machine, tiles.count * heads, slots)
    port = machine["l2.bytes_per_clk_per_sm"] * machine["chip.sm_count"]
    activity = launch_activity(workload, machine, pipeline, tiles.total_iterations * heads, l2, hbm)
    return max(cycles, l2 / port), activity, hbm / (machine["hbm.tbps_achieved"] * 1e12)


@lru_cache(maxsize=1024)
def _tiles(workload: Workload, rows: int, keys: int) -> HeadTiles:
    return head_tiles(workload, rows, keys)
