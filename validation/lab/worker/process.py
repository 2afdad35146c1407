"""Worker processes as seen by the run that starts them: ask, wait with a limit, kill, start another."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

#: How long a process that closed its output may take to end.
_LAST_WORDS_S = 5.0
Tell = Callable[[str, float], None]
Request = dict[str, Any]


class WorkerError(RuntimeError):
    """A request that failed; the worker can be asked again."""


class WorkerLostError(WorkerError):
    """The worker ended, lost its GPU context or said nothing for too long; it is gone."""


class Asker(Protocol):
    """What a stage needs of a worker."""

    def ask(self, request: Request, silence_s: float, tell: Tell = ...) -> dict[str, Any]:
        """Answer of a request; WorkerError, or WorkerLostError after ``silence_s`` seconds without a word."""

    def close(self) -> None:
        """End it."""


class Worker:
    """One process that runs ``module``; what it prints goes to ``log``.

    ``environment`` replaces its environment; the file descriptors ``shared`` stay open in it (a lock lives as long as it).
    """

    def __init__(
        self, log: Path, module: str, environment: Mapping[str, str] | None = None, shared: tuple[int, ...] = ()
    ) -> None:
        self._log = log
        with log.open("ab") as stderr:
            self._log_begin = stderr.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                text=True, encoding="utf-8", start_new_session=True, env=environment, pass_fds=shared,
            )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, request: Request, silence_s: float, tell: Tell = lambda *_: None) -> dict[str, Any]:
        """See `Asker`."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a worker that is gone shows in the answer
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        while True:
            try:
                line = self._lines.get(timeout=silence_s)
            except queue.Empty:
                self.close()
                raise WorkerLostError(f"no answer in {silence_s:.0f} s: it hangs") from None
            if not line:
                self._lines.put("")  # a caller that asks after this must not wait for a process that is gone
                with contextlib.suppress(subprocess.TimeoutExpired):  # its own exit code, not that of being killed
                    self._process.wait(_LAST_WORDS_S)
                self.close()
                raise WorkerLostError(f"its process ended ({self._ending()})")
            found = json.loads(line)
            if "done" in found:
                return dict(found["done"])
            if found.get("lost"):
                self.close()
                raise WorkerLostError(found["error"])
            if "error" in found:
                raise WorkerError(found["error"])
            tell(*found["at"])

    def close(self) -> None:
        """Kill the process and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _ending(self) -> str:
        """How the process ended, with its last words where it could still say some."""
        code = self._process.returncode
        if code < 0:
            return f"signal {-code}"
        words = b""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(self._log_begin)
            words = file.read()
        lines = words.decode(errors="replace").split("\n")
        return ": ".join([f"exit code {code}", *[line.strip()[:200] for line in lines if line.strip()][-1:]])


def farm(
    start: Callable[[], Asker], requests: Iterable[Request], workers: int, silence_s: float
) -> Iterator[tuple[Request, dict[str, Any] | WorkerError]]:
    """(request, answer or why there is none) in the order they end; a worker that is lost is replaced."""
    todo: queue.SimpleQueue[Request] = queue.SimpleQueue()
    count = 0
    for request in requests:
        todo.put(request)
        count += 1
    results: queue.SimpleQueue[tuple[Request, dict[str, Any] | WorkerError]] = queue.SimpleQueue()
    stop = threading.Event()
    alive: dict[int, Asker] = {}

    def drive(number: int) -> None:
        while not stop.is_set():
            try:
                request = todo.get_nowait()
            except queue.Empty:
                break
            try:
                if number not in alive:
                    alive[number] = start()
                results.put((request, alive[number].ask(request, silence_s)))
            except Exception as error:  # whatever happens, the run must not wait for this answer for ever
                usable = isinstance(error, WorkerError) and not isinstance(error, WorkerLostError)
                if number in alive and not usable:
                    alive.pop(number).close()
                results.put((request, error if isinstance(error, WorkerError) else WorkerError(str(error))))

    threads = [threading.Thread(target=drive, args=(n,), daemon=True) for n in range(min(workers, count))]
    for thread in threads:
        thread.start()
    try:
        for _ in range(count):
            yield results.get()
    finally:
        stop.set()
        for worker in list(alive.values()):
            worker.close()
