"""Operations that take effect later: copies, matrix products, commits.

Each is issued by a role and carries what that role knew then.  It reads and writes memory when the scheduler lets it take
effect, as late as somebody needs it or at a random moment before, and checks its accesses against what it knew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tilecast.emulator.errors import BoundsError, LayoutError, UnsupportedError
from tilecast.emulator.far import without_overflow
from tilecast.emulator.hardware.barriers import Barrier, Instance
from tilecast.emulator.hardware.clocks import COPY, MATRIX_ENGINE, Agent, Knowledge, code_of
from tilecast.emulator.hardware.memory import Memories, Shared, Tmem
from tilecast.emulator.hardware.shadow import Access
from tilecast.emulator.trace import Commit as CommitEvent
from tilecast.emulator.trace import CopyIssue, Event
from tilecast.emulator.values import legal
from tilecast.emulator.values.dtypes import Dtype
from tilecast.emulator.values.tensors import Tensor


class Tiles(Protocol):
    """A tensor in global memory that is copied tile by tile: a tensor descriptor."""

    dtype: Dtype
    block_shape: Sequence[int]
    layout: Any

    def tile(self, corner: Sequence[int]) -> Any:
        """The values from ``corner`` on, zeros outside the tensor."""


class Engines(Memories, Protocol):
    """A running program with copies in flight."""

    copies: list[Copy]
    issued_copies: list[dict[int, tuple[int, int]]]

    def line(self) -> int:
        """Line of the kernel that runs now."""

    def next_copy(self) -> int:
        """A number for a copy."""

    def record(self, event: Event) -> None:
        """Append to the trace of the running role."""


class Issuer(Protocol):
    """The role that issues."""

    name: str
    warps: int
    agents: list[Agent]

    @property
    def program(self) -> Engines:
        """The program that it is part of."""

    @property
    def wgmma_stream(self) -> int:
        """Number of its wgmma queue among the streams."""


class Copy:
    """One CTA's part of a tile on its way from global to shared memory."""

    def __init__(
        self, role: Issuer, cta: int, desc: Tiles, corner: Sequence[int], bar: Instance, target: Shared,
        number: int, event: CopyIssue | None,
    ) -> None:  # fmt: skip
        program = role.program
        self.program, self.cta, self.desc, self.corner = program, cta, desc, list(corner)
        self.bar, self.target, self.number, self.event = bar, target, number, event
        self.line, self.actor = program.line(), f"the copy that {role.name} issues"
        self.known = role.agents[cta].release()
        self.calls = program.session.calls()

    def wakes(self) -> list[Instance]:
        """Barriers that its effect may complete."""
        return [self.bar]

    def take_effect(self) -> None:
        """Write the tile, zeros where it lies outside the tensor, and count its bytes."""
        access = Access(COPY + self.number, MATRIX_ENGINE, self.known, self.line, self.actor, True)
        tile = self.desc.tile(self.corner)
        part = self._part(tile.ndim)
        self.program.smem.write(self.target.cells_of(self.cta), access, self.target.dtype.bits)
        self.target.a[part] = tile[part]
        if self.program.session.watcher is not None:
            self.program.session.watcher.copied(self)
        key = self.bar.deliver(tile[part].nbytes, self.number)
        if self.event is not None:
            self.event.key = key

    def _part(self, rank: int) -> tuple[Any, ...]:
        """Index of this CTA's half of the tile."""
        split: int | None = self.desc.layout.split_dim(rank) if self.program.ctas == 2 else None
        if split is None:
            return (slice(None),) * rank
        half = self.desc.block_shape[split] // 2
        return (slice(None),) * split + (slice(self.cta * half, (self.cta + 1) * half),)


def issue_copy(role: Issuer, desc: Tiles, coordinates: Sequence[Any], bar: Barrier, target: Shared) -> None:
    """One copy in each CTA; LayoutError where tile and target differ."""
    program = role.program
    if target.shape != list(desc.block_shape) or target.dtype is not desc.dtype:
        raise LayoutError(
            f"{program.here()}: a copy of {desc.dtype} {list(desc.block_shape)} into {target.name}, {target.dtype} {target.shape}"
        )
    complaint = legal.wrong_copy(desc.layout, target.layout)
    if complaint:
        raise LayoutError(f"{program.here()}: a copy into {target.name}: {complaint}")
    corner = [int(without_overflow(c)) for c in coordinates]
    if len(corner) != len(desc.block_shape):
        raise BoundsError(
            f"{program.here()}: {len(corner)} coordinates for a tensor of {len(desc.block_shape)} dimensions"
        )
    size = target.a.nbytes / program.ctas
    event = CopyIssue(program.line(), size, f"copy {target.name}")
    program.record(event)
    for cta in range(program.ctas):
        number = program.next_copy()
        copy = Copy(role, cta, desc, corner, bar.of_cta(cta), target, number, event if cta == 0 else None)
        copy.bar.require(copy.known, cta, copy.line)
        program.copies.append(copy)
        program.issued_copies[cta][number] = (copy.line, int(target.cells_of(cta)[0]))


def _operand_values(operand: Shared | Tmem) -> Any:
    return (operand.view if isinstance(operand, Tmem) else operand.a).astype(np.float32)


def _read_operand(program: Engines, operand: Shared | Tmem, access: Access) -> None:
    memory = program.tmem if isinstance(operand, Tmem) else program.smem
    for cta in range(program.ctas):
        memory.read(operand.cells_of(cta), access, operand.dtype.bits)


class Product:
    """tcgen05.mma: acc = a b (+ acc), both CTAs' memory in a pair."""

    def __init__(self, role: Issuer, a: Shared | Tmem, b: Shared, acc: Tmem, use_acc: bool, number: int) -> None:
        program = self.program = role.program
        self.role, self.a, self.b, self.acc, self.use_acc, self.number = role, a, b, acc, use_acc, number
        self.line, self.actor = program.line(), f"the matrix product that {role.name} issues"
        self.known, self.calls = role.agents[0].release(), program.session.calls()
        #: What the warp that issues it knows of accesses to tensor memory: Triton 3.9 has the warps meet before, 3.6 does not.
        self.known_to_warp = self.known
        if role.warps > 1 and program.session.release != "3.9":
            self.known_to_warp = self.known.copy()
            for agent in role.agents:
                self.known_to_warp.epochs[agent.index] = min(self.known.epochs[agent.index], agent.met - 1)

    def wakes(self) -> list[Instance]:
        """Only commits tell anybody."""
        return []

    def take_effect(self) -> None:
        """Read the operands as they are now, and write the accumulator."""
        program, code = self.program, code_of(MATRIX_ENGINE, self.number)
        self.known.epochs[MATRIX_ENGINE] = self.known_to_warp.epochs[MATRIX_ENGINE] = self.number - 1
        access = Access(code, MATRIX_ENGINE, self.known, self.line, self.actor, True)
        by_warp = Access(
            code, MATRIX_ENGINE, self.known_to_warp, self.line, self.actor, True, self.role.agents[0].index
        )
        _read_operand(program, self.a, access)
        _read_operand(program, self.b, access)
        with np.errstate(all="ignore"):
            product = _operand_values(self.a) @ _operand_values(self.b)
            for cta in range(program.ctas):
                if self.use_acc:
                    program.tmem.read(self.acc.cells_of(cta), access, 32)
                program.tmem.write(self.acc.cells_of(cta), by_warp, 32)
            self.acc.view[...] = self.acc.view + product if self.use_acc else product
            if program.session.watcher is not None:
                program.session.watcher.multiplied(self, self.a, self.acc.view)


class Commit:
    """tcgen05.commit: arrive at a barrier, in both CTAs of a pair, when the products before it are done."""

    def __init__(self, role: Issuer, bar: Barrier, after: int, event: CommitEvent) -> None:
        program = role.program
        if bar.shared and program.ctas == 2:
            raise UnsupportedError(
                f"{program.here()}: a commit to {bar.name}, one barrier for the pair (two_ctas=True): commits arrive in each CTA"
            )
        self.bar, self.after, self.event, self.line = bar, after, event, program.line()
        self.known = role.agents[0].release()

    def wakes(self) -> list[Instance]:
        """The barrier in each CTA."""
        return self.bar.instances

    def take_effect(self) -> None:
        """Arrive, and hand on that the products are done."""
        self.known.epochs[MATRIX_ENGINE] = max(self.known.epochs[MATRIX_ENGINE], self.after)
        for instance in self.bar.instances:
            key = instance.arrive(1, self.known, self.line)
            if instance.cta == 0:
                self.event.keys.append(key)


class Wgmma:
    """warpgroup_mma: registers that the tensor core writes; A from shared memory or registers, B from shared memory."""

    def __init__(self, role: Issuer, a: Shared | Tensor, b: Shared, acc: Tensor, use_acc: bool, number: int) -> None:
        program = role.program
        self.program, self.role, self.b, self.use_acc, self.number = program, role, b, use_acc, number
        #: Registers are read in place: their values must be there at issue, but for a product of the same queue.
        self.a = a if isinstance(a, Shared) else a.a
        self.acc = acc.pending or acc.a
        self.line, self.actor = program.line(), f"the wgmma that {role.name} issues"
        self.known: Knowledge = role.agents[0].release()
        self.calls = program.session.calls()
        self.done = False
        #: Whether the role has waited for it; line of the last wait of the role that did not include it.
        self.known_done = False
        self.left_by = self.waited_at = 0
        self.result: Any = None

    def take_effect(self) -> None:
        """Read the operands as they are now, and compute the registers."""
        stream = self.role.wgmma_stream
        self.known.epochs[stream] = max(self.known.epochs[stream], self.number - 1)
        access = Access(code_of(stream, self.number), stream, self.known, self.line, self.actor, True)
        if isinstance(self.a, Shared):
            _read_operand(self.program, self.a, access)
        _read_operand(self.program, self.b, access)
        a = _operand_values(self.a) if isinstance(self.a, Shared) else self.a.astype(np.float32)
        with np.errstate(all="ignore"):
            product = a @ _operand_values(self.b)
            before = self.acc.result if isinstance(self.acc, Wgmma) else self.acc
            self.result = before + product if self.use_acc else product
            if self.program.session.watcher is not None:
                self.program.session.watcher.multiplied(self, self.a, self.result)
        self.done = True
