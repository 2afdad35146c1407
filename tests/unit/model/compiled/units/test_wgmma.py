"""The queue of the tensor core: turns, room, groups, and what FMA take from it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tilecast.model.compiled.units.wgmma import WgmmaQueue


def drain(queue: WgmmaQueue) -> list[float]:
    """Serve all that waits; when each instruction was taken up."""
    taken = []
    while queue.next_service() < math.inf:
        taken.append(queue.next_service())
        queue.serve(taken[-1])
    return taken


def test_warps_take_turns_an_instruction_each() -> None:
    queue = WgmmaQueue(2, 6, 50.0, 0.0)
    for _ in range(3):
        queue.issue(0, 0.0, 10.0, False)
    queue.issue(1, 5.0, 40.0, True)
    assert drain(queue) == [0.0, 10.0, 50.0, 60.0], "the other warp's stands between the first and the second"
    assert queue.through(1, 0, 0.0) == 50.0 + 50.0


def test_room_comes_when_one_under_way_ends() -> None:
    queue = WgmmaQueue(1, 2, 50.0, 0.0)
    queue.issue(0, 0.0, 10.0, False)
    queue.issue(0, 0.0, 10.0, True)
    assert queue.room(0.0) is None, "nothing has been taken up yet"
    queue.serve(0.0)
    assert queue.room(0.0) == 10.0 and queue.room(12.0) == 12.0


def test_groups_are_through_in_order() -> None:
    queue = WgmmaQueue(1, 6, 50.0, 0.0)
    queue.issue(0, 0.0, 10.0, True)
    queue.issue(0, 0.0, 10.0, True)
    assert queue.through(0, 2, 3.0) == 3.0 and queue.through(0, 1, 3.0) is None
    drain(queue)
    assert queue.through(0, 1, 3.0) == 60.0 and queue.through(0, 0, 3.0) == 70.0


@given(st.integers(0, 40))
def test_fma_delay_what_is_in_service_beyond_the_share_it_hides(count: int) -> None:
    queue = WgmmaQueue(1, 6, 50.0, 0.25)
    queue.issue(0, 0.0, 40.0, True)
    queue.serve(0.0)
    for _ in range(count):
        queue.steal()
    assert queue.free == 40.0 + max(0, count - 10)
    assert queue.through(0, 0, 0.0) == queue.free + 50.0
    assert queue.runs(0.0) and not queue.runs(queue.free)
