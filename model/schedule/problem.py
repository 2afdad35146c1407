"""The modulo-scheduling problem of a pipeline as integers: moments, precedences, and pairs that take turns.

A schedule of a loop gives every *moment* (an operation is issued, starts on its engine, takes hold of a
unit) a time; iteration i happens II * i later.  Two kinds of constraints describe all that the hardware
demands:

- a precedence: ``t[dst] >= t[src] + weight - distance * II``;
- a pair that takes turns on something exclusive: there is a whole number of laps k with
  ``hold_a <= t[b] - t[a] + k * II <= II - hold_b``.

Once every pair's k is chosen, only precedences are left, so the best II of that choice is a maximum cycle
ratio and the earliest times are longest paths.  A solver therefore only has to find the k.

Times are whole cycles: durations, latencies and demands are rounded up (up to one cycle an operation
pessimistic).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from tilecast.model.pipeline.graph import Op, Pipeline, PipelineError, Role, Step
from tilecast.model.schedule.windows import earliest
from tilecast.model.sm.bounds import held_cycles
from tilecast.model.sm.recurrences import Arc, deadlock_cycle, max_cycle_ratio

#: Float noise that must not cost a cycle when rounding up.
_NOISE = 1e-6


def whole(cycles: float) -> int:
    """Cycles rounded up to a whole number, forgiving float noise."""
    return max(0, ceil(cycles - _NOISE))


@dataclass(frozen=True, slots=True)
class Pair:
    """Operations a and b take turns on ``unit``.

    Every entry (moment_a, moment_b, hold_a, hold_b) shares one lap count.  The matrix engine needs two
    entries: execution, and issue, because it serves in the order of issue.
    """

    unit: str
    entries: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """All constraints by moment number.  ``lower`` is a proven bound on II in whole cycles."""

    moments: tuple[str, ...]
    ops: tuple[str, ...]
    #: Moment numbers of issue, of start, and of taking hold of a unit: (unit, op name, moment).
    issue: tuple[int, ...]
    start: tuple[int, ...]
    duration: tuple[int, ...]
    holds: tuple[tuple[str, str, int], ...]
    arcs: tuple[Arc, ...]
    pairs: tuple[Pair, ...]
    lower: int
    #: An II at which one operation at a time certainly works, and times that do so.
    easy_ii: int
    easy_times: tuple[int, ...]


class _Builder:
    """Collects moments and constraints; used only while `build` runs."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.moments: list[str] = []
        self.issue: dict[str, int] = {}
        self.start: dict[str, int] = {}
        self.holds: dict[tuple[str, str], int] = {}
        self.arcs: list[Arc] = []
        self.pairs: dict[tuple[str, str, str], Pair] = {}
        for op in pipeline.ops:
            self.issue[op.name] = self.moment(op.name)
            self.start[op.name] = self.issue[op.name]
            if op.engine == "tensor":
                self.start[op.name] = self.moment(f"{op.name} runs")
                # It may queue behind others, but for no longer than one II: the engine's queue is finite.
                self.arcs.append((self.issue[op.name], self.start[op.name], 0, 0))
                self.arcs.append((self.start[op.name], self.issue[op.name], 0, 1))

    def moment(self, name: str) -> int:
        self.moments.append(name)
        return len(self.moments) - 1

    def precede(self, src: Op, dst: Op, latency: float, distance: int) -> None:
        """``dst`` is issued ``latency`` after the end of ``src`` of ``distance`` iterations ago, or later."""
        weight = whole(src.min_cycles) + whole(latency)
        self.arcs.append((self.start[src.name], self.issue[dst.name], weight, distance))

    def take_turns(self, unit: str, a: Op, b: Op, entries: tuple[tuple[int, int, int, int], ...]) -> None:
        self.pairs[(unit, a.name, b.name)] = Pair(unit, entries)

    def storage(self) -> None:
        """A slot is written again only after its value of ``depth`` iterations ago was consumed."""
        names = {op.name for op in self.pipeline.ops}
        carried: dict[tuple[str, str], int] = {}
        for edge in self.pipeline.edges:
            if edge.kind == "data":
                key = (edge.src, edge.dst)
                carried[key] = max(carried.get(key, 0), edge.distance)
        for buffer in self.pipeline.buffers:
            if buffer.producer in names and buffer.consumer in names and buffer.producer != buffer.consumer:
                distance = buffer.depth - carried.get((buffer.producer, buffer.consumer), 0)
                consumer, producer = self.pipeline.op(buffer.consumer), self.pipeline.op(buffer.producer)
                self.precede(consumer, producer, 0.0, distance)

    def matrix_engine(self) -> None:
        ops = [op for op in self.pipeline.ops if op.engine == "tensor"]
        for at, a in enumerate(ops):
            for b in ops[at + 1 :]:
                same = a.role == b.role
                issue_a, issue_b = (whole(a.issue_cycles), whole(b.issue_cycles)) if same else (0, 0)
                run = (self.start[a.name], self.start[b.name], whole(a.min_cycles), whole(b.min_cycles))
                issue = (self.issue[a.name], self.issue[b.name], issue_a, issue_b)
                self.take_turns("tensor", a, b, (run, issue))

    def exclusive_unit(self, unit: str) -> None:
        """Operations hold the unit for their cycles of it, in one piece, between their start and end."""
        ops = [op for op in self.pipeline.ops if op.cycles(unit) > 0 and op.engine != "tensor"]
        for op in ops:
            room = whole(op.min_cycles) - whole(op.cycles(unit))
            number = self.start[op.name]
            if room > 0:
                number = self.moment(f"{op.name} holds {unit}")
                self.arcs.append((self.start[op.name], number, 0, 0))
                self.arcs.append((number, self.start[op.name], -room, 0))
            self.holds[(unit, op.name)] = number
        matrix = [op for op in self.pipeline.ops if op.engine == "tensor" and unit == "tensor"]
        for at, a in enumerate(ops):
            for b in ops[at + 1 :] + matrix:
                if a.role == b.role and not a.engine and not b.engine:
                    continue  # one role, one thing at a time: already apart
                hold_b = self.start[b.name] if b.engine == "tensor" else self.holds[(unit, b.name)]
                length_b = b.min_cycles if b.engine == "tensor" else b.cycles(unit)
                entry = (self.holds[(unit, a.name)], hold_b, whole(a.cycles(unit)), whole(length_b))
                self.take_turns(unit, a, b, (entry,))

    def free_role(self, role: Role) -> None:
        """The role does one thing at a time, in any order."""
        ops = [self.pipeline.op(step.op) for step in role.program]
        for at, a in enumerate(ops):
            for b in ops[at + 1 :]:
                held_a, held_b = whole(held_cycles(a)), whole(held_cycles(b))
                if a.engine == b.engine == "tensor" or not (held_a or held_b):
                    continue  # matrix pairs carry their issue order already
                entry = (self.issue[a.name], self.issue[b.name], held_a, held_b)
                self.take_turns(f"role {role.name}", a, b, (entry,))

    def chains(self, role: Role) -> None:
        """Work of one tile keeps the role's order within a block: synchronous work, and parts of one GEMM.

        Pipelines leave the dependences inside an instruction stream (row max before exp) to the program.
        """
        last: dict[tuple[int, str], Step] = {}
        for step in role.program:
            op = self.pipeline.op(step.op)
            if op.engine not in ("", "tensor"):
                continue
            key = (op.tile, op.kind if op.engine else "")
            before = last.get(key)
            last[key] = step
            if before is None:
                continue
            ahead, distance = self.pipeline.op(before.op), step.shift - before.shift
            held = whole(held_cycles(ahead))
            self.arcs.append((self.issue[ahead.name], self.issue[op.name], held, distance))
            if op.engine:
                run = whole(ahead.min_cycles)
                self.arcs.append((self.start[ahead.name], self.start[op.name], run, distance))

    def programmed_role(self, role: Role) -> None:
        """The role runs its program in order; matrix operations it issues also execute in that order."""
        matrix = [step for step in role.program if self.pipeline.op(step.op).engine == "tensor"]
        for steps, node in ((list(role.program), self.issue), (matrix, self.start)):
            for at, step in enumerate(steps):
                following = steps[(at + 1) % len(steps)]
                wrap = 1 if at + 1 == len(steps) else 0
                op = self.pipeline.op(step.op)
                weight = whole(held_cycles(op) if node is self.issue else op.min_cycles)
                distance = following.shift - step.shift + wrap
                self.arcs.append((node[step.op], node[following.op], weight, distance))
        for a in matrix:
            for b in matrix:
                self.pairs.pop(("tensor", a.op, b.op), None)


def build(pipeline: Pipeline, exclusive: Sequence[str], in_program_order: bool, keep_chains: bool) -> Problem:
    """The integer problem of a pipeline.  Raises PipelineError when its dependences deadlock."""
    builder = _Builder(pipeline)
    for edge in pipeline.edges:
        builder.precede(pipeline.op(edge.src), pipeline.op(edge.dst), edge.latency_cycles, edge.distance)
    builder.storage()
    builder.matrix_engine()
    for unit in exclusive:
        builder.exclusive_unit(unit)
    for role in pipeline.roles:
        (builder.programmed_role if in_program_order else builder.free_role)(role)
        if keep_chains and not in_program_order:
            builder.chains(role)
    nodes, arcs = len(builder.moments), tuple(builder.arcs)
    forward = [arc for arc in arcs if arc[2] >= 0]  # without "a hold begins before its operation ends"
    stuck = deadlock_cycle(nodes, forward)
    if stuck is not None:
        path = " -> ".join(builder.moments[forward[i][0]] for i in stuck)
        raise PipelineError(f"pipeline {pipeline.name} deadlocks: {path} wait for each other within one iteration")
    easy_ii, easy_times = _one_at_a_time(pipeline, builder)
    return Problem(
        moments=tuple(builder.moments),
        ops=tuple(op.name for op in pipeline.ops),
        issue=tuple(builder.issue[op.name] for op in pipeline.ops),
        start=tuple(builder.start[op.name] for op in pipeline.ops),
        duration=tuple(whole(op.min_cycles) for op in pipeline.ops),
        holds=tuple((unit, name, number) for (unit, name), number in builder.holds.items()),
        arcs=arcs,
        pairs=tuple(builder.pairs.values()),
        lower=max(_resource_bound(pipeline, exclusive), ceil(max_cycle_ratio(nodes, arcs)[0])),
        easy_ii=easy_ii,
        easy_times=easy_times,
    )


def _resource_bound(pipeline: Pipeline, exclusive: Sequence[str]) -> int:
    """Largest demand on anything, each exclusive hold rounded up as the schedule rounds it."""
    demand = [whole(cycles) for cycles in pipeline.demand().values()]
    ops = pipeline.ops
    held = [sum(whole(op.cycles(unit)) for op in ops) for unit in exclusive]
    matrix = sum(whole(op.min_cycles) for op in ops if op.engine == "tensor")
    roles = [sum(whole(held_cycles(pipeline.op(s.op))) for s in role.program) for role in pipeline.roles]
    return max([1, matrix, *demand, *held, *roles])


def _one_at_a_time(pipeline: Pipeline, builder: _Builder) -> tuple[int, tuple[int, ...]]:
    """Times that run the operations one after the other, and the II this takes; always possible.

    Potentials p over the precedences with weight 1 - (n + 1) * distance split into a lap, p // (n + 1), and
    a rank within it.  A precedence either goes up in rank within its lap or has a whole lap to spare.
    """
    n = len(builder.moments)
    potential = earliest(n, [(s, d, 1, h) for s, d, w, h in builder.arcs if w >= 0], n + 1)
    out_latency = dict.fromkeys(builder.issue, 0)
    for edge in pipeline.edges:
        out_latency[edge.src] = max(out_latency[edge.src], whole(edge.latency_cycles))
    order = sorted(pipeline.ops, key=lambda op: potential[builder.issue[op.name]] % (n + 1))
    now, within = 0, {}
    for op in order:
        within[op.name] = now
        now += max(whole(op.min_cycles), whole(op.issue_cycles)) + out_latency[op.name]
    ii = max(1, now)
    times = [0] * n
    for op in pipeline.ops:
        at = ii * (potential[builder.issue[op.name]] // (n + 1)) + within[op.name]
        times[builder.issue[op.name]] = times[builder.start[op.name]] = at
        for unit, name in builder.holds:
            if name == op.name:
                times[builder.holds[(unit, name)]] = at
    return ii, tuple(times)


def laps(problem: Problem, times: Sequence[int], ii: int) -> tuple[int, ...]:
    """The lap count of every pair in a schedule that is known to be valid."""
    out = []
    for pair in problem.pairs:
        a, b, hold_a, _ = pair.entries[0]
        out.append(-((times[b] - times[a] - hold_a) // ii))
    return tuple(out)


def settle(problem: Problem, chosen: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Smallest II and earliest times under a choice of laps."""
    arcs = list(problem.arcs)
    for pair, k in zip(problem.pairs, chosen, strict=True):
        for a, b, hold_a, hold_b in pair.entries:
            arcs.append((a, b, hold_a, k))
            arcs.append((b, a, hold_b, 1 - k))
    ratio, _ = max_cycle_ratio(len(problem.moments), arcs)
    ii = max(problem.lower, ceil(ratio))
    return ii, tuple(earliest(len(problem.moments), arcs, ii))
