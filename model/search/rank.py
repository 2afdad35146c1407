"""Rank many variants by forecast without building, simulating or forecasting those that cannot win.

Every variant first gets a floor, a time no forecast of it can beat: the busiest unit or the heaviest recurrence of its
loop for every block it has to do, spread over all SMs, at the clock the power limit would allow a kernel that fast; then
its loop as simulated in plain blocks, and in masked ones.
Variants are then forecast in the order of their floors until the next floor lies above the last time that is kept.
The result is the one that forecasting all of them would give.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from tilecast.model.chip.evaluate import evaluate_seconds
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.search.floor import Floors

#: Forecasts are compared to the nanosecond; equal ones keep the order given.
DIGITS = 9
#: Times further apart than this differ when rounded so.
_APART = 10.0**-DIGITS
#: Groups whose floors lie within this factor come apart together, but at least so many by demand and at most so many to be forecast at first,
#: and so many to be simulated before anything was: where the memory sets the pace all floors are alike, and the first to be forecast rules the rest out.
_BAND, _LEAST, _MOST, _FIRST = 1.01, 32, 16, 32


class Ranked(NamedTuple):
    """A variant with its forecast, or with the floor that made a forecast needless."""

    variant: Variant
    #: Position among the variants given: the smaller one wins ties.
    order: int
    floor_seconds: float
    #: Forecast if masked blocks cost like plain ones (`Floors.simulated`); None where the loop was not simulated.
    plain_seconds: float | None
    #: None where the floor alone shows that the variant is not among those kept.
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Ranking:
    """What `rank` found: ``best`` fastest first, then every other variant that was forecast, then those dropped."""

    best: tuple[Ranked, ...]
    #: Forecast, but slower than the last of ``best`` or one too many of its group; fastest first.
    behind: tuple[Ranked, ...]
    #: What was given, and groups never forecast: their floor, their positions, and `Ranked.plain_seconds`.
    variants: tuple[Variant, ...]
    left: tuple[tuple[float, list[int], float | None], ...]

    @property
    def dropped(self) -> tuple[Ranked, ...]:
        """Never forecast: their floor shows that they cannot enter ``best``."""
        return tuple(Ranked(self.variants[order], order, floor, plain, None) for floor, orders, plain in self.left for order in orders)  # fmt: skip

    def plain_seconds(self) -> dict[Variant, float]:
        """`Ranked.plain_seconds` of every variant whose loop was simulated."""
        known = {entry.variant: entry.plain_seconds for entry in (*self.best, *self.behind) if entry.plain_seconds is not None}  # fmt: skip
        known.update(
            (self.variants[order], plain) for _, orders, plain in self.left if plain is not None for order in orders
        )
        return known


def rank(
    variants: Sequence[Variant],
    workload: Workload,
    machine: Machine,
    *,
    clock: str | float = "sustained",
    keep: int = 24,
    group: Callable[[Variant], Hashable] | None = None,
    per_group: int = 1,
) -> Ranking:
    """The ``keep`` fastest of legal ``variants`` by forecast, with a ``group`` at most ``per_group`` of each group.

    Ties go to the earlier variant.  ``clock`` as `predict` takes it.  ValueError when nothing may be kept.
    """
    if keep < 1 or per_group < 1:
        raise ValueError(f"rank: keep and per_group take at least 1, got {keep} and {per_group}")
    given = variants if isinstance(variants, tuple) else tuple(variants)
    board = _Board(keep, per_group if group else keep, grouped=group is not None)
    names = list(map(group, given)) if group else [()] * len(given)
    forecast: list[Ranked] = []
    left: list[tuple[float, list[int], float | None]] = []
    for floor, members, plain in _in_order_of_floors(given, Floors(given, workload, machine, clock), names, board):
        first = members[0]
        variant, name = given[first], names[first]
        if not board.takes(floor, first, name):
            left.append((floor, members, plain))
            continue
        seconds = round(evaluate_seconds(workload, machine, variant, clock), DIGITS)
        forecast.append(Ranked(variant, first, floor, plain, seconds))
        board.add(name, seconds, first)
    forecast.sort(key=lambda r: (r.seconds, r.order))
    best: list[Ranked] = []
    behind: list[Ranked] = []
    seen: Counter[Hashable] = Counter()
    for entry in forecast:
        name = group(entry.variant) if group else ()
        fits = len(best) < keep and (group is None or seen[name] < per_group)
        (best if fits else behind).append(entry)
        seen[name] += fits
    return Ranking(tuple(best), tuple(behind), given, tuple(left))


class _Waiting(NamedTuple):
    """Variants that share a floor of some stage, by it; in a heap the earlier ones among equals come first."""

    floor: float
    first: int
    stage: int
    members: list[int]
    plain: float | None = None


def _in_order_of_floors(
    variants: tuple[Variant, ...], floors: Floors, names: Sequence[Hashable], board: _Board
) -> Iterator[tuple[float, list[int], float | None]]:
    """(floor, orders, `Ranked.plain_seconds`) of every variant, by floor; those that ``board`` will not take come in groups with rough ones.

    Variants wait in groups that share a floor.  The groups whose floor is least come apart into smaller ones with better
    floors, stage by stage, down to single variants with their best floor.
    """
    if not variants:
        return
    stages = (
        (floors.of_demand, floors.by_demand),
        (floors.of_operations, floors.by_operations),
        (floors.dealt, lambda members: [members]),
        (floors.simulated, lambda members: [[order] for order in members]),
        (floors.masked, lambda members: [members]),
    )
    heaps: list[list[_Waiting]] = [[] for _ in stages]
    most_masked = _MOST
    opened = [_Waiting(0.0, 0, -1, list(range(len(variants))))]
    while opened:
        stage = opened[0].stage + 1
        better, split = stages[stage]
        parts = [(entry, part) for entry in opened for part in split(entry.members)]
        found = better([part[0] for _, part in parts]).tolist()
        for new, (entry, part) in zip(found, parts, strict=True):
            floor = max(new, entry.floor)
            plain = floor if better == floors.simulated else entry.plain
            heappush(heaps[stage], _Waiting(floor, part[0], stage, part, plain))
        opened = []
        while not opened and (least := min((heap[0] for heap in heaps if heap), default=None)):
            heap = heaps[least.stage]
            heappop(heap)
            if least.stage == len(stages) - 1 or not board.takes_any(least.floor, least.members, names):
                yield least.floor, least.members, least.plain
                continue
            # Groups that come up soon come apart together: floors are cheaper by the hundred.
            opened, left = [least], list[_Waiting]()
            better = stages[least.stage + 1][0]
            most = len(variants)
            if better == floors.masked:
                # The longer the search, the more at a time: never twice as many as it takes.
                most, most_masked = most_masked, 2 * most_masked
            elif better == floors.simulated and not board.all:
                most = _FIRST
            many = _LEAST if least.stage == 0 else 0
            while heap and (len(opened) < many or (heap[0].floor <= least.floor * _BAND and len(opened) < most)):
                entry = heappop(heap)
                (opened if board.takes_any(entry.floor, entry.members, names) else left).append(entry)
            for entry in left:
                heappush(heap, entry)


class _Board:
    """The (time, order) kept so far: what a variant must not exceed to be kept."""

    def __init__(self, keep: int, per_group: int, *, grouped: bool) -> None:
        self.keep, self.per_group, self.grouped = keep, per_group, grouped
        self.groups: dict[Hashable, list[tuple[float, int]]] = {}
        self.all: list[tuple[float, int]] = []

    def takes(self, floor: float, order: int, name: Hashable) -> bool:
        """Whether a variant of group ``name`` with such a floor may be among those kept, of its group and of all."""
        own = self.groups.get(name, [])
        limit = own[-1] if len(own) == self.per_group else (inf, 0)
        if len(self.all) >= self.keep:
            limit = min(limit, self.all[self.keep - 1])
        if abs(floor - limit[0]) > _APART:
            return floor < limit[0]
        return (round(floor, DIGITS), order) < limit

    def takes_any(self, floor: float, members: Sequence[int], names: Sequence[Hashable]) -> bool:
        """Whether it takes one of ``members`` with such a floor, the earliest first."""
        if self.takes(floor, members[0], names[members[0]]):
            return True
        return self.grouped and any(self.takes(floor, order, names[order]) for order in members[1:])

    def add(self, name: Hashable, seconds: float, order: int) -> None:
        """Take a time in, and the one that it drives out of its group off."""
        own = self.groups.setdefault(name, [])
        insort(own, (seconds, order))
        insort(self.all, (seconds, order))
        if len(own) > self.per_group:
            del self.all[bisect_left(self.all, own.pop())]
