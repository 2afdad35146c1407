"""``tilecast tune``: choose a kernel for a shape, say why, write it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tilecast import __version__
from tilecast.base.files import OutputError, check_writable, write_text_atomically

if TYPE_CHECKING:
    from tilecast.base.progress import Progress
    from tilecast.codegen.tune.tuning import Tuning
    from tilecast.model.kernel.workload import Workload

_AUDITS = (".json", ".csv")


def run_tune(
    work: Workload, machine: str, family: str | None, budget: int, compile: bool, candidates: int, clock: str | float,
    output: str | None, audit: str | None, table: str | None, workers: int, as_json: bool,
) -> str:  # fmt: skip
    """Tune, write what was asked for, return what to print."""
    from tilecast.validation.lab.tuning import tune

    if audit is not None and Path(audit).suffix not in _AUDITS:
        raise OutputError(f"--audit: expected a name ending in {' or '.join(_AUDITS)}, got '{audit}'")
    for path in (output, audit):
        if path is not None:
            check_writable(path)
    rows = table or (str(Path(output).with_suffix(".csv")) if output else "tune.csv")
    command = "tilecast " + " ".join(shlex.quote(a) for a in sys.argv[1:])
    found = _with_progress(
        lambda progress: tune(
            work,
            machine,
            family=family,
            budget=budget,
            compile=compile,
            candidates=candidates,
            clock=clock,
            table=rows,
            workers=workers,
            progress=progress,
            command=command,
            version=__version__,
        )
    )
    source = _source(found) if output is not None else ""
    if audit is not None:
        from tilecast.codegen.tune.render import as_csv

        text = as_csv(found) if audit.endswith(".csv") else json.dumps(found.to_dict(), indent=1) + "\n"
        write_text_atomically(audit, text)
    if output is not None:
        write_text_atomically(output, source)
    if as_json:
        return json.dumps(found.to_dict(), indent=2)
    written = [f"{path}: {what}" for path, what in ((output, "the kernel"), (audit, "the audit trail")) if path]
    return "\n".join([found.text(), *written])


def _source(found: Tuning) -> str:
    """The winner's file; its header says how it was chosen."""
    from tilecast.codegen.generate import generate
    from tilecast.model.families import find_family

    counts = found.counts()
    chosen: dict[str, object] = {"by": found.by, "of": len(found.candidates), "budget": found.budget, "fates": counts}
    measured = found.winner.measured_s
    if measured is not None:
        chosen["measured_ms"] = float(f"{1e3 * measured:.4g}")
    extra = {"chosen": {**chosen, "reason": found.winner.reason}}
    family = find_family(found.family)
    return generate(found.workload, found.machine, family, found.winner.variant, __version__, extra).source


def _with_progress(run: Callable[[Progress], Tuning]) -> Tuning:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        tasks: dict[str, object] = {}

        def progress(what: str, done: float, of: float, _detail: str = "", /) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=of)
            bar.update(tasks[what], completed=done, total=of)  # type: ignore[arg-type]

        return run(progress)
