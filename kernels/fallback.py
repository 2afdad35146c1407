"""Attention through PyTorch's own SDPA with exactly the operator's semantics: slower, anywhere, with gradients.

Only runs when the caller asked for it.  SDPA differs from the operator in three ways that are bridged here: its causal
mask is aligned top left, it has no window, and it returns no log-sum-exp.
"""

from __future__ import annotations

import math
from typing import Any

import torch

#: Scores held at once while the log-sum-exp is computed, in elements: 256 MB of float32.
SCORES_AT_ONCE = 2**26


def sdpa_attention(
    q: Any, k: Any, v: Any, scale: float | None, left: int, right: int, return_lse: bool
) -> tuple[Any, Any | None]:
    """(out, lse or None) of (batch, heads, seqlen, head_dim) tensors of any floating dtype, on any device.

    ``left`` and ``right`` are limits around the bottom-right diagonal, -1 for none.  Rows that see no key give zeros and
    an lse of -inf.  ``lse`` is float32 (batch, heads_q, seqlen_q).  Both carry gradients.
    """
    batch, heads, seqlen_q, head_dim = q.shape
    seqlen_k = k.shape[2]
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim)
    if 0 in (batch, heads, seqlen_q, seqlen_k):
        lse = torch.full((batch, heads, seqlen_q), -math.inf, dtype=torch.float32, device=q.device)
        return q.new_zeros((batch, heads, seqlen_q, v.shape[3])), lse if return_lse else None
    visible = visible_keys(seqlen_q, seqlen_k, left, right, q.device)
    lse = _log_sum_exp(q, k, scale, visible) if return_lse else None
    grouped = heads != k.shape[1]
    function = torch.nn.functional.scaled_dot_product_attention
    if visible is None:
        return function(q, k, v, scale=scale, enable_gqa=grouped), lse
    if left < 0 and right == 0 and seqlen_q == seqlen_k:
        return function(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped), lse
    # Softmax over nothing is NaN in some of SDPA's kernels: let empty rows see everything, then zero them.
    empty = ~visible.any(dim=-1, keepdim=True)
    out = function(q, k, v, attn_mask=visible | empty, scale=scale, enable_gqa=grouped)
    return out.masked_fill(empty, 0.0), lse


def visible_keys(seqlen_q: int, seqlen_k: int, left: int, right: int, device: Any) -> Any | None:
    """Boolean (seqlen_q, seqlen_k), True where the row sees the key; None where every row sees every key."""
    if left < 0 and right < 0:
        return None
    row = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device=device)[None, :]
    visible = torch.ones((seqlen_q, seqlen_k), dtype=torch.bool, device=device)
    if right >= 0:
        visible = visible & (key <= row + right)
    if left >= 0:
        visible = visible & (key >= row - left)
    return visible


def _log_sum_exp(q: Any, k: Any, scale: float, visible: Any | None) -> Any:
    """Natural log of the sum of exp(scale q.k) over visible keys, float32, in chunks of query rows."""
    batch, heads, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_k = k.shape[1], k.shape[2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(wide).reshape(batch, heads_kv, heads // heads_kv, seqlen_q, head_dim)
    keys = k.to(wide).transpose(-1, -2)[:, :, None]
    rows = max(1, SCORES_AT_ONCE // (batch * heads * seqlen_k))
    parts = []
    for start in range(0, seqlen_q, rows):
        scores = (grouped[:, :, :, start : start + rows] @ keys) * scale
        if visible is not None:
            scores = scores.masked_fill(~visible[start : start + rows], -math.inf)
        parts.append(torch.logsumexp(scores, dim=-1))
    return torch.cat(parts, dim=-1).reshape(batch, heads, seqlen_q).float()
