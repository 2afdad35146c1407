"""The files of loops at hand, those that ship and those that the user compiled, and what a variant finds in them.

A loop's code depends on few knobs: stages and the scheduler move an instruction or two of it, so the code of one kernel
answers for every variant around its loop (docs/machine-code.md says how closely).  A line holds the loops of a target, head
dimensions, mask and width of elements: that name, the hashes of the sources they were compiled from, and their code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tilecast.base.data import GENERATOR, LOOPS
from tilecast.base.files import cache_folder
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.compiled.code import CodeError, KernelCode, dump_codes, load_codes
from tilecast.model.compiled.evaluate import CompiledVariant
from tilecast.model.families import parse_variant
from tilecast.model.kernel.alike import with_knobs
from tilecast.model.kernel.variant import Variant, variant_text
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: Family -> knobs around a loop, with the values that stand for all others.
_AROUND: dict[str, dict[str, Any]] = {
    "fa3": {"kv_stages": 2, "q_stages": 1, "scheduler": "persistent"},
    # Triton pipelines a loop by its stages: of another depth it is another loop.
    "fa2": {"scheduler": "grid"},
}
#: What stands for a threshold that no instruction has.
_UNREAD_THRESHOLD: dict[str, Any] = {"rescale_threshold": 8.0}
#: Types whose kernels are kept.  Those of 16 bits take the same instructions but for the names of conversions and products.
DTYPES = ("bf16", "fp16", "fp8")


@dataclass(frozen=True, slots=True)
class KeptLoop:
    """A kernel that ships: its code, and the hash of the source (without its header) that it was compiled from."""

    source_hash: str
    code: KernelCode


def loop_of(variant: Variant) -> Variant | None:
    """The variant that stands for all with the loop of ``variant``; None for families whose loops are not kept."""
    around = _AROUND.get(variant.family)
    if around is None:
        return None
    return with_knobs(variant, {**around, **_UNREAD_THRESHOLD} if _has_no_threshold(variant) else around)


def _has_no_threshold(variant: Variant) -> bool:
    """Whether the code of ``variant`` holds no threshold of rescaling: spaces of 8 and 16 bits name it differently there."""
    return getattr(variant, "rescale", "") == "always"


def loops_at_hand(workload: Workload, machine: Machine) -> Mapping[Variant | None, KeptLoop]:
    """The loops at hand for a workload on a machine, by `loop_of`; the user's go before those that ship.

    Raises CodeError for a file of loops that is something else.
    """
    if workload.dtype not in DTYPES:
        return {}
    return _loops(
        _name(machine.arch, workload.head_dim_qk, workload.head_dim_v, workload.mask, workload.dtype == "fp8")
    )


def loop_at_hand(workload: Workload, machine: Machine, variant: Variant) -> CompiledVariant | None:
    """The machine code of ``variant``'s loop; None where it is not at hand."""
    kept = loops_at_hand(workload, machine).get(loop_of(variant))
    return _compiled(kept, variant_text(variant)) if kept is not None else None


def kept_loop(workload: Workload, machine: Machine, variant: Variant) -> CompiledVariant:
    """As `loop_at_hand`; PredictError where there is none."""
    made = loop_at_hand(workload, machine, variant)
    if made is None:
        raise PredictError(
            f"no loop of {variant_text(variant)} for {workload.label()} on {machine.name} is at hand: use --level auto or "
            "fluid, or compile some with tilecast loops"
        )
    return made


@lru_cache(maxsize=4096)
def _compiled(kept: KeptLoop, variant: str) -> CompiledVariant:
    code = kept.code
    return CompiledVariant(
        code.arch, code.compiler.replace("triton", "Triton"), code.registers, code.stack_bytes,
        replace(code, variant=variant), stands_in="" if code.variant == variant else code.variant,
    )  # fmt: skip


# --- the file -----------------------------------------------------------------------------------------------------


def _name(target: str, head_dim_qk: int, head_dim_v: int, mask: str, narrow: bool) -> str:
    return f"{target} {head_dim_qk}/{head_dim_v} {mask}" + (" fp8" if narrow else "")


def own_loops() -> Path:
    """The user's file of loops in tilecast's cache: that of the generator as it is now, for others write other kernels."""
    digest = hashlib.sha256()
    for path in sorted(path for path in GENERATOR.rglob("*") if path.suffix in (".py", ".j2")):
        digest.update(path.read_bytes())
    return cache_folder("loops") / f"{digest.hexdigest()[:16]}.txt"


def forget() -> None:
    """Read the files again, after one was written."""
    for known in (_lines, _loops, loops_digest):
        known.cache_clear()


@lru_cache(maxsize=1)
def loops_digest() -> str:
    """First 16 hex digits of SHA-256 over the loops at hand."""
    return hashlib.sha256(repr(sorted(_lines().items())).encode()).hexdigest()[:16]


#: Of head dimensions and mask: the hashes of sources, and packed code, a pair a file.
_Line = tuple[list[str], str]


@lru_cache(maxsize=1)
def _lines() -> dict[str, list[_Line]]:
    found: dict[str, list[_Line]] = {}
    own = own_loops() if cache_folder("loops").is_dir() else None
    for path in (LOOPS, own):
        if path is not None and path.is_file():
            for name, line in _read(path):
                found.setdefault(name, []).append(line)
    return found


def _read(path: Path) -> Iterator[tuple[str, _Line]]:
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    if any(len(line) != 3 for line in lines):
        again = "make it again with tilecast ship --loops" if path == LOOPS else "remove it"
        raise CodeError(f"{path}: expected lines of name, hashes and code: {again}")
    for name, hashes, packed in lines:
        yield name, (hashes.split(","), packed)


@lru_cache(maxsize=256)
def _loops(name: str) -> dict[Variant | None, KeptLoop]:
    found: dict[Variant | None, KeptLoop] = {}
    for line in _lines().get(name, []):
        found |= {loop_of(parse_variant(loop.code.variant)): loop for loop in _kept(line)}
    return found


def _kept(line: _Line) -> list[KeptLoop]:
    hashes, packed = line
    name = hashlib.sha256(packed.encode()).hexdigest()[:16]
    codes = [replace(code, digest=f"{name}_{i}") for i, code in enumerate(load_codes(packed))]
    return [KeptLoop(*both) for both in zip(hashes, codes, strict=True)]


def shelved(path: Path) -> list[KeptLoop]:
    """The loops of a file, none where there is no file; CodeError for one that is something else."""
    return [loop for _, line in _read(path) for loop in _kept(line)] if path.is_file() else []


def shelf_text(loops: Iterable[KeptLoop]) -> str:
    """The text of the file that holds ``loops``."""
    named: dict[str, list[KeptLoop]] = {}
    for loop in loops:
        code = loop.code
        named.setdefault(
            _name(code.arch, code.head_dim_qk, code.head_dim_v, code.mask, code.dtype == "fp8"), []
        ).append(loop)
    lines = []
    for name, kept in sorted(named.items()):
        kept.sort(key=lambda loop: loop.code.variant)
        hashes = ",".join(loop.source_hash for loop in kept)
        lines.append(f"{name}\t{hashes}\t{dump_codes([loop.code for loop in kept]).strip()}\n")
    return "".join(lines)
