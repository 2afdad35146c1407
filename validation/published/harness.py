"""For how long the launches behind a published row went on, where its source says: the clock of a row by its harness.

A board lets more power through for some tens of milliseconds than it sustains (`power.reaction_s` of the machine file), so that what
a table shows depends on how often its harness launches the kernel without a rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.chip.evaluate import REGIMES
from tilecast.model.machine.machine import Machine

#: The clock of a row by how long its harness keeps launching (`clock_of`).
RUN = "run"
CLOCKS = (*REGIMES, RUN)


@dataclass(frozen=True, slots=True)
class Harness:
    """What a benchmark does from a rest on, as its script says."""

    name: str
    #: Launches back to back, and seconds that the script fills with launches whatever they take.
    launches: int = 0
    seconds: float = 0.0

    def lasts(self, launch_seconds: float) -> float:
        """Seconds from the first launch to the last one's end."""
        return self.seconds + self.launches * launch_seconds


#: benchmark_flash_attention.py beside both tables: `Timer.timeit(30)`, which warms up with 2 launches.
_TIMEIT = Harness("torch.utils.benchmark, 2 launches and 30 timed", launches=32)
#: benchmark_single_sdpa.py: a profiler is started and stopped around each launch; the rests between them are not stated.
_PROFILED = Harness("a launch at a time under torch.profiler", launches=1)
#: tritonbench's defaults, DEFAULT_WARMUP and DEFAULT_RUN_ITERS of tritonbench/utils/triton_op.py: 25 ms and 100 ms.
_DO_BENCH = Harness("triton.testing.do_bench, 25 ms and 100 ms timed", seconds=0.125)
#: Part of a row's source -> its harness.
_HARNESSES = {
    "benchmark_results.csv@b740542818": _TIMEIT,
    "benchmark_results.csv@7606332572": _TIMEIT,
    "sdpa_benchmark_training/results/": _PROFILED,
    "attention_training/results/": _PROFILED,
    "meta-pytorch/tritonbench PR": _DO_BENCH,
}


def harness_of(source: str) -> Harness | None:
    """The harness of a row by its ``source``; None where that is not known."""
    return next((harness for part, harness in _HARNESSES.items() if part in source), None)


def clock_of(source: str, machine: Machine, launch_seconds: float) -> str:
    """The clock of a row whose launch takes ``launch_seconds``: "short", or how long the launches go on ("434ms").

    Of machines whose limiter's reaction is not known it is "short".  Of unknown harnesses it is that of one launch, which may itself
    last longer than the limiter takes.
    """
    if not machine.has("power.reaction_s"):
        return "short"
    harness = harness_of(source)
    lasts = launch_seconds if harness is None else harness.lasts(launch_seconds)
    return "short" if lasts <= machine["power.reaction_s"] else f"{lasts * 1e3:.0f}ms"
