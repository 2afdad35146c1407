"""What the serving kernels compute, sequence by sequence in float64, in place of the operator behind the calls."""

from __future__ import annotations

import math
from typing import Any


def serve(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, used: Any, table: Any, slots: Any, sinks: Any, *rest: Any) -> tuple[Any, Any]:  # fmt: skip
    """(out, nothing) of `operator.serve`'s arguments, for pages."""
    import torch

    k_scale, v_scale, seqlen_q, seqlen_k, scale, softcap, left, right, _ = rest
    wide = [x.view(torch.float8_e4m3fn).double() if x.dtype == torch.uint8 else x.double() for x in (k, v)]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rows_of = q if cu_q is not None else q.flatten(0, 1)
    starts = cu_q.tolist() if cu_q is not None else range(0, len(rows_of) + 1, q.shape[1])
    out = torch.zeros(*rows_of.shape[:-1], v.shape[-1], dtype=q.dtype)
    group = q.shape[-2] // k.shape[-2]
    for b in range(len(used)):
        keys = min(int(used[b]), seqlen_k)
        rows = slice(starts[b], starts[b + 1])
        queries = rows.stop - rows.start
        assert queries <= seqlen_q
        pages = table[b, : -(-keys // k.shape[1])].long()
        ks, vs = (
            x[pages].flatten(0, 1)[:keys] * (1.0 if factors is None else factors[b].double()[None, :, None])
            for x, factors in zip(wide, (k_scale, v_scale), strict=True)
        )
        ks, vs = (x.repeat_interleave(group, 1) for x in (ks, vs))
        scores = torch.einsum("qhd,khd->hqk", rows_of[rows].double(), ks) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        there = torch.arange(keys)[None] - (torch.arange(queries)[:, None] + keys - queries)
        seen = (there <= (right if right >= 0 else keys)) & (there >= -(left if left >= 0 else keys))
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, queries, 1)], -1)
        weights = scores.softmax(-1)[..., :keys]
        out[rows] = torch.einsum("hqk,khd->qhd", weights, vs).to(q.dtype)
    return out.view(*q.shape[:-1], v.shape[-1]), torch.empty(0)
