"""Making a bundle on the machine that has the GPU: identify, measure stage by stage, pack."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tilecast.validation.lab.bundle.archive import write_bundle
from tilecast.validation.lab.bundle.folder import WorkFolder
from tilecast.validation.lab.bundle.manifest import BundleError, Manifest
from tilecast.validation.lab.bundle.plans import Work, load_work, plan_path
from tilecast.validation.lab.bundle.stages import Context, Stage, run_stages, stages
from tilecast.validation.lab.measure.detect import match_machine
from tilecast.validation.lab.measure.gpu_lock import timing_on
from tilecast.validation.lab.worker.process import Asker, Worker, WorkerError

MODULE = "tilecast.validation.lab.bundle.tasks"
_IDENTIFY_S = 180.0
_MOST_WORKERS = 8


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user asked for; ``folder`` is where work is kept until the zip is complete."""

    output: Path
    folder: Path
    quick: bool
    plan: str | None
    command: str
    version: str
    rounds: int = 15
    settle_s: float = 1.0
    measure_s: float = 1.0


class Screen(Protocol):
    """Who is told what happens."""

    def begin(self, gpu: str, work: Work, todo: tuple[Stage, ...], resumed: bool) -> None:
        """Before the first stage."""

    def tell(self, stage: str, done: float, total: float, detail: str = "", /) -> None:
        """See `base.progress.Progress`: seconds of a stage by its own estimate; without ``detail`` it begins or ends."""


def start_worker(log: Path) -> Asker:
    """A process that does a bundle's tasks."""
    return Worker(log, MODULE)


def create(asked: Asked, screen: Screen, start: Callable[[Path], Asker] = start_worker) -> Manifest:
    """Measure what the work folder lacks, write the bundle and delete the folder; returns the manifest.

    Raises BundleError, PlanError and MachineError before anything is written when there is no GPU, no plan for it, or
    the folder holds other work; GpuLockError when another tilecast times on the GPU.
    """
    if asked.plan is not None and not Path(asked.plan).is_file():
        raise BundleError(f"--plan: {asked.plan} is not a file")
    about = _identify(start)
    with timing_on(about.pop("uuid")):
        return _create(asked, screen, start, about)


def _create(asked: Asked, screen: Screen, start: Callable[[Path], Asker], about: dict[str, Any]) -> Manifest:
    machine = match_machine(about["gpu"], divmod(about["capability"], 10))
    work = load_work(plan_path(about["capability"], asked.plan), machine, asked.quick)
    folder = WorkFolder(asked.folder)
    resumed = folder.open({**about, "quick": asked.quick, "plan_sha256": work.sha256, "tilecast": asked.version})
    log = folder.file("log.txt")
    context = Context(
        folder, machine, about["capability"], work, asked.quick, asked.command, asked.version,
        max(1, min(_MOST_WORKERS, (os.cpu_count() or 2) - 1)), asked.rounds, asked.settle_s, asked.measure_s,
        lambda: start(log),
    )  # fmt: skip
    todo = stages(context)
    folder.log(f"{'resumed' if resumed else 'began'}: {asked.command}: {about['gpu']}, driver {about['driver']}")
    screen.begin(about["gpu"], work, todo, resumed)

    def tell(stage: Stage, share: float, text: str) -> None:
        if not text:
            folder.log(f"{stage.name}: {'ended' if share else f'{stage.units} to do'}")
        screen.tell(stage.name, share * stage.seconds, stage.seconds, text)

    run_stages(context, todo, tell)
    manifest = write_bundle(asked.output, _manifest(asked, about, context), folder.members())
    folder.remove()
    return manifest


def _identify(start: Callable[[Path], Asker]) -> dict[str, Any]:
    """What the GPU and its software call themselves; nothing is written."""
    worker = start(Path(os.devnull))
    try:
        return worker.ask({"do": "identify"}, _IDENTIFY_S)
    except WorkerError as error:
        raise BundleError(str(error)) from None
    finally:
        worker.close()


def _manifest(asked: Asked, about: dict[str, Any], context: Context) -> Manifest:
    return Manifest(
        tilecast=asked.version, machine=context.machine.name, date=datetime.date.today().isoformat(),
        command=asked.command, quick=asked.quick, plan=context.work.name, plan_sha256=context.work.sha256,
        seconds=context.folder.spent(), failed=context.folder.failed(), left_out=context.work.left_out, files={}, **about,
    )  # fmt: skip
