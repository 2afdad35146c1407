"""flash-attn's functions on tilecast's calls, and transformers' continuous batching on those; a float64 reference in place of the kernels."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math

import pytest

torch = pytest.importorskip("torch")

from support import paged_reference  # noqa: E402

from tilecast.kernels.engines import flash  # noqa: E402
from tilecast.kernels.errors import UnsupportedError  # noqa: E402
from tilecast.kernels.serving import calls  # noqa: E402

HERE = importlib.util.find_spec("transformers") is not None


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The reference behind the calls, whose checks stay; lists how many new keys each call appended."""
    appended: list[int] = []

    def append(q, k_cache, v_cache, lists, new, *settings):  # type: ignore[no-untyped-def]
        appended.append(new[0].shape[0] * new[0].shape[1])
        return paged_reference.append(q, k_cache, v_cache, lists, new, *settings)

    monkeypatch.setattr(calls, "serve", paged_reference.serve)
    monkeypatch.setattr(calls, "append", append)
    monkeypatch.setattr(calls, "append_started", lambda *given: None)
    monkeypatch.setattr(calls, "refusal", lambda *given: None)
    monkeypatch.setattr(calls, "key_of", lambda *given: None)
    monkeypatch.setattr(calls, "started", lambda arguments: None)
    return appended


def randn(*shape: int, seed: int = 0):  # type: ignore[no-untyped-def]
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def plain(q, k, v, left=-1, right=-1):  # type: ignore[no-untyped-def]
    """(rows, heads, dim) of one sequence in float64, from the definition."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[-1] ** -0.5
    ahead = torch.arange(len(k))[None] - (torch.arange(len(q))[:, None] + len(k) - len(q))
    hidden = (ahead > right if right >= 0 else ahead > len(k)) | (ahead < -left if left >= 0 else ahead < -len(k))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


@pytest.mark.parametrize(
    ("more", "seen"),
    [({}, (-1, -1)), ({"causal": True}, (-1, 0)), ({"causal": True, "window_size": (3, 3)}, (3, 0)), ({"window_size": (3, 2)}, (3, 2))],
)  # fmt: skip
def test_each_function_means_what_flash_attn_s_does(more, seen) -> None:  # type: ignore[no-untyped-def]
    q, k, v = randn(9, 4, 64), randn(14, 2, 64, seed=1), randn(14, 2, 64, seed=2)
    starts = [torch.tensor([0, a, a + b], dtype=torch.int32) for a, b in ((4, 5), (6, 8))]
    want = torch.cat([plain(q[:4], k[:6], v[:6], *seen), plain(q[4:], k[6:], v[6:], *seen)])
    got = flash.flash_attn_varlen_func(q, k, v, *starts, 5, 8, **more)
    assert torch.allclose(got.double(), want, atol=2e-3)
    # The same keys in pages, with lengths in either form.
    table, pools = (
        torch.tensor([[1], [3]], dtype=torch.int32),
        [torch.full((4, 16, 2, 64), math.nan).half() for _ in range(2)],
    )
    for pool, x in zip(pools, (k, v), strict=True):
        pool[1, :6], pool[3, :8] = x[:6], x[6:]
    paged = flash.flash_attn_varlen_func(q, *pools, *starts, 5, 8, block_table=table, **more)
    assert torch.equal(paged, got)
    # The last 4 keys of each of two sequences are new; a cache that had them gives the same.
    q, k, v = randn(2, 4, 4, 64), randn(2, 20, 2, 64, seed=1), randn(2, 20, 2, 64, seed=2)
    table, pools = (
        torch.tensor([[1, 0], [3, 2]], dtype=torch.int32),
        [torch.zeros(4, 16, 2, 64).half() for _ in range(2)],
    )
    for pool, x in zip(pools, (k, v), strict=True):
        pool[1], pool[3] = x[0, :16], x[1, :16]
    got, _ = flash.flash_attn_with_kvcache(
        q, *pools, k[:, 16:], v[:, 16:], cache_seqlens=torch.tensor([16, 16], dtype=torch.int32), block_table=table, return_softmax_lse=True, **more
    )  # fmt: skip
    for b in range(2):
        assert torch.allclose(got[b].double(), plain(q[b], k[b], v[b], *seen), atol=2e-3)
    assert torch.equal(pools[0][0, :4], k[0, 16:]) and torch.equal(pools[1][2, :4], v[1, 16:])
    capped = flash.flash_attn_func(q, k, v, softcap=1e4, s_aux=torch.full((4,), -1e4), **more)
    assert torch.allclose(capped, got, atol=2e-3)


def test_what_would_change_the_result_is_refused() -> None:
    x, starts = randn(1, 3, 2, 64), torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=r"dropout_p: expected 0, got 0\.1; call flash-attn for it"):
        flash.flash_attn_varlen_func(x[0], x[0], x[0], starts, starts, 3, 3, dropout_p=0.1)
    with pytest.raises(UnsupportedError, match="alibi_slopes: expected None, got Tensor"):
        flash.flash_attn_func(x, x, x, alibi_slopes=torch.ones(2))
    with pytest.raises(UnsupportedError, match="cache_leftpad: expected None, got Tensor"):
        flash.flash_attn_with_kvcache(x, x, x, cache_leftpad=starts)


# --- continuous batching ------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 97, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}  # fmt: skip


@pytest.mark.skipif(not HERE, reason="transformers is not installed")
@pytest.mark.parametrize("blocks", [0, 4], ids=["packed", "block tables"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_generate_batch_gives_the_tokens_of_eager_attention(monkeypatch, served, kind: str, blocks: int) -> None:
    transformers = pytest.importorskip("transformers")
    from tilecast.kernels.engines import transformers_paged

    transformers_paged.register()
    transformers_paged.register()
    # transformers asks for a GPU before it hands out block tables.
    initialization = importlib.import_module("transformers.generation.continuous_batching.initialization")
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *given: None)
    torch.manual_seed(0)
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    elif kind == "mistral":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=8))
    else:
        settings = {"sliding_window": 8, "attn_logit_softcapping": 0.1, "attn_implementation": "eager"}
        model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, **settings))
    model = model.eval()
    prompts = [list(range(3, 3 + n)) for n in (5, 23, 11)]
    wanted = []
    for prompt in prompts:
        made = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        wanted.append(made[0, len(prompt) :].tolist())
    model.set_attn_implementation(transformers_paged.NAME)
    names = inspect.signature(transformers.ContinuousBatchingConfig).parameters
    size = {"page_size" if "page_size" in names else "block_size": 16}
    found = model.generate_batch(
        prompts, generation_config=transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**size, num_blocks=64, max_batch_tokens=64, max_blocks_per_request=blocks, use_cuda_graph=False),
    )  # fmt: skip
    answers = {tuple(answer.prompt_ids): answer.generated_tokens for answer in found.values()}  # as they were finished
    assert [answers[tuple(prompt)] for prompt in prompts] == wanted
    # transformers has no block tables where a layer has a window.
    assert bool(served) == (bool(blocks) and kind == "llama")
