"""`tilecast.attention` of e4m3 tensors without a GPU: refusals, fallback, shapes, and what a launcher keeps."""

from __future__ import annotations

import importlib
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import tilecast  # noqa: E402
from tilecast.kernels import e4m3, launching, registry, selection  # noqa: E402
from tilecast.kernels.errors import AttentionError, UnsupportedError  # noqa: E402

E4M3 = torch.float8_e4m3fn


def tensors(dim=64, heads=(4, 2), rows=30, keys=50):
    torch.manual_seed(0)
    return [torch.randn(1, h, n, dim).to(E4M3) for h, n in zip((heads[0], *2 * heads[1:]), (rows, keys, keys), strict=True)]  # fmt: skip


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (2.0, "q_descale: expected a float32 tensor, got float"),
        (torch.ones(1, dtype=torch.float64), "q_descale: expected a float32 tensor, got torch.float64"),
        (torch.ones(1, 4), r"q_descale: expected one number or \(batch, heads_kv\) \(1, 2\), got \(1, 4\)"),
        (torch.ones(1, device="meta"), "q_descale: expected device cpu as q has, got meta"),
    ],
)
@pytest.mark.parametrize("fallback", [None, "sdpa"])
def test_factors_that_make_no_sense(factor, text, fallback) -> None:
    with pytest.raises(AttentionError, match=text):
        tilecast.attention(*tensors(), q_descale=factor, fallback=fallback)


def test_factors_of_16_bit_tensors_and_mixed_dtypes_are_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(AttentionError, match=r"k_descale: expected q, k, v of torch\.float8_e4m3fn"):
        tilecast.attention(q.half(), k.half(), v.half(), k_descale=torch.ones(1))
    with pytest.raises(AttentionError, match=r"v: expected dtype torch\.float8_e4m3fn as q has, got torch\.bfloat16"):
        tilecast.attention(q, k, v.bfloat16())


@pytest.mark.parametrize(
    ("capability", "options", "text"),
    [
        ((8, 0), {}, r"no shipped kernel for fp8, mask 'none' on compute capability 8.0"),
        ((12, 0), {}, r"no shipped kernel for fp8, mask 'none' on compute capability 12.0"),
        ((9, 0), {"window": (3, 0)}, "no shipped kernel for fp8, mask 'window'"),
        ((9, 0), {"scale": -1.0}, "scale: expected a number above 0"),
    ],
)
def test_what_no_kernel_does_is_said_or_falls_back(monkeypatch, capability, options, text) -> None:
    monkeypatch.setattr(selection, "capability_of", lambda kind, device: capability)
    with pytest.raises(UnsupportedError, match=text):
        tilecast.attention(*tensors(), **options)
    assert tilecast.attention(*tensors(), **options, fallback="sdpa").dtype == torch.bfloat16


def test_e5m2_is_blackwells(monkeypatch) -> None:
    wide = [x.float().to(torch.float8_e5m2) for x in tensors()]
    monkeypatch.setattr(selection, "capability_of", lambda kind, device: (9, 0))
    with pytest.raises(UnsupportedError, match=r"no shipped kernel for e5m2, mask 'none' on compute capability 9\.0"):
        tilecast.attention(*wide)
    assert tilecast.attention(*wide, fallback="sdpa").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("mask", "module"),
    [({}, "full_pair"), ({"causal": True}, "causal"), ({"window": (3, 0)}, "window")],
)
@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
def test_blackwell_kernels_get_limits_rows_and_factors(monkeypatch, mask, module, dtype) -> None:
    monkeypatch.setattr(selection, "capability_of", lambda kind, device: (10, 0))
    log: list = []

    def launcher(entry):
        return lambda *arguments: log.append((entry.module, arguments))

    monkeypatch.setattr(registry, "launcher", launcher)
    monkeypatch.setattr(e4m3, "_kernels", {})
    q, k, v = (x.to(dtype) for x in tensors(128))
    v = v.view(torch.uint8).transpose(2, 3).contiguous().transpose(2, 3).view(dtype)
    factor = torch.ones(2, 1).t()
    tilecast.attention(q, k, v, **mask, k_descale=torch.ones(1, 4)[:, ::2], v_descale=factor)
    (name, (got_q, _, got_v, *_, left, right, no_factor, k_factor, v_factor)) = log[0]
    assert name == f"blackwell_fp8_d128_{module}"
    assert (left, right) == mask.get("window", (-1, -1))
    # The copy engine reads rows of whole heads, factors lie one after the other.
    assert got_q is q and got_v.stride(3) == 1 and torch.equal(got_v.float(), v.float())
    assert no_factor is None and k_factor.is_contiguous() and v_factor.is_contiguous()


def test_gradients_and_other_heads_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(selection, "capability_of", lambda kind, device: (9, 0))
    with pytest.raises(
        UnsupportedError, match=r"head_dim: expected one that a shipped kernel has \(64, 128, 256\), got 32"
    ):
        tilecast.attention(*tensors(32))
    q, k, v = tensors()
    with pytest.raises(UnsupportedError, match="without requires_grad"):
        tilecast.attention(q.requires_grad_(), k, v)


def test_fallback_descales_heads_in_their_groups() -> None:
    q, k, v = tensors()
    factors = (torch.tensor([[2.0, 0.5]]), torch.tensor(3.0), torch.tensor([0.25]))
    out, lse = tilecast.attention(q, k, v, causal=True, return_lse=True, fallback="sdpa",
                                  **dict(zip(("q_descale", "k_descale", "v_descale"), factors, strict=True)))  # fmt: skip
    by_head = torch.tensor([2.0, 2.0, 0.5, 0.5])[None, :, None, None]
    wide = [(q.float() * by_head).bfloat16(), (k.float() * 3).bfloat16(), (v.float() / 4).bfloat16()]
    want, want_lse = tilecast.attention(*wide, causal=True, return_lse=True, fallback="sdpa")
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_shapes_without_a_device(layout) -> None:
    q, k, v = (x.to("meta") for x in tensors())
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = tilecast.attention(q, k, v, layout=layout, return_lse=True)
    assert out.shape == q.shape and out.dtype == torch.bfloat16
    assert out.stride() == q.stride()
    assert (lse.shape, lse.dtype) == ((1, 4, 30), torch.float32)


class _Stub:
    """A kernel that keeps what it is launched with."""

    def __init__(self, name: str, log: list) -> None:
        self.name, self.log, self.made = name, log, 0

    def warmup(self, *arguments, grid, **options):
        self.made += 1
        return self

    def __getitem__(self, grid):
        return lambda *arguments: self.log.append((self.name, grid, arguments))


def stubbed(monkeypatch, name):
    """A shipped file whose kernels are stubs, and their log."""
    file = importlib.import_module(f"tilecast.kernels.generated.{name}")
    log: list = []
    utils = types.SimpleNamespace(get_device_properties=lambda _: {"multiprocessor_count": 132})
    runtime = types.SimpleNamespace(driver=types.SimpleNamespace(active=types.SimpleNamespace(utils=utils)))
    monkeypatch.setattr(file, "triton", types.SimpleNamespace(cdiv=file.triton.cdiv, runtime=runtime))
    for kernel in ("prepare", "attention"):
        if hasattr(file, kernel):
            monkeypatch.setattr(file, kernel, _Stub(kernel, log))
    return file, log


@pytest.fixture
def module(monkeypatch):
    """A file for Hopper, with two kernels."""
    return stubbed(monkeypatch, "hopper_fp8_d64_full")


def test_a_launcher_plans_a_shape_once_and_gives_both_kernels_this_calls_tensors(module) -> None:
    file, log = module
    launch = launching.e4m3_launcher(file)
    for number in range(2):
        q, k, v = tensors()
        out, lse = torch.empty(1, 4, 30, 64, dtype=torch.bfloat16), torch.empty(1, 4, 30)
        factor = torch.full((1, 2), 2.0 + number)
        launch(q, k, v, out, lse, 0.125, -1, -1, None, factor, None)
        (first, grid, before), (second, _, after) = log[-2:]
        assert (first, second, grid) == ("prepare", "attention", (1, 2, 1))
        v_t, factors = before[1:3]
        assert before[0] is v and before[3:6] == (None, factor, None)
        assert v_t.shape == (1, 2, 64, 128)
        assert all(made.base is tensor for made, tensor in zip(after[:3], (q, k, v_t), strict=True))
        assert after[3] is out and after[4] is lse and after[-2] is factors
        assert after[-1] == pytest.approx(0.125 * 1.4426950408889634)
    assert file.prepare.made == file.attention.made == 1


def test_a_launcher_of_one_kernel_gives_it_factors_as_they_are(monkeypatch) -> None:
    file, log = stubbed(monkeypatch, "blackwell_fp8_d64_window")
    launch = launching.e4m3_launcher(file)
    assert not launch.any_v
    q, k, v = tensors()
    out, factor = torch.empty(1, 4, 30, 64, dtype=torch.bfloat16), torch.ones(1, 2)
    for _ in range(2):
        launch(q, k, v, out, None, 0.125, 5, 0, None, factor, torch.ones(1))
        ((name, _, arguments),) = log
        log.clear()
        assert (
            name == "attention"
            and [made.base is x for made, x in zip(arguments, (q, k, v), strict=False)] == [True] * 3
        )
        *steps, q_factor, k_factor, v_factor, scale = arguments[-7:]
        assert steps == [0, 1, 0] and q_factor is None and k_factor is factor and float(v_factor) == 1.0
        assert scale == pytest.approx(0.125 * 1.4426950408889634)
    assert file.attention.made == 1
    launch(q[:, :, :0], k, v, out[:, :, :0], None, 0.125)
    assert not log


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q": torch.ones(1, 4, 30, 64)}, r"q: expected .*e4m3 or e5m2.* got .*float32"),
        ({"v": torch.ones(1, 2, 50, 64).to(torch.float8_e5m2)}, r"v: expected .*e4m3fn.* got .*e5m2"),
        ({"v": torch.ones(1, 2, 64, 50).to(E4M3).transpose(2, 3)}, r"v: expected .*\(1, 2, 50, 64\).*strides"),
        ({"k_descale": torch.ones(2, 1).t()[:, ::2]}, r"k_descale: expected contiguous float32 with 1 or \(1, 2\)"),
        ({"k_descale": torch.ones(2, 2)[:1].t()}, r"k_descale: expected contiguous float32 with 1 or \(1, 2\)"),
    ],
)
def test_launches_of_blackwell_kernels_refuse_in_one_sentence(change, text) -> None:
    file = importlib.import_module("tilecast.kernels.generated.blackwell_fp8_d64_full")
    q, k, v = tensors()
    options = {"q": q, "k": k, "v": v, "out": torch.empty(1, 4, 30, 64, dtype=torch.bfloat16), "lse": None} | change
    for launch in (file.launch, launching.e4m3_launcher(file)):
        with pytest.raises(ValueError, match=text):
            launch(scale=0.125, **options)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"out": torch.empty(1, 4, 30, 64)}, "out: expected .*bfloat16.* got .*float32"),
        ({"q_descale": torch.ones(3)}, r"q_descale: expected float32 with 1 or \(1, 2\) elements"),
        ({"scale": 0.0}, "scale: expected a number above 0"),
        ({"window_left": 4}, "this kernel has no window"),
    ],
)
def test_launches_refuse_in_one_sentence(module, change, text) -> None:
    q, k, v = tensors()
    options = {"out": torch.empty(1, 4, 30, 64, dtype=torch.bfloat16), "lse": None, "scale": 0.125} | change
    for launch in (module[0].launch, launching.e4m3_launcher(module[0])):
        with pytest.raises(ValueError, match=text):
            launch(q, k, v, **options)
