"""A space of variants as rows of knob values: a search rules most of them out before they become variants."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import fields
from functools import cached_property
from operator import itemgetter
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class Grid(Generic[V]):
    """Variants of one class in order: a row of values of ``knobs`` to each; all of them have ``fixed``, or the class's defaults, besides."""

    def __init__(
        self, variant: type[V], knobs: tuple[str, ...], rows: Iterable[tuple[Any, ...]], **fixed: object
    ) -> None:
        self.variant, self.knobs, self.rows, self.fixed = variant, knobs, tuple(rows), fixed

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[V]:
        return iter(self.variants)

    @cached_property
    def variants(self) -> tuple[V, ...]:
        """Every row as a variant, made when first asked for."""
        return tuple(map(self._made, self.rows))

    def where(self, knobs: tuple[str, ...], rule: Callable[[V], bool]) -> Grid[V]:
        """The rows whose variants pass ``rule``, which reads no knob but ``knobs`` (none named: all) and is asked once for the same values."""
        values = self._values(knobs)
        known: dict[Hashable, bool] = {}
        rows = []
        for row in self.rows:
            key = values(row)
            passes = known.get(key)
            if passes is None:
                passes = known[key] = rule(self._made(row))
            if passes:
                rows.append(row)
        return Grid(self.variant, self.knobs, rows, **self.fixed)

    def _values(self, knobs: tuple[str, ...]) -> Callable[[tuple[Any, ...]], Hashable]:
        """From a row to what tells its variant from others by ``knobs``."""
        columns = [column for column, knob in enumerate(self.knobs) if knob in knobs]
        return itemgetter(*columns) if columns else lambda row: row

    @cached_property
    def _made(self) -> Callable[[tuple[Any, ...]], V]:
        """From a row to its variant: by position, which takes half as long as by name."""
        plain = self.variant()
        rest = tuple(self.fixed.get(f.name, getattr(plain, f.name)) for f in fields(self.variant))  # type: ignore[arg-type]
        place = {knob: column for column, knob in enumerate(self.knobs)}
        taken = itemgetter(*(place.get(f.name, len(place) + n) for n, f in enumerate(fields(self.variant))))  # type: ignore[arg-type]
        return lambda row: self.variant(*taken(row + rest))
