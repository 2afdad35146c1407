"""What a rule is: the rows of one GPU looked up by benchmark and parameters, and the answer with what it rests on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilecast.validation.lab.calibrate.cases import Value
from tilecast.validation.lab.calibrate.store import Row


@dataclass(frozen=True, slots=True)
class Found:
    """A rule's answer: the value, its range, the rows it came from, and what must be said with it."""

    value: float
    low: float
    high: float
    rows: tuple[Row, ...]
    note: str = ""


class Table:
    """The rows of one GPU, looked up by benchmark and parameters; later rows replace earlier ones."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[tuple[str, str, str, str], Row] = {}
        for row in rows:
            self._rows[(row.group, row.benchmark, row.params, row.quantity)] = row
        self._params: dict[str, dict[str, Value]] = {row.params: json.loads(row.params) for row in self._rows.values()}

    def all(self, place: str, quantity: str, **params: Value | tuple[Value, ...]) -> list[Row]:
        """Rows of ``place`` ("group/benchmark") with these parameters; a tuple allows any of its values."""
        group, benchmark = place.split("/")
        return [
            row
            for (g, b, text, q), row in self._rows.items()
            if (g, b, q) == (group, benchmark, quantity) and _matches(self._params[text], params)
        ]

    def one(self, place: str, quantity: str, **params: Value) -> Row | None:
        """The single row with these parameters, or None; LookupError when they leave a choice."""
        found = self.all(place, quantity, **params)
        if len(found) > 1:
            raise LookupError(f"{place} {quantity} {params}: {len(found)} rows")
        return found[0] if found else None

    def params(self, row: Row) -> dict[str, Value]:
        """A row's parameters."""
        return self._params[row.params]


def _matches(have: Mapping[str, Value], wanted: Mapping[str, Value | tuple[Value, ...]]) -> bool:
    return all(
        have.get(key) in value if isinstance(value, tuple) else have.get(key) == value for key, value in wanted.items()
    )


Rule = Callable[[Table], Found | None]


def spread(rows: Sequence[Row | None], how: Callable[[float], float] = lambda x: x, note: str = "") -> Found | None:
    """The first row's value through ``how``, the range over all of them and their repeats; None when any is missing."""
    have = [row for row in rows if row is not None]
    if not have or len(have) < len(rows):
        return None
    ends = [how(x) for row in have for x in (row.low, row.value, row.high)]
    return Found(how(have[0].value), min(ends), max(ends), tuple(have), note)


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(intercept, slope) of the least-squares line through at least two points with different abscissas."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope
