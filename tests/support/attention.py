"""Attention to compare kernels with, on the GPU: in float64, and in PyTorch's operations at the kernel's own dtype."""

from __future__ import annotations

import math

import torch

from tilecast.kernels.fallback import visible_keys


def exact(q, k, v, window, scale=None):
    """Float64 (out, lse), one (batch, head) at a time; a row that sees no key gives 0 and -inf."""
    batch, heads, seqlen_q, d = q.shape
    group = heads // k.shape[1]
    scale = d**-0.5 if scale is None else scale
    out = torch.zeros(batch, heads, seqlen_q, v.shape[3], dtype=torch.float64, device=q.device)
    lse = torch.empty(batch, heads, seqlen_q, dtype=torch.float64, device=q.device)
    visible = visible_keys(seqlen_q, k.shape[2], *window, q.device)
    for b in range(batch):
        for h in range(heads):
            scores = q[b, h].double() @ k[b, h // group].double().T * scale
            if visible is not None:
                scores.masked_fill_(~visible, -math.inf)
            lse[b, h] = torch.logsumexp(scores, dim=-1)
            out[b, h] = torch.softmax(scores, dim=-1).nan_to_num_(0.0) @ v[b, h // group].double()
    return out, lse


def plain(q, k, v, window, scale=None):
    """Attention as PyTorch operations at the dtype of ``q``: the FlashAttention test-suite's yardstick."""
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = q @ wide_k.transpose(-1, -2) * (q.shape[3] ** -0.5 if scale is None else scale)
    visible = visible_keys(q.shape[2], k.shape[2], *window, q.device)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return torch.softmax(scores, dim=-1).nan_to_num(0.0) @ wide_v
