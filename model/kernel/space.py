"""The whole legal space of a family: every combination of knobs worth telling apart, in one fixed order.

`candidates` lists the few variants a quick forecast chooses from; a tuner and a what-if want all of them.  Knobs that
cannot matter are held at one value, so that no kernel appears twice under two names: the schedulers deal equal tiles
alike, one warpgroup has nobody to take turns with, and the degree of a polynomial nobody evaluates is the default's.
Knobs that change the result's accuracy (poly_degree, rescale_threshold) are not the tuner's to change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

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

#: Key tiles of the tcgen05 and wgmma families: wgmma takes N in steps of 8, the published kernels use steps of 16.
_TILES_FA4 = (128, 64, 96, 160, 192, 256)
_TILES_FA3 = (128, 64, 32, 48, 80, 96, 112, 144, 160, 176, 192, 256)
#: Share of exponentials on the FMA pipe: what FlashAttention-4 ships lies between 1/16 and 0.3 (fa4.md (d)).
_SHARES_FA4 = (0.0, 0.0625, 0.125, 0.1875, 0.25, 0.375)
_SHARES_FA3 = (0.0, 0.125, 0.25)


def legal_space(family: str, workload: Workload, machine: Machine) -> tuple[Variant, ...]:
    """Every legal variant of ``family`` (fa4, fa3, fa2, unfused), in order of preference among equals.

    Hundreds to thousands; empty where the family cannot run at all.  VariantError for unknown families.
    """
    return tuple(v for v in knob_space(family, workload, machine) if legality(v, workload, machine).legal)


def knob_space(family: str, workload: Workload, machine: Machine) -> tuple[Variant, ...]:
    """`legal_space` before legality: an audit trail shows what was illegal and why."""
    if family not in FAMILIES:
        raise VariantError(f"unknown kernel family '{family}'{nearest(family, tuple(FAMILIES))}")
    makers: dict[str, Callable[[Workload, Machine], Iterator[Variant]]] = {"fa4": _fa4, "fa3": _fa3, "fa2": _fa2}
    return tuple(makers[family](workload, machine)) if family in makers else (UnfusedVariant(),)


def _schedulers(workload: Workload, lasting: tuple[str, ...]) -> tuple[str, ...]:
    """Schedulers that differ for this mask: without one all tiles are alike, so their order does not matter."""
    if workload.mask == "none":
        return ("persistent", "grid")
    return (*lasting, "longest-first", "persistent", "grid")


def _fa4(workload: Workload, machine: Machine) -> Iterator[Fa4Variant]:
    maxima = (True, False) if machine.get("tmem.load_reduce", 0.0) else (False,)
    # Two tiles in flight, of queries or of key blocks; with one there is nothing to split.
    flights = ((2, "q"), (2, "k"), (1, "q"))
    for scheduler, group, (stages, split), tile_n, kv_stages, share, slots, split_p, load_max in product(
        _schedulers(workload, ()), (1, 2), flights, _TILES_FA4, (0, 2, 3), _SHARES_FA4, (2, 1), (True, False), maxima
    ):  # fmt: skip
        if slots == 2 and stages == 1:
            continue  # one group never waits for the other's statistics
        yield Fa4Variant(tile_n=tile_n, stages=stages, split=split, kv_stages=kv_stages, cta_group=group, emulated_share=share,
                         split_p=split_p, stats_slots=slots, load_max=load_max, scheduler=scheduler)  # fmt: skip


def _fa3(workload: Workload, machine: Machine) -> Iterator[Fa3Variant]:
    del machine
    for scheduler, rescale, groups, tile_n, kv_stages, q_stages, overlap, turns, share in product(
        _schedulers(workload, ("paired",) if workload.mask == "causal" else ()), ("anchored", "conditional", "always"),
        (2, 3, 1), _TILES_FA3, (4, 3, 2), (2, 1), (True, False), (False, True), _SHARES_FA3,
    ):  # fmt: skip
        if turns and groups == 1:
            continue
        if q_stages == 2 and scheduler in ("grid", "longest-first"):
            continue  # one tile a CTA: there is no next Q to prefetch
        yield Fa3Variant(warpgroups=groups, tile_n=tile_n, kv_stages=kv_stages, q_stages=q_stages, overlap=overlap,
                         ping_pong=turns, rescale=rescale, emulated_share=share, scheduler=scheduler)  # fmt: skip


def _fa2(workload: Workload, machine: Machine) -> Iterator[Fa2Variant]:
    del machine
    schedulers = ("grid",) if workload.mask == "none" else ("longest-first", "grid")
    for scheduler, (tile_m, warps), tile_n, stages in product(
        schedulers, ((128, 8), (128, 4), (64, 4), (64, 8), (256, 8), (32, 4)), (128, 64, 32, 16, 96, 256), (3, 2, 4, 1)
    ):
        yield Fa2Variant(tile_m=tile_m, tile_n=tile_n, warps=warps, stages=stages, scheduler=scheduler)
