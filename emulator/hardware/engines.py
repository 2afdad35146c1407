"""Operations that take effect later: copies, matrix products, commits.

Each is issued by a role and carries what that role knew then.  It reads and writes memory when the scheduler lets it take
effect, as late as something needs it or at a random moment before, and checks its accesses against what it knew.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from tilecast.emulator.errors import BoundsError, LayoutError, UnsupportedError
from tilecast.emulator.hardware.barriers import Barrier, Instance
from tilecast.emulator.hardware.clocks import COPY, MATRIX_ENGINE, Agent, Knowledge, code_of
from tilecast.emulator.hardware.context import Context
from tilecast.emulator.hardware.memory import Memories, Shared
from tilecast.emulator.hardware.shadow import Access
from tilecast.emulator.hardware.tensor_memory import Tmem
from tilecast.emulator.trace import Commit as CommitEvent
from tilecast.emulator.trace import CopyIssue, Event
from tilecast.emulator.values import legal
from tilecast.emulator.values.dtypes import Dtype
from tilecast.emulator.values.products import accumulated, matrix_product, wide
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

    copies: list[InFlight]
    #: Whether the CTAs multiply in pairs.
    paired: bool
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

    def fenced_by_compiler(self, cta: int) -> tuple[int, bool]:
        """(stream of its own accesses in a CTA, whether the compiler fences its stores as well as its loads)."""


class InFlight:
    """Something that a copy engine does later."""

    def wakes(self) -> list[Instance]:
        """Barriers that its effect may complete."""
        raise NotImplementedError

    def take_effect(self) -> None:
        """Do it."""
        raise NotImplementedError


class Copy(InFlight):
    """One CTA's part of a tile on its way from global to shared memory.

    ``fetch`` gives the whole tile when it takes effect; ``known``: what the CTA knew that issued it.
    """

    def __init__(
        self, role: Issuer, cta: int, desc: Tiles, corner: Sequence[int], bar: Instance, target: Shared,
        number: int, event: CopyIssue | None, fetch: Callable[[], Any], known: Knowledge, cells: Any,
    ) -> None:  # fmt: skip
        program = role.program
        self.program, self.cta, self.desc, self.corner = program, cta, desc, list(corner)
        self.bar, self.target, self.number, self.event = bar, target, number, event
        #: Where it writes: in its own CTA, or in the other one of the pair.
        self.cells = cells
        self.line, self.actor = program.line(), f"the copy that {role.name} issues"
        self.known, self._fetch, self._fenced = known, fetch, role.fenced_by_compiler(cta)
        self.calls = program.session.calls()

    def wakes(self) -> list[Instance]:
        """The barrier that counts its bytes."""
        return [self.bar]

    def take_effect(self) -> None:
        """Write the tile, zeros where it lies outside the tensor, and count its bytes."""
        access = Access(COPY + self.number, MATRIX_ENGINE, self.known, self.line, self.actor, True, self._fenced)
        if hasattr(self.desc, "loaded"):
            self.desc.loaded(self.corner, self.program, self.known, self.line)
        tile = self._fetch()
        part = part_of(self.program, self.desc.layout, self.cta, tile.shape)
        self.program.smem.write(self.cells, access, self.target.dtype.bits)
        self.target.put(tile[part], part)
        if self.program.session.watcher is not None:
            self.program.session.watcher.copied(self)
        key = self.bar.deliver(tile[part].nbytes, self.number)
        if self.event is not None:
            self.event.key = key


def part_of(program: Context, layout: Any, cta: int, shape: Sequence[int]) -> tuple[slice, ...]:
    """Index of what one CTA has of a tile of ``shape``."""
    if program.ctas == 1:
        return (slice(None),) * len(shape)
    part: tuple[slice, ...] = layout.part(cta, shape)
    return part


def issue_copy(
    role: Issuer, desc: Tiles, coordinates: Sequence[Any], bar: Barrier, target: Shared, *,
    fetch: Callable[[list[int]], Any] | None = None, shape: Sequence[int] | None = None, multicast: bool = False,
) -> None:  # fmt: skip
    """One copy in each CTA; LayoutError where tile and target differ.

    ``fetch`` gives the values from the coordinates on (default: the box there), of ``shape`` (default: of a box).
    ``multicast``: of the CTAs that have the same part the first one copies for all.
    """
    program = role.program
    program.meet(certain=False)
    extents = list(desc.block_shape if shape is None else shape)
    if target.shape != extents or target.dtype is not desc.dtype:
        raise LayoutError(
            f"{program.here()}: a copy of {desc.dtype} {extents} into {target.name}, {target.dtype} {target.shape}"
        )
    cells = cells_of_copies(role, desc.layout, target, multicast)
    complaint = legal.wrong_copy(desc.layout, target.layout)
    if complaint:
        raise LayoutError(f"{program.here()}: a copy into {target.name}: {complaint}")
    corner = [int(c) for c in coordinates]
    if fetch is None:
        if len(corner) != len(desc.block_shape):
            raise BoundsError(
                f"{program.here()}: {len(corner)} coordinates for a tensor of {len(desc.block_shape)} dimensions"
            )
        fetch = desc.tile
    size = target.a.nbytes / program.ctas
    event = CopyIssue(program.line(), size, f"copy {target.name}")
    program.record(event)
    values = functools.partial(fetch, corner)
    known = [agent.release() for agent in role.agents]
    for cta in range(program.ctas):
        number = program.next_copy()
        by = desc.layout.leader(cta) if multicast and program.ctas > 1 else cta
        copy = Copy(
            role,
            cta,
            desc,
            corner,
            bar.of_cta(cta),
            target,
            number,
            event if cta == 0 else None,
            values,
            known[by].copy(),
            cells[cta],
        )
        copy.bar.require(copy.known, by, copy.line)
        program.copies.append(copy)
        program.issued_copies[cta][number] = (copy.line, int(cells[cta][0]))


def cells_of_copies(role: Issuer, layout: Any, target: Shared, multicast: bool = False) -> list[Any]:
    """Of each CTA, the cells that its part of a tile is copied to; LayoutError where they are out of its reach.

    Of a view that lies in some CTAs only, a CTA's part may lie in the other CTA of its pair, whose barriers it reaches as well.
    """
    program = role.program
    own = [target.cells_of(cta) for cta in range(program.ctas)]
    if program.ctas == 1 or all(cells.size for cells in own):
        return own
    found = [target.cells_for(layout, cta) for cta in range(program.ctas)]
    shared = len({layout.leader(cta) for cta in range(program.ctas)}) < program.ctas
    for cta, cells in enumerate(found):
        homes = {int(home) for home in program.cta_of_cell(cells)}
        if any(home >> 1 != cta >> 1 for home in homes) or (multicast and shared):
            raise LayoutError(
                f"{program.here()}: a copy into {target.name}: TMA destination and completion barrier must belong to the same CTA or a CTA "
                f"pair, but the part of CTA {cta} lies in CTA {', '.join(map(str, sorted(homes)))}"
            )
    return found


def operand_values(operand: Shared | Tmem) -> Any:
    """What the tensor core reads, as float32."""
    return wide(operand.values() if isinstance(operand, Tmem) else operand.a)


def issuer(program: Engines, cta: int) -> int:
    """The CTA that issues what the tensor cores of ``cta`` do: of a pair the first."""
    return cta & ~1 if program.paired else cta


class TensorOperation:
    """Something that the tensor cores do in the order of issue; ``known``: what the CTA knew that issued it, by CTA."""

    def __init__(self, role: Issuer, number: int, what: str) -> None:
        self.program, self.number, self.line = role.program, number, role.program.line()
        self.actor = f"the {what} that {role.name} issues"
        known = [agent.release() for agent in role.agents]
        self.known = [known[issuer(role.program, cta)].copy() for cta in range(role.program.ctas)]
        if role.program.session.adds_fences == "3.9" and role.program.paired:
            # This compiler has the pair meet between what a partition stores and the product that reads it.
            for cta, one in enumerate(self.known):
                one.join(known[cta])
                one.join(known[cta ^ 1])
        self._fenced = [role.fenced_by_compiler(issuer(role.program, cta)) for cta in range(role.program.ctas)]
        self.calls = role.program.session.calls()

    def wakes(self) -> list[Instance]:
        """Only commits tell others."""
        return []

    def take_effect(self) -> None:
        """Do it."""
        raise NotImplementedError

    def accesses(self) -> list[Access]:
        """Its access to memory in each CTA, now that it takes effect."""
        code, out = code_of(MATRIX_ENGINE, self.number), []
        for known, fenced in zip(self.known, self._fenced, strict=True):
            known.epochs[MATRIX_ENGINE] = self.number - 1
            out.append(Access(code, MATRIX_ENGINE, known, self.line, self.actor, True, fenced))
        return out

    def read(self, operand: Shared | Tmem, accesses: Sequence[Access]) -> None:
        """Note that it reads an operand."""
        memory = self.program.tmem if isinstance(operand, Tmem) else self.program.smem
        for cta, access in enumerate(accesses):
            memory.read(operand.cells_of(cta), access, operand.dtype.bits)


class Product(TensorOperation):
    """tcgen05.mma: acc = a b (+ acc), both CTAs' memory in a pair."""

    def __init__(self, role: Issuer, a: Shared | Tmem, b: Shared, acc: Tmem, use_acc: bool, number: int) -> None:
        super().__init__(role, number, "matrix product")
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        program = role.program
        #: Stream of the role in each CTA, and what the warp that issues it knows of accesses to tensor memory: Triton 3.9 has
        #: the warps meet before, 3.6 does not.
        self._issuers = [role.agents[issuer(program, cta)].index for cta in range(program.ctas)]
        self.known_to_warp = self.known
        if role.warps > 1 and "3.9" not in (program.session.release, program.session.adds_fences):
            self.known_to_warp = [known.copy() for known in self.known]
            for known in self.known_to_warp:
                for agent in role.agents:
                    known.epochs[agent.index] = min(known.epochs[agent.index], agent.met - 1)

    def operands(self) -> list[Shared | Tmem]:
        """What it reads beside the accumulator."""
        return [self.a, self.b]

    def by_one_warp(self, accesses: Sequence[Access]) -> list[Access]:
        """The same, as the warp does them that issues it."""
        out = []
        for access, known, stream in zip(accesses, self.known_to_warp, self._issuers, strict=True):
            known.epochs[MATRIX_ENGINE] = self.number - 1
            out.append(dataclasses.replace(access, known=known, issuer=stream))
        return out

    def product(self) -> Any:
        """a b, of the operands as they are now."""
        return matrix_product(operand_values(self.a), operand_values(self.b))

    def take_effect(self) -> None:
        """Read the operands as they are now, and write the accumulator."""
        program, accesses = self.program, self.accesses()
        for operand in self.operands():
            self.read(operand, accesses)
        with np.errstate(all="ignore"):
            product = self.product()
            for cta, access in enumerate(accesses):
                if self.use_acc:
                    program.tmem.read(self.acc.cells_of(cta), access, 32)
            for cta, access in enumerate(self.by_one_warp(accesses)):
                program.tmem.write(self.acc.cells_of(cta), access, 32)
            result = self.acc.values() + product if self.use_acc else product
            self.acc.assign(result)
            if program.session.watcher is not None:
                program.session.watcher.multiplied(self, self.a, result)


class CopyToTensorMemory(TensorOperation):
    """tcgen05.cp: shared memory to tensor memory, in order with the products."""

    def __init__(self, role: Issuer, source: Shared, target: Tmem, number: int) -> None:
        super().__init__(role, number, "copy to tensor memory")
        self.source, self.target = source, target

    def take_effect(self) -> None:
        """Copy the values as they are now."""
        accesses, program = self.accesses(), self.program
        # It cannot be predicated: what was never written is copied, and is as undefined there.
        defined = all(program.smem.is_written(self.source.cells_of(cta)) for cta in range(program.ctas))
        if defined:
            self.read(self.source, accesses)
        for cta, access in enumerate(accesses):
            program.tmem.write(self.target.cells_of(cta), access, self.target.dtype.bits)
            if not defined:
                program.tmem.forget(self.target.cells_of(cta))
        self.target.assign(self.source.a.reshape(self.target.shape))


class Commit:
    """tcgen05.commit: arrive at a barrier, in each CTA, when the operations before it are done.

    ``descs``: operands that copies bring to several CTAs at once: each CTA arrives at the barriers of all of those.
    """

    def __init__(
        self, role: Issuer, bar: Barrier, after: int, event: CommitEvent, descs: Sequence[Shared] = ()
    ) -> None:
        program = role.program
        if bar.shared and program.ctas > 1:
            raise UnsupportedError(
                f"{program.here()}: a commit to {bar.name}, one barrier for the pair (two_ctas=True): commits arrive in each CTA"
            )
        self.bar, self.after, self.event, self.line = bar, after, event, program.line()
        known = [agent.release() for agent in role.agents]
        issuers = sorted({issuer(program, cta) for cta in range(program.ctas)})
        #: Who arrives at the barrier of each CTA, and with what knowledge.
        self._arrivals = [
            (instance, by, known[by].copy())
            for instance in bar.instances
            for by in issuers
            if _reaches(program, by, instance.cta, descs)
        ]

    def wakes(self) -> list[Instance]:
        """The barrier in each CTA."""
        return self.bar.instances

    def take_effect(self) -> None:
        """Arrive, and hand on that the products are done."""
        for instance, by, known in self._arrivals:
            known.epochs[MATRIX_ENGINE] = max(known.epochs[MATRIX_ENGINE], self.after)
            key = instance.arrive(1, known, self.line, by)
            if instance.cta == 0:
                self.event.keys.append(key)


def _reaches(program: Engines, by: int, cta: int, descs: Sequence[Shared]) -> bool:
    """Whether the commit of CTA ``by`` arrives at ``cta``: at its own, its pair's, and those that share an operand with it."""
    other = issuer(program, cta) ^ by
    if not other:
        return True
    for desc in descs:
        steps = desc.layout.cga
        if all(not any(step) for bit, step in enumerate(steps) if other >> bit & 1):
            return True
    return False


#: Of a row of A that an instruction of wgmma multiplies: 16 numbers of 16 bits.
INSTRUCTION_BITS = 256


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
        self._fenced = role.fenced_by_compiler(0)
        self.calls = program.session.calls()
        self.done = False
        #: Whether the role has waited for it; line of the last wait of the role that did not include it.
        self.known_done = False
        self.left_by = self.waited_at = 0
        self.result: Any = None

    def _read(self, operand: Shared, access: Access) -> None:
        for cta in range(self.program.ctas):
            self.program.smem.read(operand.cells_of(cta), access, operand.dtype.bits, operand.any_type)

    def take_effect(self) -> None:
        """Read the operands as they are now, and compute the registers."""
        stream = self.role.wgmma_stream
        self.known.epochs[stream] = max(self.known.epochs[stream], self.number - 1)
        access = Access(code_of(stream, self.number), stream, self.known, self.line, self.actor, True, self._fenced)
        if isinstance(self.a, Shared):
            self._read(self.a, access)
        self._read(self.b, access)
        a = operand_values(self.a) if isinstance(self.a, Shared) else self.a.astype(np.float32)
        with np.errstate(all="ignore"):
            before = self.acc.result if isinstance(self.acc, Wgmma) else self.acc
            step = INSTRUCTION_BITS // self.b.dtype.bits
            self.result = accumulated(before if self.use_acc else None, a, operand_values(self.b), step)
            if self.program.session.watcher is not None:
                self.program.session.watcher.multiplied(self, self.a, self.result)
        self.done = True
