"""Variants: the knobs of a kernel, one frozen class per family, with the one legality predicate of each.

Illegal is a result (`Verdict`), not an exception: it names the resource, the demand, the limit and the lever.
Tiles, warp roles, registers and TMEM maps of the published kernels: flash-attention @0251105 as read in fa4.md (d).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from tilecast.base.words import nearest
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: Shared memory a CTA needs beside its tiles: barriers, row statistics, scheduler slots.
_SMEM_BOOKKEEPING = 3 * 1024
#: Registers a Hopper consumer thread needs beside accumulators: addresses, row statistics, loop state.
_HOPPER_SCALAR_REGISTERS = 24


class VariantError(ValueError):
    """An unknown knob, a value it cannot take, or a family that does not exist; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a variant can run; when not, which resource overflows and what would fix it."""

    legal: bool
    resource: str = ""
    demand: float = 0.0
    limit: float = 0.0
    unit: str = ""
    lever: str = ""

    def sentence(self) -> str:
        """One sentence for people; empty when legal."""
        if self.legal:
            return ""
        over = self.demand - self.limit
        if over <= 0:
            return f"{self.resource} cannot be {self.demand:g} {self.unit}: {self.lever}"
        return (
            f"{self.resource} needs {self.demand:g} {self.unit} but the limit is {self.limit:g} "
            f"(over by {over:g}): {self.lever}"
        )


LEGAL = Verdict(True)


@dataclass(frozen=True, slots=True)
class Fa4Variant:
    """FlashAttention-4 class forward on tcgen05: two softmax warpgroups, correction, MMA, load and store roles."""

    family: str = "fa4"
    tile_m: int = 128
    tile_n: int = 128
    #: Softmax tiles in flight; split "q": two query tiles, "k": one query tile, alternate key blocks.
    stages: int = 2
    split: str = "q"
    kv_stages: int = 0  # 0: as many as shared memory holds
    cta_group: int = 1
    emulated_share: float = 0.0
    poly_degree: int = 3
    rescale_threshold: float = 8.0
    split_p: bool = True
    stats_slots: int = 1  # row-statistics slots a tile: 1 ties the two softmax groups together as FA4 does
    load_max: bool = False  # tcgen05.ld.red: row max comes with the load (sm_103)
    scheduler: str = "grid"


@dataclass(frozen=True, slots=True)
class Fa3Variant:
    """FlashAttention-3 class forward on Hopper: a TMA producer warp and wgmma consumer warpgroups of 64 rows."""

    family: str = "fa3"
    warpgroups: int = 2
    tile_n: int = 128
    kv_stages: int = 2
    q_stages: int = 1  # 2: the next work tile's Q lands under this one's loop
    overlap: bool = True  # intra-warpgroup: QK of the next block in flight under the softmax
    ping_pong: bool = True  # inter-warpgroup: one warpgroup's softmax under the other's GEMMs
    #: always: online softmax; conditional: O is rescaled only when the row max grew by more than the threshold;
    #: anchored: the row max of the first blocks is the reference for all, and a tile whose sums leave the safe range
    #: is done again with the online softmax.
    rescale: str = "always"
    rescale_threshold: float = 8.0
    emulated_share: float = 0.0
    poly_degree: int = 3
    scheduler: str = "grid"


@dataclass(frozen=True, slots=True)
class Fa2Variant:
    """FlashAttention-2 forward: mma.sync, every warp loads, multiplies and exponentiates in turn."""

    family: str = "fa2"
    tile_m: int = 128
    tile_n: int = 64
    warps: int = 4
    stages: int = 1
    scheduler: str = "grid"


@dataclass(frozen=True, slots=True)
class UnfusedVariant:
    """Three kernels: S = Q K^T to memory, softmax over S, O = P V; what FlashAttention-1 argued against."""

    family: str = "unfused"
    tile_m: int = 128
    tile_n: int = 128
    intermediate_bytes: int = 0  # 0: the input dtype's size
    scheduler: str = "grid"


Variant = Fa4Variant | Fa3Variant | Fa2Variant | UnfusedVariant

FAMILIES: dict[str, type[Fa4Variant] | type[Fa3Variant] | type[Fa2Variant] | type[UnfusedVariant]] = {
    "fa4": Fa4Variant,
    "fa3": Fa3Variant,
    "fa2": Fa2Variant,
    "unfused": UnfusedVariant,
}
#: paired: persistent, a long and a short query block of one head after the other, so that every pair is the same work.
SCHEDULERS = ("grid", "persistent", "longest-first", "work-stealing", "paired")

#: Allowed values of knobs with few; numbers are (low, high) ranges.
_CHOICES: dict[str, tuple[object, ...]] = {
    "scheduler": SCHEDULERS,
    "split": ("q", "k"),
    "cta_group": (1, 2),
    "stages": (1, 2, 3, 4),
    "tile_m": (16, 32, 64, 128, 256),
    "warpgroups": (1, 2, 3),
    "warps": (4, 8),
    "stats_slots": (1, 2),
    "q_stages": (1, 2),
    "rescale": ("always", "conditional", "anchored"),
    "poly_degree": (1, 2, 3, 4, 5),
    "intermediate_bytes": (0, 2, 4),
}
_RANGES: dict[str, tuple[float, float]] = {
    "tile_n": (16, 256),
    "kv_stages": (0, 32),
    "emulated_share": (0.0, 1.0),
    "rescale_threshold": (0.0, 64.0),
}


def parse_variant(text: str, base: Variant | None = None) -> Variant:
    """A variant from "family=fa4,cta_group=2,..."; knobs not named keep ``base``'s (or the family's) values.

    Raises VariantError with the nearest names for an unknown family, knob or value.
    """
    pairs: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, found, value = part.partition("=")
        if not found or not value:
            raise VariantError(f"--variant: expected knob=value, got '{part}'")
        pairs[key.strip().replace("-", "_")] = value.strip()
    family = pairs.pop("family", base.family if base else "")
    if family not in FAMILIES:
        raise VariantError(f"--variant: unknown family '{family}'{nearest(family, tuple(FAMILIES))}")
    variant: Variant = base if base is not None and base.family == family else FAMILIES[family]()
    changes = {key: _knob_value(variant, key, value) for key, value in pairs.items()}
    return replace(variant, **changes)  # type: ignore[arg-type]


def _knob_value(variant: Variant, key: str, text: str) -> object:
    names = tuple(f.name for f in fields(variant) if f.name != "family")
    if key not in names:
        raise VariantError(f"--variant: family {variant.family} has no knob '{key}'{nearest(key, names)}")
    current = getattr(variant, key)
    try:
        if isinstance(current, bool):
            value: object = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[
                text.lower()
            ]
        elif isinstance(current, str):
            value = text
        else:
            value = type(current)(text)
    except (KeyError, ValueError):
        kind = "true or false" if isinstance(current, bool) else type(current).__name__
        raise VariantError(f"--variant: knob '{key}' takes {kind}, got '{text}'") from None
    if key in _CHOICES and value not in _CHOICES[key]:
        allowed = ", ".join(str(v) for v in _CHOICES[key])
        raise VariantError(f"--variant: knob '{key}' takes one of {allowed}, got '{text}'")
    if key in _RANGES and not _RANGES[key][0] <= float(value) <= _RANGES[key][1]:  # type: ignore[arg-type]
        low, high = _RANGES[key]
        raise VariantError(f"--variant: knob '{key}' takes {low:g} to {high:g}, got '{text}'")
    if key == "tile_n" and int(value) % 16:  # type: ignore[call-overload]
        raise VariantError(f"--variant: knob 'tile_n' takes multiples of 16, got '{text}'")
    return value


def variant_text(variant: Variant) -> str:
    """The variant as --variant takes it: family first, then every knob."""
    knobs = (f"{f.name}={_plain(getattr(variant, f.name))}" for f in fields(variant))
    return ",".join(knobs)


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


# --- legality, one predicate per family ---------------------------------------------------------------------


def legality(variant: Variant, workload: Workload, machine: Machine) -> Verdict:
    """Whether ``variant`` can run ``workload`` on ``machine``; the only statement of the rules."""
    if isinstance(variant, Fa4Variant):
        return _fa4_legality(variant, workload, machine)
    if isinstance(variant, Fa3Variant):
        return _fa3_legality(variant, workload, machine)
    if isinstance(variant, Fa2Variant):
        return _fa2_legality(variant, workload, machine)
    return LEGAL


def fa4_smem_bytes(variant: Fa4Variant, workload: Workload, machine: Machine) -> tuple[int, int, int]:
    """(Q bytes, bytes of one K/V ring slot, slots): the ring takes what Q and bookkeeping leave, at most 32."""
    size = workload.dtype_bytes
    tiles = variant.stages if variant.split == "q" else 1
    query = tiles * variant.tile_m * workload.head_dim_qk * size
    slot = variant.tile_n * max(workload.head_dim_qk, workload.head_dim_v) * size // variant.cta_group
    room = int(machine["smem.per_cta_bytes"]) - query - _SMEM_BOOKKEEPING
    # 192/128 uses uneven slots (K 192 wide, V 128 wide): count pairs by their true size.
    pair = variant.tile_n * (workload.head_dim_qk + workload.head_dim_v) * size // variant.cta_group
    slots = min(32, int(2 * room // pair)) if room > 0 else 0
    return query, slot, variant.kv_stages or slots


def _fa4_legality(variant: Fa4Variant, workload: Workload, machine: Machine) -> Verdict:
    if machine.tensor_kind != "tcgen05":
        return Verdict(False, f"family fa4 (tcgen05.mma and tensor memory) on {machine.name}", 1, 0, "tcgen05 unit",
                       "use family fa3 on Hopper or fa2 elsewhere")  # fmt: skip
    if workload.dtype == "fp8" and not machine.has("tensor.fp8_flop_per_clk"):
        return Verdict(False, "fp8 tensor core", 1, 0, "unit", "use bf16 or fp16")
    if variant.tile_m != 128:
        return Verdict(False, "query tile", variant.tile_m, 128, "rows", "tcgen05 softmax roles own 128 rows each")
    if workload.head_dim_qk % 16 or workload.head_dim_v % 16:
        return Verdict(False, "head_dim granularity", 16, 8, "elements", "pad head_dim to a multiple of 16")
    tiles_o = variant.stages if variant.split == "q" else 1
    columns = variant.stages * variant.tile_n + tiles_o * workload.head_dim_v
    limit_columns = int(machine["tmem.columns"])
    if columns > limit_columns:
        scores = variant.stages * variant.tile_n
        if tiles_o > 1 and scores + workload.head_dim_v <= limit_columns:
            lever = "use split=k (one query tile, alternate key blocks)"
        elif scores < limit_columns:
            lever = f"use a head_dim_v of at most {limit_columns - scores}, or a smaller tile_n"
        else:
            lever = "use a smaller tile_n or fewer stages"
        name = "tensor memory (S/P and O accumulators)"
        return Verdict(False, name, columns, limit_columns, "columns", lever)
    query, slot, slots = fa4_smem_bytes(variant, workload, machine)
    limit = int(machine["smem.per_cta_bytes"])
    need = query + max(2, variant.kv_stages) * slot + _SMEM_BOOKKEEPING
    if slots < 2 or (variant.kv_stages and need > limit):
        return Verdict(False, "shared memory (Q tiles and K/V ring)", need, limit, "bytes",
                       "use cta_group=2 (each CTA holds half of K and V), split=k, fewer kv_stages or a smaller tile_n")  # fmt: skip
    if variant.load_max and not machine.get("tmem.load_reduce", 0.0):
        return Verdict(False, "tcgen05.ld.red", 1, 0, "instruction", "set load_max=false (sm_103 and later have it)")
    return LEGAL


def fa3_registers(variant: Fa3Variant, workload: Workload) -> int:
    """Registers a consumer thread needs: O and S accumulators, P, and with overlap the next S as well."""
    score = variant.tile_n // 2
    return workload.head_dim_v // 2 + score + (variant.tile_n // 4 if variant.overlap else 0) + _HOPPER_SCALAR_REGISTERS


def _fa3_legality(variant: Fa3Variant, workload: Workload, machine: Machine) -> Verdict:
    if machine.tensor_kind != "wgmma":
        return Verdict(False, f"family fa3 (wgmma) on {machine.name}", 1, 0, "wgmma unit", "use family fa4 on data-centre Blackwell or fa2 elsewhere")  # fmt: skip
    limit = {1: 255, 2: 240, 3: 160}[variant.warpgroups]
    need = fa3_registers(variant, workload)
    if need > limit:
        return Verdict(False, "registers of a consumer thread", need, limit, "registers", "use a smaller tile_n, fewer warpgroups or overlap=false")  # fmt: skip
    size = workload.dtype_bytes
    query = 64 * variant.warpgroups * workload.head_dim_qk * size * variant.q_stages
    ring = variant.kv_stages * variant.tile_n * (workload.head_dim_qk + workload.head_dim_v) * size
    total = query + ring + _SMEM_BOOKKEEPING
    if total > machine["smem.per_cta_bytes"]:
        return Verdict(False, "shared memory (Q tile and K/V ring)", total, machine["smem.per_cta_bytes"], "bytes", "use a smaller tile_n, fewer warpgroups or fewer kv_stages")  # fmt: skip
    return LEGAL


def _fa2_legality(variant: Fa2Variant, workload: Workload, machine: Machine) -> Verdict:
    if workload.dtype == "fp8" and not machine.has("tensor.fp8_flop_per_clk"):
        return Verdict(False, f"fp8 tensor core on {machine.name}", 1, 0, "unit", "use bf16 or fp16")
    size = workload.dtype_bytes
    query = variant.tile_m * workload.head_dim_qk * size
    ring = variant.stages * variant.tile_n * (workload.head_dim_qk + workload.head_dim_v) * size
    if query + ring > machine["smem.per_cta_bytes"]:
        return Verdict(False, "shared memory (Q tile and K/V tiles)", query + ring, machine["smem.per_cta_bytes"], "bytes", "use a smaller tile_m or tile_n")  # fmt: skip
    need = fa2_registers(variant, workload)
    if need > machine["reg.max_per_thread"]:
        return Verdict(False, "registers of a thread", need, machine["reg.max_per_thread"], "registers", "use 8 warps or a smaller tile_m or tile_n")  # fmt: skip
    return LEGAL


def fa2_registers(variant: Fa2Variant, workload: Workload) -> int:
    """Registers a thread needs: O and S accumulators of its rows, packed P, addresses."""
    rows = variant.tile_m / (variant.warps * 32)
    return int(rows * (workload.head_dim_v + variant.tile_n)) + 40


def fa2_ctas_per_sm(variant: Fa2Variant, workload: Workload, machine: Machine) -> int:
    """CTAs that fit one SM by shared memory, registers and warps (at least 1)."""
    size = workload.dtype_bytes
    smem = size * (
        variant.tile_m * workload.head_dim_qk
        + variant.stages * variant.tile_n * (workload.head_dim_qk + workload.head_dim_v)
    )
    by_smem = machine["smem.per_sm_bytes"] // (smem + 1024)
    registers = -(-min(255, fa2_registers(variant, workload)) // 8) * 8
    by_registers = machine["reg.file_bytes"] // (registers * 4 * 32 * variant.warps)
    by_warps = machine["sm.max_warps"] // variant.warps
    return max(1, int(min(by_smem, by_registers, by_warps, 4)))
