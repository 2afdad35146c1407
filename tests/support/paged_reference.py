"""What the serving kernels compute, sequence by sequence in float64, in place of the operators behind the calls."""

from __future__ import annotations

import itertools
import math
from typing import Any


def serve(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, used: Any, table: Any, slots: Any, sinks: Any, *rest: Any) -> tuple[Any, Any]:  # fmt: skip
    """(out, nothing) of `operator.serve`'s arguments: pages, packed keys and caches."""
    import torch

    k_scale, v_scale, seqlen_q, seqlen_k, scale, softcap, left, right, _ = rest
    wide = [x.view(torch.float8_e4m3fn).double() if x.dtype == torch.uint8 else x.double() for x in (k, v)]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rows_of = q if cu_q is not None else q.flatten(0, 1)
    starts = cu_q.tolist() if cu_q is not None else range(0, len(rows_of) + 1, q.shape[1])
    out = torch.zeros(*rows_of.shape[:-1], v.shape[-1], dtype=q.dtype)
    group = q.shape[-2] // k.shape[-2]
    for b, (first, last) in enumerate(itertools.pairwise(starts)):
        rows, queries = slice(first, last), last - first
        assert queries <= seqlen_q
        keys = int(used[b]) if used is not None else int(cu_k[b + 1] - cu_k[b]) if cu_k is not None else k.shape[1]
        assert cu_k is None or keys <= seqlen_k
        keys = max(0, min(keys, seqlen_k))
        ks, vs = (
            _keys(x, b, keys, cu_k, table, slots) * (1.0 if factors is None else factors[b].double()[None, :, None])
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
        weights = scores.softmax(-1)[..., :keys].nan_to_num(0.0)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, vs).to(q.dtype)
    return out.view(*q.shape[:-1], v.shape[-1]), torch.empty(0)


def _keys(x: Any, b: int, keys: int, cu_k: Any, table: Any, slots: Any) -> Any:
    """(keys, heads, dim) of a sequence."""
    if table is not None:
        return x[table[b, : -(-keys // x.shape[1])].long()].flatten(0, 1)[:keys]
    if cu_k is not None:
        return x[int(cu_k[b]) :][:keys]
    return x[b if slots is None else int(slots[b]), :keys]


def append(q: Any, k_cache: Any, v_cache: Any, lists: Any, new: tuple[Any, ...], interleaved: bool, follows: bool) -> tuple[Any, Any]:  # fmt: skip
    """`serving.append.append` of as many new keys for every sequence, in pages, without rotation."""
    import torch

    (k, v, cu_new, cos, _), used, table = new[:5], lists[2], lists[3]
    assert cu_new is None and cos is None
    page = k_cache.shape[1]
    for b in range(len(used)):
        for i in range(k.shape[1]):
            position = int(used[b]) + i
            if 0 <= position < page * table.shape[1] and 0 <= int(table[b, position // page]) < len(k_cache):
                k_cache[int(table[b, position // page]), position % page] = k[b, i]
                v_cache[int(table[b, position // page]), position % page] = v[b, i]
    return q, (used + k.shape[1]).to(torch.int32)
