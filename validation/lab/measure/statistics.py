"""Medians with intervals that assume nothing about the distribution, and which differences count."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Differences below this share are ties whatever the intervals say: runs minutes apart differ by as much.
TIE = 0.02


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """(median, low, high): order statistics that hold the median with at least ``confidence`` (binomial).

    With fewer than six samples no pair of order statistics is that sure: the interval is then the whole range.

    >>> median_interval([3, 1, 2])
    (2.0, 1.0, 3.0)
    """
    if not samples:
        raise ValueError("the median of no samples does not exist")
    ordered = sorted(float(s) for s in samples)
    n = len(ordered)
    middle = 0.5 * (ordered[(n - 1) // 2] + ordered[n // 2])
    rank, below = 0, 0.0
    # P(fewer than k of n samples lie under the median) is the lower tail of a fair coin.
    for k in range(n // 2):
        below += math.comb(n, k) / 2**n
        if 2 * below > 1 - confidence:
            break
        rank = k + 1
    low, high = (rank - 1, n - rank) if rank else (0, n - 1)
    return middle, ordered[low], ordered[high]


def compare(a: Sequence[float], b: Sequence[float]) -> tuple[float, str]:
    """Paired samples of two kernels measured in turns: (median of a/b, "faster", "slower" or "tie")."""
    if len(a) != len(b):
        raise ValueError(f"paired samples come in equal numbers, got {len(a)} and {len(b)}")
    ratio, low, high = median_interval([x / y for x, y in zip(a, b, strict=True)])
    if low <= 1.0 <= high or abs(ratio - 1.0) <= TIE:
        return ratio, "tie"
    return ratio, "faster" if ratio < 1.0 else "slower"
