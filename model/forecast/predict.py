"""The forecast: time, throughput, what binds, and where every cycle between peak and achieved went.

`predict` is the one function users call.  It reads top to bottom: reduce the mask, choose the variant, evaluate it (build
its pipeline, simulate one SM, play the chip, settle the clock), and account for the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilecast.base.data import LOOP_TARGETS
from tilecast.model.chip.evaluate import REGIMES, Evaluation, PredictError, check_clock, evaluate, refuse_unknown
from tilecast.model.families import family_of, find_family, legality, native_family
from tilecast.model.forecast.answer import BEFORE, COMPILED, Forecast, MachineCodeLevel
from tilecast.model.forecast.checked_range import AT_HAND, decode_note, model_error, outside_checked_range
from tilecast.model.forecast.interval import FactEffect, fact_effects
from tilecast.model.forecast.interval import interval as fact_interval
from tilecast.model.forecast.level import Compiler, Search, at_hand, evaluated, search_of
from tilecast.model.forecast.render import as_dict, as_html, as_text
from tilecast.model.forecast.trace import trace_json
from tilecast.model.forecast.waterfall import waterfall
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, machine_of
from tilecast.model.search.best import best
from tilecast.model.sm.bounds import bounds
from tilecast.model.sm.simulate import critical_recurrence
from tilecast.model.step.short import short_note

if TYPE_CHECKING:
    from tilecast.model.compiled.evaluate import CompiledVariant

#: How a variant was found that no search chose.
_GIVEN, _SHIPPED = "as given", "as its authors ship it"
_NOT_SEARCHED = (_GIVEN, _SHIPPED)
#: Where machine code was asked for and there is none.
_NO_LOOP = "before compilation: no machine code of this kernel's loop is at hand (tilecast loops, docs/machine-code.md)"


@dataclass(frozen=True, slots=True, repr=False)
class Prediction(Forecast):
    """The answer for one workload, machine and variant; see docs/model.md for every field."""

    def to_dict(self) -> dict[str, object]:
        """The documented, stable keys of --json."""
        return as_dict(self)

    def text(self) -> str:
        """The report for people."""
        return as_text(self)

    def trace_json(self) -> str:
        """Chrome trace of one tile, for ui.perfetto.dev."""
        return trace_json(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"<Prediction {self.machine.name}: {self.workload.label()}: {self.time_ms:.4g} ms, {self.tflops:.4g} TFLOP/s>"


def predict(
    workload: Workload,
    machine: Machine | str,
    variant: Variant | None = None,
    *,
    family: str | None = None,
    published: bool = False,
    clock: str | float = "sustained",
    power: float | None = None,
    interval: bool = True,
    compiler: Compiler | None = at_hand,
) -> Prediction:
    """Forecast ``workload`` on ``machine``.

    ``variant`` fixes the kernel; else the best variant of ``family`` (default: the machine's own) is searched, or with
    ``published`` the one the family's authors ship is taken.  ``clock`` is "sustained", "short", how long launches go on from a rest ("300ms", "2s") or MHz; ``power`` the
    power limit of this board in watts (`Machine.at_power`; default: the machine file's).
    Without ``interval`` the ranges of the machine's facts are left out, which is faster.
    ``compiler`` is the level: by default (`at_hand`) the variant is chosen by machine code among the loops at hand and timed
    from it, or both are done before compilation where no loop is at hand, which with `kept_loop` is refused; with None both
    are done before compilation; with `compiled_variant` the variant, chosen before compilation, is compiled and timed from its machine code.
    Raises PredictError, VariantError, MachineError or WorkloadError (all ValueError) with one sentence.
    """
    _check_types(workload, variant)
    chip = machine_of(machine)
    chip = chip if power is None else chip.at_power(power)
    if published and compiler is at_hand:
        compiler = None  # the code at hand is that of kernels of ours
    work = workload.reduced()
    variant, origin = choose(work, chip, variant, family, published, clock, search_of(compiler))
    answer = evaluate(work, chip, variant, clock)
    effects = fact_effects(work, chip, variant, clock, answer) if interval else ()
    made = compiler(work, chip, variant) if compiler is not None else None
    fluid = None
    if made is not None and origin not in _NOT_SEARCHED:
        first = best(work, chip, variant.family, clock)
        fluid = (first.variant, first.seconds * 1e3)
    missed = compiler is not None and made is None and (compiler is not at_hand or chip.arch in LOOP_TARGETS)
    notes = (_NO_LOOP,) if missed else ()
    return _explain(work, chip, variant, origin, clock, answer, effects, made, fluid, notes)


def _check_types(workload: object, variant: object) -> None:
    """PredictError for arguments in another order, and for a variant as text: who calls need not run a type checker."""
    if not isinstance(workload, Workload):
        raise PredictError(f"workload: expected a tilecast.Workload, the machine second, got {type(workload).__name__}")
    if isinstance(variant, str):
        raise PredictError(
            f"variant: expected tilecast.parse_variant('family:knob=value,...'), got the text '{variant}'"
        )


def choose(
    workload: Workload,
    machine: Machine,
    variant: Variant | None = None,
    family: str | None = None,
    published: bool = False,
    clock: str | float = "sustained",
    search: Search = best,
) -> tuple[Variant, str]:
    """The variant that `predict` forecasts for a reduced ``workload``, and how it was found.  Arguments and errors as there."""
    check_clock(clock, machine)
    refuse_unknown(workload, machine)
    origin = _GIVEN
    if variant is None:
        record = find_family(family) if family else native_family(machine)
        if published:
            variant, origin = record.published(workload, machine), _SHIPPED
        else:
            found = search(workload, machine, record.name, clock)
            variant, origin = found.variant, found.scope
    verdict = legality(variant, workload, machine)
    if not verdict.legal:
        raise PredictError(f"{variant.family} cannot run {workload.label()} on {machine.name}: {verdict.sentence()}")
    return variant, origin


def _explain(
    workload: Workload,
    machine: Machine,
    variant: Variant,
    origin: str,
    clock: str | float,
    answer: Evaluation,
    effects: tuple[FactEffect, ...],
    made: CompiledVariant | None,
    fluid: tuple[Variant, float] | None,
    notes: tuple[str, ...],
) -> Prediction:
    level, before = None, answer
    answer, bound = evaluated(workload, machine, variant, clock, made)
    if made is not None:
        # Facts move both levels alike; to follow machine code once a fact and end would take minutes.
        effects = tuple(effect.scaled(answer.tflops / before.tflops) for effect in effects)
        level = MachineCodeLevel(
            made, before.seconds * 1e3, before.tflops, before.clock.mhz, before.trace.ii_cycles, fluid
        )
    others = []
    for regime in REGIMES:
        if regime != clock:
            other, _ = evaluated(workload, machine, variant, regime, made)
            others.append((regime, other.seconds * 1e3, other.tflops, other.clock.mhz))
    return Prediction(
        workload=workload, machine=machine, variant=variant, variant_origin=origin, pipeline=answer.pipeline,
        regime=clock if isinstance(clock, str) else "fixed", time_ms=answer.seconds * 1e3, tflops=answer.tflops,
        tflops_interval=fact_interval(answer.tflops, effects), clock=answer.clock, other_regimes=tuple(others), trace=answer.trace,
        bounds=bounds(answer.pipeline), binding=bound, critical=critical_recurrence(answer.trace), chip=answer.chip,
        waterfall=waterfall(workload, machine, answer, family_of(variant).fused), fact_effects=effects,
        outside_calibrated_range=outside_checked_range(workload, machine), model_error=model_error(workload, machine, _checked_as(made)),
        notes=(*(short_note(workload, machine, answer.seconds) or decode_note(workload, machine, clock, answer.seconds)), *notes), compiled=level,
    )  # fmt: skip


def _checked_as(made: CompiledVariant | None) -> str:
    """The level whose measured error is quoted."""
    if made is None:
        return BEFORE
    return AT_HAND if made.code is not None and made.code.digest else COMPILED
