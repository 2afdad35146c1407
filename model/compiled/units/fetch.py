"""What instruction fetch costs an SM: code that its first instruction cache does not hold comes from the next at a limited rate.

Measured (`tilecast calibrate --only code`): straight-line code runs at full rate while all of it fits the first cache.
Beyond, a rate that SMs share limits it, the lower the more code there is (SMs that are at different places share fewer
fetches), and lower still when it comes from L2; code that is slow for other reasons hides the fetch, and warps that run
the same code share it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tilecast.model.compiled.costs import WarpCosts
from tilecast.model.machine.machine import Machine

#: Cycles an instruction from code that no cache of an SM holds, where a machine file does not say (H200, measured).
_FAR_CYCLES = 4.9
#: The same from the second cache of code, a little beyond the first.
_NEAR_CYCLES = 2.03
#: Bytes of an instruction, and how many there are in a line of 128 bytes.
INSTRUCTION_BYTES = 16
LINE = 8


class FetchCosts(NamedTuple):
    """What of `WarpCosts` fetching takes."""

    fetch_lines: float
    fetch_near_lines: float
    fetch_cycles: float
    fetch_full_cycles: float
    fetch_far_cycles: float


def far_cycles(machine: Machine) -> float:
    """Cycles an instruction takes that no cache near the SM holds."""
    return machine.get("code.fetch_far_cycles", _FAR_CYCLES)


def near_cycles(machine: Machine) -> float:
    """Cycles an instruction takes of code that is a little longer than the first cache."""
    return machine.get("code.fetch_cycles", _NEAR_CYCLES)


def beyond_first_cache(instructions: float, machine: Machine) -> bool:
    """Whether the first cache does not hold a program of so many instructions: programs of one SM then fetch it each for itself."""
    return INSTRUCTION_BYTES * instructions > machine.get("code.l1_bytes", 0.0)


def fetch_costs(costs: WarpCosts) -> FetchCosts:
    """That of ``costs``."""
    return FetchCosts(*(getattr(costs, name) for name in FetchCosts._fields))


def fetch_cycles(lines: int, costs: WarpCosts | FetchCosts) -> float:
    """Cycles of an SM for an instruction that the first cache does not hold, in a program of ``lines`` lines.

    Between the measured sizes (just beyond the first cache, the whole of the second, twice that) it grows evenly.
    """
    near, far = costs.fetch_near_lines, 2.0 * costs.fetch_near_lines
    sizes = (min(1.5 * costs.fetch_lines, near), near, far)
    return float(np.interp(lines, sizes, (costs.fetch_cycles, costs.fetch_full_cycles, costs.fetch_far_cycles)))


class InstructionCache:
    """Lines of code in the first cache, the least recently used out first; the line after one in use is fetched ahead."""

    def __init__(self, programs: Sequence[Sequence[int]], costs: WarpCosts | FetchCosts) -> None:
        self._known = {line for program in programs for line in program}
        self.room = int(costs.fetch_lines)
        #: Of a line that is fetched.
        self.cycles = LINE * fetch_cycles(len(self._known), costs)
        self._free = 0.0
        #: Line -> when it is there.
        self._there: OrderedDict[int, float] = OrderedDict()
        if not self.needed:
            return
        # As the tile before left it: what the programs ran last.
        last = [list(OrderedDict.fromkeys(reversed(program))) for program in programs]
        recent: dict[int, None] = {}
        for i in range(max(map(len, last))):
            for lines in last:
                if i < len(lines):
                    recent.setdefault(lines[i])
        for line in reversed(list(recent)[: self.room]):
            self._there[line] = 0.0

    @property
    def needed(self) -> bool:
        """Whether the programs do not fit."""
        return len(self._known) > self.room

    def held(self) -> list[int]:
        """Lines in the first cache, the least recently used first."""
        return list(self._there)

    def enter(self, line: int, now: float) -> float:
        """When a warp that reaches ``line`` at ``now`` can run it."""
        there = self._fetch(line, now)
        if line + 1 in self._known:
            self._fetch(line + 1, now)
        return there

    def _fetch(self, line: int, now: float) -> float:
        there = self._there
        if line in there:
            there.move_to_end(line)
            return there[line]
        self._free = max(self._free, now) + self.cycles
        there[line] = self._free
        if len(there) > self.room:
            there.popitem(last=False)
        return there[line]
