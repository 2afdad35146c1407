"""Runs of splits that one program takes in one after the other, where programs take items until there are none.

The same arithmetic as the kernels' own (`run_of` and `deal_of` of codegen/templates/hopper_serving_runs.py.j2).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from tilecast.model.kernel.variants.hopper.serving import ROWS

#: Beside a launch for sequences of more than so many rows: rows of a tile there, and keys in the time for which it does what is around its loop.
FEW_ROWS, OTHER_ROWS, OTHER_AROUND = ROWS, 128, 1024
#: What that launch takes for a block's keys of a tile, over what a program here takes for them, by head_dim; elsewhere as at 128.
#: These four are of launches timed alone and beside each other on an H200 (data/measured/h200_mixed_programs.csv).
OTHER_PACE = {64: 2.1, 128: 1.1, 256: 1.2}
#: What items take less where all pairs of SMs have two programs, at the rate at which it begins, and the least share it comes to.
SECOND_GAINS, LEAST_SHARE = 0.42, 0.75
#: What runs of groups of splits take longer than whole ones.
SHORT_RUNS = 1.125
#: What runs that shrink take longer than whole ones, where rounds of these are not nearly full: 32 sequences of 8192 keys took 390 us by 70
#: programs and 320 by 88, of 4096 keys 203 by 82 and 173 by 66 (data/measured/h200_mixed_pairs.csv).
SHRINKING = 1.2
#: Runs of several splits have a program of their own at so many columns, from so many key heads on and up to so many bytes of keys and values that
#: sequences may have, and where they have more than so many fourths of all places: as timed (data/measured/h200_decode_own_runs.csv).
OWN_DIM, OWN_HEADS, OWN_BYTES, OWN_PLACES = 128, 8, 300_000_000, 3
#: Programs of which the one that ends within so much of the first to end is taken, if it has fewer.
NEARLY = 1.02
#: Laps of the other launch's tiles that are told apart: of more the last one is no matter.
MOST_LAPS = 100_000.0


@dataclass(frozen=True, slots=True)
class Shared:
    """What one sequence has, for a key head."""

    tiles: int
    splits: int
    #: Blocks of its largest split, and of all of them.
    each: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Runs:
    """What a launch has to deal out."""

    sms: int
    heads_kv: int
    #: Splits of a group, and groups of a group of them.
    fold: int
    #: Blocks of all sequences, for a key head.
    blocks: int
    #: Whether runs shrink towards the end, where a fair share is one of what is still to be taken in.
    shrinks: bool = False

    def run(self, one: Shared, begun: int = 0) -> int:
        """Splits of a sequence that a program takes in one after the other, after ``begun`` blocks of sequences before it: as many as have
        no more than a fair share, and a sixteenth, of the blocks."""
        still = self.blocks - begun if self.shrinks else self.blocks
        share = still * self.heads_kv * 17
        fitting = [run for run in (self.fold, self.fold**2) if min(one.splits, run) * one.each * 16 * self.sms <= share]
        return max(fitting, default=1)


def runs_of(sequences: Iterable[Shared], sms: int, heads_kv: int, fold: int, shrinks: bool = True) -> Runs:
    """How a launch for ``sequences`` is dealt: in runs as large as the first one where rounds of the largest item are nearly full, otherwise
    in runs that shrink, or in none."""
    all_of_them = tuple(sequences)
    runs = Runs(sms, heads_kv, fold, sum(one.tiles * one.blocks for one in all_of_them))
    items, largest = 0, 0
    for one in all_of_them:
        run = runs.run(one)
        items += one.tiles * -(-one.splits // run)
        largest = max(largest, min(one.splits, run) * one.each)
    rounds = -(-items * heads_kv // sms)
    full = 16 * (runs.blocks * heads_kv // sms) >= 15 * rounds * largest
    return replace(runs, shrinks=not full) if full or shrinks else replace(runs, blocks=0)


def has_own_runs(narrow: bool, head_dim_qk: int, head_dim_v: int) -> bool:
    """Whether runs of several splits may have a program of their own: it was timed at 128 columns of 16 bits alone."""
    return not narrow and head_dim_qk == head_dim_v == OWN_DIM


def own_run_of(splits: int, batch: int, heads_kv: int, places: int, rounds: int, fold: int, size: float) -> int:
    """Splits of a run that has a program of its own, 0 where programs take runs in turn: one where all of ``splits`` of ``batch`` sequences and key
    heads come in ``rounds`` of ``places``; or ``fold`` (0: never), where so many heads and no more than so many bytes (``size``) are
    that many runs.  As the kernels' `plan` has it."""
    if batch * heads_kv * splits <= rounds * places:
        return 1
    own = heads_kv >= OWN_HEADS and size <= OWN_BYTES and fold > 0
    return fold if own and OWN_PLACES * places < 4 * batch * heads_kv * -(-splits // max(fold, 1)) <= 4 * places else 0


def other_pace(head_dim: int) -> float:
    """`OTHER_PACE` of heads."""
    return OTHER_PACE.get(head_dim, OTHER_PACE[128])


def programs_beside(own: Iterable[Shared], others: float, tiles: int, sms: int, heads_kv: int, fold: int) -> int:
    """How many programs take items while the launch for more rows has the other SMs, and then all of them: as many as let both end first, and
    no fewer than there are pairs of SMs, which share their way to memory.  The kernels' `programs_of`, in float32 as they have it.

    others: what that launch takes, in blocks of a key head, for ``tiles``, which are not parted.
    """
    if not tiles:
        return sms
    items = [one for one in own if one.tiles]
    largest = np.float32(max((min(one.splits, fold**2) * one.each for one in items), default=0))
    merged = heads_kv * sum(one.tiles * -(-one.splits // fold**2) for one in items)
    pairs, choice = max(1, sms // 2), np.arange(32)
    programs = np.where(choice == 31, sms, pairs + choice * pairs // 32)
    blocks = np.float32(heads_kv * sum(one.tiles * one.blocks for one in items))
    short = blocks * 17 < largest * 16 * programs.astype(np.float32)
    full = blocks * 16 >= largest * 15 * (-(-merged // programs) * programs).astype(np.float32)
    second = (programs - pairs).astype(np.float32) * np.float32(SECOND_GAINS / pairs)
    dealt = np.where(short, SHORT_RUNS, np.where(full, 1.0, SHRINKING)).astype(np.float32)
    done = blocks / np.float32(pairs) * np.maximum(1 - second, np.float32(LEAST_SHARE)) * dealt
    tile = np.float32(others) / np.float32(tiles)
    # Tiles there that have begun by then, on the SMs that they have at first, and that have ended.
    laps = np.minimum(done / max(tile, np.float32(1)), np.float32(MOST_LAPS))
    ended, begun = np.floor(laps).astype(int), np.ceil(laps).astype(int)
    there, free = tiles * heads_kv, sms - programs
    alone = np.where(free > 0, -(-there // np.maximum(free, 1)), 1 << 29)
    # The last one ends on these SMs or on those of the programs here.
    on_these = np.minimum(alone, np.maximum(-(-(there + programs * begun) // sms), begun))
    on_those = np.maximum(-(-(there - free * ended) // sms), 0)
    end = np.maximum(done, np.minimum(on_these.astype(np.float32) * tile, done + on_those.astype(np.float32) * tile))
    return int(programs[end <= np.float32(NEARLY) * end.min()].min())
