"""Error statistics of predictions: no fitting, no best-of-N, signed bias beside the absolute error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Relative errors of a group: shares, not percent."""

    count: int
    mean: float
    median: float
    p90: float
    worst: float
    bias: float


def summarise(errors: Iterable[float]) -> ErrorSummary:
    """Summary of signed relative errors (predicted / measured - 1); all zero for an empty group."""
    signed = np.asarray(list(errors), dtype=float)
    if not signed.size:
        return ErrorSummary(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    size = np.abs(signed)
    return ErrorSummary(
        int(signed.size), float(size.mean()), float(np.median(size)), float(np.percentile(size, 90)), float(size.max()),
        float(signed.mean()),
    )  # fmt: skip


def grouped(items: Sequence[T], key: Callable[[T], object], error: Callable[[T], float]) -> dict[str, ErrorSummary]:
    """Summaries by group, groups in sorted order."""
    groups: dict[str, list[float]] = {}
    for item in items:
        groups.setdefault(str(key(item)), []).append(error(item))
    return {name: summarise(groups[name]) for name in sorted(groups)}


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's tau-a of two equally long sequences; 0 for fewer than two values."""
    x, y = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if x.size != y.size:
        raise ValueError(f"rank correlation takes sequences of equal length, got {x.size} and {y.size}")
    if x.size < 2:
        return 0.0
    upper = np.triu_indices(x.size, 1)
    product = np.sign(x[upper[0]] - x[upper[1]]) * np.sign(y[upper[0]] - y[upper[1]])
    return float(product.sum() / len(upper[0]))
