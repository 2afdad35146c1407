"""Which loop of a role is followed: of the innermost loops that work the steady one.

Of a kernel that multiplies matrices, loops work that multiply, copy, read tensor memory or compute exponentials; those that
multiply come first, and of those the one with the fewest instructions a product.  Of a kernel that does not, loops work that
move or compute anything, and the one that moves most is followed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tilecast.codegen.compiler.opcodes import OPCODES
from tilecast.codegen.compiler.structure.actions import lane_bytes
from tilecast.codegen.compiler.structure.shape import EXPONENTIALS, KernelShape, Loop, Role, Step

#: Instructions of a loop in which lanes take turns, at most.
_TURN = 16
#: Lanes of a warp; opcodes that move a lane's bytes to or from global memory.
_LANES = 32
_GLOBAL = frozenset(
    name
    for name, known in OPCODES.items()
    if known.width == "lane" and not known.asynchronous and "global" in known.reads + known.writes
)
#: A loop of a role with the loops around it, outermost first.
Candidate = tuple[tuple[Loop, ...], Loop]


def multiplies(shape: KernelShape) -> bool:
    """Whether a loop of a kernel multiplies matrices."""
    return any(
        step.kind == "matrix" for role in shape.roles for loop in role.walk() if loop.name for step in loop.steps
    )


def candidates(shape: KernelShape) -> dict[Role, list[Candidate]]:
    """Each role's innermost loops that work, with the loops around them, outermost first."""
    works = _works if multiplies(shape) else _moves
    found = {role: [one for one in _innermost(_unrolled(role.whole), ()) if works(one[1])] for role in shape.roles}
    taken: set[int] = set()
    for role in sorted(found, key=lambda role: len(found[role])):
        found[role] = [one for one in found[role] if one[1].address not in taken] or found[role]
        taken |= {loop.address for _, loop in found[role]}
    return found


def _unrolled(loop: Loop) -> Loop:
    """``loop`` with what it repeats only until all lanes have had their turn (a copy whose operands may differ) run in line, once.

    In a loop that itself waits for slots and has the copy engine fill them, loops that know no barrier are another way to
    fill one (rows gathered from pages, lane by lane) and are left out; so are those without products in one that multiplies
    (locks that other CTAs hold, the sums of a tile of which a part was another CTA's).
    """
    body: list[Step | Loop] = []
    kinds = {step.kind for step in loop.steps if step.instruction.opcode != "LDGSTS"}
    fills = {"wait", "copy_in"} <= kinds or _multiplies_alone(loop)
    for one in loop.body:
        inner = _unrolled(one) if isinstance(one, Loop) else one
        if isinstance(inner, Loop) and (_takes_turns(inner) or _looks(inner)):
            body += inner.body
        elif not (fills and isinstance(inner, Loop) and _alone(inner)):
            body.append(inner)
    beside = [_unrolled(one) for one in loop.beside if not (fills and _alone(one))]
    return dataclasses.replace(loop, body=tuple(body), beside=tuple(beside))


def _multiplies_alone(loop: Loop) -> bool:
    """Whether a loop multiplies and none inside of it does."""
    inside = (step.kind for inner in loop.inner for one in inner.walk() for step in one.steps)
    return bool(loop.name) and any(step.kind == "matrix" for step in loop.steps) and "matrix" not in inside


def _alone(loop: Loop) -> bool:
    """Whether a loop neither multiplies nor meets other roles."""
    met = {"matrix", "wait", "arrive", "commit", "expect", "named_wait", "named_arrive"}
    return not any(met & {step.kind for step in one.steps} for one in loop.walk())


def _takes_turns(loop: Loop) -> bool:
    kinds = {step.kind for step in loop.steps}
    return (
        not loop.inner
        and len(loop.steps) <= _TURN
        and "to_uniform" in kinds
        and not kinds & {"matrix", "wait", "arrive"}
    )


def _looks(loop: Loop) -> bool:
    """Whether a loop only looks at a word of memory until it is what it must be: once, where it is by then."""
    loads = [step for step in loop.steps if step.instruction.opcode in ("LD", "LDG")]
    quiet = all(step.kind in ("plain", "exit") for step in loop.steps)
    return (
        not loop.inner
        and len(loop.steps) <= _TURN
        and quiet
        and len(loads) == 1
        and "STRONG" in loads[0].instruction.modifiers
    )


def _innermost(loop: Loop, around: tuple[Loop, ...]) -> list[Candidate]:
    inside = [one for inner in loop.inner for one in _innermost(inner, (*around, loop))]
    return inside if inside or not loop.name else [(around, loop)]


def _works(loop: Loop) -> bool:
    kinds = {step.kind for step in loop.steps}
    if bool(kinds & {"matrix", "copy_in", "tensor_load", "tensor_store"}) or loop.pipes()["mufu"] >= EXPONENTIALS:
        return True
    # What takes tiles that others bring, and tells them when it has.
    return {"wait", "arrive"} <= kinds and bool(kinds & {"copy_out", "shared_load", "shared_store"})


def _moves(loop: Loop) -> bool:
    """Whether a loop moves or computes anything beside its own counters."""
    kinds = {step.kind for step in loop.steps}
    pipes = loop.pipes()
    return bool(lane_traffic(loop.steps) or kinds & {"copy_in", "copy_out", "shared_load", "shared_store"}) or bool(
        pipes["mufu"] + pipes["fma"]
    )


def lane_traffic(steps: Sequence[Step]) -> int:
    """Bytes of a warp that ``steps`` load from global memory and store there, lane by lane."""
    return sum(
        _LANES * _moved(step.instruction.modifiers)
        for step in steps
        if step.instruction.opcode in _GLOBAL or step.instruction.opcode == "LDGSTS"
    )


def _moved(modifiers: str) -> int:
    """Bytes that a lane moves: of numbers shorter than a register their own."""
    parts = modifiers.split(".")
    return 1 if {"U8", "S8"} & set(parts) else 2 if {"U16", "S16"} & set(parts) else lane_bytes(modifiers)


def steady_of(loops: Sequence[Candidate], multiplying: bool) -> Candidate:
    """The steady one of a role's candidates in a kernel that is ``multiplying`` matrices, or is not.

    The one with the fewest instructions a product: masks add some, and a remainder's loop, which is not unrolled, has more; where
    none multiplies, the shortest.  In a kernel without products the one that moves most bytes.
    """

    def length(one: Candidate) -> tuple[bool, float]:
        steps = one[1].steps
        products = sum(math.prod(step.shape) or 1 for step in steps if step.kind == "matrix")
        return not products, len(steps) / max(1, products)

    if multiplying:
        return min(loops, key=length)
    return max(loops, key=lambda one: (lane_traffic(one[1].steps), len(one[1].steps)))


def tile_ends(loop: Loop) -> dict[str, int]:
    """Guard -> instructions of what a loop that multiplies runs only where a tile ends: under a branch that no thread's place in the
    warp decides, and writes results to global memory without a product of its own."""
    under: dict[str, list[Step]] = {guard.name: [] for guard in loop.guards if guard.kind in ("uniform", "thread")}
    for step in loop.steps:
        under.get(step.guard, []).append(step)
    multiplied = {step.guard for step in loop.steps if step.kind == "matrix"}
    if not multiplied - under.keys():
        return {}
    return {
        name: len(steps)
        for name, steps in under.items()
        if name not in multiplied and any("global" in OPCODES[s.instruction.opcode].writes for s in steps)
    }
