"""What one instruction makes of the values it reads: integer instructions become expressions, the rest new unknowns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tilecast.codegen.compiler.sass import Instruction
from tilecast.codegen.compiler.structure.arithmetic import MASK, halves
from tilecast.codegen.compiler.structure.operands import named, operands_of, registers_from, results, slots, width_of

#: A node of the graph of values: what it is, then numbers, texts and the indices of other nodes.
Node = tuple[str | int, ...]
_NUMBER = re.compile(r"^-?(0x[0-9a-f]+|\d+)$")
_PARTS = re.compile(r"-?0x[0-9a-f]+|-?\bU?R\d+\b")
_MOVES = frozenset(("MOV", "UMOV", "MOV32I"))
_READS = re.compile(r"^(LDC|LDCU|ULDC)$")


@dataclass
class Graph:
    """Values by index, each once: equal indices are equal values, whatever the machine does."""

    nodes: list[Node] = field(default_factory=list)
    _index: dict[Node, int] = field(default_factory=dict)

    def of(self, *node: str | int) -> int:
        """The index of a node."""
        found = self._index.get(node)
        if found is None:
            found = self._index[node] = len(self.nodes)
            self.nodes.append(node)
        return found

    def number(self, value: int) -> int:
        """The index of a constant word."""
        return self.of("int", value & MASK)


State = dict[str, int]


def bracket(operand: str) -> str:
    """What stands in the (last) brackets of an address; "" where there are none."""
    return operand[operand.rindex("[") + 1 : operand.rindex("]")] if "[" in operand and "]" in operand else ""


class Reader:
    """Expressions of the instructions of a listing, given what registers hold before each."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        #: The predicate of the instruction at hand: what was written under the same one is what it reads.
        self._under: int | None = None
        self._handlers: Mapping[str, Callable[[Instruction, list[str], State], dict[str, int] | None]] = {
            "IADD3": self._add, "UIADD3": self._add, "VIADD": self._add, "IMAD": self._mad, "UIMAD": self._mad,
            "LEA": self._lea, "ULEA": self._lea, "SHF": self._shf, "USHF": self._shf, "LOP3": self._lop3,
            "ULOP3": self._lop3, "ISETP": self._setp, "UISETP": self._setp, "SEL": self._sel, "USEL": self._sel,
            "PLOP3": self._plop3, "UPLOP3": self._plop3, "PRMT": self._prmt, "UPRMT": self._prmt, "SGXT": self._sgxt,
            "USGXT": self._sgxt, "HFMA2": self._halves, "VIMNMX": self._minmax, "UVIMNMX": self._minmax,
            "VIADDMNMX": self._add_minmax, "UVIADDMNMX": self._add_minmax,
            "SHFL": self._shuffle, "VOTE": self._vote, "VOTEU": self._vote,
        }  # fmt: skip

    def step(self, index: int, code: Instruction, state: State) -> None:
        """Change ``state`` as the instruction does."""
        registers, flags = results(code)
        if not registers and not flags:
            return
        taken = self.value(code.predicate.lstrip("@"), state) if code.predicate else None
        self._under = taken
        found = self._values(index, code, state) or {}
        self._under = None
        for name in (*registers, *flags):
            new = found.get(name)
            if new is None:
                new = self.graph.of("def", index, name)
            old = self._held(name, state)
            if taken is not None and new != old:
                new = self.graph.of("choose", taken, new, old)
            state[name] = new

    def _held(self, name: str, state: State) -> int:
        found = state.get(name)
        return self.graph.of("undef", name) if found is None else found

    def value(self, operand: str, state: State) -> int | None:
        """What an operand holds; None for what is no integer, register, predicate or constant bank."""
        if operand in ("RZ", "URZ", "SRZ"):
            return self.graph.number(0)
        if operand.startswith("!"):
            inner = self.value(operand[1:], state)
            return None if inner is None else self.graph.of("f", "not", "", inner)
        if operand in ("PT", "UPT"):
            return self.graph.number(1)
        if _NUMBER.match(operand):
            return self.graph.number(int(operand, 0))
        if operand[:1] in "-~" and operand[1:2].isalpha():
            inner = self.value(operand[1:], state)
            return None if inner is None else self.graph.of("f", "neg" if operand[0] == "-" else "inv", "", inner)
        if operand.startswith("c"):
            return self.graph.of("const", operand, *(self._held(name, state) for name in named(operand)))
        registers = registers_from(operand, 1)
        if registers:
            return self._read(registers[0], state)
        return self._read(operand, state) if named(operand) == (operand,) else None

    def _read(self, name: str, state: State) -> int:
        held = self._held(name, state)
        while self._under is not None and self.graph.nodes[held][:2] == ("choose", self._under):
            held = int(self.graph.nodes[held][2])
        return held

    def address(self, operand: str, state: State) -> int | None:
        """The sum in the brackets of an operand, without a descriptor."""
        inner = bracket(operand)
        if not inner:
            return None
        parts = [self.value(part.replace("--", ""), state) for part in _PARTS.findall(inner)]
        known = [part for part in parts if part is not None]
        return self.graph.of("f", "add", "", *known) if known else self.graph.number(0)

    def _values(self, index: int, code: Instruction, state: State) -> dict[str, int] | None:
        operands = list(operands_of(code.operands))
        opcode = code.opcode
        if opcode in _MOVES:
            return self._named(operands[0], self.value(operands[1], state))
        if opcode == "R2UR":
            sources = [one for one in operands if registers_from(one, 1)]
            value = self.value(sources[-1], state) if len(sources) > 1 else None
            return None if value is None else self._named(operands[0], self.graph.of("f", "r2ur", "", value))
        if opcode in ("S2R", "S2UR"):
            return self._named(operands[0], self.graph.of("special", operands[1]))
        if opcode == "CS2R":
            zero = self.graph.number(0)
            return dict.fromkeys(registers_from(operands[0], 2), zero) if "SRZ" in operands else None
        if _READS.match(opcode):
            held = self.value(operands[1], state)
            names = registers_from(operands[0], 2 if ".64" in code.modifiers else 1)
            if held is None:
                return None
            return {name: self.graph.of("f", "word", str(i), held) if i else held for i, name in enumerate(names)}
        if opcode == "STL":
            held_by = zip(slots(operands[0], width_of(code)), registers_from(operands[1], width_of(code)), strict=False)
            return {slot: self._held(name, state) for slot, name in held_by}
        if opcode == "LDL":
            read_from = zip(
                registers_from(operands[0], width_of(code)), slots(operands[1], width_of(code)), strict=False
            )
            return {name: self._held(slot, state) for name, slot in read_from}
        if opcode == "LDS":
            at = self.address(operands[1], state)
            return None if at is None else self._named(operands[0], self.graph.of("load", index, code.modifiers, at))
        handler = self._handlers.get(opcode)
        return handler(code, operands, state) if handler else None

    def _named(self, operand: str, value: int | None) -> dict[str, int]:
        names = registers_from(operand, 1)
        return {names[0]: value} if names and value is not None else {}

    def _apply(self, target: str, name: str, mode: str, *operands: int | None) -> dict[str, int] | None:
        known = [one for one in operands if one is not None]
        if len(known) < len(operands):
            return None
        return {target: self.graph.of("f", name, mode, *known)}

    def _sources(self, operands: list[str], state: State) -> list[int | None]:
        """Values behind the results: what follows the first register and the predicates that are results with it."""
        rest = operands[1:]
        while rest and (rest[0] in ("PT", "UPT") or re.fullmatch(r"U?P\d", rest[0])):
            rest = rest[1:]
        return [self.value(one, state) for one in rest]

    def _add(self, code: Instruction, operands: list[str], state: State) -> dict[str, int] | None:
        if code.modifiers:  # with a carry, or of two words
            return None
        return self._apply(operands[0], "add", "", *self._sources(operands, state)[:3])

    def _mad(self, code: Instruction, operands: list[str], state: State) -> dict[str, int] | None:
        sources, forms = self._sources(operands, state), code.modifiers
        if "WIDE" in forms or "HI" in forms:
            high = registers_from(operands[-1], 2)
            top = self._held(high[1], state) if high else self.graph.number(0)
            first = registers_from(operands[0], 2)
            if not first or None in sources[:3]:
                return None
            unsigned = "u" if "U32" in forms else "s"
            args = [*(one for one in sources[:3] if one is not None), top]
            if "HI" in forms:
                return {first[0]: self.graph.of("f", "wide_hi", unsigned, *args)}
            return {first[0]: self.graph.of("f", "wide_lo", unsigned, *args), first[1]: self.graph.of("f", "wide_hi", unsigned, *args)}  # fmt: skip
        if ".X" in forms:
            return None
        return self._apply(operands[0], "mad", "", *sources[:3])

    def _lea(self, code: Instruction, operands: list[str], state: State) -> dict[str, int] | None:
        sources = self._sources(operands, state)
        if not code.modifiers:
            return self._apply(operands[0], "lea", "", *sources[:3])
        if code.modifiers == ".HI" and len(sources) >= 4:
            return self._apply(operands[0], "lea_hi", "", *sources[:4])
        return self._apply(operands[0], "lea_hi_s", "", *sources[:3]) if code.modifiers == ".HI.SX32" else None

    def _shf(self, code: Instruction, operands: list[str], state: State) -> dict[str, int] | None:
        return self._apply(operands[0], "shf", code.modifiers, *self._sources(operands, state)[:3])

    def _lop3(self, code: Instruction, operands: list[str], state: State) -> dict[str, int] | None:
        flag = operands[0] if re.fullmatch(r"U?P[T\d]", operands[0]) or operands[0] == "UPT" else ""
        body = operands[1:] if flag else operands
        sources = [self.value(one, state) for one in body[1:5]]
        found = self._apply(body[0], "lop3", "", *sources)
        if found is None or not flag:
            return found
        # The predicate says whether any bit is set; what it is combined with is PT or its opposite, false.
        return {**found, flag: self.graph.of("f", "any", "", found[body[0]])}

    def _setp(self, code: Instruction, operands: list[str], state: State) -> dict[str, int] | None:
        return self._apply(operands[0], "setp", code.modifiers, *(self.value(one, state) for one in operands[2:5]))

    def _sel(self, _code: Instruction, operands: list[str], state: State) -> dict[str, int] | None:
        a, b, taken = (self.value(one, state) for one in operands[1:4])
        return None if a is None or b is None or taken is None else {operands[0]: self.graph.of("choose", taken, a, b)}

    def _plop3(self, _code: Instruction, operands: list[str], state: State) -> dict[str, int] | None:
        return self._apply(operands[0], "plop3", "", *(self.value(one, state) for one in operands[2:6]))

    def _prmt(self, _code: Instruction, operands: list[str], state: State) -> dict[str, int] | None:
        return self._apply(operands[0], "prmt", "", *(self.value(one, state) for one in operands[1:4]))

    def _sgxt(self, code: Instruction, operands: list[str], state: State) -> dict[str, int] | None:
        return self._apply(operands[0], "sgxt", code.modifiers, *(self.value(one, state) for one in operands[1:3]))

    def _halves(self, _code: Instruction, operands: list[str], _state: State) -> dict[str, int] | None:
        if len(operands) < 5 or operands[1:3] != ["-RZ", "RZ"]:
            return None
        word = halves(operands[3], operands[4])
        return None if word is None else {operands[0]: self.graph.number(word)}

    def _minmax(self, code: Instruction, operands: list[str], state: State) -> dict[str, int] | None:
        if "RELU" in code.modifiers:
            return None
        return self._apply(operands[0], "minmax", code.modifiers, *self._sources(operands, state)[:3])

    def _add_minmax(self, code: Instruction, operands: list[str], state: State) -> dict[str, int] | None:
        a, b, c, taken = (*self._sources(operands, state), None, None, None, None)[:4]
        if a is None or b is None or c is None or taken is None or "RELU" in code.modifiers:
            return None
        return {
            operands[0]: self.graph.of("f", "minmax", code.modifiers, self.graph.of("f", "add", "", a, b), c, taken)
        }

    def _vote(self, code: Instruction, operands: list[str], state: State) -> dict[str, int] | None:
        # Each vote on a predicate has one outcome: a copy's operands and the copy often ask again.
        held = self.value(operands[-1], state)
        if held is None:
            return None
        found = self.graph.of("vote", code.modifiers, held)
        names = registers_from(operands[0], 1)
        return {names[0] if names else operands[0]: found}

    def _shuffle(self, code: Instruction, operands: list[str], state: State) -> dict[str, int] | None:
        # Lane 0's value for all is how a kernel tells the compiler that a value is the warp's.
        if code.modifiers != ".IDX" or operands[3] != "RZ":
            return None
        held = self.value(operands[2], state)
        return None if held is None else {operands[1]: self.graph.of("f", "lane0", "", held)}
