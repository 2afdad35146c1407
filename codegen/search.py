"""Every variant of a family worth writing for a machine and a workload, and the best of them by forecast."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from tilecast.codegen.families import Family
from tilecast.model.forecast.predict import PredictError, predict
from tilecast.model.kernel.variant import Fa2Variant, Fa3Variant, Fa4Variant, Variant, Verdict, legality
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine


def search_space(family: Family, workload: Workload, machine: Machine) -> tuple[Variant, ...]:
    """The expressible variants, in order of preference among equals; empty when there is none."""
    return tuple(
        variant for variant in _candidates(family, workload, machine) if family.expressible(variant, workload, machine).legal
    )  # fmt: skip


def best_expressible(family: Family, workload: Workload, machine: Machine) -> Variant:
    """The expressible variant with the shortest predicted time; the earlier candidate wins ties.

    Raises PredictError, naming the first obstacle, when no candidate can be written.
    """
    space = search_space(family, workload, machine)
    if not space:
        raise PredictError(
            f"{family.name} cannot be written for {workload.label()} on {machine.name}: "
            f"{first_obstacle(family, workload, machine).sentence()}"
        )
    scored = [
        (round(predict(workload, machine, variant, interval=False).time_ms, 9), i) for i, variant in enumerate(space)
    ]
    return space[min(scored)[1]]


def first_obstacle(family: Family, workload: Workload, machine: Machine) -> Verdict:
    """Why the preferred candidate cannot be written."""
    for variant in _candidates(family, workload, machine):
        verdict = legality(variant, workload, machine)
        return verdict if not verdict.legal else family.expressible(variant, workload, machine)
    raise AssertionError("every family has candidates")


def _candidates(family: Family, workload: Workload, machine: Machine) -> Iterator[Variant]:
    masked = workload.mask != "none"
    if family.name == "hopper_ws":
        schedulers = ("paired", "longest-first") if workload.mask == "causal" else ("persistent", "grid")
        for scheduler, rescale, groups, tile_n, stages, queries, share in product(
            schedulers, ("anchored", "conditional", "always"), (2, 3), (64, 128, 32), (4, 3, 2), (2, 1), (0.0, 0.125, 0.25)
        ):  # fmt: skip
            yield Fa3Variant(warpgroups=groups, tile_n=tile_n, kv_stages=stages, q_stages=queries, ping_pong=False,
                             rescale=rescale, emulated_share=share, scheduler=scheduler)  # fmt: skip
    elif family.name == "blackwell_ws":
        scheduler = "longest-first" if masked else "persistent"
        shares = (0.0,) if machine["mufu.ex2_per_clk"] >= 32 else (0.125, 0.1875, 0.25, 0.0)
        # One CTA with a 256 wide head spills in its matrix role.
        wide = max(workload.head_dim_qk, workload.head_dim_v) > 192
        pairs = (2,) if wide else (1,) if masked else (2, 1)
        for pair, split, share, slots, max_on_load in product(pairs, ("q", "k"), shares, (2, 1), (True, False)):
            yield Fa4Variant(cta_group=pair, split=split, emulated_share=share, stats_slots=slots,
                             load_max=max_on_load, scheduler=scheduler)  # fmt: skip
    else:
        scheduler = "longest-first" if masked else "grid"
        for (tile_m, warps), tile_n, stages in product(((128, 8), (128, 4), (64, 4)), (128, 64, 32), (3, 2, 4)):
            yield Fa2Variant(tile_m=tile_m, tile_n=tile_n, warps=warps, stages=stages, scheduler=scheduler)
