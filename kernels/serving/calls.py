"""``tilecast.attention_kvcache``, ``attention_varlen`` and ``attention_mla``: what an inference engine calls.

Names and meanings are those of flash_attn_with_kvcache and flash_attn_varlen_func (docs/serving.md has a table).  All check
shapes here and end in `operator.serve`; lengths and tables stay on the device and are never waited for.
"""

from __future__ import annotations

from typing import Any

import torch

from tilecast.kernels.again import Memory, key_of, watched
from tilecast.kernels.errors import AttentionError, UnsupportedError, check_scale, limits
from tilecast.kernels.serving.append import append, append_started, check_append
from tilecast.kernels.serving.checks import (
    MOST_KEYS,
    check_length,
    check_list,
    check_no_gradients,
    check_page,
    check_softcap,
    check_tensors,
    check_values,
    factors,
)
from tilecast.kernels.serving.operator import refusal, serve, started

#: Tensors of a call before those that it appends.
_GIVEN = 11
_memory = Memory()


def attention_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | int | None = None,
    block_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    *,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    head_dim_v: int | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    return_lse: bool = False,
    check: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the queries of each sequence to its cached keys: decode, speculative decode, chunked prefill.

    q: (batch, seqlen_q, heads_q, head_dim), or with cu_seqlens_q (total_q, heads_q, head_dim).
    k_cache, v_cache: (batch_cache, seqlen_cache, heads_kv, head_dim | head_dim_v), or with block_table (pages, page size,
    heads_kv, ...) with pages of 16 to 256 tokens; bfloat16 or float16 as q, unit last stride, others multiples of 8.  Or float8_e4m3fn
    (uint8 is taken for its bytes), others multiples of 16: products are of q's dtype, which holds every e4m3 number exactly.
    cache_seqlens: keys of each sequence, int32 (batch,) or one number; all of the cache by default.
    block_table: int32 (batch, pages of a sequence); entries beyond a sequence's keys are never read.
    cache_batch_idx: int32 (batch,), the row of the cache that each sequence has, its own number by default.
    k, v: (batch, seqlen_new, heads_kv, ...), or with cu_seqlens_k_new (total_new, heads_kv, ...), are first written to the cache behind
    its cache_seqlens keys and count as keys from then on; cache_seqlens itself stays.  An e4m3 cache gets k / k_descale, rounded to the nearest, 448 at the
    most.  What a cache has no room for is not written.  No two sequences may write to one row or page.
    rotary_cos, rotary_sin: (positions, half of the rotated columns), float32 or as q; keys are rotated as they are written, and
    queries too, the i-th as position cache_seqlens + i, or without causal and window all as cache_seqlens.  rotary_interleaved: pairs are
    neighbours (GPT-J), otherwise halves (GPT-NeoX, Llama in transformers).  Needs k and v; positions beyond the tables count as the last.
    max_seqlen_q: with cu_seqlens_q, the most queries of a sequence; needed.
    max_seqlen_k: the most keys of a sequence, by default what table or cache hold; a tight bound saves scratch memory.
    head_dim_v: values are the first so many columns of v_cache, all of them by default: no view has to be made for each call.
    causal, window, scale: as `tilecast.attention`: the last query sits at the last key.
    softcap: scores become softcap * tanh(score / softcap); 0 for none.
    k_descale, v_descale: what keys and values are multiplied by, float32 of one number or (batch, heads_kv).
    sinks: (heads_q,), a logit that every row's softmax also counts, with no value; float32 or as q.
    return_lse: also return the natural log of each row's sum, float32 (batch, heads_q, seqlen_q) or (heads_q, total_q).
    check: check lengths and tables on the device, which waits for it, and raise AttentionError where they are invalid.
    Without it lengths beyond ``max_seqlen_k`` count as that, and a page outside the pool is undefined.

    What is in memory beyond a sequence's keys, NaN included, never matters.  A sequence gets the same bits alone and in any
    batch, and the same bits every time.  Safe in CUDA graphs: a replay follows the lengths and tables of its time.
    """
    new = (k, v, cu_seqlens_k_new, rotary_cos, rotary_sin)
    appends = not (k is v is cu_seqlens_k_new is rotary_cos is rotary_sin is None)
    given = (
        q,
        k_cache,
        v_cache,
        cu_seqlens_q,
        None,
        cache_seqlens,
        block_table,
        cache_batch_idx,
        sinks,
        k_descale,
        v_descale,
        *(new if appends else ()),
    )
    settings = (
        max_seqlen_q,
        max_seqlen_k,
        head_dim_v,
        head_dim_v.__class__,
        causal,
        causal.__class__,
        window,
        scale,
        softcap,
        return_lse,
        rotary_interleaved,
    )
    key = None if check else key_of(given, settings)
    if key is not None and (known := _memory.find(key)) is not None:
        return known(given)
    if head_dim_v is not None:
        # A call that was met before goes without the view: it begins where v_cache does, and its shape and strides are known.
        v_cache = _first_columns("head_dim_v", v_cache, head_dim_v)
    packed, paged = cu_seqlens_q is not None, block_table is not None
    check_tensors(
        q, k_cache, v_cache, "total_q, heads, head_dim" if packed else "batch, seqlen_q, heads, head_dim",
        "pages, page size, heads_kv, head_dim" if paged else "batch, seqlen, heads_kv, head_dim",
    )  # fmt: skip
    batch = _sequences(q, cu_seqlens_q, max_seqlen_q)
    whole = _room_of_keys(k_cache, block_table, cache_batch_idx, batch, q.device)
    cache_seqlens = _lengths(cache_seqlens, whole, batch, q.device, paged, appends)
    scales = [
        factors(name, given, batch, k_cache.shape[-2], q.device)
        for name, given in (("k_descale", k_descale), ("v_descale", v_descale))
    ]
    lists = (cu_seqlens_q, None, cache_seqlens, block_table, cache_batch_idx, sinks, *scales)
    longest_q = q.shape[1] if max_seqlen_q is None else max_seqlen_q
    return _call(
        q, k_cache, v_cache, lists, longest_q, whole if max_seqlen_k is None else max_seqlen_k,
        causal, window, scale, softcap, return_lse, check, key, (*new, rotary_interleaved) if appends else None,
    )  # fmt: skip


def _sequences(q: Any, cu_seqlens_q: Any, max_seqlen_q: int | None) -> Any:
    """How many sequences the queries are of; AttentionError where list and number do not go together."""
    if cu_seqlens_q is None:
        if max_seqlen_q is not None:
            raise AttentionError(
                "max_seqlen_q: expected None without cu_seqlens_q, for every sequence has q's seqlen_q"
            )
        return q.shape[0]
    check_list("cu_seqlens_q", cu_seqlens_q, (None,), q.device)
    if max_seqlen_q is None:
        raise AttentionError(
            "max_seqlen_q: expected the most queries of a sequence together with cu_seqlens_q, got None"
        )
    return cu_seqlens_q.shape[0] - 1


def _room_of_keys(k_cache: Any, block_table: Any, cache_batch_idx: Any, batch: Any, device: Any) -> Any:
    """Keys that cache or table have room for in a sequence; AttentionError where they do not say where its keys are."""
    if block_table is not None:
        check_page(k_cache.shape[1])
        check_list("block_table", block_table, (batch, None), device)
        if cache_batch_idx is not None:
            raise AttentionError("cache_batch_idx: expected None together with block_table, which says where keys are")
        return k_cache.shape[1] * block_table.shape[1]
    if cache_batch_idx is not None:
        check_list("cache_batch_idx", cache_batch_idx, (batch,), device)
    elif k_cache.shape[0] < batch:
        raise AttentionError(f"k_cache: expected a row for each of {batch} sequences, got {k_cache.shape[0]}")
    return k_cache.shape[1]


def _lengths(cache_seqlens: Any, whole: Any, batch: Any, device: Any, paged: bool, appends: bool) -> Any:
    """Keys of each sequence, int32 (batch,), of which a number is made one; None for all of the cache."""
    if cache_seqlens is None:
        if paged:
            raise AttentionError(
                "cache_seqlens: expected the keys of each sequence together with block_table, got None"
            )
        if appends:
            raise AttentionError("cache_seqlens: expected the keys before those of k and v, got None")
        return None
    if isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        if not 0 <= cache_seqlens <= whole:
            raise AttentionError(f"cache_seqlens: expected 0 to {whole} keys, got {cache_seqlens}")
        return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)
    check_list("cache_seqlens", cache_seqlens, (batch,), device)
    return cache_seqlens


def attention_mla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | int | None = None,
    block_table: torch.Tensor | None = None,
    head_dim_v: int = 512,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Multi-head latent attention (MLA) as decoding does it: all query heads share one latent key, whose first columns are the value.

    q: (batch, seqlen_q, heads_q, 576), queries with the key projection absorbed, then the rotated part.  kv_cache: (pages, page
    size, 1, 576) with block_table, or (batch, seqlen, 1, 576).  Returns (batch, seqlen_q, heads_q, head_dim_v); names, options and
    what holds are those of `attention_kvcache`.  The scale by default is 1/sqrt(576); a model's is that of its head before absorption.
    """
    shape: tuple[int, ...] = getattr(kv_cache, "shape", ())
    if len(shape) != 4 or shape[2] != 1:
        got = tuple(shape) if hasattr(kv_cache, "shape") else type(kv_cache).__name__
        raise AttentionError(
            f"kv_cache: expected (pages, page size, 1, latent width) or (batch, seqlen, 1, ...), got {got}"
        )
    if head_dim_v.__class__ is not int or not 1 <= head_dim_v < shape[3]:
        raise AttentionError(f"head_dim_v: expected a whole number of 1 to {shape[3] - 1}, got {head_dim_v!r}")
    return attention_kvcache(q, kv_cache, kv_cache, cache_seqlens, block_table, head_dim_v=head_dim_v, **options)


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
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    return_lse: bool = False,
    check: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences packed one after another: q (total_q, heads_q, head_dim), k, v (total_k, heads_kv, ...).

    cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), where each sequence begins, and the end; one tensor for both, where sequences have as many
    keys as queries, is faster, with the same bits.  max_seqlen_q, max_seqlen_k: no
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
            k_descale=k_descale, v_descale=v_descale, return_lse=return_lse, check=check,
        )  # fmt: skip
    given = (q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, None, None, sinks, k_descale, v_descale)
    settings = (
        max_seqlen_q,
        max_seqlen_k,
        causal,
        causal.__class__,
        window,
        scale,
        softcap,
        return_lse,
        cu_seqlens_q is cu_seqlens_k,
    )
    key = None if check else key_of(given, settings)
    if key is not None and (known := _memory.find(key)) is not None:
        return known(given)
    check_tensors(q, k, v, "total_q, heads, head_dim", "total_k, heads_kv, head_dim")
    check_list("cu_seqlens_q", cu_seqlens_q, (None,), q.device)
    check_list("cu_seqlens_k", cu_seqlens_k, (cu_seqlens_q.shape[0],), q.device)
    if seqused_k is not None:
        check_list("seqused_k", seqused_k, (cu_seqlens_q.shape[0] - 1,), q.device)
    batch = cu_seqlens_q.shape[0] - 1
    scales = [
        factors(name, given, batch, k.shape[-2], q.device)
        for name, given in (("k_descale", k_descale), ("v_descale", v_descale))
    ]
    lists = (cu_seqlens_q, cu_seqlens_k, seqused_k, None, None, sinks, *scales)
    return _call(q, k, v, lists, max_seqlen_q, max_seqlen_k, causal, window, scale, softcap, return_lse, check, key)


def _first_columns(name: str, x: Any, count: Any) -> Any:
    """The first so many columns of a cache."""
    if getattr(x, "ndim", 0) < 1:
        return x  # refused by what looks at tensors
    if count.__class__ is not int or not 1 <= count <= x.shape[-1]:
        raise AttentionError(f"{name}: expected a whole number of 1 to {x.shape[-1]}, got {count!r}")
    return x[..., :count]


def _call(
    q: Any, k: Any, v: Any, lists: tuple[Any, ...], seqlen_q: int, seqlen_k: int, causal: bool,
    window: tuple[int, int] | None, scale: float | None, softcap: float, return_lse: bool, check: bool,
    key: Any, new: Any = None,
) -> Any:  # fmt: skip
    """What both calls share, from checked tensors and lists on; a call with a key is remembered.

    ``new``: k, v, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_interleaved where something is appended first.
    """
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
    if narrow := k.dtype == torch.float8_e4m3fn:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    factor, cap = None if scale is None else check_scale(scale), check_softcap(softcap)
    appended = None
    if new is not None:
        check_append(q, k, v, lists, new, seqlen_k, check)
        if not watched(q) and (refused := refusal(q, k, q.shape[-1], v.shape[-1])):
            raise UnsupportedError(refused)  # before anything is written
        settings = new[5], (left, right) != (-1, -1)
        turned, lengths = append(q, k, v, lists, new, *settings)
        if key is not None:
            appended = append_started(q, k, v, lists, new, *settings)
        q, lists = turned, (*lists[:2], lengths, *lists[3:])
    arguments = (q, k, v, *lists, seqlen_q, seqlen_k, factor, cap, left, right, return_lse)
    out, lse = serve(*arguments)
    if key is not None:
        _memory.remember(key, _known_call(started(arguments), narrow, return_lse, appended))
    return (out, lse) if return_lse else out


def _known_call(call: Any, narrow: bool, return_lse: bool, appended: Any) -> Any:
    """A call that takes tensors as users give them, ``appended`` first where it is not None; None for None."""
    if call is None:
        return None

    if not (narrow or return_lse) and appended is None:
        # What decoding does most, without a step that it has no use for.
        return lambda given: call(given[0], given[1], given[2], given[3:])[0]

    def known(given: tuple[Any, ...]) -> Any:
        q, k, v, *lists = given[:_GIVEN]
        if narrow:
            k, v = k.view(torch.uint8), v.view(torch.uint8)
        if appended is not None:
            q, lists[2] = appended(q, k, v, lists, given[_GIVEN:])
        out, lse = call(q, k, v, lists)
        return (out, lse) if return_lse else out

    return known
