"""`play`: programs that take turns, in C where a compiler is at hand (`turns.c`), else in Python; the digits are the same."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from pathlib import Path

from tilecast.base.native import load_native
from tilecast.model.sm.native.library import pointer
from tilecast.model.training.turns import in_python

_SOURCE = Path(__file__).with_name("turns.c")
_DONE = 0


def library() -> ctypes.CDLL | None:
    """turns.c as a library; None where there is no compiler."""
    return load_native(_SOURCE)


def play(
    cycles: Sequence[float], heads: int, abreast: int, query_heads: int, turn: float, slots: int
) -> tuple[float, float]:
    """What `play` of `in_python` returns."""
    native = library()
    if native is not None:
        given, found = array("d", cycles), array("d", (0.0, 0.0))
        result = native.play(
            pointer(given), len(given), heads, abreast, query_heads,
            ctypes.c_double(turn), slots, pointer(found),
        )  # fmt: skip
        if result == _DONE:
            return found[0], found[1]
    return in_python.play(cycles, heads, abreast, query_heads, turn, slots)
