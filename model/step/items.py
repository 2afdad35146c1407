"""How a serving kernel deals a batch: row tiles, splits of a fixed number of keys, blocks of each item, in closed form.

The same arithmetic as the kernels' own (`shares` and `work_on` of a generated file): a sequence's splits follow from its lengths
and the heads alone.  An item is a split of one tile of rows of one key head; items of a sequence go heads first, then splits, late
rows before early ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tilecast.model.kernel.workload import Workload
from tilecast.model.step.batch import Batch
from tilecast.model.step.dealing import FAR, Dealing

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SequenceItems:
    """Items of one sequence and one key head, in their order."""

    tiles: int
    splits: int
    #: Keys of a split.
    split_keys: int
    #: Of each item: keys that it reads, blocks that hold them.
    keys: _Ints
    blocks: _Ints
    #: Keys of which the head reads something, each once.
    span: int


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Items of a launch in the order in which programs take them."""

    blocks: _Ints
    keys: _Ints
    #: Which items are splits of one tile (-1: not split), and how many splits each such tile has.
    tile: _Ints
    splits_of_tile: _Ints
    #: Sequences that the launch works on, their queries, and the most splits that one of them has.
    sequences: int
    queries: int
    most_splits: int
    #: Keys of all sequences and key heads that are read at least once.
    span: int
    #: Rows that each split writes and the last one reads again, summed over splits of tiles that have more than one.
    partial_rows: int
    #: Rows of all key heads, and the tiles that hold them.
    rows: int
    tiles: int

    @property
    def count(self) -> int:
        """Items in all."""
        return len(self.blocks)


def limits(heads: Workload) -> tuple[int, int]:
    """(keys before the diagonal, keys after it) that a query sees."""
    left, right = (-1, 0) if heads.mask == "causal" else heads.window or (-1, -1)
    return FAR if left < 0 else left, FAR if right < 0 else right


@lru_cache(maxsize=4096)
def sequence_items(seqlen_q: int, seqlen_k: int, group: int, left: int, right: int, dealt: Dealing) -> SequenceItems:
    """Items of one sequence and one key head, whose queries see keys from ``left`` before to ``right`` after the diagonal."""
    rows, tile_m, tile_n = seqlen_q * group, dealt.tile_m, dealt.tile_n
    tiles = -(-rows // tile_m)
    diagonal = seqlen_k - seqlen_q
    first = max(diagonal - left, 0) // tile_n * tile_n
    span = max(seqlen_k - first, 0)
    splits, keys = _splits(dealt, span) if rows <= tile_m and span > dealt.whole_keys else (1, FAR)
    index = np.arange(tiles * splits, dtype=np.int64)
    part, tile = index % splits, tiles - 1 - index // splits
    low, high = tile * tile_m // group, np.minimum((tile * tile_m + tile_m - 1) // group, seqlen_q - 1)
    if dealt.even and splits == dealt.most_splits > 1:
        blocks = -(-span // tile_n)
        starts, ends = part * blocks // splits * tile_n, (part + 1) * blocks // splits * tile_n
    else:
        starts, ends = part * keys, (part + 1) * keys
    begin = np.maximum(low + diagonal - left, 0) // tile_n * tile_n
    begin = np.maximum(begin, first + starts)
    end = np.minimum(np.minimum(high + diagonal + right + 1, seqlen_k), first + ends)
    read = np.maximum(end - begin, 0)
    some = read > 0
    reach = int(end[some].max() - begin[some].min()) if some.any() else 0
    return SequenceItems(tiles, splits, keys, read, -(-read // tile_n), reach)


def _splits(dealt: Dealing, span: int) -> tuple[int, int]:
    """(splits, keys of each) of ``span`` keys that may be split."""
    if not dealt.split_keys:
        return 1, FAR
    if dealt.even:
        splits = max(1, min(-(-span // dealt.split_keys), dealt.most_splits))
        return splits, max(dealt.split_keys, -(-span // splits))
    keys = dealt.split_keys * max(-(-span // (dealt.split_keys * dealt.most_splits)), 1)
    return max(-(-span // keys), 1), keys


def of_sequence(dealt: Dealing, heads: Workload, seqlen_q: int, seqlen_k: int) -> SequenceItems:
    """Items of one key head of a sequence."""
    return sequence_items(seqlen_q, seqlen_k, heads.group_size, *limits(heads), dealt)


def batch_items(batch: Batch, dealt: Dealing) -> Items | None:
    """Items of the sequences of ``batch`` that the kernel is for; None where there are none."""
    heads, heads_kv, group = batch.heads, batch.heads.heads_kv, batch.heads.group_size
    mine = [one for one in batch.lengths if dealt.takes(one[0] * group)]
    if not mine:
        return None
    blocks, keys, tile, counts, tiles = [], [], [], [], []
    next_tile, span, partial_rows, most = 0, 0, 0, 1
    for seqlen_q, seqlen_k in mine:
        one = of_sequence(dealt, heads, seqlen_q, seqlen_k)
        tiles.append(one.tiles)
        # Heads of a token are neighbours in memory and in the order.
        blocks.append(np.repeat(one.blocks, heads_kv))
        keys.append(np.repeat(one.keys, heads_kv))
        span += one.span * heads_kv
        most = max(most, one.splits)
        if one.splits == 1:
            tile.append(np.full(len(blocks[-1]), -1, dtype=np.int64))
            continue
        # A sequence that is split has one tile a head.
        tile.append(next_tile + np.tile(np.arange(heads_kv), one.splits))
        counts += [one.splits] * heads_kv
        next_tile += heads_kv
        partial_rows += one.splits * heads_kv * seqlen_q * group
    return Items(
        np.concatenate(blocks), np.concatenate(keys), np.concatenate(tile), np.asarray(counts, dtype=np.int64), len(mine),
        sum(q for q, _ in mine), most, span, partial_rows, heads_kv * group * sum(q for q, _ in mine), heads_kv * sum(tiles),
    )  # fmt: skip
