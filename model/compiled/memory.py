"""Bytes a launch moves from and to memory: Q and O once, K and V again whenever L2 has lost them in between."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from tilecast.model.compiled.counts import Tile, key_blocks
from tilecast.model.workload import Workload

#: Share of L2 that keeps K and V for later waves: the two halves of the chip hold copies of what both read.
_KEPT = 0.5


def memory_traffic(work: Workload, waves: Iterable[Sequence[Tile]], rows: int, l2_bytes: float) -> tuple[float, float]:
    """(bytes of one launch, share of the K and V bytes that SMs copy which comes from memory).

    The tiles (query block, head) of ``rows`` rows run in ``waves``, each on all SMs at once.
    """
    size = work.dtype_bytes
    per_key = (work.head_dim_qk + work.head_dim_v) * size
    room = _KEPT * l2_bytes
    cached: OrderedDict[int, float] = OrderedDict()
    held = 0.0
    once = float(size * work.batch * work.heads_q * work.seqlen_q * (work.head_dim_qk + work.head_dim_v))
    missed = copied = 0.0
    for wave in waves:
        wanted: dict[int, float] = {}
        for block, head in wave:
            first, end, _, _ = key_blocks(work, block * rows, rows, 1)
            group = head // work.group_size
            copied += float(end - first) * per_key
            wanted[group] = max(wanted.get(group, 0.0), float(end - first) * per_key)
        for group, need in wanted.items():
            have = cached.pop(group, 0.0)
            held -= have
            missed += max(0.0, need - have)
            cached[group] = max(need, have)
            held += cached[group]
        # What this wave streams (its Q and O) passes through the same cache.
        streamed = len(wave) * rows * per_key
        while cached and held + streamed > room:
            held -= cached.popitem(last=False)[1]
    return once + missed, min(1.0, missed / copied)
