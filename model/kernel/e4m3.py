"""What the narrow range of e4m3, 2^-9 to 448, asks of every kernel that multiplies exponentials in it."""

from __future__ import annotations

from tilecast.model.kernel.verdict import LEGAL, Verdict

#: The power of two that exponentials of rows end at which have outgrown their reference as far as they may.
OCTAVES = 8
#: Octaves that a row may outgrow its reference by: the others are left for small exponentials.
MOST_GROWTH = 4.0


def growth_in_range(threshold: float) -> Verdict:
    """Whether rows may grow by ``threshold`` octaves without that exponentials saturate, or vanish too early."""
    if threshold <= MOST_GROWTH:
        return LEGAL
    return Verdict(
        f"rescale_threshold must be at most {MOST_GROWTH:g} in e4m3, whose exponentials end at 2^{OCTAVES}, got {threshold:g}",
        f"use {MOST_GROWTH:g}",
    )
