"""How many programs a launch of a causal Hopper kernel starts, and how many turns each takes.

The text of `programs_and_turns` is also in the files that `codegen` writes, whose host asks it: what is forecast is what runs.  So it
takes numbers alone and needs the standard library alone.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heapreplace

#: Products of keys and columns that take as long as the start and the end of a program do, about 3,200 cycles: tiles alike by programs
#: of their own took 1.5 to 2.3 us more each than by programs that stay (data/measured/h100_launches.csv).
_START = 192 * 128


def start_keys(head_dim_qk: int, head_dim_v: int) -> int:
    """Keys of a tile's loop that take as long as the start and the end of a program, which no other tile hides."""
    return _START // max(128, (head_dim_qk + head_dim_v) // 2)


@lru_cache(maxsize=256)
def programs_and_turns(
    seqlen_q: int, seqlen_k: int, heads: int, sms: int, rows: int, keys: int, start: int
) -> tuple[int, int]:
    """(programs, turns of each): 1 turn where every block of `rows` queries has a program of its own, which takes it from whatever SM is
    free first; otherwise two to a pair of a long and a short block, dealt to and fro to no more programs than all turns need.

    Counted in keys, by blocks of `keys`; `start`: what a program of its own costs more.  The shorter of the two is launched.
    """
    last = range(rows + seqlen_k - seqlen_q, rows + seqlen_k, rows)
    tiles = [-(-max(min(end, seqlen_k), 1) // keys) * keys for end in last]
    count, half = len(tiles) * heads, len(tiles) // 2
    if count <= sms:
        return count, 1
    pairs = [*(tiles[i] + tiles[-1 - i] for i in range(half)), *tiles[half : len(tiles) - half]] * heads
    trips = -(-len(pairs) // sms)
    programs = -(-len(pairs) // trips)
    taken = [0] * programs
    for trip in range(trips):
        turn = pairs[trip * programs : trip * programs + programs]
        for i, length in enumerate(turn):
            taken[programs - 1 - i if trip % 2 else i] += length
    if count <= 64 * sms:  # of more, what is left at the end is little
        free = [0] * sms
        for length in reversed(tiles * heads):  # of each head the longest first
            heapreplace(free, free[0] + length + start)
        if max(free) < max(taken):
            return count, 1
    return programs, 2 * trips
