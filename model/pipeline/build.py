"""Pipeline builders, one per kernel family; `build_pipeline` picks by variant."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tilecast.model.kernel.variant import Fa2Variant, Fa3Variant, Fa4Variant, UnfusedVariant, Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import fa2, fa3, fa4, unfused
from tilecast.model.pipeline.graph import Pipeline


def build_pipeline(workload: Workload, variant: Variant, machine: Machine) -> Pipeline:
    """The loop of ``variant`` for ``workload`` on ``machine``; of the workload only head dimensions, dtype and mask matter.

    The unfused family has three kernels; this returns the first, `unfused.kernels` all of them.
    """
    if isinstance(variant, UnfusedVariant):
        return unfused.kernels(workload, variant, machine)[0].pipeline
    # The scheduler deals tiles and leaves their loop alone: variants that differ in nothing else share one pipeline.
    return _build(
        loop_shape(workload), variant if variant.scheduler == "grid" else replace(variant, scheduler="grid"), machine
    )


def loop_shape(workload: Workload) -> Workload:
    """The workload reduced to what a loop body depends on, so that pipelines and simulations are shared between shapes."""
    return replace(workload, batch=1, heads_q=1, heads_kv=1, seqlen_q=8192, seqlen_k=8192)


@lru_cache(maxsize=8192)
def _build(workload: Workload, variant: Fa4Variant | Fa3Variant | Fa2Variant, machine: Machine) -> Pipeline:
    if isinstance(variant, Fa4Variant):
        return fa4.build(workload, variant, machine)
    if isinstance(variant, Fa3Variant):
        return fa3.build(workload, variant, machine)
    return fa2.build(workload, variant, machine)
