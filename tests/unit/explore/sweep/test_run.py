"""Running sweeps: kills, dying workers, resuming, GPUs that must not be shared, and a real Ray cluster."""

from __future__ import annotations

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.interrupts import LISTENS

import tilecast
from tilecast.cli import main
from tilecast.explore.sweep import api
from tilecast.explore.sweep.errors import SweepError
from tilecast.explore.sweep.run.drive import Task, drive
from tilecast.explore.sweep.run.gpus import Gpu, GpuLocks, Host
from tilecast.explore.sweep.run.lanes import LocalEngine, ProcessLane
from tilecast.explore.sweep.run.store import Store
from tilecast.explore.sweep.spec.items import run_item
from tilecast.explore.sweep.spec.spec import Bench, load_spec, plan_forecasts, plan_measurements
from tilecast.model.machine.machine import load_machine
from tilecast.validation.lab.worker.process import WorkerError, WorkerLostError

#: Eight kernels at three lengths: every item computes something, none for long.
SPEC = """
machines = ["b200", "h200-sxm"]
[[workload]]
head_dim = [64, 128]
mask = ["none", "causal"]
seqlen = [512, 1024, 2048]
"""

#: A sweep that writes down what it hands out and what comes back, each line before the store hears of it.
LOGGED = """
import os, sys, time
from tilecast.explore.sweep.api import sweep
from tilecast.explore.sweep.run.lanes import LocalEngine

log = os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
left = [int(sys.argv[4])]

class Lane:
    def __init__(self, lane):
        self.lane = lane
        os.write(log, b"pid %d\\n" % lane._worker._process.pid)
    def submit(self, request):
        item = request.get("item")
        if item:
            left[0] -= 1
            if left[0] < 0:
                time.sleep(600)  # the kill is late: some items must be left over
            os.write(log, b"sent " + item.encode() + b"\\n")
        future = self.lane.submit(request)
        if item:
            future.add_done_callback(lambda done: os.write(log, b"done " + item.encode() + b"\\n"))
        return future
    def close(self):
        self.lane.close()

class Engine(LocalEngine):
    def starts(self, tasks):
        return [lambda start=start: Lane(start()) for start in super().starts(tasks)]

sweep(sys.argv[1], store=sys.argv[2], engine=Engine(2))
"""


class Unused:
    """An engine that must not be asked for lanes."""

    name, depth = "unused", 1

    def starts(self, tasks: int) -> list[Callable[[], Any]]:
        raise AssertionError(f"{tasks} tasks were computed again")

    def close(self) -> None:
        pass


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.toml"
    path.write_text(SPEC, encoding="utf-8")
    return path


def gone(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    try:
        return "State:\tZ" in status.read_text()
    except OSError:
        return True


def wait_for(what: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def test_kill_9_loses_at_most_the_items_in_flight(spec: Path, tmp_path: Path) -> None:
    script, store, log = tmp_path / "child.py", tmp_path / "s.db", tmp_path / "log"
    script.write_text(LOGGED, encoding="utf-8")
    total = len(plan_forecasts(load_spec(spec)).items)
    kept_before: set[str] = set()
    for so_far in (6, 14):
        log.unlink(missing_ok=True)
        child = subprocess.Popen([sys.executable, script, spec, store, log, str(so_far + 8 - len(kept_before))])

        def lines(word: str) -> set[str]:
            whole = log.read_text().splitlines() if log.exists() else []
            return {line.partition(" ")[2] for line in whole if line.startswith(word)}

        wait_for(lambda: len(lines("done") | kept_before) >= so_far or child.poll() is not None)  # noqa: B023
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        sent, done, workers = lines("sent"), lines("done"), lines("pid")
        with Store(store, write=False) as base:
            kept = {row[0] for row in base._base.execute("SELECT item FROM results WHERE status = 'ok'")}
        assert so_far - 4 <= len(kept) < total
        # Two lanes, two tasks each: nothing beyond those was lost, and nothing that was kept was handed out again.
        assert len(sent - kept) <= 4 and done - kept <= sent - kept
        assert not sent & kept_before and kept_before <= kept
        wait_for(lambda: all(gone(int(pid)) for pid in workers))  # noqa: B023
        kept_before = kept
    table = tilecast.sweep(spec, store=store, workers=2)
    assert (table.known, table.computed, len(table)) == (len(kept), total - len(kept), total)
    assert len({row["key"] for row in table}) == total and table.count("ok") == total
    again = tilecast.sweep(spec, store=store, engine=Unused())
    assert (again.known, again.computed, again.rows) == (total, 0, table.rows)
    # What came through kills, processes and SQLite is what the pure function gives.
    machines = {name: load_machine(name) for name in ("b200", "h200-sxm")}
    item = plan_forecasts(load_spec(spec)).items[17]
    with Store(store, write=False) as base:
        assert base.get([item.key])[item.key].fields() == run_item(item.text, machines)


def test_a_worker_that_is_killed_is_replaced_and_nothing_is_missing(tmp_path: Path) -> None:
    pids: list[int] = []

    class Watched(LocalEngine):
        def _start(self) -> ProcessLane:
            lane = super()._start()
            assert isinstance(lane, ProcessLane)
            pids.append(lane._worker._process.pid)  # type: ignore[attr-defined]
            return lane

    def shoot(_stage: str, done: float, _total: float, _detail: str = "", /) -> None:
        if done in (2, 5):
            os.kill(pids[-1], signal.SIGKILL)

    engine = Watched(1)
    raw = {"machines": ["a100"], "interval": False, "workload": [{"seqlen": [512, 1024], "batch": [1, 2, 3, 4]}]}
    table = tilecast.sweep(raw, engine=engine, progress=shoot)
    engine.close()
    assert table.count("ok") == table.computed == 8
    assert len(pids) == 3


def test_what_waited_behind_the_request_that_killed_a_worker_does_not_wait_for_ever() -> None:
    engine = LocalEngine(1)
    (start,) = engine.starts(1)
    lane = start()
    assert isinstance(lane, ProcessLane)
    hello = lane.submit({"do": "hello", "kind": "forecast", "machines": []})
    assert hello.result(60) == {"source": api.source_hash("forecast")}
    os.kill(lane._worker._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    for future in [lane.submit({"do": "gpus"}) for _ in range(3)]:
        assert isinstance(future.exception(20), WorkerLostError)
    lane.close()
    engine.close()


class Scripted:
    """A lane without a process: each request is answered by a function on a thread of its own."""

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._thread, self._answer, self._dead = ThreadPoolExecutor(1), answer, False

    def submit(self, request: dict[str, Any]) -> Future[dict[str, Any]]:
        return self._thread.submit(self._run, request)

    def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._dead:
            raise WorkerLostError("its process ended (signal 9)")
        try:
            return self._answer(request)
        except WorkerLostError:
            self._dead = True
            raise

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class Lanes:
    name = "scripted"

    def __init__(self, count: int, depth: int, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.depth, self.count, self.answer, self.started = depth, count, answer, 0

    def starts(self, tasks: int) -> list[Callable[[], Scripted]]:
        def start() -> Scripted:
            self.started += 1
            return Scripted(self.answer)

        return [start] * self.count

    def close(self) -> None:
        pass


HELLO = {"do": "hello", "expect": {"source": "x"}}


def scripted(number: Callable[[int], dict[str, Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda request: {"source": "x"} if request["do"] == "hello" else number(request["n"])


def tasks(count: int, groups: int = 1) -> list[Task]:
    return [Task(f"t{n}", {"do": "it", "n": n}, f"g{n % groups}") for n in range(count)]


@pytest.mark.parametrize(("lanes", "depth", "groups"), [(1, 1, 1), (2, 2, 1), (3, 2, 7), (4, 1, 2)])
def test_every_task_is_answered_once_and_a_deadly_one_given_up_after_two_tries(
    lanes: int, depth: int, groups: int
) -> None:
    tried: list[int] = []

    def number(n: int) -> dict[str, Any]:
        tried.append(n)
        if n in (5, 6):
            raise WorkerLostError("its process ended (signal 9)")
        if n == 9:
            raise WorkerError("no such luck")
        return {"status": "ok", "n": n, "lost": n == 3}

    kept: dict[str, dict[str, Any]] = {}

    def keep(task: Task, answer: dict[str, Any], seconds: float) -> None:
        assert task.name not in kept and seconds >= 0
        kept[task.name] = answer

    engine = Lanes(lanes, depth, scripted(number))
    drive(tasks(40, groups), engine, HELLO, keep)
    assert len(kept) == 40
    assert sorted(name for name, answer in kept.items() if answer["status"] == "failed") == ["t5", "t6", "t9"]
    assert "2 times" in kept["t5"]["reason"] and "signal 9" in kept["t5"]["reason"]
    assert kept["t9"]["reason"] == "no such luck"
    assert tried.count(5) == tried.count(6) == 2 and tried.count(9) == 1
    # One for each loss (5 and 6 twice) and one for the answer that said its worker is of no use any more; none for a loss
    # that leaves nothing to do, which the last may be where another lane took the rest.
    assert lanes + (5 if lanes == 1 else 4) <= engine.started <= lanes + 5


def test_a_group_stays_with_a_lane_until_another_has_nothing_to_do() -> None:
    where: dict[int, int] = {}
    # Lanes in step, so that neither runs out of work before the other.
    step = threading.Barrier(2, timeout=30)

    def number(n: int) -> dict[str, Any]:
        step.wait()
        where[n] = threading.get_ident()
        return {"status": "ok"}

    drive(tasks(40, 2), Lanes(2, 1, scripted(number)), HELLO, lambda *_: None)
    assert len({where[n] for n in range(0, 40, 2)}) == len({where[n] for n in range(1, 40, 2)}) == 1
    assert where[0] != where[1]
    # One group only: the other lane takes half of it rather than watch.
    where.clear()
    drive(tasks(40, 1), Lanes(2, 1, scripted(number)), HELLO, lambda *_: None)
    assert sorted(list(where.values()).count(lane) for lane in set(where.values())) == [20, 20]


def test_workers_of_another_program_or_that_cannot_start_end_the_sweep() -> None:
    with pytest.raises(SweepError, match="another version of tilecast"):
        drive(tasks(3), Lanes(2, 2, lambda _: {"source": "y"}), HELLO, lambda *_: None)

    def dead(_request: dict[str, Any]) -> dict[str, Any]:
        raise WorkerLostError("its process ended (exit code 1)")

    with pytest.raises(SweepError, match=r"could not start: its process ended \(exit code 1\)"):
        drive(tasks(3), Lanes(2, 2, dead), HELLO, lambda *_: None)
    # Once is an accident, as when memory is short for a moment.
    greeted: list[int] = []

    def late(request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "hello":
            greeted.append(1)
            if len(greeted) == 1:
                raise WorkerLostError("its process ended (signal 9)")
            return {"source": "x"}
        assert len(greeted) == 2
        return {"status": "ok"}

    kept: list[str] = []
    drive(tasks(3), Lanes(1, 2, late), HELLO, lambda task, *_: kept.append(task.name))
    assert sorted(kept) == ["t0", "t1", "t2"]


def test_a_sweep_that_cannot_start_leaves_no_store(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SweepError, match="another version"):
        tilecast.sweep(spec, store=tmp_path / "s.db", engine=Lanes(1, 1, lambda _: {"source": "y"}))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SweepError, match=r"needs Ray .*: pip install 'tilecast\[ray\]'"):
        tilecast.sweep(spec, store=tmp_path / "s.db", engine="ray")
    assert [entry.name for entry in tmp_path.iterdir()] == ["spec.toml"]


def test_failed_items_stay_failed_until_asked_for_again(spec: Path, tmp_path: Path) -> None:
    def engine(answer: dict[str, Any] | Exception) -> Lanes:
        def reply(request: dict[str, Any]) -> dict[str, Any]:
            if request["do"] == "hello":
                return {"source": api.source_hash("forecast")}
            if isinstance(answer, Exception):
                raise answer
            return answer

        return Lanes(2, 2, reply)

    broken = engine(WorkerError("no memory"))
    table = tilecast.sweep(spec, store=tmp_path / "s.db", engine=broken)
    assert table.count("failed") == len(table) == 24
    assert tilecast.sweep(spec, store=tmp_path / "s.db", engine=Unused()).count("failed") == 24
    good = engine({"status": "ok", "reason": ""})
    again = tilecast.sweep(spec, store=tmp_path / "s.db", engine=good, retry_failed=True)
    assert (again.known, again.computed, again.count("ok")) == (0, 24, 24)


def test_ctrl_c_leaves_a_sound_store_and_says_how_to_go_on(spec: Path, tmp_path: Path) -> None:
    store, batches = tmp_path / "s.db", 100
    # Seconds of work: it must not be over when the signal comes.
    spec.write_text(f"{SPEC}batch = {list(range(1, batches + 1))}\n", encoding="utf-8")
    program = f"{LISTENS}from tilecast.cli import main\nmain()"
    child = subprocess.Popen(
        [sys.executable, "-c", program, "sweep", spec, "--store", store, "--workers", "1"],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def kept() -> int:
        try:
            with Store(store, write=False) as base:
                return int(base._base.execute("SELECT count(*) FROM results").fetchone()[0])
        except SweepError:
            return 0

    wait_for(lambda: kept() >= 3)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130 and out == "" and "Traceback" not in err
    assert f"tilecast: stopped: results so far are kept in {store}; run the same command to go on" in err
    assert 3 <= kept() < 24 * batches


def test_the_table_has_units_and_one_value_a_cell_in_every_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = tmp_path / "spec.toml"
    wanted.write_text(
        'title = "four"\nmachines = ["a100"]\nclocks = ["short", 1000]\ninterval = false\nvariants = ["best", "fa4"]\n'
        "[[workload]]\nseqlen = 1024\n",
        encoding="utf-8",
    )
    files = [tmp_path / f"t.{ending}" for ending in ("csv", "json", "parquet")]
    with pytest.raises(SystemExit) as end:
        arguments = [part for file in files for part in ("--export", str(file))]
        main(["sweep", str(wanted), "--store", str(tmp_path / "s.db"), "--workers", "1", *arguments])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "four\n  4 items: 0 from the store, 4 computed" in out and "2 ok, 2 infeasible, 0 failed" in out
    assert "infeasible      2 x  family fa4 takes tcgen05.mma and tensor memory, which a100 does not have" in out
    with files[0].open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    as_json = json.loads(files[1].read_text())
    import pandas

    frame = pandas.read_parquet(files[2])
    assert len(rows) == len(as_json) == len(frame) == 4
    assert list(rows[0]) == list(frame.columns)
    assert [row["asked_clock"] for row in rows] == ["short", "1000", "short", "1000"]
    assert [row["status"] for row in rows] == ["ok", "ok", "infeasible", "infeasible"]
    answer = tilecast.predict(tilecast.Workload(seqlen_q=1024, seqlen_k=1024), "a100", clock=1000)
    assert float(rows[1]["time_ms"]) == as_json[1]["time_ms"] == frame["time_ms"][1] == answer.time_ms
    assert float(rows[1]["busy_tensor_share"]) == answer.units["tensor"]
    assert rows[2]["time_ms"] == "" and "tcgen05" in rows[2]["reason"] and frame["time_ms"].isna()[2]


# --- GPUs -------------------------------------------------------------------------------------------------------

TWO = (Gpu("GPU-aaaa", "NVIDIA H200", 90), Gpu("GPU-bbbb", "NVIDIA H200", 90))


def test_items_run_one_at_a_time_on_each_gpu_and_both_are_used(tmp_path: Path) -> None:
    spans: dict[str, list[tuple[float, float]]] = {gpu.uuid: [] for gpu in TWO}
    handles: dict[str, int] = {}
    # The first items meet: both GPUs are at work at the same time.
    both = threading.Barrier(2, timeout=30)

    def start(gpu: Gpu, handle: int) -> Scripted:
        handles[gpu.uuid] = handle

        def answer(request: dict[str, Any]) -> dict[str, Any]:
            if request["do"] == "hello":
                return {"source": api.source_hash("measure")}
            began = time.monotonic()
            if not spans[gpu.uuid]:
                both.wait()
            time.sleep(0.005)
            spans[gpu.uuid].append((began, time.monotonic()))
            # Three timings lose their context: the lane is replaced, its neighbour is not disturbed.
            lost = len(spans[gpu.uuid]) == 3
            return {"status": "failed" if lost else "ok", "reason": "CUDA error" if lost else "", "lost": lost}

        return Scripted(answer)

    raw = {"do": "measure", "kernels": ["cudnn", "flex"], "workload": [{"batch": list(range(1, 16))}]}
    plan = plan_measurements(load_spec(raw), "h200-sxm", load_machine("h200-sxm"), Bench("NVIDIA H200", "2", "3"))
    store = Store(tmp_path / "s.db")
    api._measure(plan.items, Host(TWO, "2", "3"), store, 1, lambda *_: None, "", start)
    assert len(store.known(item.key for item in plan.items)) == 30 == sum(map(len, spans.values()))
    store.close()
    for mine in spans.values():
        assert mine
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(mine))
    assert len(set(handles.values())) == 2


def test_a_gpu_that_another_sweep_times_on_is_not_touched(tmp_path: Path) -> None:
    first = GpuLocks(TWO[:1], tmp_path)
    rest = GpuLocks(TWO, tmp_path)
    assert [gpu.uuid for gpu in rest.held] == ["GPU-bbbb"]
    with pytest.raises(SweepError, match=r"another tilecast is timing on every one of the 2 GPU\(s\)"):
        GpuLocks(TWO, tmp_path)
    # The process that times shares the lock: killing its parent does not free the GPU before it is dead too.
    (handle,) = first.held.values()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(handle,))
    first.close()
    rest.close()
    assert [gpu.uuid for gpu in GpuLocks(TWO, tmp_path).held] == ["GPU-bbbb"]
    child.communicate(b"\n")
    locks = GpuLocks(TWO[:1], tmp_path)
    assert [gpu.uuid for gpu in locks.held] == ["GPU-aaaa"]
    locks.close()


def test_measuring_without_a_gpu_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text('do = "measure"\nkernels = ["cudnn"]\n[[workload]]\n', encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "tilecast.cli", "sweep", "spec.toml"], capture_output=True, text=True, check=False,
        cwd=tmp_path, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("tilecast: measuring needs a CUDA GPU") and done.stderr.count("\n") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["spec.toml"]


def test_kernels_are_compiled_without_the_gpu_into_the_cache_that_timing_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilecast.explore.sweep.run.worker import TASKS

    monkeypatch.setenv("TILECAST_CACHE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    raw = {"do": "measure", "variants": ["triton:tile_m=64,tile_n=32"], "workload": [{"seqlen": 512, "head_dim": 64}]}
    plan = plan_measurements(load_spec(raw), "h200-sxm", load_machine("h200-sxm"), Bench("NVIDIA H200", "2", "3"))
    request = {"do": "compile", "item": plan.items[0].text, "target": "sm_90a", "version": "0"}
    sha = TASKS["compile"](request, lambda *_: None)["compiled"]
    assert (tmp_path / "tilecast" / "measured-kernels" / f"triton_{sha}.py").exists()
    assert len(list((tmp_path / "triton").rglob("*.cubin"))) == 1


# --- Ray --------------------------------------------------------------------------------------------------------


def test_a_real_ray_cluster_of_two_workers_gives_the_same_and_survives_a_dead_actor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilecast.explore.sweep.run.ray_lanes import RayEngine

    # Ray makes a folder there, where there may be none that can be written.
    monkeypatch.setenv("HOME", str(tmp_path))

    raw = {
        "machines": ["a100", "b200"], "interval": False, "variants": ["best", "fa4"],
        "workload": [{"seqlen": [512, 1024], "batch": [1, 2], "head_dim": [64, 128]}],
    }  # fmt: skip
    plan = plan_forecasts(load_spec(raw))
    machines = {name: load_machine(name) for name in ("a100", "b200")}
    engine = RayEngine(2)
    try:
        lanes: list[Any] = []
        plain = RayEngine.starts

        def starts(self: RayEngine, count: int) -> list[Callable[[], Any]]:
            def watched(start: Callable[[], Any]) -> Callable[[], Any]:
                def run() -> Any:
                    lanes.append(start())
                    return lanes[-1]

                return run

            return [watched(start) for start in plain(self, count)]

        monkeypatch.setattr(RayEngine, "starts", starts)

        def shoot(_stage: str, done: float, _total: float, _detail: str = "", /) -> None:
            if done == 6:  # whether it is at work or still starting
                lanes[0].close()

        with_ray = tilecast.sweep(raw, store=tmp_path / "ray.db", engine=engine, progress=shoot)
    finally:
        engine.close()
    assert len(lanes) == 3
    assert with_ray.computed == len(plan.items) == 32
    with Store(tmp_path / "ray.db", write=False) as base:
        stored = base.get(item.key for item in plan.items)
    for item in plan.items:
        assert stored[item.key].fields() == run_item(item.text, machines)
    assert with_ray.count("infeasible") == 8


def test_a_table_in_a_notebook_is_short() -> None:
    rows = tuple({"machine": "b<200", "status": "ok", "time_ms": 0.123456, "key": str(n)} for n in range(60))
    found = tilecast.SweepTable(rows, 60, 0, 60)
    assert repr(found) == "<SweepTable of 60 rows, 4 columns: 60 ok>"
    page = found._repr_html_()
    assert page.count("<tr>") == 51
    assert "60 rows, the first 50" in page
    assert "b&lt;200" in page
    assert "0.1235" in page
