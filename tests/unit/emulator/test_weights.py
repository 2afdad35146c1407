"""A block of P against its scores: what is wrong, at which row and key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilecast.emulator.weights import judge_sum, judge_weights

S = np.random.default_rng(0).uniform(-6, 6, (4, 32))
SEEN = np.tril(np.ones((4, 32), bool), 28)


def p_of(s: Any, first: int = 8, keys: int = 16, subtracted: float = 6.0) -> Any:
    return np.where(SEEN, np.exp2(s - subtracted), 0)[:, first : first + keys]


def test_right_weights_say_what_was_subtracted() -> None:
    found = judge_weights(p_of(S, subtracted=5.5), S, SEEN, 8, 16, coarse=False)
    assert found.wrong == ""
    np.testing.assert_allclose(found.reference, 5.5, atol=1e-6)


def test_a_hidden_key_that_weighs_something_and_one_beyond_the_last() -> None:
    p = p_of(S, first=24, keys=8)
    p[1, 7] = 0.5
    assert not SEEN[1, 31]
    assert (found := judge_weights(p, S, SEEN, 24, 8, coarse=False)).wrong == "hidden"
    assert (found.row, found.key, found.rows) == (1, 7, 1)
    wide = np.pad(p_of(S, first=24, keys=8), [(0, 0), (0, 4)], constant_values=0.25)
    assert (found := judge_weights(wide, S, SEEN, 24, 8, coarse=False)).wrong == "hidden"
    assert (found.row, found.key, found.rows) == (0, 8, 4)


@pytest.mark.parametrize("weight", [0.0, 3.0])
def test_a_weight_that_the_others_of_its_row_do_not_explain(weight: float) -> None:
    p = p_of(S)
    key = int(np.argmax(p[2]))
    wanted, p[2, key] = p[2, key], weight
    found = judge_weights(p, S, SEEN, 8, 16, coarse=False)
    assert (found.wrong, found.row, found.key, found.got) == ("off", 2, key, weight)
    assert found.wanted == pytest.approx(wanted)


def test_exponents_that_grow_otherwise_than_scores() -> None:
    found = judge_weights(p_of(1.5 * S, subtracted=9.0), S, SEEN, 8, 16, coarse=False)
    assert found.wrong == "scale"
    assert found.got == pytest.approx(1.5, abs=0.01)


def test_a_maximum_that_is_not_that_of_the_scores() -> None:
    assert judge_weights(p_of(S, subtracted=-12.0), S, SEEN, 8, 16, coarse=False).wrong == "large"
    assert judge_weights(p_of(S, 0, 32, 40.0), S, SEEN, 0, 32, coarse=False).wrong == "none"
    # 8 bits end at 448: the weights that are cut are not held against the others.
    found = judge_weights(np.minimum(p_of(S, subtracted=-5.0), 448), S, SEEN, 8, 16, coarse=True)
    assert found.wrong == "saturated"


def test_a_sum_on_another_scale() -> None:
    total = np.ones((3, 8))
    result = total.copy()
    assert judge_sum(result, total, total, np.zeros(3), coarse=False) == (0, 0.0)
    result[2] *= 1.5
    assert judge_sum(result, total, total, np.zeros(3), coarse=False) == (2, 0.5)
