"""Profiles of a plan's kernels: each distinct kernel compiled once, without a GPU, and kept as `KernelCode`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from tilecast.base.pool import spread
from tilecast.base.progress import Progress, reported, silent
from tilecast.codegen.compiler.compile import CompileError, compile_kernel
from tilecast.codegen.compiler.machine_code import disassemble_with_control, kernel_code
from tilecast.codegen.compiler.sass import resources
from tilecast.codegen.generate import generate
from tilecast.model.compiled.code import CodeError, KernelCode
from tilecast.model.families import find_family, parse_variant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

#: The target whose machine code the simulator reads, and the families it follows.
READ_ARCH = "sm_90a"
READ_FAMILIES = ("hopper_ws", "triton")
Job = tuple[str, str, Workload, str]


@dataclass(frozen=True, slots=True)
class Profile:
    """What compiling a kernel told: registers and stack bytes a thread, and its code or why it is not read."""

    registers: int
    stack_bytes: int
    code: KernelCode | None = None
    unread: str = ""


def profile_source(source: str, family: str, variant: str, work: Workload, target: str) -> Profile:
    """Compile a kernel's file for ``target`` and read it where the simulator could follow it; CompileError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.py"
        file.write_text(source, encoding="utf-8")
        compiled = compile_kernel(file, target, work.dtype)
        cubin = file.with_suffix(".cubin")
        cubin.write_bytes(compiled.cubin)
        used = resources(cubin)
        found = Profile(used.registers, used.stack_bytes)
        if target != READ_ARCH or family not in READ_FAMILIES:
            return replace(
                found, unread=f"{family} for {target} is not read, only {' and '.join(READ_FAMILIES)} for {READ_ARCH}"
            )
        try:
            code = kernel_code(
                disassemble_with_control(cubin), family=family, variant=variant,
                head_dims=(work.head_dim_qk, work.head_dim_v), mask=work.mask, dtype=work.dtype, arch=target,
                compiler=f"triton {version('triton')}", warps=compiled.warps, registers=used.registers,
                shared_bytes=compiled.shared_bytes, stack_bytes=used.stack_bytes,
            )  # fmt: skip
        except CodeError as error:
            return replace(found, unread=str(error))
    return replace(found, code=code)


def profile(family: str, variant: str, work: Workload, machine: str) -> KernelCode:
    """The code of one variant, compiled for `READ_ARCH`.

    Raises VariantError for a variant that cannot be written, CompileError and CodeError for code that cannot be had or read.
    """
    source = generate(work, load_machine(machine), find_family(family), parse_variant(variant)).source
    found = profile_source(source, family, variant, work, READ_ARCH)
    if found.code is None:
        raise CodeError(found.unread)
    return found.code


def profile_all(
    jobs: Iterable[Job], workers: int = 0, progress: Progress = silent
) -> tuple[list[KernelCode], list[str]]:
    """(profiles, one sentence for each kernel that could not be profiled) of the distinct kernels among ``jobs``."""
    distinct: dict[tuple[object, ...], Job] = {}
    for job in jobs:
        family, variant, work, _ = job
        distinct.setdefault((family, variant, work.head_dim_qk, work.head_dim_v, work.mask, work.dtype), job)
    codes, failures = [], []
    for found in reported(spread(_try, list(distinct.values()), workers), "compile", len(distinct), progress):
        if isinstance(found, str):
            failures.append(found)
        else:
            codes.append(found)
    return codes, failures


def _try(job: Job) -> KernelCode | str:
    family, variant, work, _ = job
    try:
        return profile(*job)
    except (VariantError, CompileError, CodeError) as error:
        return f"{family} {variant} at {work.label()}: {error}"
