"""Which variants to look at: the kernels as their authors ship them, and what a forecast chooses from.

Tiles and knobs of the published kernels: flash-attention @0251105 as read in fa4.md (d).
"""

from __future__ import annotations

from tilecast.base.words import nearest
from tilecast.model.kernel.variant import (
    FAMILIES,
    Fa2Variant,
    Fa3Variant,
    Fa4Variant,
    UnfusedVariant,
    Variant,
    VariantError,
    legality,
)
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine


def published_variant(family: str, workload: Workload, machine: Machine) -> Variant:
    """The variant the family's authors ship for this shape (fa4.md (d)); VariantError for unknown families."""
    if family not in FAMILIES:
        raise VariantError(f"unknown kernel family '{family}'{nearest(family, tuple(FAMILIES))}")
    if family == "fa4":
        return _published_fa4(workload, machine)
    if family == "fa3":
        return _published_fa3(workload)
    if family == "fa2":
        wide = workload.head_dim_v > 64
        return Fa2Variant(tile_n=64 if wide or machine["smem.per_cta_bytes"] < 120_000 else 128,
                          tile_m=128 if workload.head_dim_v <= 128 else 64)  # fmt: skip
    return UnfusedVariant()


def _published_fa4(workload: Workload, machine: Machine) -> Fa4Variant:
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
        scheduler="longest-first" if masked else "persistent",
    )


def _published_fa3(workload: Workload) -> Fa3Variant:
    wide = max(workload.head_dim_qk, workload.head_dim_v)
    scheduler = "grid" if workload.mask == "none" else "longest-first"
    if wide <= 64:
        return Fa3Variant(warpgroups=3, tile_n=128, ping_pong=True, scheduler=scheduler)
    if wide <= 96:
        return Fa3Variant(warpgroups=3, tile_n=128 if workload.mask != "none" else 144, overlap=False, scheduler=scheduler)  # fmt: skip
    if wide <= 128:
        return Fa3Variant(warpgroups=2, tile_n=128, scheduler=scheduler)
    if wide <= 192:
        return Fa3Variant(warpgroups=2, tile_n=112 if workload.mask == "none" else 96, scheduler=scheduler)
    return Fa3Variant(warpgroups=2, tile_n=80, scheduler=scheduler)


def native_family(machine: Machine) -> str:
    """The family built for the machine's matrix unit."""
    return {"tcgen05": "fa4", "wgmma": "fa3"}.get(machine.tensor_kind, "fa2")


def candidates(family: str, workload: Workload, machine: Machine) -> tuple[Variant, ...]:
    """Legal variants a forecast chooses from, in order of preference among equals."""
    masked = workload.mask != "none"
    schedulers = ("longest-first",) if masked else ("persistent",)
    found: list[Variant] = []
    if family == "fa4":
        wide = max(workload.head_dim_qk, workload.head_dim_v)
        shares = (0.0,) if machine["mufu.ex2_per_clk"] >= 32 else (0.0, 0.125, 0.1875, 0.25)
        groups = (2, 1) if not masked or wide > 192 else (1,)
        load_max = bool(machine.get("tmem.load_reduce", 0.0))
        for scheduler in schedulers:
            for group in groups:
                for split in ("q", "k"):
                    found += [
                        Fa4Variant(split=split, cta_group=group, emulated_share=s, scheduler=scheduler, load_max=load_max, stats_slots=2)
                        for s in shares
                    ]  # fmt: skip
        legal = [v for v in found if legality(v, workload, machine).legal]
        # split=k only matters where two query tiles do not fit: it halves the rows that share a K/V read.
        two_tiles = [v for v in legal if isinstance(v, Fa4Variant) and v.split == "q"]
        return tuple(two_tiles or legal)
    if family == "fa3":
        for warpgroups in (2, 3):
            for tile_n in (64, 80, 96, 112, 128, 160, 176):
                for overlap in (True, False):
                    found.append(
                        Fa3Variant(warpgroups=warpgroups, tile_n=tile_n, overlap=overlap, scheduler=schedulers[0])
                    )
    elif family == "fa2":
        for tile_m, warps in ((128, 4), (128, 8), (64, 4)):
            for tile_n in (32, 64, 128):
                found.append(Fa2Variant(tile_m=tile_m, tile_n=tile_n, warps=warps, scheduler=schedulers[0]))
    elif family == "unfused":
        found.append(UnfusedVariant())
    else:
        raise VariantError(f"unknown kernel family '{family}'{nearest(family, tuple(FAMILIES))}")
    return tuple(v for v in found if legality(v, workload, machine).legal)
