"""What forecasts of backward passes have been held against, and what lies outside.

The H200's own passes and loops (data/measured) and the published ones of Hopper and Blackwell, `tilecast validate backward`.
"""

from __future__ import annotations

from tilecast.model.forecast.checked_range import outside
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

_LENGTHS = (1024, 32768)
#: Matrix units whose backward passes are in the tables.
_CHECKED = ("wgmma", "tcgen05")


def outside_checked_range(workload: Workload, machine: Machine) -> tuple[str, ...]:
    """Why a backward pass lies outside what the model has been held against (empty: inside)."""
    path = f"a backward pass through {machine.tensor_kind} (no measured backward rows)"
    return outside(workload, machine, _LENGTHS, "" if machine.tensor_kind in _CHECKED else path)
