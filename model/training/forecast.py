"""The forecast of a backward pass: time, throughput, what binds, and where every cycle between peak and achieved went."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

from tilecast.model.backward import (
    BackwardFamily,
    BackwardVariant,
    family_of,
    find_backward,
    native_backward,
)
from tilecast.model.chip.evaluate import REGIMES, Evaluation, PredictError, check_clock, refuse_unknown
from tilecast.model.chip.power import Clock
from tilecast.model.forecast.answer import KernelAnswer, WaterfallStep
from tilecast.model.forecast.binding import Binding, binding
from tilecast.model.forecast.interval import FactEffect, effects_of, fact_ends, moves_of
from tilecast.model.forecast.interval import interval as fact_interval
from tilecast.model.forecast.level import Compiler, at_hand
from tilecast.model.forecast.predict import predict
from tilecast.model.forecast.trace import trace_json
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, machine_of
from tilecast.model.pipeline.backward.kernels import LoopKernel
from tilecast.model.sm.bounds import bounds
from tilecast.model.sm.simulate import critical_recurrence
from tilecast.model.training.answer import BackwardForecast, TrainingForecast
from tilecast.model.training.evaluate import BackwardRun, LaunchRun, backward_flops, evaluate_backward, refuse
from tilecast.model.training.launch import tiles_of
from tilecast.model.training.render import as_dict, as_html, as_text, both_as_dict, both_as_html, both_as_text

#: Knobs of the two loops of a class whose kernels do not depend on each other, by what their names begin with.
_APART = ("dkv_", "dq_")


@dataclass(frozen=True, slots=True, repr=False)
class BackwardPrediction(BackwardForecast):
    """The answer for one backward pass, with its text."""

    to_dict = as_dict
    text = __str__ = as_text
    _repr_html_ = as_html

    def trace_json(self) -> str:
        """Chrome trace of a tile of each kernel with matrix products, for ui.perfetto.dev."""
        return trace_json(self)

    def __repr__(self) -> str:
        return f"<BackwardPrediction {self.machine.name}: {self.workload.label()}: {self.time_ms:.4g} ms, {self.tflops:.4g} TFLOP/s>"


@dataclass(frozen=True, slots=True, repr=False)
class TrainingPrediction(TrainingForecast):
    """The answer for a forward and a backward pass, with its text."""

    to_dict = both_as_dict
    text = __str__ = both_as_text
    _repr_html_ = both_as_html

    def trace_json(self) -> str:
        """Chrome trace of a tile of each kernel of both passes, for ui.perfetto.dev."""
        return trace_json(self.forward, self.backward)

    def __repr__(self) -> str:
        return f"<TrainingPrediction {self.backward.machine.name}: {self.backward.workload.label()}: {self.time_ms:.4g} ms>"


def predict_backward(
    workload: Workload, machine: Machine | str, variant: BackwardVariant | None = None, *, family: str | None = None,
    clock: str | float = "sustained", power: float | None = None, interval: bool = True,
) -> BackwardPrediction:  # fmt: skip
    """Forecast the gradients of q, k and v of ``workload`` on ``machine``, all launches included.

    ``variant`` fixes the kernels; else the best variant of ``family`` (default: the class built for the machine and the shape) is
    searched.  ``clock`` and ``power`` as in `predict`; with ``interval`` every fact with a range is moved to its ends.  The
    forecast is made before compilation.  Raises PredictError, VariantError, MachineError or WorkloadError with one sentence.
    """
    chip = machine_of(machine)
    chip = chip if power is None else chip.at_power(power)
    asked = workload.reduced()
    work = asked.heads_as_rows()  # as the operator has its kernels see it
    origin = "as given"
    if variant is None:
        variant, origin = best_backward(work, chip, family, clock)
    refuse(work, chip, variant, clock)
    run = evaluate_backward(work, chip, variant, clock)
    effects = _fact_effects(work, chip, variant, clock, run.tflops) if interval else ()
    others = []
    for regime in REGIMES:
        if regime != clock:
            other = evaluate_backward(work, chip, variant, regime)
            others.append((regime, other.seconds * 1e3, other.tflops, other.clock.mhz))
    return BackwardPrediction(
        asked, chip, variant, origin, clock if isinstance(clock, str) else "fixed", run,
        tuple(_kernel(one, run.clock, work, chip) for one in run.launches if one.loop is not None),
        _waterfall(work, chip, run), tuple(others), fact_interval(run.tflops, effects), effects,
        family_of(variant).writable(variant, work, chip).sentence(),
    )  # fmt: skip


def predict_training(
    workload: Workload, machine: Machine | str, variant: Variant | None = None, *, family: str | None = None,
    backward: BackwardVariant | None = None, backward_family: str | None = None, clock: str | float = "sustained",
    power: float | None = None, interval: bool = True, compiler: Compiler | None = at_hand,
) -> TrainingPrediction:  # fmt: skip
    """Forecast the forward pass (``variant``, ``family``, ``compiler`` as in `predict`) and the backward pass after it."""
    first = predict(workload, machine, variant, family=family, clock=clock, power=power, interval=interval, compiler=compiler)  # fmt: skip
    then = predict_backward(workload, machine, backward, family=backward_family, clock=clock, power=power, interval=interval)  # fmt: skip
    return TrainingPrediction(first, then)


# --- the best variant -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def best_backward(
    workload: Workload,
    machine: Machine,
    family: str | None = None,
    clock: str | float = "sustained",
    published: bool = False,
) -> tuple[BackwardVariant, str]:
    """The variant of ``family`` with the shortest forecast (the first among equals), and what was searched: what can be written, or
    with ``published`` what its authors have.

    Every variant of the space is forecast, but where a class has two loops that do not depend on each other: then each loop.
    """
    workload = workload.heads_as_rows()
    check_clock(clock, machine)
    refuse_unknown(workload, machine)
    record = find_backward(family) if family is not None else native_backward(workload, machine, published)
    space = record.published if published and record.published is not None else record.space
    listed = tuple(space(workload, machine))
    if not listed:
        raise PredictError(f"{record.name} cannot run the backward pass of {workload.label()} on {machine.name}: {_refusal(record, workload, machine)}")  # fmt: skip
    found = record.chosen(workload, machine)
    found = found if found in listed else listed[0]
    apart = all(any(f.name.startswith(loop) for f in fields(found)) for loop in _APART)
    for loop in _APART if apart else ("",):
        seen: dict[tuple[object, ...], BackwardVariant] = {}
        for v in listed:
            names = [f.name for f in fields(v) if f.name.startswith(loop)]
            if apart and loop == _APART[0]:
                names.append("dkv_apart")
            knobs = {name: getattr(v, name) for name in names}
            seen.setdefault(tuple(knobs.values()), replace(found, **knobs) if apart else v)
        allowed = [v for v in seen.values() if record.legality(v, workload, machine).legal]
        found = min(allowed, key=lambda v: round(evaluate_backward(workload, machine, v, clock).seconds, 9))
    written = record.writable(found, workload, machine).legal
    return found, f"best of {len(listed)} variants" + ("" if written else "; tilecast writes none of them yet")


def _refusal(record: BackwardFamily, workload: Workload, machine: Machine) -> str:
    chosen = record.chosen(workload, machine)
    for rule in (record.legality, record.writable):
        verdict = rule(chosen, workload, machine)
        if not verdict.legal:
            return verdict.sentence()
    return "no tile fits"


# --- explained --------------------------------------------------------------------------------------------------------


def kernel_binding(one: LaunchRun, clock: Clock, workload: Workload, machine: Machine) -> Binding:
    """What a launch with matrix products sits on, at the clock of the pass."""
    assert one.loop is not None and isinstance(one.kernel, LoopKernel)
    alone = Evaluation(
        one.seconds, 0.0, clock, one.loop.chip, one.kernel.pipeline, one.loop.trace, one.launch_seconds,
        one.memory_seconds,
    )  # fmt: skip
    return binding(workload, machine, alone, one.kernel.flop_per_score)


def _kernel(one: LaunchRun, clock: Clock, workload: Workload, machine: Machine) -> KernelAnswer:
    assert one.loop is not None and isinstance(one.kernel, LoopKernel)
    trace = one.loop.trace
    return KernelAnswer(
        one.kernel.name, one.seconds * 1e3, kernel_binding(one, clock, workload, machine), bounds(one.kernel.pipeline),
        trace, critical_recurrence(trace), one.loop.chip,
    )  # fmt: skip


def _waterfall(workload: Workload, machine: Machine, run: BackwardRun) -> tuple[WaterfallStep, ...]:
    """From the peak at the top clock to the time; cycles per SM at the forecast clock, adding up exactly, none negative."""
    hertz = run.clock.mhz * 1e6
    total = run.seconds * hertz
    rate = machine[f"tensor.{workload.dtype}_flop_per_clk"] * machine["chip.sm_count"]
    useful = backward_flops(workload) / rate
    at_peak = useful * run.clock.mhz / machine["chip.clock_max_mhz"]
    products = busy = loop = masks = fill = edges = tail = memory = rows = launch = 0.0
    for one in run.launches:
        launch += one.launch_seconds * hertz
        if one.loop is None or not isinstance(one.kernel, LoopKernel):
            rows += (one.seconds - one.launch_seconds) * hertz
            continue
        chip, p = one.loop.chip, one.kernel.pipeline
        tiles, heads = tiles_of(one.kernel, workload)
        executed = one.kernel.flop_per_score * p.rows_per_cta * p.cta_group * p.keys_per_iteration
        products += min(executed * tiles.total_iterations * heads / rate, chip.loop_cycles)
        busy += min(chip.iterations / chip.slots * p.demand().get("tensor", 0.0), chip.loop_cycles)
        loop, masks, fill, edges = loop + chip.loop_cycles, masks + chip.mask_cycles, fill + chip.fill_cycles, edges + chip.edge_cycles  # fmt: skip
        tail += chip.makespan_cycles - chip.mean_cycles - one.hidden_cycles
        memory += (one.seconds - one.launch_seconds) * hertz - (chip.makespan_cycles - one.hidden_cycles)
    products = max(products, useful)
    busy = max(busy, products)
    steps = [
        ("tensor cores at peak rate and top clock", at_peak),
        ("clock (power limit or tensor load) below the top clock", useful - at_peak),
        ("products computed twice, and blocks beyond the mask and the tensors", products - useful),
        ("matrix instructions wait for operands from shared memory", busy - products),
        ("steady state: the loops wait (see binding)", loop - busy),
        ("extra work in masked blocks", masks),
        ("pipeline fill and drain", fill),
        ("start and end of tiles, first turns to add dQ", edges),
        ("tail: the last tiles leave SMs idle", tail),
        ("memory (HBM or L2) slower than the SMs", memory),
        ("kernels before and after: row terms, rounding", rows),
        ("launches", launch),
    ]
    return tuple(WaterfallStep(cause, cycles, cycles / total) for cause, cycles in steps)


def _fact_effects(
    workload: Workload, machine: Machine, variant: BackwardVariant, clock: str | float, tflops: float
) -> tuple[FactEffect, ...]:
    """What the ends of every range do to the forecast, the widest first."""
    moves = moves_of(fact_ends(machine), lambda moved: evaluate_backward(workload, moved, variant, clock).tflops)
    return effects_of(moves, tflops)
