"""Workload, machine and variant in; the source of one serving kernel out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilecast.codegen.blackwell import serving as blackwell_serving
from tilecast.codegen.hopper import mla as hopper_mla
from tilecast.codegen.hopper import prefill as hopper_prefill
from tilecast.codegen.hopper import serving as hopper_serving
from tilecast.codegen.portable import forward as triton_portable
from tilecast.codegen.portable import serving as triton_serving
from tilecast.codegen.render import render
from tilecast.model.kernel.header import header_text
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.variants.hopper.mla import HopperMlaVariant
from tilecast.model.kernel.variants.hopper.prefill import HopperPrefillVariant
from tilecast.model.kernel.variants.hopper.serving import HopperServingVariant
from tilecast.model.kernel.variants.serving import ServingVariant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.serving import (
    BLACKWELL_SERVING,
    HOPPER_MLA,
    HOPPER_PREFILL,
    HOPPER_RUNS,
    HOPPER_RUNS_E4M3,
    HOPPER_SERVING,
    HOPPER_SERVING_E4M3,
    TRITON_SERVING,
    find_serving,
    writable,
)

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
    template = _TEMPLATES[made.family]
    header: dict[str, object] = {
        "tilecast": version,
        "family": find_serving(made.family).template,
        "machine": machine.name,
        "targets": list(template.targets),
        "pass": "serve",
        "variant": variant_text(made),
        "workload": workload.as_dict(),
    }
    read = {"k": template.context(made, workload), "header": header_text(header)}
    return GeneratedServing(render(template.file, read), header, made, template.targets)


@dataclass(frozen=True, slots=True)
class _Template:
    """The file that writes a kernel class, what turns a variant into what it reads, and targets that the result runs on."""

    file: str
    context: Callable[[Any, Workload], object]
    targets: tuple[str, ...]


_TEMPLATES = {
    # Any variant of the portable class runs on all of them: tiles come by pointers.
    TRITON_SERVING.name: _Template(triton_serving.TEMPLATE, triton_serving.context, triton_portable.targets(False)),
    HOPPER_SERVING.name: _Template(hopper_serving.TEMPLATE, hopper_serving.context, hopper_serving.TARGETS),
    HOPPER_SERVING_E4M3.name: _Template(hopper_serving.TEMPLATE, hopper_serving.context_e4m3, hopper_serving.TARGETS),
    HOPPER_RUNS.name: _Template(hopper_serving.TEMPLATE_RUNS, hopper_serving.context_runs, hopper_serving.TARGETS),
    HOPPER_RUNS_E4M3.name: _Template(hopper_serving.TEMPLATE_RUNS, hopper_serving.context_runs, hopper_serving.TARGETS),
    HOPPER_PREFILL.name: _Template(hopper_prefill.TEMPLATE, hopper_prefill.context, hopper_prefill.TARGETS),
    HOPPER_MLA.name: _Template(hopper_mla.TEMPLATE, hopper_mla.context, hopper_mla.TARGETS),
    BLACKWELL_SERVING.name: _Template(blackwell_serving.TEMPLATE, blackwell_serving.context, blackwell_serving.TARGETS),
}
