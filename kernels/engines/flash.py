"""flash-attn's own functions on tilecast's kernels: names, order and meaning of arguments as in FlashAttention 2 (with 3's ``s_aux``).

For programs and libraries that call flash-attn: ``from tilecast.kernels.engines.flash import flash_attn_with_kvcache``.  What the kernels
do not have is refused where it would change the result, and taken where it would not (``num_splits``, ``deterministic``: results
always are).  Shapes and limits are those of `tilecast.attention`, `tilecast.attention_varlen` and `tilecast.attention_kvcache`.
"""

from __future__ import annotations

from typing import Any

import torch

from tilecast.kernels.errors import UnsupportedError
from tilecast.kernels.operator import attention
from tilecast.kernels.serving.calls import attention_kvcache, attention_varlen


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, s_aux: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Attention of (batch, seqlen, heads, head_dim) tensors; with gradients unless there is a soft cap or a sink.

    return_attn_probs: (out, lse, None), lse float32 (batch, heads, seqlen_q).
    """
    _refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    window = _window(causal, window_size)
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "scale": softmax_scale,
        "return_lse": return_attn_probs,
    }
    if softcap or s_aux is not None:
        made = attention_kvcache(q, k, v, softcap=softcap, sinks=s_aux, **options)
    else:
        made = attention(q, k, v, layout="bshd", **options)
    return (*made, None) if return_attn_probs else made


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: torch.Tensor | None = None, *, seqused_k: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Attention of sequences packed one after another, (total, heads, head_dim); inference only.

    With block_table, seqused_k has the lengths, and cu_seqlens_k, where it is given as well, must say the same: it is not read.
    return_attn_probs: (out, lse, None), lse float32 (heads, total_q).
    """
    _refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    if block_table is not None and seqused_k is None and cu_seqlens_k is not None:
        seqused_k = cu_seqlens_k.diff().to(torch.int32)
    made: Any = attention_varlen(
        q, k, v, cu_seqlens_q, None if block_table is not None else cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k),
        seqused_k=seqused_k, block_table=block_table, causal=causal, window=_window(causal, window_size),
        scale=softmax_scale, softcap=softcap, sinks=s_aux, return_lse=return_attn_probs,
    )  # fmt: skip
    return (*made, None) if return_attn_probs else made


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = None, v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None, cache_batch_idx: torch.Tensor | None = None, cache_leftpad: Any = None,
    block_table: torch.Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Any = None,
    num_splits: int = 0, return_softmax_lse: bool = False, *, k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None, s_aux: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Attention of (batch, seqlen_q, heads, head_dim) queries to a cache, to which k and v are appended first; inference only.

    return_softmax_lse: (out, lse), lse float32 (batch, heads, seqlen_q).
    """
    _refuse(alibi_slopes=alibi_slopes, cache_leftpad=cache_leftpad)
    return attention_kvcache(
        q, k_cache, v_cache, cache_seqlens, block_table, cache_batch_idx, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved, causal=causal, window=_window(causal, window_size), scale=softmax_scale,
        softcap=softcap, sinks=s_aux, k_descale=k_descale, v_descale=v_descale, return_lse=return_softmax_lse,
    )  # fmt: skip


def _window(causal: bool, size: tuple[int, int]) -> tuple[int, int] | None:
    """flash-attn's window: a causal mask hides what is right of the diagonal whatever the window says."""
    left, right = size
    if (left, right) == (-1, -1):
        return None
    return (left, 0) if causal else (left, right)


def _refuse(**given: Any) -> None:
    """UnsupportedError for arguments that would change the result."""
    for name, value in given.items():
        if value is not None and not (isinstance(value, (int, float)) and value == 0):
            raise UnsupportedError(
                f"{name}: expected {'0' if name == 'dropout_p' else 'None'}, got {value if isinstance(value, (int, float)) else type(value).__name__}; "
                "call flash-attn for it"
            )
