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
    #: Keys of a split, and keys up to which a sequence stays whole; one that would have more than ``most_splits`` splits, or more
    #: than ``most_items`` in all key heads together, gets longer ones.
    split_keys: int = 512
    whole_keys: int = 0
    most_splits: int = 128
    most_items: int = 65536
    #: Programs an SM holds at once, and how many times as many a launch may have at most.  Programs that come and go stay out of
    #: step, so that some stream while others begin or end; but those that find no work cost their start.
    programs: int = 3
    waves: int = 32
    #: Registers that a thread may have, so that more programs fit an SM; 0: as many as the compiler likes.
    registers: int = 0
    #: Bits of an element of K and V: 16 as q has, or 8, e4m3 that the kernel widens.
    cache_bits: int = 16
    #: 1: each warp has keys of its own and a softmax of its own, merged once after the last block.
    apart: int = 0
    #: 1: V is the first columns of K, as in latent attention (MLA); one load serves both.
    latent: int = 0


def split_limit(variant: ServingVariant, heads_kv: int) -> int:
    """Splits that a sequence may have."""
    return max(1, min(variant.most_splits, variant.most_items // heads_kv))


def shared_bytes(variant: ServingVariant, workload: Workload, machine: Machine) -> int:
    """Shared memory of the tiles: blocks of K and V in flight, and P on its way between warps.

    Matrix units that read shared memory (wgmma, tcgen05, which take tiles of 64 rows and more) also have Q there, and a block
    more than those that multiply from registers.
    """
    v, size = variant, workload.dtype_bytes
    reads_shared = machine.tensor_kind in ("wgmma", "tcgen05") and v.tile_m > DECODE_ROWS
    blocks = v.kv_stages if reads_shared else max(1, v.kv_stages - 1)
    moving = blocks * v.tile_n * (workload.head_dim_qk + (0 if v.latent else workload.head_dim_v))
    return size * (moving + v.tile_m * (workload.head_dim_qk * reads_shared + v.tile_n))


def has_room(
    family: str, unit: str, need: int, machine: Machine, lever: str = "use fewer kv_stages or a smaller tile_n"
) -> Verdict:
    """Whether the machine multiplies with ``unit``, as ``family`` does, and a CTA may have ``need`` bytes of shared memory."""
    if machine.tensor_kind != unit:
        return Verdict(f"{machine.name} has no {unit}, which family {family} multiplies with", "use family serving")
    limit = machine["smem.per_cta_bytes"]
    return over_limit("shared memory", need, limit, "bytes", lever) if need > limit else LEGAL


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
    if variant.apart and (variant.tile_m > DECODE_ROWS or variant.tile_n < SMALLEST_DOT * variant.warps):
        return Verdict(
            f"apart needs tile_m {DECODE_ROWS} and {SMALLEST_DOT} keys to a warp, got tile_m {variant.tile_m} and {variant.tile_n} keys for "
            f"{variant.warps} warps", "use apart=0 or a larger tile_n",
        )  # fmt: skip
    if machine.tensor_kind == "wgmma" and variant.cache_bits == 8 and variant.tile_m >= 64:
        return Verdict(
            f"tile_m must be 16 or 32 with cache_bits=8 on {machine.name}, got {variant.tile_m}: Triton 3.6 computes wrong numbers for a "
            "wgmma loop with several sums whose operands come from registers", "use tile_m=32",
        )  # fmt: skip
    if variant.latent:
        widths, widths_v = tile_widths(workload.head_dim_qk), tile_widths(workload.head_dim_v)
        if widths[: len(widths_v)] != widths_v or variant.cache_bits != 16 or variant.apart:
            return Verdict(
                f"latent=1 is written for 16-bit caches whose first columns are V, in the same powers of two, with apart=0, got {workload.head_dim_qk} "
                f"and {workload.head_dim_v}, cache_bits={variant.cache_bits}, apart={variant.apart}", "use 576/512 and cache_bits=16",
            )  # fmt: skip
    if variant.cache_bits not in (8, 16):
        return Verdict(f"cache_bits must be 8 or 16, got {variant.cache_bits}", "use 16")
    if variant.most_splits & (variant.most_splits - 1):
        return Verdict(f"most_splits must be a power of two, got {variant.most_splits}", "use 32, 64 or 128")
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
        found = ServingVariant(NAMES[0], m, n, warps, stages, split_keys=split)
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
            return ServingVariant(registers=168, whole_keys=1024, most_items=264)
        return ServingVariant(tile_n=32, kv_stages=3 if wide > 192 else 4, programs=2, whole_keys=1024, most_items=264)
    # Wider heads in smaller blocks and tiles, for registers and for the shared memory of consumer GPUs.
    wide_blocks = wide in (64, 128)
    return ServingVariant(
        tile_m=64 if wide > 192 else 128, tile_n=64 if wide_blocks else 32, warps=4 if wide > 192 else 8,
        kv_stages=3 if machine.tensor_kind == "wgmma" and wide_blocks else 2, split_keys=2048, whole_keys=2048, most_splits=32, programs=1,
        waves=64, most_items=264,
    )  # fmt: skip
