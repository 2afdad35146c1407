"""Numbers for values: as one thread of one CTA sees them, with what it was told about loop counters and shared memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping

from tilecast.codegen.compiler.structure import arithmetic as word
from tilecast.codegen.compiler.structure.values import Values

Args = tuple[int, ...]
#: Functions of words, by the name that `expressions.py` gives them; with a mode of their own where they have one.
_PLAIN: dict[str, Callable[[Args], int | None]] = {
    "add": sum,
    "neg": lambda a: -a[0],
    "inv": lambda a: ~a[0],
    "not": lambda a: 1 - (a[0] & 1),
    "and": lambda a: int(all(a)),
    "any": lambda a: int(a[0] != 0),
    "mad": lambda a: a[0] * a[1] + a[2],
    "lea": lambda a: (a[0] << min(a[2], 32)) + a[1],
    "lea_hi": lambda a: ((a[0] | a[2] << 32) << min(a[3], 32) >> 32) + a[1],
    "lea_hi_s": lambda a: (word.signed(a[0]) << min(a[2], 32) >> 32) + a[1],
    "lop3": lambda a: word.lop3(a[0], a[1], a[2], a[3]),
    "plop3": lambda a: a[3] >> (4 * a[0] + 2 * a[1] + a[2]) & 1,
    "prmt": lambda a: word.prmt(a[0], a[1], a[2]),
    "r2ur": lambda a: a[0],
    "lane0": lambda a: a[0],
}
_MODED: dict[str, Callable[[str, Args], int | None]] = {
    "shf": lambda mode, a: word.shift(mode, *a),
    "setp": lambda mode, a: word.compare(mode, *a),
    "sgxt": lambda mode, a: word.extend(mode, *a),
    "wide_lo": lambda mode, a: word.wide(a[0], a[1], a[2], a[3], mode == "u")[0],
    "wide_hi": lambda mode, a: word.wide(a[0], a[1], a[2], a[3], mode == "u")[1],
    "minmax": lambda mode, a: _minmax(mode, a),
}
#: Bytes that a load moves, by what its modifiers say.
_LOADED = {".U8": 1, ".S8": 1, ".U16": 2, ".S16": 2, "": 4}


def _minmax(mode: str, a: Args) -> int:
    x, y = (a[0], a[1]) if "U32" in mode else (word.signed(a[0]), word.signed(a[1]))
    return min(x, y) if a[2] else max(x, y)


def _decided(name: str, mode: str, held: list[int | None]) -> int | None:
    """What part of a condition decides alone: false and anything, true or anything; None where it does not."""
    if name == "and":
        return 0 if 0 in held else None
    if name == "plop3" and held[3] is not None:
        table, known = held[3], held[:3]
        ways = {
            table >> (4 * bits[0] + 2 * bits[1] + bits[2]) & 1
            for bits in itertools.product((0, 1), repeat=3)
            if all(one in (None, bit) for one, bit in zip(known, bits, strict=True))
        }
        return ways.pop() if len(ways) == 1 else None
    forms = mode.split(".")
    # The other predicate alone: anything or true, anything and false.
    alone = {1: "OR", 0: "AND"}.get(held[2]) if name == "setp" and held[2] is not None else None
    if alone in forms and "EX" not in forms:
        return held[2]
    if name == "setp" and held[0] is not None and held[1] is not None:
        compared = {word.compare(mode, held[0], held[1], other) for other in (0, 1)}
        return compared.pop() if len(compared) == 1 else None
    return None


class Thread:
    """Values as one thread sees them; unknown ones are None.

    ``specials`` are its special registers by name, ``given`` numbers for phis and loads (a loop counter, a word of shared
    memory), and only values that came along ``edges`` count, where they are given.  A ``trusting`` one believes that what
    was written under a predicate that cannot be known (an election, a vote) is what is read: compilers compute the address of an
    elected thread's copy under the election as well.  A ``lenient`` one takes what some ways into a meeting point bring for
    all, where the others bring nothing that is known.
    """

    def __init__(
        self,
        values: Values,
        specials: Mapping[str, int],
        given: Mapping[int, int] | None = None,
        edges: Collection[tuple[int, int]] | None = None,
        trusting: bool = False,
        lenient: bool = False,
    ) -> None:
        self._values, self._specials, self._edges = values, specials, edges
        self._trusting, self._lenient = trusting, lenient
        self._given = dict(given or {})
        self._known: dict[int, int | None] = dict(self._given)
        self._under_way: set[int] = set()

    def number(self, value: int | None) -> int | None:
        """The number that ``value`` is, None where it depends on what is not known."""
        if value is None:
            return None
        if value in self._known:
            return self._known[value]
        if value in self._under_way:
            return None
        self._under_way.add(value)
        found = self._compute(value)
        self._under_way.discard(value)
        found = None if found is None else found & word.MASK
        self._known[value] = found
        return found

    def _compute(self, value: int) -> int | None:
        kind, *rest = self._values.graph.nodes[value]
        if kind == "int":
            return int(rest[0])
        if kind == "special":
            return self._specials.get(str(rest[0]))
        if kind == "phi":
            return self._agreed(value)
        if kind == "vote":
            return self._shared(int(rest[1]))
        if kind == "choose":
            taken, new, old = (int(one) for one in rest)
            way = self.number(taken)
            if way is not None:
                return self.number(new if way else old)
            first = self.number(new)
            believed = self._trusting and self._unknowable(taken)
            return first if believed or (first is not None and first == self.number(old)) else None
        if kind == "f":
            name, mode, *args = rest
            held = [self.number(int(one)) for one in args]
            known = tuple(one for one in held if one is not None)
            if len(known) < len(held):
                return _decided(str(name), str(mode), held)
            plain = _PLAIN.get(str(name))
            return plain(known) if plain else _MODED[str(name)](str(mode), known) if name in _MODED else None
        return None

    def _shared(self, predicate: int) -> int | None:
        """What a warp's vote on ``predicate`` says where all its lanes hold the same; None where they may differ."""
        mine = self.number(predicate)
        if mine is None or "SR_TID.X" not in self._specials:
            return None
        lane = self._specials["SR_TID.X"] ^ 31
        other = Thread(
            self._values, {**self._specials, "SR_TID.X": lane, "SR_LANEID": lane % 32}, self._given, self._edges
        )
        return mine if other.number(predicate) == mine else None

    def _unknowable(self, predicate: int) -> bool:
        """Whether a predicate that is not known does not depend on any counter, which would decide it in time."""
        return not frontier(self._values, predicate)

    def _agreed(self, phi: int) -> int | None:
        """What all the ways into a phi bring, other phis of the same web seen through; None where they differ."""
        web, todo, leaves = {phi}, [phi], set()
        while todo:
            one = todo.pop()
            if one != phi and one in self._known and self._known[one] is not None:
                leaves.add(one)
                continue
            block = int(self._values.graph.nodes[one][1])
            for source, held in self._values.inputs[one].items():
                if self._edges is not None and (source, block) not in self._edges:
                    continue
                if held in self._values.inputs:
                    if held not in web:
                        web.add(held)
                        todo.append(held)
                else:
                    leaves.add(held)
        found = {self.number(leaf) for leaf in leaves}
        found -= {None} if self._lenient else set()
        return found.pop() if len(found) == 1 else None


def leaves(values: Values, value: int | None) -> frozenset[int]:
    """What ``value`` rests on: special registers, constants of the launch, loads, phis and unknown results."""
    found, seen = set(), set()
    todo = [] if value is None else [value]
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        kind, *rest = values.graph.nodes[one]
        if kind == "phi":
            found.add(one)
            todo += values.inputs[one].values()
        elif kind in ("f", "choose", "load", "const", "vote"):
            found |= {one} if kind in ("load", "const", "vote") else set()
            skip = {"f": 2, "choose": 0, "load": 2, "const": 1, "vote": 1}[str(kind)]
            todo += [int(part) for part in rest[skip:]]
        elif kind != "int":
            found.add(one)
    return frozenset(found)


def frontier(values: Values, value: int) -> frozenset[int]:
    """The phis that ``value`` is made of directly, without those behind them; kept, as the same values are asked for every lane."""
    if value in values.frontiers:
        return values.frontiers[value]
    found, seen, todo = set(), set(), [value]
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        kind, *rest = values.graph.nodes[one]
        if kind == "phi":
            found.add(one)
        elif kind in ("f", "choose"):
            todo += [int(part) for part in rest[0 if kind == "choose" else 2 :]]
    values.frontiers[value] = frozenset(found)
    return values.frontiers[value]


def loaded_bytes(mode: str) -> int:
    """Bytes that a load with such modifiers moves."""
    return 8 if ".64" in mode else 16 if ".128" in mode else _LOADED.get(mode, 4)
