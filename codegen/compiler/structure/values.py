"""What registers hold at every instruction of a listing, as expressions of the thread index, constants and loop counters.

One pass of value numbering over the flow graph, repeated until nothing changes: where ways with different values meet, the
value is a new one that remembers both (a phi).  `evaluate.py` asks such expressions for numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilecast.codegen.compiler.flow import Flow
from tilecast.codegen.compiler.sass import Instruction
from tilecast.codegen.compiler.structure.expressions import Graph, Reader, State
from tilecast.codegen.compiler.structure.operands import named, results

#: Rounds until values settle: as many as loops are nested, and a few.  From the second number on a value that was taken for
#: a meeting of several stays one, so that they do settle.
_ROUNDS, _PATIENCE = 24, 12
#: Opcodes whose operands are not asked for.
_UNASKED = frozenset({
    "FFMA", "FADD", "FMUL", "FFMA2", "FADD2", "FMUL2", "FMNMX", "FMNMX3", "FSEL", "MUFU", "F2FP", "HMMA", "HGMMA",
    "NOP",
})  # fmt: skip


def _wanted(code: Instruction) -> tuple[str, ...]:
    """Registers that an instruction names, and those after them that it uses as well: a copy's barrier, a store's words."""
    names = named(code.operands) + named(code.predicate)
    near = [f"UR{int(name[2:]) + 1}" for name in names if name.startswith("UR")]
    if code.opcode == "STS":
        near += [f"R{int(name[1:]) + i}" for name in names if name[0] == "R" for i in (1, 2, 3)]
    return (*names, *near)


def _written(codes: Iterable[Instruction]) -> frozenset[str]:
    """Every register and predicate that some instruction writes."""
    return frozenset(name for code in codes for names in results(code) for name in names)


class Values:
    """Values before each instruction, by `Flow` of a listing."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.graph = Graph()
        self.reader = Reader(self.graph)
        #: phi -> {block it comes from: value}.
        self.inputs: dict[int, dict[int, int]] = {}
        #: (block, register) -> phi.
        self._phis: dict[tuple[int, str], int] = {}
        #: What `evaluate.frontier` found of values.
        self.frontiers: dict[int, frozenset[int]] = {}
        #: Instruction -> what the registers that it names hold before it.
        self.before: list[State] = [{} for _ in flow.instructions]
        #: Header -> (blocks of the loop, what the loop writes): all else is what it was before.
        self._loops = {loop.header: (loop.blocks, _written(flow.code(loop.blocks))) for loop in flow.loops}
        self._settle()

    def _settle(self) -> None:
        order = list(self.flow.order)
        outs: dict[int, State] = {}
        for turn in range(_ROUNDS):
            changed = False
            for block in order:
                state = self._meet(block, outs, turn >= _PATIENCE)
                for index in range(block, self.flow.ends[block]):
                    code = self.flow.instructions[index]
                    if code.opcode not in _UNASKED or code.predicate:
                        names = _wanted(code)
                        self.before[index] = {name: state[name] for name in names if name in state}
                    self.reader.step(index, code, state)
                changed |= outs.get(block) != state
                outs[block] = state
            if not changed:
                return

    def _meet(self, block: int, outs: dict[int, State], final: bool) -> State:
        ways = [one for one in self.flow.before(block) if one in outs]
        if len(ways) == 1 and len(self.flow.before(block)) == 1:
            return dict(outs[ways[0]])
        out: State = {}
        inside, written = self._loops.get(block, (frozenset(), frozenset()))
        outside = [one for one in ways if one not in inside] or ways
        for name in dict.fromkeys(name for way in ways for name in outs[way]):
            if name not in written and inside and len(outside) == 1:
                out[name] = outs[outside[0]].get(name, self.graph.of("undef", name))
                continue
            held = {
                way: outs[way][name] if name in outs[way] else self.graph.of("undef", name)
                for way in (ways if name in written or not inside else outside)
            }
            phi = self._phis.get((block, name))
            different = set(held.values()) - ({phi} if phi is not None else set())
            if len(different) == 1 and not (final and phi in self.inputs):
                out[name] = different.pop()
                continue
            if phi is None:
                phi = self._phis[block, name] = self.graph.of("phi", block, name)
            self.inputs[phi] = held
            out[name] = phi
        return out

    def phis_at(self, block: int) -> list[int]:
        """The phis of a block: of a loop's header, what its iterations hand on."""
        return [phi for (where, _), phi in self._phis.items() if where == block]

    def of(self, index: int, operand: str) -> int | None:
        """The value of an operand before instruction ``index``."""
        return self.reader.value(operand, self.before[index])

    def address(self, index: int, operand: str) -> int | None:
        """The address in an operand's brackets."""
        return self.reader.address(operand, self.before[index])

    def guard(self, index: int) -> int | None:
        """The value of the predicate under which instruction ``index`` does what it does; None where it always does."""
        code = self.flow.instructions[index]
        asked = [code.predicate.lstrip("@")] if code.predicate else []
        if code.opcode == "BRA":
            first = code.operands.split(",")[0].strip()
            asked += [first] if first.lstrip("!") in named(first) or first.lstrip("!") in ("PT", "UPT") else []
        held = [self.of(index, one) for one in asked]
        known = [one for one in held if one is not None]
        if not known:
            return None
        return known[0] if len(known) == 1 else self.graph.of("f", "and", "", *known)
