"""Interval arithmetic on 64-bit integers: arrays of (rows, 2), the smallest and the largest value, one row for each problem."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

#: Ends beyond this are cut off: what is this large has long outgrown 32 bits, and must not outgrow numpy's 64.
_MOST = 2**61


@lru_cache(maxsize=1 << 12)
def constant(low: int, high: int) -> Any:
    """One row for all problems, not to be written to."""
    made = np.array([[max(min(n, _MOST), -_MOST) for n in (low, high)]], np.int64)
    made.flags.writeable = False
    return made


def ends(array: Any) -> Any:
    """One row for all problems: of integers or truth values as they are."""
    return np.array([[int(array.min()), int(array.max())]] if array.size else [[0, 0]], np.int64)


def _hull(*candidates: Any) -> Any:
    return np.stack([np.minimum.reduce(candidates), np.maximum.reduce(candidates)], -1)


def _cut(values: Any) -> Any:
    return np.minimum(np.maximum(values, -_MOST), _MOST)


def _add(a: Any, b: Any) -> Any:
    return _cut(a + b)


def _sub(a: Any, b: Any) -> Any:
    return _cut(a - b[:, ::-1])


def _product(x: Any, y: Any) -> Any:
    near = x.astype(np.float64) * y
    with np.errstate(over="ignore"):
        return np.where(np.abs(near) < _MOST, x * y, np.sign(near).astype(np.int64) * _MOST)


def _alike(a: Any, b: Any) -> tuple[Any, Any]:
    """Both with as many rows."""
    if a.shape == b.shape:
        return a, b
    one, other = np.broadcast_arrays(a, b)
    return one, other


def _mul(a: Any, b: Any) -> Any:
    a, b = _alike(a, b)
    if a[:, 0].min() >= 0 and b[:, 0].min() >= 0:
        return _product(a, b)
    return _hull(*(_product(a[:, i], b[:, j]) for i in (0, 1) for j in (0, 1)))


def _quotient(x: Any, y: Any) -> Any:
    return np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))


def _divisor(b: Any) -> Any:
    """Without 0, by which nothing may be divided; of a range about 0 its positive part."""
    low, high = b[:, 0], b[:, 1]
    about, positive = (low <= 0) & (high >= 0), (high > 0) | (low == 0)
    return np.stack(
        [np.where(about & positive, 1, low), np.where(about, np.where(positive, np.maximum(high, 1), -1), high)], -1
    )


def _floordiv(a: Any, b: Any) -> Any:
    b = _divisor(b)
    a, b = _alike(a, b)
    return _hull(*(_quotient(a[:, i], b[:, j]) for i in (0, 1) for j in (0, 1)))


def _mod(a: Any, b: Any) -> Any:
    """Of C: the remainder has the sign of ``a``."""
    a, b = _alike(a, _divisor(b))
    most = np.abs(b).max(1) - 1
    low = np.where(a[:, 0] < 0, np.maximum(a[:, 0], -most), 0)
    high = np.where(a[:, 1] > 0, np.minimum(a[:, 1], most), 0)
    # Both ends in one multiple of a divisor that is known: the remainder runs between theirs.
    first, last = _quotient(a[:, 0], b[:, 0]), _quotient(a[:, 1], b[:, 0])
    known = (b[:, 0] == b[:, 1]) & (first == last) & ((a[:, 0] >= 0) | (a[:, 1] <= 0))
    return np.stack(
        [np.where(known, a[:, 0] - first * b[:, 0], low), np.where(known, a[:, 1] - last * b[:, 0], high)], -1
    )


def _bits(values: Any) -> Any:
    """2^n - 1 that is not less than any of a row, which are not negative."""
    most = np.maximum(values.max(1), 0).astype(np.float64)
    return (2.0 ** np.ceil(np.log2(most + 1))).astype(np.int64) - 1


def _bitwise(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Exact where both are known; between what the bits of both can make otherwise."""

    def of(a: Any, b: Any) -> Any:
        a, b = _alike(a, b)
        known = (a[:, 0] == a[:, 1]) & (b[:, 0] == b[:, 1])
        exact = compute(a[:, 0], b[:, 0])
        size = np.maximum(_bits(np.abs(a)), _bits(np.abs(b)))
        positive = (a[:, 0] >= 0) & (b[:, 0] >= 0)
        low, high = np.where(positive, 0, -size - 1), size
        if compute is np.bitwise_and:
            for one, other in ((a, b), (b, a)):
                # A mask that is not negative bounds what is left; one of leading ones rounds down, in order.
                bounded = one[:, 0] >= 0
                low, high = np.where(bounded, 0, low), np.where(bounded, np.minimum(high, one[:, 1]), high)
                step = -one[:, 0]
                rounds = (one[:, 0] == one[:, 1]) & (step > 0) & (step & (step - 1) == 0)
                low = np.where(rounds, other[:, 0] & one[:, 0], low)
                high = np.where(rounds, other[:, 1] & one[:, 0], high)
        elif compute is np.bitwise_or:
            low = np.where(positive, np.maximum(a[:, 0], b[:, 0]), low)
        return np.stack([np.where(known, exact, low), np.where(known, exact, high)], -1)

    return of


def _lshift(a: Any, b: Any) -> Any:
    return _mul(a, np.left_shift(np.int64(1), np.clip(b, 0, 60)))


def _rshift(a: Any, b: Any) -> Any:
    a, b = _alike(a, np.clip(b, 0, 63))
    return _hull(*(a[:, i] >> b[:, j] for i in (0, 1) for j in (0, 1)))


def _decided(yes: Any, no: Any) -> Any:
    """0 or 1 of a comparison that always, or never, holds; both otherwise."""
    return np.stack([np.where(yes, 1, 0), np.where(no, 0, 1)], -1)


def _lt(a: Any, b: Any) -> Any:
    return _decided(a[:, 1] < b[:, 0], a[:, 0] >= b[:, 1])


def _le(a: Any, b: Any) -> Any:
    return _decided(a[:, 1] <= b[:, 0], a[:, 0] > b[:, 1])


def _eq(a: Any, b: Any) -> Any:
    known = (a[:, 0] == a[:, 1]) & (b[:, 0] == b[:, 1])
    return _decided(known & (a[:, 0] == b[:, 0]), (a[:, 1] < b[:, 0]) | (a[:, 0] > b[:, 1]))


def union(a: Any, b: Any) -> Any:
    """What one of the two is."""
    return np.stack([np.minimum(a[:, 0], b[:, 0]), np.maximum(a[:, 1], b[:, 1])], -1)


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": _add, "sub": _sub, "mul": _mul, "floordiv": _floordiv, "mod": _mod, "lshift": _lshift, "rshift": _rshift,
    "and": _bitwise(np.bitwise_and), "or": _bitwise(np.bitwise_or), "xor": _bitwise(np.bitwise_xor),
    "min": np.minimum, "max": np.maximum, "union": union,
    "lt": _lt, "le": _le, "gt": lambda a, b: _lt(b, a), "ge": lambda a, b: _le(b, a), "eq": _eq,
    "ne": lambda a, b: 1 - _eq(a, b)[:, ::-1],
}  # fmt: skip
#: What came out, by operation and operands: a kernel does the same with the same numbers in every program and turn.
_KNOWN: dict[tuple[str, bytes, bytes], Any] = {}
_MOST_KNOWN = 1 << 15


def computed(name: str, a: Any, b: Any) -> Any:
    """``a`` (operation of that name) ``b``, not to be written to."""
    key = name, a.tobytes(), b.tobytes()
    found = _KNOWN.get(key)
    if found is None:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        found = _KNOWN[key] = OPERATIONS[name](a, b)
        found.flags.writeable = False
    return found


#: Those that give truth values.
COMPARISONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))
