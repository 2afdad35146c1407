"""Happens-before: what an agent knows to have happened.

A *stream* is something that acts in order: a role in one CTA (an agent), the matrix engine, the wgmma queue of a role.  It
counts epochs; an event is (stream, epoch), written as one number.  Copies are in no order, so each has a number of its
own.  An event happens before another when the other's `Knowledge` contains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Codes of events in shadow memory: epochs of stream a start at a << STREAM_SHIFT, copies at COPY.
STREAM_SHIFT = 24
COPY = 1 << 40
#: Roles of one program, at most.
MAX_ROLES = 8
#: Streams: role r in CTA c is 2 r + c (n r + c in a cluster of n CTAs; of more than four, there is room for fewer roles); wgmma of role r;
#: the matrix engine; copies that read shared memory, whose events have numbers of their own.
FIRST_WGMMA = 4 * MAX_ROLES
MATRIX_ENGINE = FIRST_WGMMA + MAX_ROLES
STORE_ENGINE = MATRIX_ENGINE + 1
STREAMS = STORE_ENGINE + 1


#: Number of the launch before as a program of this one, where launches overlap.
LAUNCH_BEFORE = -1


def number_before(number: Any) -> Any:
    """Number of a program of the launch before as one of this one, where launches overlap; of several in an array."""
    return LAUNCH_BEFORE - 1 - number


def code_of(stream: int, epoch: int) -> int:
    """The event as a number."""
    return stream << STREAM_SHIFT | epoch


class Knowledge:
    """Epochs of streams, the ones fenced for the asynchronous proxy, completed copies (a bit each), and what atomics told of other programs."""

    __slots__ = ("copies", "epochs", "fenced", "ordinary", "others", "seen", "unfenced")

    def __init__(self) -> None:
        self.epochs = [0] * STREAMS
        self.fenced = [0] * STREAMS
        self.copies = 0
        #: Of the copies, those that are ordinary stores (cp.async) with no fence behind them.
        self.unfenced = 0
        #: Number of another program of the launch -> what of it happened before; never changed in place.
        self.others: dict[int, Knowledge] = {}
        #: Those of them that ordinary instructions learnt of, with no fence for the copy engine behind.
        self.ordinary: frozenset[int] = frozenset()
        #: Address of an element that atomics access -> number of its latest value that was read or written before; never changed in place.
        self.seen: dict[int, int] = {}

    def copy(self) -> Knowledge:
        """A snapshot."""
        new = Knowledge.__new__(Knowledge)
        new.epochs, new.fenced, new.copies = self.epochs.copy(), self.fenced.copy(), self.copies
        new.others, new.unfenced, new.seen, new.ordinary = self.others, self.unfenced, self.seen, self.ordinary
        return new

    def join(self, other: Knowledge) -> None:
        """Learn everything that ``other`` knows."""
        self.epochs = [a if a > b else b for a, b in zip(self.epochs, other.epochs, strict=True)]
        self.fenced = [a if a > b else b for a, b in zip(self.fenced, other.fenced, strict=True)]
        if self.unfenced or other.unfenced:
            # Who knows of a copy and of no fence behind it learns of one from who does.
            mine, theirs = (
                self.unfenced & ~(other.copies & ~other.unfenced),
                other.unfenced & ~(self.copies & ~self.unfenced),
            )
            self.unfenced = mine | theirs
        self.copies |= other.copies
        if other.others and other.others is not self.others:
            # What was known before stays as it was.
            self.ordinary |= {n for n in other.ordinary if not self._knows_all_of(n, other)}
            self.learn(other.others)
        if other.seen and other.seen is not self.seen:
            self.see(other.seen)

    def _knows_all_of(self, number: int, other: Knowledge) -> bool:
        """Whether what ``other`` knows of another program is known."""
        mine, theirs = self.others.get(number), other.others.get(number)
        return theirs is None or (mine is not None and mine.has_all(theirs))

    def see(self, numbers: Mapping[int, int]) -> None:
        """Learn of values of elements, by address, that were read or written."""
        new = {address: n for address, n in numbers.items() if n > self.seen.get(address, -1)}
        if new:
            self.seen = {**self.seen, **new}

    def learn(self, others: dict[int, Knowledge]) -> None:
        """Learn what is known of other programs."""
        known = self.others.copy()
        for number, told in others.items():
            mine = known.get(number)
            known[number] = told.copy()
            if mine is not None:
                known[number].join(mine)
        self.others = known

    def has_of(self, number: int, code: int) -> bool:
        """Whether an event of another program, by its number, happened before."""
        told = self.others.get(number)
        return told is not None and told.has(code)

    def landed(self, copy: int, ordinary: bool) -> None:
        """A copy is done; ``ordinary``: it stored as other instructions do."""
        self.copies |= 1 << copy
        self.unfenced |= ordinary << copy

    def has(self, code: int) -> bool:
        """Whether the event happened before."""
        if code >= COPY:
            return bool(self.copies >> (code - COPY) & 1)
        return self.epochs[code >> STREAM_SHIFT] >= code & ((1 << STREAM_SHIFT) - 1)

    def has_all(self, other: Knowledge) -> bool:
        """Whether everything that ``other`` knows happened before."""
        return not other.copies & ~self.copies and all(a >= b for a, b in zip(self.epochs, other.epochs, strict=True))

    def has_fenced(self, code: int) -> bool:
        """Whether a fence for the asynchronous proxy stands behind the event (ordinary accesses of agents and cp.async need one)."""
        stream = code >> STREAM_SHIFT
        if code >= COPY:
            return not self.unfenced >> (code - COPY) & 1
        return stream >= FIRST_WGMMA or self.fenced[stream] >= code & ((1 << STREAM_SHIFT) - 1)


class Agent:
    """One role in one CTA."""

    __slots__ = ("cta", "epoch", "index", "knowledge", "met")

    def __init__(self, role: int, cta: int, ctas: int = 2) -> None:
        self.index, self.cta, self.epoch = max(ctas, 2) * role + cta, cta, 1
        self.knowledge = Knowledge()
        self.knowledge.epochs[self.index] = 1
        #: Epoch since which the warps of the role have not met.
        self.met = 1

    @property
    def code(self) -> int:
        """Of what the agent does now."""
        return code_of(self.index, self.epoch)

    def release(self) -> Knowledge:
        """What is known up to here, to hand on; what comes later is not part of it."""
        known = self.knowledge.copy()
        self.epoch += 1
        self.knowledge.epochs[self.index] = self.epoch
        return known

    def meet(self) -> None:
        """The warps of the role wait for one another: each knows what the others have done."""
        self.epoch += 1
        self.knowledge.epochs[self.index] = self.met = self.epoch

    def fence(self) -> None:
        """Everything known becomes visible to the asynchronous proxy."""
        self.release()
        before = self.knowledge.epochs.copy()
        before[self.index] -= 1
        self.knowledge.unfenced = 0
        self.knowledge.fenced = [max(a, b) for a, b in zip(self.knowledge.fenced, before, strict=True)]
