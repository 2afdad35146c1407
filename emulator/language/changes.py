"""Stores and reductions of global memory: who made the last of each element, and whether those that come later know of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from tilecast.emulator.errors import RaceError
from tilecast.emulator.hardware.clocks import Knowledge, number_before
from tilecast.emulator.session import Session

#: Flags of other programs that a message quotes.
_FLAGS = 2


class Storing(Protocol):
    """A running program, as far as global memory needs it."""

    session: Session
    number: int
    flags_read: dict[tuple[int, ...], None]


class Last(Protocol):
    """Program (from 1), event code and line of the last change of each element."""

    program: Any
    code: Any
    line: Any


class Adds:
    """Those of reductions."""

    def __init__(self, program: Any, code: Any, line: Any) -> None:
        self.program, self.code, self.line = program, code, line

    def beginning_at(self, first: int) -> Adds:
        """The same from an element on."""
        return Adds(self.program[first:], self.code[first:], self.line[first:])


class Before:
    """What the launch before left, where this one may overlap it: programs by `number_before` and one, and event codes of stores.

    Of reductions nothing tells: their program is none.
    """

    def __init__(self, program: Any, adds: Adds | None, code: Any) -> None:
        self.program = np.where(program != 0, number_before(program - 1) + 1, 0)
        if adds is not None:
            self.program[adds.program != 0] = np.iinfo(np.int32).min + 1
        self.code = code.copy()

    def beginning_at(self, first: int) -> Before:
        """The same from an element on."""
        part = Before.__new__(Before)
        part.program, part.code = self.program[first:], self.code[first:]
        return part


class Memory(Last, Protocol):
    """A tensor: its memory, and who stored last."""

    flat: Any
    name: str
    adds: Adds | None
    changed: bool

    def by_launch_before(
        self, session: Session, places: Any, known: Knowledge, line: int, what: str, engine: bool = False
    ) -> None:
        """RaceError where the launch before, which may still run, has stored to a place, and neither a wait nor an atomic tells of it."""


def ordered(
    program: Storing, memory: Memory, places: Any, known: Any, line: int, what: str, differs: Any, among_adds: bool = True,
    engine: bool = False,
) -> None:  # fmt: skip
    """RaceError when an earlier store by another role or program is not known, or a reduction (unless not ``among_adds``).

    ``engine``: the copy engine asks, which an ordinary acquire tells nothing without a fence behind it.
    """
    memory.by_launch_before(program.session, places, known, line, what, engine)
    for last in (memory, memory.adds if among_adds else None):
        if last is not None:
            _known(program, memory, last, places, known, line, what, differs)
            if engine and known.ordinary:
                _fenced(program, memory, last, places[differs], known, line, what)


def _known(
    program: Storing, memory: Memory, last: Last, places: Any, known: Any, line: int, what: str, differs: Any
) -> None:
    """RaceError where one of these changes (the memory's stores, or reductions) is not known."""
    at = places[(last.program[places] > 0) & differs]
    if not at.size:
        return
    same = last.program[at] == program.number + 1
    unknown = [code for code in np.unique(last.code[at[same]]) if not known.has(int(code))]
    culprits = at[np.where(same, np.isin(last.code[at], unknown), ~told(last, at, known))]
    if not culprits.size:
        return
    first = culprits[0]
    by_itself = last.program[first] == program.number + 1
    who = "this program" if by_itself else f"program {int(last.program[first]) - 1}"
    quote, did = program.session.source.quote, "added" if isinstance(last, Adds) else "stored"
    order = ", so that sums have other bits each time" if what == "a reduction" and did == "added" else ""
    raise RaceError(
        f"race on element {int(first)} of {memory.name}: {what} at {quote(line)}; "
        f"{who} has {did} to it at {quote(int(last.line[first]))}, and nothing orders the two{order}"
        f"{'' if by_itself else _waited_for(program) + _apart(program, int(last.program[first]) - 1)}"
    )


def _apart(program: Storing, other: int) -> str:
    """For a message about what another program has done: that its atomic tells of one warp only."""
    if other not in program.session.apart:
        return ""
    atomic, store = map(program.session.source.quote, program.session.apart[other])
    return (
        f"; one thread issues the atomic at {atomic}, when other warps may not have come past {store} (Triton 3.6 does not make them meet): "
        "gl.barrier()"
    )


def _fenced(program: Storing, memory: Memory, last: Last, places: Any, known: Any, line: int, what: str) -> None:
    """RaceError where another program made one of these changes, and there is no fence between the acquire that tells of it and this."""
    at = unfenced(last, places, known)
    if at.size:
        quote = program.session.source.quote
        raise RaceError(
            f"race on element {int(at[0])} of {memory.name}: {what} at {quote(line)} goes through the asynchronous proxy; program "
            f"{int(last.program[at[0]]) - 1} has changed it at {quote(int(last.line[at[0]]))}, and fence.proxy.async is missing behind the "
            f"acquire that tells of it{_waited_for(program, ', without a fence behind')}"
        )


def _waited_for(program: Storing, which: str = " do not tell of it") -> str:
    """For a message about what another program has done: the flags that this one has read."""
    flags = list(program.flags_read)[-_FLAGS:]
    said = "; ".join(program.session.source.quote(places[-1]) for places in reversed(flags))
    return f"; flags that this program has read{which}: {said}" if said else ""


def unfenced(last: Last | Before, places: Any, known: Knowledge) -> Any:
    """Those of the places that other programs changed, with no fence for the copy engine behind the acquire that tells of it."""
    return places[np.isin(last.program[places] - 1, list(known.ordinary))]


def told(last: Last | Before, at: Any, known: Knowledge) -> Any:
    """Whether the last change of each element is by a program whose atomic told of it."""
    if not known.others:
        return np.zeros(at.shape, bool)
    events = np.stack([last.program[at] - 1, last.code[at]])
    found, places = np.unique(events, axis=1, return_inverse=True)
    told = np.array([known.has_of(int(number), int(code)) for number, code in found.T])
    return told[places.reshape(-1)]


def put(
    program: Storing, memory: Memory, places: Any, new: Any, code: int, known: Knowledge, line: int, engine: bool = False
) -> None:  # fmt: skip
    """Store ``new`` at ``places`` (``engine``: by the copy engine); the same value stored twice is no race."""
    differs = memory.flat[places].view(bits_of(new)) != np.ascontiguousarray(new).view(bits_of(new))
    ordered(program, memory, places, known, line, "a store", differs, engine=engine)
    memory.flat[places] = new
    memory.program[places], memory.code[places], memory.line[places] = program.number + 1, code, line
    memory.changed = True


def reduce(
    program: Storing, memory: Memory, places: Any, new: Any, compute: Callable[[Any, Any], Any], code: int, known: Knowledge,
    line: int,
) -> None:  # fmt: skip
    """Combine ``new`` with what is at ``places``.

    Among themselves reductions need no order, but for one of floating-point sums that are to have the same bits in every run;
    RaceError where an earlier store is not known.
    """
    among_adds = program.session.sums_in_order and memory.flat.dtype.kind not in "iub"
    ordered(program, memory, places, known, line, "a reduction", np.ones(places.shape, bool), among_adds, engine=True)
    if memory.adds is None:
        memory.adds = Adds(*(np.zeros_like(one) for one in (memory.program, memory.code, memory.line)))
    memory.flat[places] = compute(memory.flat[places], new).astype(memory.flat.dtype)
    memory.adds.program[places], memory.adds.code[places] = program.number + 1, code
    memory.adds.line[places] = memory.line[places] = line
    memory.changed = True


def bits_of(values: Any) -> Any:
    """Unsigned integers of the size of the elements."""
    return {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[values.dtype.itemsize]
