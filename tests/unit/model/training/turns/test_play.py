"""Programs that take turns, played in C and in Python: the same digits."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast.model.training.turns import in_python
from tilecast.model.training.turns.play import library, play

launches = st.fixed_dictionaries(
    {
        "cycles": st.lists(st.floats(1.0, 1e6), min_size=1, max_size=40),
        "heads": st.integers(1, 12),
        "abreast": st.integers(1, 5),
        "query_heads": st.integers(1, 5),
        "turn": st.sampled_from((0.0, 1.0, 777.7)),
        "slots": st.integers(1, 33),
    }
)


@pytest.mark.skipif(library() is None, reason="no C compiler at hand")
@given(launches)
def test_both_have_the_same_digits(launch: dict[str, object]) -> None:
    assert play(**launch) == in_python.play(**launch)  # type: ignore[arg-type]


@given(launches)
def test_without_turns_it_is_a_queue_for_the_free_slot(launch: dict[str, object]) -> None:
    """Against a list of heads written out, whose programs are dealt in that order."""
    cycles, heads, abreast, slots = (launch[name] for name in ("cycles", "heads", "abreast", "slots"))
    free = [0.0] * slots  # type: ignore[operator]
    for first in range(0, heads, abreast):  # type: ignore[call-overload]
        for taken in cycles:  # type: ignore[attr-defined]
            for _ in range(first, min(first + abreast, heads)):  # type: ignore[type-var, call-overload, operator]
                heapq.heappush(free, heapq.heappop(free) + taken)
    assert in_python.play(**{**launch, "turn": 0.0}) == (max(free), 0.0)  # type: ignore[arg-type]


@given(launches)
def test_turns_never_make_a_launch_shorter(launch: dict[str, object]) -> None:
    with_turns, waited = in_python.play(**launch)  # type: ignore[arg-type]
    without, _ = in_python.play(**{**launch, "turn": 0.0})  # type: ignore[arg-type]
    assert waited >= -1e-6 * with_turns
    assert launch["slots"] != 1 or with_turns >= without * (1 - 1e-12)
