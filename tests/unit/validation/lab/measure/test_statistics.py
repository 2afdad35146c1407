"""Medians with their intervals, which differences count, and what a GPU's telemetry adds up to."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast.validation.lab.measure.statistics import TIE, compare, median_interval
from tilecast.validation.lab.measure.telemetry import Telemetry, summarise_samples

VALUES = st.floats(-1e6, 1e6, allow_nan=False)


def coverage(n: int, low: int, high: int) -> float:
    """Chance that the low-th to high-th of n sorted samples (from 0) hold the median of a continuous distribution."""
    return sum(math.comb(n, below) for below in range(low + 1, high + 1)) / 2**n


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_the_interval_covers_the_median_and_the_next_narrower_would_not(confidence: float) -> None:
    for n in range(1, 120):
        _, first, last = median_interval(range(n), confidence)
        low, high = int(first), int(last)
        assert low + high == n - 1, n
        if coverage(n, 0, n - 1) < confidence:  # too few samples for any pair: the whole range
            assert (low, high) == (0, n - 1), n
            continue
        assert coverage(n, low, high) >= confidence, n
        if low + 1 < high - 1:
            assert coverage(n, low + 1, high - 1) < confidence, n


def test_the_interval_of_fifteen_rounds_is_the_textbook_one() -> None:
    # Sign-test tables: ranks 4 and 12 of 15 hold the median with 96.5 %.
    assert median_interval(range(1, 16)) == (8.0, 4.0, 12.0)


def test_random_intervals_hold_the_true_median_as_often_as_they_say() -> None:
    draw = random.Random(1)
    hits = 0
    for _ in range(2000):
        _, low, high = median_interval([draw.expovariate(1.0) for _ in range(15)])
        hits += low <= math.log(2) <= high
    # 96.5 % expected; four standard deviations below it.
    assert hits / 2000 > 0.965 - 4 * math.sqrt(0.965 * 0.035 / 2000)


@given(st.lists(VALUES, min_size=1, max_size=40), st.randoms())
def test_median_and_interval_do_not_depend_on_the_order(samples: list[float], shuffler: random.Random) -> None:
    middle, low, high = median_interval(samples)
    assert low <= middle <= high
    assert middle == pytest.approx(statistics.median(samples), rel=1e-12)
    assert low in samples
    assert high in samples
    mixed = list(samples)
    shuffler.shuffle(mixed)
    assert median_interval(mixed) == (middle, low, high)


def test_equal_samples_have_an_interval_without_width() -> None:
    assert median_interval([7] * 20) == (7.0, 7.0, 7.0)


def test_no_samples_have_no_median() -> None:
    with pytest.raises(ValueError, match="no samples"):
        median_interval([])


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([0.9] * 10, "faster"),
        ([1.1] * 10, "slower"),
        ([1.0] * 10, "tie"),
        ([1 + 0.5 * TIE] * 10, "tie"),  # sure but small
        ([0.5, 0.6, 0.7, 0.8, 1.3, 1.4, 1.5, 0.75], "tie"),  # large but unsure
        ([1 - 1.5 * TIE] * 10, "faster"),
    ],
)
def test_compare_wants_a_difference_both_sure_and_large(ratios: list[float], verdict: str) -> None:
    base = [100.0 + i for i in range(len(ratios))]
    ratio, found = compare([r * b for r, b in zip(ratios, base, strict=True)], base)
    assert found == verdict
    assert ratio == pytest.approx(statistics.median(ratios))


def test_compare_pairs_rounds_so_that_a_common_drift_cancels() -> None:
    drift = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]
    assert compare([0.95 * d for d in drift], drift)[1] == "faster"


def test_compare_refuses_unequal_numbers() -> None:
    with pytest.raises(ValueError, match="got 2 and 3"):
        compare([1.0, 2.0], [1.0, 2.0, 3.0])


def test_telemetry_of_nothing_is_empty() -> None:
    assert summarise_samples([]) == Telemetry()


def test_telemetry_takes_medians_and_reasons_seen_in_a_tenth_of_the_samples() -> None:
    samples = [(1980.0, 300.0 + i, 50.0, 0) for i in range(19)]
    rare = summarise_samples([*samples, (1000.0, 900.0, 90.0, 0x4)])  # 1 of 20
    assert rare == Telemetry(1980.0, 309.5, 50.0, "", 20)
    often = summarise_samples([*samples[:18], (1000.0, 900.0, 90.0, 0x4), (1000.0, 900.0, 90.0, 0x4 | 0x20)])  # 2 and 1
    assert often.throttle == "power cap"
    always = summarise_samples([(1.0, 1.0, 1.0, 0x4 | 0x20)])
    assert always.throttle == "power cap, thermal"


def test_telemetry_ignores_reasons_it_has_no_word_for() -> None:
    assert summarise_samples([(1.0, 1.0, 1.0, 0x10)]).throttle == ""
