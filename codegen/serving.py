"""Workload, machine and variant in; the source of one serving kernel out."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.codegen.blackwell import serving as blackwell_serving
from tilecast.codegen.hopper import mla as hopper_mla
from tilecast.codegen.hopper import prefill as hopper_prefill
from tilecast.codegen.hopper import serving as hopper_serving
from tilecast.codegen.hopper.prefill import HopperPrefillKernel
from tilecast.codegen.hopper.serving import HopperServingKernel
from tilecast.codegen.portable import forward as triton_portable
from tilecast.codegen.portable import serving as triton_serving
from tilecast.codegen.portable.serving import ServingKernel
from tilecast.codegen.render import render
from tilecast.model.kernel.header import header_text
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.variants.blackwell_serving import BlackwellServingVariant
from tilecast.model.kernel.variants.hopper.mla import HopperMlaVariant
from tilecast.model.kernel.variants.hopper.prefill import HopperPrefillVariant
from tilecast.model.kernel.variants.hopper.serving import (
    HopperRunsVariant,
    HopperServingE4m3Variant,
    HopperServingVariant,
)
from tilecast.model.kernel.variants.serving import ServingVariant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.serving import TRITON_SERVING, find_serving, writable

AnyServing = ServingVariant | HopperServingVariant | HopperPrefillVariant | HopperMlaVariant


@dataclass(frozen=True, slots=True)
class GeneratedServing:
    """The source of a serving kernel and what it was made from."""

    source: str
    header: dict[str, object]
    variant: AnyServing
    #: Targets of `compiler.compile` that it runs on.
    targets: tuple[str, ...]


def generate_serving(
    workload: Workload, machine: Machine, variant: AnyServing | None = None, version: str = ""
) -> GeneratedServing:
    """The kernel of ``variant`` (default: the portable one to start from for the queries of ``workload`` on this machine).

    Raises VariantError, with the violated resource, by how much and the lever, for a variant that cannot be written.
    """
    made = TRITON_SERVING.chosen(workload, machine) if variant is None else variant
    verdict = writable(made, workload, machine)
    if not verdict.legal:
        raise VariantError(f"{made.family} cannot write {workload.label()} for {machine.name}: {verdict.sentence()}")
    template, kernel, targets = _template(made, workload)
    header: dict[str, object] = {
        "tilecast": version,
        "family": find_serving(made.family).template,
        "machine": machine.name,
        "targets": list(targets),
        "pass": "serve",
        "variant": variant_text(made),
        "workload": workload.as_dict(),
    }
    return GeneratedServing(render(template, {"k": kernel, "header": header_text(header)}), header, made, targets)


def _template(
    variant: AnyServing, workload: Workload
) -> tuple[str, ServingKernel | HopperServingKernel | HopperPrefillKernel, tuple[str, ...]]:
    """The file that writes a variant, what it reads, and targets that the result runs on."""
    if isinstance(variant, BlackwellServingVariant):
        return blackwell_serving.TEMPLATE, blackwell_serving.context(variant, workload), blackwell_serving.TARGETS
    if isinstance(variant, HopperServingE4m3Variant):
        return hopper_serving.TEMPLATE, hopper_serving.context_e4m3(variant, workload), hopper_serving.TARGETS
    if isinstance(variant, HopperRunsVariant):
        return hopper_serving.TEMPLATE_RUNS, hopper_serving.context_runs(variant, workload), hopper_serving.TARGETS
    if isinstance(variant, HopperServingVariant):
        return hopper_serving.TEMPLATE, hopper_serving.context(variant, workload), hopper_serving.TARGETS
    if isinstance(variant, HopperPrefillVariant):
        return hopper_prefill.TEMPLATE, hopper_prefill.context(variant, workload), hopper_prefill.TARGETS
    if isinstance(variant, HopperMlaVariant):
        return hopper_mla.TEMPLATE, hopper_mla.context(variant, workload), hopper_mla.TARGETS
    # Any variant runs on all of them: tiles come by pointers.
    return triton_serving.TEMPLATE, triton_serving.context(variant, workload), triton_portable.targets(False)
