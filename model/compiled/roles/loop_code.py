"""A loop of a backward pass as its machine code runs it, in place of the pipeline's simulation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilecast.model.chip.tiles import HeadTiles
from tilecast.model.compiled.roles.code import KernelRoles
from tilecast.model.compiled.roles.costs import role_costs
from tilecast.model.compiled.roles.launch import cta_cost
from tilecast.model.compiled.roles.run import run_roles
from tilecast.model.machine.machine import Machine


@dataclass(frozen=True, slots=True)
class LoopCode:
    """Cycles of a CTA that is alone on its SM."""

    #: Of an iteration, and of one that masks its scores.
    cycles: float
    masked_cycles: float
    #: Beyond the iterations: from a warp's first instruction to its first block, and after its last.
    ends: float
    #: Pipe, "tensor", "issue" or "port" -> busy share in an iteration (0..1).
    busy: tuple[tuple[str, float], ...]

    @property
    def masked_extra(self) -> float:
        """What an iteration that masks its scores takes more."""
        return max(0.0, self.masked_cycles - self.cycles)

    def tile_cycles(self, tiles: HeadTiles) -> NDArray[np.float64]:
        """Cycles of each listed tile's iterations."""
        masked = np.minimum(tiles.masked, tiles.iterations)
        return tiles.iterations * self.cycles + masked * self.masked_extra


def loop_code(kernel: KernelRoles, masked: KernelRoles, machine: Machine) -> LoopCode:
    """Run the roles of ``kernel``, and those of the same that masks in every iteration; CodeError where they wait for each other."""
    costs = role_costs(machine)
    cost = cta_cost(kernel, costs)
    steady = cost.steady
    slow = steady.cycles if masked == kernel else run_roles(masked, costs).cycles
    # Products that stand outside of the loop are those of iterations.
    ends = max(0.0, cost.ends - cost.peeled * steady.cycles)
    busy = tuple((name, cycles / steady.cycles) for name, cycles in steady.busy.items())
    return LoopCode(steady.cycles, slow, ends, busy)
