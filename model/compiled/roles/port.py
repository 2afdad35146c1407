"""The line in which accesses to shared memory wait for its port, beside wgmma products that read their operands through it."""

from __future__ import annotations

import math
from collections import deque

from tilecast.model.compiled.roles.costs import RoleCosts
from tilecast.model.compiled.roles.warps import Prepared, Warp
from tilecast.model.compiled.units.spread import SPREAD, Spread
from tilecast.model.compiled.units.wgmma import WgmmaQueue


class PortLine:
    """Accesses in the order of their issue; times in cycles.

    An access stands in line and its warp goes on, until it needs what the access brings or the line is full.  How many it holds
    differs from one to the next (measured: data/measured/h200_smem_bursts.csv), evenly spread here, always the same sequence; with
    one number the simulated warpgroups keep one rhythm.  Beside a product an access passes as `WgmmaQueue.through_port` says, and no
    faster than its registers are read or written then.
    """

    def __init__(self, queue: WgmmaQueue, costs: RoleCosts) -> None:
        self._queue, self._costs = queue, costs
        #: (warp, access, when it was issued).
        self._line: deque[tuple[Warp, Prepared, float]] = deque()
        self._free = 0.0
        #: When the port took up each access so far.
        self._taken: list[float] = []
        self._spread = Spread()
        self._depth = costs.line_most

    def room(self, at: float) -> float | None:
        """When an access that could be issued ``at`` finds room; None while that is unknown."""
        leaves = len(self._taken) + len(self._line) - self._depth
        if leaves >= len(self._taken):
            return None
        return max(at, self._taken[leaves]) if leaves >= 0 else at

    def enter(self, warp: Warp, access: Prepared, now: float) -> None:
        """Join the line; when the access is through is not known yet."""
        warp.expect(access.code)
        self._line.append((warp, access, now))
        least, most = self._costs.line_least, self._costs.line_most
        self._depth = least + self._spread.next() * (most - least + 1) // SPREAD

    def next(self) -> float:
        """When the port takes up the first in line; infinity where nothing waits."""
        return max(self._free, self._line[0][2]) if self._line else math.inf

    def serve(self, at: float) -> None:
        """Let the first in line through from ``at`` on."""
        warp, access, _ = self._line.popleft()
        self._taken.append(at)
        taken = access.port
        if self._queue.runs(at):
            taken = max(self._queue.through_port(taken), access.beside[0])
        self._queue.take_port(at, access.port)
        self._free = at + taken
        warp.through(access.code, self._free, self._free + access.latency)
