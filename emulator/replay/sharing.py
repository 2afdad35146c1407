"""How what runs at the same time shares the units of an SM: fairly, the tensor core first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from tilecast.model.sm.fair_share import fill

#: The port of shared memory.
_PORT = "smem"


@dataclass(frozen=True, eq=False, slots=True)
class Load:
    """What one operation asks of the units of an SM (tensor, mufu, fma, ..), in cycles of each, and the shortest time that it takes.

    Beside a matrix product both may be more: where accumulators are in registers, arithmetic shares the register ports with it.
    """

    kind: str
    demand: tuple[tuple[str, float], ...]
    cycles: float
    demand_beside: tuple[tuple[str, float], ...]
    cycles_beside: float
    #: Cycles that it holds the role that issues it.
    issue_cycles: float = 0.0
    #: FMA of a warp; of a product, how many of them a cycle it hides: each beyond takes a cycle of the tensor core.
    fma: float = 0.0
    hidden_fma: float = inf

    def times(self, count: float) -> Load:
        """So many of it in a row."""
        demand, beside = (
            tuple((unit, count * cycles) for unit, cycles in one) for one in (self.demand, self.demand_beside)
        )
        return replace(
            self, demand=demand, cycles=count * self.cycles, demand_beside=beside, cycles_beside=count * self.cycles_beside,
            issue_cycles=count * self.issue_cycles, fma=count * self.fma,
        )  # fmt: skip


def speeds(loads: Sequence[Load], slows: bool = True, between: bool = True) -> tuple[float, ...]:
    """Max-min fair speeds: 1 is as fast as alone, without a product; ``slows``: arithmetic takes longer beside one.

    ``between``: what loads and stores of shared memory take of its port, a product that reads operands there goes without, as machine code is
    simulated (`model.compiled.units.wgmma`): they come in between its reads.  Otherwise they have what it leaves, as in the pipelines.

    >>> a = Load("work", (("mufu", 10.0),), 10.0, (("mufu", 10.0),), 10.0)
    >>> speeds((a, a))
    (0.5, 0.5)
    """
    multiplies = slows and any(load.kind == "product" for load in loads)
    use = [
        {
            unit: cycles / load.cycles
            for unit, cycles in (load.demand_beside if multiplies else load.demand)
            if not between or unit != _PORT or load.kind != "product"
        }
        for load in loads
    ]
    most = [load.cycles / load.cycles_beside if multiplies else 1.0 for load in loads]
    found = [1.0] * len(loads)
    left = dict.fromkeys((unit for wants in use for unit in wants), 1.0)
    # A scheduler issues an FMA a cycle at most.
    fma = min(1.0, sum(load.fma / load.cycles * speed for load, speed in zip(loads, most, strict=True)))
    beyond = fma - min((load.hidden_fma for load in loads), default=inf)
    if beyond > 0.0:
        left["tensor"] = 1.0 - beyond
    for first in (True, False):
        fill([i for i, load in enumerate(loads) if (load.kind == "product") is first], use, left, found, most)
    if not between:
        return tuple(found)
    taken = sum(
        dict(load.demand).get(_PORT, 0.0) / load.cycles * speed
        for load, speed in zip(loads, found, strict=True)
        if load.kind != "product"
    )
    for i, load in enumerate(loads):
        reads = dict(load.demand).get(_PORT, 0.0) / load.cycles if load.kind == "product" else 0.0
        if reads > 0.0:
            found[i] = min(found[i], max(0.0, 1.0 - taken) / reads)
    return tuple(found)
