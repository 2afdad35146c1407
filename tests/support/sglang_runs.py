"""What an sglang engine hands to an attention backend: a runner with a pool of tokens, layers, batches; and what must come out."""

from __future__ import annotations

import math
import types
from typing import Any

import torch

from . import sglang_contract as contract


class Pool:
    """Keys and values of a layer by token, as sglang's MHATokenToKVPool holds and writes them."""

    def __init__(self, tokens: int, heads: int, dim: int, dtype: torch.dtype, device: str) -> None:
        self.dtype = dtype
        self.k, self.v = (
            torch.full((tokens, heads, dim), 0x7F, dtype=torch.uint8, device=device).view(dtype)
            if dtype == torch.float8_e4m3fn
            else torch.full((tokens, heads, dim), math.nan, dtype=dtype, device=device)
            for _ in range(2)
        )

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None):  # type: ignore[no-untyped-def]
        for buffer, new, scale in ((self.k, cache_k, k_scale), (self.v, cache_v, v_scale)):
            if new.dtype != self.dtype:
                new = (new / scale if scale is not None else new).to(self.dtype)
            buffer.view(torch.uint8)[loc_info] = new.contiguous().view(torch.uint8)

    def get_key_buffer(self, layer_id: int):  # type: ignore[no-untyped-def]
        return self.k

    def get_value_buffer(self, layer_id: int):  # type: ignore[no-untyped-def]
        return self.v


def runner(
    page: int = 16, context: int = 64, dtype: torch.dtype = torch.float16, device: str = "cpu", **more: Any
) -> Any:
    """A model runner of four requests, whose pages are shuffled."""
    pages = torch.randperm(4 * context // page + 1, generator=torch.Generator().manual_seed(2))[: 4 * context // page]
    tokens = (pages.view(4, -1, 1) * page + torch.arange(page)).flatten(1).to(device, torch.int32)
    found = types.SimpleNamespace(
        page_size=page, use_mla_backend=False, kv_cache_dtype=dtype, attention_chunk_size=None,
        model_config=types.SimpleNamespace(context_len=context, is_encoder_decoder=False),
        req_to_token_pool=types.SimpleNamespace(req_to_token=tokens), token_to_kv_pool=Pool(4 * context + page, 2, 64, dtype, device),
    )  # fmt: skip
    for name, value in more.items():
        setattr(found, name, value)
    return found


def layer(**more: Any) -> Any:
    return types.SimpleNamespace(**{
        "tp_q_head_num": 4, "qk_head_dim": 64, "v_head_dim": 64, "layer_id": 0, "scaling": 0.1, "logit_cap": 0.0, "logit_capping_method": "tanh",
        "sliding_window_size": -1, "is_cross_attention": False, "attn_type": types.SimpleNamespace(value="decoder"), "k_scale": None, "v_scale": None,
        "xai_temperature_len": -1, **more,
    })  # fmt: skip


def batch(run: Any, mode: contract.ForwardMode, lengths: list[tuple[int, int]], **more: Any) -> Any:
    """Requests 2, 0, 3 ... with (new tokens, keys together)."""
    device = run.req_to_token_pool.req_to_token.device
    requests = torch.tensor([2, 0, 3, 1][: len(lengths)], device=device)
    places = torch.cat([
        run.req_to_token_pool.req_to_token[r, keys - new : keys] for r, (new, keys) in zip(requests, lengths, strict=True)
    ])  # fmt: skip
    news, keys = (torch.tensor([pair[i] for pair in lengths]) for i in (0, 1))
    on_device = keys.to(device)
    return types.SimpleNamespace(**{
        "forward_mode": mode, "req_pool_indices": requests, "seq_lens": on_device, "seq_lens_cpu": keys, "out_cache_loc": places, "spec_info": None,
        "extend_seq_lens": news.int().to(device), "extend_seq_lens_cpu": news.tolist(), **more,
    })  # fmt: skip


def dense(q: Any, k: Any, v: Any, one: Any, sinks: Any) -> Any:
    """Attention of the last queries of one sequence, in float64."""
    k, v = (x.double().repeat_interleave(2, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * one.scaling
    if one.logit_cap:
        scores = one.logit_cap * torch.tanh(scores / one.logit_cap)
    age = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q) - torch.arange(len(k), device=q.device)[None]
    hidden = (age < 0) | (age > one.sliding_window_size if one.sliding_window_size >= 0 else age < 0)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)
