"""Time of a compiled kernel on a machine: tiles simulated on one SM, handed out as its scheduler does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from tilecast.model.chip.dealing import launched, rounds_of_pairs
from tilecast.model.compiled.code import CodeError, KernelCode
from tilecast.model.compiled.costs import mma_cycles, warp_costs
from tilecast.model.compiled.counts import (
    Tile,
    greedy_makespan,
    hopper_counts,
    in_halves,
    program_tiles,
    triton_counts,
)
from tilecast.model.compiled.memory import Traffic, memory_traffic, shared_by
from tilecast.model.compiled.native.kept_runs import Ends, SmFacts, kept_run, sm_facts
from tilecast.model.compiled.native.run import run_ctas
from tilecast.model.compiled.program import TileCounts, hopper_cta, triton_cta
from tilecast.model.compiled.sm import Cta
from tilecast.model.families import find_family, parse_variant
from tilecast.model.kernel.variants.fa2 import Fa2Variant
from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.machine.occupancy import ctas_that_fit

#: Blocks in the simulated tiles from which the cost of a tile is drawn: affine in their number, of a CTA alone on its SM (two warpgroups
#: can take some 15 blocks until they have found their rhythm) ...
_STEADY = (16, 48)
#: ... and of CTAs that come one after the other, alone or sharing the SM; how many of them are simulated.
_SAMPLES = (4, 10)
_SHARED_SAMPLES = (4, 7, 10, 14)
_TILES = 3
#: Tiles of a persistent program that are simulated, and whole blocks of each.
_PROGRAM = 8
_LONGEST = 6


@dataclass(frozen=True, slots=True)
class CompiledForecast:
    """What a compiled kernel is forecast to take."""

    cycles: float
    #: Of the SM that is done last, and the mean of all SMs; without launch and memory.
    span_cycles: float
    mean_cycles: float
    ctas_per_sm: int
    tiles: int
    launch_cycles: float
    #: Bytes to and from memory, and the least cycles they take.
    memory_bytes: float
    memory_cycles: float
    #: Bytes between L2 and SMs.
    l2_bytes: float
    _tile: Callable[[], _Affine] = field(repr=False, compare=False)

    @property
    def cycles_per_block(self) -> float:
        """Cycles a whole block of keys adds to a tile; simulated when asked for, as the forecast may not need it."""
        return self._tile().slope


#: Blocks at an edge by which what one of them takes is simulated.
_EDGES = 4


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
    if variant.family not in _FORECASTS:
        known = " and ".join(find_family(name).template for name in _FORECASTS)
        raise CodeError(f"forecasts from machine code know {known} kernels, got {code.family}")
    return _FORECASTS[variant.family](code, variant, work, machine, launch, pace)


def _fit(points: Sequence[tuple[int, float]]) -> _Affine:
    """Least squares through (blocks, cycles)."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return _Affine(mean_y - slope * mean_x, slope)


# --- hopper_ws ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16384)
def _hopper_run(
    code: KernelCode, variant: Fa3Variant, machine: Machine, tiles: tuple[tuple[TileCounts, ...], ...], cold: bool,
    mhz: float, share: float,
) -> Ends:  # fmt: skip
    """When each of ``tiles``, done one after the other by a CTA, is done (its last warpgroup), from the CTA's start."""
    # Variants around one loop and machines that differ outside the SM run the same.
    loop = replace(variant, scheduler="grid")
    return _hopper_ends(_nameless(code), loop, sm_facts(code, machine, mhz, 1), tiles, cold, share)


@lru_cache(maxsize=1024)
def _nameless(code: KernelCode) -> KernelCode:
    return replace(code, variant="")


@lru_cache(maxsize=16384)
def _hopper_ends(
    code: KernelCode, variant: Fa3Variant, facts: SmFacts, tiles: tuple[tuple[TileCounts, ...], ...], cold: bool, share: float
) -> Ends:  # fmt: skip
    def simulate() -> Ends:
        # Whether warpgroups fall into step or run staggered depends on how they start, and real ones wander between the
        # two: the mean of both starts.
        starts = (False, True) if variant.warpgroups > 1 else (False,)
        runs = [
            run_ctas([hopper_cta(code, variant, tiles, facts.costs, cold, share, together)], facts.costs, facts.mma)
            for together in starts
        ]
        ends = [[max(marks[i] for marks in run.marks) for i in range(len(tiles))] for run in runs]
        return tuple(sum(column) / len(column) for column in zip(*ends, strict=True))

    counts = [[c.as_tuple() for c in tile] for tile in tiles]
    return kept_run(code, (variant, facts.digest, counts, cold, share), simulate)


@lru_cache(maxsize=16384)
def _hopper_tile(
    code: KernelCode, variant: Fa3Variant, machine: Machine, shape: tuple[TileCounts, ...], cold: bool, mhz: float,
    share: float,
) -> _Affine:  # fmt: skip
    """Cost of a tile of a ``shape``, alone on its SM, by its whole blocks."""
    fewer, more = (
        (blocks, _hopper_run(code, variant, machine, (_with_whole(shape, blocks),), cold, mhz, share)[0])
        for blocks in _STEADY
    )
    found, least = _fit([fewer, more]), _products(_nameless(code), machine)
    # Where the tensor core is full, how the warpgroups stand at the end of either tile must not make blocks shorter than their products.
    return found if found.slope >= least else _Affine(fewer[1] - least * fewer[0], least)


@lru_cache(maxsize=1024)
def _products(code: KernelCode, machine: Machine) -> float:
    """Cycles of the tensor core for a whole block of all warpgroups."""
    return sum(
        mma_cycles(machine, one.amount, one.from_registers, code.dtype)
        for consumer in code.consumers for role, instructions in consumer if role == "main" for one in instructions if one.kind == "mma"
    )  # fmt: skip


def block_cycles(code: KernelCode, machine: Machine, mhz: float) -> tuple[float, float]:
    """(cycles of a whole block of a long tile of a Hopper kernel, cycles that one at the right edge of its mask takes beyond), alone on its SM, what
    it reads in L2."""
    variant = parse_variant(code.variant)
    assert isinstance(variant, Fa3Variant)
    pace = 100.0 * max(1, round(mhz / 100.0))

    def run(edge: int, main: int) -> float:
        tile = (TileCounts(edge=edge, main=main),) * variant.warpgroups
        return _hopper_run(code, variant, machine, (tile,), False, pace, 0.0)[0]

    fewer, more = _STEADY[0], _STEADY[-1]
    whole = (run(0, more) - run(0, fewer)) / (more - fewer)
    return whole, (run(_EDGES, fewer) - run(0, fewer)) / _EDGES - whole


def _hopper_cta_cost(
    code: KernelCode, variant: Fa3Variant, machine: Machine, counts: tuple[TileCounts, ...], mhz: float, share: float
) -> float:
    """Cycles of a fresh CTA that does one tile."""
    shape, whole = _shape_of(counts)
    if whole < _STEADY[0]:
        return _hopper_run(code, variant, machine, (counts,), True, mhz, share)[0]
    return _hopper_tile(code, variant, machine, shape, True, mhz, share).of(whole)


def _hopper_program(
    code: KernelCode, variant: Fa3Variant, machine: Machine, tiles: Sequence[tuple[TileCounts, ...]], mhz: float,
    share: float,
) -> float:  # fmt: skip
    """Cycles of a persistent program: its tiles in their order, in which one's Q and O share the memory with the next's blocks.

    Long tiles are simulated shortened, long programs thinned out evenly; what is left out costs what tiles cost one by one.
    """
    short = [(shape, min(whole, _LONGEST), max(0, whole - _LONGEST)) for shape, whole in map(_shape_of, tiles)]
    step = max(1.0, (len(short) - 1) / (_PROGRAM - 1))
    kept = [round(i * step) for i in range(min(len(short), _PROGRAM))]
    ends = _hopper_run(
        code, variant, machine, tuple(_with_whole(short[i][0], short[i][1]) for i in kept), False, mhz, share
    )
    if len(kept) == len(short) and not any(left_out for _, _, left_out in short):
        return ends[-1]
    middle = short[len(short) // 2][0]
    alone = _hopper_tile(code, variant, machine, middle, False, mhz, share)

    def weight(i: int) -> float:
        shape, whole, _ = short[i]
        blocks = max(c.main + c.edge + c.left for c in shape) - max(c.edge + c.left for c in middle)
        return max(alone.of(whole + blocks), alone.slope)

    rest = sum(weight(i) for i in kept[1:])
    ratio = (ends[-1] - ends[0]) / rest if rest else 1.0
    return (
        ends[0]
        + ratio * sum(weight(i) for i in range(1, len(short)))
        + alone.slope * sum(left_out for _, _, left_out in short)
    )


def _blocks(tile: tuple[TileCounts, ...]) -> int:
    """Blocks the slowest warpgroup of a tile takes in."""
    return max(c.blocks(1) for c in tile)


def _with_whole(shape: tuple[TileCounts, ...], blocks: int) -> tuple[TileCounts, ...]:
    """``shape`` with ``blocks`` more whole blocks.

    Warpgroups that see fewer blocks pass the others' blocks over, so all walk the same ring.
    """
    return tuple(replace(counts, main=blocks + counts.main) for counts in shape)


def _shape_of(counts: tuple[TileCounts, ...]) -> tuple[tuple[TileCounts, ...], int]:
    """(counts less the whole blocks that all warpgroups have, how many those are)."""
    common = min(c.main for c in counts)
    return tuple(replace(c, main=c.main - common) for c in counts), common


def _hopper(
    code: KernelCode, variant: Fa3Variant, work: Workload, machine: Machine, launch: float, mhz: float
) -> CompiledForecast:
    sms = int(machine["chip.sm_count"])
    blocks, heads = -(-work.seqlen_q // (64 * variant.warpgroups)), work.batch * work.heads_q
    asked = variant.family, variant.scheduler, work, 64 * variant.warpgroups, variant.tile_n, sms
    scheduler, rounds = launched(*asked), rounds_of_pairs(*asked)
    cold = scheduler == "grid"
    one_head = list(range(blocks)) if work.mask == "none" else list(reversed(range(blocks)))  # the longest first
    moved = _hopper_traffic(work, scheduler, 64 * variant.warpgroups, sms, machine["l2.bytes"], rounds)
    share = round(moved.missed_share, 1)  # tiles are simulated once for shares this close

    halves = in_halves(work, variant)
    counts = [hopper_counts(work, block, variant.warpgroups, variant.tile_n, halves) for block in range(blocks)]
    costs, near = warp_costs(machine, mhz), shared_by(machine, blocks * heads, mhz)
    start = costs.cta_setup + costs.barrier_setup * code.barriers
    if cold:
        turnaround = start + machine.get("launch.cta_turnaround_cycles", machine["launch.cta_start_cycles"])
        by_block = [_hopper_cta_cost(code, variant, near, c, mhz, share) + turnaround for c in counts]
        span = greedy_makespan(iter(one_head * heads), by_block.__getitem__, sms) - turnaround + start
        mean = min(span, sum(by_block) * heads / sms)
    else:
        longest, weight, all_weights = _longest(
            work, scheduler, variant.warpgroups, variant.tile_n, sms, rounds, halves
        )
        span = start + _hopper_program(code, variant, near, [counts[block] for block in longest], mhz, share)
        mean = min(span, span * all_weights / (sms * weight))
    shape, _ = _shape_of(hopper_counts(work, blocks // 2, variant.warpgroups, variant.tile_n, halves))
    tile = partial(_hopper_tile, code, variant, near, shape, cold, mhz, share)
    return _answer((span, mean), moved, machine, mhz, tile, 1, blocks * heads, launch)


@lru_cache(maxsize=1024)
def _hopper_traffic(
    work: Workload, scheduler: str, rows: int, sms: int, l2_bytes: float, rounds: int | None
) -> Traffic:
    """What a launch of tiles of ``rows`` rows moves."""
    blocks, heads = -(-work.seqlen_q // rows), work.batch * work.heads_q
    if scheduler == "grid":
        one_head = range(blocks) if work.mask == "none" else reversed(range(blocks))  # the longest first
        order = list(one_head)
        waves = _waves([(b, h) for h in range(heads) for b in order], sms)
    else:
        waves = _turns(scheduler, blocks, heads, min(sms, blocks * heads), rounds)
    return memory_traffic(work, waves, rows, l2_bytes)


@lru_cache(maxsize=1024)
def _longest(
    work: Workload, scheduler: str, warpgroups: int, keys: int, sms: int, rounds: int | None, halves: bool
) -> tuple[tuple[int, ...], int, int]:
    """Query blocks of the longest persistent program, in order; its weight, and that of all programs.

    Programs differ in their blocks and tiles; a tile's start and end weigh about as much as a block.
    """
    blocks, heads = -(-work.seqlen_q // (64 * warpgroups)), work.batch * work.heads_q
    by_block = [_blocks(hopper_counts(work, block, warpgroups, keys, halves)) for block in range(blocks)]
    queues = _queues(scheduler, blocks, heads, min(sms, blocks * heads), rounds)
    lengths = [(sum([by_block[block] for block, _ in tiles]), len(tiles)) for tiles in queues]
    longest = queues[lengths.index(max(lengths))]
    return tuple(block for block, _ in longest), sum(max(lengths)), sum(map(sum, lengths))


@lru_cache(maxsize=64)
def _queues(scheduler: str, blocks: int, heads: int, programs: int, rounds: int | None = None) -> list[list[Tile]]:
    return list(program_tiles(scheduler, blocks, heads, programs, rounds))


def _turns(scheduler: str, blocks: int, heads: int, programs: int, rounds: int | None = None) -> list[Sequence[Tile]]:
    """The n-th tiles of all persistent programs, for every n."""
    queues = _queues(scheduler, blocks, heads, programs, rounds)
    return [[queue[n] for queue in queues if n < len(queue)] for n in range(max(map(len, queues)))]


def _waves(tiles: Sequence[Tile], slots: int) -> list[Sequence[Tile]]:
    """Tiles in launch order, as many at a time as run at once."""
    return [tiles[i : i + slots] for i in range(0, len(tiles), slots)]


def _answer(
    spans: tuple[float, float], moved: Traffic, machine: Machine, mhz: float, tile: Callable[[], _Affine], fit: int,
    tiles: int, launch: float,
) -> CompiledForecast:  # fmt: skip
    """The longer of what the SMs (the last of them, and the mean) and what the memory take, and the launch."""
    memory = moved.memory_bytes / (machine["hbm.tbps_achieved"] * 1e12) * mhz * 1e6
    return CompiledForecast(
        max(spans[0], memory) + launch, *spans, fit, tiles, launch, moved.memory_bytes, memory, moved.l2_bytes, tile
    )


# --- triton ---------------------------------------------------------------------------------------------------


def ctas_per_sm(code: KernelCode, machine: Machine) -> int:
    """CTAs of a compiled kernel that fit an SM: shared memory, registers, warps."""
    return ctas_that_fit(machine, code.shared_bytes, code.registers, code.warps)


@lru_cache(maxsize=16384)
def _triton_run(
    code: KernelCode, variant: Fa2Variant, machine: Machine, counts: TileCounts, together: int, pause: float,
    mhz: float, share: float,
) -> float:  # fmt: skip
    """Cycles of a CTA while ``together`` of them share the SM, the pause before the next included."""
    facts = sm_facts(code, machine, mhz, together)
    slots: list[Cta] = []
    for slot in range(together):
        # CTAs on an SM drift apart; starting them apart avoids the lockstep that real ones leave at once.
        begins = slot * 0.5 * counts.main * 400.0 / together
        slots.append(triton_cta(code, variant, counts, _TILES, pause, facts.costs, begins, share))
    run = run_ctas(slots, facts.costs, facts.mma)
    spans = [(marks[-1] - marks[0]) / (_TILES - 1) for marks in run.marks[:: len(code.consumers)]]
    return sum(spans) / len(spans)


def _triton_cost(
    code: KernelCode, variant: Fa2Variant, machine: Machine, counts: TileCounts, together: int, pause: float,
    mhz: float, share: float,
) -> float:  # fmt: skip
    """Cycles of a CTA: simulated when short, else affine in its whole blocks."""
    if counts.main < _SAMPLES[0]:
        return _triton_run(code, variant, machine, counts, together, pause, mhz, share)
    return _triton_tile(code, variant, machine, replace(counts, main=0), together, pause, mhz, share).of(counts.main)


@lru_cache(maxsize=16384)
def _triton_tile(
    code: KernelCode, variant: Fa2Variant, machine: Machine, shape: TileCounts, together: int, pause: float, mhz: float,
    share: float,
) -> _Affine:  # fmt: skip
    """Cost of a CTA by its whole blocks."""
    # CTAs that share an SM lock into one of several rhythms; more lengths average over them.
    samples = _SAMPLES if together == 1 else _SHARED_SAMPLES
    return _fit([
        (blocks, _triton_run(code, variant, machine, replace(shape, main=blocks), together, pause, mhz, share))
        for blocks in samples
    ])  # fmt: skip


@lru_cache(maxsize=1024)
def _triton_traffic(work: Workload, scheduler: str, rows: int, slots: int, l2_bytes: float) -> Traffic:
    """What a launch of tiles of ``rows`` rows moves, ``slots`` of them at once."""
    blocks, heads = -(-work.seqlen_q // rows), work.batch * work.heads_q
    one_head = list(reversed(range(blocks))) if scheduler == "longest-first" else list(range(blocks))
    return memory_traffic(work, _waves([(b, h) for h in range(heads) for b in one_head], slots), rows, l2_bytes)


def _triton(
    code: KernelCode, variant: Fa2Variant, work: Workload, machine: Machine, launch: float, mhz: float
) -> CompiledForecast:
    sms = int(machine["chip.sm_count"])
    blocks, heads = -(-work.seqlen_q // variant.tile_m), work.batch * work.heads_q
    fit = ctas_per_sm(code, machine)
    near = shared_by(machine, blocks * heads, mhz)
    costs = warp_costs(near, mhz)
    # O leaves through shared memory by a bulk copy that the CTA waits for before it ends.
    drain = variant.tile_m * work.head_dim_v * work.dtype_bytes / costs.store_bytes_per_clk + costs.tma_latency
    start = machine.get("launch.cta_turnaround_cycles", machine["launch.cta_start_cycles"])
    turnaround = start + drain
    total = blocks * heads
    one_head = list(reversed(range(blocks))) if variant.scheduler == "longest-first" else list(range(blocks))
    order = one_head * heads
    moved = _triton_traffic(work, variant.scheduler, variant.tile_m, sms * fit, machine["l2.bytes"])
    share = round(moved.missed_share, 1)
    counts = [triton_counts(work, block, variant.tile_m, variant.tile_n) for block in range(blocks)]

    def cost(block: int, together: int) -> float:
        return _triton_cost(code, variant, near, counts[block], together, turnaround, mhz, share)

    by_block = [cost(block, fit) for block in range(blocks)]
    full = total - total % (sms * fit) if work.mask == "none" else total
    span = greedy_makespan(iter(order[:full]), by_block.__getitem__, sms * fit) if full else 0.0
    if full < total:
        # The last wave has the SM more to itself.
        together = math.ceil((total - full) / sms)
        span += max(cost(block, together) for block in set(order[full:]))
    shape = replace(counts[blocks // 2], main=0)
    tile = partial(_triton_tile, code, variant, near, shape, fit, turnaround, mhz, share)
    span += start - turnaround
    mean = min(span, sum(by_block) * heads / (sms * fit))
    return _answer((span, mean), moved, machine, mhz, tile, fit, total, launch)


_FORECASTS: dict[str, Callable[[KernelCode, Any, Workload, Machine, float, float], CompiledForecast]] = {
    "fa3": _hopper,
    "fa2": _triton,
}
