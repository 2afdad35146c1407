"""What no simulation of a loop goes below, in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.sm.bounds import around, rec_mii

#: A forecast takes nearly equal states for a repetition, so that its period may lie this far under the recurrence.
_RECURRENCE_MARGIN = 0.9995


@dataclass(frozen=True, slots=True)
class LoopFloor:
    """What no simulation of a tile's loop goes below, in closed form.

    ``unit_cycles`` a block for the busiest unit, which is idle for ``idle`` cycles before the first of them and after the last; and
    a recurrence of ``cycles`` over ``laps`` blocks that holds for all but the first and last ``loose`` blocks, entered after
    ``before`` cycles and left ``after`` cycles before the end.
    """

    unit_cycles: float
    idle: float
    cycles: float
    laps: int
    loose: int
    before: float
    after: float

    def tile_cycles(self, blocks: NDArray[np.int64]) -> NDArray[np.float64]:
        """Least cycles of the loops of tiles with so many ``blocks``; 0 for none."""
        return least_cycles(
            blocks, self.unit_cycles, self.idle, self.cycles, self.laps, self.loose, self.before + self.after
        )


def least_cycles(blocks: Any, unit_cycles: Any, idle: Any, cycles: Any, laps: Any, loose: Any, around: Any) -> NDArray[np.float64]:  # fmt: skip
    """`LoopFloor.tile_cycles` of arrays that broadcast; ``around`` is before + after."""
    times = np.where(blocks > loose, (blocks - loose - 1) // laps + 1, 0)
    chain = np.where(blocks > 0, times * cycles + around, 0.0)
    floor: NDArray[np.float64] = np.maximum(chain, np.where(blocks > 0, blocks * unit_cycles + idle, 0.0))
    return floor


def unit_floor(pipeline: Pipeline) -> LoopFloor:
    """The floor of a pipeline's loop by its busiest unit alone."""
    return LoopFloor(max(pipeline.demand().values(), default=0.0), 0.0, 0.0, 1, 0, 0.0, 0.0)


@lru_cache(maxsize=1 << 15)
def loop_floor(pipeline: Pipeline) -> LoopFloor:
    """The floor of a pipeline's loop."""
    recurrence = rec_mii(pipeline)
    if not recurrence.edges:
        return unit_floor(pipeline)
    before, after = around(pipeline)
    demand = pipeline.demand()
    unit = max(demand, key=demand.__getitem__, default="")
    users = [at for at, op in enumerate(pipeline.ops) if op.cycles(unit)]
    # Nothing uses it before the first of them can start, and after the last has ended the rest of its block is still to do.
    idle = (
        min(before[at] for at in users) + min(after[at] - pipeline.ops[at].min_cycles for at in users) if users else 0.0
    )
    # Walking the recurrence once visits blocks this far behind and ahead of the one it began with.
    offsets = [0]
    for edge in recurrence.edges:
        offsets.append(offsets[-1] + edge.distance)
    entry = next(at for at, op in enumerate(pipeline.ops) if op.name == recurrence.ops_on_cycle[0])
    return LoopFloor(
        demand.get(unit, 0.0), _RECURRENCE_MARGIN * idle, _RECURRENCE_MARGIN * recurrence.latency, max(1, recurrence.distance),
        max(offsets) - min(offsets), _RECURRENCE_MARGIN * before[entry], _RECURRENCE_MARGIN * after[entry],
    )  # fmt: skip
