"""From a cubin to `model.compiled.code.KernelCode`: instructions with their control words, cut into the stretches of a tile.

Control word (bits 105 to 125 of an instruction on Volta and later): stall count, yield, counter raised for the result,
counter raised for the operands, mask of counters waited for.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tilecast.codegen.compiler.compile import tool
from tilecast.codegen.compiler.sass import hides_scores
from tilecast.model.compiled.code import CodeError, KernelCode, Stretch, WarpInstruction

_FIRST = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/")
_SECOND = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
_TARGET = re.compile(r"\bBRA\b.*?(0x[0-9a-f]+)\s*$")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_STACK = re.compile(r"\[R1(?:\+0x([0-9a-f]+))?\]")
_MMA = re.compile(r"HGMMA\.\d+x(\d+)x\d+")
_MMA_FROM_REGISTERS = re.compile(r"HGMMA\S+ R\d+, R\d+, gdesc")

_PIPES = {
    "mufu": ("MUFU",),
    "fma": ("FFMA", "FADD", "FMUL", "IMAD", "HFMA2"),
    "alu": ("FMNMX", "FSEL", "FSETP", "LOP3", "ISETP", "SEL", "F2FP", "PRMT", "SHF", "VIADD", "LEA", "PLOP3", "IADD3", "MOV",
            "IABS", "VIMNMX", "I2FP", "VOTE", "VOTEU", "P2R", "R2P"),
    "shared": ("SHFL", "LDS", "STS", "SYNCS", "LDSM", "STSM", "LDL", "STL", "LDG", "STG"),
    "control": ("LDC", "S2R", "S2UR", "BAR", "REDUX", "CS2R"),
    "tensor": ("HGMMA",),
}  # fmt: skip
_PIPE = {opcode: pipe for pipe, opcodes in _PIPES.items() for opcode in opcodes}
_LATENCY = {
    "MUFU": "mufu", "SHFL": "shuffle", "LDS": "shared", "LDSM": "shared", "LDL": "local", "LDC": "constant", "ULDC": "constant",
    "S2R": "special", "S2UR": "special", "CS2R": "special", "REDUX": "shuffle", "LDG": "global", "I2F": "convert",
    "F2I": "convert", "VOTEU": "vote", "R2UR": "vote", "SYNCS": "poll",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    """One instruction as disassembled: byte address, text, control bits."""

    address: int
    text: str
    control: int

    @property
    def opcode(self) -> str:
        """Opcode without modifiers and predicate."""
        return _PREDICATE.sub("", self.text).split()[0].split(".")[0]

    @property
    def target(self) -> int | None:
        """Address a direct branch goes to."""
        found = _TARGET.search(self.text)
        return int(found.group(1), 16) if found else None


def disassemble_with_control(cubin: Path) -> list[Line]:
    """Instructions of the one kernel in ``cubin``, in address order; CodeError when there are none."""
    done = subprocess.run([str(tool("cuobjdump")), "-sass", str(cubin)], capture_output=True, text=True, check=False)
    lines: list[Line] = []
    first: tuple[int, str] | None = None
    for row in done.stdout.splitlines():
        found = _FIRST.match(row)
        if found:
            first = (int(found.group(1), 16), found.group(2).strip())
            continue
        second = _SECOND.match(row)
        if second and first:
            lines.append(Line(*first, int(second.group(1), 16) >> 41))
            first = None
    if not lines:
        raise CodeError(f"{cubin}: cuobjdump printed no instructions: {done.stderr.strip()[:200]}")
    return lines


def _width(text: str) -> int:
    """Bytes a lane that a store moves; the width is the opcode's, for addresses say .64 as well."""
    modifiers = _PREDICATE.sub("", text).split()[0].split(".")
    return 16 if "128" in modifiers else 8 if "64" in modifiers else 4


def _stack_word(text: str) -> int:
    """Word of the stack frame that a load or store of local memory is about."""
    found = _STACK.search(text)
    return int(found.group(1) or "0", 16) // 4 if found else 0


def instruction(line: Line, cta_warpgroups: int) -> WarpInstruction:
    """What the simulator needs of a line; ``cta_warpgroups`` meet at barriers of the whole CTA."""
    opcode, text, control = line.opcode, line.text, line.control
    pipe = _PIPE.get(opcode, "uniform" if opcode.startswith("U") or opcode == "R2UR" else "other")
    kind, amount, registers, commits, word = "plain", 0, False, False, -1
    if opcode == "HGMMA":
        found = _MMA.search(text)
        assert found is not None
        kind, amount = "mma", int(found.group(1))
        registers, commits = bool(_MMA_FROM_REGISTERS.search(text)), "gsb0" in text
    elif opcode == "WARPGROUP" and "DEPBAR" in text:
        kind, amount = "mma_wait", int(text.rsplit("0x", 1)[1], 16)
    elif opcode == "SYNCS" and "TRYWAIT" in text:
        kind = "wait"
    elif opcode == "SYNCS" and "ARRIVE" in text:
        kind = "arrive"
    elif opcode == "UTMALDG":
        kind = "load"
    elif opcode == "STG":
        kind, amount = "store", _width(text)
    elif opcode == "STL":
        kind, amount, word = "spill", _width(text), _stack_word(text)
    elif opcode == "LDL":
        kind, amount, word = "reload", _width(text), _stack_word(text)
    elif opcode == "BAR":
        # With a thread count the barrier is one warpgroup's own; without, all warps of the CTA meet.
        kind, amount = "barrier", 0 if re.search(r",\s*0x80\s*$", text) else cta_warpgroups
    return WarpInstruction(
        pipe, max(1, control & 15), control >> 11 & 63, control >> 5 & 7, control >> 8 & 7, _LATENCY.get(opcode, "fixed"),
        kind, amount, registers, commits, word,
    )  # fmt: skip


class _Flow:
    """Loops and branches of a listing."""

    def __init__(self, lines: list[Line]) -> None:
        self.lines = lines
        self.at = {line.address: i for i, line in enumerate(lines)}
        self.loops: list[tuple[int, int]] = []
        for i, line in enumerate(lines):
            target = line.target
            # Unconditional branches back come from code that was moved out of line, such as spins on a barrier.
            if target is not None and target <= line.address and target in self.at and line.text.startswith("@"):
                self.loops.append((self.at[target], i))

    def multiplies(self, loop: tuple[int, int]) -> bool:
        """Whether a loop holds matrix instructions."""
        return any(self.lines[i].opcode == "HGMMA" for i in range(loop[0], loop[1] + 1))

    def takes_maxima(self, loop: tuple[int, int]) -> bool:
        """Whether a loop compares scores, as an online softmax does."""
        return any(self.lines[i].opcode.startswith("FMNMX") for i in range(loop[0], loop[1] + 1))

    def inner(self) -> list[tuple[int, int]]:
        """Loops with matrix instructions and no smaller such loop inside, in address order."""
        with_mma = sorted({loop for loop in self.loops if self.multiplies(loop)})
        return [a for a in with_mma if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in with_mma)]

    def is_masking(self, begin: int, end: int) -> bool:
        """Whether [begin, end) hides scores and does nothing else."""
        return hides_scores([self.lines[i].opcode for i in range(begin, end)])


def _walk(
    flow: _Flow, begin: int, end: int, named: dict[int, tuple[str, int]], warpgroups: int, masked: bool = False
) -> tuple[Stretch, ...]:
    """Stretches on the path [begin, end] through every named loop; other forward branches skip masking code only.

    With ``masked`` the masking code outside the loops runs: it hides scores of the tile's first block, which every tile
    of a causal or windowed kernel does, and an unmasked one only at a ragged end.
    """
    out: list[Stretch] = []
    code: list[WarpInstruction] = []

    def close() -> None:
        if code:
            out.append(Stretch("once", tuple(code)))
            code.clear()

    i = begin
    while i <= end:
        if i in named:
            role, last = named[i]
            close()
            out.append(Stretch(role, tuple(instruction(flow.lines[j], warpgroups) for j in range(i, last + 1))))
            i = last + 1
            continue
        line = flow.lines[i]
        code.append(instruction(line, warpgroups))
        target = line.target
        ahead = flow.at.get(target, -1) if target is not None else -1
        skips_loop = any(i < a < ahead for a in named)
        always = not line.text.startswith("@")
        if i < ahead <= end + 1 and not skips_loop and (always or (not masked and flow.is_masking(i + 1, ahead))):
            i = ahead
            continue
        if line.opcode == "EXIT" and not line.text.startswith("@"):
            break
        i += 1
    close()
    return tuple(out)


def _work_loops(flow: _Flow, roles: int, warpgroups: int) -> list[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """Per consumer warpgroup its loop over work tiles and, inside, its ``roles`` loops over keys.

    A kernel may hold further loops with wgmma, where an anchored tile is done again: those have no such pair inside.  A
    kernel without a mask has one loop over keys: the one that takes no row maximum, where another one does.
    """
    inner = flow.inner()
    if roles == 1:
        inner = [loop for loop in inner if not flow.takes_maxima(loop)] or inner
    if len(inner) < warpgroups * roles:
        raise CodeError(f"expected {warpgroups * roles} loops with wgmma, found {len(inner)}: not a hopper_ws kernel?")
    around: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for loop in sorted(set(flow.loops) - set(inner), key=lambda s: s[1] - s[0]):
        mine = [a for a in inner if loop[0] <= a[0] and a[1] <= loop[1]]
        if len(mine) >= roles and not any(mine[0] in known for known in around.values()):
            around[loop] = mine[:roles]
    if len(around) < warpgroups:
        raise CodeError("found no loop over work tiles around the loops over keys: not a hopper_ws kernel?")
    return sorted(around.items())[:warpgroups]


def _hopper_consumers(flow: _Flow, mask: str, warpgroups: int) -> list[tuple[Stretch, ...]]:
    """Programs of the consumer warpgroups of a `hopper_ws` kernel: each has its own copy of the code."""
    roles = {"none": ("main",), "causal": ("edge", "main"), "window": ("edge", "main", "left")}[mask]
    out = []
    for (begin, end), mine in _work_loops(flow, len(roles), warpgroups):
        named = {a: (role, b) for role, (a, b) in zip(roles, mine, strict=True)}
        for a, b in flow.loops:
            if begin < a and b < end and b - a < 200 and not any(x <= a <= y for x, y in mine):
                named[a] = ("pass", b)
        out.append(_walk(flow, begin, end, named, warpgroups, mask != "none"))
    return out if mask == "none" else _with_passes(out)


def _with_passes(consumers: list[tuple[Stretch, ...]]) -> list[tuple[Stretch, ...]]:
    """The loop that passes over other warpgroups' blocks, where the compiler moved one consumer's copy out of line: it is
    the same few instructions in every consumer, so another's stands in."""

    def before_loops(consumer: tuple[Stretch, ...]) -> Stretch | None:
        return next((s for s in consumer[: [s.role for s in consumer].index("edge")] if s.role == "pass"), None)

    known = next((s for s in map(before_loops, consumers) if s is not None), None)
    if known is None:
        return consumers
    return [c if before_loops(c) is not None else (known, *c) for c in consumers]


def _triton_program(flow: _Flow, mask: str, warpgroups: int) -> tuple[Stretch, ...]:
    """The program of every warp of a `triton` kernel: the loop over whole blocks, then the one over masked blocks."""
    inner = flow.inner()
    roles = ("left", "main", "edge") if mask == "window" else ("main", "edge")
    if len(inner) < 1:
        raise CodeError("found no loop with wgmma: the simulator of compiled code knows kernels for Hopper only")
    named = {a: (role, b) for role, (a, b) in zip(roles, inner, strict=False)}
    return _walk(flow, 0, len(flow.lines) - 1, named, warpgroups)


def kernel_code(
    lines: list[Line], *, family: str, variant: str, head_dims: tuple[int, int], mask: str, dtype: str, arch: str,
    compiler: str, warps: int, registers: int, shared_bytes: int, stack_bytes: int,
) -> KernelCode:  # fmt: skip
    """The profile of a compiled kernel of one of our families; CodeError for code of another shape."""
    flow = _Flow(lines)
    if family == "hopper_ws":
        found = re.search(r"warpgroups=(\d)", variant)
        consumers = _hopper_consumers(flow, mask, int(found.group(1)) if found else 2)
    elif family == "triton":
        consumers = [_triton_program(flow, mask, warps // 4)] * (warps // 4)
    else:
        raise CodeError(f"reading machine code knows hopper_ws and triton on sm_90a, got {family}")
    inits = sum(line.opcode == "SYNCS" and "EXCH" in line.text for line in lines)
    return KernelCode(
        family, variant, head_dims[0], head_dims[1], mask, dtype, arch, compiler, warps, registers, shared_bytes,
        stack_bytes, inits, tuple(consumers),
    )  # fmt: skip
