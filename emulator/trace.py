"""What each role executed, in order: the input of `replay.timing`.  Costs are not decided here, only counted.

Counts are of one SM: half of what a pair of CTAs does together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: (barrier number, phase): what completes, and what waits.
Key = tuple[int, int]


@dataclass(slots=True)
class Work:
    """Arithmetic and memory traffic between two synchronising operations."""

    line: int
    #: Scalar results by pipe: fma, alu, mufu, cvt (packed pairs), div; bytes by port: smem, tmem_read, tmem_write.
    counts: dict[str, float] = field(default_factory=dict)
    #: Operations on one number a row, which depend on each other: how many, by pipe.
    chain: dict[str, int] = field(default_factory=dict)
    #: Tensor memory loads, each a latency when nothing else runs meanwhile.
    loads: int = 0


@dataclass(slots=True)
class Wait:
    """Wait for a phase of a barrier."""

    line: int
    key: Key
    name: str


@dataclass(slots=True)
class Arrive:
    """Arrive at a barrier."""

    line: int
    key: Key
    name: str
    across: bool


@dataclass(slots=True)
class CopyIssue:
    """Hand a copy to the copy engine; ``key`` is the phase that its bytes complete."""

    line: int
    bytes: float
    name: str
    key: Key | None = None


@dataclass(slots=True)
class MatrixIssue:
    """Hand a product m x n over k to the tensor core; ``number`` counts the products of its queue."""

    line: int
    m: int
    n: int
    k: int
    dtype: str
    a_home: str
    pair: int
    number: int
    name: str


@dataclass(slots=True)
class Commit:
    """Have the tensor core arrive at barriers when the products so far are done."""

    line: int
    keys: list[Key]
    number: int
    name: str


@dataclass(slots=True)
class MatrixWait:
    """Wait until product ``number`` of the role's own queue is done (wgmma)."""

    line: int
    number: int


@dataclass(slots=True)
class Fork:
    """Start the roles ``roles`` (indices), as warp_specialize does."""

    line: int
    roles: tuple[int, ...]


@dataclass(slots=True)
class Join:
    """Wait for the roles ``roles``."""

    line: int
    roles: tuple[int, ...]


Event = Work | Wait | Arrive | CopyIssue | MatrixIssue | Commit | MatrixWait | Fork | Join


@dataclass(slots=True)
class RoleTrace:
    """One role's events."""

    name: str
    index: int
    warps: int
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ProgramTrace:
    """What one program (a CTA or a pair of them) executed."""

    program: int
    roles: tuple[RoleTrace, ...]
