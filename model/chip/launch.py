"""From one SM to the chip: tiles onto SMs, memory ceilings, and the length of the kernel in cycles.

Tiles are dealt as the kernel's scheduler does (`dealing`), to all SMs: programs that stay are no more than their turns need, which makes
the turns no fewer.  What goes to the slot that is free first is estimated above
some fifteen hundred tiles instead of played; what is dealt in turns is counted.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
from numpy.typing import NDArray

from tilecast.model.chip.dealing import Dealing, dealt
from tilecast.model.chip.tiles import HeadTiles, head_tiles
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.sm.simulate import SmTrace, steady_state

_MOST_PLAYED, _MOST_DEALT = 1536, 1 << 16
#: L2 that data read by every SM can use: half of a two-partition cache, where each partition keeps a copy
#: (B2MEM: "data read by all SMs effectively ~63 MB" of 126.5).
_SHARED_L2 = 0.5


@dataclass(frozen=True, slots=True)
class ChipRun:
    """Cycles of the whole kernel and where they go (all per SM unless said otherwise)."""

    #: Longest SM, mean SM: their difference is the tail.
    makespan_cycles: float
    mean_cycles: float
    #: Mean per SM: steady-state loop, loop extra of masked blocks, fill and drain, start and end of tiles.
    loop_cycles: float
    mask_cycles: float
    fill_cycles: float
    edge_cycles: float
    tiles: int
    slots: int
    iterations: float
    l2_bytes: float
    hbm_bytes: float
    l2_floor_cycles: float
    hbm_seconds: float


def tile_cycles(trace: SmTrace, masked_trace: SmTrace, tiles: HeadTiles) -> NDArray[np.float64]:
    """Loop cycles of each listed tile, from the plain and the masked simulation."""
    ends = np.asarray(trace.iteration_end)[None, :]
    (base,) = plain_cycles(ends, np.array([len(trace.iteration_end)]), np.array([trace.ii_cycles]), tiles.iterations)
    cycles: NDArray[np.float64] = base + masked_extra(trace, masked_trace) * np.minimum(tiles.masked, tiles.iterations)
    return cycles


def plain_cycles(
    ends: NDArray[np.float64], known: NDArray[np.int64], period: NDArray[np.float64], blocks: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Cycles of the loops [variant, tile] of tiles with so many ``blocks``: of each variant the ``ends`` of its first ``known``
    blocks, and the ``period`` of those behind."""
    near = np.take_along_axis(ends, np.minimum(np.maximum(blocks, 1), known[:, None]) - 1, axis=1)
    return np.where(blocks > 0, near + np.maximum(blocks - known[:, None], 0) * period[:, None], 0.0)


def loops_after_the_first(workload: Workload, blocks: NDArray[np.int64], masked: NDArray[np.int64]) -> NDArray[np.float64]:  # fmt: skip
    """Loops beside its first of each tile with so many ``blocks``, ``masked`` among them: one of whole blocks, one for each edge of the mask."""
    edges = np.minimum(masked, 2 if workload.mask == "window" else 1)
    return np.maximum(edges + (blocks > masked) - 1.0, 0.0)


def masked_extra(trace: SmTrace, masked_trace: SmTrace) -> float:
    """Cycles a block that crosses a mask boundary takes beyond a plain one."""
    blocks = masked_trace.masked_iterations
    if not blocks:
        return 0.0
    far = max(len(trace.iteration_end), len(masked_trace.iteration_end))
    return max(0.0, (masked_trace.tile_cycles(far) - trace.tile_cycles(far)) / blocks)


@lru_cache(maxsize=1 << 13)
def run_chip(workload: Workload, variant: Variant, pipeline: Pipeline, machine: Machine) -> ChipRun:
    """Play one launch: every tile of every head on the machine's SMs."""
    return play(workload, variant, pipeline, machine, 0.0)


def play(
    workload: Workload, variant: Variant, pipeline: Pipeline, machine: Machine, extra: float, masks: bool = True
) -> ChipRun:
    """`run_chip` with every block ``extra`` cycles longer than the simulated loop's; without ``masks`` masked ones cost like plain ones."""
    pair = pipeline.cta_group
    rows = pipeline.rows_per_cta * pair
    tiles = head_tiles(workload, rows, pipeline.keys_per_iteration, first_masked=pipeline.first_block_masked)
    trace = steady_state(pipeline)
    masked_trace = steady_state(pipeline, 2) if masks and tiles.masked.any() else trace
    if extra:
        trace, masked_trace = trace.longer(extra), masked_trace.longer(extra)
    loop = tile_cycles(trace, masked_trace, tiles)
    loop += pipeline.restart_cycles * loops_after_the_first(workload, tiles.iterations, tiles.masked)
    start, finish = tile_edges(pipeline, machine)
    heads = workload.batch * workload.heads_q
    count = tiles.count * heads
    slots = int(machine["chip.sm_count"]) // pair * pipeline.ctas_per_sm
    deal = dealt(variant.family, variant.scheduler, workload, rows, pipeline.keys_per_iteration, slots)
    persistent = deal.stays
    rates = edge_memory_rates(pipeline, machine)
    # Empty tiles (no visible key) still write zeros: start and end only.
    per_tile = whole_tiles(
        loop, tiles.iterations, persistent, start, finish, tile_turnaround(pipeline, machine, trace),
        max(pipeline.demand().values(), default=0.0),
        late_query(
            machine, fetches_query_late(pipeline), rates, min(slots, count), trace.ii_cycles,
            0.0 if pipeline.tiles_overlap else finish,
        ),
    )  # fmt: skip
    # A persistent CTA starts and ends once; its tiles overlap, so their fill counts only as far as it shows.
    once = start + finish if persistent else 0.0
    edges = once + float(edge_memory_cycles(rates, count, slots, persistent, pipeline.tiles_overlap))
    makespan = float(makespan_cycles(per_tile[None, :], tiles, heads, slots, deal)[0]) + edges
    share = tiles.weight * heads / slots
    # Slots that get no tile start none.
    started = edges * min(1.0, count / slots)
    mean = float(per_tile.sum()) * share + started
    inside = mean - started if persistent else float(loop.sum()) * share
    # A tile of few blocks may end before its loop has settled to the period, and so may take less than its share of it.
    steady = min(inside, tiles.total_iterations * heads * trace.ii_cycles / slots)
    crossing = float(np.minimum(tiles.masked, tiles.iterations).sum()) * share
    mask = min(inside - steady, crossing * masked_extra(trace, masked_trace))
    l2, hbm = traffic(workload, pipeline, machine, tiles, heads, pair, slots, deal.order)
    return ChipRun(
        makespan_cycles=makespan,
        mean_cycles=mean,
        loop_cycles=steady,
        mask_cycles=mask,
        fill_cycles=inside - steady - mask,
        edge_cycles=mean - inside,
        tiles=count,
        slots=slots,
        iterations=tiles.total_iterations * heads,
        l2_bytes=l2,
        hbm_bytes=hbm,
        l2_floor_cycles=l2 / l2_bytes_per_clk(workload, tiles, machine),
        hbm_seconds=hbm / (machine["hbm.tbps_achieved"] * 1e12),
    )


def l2_bytes_per_clk(workload: Workload, tiles: HeadTiles, machine: Machine) -> float:
    """Bytes a clock that L2 hands to all SMs: those of programs that share K and V walk the same tiles in step."""
    alone = machine["l2.bytes_per_clk_per_sm"]
    shared = tiles.count * workload.group_size > 1
    rate = machine.get("l2.bytes_per_clk_per_sm_lockstep", alone) if shared else alone
    return max(rate, alone) * machine["chip.sm_count"]


def tile_edges(pipeline: Pipeline, machine: Machine) -> tuple[float, float]:
    """(start, finish): cycles of a CTA before its tile's loop and after it."""
    first_load = machine["tma.latency_hbm_cycles"] - machine["tma.latency_l2_cycles"]
    return pipeline.prologue_cycles + max(0.0, first_load), pipeline.epilogue_cycles


#: Cycles, a number or one to each variant.
Cycles = float | NDArray[np.float64]


def edge_memory_cycles(
    rates: tuple[Cycles, Cycles, Cycles, Cycles], count: int, slots: int, stays: bool | NDArray[np.bool_],
    overlap: bool | NDArray[np.bool_],
) -> NDArray[np.float64]:  # fmt: skip
    """Cycles the launch takes longer because its ``count`` tiles read Q and write O with nothing to hide it under.

    ``rates`` as `edge_memory_rates` gives them.  All tiles share the memory's bandwidth, whatever the number of SMs: twice the
    SMs move the same bytes in half as many turns, each twice as long.  A few tiles are held by the copy engines of their own
    SMs instead.  A program that ``stays`` fetches its next Q under the tile before; it writes O under the next tile where
    tiles ``overlap``.
    """
    read, write, read_alone, write_alone = rates
    saved = count - min(count, slots)
    reads, writes = count - saved * stays, count - saved * (stays & overlap)
    return np.maximum(
        reads * read + writes * write, -(-reads // slots) * read_alone + -(-writes // slots) * write_alone
    )


def edge_memory_rates(pipeline: Pipeline, machine: Machine) -> tuple[float, float, float, float]:
    """Cycles to read Q and to write O of a tile at the rate of the chip's memory, which all tiles share; the same two at the
    rate of one SM's copy engine."""
    read, write = pipeline.edge_read_bytes, pipeline.edge_write_bytes
    memory = machine["hbm.tbps_achieved"]
    # Of the CTAs on an SM one moves its bytes under the loops of the others.
    shared = pipeline.cta_group * machine.rated_mhz / 1e6 / pipeline.ctas_per_sm
    engine = machine["tma.bytes_per_clk"]
    return read / memory * shared, write / machine.get("l2.store_tbps", memory) * shared, read / engine, write / engine


def whole_tiles(
    loop: NDArray[np.float64], blocks: NDArray[np.int64], stays: bool | NDArray[np.bool_], start: Cycles, finish: Cycles,
    turnaround: Cycles, busiest: Cycles, late: Cycles,
) -> NDArray[np.float64]:  # fmt: skip
    """Cycles of tiles whose loops take ``loop`` cycles over ``blocks`` blocks, by one program to each or by programs that stay.

    ``start`` and ``finish`` are a program's own, ``turnaround`` and ``late`` what stays between two tiles of a program
    (`tile_turnaround`, `late_query`), which take each the ``busiest`` unit's time however well they overlap.
    """
    return np.where(stays, np.maximum(loop + turnaround, blocks * busiest) + late, loop + start + finish)


def tile_turnaround(pipeline: Pipeline, machine: Machine, trace: SmTrace) -> float:
    """Cycles between the tiles of a CTA that lives on."""
    # It prefetches the next query tile and stores the last one under the loop; what stays is the part of fill and drain
    # that exceeds one iteration of overlap between neighbouring tiles.
    if not pipeline.tiles_overlap:
        # The next tile's first blocks are there when the output is written; nothing else overlaps.
        return pipeline.epilogue_cycles - machine["tma.latency_l2_cycles"]
    fill = trace.iteration_end[-1] - len(trace.iteration_end) * trace.ii_cycles
    return max(0.0, fill - trace.ii_cycles) - fill


def fetches_query_late(pipeline: Pipeline) -> bool:
    """Whether a CTA that lives on fetches a tile's Q only after the last product with the Q of the tile before."""
    return not pipeline.query_ahead and pipeline.edge_read_bytes > 0


def late_query(
    machine: Machine, late: bool | NDArray[np.bool_], rates: tuple[Cycles, Cycles, Cycles, Cycles], slots: int,
    period: Cycles, ending: Cycles,
) -> NDArray[np.float64]:  # fmt: skip
    """Cycles a tile waits for its Q where that comes ``late`` (`fetches_query_late`).

    What is left of the tile before, about an iteration and its ``ending``, hides the fetch; ``slots`` programs fetch at about the same time.
    """
    shared, _, alone, _ = rates
    fetch = machine["tma.latency_hbm_cycles"] + np.maximum(slots * shared, alone)
    waits: NDArray[np.float64] = np.maximum(0.0, fetch - period - ending) * late
    return waits


def makespan_cycles(
    per_tile: NDArray[np.float64], tiles: HeadTiles, heads: int, slots: int, deal: Dealing
) -> NDArray[np.float64]:
    """Length of the longest SM (cycles), of each variant, when the listed ``tiles`` of each head take ``per_tile`` [variant, tile] cycles."""
    count = tiles.count * heads
    low, high = per_tile.min(axis=1), per_tile.max(axis=1)
    waves: NDArray[np.float64] = -(-count // slots) * high
    unlike = high - low >= 1e-9 * np.maximum(1.0, high)
    if count <= slots or not unlike.any():
        return waves
    listed = tiles.weight <= 1
    if deal.hand == "turns" and deal.order == "rows" and listed:
        found = _round_robin(per_tile, heads, slots)
    elif not listed or count > (_MOST_PLAYED if deal.hand == "free" else _MOST_DEALT):
        # Hand-out in order leaves the last tile's length on average half unfilled: the shortest where those come last.
        last = low if deal.order in ("longest", "longest by few", "last rows") or deal.rounds is not None else high
        found = np.maximum(high, per_tile.sum(axis=1) * tiles.weight * heads / slots + 0.5 * last)
    elif deal.hand == "free":
        found = _to_the_free(_in_order(per_tile, heads, deal.order), slots)
    else:
        # Not more at a time than caches hold.
        some = max(1, _MOST_DEALT // count)
        parts = (per_tile[at : at + some] for at in range(0, len(per_tile), some))
        found = np.concatenate([_dealt(part, heads, slots, deal).max(axis=1) for part in parts])
    return np.where(unlike, found, waves)


def _dealt(per_tile: NDArray[np.float64], heads: int, slots: int, deal: Dealing) -> NDArray[np.float64]:
    """Cycles of each slot [variant, slot] when tiles of all heads are dealt in turns."""
    work = _in_order(per_tile, heads, deal.order)
    if deal.rounds is None:
        return _in_turns(work, slots, zigzag=deal.hand == "zigzag")
    count = per_tile.shape[1]
    first, gone = divmod(deal.rounds * slots, (count + 1) // 2)
    # The heads that are left take turns at tiles, the longest first; of the first of them pairs have taken the outer ones.
    rest = np.repeat(per_tile[:, ::-1], heads - first, axis=1)
    place = np.arange(count)
    rest[:, :: heads - first] *= np.minimum(place, count - 1 - place) >= gone
    return _in_turns(work[:, : deal.rounds * slots], slots, zigzag=True) + _in_turns(rest, slots, zigzag=True)


def _in_order(per_tile: NDArray[np.float64], heads: int, order: str) -> NDArray[np.float64]:
    """Tiles of all heads, or their pairs, as they are dealt."""
    if order.startswith("longest"):
        return np.repeat(np.sort(per_tile, axis=1)[:, ::-1], heads, axis=1)
    one_head = {"rows": per_tile, "last rows": per_tile[:, ::-1]}.get(order)
    return np.tile(_paired(per_tile) if one_head is None else one_head, (1, heads))


def _to_the_free(sequence: NDArray[np.float64], slots: int) -> NDArray[np.float64]:
    """Cycles of the longest slot when each goes to the slot that is free first."""
    found = []
    for row in sequence.tolist():
        free = [0.0] * slots
        for cycles in row:
            heapq.heapreplace(free, free[0] + cycles)
        found.append(max(free))
    return np.array(found)


def _in_turns(sequence: NDArray[np.float64], slots: int, *, zigzag: bool) -> NDArray[np.float64]:
    """Cycles of each slot [variant, slot] when all take one after the other, every second turn backwards where ``zigzag``."""
    variants, count = sequence.shape
    turns = np.zeros((variants, -(-count // slots), slots))
    turns.reshape(variants, -1)[:, :count] = sequence
    if zigzag:
        turns[:, 1::2] = turns[:, 1::2, ::-1].copy()
    sums: NDArray[np.float64] = turns.sum(axis=1)
    return sums


def _paired(per_tile: NDArray[np.float64]) -> NDArray[np.float64]:
    """Pairs of a long and a short tile of one head; the middle one of an odd count is alone."""
    half = per_tile.shape[1] // 2
    pairs = per_tile[:, :half] + per_tile[:, ::-1][:, :half]
    return np.concatenate((pairs, per_tile[:, half : per_tile.shape[1] - half]), axis=1)


def _round_robin(per_tile: NDArray[np.float64], heads: int, slots: int) -> NDArray[np.float64]:
    """Cycles of the longest slot when tiles of ``heads`` equal heads are dealt one after the other, all of them.

    A slot's tiles step through the head ``slots`` at a time, and so come again after head / gcd(head, slots) of them:
    where the gcd is large some slots get nothing but long tiles.
    """
    turns = _turns(per_tile.shape[1], heads, slots)
    cycle = per_tile[:, turns.tile]
    # Two rounds, so that any stretch of one is a difference.
    sums = np.zeros((*cycle.shape[:2], 2 * cycle.shape[2] + 1))
    np.cumsum(np.concatenate((cycle, cycle), axis=2), axis=2, out=sums[:, :, 1:])
    whole, ends, begins = (sums[:, turns.own, at] for at in (cycle.shape[2], turns.ends, turns.begins))
    longest: NDArray[np.float64] = (turns.rounds * whole + ends - begins).max(axis=1)
    return longest


@dataclass(frozen=True, slots=True, eq=False)
class _Turns:
    """Which tiles of a head each slot comes to when they are dealt in turns."""

    #: [class, t]: the t-th tile of a slot that begins at tile ``class`` of a head.
    tile: NDArray[np.int64]
    #: By slot: its class, where in it the slot begins, how many whole rounds it makes, and where in the next it ends.
    own: NDArray[np.int64]
    begins: NDArray[np.int64]
    rounds: NDArray[np.int64]
    ends: NDArray[np.int64]


@lru_cache(maxsize=64)
def _turns(head: int, heads: int, slots: int) -> _Turns:
    """Turns of ``slots`` through ``heads`` equal heads of ``head`` tiles."""
    classes = gcd(head, slots)
    period = head // classes
    tile = (np.arange(classes)[:, None] + slots * np.arange(period)) % head
    place = np.empty(head, dtype=np.int64)
    place[tile] = np.arange(period)
    slot = np.arange(slots)
    begins = place[slot % head]
    rounds, rest = np.divmod(-(-(head * heads - slot) // slots), period)
    return _Turns(tile, slot % classes, begins, rounds, begins + rest)


def traffic(
    workload: Workload, pipeline: Pipeline, machine: Machine, tiles: HeadTiles, heads: int, pair: int, slots: int,
    order: str = "rows",
) -> tuple[float, float]:  # fmt: skip
    """(L2 bytes, HBM bytes) of the launch: K/V tiles through L2 for every query tile, HBM once where L2 holds them.

    ``order`` is `Dealing.order`: where the longest tiles of all heads go first, the K/V of all heads come up in turn.
    """
    size = workload.dtype_bytes
    row = (workload.head_dim_qk + workload.head_dim_v) * size
    queries = heads * workload.seqlen_q * (workload.head_dim_qk * size + workload.head_dim_v * 2)
    blocks = tiles.total_iterations * heads
    l2 = blocks * pipeline.keys_per_iteration * row + queries
    kv_heads = workload.batch * workload.heads_kv
    kv = kv_heads * workload.seqlen_k * row
    share = min(1.0, tiles.total_iterations * pipeline.keys_per_iteration / (tiles.count * workload.seqlen_k))
    sharers = tiles.count * workload.group_size
    if order == "longest":
        heads_alive: float = kv_heads
        resident: float = min(max(workload.group_size, slots / kv_heads), sharers)
    else:
        heads_alive, resident = max(1.0, slots / max(1, sharers)), min(slots, sharers)
    working_set = heads_alive * workload.seqlen_k * row
    # K/V that do not stay in L2 come again for every group of query tiles that runs together.
    passes = 1.0 if working_set <= _SHARED_L2 * machine["l2.bytes"] else max(1.0, share * sharers / resident)
    return l2, queries + kv * passes
