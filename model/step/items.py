"""How a serving kernel deals a batch: row tiles, splits of a fixed number of keys, blocks of each item, in closed form.

The same arithmetic as the kernels' own (`shares` and `work_on` of a generated file): a sequence's splits follow from its lengths
and the heads alone.  An item is a split of one tile of rows of one key head; items of a sequence go heads first, then splits, late
rows before early ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tilecast.model.chip.tiles import blocks_seen
from tilecast.model.kernel.workload import Workload
from tilecast.model.step.batch import Batch
from tilecast.model.step.launches.dealing import Dealing, Parting, keys_seen, limits

_Ints = NDArray[np.int64]
#: Rows of a warpgroup.
_WARPGROUP_ROWS = 64


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
    #: Its tile, in the order of items, and how often it merges what it has with what it had.
    tile: _Ints
    joins: _Ints
    #: Blocks of each item that cross an edge of the mask, as the warpgroup of its last rows sees them.
    masked: _Ints
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
    #: How often an item merges what it has with what it had; None: no item does.
    joins: _Ints | None = None
    #: Pieces of tiles of an item that is a run of them; None: an item is of one tile.
    pieces: _Ints | None = None
    #: Splits of such an item that are done apart and join later, and those of others that have to do so before; and the programs that do so,
    #: one after the other.
    apart: _Ints | None = None
    joining: _Ints | None = None
    #: Blocks of each item that cross an edge of the mask; None: none does.
    masked: _Ints | None = None

    @property
    def count(self) -> int:
        """Items in all."""
        return len(self.blocks)


@lru_cache(maxsize=4096)
def sequence_items(
    seqlen_q: int, seqlen_k: int, group: int, left: int, right: int, dealt: Dealing, heads_kv: int = 1, run: int = 1
) -> SequenceItems:
    """Items of one sequence and one key head, whose queries see keys from ``left`` before to ``right`` after the diagonal, each of ``run`` splits."""
    rows, tile_m, tile_n = seqlen_q * group, dealt.tile_m, dealt.tile_n
    tiles = -(-rows // tile_m)
    diagonal = seqlen_k - seqlen_q
    first, span = keys_seen(seqlen_q, seqlen_k, left, tile_n)
    if dealt.parting is not None:
        splits, each = _parts(dealt.parting, tiles * heads_kv, span, tile_n)
        keys = each * tile_n
    else:
        splits, keys = dealt.splits_of(rows, span)
    index = np.arange(tiles * splits, dtype=np.int64)
    place, part = (index % tiles, index // tiles) if dealt.tiles_first else (index // splits, index % splits)
    tile = tiles - 1 - place
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
    # The last warpgroup of a tile that has rows begins at a query of its own, and sees blocks of its own.
    there = np.minimum(rows - tile * tile_m, tile_m)
    last = (tile * tile_m + (there - 1) // _WARPGROUP_ROWS * _WARPGROUP_ROWS) // group
    least, _, *whole = blocks_seen(last, high, diagonal, seqlen_k, left, right, tile_n)
    own, after = np.maximum(begin // tile_n, least), -(-end // tile_n)
    masked = np.maximum(after - own, 0)
    masked -= np.clip(np.minimum(whole[1], after) - np.maximum(whole[0], own), 0, masked)
    joins = np.zeros(len(index), dtype=np.int64)
    if dealt.teams:
        # The first of a tile's splits that sees a key merges with nothing.
        seen = np.cumsum(some) - some
        joins = (some & (seen > seen[place * splits])).astype(np.int64)
    elif dealt.chained:
        joins = np.maximum(np.bincount(place, some, tiles).astype(np.int64) - 1, 0)
        read, masked = (np.bincount(place, x, tiles).astype(np.int64) for x in (read, masked))
        place, splits = np.arange(tiles), 1
    elif dealt.parting is not None and some.any():
        # A tile has no item of a part of whose keys it sees none.
        read, place, joins, masked = read[some], place[some], joins[some], masked[some]
    elif run > 1:
        # What a program adds up between splits, its load warp copies through.
        runs = -(-splits // run)
        read, masked = (
            np.bincount(place * runs + part // run, x, tiles * runs).astype(np.int64) for x in (read, masked)
        )
        joins = np.bincount(place * runs + part // run, minlength=tiles * runs) - 1
        place = np.repeat(place[::splits], runs)
    return SequenceItems(tiles, splits, keys, read, -(-read // tile_n), place, joins, masked, reach)


def _parts(parting: Parting, tiles: int, span: int, tile_n: int) -> tuple[int, int]:
    """(parts of ``span`` keys of a sequence of so many tiles, blocks of a part)."""
    blocks = max(-(-span // tile_n), 1)
    each = parting.blocks(tiles, blocks, tile_n)
    return -(-blocks // each), each


def _as_dealt(mine: list[tuple[int, int]], dealt: Dealing, heads: Workload) -> list[Dealing]:
    """How each sequence is dealt: all alike, but where parts of tiles that are far longer than others are dealt out."""
    parting = dealt.parting
    if parting is None or not dealt.longer:
        return [dealt] * len(mine)
    left, heads_kv, found = limits(heads)[0], heads.heads_kv, []
    for seqlen_q, seqlen_k in mine:
        tiles = -(-seqlen_q * heads.group_size // dealt.tile_m) * heads_kv
        parts, each = _parts(parting, tiles, keys_seen(seqlen_q, seqlen_k, left, dealt.tile_n)[1], dealt.tile_n)
        found.append((tiles, parts, parts * each))
    most = dealt.longer * sum(tiles * chain for tiles, _, chain in found)
    places, made = 0, []
    for tiles, parts, chain in found:
        apart = chain > most and parts > 1
        places += tiles * parts * apart
        made.append(replace(dealt, chained=not (apart and places <= parting.some), longer=0.0))
    return made


def of_sequence(dealt: Dealing, heads: Workload, seqlen_q: int, seqlen_k: int, run: int = 1) -> SequenceItems:
    """Items of one key head of a sequence, or of one part of the query heads that share it, each of ``run`` splits."""
    parts = dealt.head_parts
    return sequence_items(
        seqlen_q, seqlen_k, heads.group_size // parts, *limits(heads), dealt, heads.heads_kv * parts, run
    )


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """What programs have that share a launch's splits in runs."""

    #: Sums of what units have.
    sums: list[_Ints]
    pieces: _Ints
    apart: _Ints
    joining: _Ints


def in_runs(units: tuple[_Ints, ...], owners: _Ints, teams: int, heads_kv: int, most_apart: int, together: int) -> Runs:
    """What each program has where ``teams`` of each head share a launch's splits in their order, of runs of up to ``most_apart`` some apart,
    in groups of ``together``.

    Units have a number for each split and head, heads first; ``owners`` say of which tile a split is.
    """
    share, more = divmod(len(owners), teams)
    number = np.arange(teams + 1)
    bounds = share * number + np.minimum(number, more)
    first, last = owners[bounds[:-1]], owners[bounds[1:] - 1]
    sums = [np.repeat(np.add.reduceat(x[::heads_kv], bounds[:-1]), heads_kv) for x in units]
    # A run that begins inside a tile goes on from what the program before has of it, which is not done where runs are shorter than
    # tiles: then those splits are done apart, and join when the program before, whose own may have been apart too, is done.
    splits = np.bincount(owners)
    starts = np.cumsum(splits) - splits
    begin, of_tile = bounds[:-1] - starts[first], splits[first]
    end = np.minimum(bounds[1:] - starts[first], of_tile)
    several = (begin > 0) & (share + 1 < of_tile) & (share <= most_apart)
    # Those of a group that began before join it alone; groups that end in the run join those before, but for a tile's first one, and come
    # back before that where all of them are in the run.
    alone = np.minimum(-begin % together, end - begin)
    ended = end // together - begin // together + ((end == of_tile) & (end % together > 0))
    begun = (alone > 0) & (ended > 0)
    groups = 2 * ended - begun - ((begin < together) & (ended > 0))
    # Runs no shorter than a group are done by groups, the last one first: those of a group that began before add to it then, and what is left
    # is that the groups before come back, and each one that ends in the run joins them.
    if share >= together:
        several |= (begin == 0) & (end < of_tile) & (share + 1 < of_tile) & (share <= most_apart)
        joins = ended - ((begin < together) & (ended > 0))
        alone, groups = np.zeros_like(begin), joins + ((joins > 0) | (end == of_tile))
    # A program joins its own splits to a group as soon as the one before has done its own of that, groups when that has joined its groups.
    apart, joining, joined = (np.zeros_like(begin) for _ in range(3))
    for team in np.flatnonzero(several):
        follows = team > 0 and several[team - 1] and first[team] == first[team - 1]
        inside = follows and alone[team - 1] == end[team - 1] - begin[team - 1] and not ended[team - 1]
        joined[team] = alone[team] + (joined[team - 1] if inside else 0)
        apart[team] = max(joined[team], apart[team - 1] if follows else 0) + groups[team]
        joining[team] = 1 + (joining[team - 1] if follows else 0)
    return Runs(sums, *(np.repeat(x, heads_kv) for x in (last - first + 1, apart, joining)))


def batch_items(batch: Batch, dealt: Dealing) -> Items | None:
    """Items of the sequences of ``batch`` that the kernel is for; None where there are none."""
    heads, group = batch.heads, batch.heads.group_size
    heads_kv = heads.heads_kv * dealt.head_parts
    mine = [one for one in batch.lengths if dealt.takes(one[0] * group)]
    if not mine:
        return None
    blocks, keys, tile, counts, joins, owners, masked = [], [], [], [], [], [], []
    tiles, next_tile, span, partial_rows, most, begun = 0, 0, 0, 0, 1, 0
    for (seqlen_q, seqlen_k), alone in zip(mine, _as_dealt(mine, dealt, heads), strict=True):
        run = dealt.own_run
        if dealt.runs is not None:
            shared = dealt.shared(seqlen_q, seqlen_k, heads)
            run = dealt.runs.run(shared, begun)
            begun += shared.tiles * shared.blocks
        one = of_sequence(alone, heads, seqlen_q, seqlen_k, run)
        if dealt.teams:
            owners.append(tiles + one.tile)
        tiles += one.tiles
        # Heads of a token are neighbours in memory and in the order.
        blocks.append(np.repeat(one.blocks, heads_kv))
        keys.append(np.repeat(one.keys, heads_kv))
        joins.append(np.repeat(one.joins, heads_kv))
        masked.append(np.repeat(one.masked, heads_kv))
        span += one.span * heads.heads_kv
        most = max(most, one.splits)
        items = np.bincount(one.tile, minlength=one.tiles) if not dealt.teams else np.ones(one.tiles, dtype=np.int64)
        several = items > 1
        number = next_tile + (np.cumsum(several) - 1) * heads_kv
        heads_of = np.tile(np.arange(heads_kv), len(one.tile))
        tile.append(
            np.where(np.repeat(several[one.tile], heads_kv), np.repeat(number[one.tile], heads_kv) + heads_of, -1)
        )
        counts += np.repeat(items[several], heads_kv).tolist()
        next_tile += int(several.sum()) * heads_kv
        # Whole tiles are left of parted keys, else the rows that are there.
        left = np.full(one.tiles, dealt.tile_m)
        if dealt.parting is None:
            left[0] = seqlen_q * group // dealt.head_parts - (one.tiles - 1) * dealt.tile_m
        partial_rows += int((items * left)[several].sum()) * heads_kv
    runs = None
    if dealt.teams:
        units = tuple(np.concatenate(x) for x in (blocks, keys, joins, masked))
        runs = in_runs(units, np.concatenate(owners), dealt.teams, heads_kv, dealt.most_apart, dealt.together)
        blocks, keys, joins, masked = ([x] for x in runs.sums)
        tile = [np.full(len(runs.pieces), -1)]
    found = Items(
        np.concatenate(blocks), np.concatenate(keys), np.concatenate(tile), np.asarray(counts, dtype=np.int64), len(mine),
        sum(q for q, _ in mine), most, span, partial_rows, heads.heads_q * sum(q for q, _ in mine), heads_kv * tiles,
        np.concatenate(joins) if dealt.chained or dealt.runs or dealt.own_run > 1 else None, *((runs.pieces, runs.apart, runs.joining) if runs else ()),
    )  # fmt: skip
    return replace(found, masked=np.concatenate(masked))
