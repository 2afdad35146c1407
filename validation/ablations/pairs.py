"""Pairs of measured kernels of one shape whose variants differ in exactly one knob."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import combinations

from tilecast.model.families import parse_variant
from tilecast.model.kernel.variant import Variant
from tilecast.validation.ablations.effects import Effect
from tilecast.validation.lab.measure.records import Measured
from tilecast.validation.measured.recorded import Row


@dataclass(frozen=True, slots=True)
class Pair:
    """Two measured rows; the knob that is changed, and the values it is changed from and to."""

    knob: str
    value_from: object
    value_to: object
    row_from: Row
    row_to: Row
    effect: Effect


def changed_knob(one: Variant, other: Variant) -> str | None:
    """The knob in which two variants of a family differ; None where they differ in none or in several."""
    if type(one) is not type(other):
        return None
    differing = [f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)]
    return differing[0] if len(differing) == 1 else None


def paired(points: Sequence[Measured]) -> list[tuple[int, int, str]]:
    """(index from, index to, knob) of every pair, in the order of ``points``.

    Paired are rows of one GPU, kernel family, shape and mode.  A kernel measured more than once counts with its last row,
    as `tilecast measure` appends.  A pair goes from the smaller value to the larger (names: alphabetically), so that the
    order of rows does not decide its direction.
    """
    groups: dict[tuple[object, ...], dict[Variant, int]] = {}
    for i, point in enumerate(points):
        key = (point.gpu, point.machine, point.kernel, point.mode, point.workload())
        groups.setdefault(key, {})[parse_variant(point.variant)] = i
    found = []
    for members in groups.values():
        for one, other in combinations(members, 2):
            knob = changed_knob(one, other)
            if knob is not None:
                backwards = getattr(one, knob) > getattr(other, knob)
                first, last = (other, one) if backwards else (one, other)
                found.append((members[first], members[last], knob))
    return sorted(found)


def pairs(rows: Sequence[Row]) -> tuple[Pair, ...]:
    """Every pair of ``rows``, with the levels at which both have a forecast; rows without one take part in none."""
    usable = [row for row in rows if not row.refused]
    return tuple(_pair(usable[one], usable[other], knob) for one, other, knob in paired([row.point for row in usable]))


def _pair(one: Row, other: Row, knob: str) -> Pair:
    measured = one.point.cycles / other.point.cycles
    forecast = {level: cycles / other.cycles[level] for level, cycles in one.cycles.items() if level in other.cycles}
    before, after = (getattr(parse_variant(row.point.variant), knob) for row in (one, other))
    return Pair(knob, before, after, one, other, Effect(measured, measured, forecast))
