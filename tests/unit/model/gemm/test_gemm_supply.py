"""What L2 and the memory give an SM, and what a kernel's machine code takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilecast.model.compiled.code import CodeError
from tilecast.model.compiled.units.fetch import far_cycles
from tilecast.model.gemm.code import code_cycles
from tilecast.model.gemm.evaluate import evaluate_gemm
from tilecast.model.gemm.pipeline.build import build
from tilecast.model.gemm.traffic import l2_rates, memory_latency_cycles, memory_share, tiling
from tilecast.model.gemm.variant import GemmVariant
from tilecast.model.gemm.workload import Gemm
from tilecast.model.machine.machine import load_machine
from tilecast.validation.measured.gemm import code_name, kept_codes

H200 = load_machine("h200")
TURNS = GemmVariant(stages=5, c_stages=4, c_parts=2)


def test_l2_gives_shared_columns_faster_than_rows_of_its_own() -> None:
    alone, together = H200["l2.bytes_per_clk_per_sm"], H200["l2.bytes_per_clk_per_sm_lockstep"]
    top = H200["chip.clock_max_mhz"]
    square = l2_rates(GemmVariant(), H200, top, 64)
    assert square.reads == alone
    assert square.inputs == pytest.approx(2 / (1 / alone + 1 / together))
    wide, high = (l2_rates(GemmVariant(tile_m=m, tile_n=n), H200, top, 64).inputs for m, n in ((64, 256), (256, 128)))
    assert high < square.inputs < wide
    # A group of one row shares nothing; a slower SM gets more a cycle of its own.
    assert l2_rates(GemmVariant(group_m=1), H200, top, 64).inputs == pytest.approx(alone)
    assert l2_rates(GemmVariant(), H200, top / 2, 64).inputs == pytest.approx(2 * square.inputs)
    # What L2 gives to all SMs fewer share, up to what an SM gets of lines that all read.
    assert l2_rates(GemmVariant(), H200, top, 64, 132).inputs == square.inputs
    assert l2_rates(GemmVariant(), H200, top, 64, 88).reads == pytest.approx(1.5 * alone)
    assert l2_rates(GemmVariant(), H200, top, 64, 8).inputs == together


def test_short_rows_reach_less_of_the_memory() -> None:
    assert memory_share(64) < memory_share(96) < memory_share(128) < memory_share(256) == memory_share(1024) < 1
    assert memory_share(32) == memory_share(64)


def test_copies_wait_longer_for_a_busy_memory() -> None:
    waits = [memory_latency_cycles(H200, busy) for busy in (0.0, 0.64, 0.75, 0.8, 1.0)]
    assert waits[:2] == pytest.approx([H200["tma.latency_hbm_cycles"], H200["tma.latency_hbm_loaded_cycles"]])
    assert waits[1] < waits[2] < waits[3] == waits[4]


def test_later_waves_find_in_l2_what_earlier_ones_brought() -> None:
    v = GemmVariant()
    narrow, deep = (tiling(Gemm(m, n, k), v, H200) for m, n, k in ((16384, 2048, 1024), (16384, 16384, 4096)))
    stays, some, goes = (tiling(Gemm(8192, 8192, k, in_place=True), v, H200) for k in (128, 384, 1024))
    # A wave is 17 of 64 columns and a group of rows; B is new to the first of 8 groups.
    assert stays.fresh_share == pytest.approx(1 - (1 - 17 / 64) * (1 - 8 / 64))
    # What passes between two groups is B, and A, C and D of a group: B goes where that is about half of L2.
    assert stays.fresh_share < some.fresh_share < goes.fresh_share == 1.0
    assert goes.hbm_input_bytes == 8192 * 1024 * 2 * (1 + 8)
    apart = tiling(Gemm(8192, 8192, 384), v, H200)
    assert apart.fresh_share == 1.0  # D beside C passes as well
    assert (
        narrow.fresh_share == 1.0 and deep.fresh_share == 1.0
    )  # every wave has rows of its own; B goes over what L2 holds


def test_copies_wait_their_turn() -> None:
    """A deep ring hides what C and D keep k-steps waiting for, one of two slots does not."""
    problem = Gemm(8192, 8192, 256)
    shallow = GemmVariant(tile_m=128, tile_n=256, accumulators=1, stages=2)
    loop = build(problem, shallow, H200, 1700.0).pipeline
    served = {op.name.rstrip("0123456789_hp"): op.engine for op in loop.ops if op.engine in ("memory", "l2")}
    assert served == {"ask": "memory", "ask_c": "memory", "store": "memory", "load": "l2", "load_c": "l2"}
    own = build(problem, shallow, H200, 1700.0, memory=False).pipeline
    assert not any(op.engine in ("memory", "l2") for op in own.ops)
    two, three = (evaluate_gemm(problem, replace(shallow, stages=n, c_parts=4), H200, 1700.0) for n in (2, 3))
    assert two.in_step.tile_cycles > 1.1 * three.in_step.tile_cycles


def test_l2_sends_on_what_has_come_while_the_memory_sends_the_rest() -> None:
    """A k-step takes the longer of both ways, and the latency; in the SM's own pace there is one way."""
    v, problem = GemmVariant(tile_m=128, tile_n=256, accumulators=1, stages=2), Gemm(8192, 8192, 128, in_place=True)

    def steps(memory: bool) -> tuple[float, float, float]:
        loop = build(problem, v, H200, 1700.0, memory=memory, memory_busy=0.0).pipeline
        (there,) = {edge.latency_cycles for edge in loop.edges if edge.why == "A and B"}
        asked = loop.op("ask0_1").min_cycles if memory else 0.0
        return asked, loop.op("load0_1").min_cycles, there

    asked, sent, there = steps(True)
    fresh, far, near = (
        tiling(problem, v, H200).fresh_share,
        H200["tma.latency_hbm_cycles"],
        H200["tma.latency_l2_cycles"],
    )
    assert 0.0 < asked < sent
    assert asked + sent + there == pytest.approx(max(asked, sent) + fresh * far + (1 - fresh) * near)
    assert steps(False)[2] == near


def test_k_steps_that_come_from_the_memory_are_on_both_ways_at_once() -> None:
    """What a launch leaves of the memory's rate they find, and L2 counts where it is slower than the memory's way."""
    v, problem = GemmVariant(tile_m=128, tile_n=256, accumulators=1, stages=2), Gemm(8192, 8192, 2048)
    idle, busy = (build(problem, v, H200, 1700.0, memory_busy=share).pipeline for share in (0.25, 0.5))
    assert busy.op("ask0_3").min_cycles == pytest.approx(2 * idle.op("ask0_3").min_cycles)
    waits = {edge.src: edge.latency_cycles for edge in idle.edges if edge.dst == "mma0_3h0" and edge.why == "A and B"}
    assert waits.keys() == {"ask0_3", "load0_3"} and waits["load0_3"] == 0.0
    sent = (128 + 256) * 64 * 2 / H200["tma.bytes_per_clk"]
    assert waits["ask0_3"] == pytest.approx(memory_latency_cycles(H200, 0.25) + sent)


def test_a_launch_of_one_tile_copies_no_other_tile_s_c() -> None:
    v = GemmVariant(tile_m=128, tile_n=256, accumulators=1, stages=3)
    one = evaluate_gemm(Gemm(2048, 2048, 64), v, H200, 1700.0).in_step
    assert one.end(1) < one.trace.iteration_end[0]
    assert one.end(2) > one.end(1) and one.end(40) > 39 * one.tile_cycles


def test_a_first_tile_waits_for_its_code_and_the_maps_of_its_tensors() -> None:
    problem, v = Gemm(2048, 2048, 64), TURNS
    code = code_cycles(kept_codes()[code_name("bf16", v)], v, H200)
    starts = [
        evaluate_gemm(problem, v, H200, 1700.0, c).start_cycles
        for c in (None, code, replace(code, product_instructions=5000))
    ]
    assert starts[0] > 2 * H200["tma.latency_hbm_cycles"] and starts[1] < starts[2]
    # Two warpgroups that end a tile together have half of the other's epilogue each, but share what fetches their code.
    slower = H200.with_facts({"code.fetch_far_cycles": 2.0 * far_cycles(H200)})
    one, two = (
        evaluate_gemm(problem, replace(v, accumulators=n), slower, 1700.0).start_cycles
        - evaluate_gemm(problem, replace(v, accumulators=n), H200, 1700.0).start_cycles
        for n in (2, 1)
    )
    assert two > 1.2 * one


def test_a_k_step_is_given_back_behind_the_next_one() -> None:
    """Two slots have one copy under way: the slot of a product is free once the next k-step has come."""
    problem = Gemm(8192, 8192, 1024)
    two, three = (build(problem, GemmVariant(stages=stages), H200, 1700.0).pipeline for stages in (2, 3))
    for loop, ahead in ((two, 2), (three, 3)):
        freed = {edge.src for edge in loop.edges if edge.dst == f"order0_{ahead}" and edge.why == "A/B slot"}
        assert freed == {"mma0_0", "load0_1", "ask0_1"}


def test_a_warpgroup_asks_once_its_products_are_issued() -> None:
    """The array's queue takes 6 instructions of all warpgroups: of 16 of 64 columns' time two warpgroups wait for ten, of 4 none waits."""
    depth = H200["tensor.mma_queue_depth"]

    def behind(**knobs: int) -> float:
        loop = build(Gemm(8192, 8192, 128, in_place=True), GemmVariant(**knobs), H200, 1700.0).pipeline
        waits = {
            edge.latency_cycles
            for edge in loop.edges
            if edge.src.startswith("load0_1") and edge.dst.startswith(("ask", "order"))
        }
        there = {
            edge.latency_cycles for edge in loop.edges if edge.src.startswith("load0_1") and edge.dst.startswith("mma")
        }
        return max(waits) - max(there) - H200["sync.mbarrier_roundtrip_cycles"]

    assert behind(tile_m=256, accumulators=1, stages=2) == pytest.approx((16 - depth) * 64)
    assert behind(stages=3) == pytest.approx((8 - depth) * 64)
    assert behind(tile_m=64, tile_n=256, stages=3) == pytest.approx(0.0, abs=1e-9)


def test_the_second_half_of_a_line_of_c_comes_with_the_first() -> None:
    """From L2, no earlier than the first has come, and without asking the memory."""
    loop = build(Gemm(8192, 8192, 512), GemmVariant(stages=6, c_stages=4, c_parts=4), H200, 1700.0).pipeline
    near = H200["tma.latency_l2_cycles"]
    for first, second in ((0, 1), (2, 3)):
        waits = {
            edge.src: edge.latency_cycles
            for edge in loop.edges
            if edge.why == "C" and edge.dst == f"epilogue0p{second}"
        }
        assert (
            waits.keys() == {f"load_c0p{first}", f"load_c0p{second}"}
            and waits[f"load_c0p{second}"] == near < waits[f"load_c0p{first}"]
        )
        assert loop.op(f"ask_c0p{second}").min_cycles < 1.0 < loop.op(f"ask_c0p{first}").min_cycles


def test_machine_code_takes_the_place_of_counted_instructions() -> None:
    kernel = kept_codes()[code_name("bf16", TURNS)]
    cycles = code_cycles(kernel, TURNS, H200)
    assert len(cycles.epilogue) == 2 and min(cycles.epilogue) > 200
    # Beside the other warpgroup's products an epilogue takes longer than alone.
    alone = replace(TURNS, accumulators=1)
    assert sum(code_cycles(kept_codes()[code_name("bf16", alone)], alone, H200).epilogue) < sum(cycles.epilogue)
    problem = Gemm(8192, 8192, 256)
    before, compiled = (evaluate_gemm(problem, TURNS, H200, 1700.0, code) for code in (None, cycles))
    assert compiled.own.tile_cycles > before.own.tile_cycles
    with pytest.raises(CodeError, match="expected 4 waits in the epilogue of a tile, found 2"):
        code_cycles(kernel, replace(TURNS, c_parts=4), H200)
