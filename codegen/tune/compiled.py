"""Compile a tuner's candidates without a GPU, in parallel, each kernel once for good (`codegen.compiler.kept`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilecast.base.pool import spread
from tilecast.base.progress import Progress, reported, silent
from tilecast.codegen.compiler.compile import CompileError
from tilecast.codegen.compiler.kept import kept_profile, target_of
from tilecast.codegen.compiler.machine_code import obstacle
from tilecast.model.compiled.code import CodeError
from tilecast.model.compiled.forecast import forecast
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine


@dataclass(frozen=True, slots=True)
class CompiledCandidate:
    """What compiling a candidate found; ``seconds`` from its machine code, None where that cannot be read (``unread``)."""

    failure: str = ""
    unread: str = ""
    seconds: float | None = None
    registers: int | None = None
    spill_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One candidate to compile for a machine and to forecast at a clock."""

    family: str
    variant: Variant
    workload: Workload
    machine: Machine
    mhz: float
    cache: str


def compile_candidates(jobs: Sequence[Job], workers: int, progress: Progress = silent) -> list[CompiledCandidate]:
    """The jobs' results in their order, by ``workers`` processes (0: one a core); failures are results, not exceptions."""
    return list(reported(spread(compile_candidate, jobs, workers), "compile", len(jobs), progress))


def compile_candidate(job: Job) -> CompiledCandidate:
    """Compile one candidate, or find it among those kept, and forecast it from its machine code."""
    try:
        made = kept_profile(job.family, job.variant, job.workload, job.machine, job.cache)
        target = target_of(job.family, job.variant, job.machine)
    except (VariantError, CompileError) as error:
        return CompiledCandidate(failure=str(error))
    facts = CompiledCandidate(registers=made.registers, spill_bytes=made.stack_bytes)
    if made.code is None:
        unread = "" if obstacle(job.family, target) else f"its machine code cannot be read: {made.unread}"
        return replace(facts, unread=unread)
    try:
        cycles = forecast(made.code, job.workload, job.machine, job.mhz).cycles
    except CodeError as error:
        return replace(facts, unread=f"its machine code cannot be followed: {error}")
    return replace(facts, seconds=cycles / (job.mhz * 1e6))
