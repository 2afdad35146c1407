"""The chip plays a launch: programs take items in turn, stream blocks at a pace that they share, hand over and merge.

What streams on an SM goes at the pace of the loop with so many programs there, and all of it slower where the memory has less
bandwidth than that takes.  Starting, handing over and merging wait for latencies, whatever the bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilecast.model.step.items import Items

#: Items that are played one by one, by what the chip holds at once: of more the first are taken at the steady rate, in which
#: programs are out of step, as they are after some turns.
_TURNS_PLAYED = 2
#: An item of those before.
_BEFORE = -1
_IDLE, _STREAMING, _STARTING, _FINISHING, _HANDING_OVER, _MERGING, _TO_COME = range(7)
#: Items up to which all are played where some programs come late, or where programs in step with each other do not wait for the memory.
_MOST_PLAYED = 16384
#: Moments closer than this are one, in cycles.
_SAME = 1e-3


@dataclass(frozen=True, slots=True)
class Costs:
    """What items of a launch cost, in cycles."""

    sms: int
    #: Programs that an SM holds, and that the launch has: with fewer than items, each takes several in turn.
    per_sm: int
    programs: int
    #: From a program's start to its first block's arrival, of the first programs and of later ones, and of an item that a
    #: program takes after another.
    first_start: float
    later_start: float
    next_item: float
    #: After the last block: of a whole item, and of a split.
    finish: float
    hand_over: float
    #: Merging of one tile's splits, by their number and that of programs on the SM.
    merge: Callable[[int, int], float]
    #: Cycles between blocks of a program when 1, 2, ... stream on its SM, without the memory's share.
    periods: tuple[float, ...]
    #: Cycles in which the memory moves one block.
    memory_block: float
    #: Programs beyond the items, and what each costs before it finds nothing to do; of the first ones of a launch where all do.
    idle_programs: int = 0
    idle_program: float = 0.0
    idle_first: float = 0.0
    #: Whether merging keeps no program from its next item.
    merges_beside: bool = False
    #: Of an item that merges what it has with what it had, each time, and once a tile beside.
    join: float = 0.0
    join_ends: float = 0.0
    #: What an item's joins take longer where code runs for the first time.
    join_first: float = 0.0
    #: Of a part of an item that is done apart, when it joins those before it; before the first of them, and for each program that does so.
    join_later: float = 0.0
    join_again: float = 0.0
    join_on: float = 0.0
    #: Of a block that crosses an edge of the mask, beyond a period.
    masked: float = 0.0
    #: Where warps take items and copy for the others, an item ahead: from the question for the next item until it is known what that is, from
    #: then until its first block is there, and its Q, between blocks, how many are on their way at once, and how many of an item are still to
    #: be asked for when the next one is; no cycles: they are never what others wait for.
    take_item: float = 0.0
    load_item: float = 0.0
    load_queries: float = 0.0
    load_block: float = 0.0
    ring: int = 0
    asking: int = 0
    #: Of the launch that merges what programs have left, from the end of the last one on.
    joined: float = 0.0
    #: Of what a warpgroup does around an item's loop, what others may multiply under, and for how long of each block the busiest unit is free.
    around: float = 0.0
    slack: float = 0.0
    #: Slots that are another launch's at first, and when they are free; when that leaves the others.
    late: int = 0
    free_at: float = 0.0
    early_at: float = 0.0

    @property
    def slots(self) -> int:
        """Programs that the chip holds."""
        return self.sms * self.per_sm

    @property
    def held(self) -> bool:
        """Whether programs wait for the memory where all of them stream."""
        return self.slots * self.memory_block > self.periods[-1]

    def ready(self, began: float, ended: float, blocks: float) -> float:
        """When the item after one of so many blocks may begin, whose first block was there at ``began`` and whose last one ends at ``ended``."""
        first, last = self.asked(began, ended, blocks, self.asking), self.asked(began, ended, blocks, 0)
        known = first + self.take_item
        return max(max(known, last) + self.load_item, known + self.load_queries)

    def asked(self, began: float, ended: float, blocks: float, left: int) -> float:
        """When the copy of the block is asked for behind which so many are ``left`` of an item, if it has them."""
        behind = min(float(left), max(blocks - 1.0, 0.0))
        return max(began + (blocks - behind) * self.load_block, ended - (self.ring + behind) * self.periods[0])

    def beside(self, items: Items, item: int | slice) -> Any:
        """Of items, what masked blocks take beyond others, less what of the code around their loops runs while other warpgroups multiply."""
        masked = 0.0 if items.masked is None else items.masked[item] * self.masked
        return masked - np.minimum(self.around, items.blocks[item] * self.slack)


@dataclass(frozen=True, slots=True)
class Played:
    """How a launch went, in cycles from the first program's start."""

    end: float
    #: Sum over programs of what they did.
    starting: float
    streaming: float
    handing_over: float
    merging: float
    #: Of the end: while the memory, not the programs, set the pace; when the last block had come; the longest merge.
    memory_bound: float
    streamed_until: float
    longest_merge: float
    #: Of the end: programs that found nothing to do.
    idle: float = 0.0
    #: Of the end: what an SM's slot was free on average, its programs done while others ran on.
    tail: float = 0.0


def play(items: Items, costs: Costs) -> Played:
    """Play all items; of very many the first at their steady rate."""
    last = _TURNS_PLAYED * costs.slots
    many = items.count > (last + costs.slots if costs.held and not costs.late else _MOST_PLAYED)
    skipped = items.count - last if many else 0
    run = _Run(items, costs, skipped)
    before = costs.first_start + _steady(items, costs, skipped, run.leave_behind(skipped)) if skipped else 0.0
    if skipped and costs.late:
        # As many blocks as others would have done meanwhile are still to come, by all.
        before += costs.late / costs.slots * min(costs.free_at, before * costs.slots / max(1, costs.slots - costs.late))
    run.run()
    idle = max(0.0, _idle_end(run.free, costs) - run.now)
    blocks = float(items.blocks[:skipped].sum())
    held = before if blocks * costs.memory_block >= before * 0.999 else 0.0
    split = float((items.tile[:skipped] >= 0).sum())
    total = run.spent
    return Played(
        before + run.now + idle + costs.joined, total[_STARTING] + skipped * (costs.later_start if costs.programs > skipped else costs.next_item), total[_STREAMING] + before * costs.slots,
        total[_HANDING_OVER] + total[_FINISHING] + split * costs.hand_over + (skipped - split) * costs.finish,
        total[_MERGING], run.memory_bound + held, before + run.streamed_until, run.longest_merge, idle,
        max(0.0, run.now - float(run.free.mean())),
    )  # fmt: skip


def nothing(costs: Costs) -> Played:
    """A launch without an item: programs come, look, and go."""
    idle = costs.idle_first + max(0.0, costs.idle_programs / costs.slots - 1.0) * costs.idle_program
    return Played(idle, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, idle)


def _steady(items: Items, costs: Costs, count: int, left: float) -> float:
    """Cycles of the first ``count`` items but for ``left`` blocks, all programs busy: the memory's time, or the programs'."""
    blocks = float(items.blocks[:count].sum()) - left
    split = items.tile[:count] >= 0
    coming = min(count, costs.programs)
    around = (
        max(0, coming - costs.slots) * costs.later_start  # the first ones' start is before
        + (count - coming) * costs.next_item
        + split.sum() * costs.hand_over
        + (count - split.sum()) * costs.finish
    )
    shares = items.splits_of_tile[items.tile[:count][split]]
    if costs.merges_beside:
        shares = shares[:0]
    if items.joins is not None:
        around += float(items.joins[:count].sum()) * costs.join
    beside = float(np.sum(costs.beside(items, slice(count))))
    around += beside
    if costs.load_item:
        # What the load warp is behind its item's end, of items of the mean number of blocks.
        mean = blocks / count
        busy = mean * costs.periods[-1] + costs.finish + costs.next_item + beside / count
        around += count * max(0.0, costs.ready(0.0, mean * costs.periods[0], mean) - busy)
    around += sum(
        n / s * costs.merge(int(s), costs.per_sm) for s, n in zip(*np.unique(shares, return_counts=True), strict=True)
    )
    # Programs that take one item after another stay in step: none asks the memory for blocks while all look for their next item.
    looking = (count - coming) * costs.next_item / costs.slots
    return float(max(blocks * costs.memory_block + looking, (blocks * costs.periods[-1] + around) / costs.slots))


def _idle_end(free: NDArray[np.float64], costs: Costs) -> float:
    """When the last program without an item is gone: they come where those with items left, all slots sharing them."""
    if not costs.idle_programs:
        return 0.0
    return float(free.sum() + costs.idle_programs * costs.idle_program) / costs.slots


class _Run:
    """The moments of a launch: one program to a slot, ``per_sm`` slots to an SM."""

    def __init__(self, items: Items, costs: Costs, first: int) -> None:
        self.items, self.costs, self.next = items, costs, first
        self.splits_left = items.splits_of_tile.copy()
        if first:
            done = items.tile[:first]
            np.subtract.at(self.splits_left, done[done >= 0], 1)
        slots = costs.slots
        self.sm = np.arange(slots) % costs.sms
        #: Slots whose programs end together are taken in an order that has nothing to do with their SMs.
        self.order = np.random.default_rng(0).permutation(slots)
        self.phase = np.zeros(slots, dtype=np.int64)
        self.item = np.full(slots, _BEFORE, dtype=np.int64)
        self.left = np.zeros(slots)
        self.until = np.full(slots, np.inf)
        #: Slots that have an item; when each of the others had none.
        self.active = 0
        self.free = np.zeros(slots)
        #: When an item's first block had come, and when the next one may begin.
        self.began = np.zeros(slots)
        self.ready = np.full(slots, -np.inf)
        self.speed = np.array([0.0, *(1.0 / period for period in costs.periods)])
        self.now = self.memory_bound = self.streamed_until = self.longest_merge = self.merged_at = 0.0
        self.spent = [0.0] * 6

    def leave_behind(self, first: int) -> float:
        """Programs in the middle of the items before ``first``, evenly spread; returns the blocks that are left to them."""
        mean = float(self.items.blocks[:first].mean())
        self.phase[:] = _STREAMING
        self.left[self.order] = mean * (np.arange(len(self.left)) + 0.5) / len(self.left)
        return float(self.left.sum())

    def run(self) -> None:
        c = self.costs
        if not self.phase.any():
            early = c.slots - c.late
            for slot in range(min(early, c.programs, self.items.count - self.next)):
                self.take(slot, c.early_at + c.first_start)
            self.phase[early : c.programs], self.until[early : c.programs] = _TO_COME, c.free_at
        self.active = int(np.count_nonzero(self.phase))
        while self.active:
            (streaming,) = (self.phase == _STREAMING).nonzero()
            speeds = self.speeds(streaming)
            step = float(np.minimum.reduce(self.until)) - self.now
            if len(streaming):
                left = self.left[streaming]
                step = min(step, float(np.minimum.reduce(left / speeds)))
                left -= step * speeds
                self.left[streaming] = left
                self.spent[_STREAMING] += step * len(streaming)
                if self.held:
                    self.memory_bound += step
            self.now += max(step, 0.0)
            ended = self.until <= self.now + _SAME
            if len(streaming):
                ended[streaming[left <= _SAME * speeds]] = True
            for slot in self.order[ended[self.order]].tolist():
                self.ended(slot)
        self.now = max(self.now, self.merged_at)

    def speeds(self, streaming: NDArray[np.int64]) -> NDArray[np.float64]:
        """Blocks a cycle of each program that streams."""
        if self.costs.per_sm == 1:
            own = np.full(len(streaming), self.speed[1])
        else:
            there = np.bincount(self.sm[streaming], minlength=self.costs.sms)[self.sm[streaming]]
            own = self.speed[np.minimum(there, len(self.speed) - 1)]
        wanted = float(np.add.reduce(own)) * self.costs.memory_block
        self.held = wanted > 1.0
        return own / wanted if self.held else own

    def ended(self, slot: int) -> None:
        """What a slot did has come to its end: the next thing."""
        phase, item = int(self.phase[slot]), int(self.item[slot])
        if phase == _TO_COME and self.next < self.items.count:
            # Its code has run on other SMs alone.
            self.take(slot, self.costs.first_start)
            return
        if phase == _STARTING and self.items.blocks[item]:
            self.phase[slot], self.until[slot] = _STREAMING, np.inf
            self.left[slot] = self.items.blocks[item]
            self.began[slot] = self.now
        elif phase in (_STARTING, _STREAMING):
            self.streamed_until = self.now
            split, c = self.items.tile[max(item, 0)] >= 0, self.costs
            beside = 0.0 if item == _BEFORE else c.beside(self.items, item)
            if c.load_item and item != _BEFORE:
                self.ready[slot] = c.ready(self.began[slot], self.now + beside, float(self.items.blocks[item]))
            if split:
                self.wait(slot, _HANDING_OVER, c.hand_over + beside)
            else:
                self.wait(slot, _FINISHING, c.finish + beside + self.joining(item))
        elif phase == _HANDING_OVER and item != _BEFORE and self.is_last(item):
            splits = int(self.items.splits_of_tile[self.items.tile[item]])
            there = int((self.phase[self.sm == self.sm[slot]] != _IDLE).sum())
            cycles = self.costs.merge(splits, there)
            self.longest_merge = max(self.longest_merge, cycles)
            if self.costs.merges_beside:
                self.merged_at = max(self.merged_at, self.now + cycles)
                self.spent[_MERGING] += cycles
                self.go_on(slot)
            else:
                self.wait(slot, _MERGING, cycles)
        else:
            self.go_on(slot)

    def joining(self, item: int) -> float:
        """Cycles in which an item merges what it has with what it had, and goes from one of its pieces to the next."""
        joins, pieces = self.items.joins, self.items.pieces
        if joins is None or item == _BEFORE:
            return 0.0
        others = 0 if pieces is None else int(pieces[item]) - 1
        # Of the pieces of a run those at its ends are parts of tiles.
        ends = max(1, others) * self.costs.join_ends if joins[item] else 0.0
        first = self.costs.join_first if joins[item] else 0.0
        later = self.joining_later(item)
        return (
            float(joins[item]) * self.costs.join
            + ends
            + first
            + later
            + others * (self.costs.next_item + self.costs.finish)
        )

    def joining_later(self, item: int) -> float:
        """Cycles in which what was done apart joins, by an item's program and those before it."""
        apart, joining, c = self.items.apart, self.items.joining, self.costs
        if apart is None or joining is None or not apart[item]:
            return 0.0
        return c.join_again + float(joining[item]) * c.join_on + float(apart[item]) * c.join_later

    def go_on(self, slot: int) -> None:
        """The next item of a program, if there is one."""
        if self.next < self.items.count:
            self.take(slot, self.costs.later_start if self.next < self.costs.programs else self.costs.next_item)
        else:
            self.phase[slot], self.until[slot], self.free[slot] = _IDLE, np.inf, self.now
            self.active -= 1

    def is_last(self, item: int) -> bool:
        """Whether all other splits of the item's tile have been handed over; counts this one."""
        tile = self.items.tile[item]
        self.splits_left[tile] -= 1
        return not self.splits_left[tile]

    def wait(self, slot: int, phase: int, cycles: float) -> None:
        self.phase[slot], self.until[slot] = phase, self.now + cycles
        self.spent[phase] += cycles

    def take(self, slot: int, cycles: float) -> None:
        """The next item's start, by a program that needs ``cycles`` for it."""
        self.item[slot] = self.next
        self.next += 1
        self.wait(slot, _STARTING, max(cycles, self.ready[slot] - self.now))
