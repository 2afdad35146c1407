"""What a kernel's decorators, loops and aggregates become where Python runs it: constants remembered, ranges of 32-bit numbers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tilecast.emulator.far import Far
from tilecast.emulator.session import Session
from tilecast.emulator.source import CONVERTED, COUNTED
from tilecast.emulator.values.layouts import DistributedLinearLayout
from tilecast.emulator.values.scalars import Int, converted

#: Arguments by which a function of constants is remembered.
_PLAIN_NUMBERS = (Int, int)


def counted(session: Session, static: bool = False) -> Any:
    """range() whose numbers are 32-bit scalars inside a kernel; ``static``: each iteration is code of its own."""

    def numbers(*bounds: Any, **_hints: Any) -> Any:
        found = range(*map(int, bounds))
        if session.program is None:
            return found
        if static:
            return _unrolled(session, found)
        far = session.larger.counter(bounds) if session.larger is not None else None
        return map(Int, found) if far is None else _followed(session, found, bounds, far)

    return numbers


def replaced(session: Session) -> dict[str, Any]:
    """Names of files that kernels come from, in place of Python's."""
    return {"range": counted(session), COUNTED: bounded(session), CONVERTED: converted}


def bounded(session: Session) -> Callable[[Any, Any], Any]:
    """A number that is less than ``end`` where a kernel's loop goes on, with what it is in larger problems where it is an integer."""

    def number(value: Any, end: Any) -> Any:
        if session.program is None or session.larger is None or not isinstance(value, Int):
            return value
        far = session.larger.counter((end,))
        return value if far is None else value.near().sampled(far)

    return number


def _followed(session: Session, numbers: range, bounds: Any, far: Far) -> Iterator[Int]:
    """The numbers with what they are in larger problems, where what the loop adds to from turn to turn grows too."""
    turns: list[dict[str, Any]] = []
    for number in numbers:
        if len(turns) < 3 and session.larger is not None:
            turns.append(dict(sys._getframe(1).f_locals))
            if len(turns) == 3:
                session.larger.carry(bounds, turns)
        yield Int(number).sampled(far)


def remembering(session: Session, fn: Callable[..., Any]) -> Callable[..., Any]:
    """gluon.constexpr_function: what it makes of numbers is a layout more often than not, and is made once in a launch.

    Only linear layouts are kept, for all else is made as fast as it is found; not one whose lists a kernel has changed since.
    """
    if fn.__closure__:
        return fn

    def called(*args: Any, **named: Any) -> Any:
        if session.program is None or named or not all(type(arg) in _PLAIN_NUMBERS for arg in args):
            return fn(*args, **named)
        place = fn, args
        known = session.made_layouts.get(place)
        if known is None:
            made = fn(*args)
            if not isinstance(made, DistributedLinearLayout):
                return made
            known = session.made_layouts[place] = made, hash(made)
        elif hash(known[0]) != known[1]:
            return fn(*args)
        return known[0]

    return functools.wraps(fn)(called)


def _unrolled(session: Session, numbers: range) -> Iterator[Int]:
    place = session.source.line()
    outer = session.unrolled
    for number in numbers:
        session.unrolled = [*outer, place, number]
        yield Int(number)
    session.unrolled = outer


def aggregate(cls: type) -> type:
    """gluon.aggregate: a constructor that takes the fields in their order, unless the class has one of its own."""
    if "__init__" in vars(cls):
        return with_constructor(cls)
    names = list(cls.__annotations__)

    def fill(self: Any, *values: Any, **named: Any) -> None:
        given = dict(zip(names, values, strict=False)) | named
        for name in names:
            setattr(self, name, given[name] if name in given else getattr(cls, name))

    cls.__init__ = fill  # type: ignore[misc]
    return cls


def with_constructor(cls: type) -> type:
    """The same of Triton 3.6, for classes with a constructor; every field must be set."""
    initialise = cls.__init__  # type: ignore[misc]

    def checked(self: Any, *values: Any, **named: Any) -> None:
        initialise(self, *values, **named)
        for name in cls.__annotations__:
            if not hasattr(self, name):
                raise TypeError(f"the constructor of {cls.__name__} does not set {name}")

    cls.__init__ = checked  # type: ignore[misc]
    return cls
