"""The stages of a bundle.  Each does what its work folder lacks, unit by unit, and records what failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tilecast.base.files import write_text_atomically
from tilecast.model.compiled.code import dump_codes, load_codes
from tilecast.model.machine.machine import Machine
from tilecast.validation.lab.bundle.folder import WorkFolder
from tilecast.validation.lab.bundle.manifest import BundleError
from tilecast.validation.lab.bundle.plans import COMPILE_S, PROFILE_S, START_S, Work, code_key, item_seconds
from tilecast.validation.lab.measure.bench import SILENCE_S, Bench
from tilecast.validation.lab.measure.plan import EXTERNAL, Item, Options, item_from, item_to
from tilecast.validation.lab.measure.records import read
from tilecast.validation.lab.worker.process import Asker, WorkerError, farm

#: Compute capability whose machine code the simulator reads.
PROFILED = 90
_CALIBRATE_SILENCE_S = 180.0
#: One benchmark in NVRTC.
_COMPILE_CU_S = 0.3
#: Benchmarks that may kill their process before calibration gives up.
_MOST_LOST = 12
_LAP_S = 2.0
#: share of the stage that is done, what is at hand
Tell = Callable[[float, str], None]


@dataclass(frozen=True)
class Context:
    """What every stage needs."""

    folder: WorkFolder
    machine: Machine
    capability: int
    work: Work
    quick: bool
    command: str
    version: str
    workers: int
    rounds: int
    settle_s: float
    measure_s: float
    start: Callable[[], Asker]


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage with what it still has to do: ``units`` of them, about ``seconds`` in all."""

    name: str
    title: str
    units: int
    seconds: float
    run: Callable[[Context, Tell], None]


def stages(context: Context) -> tuple[Stage, ...]:
    """All stages in order, with what is left to do in each."""
    checks, codes = len(_unchecked(context)), len(_unprofiled(context))
    found = [
        Stage("calibrate", "microbenchmarks fill the machine file", *_calibrate_size(context), calibrate),
        Stage(
            "check",
            "compile, run and check every kernel once",
            checks,
            _farm_seconds(context, checks, COMPILE_S),
            check,
        ),
    ]
    for name, title in (("short", "short runs"), ("sustained", "sustained runs (clock and power settle)")):
        items = _unmeasured(context, name)
        rest = sum(_seconds(context, name, item) for item in items) + (START_S if items else 0)
        found.append(Stage(name, title, len(items), rest, _timed(name)))
    if context.capability == PROFILED:
        seconds = _farm_seconds(context, codes, PROFILE_S)
        found.append(Stage("profile", "machine code for the simulator", codes, seconds, profile))
    return tuple(found)


def _farm_seconds(context: Context, count: int, each: float) -> float:
    return START_S * (count > 0) + each * count / max(1, min(context.workers, count))


# --- calibrate ------------------------------------------------------------------------------------------------


def _calibrate_size(context: Context) -> tuple[int, float]:
    if context.folder.lines("checked.jsonl") or context.folder.file("machine.toml").exists():
        return 0, 0.0
    from tilecast.validation.lab.calibrate.groups import all_cases
    from tilecast.validation.lab.calibrate.run import chosen
    from tilecast.validation.lab.calibrate.store import params_text, read_rows

    known = {(row.group, row.benchmark, row.params) for row in read_rows(context.folder.file("calibrate.csv"))}
    cases = [
        case for case in chosen(all_cases(()), context.capability, context.quick)
        if (case.group, case.benchmark, params_text(case.params)) not in known
    ]  # fmt: skip
    compiling = _COMPILE_CU_S * len({case.text() for case in cases}) / context.workers
    # Also with all benchmarks known the machine file is to be written.
    return max(1, len(cases)), sum(case.seconds for case in cases) + compiling + START_S


def calibrate(context: Context, tell: Tell) -> None:
    """Fill calibrate.csv and write machine.toml; a benchmark that kills its process is left out and recorded."""
    folder, skip, at = context.folder, [], ""
    request: dict[str, Any] = {
        "do": "calibrate", "store": str(folder.file("calibrate.csv")), "machine": str(folder.file("machine.toml")),
        "name": f"{context.machine.name}-bundle", "quick": context.quick, "command": context.command,
    }  # fmt: skip

    def progress(label: str, share: float) -> None:
        nonlocal at
        at = label
        tell(share, label)

    while True:
        skip = [failure.what for failure in folder.failed() if failure.stage == "calibrate"]
        worker, at = context.start(), ""
        try:
            asked = {**request, "skip": skip, "measure": len(skip) < _MOST_LOST}
            answer = worker.ask(asked, _CALIBRATE_SILENCE_S, progress)
        except WorkerError as error:
            folder.fail("calibrate", at or "start", str(error))
            if not at:
                return
            continue
        finally:
            worker.close()
        for label, reason in answer["failed"]:
            folder.fail("calibrate", label, reason)
        return


# --- kernels one by one, in several processes -------------------------------------------------------------------


def _broken(context: Context) -> set[tuple[Any, ...]]:
    return {tuple(entry["key"]) for entry in context.folder.lines("checked.jsonl") if entry["reason"]}


def _unchecked(context: Context) -> list[Item]:
    known = {tuple(entry["key"]) for entry in context.folder.lines("checked.jsonl")}
    return [item for item in context.work.kernels() if code_key(item) not in known]


def check(context: Context, tell: Tell) -> None:
    """Compile, run and check every distinct kernel once, so that those that cannot run harm no measurement."""
    items = _unchecked(context)
    requests = [{"do": "check", "item": item_to(item), "version": context.version} for item in items]
    for done, (request, answer) in enumerate(farm(context.start, requests, context.workers, SILENCE_S), start=1):
        item = item_from(request["item"])
        reason = str(answer) if isinstance(answer, WorkerError) else answer["reason"]
        if reason:
            context.folder.fail("check", item.label(), reason)
        context.folder.append("checked.jsonl", {"key": code_key(item), "reason": reason})
        tell(done / len(items), item.label())


def _unprofiled(context: Context) -> list[Item]:
    known = {tuple(entry["key"]) for entry in context.folder.lines("profiles.jsonl")} | _broken(context)
    return [item for item in context.work.kernels() if code_key(item) not in known]


def profile(context: Context, tell: Tell) -> None:
    """Profile the machine code of every kernel that ran, and write codes.txt."""
    folder, items = context.folder, _unprofiled(context)
    requests = [{"do": "profile", "item": item_to(item)} for item in items]
    for done, (request, answer) in enumerate(farm(context.start, requests, context.workers, SILENCE_S), start=1):
        item = item_from(request["item"])
        if isinstance(answer, WorkerError):
            folder.fail("profile", item.label(), str(answer))
        code = "" if isinstance(answer, WorkerError) else answer["code"]
        folder.append("profiles.jsonl", {"key": code_key(item), "code": code})
        tell(done / len(items), item.label())
    codes = [code for entry in folder.lines("profiles.jsonl") if entry["code"] for code in load_codes(entry["code"])]
    if codes:
        write_text_atomically(folder.file("codes.txt"), dump_codes(codes), BundleError)


# --- timing -----------------------------------------------------------------------------------------------------


def _table(mode: str) -> str:
    return "points.csv" if mode == "short" else "sustained.csv"


def _unmeasured(context: Context, mode: str) -> list[Item]:
    path = context.folder.file(_table(mode))
    rows = read(path) if path.exists() and path.stat().st_size else []
    known = {(row.kernel, row.variant if row.source_sha else "", row.workload()) for row in rows}
    failed = {failure.what for failure in context.folder.failed() if failure.stage == mode}
    broken = _broken(context)
    items = context.work.short if mode == "short" else context.work.sustained
    return [
        item for item in items
        if (item.kernel, item.variant, item.workload) not in known and item.label() not in failed
        and code_key(item) not in broken
    ]  # fmt: skip


def _seconds(context: Context, mode: str, item: Item) -> float:
    sustained = context.settle_s + context.measure_s if mode == "sustained" else 0.0
    return item_seconds(item, context.machine, context.rounds, sustained)


def _timed(mode: str) -> Callable[[Context, Tell], None]:
    def run(context: Context, tell: Tell) -> None:
        items = _unmeasured(context, mode)
        total = sum(_seconds(context, mode, item) for item in items)
        # One process: the kernels are compiled by now, and each was run once where it could do no harm.
        options = Options(
            context.rounds, mode, context.settle_s, context.measure_s, command=context.command, version=context.version
        )
        bench, passed = Bench(context.start, context.folder.file(_table(mode)), options), 0.0
        try:
            for workload in dict.fromkeys(item.workload for item in items):
                mine = [item for item in items if item.workload == workload]
                tell(passed / total, workload.label())
                for failure in bench.measure([item for item in mine if code_key(item) not in _broken(context)]):
                    item, reason = failure.item, failure.reason
                    context.folder.fail(mode, item.label(), reason)
                    if failure.fatal and item.kernel not in EXTERNAL:
                        context.folder.append("checked.jsonl", {"key": code_key(item), "reason": reason})
                passed += sum(_seconds(context, mode, item) for item in mine)
        finally:
            bench.close()

    return run


def run_stages(context: Context, todo: Iterable[Stage], tell: Callable[[Stage, float, str], None]) -> None:
    """Run the stages one after the other; one that fails as a whole is recorded and the rest goes on."""
    for stage in todo:
        lap = _Lap(context.folder, stage.name)
        tell(stage, 0.0, "")
        try:
            if stage.units:
                stage.run(context, _telling(tell, stage, lap))
        except (ValueError, RuntimeError, OSError) as error:
            context.folder.fail(stage.name, stage.title, " ".join(str(error).split()))
        finally:
            lap.note(0.0)
        tell(stage, 1.0, "")


class _Lap:
    """Notes the seconds of a stage as they pass, so that those of a run that is killed count too."""

    def __init__(self, folder: WorkFolder, name: str) -> None:
        self._folder, self._name, self._since = folder, name, time.monotonic()

    def note(self, least_s: float) -> None:
        """Write down what passed since the last time, if at least so much."""
        now = time.monotonic()
        if now - self._since >= least_s:
            self._folder.append("seconds.jsonl", {"stage": self._name, "seconds": now - self._since})
            self._since = now


def _telling(tell: Callable[[Stage, float, str], None], stage: Stage, lap: _Lap) -> Tell:
    def told(share: float, text: str) -> None:
        lap.note(_LAP_S)
        tell(stage, share, text)

    return told
