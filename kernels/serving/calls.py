"""``tilecast.attention_kvcache`` and ``tilecast.attention_varlen``: what an inference engine calls.

Names and meanings are those of flash_attn_with_kvcache and flash_attn_varlen_func (docs/serving.md has a table).  Both check
shapes here and end in `operator.serve`; lengths and tables stay on the device and are never waited for.
"""

from __future__ import annotations

from typing import Any

import torch

from tilecast.kernels.errors import AttentionError, check_scale, limits
from tilecast.kernels.serving.checks import (
    MOST_KEYS,
    check_length,
    check_list,
    check_no_gradients,
    check_page,
    check_softcap,
    check_tensors,
    check_values,
)
from tilecast.kernels.serving.operator import serve


def attention_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | int | None = None,
    block_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    check: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the queries of each sequence to its cached keys: decode, speculative decode, chunked prefill.

    q: (batch, seqlen_q, heads_q, head_dim), or with cu_seqlens_q (total_q, heads_q, head_dim).
    k_cache, v_cache: (batch_cache, seqlen_cache, heads_kv, head_dim | head_dim_v), or with block_table (pages, page size,
    heads_kv, ...) with pages of 16 to 256 tokens; bfloat16 or float16 as q, unit last stride, others multiples of 8.
    cache_seqlens: keys of each sequence, int32 (batch,) or one number; all of the cache by default.
    block_table: int32 (batch, pages of a sequence); entries beyond a sequence's keys are never read.
    cache_batch_idx: int32 (batch,), the row of the cache that each sequence has, its own number by default.
    max_seqlen_q: with cu_seqlens_q, the most queries of a sequence; needed.
    max_seqlen_k: the most keys of a sequence, by default what table or cache hold; a tight one saves scratch memory.
    causal, window, scale: as `tilecast.attention`: the last query sits at the last key.
    softcap: scores become softcap * tanh(score / softcap); 0 for none.
    sinks: (heads_q,), a logit that every row's softmax also counts, with no value; float32 or as q.
    return_lse: also return the natural log of each row's sum, float32 (batch, heads_q, seqlen_q) or (heads_q, total_q).
    check: look at lengths and tables on the device, which waits for it, and raise AttentionError where they make no sense.
    Without it lengths beyond ``max_seqlen_k`` count as that, and a page outside the pool is undefined.

    What is in memory beyond a sequence's keys, NaN included, never matters.  A sequence gets the same bits alone and in any
    batch, and the same bits every time.  Safe in CUDA graphs: a replay follows the lengths and tables of its time.
    """
    packed, paged = cu_seqlens_q is not None, block_table is not None
    check_tensors(
        q, k_cache, v_cache, "total_q, heads, head_dim" if packed else "batch, seqlen_q, heads, head_dim",
        "pages, page size, heads_kv, head_dim" if paged else "batch, seqlen, heads_kv, head_dim",
    )  # fmt: skip
    if cu_seqlens_q is not None:
        check_list("cu_seqlens_q", cu_seqlens_q, (None,), q.device)
        if max_seqlen_q is None:
            raise AttentionError(
                "max_seqlen_q: expected the most queries of a sequence together with cu_seqlens_q, got None"
            )
    elif max_seqlen_q is not None:
        raise AttentionError("max_seqlen_q: expected None without cu_seqlens_q, for every sequence has q's seqlen_q")
    batch = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0]
    whole = k_cache.shape[1]
    if block_table is not None:
        check_page(k_cache.shape[1])
        check_list("block_table", block_table, (batch, None), q.device)
        if cache_batch_idx is not None:
            raise AttentionError("cache_batch_idx: expected None together with block_table, which says where keys are")
        if cache_seqlens is None:
            raise AttentionError(
                "cache_seqlens: expected the keys of each sequence together with block_table, got None"
            )
        whole *= block_table.shape[1]
    elif cache_batch_idx is not None:
        check_list("cache_batch_idx", cache_batch_idx, (batch,), q.device)
    elif k_cache.shape[0] < batch:
        raise AttentionError(f"k_cache: expected a row for each of {batch} sequences, got {k_cache.shape[0]}")
    if isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    elif cache_seqlens is not None:
        check_list("cache_seqlens", cache_seqlens, (batch,), q.device)
    lists = (cu_seqlens_q, None, cache_seqlens, block_table, cache_batch_idx, sinks)
    longest_q = q.shape[1] if max_seqlen_q is None else max_seqlen_q
    return _call(
        q, k_cache, v_cache, lists, longest_q, whole if max_seqlen_k is None else max_seqlen_k,
        causal, window, scale, softcap, return_lse, check,
    )  # fmt: skip


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    check: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences packed one after another: q (total_q, heads_q, head_dim), k, v (total_k, heads_kv, ...).

    cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), where each sequence begins, and the end.  max_seqlen_q, max_seqlen_k: no
    sequence is longer.  seqused_k: int32 (batch,), use only so many keys of each sequence.  With block_table, k and v are
    pages as in `attention_kvcache`, seqused_k is needed and cu_seqlens_k must be None.  The rest is as there; returns
    (total_q, heads_q, head_dim_v), and with return_lse also float32 (heads_q, total_q).
    """
    if block_table is not None:
        if cu_seqlens_k is not None:
            raise AttentionError("cu_seqlens_k: expected None together with block_table: seqused_k has the lengths")
        if seqused_k is None:
            raise AttentionError("seqused_k: expected the keys of each sequence together with block_table, got None")
        return attention_kvcache(
            q, k, v, seqused_k, block_table, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k, causal=causal, window=window, scale=scale, softcap=softcap, sinks=sinks,
            return_lse=return_lse, check=check,
        )  # fmt: skip
    check_tensors(q, k, v, "total_q, heads, head_dim", "total_k, heads_kv, head_dim")
    check_list("cu_seqlens_q", cu_seqlens_q, (None,), q.device)
    check_list("cu_seqlens_k", cu_seqlens_k, (cu_seqlens_q.shape[0],), q.device)
    if seqused_k is not None:
        check_list("seqused_k", seqused_k, (cu_seqlens_q.shape[0] - 1,), q.device)
    lists = (cu_seqlens_q, cu_seqlens_k, seqused_k, None, None, sinks)
    return _call(
        q, k, v, lists, max_seqlen_q, max_seqlen_k, causal, window, scale, softcap, return_lse, check
    )  # fmt: skip


def _call(
    q: Any, k: Any, v: Any, lists: tuple[Any, ...], seqlen_q: int, seqlen_k: int, causal: bool,
    window: tuple[int, int] | None, scale: float | None, softcap: float, return_lse: bool, check: bool,
) -> Any:  # fmt: skip
    """What both calls share, from checked tensors and lists on."""
    left, right = limits(causal, window)
    sinks = lists[5]
    if sinks is not None:
        kind = sinks.dtype if sinks.dtype == q.dtype else torch.float32
        check_list("sinks", sinks, (q.shape[-2],), q.device, str(kind))
    check_no_gradients(q, k, v)
    if seqlen_q:
        check_length("max_seqlen_q", seqlen_q, MOST_KEYS)
    if seqlen_k:
        check_length("max_seqlen_k", seqlen_k, MOST_KEYS)
    if lists[3] is not None and seqlen_k > lists[3].shape[1] * k.shape[1]:
        raise AttentionError(
            f"max_seqlen_k: expected at most the {lists[3].shape[1] * k.shape[1]} keys that block_table has pages for, got {seqlen_k}"
        )
    if lists[1] is None and lists[3] is None and seqlen_k > k.shape[1]:
        raise AttentionError(f"max_seqlen_k: expected at most the {k.shape[1]} keys of the cache, got {seqlen_k}")
    if check:
        check_values(lists, k, seqlen_q, seqlen_k, q.shape[0] if lists[0] is not None else None)
    out, lse = serve(
        q, k, v, *lists, seqlen_q, seqlen_k, None if scale is None else check_scale(scale), check_softcap(softcap),
        left, right, return_lse,
    )  # fmt: skip
    return (out, lse) if return_lse else out
