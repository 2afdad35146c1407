"""One launch on one machine: its cycles, the clock the power limit allows, its time.  What searches ask for by the hundred."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tilecast.model.chip.launch import ChipRun, run_chip
from tilecast.model.chip.power import Activity, Clock, Length, busy_share, fixed, lasting_seconds, length, settle
from tilecast.model.families import build_pipeline, family_of, loop_shape
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import unfused
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.sm.simulate import SmTrace, steady_state

REGIMES = ("sustained", "short")


class PredictError(ValueError):
    """What cannot be predicted: the message says what, why and what to do instead, in one sentence."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one evaluation yields before it is explained."""

    seconds: float
    tflops: float
    clock: Clock
    chip: ChipRun
    pipeline: Pipeline
    trace: SmTrace
    launch_seconds: float
    #: Seconds in which memory traffic, not the SMs, sets the pace.
    memory_seconds: float
    #: Of a compiled kernel: cycles of its steady state before compilation, mean per SM; None before compilation itself.
    loop_before: float | None = None


@lru_cache(maxsize=1 << 14)
def evaluate(workload: Workload, machine: Machine, variant: Variant, clock: str | float) -> Evaluation:
    """Forecast of a legal ``variant``."""
    if not family_of(variant).fused:
        return _evaluate_unfused(workload, machine, variant, clock)
    pipeline = build_pipeline(loop_shape(workload), variant, machine)
    chip = run_chip(workload, variant, pipeline, machine)
    return timed(workload, machine, pipeline, chip, clock)


def timed(workload: Workload, machine: Machine, pipeline: Pipeline, chip: ChipRun, clock: str | float) -> Evaluation:
    """A fused launch that was played on the chip, at the clock that its power allows."""
    activity = launch_activity(workload, machine, pipeline, chip.iterations, chip.l2_bytes, chip.hbm_bytes)
    busy = float(busy_share(chip.mean_cycles, chip.makespan_cycles, chip.tiles, chip.slots))
    activity = replace(activity, busy=busy)
    cycles = max(chip.makespan_cycles, chip.l2_floor_cycles)
    settled = settled_clock(machine, activity, length(cycles, chip.hbm_seconds), clock)
    launch = machine["launch.kernel_us"] * 1e-6
    on_sms = cycles / (settled.mhz * 1e6)
    seconds = max(on_sms, chip.hbm_seconds) + launch
    memory = chip.hbm_seconds if chip.hbm_seconds > on_sms else 0.0
    return Evaluation(
        seconds, workload.flops / seconds / 1e12, settled, chip, pipeline, steady_state(pipeline), launch, memory
    )


def settled_clock(machine: Machine, activity: Activity, seconds_at: Length, clock: str | float) -> Clock:
    """The clock of a regime, or the one that is given (MHz); PredictError where none keeps within the limit."""
    if not isinstance(clock, str):
        return fixed(machine, activity, seconds_at, float(clock))
    settled = settle(machine, activity, seconds_at, clock)
    if lasting_seconds(clock) is None and settled.power_w > settled.limit_w * 1.0001:
        raise PredictError(
            f"{machine.name} draws {settled.power_w:.0f} W even at {settled.mhz:.0f} MHz, above its limit of "
            f"{settled.limit_w:.0f} W: no clock keeps within it"
        )
    return settled


def evaluate_seconds(workload: Workload, machine: Machine, variant: Variant, clock: str | float = "sustained") -> float:
    """Seconds of the forecast alone, for rankings; ``variant`` must be legal."""
    return evaluate(workload, machine, variant, clock).seconds


def launch_activity(
    workload: Workload, machine: Machine, pipeline: Pipeline, iterations: float, l2_bytes: float, hbm_bytes: float
) -> Activity:
    """Executed work of a launch of ``iterations`` blocks in all; blocks cut by a mask cost like whole ones."""
    demand = pipeline.demand()
    # A CTA that shares its SM with others is one of ctas_per_sm in the pipeline's demand.
    share = iterations / pipeline.ctas_per_sm
    pair = float(pipeline.cta_group)
    # Not the unit's time: an array that waits for its operands multiplies nothing.  The energy of mma.sync beside tcgen05 is
    # not known; a FLOP of it is charged as any other.
    scores = pipeline.rows_per_cta * pair * pipeline.keys_per_iteration * iterations
    flop = 2.0 * scores * (workload.head_dim_qk + workload.head_dim_v)
    units = tuple((unit, cycles * share * pair) for unit, cycles in demand.items())
    return Activity(flop, workload.dtype, units, l2_bytes, hbm_bytes)


def _evaluate_unfused(workload: Workload, machine: Machine, variant: Any, clock: str | float) -> Evaluation:
    """Three launches, each limited by its loop or by HBM; reported through the one that takes longest."""
    sms = machine["chip.sm_count"]
    bandwidth = machine["hbm.tbps_achieved"] * 1e12
    parts = unfused.kernels(workload, variant, machine)
    read = sum(p.read_bytes + p.write_bytes for p in parts)
    loops = [steady_state(p.pipeline).ii_cycles * p.iterations / sms for p in parts]
    hbm = [(p.read_bytes + p.write_bytes) / bandwidth for p in parts]
    flop = sum(p.tensor_flop for p in parts)
    units: dict[str, float] = {}
    for part in parts:
        for unit, cycles in part.pipeline.demand().items():
            units[unit] = units.get(unit, 0.0) + cycles * part.iterations
    activity = Activity(flop, workload.dtype, tuple(units.items()), read, read)

    def spend(ghz: float) -> list[float]:
        return [max(c / (ghz * 1e9), s) for c, s in zip(loops, hbm, strict=True)]

    settled = settled_clock(machine, activity, lambda ghz: sum(spend(ghz)), clock)
    spent = spend(settled.mhz / 1e3)
    memory = sum(s for s, took in zip(hbm, spent, strict=True) if s == took)
    launch = len(parts) * machine["launch.kernel_us"] * 1e-6
    longest = max(range(len(parts)), key=lambda i: spent[i])
    run = ChipRun(
        makespan_cycles=sum(loops), mean_cycles=sum(loops), loop_cycles=sum(loops), mask_cycles=0.0, fill_cycles=0.0,
        edge_cycles=0.0, tiles=int(parts[longest].iterations), slots=int(sms),
        iterations=parts[longest].iterations, l2_bytes=read, hbm_bytes=read, l2_floor_cycles=0.0,
        hbm_seconds=sum(hbm),
    )  # fmt: skip
    seconds = sum(spent) + launch
    pipeline = parts[longest].pipeline
    return Evaluation(
        seconds, workload.flops / seconds / 1e12, settled, run, pipeline, steady_state(pipeline), launch, memory
    )


def check_clock(clock: str | float, machine: Machine) -> None:
    """PredictError unless ``clock`` is a regime, how long the work lasts, or a frequency (MHz) at which the machine can execute."""
    if isinstance(clock, str):
        lasts = lasting_seconds(clock)
        if clock not in REGIMES and not lasts:
            raise PredictError(
                f"clock: expected sustained, short, how long the work lasts (300ms, 2s) or a number of MHz, got '{clock}'"
            )
        if lasts and not machine.has("power.reaction_s"):
            raise PredictError(
                f"clock {clock}: {machine.name} has no fact power.reaction_s, how long its limiter lets a short run's power "
                "through: use short or sustained"
            )
        return
    # Not the clock under matrix work: light kernels execute at nearly all of the set clock.
    top = machine["chip.clock_max_mhz"]
    if not 50 <= clock <= top:
        raise PredictError(f"clock: expected 50 to {top:.0f} MHz, the top clock of {machine.name}, got {clock:g}")


def refuse_unknown(workload: Workload, machine: Machine) -> None:
    """PredictError for what no kernel of ``machine`` can do: an unknown dtype, tensors that its memory cannot hold."""
    room = machine.get("hbm.capacity_gb", 0.0) * 1e9
    if room and workload.tensor_bytes > room:
        raise PredictError(
            f"Q, K, V and O take {workload.tensor_bytes / 1e9:.4g} GB, the memory of {machine.name} holds "
            f"{room / 1e9:g} GB: use a smaller batch, fewer heads or shorter sequences"
        )
    if not machine.has(f"tensor.{workload.dtype}_flop_per_clk"):
        raise PredictError(
            f"{machine.name} has no {workload.dtype} matrix rate in its machine file: "
            f"use bf16 or fp16, or add tensor.{workload.dtype}_flop_per_clk with a source"
        )
