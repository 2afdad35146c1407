"""One screen for everything that takes longer than two seconds: the stage, its share, what is at hand, the time left."""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import Any


class Screen:
    """A `base.progress.Progress` on stderr, as a context manager.

    A terminal gets one bar, of the stage at hand, which goes when it is over; where stderr is no terminal a line is
    written when a stage has lasted two seconds, then every ten, and at its end.
    """

    _FIRST_S = 2.0
    _EVERY_S = 10.0

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None
        self._stage = ""
        self._began = self._due = 0.0
        self._written = False

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done: float, total: float, detail: str = "", /) -> None:
        """``done`` of ``total`` of ``stage`` are behind; ``total`` 0: how much there is is unknown."""
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began, self._due, self._written = stage, now, now + self._FIRST_S, False
            if self._terminal:
                self._open(stage, total)
        if self._terminal:
            self._bar.update(self._task, completed=done, total=total or None, detail=detail[:60])
        elif now >= self._due or (self._written and done == total):
            self._due, self._written = now + self._EVERY_S, True
            share = f"{done:.0f} of {total:.0f} ({done / total:.0%})" if total else ""
            left = f"about {in_words((total - done) * (now - self._began) / done)} left" if 0 < done < total else ""
            known = ", ".join(filter(None, (share, left)))
            print(": ".join(filter(None, (stage, known, detail))), file=sys.stderr, flush=True)

    def _open(self, stage: str, total: float) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(show_speed=True), TimeRemainingColumn(),
                       TextColumn("{task.fields[detail]}"))  # fmt: skip
            self._bar = Progress(*columns, console=Console(stderr=True, highlight=False), transient=True)
            self._bar.start()
        else:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(stage, total=total or None, detail="")


class StagesScreen(Screen):
    """A screen that prints a list of stages with their estimates first, and moves one bar over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[str, float] = {}
        self._total = 0.0

    def begin(self, gpu: str, work: Any, todo: Any, resumed: bool) -> None:
        """Print the stages (name, title, units, estimated seconds)."""
        for stage in todo:
            self._before[stage.name] = self._total
            self._total += stage.seconds
        head = "resuming" if resumed else "bundle"
        print(f"{head} on {gpu}, plan {work.name}, about {in_words(self._total)}:", file=sys.stderr)
        for stage in todo:
            left = f"{stage.units:>4} to do, about {in_words(stage.seconds)}" if stage.units else "   done"
            print(f"  {stage.name:<10} {left:<28} {stage.title}", file=sys.stderr, flush=True)

    def tell(self, stage: str, done: float, total: float, detail: str = "", /) -> None:
        """Move the bar by the stages' own estimates."""
        passed = self._before[stage] + done
        if self._terminal:
            self("bundle", passed, max(self._total, 1.0), f"{stage} {detail}")
        elif not detail:
            left = in_words(self._total - passed)
            print(f"{stage}: {'ended' if done else 'begins'}, about {left} left", file=sys.stderr, flush=True)


def in_words(seconds: float) -> str:
    """Seconds, or minutes where there are many."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def quiet_at_exit() -> None:
    """For verbs that compile: Triton's bindings report their own lost references when the interpreter ends, which no
    reader can mend."""
    atexit.register(_quiet)


def _quiet() -> None:
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
