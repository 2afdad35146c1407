"""Lanes: one worker each, asked one request at a time through futures.  Local processes here; Ray in `ray_lanes`.

A lane is an executor of `concurrent.futures` style with one worker: what a lane loses is known exactly, and requests
that share simulations can be sent to the worker that has them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from tilecast.base.pool import cores
from tilecast.validation.lab.worker.process import Asker, Worker

Request = dict[str, Any]
MODULE = "tilecast.explore.sweep.run.worker"
#: An item that says nothing for this long hangs: the slowest forecast takes seconds, a compilation a minute or two.
SILENCE_S = 900.0


class Lane(Protocol):
    """One worker.  A future raises WorkerLostError when the worker is gone, WorkerError when the request failed."""

    def submit(self, request: Request) -> Future[dict[str, Any]]:
        """Queue a request behind those before it."""

    def close(self) -> None:
        """End the worker at once; what is queued is cancelled."""


class Engine(Protocol):
    """Where work runs: ``starts`` makes each lane, anew after a loss; ``depth`` requests are queued on a lane."""

    name: str
    depth: int

    def starts(self, tasks: int) -> Sequence[Callable[[], Lane]]:
        """One factory a lane, at most as many as ``tasks`` can use."""

    def close(self) -> None:
        """Release what the engine itself holds."""


class ProcessLane:
    """A worker process, and the thread that waits for it."""

    def __init__(self, worker: Asker) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(1)

    def submit(self, request: Request) -> Future[dict[str, Any]]:
        """See `Lane`."""
        return self._thread.submit(self._worker.ask, request, SILENCE_S)

    def close(self) -> None:
        """See `Lane`."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._worker.close()


class LocalEngine:
    """Processes of this host, one a core unless ``workers`` says otherwise.  They see no GPU."""

    name = "local"
    #: One runs, one waits in its pipe, so that a worker is never idle while the parent commits.
    depth = 2

    def __init__(self, workers: int = 0) -> None:
        self._workers = workers or cores()
        self._folder = tempfile.TemporaryDirectory(prefix="tilecast-sweep-")

    def starts(self, tasks: int) -> list[Callable[[], Lane]]:
        """See `Engine`."""
        return [self._start] * max(1, min(self._workers, tasks))

    def _start(self) -> Lane:
        return ProcessLane(Worker(Path(self._folder.name) / "log", MODULE, worker_environment("")))

    def close(self) -> None:
        """See `Engine`."""
        self._folder.cleanup()


def worker_environment(gpu: str) -> dict[str, str]:
    """This process's environment with one visible GPU (or none), and one thread in numerical libraries."""
    # Lanes fill the cores already; threads inside them would only get in each other's way.
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": gpu}
