"""Which barrier an address is: one place, or a ring that a slot counter goes round; and what is known of the others."""

from __future__ import annotations

from collections.abc import Sequence

from tilecast.codegen.compiler.flow import Loop
from tilecast.codegen.compiler.structure.counters import Counters
from tilecast.codegen.compiler.structure.evaluate import Thread, frontier, leaves
from tilecast.codegen.compiler.structure.roles import WarpGroup, special_registers
from tilecast.codegen.compiler.structure.shape import Barrier
from tilecast.codegen.compiler.structure.values import Values

#: Places that a ring has at most: shared memory holds no more useful slots.
_LARGEST_RING = 16
_LANES = 32
#: An address in a cluster's shared memory has the CTA's rank above it.
_RANK = 24
_THREAD = frozenset((("special", "SR_TID.X"), ("special", "SR_LANEID")))
Sites = tuple[tuple[tuple[int, ...], Barrier], ...]


class Places:
    """Places that the values of a group of warps take."""

    def __init__(self, values: Values, group: WarpGroup) -> None:
        self._values, self._group = values, group
        self._leaves: dict[int, frozenset[int]] = {}
        #: Unknown part of an address -> its name; shared by what is asked of one kernel.
        self._bases: dict[tuple[int, ...], str] = {}
        self._found: dict[tuple[int, tuple[int, ...], bool], Sites] = {}
        self._counters: dict[tuple[int, int], Counters] = {}
        #: Lane -> phis as they are when their loops are entered.
        self._begun: dict[int, dict[int, int | None]] = {}

    def barrier(self, value: int | None, around: Sequence[Loop], named: bool = False) -> Sites:
        """(warps, barrier) of an address or a number in the loops ``around`` it, outermost first."""
        if value is None:
            return ((self._group.warps, Barrier(named, (), base="?")),)
        key = (value, tuple(loop.header for loop in around), named)
        if key not in self._found:
            self._found[key] = self._sites(value, around, named)
        return self._found[key]

    def number(self, value: int | None, guard: int | None = None) -> int | None:
        """The one number that a value is for the group's first warp, where ``guard`` holds."""
        given = {} if guard is None else {guard: 1}
        specials = special_registers(self._group.warps[0])
        return Thread(self._values, specials, given, self._group.reached.edges, trusting=True).number(value)

    def at_first(self, value: int | None) -> int | None:
        """The number that a value is for the group's first warp the first time it is asked for: loops have just been entered."""
        return self._first_seen(value, 0)

    def by_lane(self, value: int | None) -> tuple[int | None, ...]:
        """`at_first` for every lane of the group's first warp."""
        return tuple(self._first_seen(value, lane) for lane in range(_LANES))

    def _first_seen(self, value: int | None, lane: int) -> int | None:
        """`_entered` with what earlier questions of this lane told: every number, and what is unknown for good."""
        if value is None:
            return None
        begun = self._begun.setdefault(lane, {})
        for phi in frontier(self._values, value) - begun.keys():
            entries: dict[int, int | None] = {**begun, phi: None}
            # Without another phi that is being looked at, nothing could tell more about this one later.
            begun[phi] = self._on_entry(phi, entries, lane)
            begun |= {one: number for one, number in entries.items() if number is not None}
        return self._entered(value, dict(begun), lane)

    def _entered(self, value: int | None, entries: dict[int, int | None], lane: int = 0) -> int | None:
        """The number of ``value``; ``entries`` holds phis as far as they are known, None for those that are being looked at."""
        if value is None:
            return None
        for phi in frontier(self._values, value) - entries.keys():
            entries[phi] = None
            entries[phi] = self._on_entry(phi, entries, lane)
        known = {phi: number for phi, number in entries.items() if number is not None}
        return Thread(
            self._values, special_registers(self._group.warps[0], lane), known, self._group.reached.edges, trusting=True
        ).number(value)

    def _on_entry(self, phi: int, entries: dict[int, int | None], lane: int) -> int | None:
        """What a phi is when its loop is entered; elsewhere what all ways agree on."""
        block = int(self._values.graph.nodes[phi][1])
        inside = next((loop.blocks for loop in self._values.flow.loops if loop.header == block), frozenset())
        ways = [
            held
            for source, held in self._values.inputs[phi].items()
            if source not in inside and (source, block) in self._group.reached.edges
        ]
        found = {self._entered(held, entries, lane) for held in ways}
        return found.pop() if len(found) == 1 else None

    def _rests_on(self, value: int) -> frozenset[int]:
        if value not in self._leaves:
            self._leaves[value] = leaves(self._values, value)
        return self._leaves[value]

    def _sites(self, value: int, around: Sequence[Loop], named: bool) -> Sites:
        by_thread = any(self._values.graph.nodes[one] in _THREAD for one in self._rests_on(value))
        asked = self._group.warps if by_thread else self._group.warps[:1]
        found: dict[Barrier, list[int]] = {}
        for warp in asked:
            found.setdefault(self._one(value, warp, around, named), []).append(warp)
        if not by_thread:
            return ((self._group.warps, next(iter(found))),)
        return tuple((tuple(warps), barrier) for barrier, warps in found.items())

    def first(self, value: int | None) -> int:
        """The place of an mbarrier the first time it is asked for, loops just entered; -1 where it is not known."""
        found = self.at_first(value)
        return -1 if found is None else found & (1 << _RANK) - 1

    def turns(self, predicate: int | None, loop: Loop) -> tuple[bool, ...]:
        """Whether ``predicate`` is false in the iterations of ``loop``, until that repeats itself; empty where it is not known."""
        if predicate is None:
            return ()
        found = self._counters_of(self._group.warps[0], 0).sequence(predicate, loop)
        if found is None:
            return ()
        for length in range(1, _LARGEST_RING + 1):
            if all(one == found[i % length] for i, one in enumerate(found)):
                return tuple(not one for one in found[:length])
        return ()

    def _one(self, value: int, warp: int, around: Sequence[Loop], named: bool) -> Barrier:
        first, second = (self._numbers(value, warp, rank, around) for rank in (0, 1))
        if not first:
            return self._unknown(value, warp, named)
        if named:
            return Barrier(True, first)
        ranks = (first[0] >> _RANK, second[0] >> _RANK if second else 1)
        own = ranks == (0, 1) or not self._ranked(value)
        owner = "own" if own else "leader" if ranks == (0, 0) else "peer"
        return Barrier(False, tuple(sorted({place & (1 << _RANK) - 1 for place in first})), owner)

    def _ranked(self, value: int) -> bool:
        return any(self._values.graph.nodes[one] == ("special", "SR_CgaCtaId") for one in self._rests_on(value))

    def _numbers(self, value: int, warp: int, rank: int, around: Sequence[Loop]) -> tuple[int, ...]:
        """Places that ``value`` takes, ascending; none where they are not known or never come back."""
        counters = self._counters_of(warp, rank)
        fixed = counters.number(value)
        if fixed is not None:
            return (fixed,)
        found = counters.every(value, counters.collect(self._rests_on(value)))
        for loop in reversed(around):
            if found is None or len(found) > _LARGEST_RING:
                found = counters.run(value, loop)
        if found is None or len(found) > _LARGEST_RING:
            found = counters.scan(value)
        return tuple(sorted(found)) if found and len(found) <= _LARGEST_RING else ()

    def _counters_of(self, warp: int, rank: int) -> Counters:
        if (warp, rank) not in self._counters:
            self._counters[warp, rank] = Counters(
                self._values, special_registers(warp, 0, rank), self._group.reached.edges
            )
        return self._counters[warp, rank]

    def _unknown(self, value: int, warp: int, named: bool) -> Barrier:
        """The sum's known part, and a name for the rest."""
        thread = Thread(self._values, special_registers(warp), None, self._group.reached.edges)
        rest, offset, todo = [], 0, [value]
        while todo:
            node = self._values.graph.nodes[todo[-1]]
            one = todo.pop()
            known = thread.number(one)
            if known is not None:
                offset += known
            elif node[:2] == ("f", "add"):
                todo += [int(part) for part in node[3:]]
            else:
                rest.append(one)
        key = tuple(sorted(rest))
        name = self._bases.setdefault(key, f"r{key[0] if key else 0}")
        return Barrier(named, (), base=name, offset=offset & 0xFFFFFFFF)
