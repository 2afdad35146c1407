"""Error statistics on sequences small enough to do by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tilecast.validation.statistics import grouped, held_out, rank_correlation, repeated_rank_correlation, summarise


def test_summary_by_hand() -> None:
    found = summarise([0.1, -0.3, 0.2, 0.0])
    assert found.count == 4
    assert found.mean == pytest.approx(0.15)
    assert found.median == pytest.approx(0.15)
    assert found.worst == pytest.approx(0.3)
    assert found.bias == pytest.approx(0.0)
    # 90 % of the way from the first to the last of 0, 0.1, 0.2, 0.3.
    assert found.p90 == pytest.approx(0.27)


def test_bias_keeps_its_sign() -> None:
    assert summarise([-0.1, -0.2]).bias == pytest.approx(-0.15)
    assert summarise([-0.1, -0.2]).mean == pytest.approx(0.15)


def test_empty_group_is_all_zero() -> None:
    found = summarise([])
    assert (found.count, found.mean, found.median, found.p90, found.worst, found.bias) == (0, 0, 0, 0, 0, 0)


def test_groups_are_sorted_and_complete() -> None:
    items = [("b", 0.1), ("a", -0.2), ("b", 0.3)]
    found = grouped(items, lambda i: i[0], lambda i: i[1])
    assert list(found) == ["a", "b"]
    assert (found["a"].count, found["b"].count) == (1, 2)
    assert found["b"].mean == pytest.approx(0.2)


def test_rank_correlation_of_orders() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == 1.0
    assert rank_correlation([1, 2, 3], [30, 20, 10]) == -1.0
    # Of the three pairs, two agree and one does not.
    assert rank_correlation([1, 2, 3], [10, 30, 20]) == pytest.approx(1 / 3)
    # A tie counts neither way.
    assert rank_correlation([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / 3)


def test_rank_correlation_needs_two_values_of_each() -> None:
    assert rank_correlation([1.0], [2.0]) == 0.0
    with pytest.raises(ValueError, match="equal length, got 1 and 2"):
        rank_correlation([1.0], [1.0, 2.0])


def test_an_interval_is_tried_on_shapes_it_was_not_taken_from() -> None:
    rng = np.random.default_rng(0)
    alike = held_out(list(rng.lognormal(0.02, 0.1, 1000)), list(range(1000)))
    assert alike.count == 1000 and alike.coverage == pytest.approx(0.8, abs=0.03)
    assert alike.low == pytest.approx(np.exp(0.02 - 1.2816 * 0.1) - 1, abs=0.02)
    assert alike.high == pytest.approx(np.exp(0.02 + 1.2816 * 0.1) - 1, abs=0.02)
    # Rows of one shape stand in one fold: where every shape has its own error, each row does not vouch for its twin.
    shapes = np.linspace(0.5, 1.5, 5)
    twins = held_out(list(np.repeat(shapes, 20)), list(np.repeat(np.arange(5), 20)))
    assert twins.coverage < 0.7
    assert held_out([1.0, 1.1], [0, 1]).count == 0


def test_orders_within_the_noise_are_not_compared() -> None:
    # 1.0 and 1.01 are apart by less than twice sqrt(2) * 0.01, and both differ from 2.0 by more.
    assert rank_correlation([2, 1, 3], [1.0, 1.01, 2.0], [0.01, 0.01, 0.01]) == 1.0
    assert math.isnan(rank_correlation([1, 2], [1.0, 1.01], [0.01, 0.01]))


def test_repeated_measurements_agree_as_far_as_their_noise_lets_them() -> None:
    drawn, measured, noise = np.random.default_rng(0), np.array([1.0, 1.01, 1.03]), np.array([0.01, 0.02, 0.005])
    found = [rank_correlation(drawn.normal(measured, noise), measured) for _ in range(4000)]
    assert repeated_rank_correlation(measured, noise) == pytest.approx(np.mean(found), abs=0.02)
