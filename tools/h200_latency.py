"""First-call latency of `tilecast.attention` on the GPU at hand.  (Calls after it: benchmark_host.py.)

    python tools/h200_latency.py OUT.csv

Time of the first call of a shipped kernel in a fresh process with an empty compile cache, imports and CUDA start left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

from measuring import csv_table

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
    """Seconds of the first call in a fresh process with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run([sys.executable, "-c", COLD, json.dumps([dims, mask])], capture_output=True, text=True,
                              env={**os.environ, "TRITON_CACHE_DIR": cache}, check=False)  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr[-500:])
    return float(done.stdout.split()[-1])


def main() -> None:
    with csv_table(sys.argv[1], ("gpu", "date", "torch", "triton", "what", "case", "value", "unit")) as add:
        for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
            for mask in ("none", "causal", "window"):
                row = {
                    "what": "cold",
                    "case": f"{dims[0]}/{dims[1]} {mask}",
                    "value": f"{cold(dims, mask):.2f}",
                    "unit": "s",
                }
                add(row)
                print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
