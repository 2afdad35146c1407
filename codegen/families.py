"""The kernel families that can be generated: which variant class, which template, which targets.

A family's variants are the model's, so that what is forecast is what is generated; `expressible` adds to the machine's
rules (`model.variant.legality`) what the template and Triton's compiler can express.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilecast.codegen import blackwell_ws, hopper_ws, triton_portable
from tilecast.model.kernel.variant import LEGAL, VariantError, Verdict, legality
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine


@dataclass(frozen=True, slots=True)
class Family:
    """A template with its context and its rules."""

    name: str
    model_family: str
    template: str
    #: (variant, workload, machine) -> what the template reads, except the header.
    context: Callable[..., Any]
    expressible: Callable[[Any, Workload, Machine], Verdict]
    #: Targets of `codegen.compile` that a file of this family runs on, given its variant and the machine it is for.
    targets: Callable[[Any, Machine], tuple[str, ...]]
    about: str


def _by_refusal(
    context: Callable[..., Any],
) -> Callable[[Any, Workload, Machine], Verdict]:
    """The verdict of a family whose context refuses by VariantError."""

    def expressible(variant: Any, workload: Workload, machine: Machine) -> Verdict:
        verdict = legality(variant, workload, machine)
        if not verdict.legal:
            return verdict
        try:
            context(variant, workload, machine)
        except VariantError as error:
            return Verdict(False, str(error), 1, 0, "variant", "use a variant that the message allows")
        return LEGAL

    return expressible


def _portable_targets(_variant: Any, machine: Machine) -> tuple[str, ...]:
    """Tensor descriptors need sm_90; kernels that use pointers run from sm_80 on."""
    newer = ("sm_90a", "sm_100a", "sm_103a")
    return newer if machine.tensor_kind in ("wgmma", "tcgen05") else ("sm_80", *newer)


def _blackwell_targets(variant: Any, _machine: Machine) -> tuple[str, ...]:
    """tcgen05.ld.red came with sm_103."""
    return ("sm_103a",) if variant.load_max else ("sm_100a", "sm_103a")


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("triton", "fa2", triton_portable.TEMPLATE, triton_portable.context,
               _by_refusal(triton_portable.context), _portable_targets,
               "plain Triton, any GPU from Ampere on"),
        Family("hopper_ws", "fa3", hopper_ws.TEMPLATE, hopper_ws.context, hopper_ws.expressible,
               lambda variant, machine: ("sm_90a",), "Gluon, Hopper: TMA producer, wgmma consumer warpgroups"),
        Family("blackwell_ws", "fa4", blackwell_ws.TEMPLATE, blackwell_ws.context,
               _by_refusal(blackwell_ws.context), _blackwell_targets,
               "Gluon, data-centre Blackwell: tcgen05, scores and outputs in tensor memory"),
    )
}  # fmt: skip


def find_family(name: str) -> Family:
    """The family called ``name``; VariantError with the nearest names otherwise."""
    if name not in FAMILIES:
        close = difflib.get_close_matches(name, FAMILIES, 2, 0.3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(FAMILIES)}"
        raise VariantError(f"--family: unknown kernel family '{name}'; {hint}")
    return FAMILIES[name]


def native_kernel_family(machine: Machine) -> str:
    """The family written for the machine's matrix unit."""
    return {"wgmma": "hopper_ws", "tcgen05": "blackwell_ws"}.get(machine.tensor_kind, "triton")
