"""Tiny random transformers models on tilecast's attention, judged as the kernels are: against the same model in float64."""

from __future__ import annotations

import copy
import inspect

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tilecast.kernels import UnsupportedError, registry  # noqa: E402
from tilecast.kernels.transformers_adapter import register  # noqa: E402

VOCABULARY = 512
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
    "pad_token_id": VOCABULARY - 1, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
WINDOW = 48


@pytest.fixture(params=["llama", "mistral"])
def model(request):
    """bfloat16; mistral has a sliding window."""
    for mask in ("none", "window"):
        if registry.select(torch.cuda.get_device_capability(), "bf16", 64, 64, mask, 1) is None:
            pytest.skip(f"no kernel ships for head_dim 64, mask {mask}")
    register()
    torch.manual_seed(0)
    if request.param == "llama":
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    else:
        made = transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=WINDOW))
    return made.to("cuda", torch.bfloat16).eval()


@pytest.fixture
def tokens():
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randint(0, VOCABULARY - 1, (2, 200), generator=generator, device="cuda")


def logits(model, how, tokens, steps):
    """Logits of a prefill of all but ``steps`` tokens and then one token at a time, as (batch, seqlen, vocabulary)."""
    model.set_attn_implementation(how)
    with torch.no_grad():
        first = tokens.shape[1] - steps
        answer = model(tokens[:, :first], use_cache=True)
        parts = [answer.logits]
        for at in range(first, tokens.shape[1]):
            answer = model(tokens[:, at : at + 1], past_key_values=answer.past_key_values, use_cache=True)
            parts.append(answer.logits)
    return torch.cat(parts, dim=1).double()


@pytest.mark.parametrize("steps", [0, 5])
def test_prefill_and_decode(model, tokens, steps) -> None:
    ours, peer = logits(model, "tilecast", tokens, steps), logits(model, "sdpa", tokens, steps)
    expected = logits(model.double(), "eager", tokens, steps)
    error, peer_error = (ours - expected).abs().max().item(), (peer - expected).abs().max().item()
    assert error <= 2 * peer_error, f"error {error:.3g}, SDPA's own {peer_error:.3g}"


def test_the_kernels_really_ran(model, tokens) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model.set_attn_implementation("tilecast")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    assert torch.ops.tilecast.attention_forward in counter.get_flop_counts()["Global"]


def test_generate(model, tokens) -> None:
    model.set_attn_implementation("tilecast")
    made = model.generate(tokens, max_new_tokens=8, do_sample=False)
    again = model.generate(tokens, max_new_tokens=8, do_sample=False)
    assert made.shape == (2, 208) and torch.equal(made, again)


def test_compiled_model(model, tokens) -> None:
    model.set_attn_implementation("tilecast")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        ours, plain = compiled(tokens, use_cache=True).logits, model(tokens, use_cache=True).logits
    # The compiler may round the layers around attention differently.
    torch.testing.assert_close(ours, plain, atol=0.05, rtol=0.05)


def test_refusals(model, tokens) -> None:
    model.set_attn_implementation("tilecast")
    padding = torch.ones_like(tokens)
    padding[0, :3] = 0
    with pytest.raises(UnsupportedError, match="serving kernels have no backward pass"):
        model(tokens, attention_mask=padding)
    if isinstance(model, transformers.MistralForCausalLM):
        with pytest.raises(UnsupportedError, match=r"use a DynamicCache|needs a tensor"):
            model.generate(tokens, max_new_tokens=4, cache_implementation="static")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_static_cache_gives_the_tokens_of_a_growing_one(model, tokens, compiled) -> None:
    if isinstance(model, transformers.MistralForCausalLM):
        pytest.skip("windows are refused with static caches")
    model.set_attn_implementation("tilecast")
    settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    want = model.generate(tokens, **settings)
    got = model.generate(tokens, cache_implementation="static", disable_compile=not compiled, **settings)
    # Compiled layers round otherwise, and prefill runs on another kernel: tokens may part where two are level.
    torch.testing.assert_close(got.logits[0], want.logits[0], atol=0.05, rtol=0.05)
    assert (got.sequences == want.sequences).float().mean() > 0.97


def test_padding_is_packed_away(model, tokens) -> None:
    """Left padding, as in a batch of prompts of different lengths: logits of real tokens are those of the prompt alone."""
    model.set_attn_implementation("tilecast")
    padding = torch.ones_like(tokens)
    padding[0, :37] = 0
    places = (padding.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        batch = model(tokens, attention_mask=padding, position_ids=places).logits[0, 37:]
        alone = model(tokens[:1, 37:]).logits[0]
    torch.testing.assert_close(batch, alone, atol=0.05, rtol=0.05)


def test_a_training_step(model, tokens) -> None:
    """The gradients of all parameters are as close to float32 SDPA's as those of bfloat16 SDPA, and the same every time."""

    def gradients(name, of):
        of.set_attn_implementation(name)
        of.zero_grad()
        of(tokens, labels=tokens).loss.backward()
        return {key: parameter.grad.clone() for key, parameter in of.named_parameters() if parameter.grad is not None}

    ours, again, peer = gradients("tilecast", model), gradients("tilecast", model), gradients("sdpa", model)
    exact = gradients("sdpa", copy.deepcopy(model).float())
    model.zero_grad()
    assert ours.keys() == exact.keys() and all(torch.equal(ours[key], again[key]) for key in ours)
    for key, true in exact.items():
        error, peer_error = ((x[key].float() - true).abs().max().item() for x in (ours, peer))
        assert error <= 2 * peer_error + 2**-8 * true.abs().max().item(), key


@pytest.mark.parametrize("graphs", [False, True])
def test_continuous_batching(model, graphs) -> None:
    """`generate_batch` on pages gives the tokens of `generate` wherever float64 says that the first is clear of the second."""
    from tilecast.kernels.engines import transformers_paged

    transformers_paged.register()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCABULARY - 1, (n,), generator=generator).tolist() for n in (7, 300, 90, 31)]
    names = inspect.signature(transformers.ContinuousBatchingConfig).parameters
    model.set_attn_implementation(transformers_paged.NAME)
    config = transformers.GenerationConfig(
        max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=VOCABULARY - 1
    )
    found = [
        model.generate_batch(
            asked, generation_config=config, continuous_batching_config=transformers.ContinuousBatchingConfig(
                **{"page_size" if "page_size" in names else "block_size": 64}, num_blocks=256, max_batch_tokens=512, use_cuda_graph=graphs
            ),
        ) for asked in (prompts, prompts[1:2])
    ]  # fmt: skip
    together, alone = ({tuple(a.prompt_ids): a.generated_tokens for a in answers.values()} for answers in found)
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("eager")
    for prompt in prompts:
        made = together[tuple(prompt)]
        assert len(made) == 12
        with torch.no_grad():
            scores = exact(torch.tensor([[*prompt, *made]], device="cuda")).logits[0, len(prompt) - 1 : -1]
        best = scores.topk(2).values
        for token, (first, second), row in zip(made, best.tolist(), scores, strict=True):
            assert token == int(row.argmax()) or first - second < 0.05
    assert alone[tuple(prompts[1])] == together[tuple(prompts[1])]
