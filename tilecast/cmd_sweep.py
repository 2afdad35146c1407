"""``tilecast sweep``: progress on stderr, the summary and the files it wrote on stdout."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any

from tilecast.base.files import OutputError, check_writable, write_bytes_atomically
from tilecast.explore.sweep.api import sweep
from tilecast.explore.sweep.table import FORMATS, SweepTable


def run_sweep(
    *, spec: str, store: str | None, exports: list[str], engine: str, workers: int, ray_address: str | None, run: bool,
    retry_failed: bool,
) -> tuple[str, int]:  # fmt: skip
    """Compute what is missing and export; returns what to print and how many items failed."""
    for name in exports:
        if Path(name).suffix not in FORMATS:
            raise OutputError(f"--export: expected a file ending in {', '.join(FORMATS)}, got '{name}'")
        if Path(name).suffix == ".parquet":
            _need_parquet()
        check_writable(name)
    kept = Path(store) if store is not None else Path(Path(spec).with_suffix(".db").name)
    command = "tilecast " + " ".join(shlex.quote(argument) for argument in sys.argv[1:])
    screen = _Screen()
    try:
        table = sweep(
            spec, store=kept, engine=engine, workers=workers, ray_address=ray_address, run=run,
            retry_failed=retry_failed, progress=screen.tell, command=command,
        )  # fmt: skip
    except KeyboardInterrupt:
        screen.close()
        print(f"tilecast: stopped: results so far are kept in {kept}; run the same command to go on", file=sys.stderr)
        raise
    finally:
        screen.close()
    lines = [table.text(), "", f"store: {kept}"]
    for name in exports:
        _write(name, table)
        lines.append(f"table: {name} ({len(table)} rows, {len(table.columns)} columns)")
    return "\n".join(lines), table.count("failed")


def _need_parquet() -> None:
    """Refuse before hours of work, not after."""
    from importlib.util import find_spec

    for package in ("pandas", "pyarrow"):
        if find_spec(package) is None:
            raise OutputError(f"--export: Parquet needs {package}: pip install 'tilecast[report]', or export .csv")


def _write(name: str, table: SweepTable) -> None:
    write_bytes_atomically(name, table.encoded(Path(name).suffix))


class _Screen:
    """A bar with rate and time left; where stderr is no terminal, a line now and then."""

    #: Seconds between two lines.
    _EVERY_S = 10.0

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._terminal = console.is_terminal
        self._stage = ""
        self._began = self._told = 0.0
        self._task: Any = None
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(), console=console, disable=not self._terminal,
        )  # fmt: skip

    def tell(self, what: str, done: float, total: float, _detail: str = "", /) -> None:
        """Show that ``done`` of ``total`` are there."""
        now = time.monotonic()
        if what != self._stage:
            self._stage, self._began, self._told = what, now, now
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._bar.start()
            self._task = self._bar.add_task(what, total=total, rate="")
        rate = done / max(now - self._began, 1e-9)
        if self._terminal:
            self._bar.update(self._task, completed=int(done), rate=f"{rate:.3g}/s" if done else "")
        elif done == total or now - self._told >= self._EVERY_S:
            self._told = now
            left = f", about {_time((total - done) / rate)} left" if 0 < done < total else ""
            print(f"{what}: {done:.0f} of {total:.0f}, {rate:.3g}/s{left}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
