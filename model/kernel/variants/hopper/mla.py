"""Latent attention (MLA) decoding on Hopper: knobs, legality, what the template writes, first choices.

All query heads share one latent key, whose first columns are the value: a block of it is copied once and multiplied twice.  O of 64
rows is wider than a warpgroup's registers, so two warpgroups have half of its columns each; one of them makes the scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product

from tilecast.model.kernel.variants.hopper.serving import PIECE, ROWS
from tilecast.model.kernel.variants.serving import has_room
from tilecast.model.kernel.verdict import LEGAL, Verdict
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: The family, and the template that writes it.
NAMES = ("mla-hopper", "hopper_mla")
#: Keys of a block: P of a tile is one row of shared memory's widest swizzle.
KEYS = 64
#: Rows that a tile holds up to the most of which, where splits are dealt out, keys are the M of the products and rows their N: none of it is
#: wasted.  Q of the fewest leaves room for one more block.
TURNED_ROWS, TURNED_STAGES = (8, 16, 32), 3
#: Queries up to which a sequence is split, and fewest query heads of a part of those that share a key.
SPLIT_QUERIES, FEWEST_HEADS = 4, 8
#: Chunks of a program that are done apart where tiles are more than programs: what they leave takes room in every launch.
MOST_APART = 8
#: Rows of O that splits of a launch leave in L2: more, of 2 kB each, than the 50 MB of an H100 or H200 hold go to memory.
MOST_LEFT = 25600
#: Bytes that barriers, factors of rows and the compiler's own exchanges add.
_MARGIN = 2560
#: Values of V's columns: two halves, each a power of two of pieces.
_VALUES = (128, 256, 512)


@dataclass(frozen=True, slots=True)
class HopperMlaVariant:
    """Blocks in flight, and how keys are split."""

    family: str = "mla-hopper"
    #: Blocks of 64 keys that are in flight or being multiplied.
    kv_stages: int = 2
    #: Keys of a split, and where there are ``many_heads`` query heads or more, which are work enough in fewer splits.
    split_keys: int = 1024
    split_keys_of_many: int = 1024
    many_heads: int = 65
    #: Keys up to which a sequence stays whole, and most splits of a sequence.
    whole_keys: int = 1024
    most_splits: int = 32
    #: Splits that are merged at a time; of more, groups are merged first.
    merged: int = 8
    #: Sequences that a program looks at together to find its work.
    planned: int = 32


@dataclass(frozen=True, slots=True)
class HopperMlaTurned(HopperMlaVariant):
    """What a launch runs whose tiles have no more rows than the most of `TURNED_ROWS`: the kernel decides that, so nobody chooses it."""

    #: Rows that a tile holds.
    rows: int = TURNED_ROWS[0]
    #: Whether the warpgroup that merges does the softmax, for each split has a program of its own.
    apart: bool = True


def turned(variant: HopperMlaVariant, rows: int, apart: bool) -> HopperMlaTurned:
    """The same knobs for a launch whose tiles hold few rows."""
    knobs = {field.name: getattr(variant, field.name) for field in fields(variant)}
    if rows == TURNED_ROWS[0]:
        knobs["kv_stages"] = TURNED_STAGES
    return HopperMlaTurned(**knobs, rows=rows, apart=apart)


def turned_rows(rows: int) -> int:
    """Rows that a tile with so many of them holds where splits are dealt out; 0: they are the M of its products."""
    return next((held for held in TURNED_ROWS if rows <= held), 0)


def shared_bytes(variant: HopperMlaVariant, workload: Workload) -> int:
    """Shared memory of the tiles: Q, P and the ring of latent keys."""
    tiles = ROWS * (workload.head_dim_qk + KEYS)
    return workload.dtype_bytes * (tiles + variant.kv_stages * KEYS * workload.head_dim_qk)


def legality(variant: HopperMlaVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the machine can run ``variant``."""
    return has_room(variant.family, "wgmma", shared_bytes(variant, workload) + _MARGIN, machine, "use fewer kv_stages")


def writable(variant: HopperMlaVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the template can write a legal ``variant`` that computes what it should."""
    if workload.dtype not in ("bf16", "fp16"):
        return Verdict(
            f"family mla-hopper is written for bf16 and fp16, got dtype '{workload.dtype}'", "use bf16 or fp16"
        )
    qk, v = workload.head_dim_qk, workload.head_dim_v
    if v not in _VALUES or qk % PIECE or qk <= v:
        return Verdict(
            f"family mla-hopper is written for head_dim_v of 128, 256 or 512 and a wider head_dim_qk in steps of {PIECE}, got {qk}/{v}",
            "use 576/512",
        )
    if variant.kv_stages < 2:
        return Verdict(f"kv_stages must be 2 or more, got {variant.kv_stages}", "use 2")
    for name in ("split_keys", "split_keys_of_many"):
        keys = getattr(variant, name)
        if keys % KEYS or keys & (keys - 1):
            return Verdict(f"{name} must be a power of two of at least {KEYS}, got {keys}", "use 1024")
    most = variant.most_splits
    if variant.merged not in (4, 8):
        return Verdict(f"merged must be 4 or 8, got {variant.merged}", "use 8")
    if most & (most - 1) or not 2 <= most <= variant.merged**2:
        return Verdict(
            f"most_splits must be a power of two from 2 to {variant.merged**2}, merged times merged, got {most}",
            "use 32",
        )
    if variant.planned not in (32, 64, 128, 256):
        return Verdict(f"planned must be 32, 64, 128 or 256, got {variant.planned}", "use 32")
    return LEGAL


def space(workload: Workload, machine: Machine) -> Iterator[HopperMlaVariant]:
    """Every combination of knobs worth telling apart that the machine can run."""
    for (keys, of_many), most in product(((1024, 1024), (1024, 2048), (512, 1024), (2048, 4096)), (32, 64, 16, 8)):
        found = HopperMlaVariant(split_keys=keys, split_keys_of_many=of_many, most_splits=most)
        if legality(found, workload, machine).legal and writable(found, workload, machine).legal:
            yield found


def chosen(workload: Workload, machine: Machine) -> HopperMlaVariant:
    """The variant to start from: splits serve one sequence and cost many; 1024 keys were best over both on an H200."""
    return HopperMlaVariant()
