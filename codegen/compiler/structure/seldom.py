"""What stands in a steady loop and is no part of every iteration: roles that go by tiles, and branches for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from tilecast.codegen.compiler.structure.shape import Barrier, Step
from tilecast.codegen.compiler.structure.slots import Steady
from tilecast.codegen.compiler.structure.translated import ARRIVALS, kind_of


def without_tiles(chosen: Sequence[Steady]) -> list[Steady]:
    """The same without roles that go round once a tile, as a warp of its own does that takes tiles and copies their Q.

    What others do for such a role under branches goes with it.
    """
    of_tiles = [one for one in chosen if _goes_by_tiles(one, [other for other in chosen if other is not one])]
    kept = [one for one in chosen if one not in of_tiles]
    return _without_branches(kept, frozenset().union(*(_used(one, lambda _: True) for one in of_tiles)))


def _goes_by_tiles(one: Steady, others: Sequence[Steady]) -> bool:
    """Whether a role multiplies nothing, others come to its barriers under a branch, and no iteration of theirs waits for it."""
    seldom = frozenset().union(*(_used(other, lambda step: bool(step.guard)) for other in others))
    waited = frozenset().union(*(_used(other, lambda step: "wait" in step.kind and not step.guard) for other in others))
    given = _used(one, lambda step: step.kind not in ("wait", "named_wait"))
    multiplies = any(step.kind == "matrix" for step in one.repeated)
    return not multiplies and bool(_used(one, lambda _: True) & seldom) and not given & waited


def _used(one: Steady, which: Callable[[Step], bool]) -> frozenset[object]:
    """Slots of the barriers at which ``which`` steps of an iteration are."""
    return frozenset(slot for step in one.repeated if which(step) for slot in slots_of(one.site(step)))


def _without_branches(chosen: Sequence[Steady], seldom: frozenset[object]) -> list[Steady]:
    """The same without branches around the uses of ``seldom`` barriers."""
    kept = []
    for one in chosen:
        left = {step.guard for step in one.repeated if step.guard and slots_of(one.site(step)) & seldom}
        kept.append(dataclasses.replace(one, repeated=tuple(step for step in one.repeated if step.guard not in left)))
    return kept


def every_iteration(chosen: Sequence[Steady]) -> list[Steady]:
    """The same without what only some iterations do: branches around the uses of barriers to which all come under a branch, or whose
    waits stand under one and to which nobody comes in a loop.

    (A loop over all blocks of all tiles brings Q, and gives it back, once a tile; an epilogue that is no loop frees the sums.)
    """
    always: set[object] = set()
    waited: set[object] = set()
    brought: set[object] = set()
    arrived: set[object] = set()
    for one in chosen:
        # What multiplies under a branch does so but for the last time: the next block's products, ahead of this one's.
        multiplying = {step.guard for step in one.repeated if step.kind == "matrix"} | {""}
        for step in one.repeated:
            used = slots_of(one.site(step))
            (always if step.guard in multiplying else waited if step.kind == "wait" else brought).update(used)
            arrived.update(used if kind_of(step) in ARRIVALS else ())
    return _without_branches(chosen, frozenset((waited & brought | waited - arrived) - always))


def slots_of(site: Barrier | None) -> frozenset[object]:
    """What tells apart the barriers that a step may mean: slots of one ring go by several names."""
    if site is None:
        return frozenset()
    return frozenset(site.places) if site.resolved and not site.named else frozenset((site,))
