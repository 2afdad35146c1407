"""What an index expression would be in a far larger launch: does a 32-bit one overflow that small problems never reach?

Beside its value an integer carries those that the same operations give at sampled points of large problems (`extremes`
makes them).  Samples follow the expressions exactly, so that nothing is lost by rounding up, as it is with intervals.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilecast.emulator.errors import IntegerError

#: Frames that an operation remembers when it overflows: from the operator to the line of the kernel.
_DEPTH = 6
_LIMIT = 2**31
#: PTX that copies its operand, or the number of the program.
_COPY = re.compile(r"mov\.[bu]32 \$0, (\$1|%(?:ctaid|clusterid)\.x);")


@dataclass(frozen=True, slots=True)
class Over:
    """A 32-bit operation that overflowed: (file, line) of its frames, innermost first; at which point; the true result."""

    places: tuple[tuple[str, int], ...]
    point: int
    result: int


@dataclass(frozen=True)
class Sampled:
    """The points of one kernel: its numbers by name, (points, 1) each; grid and program, (points, axes); share of every loop,
    (points, 1); what to call the problem of each point.
    """

    arguments: Mapping[str, Any]
    grids: Any
    ids: Any
    turns: Any
    labels: tuple[str, ...]

    def program_id(self, axis: int) -> Far | None:
        """Number of the program along an axis."""
        return Far(self.ids[:, axis : axis + 1]) if axis < self.ids.shape[1] else None

    def num_programs(self, axis: int) -> Far | None:
        """How many there are."""
        return Far(self.grids[:, axis : axis + 1]) if axis < self.grids.shape[1] else None

    def counter(self, bounds: Sequence[Any]) -> Far | None:
        """The number of a loop over ``range(*bounds)``; None where no bound has samples."""
        if all(far_of(bound) is None for bound in bounds):
            return None
        first, last = (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
        start, step = _samples(first), _samples(bounds[2]) if len(bounds) == 3 else 1
        trips = np.maximum((_samples(last) - start) // step, 1)
        over = next((far.over for far in map(far_of, bounds) if far is not None and far.over), None)
        return Far(start + (self.turns * (trips - 1)).astype(np.int64) * step, over)


class Far:
    """Values at the sampled points: (points, 1) of a scalar, (points, 2) of a tensor's first and last element."""

    __slots__ = ("over", "values")

    def __init__(self, values: Any, over: Over | None = None) -> None:
        #: ``over``: the first 32-bit operation on the way here that overflowed; None where none did.
        self.values, self.over = values, over

    def narrow(self) -> Far:
        """After 32-bit arithmetic: wrapped, and remembered, where it overflows."""
        beyond = (self.values >= _LIMIT) | (self.values < -_LIMIT)
        if not beyond.any():
            return self
        point, place = np.argwhere(beyond)[0]
        over = self.over or Over(frames(), int(point), int(self.values[point, place]))
        return Far((self.values + _LIMIT) % (2 * _LIMIT) - _LIMIT, over)


def far_of(value: Any) -> Far | None:
    """The samples of a scalar or tensor; None where it has none."""
    return getattr(value, "far", None)


def _samples(value: Any) -> Any:
    """Of an operand with or without samples: its ends as they are stand for themselves."""
    far = far_of(value)
    if far is not None:
        return far.values
    if isinstance(value, int):
        return np.int64(value)
    flat = np.asarray(value.a).reshape(-1)
    return np.array([[flat[0], flat[-1]]], np.int64)


_COMPUTE: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "min": np.minimum, "max": np.maximum,
}  # fmt: skip


def combined(name: str, left: Any, right: Any, wide: bool) -> Far | None:
    """Samples of ``left`` (operation) ``right``; None where neither has any, or the operation is not followed."""
    one, two = far_of(left), far_of(right)
    if one is None and two is None:
        return None
    a, b = _samples(left), _samples(right)
    if name in ("floordiv", "mod"):
        # Points that the launch does not reach may divide by zero.
        b = np.where(b == 0, 1, b)
        quotient = np.sign(a) * np.sign(b) * (abs(a) // abs(b))
        values = quotient if name == "floordiv" else a - b * quotient
    elif name in ("lshift", "rshift"):
        values = a << (b & 31) if name == "lshift" else a >> (b & 31)
    elif name in _COMPUTE:
        values = _COMPUTE[name](a, b)
    else:
        return None
    found = Far(values, (one.over if one else None) or (two.over if two else None))
    return found if wide else found.narrow()


def copied(ptx: str, operand: Any, sampled: Sampled | None) -> Far | None:
    """Samples of what inline PTX makes of a number: of a plain copy, and of the program's number; None of anything else."""
    found = _COPY.fullmatch(ptx.strip())
    if found is None:
        return None
    if found.group(1) == "$1":
        return far_of(operand)
    return sampled.program_id(0) if sampled is not None else None


def without_overflow(index: Any) -> Any:
    """``index`` for an address, without its samples; IntegerError, with ``over``, where one has overflowed."""
    far = far_of(index)
    if far is None:
        return index
    if far.over is not None:
        error = IntegerError("a 32-bit index overflows; convert to int64 first")
        error.over = far.over
        raise error
    return index.near()


def frames() -> tuple[tuple[str, int], ...]:
    """(file, line) of what is running, innermost first, without the caller."""
    frame: Any = sys._getframe(2)
    found: list[tuple[str, int]] = []
    while frame is not None and len(found) < _DEPTH:
        found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)
