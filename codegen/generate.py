"""Workload, machine and variant in; the source of one kernel out, and its forecast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilecast.codegen.families import template_of
from tilecast.codegen.render import render
from tilecast.model.families import Family, writable
from tilecast.model.forecast.level import Compiler, at_hand, search_of
from tilecast.model.forecast.predict import Prediction, predict
from tilecast.model.kernel.header import header_text
from tilecast.model.kernel.variant import Variant, variant_text
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: Significant digits of kept forecasts: more would differ between platforms' floating point.
_DIGITS = 3


@dataclass(frozen=True, slots=True)
class Generated:
    """A kernel's source and what it was made from."""

    source: str
    header: dict[str, object]
    variant: Variant
    prediction: Prediction


def generate(
    workload: Workload,
    machine: Machine,
    family: Family,
    variant: Variant | None = None,
    version: str = "",
    extra: Mapping[str, object] | None = None,
    *,
    clock: str | float = "sustained",
    compiler: Compiler | None = at_hand,
    narrower: bool = False,
) -> Generated:
    """The kernel of ``variant`` (default: the best by forecast at the level of ``compiler``); ``extra`` goes into its header; with
    ``narrower`` (`hopper_ws`) it also takes heads of fewer columns.

    Raises VariantError, with the violated resource, by how much and the lever, for a variant that cannot be written,
    and PredictError when none can.
    """
    template = template_of(family)
    workload = workload.reduced()
    chosen = variant if variant is not None else search_of(compiler)(workload, machine, family.name, clock).variant
    if chosen.family != family.name:
        raise VariantError(f"--variant: expected a variant of family {family.name}, got one of {chosen.family}")
    verdict = writable(chosen, workload, machine)
    if not verdict.legal:
        raise VariantError(f"{family.name} cannot write {workload.label()} for {machine.name}: {verdict.sentence()}")
    prediction = predict(workload, machine, chosen, clock=clock, interval=False, compiler=compiler)
    header = {**header_of(family, prediction, version), **(extra or {})}
    kernel = template.context(chosen, workload, machine)
    if narrower:
        kernel = replace(kernel, narrow_heads=True)  # type: ignore[type-var]
    values = kernel if isinstance(kernel, dict) else {"k": kernel}
    source = render(template.file, {**values, "header": header_text(header)})
    return Generated(source, header, chosen, prediction)


def header_of(family: Family, prediction: Prediction, version: str) -> dict[str, object]:
    """What a generated file says about itself, as plain values."""
    work = prediction.workload
    watts = prediction.machine.given_power_w
    return {
        "tilecast": version,
        "family": family.template,
        "variant": variant_text(prediction.variant),
        "machine": prediction.machine.name,
        **({} if watts is None else {"power_w": watts}),
        "targets": list(template_of(family).targets(prediction.variant, prediction.machine)),
        "workload": work.as_dict(),
    }


def forecast_of(prediction: Prediction) -> dict[str, object]:
    """What a kernel is expected to do on its machine, as plain values."""
    return {
        "regime": prediction.regime,
        "tflops": _short(prediction.tflops),
        "time_ms": _short(prediction.time_ms),
        "clock_mhz": _short(prediction.clock_mhz),
        "cycles_per_iteration": _short(prediction.ii_cycles),
        "keys_per_iteration": prediction.pipeline.keys_per_iteration,
        "rows_per_cta": prediction.pipeline.rows_per_cta,
        "unit_share": {unit: round(share, 2) for unit, share in prediction.units.items()},
        "binding": str(prediction.binding.as_dict()["name"]),
    }


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
