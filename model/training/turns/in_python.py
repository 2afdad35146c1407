"""The rule by which programs that take turns are dealt to slots, program by program.  `turns.c` says the same in C."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import inf


def play(
    cycles: Sequence[float], heads: int, abreast: int, query_heads: int, turn: float, slots: int
) -> tuple[float, float]:
    """(cycles until the slot that is done last is free, cycles that programs wait in all) of ``heads`` heads.

    ``cycles`` are of one head's programs in the order they start, each on the slot that is free first; ``abreast`` heads take
    turns at starting one.  A program begins with each of its ``query_heads``, one after the other, ``turn`` cycles after the
    program of the same head that started before it did; ``turn`` 0: no program waits.
    """
    free = [0.0] * slots
    waited = 0.0
    order = [(taken, taken / query_heads) for taken in cycles]
    for first in range(0, heads, abreast):
        # When the program before began with each query head, of each of the heads that take turns.
        before = [[-inf] * query_heads for _ in range(min(abreast, heads - first))]
        for taken, each in order:
            for begun in before:
                start = free[0]
                if turn:
                    end = start
                    for query_head, began in enumerate(begun):
                        begun[query_head] = max(end, began + turn)
                        end = begun[query_head] + each
                    waited += end - start - taken
                else:
                    end = start + taken
                heapq.heapreplace(free, end)
    return max(free), waited
