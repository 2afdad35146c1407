"""Bars on a time axis drawn with characters: one row of cells a lane."""

from __future__ import annotations


def ruler(length: float, cells: int, parts: int) -> str:
    """The axis over a row of ``cells`` between two frame characters: ``parts`` marks from 0, and ``length`` at the end."""
    text = [" "] * (cells + 2)
    for n in range(parts):
        mark = f"{length * n / parts:.0f}"
        at = 1 + cells * n // parts
        text[at : at + len(mark)] = mark
    end = f"{length:.0f}"
    return "".join(text)[: cells + 2 - len(end)].ljust(cells + 2 - len(end)) + end


def draw_bar(
    row: list[str], start: float, end: float, label: str, *, short: str = "", narrow: str = "#", least: int = 1
) -> None:
    """Draw a bar from ``start`` to ``end``, both in cells of ``row``, over whatever is there.

    ``[label==]``: ``<`` opens a bar that began left of the row, ``>`` closes one that goes on beyond it.  Where ``label`` does
    not fit, as much of ``short`` (default: of it) as does; a bar of one or two cells is made of ``narrow``, and every bar that
    touches the row takes ``least`` cells.
    """
    if end <= 0 or start >= len(row):
        return
    first = max(0, round(start))
    last = min(len(row), max(first + least, round(end)))
    size = last - first
    if size <= 0:
        return
    inner = size - 2
    if inner <= 0:
        row[first:last] = list(narrow * size)
        return
    body = label if len(label) <= inner else (short or label)[:inner]
    # Half a cell over the edge is rounding, not a bar that goes on.
    opening, closing = "<" if start < -0.5 else "[", ">" if end > len(row) + 0.5 else "]"
    row[first:last] = list(opening + body.center(inner, "=") + closing)
