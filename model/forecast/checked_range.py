"""What the model has been held against, what lies outside, and what its kernel classes leave out."""

from __future__ import annotations

from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

_HEAD_DIMS = (64, 256)
_LENGTHS = (512, 131072)
#: Queries below which a kernel made for decoding would split the keys over SMs or pack the heads of a group into a tile.
_DECODE_QUERIES = 64


def outside_checked_range(workload: Workload, machine: Machine) -> tuple[str, ...]:
    """Why the workload lies outside what the model has been held against (empty: inside)."""
    reasons = []
    low, high = _HEAD_DIMS
    dims = (workload.head_dim_qk, workload.head_dim_v)
    if not (low <= min(dims) and max(dims) <= high):
        reasons.append(f"head_dim {'/'.join(str(d) for d in dict.fromkeys(dims))} (checked: {low} to {high})")
    low, high = _LENGTHS
    shortest, longest = sorted((workload.seqlen_q, workload.seqlen_k))
    if shortest < low or longest > high:
        reasons.append(f"seqlen {shortest if shortest < low else longest} (checked: {low} to {high})")
    if machine.tensor_kind == "mma_sync" and workload.dtype == "fp8":
        reasons.append("fp8 through mma.sync (no published attention rows)")
    if any(fact.kind == "what-if" for fact in machine.facts.values()):
        reasons.append("a machine changed by what-if")
    return tuple(reasons)


def left_out(workload: Workload) -> tuple[str, ...]:
    """What kernels made for such a shape do and the kernel classes here do not."""
    if workload.seqlen_q >= _DECODE_QUERIES:
        return ()
    group = " and packs the query heads of a group into one tile" if workload.group_size > 1 else ""
    return (
        f"{workload.seqlen_q} queries a head: a decode kernel splits the keys over SMs{group}; none of these kernel "
        "classes does, so expect it to be several times as fast",
    )
