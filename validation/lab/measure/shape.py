"""Time the kernels of one shape in turns, in the process that may be lost to them (`tasks`)."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from tilecast.model.kernel.workload import Workload
from tilecast.validation.lab.measure.accuracy import WRONG, relative_error
from tilecast.validation.lab.measure.detect import device_uuid
from tilecast.validation.lab.measure.plan import Item, Options, PlanError
from tilecast.validation.lab.measure.records import Measured, shape_fields
from tilecast.validation.lab.measure.statistics import median_interval
from tilecast.validation.lab.measure.subjects import Subject, Tensors, subject
from tilecast.validation.lab.measure.telemetry import Nvml, Telemetry
from tilecast.validation.lab.measure.timing import Samples, Timed, interleaved, launches_for, stamps_alone, sustained
from tilecast.validation.lab.worker.serve import gpu_is_lost, one_line

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
#: Inputs rotate through at least this many times the L2, so that no launch finds its own in it.
_L2_TIMES = 2.5
_MOST_COPIES = 64
#: Told which item is at hand before each step with it, by its index.
At = Callable[[int], None]


def check(item: Item, version: str) -> str:
    """Write, compile and run one kernel once; why its output is wrong, or ""."""
    inputs = tensors(item.workload)
    run, output = subject(item, version).prepare(item.workload, inputs)
    run()
    torch.cuda.synchronize()
    return _wrong(relative_error(item.workload, *inputs, output()))


def measure_shape(
    items: Sequence[Item], options: Options, at: At = lambda _: None
) -> tuple[list[Measured], list[tuple[int, str]]]:
    """(rows, (index, reason) of the items that failed) of items that share a shape.

    Raises what a kernel did to the process when that leaves it without a GPU context.
    """
    bench, work = _bench(), items[0].workload
    failed: list[tuple[int, str]] = []
    ready: list[tuple[int, Subject, Timed, float]] = []
    inputs = [tensors(work, seed) for seed in range(_copies(work, bench.device))]
    for index, item in enumerate(items):
        at(index)
        try:
            ready.append((index, *_prepare(item, work, inputs, options, bench.device)))
        except Exception as error:  # anything a compiler or a launch can raise is that item's failure, not the shape's
            if gpu_is_lost():
                raise
            failed.append((index, one_line(error)))
    results: list[tuple[Samples, Telemetry]] = []
    if options.mode == "sustained":
        for index, _, timed, _ in ready:
            at(index)
            watch = bench.nvml.watch()
            results.append((sustained(timed, options.settle_s, options.measure_s, watch), watch.result()))
    elif ready:
        with bench.nvml.watch() as watch:
            found = interleaved(
                [timed for _, _, timed, _ in ready], options.rounds, bench.stamps, at=lambda n: at(ready[n][0])
            )
        results = [(samples, watch.result()) for samples in found]
    rows = [
        _row(items[index], kernel, samples, seen, error, len(inputs), bench, options)
        for (index, kernel, _, error), (samples, seen) in zip(ready, results, strict=True)
    ]
    return rows, failed


@dataclass(frozen=True)
class _Bench:
    """The GPU of this process, and the cost of timing on it."""

    device: torch.device
    gpu: str
    nvml: Nvml
    #: (cycles, seconds) of the stamps alone.
    stamps: tuple[float, float]


@lru_cache(maxsize=1)
def _bench() -> _Bench:
    index = torch.cuda.current_device()
    device = torch.device("cuda", index)
    return _Bench(device, torch.cuda.get_device_name(index), Nvml(device_uuid(index)), stamps_alone(device))


def tensors(work: Workload, seed: int = 0) -> Tensors:
    """q, k, v of a shape, standard normal in float32 and rounded to the dtype; always the same for a seed."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def make(heads: int, rows: int, width: int) -> torch.Tensor:
        shape = (work.batch, heads, rows, width)
        return torch.randn(shape, device="cuda", generator=generator).to(_DTYPES[work.dtype])

    return (
        make(work.heads_q, work.seqlen_q, work.head_dim_qk),
        make(work.heads_kv, work.seqlen_k, work.head_dim_qk),
        make(work.heads_kv, work.seqlen_k, work.head_dim_v),
    )


def _copies(work: Workload, device: torch.device) -> int:
    size = work.dtype_bytes * work.batch * (
        work.heads_q * work.seqlen_q * (work.head_dim_qk + work.head_dim_v)
        + work.heads_kv * work.seqlen_k * (work.head_dim_qk + work.head_dim_v)
    )  # fmt: skip
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return int(max(1, min(_MOST_COPIES, math.ceil(_L2_TIMES * cache / size))))


def _prepare(
    item: Item, work: Workload, inputs: list[Tensors], options: Options, device: torch.device
) -> tuple[Subject, Timed, float]:
    kernel = subject(item, options.version)
    made = [kernel.prepare(work, tensors) for tensors in inputs]
    made[0][0]()
    torch.cuda.synchronize()
    error = relative_error(work, *inputs[0], made[0][1]())
    if _wrong(error):
        raise PlanError(_wrong(error))
    launches = [run for run, _ in made]
    return kernel, Timed(launches, launches_for(launches[0], device), device), error


def _wrong(error: float) -> str:
    if error <= WRONG:
        return ""
    return f"wrong output: relative error {error:.3g} against float64, at most {WRONG} expected"


def _row(
    item: Item, kernel: Subject, samples: Samples, seen: Telemetry, error: float, copies: int, bench: _Bench,
    options: Options,
) -> Measured:  # fmt: skip
    cycles, seconds = median_interval(samples.cycles), median_interval(samples.seconds)
    values: dict[str, object] = {
        "gpu": bench.gpu, "date": datetime.date.today().isoformat(), "driver": bench.nvml.driver,
        "torch": str(torch.__version__), "triton": str(triton.__version__), "tilecast": options.version,
        "mode": options.mode, "command": options.command, **shape_fields(item.workload), "machine": item.machine, "kernel": item.kernel, "variant": kernel.variant,
        "source_sha": kernel.source_sha, "role": item.role, "cycles": cycles[0], "cycles_low": cycles[1],
        "cycles_high": cycles[2], "ms": 1e3 * seconds[0], "ms_low": 1e3 * seconds[1], "ms_high": 1e3 * seconds[2],
        "effective_mhz": cycles[0] / seconds[0] / 1e6, "nvml_mhz": seen.sm_mhz, "power_w": seen.power_w,
        "temperature_c": seen.temperature_c, "throttle": seen.throttle, "rounds": len(samples.cycles),
        "launches_per_round": samples.launches, "input_copies": copies, "error": error,
    }  # fmt: skip
    return Measured(**values)  # type: ignore[arg-type]
