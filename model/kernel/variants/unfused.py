"""Unfused attention, three kernels: S = Q K^T to memory, softmax over S, O = P V; what FlashAttention-1 argued against."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.kernel.grid import Grid
from tilecast.model.kernel.verdict import LEGAL, Verdict, over_limit
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine


@dataclass(frozen=True, slots=True)
class UnfusedVariant:
    """Tiles of the three kernels and the type of S and P in memory."""

    family: str = "unfused"
    tile_m: int = 128
    tile_n: int = 128
    intermediate_bytes: int = 0  # 0: the input dtype's size
    scheduler: str = "grid"


def legality(variant: UnfusedVariant, workload: Workload, machine: Machine) -> Verdict:
    """Three plain kernels run wherever the score matrix fits into memory beside the tensors; the softmax is in place."""
    scores = workload.batch * workload.heads_q * workload.seqlen_q * workload.seqlen_k
    need = workload.tensor_bytes + scores * (variant.intermediate_bytes or max(2, workload.dtype_bytes))
    room = machine.get("hbm.capacity_gb", 0.0) * 1e9
    if room and need > room:
        return over_limit(
            "memory (Q, K, V, O and the score matrix)",
            need / 1e9,
            room / 1e9,
            "GB",
            "use a fused family: fa2, fa3 or fa4",
        )
    return LEGAL


def writable(variant: UnfusedVariant, workload: Workload, machine: Machine) -> Verdict:
    """Nothing is written: the family exists to be compared with."""
    del variant, workload, machine
    return Verdict("the unfused family is forecast, not written", "use family fa2, fa3 or fa4")


def space(workload: Workload, machine: Machine) -> Grid[UnfusedVariant]:
    """Intermediates in the inputs' type, in 16 bits, in fp32."""
    del workload, machine
    return Grid(UnfusedVariant, ("intermediate_bytes",), ((0,), (2,), (4,)))


def published(_workload: Workload, _machine: Machine) -> UnfusedVariant:
    """Intermediates in the inputs' type."""
    return UnfusedVariant()


def structure(_v: UnfusedVariant) -> tuple[object, ...]:
    """There is one."""
    return ()


def plainness(v: UnfusedVariant) -> tuple[float, ...]:
    """All are alike."""
    return (v.intermediate_bytes,)
