"""Run compiled warps through one SM sub-partition, instruction by instruction.

A warpgroup has one warp on each of the four sub-partitions, and they do the same, so one sub-partition with one warp of
every warpgroup stands for the SM.  The rules:

- one instruction a cycle; a warp's next instruction waits for the stall count of its last and for the counters in its
  wait mask, as the compiler wrote them;
- a pipe is occupied for `WarpCosts.pipe` cycles; while a matrix product runs, arithmetic takes longer and shares the
  register ports (`ports_under_mma`), as measured in validation/measured/h200_corun.csv;
- the tensor core serves warps in turns, an instruction each; `mma_queue` instructions at most are under way, from all
  warps together, and a warp whose next one finds no room stands still (both measured: `tilecast calibrate`, wgmma_order
  and wgmma_latency);
- barriers, copies and turn-taking are events: a full barrier opens when its copy has landed, a slot is free when every
  warpgroup has let it go.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tilecast.model.compiled.code import CodeError, WarpInstruction
from tilecast.model.compiled.costs import WarpCosts

#: What a wait, an arrival or a load is about: (name, number), number counting blocks ("K", "V") or tiles ("Q").
Tag = tuple[str, int]
#: One step of a program: an instruction and its tag.
Step = tuple[WarpInstruction, Tag | None]
MARK = WarpInstruction("other", 1, 0, 7, 7, "fixed", "mark")


@dataclass(frozen=True, slots=True)
class Cta:
    """A CTA on the SM: a program for each warpgroup, and the copies that its producer issues, in order."""

    programs: tuple[tuple[Step, ...], ...]
    #: (tag, bytes, slots of its ring, latency in cycles, share that comes from memory); empty where consumers issue their own copies.
    copies: tuple[tuple[Tag, float, int, float, float], ...]
    #: tag name -> (bytes, latency, share from memory) of copies that consumers issue.
    own_copies: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    turns: bool = False
    begins: float = 0.0


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
        "barriers_passed", "code", "counters", "cta", "fma_at", "free", "groups_committed", "groups_done", "index", "last", "number",
        "pc", "turns_taken",
    )  # fmt: skip

    def __init__(self, index: int, cta: int, number: int, code: tuple[Step, ...], begins: float) -> None:
        self.index, self.cta, self.number, self.code, self.pc, self.free = index, cta, number, code, 0, begins
        self.counters = [0.0] * 6
        self.groups_committed = 0
        self.groups_done: list[float] = []
        self.last = 0
        self.fma_at = -1e9
        self.turns_taken = 0
        self.barriers_passed = 0


class _State:
    """Everything that changes during a run."""

    def __init__(self, ctas: Sequence[Cta], costs: WarpCosts, mma: dict[tuple[int, bool], float]) -> None:
        self.ctas, self.costs, self.mma = ctas, costs, mma
        programs = [(i, w, code, cta.begins) for i, cta in enumerate(ctas) for w, code in enumerate(cta.programs)]
        self.warps = [_Warp(index, *program) for index, program in enumerate(programs)]
        self.full: list[dict[Tag, float]] = [{} for _ in ctas]
        self.released: list[dict[Tag, list[float]]] = [{} for _ in ctas]
        self.turns: list[list[list[float]]] = [[[] for _ in cta.programs] for cta in ctas]
        self.met: list[dict[int, dict[int, float]]] = [{} for _ in ctas]
        self.next_copy = [0] * len(ctas)
        self.producer_free = [cta.begins for cta in ctas]
        self.seed = 1
        self.engine_free = 0.0
        self.memory_free = 0.0
        #: End of the matrix instruction in service, and those that wait: (issue time, cycles, last of its group).
        self.tensor_free = 0.0
        self.queues: list[deque[tuple[float, float, bool]]] = [deque() for _ in self.warps]
        self.queued = 0
        self.served = 0
        #: Begin and end of every matrix instruction taken up so far, in order.
        self.intervals: list[tuple[float, float]] = []
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
                # Q has a ring for each warpgroup; K and V are everybody's.
                if len(let_go) < (1 if name.startswith("Q") else len(cta.programs)):
                    return
                at = max(at, *(t + costs.handover for t in let_go))
            self.producer_free[index] = at + costs.tma_issue
            self.full[index][(name, number)] = self.copy(at, size, share) + latency
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
        self.seed = (self.seed * 1103515245 + 12345) & 0x7FFFFFFF
        return self.costs.barrier_spread * (self.seed >> 8) / 0x7FFFFF

    def next_service(self) -> float:
        """When the tensor core can take up its next instruction; infinity when none waits."""
        if not self.queued:
            return math.inf
        return max(self.tensor_free, min(queue[0][0] for queue in self.queues if queue))

    def serve(self, at: float) -> None:
        """Start the next instruction at ``at``: that of the next warp in turn that has one."""
        for step in range(1, len(self.queues) + 1):
            turn = (self.served + step) % len(self.queues)
            queue = self.queues[turn]
            if queue and queue[0][0] <= at:
                break
        _, cycles, last = queue.popleft()
        self.queued -= 1
        self.served = turn
        self.tensor_free = at + cycles
        self.intervals.append((at, self.tensor_free))
        if last:
            self.warps[turn].groups_done.append(self.tensor_free + self.costs.mma_latency)

    def under_mma(self, at: float) -> bool:
        """Whether the tensor core runs at ``at``."""
        for begin, end in reversed(self.intervals[-16:]):
            if begin <= at < end:
                return True
        return False


def run_sm(ctas: Sequence[Cta], costs: WarpCosts, mma: dict[tuple[int, bool], float]) -> SmRun:
    """Run all programs to their end.  ``mma`` gives cycles by (columns, A from registers).

    Raises CodeError when every warp waits for something that never comes.
    """
    state = _State(ctas, costs, mma)
    warps = state.warps
    pipe_free = dict.fromkeys(costs.pipe, 0.0)
    busy = dict.fromkeys(costs.pipe, 0.0)
    ports_free = issue_free = now = 0.0
    marks: list[list[float]] = [[] for _ in warps]
    count = 0
    while True:
        chosen, best, order = None, 0.0, 0
        waiting = False
        for warp in warps:
            if warp.pc >= len(warp.code):
                continue
            waiting = True
            ready = _ready(warp, state, pipe_free, ports_free)
            if ready is None:
                continue
            ready = max(ready, issue_free)
            if chosen is None or ready < best or (ready == best and warp.last < order):
                chosen, best, order = warp, ready, warp.last
        if not waiting:
            break
        if chosen is None and state.queued:
            state.serve(state.next_service())
            continue
        if chosen is None:
            where = ", ".join(f"{w.code[w.pc][1]}" for w in warps if w.pc < len(w.code))
            raise CodeError(f"the compiled warps wait for each other: {where}; the reading of the code is wrong")
        service = state.next_service()
        if service <= best:
            state.serve(service)
            continue
        count += 1
        now, warp = best, chosen
        warp.last = count
        issue_free = now + 1.0
        instruction, _ = warp.code[warp.pc]
        loaded = state.under_mma(now)
        pipe = instruction.pipe
        if pipe == "fma":
            warp.fma_at = now
        if instruction.kind != "mma":
            taken = (costs.pipe_under_mma if loaded else costs.pipe)[pipe]
            pipe_free[pipe] = max(pipe_free[pipe], now) + taken
            busy[pipe] += taken
            if loaded:
                ports_free = max(ports_free, now) + costs.ports_under_mma[pipe]
        else:
            busy["tensor"] += mma[instruction.amount, instruction.from_registers]
        _issue(warp, state, now, loaded, marks)
    return SmRun(tuple(tuple(m) for m in marks), now, busy["tensor"], count, busy)


def _ready(warp: _Warp, state: _State, pipe_free: dict[str, float], ports_free: float) -> float | None:
    """Earliest issue of the warp's next instruction, but for the issue port; None while that is unknown."""
    instruction, tag = warp.code[warp.pc]
    at = warp.free
    mask = instruction.waits
    if mask:
        counters = warp.counters
        for bit in range(6):
            if mask >> bit & 1 and counters[bit] > at:
                at = counters[bit]
    kind = instruction.kind
    if kind == "mma":
        # The queue of the tensor core is shared by the warps of a sub-partition: room comes when one under way ends.
        ended = len(state.intervals) + state.queued - state.costs.mma_queue
        if ended >= len(state.intervals):
            return None
        if ended >= 0:
            at = max(at, state.intervals[ended][1])
        # Back-to-back FMA of other warps keeps a matrix instruction from issuing; other pipes leave it room.
        for other in state.warps:
            if other is not warp and other.fma_at + state.costs.mma_gap > at:
                at = other.fma_at + state.costs.mma_gap
        return at
    if kind == "mma_wait":
        # Groups end in the order they were committed.
        needed = warp.groups_committed - instruction.amount
        if needed > 0:
            if len(warp.groups_done) < needed:
                return None
            at = max(at, warp.groups_done[needed - 1])
    elif kind == "wait" and tag is not None:
        if state.opens(warp, tag) is None:
            return None
    elif kind == "barrier" and instruction.amount > 1:
        arrivals = state.met[warp.cta].setdefault(warp.barriers_passed, {})
        arrivals.setdefault(warp.number, at)
        if len(arrivals) < instruction.amount:
            return None
        at = max(at, *arrivals.values())
    elif kind == "store" and state.memory_free > at:
        at = state.memory_free
    if pipe_free[instruction.pipe] > at:
        at = pipe_free[instruction.pipe]
    if state.costs.ports_under_mma[instruction.pipe] and ports_free > at:
        at = ports_free
    return at


def _issue(warp: _Warp, state: _State, now: float, loaded: bool, marks: list[list[float]]) -> None:
    """Effects of an instruction issued at ``now``."""
    instruction, tag = warp.code[warp.pc]
    costs = state.costs
    after = now + instruction.stall + (costs.gap_under_mma[instruction.pipe] if loaded else 0.0)
    result = now + costs.latency[instruction.latency]
    kind = instruction.kind
    if kind == "mma":
        cycles = state.mma[instruction.amount, instruction.from_registers]
        state.queues[warp.index].append((now, cycles, instruction.commits))
        state.queued += 1
        warp.groups_committed += instruction.commits
    elif kind == "wait" and tag is not None:
        opened = state.opens(warp, tag)
        assert opened is not None
        result = max(result, opened)
        if tag[0] == "turn":
            warp.turns_taken += 1
    elif kind == "arrive" and tag is not None:
        if tag[0] == "turn":
            state.turns[warp.cta][warp.number].append(now + costs.handover)
        else:
            state.released[warp.cta].setdefault(tag, []).append(now)
            state.produce(warp.cta)
    elif kind == "load" and tag is not None:
        size, latency, share = state.ctas[warp.cta].own_copies[tag[0]]
        state.full[warp.cta][tag] = state.copy(now, size, share) + latency
    elif kind == "store":
        # The four warps of the warpgroup store the same at the same time.
        state.memory_free = max(state.memory_free, now) + 128.0 * instruction.amount / costs.store_bytes_per_clk
    elif kind == "barrier":
        after = max(after, now + costs.barrier + state.jitter())
        if instruction.amount > 1:
            warp.barriers_passed += 1
    elif kind == "mark":
        marks[warp.index].append(now)
    if instruction.write_counter < 6:
        counter = instruction.write_counter
        warp.counters[counter] = max(warp.counters[counter], result)
    if instruction.read_counter < 6:
        counter = instruction.read_counter
        warp.counters[counter] = max(warp.counters[counter], now + costs.operand_release)
    warp.free = after
    warp.pc += 1
