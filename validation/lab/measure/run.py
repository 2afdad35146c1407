"""Measure a plan: compile and check in parallel, then time one shape after the other, each on disk before the next.

This process touches no GPU: workers do, so that a kernel that faults costs its item.  A run that was cut off goes on where
it stopped: points that the table has are not measured again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tilecast.base.pool import cores
from tilecast.validation.lab.measure.bench import SILENCE_S, Bench, Failure
from tilecast.validation.lab.measure.detect import driver_version, gpu_here
from tilecast.validation.lab.measure.gpu_lock import timing_on
from tilecast.validation.lab.measure.plan import Item, Options, PlanError, item_from, item_to
from tilecast.validation.lab.measure.records import Measured, read
from tilecast.validation.lab.worker.process import Asker, Worker, WorkerError, WorkerLostError, farm

MODULE = "tilecast.validation.lab.measure.tasks"
_MOST_WORKERS = 12
#: Peers that keep their compiled kernels in the process: compiling them in another one does not help.
_COMPILED_IN_PROCESS = ("flash-attn-4",)
#: (items done since the last call, what happens)
Progress = Callable[[int, str], None]


def measure(items: list[Item], table: Path, options: Options, progress: Progress = lambda *_: None) -> list[Failure]:
    """Measure what ``table`` lacks and append it; returns what failed.

    Raises PlanError without a CUDA GPU or the software to use it, GpuLockError when another tilecast times on it.
    """
    here = gpu_here("tilecast measure")
    driver_version("tilecast measure", here.uuid)
    with timing_on(here.uuid) as lock, tempfile.TemporaryDirectory(prefix="tilecast-measure-") as folder:

        def start() -> Asker:
            return Worker(Path(folder) / "log", MODULE, here.environment(), (lock,))

        return measure_in(start, items, table, options, progress)


def measure_in(
    start: Callable[[], Asker], items: list[Item], table: Path, options: Options, progress: Progress = lambda *_: None
) -> list[Failure]:
    """`measure` in workers that ``start`` makes; PlanError where none of them gets as far as a kernel."""
    known = {row.key()[1:2] + row.key()[3:] + (_knobs(row),) for row in read(table)} if table.exists() else set()
    todo = [item for item in items if (item.kernel, options.mode, item.workload, item.variant) not in known]
    progress(len(items) - len(todo), f"{len(items) - len(todo)} of {len(items)} are in {table.name} already")
    failures: list[Failure] = []

    def record(failure: Failure) -> None:
        failures.append(failure)
        progress(0, f"failed: {failure.sentence()}")

    for failure in _checked(start, todo, options, progress):
        record(failure)
    broken = {failure.item for failure in failures}
    bench = Bench(start, table, options)
    try:
        for workload in dict.fromkeys(item.workload for item in todo):
            mine = [item for item in todo if item.workload == workload]
            for failure in bench.measure([item for item in mine if item not in broken]):
                record(failure)
            progress(len(mine), workload.label())
    except WorkerLostError as error:
        raise PlanError(f"the process that measures is lost before it runs a kernel: {error}") from None
    finally:
        bench.close()
    return failures


def _knobs(row: Measured) -> str:
    """What a plan item says of a row's kernel: nothing for a peer, whose ``variant`` is its version."""
    return row.variant if row.source_sha else ""


def _checked(start: Callable[[], Asker], todo: list[Item], options: Options, progress: Progress) -> Iterator[Failure]:
    """Run every kernel once in several processes, which fills the compile caches on disk; yields what cannot run."""
    requests = [
        {"do": "check", "item": item_to(item), "version": options.version}
        for item in todo
        if item.kernel not in _COMPILED_IN_PROCESS
    ]
    workers = options.workers or min(_MOST_WORKERS, cores())
    if len(requests) < 2 or workers == 1:
        return
    for done, (request, answer) in enumerate(farm(start, requests, workers, SILENCE_S), start=1):
        lost = isinstance(answer, WorkerLostError)
        reason = str(answer) if isinstance(answer, WorkerError) else answer["reason"]
        if reason:
            yield Failure(item_from(request["item"]), reason, lost)
        if done % 20 == 0 or done == len(requests):
            progress(0, f"compiled {done} of {len(requests)}")
