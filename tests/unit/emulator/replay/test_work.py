"""What the replay charges for executed steps: instructions by layout, pipes, chaining, the tensor core beside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilecast.emulator.any_kernel import load_any
from tilecast.emulator.call import run_call
from tilecast.emulator.replay.sharing import Load, speeds
from tilecast.emulator.replay.spent import described
from tilecast.emulator.replay.work import instructions, registers, work_load
from tilecast.emulator.trace import MatrixIssue, ProgramTrace, RoleTrace, Step, Work
from tilecast.emulator.values.layouts import BlockedLayout, NvmmaDistributedLayout, SliceLayout
from tilecast.model.machine.machine import load_machine

H200, B200 = load_machine("h200-sxm"), load_machine("b200")
ACCUMULATOR = NvmmaDistributedLayout((3, 0), (4, 1), (16, 64, 16))


def step(
    number: int,
    pipe: str,
    amount: float,
    shape: tuple[int, ...] = (64, 64),
    *operands: int,
    layout: object = ACCUMULATOR,
) -> Step:
    return Step(number, pipe, amount, shape, layout, operands, 1 if pipe in ("max", "sum") else None)


def test_a_thread_has_what_its_layout_says() -> None:
    whole = step(1, "fma", 64 * 64)
    assert registers(whole, 4) == instructions(whole, 4, 1) == 32
    # Four lanes have a row of the accumulator together, so each number a row is there four times: two rows a thread.
    row = step(2, "fma", 64, (64,), layout=SliceLayout(1, ACCUMULATOR))
    assert instructions(row, 4, 1) == 2
    small = BlockedLayout((1, 4), (4, 8), (4, 1), (1, 0))
    assert registers(step(3, "alu", 64 * 64, layout=small), 4) == 32
    # Of a pair of CTAs each does half; one warp alone does everything.
    assert instructions(step(4, "alu", 128 * 32 / 2, (128, 32), layout=None), 4, 2) == 32
    assert instructions(step(5, "alu", 1024, (32, 32), layout=None), 1, 1) == 32


@pytest.mark.parametrize(("pipe", "cycles"), [("mufu", 8), ("alu", 2), ("cvt", 2)])
def test_a_step_alone_takes_its_pipe(pipe: str, cycles: float) -> None:
    load = work_load([step(1, pipe, 64 * 64)], 4, 1, H200, False)
    assert load.cycles == pytest.approx(32 * cycles)
    assert dict(load.demand)["issue"] == 32


def test_steps_that_chain_overlap_and_a_reduction_is_waited_for() -> None:
    exponential, packs = step(1, "mufu", 64 * 64), step(2, "cvt", 64 * 32, (64, 64), 1)
    chained = work_load([exponential, packs], 4, 1, H200, False)
    assert chained.cycles < 32 * 8 + 16 * 2
    largest = step(1, "max", 64 * 64)
    scaled = step(2, "fma", 64 * 64, (64, 64), 1)
    after = work_load([largest, scaled], 4, 1, H200, False)
    # Two shuffles across the four lanes of a row stand between.
    assert after.cycles > 30 * 2 + 32 + 2 * H200["shuffle.latency_cycles"]


def test_what_others_are_told_of_has_to_be_there() -> None:
    steps = [step(1, "mufu", 64 * 64)]
    told, waits = (work_load(steps, 4, 1, H200, hands_over).cycles for hands_over in (True, False))
    assert told == pytest.approx(waits + H200["mufu.ex2_latency_cycles"])


def test_numbers_of_steps_do_not_matter() -> None:
    first = work_load([step(1, "mufu", 64 * 64), step(2, "cvt", 64 * 32, (64, 64), 1)], 4, 1, H200, False)
    later = work_load([step(8, "mufu", 64 * 64), step(9, "cvt", 64 * 32, (64, 64), 8)], 4, 1, H200, False)
    assert first is later


def test_a_barrier_holds_what_comes_after_it() -> None:
    stores = step(1, "smem_store", 64 * 128)
    loads = step(3, "smem_load", 64 * 128)
    together = work_load([stores, loads], 4, 1, H200, False).cycles
    apart = work_load([stores, Step(2, "barrier", 1.0, (), None, (), None), loads], 4, 1, H200, False).cycles
    assert apart >= together + H200["sync.barrier_cycles"]


def test_two_results_an_instruction_take_one_slot_where_the_machine_has_them() -> None:
    pair = step(1, "fma2", 64 * 32)
    on_b200, on_h200 = (dict(work_load([pair], 4, 1, machine, False).demand) for machine in (B200, H200))
    assert (on_b200["issue"], on_h200["issue"]) == (16, 32)
    assert on_b200["fma"] == pytest.approx(32 * 128 / B200["fma.achieved_lanes"])


def test_arithmetic_beside_wgmma_is_slower_and_beside_tcgen05_not() -> None:
    steps = [step(1, "mufu", 64 * 64), step(2, "fma", 64 * 64, (64, 64), 1)]
    hopper, blackwell = (work_load(steps, 4, 1, machine, False) for machine in (H200, B200))
    assert hopper.cycles_beside > 1.2 * hopper.cycles
    assert blackwell.cycles_beside == blackwell.cycles


def test_shared_memory_takes_its_port_from_a_product_that_reads_there() -> None:
    reads = (("tensor", 64.0), ("smem", 64.0))
    product = Load("product", reads, 64.0, reads, 64.0)
    stores = Load("work", (("smem", 4.0),), 16.0, (("smem", 4.0),), 16.0)
    fast = speeds((product, stores))
    assert fast == (0.75, 1.0)
    # If products go first, as in the pipelines, stores have what they leave: nothing.
    assert speeds((product, stores), between=False) == (1.0, 0.0)
    # A product that reads half as much has room for them.
    half = (("tensor", 64.0), ("smem", 32.0))
    assert speeds((Load("product", half, 64.0, half, 64.0), stores)) == (1.0, 1.0)


IN_PLACE = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
import numpy as np

LAYOUT = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
PLAIN = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])

@gluon.jit
def kernel(x_ptr):
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    x = x_ptr + rows[:, None] * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    a = gl.allocate_shared_memory(gl.float16, [64, 64], PLAIN)
    b = gl.allocate_shared_memory(gl.float16, [64, 64], PLAIN)
    a.store(gl.load(x))
    b.store(a.load(LAYOUT))
    b.store(b.load(LAYOUT))
    gl.store(x, b.load(LAYOUT))

def run():
    kernel[(1,)](np.zeros((64, 64), np.float16), num_warps=4)
"""


def test_warps_meet_between_accesses_to_an_allocation_of_which_one_stores(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(IN_PLACE)
    session, module = load_any(str(tmp_path / "kernel.py"), machine=H200, sms=1)
    module.run()
    steps = [event.steps for event in session.traces[0].roles[0].events if isinstance(event, Work)]
    kinds = [one.pipe for every in steps for one in every if one.pipe in {"smem_load", "smem_store", "barrier"}]
    assert kinds == [
        "smem_store", "barrier", "smem_load", "smem_store",
        "barrier", "smem_load", "barrier", "smem_store", "barrier", "smem_load",
    ]  # fmt: skip


FOREIGN = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
import numpy as np

LAYOUT = gl.BlockedLayout([1], [32], [4], [0])

@gluon.jit
def double(x_ptr, out_ptr, BLOCK: gl.constexpr):
    places = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, LAYOUT)
    gl.store(out_ptr + places, gl.exp2(gl.load(x_ptr + places)))

def run(n):
    x = np.ones(n, np.float32)
    double[(n // 1024,)](x, np.zeros_like(x), BLOCK=1024, num_warps=4)
"""


def test_anybodys_kernel_has_cycles_lines_and_a_timeline(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(FOREIGN)
    timeline = tmp_path / "timeline.json"
    found = run_call(str(tmp_path / "kernel.py"), "run(2048)", "h200", "late", 0, None, trace=str(timeline))
    assert found.cycles is not None
    assert found.cycles > H200["l2.latency_cycles"] + 8 * 8
    assert "work     line 10: places = gl.program_id(0)" in found.text
    assert "for the longest of 2 programs" in found.text
    assert len(json.loads(timeline.read_text())["traceEvents"]) > 2
    twice = run_call(str(tmp_path / "kernel.py"), "run(2048)", "h200", "late", 0, None)
    assert twice.cycles == found.cycles


def test_a_product_without_a_known_rate_is_named() -> None:
    issue = MatrixIssue(1, 128, 128, 64, "e2m1", "smem", 1, 1, "acc = a x b")
    trace = ProgramTrace(0, (RoleTrace("", 0, 4, [issue]),))
    lines, timeline = described([trace], B200, str)
    assert timeline is None
    assert lines == ["  cycles     not replayed: no rate of products of e2m1 is known here"]
