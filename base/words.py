"""Words for people: hints for one that is not known, numbers in few digits, and lines that fit."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def close_matches(word: object, known: Iterable[str], most: int = 3, cutoff: float = 0.4) -> list[str]:
    """Up to ``most`` of ``known`` that resemble ``word``, best first."""
    return difflib.get_close_matches(str(word), list(known), most, cutoff)


def did_you_mean(word: object, known: Iterable[str], most: int = 3, cutoff: float = 0.4) -> str:
    """'; did you mean X or Y?', or "" where nothing resembles ``word``; to be put behind 'unknown ...'."""
    close = close_matches(word, known, most, cutoff)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def nearest(word: object, known: Iterable[str]) -> str:
    """`did_you_mean`, or '; known: ...' with all of ``known`` where nothing resembles ``word``."""
    words = tuple(known)
    return did_you_mean(word, words) or f"; known: {', '.join(words)}"


def folded(line: str, width: int, indent: int) -> str:
    """``line`` in lines of at most ``width`` characters, those after the first indented; breaks at spaces and after commas."""
    if len(line) <= width:
        return line
    out = [""]
    for piece in re.findall(r"\s+|[^\s,]*,|[^\s,]+", line):
        if len(out[-1]) + len(piece.rstrip()) > width and out[-1].strip():
            out.append(" " * indent)
        if piece.strip() or out[-1].strip() or len(out) == 1:
            out[-1] += piece
    return "\n".join(part.rstrip() for part in out)


def fitted(text: str, width: int) -> str:
    """``text`` in lines of at most ``width`` characters: what goes on stands under the text behind a line's first gap.

    Bars of blocks at the ends of lines give way first, in all lines of a paragraph or in none: cut short, they would lie.
    """
    return "\n\n".join(_fitted_paragraph(part.split("\n"), width) for part in text.split("\n\n"))


def _fitted_paragraph(lines: list[str], width: int) -> str:
    if any(len(line) > width and line.endswith("█") for line in lines):
        lines = [line.rstrip("█ ") for line in lines]
    return "\n".join(folded(line, width, _hanging(line, width)) for line in lines)


def _hanging(line: str, width: int) -> int:
    """Column at which what does not fit on ``line`` goes on: behind its label where it has one, else two to the right of its start."""
    label = re.match(r" *\S+(?: \S+)? {2,}(?=\S)", line)
    if label and label.end() <= width // 3:
        return label.end()
    return len(line) - len(line.lstrip()) + 2


def significant(value: float) -> str:
    """Three digits, or the whole number where it has more."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def percent_more(share: float) -> str:
    """``share`` (0.05: five percent more) with its sign and one decimal; what rounds to nothing has no minus."""
    text = f"{share:+.1%}"
    return "+0.0%" if text == "-0.0%" else text
