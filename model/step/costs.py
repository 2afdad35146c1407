"""What an item of a serving kernel costs around its loop, in cycles: starting, handing a split over, merging.

Counts are those of the machine code that Triton 3.6 makes for sm_90a at head_dim 128.  A program begins with nothing in the caches:
its instructions come from far the first time; later each mostly waits for the one before, as in the loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.kernel.variants.serving import DECODE_ROWS, ServingVariant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: Instructions of a warp that finds its sequence, and whose item it sets up; barriers among the first.
_PLAN, _PLAN_BARRIERS, _SET_UP = 300, 5, 400
#: Instructions from the last block to the item's end, barriers among them.
_FINISH, _FINISH_BARRIERS = 370, 4
#: Instructions around and in the loop over splits, and barriers in each.
_MERGE_ROWS, _MERGE_ROWS_BARRIERS = 250, 6
_MERGE_STEP, _MERGE_STEP_BARRIERS, _MERGE_STEP_SHUFFLES = 375, 8, 6
#: Cycles a step has the shared memory's port: 75 accesses of four warps, with bank conflicts of about four ways.
_MERGE_STEP_SMEM = 1200
#: Cycles an instruction takes that no cache near the SM holds, where the machine file does not say.
_FETCH_FAR = 4.9
_REGISTERS_OF_MERGE, _MOST_MERGED = 32, 16


def merged_rows(variant: ServingVariant) -> int:
    """Rows merged at a time: those of one query of most models, and more where a tile has more."""
    return 4 if variant.tile_m <= DECODE_ROWS else 16


def merged_splits(variant: ServingVariant, head_dim_v: int) -> int:
    """Splits merged at a time, as many as 32 registers of a thread hold."""
    fitting = _REGISTERS_OF_MERGE * 32 * variant.warps // (merged_rows(variant) * head_dim_v)
    return 1 << max(0, min(fitting, variant.most_splits, _MOST_MERGED).bit_length() - 1)


@dataclass(frozen=True, slots=True)
class Around:
    """Cycles around the loop of an item, by what happens."""

    machine: Machine
    variant: ServingVariant

    def instructions(self, count: float, barriers: int, cold: bool = False) -> float:
        """``count`` instructions in a row, with barriers behind which warps read what others wrote."""
        m = self.machine
        each = m["alu.latency_cycles"]
        if cold:
            each = max(each, m.get("code.fetch_far_cycles", _FETCH_FAR))
        barrier = (
            m.get("sync.barrier_cycles", 25.0) + m.get("sync.barrier_spread_cycles", 0.0) + m["smem.latency_cycles"]
        )
        return count * each + barriers * barrier

    def plan(self, cold: bool) -> float:
        """Until a program knows its item: lengths of all sequences, added up."""
        lengths = self.machine["hbm.latency_cycles" if cold else "l2.latency_cycles"]
        return self.instructions(_PLAN, _PLAN_BARRIERS, cold) + lengths

    def set_up(self, page: int, cold: bool) -> float:
        """Until an item's first copy is issued: its lengths again, then the numbers of its first pages."""
        lookup = self.machine["hbm.latency_cycles"] if page else 0.0
        return self.instructions(_SET_UP, 1, cold) + self.machine["l2.latency_cycles"] + lookup

    def finish(self) -> float:
        """After the last block of an item that is whole."""
        return self.instructions(_FINISH, _FINISH_BARRIERS) + self.machine["l2.latency_cycles"]

    def hand_over(self) -> float:
        """After the last block of a split: stored, seen by all, counted in."""
        return self.instructions(_FINISH, _FINISH_BARRIERS) + 2.0 * self.machine["l2.latency_cycles"]

    def merge(self, splits: int, rows: int, workload: Workload, there: int) -> float:
        """Merging a tile's splits in their order, some rows and some splits at a time, with ``there`` programs on the SM."""
        m = self.machine
        groups = -(-rows // merged_rows(self.variant))
        steps = -(-splits // merged_splits(self.variant, workload.head_dim_v))
        shuffles = _MERGE_STEP_SHUFFLES * m["shuffle.latency_cycles"]
        step = self.instructions(_MERGE_STEP, _MERGE_STEP_BARRIERS) + m["l2.latency_cycles"] + shuffles
        step += _MERGE_STEP_SMEM * there
        return m["l2.latency_cycles"] + groups * (self.instructions(_MERGE_ROWS, _MERGE_ROWS_BARRIERS) + steps * step)
