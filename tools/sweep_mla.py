"""Decode steps of `tilecast.attention_mla` (576/512, one key head, pages of 64, bfloat16) on the GPU at hand, beside FlashMLA.

    python tools/sweep_mla.py OUT.csv [--flashmla LIBRARY] [--rounds 9]

Points of FlashMLA's own benchmark, some smaller ones, and batches whose tiles are no multiple of the SMs.  Each is a CUDA graph of one call, L2 evicted before, the kernels in turns;
medians and the range.  TFLOP/s counts 2 * batch * heads * keys * (576 + 512), TB/s the latent keys once.  LIBRARY is FlashMLA as vLLM
builds it (_flashmla_C.abi3.so); without it its columns stay empty.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import csv_table, evicting, graph_of, host_us, nvidia_smi, times_us

#: (batch, heads, keys)
POINTS = ((1, 128, 65536), (1, 16, 65536), (1, 128, 16384), (1, 128, 8192), (1, 16, 8192), (16, 128, 4096), (64, 128, 4096),
          (128, 16, 8192), (128, 64, 4096), (128, 128, 8192),
          (20, 128, 8192), (30, 128, 8192), (40, 128, 8192), (20, 128, 32768), (70, 128, 8192), (140, 128, 8192), (200, 128, 6016), (150, 16, 8192))  # fmt: skip
WIDTH, VALUES, PAGE = 576, 512, 64
FIELDS = ("gpu", "date", "driver", "torch", "triton", "batch", "heads", "keys", "us", "low_us", "high_us", "tflops", "tbs", "host_us",
          "flashmla_us", "flashmla_low_us", "flashmla_high_us", "speedup", "largest_difference", "sm_clock_mhz")  # fmt: skip


def load_flashmla(path: str) -> Callable[..., Any]:
    """FlashMLA as (q, cache, lengths, table) -> out, of one query a sequence."""
    import torch

    torch.ops.load_library(path)
    forward = torch.ops._flashmla_C.dense_decode_fwd

    def call(q: Any, cache: Any, lengths: Any, table: Any) -> Any:
        return forward(q, cache, VALUES, lengths, table, WIDTH**-0.5, True, None, None, None)[0]

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--flashmla", help="FlashMLA's library, as vLLM builds it")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    import torch

    import tilecast

    flashmla = load_flashmla(given.flashmla) if given.flashmla else None
    evict = evicting()
    with csv_table(given.out, FIELDS) as add:
        for batch, heads, keys in POINTS:
            pages = batch * keys // PAGE
            cache = torch.randn(pages, PAGE, 1, WIDTH, device="cuda", dtype=torch.bfloat16)
            table = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, -1)
            lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
            q = torch.randn(batch, 1, heads, WIDTH, device="cuda", dtype=torch.bfloat16)

            inputs = q, cache, lengths, table
            calls = {"tilecast": lambda given=inputs: tilecast.attention_mla(*given, causal=True)}
            if flashmla is not None:
                calls["flashmla"] = lambda given=inputs: flashmla(*given)
            found = times_us({name: graph_of(call) for name, call in calls.items()}, given.rounds, evict)
            us = statistics.median(found["tilecast"])
            flops, size = 2 * batch * heads * keys * (WIDTH + VALUES), batch * keys * WIDTH * 2
            row: dict[str, Any] = {"batch": batch, "heads": heads, "keys": keys, "us": round(us, 2), "low_us": round(min(found["tilecast"]), 2),
                   "high_us": round(max(found["tilecast"]), 2), "tflops": round(flops / us * 1e-6, 1), "tbs": round(size / us * 1e-6, 3),
                   "host_us": round(host_us(calls["tilecast"]), 1), "sm_clock_mhz": nvidia_smi("clocks.sm")}  # fmt: skip
            if flashmla is not None:
                theirs = statistics.median(found["flashmla"])
                difference = (
                    (calls["tilecast"]().float() - calls["flashmla"]().view(batch, 1, heads, VALUES).float())
                    .abs()
                    .max()
                )
                row |= {"flashmla_us": round(theirs, 2), "flashmla_low_us": round(min(found["flashmla"]), 2),
                        "flashmla_high_us": round(max(found["flashmla"]), 2), "speedup": round(theirs / us, 3),
                        "largest_difference": f"{float(difference):.2e}"}  # fmt: skip
            add(row)
            print(row, flush=True)


if __name__ == "__main__":
    main()
