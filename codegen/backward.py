"""Workload, machine and variant in; the source of one backward pass out."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.codegen.hopper import backward as hopper_backward
from tilecast.codegen.hopper import backward_apart as hopper_backward_apart
from tilecast.codegen.portable import backward as triton_backward
from tilecast.codegen.portable import forward as triton_portable
from tilecast.codegen.render import render
from tilecast.model.backward import TRITON_BACKWARD, BackwardVariant, family_of, writable
from tilecast.model.kernel.header import header_text
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.variants.fa2_backward import Fa2BackwardVariant
from tilecast.model.kernel.variants.fa3_backward import Fa3BackwardVariant
from tilecast.model.kernel.variants.fa3_backward_apart import Fa3BackwardApartVariant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine


@dataclass(frozen=True, slots=True)
class GeneratedBackward:
    """The source of a backward pass and what it was made from."""

    source: str
    header: dict[str, object]
    variant: BackwardVariant


def targets(variant: BackwardVariant) -> tuple[str, ...]:
    """Targets that a variant runs on."""
    if not isinstance(variant, Fa2BackwardVariant):
        return hopper_backward.TARGETS
    return triton_portable.targets("descriptors" in (variant.dkv_loads, variant.dq_loads))


def generate_backward(
    workload: Workload, machine: Machine, variant: BackwardVariant | None = None, version: str = ""
) -> GeneratedBackward:
    """The backward pass of ``variant`` (default: the one to start from on this machine).

    Raises VariantError, with the violated resource, by how much and the lever, for a variant that cannot be written.
    """
    workload = workload.reduced()
    made: BackwardVariant = TRITON_BACKWARD.chosen(workload, machine) if variant is None else variant
    verdict = writable(made, workload, machine)
    if not verdict.legal:
        raise VariantError(
            f"{made.family} cannot write {workload.label()} for {machine.name}: {verdict.sentence()}"
        )  # fmt: skip
    header: dict[str, object] = {
        "tilecast": version,
        "family": family_of(made).template,
        "machine": machine.name,
        "targets": list(targets(made)),
        "pass": "bwd",
        "variant": variant_text(made),
        "workload": workload.as_dict(),
    }
    if isinstance(made, Fa2BackwardVariant):
        source = _render(triton_backward.TEMPLATE, triton_backward.context(made, workload), header)
    elif isinstance(made, Fa3BackwardApartVariant):
        source = _render(hopper_backward_apart.TEMPLATE, hopper_backward_apart.context(made, workload), header)
    else:
        assert isinstance(made, Fa3BackwardVariant)
        source = _render(hopper_backward.TEMPLATE, hopper_backward.context(made, workload), header)
    return GeneratedBackward(source, header, made)


def _render(template: str, kernel: object, header: dict[str, object]) -> str:
    return render(template, {"k": kernel, "header": header_text(header)})
