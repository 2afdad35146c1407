"""Host time of calls that were met before, on the GPU at hand, by launches in C and by Triton's own.

    python tools/benchmark_host.py OUT.csv

Ours and PyTorch's call take turns, tensors are tiny so that the GPU never holds the host up, and each number is the least of
several batches' means: what a call costs where nothing else disturbs it.  ``part`` rows say where the time of
`tilecast.attention` goes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measuring import csv_table

import tilecast
from tilecast.kernels import again, launching
from tilecast.kernels.native.library import VARIABLE, library

CALLS, BATCHES = 200, 25
FIELDS = ("gpu", "date", "torch", "triton", "launches", "case", "subject", "host_us")
Runs = dict[str, Callable[[], Any]]
BF16 = torch.bfloat16


def host_us(runs: Runs) -> dict[str, float]:
    """Least mean time of a batch of calls, in microseconds; the runs take turns."""
    found = {name: float("inf") for name in runs}
    for run in runs.values():
        run()
        run()
    for _ in range(BATCHES):
        for name, run in runs.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                run()
            found[name] = min(found[name], (time.perf_counter() - begin) / CALLS * 1e6)
    return found


def randn(*shape: int, gradient: bool = False) -> torch.Tensor:
    """A bfloat16 tensor on the GPU."""
    return torch.randn(shape, device="cuda", dtype=BF16, requires_grad=gradient)


def cases() -> Iterator[tuple[str, Runs]]:
    """(case, what runs it)."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for dim in (64, 128):
        for causal in (False, True):
            q, k, v = (randn(1, 2, 128, dim) for _ in range(3))
            yield (
                f"attention d{dim} {'causal' if causal else 'none'}",
                {
                    "tilecast": lambda q=q, k=k, v=v, causal=causal: tilecast.attention(q, k, v, causal=causal),
                    "torch": lambda q=q, k=k, v=v, causal=causal: sdpa(q, k, v, is_causal=causal),
                },
            )
    q, k, v = (randn(1, 2, 128, 128, gradient=True) for _ in range(3))
    yield (
        "attention d128 none, gradients wanted",
        {
            "tilecast": lambda: tilecast.attention(q, k, v),
            "torch": lambda: sdpa(q, k, v),
        },
    )
    dout = randn(1, 2, 128, 128)
    yield (
        "attention d128 none, forward and backward",
        {
            "tilecast": lambda: torch.autograd.grad(tilecast.attention(q, k, v), (q, k, v), dout),
            "torch": lambda: torch.autograd.grad(sdpa(q, k, v), (q, k, v), dout),
        },
    )
    for batch, keys, page in ((1, 512, 16), (8, 2048, 16), (8, 2048, 64)):
        rows = randn(batch, 1, 32, 128)
        caches = [randn(batch * keys // page, page, 8, 128) for _ in range(2)]
        table = torch.arange(batch * keys // page, device="cuda", dtype=torch.int32).view(batch, -1)
        lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
        yield (
            f"attention_kvcache {batch} x {keys}, 32/8, pages of {page}",
            {"tilecast": lambda given=(rows, *caches, lengths, table): tilecast.attention_kvcache(*given, causal=True)},
        )
    a, b, c = (randn(256, 256) for _ in range(3))
    yield (
        "addmm 256 x 256 x 256",
        {
            "tilecast": lambda: tilecast.addmm(c, a, b),
            "torch": lambda: torch.addmm(c, a, b),
        },
    )


def parts() -> Runs:
    """Where a call of `tilecast.attention` spends its time, but for Python's own."""
    from tilecast.kernels.generated import hopper_ws_d128_full, triton_d128_full

    q, k, v, out = (randn(1, 2, 128, 128) for _ in range(4))
    lse = torch.empty(1, 2, 128, device="cuda")
    module = hopper_ws_d128_full if torch.cuda.get_device_capability() == (9, 0) else triton_d128_full
    launch = launching.launcher(module)
    launch(q, k, v, out, lse, 0.1)
    start = launch.started(q, k, v, out, lse, 0.1)  # type: ignore[attr-defined]
    shape, strides, device = out.shape, out.stride(), out.device
    return {
        "part: facts of three tensors": lambda: again.facts_of((q, k, v), False),
        "part: whether somebody watches": lambda: again.watched(q),
        "part: memory of one result": lambda: torch.empty_strided(shape, strides, dtype=BF16, device=device),
        "part: launch": lambda: start(q, k, v, out, lse),
    }


def measure() -> Iterator[tuple[str, str, float]]:
    """(case, subject, microseconds)."""
    for case, runs in cases():
        with torch.set_grad_enabled("gradients" in case or "backward" in case):
            for subject, us in host_us(runs).items():
                yield case, subject, us
    for name, us in host_us(parts()).items():
        yield "attention d128 none", name, us


def main() -> None:
    first = os.environ.get(VARIABLE) != "triton"
    if first and library() is None:
        raise SystemExit("launches in C: expected a C compiler and a known Triton, found none: nothing to compare")
    with csv_table(sys.argv[1], FIELDS, more=not first) as add:
        for case, subject, us in measure():
            # torch's own calls are the same beside both.
            if first or subject != "torch":
                row = {"launches": "C" if first else "Triton", "case": case, "subject": subject, "host_us": f"{us:.1f}"}
                add(row)
                print(*row.values(), flush=True)
    if first:
        subprocess.run([sys.executable, *sys.argv], env={**os.environ, VARIABLE: "triton"}, check=True)


if __name__ == "__main__":
    main()
