"""The steady loops of a kernel's warp roles, as the simulator takes them: plain values that a file can hold.

A role's program is what its warps run ahead of their loop, as far as others wait for it, and then the loop, for ever.  What
one role waits for another brings: the phases of barriers, counted in the order in which a ring of them is gone round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tilecast.model.compiled.code import PIPES as CODE_PIPES

#: What an instruction does beyond occupying its pipe.
KINDS = (
    "plain", "wait", "arrive", "named_wait", "named_arrive", "copy", "matrix", "commit", "tensor_load", "tensor_store", "fence",
)  # fmt: skip
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
    #: Number of its barrier in `KernelRoles.barriers`; -1: none, or nobody's in the loops.
    barrier: int = -1
    #: wait: phases that count as complete before anybody arrives, 1 where a fresh barrier lets it pass;
    #: tensor_load, tensor_store: registers a thread; copy: bytes; other pipes: 2 for packed pairs of numbers.
    amount: int = 0
    #: matrix: m, n, k of one instruction, home of A ("smem" or "tmem"), dtype by which it is rated.
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


@dataclass(frozen=True, slots=True)
class RoleCode:
    """A warp that stands for its role on one sub-partition; of roles of four warps and more each sub-partition has one."""

    name: str
    warp: int
    ahead: tuple[RoleInstruction, ...]
    loop: tuple[RoleInstruction, ...]


@dataclass(frozen=True, slots=True)
class KernelRoles:
    """A kernel by its steady loops."""

    kernel: str
    target: str
    roles: tuple[RoleCode, ...]
    barriers: tuple[Barrier, ...]

    @property
    def matrix(self) -> int:
        """The role that issues matrix products; its loop's iteration is the kernel's."""
        return next(i for i, role in enumerate(self.roles) if any(one.kind == "matrix" for one in role.loop))

    @property
    def flop(self) -> float:
        """FLOP of one SM in an iteration of the matrix role: half of what a pair's products are."""
        loop = self.roles[self.matrix].loop
        return sum(2.0 * m * n * k / (2 if one.pair else 1) for one in loop for m, n, k in (one.shape,))
