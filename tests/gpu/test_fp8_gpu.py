"""e4m3 attention on a Hopper or Blackwell GPU, against float64 of the descaled inputs; beside it P rounded to e4m3 in float64.

That emulation loses what the format loses; kernels may lose half as much again, for blocks have maxima of their own.
"""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import tilecast  # noqa: E402
from tilecast.kernels import registry  # noqa: E402

HERE = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
DIMS = [d for d, d_v in registry.head_dims(HERE, "fp8", "causal") if d == d_v]
WINDOWS = [d for d, d_v in registry.head_dims(HERE, "fp8", "window") if d == d_v]
pytestmark = pytest.mark.skipif(not DIMS, reason="no e4m3 kernel runs on this GPU")
E4M3 = torch.float8_e4m3fn
#: Of the error of P rounded in float64; sums over 128k keys of V > 0 in Hopper's short accumulator are judged by themselves.
FACTOR, LONG = 1.5, 2e-2


def exact(q, k, v, causal, rounded, window=None):
    """(out, lse) in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[3])
    rows = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    after = torch.arange(k.shape[2], device=q.device)[None] - rows
    if causal:
        s = s.masked_fill(after > 0, -math.inf)
    if window is not None:
        s = s.masked_fill((after > window[1]) | (after < -window[0]), -math.inf)
    largest = s.amax(-1, keepdim=True)
    p = torch.exp(s - torch.where(largest.isinf(), 0.0, largest)) * 256
    total = p.sum(-1, keepdim=True)
    p = p.float().to(E4M3).double() if rounded else p
    return torch.where(total > 0, p @ v / total, 0.0), torch.logsumexp(s, -1)


def draw(batch, heads, rows, dim, seed):
    maker = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(batch, heads, rows, dim, device="cuda", generator=maker)


def wide(x, factor):
    if factor is None:
        return x.double()
    if factor.ndim < 2:
        return x.double() * factor.double()
    return x.double() * factor.double().repeat_interleave(x.shape[1] // factor.shape[1], 1)[..., None, None]


def check(q, k, v, factors, causal, limit=None, **options):
    named = dict(zip(("q_descale", "k_descale", "v_descale"), factors, strict=True))
    out, lse = tilecast.attention(q, k, v, causal=causal, return_lse=True, **named, **options)
    assert out.dtype == torch.bfloat16
    tensors = [wide(x, f) for x, f in zip((q, k, v), factors, strict=True)]
    window = options.get("window")
    want, want_lse = exact(*tensors, causal, False, window)
    emulated, _ = exact(*tensors, causal, True, window)
    error, floor = ((x.double() - want).norm() / want.norm() for x in (out, emulated))
    assert error <= (FACTOR * floor + 2**-8 if limit is None else limit), (float(error), float(floor))
    assert torch.equal(lse.isinf(), want_lse.isinf())
    seen = ~want_lse.isinf()
    # The matrix unit aligns products to the largest and cuts some 14 bits on.
    group = q.shape[1] // k.shape[1]
    sizes = tensors[0].abs() @ tensors[1].abs().repeat_interleave(group, 1).transpose(-1, -2) / math.sqrt(q.shape[3])
    assert (lse.double() - want_lse)[seen].abs().max() < 2**-12 * float(sizes.max())
    return out


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows,keys", [(1, 1), (200, 77), (777, 1300), (130, 4096)])
def test_descaled_inputs(dim, causal, rows, keys) -> None:
    q, k, v = draw(2, 4, rows, dim, 0).to(E4M3), draw(2, 2, keys, dim, 1).to(E4M3), draw(2, 2, keys, dim, 2).to(E4M3)
    heads = [torch.rand(2, 2, device="cuda") + 0.5 for _ in range(3)]
    check(q, k, v, heads, causal)
    check(q, k, v, (heads[0].expand(2, 2), torch.tensor(0.7, device="cuda"), None), causal)


@pytest.mark.parametrize("dim", WINDOWS)
def test_windows(dim) -> None:
    q, k, v = draw(1, 4, 300, dim, 0).to(E4M3), draw(1, 2, 700, dim, 1).to(E4M3), draw(1, 2, 700, dim, 2).to(E4M3)
    check(q, k, v, (None, torch.rand(1, 2, device="cuda") + 0.5, None), False, window=(200, 30))


@pytest.mark.parametrize("dim", [d for d, d_v in registry.head_dims(HERE, "e5m2", "causal") if d == d_v])
def test_e5m2(dim) -> None:
    q, k, v = (draw(1, 2, 500, dim, seed).to(torch.float8_e5m2) for seed in range(3))
    check(q, k, v, (None, None, torch.rand(1, 2, device="cuda") + 0.5), True)


@pytest.mark.parametrize("dim", DIMS)
def test_any_strides_of_v_give_the_same_bits_as_does_every_run(dim) -> None:
    q, k, v = (draw(1, 2, 500, dim, seed).to(E4M3) for seed in range(3))
    out = check(q, k, v, (None, None, None), False)
    along_keys = v.transpose(2, 3).contiguous().transpose(2, 3)
    heads_inside = v.transpose(1, 2).contiguous().transpose(1, 2)
    for other in (v, along_keys, heads_inside):
        assert torch.equal(tilecast.attention(q, k, other), out)


@pytest.mark.parametrize("dim", DIMS)
def test_outliers_and_sinks(dim) -> None:
    q, k, v = (draw(1, 2, 1024, dim, seed) for seed in range(3))
    k[:, :, 0] = q.mean(2) + 0.5  # met last, far above the others
    q = q + 0.5
    k = k + 10 * draw(1, 2, 1024, dim, 3) * (draw(1, 2, 1024, dim, 4).abs() > 3.29)
    factors = [(x.abs().max() / 448).reshape(1) for x in (q, k, v)]
    made = [(x / f).to(E4M3) for x, f in zip((q, k, v), factors, strict=True)]
    check(*made, factors, True)


@pytest.mark.parametrize("dim", DIMS)
def test_positive_values_of_128k_keys(dim) -> None:
    q, k, v = draw(1, 1, 128, dim, 0), draw(1, 1, 131072, dim, 1), draw(1, 1, 131072, dim, 2).abs()
    check(q.to(E4M3), k.to(E4M3), v.to(E4M3), (None, None, None), False, LONG)


def test_operator_is_compiled_and_refuses_gradients() -> None:
    q, k, v = (draw(1, 2, 256, DIMS[0], seed).to(E4M3) for seed in range(3))
    compiled = torch.compile(tilecast.attention, fullgraph=True)
    assert torch.equal(compiled(q, k, v, causal=True), tilecast.attention(q, k, v, causal=True))
    with pytest.raises(tilecast.UnsupportedError, match="without requires_grad"):
        tilecast.attention(q.requires_grad_(), k, v)


@pytest.mark.parametrize("rows,keys", [(10240, 10240), (10300, 10433), (10500, 10450)])
def test_long_sequences(rows, keys) -> None:
    """Some head_dims have a file of their own from 10240 queries on; blocks are even and odd in number, whole and not."""
    for dim in DIMS:
        q, k, v = (
            draw(1, 2, rows, dim, 0).to(E4M3),
            draw(1, 1, keys, dim, 1).to(E4M3),
            draw(1, 1, keys, dim, 2).to(E4M3),
        )
        heads = [torch.rand(1, 1, device="cuda") + 0.5 for _ in range(3)]
        out = check(q, k, v, heads, True)
        named = dict(zip(("q_descale", "k_descale", "v_descale"), heads, strict=True))
        assert torch.equal(tilecast.attention(q, k, v, causal=True, **named), out)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads,heads_kv,rows,keys", [(8, 8, 2048, 2048), (6, 2, 1900, 2100), (5, 5, 1000, 777)])
def test_a_sequence_has_the_same_bits_however_its_launch_deals_tiles(dim, heads, heads_kv, rows, keys) -> None:
    """Alone its tiles have a program each or come the longest first; many of it come in pairs, the last heads of them tile by tile."""
    batch = 24
    q = draw(batch, heads, rows, dim, 0).to(E4M3)
    k, v = (draw(batch, heads_kv, keys, dim, seed).to(E4M3) for seed in (1, 2))
    out, lse = tilecast.attention(q, k, v, causal=True, return_lse=True)
    for one in (0, 11, 20, 21, 22, 23):
        alone = slice(one, one + 1)
        mine, mine_lse = tilecast.attention(q[alone], k[alone], v[alone], causal=True, return_lse=True)
        assert torch.equal(out[alone], mine) and torch.equal(lse[alone], mine_lse)


# --- quantising before --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("hadamard", [False, True])
def test_quantising_gives_the_bytes_of_pytorch(dim, dtype, hadamard) -> None:
    # Queries by bshd, keys of a cache that is longer.
    q = draw(2, 700, 6, dim, 0).to(dtype).transpose(1, 2)
    k, v = draw(2, 3, 1100, dim, 1).to(dtype)[:, :, :1000], draw(2, 3, 1000, dim, 2).to(dtype)
    *made, factors = tilecast.quantize_e4m3(q, k, v, hadamard=hadamard, seed=11)
    *again, _ = tilecast.quantize_e4m3(q, k, v, hadamard=hadamard, seed=11)
    *wanted, wanted_factors = tilecast.quantize_e4m3(q.cpu(), k.cpu(), v.cpu(), hadamard=hadamard, seed=11)
    for name, factor in factors.items():
        torch.testing.assert_close(factor.cpu(), wanted_factors[name], rtol=1e-5, atol=0.0)
    for got, same, want in zip(made, again, wanted, strict=True):
        assert torch.equal(got.view(torch.uint8), same.view(torch.uint8))
        assert (got.cpu().view(torch.uint8) != want.view(torch.uint8)).float().mean() < 2e-2
        torch.testing.assert_close(got.cpu().float(), want.float(), rtol=2**-3, atol=2**-9)


@pytest.mark.parametrize("dim", DIMS)
def test_a_rotation_makes_outliers_cost_less(dim) -> None:
    torch.manual_seed(0)
    full = []
    for seed in range(3):
        x = draw(1, 4, 2048, dim, seed)
        full.append(
            (x + 10 * draw(1, 4, 2048, dim, 10 + seed) * (draw(1, 4, 2048, dim, 20 + seed).abs() > 3.29)).half()
        )
    want, _ = exact(*(x.double() for x in full), False, False)
    errors = []
    for hadamard in (False, True):
        *made, factors = tilecast.quantize_e4m3(*full, hadamard=hadamard)
        errors.append(float((tilecast.attention(*made, **factors).double() - want).square().mean().sqrt()))
    assert errors[1] < 0.7 * errors[0], errors


def test_quantising_is_compiled() -> None:
    given = [draw(1, 2, 256, 64, seed).bfloat16() for seed in range(3)]
    plain, compiled = tilecast.quantize_e4m3(*given), torch.compile(tilecast.quantize_e4m3, fullgraph=True)(*given)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(plain[:3], compiled[:3], strict=True)
    )
