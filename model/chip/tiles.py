"""Which tiles a workload has: blocks per query tile, how many of them cross a mask boundary, useful work.

All heads and batches look alike, so the tiles of one head describe them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tilecast.model.kernel.workload import Workload

#: Query tiles of one head whose block counts are listed one by one; longer sequences are sampled evenly.
_MOST_LISTED = 2048
_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HeadTiles:
    """Tiles of one (batch, head): iterations of each listed tile, and how many tiles each stands for."""

    iterations: NDArray[np.int64]
    masked: NDArray[np.int64]
    weight: float
    count: int
    #: Score elements of each listed tile's blocks that lie inside the tensors (rows that exist times keys that exist).
    inside: NDArray[np.int64]

    @property
    def total_iterations(self) -> float:
        """Loop iterations of all tiles of the head."""
        return float(self.iterations.sum()) * self.weight

    @property
    def elements_inside(self) -> float:
        """Score elements of all blocks of the head that lie inside the tensors."""
        return float(self.inside.sum()) * self.weight


def blocks_seen(
    low: _Ints, high: _Ints, diagonal: int, seqlen_k: int, left: int, right: int, keys: int
) -> tuple[_Ints, _Ints, _Ints, _Ints]:
    """Of ``keys`` keys each the first block that one of the rows ``low`` to ``high`` sees a key of and the block after the last, and the same
    of those blocks of which every row sees every key: others cross an edge of the mask or the end of the keys, which needs the same masking.

    Row i sees keys from ``left`` before to ``right`` after i + ``diagonal``.
    """
    after, before = (np.clip(row + diagonal + right + 1, 0, seqlen_k) for row in (low, high))
    least, most = (np.clip(row + diagonal - left, 0, seqlen_k) for row in (low, high))
    return least // keys, -(-before // keys), -(-most // keys), after // keys


@lru_cache(maxsize=256)
def head_tiles(workload: Workload, rows: int, keys: int, *, first_masked: bool = False) -> HeadTiles:
    """Tiles of ``rows`` query rows over blocks of ``keys`` keys for one head, in row order; ``first_masked``: one is always masked.

    Causal masks are aligned bottom right: row i sees keys up to i + seqlen_k - seqlen_q.
    """
    count = -(-workload.seqlen_q // rows)
    index = np.arange(count) if count <= _MOST_LISTED else np.linspace(0, count - 1, _MOST_LISTED).astype(np.int64)
    low_row = index * rows
    high_row = np.minimum(low_row + rows, workload.seqlen_q)
    sk = workload.seqlen_k
    left = right = far = sk + workload.seqlen_q
    if workload.mask == "causal":
        right = 0
    elif workload.mask == "window" and workload.window is not None:
        left, right = (limit if limit >= 0 else far for limit in workload.window)
    first_block, last_block, first_whole, last_whole = blocks_seen(
        low_row, high_row - 1, sk - workload.seqlen_q, sk, left, right, keys
    )
    blocks = np.maximum(last_block - first_block, 0)
    whole = np.maximum(last_whole - first_whole, 0)
    masked = np.clip(np.maximum(blocks - whole, int(first_masked)), 0, blocks)
    keys_inside = np.minimum(last_block * keys, sk) - first_block * keys
    inside = np.where(blocks > 0, (high_row - low_row) * keys_inside, 0)
    return HeadTiles(blocks, masked, count / len(index), count, inside)
