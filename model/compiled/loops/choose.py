"""The best variant by machine code: the fluid level's best loops among those at hand, forecast from their code."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from tilecast.base.garbage import no_collections
from tilecast.model.chip.evaluate import evaluate
from tilecast.model.compiled.code import CodeError
from tilecast.model.compiled.evaluate import evaluate_compiled
from tilecast.model.compiled.forecast import forecast
from tilecast.model.compiled.loops.shelf import loop_at_hand, loop_of, loops_at_hand
from tilecast.model.families import loop_shape
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.search.best import Best, best, search_space
from tilecast.model.search.rank import rank

#: Loops that are forecast from machine code, and variants around each.
LOOPS, PER_LOOP = 4, 2
#: A variant further behind the best before compilation than the two levels differ is not looked at.
WITHIN = 1.15


@lru_cache(maxsize=256)
def _known(workload: Workload, machine: Machine, family: str) -> tuple[Variant, ...]:
    """The variants whose loops ship; of the workload only head dimensions, dtype and mask matter."""
    space = search_space(workload, machine, family).variants
    kept = loops_at_hand(workload, machine)
    return tuple(variant for variant in space if loop_of(variant) in kept) if kept else ()


@lru_cache(maxsize=1024)
@no_collections()
def best_at_hand(workload: Workload, machine: Machine, family: str, clock: str | float = "sustained") -> Best:
    """What `best` finds, chosen again by machine code where loops are at hand; arguments and errors as there.

    Of the variants whose loops ship the fluid level's best (`LOOPS` loops, `PER_LOOP` variants of each) are forecast from
    their code, and the fastest is taken.
    """
    before = best(workload, machine, family, clock)
    work = workload.reduced()
    known = _known(loop_shape(work), machine, family)
    if not known:
        return before
    ranking = rank(known, work, machine, clock=clock, keep=LOOPS * PER_LOOP, group=loop_of, per_group=PER_LOOP)
    near = [entry for entry in ranking.best if entry.seconds is not None and entry.seconds <= WITHIN * before.seconds]
    # At one clock for all: what settles differently differs by less than the forecasts do.
    mhz = evaluate(work, machine, before.variant, clock).clock.mhz
    cycles = {entry.variant: _cycles(work, machine, entry.variant, mhz) for entry in near}
    if not cycles:
        return before
    variant = min(cycles, key=lambda v: cycles[v])
    made = loop_at_hand(work, machine, variant)
    assert made is not None
    seconds = evaluate_compiled(made, work, machine, variant, clock).seconds
    scope = f"by machine code the best of {len(cycles)} variants, of {len(known)} whose loops ship"
    return replace(before, variant=variant, seconds=seconds, scope=scope)


def _cycles(workload: Workload, machine: Machine, variant: Variant, mhz: float) -> float:
    """From machine code; infinite where it cannot be followed."""
    made = loop_at_hand(workload, machine, variant)
    assert made is not None and made.code is not None
    try:
        return forecast(made.code, workload, machine, mhz).cycles
    except CodeError:
        return math.inf
