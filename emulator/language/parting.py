"""What kernels do that makes the warps of a role meet, and what lets them part (`hardware.parting`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tilecast.emulator.hardware.program import Program
from tilecast.emulator.language.hostside import running
from tilecast.emulator.session import Session
from tilecast.emulator.values.owners import warps_of
from tilecast.emulator.values.scalars import Int
from tilecast.emulator.values.tensors import Tensor


class Decision:
    """A condition on what each warp found out for itself."""

    def __init__(self, holds: bool, program: Program) -> None:
        self._holds, self._program = holds, program

    def __bool__(self) -> bool:
        self._program.decides_alone()
        return self._holds

    def __and__(self, other: Any) -> Decision:
        return Decision(self._holds and bool(other), self._program)

    def __or__(self, other: Any) -> Decision:
        return Decision(self._holds or bool(other), self._program)

    def __invert__(self) -> Decision:
        return Decision(not self._holds, self._program)

    __rand__, __ror__ = __and__, __or__


class OneWarps(Int):
    """A scalar that each warp has its own of: a PTX register that a vote left.  Here they all have the OR of all warps."""

    _program: Program

    def found_by(self, program: Program) -> OneWarps:
        """The number, with the program whose warps have it."""
        self._program = program
        return self

    __hash__ = Int.__hash__

    def __eq__(self, other: object) -> Any:
        return Decision(int.__eq__(self, other) is True, self._program)

    def __ne__(self, other: object) -> Any:
        return ~(self == other)

    def __lt__(self, other: Any) -> Any:
        return Decision(int(self) < int(other), self._program)

    def __le__(self, other: Any) -> Any:
        return Decision(int(self) <= int(other), self._program)

    def __gt__(self, other: Any) -> Any:
        return Decision(int(self) > int(other), self._program)

    def __ge__(self, other: Any) -> Any:
        return Decision(int(self) >= int(other), self._program)

    def __bool__(self) -> bool:
        self._program.decides_alone()
        return int(self) != 0


def reducing(session: Session, function: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction or scan ``function(x, axis, ...)`` of a tensor or of several: warps meet where the axis runs over several."""

    @functools.wraps(function)
    def call(x: Any, *args: Any, **options: Any) -> Any:
        program, first = running(session), x[0] if isinstance(x, tuple) and x else x
        if isinstance(first, Tensor) and program.warps() > 1:
            owner = warps_of(first.layout, first.shape)
            axis = args[0] if args else options.get("axis")
            if owner is None:
                program.meet(certain=False)
            elif (owner != (owner.flat[0] if axis is None else np.take(owner, [0], int(axis)))).any():
                program.meet()
        return function(x, *args, **options)

    return call


def converting(session: Session, function: Callable[..., Any]) -> Callable[..., Any]:
    """``convert_layout(x, layout, ...)``: warps meet where an element goes to another one."""

    @functools.wraps(function)
    def call(x: Any, layout: Any, *args: Any, **options: Any) -> Any:
        program = running(session)
        if isinstance(x, Tensor) and program.warps() > 1 and x.layout != layout:
            before, after = warps_of(x.layout, x.shape), warps_of(layout, x.shape)
            if before is None or after is None:
                program.meet(certain=False)
            elif (before != after).any():
                program.meet()
        return function(x, layout, *args, **options)

    return call


def meeting(session: Session, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that may move values between warps, whichever way: an atomic, a gather, a histogram."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if options.get("sem") != "relaxed":
            running(session).meet(certain=False)
        return function(*args, **options)

    return call
