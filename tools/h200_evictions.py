"""What reading costs on the GPU at hand after L2 was filled by writing or by reading, by L2's policy for what is read.

    python tools/h200_evictions.py OUT.csv [--rounds 9]

9 to 138 MB, read once by a launch in a CUDA graph, in turns in a drawn order; medians and the range.  `policy`: `none`, or `first`, by
which lines that are read are the first to go (createpolicy evict_first).  `evicted_by`: what filled L2 before, 256 MB written, read, or written and 64 MB
of them read.  Decode sweeps write; a step of a model leaves what its last kernels wrote.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from measuring import EVICTIONS, csv_table, evicting, graph_of, times_us

#: Programs of a launch, and chunks that each reads.
LAUNCHES = ((132, 1), (264, 1), (264, 2), (264, 4), (264, 8))
CHUNK = tl.constexpr(1 << 14)
FIELDS = ("gpu", "date", "driver", "torch", "triton", "evicted_by", "policy", "mbytes", "us", "low_us", "high_us")


@triton.jit
def read(x, y, chunks, first: tl.constexpr):
    """Sums of the float32 of neighbouring chunks, so that they are read."""
    at = x + tl.cast(tl.program_id(0), tl.int64) * chunks * CHUNK + tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.float32)
    for _ in range(chunks):
        total += tl.load(at, eviction_policy="evict_first") if first else tl.load(at)
        at += CHUNK
    tl.store(y + tl.program_id(0), tl.sum(total, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    x = torch.randn(max(programs * chunks for programs, chunks in LAUNCHES) * CHUNK.value, device="cuda")
    y = torch.empty(max(programs for programs, _ in LAUNCHES), device="cuda")
    evict = evicting()
    graphs: dict[str, Any] = {}
    for programs, chunks in LAUNCHES:
        for policy in ("none", "first"):
            graphs[f"{policy} {programs * chunks * CHUNK.value * 4}"] = graph_of(
                lambda programs=programs, chunks=chunks, policy=policy: read[(programs,)](
                    x, y, chunks, policy == "first", num_warps=8
                )
            )
    with csv_table(given.out, FIELDS) as add:
        for by in EVICTIONS:
            for name, found in times_us(graphs, given.rounds, evict, by).items():
                policy, size = name.split()
                row = {"evicted_by": by, "policy": policy, "mbytes": round(int(size) / 1e6, 1)}
                row |= {"us": round(statistics.median(found), 2), "low_us": round(min(found), 2), "high_us": round(max(found), 2)}  # fmt: skip
                add(row)
                print(row, flush=True)


if __name__ == "__main__":
    main()
