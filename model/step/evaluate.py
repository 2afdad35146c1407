"""Attention of one step on one machine: its launches, the cycles of each, the clock, the time.

Sequences of few rows go to the kernel that decodes, others to the one that prefills or one between; where a batch may have several kinds
there is a launch for each, one after the other or beside each other.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np

from tilecast.model.chip.launch import masked_extra
from tilecast.model.chip.memory import memory_seconds
from tilecast.model.chip.power import Activity, Clock
from tilecast.model.compiled.forecast import block_cycles
from tilecast.model.compiled.loops.shelf import loop_at_hand
from tilecast.model.kernel.variants.hopper import prefill as hopper_prefill
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.sm.simulate import SmTrace, steady_state
from tilecast.model.step.batch import Batch
from tilecast.model.step.clock import settled_by_length
from tilecast.model.step.costs.around import Around, Loops
from tilecast.model.step.costs.runs import AroundRuns, RunsCounts
from tilecast.model.step.costs.tiles import AroundTiles, TileCounts
from tilecast.model.step.items import Items, batch_items
from tilecast.model.step.launches.classes import StepVariant
from tilecast.model.step.launches.dealing import Dealing, limits
from tilecast.model.step.launches.variant import dealing, forward_of, in_turn, launches, loop, multiplied
from tilecast.model.step.play import Costs, Played, nothing, play

_PARTIAL_BYTES = 4


@dataclass(frozen=True, slots=True)
class LaunchRun:
    """One launch of a serving kernel: None for what it has no sequences for."""

    variant: StepVariant
    dealt: Dealing
    pipeline: Pipeline
    trace: SmTrace
    items: Items | None
    played: Played
    clock: Clock
    seconds: float
    launch_seconds: float
    hbm_bytes: float
    l2_bytes: float
    #: What the memory needs for its bytes.
    memory_seconds: float
    #: Programs of the launch, and how many the chip holds at once.
    programs: int
    slots: int
    costs: Costs

    @property
    def tail_seconds(self) -> float:
        """What an SM's slot is free on average while others have programs."""
        return self.played.tail / (self.clock.mhz * 1e6)


@dataclass(frozen=True, slots=True)
class StepRun:
    """Attention of one layer of a step."""

    launches: tuple[LaunchRun, ...]

    @property
    def seconds(self) -> float:
        """Seconds of all launches, one after the other but for what the next has done before the one before has ended."""
        return sum(launch.seconds for launch in self.launches) - self.beside_seconds

    @property
    def beside_seconds(self) -> float:
        """Seconds of launches beside those before: kernels of the copy engine let the next one begin on SMs that they leave to it, and where
        their programs have ended, and its launch is under way by then (programmatic dependent launch)."""
        return sum(
            min(before.seconds, one.seconds)
            if one.costs.late
            else min(before.tail_seconds, one.seconds - one.launch_seconds) + one.launch_seconds
            for before, one in self._joined
        )

    @property
    def under_way_seconds(self) -> float:
        """Seconds of them in which launches are made."""
        return sum(one.launch_seconds for _, one in self._joined)

    @property
    def _joined(self) -> list[tuple[LaunchRun, LaunchRun]]:
        """Launches that begin beside the one before, each with that one."""
        return [(before, one) for before, one in itertools.pairwise(self.launches) if one.dealt.follows]

    @property
    def hbm_bytes(self) -> float:
        """Bytes from and to memory."""
        return sum(launch.hbm_bytes for launch in self.launches)


def evaluate_step(
    batch: Batch, machine: Machine, variants: tuple[StepVariant, ...], clock: str | float, written: bool = False
) -> StepRun:
    """The launches of ``batch`` by the kernels that decode and prefill, as `attention_kvcache` makes them.

    With ``written`` L2 is full of other data that was written: it goes back to memory as what is read takes its place.
    """
    made: list[LaunchRun] = []
    share = machine.get("l2.dirty_share", 0.0) if written else 0.0
    for v, d in launches(variants, batch, int(machine["chip.sm_count"])):
        room = max(0.0, machine["l2.bytes"] - sum(launch.hbm_bytes for launch in made))
        before = made[-1] if d.follows else None
        made.append(_launch(batch, machine, v, d, clock, share, room, before))
    return StepRun(tuple(made))


def _launch(
    batch: Batch, machine: Machine, variant: StepVariant, dealt: Dealing, clock: str | float, dirty: float, room: float,
    before: LaunchRun | None,
) -> LaunchRun:  # fmt: skip
    """A launch; ``dirty`` is the share of what it reads first, up to ``room`` bytes, that has to be written back in its place; ``before``:
    beside which it begins."""
    items = batch_items(batch, dealt)
    heads = multiplied(
        variant, replace(batch.heads, seqlen_q=dealt.queries, seqlen_k=dealt.queries, mask="causal", window=None)
    )
    sms = int(machine["chip.sm_count"])
    pipeline = loop(heads, in_turn(variant, dealt), machine, batch.page, capped=batch.capped)
    trace = steady_state(pipeline)
    read, written, l2 = _bytes(batch, items)
    hbm, memory_needs = read + written, memory_seconds(machine, read, written)
    activity = _activity(batch.heads, dealt, pipeline, items, hbm, l2)
    bound = _bound(batch, dealt)
    programs = max(1, bound if dealt.direct else min(bound, dealt.programs * (dealt.some or sms) * dealt.waves))
    top = machine["chip.clock_max_mhz"]

    @cache
    def costs_at(mhz: float) -> Costs:
        return _costs(batch, heads, machine, variant, dealt, items, programs, memory_needs, l2, mhz)

    def played_with(costs: Costs) -> Played:
        return play(items, costs) if items is not None else nothing(costs)

    @cache
    def played_at(mhz: float) -> Played:
        return played_with(costs_at(mhz))

    alone = played_at(top)
    settled = settled_by_length(machine, activity, lambda mhz: (played_at(mhz).end, played_at(mhz).memory_bound), clock)
    if settled.bound == "boost":
        settled = replace(settled, mhz=_light_clock(machine, pipeline, items, alone))
    if isinstance(clock, str) and items is not None:
        # What lets no more power through for milliseconds lets no more through for microseconds, while programs are at their items.
        busy = min(costs_at(top).slots, items.count)

        def own_at(mhz: float) -> tuple[float, float]:
            one = played_at(mhz)
            own = (one.starting + one.streaming + one.handing_over + one.merging) / busy - costs_at(mhz).first_start
            return own, min(own, one.memory_bound)

        at_once = settled_by_length(machine, replace(activity, hbm_bytes=0.0), own_at, "short")
        if at_once.bound == "power" and at_once.mhz < settled.mhz:
            share = min(1.0, own_at(top)[0] / alone.end)
            settled = replace(at_once, mhz=1.0 / (share / at_once.mhz + (1.0 - share) / settled.mhz))
    costs = costs_at(settled.mhz)
    if before is not None and before.dealt.some and items is not None:
        # The clock is that of the launch alone: what runs beside it draws as much as SMs that it does not have.
        hertz = settled.mhz * 1e6
        # The memory sends both what they read, as far as the other one waits for it.
        waits = before.played.memory_bound / before.played.end
        free = before.seconds - before.launch_seconds - before.tail_seconds + waits * memory_needs
        left = before.costs.idle_first / (before.clock.mhz * 1e6)
        costs = replace(costs, late=before.dealt.some * dealt.programs, free_at=free * hertz, early_at=left * hertz)
    played = played_with(costs) if costs.late else played_at(settled.mhz)
    launch = machine["launch.kernel_us"] * 1e-6
    # While what is read takes the place of what was written the memory has more to do, which the programs' own pace may hide.
    first_bytes = min(hbm, room)
    streaming = max(0.0, played.streamed_until - costs.first_start) / (settled.mhz * 1e6)
    moved = memory_seconds(machine, first_bytes, dirty * first_bytes)
    back = max(0.0, moved - streaming * first_bytes / hbm) if dirty and hbm else 0.0
    seconds = played.end / (settled.mhz * 1e6) + back + launch
    return LaunchRun(
        variant, dealt, pipeline, trace, items, played, settled, seconds, launch, hbm, l2, memory_needs, programs,
        dealt.programs * (dealt.some or sms),
        costs,
    )  # fmt: skip


def _light_clock(machine: Machine, pipeline: Pipeline, items: Items | None, played: Played) -> float:
    """The clock of work that no limit holds: the top one, less what matrix products cost it, all of which they do in a small part of the time."""
    blocks = float(items.blocks.sum()) if items is not None else 0.0
    tensor = pipeline.demand().get("tensor", 0.0) / pipeline.ctas_per_sm * blocks / machine["chip.sm_count"]
    slowed = min(1.0, tensor / max(played.end, 1.0) / machine.get("power.tensor_clock_busy", 1.0))
    return machine["chip.clock_max_mhz"] * (1.0 - slowed * (1.0 - machine["power.tensor_clock_share"]))


def _bound(batch: Batch, dealt: Dealing) -> int:
    """Programs that might find work, as a launch counts them from shapes alone."""
    work, sequences = batch.workload(), len(batch.lengths)
    heads_kv, group = work.heads_kv * dealt.head_parts, work.group_size // dealt.head_parts
    # A request of the step may be as long as the longest.
    most_splits = 1
    if dealt.split_keys and work.seqlen_k > dealt.whole_keys:
        most_splits = max(1, min(dealt.most_splits, -(-work.seqlen_k // dealt.split_keys)))
    split_tiles = -(-min(work.seqlen_q * group, dealt.split_rows) // dealt.tile_m) if dealt.tiles_first else 1
    if dealt.direct:
        return heads_kv * sequences * -(-most_splits // dealt.own_run)
    rows = min(work.seqlen_q * group, dealt.most_rows)
    tiles = min(batch.queries * group // dealt.tile_m + sequences, sequences * -(-rows // dealt.tile_m))
    parts = dealt.places if dealt.parting is not None and (dealt.longer or not dealt.chained) else 0
    return max(parts, heads_kv * max(tiles, sequences * most_splits * split_tiles))


def _bytes(batch: Batch, items: Items | None) -> tuple[float, float, float]:
    """(bytes from memory, bytes to it, bytes through L2) of a launch: K and V once, Q and O, what splits leave for the last one."""
    if items is None:
        return 0.0, 0.0, 0.0
    h = batch.heads
    queries, results = (items.queries * h.heads_q * dim * h.dtype_bytes for dim in (h.head_dim_qk, h.head_dim_v))
    partials = items.partial_rows * (h.head_dim_v + 2) * _PARTIAL_BYTES
    # What is written goes to memory in the end; the last split reads it while L2 has it.
    span, read = items.span * batch.key_bytes, float(items.keys.sum()) * batch.key_bytes
    return span + queries, results + partials, read + queries + results + 2.0 * partials


def _activity(
    heads: Workload, dealt: Dealing, pipeline: Pipeline, items: Items | None, hbm: float, l2: float
) -> Activity:
    """Executed work: rows of a tile that are there (the others are zeros, whose products draw next to no power)."""
    blocks = float(items.blocks.sum()) if items is not None else 0.0
    rows = min(1.0, items.rows / (items.tiles * dealt.tile_m)) if items is not None else 1.0
    flop = 2.0 * rows * dealt.tile_m * dealt.tile_n * (heads.head_dim_qk + heads.head_dim_v) * blocks
    units = tuple((u, c * blocks / pipeline.ctas_per_sm) for u, c in pipeline.demand().items())
    return Activity(flop, heads.dtype, units, l2, hbm)


@dataclass(frozen=True, slots=True)
class _Pace:
    """How the loop of a variant's programs goes, in cycles."""

    #: Of a block of each of 1, 2, ... programs on an SM.
    periods: tuple[float, ...]
    #: From a program's first copy, from the memory, to its first block's end beyond a period.
    fill: float
    #: From that copy until the first block is there.
    landed: float
    #: Of a block beyond a period where none is before it.
    alone: float
    #: Bytes of the blocks that are on their way at once.
    ring_bytes: float
    #: Of an item's loop beyond a period for each block, where its first blocks are there; of a masked block beyond a period.
    restart: float = 0.0
    masked: float = 0.0
    #: Of a period, what the busiest unit has nothing to do in.
    slack: float = 0.0


@lru_cache(maxsize=512)
def _pace(heads: Workload, variant: StepVariant, machine: Machine, page: int, capped: bool) -> _Pace:
    dealt = dealing(variant, heads)
    counts = range(1, dealt.programs + 1) if dealt.least_rows == 1 else (dealt.programs,)
    traces = [steady_state(loop(heads, variant, machine, page, count, capped)) for count in counts]
    first = traces[0]
    begun = min(event.start for event in first.events if event.iteration == 0 and event.op.startswith("qk"))
    ring = sum(b.bytes_per_slot * b.depth for b in first.pipeline.buffers if b.producer.startswith("load"))
    # Some loops count on L2's latency, for they hide the memory's, which a first block does not.
    landed = max(
        edge.latency_cycles for edge in first.pipeline.edges if edge.src.startswith("load") and edge.kind == "data"
    )
    longer = max(0.0, machine["tma.latency_hbm_cycles" if dealt.counts.copied else "hbm.latency_cycles"] - landed)
    # Where another warpgroup ends a block the one that begins the next goes on before.
    begins = {first.pipeline.op(event.op).role for event in first.events if event.op.startswith("qk")}
    ended = max(
        event.end for event in first.events if event.iteration == 0 and first.pipeline.op(event.op).role in begins
    )
    periods, masked = tuple(trace.ii_cycles for trace in traces), 0.0
    if isinstance(dealt.counts, TileCounts):
        masked = masked_extra(first, steady_state(first.pipeline, 2))
        forward = forward_of(variant, heads)
        at_hand = None if forward is None else loop_at_hand(heads, machine, forward)
        if at_hand is not None and at_hand.code is not None:
            whole, masked = block_cycles(at_hand.code, machine, machine.rated_mhz)
            if capped:  # no such loop is at hand: what the cap adds to the other's
                whole += first.ii_cycles - steady_state(loop(heads, variant, machine, page)).ii_cycles
            periods = (whole,) * len(periods)
    return _Pace(
        periods, max(0.0, first.iteration_end[0] - first.ii_cycles) + longer, begun + longer,
        ended - begun - first.ii_cycles, float(ring),
        first.iteration_end[-1] - len(first.iteration_end) * first.ii_cycles,
        masked,
        max(0.0, first.ii_cycles - max(first.pipeline.demand().values())),
    )  # fmt: skip


def _loops(batch: Batch, dealt: Dealing, items: Items | None) -> Loops:
    """Which loops items of a launch run through: their first block stands before them."""
    if items is None or items.masked is None:
        return Loops(0.0)
    left, group = limits(batch.heads)[0], batch.heads.group_size
    mine = [keys for queries, keys in batch.lengths if dealt.takes(queries * group)]
    return Loops(
        float((items.masked > 1).mean()),
        float((items.blocks > np.maximum(items.masked, 1)).mean()),
        sum(keys > left + 1 for keys in mine) / len(mine),
    )


def _around(batch: Batch, machine: Machine, dealt: Dealing, items: Items | None, mhz: float) -> Around:
    """What a launch's items cost around their loops, by what its kernels count."""
    sms, counts = int(machine["chip.sm_count"]), dealt.counts
    if isinstance(counts, TileCounts):
        if dealt.longer and (items is None or items.joins is None or not items.joins.any()):
            counts = counts.of_one_part()
        counts = replace(counts, sequences=len(batch.lengths), laps=1 + (dealt.longer > 0))
        return AroundTiles(machine, counts, dealt.tile_m, mhz=mhz)
    if isinstance(counts, RunsCounts):
        merges = 0 if items is None else len(items.splits_of_tile)
        return AroundRuns(machine, counts, dealt.tile_m, mhz=mhz, first_merges=min(1.0, sms / max(1, merges)))
    once = items is not None and items.count <= sms * dealt.programs
    return Around(machine, counts, dealt.tile_m, dealt.warps, dealt.most_splits, mhz, once)


def _costs(
    batch: Batch, heads: Workload, machine: Machine, variant: StepVariant, dealt: Dealing, items: Items | None, programs: int,
    memory_needs: float, l2: float, mhz: float,
) -> Costs:  # fmt: skip
    sms = int(machine["chip.sm_count"])
    merges = 0 if items is None else len(items.splits_of_tile)
    around = _around(batch, machine, dealt, items, mhz)
    counts = around.counts
    pace = _pace(heads, in_turn(variant, dealt), machine, batch.page, batch.capped)
    blocks = float(items.blocks.sum()) if items is not None else 0.0
    port = machine["l2.bytes_per_clk_per_sm"] * sms
    memory = max(memory_needs * mhz * 1e6, l2 / port) / blocks if blocks else 0.0
    rows = min(
        dealt.tile_m,
        max((q for q, _ in batch.lengths if dealt.takes(q * heads.group_size)), default=1)
        * heads.group_size
        // dealt.head_parts,
    )
    start, turnaround = (
        machine["launch.cta_start_cycles"],
        machine.get("launch.cta_turnaround_cycles", machine["launch.cta_start_cycles"]),
    )
    cold, warm = (around.set_up(batch.page, cold) + pace.fill for cold in (True, False))
    columns = heads.head_dim_qk + heads.head_dim_v
    cold += around.first_time(heads.head_dim_v, _loops(batch, dealt, items))
    longer = counts.loop(heads.head_dim_qk) if isinstance(counts, TileCounts) else 1.0
    load_block = around.load_block(batch.page, dealt.tile_n, columns * (1 if batch.cache else heads.dtype_bytes))
    return Costs(
        sms=dealt.some or sms,
        per_sm=dealt.programs,
        programs=programs,
        first_start=start
        + around.plan(True)
        + around.maps()
        + cold
        + max(0.0, around.queries(rows, batch.workload().seqlen_q > 1) - pace.landed),
        later_start=turnaround + around.plan(False) + warm,
        next_item=around.next_item(batch.page, pace.fill, pace.restart),
        finish=around.finish(heads.head_dim_v, rows),
        hand_over=around.hand_over(heads.head_dim_v, rows),
        merge=lambda splits, there: 0.0 if dealt.joined else around.merge(splits, rows, heads, there),
        joined=0.0
        if items is None or not merges or not dealt.joined or not isinstance(around, AroundTiles)
        else around.joined(int(items.splits_of_tile.max()), merges, items.partial_rows, heads.head_dim_v),
        periods=tuple(max(period * longer, load_block) for period in pace.periods),
        memory_block=memory,
        idle_programs=max(0, programs - (items.count if items is not None else 0)),
        idle_program=turnaround + around.plan(False),
        idle_first=start + around.plan(True) + around.counted_out(),
        merges_beside=dealt.merges_beside,
        join_ends=around.join_ends(heads.head_dim_v, rows, pace.ring_bytes),
        join=around.join(heads.head_dim_v, rows) + (pace.alone if dealt.chained else 0.0),
        join_first=around.join_first(),
        join_later=around.join_later(heads.head_dim_v, rows),
        join_again=around.join_again(),
        join_on=around.join_on(),
        masked=pace.masked + around.masked(),
        take_item=around.take_item(),
        load_item=around.load_item(batch.page),
        load_queries=around.load_queries(heads.head_dim_qk),
        load_block=load_block,
        asking=hopper_prefill.ASKING,
        around=around.hidden(heads.head_dim_v),
        slack=pace.slack,
        ring=int(pace.ring_bytes // (dealt.tile_n * columns * heads.dtype_bytes)),
    )
