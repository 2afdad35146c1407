"""What the power limit of an NVIDIA GPU does to launches with pauses between them: time of each launch, from a rest on.

    python tools/power_pauses.py OUT.csv [--launches 10]

Attention launches of 3 to 100 ms, each followed by a pause of the host, as benchmark harnesses leave one (they make inputs, start a
profiler, compare results).  "profiler" rows start and stop `torch.profiler` around each launch and write 256 MB before it, as
cudnn-frontend's benchmark does; their pause is what that takes.  OUT has a row a launch (docs/model.md, "Clock").
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from measuring import csv_table

import tilecast

#: Batches of 16 heads of 16384 queries and keys, pauses in milliseconds, a rest before each series in seconds.
BATCHES, PAUSES_MS, REST_S = (1, 2, 4, 8, 16, 32), (0.0, 10.0, 30.0, 100.0), 0.7
FIELDS = ("gpu", "date", "driver", "torch", "triton", "batch", "harness", "pause_ms", "launch", "began_s", "ms")


def series(batch: int, harness: str, pause_ms: float, launches: int) -> list[tuple[float, float]]:
    """(seconds since the first launch, milliseconds) of every launch."""
    shape = (batch, 16, 16384, 128)
    q, k, v = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    tilecast.attention(q[:1, :1], k[:1, :1], v[:1, :1])
    torch.cuda.synchronize()
    time.sleep(REST_S)
    out = []
    began = time.perf_counter()
    for _ in range(launches):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if harness == "profiler":
            flush.zero_()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], record_shapes=True) as seen:
                at = time.perf_counter() - began
                before.record()
                tilecast.attention(q, k, v)
                after.record()
                torch.cuda.synchronize()
            seen.key_averages()
        else:
            at = time.perf_counter() - began
            before.record()
            tilecast.attention(q, k, v)
            after.record()
            if pause_ms:
                torch.cuda.synchronize()
                time.sleep(pause_ms * 1e-3)
        out.append((at, before, after))
    torch.cuda.synchronize()
    return [(at, before.elapsed_time(after)) for at, before, after in out]


def main() -> None:
    """Every batch with every pause."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--launches", type=int, default=10)
    given = arguments.parse_args()
    series(1, "profiler", 0.0, 2)  # compiles, and starts the profiler's own library
    with csv_table(given.out, FIELDS) as add:
        for batch in BATCHES:
            for harness, pause in (*(("events", p) for p in PAUSES_MS), ("profiler", 0.0)):
                for i, (at, ms) in enumerate(series(batch, harness, pause, given.launches)):
                    add({"batch": batch, "harness": harness, "pause_ms": f"{pause:g}", "launch": i, "began_s": f"{at:.4f}", "ms": f"{ms:.4f}"})  # fmt: skip


if __name__ == "__main__":
    main()
