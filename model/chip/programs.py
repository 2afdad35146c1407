"""How many programs a launch of a causal Hopper kernel starts, and how many turns each takes.

The text of `soonest_launch`, and of `finer_launch` where kernels can deal so, is also in the files that `codegen` writes, whose host
asks it: what is forecast is what runs.  So they take numbers alone and need the standard library alone.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heapreplace

#: Products of keys and columns that take as long as the start and the end of a program do, about 3,200 cycles: tiles alike by programs
#: of their own took 1.5 to 2.3 us more each than by programs that stay (data/measured/h100_launches.csv).
_START = 192 * 128
#: Bytes of K and V of all heads that L2 (50 MB) keeps for tiles of all of them: with 34 MB the longest tiles first took what counts say,
#: with 67 they lost 2 %, with 134 up to 70 % (the same table).
_KEPT = 40_000_000
#: SMs for each key head, of numbers of four bytes, from which on it does not matter whether L2 keeps all: so many walk the same keys side by side that
#: few bytes are read again.  With 8 to 26 key heads on 132 SMs the longest tiles first took 1 to 2 % less at 134 MB, with 32 they lost 2 to
#: 6 %, with 64 13 to 21 % (the same table); of e4m3 keys, with 32 heads, they took 5 % less (data/measured/h200_longest_first.csv).
_ABREAST = 10


def start_keys(head_dim_qk: int, head_dim_v: int) -> int:
    """Keys of a tile's loop that take as long as the start and the end of a program, which no other tile hides."""
    return _START // max(128, (head_dim_qk + head_dim_v) // 2)


def most_keys(head_dim_qk: int, head_dim_v: int, dtype_bytes: int) -> int:
    """Keys of all heads together up to which the heads may take turns at tiles."""
    return _KEPT // ((head_dim_qk + head_dim_v) * dtype_bytes)


def sms_abreast(dtype_bytes: int) -> int:
    """SMs for each key head from which on the heads may take turns at tiles whatever L2 keeps."""
    return -(-_ABREAST * dtype_bytes // 4)


@lru_cache(maxsize=256)
def soonest_launch(
    seqlen_q: int,
    seqlen_k: int,
    heads: int,
    heads_kv: int,
    sms: int,
    rows: int,
    keys: int,
    start: int,
    most: int,
    abreast: int,
) -> tuple[int, int, int]:
    """(keys of the program that has the most, programs, turns of each) of the launch that is over first, counted in keys.

    Tiles of `rows` queries see blocks of `keys` keys.  1 turn: a program to each tile, on whatever SM is free first, which costs
    `start` more.  An even number: pairs of a long and a short tile, two turns each; an odd one: tiles of all heads together, the
    longest first, where all `heads_kv` have `most` keys at most or `abreast` SMs each.  Both are dealt to and fro.
    """
    together = heads_kv * seqlen_k <= most or abreast * heads_kv <= sms
    last = range(rows + seqlen_k - seqlen_q, rows + seqlen_k, rows)
    count, half = len(last) * heads, len(last) // 2
    # A block more, for what is around the loop.
    tiles = [(-(-max(min(end, seqlen_k), 1) // keys) + 1) * keys for end in last]
    if count <= sms:
        return tiles[-1], count, 1
    if count > 64 * sms:  # what is left at the end is little
        pairs = (len(last) - half) * heads
        trips = -(-pairs // sms)
        return -(-sum(tiles) * heads // sms), -(-pairs // trips), 2 * trips

    def dealt(work: list[int]) -> tuple[int, int, int]:
        """(keys of the program with the most, programs, turns): no more programs than all turns need, unless that takes 2 % longer."""
        turns = -(-len(work) // sms)
        # To and fro: of each two turns a program takes the piece of its number, then the one of its number from the end.
        most = [
            max(sum(work[i :: 2 * programs]) + sum(work[2 * programs - 1 - i :: 2 * programs]) for i in range(programs))
            for programs in (-(-len(work) // turns), sms)
        ]
        few = most[0] <= 1.02 * most[1]
        return (most[0], -(-len(work) // turns), turns) if few else (most[1], sms, turns)

    middle = tiles[half : len(tiles) - half]
    most, programs, trips = dealt([*(tiles[i] + tiles[-1 - i] for i in range(half)), *middle] * heads)
    found = [(most, programs, 2 * trips)]
    if together:
        most, programs, turns = dealt([length for length in reversed(tiles) for _ in range(heads)])
        found.append((most, programs, turns | 1))
    # Free SMs are over no sooner than the longest tile, nor than the mean of them all.
    least = max(tiles[-1] + start, -(-(sum(tiles) * heads + count * start) // sms))
    if least < min(found)[0]:
        free = [0] * sms
        for length in reversed(tiles * heads):  # of each head the longest first
            heapreplace(free, free[0] + length + start)
        found.append((max(free), count, 1))
    return min(found, key=lambda one: one[0])


@lru_cache(maxsize=256)
def finer_launch(
    seqlen_q: int,
    seqlen_k: int,
    heads: int,
    heads_kv: int,
    sms: int,
    rows: int,
    keys: int,
    start: int,
    most: int,
    abreast: int,
) -> tuple[int, int, int, int]:
    """`soonest_launch`, and how many of its turns deal pairs.

    Where those are all, the first heads alone may be dealt in pairs, and then the tiles of the heads that are left one by one, the
    longest of all first, to and fro: as few heads as make the launch even, if the longest program has 1 % less by it.
    """
    longest, programs, turns = soonest_launch(
        seqlen_q, seqlen_k, heads, heads_kv, sms, rows, keys, start, most, abreast
    )
    if turns % 2:
        return longest, programs, turns, 0
    found, enough = (longest, programs, turns, turns), longest - longest // 100
    last = range(rows + seqlen_k - seqlen_q, rows + seqlen_k, rows)
    tiles = [(-(-max(min(end, seqlen_k), 1) // keys) + 1) * keys for end in last]
    count, pairs, mean = len(tiles), (len(tiles) + 1) // 2, sum(tiles) * heads / sms
    if count * heads > 64 * sms or enough < mean:  # little is left at the end
        return found
    each = [tiles[i] + tiles[-1 - i] if 2 * i < count - 1 else tiles[i] for i in range(pairs)]

    def to_and_fro(work: list[int], program: int) -> int:
        """Keys of a program: of each two turns it takes the piece of its number, then the one of its number from the end."""
        return sum(work[program :: 2 * sms]) + sum(work[2 * sms - 1 - program :: 2 * sms])

    for trips in range((pairs * heads - 1) // sms, -1, -1):
        first, gone = divmod(trips * sms, pairs)
        key_heads = heads_kv - first * heads_kv // heads
        if key_heads * seqlen_k > most and abreast * key_heads > sms:
            break
        paired = (each * (first + 1))[: trips * sms]
        rest = [
            0 if head == first and min(i, count - 1 - i) < gone else tiles[i]
            for i in range(count - 1, -1, -1)
            for head in range(first, heads)
        ]
        longest = max(to_and_fro(paired, program) + to_and_fro(rest, program) for program in range(sms))
        if longest <= min(enough, found[0] - 1):
            found = longest, sms, 2 * trips - -len(rest) // sms, 2 * trips
        if longest <= 1.005 * mean:
            break
    return found
