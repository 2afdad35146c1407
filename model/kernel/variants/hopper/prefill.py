"""Prefill of packed, cached and paged sequences on Hopper: knobs, legality, what the template writes, first choices.

The loop is that of `fa3`'s kernels with an anchored softmax: a warp copies blocks of K and V, warpgroups of 64 rows multiply.  A row
is a query of one of the heads that share a key head, so that a tile needs each block once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from tilecast.model.kernel.variants.fa3 import WIDE
from tilecast.model.kernel.variants.hopper.serving import PIECE, ROWS
from tilecast.model.kernel.variants.serving import has_room
from tilecast.model.kernel.verdict import LEGAL, Verdict
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: The family, and the template that writes it.
NAMES = ("prefill-hopper", "hopper_prefill")
#: SMs that the parts of a sequence's keys are to fill, and most parts of a sequence.
SMS, MOST_PARTS = 132, 32
#: Parts of a tile that the last program merges; those of more are merged by a launch of its own, in which many programs share a tile.
MOST_MERGED = 4
#: Of one warpgroup at 256 columns, which does a part in half the time: parts that its last program merges, none; parts of how many times the fewest
#: keys a sequence has before it has any, and how many of a longer one may be so short, beside one for each so many keys
#: (data/measured/h200_few_d256_parts.csv).
MOST_MERGED_ASIDE, WHOLE_PARTS, SMALL_PARTS = 1, 4, 4
#: Columns of O of such a program, and parts on their way to it.
JOIN_COLUMNS, JOIN_AHEAD = 32, 8
#: Blocks of a tile whose copies are still to be asked for when the next tile is taken, and sequences whose lengths are looked at together.
ASKING, PLANNED = 3, 32
#: Numbers that the parts of a launch may leave.
MOST_NUMBERS = 1 << 25
#: Where programs take in the parts of a tile one after the other, those of longer tiles are dealt out: of more blocks than so many times a
#: program's share of all.  Parts that they may leave.
CHAIN, MOST_PLACES = 1.25, 1024
#: Bytes that barriers, what roles are handed and the compiler's own exchanges add, by warpgroups: 2564 and 4484 under Triton 3.6.
_MARGIN = {1: 2688, 2: 4608, 3: 4608}
#: Columns of O and of S that a thread has registers for, by warpgroups.
_MOST_COLUMNS = {1: 384, 2: 320, 3: 128}
#: Blocks in flight that are worth their memory: more only wait.
_STAGES = 4
#: The same in bytes of one warpgroup, which waits for memory.
_IN_FLIGHT_FEW = 1 << 17
#: Fewest keys of a part where what a tile has so far is `aside`.
_PART_KEYS_ASIDE = 256


@dataclass(frozen=True, slots=True)
class HopperPrefillVariant:
    """Warpgroups that multiply, and blocks in flight."""

    family: str = "prefill-hopper"
    #: Warpgroups of 64 rows.
    warpgroups: int = 2
    #: Keys of a block, and blocks of K, and of V, that are in flight.
    tile_n: int = 64
    kv_stages: int = 4
    #: Sequences that a program looks at together to find its work.
    planned: int = 32
    #: Fewest keys of a part of a sequence that leaves SMs idle.
    part_keys: int = 768


def q_tiles(workload: Workload) -> int:
    """Tiles of Q that are there: the next one as well, where there is room for it."""
    return 2 if workload.head_dim_qk <= 192 else 1


def shared_bytes(variant: HopperPrefillVariant, workload: Workload) -> int:
    """Shared memory of the tiles: those of Q, the rings of K and V, and O of a tile's parts where it is `aside`."""
    moving = variant.kv_stages * variant.tile_n * (workload.head_dim_qk + workload.head_dim_v)
    tiles = workload.dtype_bytes * (moving + q_tiles(workload) * variant.warpgroups * ROWS * workload.head_dim_qk)
    return tiles + _aside_bytes(variant.warpgroups, workload)


def aside(warpgroups: int, head_dim_v: int) -> bool:
    """Whether O of the parts of a tile that a program has taken in so far is in shared memory, from which each thread reads its own
    numbers: where registers hold it beside O of the next part they do, and more warpgroups leave no room for it."""
    return warpgroups == 1 and head_dim_v > WIDE


def most_merged(warpgroups: int, head_dim_v: int) -> int:
    """Parts of a tile that the last program merges."""
    return MOST_MERGED_ASIDE if aside(warpgroups, head_dim_v) else MOST_MERGED


def whole_keys(variant: HopperPrefillVariant, head_dim_v: int) -> int:
    """Keys up to which a sequence is not parted, which is also for how many a longer one has a part beside the first `SMALL_PARTS`; 0: as
    many as two parts have."""
    return WHOLE_PARTS * variant.part_keys if aside(variant.warpgroups, head_dim_v) else 0


def _aside_bytes(warpgroups: int, workload: Workload) -> int:
    return 4 * ROWS * workload.head_dim_v * aside(warpgroups, workload.head_dim_v)


def legality(variant: HopperPrefillVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the machine can run ``variant``."""
    return has_room(variant.family, "wgmma", shared_bytes(variant, workload) + _margin(variant.warpgroups), machine)


def writable(variant: HopperPrefillVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the template can write a legal ``variant``."""
    if workload.dtype not in ("bf16", "fp16"):
        return Verdict(
            f"family prefill-hopper is written for bf16 and fp16, got dtype '{workload.dtype}'", "use bf16 or fp16"
        )
    for name, width in (("head_dim_qk", workload.head_dim_qk), ("head_dim_v", workload.head_dim_v)):
        if width % PIECE or width > 256:
            return Verdict(f"{name} must be 64, 128, 192 or 256, got {width}", "use family serving")
    if variant.warpgroups not in _MOST_COLUMNS:
        return Verdict(f"warpgroups must be 1, 2 or 3, got {variant.warpgroups}", "use 2")
    if variant.tile_n not in (32, 64, 128):
        return Verdict(f"tile_n must be 32, 64 or 128, got {variant.tile_n}", "use 64")
    columns, most = workload.head_dim_v + variant.tile_n, _MOST_COLUMNS[variant.warpgroups]
    if columns > most:
        return Verdict(
            f"head_dim_v and tile_n together must be at most {most} with {variant.warpgroups} warpgroups, got {columns}",
            "use a smaller tile_n or fewer warpgroups",
        )
    if variant.planned not in (32, 64, 128, 256):
        return Verdict(f"planned must be 32, 64, 128 or 256, got {variant.planned}", "use 32")
    if variant.part_keys < variant.tile_n or variant.part_keys % variant.tile_n:
        return Verdict(f"part_keys must be a multiple of tile_n {variant.tile_n}, got {variant.part_keys}", "use 768")
    return LEGAL


def space(workload: Workload, machine: Machine) -> Iterator[HopperPrefillVariant]:
    """Every combination of knobs worth telling apart that the machine can run."""
    for groups, (n, stages) in product((2, 3, 1), ((64, 4), (64, 3), (64, 2), (128, 2), (128, 3), (32, 4))):
        found = HopperPrefillVariant(warpgroups=groups, tile_n=n, kv_stages=stages)
        if legality(found, workload, machine).legal and writable(found, workload, machine).legal:
            yield found


def chosen(workload: Workload, machine: Machine) -> HopperPrefillVariant:
    """The variant to start from: two warpgroups (three of heads of 64, which leave registers for them), blocks of 64 keys, four of them
    in flight or as many as there is room for."""
    groups = 3 if max(workload.head_dim_qk, workload.head_dim_v) <= PIECE else 2
    return HopperPrefillVariant(warpgroups=groups, kv_stages=_stages(workload, machine, groups, _STAGES))


def chosen_few(workload: Workload, machine: Machine) -> HopperPrefillVariant:
    """The variant for sequences of at most 64 rows, more than decode: one warpgroup, and as many bytes in flight as four blocks of 128
    columns have.

    It was held against one warpgroup that does one thing after the other, on an H200 (data/measured/h200_few_rows.csv).
    """
    most = -(-_IN_FLIGHT_FEW // _block_bytes(workload))
    found = HopperPrefillVariant(warpgroups=1, kv_stages=_stages(workload, machine, 1, most))
    return replace(found, part_keys=_PART_KEYS_ASIDE) if aside(1, workload.head_dim_v) else found


def _stages(workload: Workload, machine: Machine, warpgroups: int, most: int) -> int:
    """Blocks of 64 keys in flight that there is room for beside the rows of so many warpgroups, at most ``most``."""
    queries = q_tiles(workload) * warpgroups * ROWS * workload.head_dim_qk * workload.dtype_bytes
    room = int(machine["smem.per_cta_bytes"]) - _margin(warpgroups) - queries - _aside_bytes(warpgroups, workload)
    return max(1, min(room // _block_bytes(workload), most))


def _margin(warpgroups: int) -> int:
    """Bytes beside the tiles; of more warpgroups than can be as of the most, so that what is wrong with them is said elsewhere."""
    return _MARGIN.get(warpgroups, max(_MARGIN.values()))


def _block_bytes(workload: Workload) -> int:
    """Bytes of 64 keys and their values."""
    return 64 * (workload.head_dim_qk + workload.head_dim_v) * workload.dtype_bytes
