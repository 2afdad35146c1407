"""The first step of attention that departs from float64, in words."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.emulator.source import Source

#: Lines that a message quotes, and characters of each.
_QUOTED, _WIDTH = 16, 100


@dataclass(frozen=True, slots=True)
class Departure:
    """The first step that is not what float64 says."""

    #: "S", "row maximum", "P", "O", "keys" or "after".
    step: str
    what: str
    #: Places concerned, the most telling first.
    lines: tuple[int, ...]
    #: Whether what hides scores is concerned.
    masks: bool = False


def explained(wrong: str, found: Departure | None, source: Source) -> str:
    """``wrong``, what is wrong with a result, with the first step that departs and the lines that it comes from."""
    if found is None:
        return wrong
    lines = tuple(dict.fromkeys(found.lines))[:_QUOTED]
    quoted = "".join(f"\n               {source.quote(place)[:_WIDTH]}" for place in lines)
    first = f"\n             first step that departs: {found.step}. {found.what}"
    return f"{wrong}{first}" + (f"; it comes from{quoted}" if quoted else "")
