"""What break-evens and maps ask of a pass, as one record each; here the forward pass's, in `training.passes` the backward's.

A pass may launch several kernels: the loop, and the launch, that a question is about is that of the kernel that takes longest
on the machine as it is, called by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilecast.model.chip.evaluate import PredictError, check_clock
from tilecast.model.chip.launch import ChipRun, run_chip
from tilecast.model.closed_forms import ClosedForm, forward_forms
from tilecast.model.families import build_pipeline, legality, loop_shape, native_family
from tilecast.model.forecast.brief import Brief, brief
from tilecast.model.forecast.level import Compiler, search_of, settled
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass as what-if verbs see it; ``variant`` is one of its classes' throughout."""

    #: Value of ``--pass``, and what stands before a shape in headlines.
    name: str
    words: str
    #: (workload, machine, variant or None, family or None, clock, level) -> the variant given, or the best of the family.
    #: PredictError for one that cannot run.
    kernel: Callable[[Workload, Machine, Any, str | None, str | float, Compiler | None], Any]
    #: The one level at which variants are compared (`forecast.level.settled`).
    settled: Callable[[Compiler | None, Workload, Machine, Any, str | None, str | float], Compiler | None]
    brief: Callable[[Workload, Machine, Any, str | float, Compiler | None], Brief]
    #: Name of the kernel that takes longest.
    main: Callable[[Workload, Machine, Any, str | float], str]
    #: (workload, machine, variant, that name) -> its loop, and FLOP of its products for an element of the score tile (None:
    #: those of a forward pass).
    loop: Callable[[Workload, Machine, Any, str], tuple[Pipeline, float | None]]
    #: (workload, machine, variant, that name) -> its launch.
    chip: Callable[[Workload, Machine, Any, str], ChipRun]
    #: Textbook demand of its loop, where there is one for all of its classes.
    forms: Callable[[], tuple[ClosedForm, ...]]


def _kernel(
    workload: Workload, machine: Machine, variant: Variant | None, family: str | None, clock: str | float,
    level: Compiler | None,
) -> Variant:  # fmt: skip
    check_clock(clock, machine)
    if variant is None:
        return search_of(level)(workload, machine, family or native_family(machine).name, clock).variant
    verdict = legality(variant, workload, machine)
    if not verdict.legal:
        raise PredictError(f"{variant.family} cannot run {workload.label()} on {machine.name}: {verdict.sentence()}")
    return variant


def _loop(workload: Workload, machine: Machine, variant: Variant, name: str) -> tuple[Pipeline, float | None]:
    return build_pipeline(loop_shape(workload), variant, machine), None


def _chip(workload: Workload, machine: Machine, variant: Variant, name: str) -> ChipRun:
    return run_chip(workload, variant, build_pipeline(loop_shape(workload), variant, machine), machine)


FORWARD = Pass(
    "fwd", "", _kernel, settled, brief, lambda workload, machine, variant, clock: "kernel", _loop, _chip,
    forward_forms,
)  # fmt: skip
