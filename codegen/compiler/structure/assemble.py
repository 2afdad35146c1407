"""From a listing to `KernelShape`: each role's path with its loops, their guards and their polls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tilecast.codegen.compiler.binary import Binary
from tilecast.codegen.compiler.flow import Flow
from tilecast.codegen.compiler.flow import Loop as FlowLoop
from tilecast.codegen.compiler.structure.actions import Actions
from tilecast.codegen.compiler.structure.barriers import Places
from tilecast.codegen.compiler.structure.evaluate import Thread, leaves
from tilecast.codegen.compiler.structure.roles import MOST_WARPS, Dispatch, WarpGroup, special_registers, waits_only
from tilecast.codegen.compiler.structure.shape import Barrier, Guard, KernelShape, Loop, Role, Step
from tilecast.codegen.compiler.structure.values import Values

#: Lanes that speak for a warp; what one thread does for all.
_LANES = (0, 1, 31)
_ONE_FOR_ALL = ("matrix", "copy_in", "copy_out", "commit", "arrive", "expect")
_POLLS = ("SYNCS", "UTCATOMSWS", "USETMAXREG")
Path = list[int | FlowLoop]


class ShapeError(ValueError):
    """Machine code without a shape that can be told: what, where, expected, got."""


def kernel_shape(binary: Binary, warps: int | None = None) -> KernelShape:
    """Roles, loops and barriers of a kernel; ``warps`` of a CTA where the file does not say.

    ShapeError where neither file nor caller says how many warps a CTA has, or no warp runs a loop.
    """
    where = f"{binary.file}: {binary.kernel}" if binary.kernel else binary.file
    count = binary.warps or warps
    if count is None:
        said = "the code gives no launch bounds and" if binary.registers is not None else "a listing"
        raise ShapeError(f"{where}: {said} does not say how many warps a CTA has: say --warps")
    if not 1 <= count <= MOST_WARPS:
        raise ShapeError(f"{where}: expected 1 to {MOST_WARPS} warps of a CTA, got {count}")
    flow = Flow(binary.instructions)
    values = Values(flow)
    groups = Dispatch(flow, values, binary.table).groups(count)
    if not any(group.loops for group in groups):
        raise ShapeError(
            f"{where}: expected a loop, found none in {len(flow.instructions)} instructions: nothing repeats"
        )
    readers = [_RoleReader(flow, values, group) for group in groups]
    roles = tuple(_merged([reader.role(binary.registers) for reader in readers]))
    return KernelShape(binary.kernel, binary.target, count, roles, _barriers(roles))


def _merged(roles: Sequence[Role]) -> list[Role]:
    """Roles without loops in one: warps that wait, or leave at once."""
    idle = [role for role in roles if not role.loops]
    if len(idle) < 2:
        return list(roles)
    first = dataclasses.replace(idle[0], warps=tuple(sorted(warp for role in idle for warp in role.warps)))
    return sorted([*(role for role in roles if role.loops), first], key=lambda role: role.warps)


def _barriers(roles: Sequence[Role]) -> tuple[tuple[Barrier, int], ...]:
    found: dict[Barrier, int] = {}
    for role in roles:
        for step in role.whole.steps:
            if step.kind == "init":
                found |= {barrier: step.amount for _, barrier in step.barriers if barrier.resolved}
    return tuple(sorted(found.items(), key=lambda one: one[0].places))


class _RoleReader:
    """Reads the path of one group of warps."""

    def __init__(self, flow: Flow, values: Values, group: WarpGroup) -> None:
        self._flow, self._values, self._group = flow, values, group
        self._actions = Actions(values, Places(values, group))
        self._block_of = {i: begin for begin, end in flow.ends.items() for i in range(begin, end)}
        self._threads = {
            (warp, lane): Thread(values, special_registers(warp, lane), None, group.reached.edges)
            for warp in group.warps
            for lane in _LANES
        }
        self._spins = frozenset(b for loop in flow.loops if waits_only(flow, loop) for b in loop.blocks)

    def role(self, registers: int | None) -> Role:
        everything = FlowLoop(0, self._group.reached.blocks)
        whole = self._loop(everything, "", list(self._group.loops), [])
        ahead = whole.before(whole.inner[0]) if any(isinstance(one, Loop) for one in whole.body) else whole.steps
        budgets = [step.amount for step in ahead if step.kind == "registers"]
        # Warps without a loop give theirs up, and take some back only to leave.
        kept = (budgets[-1] if whole.inner else min(budgets)) if budgets else registers
        return Role(self._group.warps, kept, whole)

    def _loop(self, loop: FlowLoop, name: str, inside: list[FlowLoop], around: list[FlowLoop]) -> Loop:
        """``loop`` with those of ``inside``; the whole role is one without a name."""
        blocks = loop.blocks & self._group.reached.blocks
        inner = [one for one in inside if one.blocks < loop.blocks or (not name and one is not loop)]
        direct = [one for one in inner if not any(one.blocks < other.blocks for other in inner)]
        path = self._flow.path(loop.header, blocks, direct)
        met = [one for one in path if isinstance(one, FlowLoop)]
        order = [*met, *(one for one in direct if one not in met)]
        chain = [*around, loop] if name else around
        built = {
            one.header: self._loop(
                one, f"{name}.{i}" if name else str(i), [x for x in inner if x.blocks < one.blocks], chain
            )
            for i, one in enumerate(order)
        }
        guards, marks, notes, runs = self._guards(path, loop if name else None, blocks, chain)
        body: list[Step | Loop] = []
        for at, one in enumerate(path):
            if isinstance(one, FlowLoop):
                body.append(dataclasses.replace(built[one.header], guard=marks.get(at, "")))
            else:
                step = self._step(one, chain, marks.get(at, ""), notes.get(one, ""))
                mine = runs.get(at, self._group.warps)
                if step.kind in _ONE_FOR_ALL and step.instruction.predicate:
                    mine = tuple(warp for warp in self._running(one) if warp in mine) or mine
                body.append(dataclasses.replace(step, runs=mine) if mine != self._group.warps else step)
        beside = tuple(built[one.header] for one in order if one not in met)
        return Loop(name, self._flow.instructions[loop.header].address, tuple(body), tuple(guards), beside)

    def _step(self, index: int, chain: Sequence[FlowLoop], guard: str, note: str) -> Step:
        step = self._actions.step(index, chain)
        code = step.instruction
        if code.opcode in ("BRA", "BRX") and note:
            step = dataclasses.replace(step, kind=note, note="")
        elif note:
            step = dataclasses.replace(step, note=note)
        under = self._kind(index) if code.predicate and code.opcode != "BRA" and step.kind != "plain" else ""
        sites = step.barriers
        if under == "warp" and sites:
            runs = frozenset(self._warps(index))
            sites = tuple((mine, one) for warps, one in sites if (mine := tuple(w for w in warps if w in runs)))
        return dataclasses.replace(step, guard=guard, under=under, barriers=sites)

    # --- branches -------------------------------------------------------------------------------------------------

    def _guards(
        self, path: Path, loop: FlowLoop | None, blocks: frozenset[int], chain: Sequence[FlowLoop]
    ) -> tuple[list[Guard], dict[int, str], dict[int, str], dict[int, tuple[int, ...]]]:
        """(guards, place in the path -> name of its outermost guard, instruction -> what the branch or the poll there is, place in
        the path -> warps that get there)."""
        place = {one if isinstance(one, int) else one.header: at for at, one in enumerate(path)}
        guards: list[Guard] = []
        marks: dict[int, str] = {}
        notes: dict[int, str] = {}
        runs: dict[int, tuple[int, ...]] = {}
        for at, index in enumerate(path):
            if not isinstance(index, int) or self._flow.ends[self._block_of[index]] != index + 1:
                continue
            other = self._other_way(path, at, index)
            if other is None:
                continue
            poll = self._poll(index, other)
            if poll is not None:
                notes[index] = "retry"
                notes[poll] = "inline" if other in place and place[other] <= at else "away"
                continue
            if loop is not None and (other not in loop.blocks or other == loop.header):
                notes[index] = "exit"
                continue
            end = place.get(other)
            if end is not None:
                inside = (self._warps(index) if loop else ()) or self._running(index)
                runs |= {
                    i: tuple(warp for warp in runs.get(i, inside) if warp in inside)
                    for i in range(at + 1, end)
                    if inside != self._group.warps
                }
            if loop is None or (end is not None and end <= at + 1):
                continue
            notes[index] = "guard"
            kind = self._kind(index)
            name = f"{kind}{sum(guard.kind == kind for guard in guards)}"
            away: tuple[Step, ...] = ()
            if end is None:
                away = self._away(other, blocks, set(place), chain, name)
            else:
                marks |= {i: name for i in range(at + 1, end) if i not in marks}
            turns = (
                self._actions.places.turns(self._values.guard(index), loop)
                if loop and kind in ("uniform", "thread")
                else ()
            )
            guards.append(Guard(name, kind, self._flow.instructions[index].address, away, self._warps(index), turns))
        return guards, marks, notes, runs

    def _other_way(self, path: Path, at: int, index: int) -> int | None:
        """The block that the branch at ``index`` can go to and the path does not; None where there is no choice."""
        code = self._flow.instructions[index]
        if code.opcode != "BRA" or not code.conditional:
            return None
        block = self._block_of[index]
        follows = path[at + 1] if at + 1 < len(path) else None
        taken = follows.header if isinstance(follows, FlowLoop) else follows
        edges = self._group.reached.edges
        ways = [one for one in self._flow.follows(block) if (block, one) in edges and one != taken]
        return ways[0] if len(self._flow.follows(block)) > 1 and ways else None

    def _poll(self, index: int, other: int) -> int | None:
        """The poll whose failure the branch at ``index`` repeats; None where it is about something else."""
        found = leaves(self._values, self._values.guard(index))
        nodes = [self._values.graph.nodes[one] for one in found]
        polls = [
            int(node[1])
            for node in nodes
            if node[0] == "def" and self._flow.instructions[int(node[1])].opcode in _POLLS
        ]
        if not polls:
            return None
        mine = [poll for poll in polls if poll <= index and self._block_of[poll] == self._block_of[index]]
        begin = [poll for poll in polls if poll not in mine]
        # A poll before the loop that hands its answer on, or one whose retry is the branch's other way.
        return mine[-1] if mine else max(begin) if other in self._spins or begin else None

    def _kind(self, index: int) -> str:
        """What decides the predicate of instruction ``index``."""
        guard = self._values.guard(index)
        opcodes, by_thread, voted = set(), False, False
        todo, seen = [] if guard is None else [guard], set()
        while todo:
            one = todo.pop()
            if one in seen:
                continue
            seen.add(one)
            kind, *rest = self._values.graph.nodes[one]
            if kind == "def":
                code = self._flow.instructions[int(rest[0])]
                opcodes.add(code.opcode)
                by_thread |= str(rest[1])[0] != "U"
            elif kind == "special":
                by_thread |= rest[0] in ("SR_TID.X", "SR_LANEID")
            elif kind == "phi":
                todo += self._values.inputs[one].values()
            elif kind == "load":
                by_thread = True
            elif kind == "vote":
                voted = True
            elif kind == "choose":
                todo += [int(part) for part in rest]
            elif kind == "f" and rest[0] not in ("r2ur", "lane0"):
                todo += [int(part) for part in rest[2:]]
        if voted:
            return "vote"
        if "ELECT" in opcodes:
            return "elect"
        if self._warps(index):
            return "warp"
        return "thread" if by_thread else "uniform"

    def _warps(self, index: int) -> tuple[int, ...]:
        """Warps that a guard lets through, where their index decides it and they differ; a branch's stay on the path."""
        guard = self._values.guard(index)
        told = {warp: {self._threads[warp, lane].number(guard) for lane in (0, 31)} for warp in self._group.warps}
        if any(len(one) > 1 or None in one for one in told.values()) or len({*map(frozenset, told.values())}) < 2:
            return ()
        runs = 0 if self._flow.instructions[index].opcode == "BRA" else 1
        return tuple(warp for warp, one in told.items() if one == {runs})

    def _running(self, index: int) -> tuple[int, ...]:
        """Warps in whose warpgroup a thread may run an instruction, or what stands behind a branch; all where nothing tells them apart.

        (What one thread does for its warpgroup, the warp of it that is simulated does.)
        """
        guard = self._values.guard(index)
        if guard is None or len(self._group.warps) == 1:
            return self._group.warps
        off = 1 if self._flow.instructions[index].opcode == "BRA" else 0
        found = {
            warp // 4
            for warp in self._group.warps
            if any(self._threads[warp, lane].number(guard) != off for lane in _LANES)
        }
        return tuple(warp for warp in self._group.warps if warp // 4 in found) or self._group.warps

    def _away(
        self, begin: int, blocks: frozenset[int], known: set[int], chain: Sequence[FlowLoop], name: str
    ) -> tuple[Step, ...]:
        """Steps from ``begin`` on until the path is met again."""
        inside = frozenset(block for block in blocks if block not in known)
        path = self._flow.path(begin, inside, [])
        return tuple(self._step(i, chain, name, "") for i in path if isinstance(i, int))
