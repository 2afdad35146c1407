"""Where the cycles between peak and achieved go."""

from __future__ import annotations

from tilecast.model.chip.evaluate import Evaluation
from tilecast.model.chip.tiles import head_tiles
from tilecast.model.forecast.answer import WaterfallStep
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine


def waterfall(
    workload: Workload, machine: Machine, answer: Evaluation, fused: bool = True
) -> tuple[WaterfallStep, ...]:
    """From the peak at the top clock to the predicted time; cycles per SM at the predicted clock, adding up exactly.

    No step is negative: the executed blocks hold at least the useful elements, the matrix unit takes at least the peak
    rate's time for them, the loop at least the matrix unit's, and the launch at least its loops'.
    """
    hertz = answer.clock.mhz * 1e6
    total = answer.seconds * hertz
    useful = workload.flops / _chip_rate(workload, machine)
    at_peak = useful * answer.clock.mhz / machine["chip.clock_max_mhz"]
    chip = answer.chip
    steps: list[tuple[str, float]] = [
        ("tensor cores at peak rate and top clock", at_peak),
        ("clock (power limit or tensor load) below the top clock", useful - at_peak),
    ]
    if not fused:
        # Kernels that HBM holds wait for it all the time that they do not multiply.
        on_sms = total - (answer.launch_seconds + answer.memory_seconds) * hertz
        steps.append(("loops beyond the matrix products", max(0.0, on_sms - useful)))
    else:
        steps += _loop_steps(workload, machine, answer, useful)
        idle = max(0.0, chip.makespan_cycles - chip.mean_cycles)
        few = chip.tiles <= chip.slots
        steps += [
            ("pipeline fill and drain", chip.fill_cycles),
            ("start and end of tiles", chip.edge_cycles),
            ("idle SMs: fewer tiles than SMs" if few else "tail: the last tiles leave SMs idle", idle),
        ]
    launch = answer.launch_seconds * hertz
    named = sum(cycles for _, cycles in steps)
    steps.append(("memory (HBM or L2) slower than the SMs", total - launch - named))
    steps.append(("launch", launch))
    return tuple(WaterfallStep(cause, cycles, cycles / total) for cause, cycles in steps)


def _chip_rate(workload: Workload, machine: Machine) -> float:
    """FLOP per clock of all tensor cores."""
    return machine[f"tensor.{workload.dtype}_flop_per_clk"] * machine["chip.sm_count"]


def _loop_steps(workload: Workload, machine: Machine, answer: Evaluation, useful: float) -> list[tuple[str, float]]:
    """From useful matrix work to the loop: elements beyond the mask and the tensors, the matrix path, waiting, masking."""
    chip, pipeline = answer.chip, answer.pipeline
    heads = workload.batch * workload.heads_q
    tiles = head_tiles(workload, pipeline.rows_per_cta * pipeline.cta_group, pipeline.keys_per_iteration)
    cycles = 2.0 * (workload.head_dim_qk + workload.head_dim_v) / _chip_rate(workload, machine)
    block = pipeline.rows_per_cta * pipeline.cta_group * pipeline.keys_per_iteration
    # Each level lies between the one before and the one after; sampled tiles of long sequences are off by a rounding error.
    busy = min(chip.iterations / chip.slots * pipeline.demand().get("tensor", 0.0), chip.loop_cycles)
    executed = min(max(cycles * block * chip.iterations, useful), busy)
    inside = min(max(cycles * tiles.elements_inside * heads, useful), executed)
    waits = chip.loop_cycles - busy
    known = waits if answer.loop_before is None else min(max(answer.loop_before - busy, 0.0), waits)
    steps = [
        ("score elements outside the mask", inside - useful),
        ("ragged tiles: rows and keys beyond the tensor's edge", executed - inside),
        (_matrix_path(pipeline.legacy_matrix_path), busy - executed),
        ("steady state: the loop waits (see binding)", known),
    ]
    if answer.loop_before is not None:
        steps.append(("steady state: this machine code, beyond what it does", waits - known))
    masked = "extra work in masked blocks" if workload.mask != "none" else "extra work in ragged last blocks"
    return [*steps, (masked, chip.mask_cycles)]


def _matrix_path(legacy: bool) -> str:
    if legacy:
        return "mma.sync, below the rate of the GPU's own matrix instructions"
    return "matrix instructions wait for operands from shared memory"
