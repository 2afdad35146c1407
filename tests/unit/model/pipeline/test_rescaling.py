"""How often O is rescaled: the chain of references against draws, and what stands in where independent scores never do it."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from tilecast.model.pipeline.rescaling import independent_share, rescale_share


@cache
def drawn_maxima(blocks: int, warps: int) -> tuple[NDArray[np.float64], ...]:
    """Of 32 rows of ``blocks`` of 128 normal scores."""
    rng = np.random.default_rng(0)
    return tuple(np.asarray(rng.standard_normal((warps, 32, 128)).max(axis=2)) for _ in range(blocks))


def drawn(threshold: float, blocks: int = 64, warps: int = 400) -> float:
    """The share in draws."""
    references = np.full((warps, 32), -math.inf)
    steps = 0.0
    for block, maxima in enumerate(drawn_maxima(blocks, warps)):
        moves = maxima > references + threshold * math.log(2.0)
        references = np.where(moves, maxima, references)
        steps += moves.any(axis=1).mean() if block else 0.0
    return float(steps / (blocks - 1))


@pytest.mark.parametrize("threshold", [0.0, 0.75, 2.0])
def test_independent_scores_rescale_as_often_as_drawn_ones(threshold: float) -> None:
    assert independent_share(threshold) == pytest.approx(drawn(threshold), abs=0.02)


def test_the_share_falls_with_the_threshold_to_what_is_reported_at_8() -> None:
    shares = [rescale_share(threshold) for threshold in (0.0, 0.75, 2.0, 4.0, 8.0, 16.0)]
    assert shares == sorted(shares, reverse=True)
    assert independent_share(4.0) < 0.01
    assert shares[3:] == [0.065] * 3
