"""`triton_quantize` in Triton's interpreter, against the same in PyTorch: bytes, factors, rotations.

TRITON_INTERPRET counts when triton is imported, so the numerics run in a process of their own: one test here starts pytest on
this file again.
"""

from __future__ import annotations

import pytest
from support.interpreter import run_interpreted

from tilecast.codegen.portable.quantize import generate_quantize
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tilecast.kernels import quantize  # noqa: E402
from tilecast.kernels.generated import triton_quantize as kernel  # noqa: E402


def drawn(dims: tuple[int, int], heads: tuple[int, int], rows: tuple[int, int]) -> list[torch.Tensor]:
    torch.manual_seed(sum(dims))
    shapes = ((heads[0], rows[0], dims[0]), (heads[1], rows[1], dims[0]), (heads[1], rows[1], dims[1]))
    return [torch.randn(2, *shape).half() for shape in shapes]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("dims", "heads", "rows", "rotate"),
    [
        ((64, 64), (4, 2), (1, 140), True),
        ((96, 32), (2, 2), (140, 10), True),  # three parts of 32 columns
        ((256, 128), (2, 1), (70, 130), True),  # two parts that are mixed, and programs of 64 rows
    ],
)
def test_bytes_and_factors_are_those_of_pytorch(dims, heads, rows, rotate) -> None:
    q, k, v = drawn(dims, heads, rows)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    q[0, 0] = 0
    made = [torch.full(x.shape, 0x7F, dtype=torch.uint8) for x in (q, k, v)]
    factors = torch.full((3, 2, heads[1]), float("nan"))
    kernel.launch(q, k, v, *made, factors, rotate, 2**31 - 1)
    *wanted, wanted_factors = quantize._by_pytorch(q, k, v, rotate, 2**31 - 1)
    torch.testing.assert_close(factors, wanted_factors, rtol=1e-6, atol=0.0)
    for got, want in zip(made, wanted, strict=True):
        # Rotated halves of 16 bits are often ties, and sums in another order may round to the neighbour.
        assert (got != want.view(torch.uint8)).float().mean() < 1e-2
        torch.testing.assert_close(got.view(torch.float8_e4m3fn).float(), want.float(), rtol=2**-3, atol=2**-9)


@pytest.mark.interpreted
def test_a_head_of_zeros_and_no_queries() -> None:
    q, k, v = drawn((64, 64), (2, 1), (3, 5))
    k[1] = 0
    made = [torch.zeros(x.shape, dtype=torch.uint8) for x in (q, k, v)]
    factors = torch.zeros(3, 2, 1)
    kernel.launch(q, k, v, *made, factors)
    assert factors[1, 1] == 1.0 and not made[1][1].any()
    kernel.launch(q[:, :, :0], k, v, made[0][:, :, :0], *made[1:], factors)
    assert (factors[0] == 1.0).all() and (factors[2] != 1.0).all()


def test_numerics(tmp_path) -> None:
    ran = run_interpreted(__file__, tmp_path)
    assert sum(name.startswith("test_bytes") for name in ran) == 3, "all run in the interpreter"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"v": torch.zeros(2, 1, 5, 64)}, "v: expected .*float16.* got .*float32"),
        ({"q": torch.zeros(2, 2, 64, 3).half().transpose(2, 3)}, r"q: expected .* got .*last stride"),
        ({"k_out": torch.zeros(2, 1, 5, 64)}, "k: expected .*uint8.* got .*float32"),
        (
            {"factors": torch.zeros(2, 1)},
            r"factors: expected contiguous float32 \(3, 2, 1\), got torch.float32 \(2, 1\)",
        ),
    ],
)
def test_launches_refuse_in_one_sentence(change, text) -> None:
    q, k, v = drawn((64, 64), (2, 1), (3, 5))
    outs = {f"{name}_out": torch.zeros(x.shape, dtype=torch.uint8) for name, x in (("q", q), ("k", k), ("v", v))}
    with pytest.raises(ValueError, match=text):
        kernel.launch(**({"q": q, "k": k, "v": v, "factors": torch.zeros(3, 2, 1), **outs} | change))


def test_what_is_e4m3_already_is_not_quantised() -> None:
    with pytest.raises(VariantError, match="dtype must be bf16 or fp16, which become e4m3, got 'fp8'"):
        generate_quantize(Workload(dtype="fp8"), load_machine("h200-sxm"))
