"""FlashAttention-2 class backward in plain Triton: knobs, legality, what the template writes, space, first choices.

Two kernels and seven matrix products, so that no sum crosses programs: one has a block of keys and adds up dK and dV over
the queries, the other has a block of queries and adds up dQ over the keys.  A third, which costs next to nothing, goes
before them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from tilecast.model.kernel.variants.fa2 import LOADS, SMALLEST_DOT, tile_widths
from tilecast.model.kernel.verdict import LEGAL, Verdict, over_limit
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: The family, and the template that writes it.
NAMES = ("fa2_bwd", "triton_bwd")
#: Warps of a program.
WARPS = (4, 8)
#: Query rows of the loop over queries that take as long as what a program does once, and the sum of parts (docs/notes/backward-kernels.md).
ONCE_ROWS = 80
#: Extents of the two loops' tiles.
_TILES = ("dkv_tile_m", "dkv_tile_n", "dq_tile_m", "dq_tile_n")
#: Rows of a wgmma and of a tcgen05.mma: the tile that stays must have as many for each warpgroup.
_MATRIX_ROWS = 64
#: Bytes that the compiler adds to the tiles: barriers.
_MARGIN = 1024


@dataclass(frozen=True, slots=True)
class Fa2BackwardVariant:
    """Tiles, warps and pipeline stages of the two loops: ``dkv_`` owns keys and walks over queries, ``dq_`` the reverse."""

    family: str = "fa2_bwd"
    dkv_tile_m: int = 32
    dkv_tile_n: int = 64
    dkv_warps: int = 8
    dkv_stages: int = 2
    dq_tile_m: int = 64
    dq_tile_n: int = 32
    dq_warps: int = 4
    dq_stages: int = 2
    dkv_loads: str = "pointers"
    dq_loads: str = "pointers"
    #: Whether dK and dV have a kernel each: eight products, but half the sums, so that tiles of keys can be larger.
    dkv_apart: bool = False


def _accumulators(rows: int, columns: int, warps: int) -> int:
    """Registers a thread that a rows x columns tile in float32 takes."""
    return rows * columns // (32 * warps)


def registers(variant: Fa2BackwardVariant, workload: Workload, machine: Machine) -> dict[str, int]:
    """Registers a thread that each loop keeps its sums and score tiles in, by the loop's prefix.

    The keys' loop holds dK, dV and two score tiles, the queries' loop dQ and two score tiles; tcgen05 keeps sums in tensor
    memory.  Addresses and what the compiler copies come on top, so this is a lower bound.
    """
    v = variant
    in_tensor_memory = machine.tensor_kind == "tcgen05"
    widths = (workload.head_dim_qk, workload.head_dim_v)
    keys = 0 if in_tensor_memory else max(widths) if v.dkv_apart else sum(widths)
    queries = 0 if in_tensor_memory else workload.head_dim_qk
    return {
        "dkv": _accumulators(v.dkv_tile_n, keys + 2 * v.dkv_tile_m, v.dkv_warps),
        "dq": _accumulators(v.dq_tile_m, queries + 2 * v.dq_tile_n, v.dq_warps),
    }


def keeps_tiles(machine: Machine) -> bool:
    """Whether the tiles that stay lie in shared memory all the time; else in registers, where the compiler can."""
    return machine.tensor_kind in ("wgmma", "tcgen05")


def shared_bytes(variant: Fa2BackwardVariant, workload: Workload, machine: Machine) -> dict[str, int]:
    """Shared memory of each loop's tiles, by its prefix: ``stages`` tiles that move, and the two that stay.

    On Ampere what stays is held in registers where the compiler can, on wgmma and tcgen05 in shared memory; tcgen05 also
    reads dS from there.
    """
    v = variant
    row = workload.dtype_bytes * (workload.head_dim_qk + workload.head_dim_v)
    stays = keeps_tiles(machine)
    return {
        # With two float32 terms for each row that moves.
        "dkv": row * (v.dkv_stages * v.dkv_tile_m + stays * v.dkv_tile_n) + 8 * v.dkv_stages * v.dkv_tile_m,
        "dq": row * (v.dq_stages * v.dq_tile_n + stays * v.dq_tile_m),
    }


def legality(variant: Fa2BackwardVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the machine can run ``variant``."""
    for name in _TILES:
        if getattr(variant, name) < SMALLEST_DOT:
            return Verdict(f"{name} must be at least {SMALLEST_DOT}, got {getattr(variant, name)}", "use 32 or 64")
    for name in ("dkv_warps", "dq_warps"):
        if getattr(variant, name) not in WARPS:
            return Verdict(
                f"{name} must be {WARPS[0]} or {WARPS[1]}, got {getattr(variant, name)}", f"use {name}={WARPS[0]}"
            )
    for loop, need in shared_bytes(variant, workload, machine).items():
        limit = machine["smem.per_cta_bytes"] - _MARGIN
        if need > limit:
            lever = f"use a smaller {loop}_tile_m or {loop}_tile_n, or fewer {loop}_stages"
            return over_limit(f"shared memory of the {loop} loop", need, limit, "bytes", lever)
    for loop, need in registers(variant, workload, machine).items():
        if need > machine["reg.max_per_thread"]:
            lever = f"use 8 {loop}_warps or a smaller {loop}_tile_m or {loop}_tile_n"
            return over_limit(f"a thread of the {loop} loop", need, machine["reg.max_per_thread"], "registers", lever)
    return LEGAL


def writable(variant: Fa2BackwardVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the template can write a legal ``variant`` that computes what it should."""
    if workload.dtype not in ("bf16", "fp16"):
        return Verdict(f"family fa2_bwd is written for bf16 and fp16, got dtype '{workload.dtype}'", "use bf16 or fp16")
    for name in _TILES:
        extent = getattr(variant, name)
        if extent < SMALLEST_DOT or extent & (extent - 1):
            return Verdict(f"{name} must be a power of two of at least {SMALLEST_DOT}, got {extent}", "use 32 or 64")
    for name, width in (("head_dim_qk", workload.head_dim_qk), ("head_dim_v", workload.head_dim_v)):
        if tile_widths(width)[-1] < SMALLEST_DOT:
            return Verdict(f"{name} must be a multiple of {SMALLEST_DOT}, got {width}", "pad the head")
    for name in ("dkv_loads", "dq_loads"):
        if getattr(variant, name) not in LOADS:
            return Verdict(f"{name} must be {' or '.join(LOADS)}, got '{getattr(variant, name)}'", "use one of them")
    if machine.tensor_kind not in ("wgmma", "tcgen05"):
        for name in ("dkv_loads", "dq_loads"):
            if getattr(variant, name) == "descriptors":
                lever = f"use {name}=pointers"
                return Verdict(f"{machine.name} has no bulk copy engine for tensor descriptors", lever)
        return LEGAL
    for loop, stages in (("dkv", variant.dkv_stages), ("dq", variant.dq_stages)):
        if stages < 2:
            # The loop of the keys has two sums and tiles of different widths: both are what Triton 3.6 gets wrong there.
            return Verdict(
                f"{loop}_stages must be 2 or more on {machine.name}, got {stages}: Triton 3.6 computes wrong numbers for a "
                "wgmma loop with several sums that has no software pipeline", f"use {loop}_stages=2",
            )  # fmt: skip
    for name, rows, warps in (
        ("dkv_tile_n", variant.dkv_tile_n, variant.dkv_warps),
        ("dq_tile_m", variant.dq_tile_m, variant.dq_warps),
    ):
        if rows < _MATRIX_ROWS or (machine.tensor_kind == "wgmma" and rows < _MATRIX_ROWS * warps // 4):
            least = max(_MATRIX_ROWS, _MATRIX_ROWS * warps // 4)
            return Verdict(
                f"{name} must be at least {least} for {warps} warps on {machine.name}, got {rows}: a warpgroup multiplies "
                f"{_MATRIX_ROWS} rows", f"use {name}={least} or fewer warps",
            )  # fmt: skip
    return LEGAL


def space(workload: Workload, machine: Machine) -> Iterator[Fa2BackwardVariant]:
    """Every combination of knobs worth telling apart that the machine can run."""
    loads = LOADS if machine.tensor_kind in ("wgmma", "tcgen05") else LOADS[:1]
    tiles = (16, 32, 64, 128)
    keys, queries = product(tiles, tiles[1:], WARPS, (2, 3)), product(tiles[2:], tiles, WARPS, (2, 3))
    for one, other, apart, dkv, dq in product(loads, loads, (False, True), keys, queries):
        found = Fa2BackwardVariant(
            NAMES[0], dkv[0], dkv[1], dkv[2], dkv[3], dq[0], dq[1], dq[2], dq[3], one, other, apart
        )
        if legality(found, workload, machine).legal and writable(found, workload, machine).legal:
            yield found


def chosen(workload: Workload, machine: Machine) -> Fa2BackwardVariant:
    """The variant to start from for a shape, by the wider head dimension and by whether there is a mask.

    Hopper's are those that ran fastest on an H200 (data/measured/h200_backward_sweep.csv): one warpgroup with 64 keys, two CTAs
    to an SM.  The others are the largest tiles of which the compiler spills next to nothing; Ampere's shared memory fits the 99 KB of
    consumer GPUs as well.
    """
    table = {"wgmma": _HOPPER, "tcgen05": _BLACKWELL}.get(machine.tensor_kind, _AMPERE)
    wide = max(workload.head_dim_qk, workload.head_dim_v)
    full, masked = table[next((width for width in table if width >= wide), max(table))]
    return full if workload.mask == "none" else masked


def _both(
    dkv: tuple[int, int, int, int], dq: tuple[int, int, int, int], loads: str = "pointers", apart: bool = False
) -> tuple[Fa2BackwardVariant, Fa2BackwardVariant]:
    """The same variant without and with a mask, from (tile_m, tile_n, warps, stages) of each loop."""
    made = _made(dkv, dq, loads, loads, apart)
    return made, made


def _made(
    dkv: tuple[int, int, int, int], dq: tuple[int, int, int, int], dkv_loads: str, dq_loads: str, apart: bool = False
) -> Fa2BackwardVariant:
    return Fa2BackwardVariant(NAMES[0], *dkv, *dq, dkv_loads, dq_loads, apart)


_AMPERE = {
    64: _both((32, 64, 8, 2), (128, 32, 8, 2)),
    96: _both((16, 64, 8, 2), (64, 32, 8, 2)),
    128: _both((32, 64, 8, 2), (128, 32, 8, 2)),
    192: _both((32, 32, 8, 2), (64, 16, 8, 2)),
    256: _both((16, 32, 8, 2), (64, 16, 8, 2)),
}
_HOPPER = {
    64: _both((128, 64, 4, 2), (64, 64, 4, 2), "descriptors"),
    96: _both((64, 64, 4, 2), (64, 64, 4, 2), "descriptors"),
    128: (
        _made((64, 64, 4, 2), (64, 64, 4, 2), "descriptors", "descriptors"),
        _made((64, 64, 4, 2), (128, 64, 8, 3), "descriptors", "pointers"),
    ),
    192: (
        _made((32, 64, 4, 2), (128, 64, 8, 2), "descriptors", "descriptors"),
        _made((32, 64, 4, 2), (128, 32, 8, 3), "descriptors", "pointers"),
    ),
    256: (
        _made((64, 64, 4, 2), (128, 32, 8, 3), "descriptors", "descriptors", True),
        _made((64, 64, 4, 2), (128, 32, 8, 3), "descriptors", "pointers", True),
    ),
}
_BLACKWELL = {
    64: _both((32, 128, 8, 2), (128, 64, 8, 2), "descriptors"),
    96: _both((32, 128, 8, 2), (128, 64, 8, 2), "descriptors"),
    128: _both((32, 64, 8, 2), (128, 64, 8, 2), "descriptors"),
    192: _both((32, 64, 8, 2), (128, 64, 8, 2), "descriptors", True),
    256: _both((32, 64, 8, 2), (128, 32, 8, 2), "descriptors", True),
}
