"""The best variant of a family on a machine, over more knobs than `candidates` lists: what a what-if may change.

Stated rule: start from the best of `candidates` (and of ``starts``), then change one knob at a time to the value with
the shortest forecast until nothing gains; the share of emulated exponentials is refined to 1/64 (a pair of columns of
a 128 wide tile).  A knob moves only for a gain above 0.1 %, so ties keep the earlier value and the same question has
the same answer.  Variants are tried in the order of their floors, and those whose floor lies above the best so
far are not simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

from tilecast.model.forecast.predict import PredictError
from tilecast.model.kernel.candidates import candidates, published_variant
from tilecast.model.kernel.variant import FAMILIES, Fa2Variant, Fa3Variant, Fa4Variant, Variant, legality
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.search.quick import quick
from tilecast.model.search.rank import floor_seconds

#: A knob moves only for more than this share of the time.
GAIN = 0.001
_MOST_PASSES = 3
_SHARES = (0.0, 0.125, 0.1875, 0.25, 0.375, 0.5)
_SHARE_STEPS = (0.0625, 0.03125, 0.015625)
_SCHEDULERS = ("persistent", "longest-first", "grid", "work-stealing", "paired")

#: Knobs by family in the order they are tried.  Numerics stay (polynomial degree, rescale threshold), and so does FA4's
#: split: `candidates` takes alternate key blocks of one query tile only where two query tiles do not fit.
MOVES: dict[str, tuple[tuple[str, tuple[object, ...]], ...]] = {
    "fa4": (
        ("cta_group", (1, 2)),
        ("stages", (2, 1)),
        ("emulated_share", _SHARES),
        ("tile_n", (64, 96, 128, 160, 192, 256)),
        ("stats_slots", (2, 1)),
        ("load_max", (False, True)),
        ("split_p", (True, False)),
        ("scheduler", _SCHEDULERS),
    ),
    "fa3": (
        ("warpgroups", (2, 3, 1)),
        ("tile_n", (64, 80, 96, 112, 128, 144, 160, 176, 192)),
        ("rescale", ("always", "conditional", "anchored")),
        ("overlap", (True, False)),
        ("ping_pong", (True, False)),
        ("emulated_share", (0.0, 0.125, 0.25)),
        ("kv_stages", (2, 3, 4)),
        ("q_stages", (1, 2)),
        ("scheduler", _SCHEDULERS),
    ),
    "fa2": (
        ("tile_m", (64, 128, 256)),
        ("tile_n", (32, 64, 96, 128)),
        ("warps", (4, 8)),
        ("stages", (1, 2, 3)),
        ("scheduler", _SCHEDULERS),
    ),
    "unfused": (("intermediate_bytes", (0, 2, 4)),),
}


@dataclass(frozen=True, slots=True)
class Optimum:
    """The variant a search ended on, its forecast, how much it looked at, and the runners-up.

    ``near`` is, for each knob, the best variant seen with another value of it (fastest first, the optimum not
    included): those that a small change of the machine could make the best.
    """

    variant: Variant
    seconds: float
    simulated: int
    skipped: int
    near: tuple[Variant, ...]


class _Search:
    """One search: what was simulated and what was skipped."""

    def __init__(self, workload: Workload, machine: Machine, clock: str | float) -> None:
        self.workload, self.machine, self.clock = workload, machine, clock
        self.seen: dict[Variant, float] = {}
        self.skipped: set[Variant] = set()
        self.best: Variant | None = None
        self.seconds = float("inf")

    def offer(self, variant: Variant, gain: float = 0.0) -> None:
        """Simulate ``variant`` unless it cannot win; make it the best if it is faster by more than ``gain``."""
        if variant in self.seen or variant in self.skipped:
            return
        if not legality(variant, self.workload, self.machine).legal:
            self.skipped.add(variant)
            return
        limit = self.seconds * (1.0 - gain)
        if floor_seconds(self.workload, self.machine, variant, self.clock) >= limit:
            self.skipped.add(variant)
            return
        seconds = quick(self.workload, self.machine, variant, self.clock).seconds
        self.seen[variant] = seconds
        if seconds < limit:
            self.best, self.seconds = variant, seconds

    def offer_all(self, variants: Iterable[Variant]) -> None:
        """Offer in the order of their floors: the sooner a good one is found, the fewer are simulated."""
        legal = [v for v in variants if legality(v, self.workload, self.machine).legal]
        for variant in sorted(legal, key=lambda v: floor_seconds(self.workload, self.machine, v, self.clock)):
            self.offer(variant, GAIN)

    def near(self, most: int = 3) -> tuple[Variant, ...]:
        """See `Optimum.near`."""
        assert self.best is not None
        others: dict[Variant, float] = {}
        for knob in (f.name for f in fields(self.best)):
            different = [v for v in self.seen if getattr(v, knob, None) != getattr(self.best, knob)]
            if different:
                nearest = min(different, key=lambda v: self.seen[v])
                others[nearest] = self.seen[nearest]
        return tuple(sorted(others, key=lambda v: others[v])[:most])


def reoptimise(
    workload: Workload,
    machine: Machine,
    family: str,
    clock: str | float = "sustained",
    starts: tuple[Variant, ...] = (),
) -> Optimum:
    """The best variant found by the rule of the module; PredictError when no variant of ``family`` is legal.

    A legal variant in ``starts`` is never beaten by less than it takes to move: the answer is at most as slow as it.
    """
    search = _Search(workload, machine, clock)
    for variant in starts:
        search.offer(variant)
    search.offer_all(candidates(family, workload, machine))
    if search.best is None:
        search.offer_all(_smaller_tiles(family))
    if search.best is None:
        attempt = published_variant(family, workload, machine)
        reason = legality(attempt, workload, machine).sentence() or "no tile fits"
        raise PredictError(f"{family} cannot run {workload.label()} on {machine.name}: {reason}")
    for _ in range(_MOST_PASSES):
        before = search.best
        for knob, values in MOVES[family]:
            _try_knob(search, knob, values)
        if search.best == before:
            break
    _refine_share(search)
    assert search.best is not None
    return Optimum(search.best, search.seconds, len(search.seen), len(search.skipped), search.near())


def _try_knob(search: _Search, knob: str, values: tuple[object, ...]) -> None:
    """Offer the best variant with every other value of ``knob``."""
    base = search.best
    assert base is not None
    others = (value for value in values if value != getattr(base, knob))
    search.offer_all(replace(base, **{knob: value}) for value in others)  # type: ignore[arg-type]


def _refine_share(search: _Search) -> None:
    """Hill-climb the share of emulated exponentials in ever finer steps."""
    for step in _SHARE_STEPS:
        moved = True
        while moved:
            base = search.best
            if not isinstance(base, Fa3Variant | Fa4Variant):
                return
            for value in (base.emulated_share - step, base.emulated_share + step):
                if 0.0 <= value <= 1.0:
                    search.offer(replace(base, emulated_share=value), GAIN)
            moved = search.best != base


def _smaller_tiles(family: str) -> Iterator[Variant]:
    """Tiles beyond `candidates`, for shapes and machines that none of those fit."""
    knobs = dict(MOVES[family])
    for value in knobs.get("tile_n", ()):
        variant: Variant = replace(FAMILIES[family](), tile_n=value)  # type: ignore[arg-type]
        if isinstance(variant, Fa2Variant):
            yield replace(variant, tile_m=64)
        yield variant
