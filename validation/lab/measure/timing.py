"""Time launches so that neither the host, the L2, the clock nor the order of kernels shows in the figure.

A sample is one replay of a CUDA graph: stamp, n launches over rotating copies of the inputs, stamp.  n is chosen so that
a sample lasts some milliseconds; the cost of a graph with the stamps alone is taken off.  Kernels of a shape take turns,
sample by sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilecast.validation.lab.measure.stamps import Stamps

#: A sample lasts at least this long, so that stamps (their timer ticks in microseconds on some GPUs) do not matter.
SAMPLE_S = 2e-3
MOST_LAUNCHES = 256


@dataclass(frozen=True)
class Samples:
    """Cycles and seconds of one launch, round by round."""

    cycles: tuple[float, ...]
    seconds: tuple[float, ...]
    launches: int


class Timed:
    """A kernel captured for timing; ``sample()`` replays it once.  Falls back to plain launches where capture fails."""

    def __init__(self, launches: Sequence[Callable[[], None]], count: int, device: torch.device) -> None:
        self.count = count
        self.stamps = Stamps(device)
        self._launches = launches
        self._graph: Any = None
        self._run()
        torch.cuda.synchronize()
        if count == 0:
            self._capture()
            return
        try:
            self._capture()
        except RuntimeError:
            # Some libraries synchronise or allocate during capture; the queue filler then hides the host instead.
            torch.cuda.synchronize()
            self._graph = None

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        self._graph = graph

    def _run(self) -> None:
        self.stamps.begin()
        for i in range(self.count):
            self._launches[i % len(self._launches)]()
        self.stamps.end()

    def start(self) -> None:
        """Queue one sample."""
        if self._graph is not None:
            self._graph.replay()
        else:
            torch.cuda._sleep(200_000 * max(1, self.count))
            self._run()

    def sample(self) -> tuple[float, float]:
        """(cycles, seconds) between the stamps of one replay."""
        self.start()
        torch.cuda.synchronize()
        return self.stamps.read()


def launches_for(run: Callable[[], None], device: torch.device, least_s: float = SAMPLE_S) -> int:
    """How many launches make a sample of ``least_s``; runs the kernel a few times (which also warms it up)."""
    run()
    torch.cuda.synchronize()
    probe = Stamps(device)
    probe.begin()
    run()
    probe.end()
    torch.cuda.synchronize()
    _, seconds = probe.read()
    return max(1, min(MOST_LAUNCHES, int(least_s / max(seconds, 1e-6)) + 1))


def stamps_alone(device: torch.device, rounds: int = 21) -> tuple[float, float]:
    """Median (cycles, seconds) of a graph that holds only the two stamps."""
    empty = Timed([], 0, device)
    found = sorted(empty.sample() for _ in range(rounds))
    return found[rounds // 2][0], sorted(s for _, s in found)[rounds // 2]


def interleaved(
    kernels: Sequence[Timed], rounds: int, alone: tuple[float, float], warm: int = 2,
    at: Callable[[int], None] = lambda _: None,
) -> list[Samples]:  # fmt: skip
    """Samples of every kernel, taken in turns; the first ``warm`` rounds are dropped.  ``at`` hears whose turn it is."""
    taken: list[list[tuple[float, float]]] = [[] for _ in kernels]
    for number in range(rounds + warm):
        for index, (timed, mine) in enumerate(zip(kernels, taken, strict=True)):
            at(index)
            found = timed.sample()
            if number >= warm:
                mine.append(found)
    return [
        Samples(
            tuple((c - alone[0]) / timed.count for c, _ in mine), tuple((s - alone[1]) / timed.count for _, s in mine),
            timed.count,
        )
        for timed, mine in zip(kernels, taken, strict=True)
    ]  # fmt: skip


def sustained(timed: Timed, settle_s: float, measure_s: float, watch: Any) -> Samples:
    """Back-to-back replays: ``settle_s`` unmeasured, then samples for ``measure_s`` under ``watch`` (a context)."""
    # Several replays are queued at a time, so that the GPU never waits for the host.
    begin = time.perf_counter()
    while time.perf_counter() - begin < settle_s:
        for _ in range(4):
            timed.start()
        torch.cuda.synchronize()
    cycles, seconds = [], []
    with watch:
        begin = time.perf_counter()
        while time.perf_counter() - begin < measure_s:
            for _ in range(8):
                timed.start()
            torch.cuda.synchronize()
            c, s = timed.stamps.read()
            cycles.append(c / timed.count)
            seconds.append(s / timed.count)
    return Samples(tuple(cycles), tuple(seconds), timed.count)
