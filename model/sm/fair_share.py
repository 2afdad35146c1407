"""How operations share the units of an SM: max-min fair, the matrix engine first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from tilecast.model.pipeline.graph import Op


def fair_speeds(ops: tuple[Op, ...]) -> tuple[float, ...]:
    """Max-min fair speeds (0..1) of operations sharing units; 1 means as fast as alone.

    The matrix engine goes first: measured on an H200, wgmma keeps its rate to within 1 % whatever arithmetic runs
    beside it, and the arithmetic slows down; but FMA beyond `Op.hidden_fma` take its cycles (data/measured/h200_corun.csv).

    >>> a = Op("a", "x", "r", (("mufu", 10.0),), 10.0)
    >>> fair_speeds((a, a))
    (0.5, 0.5)
    """
    return tuple(_shared([use_of(op) for op in ops]))


def unit_use(op: Op) -> dict[str, float]:
    """Share of every unit that an operation takes at full speed."""
    return _shares(op.demand, op.min_cycles)


def _shares(demand: tuple[tuple[str, float], ...], min_cycles: float) -> dict[str, float]:
    return {unit: cycles / min_cycles for unit, cycles in demand}


@dataclass(frozen=True, eq=False, slots=True)
class Use:
    """How operations of one kind draw on units; one object for all that are alike, so that they compare by identity."""

    tensor: bool
    shares: tuple[tuple[str, float], ...]
    #: FMA a cycle and sub-partition at full speed, and how many a cycle of others it hides.
    fma: float = 0.0
    hidden_fma: float = inf
    #: Highest speed while matrix operations run.
    most_beside_mma: float = 1.0


def use_of(op: Op) -> Use:
    """The `Use` of an operation."""
    return _use_of(op.engine, op.demand, op.min_cycles, op.instructions, op.hidden_fma, op.beside_mma_cycles)


@lru_cache(maxsize=1 << 13)
def _use_of(
    engine: str, demand: tuple[tuple[str, float], ...], min_cycles: float, instructions: tuple[tuple[str, float], ...],
    hidden_fma: float, beside_mma_cycles: float,
) -> Use:  # fmt: skip
    fma = sum(count for pipe, count in instructions if pipe == "fma") / min_cycles if min_cycles else 0.0
    most = min_cycles / beside_mma_cycles if beside_mma_cycles > min_cycles else 1.0
    shares = tuple(sorted(_shares(demand, min_cycles).items()))
    return _intern(engine == "tensor", shares, fma, hidden_fma, most)


@lru_cache(maxsize=1 << 14)
def _intern(
    tensor: bool, shares: tuple[tuple[str, float], ...], fma: float, hidden_fma: float, most_beside_mma: float
) -> Use:
    return Use(tensor, shares, fma, hidden_fma, most_beside_mma)


@lru_cache(maxsize=1 << 16)
def speed_of_each(uses: tuple[Use, ...]) -> dict[Use, float]:
    """Fair speed of each kind among operations of the ``uses`` (in order of their shares: sums are rounded alike in every process)."""
    return dict(zip(uses, _shared(uses), strict=True))


def _shared(uses: Sequence[Use]) -> list[float]:
    use, tensor = [dict(one.shares) for one in uses], [one.tensor for one in uses]
    speeds = [1.0] * len(use)
    left = dict.fromkeys((unit for wants in use for unit in wants), 1.0)
    hidden = min((one.hidden_fma for one in uses), default=inf)
    # Only matrix operations that share the registers with arithmetic slow it.
    most = [one.most_beside_mma if any(tensor) else 1.0 for one in uses]
    fma = 0.0
    for one, speed in zip(uses, most, strict=True):  # in order: the sum of later Pythons rounds otherwise
        fma += one.fma * speed
    # One warp scheduler issues an FMA a cycle at most.
    beyond = min(1.0, fma) - hidden
    if beyond > 0.0:
        left["tensor"] = 1.0 - beyond
    for engine_first in (True, False):
        fill([i for i, matrix in enumerate(tensor) if matrix is engine_first], use, left, speeds, most)
    return speeds


def fill(
    members: list[int], use: list[dict[str, float]], left: dict[str, float], speeds: list[float], most: list[float]
) -> None:
    """Progressive filling among ``members``; updates what is ``left`` of every unit and the ``speeds``, none above its ``most``."""
    while members:
        load: dict[str, float] = {}
        for i in members:
            for unit, share in use[i].items():
                load[unit] = load.get(unit, 0.0) + share
        level, tight = 1.0, ""
        for unit, wanted in load.items():
            if wanted > 0 and left[unit] / wanted < level - 1e-12:
                level, tight = max(0.0, left[unit] / wanted), unit
        slowest = min(most[i] for i in members)
        if slowest < level:
            level, frozen = slowest, [i for i in members if most[i] == slowest]
        else:
            frozen = [i for i in members if not tight or tight in use[i]]
        for i in frozen:
            speeds[i] = level
            for unit, cycles in use[i].items():
                left[unit] = max(0.0, left[unit] - level * cycles)
        members = [i for i in members if i not in frozen]
