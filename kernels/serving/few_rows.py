"""`tilecast.attention` of few queries, on the serving kernels: they split the keys, and rows of a group share a tile.

Which kernel runs, and how it splits, depends on the lengths of a sequence and its heads alone, never on the batch, but where others give the
same bits: the bits of a result do not either.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from tilecast.kernels import registry
from tilecast.kernels.errors import UnsupportedError
from tilecast.kernels.serving import operator
from tilecast.kernels.serving.launching import start_all

#: Most queries and most rows (queries of all heads that share a key head) that go there whatever becomes of them, and fewest keys.
QUERIES, ROWS, KEYS = 16, 128, 512
#: Most rows of all key heads, where tiles are of at most 192 and SMs about 132, whose keys a kernel may part; fewest keys that it parts, and
#: fewest where it parts none and others would take two turns.
PARTED_ROWS, PARTED_KEYS, SHARED_KEYS = 192 * 132, 2048, 4096
#: SMs, and rows of a tile of other kernels: tiles of a head of its own, where heads of a group share them here; of long causal sequences, and
#: up to how many columns these are others.
SMS, DENSE_TILE, LONG_TILE, LONG_COLUMNS = 132, 128, 192, 96
#: Queries from which on their tiles are two thirds full at least, and how many times as many rows they must have as tiles that a group
#: shares, which cost more for each row (data/measured/h200_short_groups.csv).
FULL_QUERIES, EMPTIER = 256, 1.5
#: Keys that are one block of every kernel, whose results then have the same bits; rounds of tiles of a head of its own on all SMs that are over
#: before those which a group shares (data/measured/h200_short_shared.csv).
BLOCK, ROUNDS = 64, 4
_NO_LISTS = (None,) * 8
#: (device index, dtype, head_dim, head_dim_v) for which there is no kernel.
_without: set[Any] = set()


def attend(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, left: int, right: int) -> bool:
    """Write ``out`` and ``lse`` (None: not asked for) if the problem is one of these; whether it was.

    (batch, heads, seqlen, head_dim) tensors whose rows start at 16 bytes; masks as `registry.reduce_mask` gives them.
    """
    seqlen_q, seqlen_k, heads = q.shape[2], k.shape[2], q.shape[1]
    few = seqlen_q <= QUERIES and seqlen_k >= KEYS and seqlen_q * (heads // k.shape[1]) <= ROWS
    long = seqlen_q * heads <= PARTED_ROWS and seqlen_k >= PARTED_KEYS
    short = seqlen_q < FULL_QUERIES and heads > k.shape[1]
    if not (few or long or short):
        return False
    kind = q.get_device(), q.dtype, q.shape[3], v.shape[3]
    if kind in _without or not _wanted():
        return False
    q, k, v, rows = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), out.transpose(1, 2)
    try:
        if not (
            few or (short and _emptier(q, k, v) and not _at_once(q, k)) or (long and _parted(q, k, v, left, right))
        ):
            return False
        operator.into(q, k, v, rows, lse, _NO_LISTS, scale, 0.0, seqlen_q, seqlen_k, (left, right))
    except UnsupportedError:
        _without.add(kind)
        return False
    return True


def _emptier(q: Any, k: Any, v: Any) -> bool:
    """Whether tiles of a head of its own would be so empty that those which a group shares are sooner done."""
    count, rows = operator.tiles(q, k, v)
    dense = -(-int(q.shape[1]) // DENSE_TILE) * DENSE_TILE * int(q.shape[2])
    return rows > 1 and EMPTIER * count * rows <= dense


def _at_once(q: Any, k: Any) -> bool:
    """Whether another kernel gives the same bits and its tiles, of a head of its own each, are so few in all that they are over sooner."""
    batch, queries, heads, _ = q.shape
    return bool(k.shape[1] <= BLOCK and batch * heads * -(-queries // DENSE_TILE) <= ROUNDS * SMS)


def _parted(q: Any, k: Any, v: Any, left: int, right: int) -> bool:
    """Whether keys are parted so that more SMs have work, or others would take two turns; the lengths and heads of a sequence alone say so."""
    if operator.parted(q, k, v, left):
        return True
    if k.shape[1] < SHARED_KEYS:
        return False
    others = -(-q.shape[1] // (LONG_TILE if q.shape[3] <= LONG_COLUMNS else DENSE_TILE)) * int(q.shape[2])
    return left < 0 and right == 0 and others > SMS and operator.tiles(q, k, v)[0] <= SMS


def started(
    q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, left: int, right: int
) -> Callable[..., None] | None:
    """What `attend` has just done, for other tensors like these: (q, k, v, out, lse) -> None; it keeps no tensor."""
    rows = [x.transpose(1, 2) for x in (q, k, v, out)]
    starts = operator.launches((*rows, lse, *_NO_LISTS), scale, 0.0, q.shape[2], k.shape[2], (left, right))

    def start(q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
        # Addresses are all that is new: extents and strides are those of the transposed tensors above.
        start_all(starts, q, k, v, out, lse, _NO_LISTS)

    return start if starts else None


@functools.cache
def _wanted() -> bool:
    """Whether the user asked for no family that has no serving kernels; read once, as the registry does."""
    family = os.environ.get(registry.FAMILY_VARIABLE, "")
    return not family or any(entry.family == family for entry in registry.shipped_serving())
