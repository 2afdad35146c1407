"""Larger problems of any kernel, from one launch of it: its sizes grow one by one to what the machine's memory holds.

A launch says what its tensors are and which numbers it passes on.  Where a size of a tensor grows, what has to do with it
grows with it: all sizes of the same number, the strides around it, numbers that are one of those, a product of sizes or a
size divided and rounded up, extents of the grid likewise, and integers in memory that reach half of it.  What is not found
to be any of these stays, so that a problem may be smaller than it would be; it is never larger than memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tilecast.emulator.errors import RequestError
from tilecast.emulator.far import LargeLaunch, Larger
from tilecast.emulator.language.arrays import Array, Box
from tilecast.emulator.session import Growth
from tilecast.emulator.values.tensors import Pointer

#: Numbers that strides are divided by on the way (16 bytes of elements of 1 to 8 bytes).
_UNITS = (2, 4, 8, 16)
#: Extents of a grid, most.
_GRID = (2**31 - 1, 2**16 - 1, 2**16 - 1)
#: Elements that a tensor must have before a place in it leaves 32 bits; and of the smaller of two problems of a size.
_ENOUGH, _SMALLER = 2**31, 2**32


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    #: Smallest and largest integer in it; None where it holds others.
    integers: tuple[int, int] | None

    def elements(self, sizes: Mapping[int, int]) -> int:
        """Elements from the first to the last."""
        steps = self.steps(sizes)
        return 1 + sum((sizes.get(n, n) - 1) * step for n, step in zip(self.shape, steps, strict=True))

    def steps(self, sizes: Mapping[int, int]) -> Sequence[int]:
        """Strides, in the same order of memory and with the same gaps in proportion."""
        grown = tuple((n, sizes[n]) for n in dict.fromkeys(self.shape) if n in sizes)
        return _steps(self.shape, self.strides, grown) if grown else self.strides


@lru_cache(maxsize=1 << 14)
def _steps(shape: tuple[int, ...], strides: tuple[int, ...], grown: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    sizes, found = dict(grown), []
    for step in strides:
        for n, inner in zip(shape, strides, strict=True):
            if 0 < inner * n <= step:
                step = step * sizes.get(n, n) // n
        found.append(step)
    return tuple(found)


@lru_cache(maxsize=1 << 10)
def _products(shape: tuple[int, ...]) -> Mapping[int, tuple[tuple[int, ...], ...]]:
    """Product of two sizes or more -> those sizes, of every way to make it."""
    found: dict[int, tuple[tuple[int, ...], ...]] = {}
    for count in range(2, len(shape) + 1):
        for part in itertools.combinations(shape, count):
            found[math.prod(part)] = (*found.get(math.prod(part), ()), part)
    return found


def grown(given: Mapping[str, Any], constants: Mapping[str, Any], grid: Sequence[int], growth: Growth) -> Larger | None:
    """The larger problems of a launch; None where no tensor can outgrow 32 bits.

    ``given``: what the kernel gets, by name; ``constants``: of these what it is compiled for.  Where ``growth`` says how large numbers
    are, that is the one problem.  RequestError where it makes no sense.
    """
    tensors = list(_tensors(given))
    numbers = {
        name: int(n) for name, n in given.items() if name not in constants and type(n).__name__ in ("Int", "Int64")
    }
    fixed = {int(n) for n in constants.values() if isinstance(n, int) and not isinstance(n, bool)}
    largest = growth.largest
    if largest:
        sizes = dict(_asked(numbers, largest))
        return Larger([_launch(sizes, tensors, numbers, grid, fixed, largest)], fails=True)
    problems = []
    extents = sorted({n for one in tensors for n in one.shape if n > 1 and n not in fixed})
    for size in extents:
        for least in (_SMALLER, math.inf):
            sizes = _most(size, tensors, numbers, grid, fixed, growth.memory_bytes, least)
            if sizes and max(one.elements(sizes) for one in tensors) >= _ENOUGH:
                problems.append(_launch(sizes, tensors, numbers, grid, fixed, {}))
    return Larger(problems, fails=False, most=growth.memory_bytes) if problems else None


def _asked(numbers: Mapping[str, int], largest: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    for name, value in largest.items():
        if name not in numbers:
            raise RequestError(f"largest: the kernel has no number '{name}'; it has {', '.join(numbers) or 'none'}")
        if value < numbers[name]:
            raise RequestError(f"largest: {name}: expected {numbers[name]} or more, which this launch has, got {value}")
        yield numbers[name], value


def _tensors(given: Mapping[str, Any]) -> Iterator[_Tensor]:
    """Every tensor of a launch, also in tuples and below tensor maps."""
    waiting = list(given.values())
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, (tuple, list)):
            waiting += value
            continue
        array = value.memory if isinstance(value, (Pointer, Box)) else None
        if not isinstance(array, Array) or id(array) in seen or not array.numel():
            continue
        seen.add(id(array))
        kind = array.flat.dtype
        known = (int(array.flat.min()), int(array.flat.max())) if kind.kind in "iu" and kind.itemsize >= 4 else None
        strides = tuple(int(n) for n in array.stride())
        yield _Tensor(array.name, tuple(map(int, array.shape)), strides, kind.itemsize, known)


def _most(
    size: int, tensors: Sequence[_Tensor], numbers: Mapping[str, int], grid: Sequence[int], fixed: Iterable[int],
    memory_bytes: float, enough: float,
) -> dict[int, int]:  # fmt: skip
    """The size grown twofold again and again, while memory and the grid hold it and no tensor has ``enough``; {} for no growth."""
    found: dict[int, int] = {}
    grows = [one for one in tensors if size in one.shape]
    still = [one for one in tensors if size not in one.shape]
    others = sum(one.elements({}) * one.itemsize for one in still)
    largest = max((one.elements({}) for one in still), default=0)
    for doublings in itertools.count(1):
        sizes = {size: size << doublings}
        elements = [one.elements(sizes) for one in grows]
        taken = others + sum(count * one.itemsize for count, one in zip(elements, grows, strict=True))
        extents = [_grown(n, sizes, tensors, fixed, True) for n in grid]
        if taken > memory_bytes or any(n > most for n, most in zip(extents, _GRID, strict=False)):
            return found
        found = sizes
        if max((largest, *elements)) >= enough:
            return found
    return found


def _launch(
    sizes: Mapping[int, int], tensors: Sequence[_Tensor], numbers: Mapping[str, int], grid: Sequence[int], fixed: Iterable[int],
    named: Mapping[str, int],
) -> LargeLaunch:  # fmt: skip
    made = {name: named.get(name, _grown(n, sizes, tensors, fixed, False)) for name, n in numbers.items()}
    extents = tuple(_grown(n, sizes, tensors, fixed, True) for n in grid)
    more = [f"{name} {made[name]} (here {n})" for name, n in numbers.items() if made[name] != n]
    if not more:
        more = [f"a size of {new} (here {old})" for old, new in sizes.items()]
    if extents != tuple(grid):
        more.append(f"a grid of {'x'.join(map(str, extents))}")
    memory: dict[str, tuple[int, int]] = {}
    for one in tensors:
        if one.integers is not None:
            low, high = one.integers
            size = next((n for n in sizes if n < 2 * high and high <= n), None)
            known = (low, sizes[size] if size is not None else high)
            before = memory.get(one.name, known)
            memory[one.name] = min(known[0], before[0]), max(known[1], before[1])
    return LargeLaunch(", ".join(more), made, extents, memory)


def _grown(number: int, sizes: Mapping[int, int], tensors: Sequence[_Tensor], fixed: Iterable[int], grid: bool) -> int:
    """What a number of a launch becomes: the least of what it may be."""
    if number in sizes:
        return sizes[number]
    if abs(number) <= 1:
        return number
    found = set()
    for one in tensors:
        if number in one.shape:
            found.add(number)
        if not grid:
            for old, new in zip(one.strides, one.steps(sizes), strict=True):
                found |= {new // unit for unit in (1, *_UNITS) if old == number * unit}
        for part in _products(one.shape).get(number, ()):
            found.add(math.prod(sizes.get(n, n) for n in part))
    blocks = [(-(-old // n), -(-new // n)) for old, new in sizes.items() for n in fixed if n > 1]
    found |= {new for old, new in blocks if old == number and old > 1}
    if grid and not found:
        # Tiles of one size by whatever the rest is: another size, divided or not, heads or a batch.
        parts = [*blocks, *sizes.items()]
        found |= {number // old * new for old, new in parts if old > 1 and number % old == 0}
    return min(found, default=number)
