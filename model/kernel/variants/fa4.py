"""FlashAttention-4 class forward on tcgen05: knobs, legality, what the Gluon template writes, space, published variant.

Tiles, warp roles and tensor-memory map of the published kernels: flash-attention @0251105 (FA4C).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from tilecast.model.kernel import e4m3
from tilecast.model.kernel.alike import Alike
from tilecast.model.kernel.grid import Grid
from tilecast.model.kernel.verdict import LEGAL, Verdict, over_limit
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: Shared memory a CTA needs beside its tiles: barriers, row statistics, scheduler slots.
_SMEM_BOOKKEEPING_BYTES = 3 * 1024
#: Shared memory that Triton's compiler takes for itself, read off compilations.
_COMPILER_BYTES = 640
#: Schedulers, dtypes and key tiles of the template: tiles are powers of two in Triton, and a row of S fits registers.
SCHEDULERS = ("grid", "persistent", "longest-first")
MASK_HOMES = ("tmem", "registers")
_WRITTEN_DTYPES = ("bf16", "fp16", "fp8")
_WRITTEN_TILES = (64, 128)
#: Elements along the summed dimension of one 8-bit matrix instruction.
_NARROW_DEPTH = 32
#: The correction role holds O in pieces of this many columns.
_O_COLUMNS = 32
#: Key tiles: the published kernels use steps of 16.
_TILES = (128, 64, 96, 160, 192, 256)
#: Share of exponentials on the FMA pipe: what FlashAttention-4 ships lies between 1/16 and 0.3 (FA4C).
_SHARES = (0.0, 0.0625, 0.125, 0.1875, 0.25, 0.375)
ALIKE = Alike(
    same_demand={"kv_stages": 32, "stats_slots": 2, "split_p": False, "scheduler": "grid"},
    least_waiting={"kv_stages": 32, "stats_slots": 2, "scheduler": "grid"},
    fit=("tile_m", "tile_n", "softmax_tiles", "split", "kv_stages", "cta_group", "load_max", "mask_home"),
    written=(
        "tile_m",
        "tile_n",
        "softmax_tiles",
        "split",
        "kv_stages",
        "cta_group",
        "split_p",
        "stats_slots",
        "mask_home",
    ),
)


@dataclass(frozen=True, slots=True)
class Fa4Variant:
    """Two softmax warpgroups, correction, MMA, load and store roles."""

    family: str = "fa4"
    tile_m: int = 128
    tile_n: int = 128
    #: Softmax tiles in flight; split "q": two query tiles, "k": one query tile, alternate key blocks.
    softmax_tiles: int = 2
    split: str = "q"
    kv_stages: int = 0  # 0: as many as shared memory holds
    cta_group: int = 1
    emulated_share: float = 0.0
    poly_degree: int = 3
    rescale_threshold: float = 8.0
    split_p: bool = True
    stats_slots: int = 1  # row-statistics slots a tile: 1 ties the two softmax groups together as FA4 does
    load_max: bool = False  # tcgen05.ld.red: row max comes with the load (sm_103)
    #: Where scores outside the mask are hidden: in tensor memory before the block is loaded (our template), or in registers (FA4C).
    mask_home: str = "tmem"
    scheduler: str = "grid"


def smem_bytes(variant: Fa4Variant, workload: Workload, machine: Machine) -> tuple[int, int, int]:
    """(Q bytes, bytes of one K/V ring slot, slots): the ring takes what Q and bookkeeping leave, at most 32."""
    size = workload.dtype_bytes
    tiles = variant.softmax_tiles if variant.split == "q" else 1
    query = tiles * variant.tile_m * workload.head_dim_qk * size
    slot = variant.tile_n * max(workload.head_dim_qk, workload.head_dim_v) * size // variant.cta_group
    room = int(machine["smem.per_cta_bytes"]) - query - _SMEM_BOOKKEEPING_BYTES
    # 192/128 uses uneven slots (K 192 wide, V 128 wide): count pairs by their true size.
    pair = variant.tile_n * (workload.head_dim_qk + workload.head_dim_v) * size // variant.cta_group
    slots = min(32, int(2 * room // pair)) if room > 0 else 0
    return query, slot, variant.kv_stages or slots


def legality(variant: Fa4Variant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the machine can run ``variant``."""
    if machine.tensor_kind != "tcgen05":
        return Verdict(f"family fa4 takes tcgen05.mma and tensor memory, which {machine.name} does not have",
                       "use family fa3 on Hopper or fa2 elsewhere")  # fmt: skip
    if workload.dtype == "fp8" and not machine.has("tensor.fp8_flop_per_clk"):
        return Verdict(f"{machine.name} has no fp8 matrix rate", "use bf16 or fp16")
    if variant.tile_m != 128:
        return Verdict(f"the query tile is 128 rows, got tile_m={variant.tile_m}", "use tile_m=128: a softmax role owns 128 rows")  # fmt: skip
    if variant.cta_group > machine["chip.sm_count"]:
        return Verdict(
            f"a pair of CTAs takes two SMs, {machine.name} has {machine['chip.sm_count']:g}", "use cta_group=1"
        )
    if workload.head_dim_qk % 16 or workload.head_dim_v % 16:
        return Verdict("head_dim is not a multiple of 16", "pad head_dim to a multiple of 16")
    tiles_o = variant.softmax_tiles if variant.split == "q" else 1
    columns = variant.softmax_tiles * variant.tile_n + tiles_o * workload.head_dim_v
    limit_columns = int(machine["tmem.columns"])
    if columns > limit_columns:
        scores = variant.softmax_tiles * variant.tile_n
        if tiles_o > 1 and scores + workload.head_dim_v <= limit_columns:
            lever = "use split=k (one query tile, alternate key blocks)"
        elif scores < limit_columns:
            lever = f"use a head_dim_v of at most {limit_columns - scores}, or a smaller tile_n"
        else:
            lever = "use a smaller tile_n or fewer softmax_tiles"
        return over_limit("tensor memory (S/P and O accumulators)", columns, limit_columns, "columns", lever)
    query, slot, slots = smem_bytes(variant, workload, machine)
    limit = int(machine["smem.per_cta_bytes"])
    need = query + max(2, variant.kv_stages) * slot + _SMEM_BOOKKEEPING_BYTES
    if slots < 2 or (variant.kv_stages and need > limit):
        return over_limit("shared memory (Q tiles and K/V ring)", need, limit, "bytes",
                          "use cta_group=2 (each CTA holds half of K and V), split=k, fewer kv_stages or a smaller tile_n")  # fmt: skip
    if variant.mask_home not in MASK_HOMES:
        return Verdict(
            f"scores are hidden in tmem or registers, got mask_home='{variant.mask_home}'", "use mask_home=tmem"
        )
    if variant.load_max and not machine.get("tmem.load_reduce", 0.0):
        return Verdict(f"{machine.name} has no tcgen05.ld.red", "set load_max=false (sm_103 and later have it)")
    return LEGAL


def writable(variant: Fa4Variant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the Gluon template can write a legal ``variant``: the rules of the template and of Triton's compiler."""
    if workload.dtype not in _WRITTEN_DTYPES:
        return Verdict(f"family fa4 is written for bf16, fp16 and fp8, got dtype '{workload.dtype}'", "use one of them")
    if workload.dtype == "fp8" and not (refused := _writable_in_8_bits(variant, workload)).legal:
        return refused
    if variant.scheduler not in SCHEDULERS:
        return Verdict(f"family fa4 is written with scheduler {', '.join(SCHEDULERS)}, got '{variant.scheduler}'", "use one of them")  # fmt: skip
    if variant.softmax_tiles > 2:
        return Verdict(
            f"the register file holds two softmax groups, got softmax_tiles={variant.softmax_tiles}",
            "use softmax_tiles=2",
        )
    if variant.tile_n not in _WRITTEN_TILES:
        return Verdict(f"family fa4 is written with tile_n 64 or 128 (powers of two, a row of S in registers), got {variant.tile_n}", "use tile_n=128")  # fmt: skip
    if not 3 <= variant.poly_degree <= 5:
        return Verdict(f"family fa4 is written with poly_degree 3, 4 or 5, got {variant.poly_degree}", "use poly_degree=3")  # fmt: skip
    if workload.head_dim_v % _O_COLUMNS:
        return Verdict(f"head_dim_v must be a multiple of {_O_COLUMNS}, got {workload.head_dim_v}", "pad V")
    if max(workload.head_dim_qk, workload.head_dim_v) > 192 and variant.cta_group == 1:
        return Verdict("one CTA with a head wider than 192 spills registers in its matrix role", "use cta_group=2")
    if variant.mask_home != "tmem":
        return Verdict(
            "family fa4 is written with masks in tensor memory, which leave the code of other blocks alone",
            "use mask_home=tmem",
        )
    pairs = variant.emulated_share * variant.tile_n / 2
    if pairs != int(pairs):
        low, high = (int(pairs) * 2 / variant.tile_n, (int(pairs) + 1) * 2 / variant.tile_n)
        return Verdict(f"emulated_share must be whole pairs of {variant.tile_n} columns, got {variant.emulated_share:g}", f"use {low:g} or {high:g}")  # fmt: skip
    beside, left = _bytes_beside_tiles(variant, workload, machine)
    if beside > left:
        return Verdict(
            f"row statistics and barriers need {beside} bytes of shared memory beside the tiles, {left} are left",
            "use stats_slots=1 or fewer kv_stages",
        )
    return LEGAL


def _writable_in_8_bits(variant: Fa4Variant, workload: Workload) -> Verdict:
    """What the template asks of kernels for 8-bit q, k and v besides: their P is e4m3."""
    if workload.head_dim_qk % _NARROW_DEPTH:
        return Verdict(f"head_dim_qk must be a multiple of {_NARROW_DEPTH} in fp8, got {workload.head_dim_qk}", "pad Q and K")  # fmt: skip
    if variant.split_p and variant.tile_n < 4 * _NARROW_DEPTH:
        return Verdict(f"split_p leaves the last product {variant.tile_n // 4} keys, an fp8 instruction takes {_NARROW_DEPTH}", "use split_p=false or tile_n=128")  # fmt: skip
    return e4m3.growth_in_range(variant.rescale_threshold)


def ring_slots(variant: Fa4Variant, workload: Workload, machine: Machine) -> tuple[int, int]:
    """Slots of K and of V; V's are 0 where both share one ring."""
    _, _, slots = smem_bytes(variant, workload, machine)
    shared = workload.head_dim_qk == workload.head_dim_v and variant.cta_group == 1
    return (slots, 0) if shared else (slots - slots // 2, slots // 2)


def _bytes_beside_tiles(variant: Fa4Variant, workload: Workload, machine: Machine) -> tuple[int, int]:
    """(bytes of row statistics, barriers and the compiler, bytes that the tiles leave)."""
    by_keys = variant.split == "k" and variant.softmax_tiles > 1
    query, _, _ = smem_bytes(variant, workload, machine)
    slots = ring_slots(variant, workload, machine)
    ring = sum(
        count * variant.tile_n * width * workload.dtype_bytes // variant.cta_group
        for count, width in zip(slots, (workload.head_dim_qk, workload.head_dim_v), strict=True)
    )
    rows = variant.softmax_tiles * (variant.stats_slots + by_keys) * 128 * 4
    q_tiles = 1 if by_keys else variant.softmax_tiles
    # S, P, the rest of P, O, and the maxima that alternate key blocks pass on; two a statistics slot.
    per_group = 3 + variant.split_p + by_keys + 2 * variant.stats_slots
    barriers = 2 * q_tiles + 2 * sum(slots) + variant.softmax_tiles * per_group
    return rows + 8 * barriers + _COMPILER_BYTES, int(machine["smem.per_cta_bytes"]) - query - ring


def space(workload: Workload, machine: Machine) -> Grid[Fa4Variant]:
    """Every combination of knobs worth telling apart, in order of preference among equals."""
    schedulers = ("persistent", "grid") if workload.mask == "none" else ("longest-first", "persistent", "grid")
    maxima = (True, False) if machine.get("tmem.load_reduce", 0.0) else (False,)
    return _combinations(schedulers, maxima, workload.dtype == "fp8")


@lru_cache(maxsize=8)
def _combinations(schedulers: tuple[str, ...], maxima: tuple[bool, ...], narrow: bool) -> Grid[Fa4Variant]:
    knobs = (
        "scheduler", "cta_group", "softmax_tiles", "split", "tile_n", "kv_stages", "emulated_share", "stats_slots", "split_p",
        "load_max",
    )  # fmt: skip
    # Two tiles in flight, of queries or of key blocks; with one there is nothing to split.
    flights = ((2, "q"), (2, "k"), (1, "q"))
    rows = (
        (scheduler, group, tiles, split, tile_n, kv_stages, share, slots, split_p, load_max)
        for scheduler, group, (tiles, split), tile_n, kv_stages, share, slots, split_p, load_max in product(
            schedulers, (1, 2), flights, _TILES, (0, 2, 3), _SHARES, (2, 1), (True, False), maxima
        )
        if slots == 1 or tiles > 1  # one group never waits for the other's statistics
    )
    return Grid(Fa4Variant, knobs, rows, rescale_threshold=e4m3.MOST_GROWTH if narrow else 8.0)


def published(workload: Workload, machine: Machine) -> Fa4Variant:
    """The variant that FlashAttention-4 ships for this shape (FA4C)."""
    masked = workload.mask != "none"
    wide = max(workload.head_dim_qk, workload.head_dim_v)
    pair = wide == 256 or (not masked and wide in (128, 192) and workload.seqlen_q > 256)
    if machine["mufu.ex2_per_clk"] >= 32:
        share = 0.0
    elif wide == 256:
        share = 0.30
    elif wide == 192:
        share = 0.1875 if pair else 0.0625
    elif workload.dtype == "fp8":
        share = 0.1875 if pair else 0.25
    else:
        share = 0.1875 if pair else 0.125
    return Fa4Variant(
        split="k" if wide == 256 else "q",
        cta_group=2 if pair else 1,
        emulated_share=share,
        # With 8, exponentials of rows that outgrew their reference saturated (PR #2717).
        rescale_threshold=4.0 if workload.dtype == "fp8" else 8.0,
        mask_home="registers",
        scheduler="longest-first" if masked else "persistent",
    )


def structure(v: Fa4Variant) -> tuple[object, ...]:
    """What decides the shape of the loop: variants of one structure differ in depths, orders and shares only."""
    return (v.tile_n, v.softmax_tiles, v.split, v.cta_group, v.split_p)


def tile(v: Fa4Variant) -> tuple[object, ...]:
    """The tile alone: what a compiler has to keep in registers."""
    return (v.tile_n, v.softmax_tiles, v.split, v.cta_group)


def plainness(v: Fa4Variant) -> tuple[float, ...]:
    """Smaller is plainer: how many features a kernel uses beyond its tile, then how many slots its rings have."""
    features = (v.emulated_share > 0, v.cta_group > 1, v.split == "k", v.stats_slots > 1)
    return (sum(features), v.kv_stages)


def ring_depth(v: Fa4Variant) -> float:
    """Slots of the K/V ring; infinite for as many as fit."""
    return v.kv_stages or float("inf")
