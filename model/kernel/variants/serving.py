"""Attention to serve with, in plain Triton: knobs, legality, what the template writes, first choices.

One kernel class for decode (a tile of 16 rows: the query heads of one key head, for a few queries) and for prefill (a tile of
64 or 128): packed or paged keys, split over keys with a fixed length so that a sequence's bits never depend on its company.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from tilecast.model.kernel.variants.fa2 import SMALLEST_DOT, tile_widths
from tilecast.model.kernel.verdict import LEGAL, Verdict, over_limit
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: The family, and the template that writes it.
NAMES = ("serving", "triton_serving")
#: Rows of the tile that decodes; a tile with more rows is for prefill.
DECODE_ROWS = SMALLEST_DOT
#: Bytes that the compiler adds to the tiles.
_MARGIN = 2048


@dataclass(frozen=True, slots=True)
class ServingVariant:
    """Tiles, warps, pipeline stages and how keys are split."""

    family: str = "serving"
    tile_m: int = 16
    tile_n: int = 64
    warps: int = 4
    kv_stages: int = 3
    #: Keys of a split; a sequence that would have more than ``most_splits`` gets longer ones.
    split_keys: int = 512
    most_splits: int = 128
    #: Programs an SM holds at once, and how many times as many a launch may have at most.  Programs that come and go stay out of
    #: step, so that some stream while others begin or end; but those that find no work cost their start.
    programs: int = 3
    waves: int = 32
    #: Registers that a thread may have, so that more programs fit an SM; 0: as many as the compiler likes.
    registers: int = 0


def shared_bytes(variant: ServingVariant, workload: Workload, machine: Machine) -> int:
    """Shared memory of the tiles: blocks of K and V in flight, and P on its way between warps.

    Matrix units that read shared memory (wgmma, tcgen05, which take tiles of 64 rows and more) also have Q there, and a block
    more than those that multiply from registers.
    """
    v, size = variant, workload.dtype_bytes
    reads_shared = machine.tensor_kind in ("wgmma", "tcgen05") and v.tile_m > DECODE_ROWS
    blocks = v.kv_stages if reads_shared else max(1, v.kv_stages - 1)
    moving = blocks * v.tile_n * (workload.head_dim_qk + workload.head_dim_v)
    return size * (moving + v.tile_m * (workload.head_dim_qk * reads_shared + v.tile_n))


def legality(variant: ServingVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the machine can run ``variant``."""
    need, limit = shared_bytes(variant, workload, machine), machine["smem.per_cta_bytes"] - _MARGIN
    if need > limit:
        return over_limit("shared memory", need, limit, "bytes", "use a smaller tile_n or fewer kv_stages")
    sums = 0 if machine.tensor_kind == "tcgen05" and variant.tile_m > DECODE_ROWS else workload.head_dim_v
    registers = variant.tile_m * (sums + variant.tile_n) // (32 * variant.warps)
    if registers > machine["reg.max_per_thread"]:
        return over_limit(
            "a thread", registers, machine["reg.max_per_thread"], "registers", "use more warps or a smaller tile_m"
        )
    return LEGAL


def writable(variant: ServingVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the template can write a legal ``variant`` that computes what it should."""
    if workload.dtype not in ("bf16", "fp16"):
        return Verdict(f"family serving is written for bf16 and fp16, got dtype '{workload.dtype}'", "use bf16 or fp16")
    for name in ("tile_m", "tile_n"):
        extent = getattr(variant, name)
        if extent < SMALLEST_DOT or extent & (extent - 1):
            return Verdict(
                f"{name} must be a power of two of at least {SMALLEST_DOT}, got {extent}", "use 16, 64 or 128"
            )
    for name, width in (("head_dim_qk", workload.head_dim_qk), ("head_dim_v", workload.head_dim_v)):
        if tile_widths(width)[-1] < SMALLEST_DOT:
            return Verdict(f"{name} must be a multiple of {SMALLEST_DOT}, got {width}", "pad the head")
    if variant.split_keys % variant.tile_n:
        return Verdict(f"split_keys must be a multiple of tile_n {variant.tile_n}, got {variant.split_keys}", "use 512")
    if machine.tensor_kind in ("wgmma", "tcgen05") and variant.tile_m > DECODE_ROWS and variant.kv_stages < 2:
        return Verdict(
            f"kv_stages must be 2 or more on {machine.name}, got {variant.kv_stages}: Triton 3.6 computes wrong numbers for a "
            "wgmma loop with several sums that has no software pipeline", "use kv_stages=2",
        )  # fmt: skip
    return LEGAL


def space(workload: Workload, machine: Machine) -> Iterator[ServingVariant]:
    """Every combination of knobs worth telling apart that the machine can run."""
    for (m, warps), n, stages, split in product(
        ((16, 4), (16, 2), (64, 4), (128, 8)), (64, 32, 128), (3, 2, 4), (512, 1024, 2048)
    ):
        found = ServingVariant(NAMES[0], m, n, warps, stages, split)
        if legality(found, workload, machine).legal and writable(found, workload, machine).legal:
            yield found


def chosen(workload: Workload, machine: Machine) -> ServingVariant:
    """The variant to start from: decode for up to 16 rows of a sequence, prefill for more.

    Decode at head_dim 128 is what ran fastest on an H200: three programs to an SM, blocks of 64 keys; wider heads have smaller
    blocks, in the shared memory of consumer GPUs.  Splits of 512 keys make 128 items of 8k keys of 8 heads, one for each SM.
    """
    wide = max(workload.head_dim_qk, workload.head_dim_v)
    if workload.seqlen_q * (workload.heads_q // workload.heads_kv) <= DECODE_ROWS:
        if wide <= 128:
            return ServingVariant(registers=168)
        return ServingVariant(tile_n=32, kv_stages=3 if wide > 192 else 4, programs=2)
    # Wider heads in smaller blocks and tiles, for registers and for the shared memory of consumer GPUs.
    wide_blocks = wide in (64, 128)
    return ServingVariant(
        tile_m=64 if wide > 192 else 128, tile_n=64 if wide_blocks else 32, warps=4 if wide > 192 else 8,
        kv_stages=3 if machine.tensor_kind == "wgmma" and wide_blocks else 2, split_keys=2048, most_splits=32, programs=1,
        waves=64,
    )  # fmt: skip
