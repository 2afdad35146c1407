"""The queue of the tensor core: turns, room, groups, and what FMA take from it."""

from __future__ import annotations

import math

import pytest
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


@pytest.mark.parametrize(
    ("warps", "cycles", "reads", "measured"),
    [
        # A, columns: smem 64, smem 64, smem 128, smem 256, registers 128, registers 256 (h200_calibrate.csv, st_shared).
        (1, 32.0, 32.0, 50.2), (2, 32.0, 32.0, 82.3), (2, 64.0, 48.0, 60.6), (2, 128.0, 80.0, 42.1), (2, 64.0, 32.0, 36.3), (2, 128.0, 64.0, 34.1),
    ],
)  # fmt: skip
def test_a_store_gets_through_the_port_as_fast_as_measured_beside_products(
    warps: int, cycles: float, reads: float, measured: float
) -> None:
    queue = WgmmaQueue(warps, 6, 50.0, 0.0)
    for _ in range(2):
        for warp in range(warps):
            queue.issue(warp, 0.0, cycles, False, reads)
    queue.serve(0.0)
    # 512 bytes of each of four warps.
    found = queue.through_port(16.0)
    assert abs(found / measured - 1.0) < 0.12


def test_what_others_take_of_the_port_delays_a_product_beyond_what_it_leaves() -> None:
    queue = WgmmaQueue(1, 6, 50.0, 0.0)
    queue.issue(0, 0.0, 64.0, False, 48.0)
    queue.issue(0, 0.0, 64.0, True, 48.0)
    queue.serve(0.0)
    queue.take_port(10.0, 16.0)
    assert queue.free == 64.0, "the product leaves 16 of its 64 cycles"
    queue.take_port(20.0, 5.0)
    assert queue.free == 69.0
    # A copy takes a fifth of the port all the while: 12.8 cycles of the next, which leaves more.
    queue.stream(0.0, 1000.0, 0.2)
    queue.serve(69.0)
    assert queue.free == 133.0
    queue.take_port(80.0, 16.0)
    assert queue.free == pytest.approx(133.0 + 12.8) and queue.through(0, 0, 0.0) == pytest.approx(145.8 + 50.0)
