"""``tilecast bundle`` and ``tilecast validate compare``."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tilecast import __version__
from tilecast.base.files import check_writable

if TYPE_CHECKING:
    from tilecast.validation.lab.bundle.manifest import Manifest
    from tilecast.validation.lab.bundle.plans import Work
    from tilecast.validation.lab.bundle.stages import Stage


def run_bundle(*, output: str, quick: bool, plan: str | None, resume: str | None) -> str:
    """Make a bundle (progress on stderr); returns what to print.  BundleError without a GPU."""
    from tilecast.validation.lab.bundle.create import Asked, create

    target = check_writable(output)
    folder = Path(resume) if resume is not None else target.with_name(target.name + ".work")
    command = "tilecast " + " ".join(shlex.quote(argument) for argument in sys.argv[1:])
    with _Screen() as screen:
        manifest = create(Asked(target, folder, quick, plan, command, __version__), screen)
    return _summary(target, manifest)


def _summary(target: Path, manifest: Manifest) -> str:
    from tilecast.validation.lab.bundle.manifest import failure_lines

    size = target.stat().st_size / 1024
    lines = [f"{target}: {size:.0f} KB, {', '.join(manifest.files)}; {sum(manifest.seconds.values()):.0f} s"]
    lines += [f"failed: {line}" for line in failure_lines(manifest.failed)]
    lines.append(f"read it anywhere: tilecast validate compare {shlex.quote(str(target))}")
    return "\n".join(lines)


def run_compare(*, bundle: str, machine: str | None, as_json: bool, rows: bool) -> str:
    """The report on a bundle as text or JSON; needs no GPU."""
    from tilecast.validation.bundle.compare import compare
    from tilecast.validation.bundle.text import report_dict, report_text
    from tilecast.validation.lab.bundle.archive import read_bundle

    report = compare(read_bundle(Path(bundle)), machine)
    return json.dumps(report_dict(report), indent=2) if as_json else report_text(report, rows)


class _Screen:
    """The stages with their estimates, then one bar over all of them; plain lines when stderr is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.fields[stage]:<10}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(), TextColumn("about {task.fields[left]} left  {task.fields[at]}"), console=self._console,
            disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=1.0, stage="", at="", left="?")
        self._before: dict[str, float] = {}
        self._total = 0.0

    def __enter__(self) -> _Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, gpu: str, work: Work, todo: tuple[Stage, ...], resumed: bool) -> None:
        """Print the list and show the bar."""
        for stage in todo:
            self._before[stage.name] = self._total
            self._total += stage.seconds
        self._console.print(
            f"{'resuming' if resumed else 'bundle'} on {gpu}, plan {work.name}, about {_time(self._total)}:"
        )
        for stage in todo:
            left = f"{stage.units:>4} to do, about {_time(stage.seconds)}" if stage.units else "   done"
            self._console.print(f"  {stage.name:<10} {left:<28} {stage.title}", soft_wrap=True)
        self._bar.start()
        self._bar.update(self._task, total=max(self._total, 1.0))

    def tell(self, stage: str, done: float, _total: float, detail: str = "", /) -> None:
        """Move the bar by the stages' own estimates."""
        passed = self._before[stage] + done
        left = _time(self._total - passed)
        self._bar.update(self._task, completed=passed, stage=stage, at=detail[:60], left=left)
        if not self._console.is_terminal and not detail:
            print(f"{stage}: {'ended' if done else 'begins'}, about {left} left", file=sys.stderr, flush=True)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
