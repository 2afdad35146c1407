"""Into how many parts the query heads that share a key/value head are divided among programs that own keys.

The text of `query_head_parts` is also in the files that `codegen` writes, whose host asks it: what is forecast is what runs.  So it
takes numbers alone and needs the standard library alone.
"""

from __future__ import annotations

from functools import lru_cache

from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine


@lru_cache(maxsize=256)
def query_head_parts(
    group: int, heads_kv: int, seqlen_q: int, seqlen_k: int, left: int, right: int, block: int, once: int, sms: int
) -> int:
    """Parts of `group` query heads: as many as one sequence needs for its programs, of `block` keys, to fill the SMs.

    Not of the batch, on which no sequence's dK and dV may depend: in one that fills the SMs anyway parts only cost, so not more than
    a few percent.  `left` and `right`: keys beside the diagonal that a query sees, -1: no limit; `once`: query rows that take as long
    as what each more program does once.
    """
    rows = min(seqlen_q, seqlen_k) if right >= 0 else seqlen_q  # that a block sees at most, and in the mean
    mean = rows - rows * rows / (2 * seqlen_k) if right >= 0 else rows
    if left >= 0:
        rows = mean = min(rows, left + max(right, 0) + block)
    programs = heads_kv * -(-seqlen_k // block)

    def alone(heads: int) -> float:
        longest, parts = heads * rows + once, -(-group // heads)
        if rows == mean:  # all alike
            return -(-programs * parts // sms) * longest
        return max(longest, programs * (group * mean + parts * once) / sms + longest / 4)

    found = [n for n in range(1, group + 1) if (-(-group // n) - 1) * once <= 0.06 * group * mean]
    least = min(map(alone, found))
    # The fewest parts that are about as good.
    return -(-group // max(n for n in found if alone(n) <= 1.1 * least))


def parts_of(workload: Workload, block: int, once: int, machine: Machine) -> int:
    """`query_head_parts` of a problem on a machine."""
    w, sms = workload, int(machine["chip.sm_count"])
    return query_head_parts(w.group_size, w.heads_kv, w.seqlen_q, w.seqlen_k, *w.limits, block, once, sms)
