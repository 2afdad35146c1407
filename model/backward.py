"""The kernel class of backward passes that is written: its record, and its variants as text.

Beside `families`, which holds the forward classes: those have a loop to forecast, this one has none yet, so no verb that
ranks, forecasts or sweeps sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

from tilecast.base.words import nearest
from tilecast.model.kernel.variant import BOOLEANS
from tilecast.model.kernel.variants import fa2_backward
from tilecast.model.kernel.variants.fa2_backward import Fa2BackwardVariant
from tilecast.model.kernel.verdict import VariantError, Verdict
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine


@dataclass(frozen=True, slots=True)
class BackwardFamily:
    """A kernel class of backward passes."""

    name: str
    #: Name of the template that writes it; generated files bear it.
    template: str
    about: str
    variant: type[Fa2BackwardVariant]
    legality: Callable[[Fa2BackwardVariant, Workload, Machine], Verdict]
    writable: Callable[[Fa2BackwardVariant, Workload, Machine], Verdict]
    #: Every legal combination of knobs worth telling apart, and the one to start from.
    space: Callable[[Workload, Machine], Iterable[Fa2BackwardVariant]]
    chosen: Callable[[Workload, Machine], Fa2BackwardVariant]


TRITON_BACKWARD = BackwardFamily(
    *fa2_backward.NAMES, "plain Triton without atomics, any GPU from Ampere on", Fa2BackwardVariant,
    fa2_backward.legality, fa2_backward.writable, fa2_backward.space, fa2_backward.chosen,
)  # fmt: skip


def writable(variant: Fa2BackwardVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether a backward pass of ``variant`` can be written: legal, and within what its template writes."""
    verdict = TRITON_BACKWARD.legality(variant, workload, machine)
    return TRITON_BACKWARD.writable(variant, workload, machine) if verdict.legal else verdict


def parse_backward(text: str, base: Fa2BackwardVariant) -> Fa2BackwardVariant:
    """A variant from "dkv_tile_m=32,..."; knobs not named keep ``base``'s values.

    Raises VariantError with the nearest names for an unknown family, knob or value.
    """
    head, colon, rest = text.partition(":")
    if colon and "=" not in head:
        text = f"family={head.strip()}" + (f",{rest}" if rest.strip() else "")
    knobs = [f.name for f in fields(base) if f.name != "family"]
    changes: dict[str, object] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        key = key.replace("-", "_")
        if not equals or not value:
            raise VariantError(f"--variant: expected knob=value, got '{part}'")
        if key == "family":
            check_family(value)
            continue
        if key not in knobs:
            raise VariantError(f"--variant: family {base.family} has no knob '{key}'{nearest(key, knobs)}")
        if key in changes:
            raise VariantError(f"--variant: knob '{key}' is given twice")
        changes[key] = _value(key, value, getattr(base, key))
    return replace(base, **changes)  # type: ignore[arg-type]


def check_family(name: str) -> None:
    """VariantError unless ``name`` is a family of backward passes, or the forward family of the same template."""
    if name not in (*fa2_backward.NAMES, "fa2", "triton"):
        raise VariantError(f"--pass bwd: expected family {' or '.join(fa2_backward.NAMES)}, got '{name}': no other is written yet")  # fmt: skip


def _value(key: str, text: str, current: object) -> object:
    if isinstance(current, str):
        return text
    if isinstance(current, bool):
        if text.lower() not in BOOLEANS:
            raise VariantError(f"--variant: knob '{key}' takes true or false, got '{text}'")
        return BOOLEANS[text.lower()]
    try:
        value = int(text)
    except ValueError:
        raise VariantError(f"--variant: knob '{key}' takes a whole number, got '{text}'") from None
    if key.endswith("_warps") and value not in (4, 8):
        raise VariantError(f"--variant: knob '{key}' takes one of 4, 8, got '{text}'")
    if not 1 <= value <= 256:
        raise VariantError(f"--variant: knob '{key}' takes 1 to 256, got '{text}'")
    return value
