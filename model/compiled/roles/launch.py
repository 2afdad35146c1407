"""A whole launch of a kernel by its steady loop: what its CTAs cost, dealt to the SMs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from tilecast.model.compiled.code import CodeError
from tilecast.model.compiled.roles.code import KernelRoles
from tilecast.model.compiled.roles.costs import RoleCosts
from tilecast.model.compiled.roles.run import RolesRun, run_roles, tile_cycles
from tilecast.model.machine.machine import Machine

#: Iterations of the tile from which its beginning and end are told: beyond what a ring of barriers needs to fill.
_TOLD = 24


@dataclass(frozen=True, slots=True)
class CtaCost:
    """CTAs of a kernel on an SM: so many at a time."""

    ctas: int
    steady: RolesRun
    #: Cycles of a CTA beyond its iterations: set-up, first loads, epilogue.
    ends: float
    #: Iterations' worth of products that stand outside of the loop.
    peeled: float
    #: The same as ``ends``, of a tile before which the same CTA had another; None of kernels whose CTAs have one each.
    later_ends: float | None = None

    def cycles(self, iterations: int, later: bool = False) -> float:
        """Cycles of a CTA for a tile of the work of ``iterations``, in or out of the loop; ``later``: it had another before."""
        ends = self.ends if self.later_ends is None or not later else self.later_ends
        return ends + max(0.0, iterations - self.peeled) * self.steady.cycles


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launch takes; shares are of its cycles."""

    cycles: float
    #: Pipe, "issue" or "tensor" -> busy share of an SM (0..1).
    busy: dict[str, float]


def cta_cost(
    kernel: KernelRoles, costs: RoleCosts, ctas: int = 1, steady: RolesRun | None = None, stay: bool = False
) -> CtaCost:
    """What CTAs of ``kernel`` cost, ``ctas`` of them on an SM (``steady``: their steady state where it is known; ``stay``: they take
    tile after tile); CodeError where its code cannot be followed."""
    steady = steady or run_roles(kernel, costs, ctas)

    def ends(later: bool) -> float:
        half, whole = (tile_cycles(kernel, costs, count, ctas, later) for count in (_TOLD // 2, _TOLD))
        # A tile may go at another pace than loops that began anyhow: its beginning and end are what it takes beyond iterations at its own.
        return max(0.0, 2.0 * half - whole)

    return CtaCost(ctas, steady, ends(later=False), kernel.peeled, ends(later=True) if stay else None)


def launch(cost: CtaCost, iterations: Sequence[int], machine: Machine, ctas: int = 0) -> Launch:
    """Tiles of ``iterations`` each on all SMs of ``machine``, the longest first, each to the CTA that is free first.

    ``ctas`` are launched, which take tile after tile where they are fewer than the tiles; 0: one for each.
    """
    slots = [0.0] * (int(machine["chip.sm_count"]) * cost.ctas)
    stay = 0 < ctas < len(iterations)
    if stay:
        slots = slots[:ctas]
    # From the last clock of a CTA to the first of the next on the SM.
    turnaround = machine.get("launch.cta_turnaround_cycles", machine["launch.cta_start_cycles"])
    for count in sorted(iterations, reverse=True):
        later = stay and slots[0] > 0.0
        heapq.heapreplace(slots, slots[0] + cost.cycles(count, later) + (0.0 if later else turnaround))
    cycles = max(slots)
    # An iteration of the steady state is one of every CTA on the SM.
    laps = sum(iterations) / len(slots)
    return Launch(cycles, {name: laps * busy / cycles for name, busy in cost.steady.busy.items()})


def spread(said: str, ctas: int) -> list[int]:
    """Iterations of every CTA: "128", or "1:128" for as many of each length between, as under a causal mask.

    CodeError for text that is neither.
    """
    parts = said.split(":")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts) or len(parts) > 2:
        raise CodeError(f"iterations: expected a number such as 128, or a range such as 1:128, got '{said}'")
    first, last = int(parts[0]), int(parts[-1])
    if ctas < 1:
        raise CodeError(f"CTAs: expected at least 1, got {ctas}")
    step = (last - first) / max(1, ctas - 1)
    return [round(first + step * i) for i in range(ctas)]
