"""Workload, machine and variant in; the source of one backward pass out."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.codegen import triton_portable
from tilecast.codegen.render import render
from tilecast.codegen.triton_backward import TEMPLATE, context
from tilecast.model.backward import TRITON_BACKWARD, writable
from tilecast.model.kernel.header import header_text
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.variants.fa2_backward import Fa2BackwardVariant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine


@dataclass(frozen=True, slots=True)
class GeneratedBackward:
    """The source of a backward pass and what it was made from."""

    source: str
    header: dict[str, object]
    variant: Fa2BackwardVariant


def targets(variant: Fa2BackwardVariant) -> tuple[str, ...]:
    """Targets that a variant runs on."""
    return triton_portable.targets("descriptors" in (variant.dkv_loads, variant.dq_loads))


def generate_backward(
    workload: Workload, machine: Machine, variant: Fa2BackwardVariant | None = None, version: str = ""
) -> GeneratedBackward:
    """The backward pass of ``variant`` (default: the one to start from on this machine).

    Raises VariantError, with the violated resource, by how much and the lever, for a variant that cannot be written.
    """
    workload = workload.reduced()
    made = TRITON_BACKWARD.chosen(workload, machine) if variant is None else variant
    verdict = writable(made, workload, machine)
    if not verdict.legal:
        raise VariantError(
            f"{made.family} cannot write {workload.label()} for {machine.name}: {verdict.sentence()}"
        )  # fmt: skip
    header: dict[str, object] = {
        "tilecast": version,
        "family": TRITON_BACKWARD.template,
        "machine": machine.name,
        "targets": list(targets(made)),
        "pass": "bwd",
        "variant": variant_text(made),
        "workload": workload.as_dict(),
    }
    source = render(TEMPLATE, {"k": context(made, workload), "header": header_text(header)})
    return GeneratedBackward(source, header, made)
