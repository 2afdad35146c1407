"""One partition of warp_specialize as it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import greenlet

from tilecast.emulator.hardware.barriers import Instance
from tilecast.emulator.hardware.clocks import FIRST_WGMMA, Agent
from tilecast.emulator.hardware.engines import Engines, Wgmma
from tilecast.emulator.hardware.parting import Unmet
from tilecast.emulator.hardware.transfers import Groups
from tilecast.emulator.trace import RoleTrace


class Runs(Engines, Protocol):
    """A running program that schedules roles."""

    hub: Any


class Role:
    """One partition: a thread of control, in each CTA an agent, and its queue of wgmma."""

    def __init__(self, program: Runs, index: int, name: str, warps: int, run: Callable[[], Any]) -> None:
        self.program, self.index, self.name, self.warps = program, index, name, warps
        self.agents = [Agent(index, cta, program.ctas) for cta in range(program.ctas)]
        self.coroutine = greenlet.greenlet(self._main, program.hub)
        self._run = run
        self.done = False
        #: None: can go on; otherwise says whether it can.
        self.blocked: Callable[[], bool] | None = None
        self.waiting: tuple[list[Instance], int, int] | None = None
        #: What a loop of it waits for in global memory, and where; empty where it does not.
        self.polls, self.polls_at = "", 0
        #: Number of the value that an atomic load of it returned last, by the element's address.
        self.polled: dict[int, int] = {}
        self.wgmma: deque[Wgmma] = deque()
        self.wgmma_issued = 0
        #: Line of the last wait that left a product in flight, by the product's number.
        self.left_by: dict[int, int] = {}
        #: PTX registers that outlive the block that writes them, by name.
        self.registers: dict[str, Any] = {}
        #: Tiles stored by the copy engine, and cp.async.
        self.stores, self.gathers = Groups(), Groups()
        self.unmet = Unmet()
        #: Allocations of shared memory that it has touched since the last barrier of its warps; whether it has stored there.
        self.touched: dict[int, bool] = {}
        self.trace = RoleTrace(name, index, warps)

    @property
    def wgmma_stream(self) -> int:
        """Number of its wgmma queue among the streams."""
        return FIRST_WGMMA + self.index

    def fenced_by_compiler(self, cta: int) -> tuple[int, bool]:
        """(stream of its own accesses in a CTA, whether the compiler fences its stores as well as its loads).

        Triton fences what one partition loads before a copy overwrites it; since 3.9 also what one partition stores before
        an engine reads it.  Nothing is fenced between partitions.
        """
        adds = self.program.session.adds_fences
        return (self.agents[cta].index if adds else -1), adds == "3.9"

    def _main(self) -> None:
        self._run()
        # What its arguments hold may be given back.
        self._run = lambda: None
        self.done = True
