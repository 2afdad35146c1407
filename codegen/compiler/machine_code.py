"""From a listing to `model.compiled.code.KernelCode`: instructions as the simulator takes them, cut into the stretches of a tile.

Control word (bits 105 to 125 of an instruction on Volta and later): stall count, yield, counter raised for the result,
counter raised for the operands, mask of counters waited for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilecast.codegen.compiler.flow import Flow, Loop
from tilecast.codegen.compiler.opcodes import MATRIX, WGMMA, latency_of, pipe_of
from tilecast.codegen.compiler.sass import Instruction
from tilecast.model.compiled.code import CodeError, KernelCode, Stretch, WarpInstruction
from tilecast.model.families import find_family, parse_variant

_STACK = re.compile(r"\[R1(?:\+0x([0-9a-f]+))?\]")
_MMA = re.compile(r"\.\d+x(\d+)x\d+")
_MMA_FROM_REGISTERS = re.compile(r"R\d+, R\d+, gdesc")
#: Loops over keys of a Hopper kernel and of a portable one, in the order a tile runs through them.
_HOPPER_LOOPS = {"none": ("main",), "causal": ("edge", "main"), "window": ("edge", "main", "left")}
_TRITON_LOOPS = {"none": ("main", "edge"), "causal": ("main", "edge"), "window": ("left", "main", "edge")}


def _width(modifiers: str) -> int:
    """Bytes a lane that a store moves; the width is the opcode's, for addresses say .64 as well."""
    return 16 if ".128" in modifiers else 8 if ".64" in modifiers else 4


def _stack_word(operands: str) -> int:
    """Word of the stack frame that a load or store of local memory is about."""
    found = _STACK.search(operands)
    return int(found.group(1) or "0", 16) // 4 if found else 0


def warp_instruction(code: Instruction, cta_warpgroups: int) -> WarpInstruction:
    """What the simulator needs of an instruction; ``cta_warpgroups`` meet at barriers of the whole CTA."""
    opcode, modifiers, operands = code.opcode, code.modifiers, code.operands
    kind, amount, registers, commits, word = "plain", 0, False, False, -1
    if opcode in WGMMA:
        found = _MMA.match(modifiers)
        assert found is not None
        kind, amount = "mma", int(found.group(1))
        registers, commits = bool(_MMA_FROM_REGISTERS.match(operands)), "gsb0" in operands
    elif opcode == "WARPGROUP" and "DEPBAR" in modifiers:
        kind, amount = "mma_wait", int(operands.rsplit("0x", 1)[1], 16)
    elif opcode == "SYNCS" and "TRYWAIT" in modifiers:
        kind = "wait"
    elif _arrives(code):
        kind = "arrive"
    elif opcode == "UTMALDG":
        kind = "load"
    elif opcode == "STG":
        kind, amount = "store", _width(modifiers)
    elif opcode == "STL":
        kind, amount, word = "spill", _width(modifiers), _stack_word(operands)
    elif opcode == "LDL":
        kind, amount, word = "reload", _width(modifiers), _stack_word(operands)
    elif opcode == "BAR":
        # With a thread count the barrier is one warpgroup's own; without, all warps of the CTA meet.
        kind, amount = "barrier", 0 if re.search(r",\s*0x80\s*$", operands) else cta_warpgroups
    return WarpInstruction(
        pipe_of(opcode), *code.scheduling, latency_of(opcode), kind, amount, registers, commits, word
    )


def _arrives(code: Instruction) -> bool:
    return code.opcode == "SYNCS" and "ARRIVE" in code.modifiers


def _order(flow: Flow, tile: Loop, loops: Sequence[Loop]) -> list[Loop]:
    """``loops`` in the order in which a tile runs through them."""
    return [step for step in flow.path(tile.header, tile.blocks, loops) if isinstance(step, Loop)]


def _stretches(flow: Flow, tile: Loop, named: dict[Loop, str], warpgroups: int, masked: bool) -> tuple[Stretch, ...]:
    """Stretches on the path that a tile takes through every named loop.

    With ``masked`` the masking code outside the loops runs: it hides scores of the tile's first block, which every tile
    of a causal or windowed kernel does, and an unmasked one only at a ragged end.
    """
    out: list[Stretch] = []
    once: list[WarpInstruction] = []
    for step in flow.path(tile.header, tile.blocks, named, masked):
        if isinstance(step, int):
            once.append(warp_instruction(flow.instructions[step], warpgroups))
            continue
        if once:
            out.append(Stretch("once", tuple(once)))
            once = []
        body = [flow.instructions[i] for i in flow.iteration(step)]
        out.append(Stretch(named[step], tuple(warp_instruction(i, warpgroups) for i in body)))
    return (*out, Stretch("once", tuple(once))) if once else tuple(out)


def _consumer(flow: Flow, entry: int, role: frozenset[int], mask: str, warpgroups: int) -> tuple[Stretch, ...]:
    """Program of a consumer warpgroup for one tile: its loop over work tiles where it has one, the whole role otherwise."""
    over_keys = flow.innermost(MATRIX, role)
    names = _HOPPER_LOOPS[mask]
    if len(over_keys) != len(names):
        raise CodeError(
            f"expected {len(names)} loops with wgmma in a consumer of a kernel with mask '{mask}', found "
            f"{len(over_keys)}: not a hopper_ws kernel?"
        )
    around = [
        loop for loop in flow.loops if loop.blocks <= role and all(keys.blocks < loop.blocks for keys in over_keys)
    ]
    tile = min(around, key=lambda loop: len(loop.blocks), default=Loop(entry, role))
    # Blocks that only other warpgroups need are waited for and given back.
    passing = [
        loop
        for loop in flow.loops
        if loop.blocks < tile.blocks
        and not any(loop.blocks & keys.blocks for keys in over_keys)
        and any(map(_arrives, flow.code(loop.blocks)))
    ]
    order = _order(flow, tile, [*over_keys, *passing])
    if len(order) < len(over_keys) + len(passing):
        raise CodeError("the loops over keys of a consumer do not follow each other: not a hopper_ws kernel?")
    named = dict.fromkeys(passing, "pass") | dict(zip((one for one in order if one in over_keys), names, strict=True))
    return _stretches(flow, tile, named, warpgroups, mask != "none")


def _hopper_consumers(flow: Flow, mask: str, variant: str, _warps: int) -> list[tuple[Stretch, ...]]:
    """Programs of the consumer warpgroups of a `hopper_ws` kernel: each is a role with its own copy of the code.

    Tiles that have to be done again are no consumer's: there the warps that multiply also copy.
    """
    warpgroups = int(parse_variant(variant).warpgroups)  # type: ignore[union-attr]
    roles = [
        (entry, blocks)
        for entry, blocks in flow.roles().items()
        if flow.innermost(MATRIX, blocks) and not any(i.opcode == "UTMALDG" for i in flow.code(blocks))
    ]
    if len(roles) != warpgroups:
        raise CodeError(f"expected {warpgroups} warp roles that multiply, found {len(roles)}: not a hopper_ws kernel?")
    return [_consumer(flow, entry, blocks, mask, warpgroups) for entry, blocks in roles]


def _triton_consumers(flow: Flow, mask: str, _variant: str, warps: int) -> list[tuple[Stretch, ...]]:
    """The program of a `triton` kernel, which all its warps run: the loops over whole and over masked blocks."""
    over_keys = flow.innermost(MATRIX)
    if not over_keys:
        raise CodeError("found no loop with wgmma: the simulator of compiled code knows kernels for Hopper only")
    everything = Loop(0, frozenset(flow.ends))
    named = dict(zip(_order(flow, everything, over_keys), _TRITON_LOOPS[mask], strict=False))
    return [_stretches(flow, everything, named, warps // 4, False)] * (warps // 4)


#: How the code of a family is read: (flow, mask, variant, warps) -> a program for each warpgroup that multiplies.
_READERS: dict[str, Callable[[Flow, str, str, int], list[tuple[Stretch, ...]]]] = {
    "fa3": _hopper_consumers,
    "fa2": _triton_consumers,
}
#: Target that is read, and the templates' names of the families.
ARCH = "sm_90a"
READ_FAMILIES = tuple(find_family(name).template for name in _READERS)


def obstacle(family: str, arch: str) -> str:
    """Why machine code of ``family`` for ``arch`` is not read; "" where it is."""
    if arch == ARCH and find_family(family).name in _READERS:
        return ""
    return f"{family} for {arch} is not read, only {' and '.join(READ_FAMILIES)} for {ARCH}"


@dataclass(frozen=True, slots=True)
class Made:
    """What a kernel was compiled from and by, and what it takes."""

    family: str
    variant: str
    head_dims: tuple[int, int]
    mask: str
    dtype: str
    arch: str
    compiler: str
    warps: int
    registers: int
    shared_bytes: int
    stack_bytes: int


def kernel_code(instructions: Sequence[Instruction], made: Made) -> KernelCode:
    """The profile of a compiled kernel of one of our families; CodeError for code of another shape."""
    refused = obstacle(made.family, made.arch)
    if refused:
        raise CodeError(refused)
    read = _READERS[find_family(made.family).name]
    consumers = read(Flow(instructions), made.mask, made.variant, made.warps)
    inits = sum(i.opcode == "SYNCS" and ".EXCH" in i.modifiers for i in instructions)
    return KernelCode(
        made.family, made.variant, *made.head_dims, made.mask, made.dtype, made.arch, made.compiler, made.warps,
        made.registers, made.shared_bytes, made.stack_bytes, inits, tuple(consumers),
    )  # fmt: skip
