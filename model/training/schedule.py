"""The best order of the loops of a backward pass, its proof, and the kernels' own orders."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.base.progress import Progress, silent
from tilecast.model.backward import BackwardVariant, build_backward
from tilecast.model.families import loop_shape
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.schedule.report import schedule_dict, schedules_text, solve_both
from tilecast.model.schedule.solve import Schedule, storage_of
from tilecast.model.training.evaluate import refuse
from tilecast.model.training.forecast import best_backward


@dataclass(frozen=True, slots=True)
class ScheduledLoop:
    """The loop of one kernel, its best order and its own."""

    name: str
    pipeline: Pipeline
    free: Schedule
    own: Schedule


@dataclass(frozen=True, slots=True)
class ScheduledBackward:
    """The loops of a backward pass."""

    workload: Workload
    machine: Machine
    variant: BackwardVariant
    origin: str
    loops: tuple[ScheduledLoop, ...]

    def text(self, width: int = 100) -> str:
        """What `tilecast schedule --pass bwd` prints."""
        head = f"{self.machine.title}: backward pass of {self.workload.label()}\n  {variant_text(self.variant)}  ({self.origin})"
        return "\n\n".join((head, *(f"{one.name}\n\n{schedules_text(one.pipeline, one.free, one.own, width)}" for one in self.loops)))  # fmt: skip

    def to_dict(self) -> dict[str, object]:
        """Keys documented in docs/json.md; cycles are whole SM clocks."""
        return {
            "pass": "bwd",
            "machine": self.machine.name,
            "workload": self.workload.as_dict(),
            "variant": variant_text(self.variant),
            "variant_origin": self.origin,
            "kernels": [
                {"name": one.name, "pipeline": one.pipeline.name, "best_order": schedule_dict(one.pipeline, one.free),
                 "own_order": schedule_dict(one.pipeline, one.own)}
                for one in self.loops
            ],
        }  # fmt: skip


def schedule_backward(
    workload: Workload, machine: Machine, variant: BackwardVariant | None = None, family: str | None = None,
    clock: str | float = "sustained", time_limit_s: float = 10.0, progress: Progress = silent,
) -> ScheduledBackward:  # fmt: skip
    """The schedules of the loops of a backward pass: of ``variant``, or of the best of ``family`` as `predict_backward` finds it.

    ``time_limit_s`` is for each of the two of each loop.  Raises PredictError for what cannot run.
    """
    work, origin = workload.reduced().heads_as_rows(), "as given"
    if variant is None:
        variant, origin = best_backward(work, machine, family, clock)
    refuse(work, machine, variant, clock)
    loops = []
    for kernel in build_backward(loop_shape(work), variant, machine).loops:
        free, own = solve_both(kernel.pipeline, storage_of(machine), time_limit_s, progress)
        loops.append(ScheduledLoop(kernel.name, kernel.pipeline, free, own))
    return ScheduledBackward(work, machine, variant, origin, tuple(loops))
