"""`tilecast.attention` of few rows over many keys on the GPU at hand, beside FlashAttention-3 and kernels of another folder.

    python tools/h200_chunks.py OUT.csv [--fa3 LIBRARY] [--before FOLDER] [--rounds 9]

Chunked prefill and short prompts, causal, bfloat16: shapes with fewer tiles than the GPU has SMs, or hardly more.  Each is a
CUDA graph of one call, L2 evicted before, the kernels in turns; medians.  LIBRARY: see sweep_decode.py.  FOLDER: has
``hopper_ws_d*_causal.py`` of another version, which run beside.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from h200_before_after import load
from measuring import csv_table, evicting, graph_of, nvidia_smi, times_us
from sweep_decode import fa3_forward

from tilecast.model.kernel.workload import Workload

#: (head_dim, batch, heads, key heads, queries, keys)
SHAPES = (
    (128, 1, 32, 8, 128, 32768), (128, 1, 32, 8, 512, 32768), (128, 1, 32, 8, 1024, 32768), (128, 1, 32, 8, 2048, 32768),
    (128, 1, 32, 8, 256, 32768), (128, 1, 32, 8, 64, 8192), (128, 16, 32, 8, 128, 16384), (128, 1, 8, 1, 256, 16384), (128, 1, 4, 1, 512, 131072),
    (64, 1, 32, 8, 128, 32768), (256, 1, 16, 4, 128, 32768),
    (128, 4, 8, 1, 256, 16384), (128, 1, 32, 8, 4096, 4096), (128, 1, 16, 16, 1024, 1024), (128, 1, 8, 8, 2048, 2048),
    (64, 1, 32, 8, 512, 32768), (64, 1, 16, 16, 1024, 1024), (256, 1, 16, 4, 512, 32768),
)  # fmt: skip
FIELDS = ("gpu", "date", "driver", "torch", "triton", "head_dim", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "tilecast_us",
          "before_us", "fa3_us", "tilecast_tflops", "speedup_over_fa3", "sm_clock_mhz")  # fmt: skip


def measure(shape: tuple[int, ...], fa3: Any, before: Path | None, rounds: int, evict: Any) -> dict[str, Any]:
    """One row of the table, without what is the same in all."""
    import torch

    import tilecast

    head_dim, batch, heads_q, heads_kv, seqlen_q, seqlen_k = shape
    packed = [
        torch.randn(batch * n, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        for n, heads in ((seqlen_q, heads_q), (seqlen_k, heads_kv), (seqlen_k, heads_kv))
    ]
    q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in packed)
    calls: dict[str, Callable[[], Any]] = {"tilecast": lambda: tilecast.attention(q, k, v, causal=True)}
    if before is not None:
        module, out = load(before / f"hopper_ws_d{head_dim}_causal.py", f"before_{head_dim}"), torch.empty_like(q)
        calls["before"] = lambda: module.launch(q, k, v, out, None, head_dim**-0.5)
    if fa3 is not None:
        starts = [torch.arange(batch + 1, device="cuda", dtype=torch.int32) * n for n in (seqlen_q, seqlen_k)]
        calls["fa3"] = lambda: fa3(*packed, *starts, None, seqlen_q, seqlen_k, None, head_dim**-0.5, True)
    found = times_us({name: graph_of(call) for name, call in calls.items()}, rounds, evict)
    medians = {name: statistics.median(values) for name, values in found.items()}
    flops = Workload(batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, mask="causal").flops_exact
    row: dict[str, Any] = {f"{name}_us": round(value, 1) for name, value in medians.items()}
    row |= dict(zip(FIELDS[5:11], shape, strict=True))
    row |= {
        "tilecast_tflops": round(flops / medians["tilecast"] * 1e-6),
        "sm_clock_mhz": nvidia_smi("clocks.sm"),
    }
    if fa3 is not None:
        row["speedup_over_fa3"] = round(medians["fa3"] / medians["tilecast"], 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--fa3", help="FlashAttention-3's library, as vLLM builds it")
    parser.add_argument("--before", type=Path, help="folder of other kernels")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    fa3 = fa3_forward(given.fa3) if given.fa3 else None
    evict = evicting()
    with csv_table(given.out, FIELDS) as add:
        for shape in SHAPES:
            row = measure(shape, fa3, given.before, given.rounds, evict)
            add(row)
            print(row, flush=True)


if __name__ == "__main__":
    main()
