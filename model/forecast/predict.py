"""The forecast: time, throughput, what binds, and where every cycle between peak and achieved went.

`predict` is the one function users call.  It reads top to bottom: choose the variant, build its pipeline, simulate
one SM, play the chip, settle the clock, account for the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tilecast.model.chip.launch import ChipRun, run_chip
from tilecast.model.chip.power import Activity, Clock, fixed_clock, settle_clock
from tilecast.model.kernel.candidates import candidates, native_family, published_variant
from tilecast.model.kernel.variant import UnfusedVariant, Variant, legality
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.model.pipeline import unfused
from tilecast.model.pipeline.build import build_pipeline, loop_shape
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.sm.bounds import Bounds, bounds
from tilecast.model.sm.simulate import CriticalStep, SmTrace, critical_recurrence, steady_state

#: A loop within this of its busiest unit is bound by the unit, else by the recurrence.
_UNIT_BOUND = 1.02
REGIMES = ("sustained", "short")


class PredictError(ValueError):
    """What cannot be predicted: the message says what, why and what to do instead, in one sentence."""


@dataclass(frozen=True, slots=True)
class WaterfallStep:
    """One cause between peak and achieved: cycles per SM at the predicted clock, and its share of the time."""

    cause: str
    cycles: float
    share: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The answer for one workload, machine and variant; see docs/model.md for every field."""

    workload: Workload
    machine: Machine
    variant: Variant
    variant_chosen: bool
    pipeline: Pipeline
    regime: str
    time_ms: float
    tflops: float
    tflops_interval: tuple[float, float]
    clock: Clock
    #: (time in ms, TFLOP/s, clock in MHz) of the other regimes.
    other_regimes: tuple[tuple[str, float, float, float], ...]
    trace: SmTrace
    bounds: Bounds
    critical: tuple[CriticalStep, ...]
    chip: ChipRun
    waterfall: tuple[WaterfallStep, ...]
    assumed_facts: tuple[str, ...]
    outside_calibrated_range: tuple[str, ...]

    @property
    def ii_cycles(self) -> float:
        """Cycles per loop iteration in steady state."""
        return self.trace.ii_cycles

    @property
    def clock_mhz(self) -> float:
        """SM clock the time was computed with (effective: cycles per second)."""
        return self.clock.mhz

    @property
    def units(self) -> dict[str, float]:
        """Busy share (0..1) of each unit in steady state."""
        return self.trace.unit_shares()

    @property
    def pipes(self) -> dict[str, float]:
        """Pipe utilisation as NVIDIA Nsight Compute counts it (0..1): an instruction takes one FMA, two ALU slots."""
        return pipe_shares(self.pipeline, self.trace, self.machine)

    @property
    def binding(self) -> dict[str, object]:
        """What the time sits on: a unit, a recurrence, or memory, with how far the nearest other is."""
        return binding(self)

    def to_dict(self) -> dict[str, object]:
        """The documented, stable keys of --json."""
        from tilecast.model.forecast.render import as_dict

        return as_dict(self)

    def text(self) -> str:
        """The report for people."""
        from tilecast.model.forecast.render import as_text

        return as_text(self)

    def trace_json(self) -> str:
        """Chrome trace of one tile, for ui.perfetto.dev."""
        from tilecast.model.forecast.trace import trace_json

        return trace_json(self)

    def _repr_html_(self) -> str:
        from tilecast.model.forecast.render import as_html

        return as_html(self)

    def __str__(self) -> str:
        return self.text()


def pipe_shares(pipeline: Pipeline, trace: SmTrace, machine: Machine) -> dict[str, float]:
    """Tensor, XU, FMA, ALU and issue utilisation per steady-state cycle, the way profilers count them."""
    counts = pipeline.instructions()
    ii = trace.ii_cycles
    per_mufu = 32.0 * 4.0 / machine["mufu.ex2_per_clk"]
    return {
        "tensor": pipeline.demand().get("tensor", 0.0) / ii,
        "xu": counts.get("mufu", 0.0) * per_mufu / ii,
        "fma": counts.get("fma", 0.0) / ii,
        "alu": 2.0 * counts.get("alu", 0.0) / ii,
        "issue": sum(counts.values()) / ii,
    }


def predict(
    workload: Workload,
    machine: Machine | str,
    variant: Variant | None = None,
    *,
    family: str | None = None,
    published: bool = False,
    clock: str | float = "sustained",
    interval: bool = True,
) -> Prediction:
    """Forecast ``workload`` on ``machine``.

    ``variant`` fixes the kernel; else the best legal variant of ``family`` (default: the machine's own) is chosen,
    or with ``published`` the one the family's authors ship.  ``clock`` is "sustained", "short" or MHz.
    Raises PredictError, VariantError, MachineError or WorkloadError (all ValueError) with one sentence.
    """
    chip = load_machine(machine) if isinstance(machine, str) else machine
    if isinstance(clock, str) and clock not in REGIMES:
        raise PredictError(f"clock: expected sustained, short or a number of MHz, got '{clock}'")
    if not isinstance(clock, str) and not 50 <= clock <= 5000:
        raise PredictError(f"clock: expected 50 to 5000 MHz, got {clock:g}")
    refuse_unknown(workload, chip)
    chosen = variant is None
    if variant is None:
        name = family or native_family(chip)
        if published:
            variant = published_variant(name, workload, chip)
        else:
            variant = best_variant(workload, chip, name, clock)
    verdict = legality(variant, workload, chip)
    if not verdict.legal:
        raise PredictError(f"{variant.family} cannot run {workload.label()} on {chip.name}: {verdict.sentence()}")
    answer = _evaluate(workload, chip, variant, clock)
    low, high = _interval(workload, chip, variant, clock, answer) if interval else (answer.tflops, answer.tflops)
    return _assemble(workload, chip, variant, chosen, clock, answer, (low, high))


def refuse_unknown(workload: Workload, machine: Machine) -> None:
    if not machine.has(f"tensor.{workload.dtype}_flop_per_clk"):
        raise PredictError(
            f"{machine.name} has no {workload.dtype} matrix rate in its machine file: "
            f"use bf16 or fp16, or add tensor.{workload.dtype}_flop_per_clk with a source"
        )


def best_variant(workload: Workload, machine: Machine, family: str, clock: str | float = "sustained") -> Variant:
    """The legal variant with the shortest predicted time; ties go to the earlier candidate."""
    legal = candidates(family, workload, machine)
    if not legal:
        attempt = published_variant(family, workload, machine)
        reason = legality(attempt, workload, machine).sentence() or "no candidate tile fits"
        raise PredictError(f"{family} cannot run {workload.label()} on {machine.name}: {reason}")
    scored = [(round(_evaluate(workload, machine, v, clock).seconds, 9), i) for i, v in enumerate(legal)]
    return legal[min(scored)[1]]


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one evaluation yields before it is explained."""

    seconds: float
    tflops: float
    clock: Clock
    chip: ChipRun
    pipeline: Pipeline
    trace: SmTrace
    launch_seconds: float


@lru_cache(maxsize=65536)
def _evaluate(
    workload: Workload, machine: Machine, variant: Variant, clock: str | float, masks: bool = True
) -> _Answer:
    if isinstance(variant, UnfusedVariant):
        return _evaluate_unfused(workload, machine, variant, clock)
    pipeline = build_pipeline(loop_shape(workload), variant, machine)
    chip = run_chip(workload, variant, pipeline, machine, masks)
    activity = launch_activity(workload, machine, pipeline, chip.iterations, chip.l2_bytes, chip.hbm_bytes)
    cycles = max(chip.makespan_cycles, chip.l2_floor_cycles)
    settled = _settle(machine, activity, cycles, chip.hbm_seconds, clock)
    launch = machine["launch.kernel_us"] * 1e-6
    seconds = max(cycles / (settled.mhz * 1e6), chip.hbm_seconds) + launch
    return _Answer(seconds, workload.flops / seconds / 1e12, settled, chip, pipeline, steady_state(pipeline), launch)


def _settle(machine: Machine, activity: Activity, cycles: float, hbm_seconds: float, clock: str | float) -> Clock:
    if isinstance(clock, str):
        return settle_clock(machine, activity, cycles, hbm_seconds, clock)
    return fixed_clock(machine, activity, cycles, hbm_seconds, float(clock))


def evaluate_seconds(
    workload: Workload, machine: Machine, variant: Variant, clock: str | float = "sustained", masks: bool = True
) -> float:
    """Seconds of the forecast alone, for rankings; ``variant`` must be legal.  Without ``masks`` masked blocks are plain."""
    return _evaluate(workload, machine, variant, clock, masks).seconds


def launch_activity(
    workload: Workload, machine: Machine, pipeline: Pipeline, iterations: float, l2_bytes: float, hbm_bytes: float
) -> Activity:
    """Executed work of a launch of ``iterations`` blocks in all; blocks cut by a mask cost like whole ones."""
    demand = pipeline.demand()
    # A CTA that shares its SM with others is one of ctas_per_sm in the pipeline's demand.
    share = iterations / pipeline.ctas_per_sm
    pair = float(pipeline.cta_group)
    if pipeline.name.startswith("fa2"):
        # The legacy path of wgmma and tcgen05 machines: its energy is not known, so it is charged as a busy matrix unit.
        flop = demand.get("tensor", 0.0) * share * pair * machine[f"tensor.{workload.dtype}_flop_per_clk"]
    else:
        # Not the unit's time: an array that waits for its operands multiplies nothing.
        scores = pipeline.rows_per_cta * pair * pipeline.keys_per_iteration * iterations
        flop = 2.0 * scores * (workload.head_dim_qk + workload.head_dim_v)
    units = tuple((unit, cycles * share * pair) for unit, cycles in demand.items())
    return Activity(flop, workload.dtype, units, l2_bytes, hbm_bytes)


def _evaluate_unfused(workload: Workload, machine: Machine, variant: UnfusedVariant, clock: str | float) -> _Answer:
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
    settled = _settle(machine, activity, sum(loops), sum(hbm), clock)
    hertz = settled.mhz * 1e6
    spent = [max(c / hertz, s) for c, s in zip(loops, hbm, strict=True)]
    launch = len(parts) * machine["launch.kernel_us"] * 1e-6
    longest = max(range(len(parts)), key=lambda i: spent[i])
    run = ChipRun(
        makespan_cycles=sum(loops), mean_cycles=sum(loops), loop_cycles=sum(loops), mask_cycles=0.0, fill_cycles=0.0,
        edge_cycles=0.0, tiles=int(parts[longest].iterations), slots=int(sms),
        iterations=parts[longest].iterations, l2_bytes=read, hbm_bytes=read, l2_floor_cycles=0.0,
        hbm_seconds=sum(spent),
    )  # fmt: skip
    seconds = sum(spent) + launch
    pipeline = parts[longest].pipeline
    return _Answer(seconds, workload.flops / seconds / 1e12, settled, run, pipeline, steady_state(pipeline), launch)


def uncertain_facts(machine: Machine, pipeline: Pipeline, dtype: str) -> tuple[str, ...]:
    """Facts with a range that the forecast rests on: those of the pipeline and those of the clock and memory."""
    energy = "power.tensor_pj_per_flop_fp8" if dtype == "fp8" else "power.tensor_pj_per_flop_bf16"
    names = (*pipeline.facts_used, energy, "chip.tdp_w", "l2.bytes_per_clk_per_sm", "hbm.tbps_achieved")
    return tuple(n for n in names if machine.has(n) and machine.fact(n).low is not None)


def _interval(
    workload: Workload, machine: Machine, variant: Variant, clock: str | float, answer: _Answer
) -> tuple[float, float]:
    """TFLOP/s interval: every ranged fact moved to its ends in turn, the changes added in quadrature."""
    up = down = 0.0
    for name in uncertain_facts(machine, answer.pipeline, workload.dtype):
        fact = machine.fact(name)
        ends = [e for e in (fact.low, fact.high) if e is not None and e != fact.value]
        changes = []
        for end in ends:
            other = _evaluate(workload, _moved(machine, name, float(end)), variant, clock)
            changes.append(other.tflops - answer.tflops)
        up += max([0.0, *changes]) ** 2
        down += min([0.0, *changes]) ** 2
    return answer.tflops - down**0.5, answer.tflops + up**0.5


@lru_cache(maxsize=4096)
def _moved(machine: Machine, name: str, value: float) -> Machine:
    return machine.with_facts({name: value})


def _assemble(
    workload: Workload,
    machine: Machine,
    variant: Variant,
    chosen: bool,
    clock: str | float,
    answer: _Answer,
    interval: tuple[float, float],
) -> Prediction:
    others = []
    for regime in REGIMES:
        if regime != clock:
            other = _evaluate(workload, machine, variant, regime)
            others.append((regime, other.seconds * 1e3, other.tflops, other.clock.mhz))
    assumed = tuple(
        f"{n} = {machine[n]:g} {machine.fact(n).unit} ({machine.fact(n).kind})"
        for n in uncertain_facts(machine, answer.pipeline, workload.dtype)
        if machine.fact(n).kind in ("assumed", "inferred")
    )
    return Prediction(
        workload=workload, machine=machine, variant=variant, variant_chosen=chosen, pipeline=answer.pipeline,
        regime=clock if isinstance(clock, str) else "fixed", time_ms=answer.seconds * 1e3, tflops=answer.tflops,
        tflops_interval=interval, clock=answer.clock, other_regimes=tuple(others), trace=answer.trace,
        bounds=bounds(answer.pipeline), critical=critical_recurrence(answer.trace), chip=answer.chip,
        waterfall=_waterfall(workload, machine, answer), assumed_facts=assumed,
        outside_calibrated_range=_outside(workload, machine),
    )  # fmt: skip


def _outside(workload: Workload, machine: Machine) -> tuple[str, ...]:
    """Why the workload lies outside what the model has been held against (empty: inside)."""
    reasons = []
    if not 64 <= workload.head_dim_qk <= 256:
        reasons.append(f"head_dim {workload.head_dim_qk} (checked: 64 to 256)")
    if workload.seqlen_q < 512 or workload.seqlen_k < 512:
        reasons.append(f"seqlen {min(workload.seqlen_q, workload.seqlen_k)} (checked: 512 to 131072)")
    if machine.tensor_kind == "mma_sync" and workload.dtype == "fp8":
        reasons.append("fp8 through mma.sync (no published attention rows)")
    if any(fact.kind == "what-if" for fact in machine.facts.values()):
        reasons.append("a machine changed by what-if")
    return tuple(reasons)


def _waterfall(workload: Workload, machine: Machine, answer: _Answer) -> tuple[WaterfallStep, ...]:
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
    if answer.pipeline.name.startswith("unfused"):
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


def binding(p: Prediction) -> dict[str, object]:
    """See `Prediction.binding`."""
    seconds = p.time_ms / 1e3
    if p.chip.hbm_seconds > 0.9 * seconds:
        return {"kind": "memory", "name": "HBM bandwidth", "slack": {}}
    if p.chip.l2_floor_cycles > p.chip.makespan_cycles:
        return {"kind": "memory", "name": "L2 bandwidth", "slack": {}}
    slack = {unit: 1.0 - share for unit, share in p.units.items()}
    if p.trace.ii_cycles <= _UNIT_BOUND * p.bounds.res.cycles:
        return {"kind": "unit", "name": p.bounds.res.unit, "slack": slack}
    chain = " -> ".join(step.op for step in p.critical) or "not periodic"
    return {"kind": "recurrence", "name": chain, "slack": slack}
