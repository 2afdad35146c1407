"""Attention of one step on one machine: its launches, the cycles of each, the clock, the time.

Sequences of up to 16 rows go to the kernel that decodes, others to the one that prefills; where a batch may have both there are
two launches, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from tilecast.model.chip.evaluate import settled_clock
from tilecast.model.chip.power import Activity, Clock
from tilecast.model.kernel.variants.serving import DECODE_ROWS, ServingVariant, split_limit
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.pipeline.serving import build
from tilecast.model.sm.simulate import SmTrace, steady_state
from tilecast.model.step.batch import Batch
from tilecast.model.step.costs import Around
from tilecast.model.step.items import Items, batch_items, takes
from tilecast.model.step.play import Costs, Played, nothing, play

_PARTIAL_BYTES = 4


@dataclass(frozen=True, slots=True)
class LaunchRun:
    """One launch of a serving kernel: None for what it has no sequences for."""

    variant: ServingVariant
    pipeline: Pipeline
    trace: SmTrace
    items: Items | None
    played: Played
    clock: Clock
    seconds: float
    launch_seconds: float
    hbm_bytes: float
    l2_bytes: float
    #: Programs of the launch, and how many the chip holds at once.
    programs: int
    slots: int
    costs: Costs


@dataclass(frozen=True, slots=True)
class StepRun:
    """Attention of one layer of a step."""

    launches: tuple[LaunchRun, ...]

    @property
    def seconds(self) -> float:
        """Seconds of all launches, one after the other."""
        return sum(launch.seconds for launch in self.launches)

    @property
    def hbm_bytes(self) -> float:
        """Bytes from and to memory."""
        return sum(launch.hbm_bytes for launch in self.launches)


def evaluate_step(
    batch: Batch, machine: Machine, variants: tuple[ServingVariant, ServingVariant], clock: str | float
) -> StepRun:
    """The launches of ``batch`` by a (decoding, prefilling) pair of kernels, as `attention_kvcache` makes them."""
    group = batch.heads.group_size
    lengths = [q for q, _ in batch.lengths]
    # With queries packed a sequence may have any number up to the longest: a kernel is left out only where none can be its.
    packed = len(set(lengths)) > 1
    least, most = (1 if packed else max(lengths)), max(lengths)
    wanted = [v for v in variants if takes(v, most, group) or takes(v, least, group)]
    return StepRun(tuple(_launch(batch, machine, v, clock) for v in wanted))


def _launch(batch: Batch, machine: Machine, variant: ServingVariant, clock: str | float) -> LaunchRun:
    items = batch_items(batch, variant)
    heads = replace(batch.heads, seqlen_q=1, seqlen_k=1, mask="causal", window=None)
    sms = int(machine["chip.sm_count"])
    pipeline = build(heads, variant, machine, batch.page)
    trace = steady_state(pipeline)
    hbm, l2 = _bytes(batch, variant, items)
    activity = _activity(heads, variant, pipeline, items, hbm, l2)
    bound = _bound(batch, variant)
    programs = max(1, min(bound, variant.programs * sms * variant.waves))
    top = machine["chip.clock_max_mhz"]

    def costs_at(mhz: float) -> Costs:
        return _costs(batch, heads, machine, variant, items, programs, hbm, l2, mhz)

    def played_at(mhz: float) -> Played:
        costs = costs_at(mhz)
        return play(items, costs) if items is not None else nothing(costs)

    first = played_at(top)
    cycles, memory = first.end - first.memory_bound, first.memory_bound / (top * 1e6)
    settled = settled_clock(machine, activity, lambda ghz: max(cycles / (ghz * 1e9) + memory, 1e-9), clock)
    if settled.bound == "boost":
        settled = replace(settled, mhz=_light_clock(machine, pipeline, items, first))
    played = first if settled.mhz == top else played_at(settled.mhz)
    launch = machine["launch.kernel_us"] * 1e-6
    seconds = played.end / (settled.mhz * 1e6) + launch
    return LaunchRun(
        variant, pipeline, trace, items, played, settled, seconds, launch, hbm, l2, programs, variant.programs * sms,
        costs_at(settled.mhz),
    )  # fmt: skip


def _light_clock(machine: Machine, pipeline: Pipeline, items: Items | None, played: Played) -> float:
    """The clock of work that no limit holds: the top one, less what matrix products cost in the time that they run."""
    blocks = float(items.blocks.sum()) if items is not None else 0.0
    tensor = pipeline.demand().get("tensor", 0.0) / pipeline.ctas_per_sm * blocks / machine["chip.sm_count"]
    busy = min(1.0, tensor / max(played.end, 1.0))
    return machine["chip.clock_max_mhz"] * (1.0 - busy * (1.0 - machine["power.tensor_clock_share"]))


def _bound(batch: Batch, variant: ServingVariant) -> int:
    """Programs that might find work, as a launch counts them from shapes alone."""
    heads, work = batch.heads, batch.workload()
    # A request of the step may be as long as the longest.
    most_splits = max(1, min(split_limit(variant, heads.heads_kv), -(-work.seqlen_k // variant.split_keys)))
    if work.seqlen_k <= variant.whole_keys:
        most_splits = 1
    tiles = batch.queries * heads.group_size // variant.tile_m + len(batch.lengths)
    return heads.heads_kv * max(tiles, len(batch.lengths) * most_splits)


def _bytes(batch: Batch, variant: ServingVariant, items: Items | None) -> tuple[float, float]:
    """(bytes from and to memory, bytes through L2) of a launch: K and V once, Q and O, what splits leave for the last one."""
    if items is None:
        return 0.0, 0.0
    h = batch.heads
    row = (h.head_dim_qk + h.head_dim_v) * h.dtype_bytes
    queries = items.queries * h.heads_q * row
    partials = items.partial_rows * (h.head_dim_v + 2) * _PARTIAL_BYTES
    # What is written goes to memory in the end; the last split reads it while L2 has it.
    return items.span * row + queries + partials, float(items.keys.sum()) * row + queries + 2.0 * partials


def _activity(
    heads: Workload, variant: ServingVariant, pipeline: Pipeline, items: Items | None, hbm: float, l2: float
) -> Activity:
    """Executed work: whole tiles."""
    blocks = float(items.blocks.sum()) if items is not None else 0.0
    flop = 2.0 * variant.tile_m * variant.tile_n * (heads.head_dim_qk + heads.head_dim_v) * blocks
    units = tuple((u, c * blocks / pipeline.ctas_per_sm) for u, c in pipeline.demand().items())
    return Activity(flop, heads.dtype, units, l2, hbm)


@lru_cache(maxsize=512)
def _periods(heads: Workload, variant: ServingVariant, machine: Machine, page: int) -> tuple[tuple[float, ...], float]:
    """(cycles of a block of each of 1, 2, ... programs on an SM, cycles from a program's first copy to its first block's end
    beyond a period)."""
    counts = range(1, variant.programs + 1) if variant.tile_m <= DECODE_ROWS else (variant.programs,)
    traces = [steady_state(build(heads, variant, machine, page, count)) for count in counts]
    fill = max(0.0, traces[0].iteration_end[0] - traces[0].ii_cycles)
    return tuple(trace.ii_cycles for trace in traces), fill


def _costs(
    batch: Batch, heads: Workload, machine: Machine, variant: ServingVariant, items: Items | None, programs: int,
    hbm: float, l2: float, mhz: float,
) -> Costs:  # fmt: skip
    sms = int(machine["chip.sm_count"])
    around = Around(machine, variant)
    periods, fill = _periods(heads, variant, machine, batch.page)
    blocks = float(items.blocks.sum()) if items is not None else 0.0
    bytes_per_cycle = machine["hbm.tbps_achieved"] * 1e6 / mhz
    port = machine["l2.bytes_per_clk_per_sm"] * sms
    memory = max(hbm / bytes_per_cycle, l2 / port) / blocks if blocks else 0.0
    rows = min(
        variant.tile_m,
        max((q for q, _ in batch.lengths if takes(variant, q, heads.group_size)), default=1) * heads.group_size,
    )
    start, turnaround = (
        machine["launch.cta_start_cycles"],
        machine.get("launch.cta_turnaround_cycles", machine["launch.cta_start_cycles"]),
    )
    cold, warm = (around.set_up(batch.page, cold) + fill for cold in (True, False))
    return Costs(
        sms=sms,
        per_sm=variant.programs,
        programs=programs,
        first_start=start + around.plan(True) + cold,
        later_start=turnaround + around.plan(False) + warm,
        next_item=warm,
        finish=around.finish(),
        hand_over=around.hand_over(),
        merge=lambda splits, there: around.merge(splits, rows, heads, there),
        periods=periods,
        memory_block=memory,
        idle_programs=max(0, programs - (items.count if items is not None else 0)),
        idle_program=turnaround + around.plan(False),
    )  # fmt: skip
