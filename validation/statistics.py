"""Error statistics of predictions: no fitting, no best-of-N, signed bias beside the absolute error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

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


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Where measurements lie beside their forecasts, and how often that holds of rows that had no part in it; shares."""

    count: int
    #: Ends of the interval that all rows give: measured over forecast less one.
    low: float
    high: float
    #: Share of rows inside the interval that the rows of other folds give.
    coverage: float


def held_out(ratios: Sequence[float], keys: Sequence[object], share: float = 0.8, folds: int = 5) -> HeldOut:
    """The middle ``share`` of measured over forecast, tried on rows that it was not taken from.

    Rows of one key (a shape) are in one of ``folds`` folds, keys dealt in turns as they first appear.  Zeros for fewer keys
    than folds.
    """
    order = {key: index % folds for index, key in enumerate(dict.fromkeys(keys))}
    if len(order) < folds:
        return HeldOut(0, 0.0, 0.0, 0.0)
    ends = (50.0 * (1.0 - share), 50.0 * (1.0 + share))
    found, fold = np.asarray(ratios, dtype=float), np.asarray([order[key] for key in keys])
    inside = 0
    for held in range(folds):
        low, high = np.percentile(found[fold != held], ends)
        mine = found[fold == held]
        inside += int(((low <= mine) & (mine <= high)).sum())
    low, high = np.percentile(found, ends)
    return HeldOut(int(found.size), float(low) - 1.0, float(high) - 1.0, inside / found.size)


def grouped(items: Sequence[T], key: Callable[[T], object], error: Callable[[T], float]) -> dict[str, ErrorSummary]:
    """Summaries by group, groups in sorted order."""
    groups: dict[str, list[float]] = {}
    for item in items:
        groups.setdefault(str(key(item)), []).append(error(item))
    return {name: summarise(groups[name]) for name in sorted(groups)}


def rank_correlation(a: Sequence[float], b: Sequence[float], noise: Sequence[float] | None = None) -> float:
    """Kendall's tau-a of two equally long sequences; 0 for fewer than two values.

    ``noise``: standard deviations of ``b``'s values; only pairs are compared that differ by more than twice the one of their
    difference, nan where none does.
    """
    x, y = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if x.size != y.size:
        raise ValueError(f"rank correlation takes sequences of equal length, got {x.size} and {y.size}")
    if x.size < 2:
        return 0.0
    upper = np.triu_indices(x.size, 1)
    product = np.sign(x[upper[0]] - x[upper[1]]) * np.sign(y[upper[0]] - y[upper[1]])
    if noise is not None:
        product = product[np.abs(y[upper[0]] - y[upper[1]]) > 2.0 * _of_difference(noise)]
    return float(product.sum() / product.size) if product.size else math.nan


def repeated_rank_correlation(measured: Sequence[float], noise: Sequence[float]) -> float:
    """Kendall's tau that times drawn anew, about normal with standard deviations ``noise`` (> 0), have with ``measured`` in the mean:
    what a forecast without error would reach."""
    y = np.asarray(measured, dtype=float)
    upper = np.triu_indices(y.size, 1)
    apart = np.abs(y[upper[0]] - y[upper[1]]) / _of_difference(noise)
    # The order of two stays with probability (1 + erf(apart / sqrt 2)) / 2.  Equal ones have no order to keep.
    return math.fsum(math.erf(float(one) / math.sqrt(2.0)) for one in apart) / len(apart)


#: Standard deviation of the median of so many normal values over their mean range.
_MEDIAN_OF_RANGE = {7: 0.459 / 2.704, 9: 0.408 / 2.970}


def median_noise(low: float, high: float, rounds: int) -> float:
    """Standard deviation of the median of 7 or 9 ``rounds`` that lay between ``low`` and ``high``, were they normal."""
    return _MEDIAN_OF_RANGE[rounds] * (high - low)


def _of_difference(noise: Sequence[float]) -> npt.NDArray[np.float64]:
    """Standard deviation of the difference of each pair of values with those of ``noise``."""
    spread = np.asarray(noise, dtype=float)
    upper = np.triu_indices(spread.size, 1)
    return np.asarray(np.hypot(spread[upper[0]], spread[upper[1]]), dtype=np.float64)
