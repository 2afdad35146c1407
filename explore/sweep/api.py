"""`tilecast.sweep`: read a specification, compute what the store lacks, give back the table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tilecast.base.progress import Progress, silent
from tilecast.codegen.compiler.compile import TARGETS
from tilecast.explore.sweep.errors import SweepError
from tilecast.explore.sweep.run.drive import Task, drive
from tilecast.explore.sweep.run.gpus import GpuEngine, GpuLocks, Host, compile_request, find_host, measure_request
from tilecast.explore.sweep.run.lanes import Engine, LocalEngine
from tilecast.explore.sweep.run.store import Store
from tilecast.explore.sweep.spec.items import machine_document, machine_hash, source_hash
from tilecast.explore.sweep.spec.spec import (
    Bench,
    Plan,
    Spec,
    WorkItem,
    at_level,
    load_spec,
    plan_forecasts,
    plan_measurements,
)
from tilecast.explore.sweep.table import SweepTable, rows_of
from tilecast.model.machine.machine import Machine, load_machine

ENGINES = ("local", "ray")
#: Targets that kernels can be compiled for without the GPU, by compute capability.
_TARGETS = {capability: name for name, (capability, _) in TARGETS.items()}


def sweep(
    spec: str | Path | Mapping[str, Any],
    *,
    store: str | Path | None = None,
    engine: str | Engine = "local",
    workers: int = 0,
    ray_address: str | None = None,
    run: bool = True,
    retry_failed: bool = False,
    level: str | None = None,
    progress: Progress = silent,
    command: str = "",
) -> SweepTable:
    """Compute every item of ``spec`` (a TOML file, or its content as a mapping) that ``store`` lacks.

    ``store`` is a file (None: kept in memory for this call).  ``engine`` is "local" (``workers`` processes, default one a
    core), "ray" (``ray_address`` or a cluster on this host) or an `Engine`.  With ``run`` false nothing is computed: the
    table shows what the store has.  ``level`` ("fluid", "auto", "kept") goes before that of the specification.  Failed items stay failed unless ``retry_failed``.
    Raises SweepError (a ValueError) in one sentence, before anything is written where the input is wrong.
    """
    if isinstance(engine, str) and engine not in ENGINES:
        raise SweepError(f"engine: expected {' or '.join(ENGINES)}, got '{engine}'")
    if ray_address is not None and engine != "ray":
        raise SweepError("ray_address: only goes with engine ray")
    if workers < 0 or workers > 4096:
        raise SweepError(f"workers: expected 1 to 4096 (0: one a core), got {workers}")
    parsed = at_level(load_spec(spec), level)
    host: Host | None = None
    if parsed.do == "measure":
        if engine != "local":
            raise SweepError('do = "measure" times the GPUs of this host: engine ray does not go with it')
        host = find_host()
        plan = _measurement_plan(parsed, host)
    else:
        plan = plan_forecasts(parsed)
    with Store(None if store is None else Path(store), write=run or store is None) as base:
        known = base.known(item.key for item in plan.items)
        if retry_failed:
            known = {key: status for key, status in known.items() if status != "failed"}
        todo = [item for item in plan.items if item.key not in known] if run else []
        began = time.monotonic()
        if todo:
            machines = [(machine_hash(m), machine_document(m)) for m in parsed.machines]
            base.begin(machines, (version("tilecast"), source_hash(parsed.do), command, len(plan.items), len(known)))
            if host is not None:
                _measure(todo, host, base, workers, progress, command)
            else:
                chosen = _engine(engine, workers, ray_address)
                try:
                    _forecast(todo, parsed, chosen, base, progress)
                finally:
                    if isinstance(engine, str):
                        chosen.close()
        seconds = time.monotonic() - began
        return _table(plan, base, len(known), len(todo), seconds)


def _engine(engine: str | Engine, workers: int, ray_address: str | None) -> Engine:
    if not isinstance(engine, str):
        return engine
    if engine == "ray":
        from tilecast.explore.sweep.run.ray_lanes import RayEngine

        return RayEngine(workers, ray_address)
    return LocalEngine(workers)


def _forecast(todo: Sequence[WorkItem], spec: Spec, engine: Engine, store: Store, progress: Progress) -> None:
    greeting = _greeting("forecast", spec.machines)
    tasks = [Task(item.key, {"do": "forecast", "item": item.text}, item.group) for item in todo]
    drive(tasks, engine, greeting, _keeper(todo, store, progress, "forecasts"))


def _greeting(kind: str, machines: Sequence[Machine]) -> dict[str, Any]:
    documents = [machine_document(machine) for machine in machines]
    return {"do": "hello", "kind": kind, "machines": documents, "expect": {"source": source_hash(kind)}}


def _keeper(
    todo: Sequence[WorkItem], store: Store, progress: Progress, what: str
) -> Callable[[Task, dict[str, Any], float], None]:
    """Commits each answer before it counts as done."""
    texts = {item.key: item.text for item in todo}
    done = 0

    def keep(task: Task, answer: dict[str, Any], seconds: float) -> None:
        nonlocal done
        store.put(task.name, texts[task.name], answer, seconds)
        done += 1
        progress(what, done, len(todo))

    progress(what, 0, len(todo))
    return keep


def _measurement_plan(spec: Spec, host: Host) -> Plan:
    from tilecast.validation.lab.measure.detect import match_machine

    gpu = host.gpus[0]
    if spec.machines:
        (machine,) = spec.machines
        # Kernels are generated again in other processes, which know machines by name or file.
        if machine != load_machine(machine.name):
            raise SweepError(f"{spec.where}: machines: measuring takes a shipped machine, got '{machine.name}'")
    else:
        machine = match_machine(gpu.name, divmod(gpu.capability, 10))
    return plan_measurements(spec, machine.name, machine, Bench(gpu.name, host.torch, host.triton))


def _measure(
    todo: Sequence[WorkItem], host: Host, store: Store, workers: int, progress: Progress, command: str,
    start: Callable[..., Any] | None = None,
) -> None:  # fmt: skip
    """Compile on all cores first; then time, one item at a time on each GPU."""
    tilecast = version("tilecast")
    locks = GpuLocks(host.gpus)
    timing = GpuEngine(locks, start)
    greeting = _greeting("measure", ())
    try:
        _compile(todo, host, workers, progress, greeting, tilecast)
        # Every item its own group: nothing is shared between them, and the GPUs should end together.
        tasks = [Task(item.key, measure_request(item.text, command, tilecast), item.key) for item in todo]
        drive(tasks, timing, greeting, _keeper(todo, store, progress, f"timed on {len(locks.held)} GPU(s)"))
    finally:
        timing.close()


def _compile(
    todo: Sequence[WorkItem], host: Host, workers: int, progress: Progress, greeting: dict[str, Any], tilecast: str
) -> None:
    """Fill Triton's cache; a kernel that does not compile says so when its turn to be timed comes."""
    target = _TARGETS.get(host.gpus[0].capability)
    generated = [item for item in todo if json.loads(item.text)["variant"]]
    if target is None or not generated:
        return
    # Shapes of one kernel follow each other in one worker: most of them are in the cache after the first.
    tasks = [Task(item.key, compile_request(item.text, target, tilecast), item.group) for item in generated]
    done = 0

    def count(*_: object) -> None:
        nonlocal done
        done += 1
        progress("compiled", done, len(tasks))

    engine = LocalEngine(workers)
    progress("compiled", 0, len(tasks))
    try:
        drive(tasks, engine, greeting, count)
    finally:
        engine.close()


def _table(plan: Plan, store: Store, known: int, computed: int, seconds: float) -> SweepTable:
    stored = store.get(item.key for item in plan.items)
    results = {key: found.fields() for key, found in stored.items()}
    rows = rows_of([(item.key, item.text) for item in plan.items], results)
    return SweepTable(tuple(rows), len(plan.items), known, computed, seconds, plan.left_out, plan.spec.title)
