"""How long forecasts take on this machine: warm, cold from a shell, a thousand shapes; each with its target.

python tools/benchmark_speed.py [--shapes N]

Times are those of one core, as CPU time of this process or of its children (a busy machine lengthens them less than the
clock on the wall, which stands beside them).  Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial

from tilecast.model.families import native_family
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine, machine_names
from tilecast.model.search.best import best

_MACHINES = ("h200-sxm", "b200", "b300", "a100")
#: Questions drawn beside the fixed ones.
_DRAWN = 60
_HEADS = ((64, 64), (128, 128), (256, 256), (192, 128))


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """(CPU seconds, seconds on the wall) of one call, children included."""

    def cpu() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + children.ru_utime + children.ru_stime

    began, on_cpu = time.perf_counter(), cpu()
    call()
    return cpu() - on_cpu, time.perf_counter() - began


class Report:
    """Prints a line a figure and remembers whether all met their targets."""

    def __init__(self) -> None:
        self.met = True

    def line(self, what: str, times: list[tuple[float, float]], target: float, *, worst: bool = False) -> None:
        """The median (or the ``worst``) of ``times`` beside the ``target``, all in seconds."""
        pick = max if worst else statistics.median
        cpu, wall = pick(t[0] for t in times), pick(t[1] for t in times)
        met = cpu <= target
        self.met = self.met and met
        shown = [f"{t:8.2f} s " if target >= 1 else f"{t * 1e3:8.1f} ms" for t in (cpu, wall, target)]
        print(f"{what:<58}{shown[0]}  (wall {shown[1].strip()}, target {shown[2].strip()})  {'met' if met else 'MISSED'}", flush=True)  # fmt: skip


def square(seqlen: int, dims: tuple[int, int], mask: str, batch: int = 4) -> Workload:
    """Attention of 16 heads over ``seqlen`` queries and keys."""
    window = (1024, 0) if mask == "window" else None
    return Workload(batch, 16, 16, seqlen, seqlen, *dims, mask, window)


def draw_shapes(count: int, seed: int) -> list[tuple[Workload, str]]:
    """Random shapes over machines, head dimensions, masks and lengths."""
    draw = random.Random(seed)
    out = []
    for _ in range(count):
        seqlen = draw.choice((512, 1024, 2048, 4096, 8192, 16384, 32768)) + draw.choice((0, 0, 0, 100))
        work = square(seqlen, draw.choice(_HEADS), draw.choice(("none", "causal", "window")), draw.choice((1, 2, 4, 8)))
        out.append((work, draw.choice(_MACHINES)))
    return out


def draw_questions(count: int, seed: int) -> list[tuple[Machine, list[Workload]]]:
    """Random questions in the order drawn: a machine, and a workload at one length and at another."""
    draw = random.Random(seed)
    machines = [load_machine(name) for name in machine_names()]
    out = []
    for _ in range(count):
        chip = draw.choice(machines)
        dtype = draw.choice(("bf16", "fp16", *(["fp8"] if chip.has("tensor.fp8_flop_per_clk") else [])))
        mask = draw.choice(("none", "causal", "window"))
        window = draw.choice(((127, 0), (1023, 0), (256, 256))) if mask == "window" else None
        kv, group = draw.choice((1, 2, 4, 8, 16)), draw.choice((1, 1, 4, 8))
        dims, batch = draw.choice((*_HEADS, (96, 96))), draw.choice((1, 2, 4, 8))
        lengths = draw.sample((512, 1000, 2048, 4096, 8192, 16384, 20000, 32768), 2)
        out.append((chip, [Workload(batch, kv * group, kv, n, n, *dims, mask, window, dtype) for n in lengths]))
    return out


def main() -> None:
    """Measure and print; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=int, default=1000, help="how many shapes to forecast (targets scale)")
    parser.add_argument("--seed", type=int, default=1, help="of the questions that are drawn")
    args = parser.parse_args()
    report = Report()
    _kernels(report)
    _drawn(report, args.seed)
    _shell(report)
    _many(report, draw_shapes(args.shapes, 1))
    sys.exit(0 if report.met else 1)


def _kernels(report: Report) -> None:
    """The search for a kernel, and forecasts of a named one, on each machine, mask and head dimension."""
    fresh, later, named, ranged = [], [], [], []
    for name in _MACHINES:
        chip = load_machine(name)
        family = native_family(chip)
        for mask in ("none", "causal"):
            for dims in ((64, 64), (128, 128)):
                first, *again = [
                    timed(partial(best, square(n, dims, mask), chip, family.name)) for n in (4096, 2048, 6000, 8192)
                ]
                fresh.append(first)
                later += again
                longest = max(t[0] for t in again)
                print(f"  {name:<9} {mask:<7} head {dims[0]:<4} first {first[0] * 1e3:7.0f} ms, other lengths up to {longest * 1e3:5.0f} ms", flush=True)  # fmt: skip
                for n in (1024, 4096, 10000):
                    work = square(n, dims, mask, 3)
                    variant = family.published(work, chip)
                    named.append(timed(partial(predict, work, name, variant, interval=False)))
                    first_of_its_loop = n == 1024
                    whole = timed(partial(predict, work, name, variant))
                    if not first_of_its_loop:
                        ranged.append(whole)
    for words, asked in (("first question of a head size and mask", fresh), ("another length", later)):
        report.line(f"best of the whole space, {words}", asked, 0.150)
        report.line("  the slowest of them", asked, 0.150, worst=True)
    report.line("a named variant", named, 0.015)
    report.line("the same with its interval, another length", ranged, 0.015)


def _drawn(report: Report, seed: int) -> None:
    """The search for kernels of questions drawn on all machines."""
    asked = [[timed(partial(best, work, chip)) for work in works] for chip, works in draw_questions(_DRAWN, seed)]
    for words, times in (("first questions", [t[0] for t in asked]), ("other lengths", [t[1] for t in asked])):
        times.sort()
        report.line(f"{_DRAWN} drawn {words} on all machines", times, 0.150)
        report.line("  the slowest but one in twenty", times[: _DRAWN - _DRAWN // 20], 0.150, worst=True)
        report.line("  the slowest of them", times, 0.150, worst=True)


def _shell(report: Report) -> None:
    """`tilecast predict` as a command."""
    for words in (("b200", "--causal"), ("h200-sxm",)):
        command = [
            sys.executable,
            "-m",
            "tilecast.cli",
            "predict",
            "--machine",
            words[0],
            "--seqlen",
            "8192",
            *words[1:],
        ]
        # As after installation, which compiles modules, or a run before: whatever this shell says of bytecode.
        with tempfile.TemporaryDirectory() as folder:
            shell = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
            run = partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL, env=shell)
            _, *cold = [timed(run) for _ in range(6)]
        report.line(f"tilecast predict from a cold shell, {' '.join(words)}", cold, 1.2)


def _many(report: Report, shapes: list[tuple[Workload, str]]) -> None:
    """Forecasts of many shapes one after the other."""
    machines = {name: load_machine(name) for name in _MACHINES}

    def forecast_named() -> None:
        for work, name in shapes:
            variant = native_family(machines[name]).published(work, machines[name])
            predict(work, name, variant, interval=False, compiler=None)

    def forecast_searched() -> None:
        for work, name in shapes:
            predict(work, name, interval=False, compiler=None)

    report.line(f"{len(shapes)} shapes with a named variant", [timed(forecast_named)], 0.020 * len(shapes))
    report.line(f"{len(shapes)} shapes with search", [timed(forecast_searched)], 0.150 * len(shapes))


if __name__ == "__main__":
    main()
