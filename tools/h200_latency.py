"""First-call latency and host overhead of `tilecast.attention` on the GPU at hand.

    python tools/h200_latency.py OUT.csv

Cold: time of the first call of a shipped kernel in a fresh process with an empty compile cache, imports and CUDA start
left out.  Warm: host time of a call that the GPU never holds up (tiny shapes, median over batches of calls), beside torch
SDPA's for the same tensors.
"""

from __future__ import annotations

import csv
import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

COLD = """
import json, sys, time, torch, triton, tilecast
dims, mask = json.loads(sys.argv[1])
q, k = (torch.randn(1, 2, 256, dims[0], device="cuda", dtype=torch.bfloat16) for _ in range(2))
v = torch.randn(1, 2, 256, dims[1], device="cuda", dtype=torch.bfloat16)
torch.nn.functional.scaled_dot_product_attention(q, q, q); torch.cuda.synchronize()
window = {"none": (-1, -1), "causal": (-1, 0), "window": (64, 0)}[mask]
begin = time.perf_counter()
tilecast.attention(q, k, v, window=window); torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""


def cold(dims: tuple[int, int], mask: str) -> float:
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run([sys.executable, "-c", COLD, json.dumps([dims, mask])], capture_output=True, text=True,
                              env={**os.environ, "TRITON_CACHE_DIR": cache}, check=False)  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr[-500:])
    return float(done.stdout.split()[-1])


def host_us(run: Callable[[], Any], calls: int = 200, batches: int = 15) -> float:
    import torch

    found = []
    for _ in range(batches):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        found.append((time.perf_counter() - begin) / calls * 1e6)
    return statistics.median(found)


def main() -> None:
    import torch
    import triton

    import tilecast

    rows = []
    here = (torch.cuda.get_device_name(), datetime.date.today().isoformat(), torch.__version__, triton.__version__)
    for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
        for mask in ("none", "causal", "window"):
            seconds = cold(dims, mask)
            rows.append((*here, "cold", f"{dims[0]}/{dims[1]} {mask}", f"{seconds:.2f}", "s"))
            print(*rows[-1][4:], flush=True)
    for name, causal in (("none", False), ("causal", True)):
        q, k, v = (torch.randn(1, 2, 128, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        with torch.no_grad():
            for label, run in (
                ("tilecast.attention", functools.partial(tilecast.attention, q, k, v, causal=causal)),
                ("torch SDPA", functools.partial(sdpa, q, k, v, is_causal=causal)),
            ):
                run()
                rows.append((*here, "warm host time", f"{label} d128 {name}", f"{host_us(run):.1f}", "us"))
                print(*rows[-1][4:], flush=True)
    with open(sys.argv[1], "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("gpu", "date", "torch", "triton", "what", "case", "value", "unit"))
        writer.writerows(rows)


if __name__ == "__main__":
    main()
