"""The best variant of a kernel class for a workload, a machine and a clock: the one search that every verb asks.

The space is every variant of the class that is legal and that its template can write, so that the kernel forecast is a
kernel that can be generated; where the template writes nothing for the workload, every legal variant.  The search is
exact over that space (`rank`); the share of emulated exponentials, which is continuous, is then refined in steps down
to 1/64.  Equal forecasts go to the earlier variant of the space.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from tilecast.base.garbage import no_collections
from tilecast.model.chip.evaluate import PredictError, check_clock, evaluate_seconds, refuse_unknown
from tilecast.model.families import find_family, loop_shape, native_family
from tilecast.model.kernel.variant import Variant, emulated_share, with_emulated_share
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, machine_of
from tilecast.model.search.rank import DIGITS, rank

_SHARE_STEPS = (0.0625, 0.03125, 0.015625)
#: Runners-up that `Best.near` names.
NEAR = 3


@dataclass(frozen=True, slots=True)
class Space:
    """What a search looks at."""

    variants: tuple[Variant, ...]
    #: Whether every variant can be generated, and if not, why none can.
    written: bool
    refusal: str

    @property
    def scope(self) -> str:
        """What the best of the space is the best of."""
        if self.written:
            return f"best of the {len(self.variants)} variants that tilecast writes"
        return f"best of {len(self.variants)} legal variants; tilecast writes none: {self.refusal}"


@dataclass(frozen=True, slots=True)
class Best:
    """The variant a search ended on, its time, and how much it looked at.

    ``near`` is, for each knob, the fastest variant with another value of it among those simulated (fastest first, the best
    not included): those that a small change of the machine could make the best.  Those that were not forecast are compared
    by their plain blocks.
    """

    variant: Variant
    seconds: float
    scope: str
    simulated: int
    skipped: int
    near: tuple[Variant, ...]


@lru_cache(maxsize=256)
def _space(workload: Workload, machine: Machine, family: str) -> Space:
    record = find_family(family)
    space, alike = record.space(workload, machine), record.alike

    def is_legal(variant: Variant) -> bool:
        return record.legality(variant, workload, machine).legal

    def is_written(variant: Variant) -> bool:
        return is_legal(variant) and record.writable(variant, workload, machine).legal

    # Most knobs of a variant do not matter here.
    written = space.where((*alike.fit, *alike.written), is_written)
    if len(written):
        return Space(tuple(written), True, "")
    legal = tuple(space.where(alike.fit, is_legal))
    return Space(legal, False, record.writable(legal[0], workload, machine).sentence() if legal else "")


def search_space(workload: Workload, machine: Machine, family: str) -> Space:
    """The variants that `best` chooses from; of the workload only head dimensions, dtype and mask matter.

    Raises PredictError where no variant of ``family`` is legal, with the obstacle of the variant its authors ship.
    """
    work = workload.reduced()
    found = _space(loop_shape(work), machine, family)
    if not found.variants:
        record = find_family(family)
        reason = record.legality(record.published(work, machine), work, machine).sentence() or "no tile fits"
        # Heads that only latent attention has, whose decode kernels `step` forecasts.
        shared = work.heads_kv == 1 and work.head_dim_qk > work.head_dim_v
        latent = "; latent attention that decodes: tilecast step --latent" if shared else ""
        raise PredictError(f"{record.name} cannot run {work.label()} on {machine.name}: {reason}{latent}")
    return found


@lru_cache(maxsize=4096)
@no_collections()
def best(workload: Workload, machine: Machine | str, family: str = "", clock: str | float = "sustained") -> Best:
    """The variant of ``family``, "": the machine's own, with the shortest forecast; ``machine`` and ``clock`` as `predict` takes them.

    Raises PredictError where no variant is legal or the machine lacks the dtype.
    """
    machine = machine_of(machine)
    family = family or native_family(machine).name
    work = workload.reduced()
    refuse_unknown(work, machine)
    check_clock(clock, machine)
    space = search_space(work, machine, family)
    ranking = rank(space.variants, work, machine, clock=clock, keep=1)
    times = {entry.variant: entry.seconds for entry in (*ranking.best, *ranking.behind) if entry.seconds is not None}
    variant = _refine_share(ranking.best[0].variant, times, work, machine, space, clock)
    # The time in full: what is compared is rounded.
    seconds = evaluate_seconds(work, machine, variant, clock)
    plain = ranking.plain_seconds()
    near = _near(variant, times, plain, work, machine, clock)
    return Best(variant, seconds, space.scope, len(plain), len(space.variants) - len(plain), near)


def _refine_share(
    variant: Variant, times: dict[Variant, float], workload: Workload, machine: Machine, space: Space, clock: str | float
) -> Variant:  # fmt: skip
    """Hill-climb the share of emulated exponentials in ever finer steps, within what the space allows."""
    share = emulated_share(variant)
    if share is None:
        return variant
    record = find_family(variant.family)
    rules = (record.legality, record.writable) if space.written else (record.legality,)
    for step in _SHARE_STEPS:
        moved = True
        while moved:
            moved = False
            for tried in (share - step, share + step):
                if not 0.0 <= tried <= 1.0:
                    continue
                other = with_emulated_share(variant, tried)
                if other in times or not all(rule(other, workload, machine).legal for rule in rules):
                    continue
                times[other] = round(evaluate_seconds(workload, machine, other, clock), DIGITS)
                if times[other] < times[variant]:
                    variant, share, moved = other, tried, True
                    break
    return variant


def _near(
    chosen: Variant, times: dict[Variant, float], plain: dict[Variant, float], workload: Workload, machine: Machine,
    clock: str | float,
) -> tuple[Variant, ...]:  # fmt: skip
    """See `Best.near`; ``times`` are forecasts, ``plain`` is `Ranked.plain_seconds`."""
    others: dict[Variant, float] = {}
    by_time = [sorted(known, key=known.__getitem__) for known in (times, plain)]
    for knob in (f.name for f in fields(chosen)):
        fastest, own = {}, getattr(chosen, knob)
        for known in by_time:
            variant = next((v for v in known if getattr(v, knob) != own), None)
            if variant is not None:
                fastest[variant] = round(evaluate_seconds(workload, machine, variant, clock), DIGITS)
        if fastest:
            variant = min(fastest, key=lambda v: fastest[v])
            others[variant] = fastest[variant]
    return tuple(sorted(others, key=lambda v: others[v])[:NEAR])
