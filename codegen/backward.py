"""Workload, machine and variant in; the source of one backward pass out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilecast.codegen.hopper import backward as hopper_backward
from tilecast.codegen.hopper import backward_apart as hopper_backward_apart
from tilecast.codegen.hopper import backward_thirds as hopper_backward_thirds
from tilecast.codegen.portable import backward as triton_backward
from tilecast.codegen.portable import backward_few
from tilecast.codegen.portable import forward as triton_portable
from tilecast.codegen.render import render
from tilecast.model.backward import (
    FEW_BACKWARD,
    HOPPER_BACKWARD,
    HOPPER_BACKWARD_APART,
    TRITON_BACKWARD,
    BackwardVariant,
    family_of,
    writable,
)
from tilecast.model.kernel.header import header_text
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.variants import fa3_backward
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine


@dataclass(frozen=True, slots=True)
class GeneratedBackward:
    """The source of a backward pass and what it was made from."""

    source: str
    header: dict[str, object]
    variant: BackwardVariant


@dataclass(frozen=True, slots=True)
class _Template:
    """A Jinja2 file, what makes of a variant what it reads, and the targets that the result runs on."""

    file: str
    context: Callable[[Any, Workload], object]
    targets: Callable[[Any], tuple[str, ...]]


def _portable_targets(variant: Any) -> tuple[str, ...]:
    return triton_portable.targets("descriptors" in (variant.dkv_loads, variant.dq_loads))


def _hopper_targets(_variant: Any) -> tuple[str, ...]:
    return hopper_backward.TARGETS


def _hopper(variant: Any, workload: Workload) -> object:
    form = hopper_backward_thirds if fa3_backward.thirds(workload) else hopper_backward
    return form.context(variant, workload)


#: By the template's name of a kernel class; the others are forecast only.
_TEMPLATES = {
    TRITON_BACKWARD.template: _Template(triton_backward.TEMPLATE, triton_backward.context, _portable_targets),
    HOPPER_BACKWARD.template: _Template(hopper_backward.TEMPLATE, _hopper, _hopper_targets),
    HOPPER_BACKWARD_APART.template: _Template(
        hopper_backward_apart.TEMPLATE, hopper_backward_apart.context, _hopper_targets
    ),
    FEW_BACKWARD.template: _Template(backward_few.TEMPLATE, backward_few.context, lambda _: backward_few.TARGETS),
}


def targets(variant: BackwardVariant) -> tuple[str, ...]:
    """Targets that a variant which can be written runs on."""
    return _TEMPLATES[family_of(variant).template].targets(variant)


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
        raise VariantError(f"{made.family} cannot write {workload.label()} for {machine.name}: {verdict.sentence()}")
    header: dict[str, object] = {
        "tilecast": version,
        "family": family_of(made).template,
        "machine": machine.name,
        "targets": list(targets(made)),
        "pass": "bwd",
        "variant": variant_text(made),
        "workload": workload.as_dict(),
    }
    template = _TEMPLATES[family_of(made).template]
    source = render(template.file, {"k": template.context(made, workload), "header": header_text(header)})
    return GeneratedBackward(source, header, made)
