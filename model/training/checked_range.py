"""What forecasts of backward passes have been held against, and what lies outside.

The H200's own passes and loops (data/measured) and the published ones of Hopper and Blackwell, `tilecast validate backward`.
"""

from __future__ import annotations

from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

_HEAD_DIMS = (64, 256)
_LENGTHS = (1024, 32768)
#: Matrix units whose backward passes are in the tables.
_CHECKED = ("wgmma", "tcgen05")


def outside_checked_range(workload: Workload, machine: Machine) -> tuple[str, ...]:
    """Why a backward pass lies outside what the model has been held against (empty: inside)."""
    reasons = []
    low, high = _HEAD_DIMS
    dims = (workload.head_dim_qk, workload.head_dim_v)
    if not (low <= min(dims) and max(dims) <= high):
        reasons.append(f"head_dim {'/'.join(str(d) for d in dict.fromkeys(dims))} (checked: {low} to {high})")
    low, high = _LENGTHS
    shortest, longest = sorted((workload.seqlen_q, workload.seqlen_k))
    if shortest < low or longest > high:
        reasons.append(f"seqlen {shortest if shortest < low else longest} (checked: {low} to {high})")
    if machine.tensor_kind not in _CHECKED:
        reasons.append(f"a backward pass through {machine.tensor_kind} (no measured backward rows)")
    if any(fact.kind == "what-if" for fact in machine.facts.values()):
        reasons.append("a machine changed by what-if")
    return tuple(reasons)
