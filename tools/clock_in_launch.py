"""What clock the SMs of an NVIDIA GPU run at *within* a launch that draws more than the board's limit, and in its last, partial wave.

    python tools/clock_in_launch.py OUT.csv [--repeats 6]

A launch is so many products of 128 x 256 tiles, one to an SM at a time, whose K is walked in eight pieces; each piece leaves the SM's
cycles and the global timer, so that cycles over nanoseconds are the clock the SMs executed at while it ran.  Launches are of whole waves
and of a part of one more, alone after a rest, behind a memset of 256 MB as `triton.testing.do_bench` clears L2, or back to back.  OUT has
a row for each interval of time since the first piece of a launch began, of the first and the last of a series: the clock, and how many SMs
worked in it on average, medians of the repeats (docs/model.md, "Clock").
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from measuring import csv_table

#: Tile and K of a product, pieces of K; all tiles read the same operands, which L2 holds.
M, N, BK, K, PIECES = 128, 256, 64, 8192, 8
#: Whole waves, and SMs that work in one more.
WAVES, PARTS = (1, 2, 3, 4, 8, 32, 128), (0.0, 0.25, 0.5, 0.75)
#: Those of `WAVES` that also end in a partial wave.
PARTED = (1, 2, 3, 4)
HARNESSES = ("alone", "cleared", "in turn")
REST_S, IN_TURN = 0.012, 24
FIELDS = ("gpu", "date", "driver", "torch", "triton", "tiles", "waves", "harness", "launch", "from_us", "to_us", "sms", "mhz")  # fmt: skip


@triton.jit
def ticks():
    """The SM's cycle counter."""
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def nanoseconds():
    """The timer that all SMs share."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def products(
    a, b, out, stamps, m: tl.constexpr, n: tl.constexpr, bk: tl.constexpr, k: tl.constexpr, pieces: tl.constexpr
):
    """One tile of A (m, k) times B (k, n), bf16; ``stamps`` (tiles, pieces + 1, 2): cycles and nanoseconds between pieces of k."""
    at = tl.program_id(0)
    rows, columns, inner = tl.arange(0, m), tl.arange(0, n), tl.arange(0, bk)
    total = tl.zeros((m, n), tl.float32)
    place = stamps + at * (pieces + 1) * 2
    for piece in range(pieces):
        tl.store(place + piece * 2, ticks())
        tl.store(place + piece * 2 + 1, nanoseconds())
        begin = piece * (k // pieces)
        for step in tl.range(0, k // pieces, bk, num_stages=4):
            left = tl.load(a + rows[:, None] * k + (begin + step + inner)[None, :])
            right = tl.load(b + columns[None, :] * k + (begin + step + inner)[:, None])
            total = tl.dot(left, right, total)
    tl.store(place + pieces * 2, ticks())
    tl.store(place + pieces * 2 + 1, nanoseconds())
    tl.store(out + at * n + columns, tl.sum(total, 0))


def intervals(end_us: float) -> list[float]:
    """Ends of the intervals: 20 us each, a quarter longer each from 400 us on."""
    ends = [0.0]
    while ends[-1] < end_us:
        ends.append(ends[-1] + max(20.0, ends[-1] / 4 if ends[-1] >= 400 else 0.0))
    return ends


def rows_of(stamps: torch.Tensor) -> list[dict[str, Any]]:
    """The clock and the SMs at work by interval of one launch; ``stamps`` (tiles, PIECES + 1, 2) on the host."""
    cycles = (stamps[:, 1:, 0] - stamps[:, :-1, 0]).double().flatten()
    begin = stamps[:, :-1, 1].double().flatten()
    end = stamps[:, 1:, 1].double().flatten()
    zero = begin.min()
    begin, end = (begin - zero) / 1e3, (end - zero) / 1e3
    pace = cycles / (end - begin)
    ends = intervals(float(end.max()))
    made = []
    for low, high in itertools.pairwise(ends):
        inside = (torch.clamp(end, max=high) - torch.clamp(begin, min=low)).clamp(min=0.0)
        busy = float(inside.sum())
        if busy > 0:
            made.append({"from_us": f"{low:.0f}", "to_us": f"{high:.0f}", "sms": f"{busy / (high - low):.1f}", "mhz": f"{float((inside * pace).sum()) / busy:.1f}"})  # fmt: skip
    return made


def medians(found: list[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of the same interval of the same launch, one a repeat, the medians."""
    alike: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for launch, row in found:
        alike.setdefault((launch, row["from_us"], row["to_us"]), []).append(row)
    return [
        {
            "launch": launch, "from_us": low, "to_us": high,
            **{name: f"{statistics.median(float(row[name]) for row in rows):.1f}" for name in ("sms", "mhz")},
        }
        for (launch, low, high), rows in sorted(alike.items(), key=lambda one: (one[0][0], float(one[0][1])))
    ]  # fmt: skip


def main() -> None:
    """Every grid in every harness."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--repeats", type=int, default=6)
    given = arguments.parse_args()
    torch.manual_seed(0)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    a, b = (torch.randn(x, K, device="cuda", dtype=torch.bfloat16) for x in (M, N))
    clear = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    grids = [(w, p) for w in WAVES for p in (PARTS if w in PARTED else PARTS[:1])]
    largest = max(round(sms * (w + p)) for w, p in grids)
    out = torch.empty(largest, N, device="cuda")
    stamps = [torch.zeros(largest, PIECES + 1, 2, dtype=torch.int64, device="cuda") for _ in range(IN_TURN)]

    def launch(tiles: int, into: torch.Tensor) -> None:
        products[(tiles,)](a, b, out, into, M, N, BK, K, PIECES, num_warps=8)

    launch(sms, stamps[0])
    torch.cuda.synchronize()

    def series(tiles: int, harness: str, count: int) -> list[tuple[int, dict[str, Any]]]:
        """(launch, interval) of a series' first and last launch."""
        torch.cuda.synchronize()
        time.sleep(REST_S)
        for into in stamps[:count]:
            if harness == "cleared":
                clear.zero_()
            launch(tiles, into)
        torch.cuda.synchronize()
        return [(at, row) for at in sorted({0, count - 1}) for row in rows_of(stamps[at][:tiles].cpu())]

    with csv_table(given.out, FIELDS) as add:
        for (waves, part), harness in itertools.product(grids, HARNESSES):
            tiles = round(sms * (waves + part))
            count = 1 if harness == "alone" else IN_TURN if waves <= 8 else 4
            found = [one for _ in range(given.repeats) for one in series(tiles, harness, count)]
            for row in medians(found):
                add({"tiles": tiles, "waves": waves + part, "harness": harness, **row})


if __name__ == "__main__":
    main()
