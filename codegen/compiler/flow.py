"""Control flow of a listing: basic blocks, natural loops, warp roles, and the path that one pass through them takes.

Addresses say little: compilers move waits, loop bodies and whole roles out of line.  A loop is therefore found by
dominance (a branch back to a block that every way to the branch leads through), and code is read along branches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from tilecast.codegen.compiler.opcodes import pipe_of
from tilecast.codegen.compiler.sass import Instruction

#: Loops shorter than this wait for a barrier; they do not make the loop around them an outer one.
_SPIN = 16
#: Selects in a stretch that make it masking code, and the length from which leaving it out matters.
_MASKING_SELECTS, _MASKING_LENGTH = 16, 48
#: Stands before the first instruction and before code that only indirect branches reach.
_ENTRY = -1


@dataclass(frozen=True, slots=True)
class Loop:
    """A natural loop; blocks are named by the index of their first instruction."""

    header: int
    blocks: frozenset[int]


@dataclass(frozen=True, slots=True)
class SteadyLoop:
    """What an iteration of a loop executes, without the masking code that a branch jumps over where no mask is needed."""

    begin: int
    instructions: tuple[Instruction, ...]
    #: Instructions of the masking code.
    skipped: int = 0

    def opcodes(self) -> Counter[str]:
        """Instructions by opcode."""
        return Counter(i.opcode for i in self.instructions)

    def pipes(self) -> Counter[str]:
        """Instructions by pipe."""
        return Counter(pipe_of(i.opcode) for i in self.instructions)


def hides_scores(code: Sequence[Instruction]) -> bool:
    """Whether a stretch of code masks scores and does nothing else: many selects and no exponential."""
    selects = sum(i.opcode in ("FSEL", "SEL") for i in code)
    return len(code) >= _MASKING_LENGTH and selects >= _MASKING_SELECTS and all(i.opcode != "MUFU" for i in code)


class Flow:
    """Blocks, loops and roles of a listing."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.instructions = tuple(instructions)
        at = {instruction.address: i for i, instruction in enumerate(self.instructions)}
        jumps = {i: [at[t] for t in x.targets if t in at] for i, x in enumerate(self.instructions) if x.targets}
        begins = {0} | {t for targets in jumps.values() for t in targets}
        for i, x in enumerate(self.instructions):
            if x.opcode == "USETMAXREG":
                begins.add(i)
            if i in jumps or not x.goes_on:
                begins.add(i + 1)
        edges = sorted(begins - {len(self.instructions)})
        #: First instruction of a block -> one after its last.
        self.ends = dict(zip(edges, [*edges[1:], len(self.instructions)], strict=True))
        self._graph = nx.DiGraph()
        self._graph.add_nodes_from(edges)
        for begin, end in self.ends.items():
            if self.instructions[end - 1].goes_on and end in self.ends:
                self._graph.add_edge(begin, end)
            for target in jumps.get(end - 1, ()):
                # A BSSY names where lanes meet again, and does not go there: its BSYNC does, from right before as a rule.
                if self.instructions[end - 1].opcode != "BSSY" or self.instructions[target - 1].opcode != "BSYNC":
                    self._graph.add_edge(begin, target)
        self._enter()

    def _enter(self) -> None:
        """Edges from `_ENTRY`: to the first block, and to code whose indirect branches the disassembler did not resolve."""
        reached = {_ENTRY}
        for begin in self.ends:
            if begin not in reached:
                self._graph.add_edge(_ENTRY, begin)
                reached |= {begin} | nx.descendants(self._graph, begin)

    def block(self, begin: int) -> tuple[Instruction, ...]:
        """Instructions of the block that starts at ``begin``."""
        return self.instructions[begin : self.ends[begin]]

    def code(self, blocks: Iterable[int]) -> tuple[Instruction, ...]:
        """Instructions of ``blocks`` in address order."""
        return tuple(i for begin in sorted(blocks) for i in self.block(begin))

    def follows(self, begin: int) -> list[int]:
        """Blocks that can follow one: the next in address order before the target of its branch."""
        return list(self._graph.successors(begin))

    def before(self, begin: int) -> list[int]:
        """Blocks that can come before one."""
        return [one for one in self._graph.predecessors(begin) if one != _ENTRY]

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Blocks, each before those that can follow it but for ways back."""
        return tuple(reversed([one for one in nx.dfs_postorder_nodes(self._graph, _ENTRY) if one != _ENTRY]))

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Natural loops by header; branches back to one header make one loop."""
        above: dict[int, int] = nx.immediate_dominators(self._graph, _ENTRY)
        blocks: dict[int, set[int]] = {}
        for source, target in self._graph.edges:
            if source == _ENTRY or not self._dominates(above, target, source):
                continue
            found = blocks.setdefault(target, {target})
            todo = [source]
            while todo:
                one = todo.pop()
                if one not in found:
                    found.add(one)
                    todo += self._graph.predecessors(one)
        return tuple(Loop(header, frozenset(found)) for header, found in sorted(blocks.items()))

    @staticmethod
    def _dominates(above: Mapping[int, int], upper: int, lower: int) -> bool:
        """Whether every way to ``lower`` leads through ``upper``."""
        while lower != upper:
            if lower == _ENTRY:
                return False
            lower = above[lower]
        return True

    def roles(self) -> dict[int, frozenset[int]]:
        """Blocks of each warp role, by where it begins.

        A warp-specialised kernel is one function; a role begins where its warps change their register budget.
        """
        entries = [begin for begin in self.ends if self.instructions[begin].opcode == "USETMAXREG"]
        found = {}
        for entry in entries:
            blocks, todo = {entry}, [entry]
            while todo:
                for one in self._graph.successors(todo.pop()):
                    if one not in blocks and one not in entries:
                        blocks.add(one)
                        todo.append(one)
            found[entry] = frozenset(blocks)
        return found

    def innermost(self, opcodes: Collection[str], blocks: frozenset[int] | None = None) -> list[Loop]:
        """Loops (of ``blocks``) with instructions of ``opcodes`` and no smaller such loop inside, in address order."""
        mine = [
            loop
            for loop in self.loops
            if (blocks is None or loop.blocks <= blocks) and any(i.opcode in opcodes for i in self.code(loop.blocks))
        ]
        return [a for a in mine if not any(b.blocks < a.blocks for b in mine)]

    def iteration(self, loop: Loop, masked: bool = True) -> list[int]:
        """Indices of what an iteration of ``loop`` executes; without ``masked``, branches over masking code are taken."""
        return [i for i in self.path(loop.header, loop.blocks, (), masked) if isinstance(i, int)]

    def path(
        self, begin: int, inside: Collection[int], loops: Collection[Loop], masked: bool = True
    ) -> list[int | Loop]:
        """Indices of the instructions executed from block ``begin`` on, until the path leaves ``inside`` or meets itself.

        Each of ``loops`` is entered, once, and stands in the path for its iterations.  Other branches forward skip what a
        warp votes for, and without ``masked`` masking code; so waits and rare cases, out of line or not, are left out.
        """
        left = {loop.header: loop for loop in loops}
        out: list[int | Loop] = []
        seen: set[int] = set()
        at: int | None = begin
        while at is not None:
            if at in left:
                loop = left.pop(at)
                out.append(loop)
                seen |= loop.blocks
                at = self._after(loop, inside, left, seen)
                continue
            seen.add(at)
            out += range(at, self.ends[at])
            at = self._next(at, inside, left, seen, masked)
        return out

    def _next(
        self, at: int, inside: Collection[int], left: Mapping[int, Loop], seen: set[int], masked: bool
    ) -> int | None:
        ways = [one for one in self.follows(at) if one in inside and one not in seen]
        if len(ways) == 2 and (self._votes(at) or (not masked and self._hides(ways[0], ways[1]))):
            ways.reverse()
        if self.instructions[self.ends[at] - 1].taken_together is not None:
            return self._together(at, ways)
        return self._best(ways, inside, left, seen)

    def _together(self, at: int, ways: list[int]) -> int | None:
        """Where a warp goes whose lanes run together, at a branch that asks for that."""
        branch = self.instructions[self.ends[at] - 1]
        taken = [one for one in ways if self.instructions[one].address == branch.target]
        left = taken if branch.taken_together else [one for one in ways if one not in taken]
        return next(iter(left or ways), None)

    def _after(self, loop: Loop, inside: Collection[int], left: Mapping[int, Loop], seen: set[int]) -> int | None:
        """Where the path goes on when ``loop`` is done: from the branch that repeats it where that one can also leave."""
        blocks = [i for i in self.iteration(loop) if i in self.ends]
        ways = [one for block in reversed(blocks) for one in self.follows(block) if one in inside and one not in seen]
        return self._best(ways, inside, left, seen)

    def _best(self, ways: list[int], inside: Collection[int], left: Mapping[int, Loop], seen: set[int]) -> int | None:
        """The way that leads to most of the loops ``left``, the first among equals."""
        if len(ways) < 2 or not left:
            return ways[0] if ways else None
        return max(ways, key=lambda way: len(self._reached(way, inside, seen) & left.keys()))

    def _reached(self, begin: int, inside: Collection[int], seen: set[int]) -> set[int]:
        found, todo = {begin}, [begin]
        while todo:
            for one in self._graph.successors(todo.pop()):
                if one in inside and one not in seen and one not in found:
                    found.add(one)
                    todo.append(one)
        return found

    def _votes(self, at: int) -> bool:
        """Whether the block at ``at`` ends by skipping what only runs where some thread of the warp voted for it, there or in a block before,
        as where a branch lies between."""
        branch = self.instructions[self.ends[at] - 1]
        if not branch.predicate.startswith("@!"):
            return False
        asked = branch.predicate.removeprefix("@!")
        code = (self.instructions[i] for i in range(self.ends[at] - 2, -1, -1))
        made = next((i for i in code if i.operands.split(",")[0].strip() == asked), None)
        return made is not None and made.opcode == "VOTE" and "ANY" in made.modifiers

    def _hides(self, begin: int, end: int) -> bool:
        return begin < end and hides_scores(self.instructions[begin:end])


def steady_loops(instructions: Sequence[Instruction]) -> tuple[SteadyLoop, ...]:
    """Loops that contain no other loop but waits, in address order."""
    flow = Flow(instructions)
    long = [loop for loop in flow.loops if len(flow.iteration(loop)) >= _SPIN]
    out = []
    for loop in long:
        if not any(other.blocks < loop.blocks for other in long):
            all_of_it, kept = flow.iteration(loop), flow.iteration(loop, masked=False)
            code = tuple(flow.instructions[i] for i in kept)
            out.append(SteadyLoop(loop.header, code, len(all_of_it) - len(kept)))
    return tuple(out)
