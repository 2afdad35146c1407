"""Rank many variants by forecast without simulating those that cannot win.

Every variant first gets a floor, a time no forecast of it can beat: the busiest unit or the heaviest recurrence of its
loop for every block it has to do, spread over all SMs, at the clock the power limit would allow a kernel that fast.
Variants are then forecast in the order of their floors until the next floor lies above the last time that is kept.
The result is the one that forecasting all of them would give.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from tilecast.model.chip.launch import LASTING, makespan_cycles, tile_edges, traffic
from tilecast.model.chip.power import Activity, fixed_clock, settle_clock
from tilecast.model.chip.tiles import HeadTiles, head_tiles
from tilecast.model.forecast.predict import evaluate_seconds, launch_activity
from tilecast.model.kernel.variant import UnfusedVariant, Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.build import build_pipeline, loop_shape
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.sm.bounds import held_cycles, rec_mii

#: A forecast reads the period off a finite window, where it may lie this far under the recurrence.
_RECURRENCE_MARGIN = 0.98
#: Forecasts are compared to the nanosecond, as `predict.best_variant` does; equal ones keep the order given.
_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Ranked:
    """A variant with its forecast, or with the floor that made a forecast needless."""

    variant: Variant
    #: Position among the variants given: the smaller one wins ties.
    order: int
    floor_seconds: float
    #: None where the floor alone shows that the variant is not among those kept.
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Ranking:
    """What `rank` found: ``best`` fastest first, then every other variant that was forecast, then those dropped."""

    best: tuple[Ranked, ...]
    #: Forecast, but slower than the last of ``best`` or one too many of its group; fastest first.
    behind: tuple[Ranked, ...]
    #: Never forecast: their floor shows that they cannot enter ``best``.
    dropped: tuple[Ranked, ...]


def rank(
    variants: Sequence[Variant],
    workload: Workload,
    machine: Machine,
    *,
    clock: str | float = "sustained",
    keep: int = 24,
    group: Callable[[Variant], Hashable] | None = None,
    per_group: int = 1,
) -> Ranking:
    """The ``keep`` fastest of legal ``variants`` by forecast, with a ``group`` at most ``per_group`` of each group.

    Ties go to the earlier variant.  ``clock`` as `predict` takes it.  ValueError when nothing may be kept.
    """
    if keep < 1 or per_group < 1:
        raise ValueError(f"rank: keep and per_group take at least 1, got {keep} and {per_group}")
    floors = [floor_seconds(workload, machine, variant, clock) for variant in variants]
    board = _Board(keep, per_group if group else keep)
    forecast: list[Ranked] = []
    dropped: list[Ranked] = []
    for order in sorted(range(len(variants)), key=lambda i: (floors[i], i)):
        variant, floor = variants[order], floors[order]
        name = group(variant) if group else ()
        if round(floor, _DIGITS) > board.last(name):
            dropped.append(Ranked(variant, order, floor, None))
            continue
        if workload.mask != "none":
            # Half the simulation already: masked blocks take no less than plain ones.
            floor = max(floor, _unmasked_seconds(workload, machine, variant, clock))
            if round(floor, _DIGITS) > board.last(name):
                dropped.append(Ranked(variant, order, floor, None))
                continue
        seconds = round(evaluate_seconds(workload, machine, variant, clock), _DIGITS)
        forecast.append(Ranked(variant, order, floor, seconds))
        board.add(name, seconds)
    forecast.sort(key=lambda r: (r.seconds, r.order))
    best: list[Ranked] = []
    behind: list[Ranked] = []
    seen: Counter[Hashable] = Counter()
    for entry in forecast:
        name = group(entry.variant) if group else ()
        fits = len(best) < keep and (group is None or seen[name] < per_group)
        (best if fits else behind).append(entry)
        seen[name] += fits
    return Ranking(tuple(best), tuple(behind), tuple(dropped))


class _Board:
    """The times kept so far: what a variant must not exceed to be kept."""

    def __init__(self, keep: int, per_group: int) -> None:
        self.keep, self.per_group = keep, per_group
        self.groups: dict[Hashable, list[float]] = {}
        self.all: list[float] = []

    def last(self, name: Hashable) -> float:
        """The longest time that is still kept, of the group or of all."""
        own = self.groups.get(name, [])
        limit = own[-1] if len(own) == self.per_group else inf
        return min(limit, self.all[self.keep - 1] if len(self.all) >= self.keep else inf)

    def add(self, name: Hashable, seconds: float) -> None:
        """Take a time in, and the one that it drives out of its group off."""
        own = self.groups.setdefault(name, [])
        insort(own, seconds)
        insort(self.all, seconds)
        if len(own) > self.per_group:
            del self.all[bisect_left(self.all, own.pop())]


def _unmasked_seconds(workload: Workload, machine: Machine, variant: Variant, clock: str | float) -> float:
    """Seconds if masked blocks cost like plain ones, from the plain simulation; 0 where that is no floor."""
    if isinstance(variant, UnfusedVariant):
        return 0.0
    pipeline = build_pipeline(loop_shape(workload), variant, machine)
    tiles = _tiles(workload, pipeline.rows_per_cta * pipeline.cta_group, pipeline.keys_per_iteration)
    if np.ptp(tiles.iterations) == 0 and np.ptp(tiles.masked) > 0:
        return 0.0  # tiles alike fill whole waves, tiles that are not are estimated: the two do not compare
    return evaluate_seconds(workload, machine, variant, clock, masks=False)


def floor_seconds(workload: Workload, machine: Machine, variant: Variant, clock: str | float = "sustained") -> float:
    """Seconds that no forecast of ``variant`` goes below; no simulation.  0 for the unfused family, which has no loop."""
    if isinstance(variant, UnfusedVariant):
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
    if variant.scheduler not in LASTING:
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
    port = machine["l2.bytes_per_clk_per_sm"] * machine["chip.sm_count"]
    activity = launch_activity(workload, machine, pipeline, tiles.total_iterations * heads, l2, hbm)
    return max(cycles, l2 / port), activity, hbm / (machine["hbm.tbps_achieved"] * 1e12)


@lru_cache(maxsize=1024)
def _tiles(workload: Workload, rows: int, keys: int) -> HeadTiles:
    return head_tiles(workload, rows, keys)
