"""Streams of arithmetic beside matrix products of e4m3 and of bf16 on one SM, by the kernel of `tilecast calibrate`'s corun/beside_mma.

    python tools/corun_e4m3.py OUT.csv

One warpgroup multiplies back to back (m64 x n, 32 bytes of each row), one or two others run a stream; seconds on a Hopper GPU.
"""

from __future__ import annotations

import csv
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from tilecast.validation.lab.calibrate.cases import Case
from tilecast.validation.lab.calibrate.gpu import Gpu
from tilecast.validation.lab.calibrate.groups.corun import corun_case
from tilecast.validation.lab.calibrate.nvrtc import compile_cubin
from tilecast.validation.lab.calibrate.preludes import STREAMS, wgmma_prelude

SHAPES = ((128, "smem"), (128, "register"), (256, "smem"))
#: (stream, warpgroups that multiply, warpgroups that run the stream)
SIDES = (
    ("ffma_3src", 1, 1), ("ffma_3src", 0, 1), ("ffma_3src", 1, 0), ("fadd", 1, 1), ("max2", 1, 1), ("ex2", 1, 1), ("ex2", 1, 2),
    ("softmax_online", 1, 1), ("softmax_online", 1, 2),
)  # fmt: skip


def cases() -> list[Case]:
    """Every stream beside products of every shape in both types."""
    found = []
    for dtype in ("fp8", "bf16"):
        for n, home in SHAPES:
            for stream, mma, streams in SIDES:
                case = corun_case("corun", stream, mma, streams, n, home)
                prelude = wgmma_prelude(n, home, dtype) + STREAMS[stream].prelude()
                found.append(replace(case, prelude=prelude, params={**case.params, "dtype": dtype}))
    return found


def main() -> None:
    gpu = Gpu()
    todo, rows = cases(), []
    for case in todo:
        gpu.kernel(case, compile_cubin(case.text(), gpu.arch))
        for quantity, reading in case.measure(gpu, case).items():
            rows.append(
                (gpu.identity.name, *case.params.values(), quantity, f"{statistics.median(reading.samples):.4f}")
            )
    with Path(sys.argv[1]).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("gpu", *todo[0].params, "quantity", "value"))
        writer.writerows(rows)


if __name__ == "__main__":
    main()
