"""One step of fluid time, against steps worked out by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilecast.model.sm.fluid import advance


@dataclass
class Entry:
    left: float


def test_time_passes_until_the_first_one_ends() -> None:
    slow, fast = Entry(10.0), Entry(12.0)
    assert advance([slow, fast], [0.5, 1.0], 100.0) == (12.0, [fast])
    assert (slow.left, fast.left) == (4.0, 0.0)


def test_those_that_end_together_end_together() -> None:
    first, second = Entry(5.0), Entry(2.5)
    step, ended = advance([first, second], [1.0, 0.5], 100.0)
    assert step == 5.0 and ended == [first, second]


def test_another_moment_may_come_first() -> None:
    only = Entry(8.0)
    assert advance([only], [0.25], 4.0) == (4.0, [])
    assert only.left == 7.0


def test_nothing_that_runs_waits_for_the_other_moment_or_for_ever() -> None:
    assert advance([], [], 3.0) == (3.0, [])
    assert advance([Entry(1.0)], [0.0], math.inf)[0] == math.inf
