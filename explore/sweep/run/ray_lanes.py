"""Lanes on a Ray cluster: one actor each.  Ray is imported here only, and only when asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tilecast.base.pool import cores
from tilecast.explore.sweep.errors import SweepError
from tilecast.explore.sweep.run.lanes import Lane, Request
from tilecast.validation.lab.worker.process import WorkerError, WorkerLostError

#: The least object store Ray takes: results are a kilobyte each and travel inline.
_OBJECT_STORE_BYTES = 80 << 20


class Answerer:
    """The actor: answers requests as the local worker process does."""

    def ask(self, request: Request) -> dict[str, Any]:
        """Answer of a request."""
        from tilecast.explore.sweep.run.worker import TASKS

        return TASKS[request["do"]](request, lambda *_: None)


class RayEngine:
    """A running cluster (``address``), the one this process is connected to, or a new one on this host."""

    name = "ray"
    depth = 2

    def __init__(self, workers: int = 0, address: str | None = None) -> None:
        try:
            # Asking the cluster for usage statistics would send data over the network.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            import ray
        except ImportError as error:
            raise SweepError(f"--engine ray needs Ray ({error}): pip install 'tilecast[ray]'") from None
        self._ray: Any = ray
        self._mine = not ray.is_initialized()
        try:
            if self._mine and address is None:
                ray.init(
                    num_cpus=workers or cores(), include_dashboard=False, log_to_driver=False, logging_level="ERROR",
                    object_store_memory=_OBJECT_STORE_BYTES,
                )  # fmt: skip
            elif self._mine:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # Ray raises many classes; all of them mean that there is no cluster
            text = " ".join(str(error).split())[:200]
            raise SweepError(f"--engine ray: no cluster{f' at {address}' if address else ''}: {text}") from None
        self._workers = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._actor: Any = ray.remote(num_cpus=1, max_restarts=0)(Answerer)

    def starts(self, tasks: int) -> list[Callable[[], Lane]]:
        """One actor a CPU of the cluster."""
        return [lambda: RayLane(self._ray, self._actor.remote())] * max(1, min(self._workers, tasks))

    def close(self) -> None:
        """Leave the cluster, if it was joined here."""
        if self._mine:
            self._ray.shutdown()


class RayLane:
    """An actor; its futures speak as those of `lanes.ProcessLane` do."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    def submit(self, request: Request) -> Future[dict[str, Any]]:
        """See `lanes.Lane`."""
        answer: Future[dict[str, Any]] = Future()
        self._actor.ask.remote(request).future().add_done_callback(lambda done: self._pass_on(done, answer))
        return answer

    def _pass_on(self, done: Future[dict[str, Any]], answer: Future[dict[str, Any]]) -> None:
        error = done.exception()
        if error is None:
            answer.set_result(done.result())
        elif isinstance(error, self._ray.exceptions.RayTaskError):
            answer.set_exception(WorkerError(" ".join(str(error.cause or error).split())[:300]))
        else:
            answer.set_exception(WorkerLostError(f"its actor ended ({' '.join(str(error).split())[:150]})"))

    def close(self) -> None:
        """See `lanes.Lane`."""
        self._ray.kill(self._actor)
