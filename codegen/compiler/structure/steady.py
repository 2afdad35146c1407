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
from collections.abc import Callable, Sequence

from tilecast.codegen.compiler.flow import hides_scores
from tilecast.codegen.compiler.opcodes import MATRIX, MMA_SYNC, TCGEN05, WGMMA, latency_of
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
from tilecast.codegen.compiler.structure.shape import Barrier, KernelShape, Loop, Role, Step
from tilecast.codegen.compiler.structure.slots import (
    Steady,
    arrivals_by_turns,
    at_base,
    by_slot,
    mapped,
    with_whole_phases,
)
from tilecast.model.compiled.costs import PARTITIONS
from tilecast.model.compiled.roles import code as roles
from tilecast.model.compiled.roles.code import KernelRoles, RoleCode, RoleInstruction

#: Arithmetic on pairs of numbers, which takes its pipe twice as long.
_PAIRS = ("FFMA2", "FADD2", "FMUL2")
_KIND = {"copy_in": "copy", "matrix_wait": "wgmma_wait"}
_HOME = {"shared": "smem", "tensor": "tmem", "registers": "register"}
_ARRIVALS = ("arrive", "commit", "copy")
_NAMED = ("named_wait", "named_arrive")
#: Low bits of an address in shared memory that do not depend on where it begins.
_SPAN = 256
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
    multiplying = multiplies(shape)
    if not any(candidates(shape).values()):
        raise ShapeError(
            f"{shape.kernel}: expected a loop that multiplies, computes or moves data, found loops that count or wait alone"
        )
    shape = _joined(shape)
    chosen = [one for role, loops in candidates(shape).items() if loops for one in _warps(role, loops, shape, masked)]
    chosen = _placed(at_base(chosen, shape))
    chosen = _every_iteration(_without_tiles(chosen))
    chosen = [one for one in chosen if not multiplying or _is_paced(one.repeated)]
    chosen, unrolled = by_slot(chosen)
    chosen = [with_whole_phases(one) for one in chosen]
    if multiplying and not any(step.instruction.opcode in MATRIX for one in chosen for step in one.repeated):
        raise ShapeError(
            f"{shape.kernel}: expected matrix products in an innermost loop, whose iterations are simulated, "
            "found them only around loops: write the inner loop in line"
        )
    _check_products(shape.kernel, chosen)
    names = list(dict.fromkeys(site for one in chosen for step in one.repeated if (site := one.site(step)) is not None))
    unknown = next((site for site in names if not site.resolved), None)
    if lost:
        names = [site for site in names if site.resolved]
    elif unknown is not None:
        raise LostBarrierError(
            f"{shape.kernel}: expected barriers at known places in the steady loops, got {unknown.label()}"
        )
    # Barriers of a tile alone: only those that are known, and all of whose parties are in the roles looked at, are waited for.
    alone = dict.fromkeys(
        site
        for one in chosen
        for step in (*one.begin, *one.end)
        if (site := one.site(step)) is not None and site.resolved
    )
    looped = frozenset(names)
    names += [site for site in alone if site not in looped]
    # Ahead of the loops only what they go on with matters.
    chosen = [
        dataclasses.replace(one, ahead=tuple(s for s in one.ahead if s.kind in _GOES_ON or one.site(s) in looped))
        for one in chosen
    ]
    parties = _parties(chosen, looped)
    number = {site: i for i, site in enumerate(names)}
    codes = tuple(
        RoleCode(
            one.name, one.warp,
            *(tuple(_instruction(one, step, number, out_bytes) for step in steps) for steps in (one.ahead, one.repeated, one.begin, one.end)),
        )
        for one in chosen
    )  # fmt: skip
    barriers = tuple(
        roles.Barrier(
            site.label(), site.stages, site.named,
            tuple((role, kind, count) for (at, role, kind), count in parties.items() if at == site),
            arrivals_by_turns(site, chosen, shape, unrolled),
        )
        for site in names
    )  # fmt: skip
    return KernelRoles(shape.kernel, shape.target, codes, barriers, unrolled, _lane_bytes(chosen) / unrolled)


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


def _without_tiles(chosen: Sequence[Steady]) -> list[Steady]:
    """The same without roles that go round once a tile: they multiply nothing, others come to their barriers under a branch, and no
    iteration waits for them.

    (A warp of its own takes tiles and copies their Q.)  What others do for such a role under branches goes with it.
    """

    def slots(one: Steady, which: Callable[[Step], bool]) -> frozenset[object]:
        return frozenset(slot for step in one.repeated if which(step) for slot in _slots(one.site(step)))

    of_tiles = []
    for one in chosen:
        others = [other for other in chosen if other is not one]
        given = slots(one, lambda step: step.kind not in ("wait", "named_wait"))
        waited = frozenset().union(
            *(slots(other, lambda step: "wait" in step.kind and not step.guard) for other in others)
        )
        seldom = frozenset().union(*(slots(other, lambda step: bool(step.guard)) for other in others))
        multiplies = any(step.kind == "matrix" for step in one.repeated)
        if not multiplies and slots(one, lambda _: True) & seldom and not given & waited:
            of_tiles.append(one)
    left = frozenset(slot for one in of_tiles for slot in slots(one, lambda _: True))
    kept = [one for one in chosen if one not in of_tiles]
    return _without_branches(kept, left) if of_tiles else kept


def _without_branches(chosen: Sequence[Steady], seldom: frozenset[object]) -> list[Steady]:
    """The same without branches around the uses of ``seldom`` barriers."""
    kept = []
    for one in chosen:
        left = {step.guard for step in one.repeated if step.guard and _slots(one.site(step)) & seldom}
        kept.append(dataclasses.replace(one, repeated=tuple(step for step in one.repeated if step.guard not in left)))
    return kept


def _every_iteration(chosen: Sequence[Steady]) -> list[Steady]:
    """The same without what only some iterations do: branches around the uses of barriers to which all come under a branch, or whose
    waits stand under one and to which nobody comes in a loop.

    (A loop over all blocks of all tiles brings Q, and gives it back, once a tile; an epilogue that is no loop frees the sums.)
    """
    always: set[object] = set()
    waited: set[object] = set()
    brought: set[object] = set()
    arrived: set[object] = set()
    for one in chosen:
        # What multiplies under a branch does so but for the last time: the next block's products, ahead of this one's.
        multiplying = {step.guard for step in one.repeated if step.kind == "matrix"} | {""}
        for step in one.repeated:
            used = _slots(one.site(step))
            (always if step.guard in multiplying else waited if step.kind == "wait" else brought).update(used)
            arrived.update(used if _kind(step) in _ARRIVALS else ())
    return _without_branches(chosen, frozenset((waited & brought | waited - arrived) - always))


def _slots(site: Barrier | None) -> frozenset[object]:
    """What tells apart the barriers that a step may mean: slots of one ring go by several names."""
    if site is None:
        return frozenset()
    return frozenset(site.places) if site.resolved and not site.named else frozenset((site,))


def _placed(chosen: Sequence[Steady]) -> list[Steady]:
    """The same with rings for barriers whose slot is not known, where the known part of the address points at one ring alone.

    Shared memory begins at an address that the loader gives, a multiple of the span below: what is known agrees in its low bits.
    """
    sites = {site for one in chosen for step in one.repeated if (site := one.site(step)) is not None and not site.named}
    rings: dict[int, set[Barrier]] = {}
    for site in sites:
        if site.resolved:
            rings.setdefault(site.places[0] % _SPAN, set()).add(site)

    def place(step: Step) -> Step:
        found = []
        for warps, site in step.barriers:
            alike = rings.get(site.offset % _SPAN, set()) if not site.resolved and not site.named else set()
            found.append((warps, next(iter(alike)) if len(alike) == 1 else site))
        return dataclasses.replace(step, barriers=tuple(found))

    return mapped(chosen, place)


def _warps(role: Role, loops: Sequence[Candidate], shape: KernelShape, masked: bool) -> list[Steady]:
    """The warps of a role on the sub-partition of the matrix role's; of a role without one there, its first."""
    around, loop = steady_of(loops, multiplies(shape))
    # Of a tile whose iterations are a loop in a loop, also what goes before the outer one.
    levels = [*itertools.pairwise(around[1:]), (around[-1], loop)]
    ahead = tuple(
        step for out, into in levels for step in _ahead(out, into) if step.kind == "expect" or _kind(step) != "plain"
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
    return tuple(one for one in way if isinstance(one, Step) and (whole or not (one.kind in _NAMED and one.amount < 0)))


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


def _kind(step: Step) -> str:
    opcode = step.instruction.opcode
    if step.kind == "matrix" and opcode in WGMMA | MMA_SYNC:
        return "wgmma" if opcode in WGMMA else "mma_sync"
    if step.kind == "copy_in" and opcode == "LDGSTS":
        return "group_copy"
    kind = _KIND.get(step.kind, step.kind)
    return kind if kind in roles.KINDS else "plain"


def _parties(chosen: Sequence[Steady], looped: frozenset[Barrier]) -> dict[tuple[Barrier, int, str], int]:
    """(barrier, role, kind of arrival) -> arrivals in a phase: those of an iteration over the waits of one."""
    waited: Counter[Barrier] = Counter()
    for one in chosen:
        mine = Counter(one.site(step) for step in one.repeated if _kind(step) in ("wait", "named_wait"))
        for site, count in mine.items():
            if site is not None:
                waited[site] = max(waited[site], count)
    found: dict[tuple[Barrier, int, str], int] = {}
    for role, one in enumerate(chosen):
        once = [step for step in (*one.begin, *one.end) if one.site(step) not in looped]
        for steps in (one.ahead, one.repeated, once):
            arrivals = Counter((one.site(step), _kind(step)) for step in steps if _kind(step) in _ARRIVALS)
            announced = Counter(one.site(step) for step in steps if step.kind == "expect")
            for (site, kind), count in arrivals.items():
                # A named barrier counts threads of any warp.
                if site is None or site.named:
                    continue
                phases = waited[site] if steps is one.repeated else count
                found[site, role, kind] = max(1, round(count / max(1, announced[site] if kind == "copy" else phases)))
    return found


def _instruction(one: Steady, step: Step, number: dict[Barrier, int], out_bytes: int) -> RoleInstruction:
    code, kind, site = step.instruction, _kind(step), one.site(step)
    amount = 2 if code.opcode in _PAIRS else 0
    if kind in ("tensor_load", "tensor_store", "shared_load", "shared_store"):
        amount = step.amount
    elif kind == "wait":
        amount = one.passes(site)
    elif kind == "copy":
        amount = _bytes(one, step)
    elif kind == "copy_out":
        amount = _out_bytes(one, step, out_bytes)
    elif kind == "wgmma":
        amount = int(step.note == "commits")
    elif kind in ("wgmma_wait", "group_wait", "group_copy"):
        amount = max(0, step.amount)
    matrix = kind in roles.MATRIX_KINDS
    shape = step.shape if matrix else (0, 0, 0)
    if kind in _NAMED:
        amount, shape = max(0, step.amount), (_brings(one, step), 0, 0)
    if kind in ("shared_load", "shared_store"):
        shape = (step.wavefronts, sum(warp // 4 == one.warp // 4 for warp in one.role.warps), 0)
    pipe = "tmem" if kind in ("tensor_load", "tensor_store") else step.pipe
    remote = any(barrier.owner == "leader" for _, barrier in step.barriers) if kind == "arrive" else step.pair
    return RoleInstruction(
        pipe, *code.scheduling, latency_of(code.opcode, code.modifiers), kind,
        number.get(site, -1) if site is not None else -1, amount, shape,
        _HOME.get(step.source, "") if matrix else "add" if step.note == "adds" else "", _dtype(step) if matrix else "", remote,
        kind == "wait" and bool(step.guard),
    )  # fmt: skip


def _brings(one: Steady, step: Step) -> int:
    """Threads that come to a named barrier with this warp: those of the warps that it stands for, four at most."""
    mine = next((warps for warps, _ in step.barriers if one.warp in warps), ())
    return 32 * sum(warp // 4 == one.warp // 4 for warp in mine)


def _out_bytes(one: Steady, step: Step, out_bytes: int) -> int:
    """Bytes of a copy out: of a loop its share of ``out_bytes``, elsewhere of what its role's warps put into shared memory there."""
    for steps in (one.repeated, one.begin, one.end):
        if any(step is other for other in steps):
            copies = [other for other in steps if other.kind == "copy_out" and other.turn == step.turn]
            stored = sum(other.amount for other in steps if other.kind == "shared_store")
            mine = 4 * 32 * stored * len(one.role.warps)
            return (out_bytes if steps is one.repeated else mine) // max(1, len(copies))
    return 0


def _dtype(step: Step) -> str:
    """The type at whose rate a product runs; of mma.sync also those of which an instruction has 32 bytes in other numbers."""
    opcode, forms = step.instruction.opcode, step.instruction.modifiers.split(".")
    if opcode not in MMA_SYNC:
        return "bf16" if opcode in ("UTCHMMA", "HGMMA") else "fp8"
    if opcode == "BMMA":
        return "b1"
    wide = "tf32" if "TF32" in forms else "bf16"
    return wide if opcode == "HMMA" else "int4" if {"S4", "U4"} & set(forms) else "fp8"


def _bytes(one: Steady, step: Step) -> int:
    """Bytes that a copy brings to one SM: what its barrier is told to expect, over the copies that share it."""
    site = one.site(step)
    for steps in (one.repeated, one.ahead):
        told = [
            other.amount for other in steps if other.kind == "expect" and one.site(other) == site and other.amount > 0
        ]
        copies = sum(other.kind == "copy_in" and one.site(other) == site for other in steps)
        if told and copies:
            return sum(told) // copies // (2 if step.pair else 1)
    return 0
