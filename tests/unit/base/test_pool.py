"""Work on several processes comes back in order, and tells how far it is."""

from __future__ import annotations

import math
import os

import pytest

from tilecast.base.pool import cores, spread
from tilecast.base.progress import reported, silent


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_inputs(workers: int) -> None:
    assert list(spread(math.factorial, list(range(12)), workers)) == [math.factorial(n) for n in range(12)]


def test_one_input_needs_no_process() -> None:
    assert list(spread(_process, [0], 4)) == [os.getpid()]
    assert list(spread(_process, [], 4)) == []


def test_several_inputs_run_elsewhere() -> None:
    assert os.getpid() not in set(spread(_process, [0, 1, 2, 3], 2))


def test_an_exception_of_the_function_arrives() -> None:
    with pytest.raises(ValueError, match="negative"):
        list(spread(math.factorial, [3, -1, 2], 2))


def test_there_is_a_core() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)


def test_steps_are_reported_before_the_first_and_after_each() -> None:
    told: list[tuple[object, ...]] = []
    out = []
    for step in reported("ab", "letters", 2, lambda *args: told.append(args)):
        out.append((step, len(told)))
    assert out == [("a", 2), ("b", 3)]
    assert told == [("letters", 0, 2), ("letters", 1, 2), ("letters", 2, 2)]
    assert list(reported("ab", "letters", 2, silent)) == ["a", "b"]


def _process(_: int) -> int:
    return os.getpid()
