"""One launch of a backward pass on one machine: tiles onto SMs, bytes, cycles; the clock is whose launches they are.

Tiles of programs that own keys come from the problem seen from the keys (`seen_from_keys`): what is right of the diagonal for a
query is left of it for a key.  Heads whose blocks programs take by turns are dealt that way; the rest is `chip.launch`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tilecast.model.chip.launch import (
    ChipRun,
    edge_memory_cycles,
    edge_memory_rates,
    masked_extra,
    tile_cycles,
    tile_edges,
)
from tilecast.model.chip.tiles import HeadTiles, head_tiles
from tilecast.model.compiled.roles.loop_code import LoopCode
from tilecast.model.compiled.units.fetch import beyond_first_cache, far_cycles, near_cycles
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.backward.kernels import LoopKernel, RowKernel, seen_from_keys
from tilecast.model.sm.simulate import SmTrace, steady_state
from tilecast.model.training.turns.play import play

#: Tiles that are played; more are estimated.
_MOST_PLAYED = 1 << 15
#: Share of L2 that data read by every SM can use (`chip.launch`).
_SHARED_L2 = 0.5


@dataclass(frozen=True, slots=True)
class LoopRun:
    """A launch with matrix products, in cycles."""

    kernel: LoopKernel
    chip: ChipRun
    trace: SmTrace
    #: Cycles before the first bytes are asked for and behind the last, where its instructions are counted.
    apart_cycles: float = 0.0

    def cycles(self) -> float:
        """Of the SM that is done last, or of L2."""
        return max(self.chip.makespan_cycles, self.chip.l2_floor_cycles)

    def memory_seconds(self, ghz: float) -> float:
        """Until the last byte has come and gone, at that clock of the SMs."""
        return self.chip.hbm_seconds + self.apart_cycles / (ghz * 1e9)


def tiles_of(kernel: LoopKernel, workload: Workload) -> tuple[HeadTiles, int]:
    """Tiles of one head of those that own rows, with their steps, and how many such heads there are."""
    w, p = kernel.problem or workload, kernel.pipeline
    rows = p.rows_per_cta * p.cta_group
    if kernel.owns == "queries":
        return head_tiles(w, rows, p.keys_per_iteration), w.batch * w.heads_q
    found = head_tiles(seen_from_keys(w), rows, p.keys_per_iteration)
    group, parts = w.group_size, kernel.parts
    if group > parts:
        # Of parts of unlike size the mean.
        found = replace(
            found, iterations=(found.iterations * group + parts // 2) // parts,
            masked=(found.masked * group + parts // 2) // parts, inside=(found.inside * group + parts // 2) // parts,
        )  # fmt: skip
    return found, w.batch * w.heads_kv * kernel.parts


@lru_cache(maxsize=1 << 12)
def run_loop(kernel: LoopKernel, workload: Workload, machine: Machine, code: LoopCode | None = None) -> LoopRun:
    """Play one launch; with ``code`` its CTAs take what the machine code does, and wait for each other and memory as before."""
    p = kernel.pipeline
    tiles, heads = tiles_of(kernel, workload)
    trace = steady_state(p)
    masked_trace = steady_state(p, 2) if tiles.masked.any() else trace
    start, finish = tile_edges(p, machine)
    pace, extra = trace.ii_cycles, masked_extra(trace, masked_trace)
    if code is None:
        loop = tile_cycles(trace, masked_trace, tiles)
    else:
        loop = code.tile_cycles(tiles)
        pace, extra = code.cycles, code.masked_extra
        # The code's first loads come from L2; what goes before its first instruction is the launch's.
        start, finish = start - p.prologue_cycles + machine["launch.cta_start_cycles"], code.ends
    ahead, inside_loop, behind = kernel.instructions
    count = tiles.count * heads
    slots = int(machine["chip.sm_count"]) // p.cta_group * p.ctas_per_sm
    # Programs of one SM fetch their code each for itself where the first cache does not hold it.
    several = 1.0
    if beyond_first_cache(sum(kernel.instructions), machine):
        several = min(p.ctas_per_sm, max(1.0, count * p.ctas_per_sm / slots))
    start, finish = (edge + several * each * near_cycles(machine) for edge, each in ((start, ahead), (finish, behind)))
    # Blocks that see nothing still write zeros.
    between, exposed = start + finish, count
    if kernel.turnaround_cycles is not None:
        # Of a program that stays the first tile is fetched and the last stored with nothing to hide it under.
        between, exposed = kernel.turnaround_cycles, min(count, slots)
    per_tile = loop + between
    edges = float(edge_memory_cycles(edge_memory_rates(p, machine), exposed, slots, False, p.tiles_overlap))
    edges += start + finish - between
    # The first program on an SM has its code from far, that of the loop while it goes round for the first time.
    far = far_cycles(machine)
    first = (ahead + behind) * (far - near_cycles(machine)) + max(0.0, inside_loop * far - pace)
    edges += first
    makespan, waited = _makespan(per_tile, tiles, heads, slots, kernel)
    makespan += edges
    share = tiles.weight * heads / slots
    started = edges * min(1.0, count / slots) + waited
    mean = float(per_tile.sum()) * share + started
    inside = float(loop.sum()) * share
    steady = min(inside, tiles.total_iterations * heads * pace / slots)
    crossing = float(np.minimum(tiles.masked, tiles.iterations).sum()) * share
    mask = min(inside - steady, crossing * extra)
    l2, hbm, floor = _traffic(kernel, workload, machine, tiles, heads, slots)
    chip = ChipRun(
        makespan_cycles=max(makespan, mean), mean_cycles=mean, loop_cycles=steady, mask_cycles=mask,
        fill_cycles=inside - steady - mask, edge_cycles=mean - inside, tiles=count, slots=slots,
        iterations=tiles.total_iterations * heads, l2_bytes=l2, hbm_bytes=hbm, l2_floor_cycles=floor,
        hbm_seconds=hbm / (machine["hbm.tbps_achieved"] * 1e12),
    )  # fmt: skip
    return LoopRun(kernel, chip, trace, start + ahead * (far - near_cycles(machine)) + finish if ahead else 0.0)


def _makespan(
    per_tile: NDArray[np.float64], tiles: HeadTiles, heads: int, slots: int, kernel: LoopKernel
) -> tuple[float, float]:
    """Cycles of the slot that is done last when the next tile goes to who is free first, and those that slots wait in the mean.

    A program that adds to a block of its head's sum waits until the one before it, of the keys before, has.  All walk from the last
    query of a head to the first at one pace, so a program that comes too early waits at the head's first block, and is a turn behind
    from there on.  Of the query heads that share keys one comes after the other: who sees fewer queries waits for who sees more
    at each of them.
    """
    count, turn = tiles.count * heads, kernel.turn_cycles
    low, high = float(per_tile.min()), float(per_tile.max())
    uniform = high - low < 1e-9 * max(1.0, high)
    if not turn and (count <= slots or uniform):
        return -(-count // slots) * high, 0.0
    order = per_tile[::-1] if kernel.last_first else per_tile
    abreast = max(1, min(heads, kernel.heads_abreast))
    if tiles.weight > 1 or count > _MOST_PLAYED:
        queue = turn * (min(tiles.count, -(-slots // abreast)) - 1)
        share = float(per_tile.sum()) * tiles.weight * heads / slots
        return max(high, share + 0.5 * float(order[-1])) + queue, queue
    makespan, waited = play(order.tolist(), heads, abreast, kernel.query_heads, turn, slots)
    return makespan, waited / slots


def _traffic(
    kernel: LoopKernel, workload: Workload, machine: Machine, tiles: HeadTiles, heads: int, slots: int
) -> tuple[float, float, float]:
    """(L2 bytes, HBM bytes, cycles that L2 needs at least) of a launch.

    Rows that programs walk over come from memory once for each group of programs that run together, unless L2 holds those of
    all heads at work; so do the sums, which are read and written.
    """
    w, p = kernel.problem or workload, kernel.pipeline
    group = w.group_size
    steps = tiles.total_iterations * heads
    edges = tiles.count * heads * p.cta_group * (p.edge_read_bytes + p.edge_write_bytes)
    once = tiles.count * heads * p.cta_group * (p.edge_read_bytes / kernel.parts + p.edge_write_bytes)
    added = steps * kernel.added_bytes
    l2 = steps * kernel.step_bytes + edges + added
    walked = w.seqlen_q * group / kernel.parts if kernel.owns == "keys" else w.seqlen_k
    rows = float(walked * heads if kernel.owns == "keys" else walked * w.batch * w.heads_kv)
    sharers = tiles.count * (1 if kernel.owns == "keys" else group)
    alive = max(min(float(heads), float(kernel.heads_abreast)), slots / max(1, tiles.count))
    if kernel.owns == "queries":
        alive = max(1.0, alive / group)
    resident = max(1.0, min(slots / alive, sharers))
    seen = min(1.0, tiles.total_iterations * p.keys_per_iteration / (tiles.count * max(1, walked)))
    held = alive * walked * (kernel.row_bytes + kernel.sum_row_bytes)
    passes = 1.0 if held <= _SHARED_L2 * machine["l2.bytes"] else max(1.0, seen * sharers / resident)
    hbm = once + rows * (kernel.row_bytes + 2 * kernel.sum_row_bytes) * passes
    port = machine["l2.bytes_per_clk_per_sm"] * machine["chip.sm_count"]
    floor = (l2 - added) / port
    if added:
        tbps = machine.get("l2.reduce_tbps", machine.get("l2.store_tbps", machine["hbm.tbps_achieved"]))
        floor += added / tbps * machine.rated_mhz / 1e6
    return l2, hbm, floor


def row_seconds(kernel: RowKernel, machine: Machine) -> float:
    """Seconds of a kernel that passes over its rows once: their bytes, after the first of them have come, which beside another they have.

    Where its instructions are counted: no sooner than a program has run them and waited.
    """
    hz = machine["chip.clock_max_mhz"] * 1e6
    start = machine["launch.cta_start_cycles"] + machine["tma.latency_hbm_cycles"]
    moved = (kernel.read_bytes + kernel.write_bytes) / (machine["hbm.tbps_achieved"] * 1e12)
    later = kernel.again * near_cycles(machine) + kernel.waits * machine.get("hbm.latency_cycles", 0.0)
    code = kernel.instructions * far_cycles(machine)
    return (start * (not kernel.beside) + code) / hz + max(moved, later / hz)
