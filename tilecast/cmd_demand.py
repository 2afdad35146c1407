"""``tilecast demand``: cycles per unit and bytes per level in closed form, no simulation."""

from __future__ import annotations

import json

from tilecast.model.demand import demand_dict, demand_report
from tilecast.model.machine import Machine, load_machine
from tilecast.model.workload import Workload


def run_demand(
    machine: Machine | str,
    workload: Workload | None = None,
    tile_m: int = 128,
    tile_n: int = 128,
    as_json: bool = False,
) -> str:
    """Text (or JSON) of the closed forms; raises DemandError, MachineError or WorkloadError (all ValueError)."""
    chip = load_machine(machine) if isinstance(machine, str) else machine
    if as_json:
        return json.dumps(demand_dict(chip, workload, tile_m, tile_n), indent=2)
    return demand_report(chip, workload, tile_m, tile_n)
