"""The one reader of listings: instructions of a cubin with their control words and branch targets, and its resources."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tilecast.codegen.compiler.compile import Compiled, CompileError, compile_kernel, tool

_FIRST = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*(.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/"
)
_SECOND = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"\.L_x_\d+")
_GUARD = re.compile(r"^!?U?P\d\b")
#: nvdisasm's remarks inside an instruction, such as the targets of an indirect branch.
_REMARK = re.compile(r'\s*\(\*".*?"\*\)')
#: Opcodes after which a warp does not go on with the next instruction, unless they are predicated.
_ENDS = frozenset(("EXIT", "RET", "BRX", "JMX"))


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction: byte address, opcode, modifiers (".64x128x16"), operands and predicate ("@!P0" or "")."""

    address: int
    opcode: str
    modifiers: str = ""
    operands: str = ""
    predicate: str = ""
    #: Bits 105 to 125 of the encoding: stall count, yield, counters raised and waited for.
    control: int = 0
    #: Addresses that a branch names.
    targets: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """Opcode, modifiers and operands as the disassembler writes them."""
        return f"{self.opcode}{self.modifiers} {self.operands}".rstrip()

    @property
    def target(self) -> int | None:
        """Address that a direct branch goes to."""
        return self.targets[0] if self.opcode == "BRA" and self.targets else None

    @property
    def conditional(self) -> bool:
        """Whether it may do nothing: under a predicate, or a branch with one among its operands."""
        return bool(self.predicate) or (self.opcode == "BRA" and _GUARD.match(self.operands) is not None)

    @property
    def goes_on(self) -> bool:
        """Whether the next instruction can follow."""
        return self.conditional or not (self.opcode in _ENDS or self.target is not None)


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel takes: registers and stack bytes (spills) a thread."""

    registers: int
    stack_bytes: int


@dataclass(frozen=True, slots=True)
class MachineCode:
    """A kernel as compiled, and what it takes."""

    compiled: Compiled
    resources: Resources

    def instructions(self) -> tuple[Instruction, ...]:
        """Its listing; CompileError where the disassembler at hand does not know the target."""
        return disassemble(self.compiled.cubin)


def compile_and_read(path: str | Path, target: str, dtype: str = "bf16") -> MachineCode:
    """Compile the kernel of ``path`` for ``target`` without a GPU; CompileError for what cannot be compiled or read."""
    compiled = compile_kernel(path, target, dtype)
    return MachineCode(compiled, resources(compiled.cubin))


def resources(cubin: bytes) -> Resources:
    """Registers and stack of the one kernel in ``cubin``; CompileError where the tool reports none."""
    text = _run("cuobjdump", "--dump-resource-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise CompileError("cuobjdump reports no resources of the compiled kernel")
    return Resources(int(found.group(1)), int(found.group(2)))


def disassemble(cubin: bytes) -> tuple[Instruction, ...]:
    """Instructions of the one kernel in ``cubin``, in address order; CompileError when there are none."""
    return parse_listing(_run("nvdisasm", "-c", cubin, "-hex"))


def parse_listing(text: str) -> tuple[Instruction, ...]:
    """Instructions of a listing of ``nvdisasm -c -hex``; CompileError when there are none."""
    rows: list[tuple[re.Match[str], int, list[str]]] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    first: re.Match[str] | None = None
    for line in text.splitlines():
        label = _LABEL.match(line)
        if label:
            waiting.append(label.group(1))
            continue
        found = _FIRST.match(line)
        if found:
            first = found
            labels.update(dict.fromkeys(waiting, int(found.group(1), 16)))
            waiting.clear()
            continue
        second = _SECOND.match(line)
        if second and first:
            rows.append((first, int(second.group(1), 16) >> 41, _TARGET.findall(first.group(5))))
            first = None
    if not rows:
        raise CompileError(f"nvdisasm printed no instructions: {text.strip()[:200] or 'nothing at all'}")
    return tuple(
        Instruction(
            int(found.group(1), 16), found.group(3), found.group(4), _REMARK.sub("", found.group(5)), found.group(2) or "",
            control, tuple(labels[name] for name in named if name in labels),
        )
        for found, control, named in rows
    )  # fmt: skip


def _run(program: str, option: str, cubin: bytes, *more: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run(
            [str(tool(program)), option, *more, str(file)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        reason = done.stderr.strip().splitlines()
        raise CompileError(f"{program}: {reason[0] if reason else 'failed'}")
    return done.stdout
