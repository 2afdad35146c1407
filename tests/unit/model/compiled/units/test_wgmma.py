"""The queue of the tensor core: order, room, groups, operands, and what others take of the port."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast.model.compiled.costs import mma_cycles, warp_costs
from tilecast.model.compiled.units.wgmma import WgmmaQueue
from tilecast.model.machine.machine import load_machine

ROOT = Path(__file__).resolve().parents[5]


def drain(queue: WgmmaQueue) -> list[float]:
    """Serve all that waits; when each instruction was taken up."""
    taken = []
    while queue.next_service() < math.inf:
        taken.append(queue.next_service())
        queue.serve(taken[-1])
    return taken


def test_products_go_in_the_order_of_their_issue() -> None:
    queue = WgmmaQueue(2, 6, 50.0, 0.0)
    queue.issue(0, 0.0, 10.0, False)
    queue.issue(0, 0.0, 10.0, False)
    queue.issue(1, 5.0, 40.0, True)
    queue.issue(0, 6.0, 10.0, True)
    assert drain(queue) == [0.0, 10.0, 20.0, 60.0]
    assert queue.through(1, 0, 0.0) == 60.0 + 50.0 and queue.through(0, 0, 0.0) == 70.0 + 50.0


@given(st.floats(-100.0, 100.0), st.floats(0.0, 100.0), st.sampled_from([32.0, 64.0, 128.0]))
def test_a_product_takes_longer_by_its_share_of_the_time_that_a_copy_comes_in(
    begin: float, length: float, cycles: float
) -> None:
    queue = WgmmaQueue(1, 6, 50.0, 0.0, beside_copy=0.25)
    queue.copy(begin, begin + length)
    queue.issue(0, 0.0, cycles, True)
    queue.serve(0.0)
    beside = max(0.0, min(begin + length, cycles) - max(begin, 0.0))
    assert queue.free == pytest.approx(cycles + 0.25 * beside) and queue.through(0, 0, 0.0) == queue.free + 50.0


def test_copies_lengthen_products_as_measured() -> None:
    """data/measured/h200_calibrate.csv, smem/beside_mma without a stream: m64n128 beside copies one after the other."""
    with (ROOT / "data" / "measured" / "h200_calibrate.csv").open(encoding="utf-8", newline="") as file:
        wanted = {
            "a": "register",
            "fill": True,
            "mma_warpgroups": 1,
            "n": 128,
            "stream": "none",
            "stream_warpgroups": 0,
        }
        measured = {
            row["quantity"]: float(row["value"]) for row in csv.DictReader(file)
            if (row["group"], row["benchmark"]) == ("smem", "beside_mma") and json.loads(row["params"]) == wanted
        }  # fmt: skip
    machine = load_machine("h200-sxm")
    share = machine["tensor.mma_cycles_per_copied_byte"] * measured["fill_bytes_per_clk"]
    queue = WgmmaQueue(1, 6, 50.0, 0.0, beside_copy=share)
    queue.copy(0.0, 1e6)
    for _ in range(4):
        queue.issue(0, 0.0, 64.0, True)
    drain(queue)
    assert queue.free / 4 == pytest.approx(measured["cycles_per_mma"], rel=0.01)


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


@given(st.floats(0.0, 60.0), st.booleans())
def test_a_is_fetched_from_shared_memory_before_a_product_begins_behind_others_unseen(
    after: float, fetched: bool
) -> None:
    queue = WgmmaQueue(2, 6, 50.0, 16.0)
    queue.issue(0, 0.0, 40.0, True)
    queue.serve(0.0)
    queue.issue(1, after, 40.0, True, fetched=fetched)
    assert queue.busy(after) == math.inf
    (second,) = drain(queue)
    assert second == max(40.0, after + 16.0 * fetched)
    assert queue.through(1, 0, 0.0) == second + 40.0 + 50.0
    assert queue.busy(0.0) == second + 40.0 and queue.busy(200.0) == 200.0


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("home", ["smem", "register"])
def test_eight_products_alone_take_as_long_as_measured(columns: int, home: str) -> None:
    """data/measured/h200_calibrate.csv, tensor/wgmma_latency: one warpgroup, the first product to the end of the wait."""
    with (ROOT / "data" / "measured" / "h200_calibrate.csv").open(encoding="utf-8", newline="") as file:
        wanted = {"a": home, "b": "k-major", "n": columns, "steps": 8, "warpgroups": 1}
        measured = next(
            float(row["value"]) for row in csv.DictReader(file)
            if row["benchmark"] == "wgmma_latency" and row["quantity"] == "wait_cycles" and json.loads(row["params"]) == wanted
        )  # fmt: skip
    machine = load_machine("h200-sxm")
    costs = warp_costs(machine, 1980.0)
    queue = WgmmaQueue(1, costs.mma_queue, costs.mma_latency, costs.mma_fetch)
    for step in range(8):
        room = queue.room(0.0)
        while room is None:
            queue.serve(queue.next_service())
            room = queue.room(0.0)
        queue.issue(
            0, room, mma_cycles(machine, columns, home == "register", "bf16"), step == 7, fetched=home == "smem"
        )
    drain(queue)
    assert queue.through(0, 0, 0.0) == pytest.approx(measured, rel=0.025)


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
