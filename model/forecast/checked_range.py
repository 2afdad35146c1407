"""What the model has been held against, and what lies outside."""

from __future__ import annotations

from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine


def outside_checked_range(workload: Workload, machine: Machine) -> tuple[str, ...]:
    """Why the workload lies outside what the model has been held against (empty: inside)."""
    reasons = []
    if not 64 <= workload.head_dim_qk <= 256:
        reasons.append(f"head_dim {workload.head_dim_qk} (checked: 64 to 256)")
    if workload.seqlen_q < 512 or workload.seqlen_k < 512:
        reasons.append(f"seqlen {min(workload.seqlen_q, workload.seqlen_k)} (checked: 512 to 131072)")
    if machine.tensor_kind == "mma_sync" and workload.dtype == "fp8":
        reasons.append("fp8 through mma.sync (no published attention rows)")
    if any(fact.kind == "what-if" for fact in machine.facts.values()):
        reasons.append("a machine changed by what-if")
    return tuple(reasons)
