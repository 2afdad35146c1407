"""Profiles of a plan's kernels: each distinct kernel compiled once, without a GPU, and kept as `KernelCode`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tilecast.base.pool import spread
from tilecast.base.progress import Progress, reported, silent
from tilecast.codegen.compiler.binary import BinaryError, from_cubin
from tilecast.codegen.compiler.compile import CompileError
from tilecast.codegen.compiler.machine_code import ARCH, Made, kernel_code, obstacle
from tilecast.codegen.compiler.opcodes import UnknownOpcodeError
from tilecast.codegen.compiler.sass import MachineCode, compile_and_read
from tilecast.codegen.compiler.structure.assemble import ShapeError, kernel_shape
from tilecast.codegen.compiler.structure.steady import kernel_roles
from tilecast.codegen.generate import generate
from tilecast.model.compiled.code import CodeError, KernelCode
from tilecast.model.compiled.roles.code import KernelRoles
from tilecast.model.families import find_family, parse_variant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

Job = tuple[str, str, Workload, str]


@dataclass(frozen=True, slots=True)
class Profile:
    """What compiling a kernel told: registers and stack bytes a thread, and its code or why it is not read."""

    registers: int
    stack_bytes: int
    code: KernelCode | None = None
    unread: str = ""
    roles: KernelRoles | None = None


def compiler_name() -> str:
    """The compiler that is installed, as profiles name it; PackageNotFoundError where none is."""
    return f"triton {version('triton')}"


def profile_source(source: str, family: str, variant: str, work: Workload, target: str, loops: bool = False) -> Profile:
    """Compile a kernel's file for ``target`` and read it where a simulator could follow it; CompileError where it fails.

    With ``loops`` the steady loops of a kernel are read whose whole tiles are not.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.py"
        file.write_text(source, encoding="utf-8")
        code = compile_and_read(file, target, work.dtype)
    return profile_code(code, family, variant, work, loops)


def profile_code(code: MachineCode, family: str, variant: str, work: Workload, loops: bool = False) -> Profile:
    """The profile of a compiled kernel of ``family``; CompileError where the disassembler does not know its target."""
    used, compiled = code.resources, code.compiled
    unread = obstacle(family, compiled.target)
    if unread and not loops:
        return Profile(used.registers, used.stack_bytes, unread=unread)
    if unread:
        try:
            roles = kernel_roles(kernel_shape(from_cubin(compiled.cubin, family, compiled.target, compiled.name)))
        except (BinaryError, ShapeError, UnknownOpcodeError) as error:
            return Profile(used.registers, used.stack_bytes, unread=str(error))
        return Profile(used.registers, used.stack_bytes, roles=roles)
    made = Made(
        family, variant, (work.head_dim_qk, work.head_dim_v), work.mask, work.dtype, compiled.target, compiler_name(),
        compiled.warps, used.registers, compiled.shared_bytes, used.stack_bytes,
    )  # fmt: skip
    try:
        return Profile(used.registers, used.stack_bytes, kernel_code(code.instructions(), made))
    except CodeError as error:
        return Profile(used.registers, used.stack_bytes, unread=str(error))


def profile(family: str, variant: str, work: Workload, machine: str) -> KernelCode:
    """The code of one variant, compiled for `ARCH`.

    Raises VariantError for a variant that cannot be written, CompileError and CodeError for code that cannot be had or read.
    """
    source = generate(work, load_machine(machine), find_family(family), parse_variant(variant), compiler=None).source
    found = profile_source(source, family, variant, work, ARCH)
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
