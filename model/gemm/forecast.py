"""The forecast of a GEMM: time, rates, what binds, where the cycles go, and what the second accumulator is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tilecast.model.chip.evaluate import PredictError, check_clock
from tilecast.model.compiled.evaluate import followed_on
from tilecast.model.forecast.answer import WaterfallStep
from tilecast.model.forecast.binding import POWER_BOUND
from tilecast.model.forecast.interval import FactEffect, effects_of, fact_ends, moves_of
from tilecast.model.forecast.interval import interval as fact_interval
from tilecast.model.gemm.answer import BufferGain, GemmForecast
from tilecast.model.gemm.code import GemmCode, code_cycles
from tilecast.model.gemm.evaluate import GemmRun, evaluate_gemm, executed_flop, refuse
from tilecast.model.gemm.families import find_gemm_family, legality, native_gemm_family, writable
from tilecast.model.gemm.pipeline.build import build
from tilecast.model.gemm.render import as_dict, as_html, as_text
from tilecast.model.gemm.traffic import part_of
from tilecast.model.gemm.variant import GemmVariant
from tilecast.model.gemm.workload import Gemm
from tilecast.model.machine.machine import Machine, machine_of
from tilecast.model.sm.bounds import bounds
from tilecast.model.sm.simulate import critical_recurrence

#: A loop within this of its busiest unit is bound by the unit, else by the recurrence.
_UNIT_BOUND = 1.02
#: Share of a launch that the SMs' own pace must explain, or the memory binds.
_MEMORY_BOUND = 0.95
#: k at which the second accumulator is looked at.
GAIN_KS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
#: The rate at which copies come that neighbours make at the same time.
_TOGETHER = "l2.bytes_per_clk_per_sm_lockstep"
_UNIT_NAMES = {"tma": "copies into shared memory"}
#: What makes machine code of a variant.
Compiler = Callable[[Gemm, Machine, GemmVariant], GemmCode]


@dataclass(frozen=True, slots=True, repr=False)
class GemmPrediction(GemmForecast):
    """The answer for one GEMM, with its text."""

    to_dict = as_dict
    text = __str__ = as_text
    _repr_html_ = as_html

    def __repr__(self) -> str:
        return f"<GemmPrediction {self.machine.name}: {self.gemm.label()}: {self.time_ms:.4g} ms, {self.run.tflops:.4g} TFLOP/s>"


def forecast_gemm(
    gemm: Gemm, machine: Machine | str, variant: GemmVariant | None = None, *, family: str | None = None,
    clock: str | float = "sustained", written: bool = False, interval: bool = False, compiler: Compiler | None = None,
) -> GemmPrediction:  # fmt: skip
    """Forecast ``gemm``; without a ``variant`` the best of ``family`` (default: the machine's own), ``written``: that can be.

    ``clock`` is as in `predict`; with ``interval`` every fact with a range is moved to its ends, which takes seconds.  With a
    ``compiler`` the kernel, chosen before compilation, is forecast from its machine code (`codegen.gemm.machine_code.compiled_gemm`), and the
    interval is as wide as before compilation.  Raises PredictError, VariantError, MachineError or WorkloadError with one sentence.
    """
    chip = machine_of(machine)
    origin = "as given"
    if variant is None:
        name = find_gemm_family(family).name if family else native_gemm_family(chip).name
        variant, origin = best_gemm(gemm, chip, name, clock, written=written)
    refuse(gemm, chip, variant, clock)
    before = run = evaluate_gemm(gemm, variant, chip, clock)
    made = compiler(gemm, chip, variant) if compiler is not None else None
    if made is not None:
        run = _compiled(made, gemm, variant, chip, clock)
    regime = clock if isinstance(clock, str) else "fixed"
    effects = _fact_effects(gemm, chip, variant, clock, before.tflops) if interval else ()
    effects = tuple(effect.scaled(run.tflops / before.tflops) for effect in effects)
    return GemmPrediction(
        gemm, chip, variant, origin, regime, run, bounds(run.in_step.loop.pipeline), _binding(run),
        _waterfall(gemm, chip, variant, run), fact_interval(run.tflops, effects) if interval else (), effects, made,
        before.seconds * 1e3,
    )  # fmt: skip


def _compiled(made: GemmCode, gemm: Gemm, variant: GemmVariant, machine: Machine, clock: str | float) -> GemmRun:
    with followed_on(machine):
        return evaluate_gemm(gemm, variant, machine, clock, code_cycles(made.roles, variant, machine))


def _fact_effects(gemm: Gemm, machine: Machine, variant: GemmVariant, clock: str | float, tflops: float) -> tuple[FactEffect, ...]:  # fmt: skip
    """What the ends of every range do to the forecast, the widest first.

    That neighbours read the same lines together is an assumption: at the low end each reads as if alone.
    """
    ends = [*fact_ends(machine)]
    if machine.has(_TOGETHER):
        ends.append((_TOGETHER, "low", machine.with_facts({_TOGETHER: machine["l2.bytes_per_clk_per_sm"]})))
    return effects_of(moves_of(ends, lambda moved: evaluate_gemm(gemm, variant, moved, clock).tflops), tflops)


def best_gemm(gemm: Gemm, machine: Machine, family: str, clock: str | float, accumulators: int | None = None, *, written: bool = False) -> tuple[GemmVariant, str]:  # fmt: skip
    """The fastest variant of the family's space (the first among equals), and what was searched.

    Variants whose busiest unit alone takes longer than the best so far are not simulated.
    """
    check_clock(clock, machine)
    space = find_gemm_family(family).space(gemm, machine)
    allowed = writable if written else legality
    listed = [v for v in space if accumulators in (None, v.accumulators) and allowed(v, gemm, machine).legal]
    if not listed:
        first = replace(GemmVariant(family), accumulators=accumulators or 1)
        why = allowed(first, gemm, machine).sentence() or "no tile fits"
        raise PredictError(f"{family} cannot run {gemm.label()} on {machine.name}: {why}")
    found, least = listed[0], (float("inf"), 0.0)
    for v in sorted(listed, key=lambda v: _floor(gemm, v, machine)):
        if _floor(gemm, v, machine) > least[0]:
            break
        run = evaluate_gemm(gemm, v, machine, clock)
        took = round(run.seconds, 12), round(run.apart_seconds, 12)
        if took < least:
            found, least = v, took
    return found, f"fastest of {len(listed)} variants"


def _floor(gemm: Gemm, v: GemmVariant, machine: Machine) -> float:
    """Seconds below which no launch of ``v`` can be: the busiest unit, without the memory, at the highest clock."""
    top = machine["chip.clock_max_mhz"]
    loop = build(part_of(gemm, v), v, machine, top, memory=False, most_steps=1)
    demand = max((c for u, c in loop.pipeline.demand().items() if u == "tensor"), default=0.0) / loop.tiles
    return demand * loop.tiling.steps * loop.tiling.tiles / (loop.tiling.slots / loop.pipeline.ctas_per_sm) / (top * 1e6)  # fmt: skip


def buffer_gains(gemm: Gemm, machine: Machine, family: str | None = None, clock: str | float = "sustained", ks: Iterable[int] = GAIN_KS) -> tuple[BufferGain, ...]:  # fmt: skip
    """The gain of the second accumulator at each k, all else as in ``gemm``; PredictError for families that have but one."""
    name = find_gemm_family(family).name if family else native_gemm_family(machine).name
    if not any(v.accumulators == 2 for v in find_gemm_family(name).space(gemm, machine)):
        raise PredictError(f"{name} has one accumulator on {machine.name}: use family gemm_hopper or gemm_blackwell on a machine that runs it")  # fmt: skip
    out = []
    for k in ks:
        g = replace(gemm, k=k)
        two, one = (best_gemm(g, machine, name, clock, count)[0] for count in (2, 1))
        run = evaluate_gemm(g, two, machine, clock)
        pairs = [(v, alone) for v in (two, *find_gemm_family(name).space(g, machine)) if v.accumulators == 2 and legality(alone := replace(v, accumulators=1), g, machine).legal]  # fmt: skip
        # The best kernel's own twin, where it has one.
        pair = pairs[0] if pairs and pairs[0][0] == two else min(pairs, key=lambda pair: evaluate_gemm(g, pair[0], machine, clock).seconds, default=None)  # fmt: skip
        same, beside = (
            (evaluate_gemm(g, v, machine, clock).seconds * 1e3 for v in reversed(pair)) if pair else (None, None)
        )
        out.append(
            BufferGain(k, two, one, run.seconds * 1e3, evaluate_gemm(g, one, machine, clock).seconds * 1e3, same, beside, _binding(run))
        )  # fmt: skip
    return tuple(out)


def _binding(run: GemmRun) -> tuple[str, str]:
    body = run.seconds - run.launch_seconds
    if run.launch_seconds > body:
        return "launch", "kernel launch"
    own, tiling = run.own, run.own.loop.tiling
    hertz = run.clock.mhz * 1e6
    on_sms = run.own_cycles / hertz
    if run.clock.bound == "power" and run.hbm_seconds > 0.5 * body and on_sms > POWER_BOUND * body:
        return "power", "power limit"
    if on_sms < body * _MEMORY_BOUND:
        shares = run.in_step.loop.pipeline.demand()
        return "memory", "L2 bandwidth" if shares.get("l2", 0.0) > shares.get("memory", 0.0) else "HBM bandwidth"
    if run.own_cycles - own.tile_cycles * tiling.most > 0.5 * run.own_cycles:
        return "start", "start, fill and end of tiles"
    if 2 * tiling.tiles <= tiling.slots and run.hbm_seconds <= 0.5 * body:
        return "occupancy", "idle SMs"
    demand = own.loop.pipeline.demand()
    unit = max(demand, key=lambda name: demand[name])
    if demand[unit] * _UNIT_BOUND >= own.trace.ii_cycles:
        return "unit", _UNIT_NAMES.get(unit, unit)
    chain = [step.op for step in critical_recurrence(own.trace)]
    return "recurrence", " -> ".join(_folded(chain)) or "not periodic"


def _folded(chain: list[str]) -> list[str]:
    """Operation names with runs of one kind of one tile as first..last: mma0_0..mma0_7."""
    out: list[list[str]] = []
    for op in chain:
        if out and "_" in op and op.rpartition("_")[0] == out[-1][-1].rpartition("_")[0]:
            out[-1].append(op)
        else:
            out.append([op])
    return [part[0] if len(part) == 1 else f"{part[0]}..{part[-1]}" for part in out]


def _waterfall(gemm: Gemm, machine: Machine, variant: GemmVariant, run: GemmRun) -> tuple[WaterfallStep, ...]:
    """From the peak at the top clock to the time; cycles per SM at the forecast clock, adding up exactly, none negative."""
    hertz = run.clock.mhz * 1e6
    total = run.seconds * hertz
    own, tiling = run.own, run.own.loop.tiling
    sms = tiling.slots / own.loop.pipeline.ctas_per_sm
    rate = machine[f"tensor.{gemm.dtype}_flop_per_clk"] * machine["chip.sm_count"]
    useful = gemm.flops / rate
    at_peak = useful * run.clock.mhz / machine["chip.clock_max_mhz"]
    mean = tiling.tiles / sms
    whole = max(executed_flop(part_of(gemm, variant), own.loop) / rate, useful)
    demand = own.loop.pipeline.demand().get("tensor", 0.0) / own.loop.tiles
    busy = max(demand * tiling.steps / (tiling.steps - own.loop.steps_left) * mean, whole)
    paced = max(own.tile_cycles * mean, busy)
    tail = own.tile_cycles * (tiling.most - mean)
    fill = max(0.0, run.own_cycles - own.tile_cycles * tiling.most)
    launch, merge = run.launch_seconds * hertz, run.merge_seconds * hertz
    # Where the memory holds the launch, the SMs that wait for it hardly feel the tail.
    room = max(0.0, total - launch - merge - paced)
    fill = min(fill, room)
    tail = min(max(0.0, tail), room - fill)
    few = tiling.tiles <= tiling.slots
    steps = [
        ("tensor cores at peak rate and top clock", at_peak),
        ("clock (power limit or tensor load) below the top clock", useful - at_peak),
        ("ragged tiles: rows, columns and k beyond the tensors' edges", whole - useful),
        ("matrix instructions below the peak rate: operands, half-filled instructions", busy - whole),
        ("epilogue and copies that no product hides", paced - busy),
        ("start, fill and drain", fill),
        ("idle SMs: fewer tiles than SMs" if few else "tail: the last tiles leave SMs idle", tail),
        ("memory slower than the SMs", max(0.0, total - launch - merge - paced - fill - tail)),
        ("a second launch, which adds up sums of parts of k", merge),
        ("launch", launch),
    ]
    return tuple(WaterfallStep(cause, cycles, cycles / total) for cause, cycles in steps)
