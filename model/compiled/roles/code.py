"""The steady loops of a kernel's warp roles, as the simulator takes them: plain values that a file can hold.

A role's program is what its warps run ahead of their loop, as far as others wait for it, and then the loop, for ever.  What
one role waits for another brings: the phases of barriers, counted in the order in which a ring of them is gone round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tilecast.model.compiled.code import PIPES as CODE_PIPES

#: What an instruction does beyond occupying its pipe.
KINDS = (
    "plain", "wait", "arrive", "named_wait", "named_arrive", "copy", "matrix", "commit", "tensor_load", "tensor_store", "fence",
    "wgmma", "wgmma_wait", "mma_sync", "group_copy", "group", "group_wait", "copy_out", "shared_load", "shared_store",
)  # fmt: skip
#: Matrix products: of one thread for the CTA (tcgen05), of a warpgroup, of a warp.
MATRIX_KINDS = ("matrix", "wgmma", "mma_sync")
#: Pipes of a sub-partition: those of every kernel, and the port to tensor memory.
PIPES = (*CODE_PIPES, "tmem")


class RoleInstruction(NamedTuple):
    """One instruction of one warp."""

    pipe: str
    #: Cycles before the warp's next instruction can issue, at least 1.
    stall: int
    #: Bit mask of the six counters that must be clear first; the counters it raises for result and operands (7: none).
    waits: int
    write_counter: int
    read_counter: int
    #: Class of `model.compiled.code.LATENCIES`.
    latency: str
    kind: str = "plain"
    #: Number of its barrier in `KernelRoles.barriers`; -1: none, or one that no loop uses.
    barrier: int = -1
    #: wait: phases that count as complete before the first arrival, 1 where a fresh barrier lets it pass;
    #: tensor_load, tensor_store, shared_load, shared_store: registers a thread; copy, copy_out: bytes; group_copy: bytes a lane;
    #: wgmma: 1 where its group ends;
    #: wgmma_wait, group_wait: groups that may stay under way; named_wait, named_arrive: threads that open it, 0: all that ever
    #: come; other pipes: 2 for packed pairs of numbers.
    amount: int = 0
    #: matrix, wgmma, mma_sync: m, n, k of one instruction, home of A ("smem", "tmem" or "register"), dtype by which it is rated.
    #: named_wait, named_arrive: threads that come with it, of the warpgroup for which the warp stands.
    #: shared_load, shared_store: wavefronts of 128 bytes that a warp's takes of the port, warps for which it stands.
    shape: tuple[int, int, int] = (0, 0, 0)
    source: str = ""
    dtype: str = ""
    #: It works for a pair of CTAs, or arrives at the barrier of the pair's other CTA.
    pair: bool = False
    #: wait: under a branch, so that an iteration may do without.
    guarded: bool = False


class Barrier(NamedTuple):
    """A barrier, or a ring of them that is gone round in order."""

    name: str
    stages: int
    named: bool
    #: (role, kind, how often a phase) of all who arrive at it.
    parties: tuple[tuple[int, str, int], ...]
    #: Arrivals that complete a phase, of any warp; 0: each party brings its own to every phase.
    arrivals_by_turns: int = 0


@dataclass(frozen=True, slots=True)
class RoleCode:
    """A warp that stands for its role on one sub-partition; of roles of four warps and more each sub-partition has one."""

    name: str
    warp: int
    #: What the loop goes on with of the code before it, and an iteration.
    ahead: tuple[RoleInstruction, ...]
    loop: tuple[RoleInstruction, ...]
    #: All that a tile runs before and after its iterations; empty where a file of loops does not say.
    begin: tuple[RoleInstruction, ...] = ()
    end: tuple[RoleInstruction, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelRoles:
    """A kernel by its steady loops."""

    kernel: str
    target: str
    roles: tuple[RoleCode, ...]
    barriers: tuple[Barrier, ...]
    #: Iterations of the kernel's loop that a pass through each role's loop stands for.
    unrolled: int = 1
    #: Bytes of a CTA that lanes load from global memory and store there in an iteration.
    lane_bytes: float = 0.0

    @property
    def matrix(self) -> int:
        """The first role that issues matrix products (0 where none does); its loop's iteration is the kernel's."""
        return next((i for i, role in enumerate(self.roles) if any(one.kind in MATRIX_KINDS for one in role.loop)), 0)

    @property
    def _outside(self) -> float:
        """Passes' worth of products that stand outside of the loops."""
        inside = sum(_flop(role.loop) for role in self.roles)
        return sum(_flop(role.begin) + _flop(role.end) for role in self.roles) / inside if inside else 0.0

    @property
    def peeled(self) -> int:
        """Iterations' worth of products that stand outside of the loops."""
        return round(self._outside * self.unrolled)

    @property
    def more_passes(self) -> int:
        """Passes that roles which multiply nothing make more than those that do: they bring what products outside of loops take."""
        return math.ceil(round(self._outside, 6))

    @property
    def pair(self) -> bool:
        """Whether its products are those of a pair of CTAs."""
        return any(one.pair for role in self.roles for one in role.loop if one.kind in MATRIX_KINDS)

    @property
    def flop(self) -> float:
        """FLOP of a CTA in an iteration of the matrix roles: half of what a pair's products are, and what the warps of all four
        sub-partitions multiply where each does."""
        return sum(_flop(role.loop) for role in self.roles) / self.unrolled


def _flop(code: Sequence[RoleInstruction]) -> float:
    """FLOP of a CTA in ``code``."""
    return sum(
        2.0 * math.prod(one.shape) * (4 if one.kind == "mma_sync" else 0.5 if one.pair else 1)
        for one in code
        if one.kind in MATRIX_KINDS
    )


def together(kernel: KernelRoles, ctas: int) -> KernelRoles:
    """``ctas`` CTAs of ``kernel`` on one SM: each with barriers of its own."""
    if ctas == 1:
        return kernel
    roles: list[RoleCode] = []
    barriers: list[Barrier] = []
    for cta in range(ctas):
        first_role, first_barrier = len(roles), len(barriers)

        def moved(code: tuple[RoleInstruction, ...], by: int = first_barrier) -> tuple[RoleInstruction, ...]:
            return tuple(one._replace(barrier=one.barrier + by) if one.barrier >= 0 else one for one in code)

        for role in kernel.roles:
            parts = (moved(code) for code in (role.ahead, role.loop, role.begin, role.end))
            roles.append(RoleCode(f"CTA {cta} {role.name}" if cta else role.name, role.warp, *parts))
        for barrier in kernel.barriers:
            parties = tuple((role + first_role, kind, count) for role, kind, count in barrier.parties)
            barriers.append(
                barrier._replace(name=f"CTA {cta} {barrier.name}" if cta else barrier.name, parties=parties)
            )
    return KernelRoles(
        kernel.kernel, kernel.target, tuple(roles), tuple(barriers), kernel.unrolled, ctas * kernel.lane_bytes
    )


def again(kernel: KernelRoles) -> KernelRoles:
    """``kernel`` in a tile before which the same CTA had another: what it loads around its loops (lengths, where a tile begins) are
    words next to those of the tile before, which L1 holds."""

    def known(code: tuple[RoleInstruction, ...]) -> tuple[RoleInstruction, ...]:
        return tuple(one._replace(latency="local") if one.latency == "global" else one for one in code)

    return replace(
        kernel, roles=tuple(replace(role, begin=known(role.begin), end=known(role.end)) for role in kernel.roles)
    )
