"""The kernel class that appends to caches: its variants as text, and whether they can be written.

Beside `serving`, whose kernels read what it wrote; nothing forecasts it.
"""

from __future__ import annotations

from tilecast.model.kernel.knobs import parse_knobs
from tilecast.model.kernel.variants.append import NAMES, AppendVariant
from tilecast.model.kernel.verdict import VariantError


def parse_append(text: str, base: AppendVariant) -> AppendVariant:
    """A variant from "rows=8,..."; knobs not named keep ``base``'s values.

    Raises VariantError with the nearest names for an unknown family, knob or value.
    """
    return parse_knobs(text, base, check_family, _value)


def check_family(name: str) -> None:
    """VariantError unless ``name`` is the family of kernels that append."""
    if name not in NAMES:
        raise VariantError(f"--pass append: expected family {' or '.join(NAMES)}, got '{name}'")


def _value(key: str, text: str, current: object) -> object:
    try:
        value = int(text)
    except ValueError:
        raise VariantError(f"--variant: knob '{key}' takes a whole number, got '{text}'") from None
    if key == "warps" and value not in (1, 2, 4, 8):
        raise VariantError(f"--variant: knob '{key}' takes one of 1, 2, 4, 8, got '{text}'")
    return value
