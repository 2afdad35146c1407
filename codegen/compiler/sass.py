"""The one reader of listings: instructions of a cubin with their control words and branch targets, and its resources."""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tilecast.codegen.compiler.compile import Compiled, CompileError, compile_kernel, tool

#: An instruction, and the first half of its encoding where the disassembler was asked for it.
_FIRST = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*(.*?)\s*;\s*(/\* 0x[0-9a-f]{16} \*/)?\s*$"
)
_SECOND = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"\.L_x_\d+")
#: cuobjdump -sass writes addresses where nvdisasm writes labels.
_PLACE = re.compile(r"\b0x([0-9a-f]+)$")
_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)|^\s*Function : (\S+)")
_ARCH = re.compile(r"^\s*\.target\s+(sm_\w+)|EF_CUDA_SM(\d+)\b")
_GUARD = re.compile(r"^!?U?P\d\b")
#: nvdisasm's remarks inside an instruction, such as the targets of an indirect branch.
_REMARK = re.compile(r'\s*\(\*".*?"\*\)')
#: Opcodes after which a warp does not go on with the next instruction, unless they are predicated.
_ENDS = frozenset(("EXIT", "RET", "BRX", "BRXU", "JMX", "JMXU", "KILL"))


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
    def scheduling(self) -> tuple[int, int, int, int]:
        """From the control word: cycles before the warp's next instruction (at least 1), mask of the counters that it waits for,
        counter that it raises for its result, and for its operands (7: none)."""
        control = self.control
        return max(1, control & 15), control >> 11 & 63, control >> 5 & 7, control >> 8 & 7

    @property
    def text(self) -> str:
        """Opcode, modifiers and operands as the disassembler writes them."""
        return f"{self.opcode}{self.modifiers} {self.operands}".rstrip()

    @property
    def target(self) -> int | None:
        """Address that a direct branch goes to."""
        return self.targets[0] if self.opcode == "BRA" and self.targets else None

    @property
    def taken_together(self) -> bool | None:
        """Whether a branch that asks if the warp's lanes run together (DIV, CONV) is taken where they do; None of all else."""
        forms = self.modifiers.split(".") if self.opcode == "BRA" else ()
        return False if "DIV" in forms else True if "CONV" in forms else None

    @property
    def conditional(self) -> bool:
        """Whether it may do nothing: under a predicate, or a branch with one among its operands or one on divergence."""
        return bool(self.predicate) or (
            self.opcode == "BRA" and (self.taken_together is not None or _GUARD.match(self.operands) is not None)
        )

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


def resources(cubin: bytes, kernel: str = "") -> Resources:
    """Registers and stack of ``kernel`` (default: the one kernel) in ``cubin``; CompileError where the tool reports none."""
    text = _run("cuobjdump", "--dump-resource-usage", cubin)
    found = re.search(
        rf"Function {re.escape(kernel)}:\s+REG:(\d+) STACK:(\d+)" if kernel else r"REG:(\d+) STACK:(\d+)", text
    )
    if found is None:
        raise CompileError("cuobjdump reports no resources of the compiled kernel")
    return Resources(int(found.group(1)), int(found.group(2)))


def disassemble(cubin: bytes, kernel: str = "", symbol: int = -1) -> tuple[Instruction, ...]:
    """Instructions of ``kernel`` (default: the one kernel) in ``cubin``, in address order; CompileError when there are none.

    ``symbol`` is its place in the table of symbols, where that is known: libraries hold hundreds of kernels, and only one is
    disassembled then.
    """
    alone = ("-fun", str(symbol)) if symbol >= 0 else ()
    text = _run("nvdisasm", "-c", cubin, "-hex", *alone)
    if kernel:
        text = next((part.text for part in split_listing(text) if part.kernel == kernel), "")
    return parse_listing(text)


@dataclass(frozen=True, slots=True)
class Listing:
    """A kernel's part of a listing; ``target`` as the disassembler names it, "" where it does not."""

    kernel: str
    target: str
    text: str


def split_listing(text: str) -> tuple[Listing, ...]:
    """The kernels of a listing of ``nvdisasm -c`` or ``cuobjdump -sass``; one without a name where no header says more."""
    target, name, begun = "", "", False
    parts: list[tuple[str, str, list[str]]] = [("", "", [])]
    for line in text.splitlines():
        arch, section = _ARCH.search(line), _SECTION.match(line)
        if arch:
            plain = "" if not arch.group(2) else f"sm_{arch.group(2)}"
            target = arch.group(1) or (target if target.startswith(plain) else plain)
            parts[-1] = (parts[-1][0], target if begun else "", parts[-1][2])
        if section:
            name, begun = section.group(1) or section.group(2), True
            parts.append((name, target, []))
        parts[-1][2].append(line)
    whole = parts if len(parts) == 1 else parts[1:]
    return tuple(Listing(kernel, known or target, "\n".join(lines)) for kernel, known, lines in whole)


def parse_listing(text: str) -> tuple[Instruction, ...]:
    """Instructions of a kernel's listing; CompileError when there are none, or where some of it is missing or out of order.

    ``nvdisasm -c -hex`` writes encodings and labels; without ``-hex`` control words are 0, and ``cuobjdump -sass`` names
    addresses in place of labels, and none for indirect branches.
    """
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
            labels.update(dict.fromkeys(waiting, int(found.group(1), 16)))
            waiting.clear()
            first = found if found.group(6) else None
            if first is None:
                rows.append((found, 0, _TARGET.findall(found.group(5))))
            continue
        second = _SECOND.match(line)
        if second and first:
            rows.append((first, int(second.group(1), 16) >> 41, _TARGET.findall(first.group(5))))
            first = None
    if not rows:
        raise CompileError(f"nvdisasm printed no instructions: {text.strip()[:200] or 'nothing at all'}")
    places = [int(found.group(1), 16) for found, *_ in rows]
    for before, place in itertools.pairwise(places):
        if place <= before:
            raise CompileError(f"expected instructions by ascending address, got {place:#x} behind {before:#x}")
    for found, _, named in rows:
        if missing := [name for name in named if name not in labels]:
            raise CompileError(
                f"expected the label {missing[0]} that {found.group(3)} at {found.group(1)} names, found none: cut off?"
            )
    return tuple(
        Instruction(
            int(found.group(1), 16), found.group(3), found.group(4), _REMARK.sub("", found.group(5)), found.group(2) or "",
            control, tuple(labels[name] for name in named) or _places(found),
        )
        for found, control, named in rows
    )  # fmt: skip


def _places(found: re.Match[str]) -> tuple[int, ...]:
    """Address that a branch names where there are no labels."""
    place = _PLACE.search(found.group(5)) if found.group(3) in ("BRA", "BSSY") else None
    return (int(place.group(1), 16),) if place else ()


def _run(program: str, option: str, cubin: bytes, *more: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run(
            [str(tool(program)), option, *more, str(file)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        reason = [line for line in said if "error" in line or "fatal" in line] or said
        raise CompileError(f"{program}: {reason[0] if reason else 'failed'}")
    return done.stdout
