"""Padding, soft caps and sinks through the serving kernels' calls, a float64 reference in their place, against plain formulas and
against transformers' own eager attention where it is installed."""

from __future__ import annotations

import importlib.util
import math

import pytest

torch = pytest.importorskip("torch")

from support.paged_reference import serve as reference  # noqa: E402

from tilecast.kernels.engines import padded  # noqa: E402
from tilecast.kernels.errors import UnsupportedError  # noqa: E402
from tilecast.kernels.serving import calls  # noqa: E402

HERE = importlib.util.find_spec("transformers") is not None


def one(q, k, v, scale, softcap, sinks, left, right):  # type: ignore[no-untyped-def]
    """Attention of one sequence: (rows, heads, dim) in float64."""
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), wide_k) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    ahead = torch.arange(len(k))[None] - (torch.arange(len(q))[:, None] + len(k) - len(q))
    hidden = (ahead > right if right >= 0 else ahead > len(k)) | (ahead < -left if left >= 0 else ahead < -len(k))
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], wide_v).to(q.dtype)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference behind the calls, whose checks stay."""
    monkeypatch.setattr(calls, "serve", reference)
    # Calls met before are remembered with the kernels that they started: here each is looked at anew.
    monkeypatch.setattr(calls, "key_of", lambda *given: None)


def tensors(queries: int, keys: int, heads=(4, 2), dim=32, batch=3):  # type: ignore[no-untyped-def]
    draw = torch.Generator().manual_seed(3)
    shapes = ((batch, heads[0], queries, dim), (batch, heads[1], keys, dim), (batch, heads[1], keys, dim))
    return [torch.randn(shape, generator=draw).half() for shape in shapes]


@pytest.mark.parametrize("queries", [1, 4, 12])
@pytest.mark.parametrize("window", [None, (5, 0)])
def test_real_tokens_see_real_tokens(queries: int, window: tuple[int, int] | None) -> None:
    q, k, v = tensors(queries, 12)
    real = torch.ones(3, 12, dtype=torch.bool)
    real[0, :7] = False  # padding on the left
    real[1, 3:6] = False  # and in the middle, as a cache of right-padded prompts has it
    sinks = torch.linspace(-1, 1, 4)
    out = padded.attend(q, k, v, real, True, window, 0.3, 0.0, sinks)
    for b in range(3):
        rows = real[b, -queries:]
        alone = one(
            q[b].transpose(0, 1)[rows], k[b].transpose(0, 1)[real[b]], v[b].transpose(0, 1)[real[b]], 0.3, 0.0, sinks,
            *(window or (-1, 0)),
        )  # fmt: skip
        assert torch.equal(out[b][rows], alone)
        assert not out[b][~rows].any()


def test_soft_caps_and_sinks_without_padding() -> None:
    q, k, v = tensors(4, 9)
    sinks = torch.linspace(-1, 1, 4, dtype=torch.bfloat16)
    out = padded.attend(q, k, v, None, True, None, None, 7.0, sinks)
    want = one(q[1].transpose(0, 1), k[1].transpose(0, 1), v[1].transpose(0, 1), 32**-0.5, 7.0, sinks, -1, 0)
    assert torch.equal(out[1], want)


def test_training_is_refused() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(4, 9))
    with pytest.raises(UnsupportedError, match="serving kernels have no backward pass"):
        padded.attend(q, k, v, None, True, None, None, 7.0, None)


# --- whole models -------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 97, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0}  # fmt: skip


@pytest.fixture(params=["llama", "gemma2", "gpt-oss"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A tiny model in half precision on tilecast's attention, whose operator is the reference too."""
    transformers = pytest.importorskip("transformers")
    from tilecast.kernels import operator, transformers_adapter

    def attention(q, k, v, causal, scale, window, fallback, deterministic):  # type: ignore[no-untyped-def]
        rows = [x.transpose(1, 2) for x in (q, k, v)]
        lengths = q.shape[2], k.shape[2]
        made, _ = reference(*rows, *[None] * 8, *lengths, scale, 0.0, *(window or (-1, 0 if causal else -1)), False)
        return made.transpose(1, 2)

    monkeypatch.setattr(operator, "attention", attention)
    transformers_adapter.register("tilecast")
    torch.manual_seed(0)
    if request.param == "llama":
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    elif request.param == "gemma2":
        made = transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(**SIZES, sliding_window=8, attn_logit_softcapping=5.0)
        )
    else:
        made = transformers.GptOssForCausalLM(
            transformers.GptOssConfig(**SIZES, sliding_window=8, num_local_experts=2, num_experts_per_tok=1)
        )
        for layer in made.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    return made.half().eval()


@pytest.mark.skipif(not HERE, reason="transformers is not installed")
def test_a_batch_of_prompts_of_different_lengths(model) -> None:  # type: ignore[no-untyped-def]
    tokens = torch.randint(1, 97, (3, 20), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(tokens)
    real[0, :11], real[1, :4] = 0, 0
    answers = {}
    for how in ("eager", "tilecast"):
        model.set_attn_implementation(how)
        with torch.no_grad():
            first = model(tokens, attention_mask=real, use_cache=True)
            more = torch.cat([real, torch.ones(3, 1, dtype=real.dtype)], 1)
            then = model(tokens[:, :1], attention_mask=more, past_key_values=first.past_key_values, use_cache=True)
        answers[how] = [first.logits[real.bool()], then.logits]
    for ours, theirs in zip(answers["tilecast"], answers["eager"], strict=True):
        assert torch.allclose(ours, theirs, atol=0.02)


@pytest.mark.skipif(not HERE, reason="transformers is not installed")
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_static_cache(model) -> None:  # type: ignore[no-untyped-def]
    """Tokens of `generate` with keys in a cache that has room for more; a batch of equal prompts, for padding is refused."""
    tokens = torch.randint(1, 97, (3, 20), generator=torch.Generator().manual_seed(1))
    model = model.float()
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    model.set_attn_implementation("eager")
    want = model.generate(tokens, **settings)
    model.set_attn_implementation("tilecast")
    got = model.generate(tokens, cache_implementation="static", disable_compile=True, **settings)
    assert torch.equal(got, want)
    padding = torch.ones_like(tokens)
    padding[0, :3] = 0
    with pytest.raises(UnsupportedError, match="expected no padding together with a static cache"):
        model.generate(tokens, attention_mask=padding, cache_implementation="static", **settings)


@pytest.mark.skipif(not HERE, reason="transformers is not installed")
@pytest.mark.parametrize("model", ["gemma2"], indirect=True)
def test_static_caches_with_windows_are_refused(model) -> None:  # type: ignore[no-untyped-def]
    model.set_attn_implementation("tilecast")
    with pytest.raises(UnsupportedError, match=r"use a DynamicCache|needs a tensor"):
        model.generate(torch.ones(1, 20, dtype=torch.long), max_new_tokens=4, cache_implementation="static")
