"""The templates: which file writes a kernel class, what it reads, and which targets the result runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilecast.codegen.blackwell import forward as blackwell_ws
from tilecast.codegen.hopper import forward as hopper_ws
from tilecast.codegen.portable import forward as triton_portable
from tilecast.model.families import Family
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine


@dataclass(frozen=True, slots=True)
class Template:
    """A Jinja2 file with the function that turns a variant into what it reads."""

    file: str
    #: (variant, workload, machine) -> what the file reads, except the header.
    context: Callable[[Any, Workload, Machine], object]
    #: Targets of `compiler.compile` that the result runs on, given its variant and the machine it is for.
    targets: Callable[[Any, Machine], tuple[str, ...]]


def _portable_targets(_variant: Any, machine: Machine) -> tuple[str, ...]:
    """Tensor descriptors need sm_90; kernels that use pointers run from sm_80 on."""
    return triton_portable.targets(machine.tensor_kind in ("wgmma", "tcgen05"))


def _blackwell_targets(variant: Any, _machine: Machine) -> tuple[str, ...]:
    """tcgen05.ld.red came with sm_103."""
    return ("sm_103a",) if variant.load_max else ("sm_100a", "sm_103a")


TEMPLATES: dict[str, Template] = {
    "triton": Template(triton_portable.TEMPLATE, triton_portable.context, _portable_targets),
    "hopper_ws": Template(hopper_ws.TEMPLATE, hopper_ws.context, lambda variant, machine: ("sm_90a",)),
    "blackwell_ws": Template(blackwell_ws.TEMPLATE, blackwell_ws.context, _blackwell_targets),
}


def template_of(family: Family) -> Template:
    """The template of a kernel class; VariantError where nothing is written of it."""
    if family.template not in TEMPLATES:
        written = ", ".join(name for name in ("fa2", "fa3", "fa4"))
        raise VariantError(f"--family: family {family.name} is forecast, not written; written are {written}")
    return TEMPLATES[family.template]
