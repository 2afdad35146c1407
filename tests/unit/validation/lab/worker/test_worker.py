"""A worker and the run that asks it: what a task does to its process costs that request, and no process stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.paths import ROOT

from tilecast.validation.lab.worker.process import Worker, WorkerError, WorkerLostError, farm

ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
MODULE = "support.worker_tasks"
Start = Callable[[], Worker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Worker] = []

    def start() -> Worker:
        started.append(Worker(tmp_path / "log", MODULE, ENVIRONMENT))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


def act(what: str, **more: object) -> dict[str, object]:
    return {"do": "do", "what": what, **more}


def test_a_task_that_fails_leaves_its_worker_usable(start: Start) -> None:
    worker = start()
    pid = worker.ask(act("nothing"), 30)["pid"]
    with pytest.raises(WorkerError, match="no-such-task") as error:
        worker.ask({"do": "no-such-task"}, 30)
    assert not isinstance(error.value, WorkerLostError)
    with pytest.raises(WorkerError, match="wrong output"):
        worker.ask(act("wrong"), 30)
    told: list[tuple[str, float]] = []
    assert worker.ask(act("nothing", tell="half"), 30, lambda *at: told.append(at)) == {"pid": pid}
    assert told == [("half", 0.5)]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("crash", r"its process ended \(signal 11\)"),
        ("exit", r"its process ended \(exit code 3: last words\)"),
        ("fault", "CUDA error: an illegal memory access was encountered"),
        ("hang", "no answer in 1 s: it hangs"),
    ],
)
def test_a_task_that_takes_its_process_down_says_how(start: Start, what: str, reason: str) -> None:
    worker = start()
    worker.ask(act("nothing"), 30)
    with pytest.raises(WorkerLostError, match=reason):
        worker.ask(act(what), 1 if what == "hang" else 30)
    assert worker._process.poll() is not None
    with pytest.raises(WorkerLostError):  # and does not wait for ever when it is asked again
        worker.ask(act("nothing"), 5)


def test_a_farm_loses_the_requests_that_kill_and_no_other(start: Start) -> None:
    plan = ["nothing", "crash", "wrong", "nothing", "fault", "nothing", "exit", "nothing"]
    requests = [act(what, number=number) for number, what in enumerate(plan)]
    answers = {request["number"]: answer for request, answer in farm(start, requests, 2, 30)}
    assert len(answers) == len(plan)
    for number, what in enumerate(plan):
        if what == "nothing":
            assert "pid" in answers[number]
        else:
            assert isinstance(answers[number], WorkerLostError) == (what != "wrong")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc")
def test_a_worker_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from tilecast.validation.lab.worker.process import *\n"
        f"w = Worker(Path(sys.argv[1]), {MODULE!r})\n"
        "print(w.ask({'do': 'do', 'what': 'nothing'}, 30)['pid'], flush=True); os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "log")], capture_output=True, text=True, check=True,
        env=ENVIRONMENT,
    )  # fmt: skip
    status = Path(f"/proc/{done.stdout.strip()}/status")
    until = time.monotonic() + 60
    while status.exists() and "State:\tZ" not in status.read_text() and time.monotonic() < until:
        time.sleep(0.05)
    assert not status.exists() or "State:\tZ" in status.read_text()
