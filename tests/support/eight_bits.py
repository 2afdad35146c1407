"""8-bit attention kernels on the emulator, held against float64.

Judged beside P rounded to e4m3 in float64: that loses what the format loses, and a kernel, whose blocks have references of
their own, may lose half as much again.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from tilecast.emulator.any_kernel import emulated
from tilecast.model.kernel.workload import Workload

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: What scores do from key to key: nothing; the first key, which kernels meet last, lies far above; those of the first 128 keys lie
#: 3.6 octaves above the others, which a reference may be outgrown by.
EVEN, SINK, GROWN = "even", "sink", "grown"


def hidden(work: Workload, rows: int, keys: int, window: tuple[int, int]) -> Any:
    """[rows, keys] what the mask hides; ``window`` is that of window kernels."""
    place = torch.arange(keys)[None] - (torch.arange(rows)[:, None] + keys - rows)
    if work.mask == "none":
        return torch.zeros_like(place, dtype=torch.bool)
    left, right = (-1, 0) if work.mask == "causal" else window
    return (place > right if right >= 0 else False) | (place < -left if left >= 0 else torch.zeros_like(place).bool())


def exact(q: Any, k: Any, v: Any, unseen: Any, rounded: bool) -> tuple[Any, Any]:
    """(out, log-sum-exp) in float64, with P rounded to e4m3 or not."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[3])).masked_fill(unseen, -math.inf)
    largest = s.amax(-1, keepdim=True)
    p = torch.exp(s - torch.where(largest.isinf(), 0.0, largest)) * 256
    total = p.sum(-1, keepdim=True)
    p = p.float().to(E4M3).double() if rounded else p
    return torch.where(total > 0, p @ v / total, 0.0), torch.logsumexp(s, -1)


def drawn(
    work: Workload, rows: int, keys: int, heads: tuple[int, int], dtype: Any, scores: str
) -> tuple[Any, Any, Any]:
    """q, k and v."""
    torch.manual_seed(rows)
    (hq, hk), dim = heads, work.head_dim_qk
    q, k, v = torch.randn(1, hq, rows, dim), torch.randn(1, hk, keys, dim), torch.randn(1, hk, keys, work.head_dim_v)
    if scores == SINK:
        q, k[:, :, 0] = q + 0.5, 2.0
    if scores == GROWN:
        q, k = q / 4, k / 4
        q[..., 0], k[..., 0], k[:, :, :128, 0] = 1.0, 0.0, 2.5 * math.sqrt(dim)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def judge(
    path: str | Path, work: Workload, rows: int, keys: int, heads: tuple[int, int], mode: str, *, machine: str,
    dtype: Any = E4M3, along_keys: bool = False, scores: str = EVEN, window: tuple[int, int] = (-1, -1),
) -> None:  # fmt: skip
    """Run a file on drawn tensors, each key head with factors of its own, and hold it against float64."""
    q, k, v = drawn(work, rows, keys, heads, dtype, scores)
    if along_keys:
        v = v.view(torch.uint8).transpose(2, 3).contiguous().transpose(2, 3).view(dtype)
    (_, hk), dim = heads, work.head_dim_qk
    factors = [torch.rand(1, hk) + 0.5, torch.tensor([0.8]), torch.rand(1, hk) + 0.5]
    if scores == GROWN:
        factors[:2] = torch.ones(1, hk), None
    out = torch.full((*q.shape[:3], work.head_dim_v), math.nan, dtype=torch.bfloat16)
    lse = torch.full(q.shape[:3], math.nan)
    limits = window if work.mask == "window" else (-1, -1)
    names = ("q_descale", "k_descale", "v_descale")
    emulated(str(path), machine=machine, mode=mode, seed=rows, sms=4).launch(
        q, k, v, out, lse, dim**-0.5, *limits, **dict(zip(names, factors, strict=True))
    )
    wide = []
    for x, factor in zip((q, k, v), factors, strict=True):
        by_head = torch.ones(1) if factor is None else factor.double()
        if by_head.ndim == 2:
            by_head = by_head.repeat_interleave(x.shape[1] // hk, 1)[..., None, None]
        wide.append(x.double() * by_head)
    unseen = hidden(work, rows, keys, window)
    want, want_lse = exact(*wide, unseen, False)
    floor, _ = exact(*wide, unseen, True)
    error, allowed = (out.double() - want).norm() / want.norm(), (floor - want).norm() / want.norm()
    assert error <= 1.5 * allowed + 2**-8, (float(error), float(allowed))
    seen = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), seen)
    assert (lse.double() - want_lse)[seen].abs().max() < 1e-4
