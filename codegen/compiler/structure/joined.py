"""Warps that go round one loop of matrix products and differ in what they do beside it: one role."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tilecast.codegen.compiler.structure.shape import KernelShape, Loop, Role, Step


def joined(shape: KernelShape, steady: Mapping[Role, Loop]) -> KernelShape:
    """``shape`` with roles in one that have warps of a warpgroup each and the same loop of products for their ``steady`` one.

    (A warp that alone takes a lock, or stores what all made, has loops that the others have not.)  The role with most warps
    speaks for all: one sub-partition is simulated, so what a single warp does beside the products does not count for all four.
    """
    roles: list[Role] = []
    for role in sorted(shape.roles, key=lambda one: -len(one.warps)):
        loop = steady.get(role)
        found = next(
            (
                i
                for i, other in enumerate(roles)
                if loop is not None
                and other in steady
                and steady[other].address == loop.address
                and any(step.kind == "matrix" for step in loop.steps)
                and {warp // 4 for warp in role.warps} & {warp // 4 for warp in other.warps}
            ),
            None,
        )
        if found is None:
            roles.append(role)
            continue
        other, warps = roles[found], tuple(sorted((*roles[found].warps, *role.warps)))
        roles[found] = dataclasses.replace(other, warps=warps, whole=_spoken_for(other.whole, other.warps, warps))
        steady = {**steady, roles[found]: steady[other]}
    return dataclasses.replace(shape, roles=tuple(sorted(roles, key=lambda one: one.warps)))


def _spoken_for(loop: Loop, before: tuple[int, ...], warps: tuple[int, ...]) -> Loop:
    """``loop`` in which ``warps`` come to what all of those ``before`` came to."""

    def step(one: Step) -> Step:
        sites = tuple((warps if mine == before else mine, site) for mine, site in one.barriers)
        return dataclasses.replace(one, barriers=sites) if sites != one.barriers else one

    def body(one: Step | Loop) -> Step | Loop:
        return _spoken_for(one, before, warps) if isinstance(one, Loop) else step(one)

    guards = tuple(dataclasses.replace(one, away=tuple(map(step, one.away))) for one in loop.guards)
    beside = tuple(_spoken_for(one, before, warps) for one in loop.beside)
    return dataclasses.replace(loop, body=tuple(map(body, loop.body)), guards=guards, beside=beside)
