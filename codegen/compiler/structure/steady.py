"""From a kernel's shape to the steady loops that the simulator runs: one loop a role, and who arrives at which barrier.

Of a role's innermost loops that work, the one with the fewest instructions is the steady one: the others mask scores or
finish what is left.  A loop that several roles' warps can reach is of the role that reaches the fewest.  Code under a vote of
the warp (a rescale that few blocks need), under a branch that masks scores and under one that writes a tile's results (a loop
over the blocks of all tiles) is left out, code under other guards runs; what stands out of line does not.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence

from tilecast.codegen.compiler.flow import hides_scores
from tilecast.codegen.compiler.opcodes import MATRIX, TCGEN05
from tilecast.codegen.compiler.structure.assemble import ShapeError
from tilecast.codegen.compiler.structure.candidates import (
    Candidate,
    candidates,
    lane_traffic,
    multiplies,
    steady_of,
    tile_ends,
)
from tilecast.codegen.compiler.structure.joined import joined
from tilecast.codegen.compiler.structure.operands import operands_of
from tilecast.codegen.compiler.structure.seldom import every_iteration, without_tiles
from tilecast.codegen.compiler.structure.shape import Barrier, KernelShape, Loop, Role, Step
from tilecast.codegen.compiler.structure.slots import (
    Steady,
    arrivals_by_turns,
    at_base,
    by_slot,
    placed,
    with_whole_phases,
)
from tilecast.codegen.compiler.structure.translated import NAMED, instruction_of, kind_of, parties_of
from tilecast.model.compiled.costs import PARTITIONS
from tilecast.model.compiled.roles import code as roles
from tilecast.model.compiled.roles.code import KernelRoles, RoleCode

#: Products of tcgen05 and what tells of their end: of one thread for the CTA.
_ONE_THREAD = TCGEN05 | {"UTCBAR"}
#: What is handed over once, before the first tile.
_HANDED = ("wait", "arrive", "named_arrive", "expect", "copy_in")
#: What may stand between a try and its wait: nothing that changes what the barrier is asked for.
_BETWEEN = ("plain", "retry", "guard", "to_uniform", "elect")
#: What runs ahead of a loop and matters there without a barrier.
_GOES_ON = ("matrix", "matrix_wait", "group", "group_wait")


class LostBarrierError(ShapeError):
    """A barrier of a steady loop whose place the code does not tell."""


def kernel_roles(shape: KernelShape, out_bytes: int = 0, masked: bool = False, lost: bool = False) -> KernelRoles:
    """The steady loops of a kernel; ShapeError for one in whose loops nothing is multiplied, computed or moved, or whose products
    stand around its loops, LostBarrierError for a barrier whose place is not known, unless such are to be left out as ``lost``.

    ``out_bytes`` are those that a role copies out in an iteration, which no code tells; with ``masked`` an iteration masks its
    scores.
    """
    if not any(candidates(shape).values()):
        raise ShapeError(
            f"{shape.kernel}: expected a loop that multiplies, computes or moves data, found loops that count or wait alone"
        )
    shape = _joined(shape)
    chosen, unrolled = _chosen(shape, masked)
    looped = _sites(shape.kernel, chosen, lost)
    # Barriers of a tile alone: only those that are known, and all of whose parties are in the roles looked at, are waited for.
    alone = (one.site(step) for one in chosen for step in (*one.begin, *one.end))
    sites = [
        *looped,
        *dict.fromkeys(site for site in alone if site is not None and site.resolved and site not in looped),
    ]
    # Ahead of the loops only what they go on with matters.
    chosen = [
        dataclasses.replace(one, ahead=tuple(s for s in one.ahead if s.kind in _GOES_ON or one.site(s) in looped))
        for one in chosen
    ]
    number = {site: i for i, site in enumerate(sites)}
    codes = tuple(
        RoleCode(
            one.name, one.warp,
            *(tuple(instruction_of(one, step, number, out_bytes) for step in steps) for steps in (one.ahead, one.repeated, one.begin, one.end)),
        )
        for one in chosen
    )  # fmt: skip
    parties = parties_of(chosen, frozenset(looped))
    barriers = tuple(
        roles.Barrier(
            site.label(), site.stages, site.named,
            tuple((role, kind, count) for (at, role, kind), count in parties.items() if at == site),
            arrivals_by_turns(site, chosen, shape, unrolled),
        )
        for site in sites
    )  # fmt: skip
    return KernelRoles(shape.kernel, shape.target, codes, barriers, unrolled, _lane_bytes(chosen) / unrolled)


def _chosen(shape: KernelShape, masked: bool) -> tuple[list[Steady], int]:
    """The steady loop of every role, and how many iterations a pass of them stands for; ShapeError where none of them multiplies in a kernel that does."""
    multiplying = multiplies(shape)
    chosen = [one for role, loops in candidates(shape).items() if loops for one in _warps(role, loops, shape, masked)]
    chosen = placed(at_base(chosen, shape))
    chosen = every_iteration(without_tiles(chosen))
    chosen = [one for one in chosen if not multiplying or _is_paced(one.repeated)]
    chosen, unrolled = by_slot(chosen)
    chosen = [with_whole_phases(one) for one in chosen]
    if multiplying and not any(step.instruction.opcode in MATRIX for one in chosen for step in one.repeated):
        raise ShapeError(
            f"{shape.kernel}: expected matrix products in an innermost loop, whose iterations are simulated, "
            "found them only around loops: write the inner loop in line"
        )
    _check_products(shape.kernel, chosen)
    return chosen, unrolled


def _sites(kernel: str, chosen: Sequence[Steady], lost: bool) -> dict[Barrier, None]:
    """Barriers of the loops, in the order in which roles come to them; LostBarrierError for one whose place is not known, unless such are left out as ``lost``."""
    sites = dict.fromkeys(site for one in chosen for step in one.repeated if (site := one.site(step)) is not None)
    unknown = next((site for site in sites if not site.resolved), None)
    if unknown is not None and not lost:
        raise LostBarrierError(
            f"{kernel}: expected barriers at known places in the steady loops, got {unknown.label()}"
        )
    return {site: None for site in sites if site.resolved}


def _is_paced(steps: Sequence[Step]) -> bool:
    """Whether a loop multiplies, or meets other roles at barriers: of one beside products that does neither (Q of the next tile) nothing
    says how often it runs."""
    return any(step.kind == "matrix" or step.barriers for step in steps)


def _check_products(kernel: str, chosen: Sequence[Steady]) -> None:
    """ShapeError for a product that nothing rates: of a shape that the code does not tell, or in double precision."""
    for one in chosen:
        for step in (*one.begin, *one.repeated, *one.end):
            code = step.instruction
            if step.kind == "matrix" and (code.opcode == "DMMA" or 0 in step.shape):
                lacks = "double precision, whose rate no machine file has"
                if code.opcode != "DMMA":
                    lacks = "a shape that the code computes, and which cannot be followed"
                raise ShapeError(
                    f"{kernel}: expected matrix products of known shape and rate, got {code.opcode}{code.modifiers} at "
                    f"{code.address:#x} of {lacks}"
                )


def _lane_bytes(chosen: Sequence[Steady]) -> float:
    """Bytes of a CTA that lanes load from global memory and store there in a pass of its loops."""
    stands_for = Counter(one.role.warps for one in chosen)
    return sum(lane_traffic(one.repeated) * len(one.role.warps) / stands_for[one.role.warps] for one in chosen)


def loops_left_out(shape: KernelShape) -> dict[int, tuple[int, ...]]:
    """Warp -> instructions of its role's innermost loops that work but are not followed, as they stand in the code."""
    found, multiplying = {}, multiplies(shape)
    for role, loops in candidates(_joined(shape)).items():
        steady = steady_of(loops, multiplying)[1] if loops else None
        if steady is not None and multiplying and not _is_paced(steady.steps):
            steady = None
        others = tuple(len(loop.steps) for _, loop in loops if loop is not steady)
        if others:
            found.update(dict.fromkeys(role.warps, others))
    return found


def tile_ends_left_out(shape: KernelShape) -> dict[int, int]:
    """Warp -> instructions of its role's steady loop that end a tile, under a branch, and are no part of an iteration."""
    found = {}
    for role, loops in candidates(_joined(shape)).items():
        ends = sum(tile_ends(steady_of(loops, multiplies(shape))[1]).values()) if loops else 0
        found.update(dict.fromkeys(role.warps, ends) if ends else {})
    return found


def _joined(shape: KernelShape) -> KernelShape:
    multiplying = multiplies(shape)
    return joined(shape, {role: steady_of(loops, multiplying)[1] for role, loops in candidates(shape).items() if loops})


def _warps(role: Role, loops: Sequence[Candidate], shape: KernelShape, masked: bool) -> list[Steady]:
    """The warps of a role on the sub-partition of the matrix role's; of a role without one there, its first."""
    around, loop = steady_of(loops, multiplies(shape))
    # Of a tile whose iterations are a loop in a loop, also what goes before the outer one.
    levels = [*itertools.pairwise(around[1:]), (around[-1], loop)]
    ahead = tuple(
        step for out, into in levels for step in _ahead(out, into) if step.kind == "expect" or kind_of(step) != "plain"
    )
    begin = tuple(step for out, into in levels for step in _ahead(out, into, True))
    if len(around) > 1 and around[1] in around[0].body:
        # What is handed over once, before the first tile, and what every tile begins with.
        handed = tuple(step for step in around[0].before(around[1]) if step.kind in _HANDED)
        ahead, begin = (*handed, *ahead), (*handed, *begin)
    first = next((one for one in shape.roles if one.work.startswith("matrix")), role)
    partition = first.warps[0] % PARTITIONS
    mine = [warp for warp in role.warps if warp % PARTITIONS == partition] or role.warps[:1]

    def run_by(warp: int, steps: Sequence[Step]) -> tuple[Step, ...]:
        return tuple(
            step for step in steps if (not step.runs or warp in step.runs) and (warp == mine[0] or not lone(step))
        )

    def lone(step: Step) -> bool:
        """Whether one thread of the CTA does it, also where it is not known who takes the branch around it."""
        return step.instruction.opcode in _ONE_THREAD

    end = around[-1].after(loop) if loop in around[-1].body else ()
    return [
        Steady(
            role, warp, run_by(warp, _told(ahead)), run_by(warp, _repeated(loop, masked)), run_by(warp, _told(begin)),
            run_by(warp, _told(end)),
        )
        for warp in mine
    ]  # fmt: skip


def _repeated(loop: Loop, masked: bool = False) -> tuple[Step, ...]:
    """Steps of an iteration, without what a vote decides and, unless it is a ``masked`` one, what masks scores."""
    skipped = {guard.name for guard in loop.guards if guard.kind == "vote"} | tile_ends(loop).keys()
    turns = {}
    for guard in loop.guards:
        if not masked and hides_scores([step.instruction for step in loop.steps if step.guard == guard.name]):
            skipped.add(guard.name)
        if len(guard.turns) > 1:
            turns[guard.name] = guard.turns
    # The first to add to a sum writes it; where that stands in line, the others add elsewhere.
    ways = (loop.steps, *(guard.away for guard in loop.guards))
    adds = any(step.instruction.opcode == "UTMAREDG" for way in ways for step in way)
    steps = [
        dataclasses.replace(
            step, turns=turns.get(step.guard, ()), note="adds" if adds and step.kind == "copy_out" else step.note
        )
        for step in loop.steps
        if step.guard not in skipped
    ]
    return _told(steps)


def _ahead(around: Loop, loop: Loop, whole: bool = False) -> tuple[Step, ...]:
    """What ``around`` runs before it enters ``loop``; loops on the way, over masked blocks, run no iteration.

    Meetings of the whole CTA count where the ``whole`` tile is looked at.
    """
    way = around.body[: around.body.index(loop)] if loop in around.body else around.body
    # Where the whole CTA meets, all warps are there before the loops begin.
    return tuple(one for one in way if isinstance(one, Step) and (whole or not (one.kind in NAMED and one.amount < 0)))


def _told(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Copies whose barrier is not known complete on the one that was told of them last; who tries and then waits waits once, also
    where several tries go ahead of the first wait."""
    out: list[Step] = []
    tried: dict[tuple[str, object], int] = {}
    told: Step | None = None
    for step in steps:
        if step.kind == "wait":
            # By the barrier alone: a try and its wait may differ in the predicate that they write and where the parity stands.
            asked = (operands_of(step.instruction.operands)[1], step.barriers)
            if asked in tried:
                first = out[tried[asked]]
                if first.instruction.predicate and step.amount >= 0:
                    out[tried[asked]] = dataclasses.replace(first, amount=step.amount)
                continue
            tried[asked] = len(out)
        elif step.kind not in _BETWEEN:
            tried.clear()
        told = step if step.kind == "expect" else told
        lost = step.kind == "copy_in" and not all(barrier.resolved for _, barrier in step.barriers)
        out.append(dataclasses.replace(step, barriers=told.barriers) if lost and told is not None else step)
    return tuple(out)
