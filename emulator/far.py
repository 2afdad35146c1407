"""What an index expression is in far larger launches: does a 32-bit one overflow that small problems never reach?

Beside its value an integer carries the intervals that the same operations give it in large problems: in each once for all
programs and all turns of loops (what cannot leave 32 bits there never does), and for some programs and turns, one by one
(what leaves 32 bits there does so on the GPU: only that is said to be wrong).  `extremes` and `language.growth` make the problems.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilecast.emulator.errors import IntegerError
from tilecast.emulator.intervals import COMPARISONS, OPERATIONS, computed, constant, ends

#: Frames that an operation remembers when it overflows: from the line of the kernel outwards.
_DEPTH = 6
_LIMIT = 2**31
#: Shares of the grid and of every loop of the rows for one program and one turn; the first row of a problem is for all.
_SHARES = (0.0, 0.38, 1.0)
_HERE = os.path.dirname(os.path.abspath(__file__))


@dataclass(frozen=True, slots=True)
class Overflow:
    """A 32-bit operation that leaves its 32 bits in a larger problem."""

    #: (file, line) of its frames, innermost first; its columns in the first of them, None where they are not known.
    places: tuple[tuple[str, int], ...]
    columns: tuple[int, int] | None
    #: In which problem; what it would be over all programs and turns there.
    problem: str
    low: int
    high: int
    #: The name of what a loop adds to; empty of an expression.
    name: str = ""


@dataclass(slots=True)
class Indices:
    """What is known of 32-bit operations so far, by their places in the code."""

    checked: set[tuple[str, int, int]] = field(default_factory=set)
    #: Those whose interval over all programs leaves 32 bits, and that of no single program and turn that was looked at.
    undecided: set[tuple[str, int, int]] = field(default_factory=set)
    found: dict[tuple[str, int, int], Overflow] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LargeLaunch:
    """A launch of a kernel in a larger problem: its numbers and grid; smallest and largest integer of tensors, by name."""

    label: str
    numbers: Mapping[str, int]
    grid: tuple[int, ...]
    memory: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class Larger:
    """The larger problems of one kernel, as rows of intervals.

    ``fails``: an overflow is an error; otherwise it is only noted.  ``most``: what is larger is no place in memory, so that sizes and
    grid do not fit each other, and is not said to overflow.
    """

    def __init__(self, launches: Sequence[LargeLaunch], fails: bool, most: float = float("inf")) -> None:
        self.fails, self.most, self.indices = fails, most, Indices()
        #: Shares of the grid and of loops that each row of a problem is about.
        shares = [((0.0, 1.0), (0.0, 1.0)), *(((p, p), (t, t)) for p in _SHARES for t in _SHARES)]
        rows = [(one, program, turn) for one in launches for program, turn in shares]
        self.labels = tuple(one.label for one, _, _ in rows)
        self.single = np.array([program[0] == program[1] for _, program, _ in rows])
        self.turns = np.array([turn for _, _, turn in rows])
        axes = max(len(one.grid) for one in launches)
        grids = [(*one.grid, *(1,) * (axes - len(one.grid))) for one, _, _ in rows]
        self._grids = np.array(grids, np.int64)
        last = self._grids[:, :, None] - 1
        shares_of_grid = np.array([program for _, program, _ in rows])[:, None, :]
        self._ids = (shares_of_grid * last).astype(np.int64)
        self.arguments = {
            name: np.array([[one.numbers[name]] * 2 for one, _, _ in rows], np.int64)
            for name in launches[0].numbers
            if all(name in one.numbers for one in launches)
        }
        self._memory = {
            name: np.array([one.memory[name] for one, _, _ in rows], np.int64) for name in launches[0].memory
        }

    def argument(self, name: str) -> Far | None:
        """A number that the launch gives; one that needs 64 bits has them."""
        values = self.arguments.get(name)
        return None if values is None else Far(self, values, np.abs(values[:, 0]) >= _LIMIT)

    def program_id(self, axis: int) -> Far | None:
        """Number of the program along an axis."""
        return Far(self, self._ids[:, axis]) if axis < self._ids.shape[1] else None

    def num_programs(self, axis: int) -> Far | None:
        """How many there are."""
        return Far(self, self._grids[:, [axis, axis]]) if axis < self._grids.shape[1] else None

    def loaded(self, name: str) -> Far | None:
        """An integer of a tensor; None where it is as large as here."""
        values = self._memory.get(name)
        return None if values is None else Far(self, values)

    def counter(self, bounds: Sequence[Any]) -> Far | None:
        """The number of a loop over ``range(*bounds)``; None where no bound is larger."""
        known = [far for far in map(far_of, bounds) if far is not None]
        if not known:
            return None
        first, last = (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
        start, stop = self._of(first), self._of(last)
        step = self._of(bounds[2] if len(bounds) == 3 else 1)
        exact, wide = all(far.exact for far in known), _widths(known)
        over = any(far.over for far in known)
        if (step[:, 0] <= 0).any():
            # Downwards: between the bounds.
            return Far(self, np.stack([np.minimum(stop[:, 0] + 1, start[:, 0]), start[:, 1]], -1), wide, False, over)
        turns = self._turns(start, stop, step)
        low, high = start[:, 0] + turns[:, 0] * step[:, 0], start[:, 1] + turns[:, 1] * step[:, 1]
        return Far(self, np.stack([low, np.maximum(np.minimum(high, stop[:, 1] - 1), low)], -1), wide, exact, over)

    def _of(self, value: Any) -> Any:
        return np.broadcast_to(_rows(value), self.turns.shape)

    def _turns(self, start: Any, stop: Any, step: Any) -> Any:
        """Turns of a loop before the one that a row is about."""
        fewest = np.maximum((stop[:, 0] - start[:, 1] + step[:, 1] - 1) // step[:, 1], 1)
        most = np.maximum((stop[:, 1] - start[:, 0] + step[:, 0] - 1) // step[:, 0], 1)
        return (self.turns * np.stack([fewest - 1, most - 1], -1)).astype(np.int64)

    def carry(self, bounds: Sequence[Any], turns: Sequence[Mapping[str, Any]]) -> None:
        """Widen what a loop over ``range(*bounds)`` adds the same to in every turn; ``turns``: what its frame had as the first
        two turns began, and has as the third does.
        """
        first, last = (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
        step = self._of(bounds[2] if len(bounds) == 3 else 1)
        if (step[:, 0] <= 0).any():
            return
        still = np.maximum(self._turns(self._of(first), self._of(last), step) - 2, 0)
        for name, value in turns[2].items():
            values = [one.get(name) for one in turns]
            if not all(counts(one) for one in values) or len({type(one) for one in values}) > 1 or value is values[1]:
                continue
            start, then, here = (self._of(one) for one in values)
            shift = here - then
            if not shift.any() or (shift != then - start).any():
                continue
            low = here[:, 0] + np.minimum(shift[:, 0] * still[:, 0], shift[:, 0] * still[:, 1])
            high = here[:, 1] + np.maximum(shift[:, 1] * still[:, 0], shift[:, 1] * still[:, 1])
            far = far_of(value) or Far(self, here, value.bits == 64)
            value.far = Far(self, np.stack([low, high], -1), far.wide, far.exact, far.over).checked(name)


class Far:
    """The intervals of a scalar, or of all elements of a tensor: (rows, 2).

    ``wide``: rows that have 64 bits (True: all); ``exact``: no interval on the way here was wider than it need be.
    """

    __slots__ = ("exact", "larger", "over", "share", "values", "wide")

    def __init__(self, larger: Larger, values: Any, wide: Any = False, exact: bool = True, over: bool = False) -> None:
        self.larger, self.values, self.wide, self.exact = larger, values, wide, exact
        #: Whether it comes from an operation that has left 32 bits, which was noted there.
        self.over = over
        #: (x, d, m) of what is x // d * m, with d and m as their intervals; None otherwise.
        self.share: tuple[Far, Any, Any] | None = None

    def widened(self) -> Far:
        """As 64 bits."""
        return Far(self.larger, self.values, True, self.exact, self.over)

    def narrowed(self) -> Far:
        """As 32 bits."""
        return Far(self.larger, self.values, False, self.exact, self.over).checked()

    def checked(self, name: str = "") -> Far:
        """After 32-bit arithmetic: an overflow is noted, or an IntegerError with ``over``; then it may be anything.

        ``name``: of what a loop adds to.
        """
        indices, frame = self.larger.indices, _kernel_frame()
        place = (frame.f_code.co_filename, frame.f_lineno, frame.f_lasti)
        indices.checked.add(place)
        if self.wide is True or (self.values.max(initial=0) < _LIMIT and self.values.min(initial=0) >= -_LIMIT):
            return self
        beyond = ((self.values[:, 1] >= _LIMIT) | (self.values[:, 0] < -_LIMIT)) & ~np.asarray(self.wide, bool)
        if not beyond.any():
            return self
        single = beyond & self.larger.single & (np.abs(self.values).max(1) <= self.larger.most)
        certain = bool(single.any())
        if certain and self.exact and not self.over and place not in indices.found:
            indices.found[place] = self._overflow(frame, int(np.argmax(single)), name)
            if self.larger.fails:
                error = IntegerError("a 32-bit integer overflows in a larger problem")
                error.over = indices.found[place]
                raise error
        elif not self.over and place not in indices.found:
            indices.undecided.add(place)
        wrapped = np.where(beyond[:, None], np.array([[-_LIMIT, _LIMIT - 1]]), self.values)
        return Far(self.larger, wrapped, self.wide, self.exact, self.over or certain)

    def _overflow(self, frame: types.FrameType, row: int, name: str) -> Overflow:
        label = self.larger.labels[row]
        whole = self.larger.labels.index(label)
        low, high = (int(end) for end in self.values[whole])
        return Overflow(_outwards(frame), _columns(frame), label, low, high, name)


def far_of(value: Any) -> Far | None:
    """The intervals of a scalar or tensor; None where it has none."""
    return getattr(value, "far", None)


def _rows(value: Any) -> Any:
    """Intervals of an operand; of one without its values as they are."""
    far = far_of(value)
    if far is not None:
        return far.values
    return constant(int(value), int(value)) if isinstance(value, int) else ends(value.a)


def _widths(several: Sequence[Far]) -> Any:
    """Rows in which one of them has 64 bits."""
    rows: Any = False
    for far in several:
        rows = far.wide if rows is False else rows if far.wide is False else np.asarray(rows) | far.wide
    return rows


def combined(name: str, left: Any, right: Any, wide: bool) -> Far | None:
    """Intervals of ``left`` (operation) ``right``; None where neither has any, or the operation is not followed."""
    one, two = far_of(left), far_of(right)
    known = one if one is not None else two
    if known is None or name not in OPERATIONS or isinstance(left, float) or isinstance(right, float):
        return None
    a, b = _rows(left), _rows(right)
    values = computed(name, a, b)
    if values.shape != known.values.shape:
        values = np.broadcast_to(values, known.values.shape)
    if name == "sub" and two is not None and two.share is not None and two.share[0] is one:
        values = _rest(two.share, values)
    # A comparison may go either way; what bounds a number has its reason; a remainder may be any.
    known_ends = [far is None or far.exact for far in (one, two)]
    exact = all(known_ends) or name in COMPARISONS or (name == "mod" and any(known_ends))
    if name in ("min", "max") and any(known_ends) and not exact:
        exact = _bounds(name, *((a, b) if known_ends[0] else (b, a)))
    both = [far for far in (one, two) if far is not None]
    over = name not in COMPARISONS and any(far.over for far in both)
    rows = wide or _widths(both)
    found = Far(known.larger, values, rows, exact, over).checked()
    if name == "floordiv" and one is not None:
        found.share = one, b, constant(1, 1)
    elif name == "mul" and (share := one.share if one is not None and one.share else two.share if two else None):
        found.share = *share[:2], share[2] * (b if one is not None and one.share else a)
    return found


def _bounds(name: str, known: Any, other: Any) -> bool:
    """Whether the smaller or larger of a ``known`` interval and a wider ``other`` is as ``known`` on the side that is not bounded, too."""
    return bool((other[:, 0] >= known[:, 0]).all() if name == "min" else (other[:, 1] <= known[:, 1]).all())


def _rest(share: tuple[Far, Any, Any], values: Any) -> Any:
    """Of x - x // d * m: a remainder in the rows where m is d; ``values`` elsewhere."""
    x, d, m = share
    alike = (d == m).all(1) & (d[:, 0] == d[:, 1]) & (d[:, 0] > 0) & (x.values[:, 0] >= 0)
    return np.where(alike[:, None], np.maximum(np.minimum(values, d - 1), 0), values)


def summed(x: Any, count: int, wide: bool) -> Far | None:
    """Intervals of a sum of ``count`` elements of ``x``, or of fewer of them; of truth values any number may hold."""
    far = far_of(x)
    if far is None:
        return None
    values = computed("union", far.values, computed("mul", far.values, constant(count, count)))
    counted = bool((far.values >= 0).all() and (far.values <= 1).all())
    return Far(far.larger, values, wide or far.wide, far.exact and counted, far.over).checked()


def near(index: Any) -> Any:
    """``index`` without its intervals."""
    return index if far_of(index) is None else index.near()


def counts(value: Any) -> bool:
    """Whether it is an integer scalar or tensor of a kernel, of 32 or 64 bits."""
    return hasattr(type(value), "sampled") and value.bits in (32, 64)


def frames() -> tuple[tuple[str, int], ...]:
    """(file, line) of what is running, innermost first, without the caller."""
    return _outwards(sys._getframe(2))


def _outwards(frame: types.FrameType | None) -> tuple[tuple[str, int], ...]:
    found: list[tuple[str, int]] = []
    while frame is not None and len(found) < _DEPTH:
        found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _kernel_frame() -> types.FrameType:
    """The innermost frame that is not the emulator's own."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_HERE) and frame.f_back is not None:
        frame = frame.f_back
    found: types.FrameType = frame
    return found


def _columns(frame: types.FrameType) -> tuple[int, int] | None:
    """Columns of the running expression in its line; None where it has several lines."""
    for number, place in enumerate(frame.f_code.co_positions()):
        if 2 * number == frame.f_lasti:
            line, end_line, column, end_column = place
            if line == end_line == frame.f_lineno and column is not None and end_column is not None:
                return column, end_column
    return None
