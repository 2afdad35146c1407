"""The kernel classes of serving steps that are written: their records, and their variants as text.

Beside `families`, as `backward` is; `step/` forecasts what it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tilecast.model.kernel.knobs import check_value, parse_knobs, value_like
from tilecast.model.kernel.variants import blackwell_serving, serving
from tilecast.model.kernel.variants.blackwell_serving import BlackwellServingVariant
from tilecast.model.kernel.variants.hopper import mla as hopper_mla
from tilecast.model.kernel.variants.hopper import prefill as hopper_prefill
from tilecast.model.kernel.variants.hopper import serving as hopper_serving
from tilecast.model.kernel.variants.hopper.mla import HopperMlaVariant
from tilecast.model.kernel.variants.hopper.prefill import HopperPrefillVariant
from tilecast.model.kernel.variants.hopper.serving import (
    HopperRunsE4m3Variant,
    HopperRunsVariant,
    HopperServingE4m3Variant,
    HopperServingVariant,
)
from tilecast.model.kernel.variants.serving import ServingVariant
from tilecast.model.kernel.verdict import VariantError, Verdict
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

V = TypeVar(
    "V",
    ServingVariant,
    HopperServingVariant,
    HopperServingE4m3Variant,
    HopperRunsVariant,
    HopperRunsE4m3Variant,
    HopperPrefillVariant,
    HopperMlaVariant,
    BlackwellServingVariant,
)


@dataclass(frozen=True, slots=True)
class ServingFamily(Generic[V]):
    """A kernel class of serving steps."""

    name: str
    #: Name of the template that writes it; generated files bear it.
    template: str
    about: str
    variant: type[V]
    legality: Callable[[V, Workload, Machine], Verdict]
    writable: Callable[[V, Workload, Machine], Verdict]
    #: Every legal combination of knobs worth telling apart, and the one to start from.
    space: Callable[[Workload, Machine], Iterable[V]]
    chosen: Callable[[Workload, Machine], V]


TRITON_SERVING = ServingFamily(
    *serving.NAMES, "paged, packed and split attention in plain Triton, any GPU from Ampere on", ServingVariant,
    serving.legality, serving.writable, serving.space, serving.chosen,
)  # fmt: skip
HOPPER_SERVING = ServingFamily(
    *hopper_serving.NAMES, "decoding on Hopper: K and V by the copy engine, wgmma, in Gluon", HopperServingVariant,
    hopper_serving.legality, hopper_serving.writable, hopper_serving.space, hopper_serving.chosen,
)  # fmt: skip
HOPPER_PREFILL = ServingFamily(
    *hopper_prefill.NAMES, "prefill on Hopper: K and V by the copy engine, wgmma, in Gluon", HopperPrefillVariant,
    hopper_prefill.legality, hopper_prefill.writable, hopper_prefill.space, hopper_prefill.chosen,
)  # fmt: skip
HOPPER_SERVING_E4M3 = ServingFamily(
    *hopper_serving.NAMES_E4M3, "the same for caches of e4m3, which warps widen to 16 bits in registers", HopperServingE4m3Variant,
    hopper_serving.legality_e4m3, hopper_serving.writable_e4m3, hopper_serving.space_e4m3, hopper_serving.chosen_e4m3,
)  # fmt: skip
HOPPER_RUNS = ServingFamily(
    *hopper_serving.NAMES_RUNS, "decoding few rows on Hopper: K and V by the copy engine, mma.sync by each warp, runs of splits", HopperRunsVariant,
    hopper_serving.legality_runs, hopper_serving.writable_runs, hopper_serving.space_runs, hopper_serving.chosen_runs,
)  # fmt: skip
HOPPER_RUNS_E4M3 = ServingFamily(
    *hopper_serving.NAMES_RUNS_E4M3, "the same for caches of e4m3, which warps widen to 16 bits in registers", HopperRunsE4m3Variant,
    hopper_serving.legality_runs, hopper_serving.writable_runs_e4m3, hopper_serving.space_runs_e4m3, hopper_serving.chosen_runs_e4m3,
)  # fmt: skip
HOPPER_MLA = ServingFamily(
    *hopper_mla.NAMES, "latent attention (MLA) on Hopper: keys copied once, wgmma, O in two warpgroups, in Gluon", HopperMlaVariant,
    hopper_mla.legality, hopper_mla.writable, hopper_mla.space, hopper_mla.chosen,
)  # fmt: skip
BLACKWELL_SERVING = ServingFamily(
    *blackwell_serving.NAMES, "decoding on Blackwell: K and V by the copy engine, tcgen05, in Gluon", BlackwellServingVariant,
    blackwell_serving.legality, blackwell_serving.writable, blackwell_serving.space, blackwell_serving.chosen,
)  # fmt: skip
_FAMILIES: tuple[ServingFamily[Any], ...] = (
    TRITON_SERVING,
    HOPPER_SERVING,
    HOPPER_SERVING_E4M3,
    HOPPER_RUNS,
    HOPPER_RUNS_E4M3,
    HOPPER_PREFILL,
    HOPPER_MLA,
    BLACKWELL_SERVING,
)


def writable(
    variant: ServingVariant | HopperServingVariant | HopperServingE4m3Variant | HopperPrefillVariant | HopperMlaVariant,
    workload: Workload,
    machine: Machine,
) -> Verdict:
    """Whether a kernel of ``variant`` can be written: legal, and within what its template writes."""
    family = find_serving(variant.family)
    verdict = family.legality(variant, workload, machine)
    return family.writable(variant, workload, machine) if verdict.legal else verdict


def find_serving(name: str) -> ServingFamily[Any]:
    """The kernel class of a name, its own or its template's; VariantError where there is none."""
    for family in _FAMILIES:
        if name in (family.name, family.template):
            return family
    names = " or ".join(name for family in _FAMILIES for name in (family.name, family.template))
    raise VariantError(f"--pass serve: expected family {names}, got '{name}'")


def parse_serving(text: str, base: V) -> V:
    """A variant from "tile_m=16,..."; knobs not named keep ``base``'s values.

    Raises VariantError with the nearest names for an unknown family, knob or value.
    """

    def check_family(name: str) -> None:
        if find_serving(name).name != base.family:
            raise VariantError(f"--variant: expected knobs of family {base.family}, got family '{name}'")

    return parse_knobs(text, base, check_family, _value)


def _value(key: str, text: str, current: object) -> object:
    value = value_like(key, text, current)
    if not isinstance(current, bool):
        least = 0 if key in ("registers", "whole_keys", "apart", "latent", "overlapped") else 1
        check_value(key, text, value, (1, 2, 4, 8) if key == "warps" else None, (least, 65536))
    return value
