"""The best variant by machine code: the fluid level's best loops among those at hand, forecast from their code."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from tilecast.base.garbage import no_collections
from tilecast.model.chip.evaluate import PredictError, evaluate
from tilecast.model.compiled.code import CodeError
from tilecast.model.compiled.energy import clock_of
from tilecast.model.compiled.evaluate import evaluate_compiled
from tilecast.model.compiled.forecast import forecast
from tilecast.model.compiled.loops.shelf import kept_loop, loop_of, loops_at_hand, loops_digest
from tilecast.model.families import loop_shape
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.search.best import NEAR, Best, best, search_space
from tilecast.model.search.rank import DIGITS, Ranked, rank

#: Loops that are forecast from machine code, by the fluid level's best variant of each: of 38 measured shapes the fastest
#: kernel's loop was always among the fluid level's first twelve.  Of the fastest loops by machine code the second-best
#: variants are forecast as well: stages and schedulers move a forecast less than loops do.
LOOPS, PER_LOOP, SECOND_OF = 12, 2, 3
#: A variant further behind the best loop at hand, before compilation, than the two levels differ is not looked at.
WITHIN = 1.15
#: Where the best loop at hand is further behind the best of all variants, before compilation, no loop at hand answers:
#: by so much forecasts before compilation were too fast on average when this was set (2026-11-23).
ANSWERS_WITHIN = 1.04


@lru_cache(maxsize=256)
def _known(workload: Workload, machine: Machine, family: str, digest: str) -> tuple[Variant, ...]:
    """The variants whose loops are at hand; of the workload only head dimensions, dtype and mask matter.

    ``digest`` (`loops_digest`) is what the cache goes by beside them.
    """
    del digest
    space = search_space(workload, machine, family).variants
    kept = loops_at_hand(workload, machine)
    return tuple(variant for variant in space if loop_of(variant) in kept) if kept else ()


def best_at_hand(workload: Workload, machine: Machine, family: str, clock: str | float = "sustained") -> Best:
    """What `best` finds, chosen again by machine code where loops are at hand; arguments and errors as there.

    Of the variants whose loops are at hand the fluid level's best (`LOOPS` loops, `PER_LOOP` variants of each of the fastest
    loops) are forecast from their code, and the fastest is taken.
    """
    before = best(workload, machine, family, clock)
    found = _chosen(workload, machine, family, clock, loops_digest())
    if found is None or found.before_seconds > ANSWERS_WITHIN * before.seconds:
        return before
    return found.best


def best_kept(workload: Workload, machine: Machine, family: str, clock: str | float = "sustained") -> Best:
    """As `best_at_hand`, from machine code alone; PredictError where no loop is at hand."""
    found = _chosen(workload, machine, family, clock, loops_digest())
    if found is None:
        work = workload.reduced()
        raise PredictError(
            f"no loop of {family} for {work.label()} on {machine.name} is at hand: use --level auto or fluid, or compile some "
            "with tilecast loops"
        )
    return found.best


def looked_at(
    workload: Workload, machine: Machine, family: str, clock: str | float = "sustained"
) -> tuple[tuple[Variant, float], ...]:
    """What `best_kept` compared by machine code: variants and seconds, fastest first."""
    found = _chosen(workload, machine, family, clock, loops_digest())
    return found.seconds if found is not None else ()


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The best of the loops at hand by machine code, and the least time of theirs before compilation."""

    best: Best
    before_seconds: float
    #: Everything that was looked at, fastest first.
    seconds: tuple[tuple[Variant, float], ...]


@lru_cache(maxsize=1024)
@no_collections()
def _chosen(workload: Workload, machine: Machine, family: str, clock: str | float, digest: str) -> _Chosen | None:
    before = best(workload, machine, family, clock)
    work = workload.reduced()
    known = _known(loop_shape(work), machine, family, digest)
    if not known:
        return None
    ranking = rank(known, work, machine, clock=clock, keep=LOOPS, group=loop_of)
    least = ranking.best[0].seconds
    assert least is not None
    # Near the clock that they will settle at: each is forecast once.
    mhz = evaluate(work, machine, before.variant, clock).clock.mhz
    guesses = {e.variant: _seconds(work, machine, e.variant, mhz, clock) for e in _near(ranking.best, least)}
    fastest = {loop_of(v) for v in sorted(guesses, key=lambda v: guesses[v])[:SECOND_OF]}
    others = tuple(variant for variant in known if loop_of(variant) in fastest)
    again = rank(others, work, machine, clock=clock, keep=SECOND_OF * PER_LOOP, group=loop_of, per_group=PER_LOOP)
    for entry in _near(again.best, least):
        if entry.variant not in guesses:
            guesses[entry.variant] = _seconds(work, machine, entry.variant, mhz, clock)
    place = {variant: order for order, variant in enumerate(known)}
    # Compared to the nanosecond, and equal ones by their order in the space, as before compilation.
    ordered = sorted(guesses, key=lambda v: (round(guesses[v], DIGITS), place[v]))
    variant = ordered[0]
    if math.isinf(guesses[variant]):
        return None
    seconds = evaluate_compiled(kept_loop(work, machine, variant), work, machine, variant, clock).seconds
    scope = f"by machine code the best of {len(guesses)} variants, of {len(known)} whose loops are at hand"
    times = tuple((v, seconds * guesses[v] / guesses[variant]) for v in ordered if not math.isinf(guesses[v]))
    near_it = tuple(v for v, _ in times[1 : NEAR + 1])
    return _Chosen(Best(variant, seconds, scope, len(guesses), len(known) - len(guesses), near_it), least, times)


def _near(entries: Iterable[Ranked], least: float) -> list[Ranked]:
    return [entry for entry in entries if entry.seconds is not None and entry.seconds <= WITHIN * least]


def _seconds(workload: Workload, machine: Machine, variant: Variant, mhz: float, clock: str | float) -> float:
    """From machine code as followed at ``mhz``, at the clock that so many cycles settle at; infinite where it cannot be followed."""
    made = kept_loop(workload, machine, variant)
    assert made.code is not None
    try:
        seen = forecast(made.code, workload, machine, mhz)
        if isinstance(clock, str):
            mhz = clock_of(made.code, workload, machine, seen, clock).mhz
    except CodeError:
        return math.inf
    return seen.cycles / (mhz * 1e6)
