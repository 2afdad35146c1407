"""Atomics of global memory: what they leave at an element, in order, and what each of those values tells its reader.

Programs run one after another, on a GPU they do not.  So a load returns the oldest value that its program does not know to be
over, and learns what that one tells; asked again, the next one.  A loop that would have gone on before the release that it needs
learns nothing of it.  At random moments a load may return any of these values.  Read-modify-writes change the latest one: that
other programs may come first is played by `residents`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tilecast.emulator.hardware.clocks import Knowledge, number_before
from tilecast.emulator.hardware.program import Program
from tilecast.emulator.hardware.role import Role
from tilecast.emulator.language import hostside
from tilecast.emulator.language.arrays import Array
from tilecast.emulator.session import Session
from tilecast.emulator.values.scalars import Float, Int
from tilecast.emulator.values.tensors import Pointer, Tensor, raw

#: How often, at random moments, a load returns the oldest value that it may.
_OLDEST = 0.5
#: Elements of one instruction beyond which only the latest value of each is kept: no program waits for so many.
_KEPT = 64
_ACQUIRES, _RELEASES = ("acquire", "acq_rel"), ("release", "acq_rel")


class Flag:
    """One element: the values that it has had in this launch, and what each tells (None: nothing)."""

    def __init__(self, memory: Array, place: int, before: Knowledge | None = None) -> None:
        self.memory, self.place, self.address = memory, place, _address(memory, place)
        self.values, self.told = [memory.flat[place]], [before]
        #: How many older values are not kept; number of the last one that an ordinary store left.
        self.dropped = self.plain = 0

    @property
    def latest(self) -> int:
        """Number of the latest value; an ordinary store since makes one more, which tells nothing."""
        now = self.memory.flat[self.place]
        if self.values[-1].tobytes() != now.tobytes():
            self.values.append(now)
            self.told.append(None)
            self.plain = self.dropped + len(self.values) - 1
        return self.dropped + len(self.values) - 1

    def told_after(self) -> Knowledge | None:
        """What the last value tells in a launch that overlaps this one."""
        number, told = self.latest, self.told[-1]
        if told is None or number != self.dropped + len(self.told) - 1:
            return None
        known = Knowledge()
        known.others = {number_before(program): of for program, of in told.others.items() if program >= 0}
        return known

    def value(self, number: int) -> Any:
        """The value of that number."""
        return self.values[number - self.dropped]

    def oldest(self, program: Program, role: Role) -> int:
        """Number of the oldest value that a role may read."""
        known: list[int] = [self.dropped, *(agent.knowledge.seen.get(self.address, 0) for agent in role.agents)]
        storer, code = int(self.memory.program[self.place]) - 1, int(self.memory.code[self.place])
        if self.latest and self.plain > max(known) and storer >= 0:
            told = (agent.knowledge for agent in role.agents)
            if any(k.has(code) if storer == program.number else k.has_of(storer, code) for k in told):
                return self.plain
        return max(known)

    def may_read(self, program: Program) -> int:
        """Number of the value that a load of the running role returns."""
        role, last = program.role(), self.latest
        first: int = self.oldest(program, role)
        if not program.late and program.random.random() >= _OLDEST:
            return int(program.random.randint(first, last))
        return first + 1 if role.polled.get(self.address) == first < last else first

    def read(self, program: Program, number: int, sem: str) -> None:
        """The running role reads this value."""
        role, told = program.role(), self.told[number - self.dropped]
        role.polled[self.address] = number
        if sem in _ACQUIRES:
            program.flags_read[tuple(program.session.source.calls()[:2])] = None
        for agent in role.agents:
            agent.knowledge.see({self.address: number})
            if told is not None and sem in _ACQUIRES:
                agent.knowledge.join(told)
                if program.number in told.others:  # another role of this program told
                    agent.knowledge.join(told.others[program.number])
                agent.knowledge.ordinary |= told.others.keys()

    def write(self, program: Program, value: Any, told: Knowledge | None, keeps: bool) -> None:
        """The running role leaves a value that tells so much."""
        number = self.latest + 1
        for agent in program.role().agents:
            agent.knowledge.see({self.address: number})
        if not keeps:
            self.dropped = number
            self.values.clear()
            self.told.clear()
        self.memory.flat[self.place] = value
        self.memory.line[self.place] = program.line()
        self.values.append(self.memory.flat[self.place])
        self.told.append(told)


def _address(memory: Array, place: int) -> int:
    first: int = memory.flat.__array_interface__["data"][0]
    size: int = memory.flat.itemsize
    return first + place * size


def _flag(program: Program, memory: Array, place: int) -> Flag:
    """What is known of an element."""
    session, address = program.session, _address(memory, place)
    if address not in session.flags:
        memory.enter(session.launches, session.overlaps)
        session.flags[address] = Flag(memory, place, session.told_before.get(address))
    found: Flag = session.flags[address]
    return found


def read(program: Program, memory: Array, place: int, sem: str) -> Any:
    """An atomic load of one element."""
    flag = _flag(program, memory, place)
    number = flag.may_read(program)
    flag.read(program, number, sem)
    return flag.value(number)


def write(
    program: Program, memory: Array, places: Sequence[int], sem: str, new: Callable[[int, Any], Any], modifies: bool
) -> list[Any]:
    """Leave ``new(i, value before)`` at each place, one after the other; the values before.

    What ``modifies`` the value before reads the latest one, and hands on what that one told.
    """  # fmt: skip
    keeps, released, before = len(places) <= _KEPT, None, []
    flags = [_flag(program, memory, place) for place in places]
    for flag in flags if modifies else ():
        flag.read(program, flag.latest, sem)
    if sem in _RELEASES:
        released, apart = Knowledge(), _warps_apart(program)
        for agent in program.role().agents:
            known = agent.release()
            if apart:
                known.epochs[agent.index] = min(known.epochs[agent.index], agent.met - 1)
            released.learn({**known.others, program.number: known})
            released.see(known.seen)
    for i, flag in enumerate(flags):
        before.append(flag.value(flag.latest))
        told = flag.told[-1] if modifies else None
        if told is not None and released is not None:
            told = told.copy()
            told.join(released)
        flag.write(program, new(i, before[-1]), released if told is None else told, keeps)
    return before


def _warps_apart(program: Program) -> bool:
    """Whether other warps of the running role than the one that issues an atomic have stored and not met since.

    Triton 3.9 has them meet before an atomic that releases, 3.6 does not (`test_what_triton_orders`): asked of the source, as fences are.
    """
    session, line = program.session, program.role().unmet.stored_by_others()
    if session.adds_fences == "3.9":
        program.meet(certain=False)
        return False
    if line:
        session.apart[program.number] = program.line(), line
    return line > 0


def changes_after(program: Program, memory: Array, place: int) -> Callable[[], bool]:
    """Whether there is a value after the one that the running role has read last."""
    flag = _flag(program, memory, place)
    number = program.role().polled.get(flag.address, flag.latest)
    return lambda: flag.latest > number


def _begin(session: Session, pointer: Pointer, mask: Any) -> tuple[Program, Any, Any]:
    """(program, offsets, which of them are asked for) of an atomic."""
    program = hostside.running(session)
    program.step_of_programs()
    return program, *hostside.wanted(program, pointer, mask, "atomic")


def _answer(session: Session, pointer: Pointer, values: Any) -> Any:
    if not values.ndim and values.dtype.kind in "iuf":
        return Float(values) if values.dtype.kind == "f" else Int(int(values))
    layout = pointer.offset.layout if isinstance(pointer.offset, Tensor) else None
    return bool(values) if not values.ndim and values.dtype.kind == "b" else Tensor(session, values, layout)


def _modify(
    session: Session, pointer: Pointer, mask: Any, sem: Any, new: Callable[[Any, Any], Any], operands: Sequence[Any]
) -> Any:
    """``new(before, operands of the element)`` at each element, one after the other; what was there."""
    program, offsets, asked = _begin(session, pointer, mask)
    memory = pointer.memory
    given = [np.broadcast_to(np.asarray(raw(one)), offsets.shape).astype(memory.flat.dtype)[asked] for one in operands]
    before = write(
        program, memory, offsets[asked].tolist(), "acq_rel" if sem is None else str(sem),
        lambda i, old: new(old, [one[i] for one in given]), modifies=True,
    )  # fmt: skip
    found = np.zeros(offsets.shape, memory.flat.dtype)
    found[asked] = before
    if sem != "relaxed":
        # All threads get what one has found.
        program.meet(certain=False)
    return _answer(session, pointer, found)


def read_modify_write(session: Session, compute: Any) -> Callable[..., Any]:
    """A read-modify-write of global memory by a numpy ufunc (None: exchange); returns what was there."""

    def combined(before: Any, operands: Sequence[Any]) -> Any:
        return operands[0] if compute is None else compute(before, operands[0])

    def call(pointer: Pointer, value: Any, mask: Any = None, sem: str | None = None, **_scope: Any) -> Any:
        return _modify(session, pointer, mask, sem, combined, [value])

    return call


def atomic_cas(session: Session, pointer: Pointer, cmp: Any, val: Any, sem: Any = None, **_scope: Any) -> Any:
    """Where ``cmp`` is there, ``val`` takes its place; what was there."""
    return _modify(session, pointer, None, sem, lambda old, given: given[1] if old == given[0] else old, [cmp, val])


def atomic_load(session: Session, pointer: Pointer, mask: Any = None, sem: Any = None, **_scope: Any) -> Any:
    """What is there, in order with what its writers did before they stored it."""
    program, offsets, asked = _begin(session, pointer, mask)
    order = "acquire" if sem is None else str(sem)
    found = np.zeros(offsets.shape, pointer.memory.flat.dtype)
    found[asked] = [read(program, pointer.memory, place, order) for place in offsets[asked].tolist()]
    return _answer(session, pointer, found)


def atomic_store(
    session: Session, pointer: Pointer, val: Any, mask: Any = None, sem: Any = None, **_scope: Any
) -> None:
    """Store, and tell those that acquire there of what was done before."""
    program, offsets, asked = _begin(session, pointer, mask)
    values = np.broadcast_to(np.asarray(raw(val)), offsets.shape).astype(pointer.memory.flat.dtype)[asked]
    order = "release" if sem is None else str(sem)
    write(program, pointer.memory, offsets[asked].tolist(), order, lambda i, _: values[i], modifies=False)


def atomic_poll(session: Session, pointer: Pointer, expected_value: Any, sem: Any = None, **_limits: Any) -> Any:
    """Wait until a value is there; DeadlockError where neither an earlier program nor another role stores it."""
    program, offsets, asked = _begin(session, pointer, None)
    wanted = np.broadcast_to(np.asarray(raw(expected_value)), offsets.shape)[asked]
    for place, value in zip(offsets[asked].tolist(), wanted, strict=True):
        _until(program, _flag(program, pointer.memory, place), value, "acquire" if sem is None else str(sem))
    return _answer(session, pointer, np.ones(offsets.shape, bool))


def _until(program: Program, flag: Flag, wanted: Any, sem: str) -> None:
    """Have the running role wait for the first value that it may read and that is ``wanted``."""
    role = program.role()

    def there() -> int | None:
        last = flag.latest
        return next((n for n in range(flag.oldest(program, role), last + 1) if flag.value(n) == wanted), None)

    if there() is None:
        name, left = flag.memory.name, flag.value(flag.latest)
        what = f"element {flag.place} of {name} to become {wanted}, which earlier programs leave at {left}"
        program.poll(what, lambda: there() is not None)
    number = there()
    assert number is not None
    flag.read(program, number, sem)


def names(session: Session) -> Mapping[str, Any]:
    """By name in gluon.language, beside the read-modify-writes."""
    return {fn.__name__: functools.partial(fn, session) for fn in (atomic_cas, atomic_load, atomic_store, atomic_poll)}
