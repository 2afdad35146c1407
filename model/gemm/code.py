"""A GEMM kernel as a compiler made it: what its machine code takes where the forecast before compilation counts.

A role's code is followed instruction by instruction on one sub-partition (`compiled.roles`), with every mbarrier open: what
others make it wait for is the graph's business (`gemm.pipeline`).  Of the warpgroups that multiply these are the way to a
tile's first product and every part of an epilogue, of the warps that copy what they run for a tile and for a k-step or a box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tilecast.model.compiled.code import CodeError
from tilecast.model.compiled.roles.code import MATRIX_KINDS, KernelRoles, RoleCode, RoleInstruction
from tilecast.model.compiled.roles.costs import role_costs
from tilecast.model.compiled.roles.run import pass_cycles
from tilecast.model.gemm.families import boxes, consumer_warps
from tilecast.model.gemm.variant import GemmVariant
from tilecast.model.machine.machine import Machine

#: Of an instruction whose result no other waits for.
_NO_COUNTER = 7


@dataclass(frozen=True, slots=True)
class GemmCode:
    """A variant as a compiler made it."""

    target: str
    compiler: str
    #: Of a thread, and bytes of its stack.
    registers: int
    stack_bytes: int
    roles: KernelRoles


@dataclass(frozen=True, slots=True)
class CodeCycles:
    """Cycles of a variant's code on a machine, nothing in its way."""

    #: From the turn, or the end of the last tile, to a tile's first product.
    begin: float
    #: Every part of an epilogue, the products' end first: alone, and of warpgroups that take turns while the other multiplies (else 0).
    epilogue: tuple[float, ...]
    epilogue_beside: tuple[float, ...]
    #: The warp that copies A and B: what a tile adds, and a k-step.
    load_tile: float
    load_step: float
    #: The warp that copies C: what a box takes; 0 where its code is not there (C is not read).
    load_box: float
    #: Instructions that a first tile of one k-step runs: of a warpgroup that multiplies, and of the warp that copies A and B.
    product_instructions: int
    copy_instructions: int


def code_cycles(kernel: KernelRoles, variant: GemmVariant, machine: Machine) -> CodeCycles:
    """What the code of ``variant``'s ``kernel`` takes on ``machine``.

    Raises CodeError for code of another kernel, MachineError for a machine that lacks a fact.
    """
    return _cycles(kernel, variant, machine)


@lru_cache(maxsize=1024)
def _cycles(kernel: KernelRoles, v: GemmVariant, machine: Machine) -> CodeCycles:
    costs = role_costs(machine)
    products = [role for role in kernel.roles if any(one.kind in MATRIX_KINDS for one in role.loop)]
    copies = [role for role in kernel.roles if any(one.kind == "copy" for one in role.loop)]
    groups = consumer_warps(v) // 4 if v.joined else 2
    if len(products) != groups or not copies:
        raise CodeError(
            f"{kernel.kernel}: expected {groups} warpgroup{'s' if groups > 1 else ''} that multiply and a warp that copies, as such {v.family} kernels have"
        )
    mine, other = products[-1], products[0]
    parts = _parts(mine, v)
    # The ring's warp has a loop of k-steps within its tiles; C's has all boxes of a tile in one.
    ring = next((role for role in copies if role.begin and role is copies[0]), copies[0])
    boxes_of_c = copies[1] if len(copies) > 1 else None
    per_tile = boxes(v) * (1 if v.accumulators == 2 or v.joined else 2)
    return CodeCycles(
        begin=pass_cycles(_until_product(mine.begin), costs),
        epilogue=tuple(pass_cycles(part, costs) for part in parts),
        epilogue_beside=tuple(pass_cycles(part, costs, other.loop) if v.accumulators == 2 else 0.0 for part in parts),
        load_tile=pass_cycles(ring.begin, costs),
        load_step=pass_cycles(_unlooked(ring.loop), costs),
        load_box=pass_cycles(boxes_of_c.loop, costs) / per_tile if boxes_of_c is not None else 0.0,
        product_instructions=len(mine.begin) + len(mine.loop) + len(mine.end),
        copy_instructions=len(ring.begin) + len(ring.loop),
    )


def _unlooked(code: Sequence[RoleInstruction]) -> tuple[RoleInstruction, ...]:
    """A k-step of the warp that copies, where programs meet in it: who is not ahead does not wait for what it asks the counters."""
    return tuple(
        one._replace(latency="fixed", write_counter=_NO_COUNTER) if one.latency == "l2" else one for one in code
    )


def _until_product(code: Sequence[RoleInstruction]) -> tuple[RoleInstruction, ...]:
    """``code`` up to its first product."""
    at = next((i for i, one in enumerate(code) if one.kind in MATRIX_KINDS), len(code))
    return tuple(code[:at])


def _parts(role: RoleCode, v: GemmVariant) -> list[tuple[RoleInstruction, ...]]:
    """The epilogue from one wait for C (or for a free slot) to the next; CodeError where they are not as many as the parts."""
    waits = [i for i, one in enumerate(role.end) if one.kind == "wait"]
    if len(waits) != boxes(v):
        raise CodeError(
            f"{role.name}: expected {boxes(v)} waits in the epilogue of a tile, found {len(waits)}: this is not the code of this variant"
        )
    ends = [*waits[1:], len(role.end)]
    begins = [0, *waits[1:]]
    return [role.end[begin:end] for begin, end in zip(begins, ends, strict=True)]
