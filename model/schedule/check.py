"""Check a schedule by brute force: unroll the loop and look at every moment.

No solver and no arithmetic shared with the scheduler.

`check_schedule` takes the pipeline at its word (durations and latencies as given, not rounded) and returns
one sentence for everything the schedule violates, so an empty list means that the hardware described by the
pipeline could run it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from tilecast.model.pipeline.graph import Op, Pipeline
from tilecast.model.schedule.solve import Schedule

#: Float noise in sums of cycle counts.
_EPS = 1e-6


class _Unrolled:
    """Absolute times of every operation of every unrolled iteration."""

    def __init__(self, pipeline: Pipeline, schedule: Schedule) -> None:
        self.pipeline, self.schedule = pipeline, schedule
        ii = schedule.ii_cycles
        distance = max((abs(edge.distance) for edge in pipeline.edges), default=0)
        depth = max((buffer.depth for buffer in pipeline.buffers), default=0)
        latest = max(schedule.starts.values()) + max(op.min_cycles for op in pipeline.ops)
        # Enough laps that every pair of iterations that can be alive together is seen in full.
        self.n = 2 * (int(latest // ii) + 2) + distance + depth + 4

    def issue(self, op: str, i: int) -> float:
        return self.schedule.issues[op] + i * self.schedule.ii_cycles

    def start(self, op: str, i: int) -> float:
        return self.schedule.starts[op] + i * self.schedule.ii_cycles

    def end(self, op: str, i: int) -> float:
        return self.start(op, i) + self.pipeline.op(op).min_cycles

    def everything(self) -> Iterable[tuple[Op, int]]:
        return ((op, i) for op in self.pipeline.ops for i in range(self.n))


def check_schedule(pipeline: Pipeline, schedule: Schedule) -> list[str]:
    """Sentences for every violated statement, without repeats; empty when the schedule is valid.

    An infeasible schedule is valid when some limit it names is really exceeded.
    """
    if schedule.status == "infeasible":
        return [] if schedule.reason else ["status is infeasible but every limit holds"]
    missing = sorted({op.name for op in pipeline.ops} ^ set(schedule.starts))
    if missing or schedule.starts.keys() != schedule.issues.keys():
        return [f"operations without a time, or times without an operation: {', '.join(missing) or 'issues'}"]
    if schedule.ii_cycles < 1:
        return [f"II is {schedule.ii_cycles} cycles"]
    unrolled = _Unrolled(pipeline, schedule)
    found = [
        *_claims(pipeline, schedule),
        *_dependences(unrolled),
        *_matrix_engine(unrolled),
        *_roles(unrolled),
        *_held_units(unrolled),
        *_storage(unrolled),
    ]
    if schedule.keep_chains and not schedule.program_order:
        found += _chains(unrolled)
    if schedule.program_order:
        found += _program_order(unrolled)
    return list(dict.fromkeys(found))


def _claims(pipeline: Pipeline, schedule: Schedule) -> list[str]:
    ii, out = schedule.ii_cycles, []
    if not 0 <= schedule.bound <= ii or (schedule.status == "optimal") != (schedule.bound == ii):
        out.append(f"status {schedule.status} does not go with II {ii} and bound {schedule.bound}")
    for unit, cycles in pipeline.demand().items():
        if cycles > ii + _EPS:
            out.append(f"unit {unit} needs {cycles:g} cycles an iteration but II is {ii}")
    out += [limit.sentence() for limit in schedule.limits if not limit.holds]
    ends = [schedule.starts[op.name] + op.min_cycles for op in pipeline.ops]
    if schedule.span_cycles < max(ends) - min(schedule.starts.values()) - _EPS:
        out.append(f"the iteration takes longer than the stated {schedule.span_cycles} cycles")
    if schedule.overlap_depth * ii < schedule.span_cycles:
        out.append(f"{schedule.overlap_depth} iterations in flight cannot span {schedule.span_cycles} cycles")
    for op in pipeline.ops:
        issue, start = schedule.issues[op.name], schedule.starts[op.name]
        if issue > start or (op.engine != "tensor" and issue != start):
            out.append(f"{op.name} is issued at {issue} but starts at {start}")
    return out


def _dependences(u: _Unrolled) -> list[str]:
    out = []
    for edge in u.pipeline.edges:
        for i in range(edge.distance, u.n):
            ready = u.end(edge.src, i - edge.distance) + edge.latency_cycles
            if u.issue(edge.dst, i) < ready - _EPS:
                why = edge.why or edge.kind
                out.append(f"{edge.dst} starts before {edge.src} ({why}, distance {edge.distance}) allows")
                break
    return out


def _overlaps(what: str, taken: list[tuple[float, float, str, int]]) -> list[str]:
    """Neighbours in time that overlap; zero-length entries may touch but not lie inside another."""
    out = []
    taken.sort()
    until, holder = float("-inf"), ("", -1)
    for begin, end, name, i in taken:
        if begin < until - _EPS:
            out.append(f"{what}: {name} overlaps {holder[0]} ({i - holder[1]} iterations apart)")
        if end > until:
            until, holder = end, (name, i)
    return out


def _matrix_engine(u: _Unrolled) -> list[str]:
    matrix = [(op, i) for op, i in u.everything() if op.engine == "tensor"]
    out = _overlaps("matrix engine", [(u.start(o.name, i), u.end(o.name, i), o.name, i) for o, i in matrix])
    asked = sorted((u.issue(op.name, i), u.start(op.name, i), op.name) for op, i in matrix)
    for (issue, start, name), (later_issue, later_start, later) in pairwise(asked):
        if later_issue > issue + _EPS and later_start < start - _EPS:
            out.append(f"matrix engine: {later} overtakes {name}, which was issued before it")
    return out


def _roles(u: _Unrolled) -> list[str]:
    out = []
    for role in u.pipeline.roles:
        taken = []
        for step in role.program:
            op = u.pipeline.op(step.op)
            held = op.issue_cycles if op.engine else op.min_cycles
            taken += [(u.issue(step.op, i), u.issue(step.op, i) + held, step.op, i) for i in range(u.n)]
        out += _overlaps(f"role {role.name}", taken)
    return out


def _held_units(u: _Unrolled) -> list[str]:
    out = []
    for unit, holds in u.schedule.holds.items():
        taken = []
        for name, at in holds.items():
            op = u.pipeline.op(name)
            length, start = op.cycles(unit), u.schedule.starts[name]
            # The schedule rounds durations up; a hold may use that fraction of a cycle.
            if at < start - _EPS or at + length > start + op.min_cycles + 1:
                out.append(f"{name} holds {unit} outside its own execution")
            taken += [(u.start(name, i) + at - start, u.start(name, i) + at - start + length, name, i)
                      for i in range(u.n)]  # fmt: skip
        if unit == "tensor":
            taken += [(u.start(o.name, i), u.end(o.name, i), o.name, i)
                      for o, i in u.everything() if o.engine == "tensor"]  # fmt: skip
        users = {o.name for o in u.pipeline.ops if o.cycles(unit) > 0 and o.engine != "tensor"}
        if users != set(holds):
            out.append(f"unit {unit}: no hold is given for {', '.join(sorted(users ^ set(holds)))}")
        out += _overlaps(f"unit {unit}", taken)
    return out


def _storage(u: _Unrolled) -> list[str]:
    """No buffer has more live values than slots; a value lives from producer issue to consumer end."""
    out = []
    names = set(u.schedule.starts)
    for buffer in u.pipeline.buffers:
        if buffer.producer not in names or buffer.consumer not in names or buffer.producer == buffer.consumer:
            continue
        lag = max(
            (e.distance for e in u.pipeline.edges
             if (e.src, e.dst, e.kind) == (buffer.producer, buffer.consumer, "data")), default=0,
        )  # fmt: skip
        changes = []
        for i in range(u.n - lag):
            born, dies = u.issue(buffer.producer, i), u.end(buffer.consumer, i + lag)
            if dies > born:
                changes += [(born, 1), (dies - _EPS, -1)]
        live = 0
        for _, change in sorted(changes):
            live += change
            if live > buffer.depth:
                out.append(f"buffer {buffer.name} would hold more than its {buffer.depth} values")
                break
    return out


def _chains(u: _Unrolled) -> list[str]:
    """Work of a tile keeps its role's order within a block: synchronous operations, and parts of one GEMM."""
    out = []
    for role in u.pipeline.roles:
        for n, step in enumerate(role.program):
            for earlier in role.program[:n]:
                a, b = u.pipeline.op(earlier.op), u.pipeline.op(step.op)
                same_gemm = a.engine == b.engine == "tensor" and a.kind == b.kind
                if a.tile != b.tile or not (same_gemm or not (a.engine or b.engine)):
                    continue
                if u.start(b.name, step.shift) < u.end(a.name, earlier.shift) - _EPS:
                    out.append(f"role {role.name}: {b.name} comes before {a.name} of the same step")
    return out


def _program_order(u: _Unrolled) -> list[str]:
    out = []
    for role in u.pipeline.roles:
        free, before = float("-inf"), ""
        for lap in range(u.n):
            for step in role.program:
                op, i = u.pipeline.op(step.op), lap + step.shift
                at = u.issue(step.op, i)
                if at < free - _EPS:
                    out.append(f"role {role.name}: {step.op} comes before {before} against the program")
                free, before = at + (op.issue_cycles if op.engine else op.min_cycles), step.op
    return out
