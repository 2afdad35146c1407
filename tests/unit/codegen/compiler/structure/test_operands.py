"""Registers that instructions write, where the first operand does not tell."""

from __future__ import annotations

import pytest

from tilecast.codegen.compiler.sass import Instruction
from tilecast.codegen.compiler.structure.operands import results


@pytest.mark.parametrize(
    ("opcode", "modifiers", "operands", "first", "last", "count"),
    [
        ("LDTM", ".x32", "R4, tmem[UR4]", "R4", "R35", 32),
        # The maximum comes first and is one register, what was loaded follows.
        ("LDTM", ".STAT.x32.MAX.F32", "R132, R4, tmem[UR4]", "R132", "R35", 33),
        ("LDTM", ".STAT.x32.MAX.F32", "RZ, R20, tmem[UR4]", "R20", "R51", 32),
        ("LDS", ".128", "R8, [R2]", "R8", "R11", 4),
    ],
)
def test_registers_that_are_written(
    opcode: str, modifiers: str, operands: str, first: str, last: str, count: int
) -> None:
    registers, predicates = results(Instruction(0, opcode, modifiers, operands))
    assert (registers[0], registers[-1], len(registers)) == (first, last, count)
    assert predicates == ()
