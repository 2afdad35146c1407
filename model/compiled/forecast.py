"""Time of a compiled kernel on a machine: tiles simulated on one SM, handed out as its scheduler does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from tilecast.model.compiled.code import CodeError, KernelCode
from tilecast.model.compiled.costs import mma_cycles, warp_costs
from tilecast.model.compiled.counts import Tile, greedy_makespan, hopper_counts, program_tiles, triton_counts
from tilecast.model.compiled.memory import memory_traffic
from tilecast.model.compiled.program import TileCounts, hopper_cta, triton_cta
from tilecast.model.compiled.sm import Cta, run_sm
from tilecast.model.machine import Machine
from tilecast.model.variant import Fa2Variant, Fa3Variant, parse_variant
from tilecast.model.workload import Workload

#: Blocks in the simulated tiles from which the cost of a tile is drawn: affine in their number.
_SAMPLES = (4, 10)
_TILES = 3


@dataclass(frozen=True, slots=True)
class CompiledForecast:
    """What a compiled kernel is forecast to take."""

    cycles: float
    #: Cycles a whole block of keys adds to a tile, and what a tile costs besides.
    cycles_per_block: float
    tile_cycles: float
    ctas_per_sm: int
    tiles: int
    launch_cycles: float
    #: Bytes to and from memory, and the least cycles they take.
    memory_bytes: float
    memory_cycles: float


@dataclass(frozen=True, slots=True)
class _Affine:
    """Cost of a tile: ``fixed + slope x whole blocks``."""

    fixed: float
    slope: float

    def of(self, blocks: int) -> float:
        return self.fixed + self.slope * blocks


def forecast(code: KernelCode, work: Workload, machine: Machine, mhz: float) -> CompiledForecast:
    """SM cycles of one launch, launches back to back, at an SM clock of ``mhz`` (memory keeps its own pace).

    Raises CodeError when code and workload do not belong together.
    """
    if (code.head_dim_qk, code.head_dim_v, code.mask) != (work.head_dim_qk, work.head_dim_v, work.mask):
        raise CodeError(
            f"the profile is of head_dim {code.head_dim_qk}/{code.head_dim_v}, mask {code.mask}; got {work.label()}"
        )
    variant = parse_variant(code.variant)
    pace = 100.0 * max(1, round(mhz / 100.0))  # tiles are simulated once for clocks this close
    launch = machine.get("launch.graph_kernel_us", machine["launch.kernel_us"]) * mhz
    if isinstance(variant, Fa3Variant):
        return _hopper(code, variant, work, machine, launch, pace)
    if isinstance(variant, Fa2Variant):
        return _triton(code, variant, work, machine, launch, pace)
    raise CodeError(f"forecasts from machine code know hopper_ws and triton kernels, got {code.family}")


def _mma_table(code: KernelCode, machine: Machine) -> dict[tuple[int, bool], float]:
    kinds = {
        (i.amount, i.from_registers)
        for consumer in code.consumers
        for stretch in consumer
        for i in stretch.instructions
        if i.kind == "mma"
    }
    return {kind: mma_cycles(machine, *kind) for kind in kinds}


def _fit(points: Sequence[tuple[int, float]]) -> _Affine:
    """Least squares through (blocks, cycles)."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return _Affine(mean_y - slope * mean_x, slope)


# --- hopper_ws ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _hopper_tile(
    code: KernelCode, variant: Fa3Variant, machine: Machine, shape: tuple[TileCounts, ...], cold: bool, mhz: float,
    share: float,
) -> _Affine:  # fmt: skip
    """Cost of tiles of a ``shape`` (whole blocks left open): one after the other, or each in a fresh CTA."""
    costs, mma = warp_costs(machine, mhz), _mma_table(code, machine)
    points = []
    for blocks in _SAMPLES:
        # Warpgroups that see fewer blocks pass the others' blocks over, so all walk the same ring.
        tile = [replace(counts, main=blocks + counts.main) for counts in shape]
        tiles = 1 if cold else _TILES
        # Whether warpgroups fall into step or run staggered depends on how they start, and real ones wander between the
        # two: the mean of both starts.
        starts = (False, True) if variant.warpgroups > 1 else (False,)
        spans = []
        for together in starts:
            run = run_sm([hopper_cta(code, variant, [tile] * tiles, costs, cold, share, together)], costs, mma)
            if cold:
                spans.append(max(marks[0] for marks in run.marks))
            else:
                spans.append(max((marks[-1] - marks[0]) / (tiles - 1) for marks in run.marks))
        points.append((blocks, sum(spans) / len(spans)))
    return _fit(points)


def _shape_of(counts: tuple[TileCounts, ...]) -> tuple[tuple[TileCounts, ...], int]:
    """(counts less the whole blocks that all warpgroups have, how many those are)."""
    common = min(c.main for c in counts)
    return tuple(replace(c, main=c.main - common) for c in counts), common


def _hopper(
    code: KernelCode, variant: Fa3Variant, work: Workload, machine: Machine, launch: float, mhz: float
) -> CompiledForecast:
    sms = int(machine["chip.sm_count"])
    blocks, heads = -(-work.seqlen_q // (64 * variant.warpgroups)), work.batch * work.heads_q
    cold = variant.scheduler == "grid"
    one_head = list(range(blocks)) if work.mask == "none" else list(reversed(range(blocks)))  # the longest first
    if cold:
        waves = _waves([(b, h) for h in range(heads) for b in one_head], sms)
    else:
        waves = _turns(variant.scheduler, blocks, heads, min(sms, blocks * heads))
    moved, share = memory_traffic(work, waves, 64 * variant.warpgroups, machine["l2.bytes"])
    share = round(share, 1)  # tiles are simulated once for shares this close

    def cost(block: int) -> float:
        shape, whole = _shape_of(hopper_counts(work, block, variant.warpgroups, variant.tile_n))
        return _hopper_tile(code, variant, machine, shape, cold, mhz, share).of(whole)

    by_block = [cost(block) for block in range(blocks)]
    costs = warp_costs(machine, mhz)
    start = costs.cta_setup + costs.barrier_setup * code.barriers
    if cold:
        turnaround = start + machine.get("launch.cta_turnaround_cycles", machine["launch.cta_start_cycles"])
        span = (
            greedy_makespan(iter(one_head * heads), lambda block: by_block[block] + turnaround, sms)
            - turnaround
            + start
        )
    else:
        span = start + max(
            sum(by_block[block] for block, _ in tiles)
            for tiles in program_tiles(variant.scheduler, blocks, heads, min(sms, blocks * heads))
        )
    shape, _ = _shape_of(hopper_counts(work, blocks // 2, variant.warpgroups, variant.tile_n))
    tile = _hopper_tile(code, variant, machine, shape, cold, mhz, share)
    return _answer(span, moved, machine, mhz, tile, 1, blocks * heads, launch)


def _turns(scheduler: str, blocks: int, heads: int, programs: int) -> list[Sequence[Tile]]:
    """The n-th tiles of all persistent programs, for every n."""
    queues = list(program_tiles(scheduler, blocks, heads, programs))
    return [[queue[n] for queue in queues if n < len(queue)] for n in range(max(map(len, queues)))]


def _waves(tiles: Sequence[Tile], slots: int) -> list[Sequence[Tile]]:
    """Tiles in launch order, as many at a time as run at once."""
    return [tiles[i : i + slots] for i in range(0, len(tiles), slots)]


def _answer(
    span: float, moved: float, machine: Machine, mhz: float, tile: _Affine, fit: int, tiles: int, launch: float
) -> CompiledForecast:
    """The longer of what the SMs and what the memory take, and the launch."""
    memory = moved / (machine["hbm.tbps_achieved"] * 1e12) * mhz * 1e6
    return CompiledForecast(max(span, memory) + launch, tile.slope, tile.fixed, fit, tiles, launch, moved, memory)


# --- triton ---------------------------------------------------------------------------------------------------


def ctas_per_sm(code: KernelCode, machine: Machine) -> int:
    """CTAs of a compiled kernel that fit an SM: shared memory, registers, warps."""
    registers = -(-code.registers // 8) * 8 * 32 * code.warps * 4
    return max(
        1,
        min(
            int(machine["smem.per_sm_bytes"] // (code.shared_bytes + 1024)),
            int(machine["reg.file_bytes"] // registers),
            int(machine["sm.max_warps"] // code.warps),
        ),
    )


@lru_cache(maxsize=4096)
def _triton_tile(
    code: KernelCode, variant: Fa2Variant, machine: Machine, shape: TileCounts, together: int, pause: float, mhz: float,
    share: float,
) -> _Affine:  # fmt: skip
    """Cost of a CTA while ``together`` of them share the SM, the pause before the next included."""
    costs, mma = warp_costs(machine, mhz), _mma_table(code, machine)
    points = []
    for blocks in _SAMPLES:
        counts = replace(shape, main=blocks)
        slots: list[Cta] = []
        for slot in range(together):
            # CTAs on an SM drift apart; starting them apart avoids the lockstep that real ones leave at once.
            begins = slot * 0.5 * blocks * 400.0 / together
            slots.append(triton_cta(code, variant, counts, _TILES, pause, costs, begins, share))
        run = run_sm(slots, costs, mma)
        groups = len(code.consumers)
        spans = [(marks[-1] - marks[0]) / (_TILES - 1) for marks in run.marks[::groups]]
        points.append((blocks, sum(spans) / len(spans)))
    return _fit(points)


def _triton(
    code: KernelCode, variant: Fa2Variant, work: Workload, machine: Machine, launch: float, mhz: float
) -> CompiledForecast:
    sms = int(machine["chip.sm_count"])
    blocks, heads = -(-work.seqlen_q // variant.tile_m), work.batch * work.heads_q
    fit = ctas_per_sm(code, machine)
    costs = warp_costs(machine, mhz)
    # O leaves through shared memory by a bulk copy that the CTA waits for before it ends.
    drain = variant.tile_m * work.head_dim_v * work.dtype_bytes / costs.store_bytes_per_clk + costs.tma_latency
    start = machine.get("launch.cta_turnaround_cycles", machine["launch.cta_start_cycles"])
    turnaround = start + drain
    total = blocks * heads
    one_head = list(reversed(range(blocks))) if variant.scheduler == "longest-first" else list(range(blocks))
    order = one_head * heads
    waves = _waves([(b, h) for h in range(heads) for b in one_head], sms * fit)
    moved, share = memory_traffic(work, waves, variant.tile_m, machine["l2.bytes"])
    share = round(share, 1)
    counts = [triton_counts(work, block, variant.tile_m, variant.tile_n) for block in range(blocks)]

    def cost(block: int, together: int) -> float:
        shape = replace(counts[block], main=0)
        return _triton_tile(code, variant, machine, shape, together, turnaround, mhz, share).of(counts[block].main)

    by_block = [cost(block, fit) for block in range(blocks)]
    full = total - total % (sms * fit) if work.mask == "none" else total
    span = greedy_makespan(iter(order[:full]), by_block.__getitem__, sms * fit) if full else 0.0
    if full < total:
        # The last wave has the SM more to itself.
        together = math.ceil((total - full) / sms)
        span += max(cost(block, together) for block in set(order[full:]))
    tile = _triton_tile(code, variant, machine, replace(counts[blocks // 2], main=0), fit, turnaround, mhz, share)
    return _answer(span + start - turnaround, moved, machine, mhz, tile, fit, total, launch)
