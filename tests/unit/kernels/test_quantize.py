"""`tilecast.quantize_e4m3` without a GPU: what it computes, what a rotation is worth, refusals, shapes."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

import tilecast  # noqa: E402
from tilecast.kernels import quantize, selection  # noqa: E402
from tilecast.kernels.errors import AttentionError, UnsupportedError  # noqa: E402


def tensors(dim=64, heads=(4, 2), rows=30, keys=50, dim_v=0):
    torch.manual_seed(0)
    shapes = ((heads[0], rows, dim), (heads[1], keys, dim), (heads[1], keys, dim_v or dim))
    return [torch.randn(2, *shape).bfloat16() for shape in shapes]


def wide(made, factors):
    group = made[0].shape[1] // made[1].shape[1]
    by = [factors[f"{x}_descale"].double()[..., None, None] for x in "qkv"]
    return [made[0].double() * by[0].repeat_interleave(group, 1), made[1].double() * by[1], made[2].double() * by[2]]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("hadamard", [False, True])
def test_values_factors_and_memory_order(layout, hadamard) -> None:
    given = tensors(dim=96, dim_v=64)
    if layout == "bshd":
        given = [x.transpose(1, 2).contiguous() for x in given]
    *made, factors = tilecast.quantize_e4m3(*given, hadamard=hadamard, seed=3, layout=layout)
    assert [(x.shape, x.stride(), x.dtype) for x in made] == [(x.shape, x.stride(), torch.float8_e4m3fn) for x in given]
    if layout == "bshd":
        given, made = ([x.transpose(1, 2) for x in group] for group in (given, made))
    want = [quantize.rotated(x.double(), 3) if hadamard and n < 2 else x.double() for n, x in enumerate(given)]
    for x, y in zip(wide(made, factors), want, strict=True):
        assert (x - y).norm() <= 0.03 * y.norm()
    # The largest of a key head is 448, in the queries of its group too.
    assert all(f.shape == (2, 2) and f.dtype == torch.float32 for f in factors.values())
    assert (made[0].float().unflatten(1, (2, 2)).abs().amax((2, 3, 4)) == 448).all()
    assert (made[1].float().abs().amax((2, 3)) == 448).all()


@pytest.mark.parametrize("dim", [32, 96, 128, 256])
def test_rotations_are_orthogonal_and_spread_an_outlier(dim) -> None:
    x, y = torch.randn(2, 7, dim, dtype=torch.float64)
    a, b = quantize.rotated(x, 1), quantize.rotated(y, 1)
    torch.testing.assert_close(a @ b.T, x @ y.T)
    mixed = dim & -dim
    one = quantize.rotated(torch.eye(dim, dtype=torch.float64)[:1], 1)
    torch.testing.assert_close(one.abs().unique(), torch.tensor([*[0.0] * (mixed < dim), mixed**-0.5]).double())
    assert not torch.equal(quantize.signs(dim, 1), quantize.signs(dim, 2))


def test_a_rotation_halves_the_error_of_outliers() -> None:
    torch.manual_seed(0)

    def draw():
        x = torch.randn(1, 2, 1024, 128)
        return (x + torch.randn_like(x) * 10 * (torch.rand_like(x) < 1e-3)).half()

    q, k, v = draw(), draw(), draw()

    def attention(q, k, v):
        return torch.softmax(q @ k.transpose(2, 3) / math.sqrt(128), -1) @ v

    want = attention(q.double(), k.double(), v.double())
    errors = []
    for hadamard in (False, True):
        *made, factors = tilecast.quantize_e4m3(q, k, v, hadamard=hadamard)
        errors.append(float((attention(*wide(made, factors)) - want).square().mean().sqrt()))
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"seed": -1}, AttentionError, "seed: expected a whole number from 0 to 2147483647, got -1"),
        ({"seed": True}, AttentionError, "seed: expected a whole number"),
        ({"hadamard": 1}, AttentionError, "hadamard: expected True or False, got 1"),
        ({"layout": "sbhd"}, AttentionError, "layout: expected 'bhsd' or 'bshd', got 'sbhd'"),
        ({"v": torch.zeros(2, 2, 49, 64).bfloat16()}, AttentionError, "v: expected seqlen 50 as k has, got 49"),
        ({"k": 3.0}, AttentionError, "k: expected a torch tensor, got float"),
        ({"v": torch.zeros(2, 2, 50, 80).bfloat16()}, UnsupportedError, "v: expected head_dim of 32 to 256 in steps of 32, got 80"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_said(change, error, text) -> None:
    q, k, v = tensors()
    with pytest.raises(error, match=text):
        tilecast.quantize_e4m3(**({"q": q, "k": k, "v": v} | change))


def test_other_dtypes_and_older_gpus_are_refused(monkeypatch) -> None:
    with pytest.raises(UnsupportedError, match=r"expected dtype torch\.bfloat16 or torch\.float16, got torch\.float32"):
        tilecast.quantize_e4m3(*(x.float() for x in tensors()))
    monkeypatch.setattr(quantize, "capability_of", lambda kind, device: (7, 5))
    with pytest.raises(UnsupportedError, match=r"expected compute capability 8\.0 or newer, got 7\.5"):
        quantize._find("cuda", 0)


def test_shapes_without_a_device_and_under_the_compiler() -> None:
    given = tensors()
    *made, factors = tilecast.quantize_e4m3(*(x.to("meta") for x in given))
    assert [x.shape for x in made] == [x.shape for x in given] and factors["q_descale"].shape == (2, 2)
    torch.library.opcheck(torch.ops.tilecast.quantize_e4m3.default, (*given, True, 0))
    empty = [x[:, :, :0] for x in given]
    *_, factors = tilecast.quantize_e4m3(*empty)
    assert all((f == 1.0).all() for f in factors.values())


def test_the_kernel_gets_bytes_of_what_is_returned(monkeypatch) -> None:
    pytest.importorskip("triton")
    from tilecast.kernels.generated import triton_quantize

    calls: list = []
    monkeypatch.setattr(triton_quantize, "launch", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(quantize, "capability_of", lambda kind, device: (9, 0))
    monkeypatch.setattr(quantize, "_known", {})
    monkeypatch.setattr(selection.torch.cuda, "device_count", lambda: 1)
    q, k, v = tensors()
    *made, factors = quantize._run(q[..., ::1], k.transpose(2, 3).contiguous().transpose(2, 3), v, True, 5)
    ((got_q, got_k, got_v, *outs, got_factors, rotate, seed),) = calls
    assert got_q.data_ptr() == q.data_ptr() and got_v is v and got_k.stride(3) == 1
    assert [x.dtype for x in outs] == [torch.uint8] * 3
    assert [x.data_ptr() for x in outs] == [x.data_ptr() for x in made]
    assert got_factors is factors and factors.shape == (3, 2, 2) and (rotate, seed) == (True, 5)
