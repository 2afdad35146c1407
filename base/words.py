"""Hints for a word that is not known: the nearest ones that are."""

from __future__ import annotations

import difflib
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
