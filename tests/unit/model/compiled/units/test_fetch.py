"""Instruction fetch: lines, what stays in the first cache, and what the rest costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sm_runs import run_both

from tilecast.model.compiled.code import WarpInstruction
from tilecast.model.compiled.costs import warp_costs
from tilecast.model.compiled.sm import MARK, Cta
from tilecast.model.compiled.units.fetch import LINE, InstructionCache, fetch_cycles
from tilecast.model.machine.machine import load_machine

H200 = warp_costs(load_machine("h200-sxm"), 1700.0)
COSTS = replace(H200, fetch_lines=4, fetch_near_lines=16, fetch_cycles=2.0, fetch_full_cycles=3.0, fetch_far_cycles=5.0)
ADD = WarpInstruction("fma", 1, 0, 7, 7, "fixed", "plain")


def test_the_rate_grows_with_the_program_between_the_measured_sizes() -> None:
    rates = [fetch_cycles(lines, COSTS) for lines in (5, 6, 11, 16, 24, 32, 1000)]
    assert rates == [2.0, 2.0, 2.5, 3.0, 4.0, 5.0, 5.0]


def test_code_that_fits_costs_nothing() -> None:
    assert not InstructionCache([[0, 1, 2, 3], [0, 1]], COSTS).needed
    assert InstructionCache([[0, 1, 2], [8, 9]], COSTS).needed
    assert not InstructionCache([[0, 1, 2, 3]] * 3, COSTS).needed  # warps that run the same code share it


def test_a_walk_over_too_much_code_is_fetched_line_by_line() -> None:
    cache = InstructionCache([range(6)], COSTS)
    now, entered = 0.0, []
    for line in (*range(6), *range(6)):
        now = max(now, cache.enter(line, now)) + 1.0
        entered.append(now)
    # What the tile before left are the last four lines; the least recently used go first, so every line is fetched again.
    assert entered[6] - entered[0] == pytest.approx(6 * LINE * 2.0, rel=0.1)


def test_the_next_line_is_fetched_ahead() -> None:
    cache = InstructionCache([range(6)], COSTS)
    assert cache.enter(0, 0.0) == 16.0
    assert cache.enter(1, 100.0) == 32.0  # asked for when 0 was entered, behind it


def test_what_was_used_last_is_there_at_the_start() -> None:
    cache = InstructionCache([[0, 1, 2, 3, 4, 5, 0]], COSTS)
    assert [cache.enter(line, 0.0) for line in (0, 5, 4)] == [0.0, 0.0, 0.0]


def timed(lines: int, costs: object, stall: int = 1, laps: int = 4) -> float:
    code = (ADD._replace(stall=stall),) * (lines * LINE) * laps + (MARK,)
    at = (*(i // LINE % lines for i in range(lines * LINE * laps)), lines - 1)
    found = run_both([Cta((tuple((i, None) for i in code),), (), lines=(at,))], costs, {})  # type: ignore[arg-type]
    return found.marks[0][0] / (lines * LINE * laps)


def test_a_run_is_limited_by_fetch_only_where_code_is_too_long_and_quick() -> None:
    assert timed(4, COSTS) < 1.1
    assert timed(12, COSTS) == pytest.approx(fetch_cycles(12, COSTS), rel=0.1)
    assert timed(12, COSTS, stall=6) == pytest.approx(6.0, rel=0.05)  # slow code hides it


def test_the_h200_reproduces_its_own_microbenchmark() -> None:
    """data/measured/h200_calibrate.csv, code/length, all apart, one warpgroup: 1.02, 2.4 to 2.7 and 3.0 cycles."""
    assert timed(24 << 10 >> 7, H200, laps=2) < 1.1
    assert 1.9 < timed(64 << 10 >> 7, H200, laps=2) < 2.75
    assert 2.4 < timed(128 << 10 >> 7, H200, laps=2) < 3.2


@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=30), min_size=1, max_size=3))
def test_lines_are_never_there_before_they_are_asked_for_twice(programs: list[list[int]]) -> None:
    cache = InstructionCache(programs, COSTS)
    if not cache.needed:
        return
    now = 0.0
    for program in programs:
        for line in program:
            there = cache.enter(line, now)
            again = cache.enter(line, now)
            assert again == there  # a line that is there, or on its way, is not fetched again
            now = max(now, there) + 1.0
