"""FLOP of an attention call, for FlopCounterMode: the counts of the FlashAttention papers, without torch."""

from __future__ import annotations

from typing import Any


def attention_flops(
    q_shape: Any, k_shape: Any, v_shape: Any, scale: Any, left: int, right: int, *_: Any, **__: Any
) -> int:
    """Forward FLOP as the FlashAttention papers count them.

    2 batch heads_q seqlen_q seqlen_k (head_dim + head_dim_v); causal with equal lengths counts half of that, any other
    mask counts the pairs of query and key that see each other.
    """
    batch, heads, seqlen_q, head_dim = q_shape
    seqlen_k, head_dim_v = k_shape[2], v_shape[3]
    per_pair = 2 * batch * heads * (head_dim + head_dim_v)
    if left < 0 and right == 0 and seqlen_q == seqlen_k:
        return int(per_pair * seqlen_q * seqlen_k // 2)
    offset = seqlen_k - seqlen_q
    highs = _clipped_sum(seqlen_q, offset + right + 1, seqlen_k) if right >= 0 else seqlen_q * seqlen_k
    lows = _clipped_sum(seqlen_q, offset - left, seqlen_k) if left >= 0 else 0
    return int(per_pair * (highs - lows))


def attention_backward_flops(
    dout_shape: Any,
    q_shape: Any,
    k_shape: Any,
    v_shape: Any,
    output_shape: Any,
    lse_shape: Any,
    dlse_shape: Any,
    scale: Any,
    left: int,
    right: int,
    **_: Any,
) -> int:
    """Backward FLOP as the papers count them: five products where forward has two, whatever a kernel does again."""
    return attention_flops(q_shape, k_shape, v_shape, scale, left, right) * 5 // 2


def _clipped_sum(rows: int, start: int, top: int) -> int:
    """Sum over i in [0, rows) of start + i, each clipped to [0, top]."""
    first = max(0, min(rows, -start))
    last = max(first, min(rows, top - start))
    ramp = (last - first) * start + (first + last - 1) * (last - first) // 2
    return ramp + (rows - last) * top
