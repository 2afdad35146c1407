"""Runs of splits that one program takes in one after the other, where programs take items until there are none.

The same arithmetic as the kernels' own (`run_of` and `deal_of` of codegen/templates/hopper_serving_runs.py.j2).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


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
