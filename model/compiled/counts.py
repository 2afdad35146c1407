"""How many blocks each tile of a workload takes in, by warpgroup, and in which order programs do the tiles.

The formulas are those of the generated kernels (codegen/templates/hopper_ws.py.j2: key_blocks, work_tile; triton.py.j2).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from tilecast.model.compiled.program import TileCounts
from tilecast.model.kernel.variants.fa3 import ends_in_halves, in_words
from tilecast.model.kernel.workload import Workload


def key_blocks(work: Workload, row: int, rows: int, keys: int) -> tuple[int, int, int, int]:
    """(first, end, first whole, end whole) block that rows [row, row + rows) see; ends are exclusive."""
    left, right = work.limits
    offset = work.seqlen_k - work.seqlen_q
    end, whole_end = work.seqlen_k, work.seqlen_k // keys
    first = first_whole = 0
    if right >= 0:
        end = max(min(row + rows + offset + right, work.seqlen_k), 1)
        whole_end = max(min(row + 1 + offset + right, work.seqlen_k), 0) // keys
    if left >= 0:
        first = min(max(row + offset - left, 0) // keys, -(-end // keys) - 1)
        first_whole = -(-max(row + rows - 1 + offset - left, 0) // keys)
    return first, -(-end // keys), first_whole, whole_end


def in_halves(work: Workload, variant: Any) -> bool:
    """Whether a Hopper kernel counts blocks by halves (`fa3.ends_in_halves`)."""
    promoted = work.dtype == "fp8" and variant.rescale == "always"
    return ends_in_halves(
        work.mask, in_words(promoted, variant.overlap, variant.warpgroups), variant.warpgroups, variant.tile_n
    )


@lru_cache(maxsize=65536)
def hopper_counts(
    work: Workload, block: int, warpgroups: int, keys: int, halves: bool = False
) -> tuple[TileCounts, ...]:
    """What each warpgroup does for query block ``block`` of 64 x warpgroups rows; with ``halves`` (`in_halves`) the loop of edges is
    that of half blocks."""
    tile = 64 * warpgroups
    if halves:
        count = key_blocks(work, block * tile, tile, keys // 2)[1]
        half, whole = count % 2 * min(count // 2, 1), max(count // 2, 1)
        return (TileCounts(0, half, whole - 1, 0, 0),) * warpgroups
    cta_first, cta_end, _, _ = key_blocks(work, block * tile, tile, keys)
    out = []
    for w in range(warpgroups):
        first, end, whole_first, whole_end = key_blocks(work, block * tile + 64 * w, 64, keys)
        edge = max(min(end - 1, whole_end), first)
        inner = max(min(edge, whole_first), first)
        out.append(TileCounts(cta_end - end, end - 1 - edge, edge - inner, inner - first, first - cta_first))
    return tuple(out)


@lru_cache(maxsize=65536)
def triton_counts(work: Workload, block: int, rows: int, keys: int) -> TileCounts:
    """What a CTA does for query block ``block``."""
    first, end, whole_first, whole_end = key_blocks(work, block * rows, rows, keys)
    whole_end = max(min(whole_end, end), first)
    whole_first = min(max(whole_first, first), end)
    if whole_first >= whole_end:
        # No whole block: the loops over edges share what there is.
        return TileCounts(0, end - max(first, min(whole_first, end)), 0, max(0, min(whole_first, end) - first), 0)
    return TileCounts(0, end - whole_end, whole_end - whole_first, whole_first - first, 0)


#: Family -> (workload, block of query rows, variant, warpgroups) -> what each warpgroup of a CTA does for the block.
BLOCK_COUNTS: dict[str, Callable[[Workload, int, Any, int], tuple[TileCounts, ...]]] = {
    "fa3": lambda work, block, variant, groups: hopper_counts(
        work, block, groups, variant.tile_n, in_halves(work, variant)
    ),
    "fa2": lambda work, block, variant, groups: (triton_counts(work, block, variant.tile_m, variant.tile_n),) * groups,
}

Tile = tuple[int, int]


def program_tiles(
    scheduler: str, blocks: int, heads: int, programs: int, rounds: int | None = None
) -> Iterator[list[Tile]]:
    """For each persistent program the (query block, head) of its tiles, in order.

    Of paired ones ``rounds`` is how many pairs each program gets where those are not all: then come the tiles that are left, the longest
    first.
    """
    total = blocks * heads
    for pid in range(programs):
        tiles: list[Tile] = []
        if scheduler == "persistent":
            tiles = [(tile % blocks, tile // blocks) for tile in range(pid, total, programs)]
        elif scheduler == "longest-first":
            for turn in range(-(-total // programs)):
                tile = turn * programs + (pid if turn % 2 == 0 else programs - 1 - pid)
                if tile < total:
                    tiles.append((blocks - 1 - tile // heads, tile % heads))
        elif scheduler == "paired" and total <= programs:
            tiles = [(blocks - 1 - pid % blocks, pid // blocks)] if pid < total else []
        elif scheduler == "paired":
            pairs = (blocks + 1) // 2
            for trip in range(-(-pairs * heads // programs) if rounds is None else rounds):
                pair = trip * programs + (pid if trip % 2 == 0 else programs - 1 - pid)
                if pair // pairs < heads:
                    short = pair % pairs
                    tiles.append((blocks - 1 - short, pair // pairs))
                    if short != blocks - 1 - short:
                        tiles.append((short, pair // pairs))
            if rounds is not None:
                tiles += _left_by_pairs(pid, blocks, heads, programs, rounds)
        else:
            raise ValueError(f"a persistent scheduler is persistent, longest-first or paired, got '{scheduler}'")
        yield tiles


def _left_by_pairs(pid: int, blocks: int, heads: int, programs: int, rounds: int) -> Iterator[Tile]:
    """What program ``pid`` gets of the tiles that so many ``rounds`` of pairs leave, those of all heads that are left in turns."""
    first, gone = divmod(rounds * programs, (blocks + 1) // 2)
    for turn in range(-(-blocks * (heads - first) // programs)):
        place = turn * programs + (pid if turn % 2 == 0 else programs - 1 - pid)
        short, head = place // (heads - first), first + place % (heads - first)
        if short < blocks and (head > first or min(short, blocks - 1 - short) >= gone):
            yield blocks - 1 - short, head


def greedy_makespan(order: Iterator[int], cost: Callable[[int], float], slots: int) -> float:
    """Time until the last of the tiles is done when each goes to the slot that is free first, in launch order."""
    free = [0.0] * slots
    heapq.heapify(free)
    for block in order:
        heapq.heapreplace(free, free[0] + cost(block))
    return max(free)
