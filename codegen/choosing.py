"""The rules by which a tuner chooses: which candidates go on to the next stage, and who wins a tie.  Pure functions.

Forecasts of variants that share their structure (tile, warps, what overlaps what) miss reality by the same amount and in
the same direction; knobs of depth and order around it (ring slots, scheduler, share of emulated exponentials) move the
time by a few percent.  Trying five variants of one structure therefore tests one guess five times: a stage takes the
best by forecast, but no more than a fixed number of one structure as long as others are left.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from tilecast.model.variant import Fa2Variant, Fa3Variant, Fa4Variant, Variant, variant_text

T = TypeVar("T")

#: Differences within this share are ties (`validation.measure.statistics.TIE`, which says why).
TIE = 0.02


def structure(variant: Variant) -> tuple[object, ...]:
    """What decides the shape of the loop: variants of one structure differ in depths, orders and shares only."""
    if isinstance(variant, Fa3Variant):
        return (variant.warpgroups, variant.tile_n, variant.overlap, variant.ping_pong, variant.rescale)
    if isinstance(variant, Fa4Variant):
        return (variant.tile_n, variant.stages, variant.split, variant.cta_group, variant.split_p)
    if isinstance(variant, Fa2Variant):
        return (variant.tile_m, variant.tile_n, variant.warps)
    return ()


def diverse(ordered: Sequence[T], variant_of: Callable[[T], Variant], count: int, per_structure: int) -> tuple[T, ...]:
    """The first ``count`` of ``ordered`` with at most ``per_structure`` of one structure; the rest fill up what is left.

    Keeps the order given.  ``per_structure`` 0 takes the first ``count`` whatever they are.
    """
    taken: list[int] = []
    seen: Counter[tuple[object, ...]] = Counter()
    for i, item in enumerate(ordered):
        kind = structure(variant_of(item))
        if len(taken) < count and (not per_structure or seen[kind] < per_structure):
            seen[kind] += 1
            taken.append(i)
    chosen = set(taken)
    taken += [i for i in range(len(ordered)) if i not in chosen][: count - len(taken)]
    return tuple(ordered[i] for i in sorted(taken))


def sample(variants: Sequence[Variant], count: int, first: Sequence[Variant] = ()) -> tuple[Variant, ...]:
    """``count`` variants that represent a space without asking any forecast: ``first``, then one of every structure in
    turn, each time the one whose name has the smallest SHA-256; structures come in the order of theirs.
    """
    chosen = list(dict.fromkeys(v for v in first if v in set(variants)))[:count]
    groups: dict[tuple[object, ...], list[Variant]] = {}
    for variant in sorted(set(variants) - set(chosen), key=_digest):
        groups.setdefault(structure(variant), []).append(variant)
    order = sorted(groups, key=lambda kind: hashlib.sha256(repr(kind).encode()).hexdigest())
    while len(chosen) < count and any(groups.values()):
        for kind in order:
            if groups[kind] and len(chosen) < count:
                chosen.append(groups[kind].pop(0))
    return tuple(chosen)


def _digest(variant: Variant) -> str:
    return hashlib.sha256(variant_text(variant).encode()).hexdigest()
