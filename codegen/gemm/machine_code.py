"""The machine code of a GEMM variant, compiled once for good without a GPU: what `tilecast gemm --level code` forecasts from."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tilecast.base.files import cache_folder
from tilecast.codegen.compiler.binary import BinaryError, from_cubin
from tilecast.codegen.compiler.compile import CompileError
from tilecast.codegen.compiler.kept import FOLDER, triton_version
from tilecast.codegen.compiler.opcodes import UnknownOpcodeError
from tilecast.codegen.compiler.records import keep, kept, record_file
from tilecast.codegen.compiler.sass import compile_and_read
from tilecast.codegen.compiler.structure.assemble import ShapeError, kernel_shape
from tilecast.codegen.compiler.structure.steady import kernel_roles
from tilecast.codegen.gemm.generate import TARGETS, generate_gemm
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.compiled.code import CodeError
from tilecast.model.compiled.roles.store import dump_roles, load_roles
from tilecast.model.gemm.code import GemmCode
from tilecast.model.gemm.variant import GemmVariant
from tilecast.model.gemm.workload import Gemm
from tilecast.model.kernel.header import without_header
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.machine.machine import Machine

#: Goes up when more is read from the same code: what was kept before is then read anew.
_READING = "2"
#: The family whose kernels' code is followed.
FOLLOWED = "gemm_hopper"


def compiled_gemm(gemm: Gemm, machine: Machine, variant: GemmVariant) -> GemmCode:
    """The machine code of ``variant`` for ``machine``, from tilecast's cache or compiled here.

    Raises PredictError for a kernel that is not written or followed, and where no compiler is installed.
    """
    if variant.family != FOLLOWED or machine.arch not in TARGETS[FOLLOWED]:
        raise PredictError(f"machine code of {FOLLOWED} kernels for {', '.join(TARGETS[FOLLOWED])} is followed, got {variant.family} for {machine.arch}: use --level fluid")  # fmt: skip
    try:
        source = generate_gemm(gemm, machine, variant).source
        target = machine.arch
        file = record_file(cache_folder(FOLDER), FOLLOWED, _READING, target, triton_version(), without_header(source))
        if (found := kept(file, lambda record: _code(target, record))) is None:
            found = _made(source, target, gemm.dtype)
            keep(file, _record(found))
        return found
    except (CompileError, CodeError, VariantError) as error:
        raise PredictError(f"no machine code of this kernel: {error}: use --level fluid") from None


def _made(source: str, target: str, dtype: str) -> GemmCode:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.py"
        file.write_text(source, encoding="utf-8")
        code = compile_and_read(file, target, dtype)
    made = code.compiled
    try:
        roles = kernel_roles(kernel_shape(from_cubin(made.cubin, FOLLOWED, made.target, made.name)))
    except (BinaryError, ShapeError, UnknownOpcodeError) as error:
        raise CodeError(str(error)) from None
    return GemmCode(target, f"Triton {triton_version()}", code.resources.registers, code.resources.stack_bytes, roles)


def _record(made: GemmCode) -> dict[str, Any]:
    return {
        "compiler": made.compiler, "registers": made.registers, "stack_bytes": made.stack_bytes,
        "roles": dump_roles([("", made.roles)]),
    }  # fmt: skip


def _code(target: str, record: dict[str, Any]) -> GemmCode:
    roles = load_roles(record["roles"])[""]
    return GemmCode(target, record["compiler"], record["registers"], record["stack_bytes"], roles)
