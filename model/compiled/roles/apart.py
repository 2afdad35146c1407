"""Roles of a kernel each by itself, where what they hand each other cannot be followed: the least that an iteration takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tilecast.model.compiled.costs import PARTITIONS
from tilecast.model.compiled.roles.code import MATRIX_KINDS, KernelRoles, RoleCode, RoleInstruction, together
from tilecast.model.compiled.roles.costs import RoleCosts
from tilecast.model.compiled.roles.run import RolesRun, step
from tilecast.model.compiled.roles.state import State

#: Iterations until a role alone has found its rhythm, and those that are averaged.
_SETTLING, _AVERAGED = 4, 8


def roles_apart(kernel: KernelRoles, costs: RoleCosts, ctas: int = 1) -> RolesRun:
    """Every role of ``ctas`` CTAs finds all barriers open: an iteration takes no less than the slowest role alone, than what they
    take of a pipe of the sub-partition together, and than the products.

    Roles count whose loops meet, at some barrier, the loops of those that multiply: others (an epilogue, once a tile) go round
    less often.
    """
    kernel = together(kernel, ctas)
    partition = kernel.roles[kernel.matrix].warp % PARTITIONS
    busy: Counter[str] = Counter()
    slowest = 0.0
    for role in _linked(kernel):
        cycles, taken = _alone(kernel, role, costs)
        slowest = max(slowest, cycles)
        here = role.warp % PARTITIONS == partition
        busy.update({name: count for name, count in taken.items() if here or name in ("tensor", "port")})
    found = {name: count / kernel.unrolled for name, count in busy.items()}
    return RolesRun(max(slowest / kernel.unrolled, *found.values()), found, {})


def _linked(kernel: KernelRoles) -> list[RoleCode]:
    """Roles that multiply, and those that meet them in their loops, or meet one that does; all where none multiplies."""
    met = {role.name: {one.barrier for one in role.loop if one.barrier >= 0} for role in kernel.roles}
    linked = [role for role in kernel.roles if any(one.kind in MATRIX_KINDS for one in role.loop)]
    if not linked:
        return list(kernel.roles)
    grown = True
    while grown:
        known = set().union(*(met[role.name] for role in linked))
        more = [role for role in kernel.roles if role not in linked and met[role.name] & known]
        linked += more
        grown = bool(more)
    return linked


def _alone(kernel: KernelRoles, role: RoleCode, costs: RoleCosts) -> tuple[float, dict[str, float]]:
    """(cycles, cycles by pipe) of a pass through a role's loop that waits for nobody."""
    mine = RoleCode(role.name, role.warp, _open(role.ahead), _open(role.loop))
    state = State(KernelRoles(kernel.kernel, kernel.target, (mine,), ()), costs)
    (warp,) = state.warps
    marks: list[tuple[float, dict[str, float]]] = []
    for laps in (_SETTLING, _SETTLING + _AVERAGED):
        while len(warp.laps) < laps:
            step(state)
        marks.append((warp.laps[-1], dict(state.busy)))
    ((begin, before), (end, after)) = marks
    taken = {name: (after[name] - before[name]) / _AVERAGED for name in after}
    return (end - begin) / _AVERAGED, taken


def _open(code: Sequence[RoleInstruction]) -> tuple[RoleInstruction, ...]:
    """The same without barriers: mbarriers are found complete, named ones take their issue alone."""
    return tuple(
        one._replace(kind="plain", barrier=-1, amount=0) if one.kind in ("named_wait", "named_arrive")
        else one._replace(barrier=-1)
        for one in code
    )  # fmt: skip
