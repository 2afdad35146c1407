"""Which numbers an expression of loop counters takes.

A counter that wraps takes few numbers: they are collected until no way round any loop adds one.  One that only counts up, and
is divided where it is used, takes too many: then a loop is run in numbers, or the one counter is put through its paces, and an
expression that comes back to the same numbers again and again goes round them.  First values that are not known are taken as
0, for a ring is the same wherever it is entered.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

from tilecast.codegen.compiler.flow import Loop
from tilecast.codegen.compiler.structure.evaluate import Thread, frontier, leaves
from tilecast.codegen.compiler.structure.values import Values

#: Rounds of collecting and iterations that are run: a ring shows itself twice in half of them.
_ITERATIONS = 64
#: Numbers that a wrapping counter takes at most, and combinations that are tried for one expression.
_MOST_NUMBERS, _MOST_TRIED = 24, 128
#: Functions whose results are predicates: no counter is one.
_CHOICES = (["setp"], ["not"], ["any"], ["and"], ["plop3"])
Numbers = Mapping[int, set[int] | None]


class Counters:
    """Numbers of the expressions of a listing for one thread, with only values that came along ``edges``."""

    def __init__(self, values: Values, specials: Mapping[str, int], edges: Collection[tuple[int, int]]) -> None:
        self._values, self._specials, self._edges = values, specials, edges
        self._plain = self._thread({})
        self._collected: dict[int, set[int] | None] = {}
        self._frontiers: dict[int, tuple[int, ...]] = {}
        self._scanned: dict[int, set[int] | None] = {}

    def _thread(self, given: Mapping[int, int]) -> Thread:
        return Thread(self._values, self._specials, given, self._edges, trusting=True)

    def number(self, value: int) -> int | None:
        """The number that does not depend on any counter."""
        return self._plain.number(value)

    def _made_of(self, value: int) -> tuple[int, ...]:
        if value not in self._frontiers:
            self._frontiers[value] = tuple(sorted(frontier(self._values, value)))
        return self._frontiers[value]

    def _ways(self, phi: int) -> list[tuple[int, int]]:
        """(block it comes from, value) of the ways into a phi that exist."""
        block = int(self._values.graph.nodes[phi][1])
        return [(source, held) for source, held in self._values.inputs[phi].items() if (source, block) in self._edges]

    def collect(self, behind: Collection[int]) -> Numbers:
        """The numbers of every phi among ``behind``; None for one that takes too many, or rests on something unknown."""
        new = sorted(one for one in behind if one in self._values.inputs and one not in self._collected)
        self._collected |= {phi: set() for phi in new}
        for _ in range(_ITERATIONS):
            changed = False
            for phi in new:
                known = self._collected[phi]
                if known is None:
                    continue
                for _, way in self._ways(phi):
                    found = self.every(way, self._collected)
                    found = self.scan(way) if found is None else found
                    if found is None or len(known | found) > _MOST_NUMBERS:
                        self._collected[phi], changed = None, True
                        break
                    changed |= not found <= known
                    known |= found
            if not changed:
                break
        return self._collected

    def every(self, value: int, numbers: Numbers) -> set[int] | None:
        """The numbers of an expression for every number of the phis it is made of; None where one is unknown."""
        if value in numbers:
            held = numbers[value]
            return None if held is None else set(held)
        made_of = self._made_of(value)
        choices = [numbers.get(phi) for phi in made_of]
        if None in choices:
            return None
        tried = list(itertools.islice(itertools.product(*(sorted(one or ()) for one in choices)), _MOST_TRIED + 1))
        if len(tried) > _MOST_TRIED:
            return None
        found = {self._thread(dict(zip(made_of, one, strict=True))).number(value) for one in tried}
        return None if None in found else {one for one in found if one is not None}

    def run(self, value: int, loop: Loop) -> set[int] | None:
        """The numbers of ``value`` in the iterations of ``loop``; None where one is unknown or they never come back."""
        out = self.sequence(value, loop)
        if out is None:
            return None
        half = set(out[: _ITERATIONS // 2])
        return half if half == set(out) else None

    def sequence(self, value: int, loop: Loop) -> list[int] | None:
        """The numbers of ``value`` in the first iterations of ``loop``, in order; None where one is unknown."""
        handed_on = set(self._values.phis_at(loop.header))
        mine = sorted(handed_on & (set(self._made_of(value)) | leaves(self._values, value)))
        if not mine:
            return None
        begin: dict[int, int] = {}
        for phi in mine:
            ways = [held for source, held in self._ways(phi) if source not in loop.blocks]
            for way in ways:
                self._free(way, begin, loop)
            found = {self._thread(begin).number(way) for way in ways} - {None}
            begin[phi] = (found.pop() or 0) if len(found) == 1 else 0
        self._free(value, begin, loop)
        given, out = dict(begin), []
        for _ in range(_ITERATIONS):
            thread = self._thread(given)
            found_here = thread.number(value)
            if found_here is None:
                return None
            out.append(found_here)
            stepped = {phi: self._stepped(phi, loop, thread) for phi in mine}
            kept = {phi: held for phi, held in given.items() if phi not in stepped}
            given = kept | {phi: held for phi, held in stepped.items() if held is not None}
        return out

    def _stepped(self, phi: int, loop: Loop, thread: Thread) -> int | None:
        """What the next iteration is handed; None where that is not known."""
        known = {thread.number(value) for source, value in self._ways(phi) if source in loop.blocks}
        return known.pop() if len(known) == 1 else None

    def _free(self, value: int, given: dict[int, int], loop: Loop) -> None:
        """Give 0 to counters from outside of ``loop`` that ``value`` is made of, unless they are known: there they stand still."""
        for phi in self._made_of(value):
            outside = int(self._values.graph.nodes[phi][1]) not in loop.blocks
            if phi not in given and outside and self.number(phi) is None:
                given[phi] = 0

    def scan(self, value: int) -> set[int] | None:
        """The numbers of ``value`` when the one unknown that it is made of is 0, 1, 2, ...; None where they never come back.

        The unknown may be a counter or a sum of several and of what the launch brings, such as blocks done so far.
        """
        if value not in self._scanned:
            self._scanned[value] = self._scan(value)
        return self._scanned[value]

    def _scan(self, value: int) -> set[int] | None:
        for unknown in self._unknowns(value):
            if self._thread({unknown: 0}).number(value) is None:
                continue
            out = [self._thread({unknown: count}).number(value) for count in range(_ITERATIONS)]
            half = set(out[: _ITERATIONS // 2])
            if half == set(out) and None not in half:
                return {one for one in half if one is not None}
        return None

    def _unknowns(self, value: int) -> list[int]:
        """Words without a known number that ``value`` is made of, those made of others first."""
        found, todo = set(), [value]
        while todo:
            one = todo.pop()
            kind, *rest = self._values.graph.nodes[one]
            if one in found or self.number(one) is not None or kind == "vote" or rest[:1] in _CHOICES:
                continue
            found.add(one)
            if kind in ("f", "choose"):
                todo += [int(part) for part in rest[0 if kind == "choose" else 2 :]]
        return sorted(found - {value}, reverse=True)
