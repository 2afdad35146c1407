"""Models that know nothing of tilecast, on its kernels: under PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

import copy
import itertools

import pytest

torch = pytest.importorskip("torch")

from torch.nn import attention  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402

import tilecast  # noqa: E402

pytestmark = pytest.mark.skipif(
    not hasattr(attention, "register_flash_attention_impl"), reason="PyTorch before 2.10 has no registry"
)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@pytest.fixture(autouse=True)
def flash():
    """PyTorch chooses flash where it may; ours is active."""
    tilecast.register_flash_attention()
    attention.activate_flash_attention_impl("tilecast")
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        yield
    attention.restore_flash_attention_impl(_raise_warn=False)


def tensors(order, batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, dtype, seed=0):
    """(batch, heads, seqlen, head_dim) leaves whose memory has the axes in ``order``."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def make(number, length):
        shape = (batch, number, length, head_dim)
        held = torch.randn(
            [shape["bhsd".index(axis)] for axis in order], generator=generator, device="cuda", dtype=dtype
        )
        return held.permute(*(order.index(axis) for axis in "bhsd")).requires_grad_()

    return make(heads, seqlen_q), make(heads_kv, seqlen_k), make(heads_kv, seqlen_k)


def run(q, k, v, **options):
    """Output and gradients."""
    out = sdpa(q, k, v, **options)
    dout = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda", dtype=out.dtype)
    return out, *torch.autograd.grad(out, (q, k, v), dout)


def before(*arguments, **options):
    """The same call on PyTorch's own kernels."""
    attention.restore_flash_attention_impl(_raise_warn=False)
    try:
        return run(*arguments, **options)
    finally:
        attention.activate_flash_attention_impl("tilecast")


def kernels(call):
    """Names of the CUDA kernels that ``call`` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.key for event in profile.key_averages()]


@DTYPES
@pytest.mark.parametrize("order", ["bhsd", "bshd", "sbhd"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
def test_values_and_gradients(head_dim, causal, order, dtype) -> None:
    q, k, v = tensors(order, 2, 8, 2, 300, 300, head_dim, dtype)
    ours = run(q, k, v, is_causal=causal, enable_gqa=True)
    peer = before(q, k, v, is_causal=causal, enable_gqa=True)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        # The random dout is of the output's dtype: the same numbers for all.
        out = sdpa(*exact, is_causal=causal, enable_gqa=True)
        dout = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda", dtype=dtype)
        true = (out, *torch.autograd.grad(out, exact, dout.double()))
    for mine, theirs, right in zip(ours, peer, true, strict=True):
        error, peer_error = ((x.double() - right).abs().max().item() for x in (mine, theirs))
        assert error <= 2 * peer_error + 2**-10 * right.abs().max().item()
    assert ours[0].stride() == peer[0].stride()


def test_the_bits_are_those_of_tilecast_attention() -> None:
    q, k, v = tensors("bshd", 2, 8, 8, 513, 513, 128, torch.bfloat16)
    assert torch.equal(sdpa(q, k, v, is_causal=True), tilecast.attention(q, k, v, causal=True))
    assert torch.equal(sdpa(q, k, v, scale=0.3), tilecast.attention(q, k, v, scale=0.3))


def test_our_kernels_run_and_only_while_active() -> None:
    q, k, v = tensors("bhsd", 1, 4, 4, 256, 256, 64, torch.bfloat16)
    sdpa(q, k, v)
    active = kernels(lambda: run(q, k, v))
    attention.restore_flash_attention_impl()
    restored = kernels(lambda: run(q, k, v))
    attention.activate_flash_attention_impl("tilecast")
    assert any("flash_fwd" in name for name in restored) and not any("flash" in name for name in active), (
        active,
        restored,
    )


@pytest.mark.parametrize(
    ("head_dim", "lengths", "options"),
    [
        (64, (256, 256), {"dropout_p": 0.2}),
        (64, (100, 200), {"is_causal": True}),
    ],
    ids=["dropout", "causal, unequal lengths"],
)
def test_what_we_do_not_do_is_exactly_as_before(head_dim, lengths, options) -> None:
    q, k, v = tensors("bhsd", 2, 4, 4, *lengths, head_dim, torch.float16)
    torch.manual_seed(7)
    ours = run(q, k, v, **options)
    torch.manual_seed(7)
    theirs = before(q, k, v, **options)
    # PyTorch's own backward adds with atomics: its gradients differ from run to run.
    assert torch.equal(ours[0], theirs[0])
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(mine, other, atol=5e-3, rtol=1e-2)


def test_masks_and_cpus_never_come_to_us() -> None:
    q, k, v = tensors("bhsd", 1, 4, 4, 128, 128, 64, torch.bfloat16)
    mask = torch.rand(128, 128, device="cuda") > 0.5
    torch.testing.assert_close(run(q, k, v, attn_mask=mask)[0], before(q, k, v, attn_mask=mask)[0])
    there = [x.detach().cpu() for x in (q, k, v)]
    assert sdpa(*there).shape == q.shape


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_plain_torch_model_trains_compiled_and_not(batch_first) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(512, 8, 1024, dropout=0.0, batch_first=batch_first)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to("cuda", torch.bfloat16)
    x = torch.randn(200, 2, 512, device="cuda", dtype=torch.bfloat16)
    x = x.transpose(0, 1) if batch_first else x

    def gradients(of, given):
        of.zero_grad()
        of(given).square().mean().backward()
        return [p.grad.clone() for p in of.parameters()]

    ours, again = gradients(model, x), gradients(model, x)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    torch._dynamo.reset()
    compiled = gradients(torch.compile(model, fullgraph=True), x)
    attention.restore_flash_attention_impl()
    peer = gradients(model, x)
    exact = gradients(copy.deepcopy(model).float(), x.float())
    attention.activate_flash_attention_impl("tilecast")
    for mine, made, theirs, right in zip(ours, compiled, peer, exact, strict=True):
        error, compiled_error, peer_error = ((g.float() - right).abs().max().item() for g in (mine, made, theirs))
        floor = 2**-7 * right.abs().max().item()
        assert error <= 2 * peer_error + floor and compiled_error <= 2 * peer_error + floor


def test_a_transformers_model_runs_and_trains_untouched() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
             "num_key_value_heads": 2, "head_dim": 64}  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to("cuda", torch.bfloat16)
    model.set_attn_implementation("sdpa")
    tokens = torch.randint(0, 512, (2, 200), generator=torch.Generator("cuda").manual_seed(0), device="cuda")

    def gradients(of):
        of.zero_grad()
        of(tokens, labels=tokens).loss.backward()
        return [p.grad.clone() for p in of.parameters() if p.grad is not None]

    model(tokens)
    names = kernels(lambda: model(tokens))
    ours = gradients(model)
    attention.restore_flash_attention_impl()
    peer, theirs = gradients(model), kernels(lambda: model(tokens))
    exact = gradients(copy.deepcopy(model).float())
    attention.activate_flash_attention_impl("tilecast")
    assert any("flash_fwd" in name for name in theirs) and not any("flash" in name for name in names)
    for mine, other, right in zip(ours, peer, exact, strict=True):
        error, peer_error = ((g.float() - right).abs().max().item() for g in (mine, other))
        assert error <= 2 * peer_error + 2**-7 * right.abs().max().item()
    model.eval()
    made = model.generate(tokens, max_new_tokens=4, do_sample=False)
    assert made.shape == (2, 204)


def test_flop_counts_profiles_and_graphs_see_what_they_saw() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = tensors("bhsd", 2, 8, 8, 512, 512, 64, torch.bfloat16)

    def counted(call):
        with FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops()

    assert counted(lambda: run(q, k, v)) == counted(lambda: before(q, k, v)) > 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(q, k, v)
    seen = {event.key for event in profile.key_averages()}
    assert (
        "aten::_scaled_dot_product_flash_attention" in seen
        and "aten::_scaled_dot_product_flash_attention_backward" in seen
    )
    with torch.no_grad():
        expected = sdpa(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = sdpa(q, k, v)
        made.zero_()
        graph.replay()
    assert torch.equal(made, expected)


def test_every_mixture_of_kernels_before_and_after_agrees() -> None:
    """The lse and the output of either forward serve either backward."""
    q, k, v = tensors("bhsd", 1, 4, 4, 200, 200, 64, torch.bfloat16)
    found = []
    for first, second in itertools.product((True, False), repeat=2):
        attention.activate_flash_attention_impl("tilecast") if first else attention.restore_flash_attention_impl(
            _raise_warn=False
        )
        out = sdpa(q, k, v, is_causal=True)
        attention.activate_flash_attention_impl("tilecast") if second else attention.restore_flash_attention_impl(
            _raise_warn=False
        )
        found.append(torch.autograd.grad(out.float().square().sum(), (q, k, v)))
    attention.activate_flash_attention_impl("tilecast")
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=0.1, rtol=0.05)
