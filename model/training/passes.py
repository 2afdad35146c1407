"""The backward pass as break-evens and maps ask of it (`model.passes`); always before compilation."""

from __future__ import annotations

from functools import lru_cache

from tilecast.model.backward import BackwardVariant, build_backward
from tilecast.model.chip.launch import ChipRun
from tilecast.model.families import loop_shape
from tilecast.model.forecast.binding import critical_unit
from tilecast.model.forecast.brief import Brief
from tilecast.model.forecast.level import Compiler
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.passes import Pass
from tilecast.model.pipeline.backward.kernels import LoopKernel
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.training.evaluate import evaluate_backward, refuse
from tilecast.model.training.forecast import best_backward, kernel_binding
from tilecast.model.training.launch import run_loop


def _kernel(
    workload: Workload, machine: Machine, variant: BackwardVariant | None, family: str | None, clock: str | float,
    level: Compiler | None,
) -> BackwardVariant:  # fmt: skip
    if variant is None:
        variant, _ = best_backward(workload, machine, family, clock)
    refuse(workload, machine, variant, clock)
    return variant


@lru_cache(maxsize=65536)
def _brief(
    workload: Workload, machine: Machine, variant: BackwardVariant, clock: str | float, level: Compiler | None
) -> Brief:
    run = evaluate_backward(workload, machine, variant, clock)
    assert run.main.loop is not None
    trace = run.main.loop.trace
    bound = kernel_binding(run.main, run.clock, workload, machine)
    return Brief(run.seconds, run.tflops, run.clock.mhz, trace.ii_cycles, bound.name, critical_unit(trace))


def _main(workload: Workload, machine: Machine, variant: BackwardVariant, clock: str | float) -> str:
    return evaluate_backward(workload, machine, variant, clock).main.kernel.name


def _of(workload: Workload, machine: Machine, variant: BackwardVariant, name: str) -> LoopKernel:
    return next(kernel for kernel in build_backward(workload, variant, machine).loops if kernel.name == name)


def _loop(workload: Workload, machine: Machine, variant: BackwardVariant, name: str) -> tuple[Pipeline, float | None]:
    kernel = _of(loop_shape(workload), machine, variant, name)
    return kernel.pipeline, kernel.flop_per_score


def _chip(workload: Workload, machine: Machine, variant: BackwardVariant, name: str) -> ChipRun:
    return run_loop(_of(workload, machine, variant, name), workload, machine).chip


BACKWARD = Pass(
    "bwd", "backward pass of ", _kernel, lambda compiler, *question: None, _brief,
    _main, _loop, _chip, lambda: (),
)  # fmt: skip
