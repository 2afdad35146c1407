"""Compile a tuner's candidates without a GPU, in parallel, each kernel once for good: results are kept by source.

What is kept of a kernel is its `KernelCode` (or, for families whose machine code no simulator reads, only registers and
spills), under the SHA-256 of its source, target and compiler.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tilecast.base.files import OutputError, write_text_atomically
from tilecast.base.pool import spread
from tilecast.base.progress import Progress, reported, silent
from tilecast.codegen.compiler.compile import CompileError
from tilecast.codegen.compiler.machine_code import obstacle
from tilecast.codegen.compiler.profile import profile_source
from tilecast.codegen.families import template_of
from tilecast.codegen.generate import generate
from tilecast.model.compiled.code import CodeError, KernelCode, dump_codes, load_codes
from tilecast.model.compiled.forecast import forecast
from tilecast.model.families import find_family
from tilecast.model.kernel.header import without_header
from tilecast.model.kernel.variant import Variant, variant_text
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: Goes up when `codegen.machine_code` reads more from the same code: what was kept before is then read anew.
_READING = "3"


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


def target_of(family: str, variant: Variant, machine: Machine) -> str:
    """The target of `codegen.compile` for a machine; CompileError where there is none."""
    capability = int(machine["chip.compute_capability"])
    suffix = "a" if capability >= 90 else ""
    wanted = f"sm_{capability}{suffix}"
    able = template_of(find_family(family)).targets(variant, machine)
    if wanted not in able:
        raise CompileError(f"{family} is compiled for {', '.join(able)}, not for {machine.name} (sm_{capability})")
    return wanted


def compile_candidates(jobs: Sequence[Job], workers: int, progress: Progress = silent) -> list[CompiledCandidate]:
    """The jobs' results in their order, by ``workers`` processes (0: one a core); failures are results, not exceptions."""
    return list(reported(spread(compile_candidate, jobs, workers), "compile", len(jobs), progress))


def compile_candidate(job: Job) -> CompiledCandidate:
    """Compile one candidate, or find it among those kept, and forecast it from its machine code."""
    try:
        code, facts = _profile(job)
    except (VariantError, CompileError) as error:
        return CompiledCandidate(failure=str(error))
    if code is None:
        return facts
    try:
        cycles = forecast(code, job.workload, job.machine, job.mhz).cycles
    except CodeError as error:
        return replace(facts, unread=f"its machine code cannot be followed: {error}")
    return replace(facts, seconds=cycles / (job.mhz * 1e6))


def _profile(job: Job) -> tuple[KernelCode | None, CompiledCandidate]:
    family = find_family(job.family)
    source = generate(job.workload, job.machine, family, job.variant).source
    target = target_of(job.family, job.variant, job.machine)
    kept = _kept_as(job, source, target)
    if kept is not None and kept.exists():
        found = _load(kept)
        if found is not None:
            return found
    made = profile_source(source, job.family, variant_text(job.variant), job.workload, target)
    facts = CompiledCandidate(registers=made.registers, spill_bytes=made.stack_bytes)
    if made.code is None and not obstacle(job.family, target):
        facts = replace(facts, unread=f"its machine code cannot be read: {made.unread}")
    if kept is not None:
        _keep(kept, made.code, facts)
    return made.code, facts


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def _kept_as(job: Job, source: str, target: str) -> Path | None:
    """The file a kernel's result is kept in; the header (machine, lengths) does not count."""
    if not job.cache:
        return None
    name = "\n".join(
        (_READING, target, job.workload.dtype, _triton(), variant_text(job.variant), without_header(source))
    )
    return Path(job.cache) / f"{job.family}_{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"


def _keep(path: Path, code: KernelCode | None, facts: CompiledCandidate) -> None:
    """Write whole or not at all; a cache that cannot be written is no reason to fail."""
    text = json.dumps({
        "code": dump_codes([code]) if code else None, "unread": facts.unread, "registers": facts.registers,
        "spill_bytes": facts.spill_bytes,
    })  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, text)
    except (OSError, OutputError):
        return


def _load(path: Path) -> tuple[KernelCode | None, CompiledCandidate] | None:
    """What `_keep` wrote; None for a file that is damaged or from another version."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        code = load_codes(raw["code"])[0] if raw["code"] else None
        return code, CompiledCandidate(unread=raw["unread"], registers=raw["registers"], spill_bytes=raw["spill_bytes"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
