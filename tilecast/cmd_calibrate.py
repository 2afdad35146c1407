"""`tilecast calibrate`: measure the GPU at hand, write its machine file, show what moved and what is missing."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tilecast.base.files import check_writable, write_text_atomically


def run_calibrate(*, output: str, store: str, only: tuple[str, ...], quick: bool) -> str:
    """Run the benchmarks (progress on stderr), write ``output`` and ``store``; the report as text.

    CalibrateError without a GPU, NVRTC or a writable destination, and for unknown groups; GpuLockError when another
    tilecast times on the GPU.
    """
    from tilecast.validation.lab.calibrate.groups import all_cases

    wanted = all_cases(only)
    for path in (output, store):
        check_writable(path)
    from tilecast.validation.lab.calibrate.gpu import Gpu
    from tilecast.validation.lab.calibrate.report import machine_text, report_text
    from tilecast.validation.lab.calibrate.run import chosen, run_cases
    from tilecast.validation.lab.measure.gpu_lock import timing_on

    gpu = Gpu()
    cases = chosen(wanted, gpu.identity.compute_capability, quick, gpu.identity.smem_per_cta)
    command = " ".join(["tilecast calibrate", *(["--quick"] if quick else []), *(f"--only {name}" for name in only)])
    begin = time.perf_counter()
    with timing_on(gpu.uuid), _Progress() as progress:
        outcome = run_cases(gpu, cases, store, command, progress.tell)
    write_text_atomically(output, machine_text(outcome.rows, gpu.identity, Path(output).stem))
    lines = [report_text(outcome.rows, gpu.identity, output)]
    if outcome.failed:
        lines.append(f"{len(outcome.failed)} benchmarks failed:")
        lines += [f"  {label}: {reason}" for label, reason in outcome.failed]
    lines.append(
        f"{outcome.measured} measured, {outcome.skipped} already in {store}, {time.perf_counter() - begin:.0f} s; wrote {output}"
    )
    return "\n".join(lines)


class _Progress:
    """A bar with the time left, by the cases' own estimates; plain lines when stderr is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._terminal = sys.stderr.isatty()
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[at]}"), TimeElapsedColumn(),
            TimeRemainingColumn(), console=Console(stderr=True), disable=not self._terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("calibrate", total=1.0, at="")
        self._group = ""

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def tell(self, _stage: str, done: float, total: float, case: str = "", /) -> None:
        """Before a case: ``done`` of ``total`` estimated seconds are behind."""
        group = case.partition("/")[0]
        self._bar.update(self._task, total=total, completed=done, at=case, description=group)
        if not self._terminal and group not in ("", self._group):
            self._group = group
            print(f"calibrate: {group} ({done:.0f} of about {total:.0f} s)", file=sys.stderr, flush=True)
