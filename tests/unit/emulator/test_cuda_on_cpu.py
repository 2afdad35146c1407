"""What host code gets that asks torch for a GPU: the CPU, and what a GPU sums in float32."""

from __future__ import annotations

from typing import Any

import pytest

from tilecast.emulator.cuda_on_cpu import cuda_on_cpu

torch = pytest.importorskip("torch")


def gradient(dtype: Any) -> Any:
    """Of the input of a 3 x 3 convolution, from numbers that 16 bits hold."""
    made = torch.Generator().manual_seed(0)
    dout, x, w = (
        torch.randn(shape, generator=made).bfloat16().to(dtype)
        for shape in ((1, 64, 9, 9), (1, 32, 9, 9), (64, 32, 3, 3))
    )
    return torch.ops.aten.convolution_backward(
        dout, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False]
    )


def test_a_convolution_is_summed_in_float32_and_rounded_once() -> None:
    exact = gradient(torch.float32)[0]
    with cuda_on_cpu((10, 0), 148):
        found, *others = gradient(torch.bfloat16)
        wide = gradient(torch.float32)[0]
    assert found.dtype == torch.bfloat16 and others == [None, None]
    assert torch.equal(found, exact.bfloat16()) and torch.equal(wide, exact)
    # Outside, torch is as it was.
    assert gradient(torch.bfloat16)[0].dtype == torch.bfloat16


def test_a_layer_keeps_its_type() -> None:
    with cuda_on_cpu((9, 0), 132):
        x, w = torch.ones(1, 8, 4, 4, dtype=torch.float16, device="cuda"), torch.ones(8, 8, 3, 3, dtype=torch.float16)
        assert torch.nn.functional.conv2d(x, w, stride=1).dtype == torch.float16
