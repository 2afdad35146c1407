"""The rules by which a tuner chooses: which candidates go on to the next stage, and who wins a tie.  Pure functions.

Forecasts of variants that share their structure (tile, warps, what overlaps what) miss reality by the same amount and in
the same direction; knobs of depth and order around it (ring slots, scheduler, share of emulated exponentials) move the
time by a few percent.  Trying five variants of one structure therefore tests one guess five times: a stage takes the
best by forecast, but no more than a fixed number of one structure as long as others are left.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import hypot
from typing import TypeVar

from tilecast.model.families import family_of
from tilecast.model.kernel.variant import Variant, variant_text

T = TypeVar("T")

#: Differences within this share are ties (`validation.measure.statistics.TIE`, which says why).
TIE = 0.02


def structure(variant: Variant) -> tuple[object, ...]:
    """What decides the shape of the loop: variants of one structure differ in depths, orders and shares only."""
    return family_of(variant).structure(variant)


def tile(variant: Variant) -> tuple[object, ...]:
    """The tile alone: what a compiler has to keep in registers."""
    return family_of(variant).tile(variant)


def diverse(
    ordered: Sequence[T],
    variant_of: Callable[[T], Variant],
    count: int,
    alike: Callable[[Variant], Hashable],
    most: int,
) -> tuple[T, ...]:
    """The first ``count`` of ``ordered`` with at most ``most`` that are ``alike``; where too few differ, the first others.

    Keeps the order given.
    """
    taken: list[int] = []
    seen: Counter[Hashable] = Counter()
    for i, item in enumerate(ordered):
        kind = alike(variant_of(item))
        if len(taken) < count and seen[kind] < most:
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


def plainness(variant: Variant) -> tuple[float, ...]:
    """Smaller is plainer: how many features a kernel uses beyond its tile, then how many slots its rings have."""
    return family_of(variant).plainness(variant)


def pick_winner(timed: Sequence[Timed]) -> tuple[int, tuple[int, ...]]:
    """(index of the winner, indices that tie with the fastest) among measured kernels.

    A difference within the larger of the combined interval and `TIE` is a tie.  Of those that tie with the fastest wins
    the one that does not spill, then the one with fewer registers a thread, then the plainer one, then the earlier one.
    """
    fastest = min(range(len(timed)), key=lambda i: (timed[i].seconds, timed[i].order))
    ties = tuple(i for i in range(len(timed)) if i == fastest or is_tie(timed[i], timed[fastest]))

    def rule(i: int) -> tuple[object, ...]:
        one = timed[i]
        return (one.spill_bytes > 0, one.registers, plainness(one.variant), one.order)

    return min(ties, key=rule), ties


@dataclass(frozen=True, slots=True)
class Timed:
    """A measured kernel as the tie rule sees it."""

    variant: Variant
    order: int
    seconds: float
    low: float
    high: float
    registers: int = 0
    spill_bytes: int = 0


def is_tie(a: Timed, b: Timed) -> bool:
    """Whether the difference of two times is within the larger of their combined interval and `TIE`."""
    combined = hypot((a.high - a.low) / 2 / a.seconds, (b.high - b.low) / 2 / b.seconds)
    return abs(a.seconds / b.seconds - 1.0) <= max(combined, TIE)


def _digest(variant: Variant) -> str:
    return hashlib.sha256(variant_text(variant).encode()).hexdigest()
