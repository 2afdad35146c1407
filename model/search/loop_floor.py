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

    ``unit_cycles`` a block for the busiest unit; and a recurrence of ``cycles`` over ``laps`` blocks that holds for all
    but the first and last ``loose`` blocks, entered after ``before`` cycles and left ``after`` cycles before the end.
    """

    unit_cycles: float
    cycles: float
    laps: int
    loose: int
    before: float
    after: float

    def tile_cycles(self, blocks: NDArray[np.int64]) -> NDArray[np.float64]:
        """Least cycles of the loops of tiles with so many ``blocks``; 0 for none."""
        return least_cycles(blocks, self.unit_cycles, self.cycles, self.laps, self.loose, self.before + self.after)


def least_cycles(blocks: Any, unit_cycles: Any, cycles: Any, laps: Any, loose: Any, around: Any) -> NDArray[np.float64]:
    """`LoopFloor.tile_cycles` of arrays that broadcast; ``around`` is before + after."""
    times = np.where(blocks > loose, (blocks - loose - 1) // laps + 1, 0)
    chain = np.where(blocks > 0, times * cycles + around, 0.0)
    floor: NDArray[np.float64] = np.maximum(chain, blocks * unit_cycles)
    return floor


def unit_floor(pipeline: Pipeline) -> LoopFloor:
    """The floor of a pipeline's loop by its busiest unit alone."""
    return LoopFloor(max(pipeline.demand().values(), default=0.0), 0.0, 1, 0, 0.0, 0.0)


@lru_cache(maxsize=1 << 15)
def loop_floor(pipeline: Pipeline) -> LoopFloor:
    """The floor of a pipeline's loop."""
    recurrence = rec_mii(pipeline)
    unit = unit_floor(pipeline)
    if not recurrence.edges:
        return unit
    # Walking the recurrence once visits blocks this far behind and ahead of the one it began with.
    offsets = [0]
    for edge in recurrence.edges:
        offsets.append(offsets[-1] + edge.distance)
    before, after = around(pipeline, recurrence.ops_on_cycle[0])
    return LoopFloor(
        unit.unit_cycles, _RECURRENCE_MARGIN * recurrence.latency, max(1, recurrence.distance), max(offsets) - min(offsets),
        _RECURRENCE_MARGIN * before, _RECURRENCE_MARGIN * after,
    )  # fmt: skip
