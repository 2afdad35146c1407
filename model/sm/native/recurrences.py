"""`heaviest_cycle` and `longest_paths`: what `sm/recurrences.py` does, in C where a compiler is at hand (`loop.c`)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain

from tilecast.model.sm import recurrences as in_python
from tilecast.model.sm.native.library import library, pointer
from tilecast.model.sm.recurrences import Arc


def heaviest_cycle(nodes: int, arcs: Sequence[Arc]) -> list[int]:
    """What `heaviest_cycle` of `sm/recurrences.py` returns and raises."""
    native = library()
    if native is None:
        return in_python.heaviest_cycle(nodes, arcs)
    try:
        flat = array("q", chain.from_iterable(arcs))
    except OverflowError:
        return in_python.heaviest_cycle(nodes, arcs)
    best = array("i", [0] * nodes)
    count = native.heaviest_cycle(nodes, len(arcs), pointer(flat), pointer(best))
    # A deadlock, or numbers too large for C: Python says which, or answers.
    return best[:count].tolist() if count >= 0 else in_python.heaviest_cycle(nodes, arcs)


def longest_paths(alone: Sequence[float], links: Sequence[tuple[int, int, float]]) -> tuple[list[float], list[float]]:
    """What `longest_paths` of `sm/recurrences.py` returns."""
    native = library()
    if native is None:
        return in_python.longest_paths(alone, links)
    ends = array("i", [node for src, dst, _ in links for node in (src, dst)])
    cycles = array("d", [cycles for _, _, cycles in links])
    before, after = array("d", bytes(8 * len(alone))), array("d", alone)
    native.longest_paths(len(alone), len(links), pointer(ends), pointer(cycles), pointer(before), pointer(after))
    return before.tolist(), after.tolist()
