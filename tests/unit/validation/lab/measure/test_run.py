"""Measuring a plan whose kernels crash, fault, hang or are wrong: each loses its own item, and is said what of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.interrupts import LISTENS
from support.paths import ROOT

from tilecast.model.kernel.workload import Workload
from tilecast.validation.lab.measure import bench as bench_module
from tilecast.validation.lab.measure import run
from tilecast.validation.lab.measure.bench import Bench
from tilecast.validation.lab.measure.plan import Item, Options, PlanError
from tilecast.validation.lab.worker.process import Worker, WorkerLostError

ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
FAULT = "CUDA error: an illegal memory access was encountered"
SHORT, LONG = Workload(seqlen_q=512, seqlen_k=512), Workload(seqlen_q=1024, seqlen_k=1024)
OPTIONS = Options(workers=1, settle_s=0.0, measure_s=0.0)
Start = Callable[[], Worker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Worker] = []

    def start() -> Worker:
        started.append(Worker(tmp_path / "log", "support.worker_tasks", ENVIRONMENT))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


def items(*variants: str, work: Workload = SHORT) -> list[Item]:
    return [Item("triton", variant, work, "h200-sxm") for variant in variants]


def timed(table: Path) -> list[tuple[str, str, str]]:
    """(variant, process, how many took turns) of the lines in the table."""
    return [tuple(line.split(",")) for line in table.read_text().splitlines()] if table.exists() else []  # type: ignore[misc]


@pytest.mark.parametrize(
    ("what", "reason"), [("fault", FAULT), ("crash", "its process ended (signal 11)"), ("hang", "no answer in 4 s")]
)
@pytest.mark.parametrize("where", ["", " in turn"])
def test_what_a_kernel_does_to_the_process_costs_its_item_and_the_others_still_take_turns(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, where: str, reason: str
) -> None:
    monkeypatch.setattr(bench_module, "SILENCE_S", 4.0 if what == "hang" else 30.0)
    table = tmp_path / "t.csv"
    bench = Bench(start, table, OPTIONS)
    (failure,) = bench.measure(items("a", what + where, "b", "c"))
    assert failure.item.variant == what + where and failure.fatal
    assert reason in failure.reason
    assert failure.sentence().startswith(f"triton {what}{where} at ") and reason in failure.sentence()
    rows = timed(table)
    assert [row[0] for row in rows] == ["a", "b", "c"]
    assert {row[2] for row in rows} == {"3"} and len({row[1] for row in rows}) == 1
    # The process that was started for them goes on to the next shape.
    assert bench.measure(items("d")) == []
    assert timed(table)[-1][1] == rows[0][1]


def test_every_bad_kernel_of_a_turn_is_found(start: Start, tmp_path: Path) -> None:
    bench = Bench(start, tmp_path / "t.csv", OPTIONS)
    failures = bench.measure(items("fault", "a", "wrong", "crash in turn", "b", "exit"))
    assert {f.item.variant: (f.fatal, f.reason) for f in failures} == {
        "fault": (True, FAULT),
        "wrong": (False, "wrong output"),
        "crash in turn": (True, "its process ended (signal 11)"),
        "exit": (True, "its process ended (exit code 3: last words)"),
    }
    assert [row[0] for row in timed(tmp_path / "t.csv")] == ["a", "b"]


def test_a_plan_loses_only_its_bad_items(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "t.csv"
    monkeypatch.setattr(run, "read", lambda _: [])
    plan = [*items("a", "fault", "check crash", "check inexact", "b"), *items("c", "crash in turn", "d", work=LONG)]
    told: list[tuple[int, str]] = []
    failures = run.measure_in(start, plan, table, replace(OPTIONS, workers=2), lambda *at: told.append(at))
    assert {f.item.variant: f.reason for f in failures} == {
        "fault": FAULT, "check crash": "its process ended (signal 11)", "check inexact": "slightly wrong",
        "crash in turn": "its process ended (signal 11)",
    }  # fmt: skip
    assert [row[0] for row in timed(table)] == ["a", "b", "c", "d"]
    assert sum(done for done, _ in told) == len(plan)
    assert [text for _, text in told if text.startswith("failed: ")] == [f"failed: {f.sentence()}" for f in failures]


def test_what_cannot_start_is_no_kernels_fault(tmp_path: Path) -> None:
    def start() -> Worker:
        return Worker(tmp_path / "log", "support.no_such_module", ENVIRONMENT)

    with pytest.raises(WorkerLostError, match=r"exit code 1: .*No module named"):
        Bench(start, tmp_path / "t.csv", OPTIONS).measure(items("a", "b"))
    with pytest.raises(PlanError, match=r"is lost before it runs a kernel: its process ended \(exit code 1: "):
        run.measure_in(start, items("a"), tmp_path / "t.csv", OPTIONS)
    assert not (tmp_path / "t.csv").exists()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc")
def test_an_interrupt_leaves_no_process_behind(tmp_path: Path) -> None:
    script = f"""{LISTENS}
from pathlib import Path
from tilecast.model.kernel.workload import Workload
from tilecast.validation.lab.measure.plan import Item, Options
from tilecast.validation.lab.measure.run import measure_in
from tilecast.validation.lab.worker.process import Worker
folder = Path({str(tmp_path)!r})
class Shown(Worker):
    def ask(self, *of):  # the run has it by now
        print(self._process.pid, flush=True)
        return super().ask(*of)
def start():
    return Shown(folder / "log", "support.worker_tasks")
measure_in(start, [Item("triton", "hang", Workload(), "h200-sxm")], folder / "t.csv", Options(workers=1))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert process.stdout is not None
    worker = Path(f"/proc/{process.stdout.readline().strip()}")
    assert worker.exists()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode in (1, 130, -signal.SIGINT)
    assert not worker.exists()
