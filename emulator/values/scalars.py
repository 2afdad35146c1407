"""What a kernel computes with beside tensors: scalars and compile-time constants."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tilecast.emulator.errors import IntegerError
from tilecast.emulator.far import Far, combined, far_of, frames
from tilecast.emulator.values import dtypes


class Int(int):
    """A 32-bit scalar with C's division and an overflow check; also a compile-time constant (``value``)."""

    bits = 32
    #: What it would be in far larger problems; None where not asked for.
    far: Far | None = None

    def to(self, dtype: Any) -> Any:
        """The number with another width, or as a floating-point number."""
        if _is_floating(dtype):
            return float(self)
        if self.far is None:
            return Int64(self) if dtype is dtypes.INT64 else Int(self)
        return Int64(self).sampled(self.far) if dtype is dtypes.INT64 else Int(self).sampled(self.far.narrowed())

    def sampled(self, far: Far | None) -> Int:
        """This number, which no other value shares yet, with intervals."""
        if far is not None:
            self.far = far.widened() if self.bits == 64 else far
        return self

    def near(self) -> Int:
        """The number without its intervals."""
        return type(self)(self)

    @property
    def value(self) -> int:
        """The plain number, as of a constexpr."""
        return int(self)


class Int64(Int):
    """A 64-bit scalar."""

    bits = 64


class Undefined(Int):
    """What no program may depend on, as a quotient by zero: an IntegerError where an address, a coordinate or a branch does."""

    why, bits = "", 0
    #: Where it came from: (file, line) of the frames.
    places: tuple[tuple[str, int], ...] = ()

    def _used(self, *_others: Any) -> Any:
        error = IntegerError(self.why)
        error.places = self.places
        raise error

    __int__ = __index__ = __bool__ = __float__ = _used

    def _spreads(self, *_others: Any) -> Undefined:
        return self

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __neg__ = _spreads  # type: ignore[assignment]
    __hash__ = int.__hash__

    def to(self, dtype: Any) -> Int:
        """Not defined with another width either."""
        return self


def converted(value: Any, *to: Any, **named: Any) -> Any:
    """``value.to(..)``; what a comparison of scalars gives, and floating-point scalars, are Python's own."""
    if not isinstance(value, (bool, float)):
        return value.to(*to, **named)
    dtype = to[0] if to else named["dtype"]
    if dtype is dtypes.BOOL:
        return bool(value)
    return float(value) if _is_floating(dtype) else Int(value).to(dtype)


def _is_floating(dtype: dtypes.Dtype) -> bool:
    return dtype is not dtypes.BOOL and not np.issubdtype(dtype.numpy, np.integer)


def undefined(why: str, places: tuple[tuple[str, int], ...]) -> Undefined:
    """A number that is not defined."""
    made = Undefined(0)
    made.why, made.places = why, places
    return made


def _truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_INTEGER: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": _truncated,
    "mod": lambda a, b: a - b * _truncated(a, b), "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "lshift": operator.lshift, "rshift": operator.rshift,
}  # fmt: skip


_OVERFLOW = "a 32-bit integer overflows: {}; convert to int64 before this"


def _scalar(wide: bool, number: int, mask: bool) -> Int:
    return Int64(number) if wide else Int(number if -(2**31) <= number < 2**31 else _beyond(number, mask))


def _beyond(number: int, mask: bool) -> int:
    """What a result of more than 32 bits is: of a ``mask``, bits shifted out of it are lost (PTX ISA, "shl"); IntegerError of a number."""
    if mask:
        return (number + 2**31) % 2**32 - 2**31
    raise IntegerError(_OVERFLOW.format(number))


def _integer(name: str, reflected: bool) -> Callable[[Int, Any], Any]:
    compute, divides, shifts = _INTEGER[name], name in ("floordiv", "mod"), name == "lshift"

    def forward(self: Int, other: Any) -> Any:
        kind = type(other)
        if (kind is Int or kind is int) and type(self) is Int and (not divides or (self if reflected else other)):
            # What most are: 32 bits, of this launch only.
            number = compute(int(other), int(self)) if reflected else compute(int(self), int(other))
            # A negative number that is shifted is a mask.
            if not -(2**31) <= number < 2**31:
                number = _beyond(number, shifts and number < 0)
            result = Int(number)
            if self.far is not None or (kind is Int and other.far is not None):
                result.far = combined(name, other, self, False) if reflected else combined(name, self, other, False)
            return result
        if type(other) is bool or not isinstance(other, int):
            if isinstance(other, float) and name in ("add", "sub", "mul"):
                left, right = (other, float(self)) if reflected else (float(self), other)
                return getattr(operator, name)(left, right)
            if type(other) is not bool:
                return NotImplemented
        for one in (self, other):
            if isinstance(one, Undefined):
                return one
        left, right = (int(other), int(self)) if reflected else (int(self), int(other))
        if not right and divides:
            return undefined("integer division by zero", frames())
        wide = self.bits == 64 or isinstance(other, Int64)
        result = _scalar(wide, compute(left, right), shifts and left < 0)
        if self.far is not None or far_of(other) is not None:
            result.far = combined(name, other, self, wide) if reflected else combined(name, self, other, wide)
        return result

    return forward


for _name in _INTEGER:
    setattr(Int, f"__{_name}__", _integer(_name, False))
    setattr(Int, f"__r{_name}__", _integer(_name, True))


class Float(float):
    """A compile-time constant."""

    @property
    def value(self) -> float:
        """The plain number."""
        return float(self)

    def to(self, dtype: Any) -> Int | Float:
        """The number as another type: towards zero as an integer."""
        whole = np.issubdtype(dtype.numpy, np.integer)
        return Int(int(self)).to(dtype) if whole else Float(self)


class Str(str):
    """A compile-time constant."""

    __slots__ = ()

    @property
    def value(self) -> str:
        """The plain text."""
        return str(self)


class Several(tuple):  # type: ignore[type-arg]
    """A compile-time constant."""

    __slots__ = ()

    @property
    def value(self) -> tuple[Any, ...]:
        """The plain tuple."""
        return tuple(self)


def constexpr(value: Any = None) -> Any:
    """A compile-time constant: behaves as the value and has ``.value``."""
    if type(value) is int:
        return Int(value)
    if type(value) is float:
        return Float(value)
    if type(value) is str:
        return Str(value)
    return Several(value) if type(value) is tuple else value
