"""Backward of few query rows in plain Triton: knobs, legality, what the template writes, space, first choices.

All query rows of the heads that share a key/value head stay in a program, which walks over a part of the keys once: K and V are read
and dK and dV are written as if nothing else were to do, five products, and what a part adds to dQ is summed by a second launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from tilecast.model.kernel.variants.fa2 import SMALLEST_DOT
from tilecast.model.kernel.verdict import LEGAL, Verdict, over_limit
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: The family, and the template that writes it.
NAMES = ("few_bwd", "triton_few_bwd")
#: Warps of a program.
WARPS = (4, 8)
#: Rows of a wgmma, of which keys or columns of dQ are that many at least.
_MATRIX_ROWS = 64
#: Bytes that the compiler adds to the tiles: barriers, and what changes layout on its way out.
_MARGIN = 1024


@dataclass(frozen=True, slots=True)
class FewBackwardVariant:
    """Most query rows of a program, keys of a step, warps, and tiles of K and V on their way."""

    family: str = NAMES[0]
    rows: int = 64
    tile_n: int = 64
    warps: int = 8
    stages: int = 2
    #: Query rows of a step where a program has all keys and walks over rows; 0: it has all rows.
    step: int = 0


def rows_of(workload: Workload) -> int:
    """Query rows of the heads that share a key/value head."""
    return workload.group_size * workload.seqlen_q


def changed_over(variant: FewBackwardVariant, workload: Workload) -> tuple[FewBackwardVariant, Workload]:
    """What a program that has all keys and walks over rows is to one that has all rows and walks over keys: both change places.

    As many products and bytes: dK and dV stay in place of dQ, and a step's Q, O, dO and dQ come and go in place of K, V, dK and dV.
    """
    v, w = variant, workload
    if not v.step:
        return v, w
    turned = replace(w, heads_q=w.heads_kv, seqlen_q=v.tile_n, seqlen_k=rows_of(w), mask="none", window=None)
    return replace(v, rows=v.tile_n, tile_n=v.step, step=0), turned


def tile_rows(workload: Workload) -> int:
    """The same as a tile has them: a power of two, the smallest K of a product at least."""
    return max(SMALLEST_DOT, 1 << (rows_of(workload) - 1).bit_length())


def columns(width: int) -> int:
    """Columns of a tile of heads of so many: a power of two.

    >>> columns(64), columns(192)
    (64, 256)
    """
    return max(SMALLEST_DOT, 1 << (width - 1).bit_length())


def shared_bytes(variant: FewBackwardVariant, workload: Workload) -> int:
    """Shared memory of a program: tiles of K and V on their way, Q and dO, dS."""
    v, w = variant, workload
    both = columns(w.head_dim_qk) + columns(w.head_dim_v)
    rows = tile_rows(w)
    return w.dtype_bytes * ((v.stages * v.tile_n + rows) * both + v.tile_n * rows)


def registers(variant: FewBackwardVariant, workload: Workload) -> int:
    """Registers of a thread for dQ, two score tiles, and dK or dV of a step: a lower bound."""
    v, w, rows = variant, workload, tile_rows(workload)
    widest = max(columns(w.head_dim_qk), columns(w.head_dim_v))
    return (columns(w.head_dim_qk) * rows + v.tile_n * (2 * rows + widest)) // (32 * v.warps)


def legality(variant: FewBackwardVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the machine can run ``variant``, and the problem has few rows enough."""
    v = variant
    if machine.tensor_kind != "wgmma":
        return Verdict(
            f"family {NAMES[0]} is for Hopper's matrix unit, {machine.name} has {machine.tensor_kind}", "use fa2_bwd"
        )
    if v.warps not in WARPS:
        return Verdict(f"warps must be {WARPS[0]} or {WARPS[1]}, got {v.warps}", f"use warps={WARPS[0]}")
    if rows_of(workload) > v.rows:
        return over_limit("query rows of a key/value head", rows_of(workload), v.rows, "rows", "use another family")
    if v.step and workload.seqlen_k > v.tile_n:
        return over_limit("keys of a program that walks over rows", workload.seqlen_k, v.tile_n, "keys", "use step=0")
    v, workload = changed_over(v, workload)
    need, limit = shared_bytes(v, workload), machine["smem.per_cta_bytes"] - _MARGIN
    if need > limit:
        return over_limit("shared memory", need, limit, "bytes", "use a smaller tile_n or fewer stages")
    need, limit = registers(v, workload), machine["reg.max_per_thread"]
    if need > limit:
        return over_limit("a thread", need, limit, "registers", "use 8 warps or a smaller tile_n")
    return LEGAL


def writable(variant: FewBackwardVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the template can write a legal ``variant`` that computes what it should."""
    v, w = variant, workload
    if w.dtype not in ("bf16", "fp16"):
        return Verdict(f"family {NAMES[0]} is written for bf16 and fp16, got dtype '{w.dtype}'", "use bf16 or fp16")
    rows = ("step", v.step, _MATRIX_ROWS) if v.step else ("rows", v.rows, SMALLEST_DOT)
    for name, extent, least in (rows, ("tile_n", v.tile_n, _MATRIX_ROWS)):
        if extent < least or extent & (extent - 1):
            return Verdict(f"{name} must be a power of two of at least {least}, got {extent}", f"use {name}=64")
    if columns(w.head_dim_qk) < _MATRIX_ROWS or w.head_dim_qk % 8 or w.head_dim_v % 8:
        return Verdict(f"head_dim must be a multiple of 8 above 32, got {w.dims}", "pad the head")
    if v.stages < 2 and not v.step:
        return Verdict(f"stages must be 2 or more, got {v.stages}", "use stages=2")
    return LEGAL


def space(workload: Workload, machine: Machine) -> Iterator[FewBackwardVariant]:
    """Every combination of knobs worth telling apart that the machine can run."""
    for tile_n, warps, stages in product((64, 128), WARPS, (2, 3)):
        found = FewBackwardVariant(tile_n=tile_n, warps=warps, stages=stages)
        if legality(found, workload, machine).legal and writable(found, workload, machine).legal:
            yield found


def chosen(workload: Workload, machine: Machine) -> FewBackwardVariant:
    """The variant to start from."""
    return FewBackwardVariant()
