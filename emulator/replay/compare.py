"""The timeline of the executed source beside the pipeline simulation of the same variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tilecast.emulator.replay.timeline import Timeline
from tilecast.emulator.replay.timing import BESIDE, COPY_LATENCY, MEETINGS, RESCALE, ROOM, replay
from tilecast.emulator.trace import ProgramTrace
from tilecast.model.families import build_pipeline, parse_variant
from tilecast.model.kernel.header import header_workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.fa3 import AHEAD_OF_QK_CYCLES, COMPILED_WAIT
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.sm.simulate import steady_state

#: Differences up to here need no reason.
AGREES = 0.05
#: What the pipeline has and the source does not: addresses and descriptors that compiled code works out before a product.
ADDRESSES = "the pipeline's addresses before products"
#: What the source is replayed without, by the tensor cores of the machine.
_LEFT_OUT = {
    "tcgen05": ((RESCALE,), (MEETINGS,), (COPY_LATENCY,), (RESCALE, MEETINGS), (RESCALE, COPY_LATENCY)),
    "wgmma": ((ROOM,), (BESIDE,), (MEETINGS,)),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Cycles per loop iteration by both routes, and what explains the difference."""

    timeline: Timeline
    #: 0 when the program is too short to show a steady state.
    ii_cycles: float
    model_ii_cycles: float
    #: Relative difference to the model when something the source does is left out: name, difference.
    without: tuple[tuple[str, float], ...]

    @property
    def difference(self) -> float:
        """Of the source's iteration to the model's, relative."""
        return self.ii_cycles / self.model_ii_cycles - 1 if self.ii_cycles else 0.0


def compare(header: Mapping[str, Any], trace: ProgramTrace, machine: Machine) -> Comparison:
    """Replay one program and hold it against the pipeline of the header's variant, without waits that only the compiler makes."""
    pipeline = build_pipeline(header_workload(header), parse_variant(str(header["variant"])), machine)
    pipeline = without_compiled_waits(pipeline)
    model = steady_state(pipeline).ii_cycles
    timeline = replay(trace, machine)
    ii = timeline.ii_cycles()
    left_out = []
    for names in _LEFT_OUT[machine.tensor_kind] if ii else ():
        other = replay(trace, machine, names).ii_cycles()
        left_out.append((" and ".join(names), other / model - 1))
    if ii and machine.tensor_kind == "wgmma":
        left_out.append((ADDRESSES, ii / steady_state(without_addresses(pipeline)).ii_cycles - 1))
    return Comparison(timeline, ii, model, tuple(left_out))


def without_compiled_waits(pipeline: Pipeline) -> Pipeline:
    """A pipeline without the waits that only the compiler makes."""
    return replace(pipeline, edges=tuple(edge for edge in pipeline.edges if edge.why != COMPILED_WAIT))


def without_addresses(pipeline: Pipeline) -> Pipeline:
    """A pipeline of Hopper whose warpgroups do not work out addresses before their products."""

    def shorter(cycles: float) -> float:
        return max(1e-3, cycles - AHEAD_OF_QK_CYCLES)

    ops = (op._replace(min_cycles=shorter(op.min_cycles)) if op.name.startswith("ahead") else op for op in pipeline.ops)
    return replace(pipeline, ops=tuple(ops))
