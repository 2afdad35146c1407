"""What softmax arithmetic costs, counted by hand for a tile of 128 x 128 on a B200."""

from __future__ import annotations

import pytest

from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.pipeline.softmax_cost import (
    add,
    beside_mma_cycles,
    exp_work,
    load_cycles,
    mask_work,
    one_warp_cycles,
    row_max_work,
    row_sum_work,
    work,
)

TILE = 128.0 * 128.0
B200 = load_machine("b200")


def test_exponentials_of_a_tile() -> None:
    """16384 elements: ex2 at 16 a clock, a packed FMA each for the scale, one conversion for two."""
    found = exp_work(B200, Workload(), TILE, 0.0, 3)
    cycles, counts = dict(found.cycles), dict(found.instructions)
    assert cycles["mufu"] == TILE / 16 == 1024
    assert cycles["fma"] == TILE / 128
    assert cycles["cvt"] == TILE / 2 / B200["cvt.f32x2_to_bf16x2_per_clk"]
    assert counts == {"mufu": TILE / 128, "fma": TILE / 128 / 2, "alu": TILE / 2 / 128}
    # Four schedulers issue one warp instruction a clock each; counts are those of one of them.
    assert cycles["issue"] == sum(counts.values()) * 4 / B200["issue.warp_inst_per_clk"]


def test_emulation_moves_work_from_mufu_to_fma() -> None:
    none, some = (dict(exp_work(B200, Workload(), TILE, share, 3).cycles) for share in (0.0, 0.25))
    assert some["mufu"] == 0.75 * none["mufu"]
    assert some["fma"] == pytest.approx(none["fma"] + 0.25 * TILE * B200["mufu.ex2_emulation_fma_slots"] / 128)
    steeper = dict(exp_work(B200, Workload(), TILE, 0.25, 4).cycles)
    assert steeper["fma"] - some["fma"] == pytest.approx(0.25 * TILE / 128)  # one more FMA for each degree


def test_fp8_packs_more_and_permutes() -> None:
    bf16, fp8 = (dict(exp_work(B200, Workload(dtype=dtype), TILE, 0.0, 3).instructions) for dtype in ("bf16", "fp8"))
    assert fp8["alu"] - bf16["alu"] == TILE / 4 / 128


def test_row_maximum_takes_two_elements_an_instruction_where_the_machine_has_three_inputs() -> None:
    assert dict(row_max_work(B200, TILE).cycles)["alu"] == TILE / 2 / B200["alu.lanes"]
    two_inputs = B200.with_facts({"alu.minmax_inputs": 2})
    assert dict(row_max_work(two_inputs, TILE).cycles)["alu"] == TILE / B200["alu.lanes"]


def test_row_sum_and_mask() -> None:
    assert dict(row_sum_work(B200, TILE).cycles)["fma"] == TILE / 128
    assert dict(mask_work(B200, TILE)) == {"alu": TILE / B200["alu.lanes"], "issue": TILE / 128}


def test_registers_are_charged_where_accumulators_live_in_them() -> None:
    h200 = load_machine("h200-sxm")
    found = dict(work(h200, {}, {"fma": 10.0, "alu": 4.0, "other": 100.0}).cycles)
    assert found["regs"] == 10 * h200["regs.cycles_per_fma"] + 4 * h200["regs.cycles_per_alu"]
    assert "regs" not in dict(work(B200, {}, {"fma": 10.0}).cycles)


def test_work_adds_up_unit_by_unit() -> None:
    one, other = row_sum_work(B200, TILE), exp_work(B200, Workload(), TILE, 0.0, 3)
    both = dict(add(one, other).cycles)
    for unit in both:
        assert both[unit] == pytest.approx(dict(one.cycles).get(unit, 0.0) + dict(other.cycles).get(unit, 0.0))
    assert dict(one.scaled(3).cycles)["fma"] == 3 * dict(one.cycles)["fma"]


def test_one_warp_hides_part_of_the_lighter_pipes() -> None:
    done = work(B200, {"mufu": 100.0, "fma": 60.0, "alu": 20.0}, {})
    assert one_warp_cycles(B200, done) == pytest.approx(100 + B200["issue.one_warp_exposed_share"] * 80)


def test_copies_take_their_bytes_at_the_copy_engines_rate() -> None:
    assert load_cycles(B200, 32768) == 32768 / B200["tma.bytes_per_clk"]


def test_beside_wgmma_a_warp_is_as_slow_as_measured() -> None:
    """corun/beside_mma of h200_calibrate.csv: cycles an element of one warp's softmax."""
    hopper, elements = load_machine("h200-sxm"), 128.0 * 64
    anchored = add(exp_work(hopper, Workload(), elements, 0.0, 3), row_sum_work(hopper, elements))
    assert 14.1 <= beside_mma_cycles(hopper, anchored) / 64 <= 14.9
    assert beside_mma_cycles(hopper, add(anchored, row_max_work(hopper, elements))) / 64 == pytest.approx(
        16.3, rel=0.02
    )
    assert beside_mma_cycles(B200, anchored) == 0.0
