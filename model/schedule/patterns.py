"""Recognise in a schedule the overlap patterns that attention kernels are known for, and turn it into
programs.

A *softmax role* of a tile is the role that does most of the tile's exponentials; its synchronous operations
of that tile are the softmax.  All fractions are shares of time in 0..1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tilecast.model.pipeline.graph import Op, Pipeline, Role, Step
from tilecast.model.schedule.solve import Schedule

#: An overlap counts as the pattern when it covers at least half of what it could cover.
_ENOUGH = 0.5

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class PingPong:
    """Whether tiles take turns: each one's softmax runs while the matrix engine works on the others.

    ``under_others[n]`` is the share of tile ``tiles[n]``'s softmax during which the matrix engine runs
    operations of other tiles, ``under_own[n]`` the same for its own.  ``matrix_hidden`` is the share of all
    matrix time that some other tile's softmax covers.
    """

    found: bool
    tiles: tuple[int, ...]
    under_others: tuple[float, ...]
    under_own: tuple[float, ...]
    matrix_hidden: float


@dataclass(frozen=True, slots=True)
class IntraOverlap:
    """Overlap within one warpgroup: matrix work of another block in flight during this block's softmax.

    ``next_qk[n]`` is the share of tile ``tiles[n]``'s QK time that a later block's QK spends under the
    softmax of an earlier block; ``earlier_pv[n]`` the same for the PV of an earlier block (FlashAttention-3
    hides both).
    """

    found: bool
    tiles: tuple[int, ...]
    next_qk: tuple[float, ...]
    earlier_pv: tuple[float, ...]


def softmax_ops(pipeline: Pipeline) -> dict[int, tuple[Op, ...]]:
    """The softmax operations of every query tile that has exponentials."""
    out: dict[int, tuple[Op, ...]] = {}
    for tile in sorted({op.tile for op in pipeline.ops if op.tile >= 0}):
        mine = [op for op in pipeline.ops if op.tile == tile]
        heaviest = max(mine, key=lambda op: op.cycles("mufu"))
        if heaviest.cycles("mufu") > 0:
            out[tile] = tuple(op for op in mine if not op.engine and op.role == heaviest.role)
    return out


def is_ping_pong(schedule: Schedule, pipeline: Pipeline) -> PingPong:
    """Whether the schedule ping-pongs between query tiles; not found for fewer than two tiles."""
    softmax = softmax_ops(pipeline)
    tiles = tuple(softmax)
    if not schedule.starts or not tiles:
        return PingPong(False, tiles, (), (), 0.0)
    ii = schedule.ii_cycles
    matrix = {t: _on_circle(_executions(schedule, _matrix(pipeline, t)), ii) for t in tiles}
    soft = {t: _on_circle(_executions(schedule, softmax[t]), ii) for t in tiles}
    others = {t: [span for other in tiles if other != t for span in matrix[other]] for t in tiles}
    under_others = tuple(_share(soft[t], others[t]) for t in tiles)
    under_own = tuple(_share(soft[t], matrix[t]) for t in tiles)
    hidden = [_common(matrix[t], _merge([s for o in tiles if o != t for s in soft[o]])) for t in tiles]
    busy = sum(_length(matrix[t]) for t in tiles)
    # A softmax longer than the others' matrix work cannot be covered whole: compare with what could be.
    could = [min(1.0, _length(others[t]) / max(1e-9, _length(soft[t]))) for t in tiles]
    found = len(tiles) > 1 and all(
        share >= _ENOUGH * most and share > own for share, most, own in zip(under_others, could, under_own, strict=True)
    )
    return PingPong(found, tiles, under_others, under_own, sum(hidden) / busy if busy else 0.0)


def intra_warpgroup_overlap(schedule: Schedule, pipeline: Pipeline) -> IntraOverlap:
    """Whether matrix work of neighbouring blocks runs under the softmax of the same tile."""
    softmax = softmax_ops(pipeline)
    tiles = tuple(softmax)
    if not schedule.starts or not tiles:
        return IntraOverlap(False, tiles, (), ())
    ii, depth = schedule.ii_cycles, schedule.overlap_depth
    next_qk: list[float] = []
    earlier_pv: list[float] = []
    for tile in tiles:
        soft = _executions(schedule, softmax[tile])
        for kind, laps, out in (("qk", range(1, depth + 1), next_qk), ("pv", range(-depth, 0), earlier_pv)):
            ops = [op for op in _matrix(pipeline, tile) if op.kind == kind]
            own = _executions(schedule, ops)
            moved = [(begin + lap * ii, end + lap * ii) for begin, end in own for lap in laps]
            out.append(_common(soft, moved) / max(1e-9, _length(own)))
    found = any(share >= _ENOUGH for share in next_qk + earlier_pv)
    return IntraOverlap(found, tiles, tuple(next_qk), tuple(earlier_pv))


def role_program(schedule: Schedule, role: Role, pipeline: Pipeline) -> tuple[Step, ...]:
    """The program that issues the role's operations in the schedule's order.

    A program is a circle; it is cut where the fewest iterations are straddled and, where there is a choice,
    before a PV, because then the loop's prologue is the QK of the first block, as in the published kernels.
    """
    ii = schedule.ii_cycles
    order = sorted(role.program, key=lambda step: (schedule.issues[step.op] % ii, schedule.starts[step.op] % ii))
    position = {op.name: n for n, op in enumerate(pipeline.ops)}

    def cut(at: int) -> tuple[Step, ...]:
        laps = [schedule.issues[s.op] // ii - (1 if n < at else 0) for n, s in enumerate(order)]
        oldest = max(laps)
        steps = [Step(s.op, oldest - lap) for s, lap in zip(order, laps, strict=True)]
        return tuple(steps[at:] + steps[:at])

    def rank(steps: tuple[Step, ...]) -> tuple[int, bool, int, int]:
        first = pipeline.op(steps[0].op)
        return max(step.shift for step in steps), first.kind != "pv", first.tile, position[first.name]

    return min((cut(at) for at in range(len(order))), key=rank, default=())


def matrix_issue_order(schedule: Schedule, pipeline: Pipeline) -> dict[str, tuple[Step, ...]]:
    """What the templates take: per role that issues matrix work, those operations in order for one II."""
    out = {}
    for role in pipeline.roles:
        program = role_program(schedule, role, pipeline) if schedule.starts else ()
        matrix = tuple(step for step in program if pipeline.op(step.op).engine == "tensor")
        if matrix:
            least = min(step.shift for step in matrix)
            out[role.name] = tuple(Step(step.op, step.shift - least) for step in matrix)
    return out


def with_discovered_order(schedule: Schedule, pipeline: Pipeline) -> Pipeline:
    """The same pipeline with every role's program in the schedule's order, to simulate or generate."""
    roles = tuple(replace(role, program=role_program(schedule, role, pipeline)) for role in pipeline.roles)
    return replace(pipeline, roles=roles)


def step_text(step: Step) -> str:
    """``pv0`` for this iteration's block, ``qk0[j+1]`` for the next one's."""
    return step.op if step.shift == 0 else f"{step.op}[j{step.shift:+d}]"


# -- arithmetic on sets of spans -------------------------------------------------------------------


def _matrix(pipeline: Pipeline, tile: int) -> list[Op]:
    return [op for op in pipeline.ops if op.tile == tile and op.engine == "tensor"]


def _executions(schedule: Schedule, ops: Iterable[Op]) -> list[Span]:
    return [(schedule.starts[op.name], schedule.starts[op.name] + op.min_cycles) for op in ops]


def _on_circle(spans: Iterable[Span], ii: int) -> list[Span]:
    """Spans folded into [0, II)."""
    out: list[Span] = []
    for begin, end in spans:
        length = min(end - begin, float(ii))
        begin %= ii
        out.append((begin, min(begin + length, ii)))
        if begin + length > ii:
            out.append((0.0, begin + length - ii))
    return out


def _merge(spans: Iterable[Span]) -> list[Span]:
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def _length(spans: Sequence[Span]) -> float:
    return sum(end - begin for begin, end in _merge(spans))


def _common(a: Sequence[Span], b: Sequence[Span]) -> float:
    return sum(max(0.0, min(ae, be) - max(ab, bb)) for ab, ae in _merge(a) for bb, be in _merge(b))


def _share(of: Sequence[Span], under: Sequence[Span]) -> float:
    length = _length(of)
    return _common(of, under) / length if length else 0.0
