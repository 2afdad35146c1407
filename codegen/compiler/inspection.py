"""What a compiled kernel takes and executes: of our own, beside what its forecast says it does; of any other, its shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilecast.codegen.compiler.binary import Binary, from_cubin, read_binary
from tilecast.codegen.compiler.compile import Compiled, CompileError, compile_kernels, load_source
from tilecast.codegen.compiler.flow import SteadyLoop, steady_loops
from tilecast.codegen.compiler.opcodes import MATRIX
from tilecast.codegen.compiler.structure import report as structure
from tilecast.codegen.compiler.structure.assemble import kernel_shape
from tilecast.codegen.compiler.structure.shape import KernelShape
from tilecast.model.families import build_pipeline, find_family, parse_variant
from tilecast.model.kernel.header import header_workload
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.model.pipeline.graph import Pipeline, Role

#: Disagreement between machine code and forecast that is worth a flag.
TOLERANCE = 0.05
_PIPES = ("mufu", "fma", "alu", "tensor", "other")
#: Pipes that the model counts instruction by instruction; "other" it only counts around matrix instructions.
_COMPARED = ("mufu", "fma", "alu")
#: Roles without exponentials, by what only their loops contain.
_SIGNATURES = {"mma": "UTCHMMA", "load": "UTMALDG", "correction": "LDTM"}


@dataclass(frozen=True, slots=True)
class Mix:
    """Warp instructions of one pipe in one iteration of a role's steady loop: compiled and forecast."""

    pipe: str
    compiled: int
    forecast: float | None

    @property
    def difference(self) -> float | None:
        """compiled / forecast - 1; None where the forecast has nothing to compare."""
        return None if not self.forecast else self.compiled / self.forecast - 1.0

    @property
    def flagged(self) -> bool:
        """Whether the two disagree by more than `TOLERANCE`."""
        return self.difference is not None and abs(self.difference) > TOLERANCE + 1e-9


@dataclass(frozen=True, slots=True)
class RoleMix:
    """The steady loop of one warp role."""

    role: str
    instructions: int
    #: Masking instructions that iterations without a mask jump over, not counted in the mix.
    skipped: int
    opcodes: tuple[tuple[str, int], ...]
    mix: tuple[Mix, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """The report of `inspect`."""

    file: str
    target: str
    kernel: str
    #: None here and below where a file of another author does not say.
    registers: int | None
    spill_bytes: int | None
    shared_bytes: int | None
    tmem_columns: int | None
    matrix_instructions: int
    #: Of a generated kernel, whose forecast is known.
    roles: tuple[RoleMix, ...]
    shape: KernelShape


def inspect(path: str | Path, target: str, dtype: str = "bf16", kernel: str | None = None) -> Inspection:
    """Compile ``path`` for ``target`` and read its machine code: of ``kernel`` (a part of its name) where a launch starts several.

    Raises CompileError for what cannot be compiled or disassembled.
    """
    compiled, binary, header = compile_binary(path, target, dtype, kernel)
    instructions = binary.instructions
    return Inspection(
        file=str(path),
        target=target,
        kernel=compiled.name,
        registers=binary.registers,
        spill_bytes=binary.stack_bytes,
        shared_bytes=compiled.shared_bytes,
        tmem_columns=compiled.tmem_columns,
        matrix_instructions=sum(i.opcode in MATRIX for i in instructions),
        roles=tuple(_roles(steady_loops(instructions), header)) if has_pipeline(header) else (),
        shape=kernel_shape(binary, compiled.warps),
    )


def compile_binary(
    path: str | Path, target: str, dtype: str = "bf16", kernel: str | None = None
) -> tuple[Compiled, Binary, dict[str, object]]:
    """A generated kernel compiled for ``target``, its machine code as that of any binary, and its header; CompileError."""
    header = load_source(path).TILECAST
    # Before e4m3 attention a kernel brings V into the matrix unit's order.
    found = [one for one in compile_kernels(path, target, dtype) if one.name != "prepare"]
    compiled = one_of(found, str(path), kernel)
    return compiled, from_cubin(compiled.cubin, str(path), target, compiled.name), header


def one_of(found: Sequence[Compiled], path: str, kernel: str | None) -> Compiled:
    """The kernel that ``kernel`` names, or the only one; CompileError that asks which where there are more."""
    named = [one for one in found if kernel is None or kernel in one.name]
    names = ", ".join(dict.fromkeys(one.name for one in found))
    if not named:
        raise CompileError(f"{path}: expected a kernel '{kernel}', its launch starts {names}")
    if len({one.name for one in named}) > 1:
        raise CompileError(f"{path}: its launch starts {names}: which one? Say --kernel")
    return named[0]


def has_pipeline(header: dict[str, object]) -> bool:
    """Whether a generated file's kernel has a forecast before compilation: forward attention of whole tensors has."""
    return "pass" not in header


def inspect_binary(
    path: str | Path, target: str | None = None, kernel: str | None = None, warps: int | None = None
) -> Inspection:
    """Read the machine code of any CUDA binary (`binary.read_binary`); ``warps`` of a CTA where the file does not say.

    Raises BinaryError, UnknownOpcodeError and ShapeError for what cannot be read, CompileError without the tools.
    """
    binary = read_binary(path, target, kernel)
    return Inspection(
        file=binary.file, target=binary.target, kernel=binary.kernel, registers=binary.registers,
        spill_bytes=binary.stack_bytes, shared_bytes=binary.shared_bytes, tmem_columns=binary.tmem_columns,
        matrix_instructions=sum(i.opcode in MATRIX for i in binary.instructions), roles=(), shape=kernel_shape(binary, warps),
    )  # fmt: skip


def pipeline_of(header: dict[str, object], machine: Machine | None = None) -> Pipeline:
    """The pipeline that a generated file's header describes, on ``machine`` (default: the one it was written for)."""
    family = find_family(str(header["family"]))
    text = str(header["variant"])
    variant = parse_variant(text if text.startswith("family=") else f"family={family.name},{text}")
    return build_pipeline(header_workload(header), variant, machine or load_machine(str(header["machine"])))


def _roles(loops: tuple[SteadyLoop, ...], header: dict[str, object]) -> list[RoleMix]:
    """Steady loops by role: of the loops that can be a role's, the shortest, since masks and rescaling only add."""
    pipeline = pipeline_of(header)
    work = [loop for loop in loops if loop.pipes()["mufu"] >= 8]
    computing = [role for role in pipeline.roles if _per_warp(pipeline, role).get("mufu", 0.0) >= 8]
    found = list(zip(computing, _steady(work, len(computing)), strict=False))
    for role in pipeline.roles:
        mark = _SIGNATURES.get(role.name)
        mine = [loop for loop in loops if mark and loop.opcodes()[mark] and loop not in work]
        if mine:
            found.append((role, min(mine, key=lambda loop: len(loop.instructions))))
    return [_role_mix(pipeline, role, loop) for role, loop in found]


def _role_mix(pipeline: Pipeline, role: Role, loop: SteadyLoop) -> RoleMix:
    expected, counts = _per_warp(pipeline, role), loop.pipes()
    counts["other"] = len(loop.instructions) - sum(counts[pipe] for pipe in _PIPES if pipe != "other")
    mix = tuple(Mix(pipe, counts[pipe], expected.get(pipe) if pipe in _COMPARED else None) for pipe in _PIPES)
    return RoleMix(role.name, len(loop.instructions), loop.skipped, tuple(loop.opcodes().most_common(12)), mix)


def _steady(loops: list[SteadyLoop], roles: int) -> list[SteadyLoop]:
    """One loop a role, in address order: the code of equal roles follows each other, each with its own masked loops."""
    if not loops or not roles:
        return []
    shortest = min(len(loop.instructions) for loop in loops)
    # Copies of one loop differ by a few instructions of address arithmetic; masked ones by many.
    alike = [loop for loop in loops if len(loop.instructions) <= 1.15 * shortest + 8]
    return alike[:roles]


def _per_warp(pipeline: Pipeline, role: Role) -> dict[str, float]:
    """Warp instructions of one iteration of a role, by pipe, as one of its warps executes them."""
    if not role.warps:
        return {}
    share = 4.0 / role.warps
    total: dict[str, float] = {}
    for step in role.program:
        for pipe, count in pipeline.op(step.op).instructions:
            total[pipe] = total.get(pipe, 0.0) + count * share
    return total


def as_dict(report: Inspection) -> dict[str, object]:
    """Plain values for --json."""
    return {
        "file": report.file,
        "arch": report.target,
        "kernel": report.kernel,
        "registers": report.registers,
        "spill_bytes": report.spill_bytes,
        "shared_bytes": report.shared_bytes,
        "tmem_columns": report.tmem_columns,
        "matrix_instructions": report.matrix_instructions,
        "roles": [
            {
                "role": role.role,
                "loop_instructions": role.instructions,
                "skipped_masking_instructions": role.skipped,
                "opcodes": dict(role.opcodes),
                "pipes": {
                    m.pipe: {
                        "compiled": m.compiled,
                        "forecast": m.forecast,
                        "difference": m.difference,
                        "flagged": m.flagged,
                    }
                    for m in role.mix
                },
            }
            for role in report.roles
        ],
        "structure": structure.as_dict(report.shape),
    }


def as_text(report: Inspection) -> str:
    """The report for people."""
    facts = (
        ("registers a thread", report.registers, ""), ("spills", report.spill_bytes, " B"),
        ("shared memory", report.shared_bytes, " B"), ("tensor memory", report.tmem_columns, " columns"),
        ("matrix instructions", report.matrix_instructions, ""),
    )  # fmt: skip
    lines = [
        f"{report.kernel or 'a kernel'} of {report.file}, compiled for {report.target}",
        "  " + "   ".join(f"{name} {value}{unit}" for name, value, unit in facts if value is not None),
    ]
    for role in report.roles:
        beside = f", and {role.skipped} of masking that most iterations jump over" if role.skipped else ""
        if role.role == "correction":
            beside = "; the forecast charges the rescale of O at the share of steps that need one"
        lines.append(f"\n{role.role}: steady loop of {role.instructions} instructions{beside}")
        lines.append(f"  {'pipe':<8}{'compiled':>10}{'forecast':>10}{'difference':>12}")
        for m in role.mix:
            forecast = "-" if m.forecast is None else f"{m.forecast:.0f}"
            difference = "-" if m.difference is None else f"{m.difference:+.1%}"
            flag = f"  more than {TOLERANCE:.0%} apart" if m.flagged else ""
            lines.append(f"  {m.pipe:<8}{m.compiled:>10}{forecast:>10}{difference:>12}{flag}")
        lines.append("  " + " ".join(f"{name} {count}" for name, count in role.opcodes))
    lines += ["", structure.as_text(report.shape)]
    return "\n".join(lines)
