"""Read machine code: resources of a kernel and its instruction mix, per warp role.

A warp-specialised kernel is one function whose roles are separate stretches of code; each starts where the warps of the
role change their register budget (USETMAXREG).  Loops are found by their backward branches.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilecast.codegen.compiler.compile import CompileError, tool

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.[A-Za-z0-9_]+)*)(.*?);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_BRANCH = re.compile(r"`\((\.L_x_\d+)\)")

#: Hardware unit of an opcode, in the model's names; the rest is "other".
PIPE_OF = {
    "mufu": ("MUFU",),
    "fma": ("FFMA", "FMUL", "FADD", "FFMA2", "FMUL2", "FADD2"),
    "alu": ("FMNMX", "FMNMX3", "FSEL", "FSETP", "LOP3", "ISETP", "SEL", "F2FP", "PRMT", "SHF", "VIADD", "LEA", "PLOP3"),
    "tensor": ("HGMMA", "UTCHMMA", "HMMA", "UTCQMMA"),
}
_PIPE = {opcode: pipe for pipe, opcodes in PIPE_OF.items() for opcode in opcodes}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction: byte address, opcode, modifiers, operands, and the predicate it is under ("@!P0" or "")."""

    address: int
    opcode: str
    modifiers: str
    operands: str
    predicate: str = ""


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop without inner loops: its instructions from the branch target to the branch."""

    begin: int
    end: int
    #: What every iteration executes: without stretches of masking code that a branch skips where no mask is needed.
    instructions: tuple[Instruction, ...]
    #: Instructions of those stretches.
    skipped: int = 0

    def opcodes(self) -> Counter[str]:
        """Instructions by opcode."""
        return Counter(i.opcode for i in self.instructions)

    def pipes(self) -> Counter[str]:
        """Instructions by the model's pipes (mufu, fma, alu, tensor, other)."""
        return Counter(_PIPE.get(i.opcode, "other") for i in self.instructions)


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel takes: registers and stack bytes (spills) a thread."""

    registers: int
    stack_bytes: int


def resources(cubin: Path) -> Resources:
    """Registers and stack of the one kernel in ``cubin``."""
    text = _run(tool("cuobjdump"), "--dump-resource-usage", str(cubin))
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise CompileError(f"{cubin}: cuobjdump reports no resources")
    return Resources(int(found.group(1)), int(found.group(2)))


def disassemble(cubin: Path) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    """(instructions in order, label -> index of the instruction it stands before)."""
    text = _run(tool("nvdisasm"), "-c", str(cubin))
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label = _LABEL.match(line)
        if label:
            labels[label.group(1)] = len(instructions)
            continue
        found = _INSTRUCTION.match(line)
        if found:
            address, predicate, opcode, modifiers, operands = found.groups()
            instructions.append(Instruction(int(address, 16), opcode, modifiers, operands, (predicate or "").strip()))
    if not instructions:
        raise CompileError(f"{cubin}: nvdisasm printed no instructions")
    return tuple(instructions), labels


#: Loops shorter than this wait for a barrier; they do not make the loop around them an outer one.
_SPIN = 16


def inner_loops(instructions: tuple[Instruction, ...], labels: dict[str, int]) -> tuple[Loop, ...]:
    """Loops that contain no other loop but waits, in address order."""
    spans = []
    for index, instruction in enumerate(instructions):
        target = _BRANCH.search(instruction.operands) if instruction.opcode == "BRA" else None
        if target and labels.get(target.group(1), index + 1) <= index:
            begin = labels[target.group(1)]
            if index - begin >= _SPIN:
                spans.append((begin, index))
    inner = [
        (begin, end)
        for begin, end in spans
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in spans)
    ]
    return tuple(_loop(begin, end, instructions, labels) for begin, end in sorted(set(inner)))


#: Selects in a stretch that make it masking code, and the length from which leaving it out matters.
_MASKING_SELECTS, _MASKING_LENGTH = 16, 48


def hides_scores(opcodes: Sequence[str]) -> bool:
    """Whether a stretch of code masks scores and does nothing else: many selects and no exponential."""
    selects = sum(opcode in ("FSEL", "SEL") for opcode in opcodes)
    return len(opcodes) >= _MASKING_LENGTH and selects >= _MASKING_SELECTS and "MUFU" not in opcodes


def _loop(begin: int, end: int, instructions: tuple[Instruction, ...], labels: dict[str, int]) -> Loop:
    """The loop [begin, end] without the masking code that its branches jump over."""
    left_out: set[int] = set()
    for index in range(begin, end):
        target = _BRANCH.search(instructions[index].operands) if instructions[index].opcode == "BRA" else None
        after = labels.get(target.group(1), 0) if target else 0
        stretch = range(index + 1, min(after, end))
        if hides_scores([instructions[i].opcode for i in stretch]):
            left_out.update(stretch)
    kept = tuple(instructions[i] for i in range(begin, end + 1) if i not in left_out)
    return Loop(begin, end, kept, len(left_out))


def _run(program: Path, *arguments: str) -> str:
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()
        raise CompileError(f"{program.name}: {reason[0] if reason else 'failed'}")
    return done.stdout
