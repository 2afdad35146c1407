"""Compile a tuner's candidates without a GPU, in parallel, each kernel once for good: results are kept by source.

What is kept of a kernel is its `KernelCode` (or, for families whose machine code no simulator reads, only registers and
spills), under the SHA-256 of its source, target and compiler.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tilecast.codegen.compiler.compile import CompileError, compile_kernel
from tilecast.codegen.compiler.machine_code import disassemble_with_control, kernel_code
from tilecast.codegen.compiler.sass import resources
from tilecast.codegen.families import find_family
from tilecast.codegen.generate import generate
from tilecast.model.compiled.code import CodeError, KernelCode, dump_codes, load_codes
from tilecast.model.compiled.forecast import forecast
from tilecast.model.kernel.header import without_header
from tilecast.model.kernel.variant import Variant, VariantError, variant_text
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: The target whose machine code is simulated.
READ_ARCH = "sm_90a"
#: Goes up when `codegen.machine_code` reads more from the same code: what was kept before is then read anew.
_READING = "2"


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


def cache_folder() -> Path:
    """Where compiled candidates are kept: $TILECAST_CACHE, $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("TILECAST_CACHE") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tilecast" / "tuned-kernels"


def target_of(family: str, variant: Variant, machine: Machine) -> str:
    """The target of `codegen.compile` for a machine; CompileError where there is none."""
    capability = int(machine["chip.compute_capability"])
    suffix = "a" if capability >= 90 else ""
    wanted = f"sm_{capability}{suffix}"
    able = find_family(family).targets(variant, machine)
    if wanted not in able:
        raise CompileError(f"{family} is compiled for {', '.join(able)}, not for {machine.name} (sm_{capability})")
    return wanted


def compile_candidates(
    jobs: Sequence[Job], workers: int, progress: Callable[[int, int], None] = lambda *_: None
) -> list[CompiledCandidate]:
    """The jobs' results in their order; failures are results, not exceptions."""
    if workers <= 1 or len(jobs) <= 1:
        out = []
        for done, job in enumerate(jobs, start=1):
            out.append(compile_candidate(job))
            progress(done, len(jobs))
        return out
    found = []
    with multiprocessing.get_context("spawn").Pool(min(workers, len(jobs))) as pool:
        for done, result in enumerate(pool.imap(compile_candidate, jobs, chunksize=1), start=1):
            found.append(result)
            progress(done, len(jobs))
    return found


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
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.py"
        file.write_text(source, encoding="utf-8")
        compiled = compile_kernel(file, target, job.workload.dtype)
        cubin = file.with_suffix(".cubin")
        cubin.write_bytes(compiled.cubin)
        used = resources(cubin)
        facts = CompiledCandidate(registers=used.registers, spill_bytes=used.stack_bytes)
        code: KernelCode | None = None
        if target == READ_ARCH and job.family in ("hopper_ws", "triton"):
            work = job.workload
            try:
                code = kernel_code(
                    disassemble_with_control(cubin), family=job.family, variant=variant_text(job.variant),
                    head_dims=(work.head_dim_qk, work.head_dim_v), mask=work.mask, dtype=work.dtype, arch=target,
                    compiler=f"triton {_triton()}", warps=compiled.warps, registers=used.registers,
                    shared_bytes=compiled.shared_bytes, stack_bytes=used.stack_bytes,
                )  # fmt: skip
            except CodeError as error:
                facts = replace(facts, unread=f"its machine code cannot be read: {error}")
    if kept is not None:
        _keep(kept, code, facts)
    return code, facts


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def _kept_as(job: Job, source: str, target: str) -> Path | None:
    """The file a kernel's result is kept in; the header (machine, lengths) does not count."""
    if not job.cache:
        return None
    name = "\n".join((_READING, target, job.workload.dtype, _triton(), variant_text(job.variant), without_header(source)))
    return Path(job.cache) / f"{job.family}_{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"


def _keep(path: Path, code: KernelCode | None, facts: CompiledCandidate) -> None:
    """Write whole or not at all; a cache that cannot be written is no reason to fail."""
    text = json.dumps({
        "code": dump_codes([code]) if code else None, "unread": facts.unread, "registers": facts.registers,
        "spill_bytes": facts.spill_bytes,
    })  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        return


def _load(path: Path) -> tuple[KernelCode | None, CompiledCandidate] | None:
    """What `_keep` wrote; None for a file that is damaged or from another version."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        code = load_codes(raw["code"])[0] if raw["code"] else None
        return code, CompiledCandidate(unread=raw["unread"], registers=raw["registers"], spill_bytes=raw["spill_bytes"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
