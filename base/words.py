"""Words for people: hints for one that is not known, and lines that fit."""

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
