"""Sign and size of an effect, by hand."""

from __future__ import annotations

import pytest

from tilecast.validation.ablations.effects import Effect, Score, score


def test_a_range_is_judged_by_its_nearer_end() -> None:
    effect = Effect(1.04, 1.08, {"low": 1.01, "inside": 1.05, "high": 1.10, "wrong": 0.97})
    assert [effect.points(level) for level in effect.forecast] == pytest.approx([3.0, 0.0, 2.0, 7.0])
    assert [effect.sign_right(level) for level in effect.forecast] == [True, True, True, False]
    assert effect.measured == pytest.approx((1.04 * 1.08) ** 0.5)


@pytest.mark.parametrize(
    ("low", "high", "clear"),
    [(1.031, 1.031, True), (1.029, 1.029, False), (1.02, 1.20, False), (0.96, 0.965, True), (0.90, 0.98, False),
     (0.9, 1.1, False)],
)  # fmt: skip
def test_an_effect_is_clear_where_its_whole_range_is(low: float, high: float, clear: bool) -> None:
    assert Effect(low, high, {}).clear() is clear


def test_a_forecast_of_no_effect_has_no_sign() -> None:
    assert not Effect(1.05, 1.05, {"level": 1.0}).sign_right("level")
    assert not Effect(0.95, 0.95, {"level": 1.0}).sign_right("level")


def test_a_score_counts_signs_of_clear_effects_and_sizes_of_all() -> None:
    effects = [
        Effect(1.10, 1.10, {"level": 1.09}),  # clear, right, 1 point
        Effect(0.90, 0.90, {"level": 1.02}),  # clear, wrong, 12 points
        Effect(1.01, 1.01, {"level": 0.97}),  # not clear, 4 points
        Effect(1.50, 1.50, {"other": 1.50}),  # of another level
    ]
    found = score(effects, "level")
    assert (found.effects, found.clear, found.signs_right) == (3, 2, 1)
    assert found.median_points == pytest.approx(4.0)
    assert found.within == pytest.approx(1 / 3)
    assert found.sign_share == 0.5


def test_without_effects_there_is_no_share() -> None:
    assert score([], "level") == Score(0, 0, 0, 0.0, 0.0)
    assert score([], "level").sign_share is None
