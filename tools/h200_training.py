"""A small GPT trained on the GPU at hand, its attention by tilecast and by PyTorch's own kernels: loss curves, final bits, speed.

    python tools/h200_training.py OUT.csv [--steps 500]

The model is plain PyTorch: `F.scaled_dot_product_attention`, and no line of it changes.  tilecast runs underneath as PyTorch's
flash attention (`tilecast.register_flash_attention`), twice; then PyTorch's flash and cuDNN backends, and flash-attn-4 where
it is installed.  The text is the source code of Python's standard library, a byte a token; every run has the same seed, the
same batches and deterministic algorithms.  OUT has a row for each run and twentieth step.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from measuring import csv_table, nvidia_smi
from torch import nn
from torch.nn import attention
from torch.nn import functional as F  # noqa: N812

import tilecast

LAYERS, WIDTH, HEADS, HEADS_KV, CONTEXT, BATCH = 6, 1024, 8, 4, 4096, 4
EVERY, WARMUP, RATE = 20, 20, 3e-4
FIELDS = ("gpu", "date", "driver", "torch", "triton", "attention", "step", "loss", "tokens_per_second", "sm_clock_mhz", "parameters_sha256")  # fmt: skip


class Block(nn.Module):
    """Attention with grouped heads and a feed-forward layer, both before their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.dim = WIDTH // HEADS
        self.norm, self.norm_ff = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * self.dim, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        """(batch, seqlen, width) to the same."""
        batch, seqlen, _ = x.shape
        heads = self.qkv(self.norm(x)).view(batch, seqlen, -1, self.dim).transpose(1, 2)
        q, k, v = heads.split((HEADS, HEADS_KV, HEADS_KV), dim=1)
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(made.transpose(1, 2).reshape(batch, seqlen, WIDTH))
        return x + self.ff(self.norm_ff(x))


class Gpt(nn.Module):
    """Bytes to scores of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Any) -> Any:
        """(batch, seqlen) to (batch, seqlen, 256)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))


def text() -> Any:
    """The standard library's source as bytes on the GPU."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).cuda().long()


@contextlib.contextmanager
def attention_by(name: str) -> Iterator[None]:
    """Everything inside attends with ``name``'s kernels."""
    backend = attention.SDPBackend.CUDNN_ATTENTION if name == "cudnn" else attention.SDPBackend.FLASH_ATTENTION
    implementation = {"tilecast": "tilecast", "flash-attn-4": "FA4"}.get(name.split(",")[0])
    if implementation:
        attention.activate_flash_attention_impl(implementation)
    try:
        with attention.sdpa_kernel(backend):
            yield
    finally:
        if implementation:
            attention.restore_flash_attention_impl()


def train(name: str, data: Any, steps: int) -> Iterator[dict[str, Any]]:
    """A row for every twentieth step and the last."""
    torch.manual_seed(0)
    model = Gpt().to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    picks = torch.Generator().manual_seed(1)
    with attention_by(name):
        began = last = time.perf_counter()
        for step in range(1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, step / WARMUP)
            starts = torch.randint(0, len(data) - CONTEXT - 1, (BATCH,), generator=picks).tolist()
            batch = torch.stack([data[s : s + CONTEXT + 1] for s in starts])
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % EVERY == 0 or step == steps:
                mhz = nvidia_smi("clocks.sm")  # asked for while the last steps run
                shown = loss.item()
                now = time.perf_counter()
                done = EVERY if step % EVERY == 0 else step % EVERY
                row = {"attention": name, "step": step, "loss": f"{shown:.6f}", "sm_clock_mhz": mhz,
                       "tokens_per_second": f"{done * BATCH * CONTEXT / (now - last):.0f}"}  # fmt: skip
                last = now
                if step == steps:
                    held = b"".join(p.detach().view(torch.uint8).cpu().numpy().tobytes() for p in model.parameters())
                    row["parameters_sha256"] = hashlib.sha256(held).hexdigest()
                yield row
    print(f"{name:<20} {steps} steps in {time.perf_counter() - began:.1f} s", flush=True)


def main() -> None:
    """Run all and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=500)
    asked = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)
    tilecast.register_flash_attention()
    runs = ["tilecast", "tilecast, again", "flash", "cudnn"]
    if importlib.util.find_spec("flash_attn") and importlib.util.find_spec("cutlass"):
        runs.append("flash-attn-4")
    data = text()
    with csv_table(asked.out, FIELDS) as add:
        for name in runs:
            for row in train(name, data, asked.steps):
                add(row)


if __name__ == "__main__":
    main()
