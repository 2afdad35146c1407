"""What a launch of a serving kernel does with sequences: which it takes, how it splits them, how many programs there are."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.kernel.variants.hopper.runs import Runs, Shared
from tilecast.model.kernel.workload import Workload
from tilecast.model.step.costs.around import Counts

#: More rows and keys than a sequence has.
FAR = 1 << 29


@dataclass(frozen=True, slots=True)
class Parting:
    """Into how many parts the keys of a sequence are divided: more than one where its tiles leave SMs idle; depends only on its own lengths and heads."""

    #: SMs that the parts of a sequence are to fill, most parts of a sequence, fewest keys of a part.
    sms: int
    most: int
    keys: int
    #: Most parts of tiles that a launch has memory for, and most where only the parts of very long tiles go to several programs.
    room: int
    some: int
    #: Slots in memory of a program for intermediate results of a tile: none where these stay in registers.
    chained: int
    #: Keys up to which a sequence is not parted, and for how many a longer one has a part beside so many small ones; 0: any part may be small.
    whole: int = 0
    small: int = 0

    def wanted(self, tiles: int, keys: int) -> int:
        """Parts that the keys of a sequence of ``tiles`` tiles are divided into: those that fill the SMs once, or twice where that leaves fewer of them
        idle and there are enough keys."""
        once, twice, most = self.sms // tiles, 2 * self.sms // tiles, min(keys // self.keys, self.most)
        if self.whole:
            most = min(most, self.small + keys // self.whole) if keys > self.whole else 1
        return max(1, min(twice if 2 * once < twice <= most else once, most))

    def blocks(self, tiles: int, blocks: int, tile_n: int) -> int:
        """Blocks of a part of ``blocks`` blocks of keys."""
        return -(-blocks // self.wanted(tiles, blocks * tile_n))


@dataclass(frozen=True, slots=True)
class Dealing:
    """How a launch assigns sequences to tiles, splits and programs, for heads of one model."""

    #: Rows of the sequences that it takes: queries times query heads that share a key head.
    least_rows: int
    most_rows: int
    #: Rows of a tile, keys of a block.
    tile_m: int
    tile_n: int
    #: Keys of a split, of sequences of one tile and more than ``whole_keys`` keys; 0: none is split.
    split_keys: int
    whole_keys: int
    most_splits: int
    #: Whether a sequence of ``most_splits`` splits has even shares of its blocks; else splits of a multiple of ``split_keys``.
    even: bool
    #: Programs that an SM holds, and how many times as many a launch may have; 1: programs are persistent and take all items.
    programs: int
    waves: int
    #: Warps of a program that merge.
    warps: int
    #: Whether a warpgroup of its own merges, beside the loop.
    merges_beside: bool
    counts: Counts
    #: Most rows of a sequence that is split; 0: those of a tile.
    split_rows: int = 0
    #: Whether tiles of a split are neighbours among items; else splits of a tile are.
    tiles_first: bool = False
    #: Which sequences' keys are parted, where the kernel does that.
    parting: Parting | None = None
    #: Whether one program processes the splits of a tile, or the parts of its keys, one after the other.
    chained: bool = False
    #: Tiles with more than this share of all blocks have their parts assigned to several programs nevertheless; 0: none.
    longer: float = 0.0
    #: Programs of a part of the query heads that then share all splits in runs, which begin and end inside tiles; 0: each takes whole tiles.
    teams: int = 0
    #: Splits of a run of theirs up to which it may have some apart.
    most_apart: int = 0
    #: Splits of a group, which join as one where all of them are apart.
    together: int = 1
    #: Whether the next launch may begin beside it, and whether it may begin beside the one before.
    beside: bool = False
    follows: bool = False
    #: Programs that take items, where the launch for more rows has the other SMs; 0: all.
    some: int = 0
    #: Splits of a group of them, and groups of a group of groups, which one program may take in; whether runs shrink where rounds are not nearly full, and how a launch deals them out.
    fold: int = 0
    shrinks: bool = True
    runs: Runs | None = None
    #: Queries of the longest sequence, as far as they fit a tile, and rows up to which a launch keeps no more of its tiles; 0: it keeps all.
    queries: int = 1
    half_rows: int = 0
    #: Whether each split that a sequence may have has a program of its own, and rounds of programs up to which it has; or each run of so many
    #: splits, and whether that may be.
    direct: bool = False
    rounds: int = 1
    own_run: int = 1
    own_runs: bool = False
    #: Most parts of tiles that a launch counts on, and whether a launch of its own merges them.
    places: int = 0
    joined: bool = False
    #: Parts of the query heads that share a key head: each has tiles of its own and reads the same keys.
    head_parts: int = 1
    #: Rows that its tiles hold where they are few and keys are the M of its products (0: rows are), and whether a warpgroup of its own does the softmax.
    turned: int = 0
    apart: bool = False

    def takes(self, rows: int) -> bool:
        """Whether the launch is for sequences of so many rows."""
        return self.least_rows <= rows <= self.most_rows

    def splits_of(self, rows: int, span: int) -> tuple[int, int]:
        """(splits, keys of each) of a sequence of so many rows, which see ``span`` keys."""
        if not self.split_keys or rows > (self.split_rows or self.tile_m) or span <= self.whole_keys:
            return 1, FAR
        if self.even:
            splits = max(1, min(-(-span // self.split_keys), self.most_splits))
            return splits, max(self.split_keys, -(-span // splits))
        keys = self.split_keys * max(-(-span // (self.split_keys * self.most_splits)), 1)
        return max(-(-span // keys), 1), keys

    def shared(self, seqlen_q: int, seqlen_k: int, heads: Workload) -> Shared:
        """What a sequence of a model's ``heads`` has, for a key head."""
        rows, span = seqlen_q * heads.group_size, keys_seen(seqlen_q, seqlen_k, limits(heads)[0], self.tile_n)[1]
        splits, keys = self.splits_of(rows, span)
        blocks = -(-span // self.tile_n)
        each = -(-blocks // splits) if splits in (1, self.most_splits) else keys // self.tile_n
        return Shared(-(-rows // self.tile_m), splits, each, blocks)


def limits(heads: Workload) -> tuple[int, int]:
    """(keys before the diagonal, keys after it) that a query sees."""
    left, right = heads.limits
    return FAR if left < 0 else left, FAR if right < 0 else right


def keys_seen(seqlen_q: int, seqlen_k: int, left: int, tile_n: int) -> tuple[int, int]:
    """(first key, keys from it on) of a sequence, of which its first query sees those from ``left`` before the diagonal."""
    first = max(seqlen_k - seqlen_q - left, 0) // tile_n * tile_n
    return first, max(seqlen_k - first, 0)
