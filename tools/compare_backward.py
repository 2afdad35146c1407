"""Whole backward passes on the GPU at hand, in turns: those that ship for it, further files, and PyTorch's own.

    python tools/compare_backward.py OUT.csv [--shapes 64:none:1024,128:causal:16384] [--files FILE.py ...] [--group 1] [--seconds 300]

A pass that may add to dQ in any order has a second row, with deterministic=False.

Other processes compile every file before and check it on a small problem, as `sweep_backward.py` does; what is wrong there
gets a row that says so.  Shapes are those of the FlashAttention papers: 16k tokens, hidden size 2048.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from measuring import Add, csv_table, evicting, in_turns
from sweep_backward import FIELDS, ROUNDS, WARMUP, Shape, check, parse_shapes, peers, problem, row_of

from tilecast.base.module_file import module_of
from tilecast.validation.lab.measure.telemetry import Nvml

DEFAULT = ",".join(f"{dim}:{mask}:{n}" for dim in (64, 128) for mask in ("none", "causal") for n in (1024, 4096, 16384))


def shipped(shape: Shape) -> list[Path]:
    """Every shipped backward pass that this device could run a shape with, best first."""
    import torch

    from tilecast.kernels import registry

    wanted = torch.cuda.get_device_capability(), "bf16", shape.head_dim, shape.head_dim_v, shape.mask
    fitting = [entry for entry in registry.shipped_backward() if entry.covers(*wanted) and entry.mask == shape.mask]
    fitting.sort(key=lambda entry: -entry.preference)
    return [registry.INDEX.parent / f"{entry.module}.py" for entry in fitting if entry.exact]


def fits(path: Path, shape: Shape) -> bool:
    """Whether a file was written for such problems."""
    work = module_of(path).TILECAST["workload"]
    return bool(
        (work["head_dim_qk"], work["head_dim_v"], work["mask"]) == (shape.head_dim, shape.head_dim_v, shape.mask)
    )


def compare(
    shape: Shape, group: int, files: list[Path], wrong: dict[Path, str], add: Add, nvml: Nvml, evict: Any
) -> None:
    """All rows of one shape, of which ``group`` query heads share keys."""
    from tilecast.kernels.launching import backward_launcher

    tensors = problem(shape, group)
    whole = "whole, in turns" + (f"; {shape.heads // group} key heads" if group > 1 else "")
    names, knobs, notes, runs = [], [], [], []
    for path in files:
        module = module_of(path)
        if wrong[path]:
            add(row_of(shape, kernel=path.stem, knobs=module.TILECAST["variant"], note=wrong[path]))
            continue
        run = partial(backward_launcher(module), *tensors, shape.head_dim**-0.5, *shape.window)
        for more in ({}, {"deterministic": False}) if hasattr(module, "ANY_ORDER_ABREAST") else ({},):
            names.append(path.stem)
            knobs.append(module.TILECAST["variant"])
            notes.append(f"any order, {whole}" if more else whole)
            runs.append(partial(run, **more))
    for name, run in peers(shape, tensors):
        if name.startswith(("sdpa", "flash-attn-4")):
            names.append(name)
            knobs.append("")
            notes.append(whole)
            runs.append(run)
    with nvml.watch() as seen:
        found = in_turns(runs, ROUNDS, evict, warmup=WARMUP, filler=0)
    mhz = seen.result().sm_mhz or math.nan
    rows = sorted(zip(names, knobs, notes, found, strict=True), key=lambda row: statistics.median(row[3]))
    for name, text, note, times in rows:
        add(row_of(shape, kernel=name, knobs=text, times=times, flop=shape.flop, clock=mhz, note=note))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", help="CSV to write")
    parser.add_argument("--shapes", default=DEFAULT, help="head_dim[/head_dim_v]:mask:seqlen, several with commas")
    parser.add_argument("--files", nargs="*", default=[], type=Path, help="further backward passes, where they fit")
    parser.add_argument("--group", type=int, default=1, help="query heads that share keys")
    parser.add_argument("--seconds", type=float, default=300, help="begin no shape after so many seconds")
    options = parser.parse_args()
    begin, shapes = time.monotonic(), parse_shapes(options.shapes)
    files = {shape: [*shipped(shape), *(path for path in options.files if fits(path, shape))] for shape in shapes}
    tasks = {path: (path, shape) for shape, paths in files.items() for path in paths}
    with multiprocessing.get_context("spawn").Pool(min(14, len(tasks))) as pool:
        wrong = dict(zip(tasks, pool.map(check, tasks.values(), chunksize=1), strict=True))
    print(f"{len(tasks)} files checked after {time.monotonic() - begin:.0f} s", file=sys.stderr)
    import torch

    nvml, evict = Nvml(), evicting()
    with csv_table(options.out, FIELDS) as add:
        for shape in shapes:
            if time.monotonic() - begin > options.seconds:
                print(f"out of time before {shape}", file=sys.stderr)
                break
            compare(shape, options.group, files[shape], wrong, add, nvml, evict)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
