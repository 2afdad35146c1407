"""The kernel class that appends to caches: its variants as text, and whether they can be written.

Beside `serving`, whose kernels read what it wrote; nothing forecasts it.
"""

from __future__ import annotations

from tilecast.model.kernel.knobs import check_value, parse_knobs, value_like
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
    value = value_like(key, text, current)
    check_value(key, text, value, (1, 2, 4, 8) if key == "warps" else None)
    return value
