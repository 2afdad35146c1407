"""Steady loops in a file: compact text, distinct instructions once."""

from __future__ import annotations

import base64
import json
import lzma
from collections.abc import Sequence
from typing import Any

from tilecast.model.compiled.code import CodeError
from tilecast.model.compiled.roles.code import Barrier, KernelRoles, RoleCode, RoleInstruction


def dump_roles(kernels: Sequence[tuple[str, KernelRoles]]) -> str:
    """Named kernels as text."""
    table: dict[RoleInstruction, int] = {}

    def numbers(code: Sequence[RoleInstruction]) -> list[int]:
        return [table.setdefault(one, len(table)) for one in code]

    packed = [
        [name, kernel.kernel, kernel.target, kernel.barriers,
         [[role.name, role.warp, *map(numbers, (role.ahead, role.loop, role.begin, role.end))] for role in kernel.roles], kernel.unrolled]
        for name, kernel in kernels
    ]  # fmt: skip
    plain = json.dumps({"instructions": list(table), "kernels": packed}, separators=(",", ":"))
    return base64.b85encode(lzma.compress(plain.encode(), preset=9)).decode() + "\n"


def load_roles(text: str) -> dict[str, KernelRoles]:
    """Inverse of `dump_roles`, by name; CodeError for text that is something else."""
    try:
        raw: dict[str, Any] = json.loads(lzma.decompress(base64.b85decode(text.strip())))
        table = [_instruction(row) for row in raw["instructions"]]
        return {
            name: KernelRoles(
                kernel, target,
                tuple(RoleCode(role, warp, *(tuple(table[i] for i in part) for part in code)) for role, warp, *code in roles),
                tuple(Barrier(label, stages, named, tuple(tuple(party) for party in parties), *rest) for label, stages, named, parties, *rest in barriers),
                *unrolled,
            )
            for name, kernel, target, barriers, roles, *unrolled in raw["kernels"]
        }  # fmt: skip
    except (ValueError, LookupError, TypeError, lzma.LZMAError) as error:
        raise CodeError(f"not a file of steady loops ({type(error).__name__}): it is written with dump_roles") from None


def _instruction(row: list[Any]) -> RoleInstruction:
    values: list[Any] = [tuple(part) if isinstance(part, list) else part for part in row]
    return RoleInstruction(*values)
