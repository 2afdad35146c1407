"""Decoding on Hopper: knobs, legality, what the template writes, first choices.

A warp copies K and V into rings in shared memory, so that as much of them is on its way as memory holds; a warpgroup multiplies
with wgmma.  A tile has 64 rows, the M of wgmma, however few of them a sequence has: memory is what a decode step waits for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from tilecast.model.kernel.variants.serving import has_room
from tilecast.model.kernel.verdict import LEGAL, Verdict, over_limit
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: The family, and the template that writes it.
NAMES = ("serving-hopper", "hopper_serving")
#: The same for caches of e4m3, whose bytes go from shared memory to registers and are widened there: by mma.sync, for wgmma reads
#: 16-bit keys from shared memory alone, where widened ones would have to go back to.
NAMES_E4M3 = ("serving-hopper-e4m3", "hopper_serving_e4m3")
#: The same for 16-bit caches and few rows: tiles go to registers by ldmatrix and are multiplied by mma.sync, by each warp for itself;
#: a program takes in splits of a sequence one after the other where there are enough of them for all SMs.
NAMES_RUNS = ("serving-hopper-runs", "hopper_serving_runs")
#: The same for caches of e4m3.
NAMES_RUNS_E4M3 = ("serving-hopper-runs-e4m3", "hopper_serving_runs_e4m3")
#: Rows of a tile: the M of wgmma.
ROWS = 64
#: The same of the kernels that multiply by mma.sync: its M; rows of a sequence that the one for e4m3 caches is chosen for.
ROWS_E4M3, MOST_ROWS_E4M3 = 16, 32
#: Rows of such a tile of 16-bit caches that are kept where no sequence of a launch has more: a thread's first ones.
ROWS_HELD = 8
#: Columns of a piece of a block: 128 bytes of 16-bit elements, the widest row that shared memory swizzles.
PIECE = 64
#: Bytes that barriers and the compiler's own exchanges add.
_MARGIN = 1024
#: Tiles of Q.
_Q_TILES = 2
#: Bytes of K and V in flight that were fastest at head_dim 128.
_IN_FLIGHT, _IN_FLIGHT_E4M3 = 3 << 15, 1 << 17
#: Registers of O that a thread has room for, beside S, P and addresses, and, from e4m3 caches, beside the role that widens.
_MOST_COLUMNS, _MOST_COLUMNS_E4M3 = 256, 128


@dataclass(frozen=True, slots=True)
class HopperServingVariant:
    """Blocks in flight, and how keys are split."""

    #: Whether K and V are bytes of e4m3.
    narrow: ClassVar[bool] = False

    family: str = "serving-hopper"
    #: Keys of a block, and blocks of K, and of V, that are in flight.
    tile_n: int = 64
    kv_stages: int = 3
    #: Keys of a split, and where a sequence has ``many_heads`` key heads or more, which are work enough in fewer splits.
    split_keys: int = 512
    split_keys_of_many: int = 1024
    many_heads: int = 8
    #: Keys up to which a sequence stays whole, most splits of a sequence, and of all its key heads together.
    whole_keys: int = 1024
    most_splits: int = 128
    most_items: int = 132
    #: Splits that are merged at a time; of more, groups are merged first.
    merged: int = 16
    #: Sequences that a program looks at together to find its work.
    planned: int = 128


#: Heads of K and of V, with as many columns, of the 16-bit kernels of the copy engine, which also take those of fewer, a multiple of 8: multiplied
#: as if they were as wide, of zeros that no memory sends.
OWN_COLUMNS = (PIECE, 2 * PIECE, 4 * PIECE)
#: The other heads of such kernels.
_OWN_UNEQUAL = (3 * PIECE, 2 * PIECE)


def takes_narrower(head_dim_qk: int, head_dim_v: int) -> bool:
    """Whether a 16-bit kernel of the copy engine for such heads also takes those of fewer columns."""
    return head_dim_qk == head_dim_v and head_dim_v in OWN_COLUMNS


def own_columns(head_dim_qk: int, head_dim_v: int) -> tuple[int, int]:
    """(columns of Q and K, of V) of the 16-bit kernel of the copy engine that runs such heads."""
    dims = head_dim_qk, head_dim_v
    if dims == _OWN_UNEQUAL or head_dim_qk % 8 or head_dim_v % 8:
        return dims
    return next(((own, own) for own in OWN_COLUMNS if max(dims) <= own), dims)


def split_limit(variant: HopperServingVariant, heads_kv: int) -> int:
    """Splits that a sequence may have."""
    return max(1, min(variant.most_splits, variant.most_items // heads_kv))


def shared_bytes(variant: HopperServingVariant, workload: Workload, rows: int = ROWS) -> int:
    """Shared memory of the tiles: two of Q, of ``rows``, and the rings of K and V."""
    moving = variant.kv_stages * variant.tile_n * (workload.head_dim_qk + workload.head_dim_v)
    return workload.dtype_bytes * (moving + _Q_TILES * rows * workload.head_dim_qk)


def legality(variant: HopperServingVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the machine can run ``variant``."""
    return fits(variant.family, shared_bytes(variant, workload), machine)


def fits(family: str, tiles: int, machine: Machine) -> Verdict:
    """Whether the machine multiplies as ``family`` does and has shared memory for ``tiles`` bytes of tiles."""
    return has_room(family, "wgmma", tiles + _MARGIN, machine)


def writable(variant: HopperServingVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the template can write a legal ``variant`` that computes what it should."""
    if workload.dtype not in ("bf16", "fp16"):
        return Verdict(
            f"family {variant.family} is written for bf16 and fp16, got dtype '{workload.dtype}'", "use bf16 or fp16"
        )
    for name, width in (("head_dim_qk", workload.head_dim_qk), ("head_dim_v", workload.head_dim_v)):
        if width % PIECE or width > _MOST_COLUMNS:
            return Verdict(
                f"{name} must be a multiple of {PIECE} up to {_MOST_COLUMNS} for family {variant.family}, got {width}", "use family serving"
            )  # fmt: skip
    if variant.tile_n not in (32, 64, 128):
        return Verdict(f"tile_n must be 32, 64 or 128, got {variant.tile_n}", "use 64")
    for name in ("split_keys", "split_keys_of_many"):
        keys = getattr(variant, name)
        if keys % variant.tile_n or keys & (keys - 1):
            return Verdict(
                f"{name} must be a power of two and a multiple of tile_n {variant.tile_n}, got {keys}", "use 512"
            )
    if workload.head_dim_v & (workload.head_dim_v - 1):
        return Verdict(f"head_dim_v must be 64, 128 or 256, got {workload.head_dim_v}", "use family serving")
    if variant.merged not in (4, 8, 16, 32):
        return Verdict(f"merged must be 4, 8, 16 or 32, got {variant.merged}", "use 16")
    if variant.most_splits > variant.merged**2:
        return Verdict(
            f"most_splits must be at most {variant.merged**2}, merged times merged, got {variant.most_splits}", "use 128 and 16"
        )  # fmt: skip
    if variant.planned not in (32, 64, 128, 256):
        return Verdict(f"planned must be 32, 64, 128 or 256, got {variant.planned}", "use 128")
    return LEGAL


def space(workload: Workload, machine: Machine) -> Iterator[HopperServingVariant]:
    """Every combination of knobs worth telling apart that the machine can run."""
    for (n, stages), split, many in product(
        ((64, 3), (64, 2), (64, 4), (64, 6), (128, 2), (32, 4)), (512, 256), (1024, 512)
    ):
        found = HopperServingVariant(tile_n=n, kv_stages=stages, split_keys=split, split_keys_of_many=many)
        if legality(found, workload, machine).legal and writable(found, workload, machine).legal:
            yield found


def chosen(workload: Workload, machine: Machine) -> HopperServingVariant:
    """The variant to start from: three blocks of 64 keys of 128 columns in flight, or as many bytes of other heads; of heads with more than 128
    columns of V, whose O leaves few registers for S, in blocks of 32 keys.

    More only lengthen the memory's queue, on an H200 (data/measured/h200_decode_hopper.csv).
    """
    tile_n = 64 if workload.head_dim_v <= 2 * PIECE else 32
    room = int(machine["smem.per_cta_bytes"]) - _MARGIN - _Q_TILES * ROWS * workload.head_dim_qk * workload.dtype_bytes
    block = tile_n * (workload.head_dim_qk + workload.head_dim_v) * workload.dtype_bytes
    return HopperServingVariant(tile_n=tile_n, kv_stages=max(1, min(room // block, -(-_IN_FLIGHT // block))))


@dataclass(frozen=True, slots=True)
class HopperServingE4m3Variant(HopperServingVariant):
    """Blocks of bytes in flight (``kv_stages``), whose keys the four matrix warps deal among them, and how keys are split."""

    narrow: ClassVar[bool] = True

    family: str = "serving-hopper-e4m3"
    tile_n: int = 128
    kv_stages: int = 4
    #: Bits of an element of K and V: 8, and nothing else.
    cache_bits: int = 8


def piece_e4m3(head_dim_qk: int, head_dim_v: int) -> int:
    """Columns of a piece of a block: 128 bytes where both heads are a multiple of that, 64 otherwise."""
    return 2 * PIECE if head_dim_qk % (2 * PIECE) == head_dim_v % (2 * PIECE) == 0 else PIECE


def shared_bytes_e4m3(variant: HopperServingE4m3Variant, workload: Workload) -> int:
    """Shared memory of the tiles: two of Q, the rings of K and V as bytes, and what four warps have made of O in float32."""
    moving = variant.kv_stages * variant.tile_n * (workload.head_dim_qk + workload.head_dim_v)
    return moving + ROWS_E4M3 * (workload.dtype_bytes * _Q_TILES * workload.head_dim_qk + 16 * workload.head_dim_v)


def legality_e4m3(variant: HopperServingE4m3Variant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the machine can run ``variant``."""
    return fits(variant.family, shared_bytes_e4m3(variant, workload), machine)


def writable_e4m3(variant: HopperServingE4m3Variant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the template can write a legal ``variant`` that computes what it should."""
    verdict = writable(variant, workload, machine)
    if not verdict.legal:
        return verdict
    if workload.head_dim_v > _MOST_COLUMNS_E4M3:
        return over_limit("head_dim_v", workload.head_dim_v, _MOST_COLUMNS_E4M3, "columns", "use family serving")
    if variant.tile_n == 32:
        return Verdict(
            f"tile_n must be 64 or 128 for family {variant.family}, got 32: each of four warps multiplies 16 keys at a time", "use 128"
        )  # fmt: skip
    return _of_bytes(variant, "serving-hopper")


def _of_bytes(variant: HopperServingE4m3Variant | HopperRunsE4m3Variant, other: str) -> Verdict:
    """Whether a cache has elements that the templates for bytes read; ``other``: the family for those that have not."""
    if variant.cache_bits != 8:
        return Verdict(f"cache_bits must be 8, got {variant.cache_bits}", f"use family {other}")
    return LEGAL


def space_e4m3(workload: Workload, machine: Machine) -> Iterator[HopperServingE4m3Variant]:
    """Every combination of knobs worth telling apart that the machine can run."""
    for (n, stages), split, many in product(
        ((128, 3), (128, 4), (128, 6), (64, 6), (64, 8)), (512, 256, 1024), (1024, 512, 2048)
    ):
        found = HopperServingE4m3Variant(tile_n=n, kv_stages=stages, split_keys=split, split_keys_of_many=many)
        if legality_e4m3(found, workload, machine).legal and writable_e4m3(found, workload, machine).legal:
            yield found


def chosen_e4m3(workload: Workload, machine: Machine) -> HopperServingE4m3Variant:
    """The variant to start from: four blocks of 128 keys of 128 columns in flight, or as many bytes of other heads.

    Three took 6 % less to 2 % more time, blocks of 64 keys up to 27 % more, on an H200 (data/measured/h200_decode_e4m3_hopper.csv).
    """
    block = 128 * (workload.head_dim_qk + workload.head_dim_v)
    other = shared_bytes_e4m3(HopperServingE4m3Variant(kv_stages=0), workload) + _MARGIN
    stages = max(1, min((int(machine["smem.per_cta_bytes"]) - other) // block, -(-_IN_FLIGHT_E4M3 // block)))
    return HopperServingE4m3Variant(kv_stages=stages)


@dataclass(frozen=True, slots=True)
class HopperRunsVariant(HopperServingVariant):
    """Blocks in flight (``kv_stages``) of each of an SM's ``programs``, how keys are split, and how splits are added up: in groups of as
    many as ``merged`` is the square of, and those in as many groups again."""

    family: str = "serving-hopper-runs"
    split_keys_of_many: int = 512
    programs: int = 2
    #: Blocks in flight of the one program of an SM that takes items in turn.
    dealt_stages: int = 3
    #: The same beside a launch that has the other SMs, where that is more.
    beside_stages: int = 1
    #: Whether runs become shorter towards the end of a launch whose rounds are not nearly full; else it takes splits one by one.
    shrinks: bool = True

    #: Rounds of all programs that an SM holds up to which each split has one of its own.
    direct_rounds: ClassVar[int] = 2

    @property
    def fold(self) -> int:
        """Splits of a group, and groups of a group of them."""
        return math.isqrt(self.merged)


@dataclass(frozen=True, slots=True)
class HopperRunsE4m3Variant(HopperRunsVariant):
    """The same for caches of e4m3, whose bytes warps widen in registers: blocks and splits of twice the keys, in runs where
    rounds are nearly full and one by one elsewhere."""

    narrow: ClassVar[bool] = True
    direct_rounds: ClassVar[int] = 1

    family: str = "serving-hopper-runs-e4m3"
    tile_n: int = 128
    kv_stages: int = 2
    split_keys: int = 1024
    split_keys_of_many: int = 1024
    dealt_stages: int = 4
    shrinks: bool = False
    #: Bits of an element of K and V: 8, and nothing else.
    cache_bits: int = 8


#: Tiles of Q of items that a program has been told of, where it takes them in turn.
Q_SLOTS_RUNS = 4
#: Columns of O that the warps of a program leave in shared memory at a time.
PARTS_COLUMNS = 2 * PIECE
#: Shared memory that an SM keeps back for each program.
_KEPT_BACK = 1024
#: Bytes of K and V in flight of a program that were fastest at head_dim 128.
_IN_FLIGHT_RUNS = 1 << 16
#: The same of a program that takes items in turn on some of the SMs.
_IN_FLIGHT_BESIDE = 5 << 15


def shared_bytes_runs(variant: HopperRunsVariant, workload: Workload, stages: int) -> int:
    """Shared memory of a program but for Q: rings of ``stages`` blocks of K and V, and what four warps have made of O, its maxima and
    sums, in float32."""
    moving = stages * variant.tile_n * (workload.head_dim_qk + workload.head_dim_v)
    element = 1 if variant.narrow else workload.dtype_bytes
    return element * moving + 4 * 4 * ROWS_E4M3 * (min(workload.head_dim_v, PARTS_COLUMNS) + 2)


def legality_runs(variant: HopperRunsVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the machine can run ``variant``: ``programs`` of it with one item on an SM, or one that takes items in turn and also keeps O
    of groups of splits."""
    one, margin = shared_bytes_runs(variant, workload, variant.kv_stages), _MARGIN // 4
    tile = ROWS_E4M3 * workload.head_dim_qk * workload.dtype_bytes
    if workload.head_dim_v > PARTS_COLUMNS:
        one += tile  # Q, for which O leaves no registers
    several = variant.programs * (one + margin) + (variant.programs - 1) * _KEPT_BACK
    sums = 2 * 4 * ROWS_E4M3 * workload.head_dim_v
    dealt = max(variant.dealt_stages, variant.beside_stages)
    of_groups = shared_bytes_runs(variant, workload, dealt) + Q_SLOTS_RUNS * tile + sums + _MARGIN
    return fits(variant.family, max(several, of_groups) - _MARGIN, machine)


def writable_runs(variant: HopperRunsVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the template can write a legal ``variant`` that computes what it should."""
    verdict = writable(variant, workload, machine)
    if not verdict.legal:
        return verdict
    if variant.narrow and workload.head_dim_v > _MOST_COLUMNS_E4M3:
        return over_limit("head_dim_v", workload.head_dim_v, _MOST_COLUMNS_E4M3, "columns", "use family serving")
    if workload.head_dim_v > PARTS_COLUMNS and variant.programs > 1:
        return Verdict(
            f"programs must be 1 for head_dim_v {workload.head_dim_v}, got {variant.programs}: each of four warps has all of O of {ROWS_E4M3} "
            "rows in registers", "use 1",
        )  # fmt: skip
    if variant.tile_n == 32:
        return Verdict(
            f"tile_n must be 64 or 128 for family {variant.family}, got 32: each of four warps multiplies 16 keys at a time", "use 64"
        )  # fmt: skip
    if variant.merged not in (4, 16):
        return Verdict(f"merged must be 4 or 16 for family {variant.family}, got {variant.merged}", "use 16")
    return LEGAL


def space_runs(workload: Workload, machine: Machine) -> Iterator[HopperRunsVariant]:
    """Every combination of knobs worth telling apart that the machine can run."""
    wide = workload.head_dim_v > PARTS_COLUMNS
    several = ((64, 2, 1), (64, 1, 1)) if wide else ((64, 2, 2), (64, 3, 1), (64, 4, 2), (64, 4, 1), (128, 2, 1))
    for (n, stages, programs), split in product(several, (512, 256, 1024)):
        found = HopperRunsVariant(
            tile_n=n,
            kv_stages=stages,
            split_keys=split,
            split_keys_of_many=split,
            programs=programs,
            dealt_stages=2 if wide else max(stages, 3 * 64 // n),
        )
        if legality_runs(found, workload, machine).legal and writable_runs(found, workload, machine).legal:
            yield found


def chosen_runs(workload: Workload, machine: Machine) -> HopperRunsVariant:
    """The variant to start from: two programs of an SM, each with two blocks of 64 keys of 128 columns in flight, or 128 of narrower heads, or
    as many bytes of others; one program that takes items in turn has half as much again.  Of more columns of V than 128, whose O takes the registers of
    two programs, one program has the bytes of both.

    Two, three and four blocks of the latter were compared on an H200 (docs/notes/serving-kernels.md).  Beside a launch that has the other SMs it
    has five blocks of 64 keys of 128 columns, or as many bytes, where they fit (data/measured/h200_decode_pace.csv).
    """
    tile_n = 128 if workload.head_dim_qk + workload.head_dim_v <= 2 * PIECE else 64
    block = tile_n * (workload.head_dim_qk + workload.head_dim_v) * workload.dtype_bytes
    programs = 1 if workload.head_dim_v > PARTS_COLUMNS else 2
    most, dealt = -(-_IN_FLIGHT_RUNS * 2 // (programs * block)), -(-_IN_FLIGHT // block)
    found = next(
        (
            found
            for stages in range(most, 0, -1)
            if legality_runs(
                found := HopperRunsVariant(
                    tile_n=tile_n, kv_stages=stages, dealt_stages=max(1, dealt - most + stages), programs=programs
                ),
                workload,
                machine,
            ).legal
        ),
        HopperRunsVariant(tile_n=tile_n, kv_stages=1, dealt_stages=1, programs=programs),
    )
    more = (
        replace(found, beside_stages=stages) for stages in range(_IN_FLIGHT_BESIDE // block, found.dealt_stages, -1)
    )
    return next((one for one in more if legality_runs(one, workload, machine).legal), found)


def writable_runs_e4m3(variant: HopperRunsE4m3Variant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the template can write a legal ``variant`` that computes what it should."""
    verdict = writable_runs(variant, workload, machine)
    return _of_bytes(variant, "serving-hopper-runs") if verdict.legal else verdict


def space_runs_e4m3(workload: Workload, machine: Machine) -> Iterator[HopperRunsE4m3Variant]:
    """Every combination of knobs worth telling apart that the machine can run."""
    for (n, stages, programs), split, shrinks in product(
        ((128, 1, 2), (128, 2, 2), (128, 4, 2), (128, 4, 1), (64, 3, 2), (64, 4, 2)), (1024, 512), (False, True)
    ):
        found = HopperRunsE4m3Variant(
            tile_n=n, kv_stages=stages, split_keys=split, split_keys_of_many=split, programs=programs, dealt_stages=2 * stages, shrinks=shrinks,
        )  # fmt: skip
        if legality_runs(found, workload, machine).legal and writable_runs_e4m3(found, workload, machine).legal:
            yield found


def chosen_runs_e4m3(workload: Workload, machine: Machine) -> HopperRunsE4m3Variant:
    """The variant to start from: two programs of an SM, each with two blocks of 128 keys of 128 columns in flight, or as many bytes of
    other heads, wider ones in blocks of 64 keys; one program that takes items in turn has four."""
    tile_n = 128 if workload.head_dim_qk + workload.head_dim_v <= 2 * PIECE * 2 else 64
    block = tile_n * (workload.head_dim_qk + workload.head_dim_v)
    return HopperRunsE4m3Variant(
        tile_n=tile_n,
        kv_stages=max(1, _IN_FLIGHT_RUNS // block),
        dealt_stages=max(1, _IN_FLIGHT_E4M3 // block),
    )
