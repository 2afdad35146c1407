"""Whether a kernel computed attention: sampled rows against float64."""

from __future__ import annotations

import torch

from tilecast.model.kernel.workload import Workload

#: Above this share of ||ref|| an output is wrong, not rounded: 16-bit attention lands between 1e-3 and 1e-2.
WRONG = 0.03
_ROWS = 64


def relative_error(work: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> float:
    """||out - ref|| / ||ref|| over rows spread over sequence, heads and batch; NaN when an output is not finite."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, work.seqlen_q, (_ROWS,), generator=generator)
    rows[0], rows[1] = 0, work.seqlen_q - 1
    heads = torch.randint(0, work.heads_q, (_ROWS,), generator=generator)
    batch = torch.randint(0, work.batch, (_ROWS,), generator=generator)
    left, right = work.limits
    wrong = size = 0.0
    for b, h, i in zip(batch.tolist(), heads.tolist(), rows.tolist(), strict=True):
        keys, values = k[b, h // work.group_size].double(), v[b, h // work.group_size].double()
        scores = keys @ q[b, h, i].double() * work.head_dim_qk**-0.5
        position = torch.arange(work.seqlen_k, device=q.device) - (i + work.seqlen_k - work.seqlen_q)
        if right >= 0:
            scores = scores.masked_fill(position > right, -torch.inf)
        if left >= 0:
            scores = scores.masked_fill(position < -left, -torch.inf)
        reference = torch.softmax(scores, 0) @ values
        wrong += float((out[b, h, i].double() - reference).square().sum())
        size += float(reference.square().sum())
    return float((wrong / max(size, 1e-300)) ** 0.5)
