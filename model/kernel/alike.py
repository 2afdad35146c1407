"""Which variants of a kernel class share what: so that a search works out once what many variants have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Alike:
    """Knobs of a kernel class by what they leave alone."""

    #: Knobs that leave the loop's demand on every unit alone, at the values with which a tile starts soonest.
    same_demand: Mapping[str, object]
    #: Knobs that leave its operations and their order alone too, at the values with which they wait least.
    least_waiting: Mapping[str, object]
    #: Knobs by which legality tells variants of the space apart, and those by which writable tells legal ones apart: of schedulers
    #: and of shares of emulated exponentials a space has only those that are written.
    fit: tuple[str, ...]
    written: tuple[str, ...]


def with_knobs(variant: V, knobs: Mapping[str, object]) -> V:
    """The variant with some knobs changed; itself where it has them already."""
    for name, value in knobs.items():
        if getattr(variant, name) != value:
            break
    else:
        return variant
    # Searches ask by the thousand: `dataclasses.replace` takes four times as long.
    place, values_of = _knobs(type(variant))  # type: ignore[arg-type]
    values = list(values_of(variant))
    for name, value in knobs.items():
        values[place[name]] = value
    return type(variant)(*values)


@lru_cache(maxsize=16)
def _knobs(variant: type[Any]) -> tuple[dict[str, int], attrgetter[tuple[Any, ...]]]:
    """Where a class has each knob among its arguments, and the function to all their values."""
    names = [f.name for f in fields(variant)]
    return {name: at for at, name in enumerate(names)}, attrgetter(*names)


def key_without(variant: type[Any], knobs: Iterable[str]) -> attrgetter[Any]:
    """The function from a variant of a class to the values of all its knobs but ``knobs``."""
    return _getter(variant, frozenset(knobs))  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _getter(variant: type[Any], knobs: frozenset[str]) -> attrgetter[Any]:
    return attrgetter(*(f.name for f in fields(variant) if f.name not in knobs))
