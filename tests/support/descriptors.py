"""Whether the assembler kept every wgmma descriptor of a kernel: which values reach it, read off the machine code.

A descriptor is an address in shared memory and constants.  ptxas 12.8 loses one at times: the wgmma then reads registers
that nothing wrote, or that hold an argument of the kernel, and no tool says so.  `lost_descriptors` follows every register
from where it is written and finds such reads.

As a script: reads lines "ruled MASK DIM_QK DIM_V STAGES TILE_M WARPS TILE_N", compiles that variant of the portable family
for sm_90a with the Triton at hand, and prints the number of lost descriptors; after an "unruled" line as if the family had
no rule about them.
"""

from __future__ import annotations

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tilecast.codegen.compiler.machine_code import ARCH
from tilecast.codegen.compiler.sass import Instruction, disassemble

_REGISTER = re.compile(r"\b(U?R)(\d+)(\.64)?\b")
#: Arguments of the kernel lie in constant bank 0 from here on, before them what the launch itself needs.
_ARGUMENTS = 0x210
_WIDE = {"UIMAD.WIDE", "IMAD.WIDE", "UIADD3.64", "ULDC.64", "LDC.64"}
_NO_RESULT = {
    "ST", "STG", "STS", "STSM", "SYNCS", "BAR", "BRA", "EXIT", "UTMALDG", "UTMASTG", "WARPGROUP", "FENCE", "MEMBAR",
    "UTMACMDFLUSH", "UTMACCTL", "USETMAXREG", "NOP", "WARPSYNC", "BSSY", "BSYNC", "DEPBAR",
}  # fmt: skip
#: What a register was made from: "unset", "shared" (the address of shared memory), "argument", "place" (of the CTA in the
#: grid); constants and what was read from memory add nothing.
Roots = frozenset[str]


@dataclass(frozen=True)
class _Step:
    """What one instruction reads, writes and where it leads."""

    reads: frozenset[str]
    writes: tuple[str, ...]
    roots: Roots
    descriptor: tuple[str, ...]
    next: tuple[int, ...]


def lost_descriptors(cubin: bytes) -> list[int]:
    """Addresses of the wgmma instructions whose descriptors come from registers that no instruction wrote, or from arguments alone."""
    instructions = disassemble(cubin)
    at = {instruction.address: index for index, instruction in enumerate(instructions)}
    steps = [_step(index, instruction, at) for index, instruction in enumerate(instructions)]
    unset = frozenset({"unset"})
    everything = {register for step in steps for register in (*step.reads, *step.writes, *step.descriptor)}
    states: list[dict[str, Roots] | None] = [None] * len(steps)
    states[0] = dict.fromkeys(everything, unset)
    waiting = [0]
    while waiting:
        index = waiting.pop()
        before, step = states[index], steps[index]
        assert before is not None
        held = step.roots.union(*(before[register] for register in step.reads))
        after = {**before, **dict.fromkeys(step.writes, held)}
        for following in step.next:
            known = states[following]
            merged = after if known is None else {r: known[r] | after[r] for r in after}
            if merged != known:
                states[following] = merged
                waiting.append(following)
    return [
        instructions[index].address
        for index, (step, state) in enumerate(zip(steps, states, strict=True))
        if state is not None and any(_is_lost(state[register]) for register in step.descriptor)
    ]


def _is_lost(roots: Roots) -> bool:
    # Which slot of a ring a tile lies in may well come from an argument, but then the ring's address is in it too.
    return "unset" in roots or (bool(roots) and "shared" not in roots)


def _step(index: int, instruction: Instruction, at: dict[int, int]) -> _Step:
    name, text = f"{instruction.opcode}{instruction.modifiers}", instruction.operands
    operands = [part.strip() for part in re.split(r",(?![^\[]*\])", text)]
    writes: tuple[str, ...] = ()
    # Votes, shuffles and the like name a predicate first.
    place = 1 if re.fullmatch(r"U?P(\d|T)", operands[0]) and len(operands) > 1 else 0
    found = _REGISTER.fullmatch(operands[place].removesuffix(".reuse"))
    if instruction.opcode not in _NO_RESULT and found:
        wide = any(name.startswith(w) for w in _WIDE) or (instruction.opcode == "CS2R" and ".32" not in name)
        loads = re.match(r"LD[GSL]?\b.*\.(64|128)", name)
        width = (
            int(loads[1]) // 32
            if loads
            else 2
            if wide
            else _hgmma_columns(instruction) // 2
            if instruction.opcode == "HGMMA"
            else 1
        )
        writes = tuple(f"{found[1]}{int(found[2]) + n}" for n in range(width))
        operands = operands[place + 1 :]
    reads = set()
    for kind, number, pair in _REGISTER.findall(" ".join(operands)):
        reads.update(f"{kind}{int(number) + n}" for n in range(2 if pair or ".64" in instruction.modifiers else 1))
    roots = set()
    for offset in re.findall(r"c\[0x0\]\[0x([0-9a-f]+)\]", text):
        roots.update({"argument"} if int(offset, 16) >= _ARGUMENTS else ())
    if "SR_CTAID" in text:
        roots.add("place")
    if "SR_CgaCtaId" in text:
        roots.add("shared")
    descriptor: tuple[str, ...] = ()
    matrices = re.search(r"gdesc\[UR(\d+)\]", text) if instruction.opcode == "HGMMA" else None
    if matrices:
        # Four registers: A and B; A's are not read where A itself lies in registers.
        first = 2 if re.match(r"R\d", operands[0]) else 0
        descriptor = tuple(f"UR{int(matrices[1]) + n}" for n in range(first, 4))
    # A predicated write is taken to happen: what reads the register is under the same predicate.
    following = [at[target] for target in instruction.targets]
    if instruction.goes_on and index + 1 < len(at):
        following.insert(0, index + 1)
    return _Step(frozenset(reads), writes, frozenset(roots), descriptor, tuple(following))


def _hgmma_columns(instruction: Instruction) -> int:
    found = re.match(r"\.\d+x(\d+)x", instruction.modifiers)
    assert found is not None
    return int(found[1])


def main() -> None:
    """See the module."""
    import triton

    from tilecast.codegen.compiler.compile import compile_kernel
    from tilecast.codegen.generate import generate
    from tilecast.model.families import find_family
    from tilecast.model.kernel.variants import fa2
    from tilecast.model.kernel.workload import Workload
    from tilecast.model.machine.machine import load_machine

    print("triton", triton.__version__, flush=True)
    for line in sys.stdin:
        rule, mask, *numbers = line.split()
        dim_qk, dim_v, stages, tile_m, warps, tile_n = map(int, numbers)
        if rule == "unruled":
            fa2._WGMMA_ROWS = 1 << 30
        work = Workload(head_dim_qk=dim_qk, head_dim_v=dim_v, mask=mask)
        variant = fa2.Fa2Variant(tile_m=tile_m, tile_n=tile_n, warps=warps, kv_stages=stages, scheduler="grid")
        source = generate(work, load_machine("h200-sxm"), find_family("triton"), variant).source
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "kernel.py"
            file.write_text(source)
            print(len(lost_descriptors(compile_kernel(file, ARCH).cubin)), flush=True)


if __name__ == "__main__":
    main()
