"""Measure a plan: compile in parallel, then time one shape after the other, each result on disk before the next.

A run that was cut off goes on where it stopped: points that the table has are not measured again.
"""

from __future__ import annotations

import datetime
import math
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from tilecast.model.kernel.workload import Workload
from tilecast.validation.lab.measure.accuracy import WRONG, relative_error
from tilecast.validation.lab.measure.gpu_lock import timing_on
from tilecast.validation.lab.measure.plan import Item, PlanError
from tilecast.validation.lab.measure.records import Measured, append, read, shape_fields
from tilecast.validation.lab.measure.statistics import median_interval
from tilecast.validation.lab.measure.subjects import Subject, Tensors, subject
from tilecast.validation.lab.measure.telemetry import Nvml, Telemetry
from tilecast.validation.lab.measure.timing import Samples, Timed, interleaved, launches_for, stamps_alone, sustained

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Inputs rotate through at least this many times the L2, so that no launch finds its own in it.
_L2_TIMES = 2.5
_MOST_COPIES = 64


@dataclass(frozen=True, slots=True)
class Options:
    """How to measure."""

    rounds: int = 15
    mode: str = "short"
    settle_s: float = 1.0
    measure_s: float = 1.0
    workers: int = 0
    command: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """An item that could not be measured, and why, in one line."""

    item: Item
    reason: str

    def sentence(self) -> str:
        """For people."""
        return f"{self.item.kernel} {self.item.variant} at {self.item.workload.label()}: {self.reason}"


Progress = Callable[[int, str], None]


def measure(items: list[Item], table: Path, options: Options, progress: Progress = lambda *_: None) -> list[Failure]:
    """Measure what ``table`` lacks and append it; returns what failed.  PlanError without a CUDA GPU."""
    if not torch.cuda.is_available():
        raise PlanError("measuring needs a CUDA GPU and a torch built for it; forecasts need neither: tilecast predict")
    gpu = torch.cuda.get_device_name()
    known = {row.key()[1:2] + row.key()[3:] + (_knobs(row),) for row in read(table)} if table.exists() else set()
    todo = [item for item in items if (item.kernel, options.mode, item.workload, item.variant) not in known]
    progress(len(items) - len(todo), f"{len(items) - len(todo)} of {len(items)} are in {table.name} already")
    failures = list(_compile(todo, options, progress))
    broken = {failure.item for failure in failures}
    nvml = Nvml(device_uuid(torch.cuda.current_device()))
    device = torch.device("cuda", torch.cuda.current_device())
    alone = stamps_alone(device)
    about = {"gpu": gpu, "date": datetime.date.today().isoformat(), "driver": nvml.driver, "torch": torch.__version__,
             "triton": triton.__version__, "tilecast": options.version, "mode": options.mode,
             "command": options.command}  # fmt: skip
    for workload in dict.fromkeys(item.workload for item in todo):
        mine = [item for item in todo if item.workload == workload and item not in broken]
        rows, failed = _measure_shape(workload, mine, options, alone, nvml, device, about)
        append(table, rows)
        failures += failed
        progress(len(mine), workload.label())
    return failures


def measure_alone(
    items: list[Item], table: Path, options: Options, progress: Progress = lambda *_: None
) -> list[Failure]:
    """`measure` while no other tilecast times on the GPU; GpuLockError when one does."""
    if not torch.cuda.is_available():
        return measure(items, table, options, progress)  # which refuses
    with timing_on(device_uuid(torch.cuda.current_device())):
        return measure(items, table, options, progress)


def device_uuid(index: int) -> str:
    """The UUID of a CUDA device, as NVML and CUDA_VISIBLE_DEVICES take it."""
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def _knobs(row: Measured) -> str:
    """What a plan item says of a row's kernel: nothing for a peer, whose ``variant`` is its version."""
    return row.variant if row.source_sha else ""


def _compile(todo: list[Item], options: Options, progress: Progress) -> Iterator[Failure]:
    """Fill the on-disk compile caches from several processes; the one that measures then finds everything ready."""
    if len(todo) < 2 or options.workers == 1:
        return
    workers = options.workers or min(12, multiprocessing.cpu_count())
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=64) as pool:
        jobs = [(item, options.version) for item in todo]
        for done, (item, reason) in enumerate(pool.imap_unordered(_compile_one, jobs, chunksize=1), start=1):
            if reason:
                yield Failure(item, reason)
            if done % 20 == 0 or done == len(jobs):
                progress(0, f"compiled {done} of {len(jobs)}")


def _compile_one(job: tuple[Item, str]) -> tuple[Item, str]:
    item, version = job
    if item.kernel == "flash-attn-4":  # keeps its compiled kernels in the process
        return item, ""
    try:
        run, _ = subject(item, version).prepare(item.workload, tensors(item.workload))
        run()
        torch.cuda.synchronize()
    except Exception as error:  # anything a compiler or a launch can raise is that item's failure, not the run's
        return item, _one_line(error)
    return item, ""


def tensors(work: Workload, seed: int = 0) -> Tensors:
    """q, k, v of a shape, standard normal in float32 and rounded to the dtype; always the same for a seed."""
    if work.dtype not in _DTYPES:
        raise PlanError(f"measuring takes {' or '.join(_DTYPES)}, got {work.dtype}")
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


def _measure_shape(
    work: Workload, items: list[Item], options: Options, alone: tuple[float, float], nvml: Nvml, device: torch.device,
    about: dict[str, str],
) -> tuple[list[Measured], list[Failure]]:  # fmt: skip
    failures: list[Failure] = []
    ready: list[tuple[Item, Subject, Timed, float]] = []
    inputs = [tensors(work, seed) for seed in range(_copies(work, device))]
    for item in items:
        try:
            ready.append((item, *_prepare(item, work, inputs, options, device)))
        except Exception as error:
            failures.append(Failure(item, _one_line(error)))
            if "illegal memory access" in str(error):
                raise PlanError(f"{failures[-1].sentence()}: the GPU context is lost; run again to go on") from None
    if not ready:
        return [], failures
    results: list[tuple[Samples, Telemetry]] = []
    if options.mode == "sustained":
        for _, _, timed, _ in ready:
            watch = nvml.watch()
            results.append((sustained(timed, options.settle_s, options.measure_s, watch), watch.result()))
    else:
        with nvml.watch() as watch:
            found = interleaved([timed for _, _, timed, _ in ready], options.rounds, alone)
        results = [(samples, watch.result()) for samples in found]
    rows = [
        _row(item, kernel, samples, seen, error, len(inputs), about)
        for (item, kernel, _, error), (samples, seen) in zip(ready, results, strict=True)
    ]
    return rows, failures


def _prepare(
    item: Item, work: Workload, inputs: list[Tensors], options: Options, device: torch.device
) -> tuple[Subject, Timed, float]:
    kernel = subject(item, options.version)
    made = [kernel.prepare(work, tensors) for tensors in inputs]
    made[0][0]()
    torch.cuda.synchronize()
    error = relative_error(work, *inputs[0], made[0][1]())
    if not error <= WRONG:
        raise PlanError(f"wrong output: relative error {error:.3g} against float64, at most {WRONG} expected")
    launches = [run for run, _ in made]
    return kernel, Timed(launches, launches_for(launches[0], device), device), error


def _row(
    item: Item, kernel: Subject, samples: Samples, seen: Telemetry, error: float, copies: int, about: dict[str, str]
) -> Measured:
    cycles, seconds = median_interval(samples.cycles), median_interval(samples.seconds)
    values: dict[str, object] = {
        **about, **shape_fields(item.workload), "machine": item.machine, "kernel": item.kernel, "variant": kernel.variant,
        "source_sha": kernel.source_sha, "role": item.role, "cycles": cycles[0], "cycles_low": cycles[1],
        "cycles_high": cycles[2], "ms": 1e3 * seconds[0], "ms_low": 1e3 * seconds[1], "ms_high": 1e3 * seconds[2],
        "effective_mhz": cycles[0] / seconds[0] / 1e6, "nvml_mhz": seen.sm_mhz, "power_w": seen.power_w,
        "temperature_c": seen.temperature_c, "throttle": seen.throttle, "rounds": len(samples.cycles),
        "launches_per_round": samples.launches, "input_copies": copies, "error": error,
    }  # fmt: skip
    return Measured(**values)  # type: ignore[arg-type]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:300]
