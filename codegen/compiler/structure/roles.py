"""Which warps run which code: the dispatch on the warp index, followed for each warp of a CTA.

A branch goes one way only for a warp whose index decides it.  Kernels that hand out their roles through shared memory (a byte
for each warp, as Triton's) are followed through the constants that they store there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilecast.codegen.compiler.flow import Flow, Loop
from tilecast.codegen.compiler.structure.evaluate import Thread, leaves, loaded_bytes
from tilecast.codegen.compiler.structure.operands import operands_of, registers_from
from tilecast.codegen.compiler.structure.values import Values

#: Lanes that speak for a warp: what they agree on, its lanes agree on.
_LANES = (0, 1, 31)
#: Warps that a CTA may have at most.
MOST_WARPS = 32
_STORED = {"": 4, ".64": 8, ".128": 16, ".U8": 1, ".U16": 2}
#: What tells a loop that works from one that waits.
_WAITS = frozenset(("TRYWAIT", "TRY_ALLOC", "FIND_AND_SET"))
_WORKS = frozenset({
    "HMMA", "IMMA", "QMMA", "HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA", "UTCBAR",
    "UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UTCCP", "LDGSTS", "LDTM", "STTM", "STG", "LDG", "STS", "LDSM",
    "BAR", "MUFU", "FFMA", "FADD", "FMUL", "FFMA2", "FADD2", "FMUL2", "SHFL",
})  # fmt: skip
Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Reached:
    """What one warp can run: blocks and the ways between them."""

    blocks: frozenset[int]
    edges: frozenset[Edge]


@dataclass(frozen=True, slots=True)
class WarpGroup:
    """Warps of a CTA that run the same loops, and what they can run."""

    warps: tuple[int, ...]
    reached: Reached
    #: Loops that work, and no dispatch.
    loops: tuple[Loop, ...]


def special_registers(warp: int, lane: int = 0, rank: int = 0) -> dict[str, int]:
    """Special registers of a thread that its place in the CTA and in the cluster decides."""
    return {"SR_TID.X": 32 * warp + lane, "SR_TID.Y": 0, "SR_TID.Z": 0, "SR_LANEID": lane, "SR_CgaCtaId": rank}


def waits_only(flow: Flow, loop: Loop) -> bool:
    """Whether a loop polls a barrier, registers or tensor memory and does nothing else."""
    code = flow.code(loop.blocks)
    polls = any(_WAITS & set(i.modifiers.split(".")) or i.opcode == "NANOSLEEP" for i in code)
    arrives = any(i.opcode == "SYNCS" and "ARRIVE" in i.modifiers for i in code)
    return polls and not arrives and not any(i.opcode in _WORKS for i in code)


class Dispatch:
    """The ways of each warp through a listing."""

    def __init__(self, flow: Flow, values: Values, table: Sequence[int] = ()) -> None:
        self.flow, self.values, self._table = flow, values, table
        self._stored = self._stores()
        #: Block -> guards under which a warp ends inside it.
        self._exits = {block: self._guards(range(block, end)) for block, end in flow.ends.items()}

    def _guards(self, indices: Iterable[int]) -> tuple[int, ...]:
        ends = [
            i for i in indices if self.flow.instructions[i].opcode == "EXIT" and self.flow.instructions[i].predicate
        ]
        return tuple(guard for guard in map(self.values.guard, ends) if guard is not None)

    def groups(self, warps: int) -> tuple[WarpGroup, ...]:
        """Warps 0 to ``warps`` - 1 by the loops they run, in the order of their first warps."""
        reached = [self.reached(warp) for warp in range(warps)]
        shared = self._dispatch_blocks(reached)
        work = [loop for loop in self.flow.loops if not waits_only(self.flow, loop)]
        found: dict[frozenset[int], list[int]] = defaultdict(list)
        for warp, way in enumerate(reached):
            mine = [loop.header for loop in work if self._closed(loop, way) and not loop.blocks & shared]
            found[frozenset(mine)].append(warp)
        out = []
        for headers, members in found.items():
            blocks = frozenset().union(*(reached[one].blocks for one in members))
            edges = frozenset().union(*(reached[one].edges for one in members))
            loops = tuple(loop for loop in work if loop.header in headers)
            out.append(WarpGroup(tuple(members), Reached(blocks, edges), loops))
        return tuple(sorted(out, key=lambda group: group.warps))

    @staticmethod
    def _closed(loop: Loop, way: Reached) -> bool:
        """Whether a warp goes round a loop: it reaches the header from inside."""
        return any(target == loop.header and source in loop.blocks for source, target in way.edges)

    def _dispatch_blocks(self, reached: list[Reached]) -> set[int]:
        """Blocks whose table or stored word sends different warps to different places."""
        out = set()
        for block in self.flow.ends:
            ways = {frozenset(edge for edge in way.edges if edge[0] == block) for way in reached if block in way.blocks}
            last = self.flow.ends[block] - 1
            if len(ways) > 1 and (self.flow.instructions[last].opcode == "BRX" or self._loads(self.values.guard(last))):
                out.add(block)
        return out

    def reached(self, warp: int) -> Reached:
        """What ``warp`` can run; the second look knows which ways into a meeting point exist."""
        found = self._walk(warp, None)
        return self._walk(warp, found.edges)

    def _walk(self, warp: int, edges: frozenset[Edge] | None) -> Reached:
        threads = [Thread(self.values, special_registers(warp, lane), None, edges) for lane in _LANES]
        blocks, found, todo = {0}, set(), [0]
        while todo:
            block = todo.pop()
            for after in self._ways(block, warp, threads, edges):
                found.add((block, after))
                if after not in blocks:
                    blocks.add(after)
                    todo.append(after)
        return Reached(frozenset(blocks), frozenset(found))

    def _ways(self, block: int, warp: int, threads: list[Thread], edges: frozenset[Edge] | None) -> list[int]:
        after = self.flow.follows(block)
        if any(self._decided(guard, warp, threads, edges) for guard in self._exits[block]):
            return []
        last = self.flow.ends[block] - 1
        code = self.flow.instructions[last]
        if code.opcode == "BRX":
            return self._indirect(last, after, warp, edges)
        guard = self.values.guard(last)
        taken: int | bool | None = code.taken_together
        if taken is None and guard is not None and code.opcode == "BRA":
            taken = self._decided(guard, warp, threads, edges)
        if taken is None:
            return after
        target = [one for one in after if self.flow.instructions[one].address == code.target]
        return target if taken else [one for one in after if one not in target] or after

    def _decided(self, guard: int, warp: int, threads: list[Thread], edges: frozenset[Edge] | None) -> int | None:
        """The guard's value for a warp; None where its lanes may differ or nothing tells."""
        found = {thread.number(guard) for thread in threads}
        if len(found) == 1 and None not in found:
            return found.pop()
        loads = self._loads(guard)
        if len(loads) != 1:
            return None
        seen = set()
        for held in self.loaded(loads[0], warp, edges):
            seen |= {
                Thread(self.values, special_registers(warp, lane), {loads[0]: held}, edges).number(guard)
                for lane in _LANES
            }
        return seen.pop() if len(seen) == 1 else None

    def _loads(self, value: int | None) -> list[int]:
        return [one for one in leaves(self.values, value) if self.values.graph.nodes[one][0] == "load"]

    def _indirect(self, last: int, after: list[int], warp: int, edges: frozenset[Edge] | None) -> list[int]:
        """Where a branch through a table leads.

        Without the table, the disassembler names its targets in their order, but each only once: they are the table where
        the last number that the kernel stores (which ends its roles) is the last entry.
        """
        code = self.flow.instructions[last]
        held = self.values.of(last, operands_of(code.operands)[0].split(" ")[0])
        loads = self._loads(held)
        node = () if held is None else self.values.graph.nodes[held]
        if len(loads) > 1 or not node or node[0] != "const" or len(node) < 3:
            return after
        given = [{loads[0]: one} for one in self.loaded(loads[0], warp, edges)] if loads else [{}]
        entries = [Thread(self.values, special_registers(warp), one, edges).number(int(node[2])) for one in given]
        known = [one // 4 for one in entries if one is not None]
        table = self._table or (code.targets if max(known, default=-1) == len(code.targets) - 1 else ())
        if len(known) < len(entries) or not known or max(known) >= len(table):
            return after
        return [one for one in after if self.flow.instructions[one].address in {table[i] for i in known}] or after

    def loaded(self, load: int, warp: int, edges: frozenset[Edge] | None = None) -> tuple[int, ...]:
        """Every number that the kernel itself stores where ``load`` reads; none where one of them is unknown."""
        _, _, mode, at = self.values.graph.nodes[load]
        # Every round of a dispatch reads the same place: a round that lost sight of the address does not count.
        place = Thread(self.values, special_registers(warp), None, edges, lenient=True).number(int(at))
        count = loaded_bytes(str(mode))
        if place is None or count > 4:
            return ()
        columns = [self._stored.get(place + i, ()) for i in range(count)]
        if any(not column or None in column for column in columns) or len({len(column) for column in columns}) != 1:
            return ()
        rows = zip(*columns, strict=True)
        return tuple(sorted({sum((byte or 0) << 8 * i for i, byte in enumerate(row)) for row in rows}))

    def _stores(self) -> Mapping[int, tuple[int | None, ...]]:
        """Bytes that are stored in shared memory at known addresses, in the order of the code; None for unknown ones."""
        out: dict[int, tuple[int | None, ...]] = {}
        thread = Thread(self.values, special_registers(0))
        for index, code in enumerate(self.flow.instructions):
            if code.opcode != "STS":
                continue
            operands = operands_of(code.operands)
            place = thread.number(self.values.address(index, operands[0]))
            size = _STORED.get(code.modifiers)
            if place is None or size is None:
                continue
            words = [thread.number(one) for one in self._words(index, operands[1], size)]
            for i in range(size):
                one = words[i // 4]
                out[place + i] = (*out.get(place + i, ()), None if one is None else one >> 8 * (i % 4) & 255)
        return out

    def _words(self, index: int, operand: str, size: int) -> Iterable[int | None]:
        names = registers_from(operand, max(1, size // 4))
        if not names:
            return [self.values.of(index, operand)] * max(1, size // 4)
        return [self.values.of(index, name) for name in names]
