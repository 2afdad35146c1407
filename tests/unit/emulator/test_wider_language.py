"""What few kernels need of the language: packed pairs, element by element, scans, histograms, gathers, mma.sync."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilecast
from tilecast.emulator.errors import BoundsError, IntegerError, LayoutError, UnsupportedError

HEAD = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.extra import libdevice
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.blackwell import float2
from triton.experimental.gluon.language.nvidia.blackwell.float2 import Float2Tensor

FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
WIDE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])

@gluon.jit
def places(ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    return rows * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))[None, :]

"""


def launch(tmp_path: Path, body: str, *args: Any) -> None:
    """Run ``kernel`` of these lines on the arguments, named a, b, ..."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    names = ", ".join("abcdef"[: len(args)])
    path = tmp_path / "kernels.py"
    path.write_text(HEAD + f"@gluon.jit\ndef kernel({names}):\n{lines}\n")
    tilecast.emulated(path).kernel[(1,)](*args)


def normal(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def test_packed_pairs_are_neighbours_along_an_axis_and_round_once(tmp_path: Path) -> None:
    x, y, out, sums = normal(4, 64), normal(4, 64) + 1, np.zeros((4, 64), np.float32), np.zeros((2, 4), np.float32)
    body = """
at = places(4, 64, WIDE)
x, y = float2.pack(gl.load(a + at), axis=1), float2.pack(gl.load(b + at), axis=1)
gl.static_assert(x.value.shape[1] == 32 and isinstance(x, Float2Tensor))
found = float2.fma(x, y, float2.full_like(x, -3.0)) - x * y + y
gl.store(c + at, float2.unpack(found, axis=1))
even, odd = float2.unpack2(x.sum(axis=1))
rows = gl.arange(0, 4, layout=gl.SliceLayout(1, WIDE))
gl.store(d + rows, even)
gl.store(d + 4 + rows, odd)
"""
    launch(tmp_path, body, x, y, out, sums)
    once = (x.astype(np.float64) * y - 3).astype(np.float32)
    assert (out == once - x * y + y).all()
    np.testing.assert_allclose(sums, [x[:, ::2].sum(1), x[:, 1::2].sum(1)], rtol=1e-5, atol=1e-5)


def test_packing_other_types_or_an_odd_extent_is_named_with_the_line(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"float2.pack2\(h, h\).*two float32 tensors"):
        launch(tmp_path, "h = gl.arange(0, 32, layout=FLAT)\nfloat2.pack2(h, h)", np.zeros(1))
    with pytest.raises(LayoutError, match=r"extent of 1"):
        launch(tmp_path, "float2.pack(gl.zeros([1], gl.float32, FLAT), 0)", np.zeros(1))


def test_a_scalar_function_may_branch_on_each_element_alone_or_in_groups(tmp_path: Path) -> None:
    x, single, both = normal(64), np.zeros(64, np.float32), np.zeros((2, 64), np.float32)
    path = tmp_path / "kernels.py"
    path.write_text(
        HEAD
        + """
@gluon.jit
def clipped(x, limit):
    if x > limit:
        return limit
    return x

@gluon.jit
def doubled(x0, x1):
    return x0 * 2, x1 * 2, x0 > 0.0, x1 > 0.0

@gluon.jit
def kernel(x_ptr, single, both):
    at = gl.arange(0, 64, layout=FLAT)
    x = gl.load(x_ptr + at)
    gl.store(single + at, gl.map_elementwise(clipped, x, 0.5))
    twice, positive = gl.map_elementwise(doubled, x, pack=2)
    gl.store(both + at, twice)
    gl.store(both + 64 + at, gl.where(positive, 1.0, 0.0))
"""
    )
    tilecast.emulated(path).kernel[(1,)](x, single, both)
    assert (single == np.minimum(x, np.float32(0.5))).all()
    assert (both == [x * 2, x > 0]).all()


def test_scans_histograms_and_gathers(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 8, 32, dtype=np.int32)
    out = [np.zeros(n, np.int32) for n in (32, 32, 8, 32)]
    path = tmp_path / "kernels.py"
    path.write_text(
        HEAD
        + """
@gluon.jit
def add(p, q):
    return p + q

@gluon.jit
def kernel(x_ptr, sums, tails, bins, turned):
    at = gl.arange(0, 32, layout=FLAT)
    x = gl.load(x_ptr + at)
    gl.store(sums + at, gl.associative_scan(x, 0, add))
    gl.store(tails + at, gl.associative_scan(x, 0, add, reverse=True))
    gl.store(bins + gl.arange(0, 8, layout=FLAT), gl.histogram(x, 8, layout=FLAT))
    gl.store(turned + at, gl.gather(x, 31 - at, 0))
"""
    )
    tilecast.emulated(path).kernel[(1,)](x, *out)
    wanted = (x.cumsum(), x[::-1].cumsum()[::-1], np.bincount(x, minlength=8), x[::-1])
    for found, right in zip(out, wanted, strict=True):
        assert (found == right).all()


@pytest.mark.parametrize(("call", "message"), [("gl.gather(x, x + 1, 0)", "32"), ("gl.histogram(x, 8)", "0 to 31")])
def test_numbers_outside_are_out_of_bounds(tmp_path: Path, call: str, message: str) -> None:
    with pytest.raises(BoundsError, match=message):
        launch(tmp_path, f"x = gl.arange(0, 32, layout=FLAT)\n{call}", np.zeros(1))


PRODUCT = """
MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
x = gl.convert_layout(gl.load(a + places(32, 16, WIDE)), gl.DotOperandLayout(0, MMA, 8))
y = gl.convert_layout(gl.load(b + places(16, 64, WIDE)), gl.DotOperandLayout(1, PARENT, 8))
acc = mma_v2(x, y, gl.full([32, 64], 1.0, gl.float32, MMA), input_precision=PRECISION)
gl.store(c + places(32, 64, WIDE), gl.convert_layout(acc, WIDE))
"""


@pytest.mark.parametrize(("precision", "bound"), [("ieee", 1e-5), ("tf32", 2e-2)])
def test_mma_sync_adds_the_product_in_the_precision_asked_for(tmp_path: Path, precision: str, bound: float) -> None:
    x, y, out = normal(32, 16), normal(16, 64), np.zeros((32, 64), np.float32)
    launch(tmp_path, PRODUCT.replace("PARENT", "MMA").replace("PRECISION", f'"{precision}"'), x, y, out)
    error = np.abs(out - 1 - x.astype(np.float64) @ y).max()
    assert error < bound
    # tf32 keeps ten bits of fraction, so that it cannot be exact.
    assert (error > 1e-4) == (precision == "tf32")


def test_mma_sync_wants_operands_of_its_accumulators_layout(tmp_path: Path) -> None:
    other = "gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])"
    with pytest.raises(LayoutError, match="operand 1 needs a DotOperandLayout"):
        body = PRODUCT.replace("PARENT", other).replace("PRECISION", '"ieee"')
        launch(tmp_path, body, normal(32, 16), normal(16, 64), np.zeros((32, 64), np.float32))


def test_layouts_that_the_compiler_chooses_fit_everything(tmp_path: Path) -> None:
    x, out = normal(64) ** 2, np.zeros(64, np.float32)
    body = """
at = gl.arange(0, 64, gl.AutoLayout())
fixed = gl.arange(0, 64, layout=FLAT)
gl.store(b + fixed, libdevice.fast_expf(gl.load(gl.set_auto_layout(a + at, FLAT))) + gl.load(a + at))
"""
    launch(tmp_path, body, x, out)
    np.testing.assert_allclose(out, np.exp(x) + x, rtol=1e-6)


def test_what_a_compiled_kernel_would_tell_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(
        HEAD + "@gluon.jit\ndef kernel(a):\n    pass\n\ndef host(a):\n    return kernel.warmup(a, grid=(1,)).asm\n"
    )
    with pytest.raises(UnsupportedError, match="kernel: nothing is compiled here, so that a kernel has no asm"):
        tilecast.emulated(path).host(np.zeros(1))


def test_autotuned_and_derived_arguments_leave_the_kernel_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(
        HEAD.replace(
            "from triton.experimental import gluon\n", "import triton\nfrom triton.experimental import gluon\n", 1
        )
        + """
@gluon.jit
def kernel(out, N: gl.constexpr, TWICE: gl.constexpr):
    gl.store(out + gl.arange(0, 32, layout=FLAT), gl.full([32], N + TWICE, gl.int32, FLAT))

tuned = triton.autotune([triton.Config({"N": 3})], key=[])(kernel)
derived = triton.heuristics({"TWICE": lambda given: 2 * given["N"]})(kernel)
"""
    )
    found, out = tilecast.emulated(path), np.zeros(32, np.int32)
    for launched, arguments, wanted in (
        (found.tuned, {"TWICE": 1}, 4),
        (found.derived, {"N": 5}, 15),
        (found.kernel, {"N": 1, "TWICE": 1}, 2),
    ):
        launched[(1,)](out, **arguments)
        assert (out == wanted).all()


@pytest.mark.parametrize(
    "call", ["[(first, (out, 1)), (second, (out,))], [1], [24]", "(out, 1), first, (out,), [second], [1], [24]"]
)
def test_partitions_are_given_as_releases_take_them_and_the_first_one_returns(tmp_path: Path, call: str) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(
        HEAD
        + f"""
ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])

@gluon.jit
def first(out, number):
    gl.store(out + gl.arange(0, 32, layout=FLAT), gl.full([32], number, gl.int32, FLAT))
    return number + 1

@gluon.jit
def second(out):
    gl.store(out + 32 + gl.arange(0, 32, layout=ONE), gl.full([32], 7, gl.int32, ONE))

@gluon.jit
def kernel(out):
    found = gl.warp_specialize({call})
    gl.store(out + 64 + gl.arange(0, 32, layout=FLAT), gl.full([32], found, gl.int32, FLAT))
"""
    )
    out = np.zeros(96, np.int32)
    tilecast.emulated(path).kernel[(1,)](out)
    assert out.reshape(3, 32).tolist() == [[1] * 32, [7] * 32, [2] * 32]


def test_scalars_take_other_types_comparisons_too(tmp_path: Path) -> None:
    out = np.zeros(4, np.int32)
    body = """
one = gl.program_id(0) + 1
less = (one < 2).to(gl.int32)
half = one.to(gl.float32) / 2
gl.store(a, less)
gl.store(a + 1, (one > 1).to(gl.int64).to(gl.int32))
gl.store(a + 2, (half * 4).to(gl.int32))
gl.store(a + 3, less + (one == 1).to(gl.int32))
"""
    launch(tmp_path, body, out)
    np.testing.assert_array_equal(out, [1, 0, 2, 2])


def test_a_mask_loses_the_bits_that_are_shifted_out_and_a_number_overflows(tmp_path: Path) -> None:
    """PTX ISA, "shl": amounts beyond the width are clamped to it."""
    amounts, out = np.array([0, 5, 31, 32, 40, 200], np.int32), np.zeros((2, 6), np.int32)
    body = """
at = gl.arange(0, 8, layout=FLAT)
gl.store(b + at, -1 << gl.load(a + at, mask=at < 6, other=0), mask=at < 6)
for i in range(6):
    gl.store(b + 6 + i, -1 << gl.load(a + i))
"""
    launch(tmp_path, body, amounts, out)
    assert (out == np.array([-1, -32, -(2**31), 0, 0, 0])).all()
    for number in ("1 << gl.load(a + 3)", "gl.full([8], 3, gl.int32, FLAT) << gl.load(a + 2)"):
        with pytest.raises(IntegerError, match="a 32-bit integer overflows"):
            launch(
                tmp_path,
                f"gl.store(b + gl.arange(0, 8, layout=FLAT), {number}, mask=gl.arange(0, 8, layout=FLAT) < 1)",
                amounts,
                out,
            )


def test_a_barrier_is_one_number_for_each_cta(tmp_path: Path) -> None:
    """As Triton's verifier has it: "a descriptor of Nxi64 type with N <= number of CTAs"."""
    body = "bars = gl.allocate_shared_memory(gl.int64, [4, {}], mbarrier.MBarrierLayout())\nmbarrier.init(bars.index(0), count=1)"
    head = "from triton.experimental.gluon.language.nvidia.hopper import mbarrier\n"
    path = tmp_path / "barriers.py"
    for count in (1, 2):
        lines = "\n".join(f"    {line}" for line in body.format(count).splitlines())
        path.write_text(HEAD + head + f"@gluon.jit\ndef kernel(a):\n{lines}\n")
        kernel = tilecast.emulated(path).kernel[(1,)]
        if count == 1:
            kernel(np.zeros(1))
        else:
            with pytest.raises(LayoutError, match="bars: 2 numbers to a barrier, of at most 1, one for each CTA"):
                kernel(np.zeros(1))
