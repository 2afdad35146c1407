"""Where the cycles between peak and achieved go."""

from __future__ import annotations

from tilecast.model.chip.evaluate import Evaluation
from tilecast.model.forecast.answer import WaterfallStep
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine


def waterfall(
    workload: Workload, machine: Machine, answer: Evaluation, fused: bool = True
) -> tuple[WaterfallStep, ...]:
    """From the peak at the top clock to the predicted time; cycles per SM at the predicted clock, adding up exactly."""
    hertz = answer.clock.mhz * 1e6
    total = answer.seconds * hertz
    rate = machine[f"tensor.{workload.dtype}_flop_per_clk"] * machine["chip.sm_count"]
    useful = workload.flops / rate
    at_peak = useful * answer.clock.mhz / machine["chip.clock_max_mhz"]
    chip = answer.chip
    steps: list[tuple[str, float]] = [
        ("tensor cores at peak rate and top clock", at_peak),
        ("clock (power limit or tensor load) below the top clock", useful - at_peak),
    ]
    if not fused:
        steps.append(("loops beyond the matrix products", max(0.0, chip.loop_cycles - useful)))
    else:
        per_slot = answer.pipeline.demand().get("tensor", 0.0) / answer.trace.ii_cycles
        executed = chip.loop_cycles * per_slot
        steps += [
            ("score elements outside the mask or the tensor's edge", executed - useful),
            ("steady state: the loop waits (see binding)", chip.loop_cycles - executed),
            ("extra work in masked blocks", chip.mask_cycles),
            ("pipeline fill and drain", chip.fill_cycles),
            ("start and end of tiles", chip.edge_cycles),
            ("tail: the last tiles leave SMs idle", max(0.0, chip.makespan_cycles - chip.mean_cycles)),
        ]
    launch = answer.launch_seconds * hertz
    named = sum(cycles for _, cycles in steps)
    steps.append(("memory (HBM or L2) slower than the SMs", total - launch - named))
    steps.append(("launch", launch))
    return tuple(WaterfallStep(cause, cycles, cycles / total) for cause, cycles in steps)
