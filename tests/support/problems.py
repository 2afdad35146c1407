"""Attention problems for tests on the GPU: dimensions, masks, inputs, and the kernel that will run one."""

from __future__ import annotations

import pytest
import torch

from tilecast.kernels import registry

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
#: Heads that kernels of the copy engine take as if they were wider, those that are copied for them, and 192 columns, which Hopper alone has
#: kernels for.
NARROWER = [
    (8, 8), (40, 40), (72, 72), (80, 80), (112, 112), (128, 64), (100, 100), (160, 160), (192, 192), (176, 104), (72, 144), (33, 250),
]  # fmt: skip
DTYPES = [torch.bfloat16, torch.float16]
MASKS = ["none", "causal", "window"]
#: A NaN in bfloat16 and in float16, and nothing a kernel would write by chance.
POISON = 0x7FA5


def window_of(mask, seqlen):
    """(left, right) for attention's window argument."""
    if mask == "window":
        return (37, 21) if seqlen > 100 else (2, 1)
    return (-1, 0) if mask == "causal" else (-1, -1)


def kernel_for(q, k, v, window):
    """The entry that will run, or skip: not every head_dim ships for every GPU."""
    entry = entry_of(q, k, v, window, registry.shipped())
    if entry is None:
        pytest.skip(f"no kernel ships for head_dim {q.shape[3]}/{v.shape[3]} here")
    return entry


def entry_of(q, k, v, window, entries):
    """The one of some entries that will run; None where none does."""
    mask, _, _ = registry.reduce_mask(*window, q.shape[2], k.shape[2])
    here, dims = (torch.cuda.get_device_capability(), NAMES[q.dtype]), (q.shape[3], v.shape[3])
    if not registry.candidates(*here, *dims, mask, entries):
        dims = registry.widened(*here, *dims, mask, entries) or dims
    # A backward pass that another is better than at such lengths still is one.
    found = registry.candidates(*here, *dims, mask, entries)
    group = q.shape[1] // k.shape[1]
    return registry.select(*here, *dims, mask, q.shape[2], entries, k.shape[2], group) or (found[-1] if found else None)


def inputs(batch, heads, heads_kv, seqlen_q, seqlen_k, d, dv, dtype, seed=0, kind="randn"):
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(h, s, width):
        return torch.randn(batch, h, s, width, generator=generator, device="cuda")

    q, k, v = draw(heads, seqlen_q, d), draw(heads_kv, seqlen_k, d), draw(heads_kv, seqlen_k, dv)
    if kind == "large":
        q = q * 8
    if kind == "rising":
        # Scores grow along the keys, so the running maximum moves in every block.
        k = k * torch.linspace(0.1, 6, seqlen_k, device="cuda")[:, None]
    return q.to(dtype), k.to(dtype), v.to(dtype)


def bits(tensor):
    """The same memory as whole numbers: zeros and NaN compare as what they are."""
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
