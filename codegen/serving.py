"""Workload, machine and variant in; the source of one serving kernel out."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.codegen import triton_portable
from tilecast.codegen.render import render
from tilecast.codegen.triton_serving import TEMPLATE, context
from tilecast.model.kernel.header import header_text
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.variants.serving import ServingVariant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.serving import TRITON_SERVING, writable

#: Targets that every variant runs on: tiles come by pointers.
TARGETS = triton_portable.targets(False)


@dataclass(frozen=True, slots=True)
class GeneratedServing:
    """The source of a serving kernel and what it was made from."""

    source: str
    header: dict[str, object]
    variant: ServingVariant


def generate_serving(
    workload: Workload, machine: Machine, variant: ServingVariant | None = None, version: str = ""
) -> GeneratedServing:
    """The kernel of ``variant`` (default: the one to start from for the queries of ``workload`` on this machine).

    Raises VariantError, with the violated resource, by how much and the lever, for a variant that cannot be written.
    """
    made = TRITON_SERVING.chosen(workload, machine) if variant is None else variant
    verdict = writable(made, workload, machine)
    if not verdict.legal:
        raise VariantError(f"{made.family} cannot write {workload.label()} for {machine.name}: {verdict.sentence()}")
    header: dict[str, object] = {
        "tilecast": version,
        "family": TRITON_SERVING.template,
        "machine": machine.name,
        "targets": list(TARGETS),
        "pass": "serve",
        "variant": variant_text(made),
        "workload": workload.as_dict(),
    }
    return GeneratedServing(
        render(TEMPLATE, {"k": context(made, workload), "header": header_text(header)}), header, made
    )
