"""A variant of any family, and its text form."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from tilecast.model.kernel.variants.fa2 import Fa2Variant
from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.variants.fa4 import Fa4Variant
from tilecast.model.kernel.variants.unfused import UnfusedVariant

if TYPE_CHECKING:
    from tilecast.model.kernel.variants.append import AppendVariant
    from tilecast.model.kernel.variants.blackwell.backward import Fa4BackwardVariant
    from tilecast.model.kernel.variants.fa2_backward import Fa2BackwardVariant
    from tilecast.model.kernel.variants.fa3_backward import Fa3BackwardVariant
    from tilecast.model.kernel.variants.fa3_backward_apart import Fa3BackwardApartVariant
    from tilecast.model.kernel.variants.hopper.few_backward import FewBackwardVariant
    from tilecast.model.kernel.variants.hopper.mla import HopperMlaVariant
    from tilecast.model.kernel.variants.hopper.prefill import HopperPrefillVariant
    from tilecast.model.kernel.variants.hopper.serving import HopperServingVariant
    from tilecast.model.kernel.variants.serving import ServingVariant

Variant = Fa4Variant | Fa3Variant | Fa2Variant | UnfusedVariant
#: What a knob with two values may be called.
BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def variant_text(
    variant: Variant
    | Fa2BackwardVariant
    | Fa3BackwardVariant
    | Fa3BackwardApartVariant
    | Fa4BackwardVariant
    | FewBackwardVariant
    | ServingVariant
    | HopperServingVariant
    | HopperPrefillVariant
    | HopperMlaVariant
    | AppendVariant,
) -> str:
    """The variant as --variant takes it: family first, then every knob."""
    knobs = (f"{f.name}={_plain(getattr(variant, f.name))}" for f in fields(variant))
    return ",".join(knobs)


def emulated_share(variant: Variant) -> float | None:
    """Share of the exponentials that run on the FMA pipe; None for a class without that knob."""
    share: float | None = getattr(variant, "emulated_share", None)
    return share


def with_emulated_share(variant: Variant, share: float) -> Variant:
    """The variant with another share; itself where its class has no such knob."""
    if emulated_share(variant) is None:
        return variant
    return replace(variant, emulated_share=share)  # type: ignore[arg-type]


def short_text(variant: Variant) -> str:
    """The family and the knobs that differ from its defaults, as --variant takes them."""
    default = type(variant)()
    changed = [f.name for f in fields(variant) if f.name != "family" and getattr(variant, f.name) != getattr(default, f.name)]  # fmt: skip
    return ",".join([f"family={variant.family}", *(f"{name}={_plain(getattr(variant, name))}" for name in changed)])


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
