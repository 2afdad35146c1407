"""Machine code written by hand, as a disassembler would print it."""

from __future__ import annotations

import re

from tilecast.codegen.compiler.sass import Instruction

_TEXT = re.compile(r"(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9]*)((?:\.\w+)*)\s*(.*)")


def made_of(text: str, address: int = 0, control: int = 0, target: int | None = None) -> Instruction:
    """An instruction from what a disassembler prints of it."""
    found = _TEXT.fullmatch(text)
    assert found is not None, text
    predicate, opcode, modifiers, operands = found.groups()
    return Instruction(
        address, opcode, modifiers, operands, predicate or "", control, () if target is None else (target,)
    )


def assemble(*rows: str) -> list[Instruction]:
    """Instructions at addresses 16 apart; ``name:`` rows are labels and ``{name}`` goes there."""
    labels: dict[str, int] = {}
    texts: list[str] = []
    for row in rows:
        if row.endswith(":"):
            labels[row[:-1]] = 16 * len(texts)
        else:
            texts.append(row)
    named = [re.search(r"\{(\w+)\}", text) for text in texts]
    return [
        made_of(text, 16 * i, 1, labels[found[1]] if found else None)
        for i, (text, found) in enumerate(zip(texts, named, strict=True))
    ]


def loop(name: str, *body: str) -> list[str]:
    """Rows that repeat ``body``."""
    return [f"{name}:", *body, f"@P0 BRA {{{name}}}"]
