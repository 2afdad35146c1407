"""The GPUs of this host as lanes: one process a GPU, one item at a time, and no other process that times on it meanwhile."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tilecast.explore.sweep.errors import SweepError
from tilecast.explore.sweep.run.lanes import MODULE, SILENCE_S, Lane, ProcessLane, Request, worker_environment
from tilecast.validation.lab.measure.gpu_lock import GpuLockError, try_lock
from tilecast.validation.lab.worker.process import Worker, WorkerError


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its UUID, which names it whatever order CUDA or NVML count in."""

    uuid: str
    name: str
    #: Compute capability times ten.
    capability: int


@dataclass(frozen=True, slots=True)
class Host:
    """What a measuring sweep runs on: GPUs of one kind, and the software that compiles for them."""

    gpus: tuple[Gpu, ...]
    torch: str
    triton: str


def find_host() -> Host:
    """The GPUs CUDA shows here that are of the first one's kind; SweepError with what is missing.

    A process of its own asks, so that this one holds no context on any GPU.
    """
    with tempfile.TemporaryDirectory(prefix="tilecast-sweep-") as folder:
        worker = Worker(Path(folder) / "log", MODULE)
        try:
            found = worker.ask({"do": "gpus"}, SILENCE_S)
        except WorkerError as error:
            raise SweepError(str(error)) from None
        finally:
            worker.close()
    gpus = [Gpu(*entry) for entry in found["gpus"]]
    return Host(tuple(gpu for gpu in gpus if gpu.name == gpus[0].name), found["torch"], found["triton"])


class GpuLocks:
    """Exclusive locks on GPUs of this host, by UUID, held until ``close`` and by every process that shares them."""

    def __init__(self, gpus: Sequence[Gpu], folder: Path | None = None) -> None:
        """Lock those that are free; SweepError when none is."""
        self.held: dict[Gpu, int] = {}
        for gpu in gpus:
            try:
                handle = try_lock(gpu.uuid, folder)
            except GpuLockError as error:
                raise SweepError(str(error)) from None
            if handle is not None:
                self.held[gpu] = handle
        if not self.held:
            raise SweepError(
                f"another tilecast is timing on {'every one of ' if len(gpus) > 1 else ''}the {len(gpus)} GPU(s) here: "
                "wait for it to end"
            )

    def close(self) -> None:
        """Let go; a worker that is still dying holds on until it is dead."""
        for handle in self.held.values():
            os.close(handle)
        self.held = {}


class GpuEngine:
    """One lane a locked GPU; ``start`` makes the lane of a GPU from its lock (default: a worker process)."""

    name = "gpu"
    #: Nothing waits in a worker: what a lost GPU takes with it is the one item it was timing.
    depth = 1

    def __init__(self, locks: GpuLocks, start: Callable[[Gpu, int], Lane] | None = None) -> None:
        self._locks = locks
        self._folder = tempfile.TemporaryDirectory(prefix="tilecast-sweep-")
        self._start = start or self._process

    def starts(self, tasks: int) -> list[Callable[[], Lane]]:
        """See `lanes.Engine`."""
        held = list(self._locks.held.items())
        return [partial(self._start, gpu, handle) for gpu, handle in held[: max(1, tasks)]]

    def _process(self, gpu: Gpu, handle: int) -> Lane:
        log = Path(self._folder.name) / "log"
        return ProcessLane(Worker(log, MODULE, worker_environment(gpu.uuid), (handle,)))

    def close(self) -> None:
        """See `lanes.Engine`."""
        self._locks.close()
        self._folder.cleanup()


def compile_request(item: str, target: str, version: str) -> Request:
    """The request that compiles a measured item's kernel ahead of its turn."""
    return {"do": "compile", "item": item, "target": target, "version": version}


def measure_request(item: str, command: str, version: str) -> dict[str, Any]:
    """The request that times it."""
    return {"do": "measure", "item": item, "command": command, "version": version}
