"""What each role executed, in order: the input of `replay.timing`.  Costs are not decided here, only counted.

Counts are of one SM: half of what a pair of CTAs does together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: (barrier number, phase): what completes, and what waits.
Key = tuple[int, int]


class Step(NamedTuple):
    """One operation on a tensor, of the warps of a role.

    ``pipe``: what executes it: fma, fma2 (two results an instruction), alu, mufu, cvt (two results), div, mma (products of elements); max, sum and combine (integers) along ``axis``; all (what several
    steps make together);
    smem_load, smem_store, tmem_load, tmem_store, global_load, global_store; fence, barrier.
    """

    #: Steps of a program are numbered as they are executed.
    number: int
    pipe: str
    #: Instructions of single threads (of reductions: elements), or bytes, of one CTA.
    amount: float
    #: Of the result (of reductions: of what is reduced), of all CTAs; the layout says which of it a thread has (None: not known).
    shape: tuple[int, ...]
    layout: Any
    #: The steps whose results it takes.
    operands: tuple[int, ...]
    #: The dimension that a reduction takes away.
    axis: int | None


@dataclass(slots=True)
class Work:
    """Arithmetic and memory traffic between two synchronising operations."""

    line: int
    steps: list[Step] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, float]:
        """What every pipe and port executes, in the units of its steps."""
        found: dict[str, float] = {}
        for step in self.steps:
            found[step.pipe] = found.get(step.pipe, 0.0) + step.amount
        return found


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
    #: CTAs that it consists of.
    ctas: int = 1
