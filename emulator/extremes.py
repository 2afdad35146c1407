"""What a generated file's own ``launch`` makes of problems with billions of elements, for the samples of `far`.

Launches are planned on tensors that have shapes and strides but no data, and not run: what is kept is the grid and the
numbers that the kernel would get.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilecast.emulator.errors import EmulationError
from tilecast.emulator.far import Sampled
from tilecast.emulator.language.arrays import Array
from tilecast.emulator.session import Planned, Session
from tilecast.emulator.values import dtypes

#: Shares of the grid and of every loop at which values are sampled: the ends and the inside.
_SHARES = (0.0, 0.38, 1.0)
_BITS = 31


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
        return int(np.prod(self._shape, dtype=object))

    def new_empty(self, shape: Any, dtype: Any = None) -> Array:
        """Another one, dense."""
        kind = dtypes.FP32 if str(dtype) == "torch.float32" else dtypes.of(self.data)
        strides = tuple(int(np.prod(shape[i + 1 :], dtype=object)) for i in range(len(shape)))
        return Vast(tuple(shape), strides, kind, "new_empty")


def sums(problem: Large, name: str) -> Vast:
    """A float32 number for each row, contiguous."""
    rows = (problem.batch, problem.heads, problem.seqlen)
    return Vast(rows, (problem.heads * problem.seqlen, problem.seqlen, 1), dtypes.FP32, name)


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
) -> Mapping[str, Sampled]:  # fmt: skip
    """Samples for every kernel that ``launch`` starts, by its name; empty where it takes none of the large problems.

    ``widths``: head dimensions of Q and K, and of V; ``window``: as ``launch`` takes it; ``kinds``: types of Q, K, V, and of the output.
    """

    def call(problem: Large) -> None:
        q, k = (vast(problem, widths[0], kinds[0], name) for name in "qk")
        v, out = (vast(problem, widths[1], kind, name) for kind, name in zip(kinds, ("v", "out"), strict=True))
        launch(q, k, v, out, sums(problem, "lse"), widths[0] ** -0.5, *window)

    return far_calls(session, call)


def far_calls(session: Session, call: Callable[[Large], None]) -> Mapping[str, Sampled]:
    """Samples for every kernel that ``call`` starts for the large problems, by its name; empty where it takes none of them."""
    planned: list[tuple[Large, list[Planned]]] = []
    for problem in LARGE:
        session.planned = []
        try:
            call(problem)
            planned.append((problem, session.planned))
        except (ValueError, EmulationError):
            # A launch may refuse what is too large for it.
            continue
        finally:
            session.planned = None
    names = {one.kernel for _, launches in planned for one in launches}
    return {name: _sampled(name, planned) for name in names}


def _sampled(name: str, planned: list[tuple[Large, list[Planned]]]) -> Sampled:
    """All points of the problems whose launch starts ``name``."""
    found = [(problem, one) for problem, launches in planned for one in launches if one.kernel == name]
    points = [(problem, one, at, turn) for problem, one in found for at in _SHARES for turn in _SHARES]
    arguments = {}
    for argument in found[0][1].numbers:
        values = np.array([[one.numbers[argument]] for _, one, _, _ in points], np.int64)
        # A number of 64 bits is another kernel's: the compiler makes one for it.
        if (abs(values) < 1 << _BITS).all():
            arguments[argument] = values
    grids = np.array([one.grid for _, one, _, _ in points], np.int64)
    ids = np.array([[int(at * (n - 1)) for n in one.grid] for _, one, at, _ in points], np.int64)
    turns = np.array([[turn] for _, _, _, turn in points])
    return Sampled(arguments, grids, ids, turns, tuple(problem.label() for problem, _, _, _ in points))
