"""Variants as text for kernel classes that no verb ranks: "tile_m=32,warps=4" onto a variant to start from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from tilecast.base.words import nearest
from tilecast.model.kernel.variant import BOOLEANS
from tilecast.model.kernel.verdict import VariantError

V = TypeVar("V")


def parse_knobs(
    text: str, base: V, check_family: Callable[[str], None], value_of: Callable[[str, str, object], object]
) -> V:
    """``base`` with the knobs that ``text`` names; ``value_of`` makes a value of (knob, text, current value).

    Raises VariantError with the nearest names for an unknown family, knob or value.
    """
    given: Any = base
    head, colon, rest = text.partition(":")
    if colon and "=" not in head:
        text = f"family={head.strip()}" + (f",{rest}" if rest.strip() else "")
    knobs = [f.name for f in fields(given) if f.name != "family"]
    changes: dict[str, object] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        key = key.replace("-", "_")
        if not equals or not value:
            raise VariantError(f"--variant: expected knob=value, got '{part}'")
        if key == "family":
            check_family(value)
            continue
        if key not in knobs:
            raise VariantError(f"--variant: family {given.family} has no knob '{key}'{nearest(key, knobs)}")
        if key in changes:
            raise VariantError(f"--variant: knob '{key}' is given twice")
        changes[key] = value_of(key, value, getattr(given, key))
    return replace(given, **changes)  # type: ignore[no-any-return]


def value_like(key: str, text: str, current: object) -> Any:
    """``text`` as a value of the kind that knob ``key`` has now: a boolean, a number, a word; VariantError names the kind."""
    kind = (
        "true or false" if isinstance(current, bool) else "a whole number" if isinstance(current, int) else "a number"
    )
    try:
        return BOOLEANS[text.lower()] if isinstance(current, bool) else type(current)(text)  # type: ignore[call-arg]
    except (KeyError, ValueError):
        raise VariantError(f"--variant: knob '{key}' takes {kind}, got '{text}'") from None


def check_value(
    key: str, text: str, value: Any, choices: Sequence[object] | None = None, limits: tuple[float, float] | None = None
) -> None:
    """VariantError unless ``value``, made of ``text``, is one of ``choices`` and within ``limits``, both ends allowed."""
    if choices and value not in choices:
        raise VariantError(f"--variant: knob '{key}' takes one of {', '.join(map(str, choices))}, got '{text}'")
    if limits and not limits[0] <= float(value) <= limits[1]:
        raise VariantError(f"--variant: knob '{key}' takes {limits[0]:g} to {limits[1]:g}, got '{text}'")


def family_named(text: str) -> str | None:
    """The family that a variant's text names, "family=..." or "...:"; None where it names none."""
    head, colon, _ = text.partition(":")
    if colon and "=" not in head:
        return head.strip()
    given = (part.partition("=") for part in text.split(","))
    return next((value.strip() for key, _, value in given if key.strip() == "family"), None)
