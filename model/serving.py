"""The kernel class of serving steps that is written: its record, and its variants as text.

Beside `families`, as `backward` is; `step/` forecasts what it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tilecast.model.kernel.knobs import parse_knobs
from tilecast.model.kernel.variants import serving
from tilecast.model.kernel.variants.serving import ServingVariant
from tilecast.model.kernel.verdict import VariantError, Verdict
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine


@dataclass(frozen=True, slots=True)
class ServingFamily:
    """A kernel class of serving steps."""

    name: str
    #: Name of the template that writes it; generated files bear it.
    template: str
    about: str
    variant: type[ServingVariant]
    legality: Callable[[ServingVariant, Workload, Machine], Verdict]
    writable: Callable[[ServingVariant, Workload, Machine], Verdict]
    #: Every legal combination of knobs worth telling apart, and the one to start from.
    space: Callable[[Workload, Machine], Iterable[ServingVariant]]
    chosen: Callable[[Workload, Machine], ServingVariant]


TRITON_SERVING = ServingFamily(
    *serving.NAMES, "paged, packed and split attention in plain Triton, any GPU from Ampere on", ServingVariant,
    serving.legality, serving.writable, serving.space, serving.chosen,
)  # fmt: skip


def writable(variant: ServingVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether a kernel of ``variant`` can be written: legal, and within what its template writes."""
    verdict = TRITON_SERVING.legality(variant, workload, machine)
    return TRITON_SERVING.writable(variant, workload, machine) if verdict.legal else verdict


def parse_serving(text: str, base: ServingVariant) -> ServingVariant:
    """A variant from "tile_m=16,..."; knobs not named keep ``base``'s values.

    Raises VariantError with the nearest names for an unknown family, knob or value.
    """
    return parse_knobs(text, base, check_family, _value)


def check_family(name: str) -> None:
    """VariantError unless ``name`` is the family of serving kernels."""
    if name not in serving.NAMES:
        raise VariantError(f"--pass serve: expected family {' or '.join(serving.NAMES)}, got '{name}'")


def _value(key: str, text: str, current: object) -> object:
    try:
        value = int(text)
    except ValueError:
        raise VariantError(f"--variant: knob '{key}' takes a whole number, got '{text}'") from None
    least = 0 if key in ("registers", "whole_keys", "apart", "latent") else 1
    if key == "warps" and value not in (1, 2, 4, 8):
        raise VariantError(f"--variant: knob '{key}' takes one of 1, 2, 4, 8, got '{text}'")
    if not least <= value <= 65536:
        raise VariantError(f"--variant: knob '{key}' takes {least} to 65536, got '{text}'")
    return value
