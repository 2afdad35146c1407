"""Run compiled warps through one SM sub-partition, instruction by instruction.

A warpgroup has one warp on each of the four sub-partitions, and they do the same, so one sub-partition with one warp of
every warpgroup stands for the SM.  The rules:

- one instruction a cycle; a warp's next instruction waits for the stall count of its last and for the counters in its
  wait mask, as the compiler wrote them;
- a pipe is occupied for `WarpCosts.pipe` cycles; an ex2 holds its warp for two, whatever its stall count (measured: `tilecast
  calibrate`, corun/beside_mma without products, softmax of one warp);
- while a product runs it goes first: ex2 takes longer, and of FMA and ALU instructions, of all warps together, one goes in
  four cycles (`slot_under_mma`), the time of a product's step of eight columns (measured: FMA data/measured/h200_two_warpgroups.csv,
  ALU `tilecast calibrate`, corun/beside_mma);
- shuffles and spilled words go through the port of shared memory and take from a product what it does not leave of that
  (measured: `tilecast calibrate`, corun/beside_mma); where it leaves nothing, they and arrivals at barriers hold their warps,
  several in a row as long as one (`port_hold`; measured: data/measured/h200_smem_bursts.csv);
- code that the first instruction cache does not hold is fetched at the rate of `fetch`;
- the tensor core serves products in the order of their issue (measured: data/measured/h200_two_warpgroups.csv); `mma_queue`
  at most are under way, from all warps together, and a warp whose next one finds no room stands still; with A in shared memory
  one can begin `mma_fetch` cycles after its issue (both measured: `tilecast calibrate`, wgmma_latency); while K and V come in
  products take `mma_beside_copy` of that time longer (measured: smem/beside_mma);
- spilled registers are stored through L1 to L2 at the rate all SMs share (measured: `tilecast calibrate --only local`);
  a queue of them waits at most, and reloads find in L1 what was used last;
- barriers, copies and turn-taking are events: a full barrier opens when its copy has landed, a slot is free when every
  warpgroup has let it go.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tilecast.model.compiled.code import PIPES, CodeError, WarpInstruction
from tilecast.model.compiled.costs import WarpCosts
from tilecast.model.compiled.units.fetch import InstructionCache
from tilecast.model.compiled.units.prepared import Prepared, prepare
from tilecast.model.compiled.units.spread import SPREAD, Spread
from tilecast.model.compiled.units.steps import Program, Step, Tag
from tilecast.model.compiled.units.wgmma import WgmmaQueue

MARK = WarpInstruction("other", 1, 0, 7, 7, "fixed", "mark")


@dataclass(frozen=True, slots=True)
class Cta:
    """A CTA on the SM: a program for each warpgroup, and the copies that its producer issues, in order."""

    programs: tuple[Sequence[Step], ...]
    #: (tag, bytes, slots of its ring, latency in cycles, share that comes from memory); empty where consumers issue their own copies.
    copies: tuple[tuple[Tag, float, int, float, float], ...]
    #: tag name -> (bytes, latency, share from memory) of copies that consumers issue.
    own_copies: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    begins: float = 0.0
    #: [program][step] the line of code that holds the instruction; empty where fetching it is not looked at.
    lines: tuple[Sequence[int], ...] = ()

    def lines_of_steps(self) -> tuple[Sequence[int], ...]:
        """``lines``, or those the programs know themselves."""
        return self.lines or tuple(program.lines for program in self.programs if isinstance(program, Program))


@dataclass(frozen=True, slots=True)
class SmRun:
    """When every program reached its marks, and how long units were busy."""

    #: [program][mark] cycles.
    marks: tuple[tuple[float, ...], ...]
    end: float
    tensor_cycles: float
    instructions: int
    #: Cycles by pipe (one sub-partition).
    busy: dict[str, float]


class _Warp:
    __slots__ = (
        "barriers_passed", "code", "counters", "cta", "free", "held", "index", "last", "line", "lines", "marks", "number", "pc", "prepared", "ready", "table", "turns_taken",
    )  # fmt: skip

    def __init__(
        self, index: int, cta: int, number: int, code: tuple[Step, ...], begins: float, lines: Sequence[int],
        table: dict[WarpInstruction, Prepared],
    ) -> None:  # fmt: skip
        self.lines, self.line = lines, -1
        self.index, self.cta, self.number, self.code, self.pc, self.free = index, cta, number, code, 0, begins
        self.table = table
        self.marks: list[float] = []
        self.counters = [0.0] * 6
        self.last = 0
        self.turns_taken = 0
        self.barriers_passed = 0
        #: Until when what does not go through the port of shared memory waits.
        self.held = 0.0

    def advance(self) -> None:
        """Look up the next instruction and when the warp itself is ready for it."""
        prepared = self.table[self.code[self.pc][0]]
        ready = self.free if prepared.hold else max(self.free, self.held)
        for bit in prepared.waits:
            if self.counters[bit] > ready:
                ready = self.counters[bit]
        self.prepared, self.ready = prepared, ready


class _State:
    """Everything that changes during a run."""

    def __init__(self, ctas: Sequence[Cta], costs: WarpCosts, mma: dict[tuple[int, bool], float]) -> None:
        self.ctas, self.costs = ctas, costs
        distinct = {step[0] for cta in ctas for code in cta.programs for step in code}
        table = {instruction: prepare(instruction, costs, mma) for instruction in distinct}
        lines = [cta.lines_of_steps() for cta in ctas]
        cache = InstructionCache([held for of_cta in lines for held in of_cta], costs)
        self.cache = cache if cache.needed else None
        programs = [
            (i, w, tuple(code), cta.begins, lines[i][w] if self.cache else ())
            for i, cta in enumerate(ctas)
            for w, code in enumerate(cta.programs)
        ]
        self.warps = [_Warp(index, *program, table) for index, program in enumerate(programs)]
        self.full: list[dict[Tag, float]] = [{} for _ in ctas]
        self.released: list[dict[Tag, list[float]]] = [{} for _ in ctas]
        self.turns: list[list[list[float]]] = [[[] for _ in cta.programs] for cta in ctas]
        self.met: list[dict[int, dict[int, float]]] = [{} for _ in ctas]
        self.next_copy = [0] * len(ctas)
        self.producer_free = [cta.begins for cta in ctas]
        self.spread = Spread()
        self.engine_free = 0.0
        self.memory_free = 0.0
        self.store_free = 0.0
        #: Spilled words (warp, word) in L1, the least recently used first.
        self.spilled: OrderedDict[tuple[int, int], None] = OrderedDict()
        self.tensor = WgmmaQueue(
            len(self.warps), costs.mma_queue, costs.mma_latency, costs.mma_fetch, costs.mma_beside_copy
        )
        for i in range(len(ctas)):
            self.produce(i)

    def produce(self, index: int) -> None:
        """Let a producer issue every copy whose slot is known to be free."""
        cta, costs = self.ctas[index], self.costs
        while self.next_copy[index] < len(cta.copies):
            (name, number), size, slots, latency, share = cta.copies[self.next_copy[index]]
            at = self.producer_free[index]
            if number >= slots:
                let_go = self.released[index].get((name, number - slots), [])
                # Q has a ring for each warpgroup; K and V are shared by all.
                if len(let_go) < (1 if name.startswith("Q") else len(cta.programs)):
                    return
                at = max(at, *(t + costs.handover for t in let_go))
            self.producer_free[index] = at + costs.tma_issue
            landed = self.full[index][(name, number)] = self.copy(at, size, share) + latency
            if size:
                self.tensor.copy(landed - size / costs.tma_bytes_per_clk, landed)
            self.next_copy[index] += 1

    def copy(self, at: float, size: float, share: float) -> float:
        """When ``size`` bytes asked for at ``at`` have moved (without latency).

        ``share`` of them come from memory, at one SM's part of its rate, which stores also take from; all come through
        the copy engine, one tile after the other, but for tiles of Q, which nothing waits behind.
        """
        if share:
            self.memory_free = max(self.memory_free, at) + share * size / self.costs.memory_bytes_per_clk
            if share >= 1.0:
                return self.memory_free
        self.engine_free = max(self.engine_free, at) + size / self.costs.tma_bytes_per_clk
        return max(self.engine_free, self.memory_free) if share else self.engine_free

    def store(self, now: float, size: float, rate: float) -> None:
        """A store of ``size`` bytes (the four warps of a warpgroup store the same at the same time) enters the queue to L2."""
        self.store_free = max(self.store_free, now) + size / rate

    def holds(self, warp: _Warp, word: int) -> bool:
        """Whether L1 holds a spilled word; it does from now on."""
        key = (warp.index, word)
        found = key in self.spilled
        self.spilled[key] = None
        self.spilled.move_to_end(key)
        if len(self.spilled) > self.costs.spill_words:
            self.spilled.popitem(last=False)
        return found

    def opens(self, warp: _Warp, tag: Tag) -> float | None:
        """When the barrier of a wait opens; None while that is unknown."""
        if tag[0] != "turn":
            return self.full[warp.cta].get(tag)
        before = self.turns[warp.cta][(warp.number - 1) % len(self.turns[warp.cta])]
        needed = warp.turns_taken + (warp.number > 0)
        if needed == 0:
            return 0.0
        return before[needed - 1] if len(before) >= needed else None

    def jitter(self) -> float:
        """Cycles a barrier waits for the slowest of its warps beyond the usual, evenly spread, always the same sequence."""
        return self.costs.barrier_spread * self.spread.next() / (SPREAD - 1)

    def arrive(self, warp: _Warp, tag: Tag, now: float) -> None:
        """A warpgroup passes its turn on, or lets a slot go."""
        if tag[0] == "turn":
            self.turns[warp.cta][warp.number].append(now + self.costs.one_way)
        else:
            self.released[warp.cta].setdefault(tag, []).append(now)
            self.produce(warp.cta)


def run_sm(ctas: Sequence[Cta], costs: WarpCosts, mma: dict[tuple[int, bool], float]) -> SmRun:
    """Run all programs to their end.  ``mma`` gives cycles by (columns, A from registers).

    Raises CodeError when every warp waits for something that never comes.
    """
    state = _State(ctas, costs, mma)
    active = [warp for warp in state.warps if warp.code]
    tensor = state.tensor
    pipe_free = [0.0] * len(PIPES)
    busy = [0.0] * len(PIPES)
    slot_free = issue_free = now = 0.0
    count = 0
    for warp in active:
        warp.advance()
    while active:
        chosen, best = None, math.inf
        for warp in active:
            ready = warp.ready
            prepared = warp.prepared
            if prepared.conditional:
                known = _condition(warp, prepared, ready, state)
                if known is None:
                    continue
                ready = known
            if prepared.kind != "mma":
                if pipe_free[prepared.pipe] > ready:
                    ready = pipe_free[prepared.pipe]
                if prepared.slot and slot_free > ready:
                    ready = max(ready, min(slot_free, tensor.busy(ready)))
            if issue_free > ready:
                ready = issue_free
            if ready < best or (ready == best and chosen is not None and warp.last < chosen.last):
                chosen, best = warp, ready
        service = tensor.next_service()
        if service <= best and service < math.inf:
            tensor.serve(service)
            continue
        if chosen is None:
            where = ", ".join(str(warp.code[warp.pc][1]) for warp in active)
            raise CodeError(f"the compiled warps wait for each other: {where}; the reading of the code is wrong")
        count += 1
        now, prepared = best, chosen.prepared
        chosen.last = count
        issue_free = now + 1.0
        loaded = tensor.runs(now)
        pipe = prepared.pipe
        if prepared.kind == "mma":
            busy[pipe] += prepared.mma_cycles
        else:
            taken = prepared.taken_under_mma if loaded else prepared.taken
            pipe_free[pipe] = (pipe_free[pipe] if pipe_free[pipe] > now else now) + taken
            busy[pipe] += taken
            if loaded and prepared.slot:
                slot_free = (slot_free if slot_free > now else now) + prepared.slot
            if prepared.port:
                tensor.take_port(now, prepared.port)
        if prepared.hold and loaded and now >= chosen.held and tensor.holds(now):
            chosen.held = now + prepared.hold
        _issue(chosen, prepared, state, now)
        if chosen.pc == len(chosen.code):
            active.remove(chosen)
            continue
        chosen.advance()
        if chosen.lines and chosen.lines[chosen.pc] != chosen.line:
            chosen.line = chosen.lines[chosen.pc]
            assert state.cache is not None
            chosen.ready = max(chosen.ready, state.cache.enter(chosen.line, now))
    shares = dict(zip(PIPES, busy, strict=True))
    return SmRun(tuple(tuple(w.marks) for w in state.warps), now, shares["tensor"], count, shares)


def _condition(warp: _Warp, prepared: Prepared, at: float, state: _State) -> float | None:
    """Earliest issue of an instruction that depends on other warps or engines; None while that is unknown."""
    kind = prepared.kind
    if kind == "mma":
        return state.tensor.room(at)
    if kind == "mma_wait":
        return state.tensor.through(warp.index, prepared.amount, at)
    if kind == "wait":
        tag = warp.code[warp.pc][1]
        return at if tag is None or state.opens(warp, tag) is not None else None
    if kind == "barrier":
        arrivals = state.met[warp.cta].setdefault(warp.barriers_passed, {})
        arrivals.setdefault(warp.number, at)
        return max(at, *arrivals.values()) if len(arrivals) >= prepared.amount else None
    if kind == "spill":
        return max(at, state.store_free - state.costs.store_queue_bytes / state.costs.store_bytes_per_clk)
    return max(at, state.store_free)  # a store


def _issue(warp: _Warp, prepared: Prepared, state: _State, now: float) -> None:
    """Effects of an instruction issued at ``now``."""
    costs = state.costs
    after = now + prepared.stall
    result = now + prepared.latency
    kind = prepared.kind
    if kind != "plain":
        tag = warp.code[warp.pc][1]
        if kind == "mma":
            fetched = not prepared.from_registers
            state.tensor.issue(warp.index, now, prepared.mma_cycles, prepared.commits, prepared.port, fetched)
        elif kind == "wait" and tag is not None:
            result = max(result, state.opens(warp, tag) or 0.0)
            warp.turns_taken += tag[0] == "turn"
        elif kind == "arrive" and tag is not None:
            state.arrive(warp, tag, now)
        elif kind == "load" and tag is not None:
            size, latency, share = state.ctas[warp.cta].own_copies[tag[0]]
            state.full[warp.cta][tag] = state.copy(now, size, share) + latency
        elif kind == "store":
            # Beside reads, writes get half of the memory's rate.
            moved = 128.0 * prepared.amount
            beside = state.memory_free > now
            state.store(now, moved, costs.memory_bytes_per_clk / 2.0 if beside else costs.store_bytes_per_clk)
            state.memory_free = max(state.memory_free, now) + moved / costs.memory_bytes_per_clk
        elif kind == "spill":
            state.store(now, 128.0 * prepared.amount, costs.store_bytes_per_clk)
            state.holds(warp, prepared.word)
        elif kind == "reload":
            if not state.holds(warp, prepared.word):
                result = now + costs.reload_latency
        elif kind == "barrier":
            after = max(after, now + costs.barrier + state.jitter())
            warp.barriers_passed += prepared.amount > 1
        elif kind == "mark":
            warp.marks.append(now)
    counters = warp.counters
    if prepared.write_counter < 6 and result > counters[prepared.write_counter]:
        counters[prepared.write_counter] = result
    if prepared.read_counter < 6 and now + costs.operand_release > counters[prepared.read_counter]:
        counters[prepared.read_counter] = now + costs.operand_release
    warp.free = after
    warp.pc += 1
