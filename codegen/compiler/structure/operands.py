"""Which registers an instruction writes and reads, as the disassembler writes its operands."""

from __future__ import annotations

import re
from functools import lru_cache

from tilecast.codegen.compiler.sass import Instruction

_REGISTER = re.compile(r"^(U?R)(\d+)")
_PREDICATE = re.compile(r"^U?P\d$")
_NAMED = re.compile(r"\bU?[RP]\d+\b")
_LDTM = re.compile(r"\.x(\d+)\b")
_SLOT = re.compile(r"\[R1(?:\+0x([0-9a-f]+))?\]")
_HGMMA = re.compile(r"^\.\d+x(\d+)x\d+")
#: Opcodes whose first operand is no result.
_NO_RESULT = frozenset({
    "ST", "STG", "STS", "STL", "STSM", "STTM", "STT", "STAS", "SYNCS", "BAR", "BRA", "BRX", "EXIT", "RET", "CALL",
    "UTMALDG", "UTMASTG", "UTMAREDG", "UTMACCTL", "UTMAPF", "UTMACMDFLUSH", "UBLKCP", "UBLKPF", "UBLKRED", "UTCHMMA",
    "UTCQMMA", "UTCIMMA", "UTCOMMA", "UTCCP", "UTCBAR", "UTCSHIFT", "WARPGROUP", "FENCE", "MEMBAR", "USETMAXREG",
    "NOP", "WARPSYNC", "BSSY", "BSYNC", "BREAK", "DEPBAR", "LDGSTS", "LDGDEPBAR", "ARRIVES", "CCTL", "RED", "REDG",
    "REDAS", "NANOSLEEP", "UVIRTCOUNT", "UCGABAR_ARV", "UCGABAR_WAIT", "ERRBAR", "CGAERRBAR", "BPT", "YIELD", "KILL",
    "PREEXIT", "ACQBULK", "BMOV",
})  # fmt: skip
#: Results that are predicates follow the register: carries, and which of two was taken.
_CARRIES = frozenset({
    "IADD3", "UIADD3", "LEA", "ULEA", "IMAD", "UIMAD", "VIMNMX", "UVIMNMX", "VIMNMX3", "UVIMNMX3", "VOTE",
})  # fmt: skip
_WIDE_BY_NAME = frozenset({
    "FFMA2", "FADD2", "FMUL2",
})  # fmt: skip


@lru_cache(maxsize=1 << 14)
def operands_of(text: str) -> tuple[str, ...]:
    """Operands, without hints about the register cache."""
    return tuple(one.strip().replace(".reuse", "") for one in text.split(",")) if text else ()


def is_predicate(operand: str) -> bool:
    """Whether an operand is a predicate register or a predicate constant."""
    bare = operand.lstrip("!")
    return bare in ("PT", "UPT") or _PREDICATE.match(bare) is not None


def registers_from(operand: str, count: int) -> tuple[str, ...]:
    """``count`` registers from the one that ``operand`` names; none for RZ, constants and anything else."""
    found = _REGISTER.match(operand)
    if found is None:
        return ()
    bank, first = found.group(1), int(found.group(2))
    return tuple(f"{bank}{first + i}" for i in range(count))


def named(operand: str) -> tuple[str, ...]:
    """Every register and predicate that an operand names."""
    return tuple(_NAMED.findall(operand))


def slots(operand: str, count: int) -> tuple[str, ...]:
    """Words of the thread's stack at an address like [R1+0x4c], by names that no register has; none for other addresses."""
    found = _SLOT.fullmatch(operand)
    begin = int(found.group(1) or "0", 16) if found else 0
    return tuple(f"L{begin + 4 * i}" for i in range(count)) if found else ()


def width_of(code: Instruction) -> int:
    """Registers that a result takes."""
    opcode, modifiers = code.opcode, code.modifiers
    if opcode == "LDTM":
        found = _LDTM.search(modifiers)
        return int(found.group(1)) if found else 1
    if opcode in ("HGMMA", "QGMMA", "IGMMA"):
        found = _HGMMA.match(modifiers)
        return int(found.group(1)) // 2 if found else 4
    if opcode in ("HMMA", "IMMA", "QMMA"):
        return 4
    if opcode in ("LDSM", "MOVM"):
        return 4 if modifiers.endswith(".4") else 2 if modifiers.endswith(".2") else 1
    if opcode == "CS2R":
        return 1 if ".32" in modifiers else 2
    if opcode in _WIDE_BY_NAME or ".WIDE" in modifiers:
        return 2
    if ".128" in modifiers:
        return 4
    # SHF.*.U64 names the width of its source.
    return 2 if ".64" in modifiers and opcode not in ("SHF", "USHF") else 1


def results(code: Instruction) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(registers, predicates) that an instruction writes; PT and RZ swallow theirs."""
    operands = operands_of(code.operands)
    if not operands:
        return (), ()
    first = operands[0]
    if code.opcode == "STL":
        return slots(first, width_of(code)), ()
    if code.opcode in _NO_RESULT:
        # Only a poll, an allocation of registers and the like tell whether they succeeded.
        told = code.opcode in ("SYNCS", "USETMAXREG") and is_predicate(first)
        return (), (first,) if told and first not in ("PT", "UPT") else ()
    if code.opcode == "LDTM" and ".STAT" in code.modifiers and len(operands) > 1:
        # What the load reduces comes before what it loads.
        return (*registers_from(first, 1), *registers_from(operands[1], width_of(code))), ()
    if code.opcode == "R2P":
        return (), tuple(f"P{i}" for i in range(7))
    if not is_predicate(first):
        flags: list[str] = []
        if code.opcode in _CARRIES:
            for one in operands[1:]:
                if not is_predicate(one) or one.startswith("!") or (code.opcode == "VOTE" and flags):
                    break
                flags.append(one)
        return registers_from(first, width_of(code)), _kept(flags)
    if "SETP" in code.opcode or "PLOP3" in code.opcode:
        return (), _kept(operands[:2])
    second = operands[1] if len(operands) > 1 else ""
    return registers_from(second, width_of(code)), _kept(operands[:1])


def _kept(predicates: tuple[str, ...] | list[str]) -> tuple[str, ...]:
    return tuple(one for one in predicates if one not in ("PT", "UPT"))
