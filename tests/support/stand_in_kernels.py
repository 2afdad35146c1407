"""Entries of kernels that do not exist, and tensors for them: what the operator does around a kernel is tested on a CPU."""

from __future__ import annotations

from dataclasses import replace

from tilecast.kernels.registry import Entry

HOPPER, AMPERE = (9, 0), (8, 0)
KERNEL = Entry("k", "test", frozenset({HOPPER}), None, 10, 64, 64, "none", frozenset({"bf16", "fp16"}), 0, 2**62)
SHIPPED = tuple(
    replace(KERNEL, module=f"k{d}_{dv}_{mask}", head_dim_qk=d, head_dim_v=dv, mask=mask)
    for d, dv in ((64, 64), (192, 128))
    for mask in ("none", "causal", "window")
)
BACKWARD = tuple(replace(entry, module=f"b{entry.module}", direction="bwd") for entry in SHIPPED)


def tensors(torch, batch=2, heads=4, heads_kv=2, seqlen_q=5, seqlen_k=7, d=64, dv=64, dtype="float16"):
    torch.manual_seed(0)
    return (
        torch.randn(batch, heads, seqlen_q, d).to(getattr(torch, dtype)),
        torch.randn(batch, heads_kv, seqlen_k, d).to(getattr(torch, dtype)),
        torch.randn(batch, heads_kv, seqlen_k, dv).to(getattr(torch, dtype)),
    )
