"""Decode steps of `tilecast.attention_mla` (576/512, one key head, pages of 64, bfloat16) on the GPU at hand.

    python tools/sweep_mla.py OUT.csv [--rounds 9]

Points of FlashMLA's own benchmark and some smaller ones.  Each is a CUDA graph of one call, L2 evicted before; medians and the
range.  TFLOP/s counts 2 * batch * heads * keys * (576 + 512), TB/s the latent keys once.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path

from sweep_decode import EVICT_BYTES, graph_of, host_us, nvidia_smi, times_us

#: (batch, heads, keys)
POINTS = ((1, 16, 8192), (1, 128, 8192), (1, 128, 65536), (16, 16, 4096), (16, 128, 4096), (64, 128, 4096), (128, 16, 8192),
          (128, 64, 4096), (128, 128, 8192))  # fmt: skip
WIDTH, VALUES, PAGE = 576, 512, 64
FIELDS = ("gpu", "driver", "torch", "triton", "batch", "heads", "keys", "us", "low_us", "high_us", "tflops", "tbs", "host_us",
          "sm_clock_mhz")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    import torch
    import triton

    import tilecast

    same = {"gpu": torch.cuda.get_device_name(), "driver": nvidia_smi("driver_version"), "torch": torch.__version__,
            "triton": triton.__version__}  # fmt: skip
    evict = torch.empty(EVICT_BYTES // 4, dtype=torch.int32, device="cuda")
    with given.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for batch, heads, keys in POINTS:
            pages = batch * keys // PAGE
            cache = torch.randn(pages, PAGE, 1, WIDTH, device="cuda", dtype=torch.bfloat16)
            table = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, -1)
            lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
            q = torch.randn(batch, 1, heads, WIDTH, device="cuda", dtype=torch.bfloat16)

            def call(given: tuple[object, ...] = (q, cache, lengths, table)) -> object:
                return tilecast.attention_mla(*given, causal=True)  # type: ignore[arg-type]

            found = times_us({"tilecast": graph_of(call)}, given.rounds, evict)["tilecast"]
            us = statistics.median(found)
            flops, size = 2 * batch * heads * keys * (WIDTH + VALUES), batch * keys * WIDTH * 2
            row = {**same, "batch": batch, "heads": heads, "keys": keys, "us": round(us, 2), "low_us": round(min(found), 2),
                   "high_us": round(max(found), 2), "tflops": round(flops / us * 1e-6, 1), "tbs": round(size / us * 1e-6, 3),
                   "host_us": round(host_us(call), 1), "sm_clock_mhz": nvidia_smi("clocks.sm")}  # fmt: skip
            writer.writerow(row)
            file.flush()
            print(row, flush=True)


if __name__ == "__main__":
    main()
