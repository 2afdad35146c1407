"""Into how many parts the query heads that share a key/value head are divided among programs that own keys, and keys among programs that own queries.

The text of `query_head_parts` and of `part_keys` is also in the files that `codegen` writes, whose host asks them: what is forecast is what runs.
So they take numbers alone and need the standard library alone.
"""

from __future__ import annotations

from functools import lru_cache

from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine


@lru_cache(maxsize=256)
def query_head_parts(
    group: int,
    heads_kv: int,
    seqlen_q: int,
    seqlen_k: int,
    left: int,
    right: int,
    block: int,
    once: int,
    beside: float,
    sms: int,
) -> int:
    """Parts of `group` query heads that take least time in the mean over batches of 1, 2, 4 and so on up to 16k tokens.

    Not in the batch at hand, on which no sequence's dK and dV may depend: the more parts, the sooner few sequences are done, whose
    programs do not fill the SMs, and the more bytes of dK and dV go to memory and back for many.  `left` and `right`: keys beside the
    diagonal that a query sees, -1: no limit; `block`: keys of a program; `once`: query rows that take as long as what each more
    program does once; `beside`: time of programs that run on SMs which these leave, over that of these.
    """
    rows = min(seqlen_q, seqlen_k) if right >= 0 else seqlen_q  # that a block sees at most, and in the mean
    mean = rows - rows * rows / (2 * seqlen_k) if right >= 0 else rows
    if left >= 0:
        rows = mean = min(rows, left + max(right, 0) + block)
    programs = heads_kv * -(-seqlen_k // block)
    batches = [1 << i for i in range(14) if not i or max(seqlen_q, seqlen_k) << i <= 16384]

    def time(heads: int, batch: int) -> float:
        """Of a pass, in rows of a program's loop; all numbers of an H200."""
        longest, parts = heads * rows + once, -(-group // heads)
        if rows == mean and not beside:  # all alike
            on_sms: float = -(-batch * programs * parts // sms) * longest
        else:
            work = group * mean * (1 + beside) + parts * once
            on_sms = max(longest, batch * programs * work / sms + longest / 4)
        # A row of Q, dO, O and dQ takes memory as long as 2.5 blocks of keys take the SMs; dK and dV of a part are 0.4 of a row.
        moved = group * seqlen_q + (0.4 * parts * seqlen_k if parts > 1 else 0)
        return max(on_sms, 2.5 * batch * heads_kv * moved / sms) + 500  # what starts and ends a pass

    times: dict[int, float] = {}
    for heads in range(group, 0, -1):
        times[heads] = 1.0
        for batch in batches:
            times[heads] *= time(heads, batch)
    least = min(times.values())
    # The fewest parts that are about as good.
    return -(-group // next(heads for heads in times if times[heads] <= 1.03 ** len(batches) * least))


def parts_of(workload: Workload, block: int, once: int, beside: float, machine: Machine) -> int:
    """`query_head_parts` of a problem on a machine."""
    w, sms = workload, int(machine["chip.sm_count"])
    return query_head_parts(w.group_size, w.heads_kv, w.seqlen_q, w.seqlen_k, *w.limits, block, once, beside, sms)


@lru_cache(maxsize=256)
def part_keys(heads_kv: int, rows: int, seqlen_k: int, tile: int, columns: int, sms: int) -> int:
    """Keys of a program that has all `rows` of a head, a multiple of `tile`, that take least time in the mean over batches of 1, 2, 4 and
    so on up to 16k keys.

    Not in the batch at hand, on which no sequence's dQ may depend: the fewer keys, the sooner few sequences are done, and the more sums of dQ
    go to memory and back for many.  `columns`: of a tile of keys.
    """
    # In keys of a program at the memory's pace: what one starts and ends with, some 3 us; of a row Q, dO and O, and its sum to and fro.
    once, row, row_of_sum = 64 * 128 // columns, 0.75, 1.75
    batches = [1 << i for i in range(14) if not i or seqlen_k << i <= 16384]
    tiles = -(-seqlen_k // tile)

    def time(parts: int, batch: int) -> float:
        """Of a pass."""
        programs = batch * heads_kv * parts
        on_sms = -(-programs // sms) * (once + -(-tiles // parts) * tile)
        moved = batch * heads_kv * (seqlen_k + rows * (row_of_sum * parts if parts > 1 else row)) / sms
        return max(float(on_sms), moved) + (3 if parts > 1 else 2) * once

    best, least = tiles, 0.0
    for parts in range(1, min(tiles, 2 * sms) + 1):
        if parts > 1 and -(-tiles // parts) == -(-tiles // (parts - 1)):
            continue
        mean = 1.0
        for batch in batches:
            mean *= time(parts, batch)
        if not least or mean < least:
            best, least = -(-tiles // parts), mean
    return best * tile
