"""Attention of padded batches and static caches, with soft caps and sinks, by the serving kernels: what `transformers_adapter` hands over to them.

Padding is packed away: kernels see the real tokens alone.  Inference only, for serving kernels have no backward pass.
"""

from __future__ import annotations

from typing import Any

import torch

from tilecast.kernels.serving.calls import attention_kvcache, attention_varlen


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, real: torch.Tensor | None, causal: bool,
    window: tuple[int, int] | None, scale: float | None, softcap: float, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """(batch, seqlen_q, heads, head_dim_v) of (batch, heads, seqlen, head_dim) tensors; rows of padding are zero.

    ``real``: (batch, seqlen_k), True where a key is no padding; the queries are the last of the keys.
    sinks: (heads,), of any floating dtype.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if sinks is not None and sinks.dtype not in (q.dtype, torch.float32):
        sinks = sinks.float()
    rest: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "softcap": softcap, "sinks": sinks}
    if real is None:
        made: Any = attention_kvcache(q, k, v, **rest)
        return made
    real_q = real[:, -q.shape[1] :]
    lengths_q, lengths_k = real_q.sum(1), real.sum(1)
    starts_k = _starts(lengths_k)
    # One list of both, where it is one, is faster.
    starts_q = starts_k if real_q.shape == real.shape else _starts(lengths_q)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    out[real_q] = attention_varlen(
        q[real_q], k[real], v[real], starts_q, starts_k, int(lengths_q.max()), int(lengths_k.max()), **rest
    )
    return out


def attend_static(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor, scale: float | None,
    softcap: float, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention to the first ``lengths`` keys (int32 (batch,), on the device) of a cache that has room for more.

    Tensors and result as in `attend`; the last query sits at the last of those keys.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if sinks is not None and sinks.dtype not in (q.dtype, torch.float32):
        sinks = sinks.float()
    made: Any = attention_kvcache(q, k, v, lengths, causal=True, scale=scale, softcap=softcap, sinks=sinks)
    return made


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    """Where each sequence begins, and the end: int32 (batch + 1,)."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
