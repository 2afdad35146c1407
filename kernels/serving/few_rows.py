"""`tilecast.attention` of few queries, on the serving kernels, which split the keys, or on those of short sequences; of both a tile's rows are
those of a group of heads.

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
from tilecast.kernels.selection import DTYPE_NAMES, capability_of
from tilecast.kernels.serving import operator
from tilecast.kernels.serving.launching import start_all
from tilecast.kernels.starting import on_device

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
#: Keys that are one block of every kernel; those of Hopper then have the same bits, and rounds of tiles of a head of its own on all SMs are over
#: before those which a group shares (data/measured/h200_short_shared.csv).
BLOCK, ROUNDS = 64, 4
#: Rows of a tile of kernels of short sequences, and how many times as many of these there may be as of a head's own, by columns of the kernel, and by
#: most keys: beyond, others are sooner done (data/measured/h200_short_lean.csv, h200_short_wide_forms.csv,
#: h200_short_parts_lengths.csv).
SHORT_TILE = 64
MORE_TILES = {
    64: ((2047, 1.75), (10239, 1.9)),
    128: ((64, 1.5), (512, 1.4), (2047, 1.25), (8191, 1.9)),
    192: ((64, 1.25), (256, 1.0), (640, 0.75)),
    256: ((144, 1.25), (256, 0.8), (512, 0.5)),
}
#: Most keys that kernels of short sequences are asked for.
SHORT_KEYS = 10239
#: Columns of q and k, and of v, that have kernels of their own; others of more than 128 run on those of 256, if any.
OWN_WIDTHS = 192, 128
#: Most rows that a kernel for decoding takes in one tile: where there are kernels of short sequences, it has what keys are more than these take,
#: and of wider heads than they part keys for, more rows.
DECODED_ROWS, PARTED_COLUMNS = 16, 128
#: Keys that these kernels take few queries for, where there are fewer: those which part the keys do so for more (data/measured/h200_short_parts_in_turn.csv).
FEW_AS_KEYS = 1025
_NO_LISTS = (None,) * 8
#: (device index, dtype, head_dim, head_dim_v) for which there is no serving kernel, and those of short sequences for others.
_without: set[Any] = set()
_short_kernels: dict[Any, tuple[tuple[int, int, int, Any], ...]] = {}


def attend(
    q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, left: int, right: int
) -> Callable[..., Any] | None:
    """Write ``out`` and ``lse`` (None: not asked for) if the problem is one of these.

    (batch, heads, seqlen, head_dim) tensors whose rows start at 16 bytes; masks as `registry.reduce_mask` gives them.  Returns what makes of
    the same arguments what was just done, for other tensors like these: (q, k, v, out, lse) -> None, which keeps no tensor, or None where
    there is nothing to launch; None if the problem is none of these.
    """
    seqlen_q, seqlen_k, heads = q.shape[2], k.shape[2], q.shape[1]
    rows = seqlen_q * (heads // k.shape[1])
    few = seqlen_q <= QUERIES and seqlen_k >= KEYS and rows <= ROWS
    wide = max(q.shape[3], v.shape[3]) > PARTED_COLUMNS
    long = seqlen_q * heads <= PARTED_ROWS and seqlen_k >= PARTED_KEYS
    short = seqlen_q < FULL_QUERIES and heads > k.shape[1]
    small = seqlen_q < FULL_QUERIES and seqlen_k <= SHORT_KEYS and not (few and (rows <= DECODED_ROWS or wide))
    if not (few or long or short or small):
        return None
    kind = q.get_device(), q.dtype, q.shape[3], v.shape[3]
    kernels = _short_ones(q, kind) if small else ()
    if kernels and _hardly_more(q, k, v):
        asked = max(seqlen_k, FEW_AS_KEYS) if few else seqlen_k
        for least, most, keys, launch in kernels:
            if least <= rows <= most and asked <= keys:
                launch(q, k, v, out, lse, scale, left, right)
                return launch.started  # type: ignore[no-any-return]
    decoded = bool(kernels) and rows <= DECODED_ROWS and seqlen_k <= KEYS
    if kind in _without or not _wanted():
        return None
    served = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    try:
        shared = few or decoded or (short and _emptier(*served) and not _at_once(*served[:2]))
        if not (shared or (long and _parted(*served, left, right))):
            return None
        operator.into(*served, out.transpose(1, 2), lse, _NO_LISTS, scale, 0.0, seqlen_q, seqlen_k, (left, right))
    except UnsupportedError:
        _without.add(kind)
        return None
    return started


def _short_ones(q: Any, kind: tuple[Any, ...]) -> tuple[tuple[int, int, int, Any], ...]:
    """(fewest rows, most rows, most keys, launch) of the kernels of short sequences for q's device and tensors of such a ``kind``."""
    found = _short_kernels.get(kind)
    if found is None:
        entries: tuple[registry.Entry, ...] = ()
        if isinstance(capability := capability_of(q.device.type, kind[0]), tuple):
            known = tuple(entry for entry in registry.shipped_short() if _asked(entry.family))
            entries = registry.candidates(capability, DTYPE_NAMES[q.dtype], kind[2], kind[3], "window", known)
        found = _short_kernels[kind] = tuple(
            (e.seqlen_q_min, e.seqlen_q_max, e.seqlen_k_max, on_device(registry.launcher(e), kind[0])) for e in entries
        )
    return found


def _hardly_more(q: Any, k: Any, v: Any) -> bool:
    """Whether tiles of kernels of short sequences, which a group shares, are hardly more than those of a head of its own."""
    _, heads, queries, columns = q.shape
    _, heads_kv, keys, _ = k.shape
    widest = max(columns, v.shape[3])
    width = 192 if (columns, v.shape[3]) == OWN_WIDTHS else 64 if widest <= 64 else 128 if widest <= 128 else 256
    more = next((more for longest, more in MORE_TILES[width] if keys <= longest), 0.0)
    shared = -(-queries * (heads // heads_kv) // SHORT_TILE) * heads_kv
    return bool(shared <= more * -(-queries // DENSE_TILE) * heads)


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
    """What `attend` has just done by a serving kernel, for other tensors like these."""
    rows = [x.transpose(1, 2) for x in (q, k, v, out)]
    starts = operator.launches((*rows, lse, *_NO_LISTS), scale, 0.0, q.shape[2], k.shape[2], (left, right))

    def start(q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
        # Addresses are all that is new: extents and strides are those of the transposed tensors above.
        start_all(starts, q, k, v, out, lse, _NO_LISTS)

    return start if starts else None


@functools.cache
def _wanted() -> bool:
    """Whether the user asked for no family that has no serving kernels; read once, as the registry does."""
    return any(_asked(entry.family) for entry in registry.shipped_serving())


def _asked(family: str) -> bool:
    """Whether the user asked for no family, or for this one."""
    return os.environ.get(registry.FAMILY_VARIABLE, "") in ("", family)
