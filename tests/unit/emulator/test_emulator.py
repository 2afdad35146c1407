"""The parts of the emulator: scalars, rounding, PTX, layouts, barriers, memory, refusals, and the verdict."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tilecast.emulator.errors import (
    BarrierError,
    DeadlockError,
    EmulationError,
    LayoutError,
    RaceError,
    UnsupportedError,
)
from tilecast.emulator.hardware.clocks import COPY, Agent, Knowledge
from tilecast.emulator.language import ptx
from tilecast.emulator.run import emulate, kernel_path, new_session
from tilecast.emulator.source import Source
from tilecast.emulator.values import dtypes
from tilecast.emulator.values.layouts import (
    DistributedLinearLayout,
    SliceLayout,
    expanded,
    halved,
    permuted,
    reshaped,
    row_per_lane,
    same_threads,
)
from tilecast.emulator.values.scalars import Int, Int64, constexpr
from tilecast.emulator.values.tensors import Tensor
from tilecast.emulator.verify import judge, reference, visible
from tilecast.model.machine.machine import load_machine

HEADER = """
TILECAST = {
    "family": "blackwell_ws", "machine": "b200",
    "workload": {"head_dim_qk": 64, "head_dim_v": 64, "mask": "none", "window": None},
}
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

"""

LAUNCH = """

def launch(q, k, v, out, lse, scale, window_left=-1, window_right=-1):
    kernel[(1,)](out, num_warps=4)
"""


def run(body: str, mode: str = "late", seed: int = 0) -> object:
    """Run a kernel of a few lines that gets ``out``, 64 x 64 of fp16."""
    ones = np.ones((1, 1, 64, 64), np.float16)
    return emulate("small.py", ones, ones, ones, text=HEADER + body + LAUNCH, mode=mode, seed=seed).out


def session() -> object:
    return new_session(Source("none.py", HEADER), load_machine("b200"))


# --- values -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "quotient", "rest"), [(7, 2, 3, 1), (-7, 2, -3, -1), (7, -2, -3, 1), (-7, -2, 3, -1)]
)
def test_integer_division_rounds_towards_zero_as_in_c(a: int, b: int, quotient: int, rest: int) -> None:
    assert (Int(a) // b, Int(a) % b) == (quotient, rest)
    assert (a // Int(b), a % Int(b)) == (quotient, rest)


def test_32_bit_integers_overflow_loudly() -> None:
    with pytest.raises(EmulationError, match="overflows"):
        Int(2**30) * 2
    assert Int(2**30).to(dtypes.INT64) * 2 == 2**31
    assert isinstance(Int64(1) + Int(1), Int64)
    tensor = Tensor(session(), np.array([2**30], np.int32))  # type: ignore[arg-type]
    with pytest.raises(EmulationError, match="overflows"):
        tensor * 2


def test_constants_keep_their_kind() -> None:
    assert constexpr(3).value == 3 and constexpr(0.5) * 2 == 1.0 and constexpr("a").value == "a"
    assert constexpr(True) is True


def test_rounding_is_to_nearest_even() -> None:
    between = np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)  # half way between neighbours of bf16
    np.testing.assert_array_equal(dtypes.cast(between, dtypes.BF16).astype(np.float32), [1.0, 1 + 2**-6])
    np.testing.assert_array_equal(dtypes.cast(np.float32([2049, 2051]), dtypes.FP16), [2048, 2052])


def test_fp8_saturates_and_keeps_nan() -> None:
    made = dtypes.cast(np.array([1e6, -1e6, np.nan, 17.0], np.float32), dtypes.FP8E4).astype(np.float32)
    np.testing.assert_array_equal(made[:2], [448, -448])
    assert np.isnan(made[2]) and made[3] == 16.0


# --- PTX ----------------------------------------------------------------------------------------------------------------


def one(text: str, *inputs: float) -> float:
    return float(ptx.run(text, [np.array([x], np.float32) for x in inputs], 1)[0].view(np.float32)[0])


def test_ptx_rounds_and_flushes_as_asked() -> None:
    assert one("add.rm.f32 $0, $1, $2;", 2.0**24, -0.5) == 2.0**24 - 1
    assert one("add.rn.f32 $0, $1, $2;", 2.0**24, -0.25) == 2.0**24
    assert one("fma.rn.f32 $0, $1, $2, $3;", 1 + 2**-12, 1 - 2**-12, -1.0) == -(2.0**-24)
    assert one("ex2.approx.ftz.f32 $0, $1;", -140.0) == 0.0
    assert 0.0 < math.tanh(0.7) - one("tanh.approx.f32 $0, $1;", 0.7) < 2**-11 * math.tanh(0.7)
    assert one("tanh.approx.f32 $0, $1;", -1e9) == -1.0
    assert one("max.ftz.f32 $0, $1, $2;", float("nan"), 1.0) == 1.0
    assert np.isnan(one("max.NaN.ftz.f32 $0, $1, $2;", float("nan"), 1.0))


def test_ptx_registers_that_a_block_does_not_declare_last() -> None:
    """A vote is read by a later block, of another number of threads; each partition has its own."""
    vote = (
        "{ .reg .pred above; setp.gt.f32 above, $1, 0f40000000; setp.gt.or.f32 above, $2, 0f40000000, above;\n"
        "vote.sync.any.pred above, above, -1; selp.b32 within, 0, 1, above; mov.b32 $0, $1; }"
    )
    lasting: dict[str, object] = {}
    low, high = np.array([1.0, np.nan], np.float32), np.array([2.0, 2.5], np.float32)
    for second, outcome in ((low, 1), (high, 0)):
        ptx.run(vote, [low, second], 1, lasting=lasting)
        assert ptx.run("mov.b32 $0, within;", [np.zeros(1, np.int32)], 1, lasting=lasting)[0] == outcome
    assert lasting.keys() == {"within"}
    with pytest.raises(UnsupportedError, match="'within', which nothing has written"):
        ptx.run("mov.b32 $0, within;", [np.zeros(1, np.int32)], 1)
    with pytest.raises(UnsupportedError, match="'apart' outlives its block and differs"):
        ptx.run("mov.b32 apart, $1; mov.b32 $0, $1;", [low], 1)


def test_ptx_that_is_not_known_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"sin\.approx\.f32 \$0, \$1"):
        one("sin.approx.f32 $0, $1;", 1.0)
    with pytest.raises(UnsupportedError, match="'%r5', which nothing has written"):
        one("add.f32 $0, $1, %r5;", 1.0)


def test_ptx_instruction_counts() -> None:
    text = "{ .reg .b64 a; mov.b64 a, {$1, $2}; fma.rn.ftz.f32x2 a, a, a, a; mov.b64 {$0, x}, a; ex2.approx.ftz.f32 $0, $1; }"
    assert ptx.instructions(text) == {"fma2": 1.0, "mufu": 1.0}


# --- layouts --------------------------------------------------------------------------------------------------------------


def rows(columns: int) -> DistributedLinearLayout:
    return DistributedLinearLayout(
        [[0, 1 << i] for i in range(columns.bit_length() - 1)], [[1 << i, 0] for i in range(5)], [[32, 0], [64, 0]], [], [128, columns],
    )  # fmt: skip


def test_slices_expand_into_their_parent_only() -> None:
    assert expanded(SliceLayout(1, rows(32)), 1) == rows(32)
    with pytest.raises(LayoutError, match="new dimension 0"):
        expanded(SliceLayout(1, rows(32)), 0)


def test_tensor_memory_wants_a_row_to_a_lane() -> None:
    assert row_per_lane(rows(32), [128, 32]) == ""
    # What a layout of fewer columns leaves out is in more registers, as in Triton's linear layouts.
    assert row_per_lane(rows(32), [128, 64]) == ""
    assert "got one of [128, 32]" in row_per_lane(rows(32), [64, 32])
    turned = DistributedLinearLayout([[1, 0]], [[0, 1 << i] for i in range(5)], [[2, 0], [4, 0]], [], [128, 32])
    assert "row 32 w + l" in row_per_lane(turned, [128, 32])


def test_operands_need_one_layout() -> None:
    shared = session()
    a = Tensor(shared, np.ones((128, 2), np.float32), rows(2))  # type: ignore[arg-type]
    b = Tensor(shared, np.ones((128, 2), np.float32), SliceLayout(0, rows(4)))  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="different layouts"):
        a + b


def test_layouts_follow_reshape_permute_and_split() -> None:
    """The two halves of a row, as the kernels take them apart: same threads, registers renamed."""
    middle = reshaped(rows(32), (128, 32), (128, 2, 16))
    left = halved(permuted(middle, (0, 2, 1)))
    assert left is not None and left.shape == (128, 16) and same_threads(left, rows(16))
    across = DistributedLinearLayout(
        [[0, 1]], [[0, 2], [1, 0], [2, 0], [4, 0], [8, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    with pytest.raises(LayoutError, match="same thread"):
        halved(permuted(reshaped(across, (64, 4), (64, 2, 2)), (0, 2, 1)))


def test_a_conversion_that_is_not_trivial() -> None:
    body = """
@gluon.jit
def kernel(out):
    rows = gl.DistributedLinearLayout([[0, 1]], [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [[32, 0], [64, 0]], [], [128, 2])
    turned = gl.DistributedLinearLayout([[0, 1]], [[2, 0], [1, 0], [4, 0], [8, 0], [16, 0]], [[32, 0], [64, 0]], [], [128, 2])
    x = gl.full([128, 2], 1.0, gl.float32, rows)
    gl.convert_layout(x, turned{})
"""
    run(body.format(""))
    with pytest.raises(LayoutError, match="moves values between threads"):
        run(body.format(", assert_trivial=True"))


# --- happens-before -------------------------------------------------------------------------------------------------------


def test_knowledge_travels_with_releases_only() -> None:
    writer, reader = Agent(0, 0), Agent(1, 0)
    before = writer.code
    handed = writer.release()
    after = writer.code
    reader.knowledge.join(handed)
    assert reader.knowledge.has(before) and not reader.knowledge.has(after)
    assert not reader.knowledge.has_fenced(before)
    reader.fence()
    assert reader.knowledge.has_fenced(before)


def test_copies_are_known_one_by_one() -> None:
    known = Knowledge()
    known.copies |= 1 << 7
    assert known.has(COPY + 7) and not known.has(COPY + 6)


# --- small kernels ----------------------------------------------------------------------------------------------------------

TWO_ROLES = """
@gluon.jit
def first(memory, bars):
    {first}


@gluon.jit
def second(memory, bars):
    {second}


@gluon.jit
def kernel(out):
    memory = gl.allocate_shared_memory(gl.float32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    gl.warp_specialize([(first, (memory, bars)), (second, (memory, bars))], [4], [64])
"""
STORE = "memory.index(0).store(gl.full([32], 1.0, gl.float32, None))"


def two(first: str, second: str) -> str:
    return TWO_ROLES.format(first=first, second=second)


@pytest.mark.parametrize("mode", ["late", "random"])
def test_a_barrier_orders_a_store_and_a_load(mode: str) -> None:
    run(
        two(
            f"{STORE}\n    mbarrier.arrive(bars.index(0))",
            "mbarrier.wait(bars.index(0), 0)\n    memory.index(0).load()",
        ),
        mode,
    )


def test_the_wrong_barrier_does_not() -> None:
    first = f"mbarrier.arrive(bars.index(0))\n    {STORE}\n    mbarrier.arrive(bars.index(1))"
    with pytest.raises(RaceError) as caught:
        run(two(first, "mbarrier.wait(bars.index(0), 0)\n    memory.index(0).load()"))
    assert "memory.index(0).load()" in str(caught.value) and STORE in str(caught.value)


def test_deadlock_names_who_waits_for_what() -> None:
    with pytest.raises(DeadlockError) as caught:
        run(two("mbarrier.wait(bars.index(0), 0)", "mbarrier.wait(bars.index(1), 0)"))
    message = str(caught.value)
    assert "first waits for bars[0], parity 0; phase 0 is running and lacks 1 of 1 arrivals" in message
    assert "second waits for bars[1], parity 0" in message and "mbarrier.wait(bars.index(1), 0)" in message


def test_too_many_arrivals() -> None:
    with pytest.raises(BarrierError, match="more arrivals in phase 0"):
        run(two("mbarrier.arrive(bars.index(0), count=2)", "pass"))


def test_a_barrier_without_init() -> None:
    body = two("pass", "mbarrier.arrive(bars.index(1))").replace("    mbarrier.init(bars.index(1), count=1)\n", "")
    with pytest.raises(BarrierError, match=r"bars\[1\] is used before mbarrier.init"):
        run(body)


def test_a_ring_index_outside() -> None:
    with pytest.raises(EmulationError, match="memory has 2 slots, index 2"):
        run(two("memory.index(2).load()", "pass"))


def test_what_is_not_emulated_is_named_with_its_line() -> None:
    with pytest.raises(UnsupportedError, match=r"line \d+: gl\.bank_conflicts\(1\): .*gluon\.language\.bank_conflicts"):
        run(two("gl.bank_conflicts(1)", "pass"))
    with pytest.raises(UnsupportedError, match=r"line \d+: gl\.arange\(0, 32\)\.sort.*tensor\.sort"):
        run(two("gl.arange(0, 32).sort(0)", "pass"))
    with pytest.raises(UnsupportedError, match=r"line \d+: mbarrier\.arrive\(bars\.index\(0\), to_cta=0\)"):
        run(two("mbarrier.arrive(bars.index(0), to_cta=0)", "pass"))


# --- refusals and verdict -------------------------------------------------------------------------------------------------


def test_refusals_say_what_to_do() -> None:
    ones = np.ones((1, 1, 64, 128), np.float16)
    with pytest.raises(EmulationError, match="tilecast generate"):
        emulate("no_such_kernel", ones, ones, ones)
    with pytest.raises(EmulationError, match="late or random"):
        emulate("hopper_ws_d128_full", ones, ones, ones, mode="early")
    with pytest.raises(EmulationError, match="needs wgmma, b200 has tcgen05"):
        emulate("hopper_ws_d128_full", ones, ones, ones, machine="b200")
    with pytest.raises(EmulationError, match="family 'triton'"):
        emulate("triton_d128_full", ones, ones, ones)
    with pytest.raises(EmulationError, match="q: expected a tensor of"):
        emulate("hopper_ws_d128_full", ones[0], ones, ones)
    with pytest.raises(UnsupportedError, match=r"tcgen05\.ld\.red"):
        emulate("blackwell_ws_d128_causal_b300", ones, ones, ones, machine="b200")


def test_torch_tensors_are_read_in_place() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 100, 64, dtype=torch.bfloat16) for _ in range(3))
    done = emulate("hopper_ws_d64_full", q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double()).numpy()
    np.testing.assert_allclose(done.out.astype(np.float64), expected, atol=2e-2)
    assert judge(done, q, k, v, 0.125, (-1, -1)).wrong == ""


def test_reference_aligns_bottom_right_and_empties_rows_without_keys() -> None:
    np.testing.assert_array_equal(visible(2, 3, (-1, 0)), [[True, True, False], [True, True, True]])
    q, k = np.ones((1, 1, 3, 4), np.float32), np.ones((1, 1, 2, 4), np.float32)
    out, lse = reference(q, k, k, 1.0, (-1, 0))
    assert np.isneginf(lse[0, 0, 0]) and (out[0, 0, 0] == 0).all() and lse[0, 0, 2] == pytest.approx(4 + np.log(2))


def test_emulated_files_stay_as_they_are(tmp_path: Path) -> None:
    shipped = kernel_path("hopper_ws_d64_full")
    before = shipped.read_bytes()
    copy = tmp_path / "kernel.py"
    copy.write_bytes(before)
    q = np.zeros((1, 1, 64, 64), ml_dtypes.bfloat16)
    emulate(copy, q, q, q)
    assert copy.read_bytes() == before
