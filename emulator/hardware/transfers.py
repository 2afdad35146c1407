"""Copies that the issuing role waits for itself, by groups: tiles stored by the copy engine, and cp.async.

As those in `engines`, a transfer carries what its role knew when it was issued and takes effect later: when the role
waits for its group, or at a random moment before.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tilecast.emulator.errors import BoundsError, LayoutError
from tilecast.emulator.hardware.barriers import Instance
from tilecast.emulator.hardware.clocks import COPY, STORE_ENGINE, Agent, Knowledge
from tilecast.emulator.hardware.engines import Engines, InFlight, Issuer, part_of
from tilecast.emulator.hardware.memory import Shared
from tilecast.emulator.hardware.shadow import Access
from tilecast.emulator.values.dtypes import Dtype

#: Bytes of a row that one instruction of the copy engine moves.
_SWIZZLE = 128


class Boxes(Protocol):
    """A tensor descriptor that can be stored to."""

    @property
    def dtype(self) -> Dtype:
        """Element type."""

    block_shape: list[int]
    layout: Any

    def reduce(
        self, corner: Any, block: Any, compute: Any, program: Any, code: int, known: Knowledge, line: int
    ) -> None:
        """Combine a box with what is there."""

    def put(self, corner: Any, block: Any, program: Any, code: int, known: Knowledge, line: int) -> None:
        """Store a box."""


class Transfer:
    """One CTA's copy; ``run`` moves the values when it takes effect, given the access that it makes."""

    def __init__(
        self, role: Issuer, what: str, memory: Shared, through_async_proxy: bool, run: Callable[[Access], None], cta: int = 0
    ) -> None:  # fmt: skip
        program = role.program
        self.number, self.line, self.done, self.cta = program.next_copy(), program.line(), False, cta
        #: cp.async stores as other instructions do, and needs the fence before an engine reads; with Triton's own, nothing is asked.
        self.ordinary = what == "cp.async" and not program.session.adds_fences
        self.known = role.agents[cta].release()
        actor = f"the {what} that {role.name} issues"
        self._access = Access(
            COPY + self.number,
            STORE_ENGINE,
            self.known,
            self.line,
            actor,
            through_async_proxy,
            role.fenced_by_compiler(cta),
        )
        self._run = run
        # What a program still stores as it ends, Triton's own code leaves to the hardware.
        if not (through_async_proxy and program.session.adds_fences):
            program.issued_copies[cta][self.number] = (self.line, int(memory.cells_of(cta)[0]))

    def take_effect(self) -> None:
        """Move the values, once."""
        if not self.done:
            self.done = True
            self._run(self._access)


class Groups:
    """Transfers of one kind that one role has issued, group by group, oldest first."""

    def __init__(self) -> None:
        self._groups: deque[list[Transfer]] = deque()
        self._open: list[Transfer] = []

    def add(self, transfers: Sequence[Transfer]) -> None:
        """To the open group."""
        self._open += transfers

    def commit(self) -> None:
        """Close the open group; it may be empty."""
        self._groups.append(self._open)
        self._open = []

    def issued(self) -> list[Transfer]:
        """What has not been waited for."""
        return [t for group in (*self._groups, self._open) for t in group]

    def in_flight(self) -> list[Transfer]:
        """What has not taken effect yet."""
        return [t for group in (*self._groups, self._open) for t in group if not t.done]

    def wait(self, outstanding: int, agents: Sequence[Agent]) -> None:
        """Have all but the last ``outstanding`` groups take effect; the waiters, each in its CTA, know of them."""
        while len(self._groups) > outstanding:
            for transfer in self._groups.popleft():
                transfer.take_effect()
                agents[transfer.cta].knowledge.landed(transfer.number, transfer.ordinary)


def store_tile(role: Issuer, desc: Boxes, coordinates: Any, source: Shared, reduce: Any = None) -> list[Transfer]:
    """A tile from shared to global memory by the copy engine, a transfer in each CTA; LayoutError where tile and source differ.

    ``reduce``: a numpy ufunc that combines it with what is there; None: stored.
    """
    program: Engines = role.program
    box, size = list(desc.block_shape), source.dtype.bits // 8
    # Boxes wider than the swizzle are stored piece by piece, as many as the source has.
    narrower = source.shape[:-1] == box[:-1] and source.shape[-1] < box[-1] and not source.shape[-1] * size % _SWIZZLE
    if (source.shape != box and not narrower) or source.dtype is not desc.dtype:
        raise LayoutError(
            f"{program.here()}: a copy of {source.name}, {source.dtype} {source.shape}, to boxes of {desc.dtype} {box}"
        )
    if program.ctas > 1 and not all(source.cells_of(cta).size for cta in range(program.ctas)):
        raise LayoutError(
            f"{program.here()}: a copy of {source.name}: the source subview may have an origin in another CTA than the one that stores it"
        )
    corner = [int(c) for c in coordinates]
    if len(corner) != len(desc.block_shape):
        raise BoundsError(
            f"{program.here()}: {len(corner)} coordinates for a tensor of {len(desc.block_shape)} dimensions"
        )

    def run(cta: int, access: Access) -> None:
        part = part_of(program, desc.layout, cta, source.shape)
        starts = [c + (s.start or 0) for c, s in zip(corner, part, strict=True)]
        program.smem.read(source.cells_of(cta), access, source.dtype.bits)
        if reduce is not None:
            desc.reduce(starts, source.a[part], reduce, program, access.code, access.known, access.line)
        else:
            desc.put(starts, source.a[part], program, access.code, access.known, access.line)

    # CTAs that have the same part store it once.
    ctas = [cta for cta in range(program.ctas) if program.ctas == 1 or desc.layout.leader(cta) == cta]
    return [Transfer(role, "tile store", source, True, functools.partial(run, cta), cta) for cta in ctas]


def scatter_rows(role: Issuer, desc: Boxes, rows: Any, column: int, source: Shared) -> list[Transfer]:
    """Rows of shared memory to rows of global memory by number, by the copy engine; LayoutError where they do not match."""
    program: Engines = role.program
    if source.shape != [len(rows), desc.block_shape[-1]] or source.dtype is not desc.dtype or desc.block_shape[0] != 1:
        raise LayoutError(
            f"{program.here()}: a scatter of {source.name}, {source.dtype} {source.shape}, to {len(rows)} rows of boxes of "
            f"{desc.dtype} {list(desc.block_shape)}"
        )

    def run(cta: int, access: Access) -> None:
        part = part_of(program, desc.layout, cta, source.shape)
        program.smem.read(source.cells_of(cta), access, source.dtype.bits)
        for number, row in zip(rows[part[0]], source.a[part], strict=True):
            start = [int(number), column + (part[1].start or 0)]
            desc.put(start, row[None], program, access.code, access.known, access.line)

    ctas = [cta for cta in range(program.ctas) if program.ctas == 1 or desc.layout.leader(cta) == cta]
    return [Transfer(role, "scatter", source, True, functools.partial(run, cta), cta) for cta in ctas]


def gather(role: Issuer, target: Shared, values: Callable[[], Any]) -> list[Transfer]:
    """cp.async: ``values`` of global memory, asked for when it takes effect, to shared memory, each CTA its part."""
    program: Engines = role.program

    def run(cta: int, access: Access) -> None:
        part = part_of(program, target.layout, cta, target.shape)
        program.smem.write(target.cells_of(cta), access, target.dtype.bits)
        target.put(values()[part], part)

    return [Transfer(role, "cp.async", target, False, functools.partial(run, cta), cta) for cta in range(program.ctas)]


class RegistersToCluster(InFlight):
    """st.async: registers to shared memory of the cluster, counted in bytes at the barrier of the CTA that they come to."""

    def __init__(self, role: Issuer, cta: int, bar: Instance, target: Shared, values: Any) -> None:
        program = role.program
        self._program, self._cta, self._bar, self._target, self._values = program, cta, bar, target, values
        self._line, self._actor = program.line(), f"the asynchronous store that {role.name} issues"
        self._number = program.next_copy()
        # Which CTA holds the registers is not followed: any of them may.
        self._known = Knowledge()
        for agent in role.agents:
            self._known.join(agent.release())
        bar.require(role.agents[cta].knowledge, cta, self._line)
        program.issued_copies[cta][self._number] = (self._line, int(target.cells_of(cta)[0]))

    def wakes(self) -> list[Instance]:
        """The barrier."""
        return [self._bar]

    def take_effect(self) -> None:
        """Write the values, and count their bytes."""
        program, target = self._program, self._target
        access = Access(COPY + self._number, STORE_ENGINE, self._known, self._line, self._actor)
        part = part_of(program, target.layout, self._cta, target.shape)
        program.smem.write(target.cells_of(self._cta), access, target.dtype.bits)
        target.put(self._values[part], part)
        self._bar.deliver(self._values[part].nbytes, self._number)


class ArriveAfterCopies(InFlight):
    """cp.async.mbarrier.arrive: arrive when the cp.async that a role has issued so far have landed."""

    def __init__(self, role: Issuer, cta: int, bar: Instance, earlier: Sequence[Transfer], count: int) -> None:
        self._bar, self._earlier, self._count, self._cta = bar, [t for t in earlier if t.cta == cta], count, cta
        self._line = role.program.line()
        self._known = role.agents[cta].release()
        bar.require(self._known, cta, self._line)
        # Without .noinc the phase waits for one arrival more, which this one will be.
        bar.pending += 0 if count else 1

    def wakes(self) -> list[Instance]:
        """The barrier."""
        return [self._bar]

    def take_effect(self) -> None:
        """Have the copies land, and arrive with the knowledge of them."""
        for transfer in self._earlier:
            transfer.take_effect()
            self._known.landed(transfer.number, transfer.ordinary)
        self._bar.arrive(self._count or 1, self._known, self._line, self._cta)
