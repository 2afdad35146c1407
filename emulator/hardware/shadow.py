"""Shadow memory: cell by cell who wrote and who read last, and an objection to what is unordered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilecast.emulator.errors import RaceError, UninitializedError
from tilecast.emulator.hardware.clocks import STREAM_SHIFT, Knowledge
from tilecast.emulator.hardware.context import Context


@dataclass(frozen=True, slots=True)
class Access:
    """Who touches memory: event code and stream, what it knows, its source line, and through which proxy."""

    code: int
    stream: int
    known: Knowledge
    line: int
    actor: str
    through_async_proxy: bool = False
    #: Stream whose ordinary loads the compiler fences before this access (-1: none), and whether its stores too.
    fenced_by_compiler: tuple[int, bool] = (-1, False)
    #: Of what one warp of a role issues, the stream of the role: its other warps need not have come this far.
    issuer: int = -1

    def needs_fence(self, code: int, of_store: bool) -> bool:
        """Whether it goes through the asynchronous proxy and no fence stands behind the ordinary access ``code``."""
        if not self.through_async_proxy or self.known.has_fenced(code):
            return False
        stream, stores = self.fenced_by_compiler
        return code >> STREAM_SHIFT != stream or (of_store and not stores)


#: Lines of writes to the neighbours of a cell that a message quotes.
_BESIDE = 6


class Shadow:
    """Last writer and last readers of every cell of one memory."""

    def __init__(
        self, program: Context, what: str, has_proxies: bool, used: Callable[[int], None] = lambda cell: None
    ) -> None:
        self._program, self._what, self._has_proxies = program, what, has_proxies
        #: Told the first cell of every access.
        self._used = used
        self._writer = np.zeros(0, np.int64)
        self._writer_line = np.zeros(0, np.int32)
        self._bits = np.zeros(0, np.int16)
        #: Of each stream that has read here: its last read of every cell, and the line.
        self._readers: dict[int, tuple[Any, Any]] = {}
        self._places: list[tuple[int, int, int, str]] = []

    @property
    def cells(self) -> int:
        """How many there are."""
        return len(self._writer)

    def grow(self, cells: int) -> int:
        """Add cells; returns the number of the first."""
        start = len(self._writer)
        self._writer = np.append(self._writer, np.zeros(cells, np.int64))
        self._writer_line = np.append(self._writer_line, np.zeros(cells, np.int32))
        self._bits = np.append(self._bits, np.zeros(cells, np.int16))
        self._readers = {
            stream: (np.append(codes, np.zeros(cells, np.int64)), np.append(lines, np.zeros(cells, np.int32)))
            for stream, (codes, lines) in self._readers.items()
        }
        return start

    def call(self, start: int, end: int, slot: int, name: str) -> None:
        """Name the cells of one allocation, ``slot`` of them to an index."""
        self._places.append((start, end, slot, name))

    def place(self, cell: int) -> str:
        """Name of a cell for people."""
        for start, end, slot, name in self._places:
            if start <= cell < end:
                number = f"[{(cell - start) // slot}]" if end - start > slot else ""
                return f"{self._what} {name}{number}"
        return f"{self._what} cell {cell}"

    def written_at(self, cells: Any) -> tuple[int, ...]:
        """Lines of the last writes to cells."""
        return tuple(int(line) for line in np.unique(self._writer_line[cells]))

    def _beside(self, cell: int) -> str:
        """For a message about a cell: where the other cells of its slot were written last."""
        for start, end, slot, _ in self._places:
            if start <= cell < end:
                first = start + (cell - start) // slot * slot
                lines = set(self.written_at(np.arange(first, min(first + slot, end)))) - {
                    0,
                    int(self._writer_line[cell]),
                }
                quoted = "; ".join(self._quote(line) for line in sorted(lines)[:_BESIDE])
                return f"; other parts of it were written at {quoted}" if quoted else ""
        return ""

    def is_written(self, cells: Any) -> bool:
        """Whether all of the cells have been written."""
        return bool((self._writer[cells] != 0).all())

    def forget(self, cells: Any) -> None:
        """What the cells hold is not defined any more."""
        self._writer[cells] = 0

    def read(self, cells: Any, who: Access, bits: int, any_type: bool = False) -> None:
        """``who`` reads; RaceError or UninitializedError when it should not, and (but for ``any_type``) elements of another size."""
        self._used(int(cells[0]))
        writers = self._writer[cells]
        for code in _distinct(writers):
            if code == 0:
                cell = int(cells[writers == 0][0])
                raise UninitializedError(
                    f"{self._quote(who.line)}: {who.actor} reads {self.place(cell)}, which was never written"
                    f"{self._program.coming(self, cell)}"
                )
            self._known(code, cells, writers, who, "reads", "write")
        if not any_type and np.count_nonzero(self._bits[cells] != bits):
            cell = int(cells[self._bits[cells] != bits][0])
            raise UninitializedError(
                f"{self._quote(who.line)}: {who.actor} reads {self.place(cell)} as {bits}-bit elements, but the last write, "
                f"at {self._quote(int(self._writer_line[cell]))}, left {int(self._bits[cell])}-bit ones{self._beside(cell)}"
            )
        if who.stream not in self._readers:
            self._readers[who.stream] = np.zeros(self.cells, np.int64), np.zeros(self.cells, np.int32)
        codes, lines = self._readers[who.stream]
        codes[cells] = who.code
        lines[cells] = who.line

    def write(self, cells: Any, who: Access, bits: int, changes: bool = True) -> None:
        """``who`` writes (``changes``: something else than what is there); RaceError when an access is not ordered before."""
        self._used(int(cells[0]))
        if changes:
            writers = self._writer[cells]
            for code in _distinct(writers):
                if code:
                    self._known(code, cells, writers, who, "writes", "write")
        # In the order of the streams, so that the same race is named whichever role came to read first.
        for stream in sorted(self._readers):
            codes, lines = self._readers[stream]
            readers = codes[cells]
            if not np.count_nonzero(readers):
                continue
            for code in _distinct(readers):
                if code not in (0, who.code) and not who.known.has(code):
                    cell = int(cells[readers == code][0])
                    self._race(cell, who, "writes", "read", code, int(lines[cell]))
                if code and self._has_proxies and who.needs_fence(code, False):
                    cell = int(cells[readers == code][0])
                    raise RaceError(
                        f"race on {self.place(cell)}: {who.actor} ({self._quote(who.line)}) goes through the asynchronous proxy "
                        f"and may overwrite what the ordinary load at {self._quote(int(lines[cell]))} reads: "
                        "fence_async_shared() is missing between them"
                    )
            codes[cells] = 0
        self._writer[cells] = who.code
        self._writer_line[cells] = who.line
        self._bits[cells] = bits

    def _known(self, code: int, cells: Any, writers: Any, who: Access, verb: str, other: str) -> None:
        if not who.known.has(code):
            cell = int(cells[writers == code][0])
            self._race(cell, who, verb, other, code, int(self._writer_line[cell]))
        if self._has_proxies and who.needs_fence(code, True):
            cell = int(cells[writers == code][0])
            raise RaceError(
                f"race on {self.place(cell)}: {who.actor} ({self._quote(who.line)}) goes through the asynchronous proxy and may not "
                f"see the ordinary store at {self._quote(int(self._writer_line[cell]))}: fence_async_shared() is missing between them"
            )

    def _race(self, cell: int, who: Access, verb: str, other: str, code: int, line: int) -> None:
        raise RaceError(
            f"race on {self.place(cell)}: {who.actor} {verb} at {self._quote(who.line)}; the {other} by "
            f"{self._program.actor(code)} at {self._quote(line)} is not ordered before it by any barrier"
            f"{self._program.too_weak(code)}{_one_warp(code, who)}"
        )

    def _quote(self, line: int) -> str:
        return self._program.session.source.quote(line)


def _one_warp(code: int, who: Access) -> str:
    """For a message about an access of the role that issues: its warps are not in step."""
    if code >> STREAM_SHIFT != who.issuer:
        return ""
    return "; one warp issues it, when the others may not have come this far (Triton 3.6 does not make them meet): gl.barrier()"


def _distinct(codes: Any) -> list[int]:
    first = codes[0]
    return (
        [int(first)]
        if len(codes) == 1 or np.count_nonzero(codes == first) == len(codes)
        else [int(c) for c in np.unique(codes)]
    )
