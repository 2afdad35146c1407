"""Copies that the issuing role waits for itself, by groups: tiles stored by the copy engine, and cp.async.

As those in `engines`, a transfer carries what its role knew when it was issued and takes effect later: when the role
waits for its group, or at a random moment before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from tilecast.emulator.errors import BoundsError, LayoutError, UnsupportedError
from tilecast.emulator.hardware.clocks import COPY, STORE_ENGINE, Knowledge
from tilecast.emulator.hardware.engines import Engines, Issuer
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

    def put(self, corner: Any, block: Any, program: Any, code: int, known: Knowledge, line: int) -> None:
        """Store a box."""


class Transfer:
    """One copy; ``run`` moves the values when it takes effect, given the access that it makes."""

    def __init__(
        self, role: Issuer, what: str, memory: Shared, through_async_proxy: bool, run: Callable[[Access], None]
    ) -> None:  # fmt: skip
        program = role.program
        if program.ctas != 1:
            raise UnsupportedError(f"{program.here()}: {what} in a pair of CTAs is not emulated")
        self.number, self.line, self.done = program.next_copy(), program.line(), False
        self.known = role.agents[0].release()
        actor = f"the {what} that {role.name} issues"
        self._access = Access(COPY + self.number, STORE_ENGINE, self.known, self.line, actor, through_async_proxy)
        self._run = run
        program.issued_copies[0][self.number] = (self.line, int(memory.cells_of(0)[0]))

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

    def add(self, transfer: Transfer) -> None:
        """To the open group."""
        self._open.append(transfer)

    def commit(self) -> None:
        """Close the open group; it may be empty."""
        self._groups.append(self._open)
        self._open = []

    def in_flight(self) -> list[Transfer]:
        """What has not taken effect yet."""
        return [t for group in (*self._groups, self._open) for t in group if not t.done]

    def wait(self, outstanding: int, known: Knowledge) -> None:
        """Have all but the last ``outstanding`` groups take effect; the waiter knows of them."""
        while len(self._groups) > outstanding:
            for transfer in self._groups.popleft():
                transfer.take_effect()
                known.copies |= 1 << transfer.number


def store_tile(role: Issuer, desc: Boxes, coordinates: Any, source: Shared) -> Transfer:
    """A tile from shared to global memory by the copy engine; LayoutError where tile and source differ."""
    program: Engines = role.program
    box, size = list(desc.block_shape), source.dtype.bits // 8
    # Boxes wider than the swizzle are stored piece by piece, as many as the source has.
    narrower = source.shape[:-1] == box[:-1] and source.shape[-1] < box[-1] and not source.shape[-1] * size % _SWIZZLE
    if (source.shape != box and not narrower) or source.dtype is not desc.dtype:
        raise LayoutError(
            f"{program.here()}: a copy of {source.name}, {source.dtype} {source.shape}, to boxes of {desc.dtype} {box}"
        )
    corner = [int(c) for c in coordinates]
    if len(corner) != len(desc.block_shape):
        raise BoundsError(
            f"{program.here()}: {len(corner)} coordinates for a tensor of {len(desc.block_shape)} dimensions"
        )

    def run(access: Access) -> None:
        program.smem.read(source.cells_of(0), access, source.dtype.bits)
        desc.put(corner, source.a, program, access.code, access.known, access.line)

    return Transfer(role, "tile store", source, True, run)


def gather(role: Issuer, target: Shared, values: Callable[[], Any]) -> Transfer:
    """cp.async: ``values`` of global memory, asked for when it takes effect, to shared memory."""
    program: Engines = role.program

    def run(access: Access) -> None:
        program.smem.write(target.cells_of(0), access, target.dtype.bits)
        target.a[...] = values()

    return Transfer(role, "cp.async", target, False, run)
