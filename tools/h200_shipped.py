"""Every shipped kernel that the GPU at hand runs, at the reference shape of `codegen/shipped.toml`.

    python tools/h200_shipped.py OUT.csv

The protocol of `h200_kernels.py` (kernels of a shape in turns, L2 evicted, medians), without peers: `kernels/README.md`
shows these figures.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from importlib.metadata import version

import torch
from h200_kernels import ROUNDS, measure
from measuring import csv_table

from tilecast.codegen.shipping.ship import Shipped, read_list
from tilecast.kernels import registry
from tilecast.validation.lab.measure.telemetry import Nvml

FIELDS = ("gpu", "date", "driver", "torch", "triton", "kernel", "version", "dtype", "batch", "heads", "seqlen",
          "head_dim", "head_dim_v", "mask", "ms", "ms_low", "ms_high", "tflops", "sm_clock_mhz", "rounds")  # fmt: skip


def runnable() -> list[Shipped]:
    """Rows of the list whose kernels run here."""
    here = torch.cuda.get_device_capability()
    modules = {entry.module for entry in registry.shipped() if entry.runs_on(here)}
    return [kernel for kernel in read_list() if kernel.module in modules]


def calls(kernel: Shipped) -> Callable[[], None]:
    """A launch on tensors of the reference shape."""
    work = kernel.workload
    entry = next(entry for entry in registry.shipped() if entry.module == kernel.module)
    launch = registry.launcher(entry)

    def tensor(heads: int, width: int) -> torch.Tensor:
        return torch.randn((work.batch, heads, work.seqlen_q, width), device="cuda").to(torch.bfloat16)

    torch.manual_seed(0)
    q, k, v = tensor(work.heads_q, work.head_dim_qk), tensor(work.heads_kv, work.head_dim_qk), tensor(work.heads_kv, work.head_dim_v)  # fmt: skip
    out = torch.empty_like(v)
    window = work.window or ()
    return lambda: launch(q, k, v, out, None, work.head_dim_qk**-0.5, *window)


def _warm(index: int) -> None:
    calls(runnable()[index])()
    torch.cuda.synchronize()


def main() -> None:
    kernels = runnable()
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        pool.map(_warm, range(len(kernels)), chunksize=1)
    nvml = Nvml()
    by_shape = sorted(kernels, key=lambda kernel: kernel.workload.label())
    with csv_table(sys.argv[1], FIELDS) as add:
        for _, same in itertools.groupby(by_shape, key=lambda kernel: kernel.workload.label()):
            group = {kernel.module: kernel for kernel in same}
            with nvml.watch() as seen:
                times = measure({name: (calls(kernel), "") for name, kernel in group.items()}, ROUNDS)
            for name, found in times.items():
                work, median = group[name].workload, statistics.median(found)
                low, high = found[len(found) // 6], found[-1 - len(found) // 6]
                row = {
                    "kernel": name, "version": f"tilecast {version('tilecast')}", "dtype": work.dtype, "batch": work.batch, "heads": work.heads_q,
                    "seqlen": work.seqlen_q, "head_dim": work.head_dim_qk, "head_dim_v": work.head_dim_v, "mask": work.mask, "ms": f"{median:.4f}",
                    "ms_low": f"{low:.4f}", "ms_high": f"{high:.4f}", "tflops": f"{work.flops / median / 1e9:.1f}",
                    "sm_clock_mhz": f"{seen.result().sm_mhz:.0f}", "rounds": ROUNDS,
                }  # fmt: skip
                add(row)
                print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
