"""What tools that measure share: a table that grows row by row, L2 filled before each launch, kernels in turns, graphs, the host's time."""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

#: What evicts L2: more than it holds.
EVICT_BYTES = 256 << 20
#: How L2 can be filled.
EVICTIONS = ("writing", "reading", "writing, then reading")
#: Of the GPU's clocks, what a launch waits for behind the eviction: the host must be ahead, or its own time is measured.
FILLER_CYCLES = 100_000
Call = Callable[[], Any]
#: Adds a row to a table.
Add = Callable[[Mapping[str, Any]], None]
T = TypeVar("T")


def nvidia_smi(field: str) -> str:
    """A field of nvidia-smi --query-gpu of the first GPU."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "--id=0"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measured_on() -> dict[str, str]:
    """What all rows of a table have in common: the GPU, the day, and versions."""
    import torch
    import triton

    return {
        "gpu": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(), "driver": nvidia_smi("driver_version"),
        "torch": torch.__version__, "triton": triton.__version__,
    }  # fmt: skip


def by_sdpa(backend: str, causal: bool) -> Callable[[Any, Any, Any], Any]:
    """PyTorch's attention by the CUDNN or FLASH backend: (q, k, v) -> out, each (batch, heads, seqlen, head_dim); causal masks begin top left."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(getattr(SDPBackend, f"{backend}_ATTENTION")):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return attend


@contextmanager
def csv_table(path: str | Path, fields: Sequence[str], *, more: bool = False) -> Iterator[Add]:  # fmt: skip
    """A CSV with ``fields``, those of `measured_on` filled in, as a function that adds a row and leaves it on the disk;
    with ``more`` to those of a table that is there."""
    same = {name: value for name, value in measured_on().items() if name in fields}
    with open(path, "a" if more else "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        if not more:
            writer.writeheader()

        def add(row: Mapping[str, Any]) -> None:
            writer.writerow({**same, **row})
            file.flush()

        yield add


def share_of(problems: Sequence[T], share: str, only: str | None = None) -> list[tuple[int, T]]:
    """Of numbered problems, those of the numbers ``only`` ("3,17"; None: all), and of these a share "NUMBER/OF": each OF-th from the
    NUMBER-th on."""
    wanted = None if only is None else set(map(int, only.split(",")))
    first, each = map(int, share.split("/"))
    return [(i, problem) for i, problem in enumerate(problems) if wanted is None or i in wanted][first::each]


def listing(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Arguments of a tool that measures a list of problems, medians of ``rounds`` where none are given."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--share", default="0/1", help="NUMBER/OF: each OF-th problem from the NUMBER-th on")
    return parser


def tabulate(given: argparse.Namespace, fields: Sequence[str], problems: Sequence[T], measure: Callable[[T], Iterable[Mapping[str, Any]]]) -> None:  # fmt: skip
    """The rows of each problem that ``given`` (`listing`) asks for, added to the table and printed."""
    with csv_table(given.out, fields) as add:
        for _, problem in share_of(problems, given.share):
            for row in measure(problem):
                add(row)
                print(row, flush=True)


def drawing(description: str | None, count: int, rounds: int) -> argparse.ArgumentParser:
    """Arguments of a tool that measures problems drawn by a rule: ``count`` of them, medians of ``rounds``, where none are given."""
    parser = listing(description, rounds)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--only", help="numbers of problems, with commas between (default: all)")
    parser.add_argument("--seconds", type=float, default=1000, help="begin no problem after so many seconds")
    return parser


def measured(
    given: argparse.Namespace, fields: Sequence[str], problems: Sequence[T], measure: Callable[[T], Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Rows of the problems that ``given`` (`drawing`) asks for, each of them added to the table, printed and given; one that fails says so
    in its ``note``."""
    import torch

    begin = time.monotonic()
    with csv_table(given.out, fields) as add:
        for number, problem in share_of(problems, given.share, given.only):
            if time.monotonic() - begin > given.seconds:
                print(f"out of time before {number}")
                return
            row: dict[str, Any] = {"number": number}
            try:
                row |= measure(problem)
            except Exception as error:
                row["note"] = f"{problem}: {type(error).__name__}: {first_line(error)}"
            add({"seed": given.seed, **row})
            print(row, flush=True)
            yield row
            torch.cuda.empty_cache()


def first_line(error: BaseException) -> str:
    """What an error says, without where and why."""
    return (str(error).splitlines() or [""])[0][:160]


def geometric_summary(speedups: Sequence[float]) -> str:
    """Mean, least and how many of a table's ratios of times."""
    if not speedups:
        return "no problem"
    mean = math.exp(statistics.fmean(map(math.log, speedups)))
    return f"{len(speedups)} problems: {mean:.3f} geometric mean, least {min(speedups)}, {sum(x < 0.97 for x in speedups)} below 0.97"


def evicting() -> Any:
    """Numbers that fill L2 (`fill_l2`)."""
    import torch

    return torch.zeros(EVICT_BYTES // 4, dtype=torch.int32, device="cuda")


def fill_l2(evict: Any, by: str) -> None:
    """Evict what L2 holds: ``evict``, more than it holds, is written ("writing"), read ("reading"), or written and a quarter of it read."""
    if by != "reading":
        evict.zero_()
    if by != "writing":
        (evict if by == "reading" else evict[: len(evict) // 4]).amax()


def graph_of(call: Call, launches: int = 1, stream: Any = None) -> Any:
    """A CUDA graph of so many calls, captured after two runs; on ``stream``, or on one of its own."""
    import torch

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(launches):
            call()
    return graph


def times_us(graphs: Mapping[str, Any], rounds: int, evict: Any, by: str = EVICTIONS[0]) -> dict[str, list[float]]:
    """Microseconds of each graph, in turns whose order is drawn anew each round: one that always follows another runs at the clock
    that the other left, 3 % apart where power limits it.  L2 is filled before each (`fill_l2`)."""
    import torch

    draw, names = random.Random(0), list(graphs)

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name in draw.sample(names, len(names)):
            fill_l2(evict, by)
            torch.cuda._sleep(FILLER_CYCLES)
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) * 1e3)
    return found


def in_turns(
    runs: Sequence[Call], rounds: int, evict: Any, *, warmup: int = 2, filler: int = FILLER_CYCLES, back: bool = False
) -> list[list[float]]:
    """Milliseconds of each in the order of the rounds, all of them queued before the first is read: a round times all, every second one
    in the opposite order where they go ``back``; L2 is written full and the queue held up by ``filler`` cycles before each."""
    import torch

    for run in runs:
        for _ in range(warmup):
            run()
    torch.cuda.synchronize()
    events: list[list[tuple[Any, Any]]] = [[] for _ in runs]
    for turn in range(rounds):
        there = list(range(len(runs)))
        for which in there[::-1] if back and turn % 2 else there:
            evict.zero_()
            if filler:
                torch.cuda._sleep(filler)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            runs[which]()
            end.record()
            events[which].append((begin, end))
    torch.cuda.synchronize()
    return [[begin.elapsed_time(end) for begin, end in found] for found in events]


def host_us(call: Call, count: int = 50) -> float:
    """Microseconds of the host a call takes outside a graph, least of five runs of ``count``."""
    import torch

    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - start) / count * 1e6)
    torch.cuda.synchronize()
    return best
