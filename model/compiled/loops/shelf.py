"""The file of loops that ship, and what a variant finds in it.

A loop's code depends on few knobs: stages and the scheduler move an instruction or two of it, so the code of one kernel
answers for every variant around its loop (docs/machine-code.md says how closely).  A line holds the loops of a target, head
dimensions and mask: that name, the hashes of the sources they were compiled from, and their code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tilecast.base.data import LOOPS
from tilecast.model.compiled.code import CodeError, KernelCode, dump_codes, load_codes
from tilecast.model.compiled.evaluate import CompiledVariant
from tilecast.model.families import parse_variant
from tilecast.model.kernel.variant import Variant, variant_text
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: Family -> knobs around a loop, with the values that stand for all others.
_AROUND: dict[str, dict[str, Any]] = {"fa3": {"kv_stages": 2, "q_stages": 1, "scheduler": "persistent"}}
#: Types whose kernels take the same instructions but for the names of conversions and products.
_DTYPES = ("bf16", "fp16")


@dataclass(frozen=True, slots=True)
class KeptLoop:
    """A kernel that ships: its code, and the hash of the source (without its header) that it was compiled from."""

    source_hash: str
    code: KernelCode


def loop_of(variant: Variant) -> Variant | None:
    """The variant that stands for all with the loop of ``variant``; None for families whose loops do not ship."""
    around = _AROUND.get(variant.family)
    return replace(variant, **around) if around is not None else None


def loops_at_hand(workload: Workload, machine: Machine) -> Mapping[Variant | None, KeptLoop]:
    """The loops that ship for a workload on a machine, by `loop_of`.

    Raises CodeError for a file of loops that is something else.
    """
    return _loops(_name(machine.arch, workload)) if workload.dtype in _DTYPES else {}


def loop_at_hand(workload: Workload, machine: Machine, variant: Variant) -> CompiledVariant | None:
    """The machine code of ``variant``'s loop as it ships; None where it does not."""
    kept = loops_at_hand(workload, machine).get(loop_of(variant))
    return _compiled(kept, variant_text(variant)) if kept is not None else None


@lru_cache(maxsize=4096)
def _compiled(kept: KeptLoop, variant: str) -> CompiledVariant:
    code = kept.code
    return CompiledVariant(
        code.arch, code.compiler.replace("triton", "Triton"), code.registers, code.stack_bytes,
        replace(code, variant=variant), stands_in="" if code.variant == variant else code.variant,
    )  # fmt: skip


# --- the file -----------------------------------------------------------------------------------------------------


def _name(target: str, workload: Workload) -> str:
    return f"{target} {workload.head_dim_qk}/{workload.head_dim_v} {workload.mask}"


@lru_cache(maxsize=1)
def _lines() -> dict[str, tuple[list[str], str]]:
    lines = [line.split("\t") for line in LOOPS.read_text(encoding="utf-8").splitlines()]
    if any(len(line) != 3 for line in lines):
        raise CodeError(f"{LOOPS}: expected lines of name, hashes and code: make it again with tilecast ship --loops")
    return {name: (hashes.split(","), packed) for name, hashes, packed in lines}


@lru_cache(maxsize=256)
def _loops(name: str) -> dict[Variant | None, KeptLoop]:
    if name not in _lines():
        return {}
    hashes, packed = _lines()[name]
    kept = [KeptLoop(*both) for both in zip(hashes, load_codes(packed), strict=True)]
    return {loop_of(parse_variant(loop.code.variant)): loop for loop in kept}


def shelf_text(loops: Iterable[tuple[Workload, KeptLoop]]) -> str:
    """The text of the file that holds ``loops``."""
    named: dict[str, list[KeptLoop]] = {}
    for workload, loop in loops:
        named.setdefault(_name(loop.code.arch, workload), []).append(loop)
    lines = []
    for name, kept in sorted(named.items()):
        kept.sort(key=lambda loop: loop.code.variant)
        hashes = ",".join(loop.source_hash for loop in kept)
        lines.append(f"{name}\t{hashes}\t{dump_codes([loop.code for loop in kept]).strip()}\n")
    return "".join(lines)
