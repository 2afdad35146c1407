"""What a generated file's own ``launch`` makes of problems with billions of elements, for the intervals of `far`.

Launches are planned on tensors that have shapes and strides but no data, and not run: what is kept is the grid and the
numbers that the kernel would get.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilecast.emulator.errors import EmulationError
from tilecast.emulator.far import LargeLaunch, Larger
from tilecast.emulator.language.arrays import Array
from tilecast.emulator.session import Session
from tilecast.emulator.values import dtypes


@dataclass(frozen=True)
class Large:
    """A problem that outgrows 32 bits in one product of an index and a stride; every number by itself fits.

    ``order``: the dimensions (b, h, s) from the one with the largest stride to the one with the smallest.
    """

    batch: int
    heads: int
    seqlen: int
    order: str

    def label(self) -> str:
        """For messages."""
        return f"batch {self.batch}, heads {self.heads}, seqlen {self.seqlen}, memory in the order {','.join(self.order)},d"


#: Rows, heads and sequences times their stride; heads of all sequences times the length (log-sum-exp).
LARGE = (
    Large(8, 32, 2**21, "sbh"),
    Large(4, 128, 2**20, "hbs"),
    Large(128, 4, 2**20, "bhs"),
    Large(128, 8, 2**22, "bhs"),
)


#: What to call a problem, what starts it, and between what the integers of its lists lie, by their names.
Call = tuple[str, Callable[[], None], Mapping[str, tuple[int, int]]]


class Vast(Array):
    """A tensor with a shape and strides, and no data."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: dtypes.Dtype, name: str) -> None:
        # No constructor of Array: it makes room for every element.
        self.data, self.name = np.empty(0, dtype.numpy), name
        self._shape, self._strides = shape, strides

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return self._shape

    def stride(self, axis: int | None = None) -> Any:
        """Strides in elements."""
        return self._strides if axis is None else self._strides[axis]

    def is_contiguous(self) -> bool:
        """The log-sum-exp is asked, which is."""
        return True

    def numel(self) -> int:
        """Elements."""
        return math.prod(self._shape)

    def new_empty(self, shape: Any, dtype: Any = None) -> Array:
        """Another one, dense."""
        kind = dtypes.FP32 if str(dtype) == "torch.float32" else dtypes.of(self.data)
        return dense(shape, kind, "new_empty")


def dense(shape: Sequence[int], dtype: dtypes.Dtype, name: str) -> Vast:
    """A contiguous tensor without data."""
    return Vast(tuple(shape), tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))), dtype, name)


def sums(problem: Large, name: str) -> Vast:
    """A float32 number for each row, contiguous."""
    return dense((problem.batch, problem.heads, problem.seqlen), dtypes.FP32, name)


def vast(problem: Large, width: int, dtype: dtypes.Dtype, name: str) -> Vast:
    """Rows of so many elements of a problem, without data."""
    extents = {"b": problem.batch, "h": problem.heads, "s": problem.seqlen}
    strides, step = {}, width
    for dim in reversed(problem.order):
        strides[dim] = step
        step *= extents[dim]
    shape = (problem.batch, problem.heads, problem.seqlen, width)
    return Vast(shape, (strides["b"], strides["h"], strides["s"], 1), dtype, name)


def far_launches(
    session: Session, launch: Callable[..., Any], widths: tuple[int, int], window: tuple[int, int],
    kinds: tuple[dtypes.Dtype, dtypes.Dtype] = (dtypes.FP16, dtypes.FP16),
) -> Mapping[str, Larger]:  # fmt: skip
    """The larger problems of every kernel that ``launch`` starts, by its name; empty where it takes none of them.

    ``widths``: head dimensions of Q and K, and of V; ``window``: as ``launch`` takes it; ``kinds``: types of Q, K, V, and of the output.
    """

    def call(problem: Large) -> None:
        q, k = (vast(problem, widths[0], kinds[0], name) for name in "qk")
        v, out = (vast(problem, widths[1], kind, name) for kind, name in zip(kinds, ("v", "out"), strict=True))
        launch(q, k, v, out, sums(problem, "lse"), widths[0] ** -0.5, *window)

    return far_calls(session, [(one.label(), functools.partial(call, one), {}) for one in LARGE])


def far_calls(session: Session, calls: Sequence[Call]) -> Mapping[str, Larger]:
    """The larger problems of every kernel that calls start, by its name; empty where none is taken."""
    planned: dict[str, list[LargeLaunch]] = {}
    for label, call, memory in calls:
        session.planned = []
        try:
            call()
            for one in session.planned:
                planned.setdefault(one.kernel, []).append(LargeLaunch(label, one.numbers, one.grid, memory))
        except (ValueError, EmulationError):
            # A launch may refuse what is too large for it.
            continue
        finally:
            session.planned = None
    return {name: Larger(launches, fails=True) for name, launches in planned.items()}
