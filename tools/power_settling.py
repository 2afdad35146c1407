"""How fast an NVIDIA GPU slows down to the clock that its power limit sustains: time of equal launches, from idle on.

    python tools/power_settling.py OUT.csv [--seconds 6]

Each load rests for some seconds and then runs back to back; an event before and after every launch gives its time.  OUT has
the mean time of a launch in intervals of time since the load began, each a quarter longer than the one before, of two
repetitions.  `power.settling_s` of the machine files comes from this table (docs/model.md, "Clock").
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from measuring import csv_table

import tilecast

REST_S, REPEAT, AHEAD, FIRST_S, GROWTH = 3.0, 2, 16, 0.004, 1.25
FIELDS = ("gpu", "date", "driver", "torch", "triton", "load", "repetition", "from_s", "to_s", "launches", "ms_per_launch", "relative_rate")  # fmt: skip


def loads() -> dict[str, Callable[[], Any]]:
    """Work that meets the power limit: a matrix product, and attention."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    made = torch.empty_like(a)
    q, k, v = (torch.randn(2, 16, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return {
        "matmul 8192 bf16": lambda: torch.matmul(a, b, out=made),
        "attention d128 causal 8192 bf16": lambda: tilecast.attention(q, k, v, causal=True),
    }


def run(load: Callable[[], Any], seconds: float) -> list[tuple[float, float]]:
    """(seconds since the first launch began, milliseconds) of every launch."""
    began = torch.cuda.Event(enable_timing=True)
    marks = [began]
    start = time.perf_counter()
    began.record()
    while time.perf_counter() - start < seconds:
        load()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        marks.append(mark)
        if len(marks) > AHEAD:
            marks[-AHEAD].synchronize()
    torch.cuda.synchronize()
    ends = [began.elapsed_time(mark) for mark in marks]
    return [(end / 1e3, end - before) for before, end in itertools.pairwise(ends)]


def binned(times: list[tuple[float, float]], seconds: float) -> list[tuple[float, float, int, float]]:
    """(from, to, launches, mean ms) by growing intervals."""
    out, low, high = [], 0.0, FIRST_S
    while low < seconds:
        held = [ms for at, ms in times if low <= at < high]
        if held:
            out.append((low, high, len(held), sum(held) / len(held)))
        low, high = high, high * GROWTH
    return out


def main() -> None:
    """Run every load and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=6.0)
    asked = parser.parse_args()
    with csv_table(asked.out, FIELDS) as add:
        for name, load in loads().items():
            for _ in range(3):
                load()
            for repetition in range(REPEAT):
                torch.cuda.synchronize()
                time.sleep(REST_S)
                rows = binned(run(load, asked.seconds), asked.seconds)
                settled = rows[-1][3]
                for low, high, launches, ms in rows:
                    add({"load": name, "repetition": repetition, "from_s": f"{low:.4f}", "to_s": f"{high:.4f}",
                                     "launches": launches, "ms_per_launch": f"{ms:.4f}", "relative_rate": f"{settled / ms:.4f}"})  # fmt: skip
                print(name, repetition, f"first {rows[0][3]:.3f} ms, settled {settled:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
