"""How operations share the units of an SM: max-min fair, the matrix engine first."""

from __future__ import annotations

from tilecast.model.pipeline.graph import Op


def fair_speeds(ops: tuple[Op, ...]) -> tuple[float, ...]:
    """Max-min fair speeds (0..1) of operations sharing units; 1 means as fast as alone.

    The matrix engine goes first: measured on an H200, wgmma keeps its rate to within 1 % whatever arithmetic runs
    beside it, and the arithmetic slows down (data/measured/h200_corun.csv).

    >>> a = Op("a", "x", "r", (("mufu", 10.0),), 10.0)
    >>> fair_speeds((a, a))
    (0.5, 0.5)
    """
    return share_units(ops, [unit_use(op) for op in ops])


def unit_use(op: Op) -> dict[str, float]:
    """Share of every unit that an operation takes at full speed."""
    return {unit: cycles / op.min_cycles for unit, cycles in op.demand}


def share_units(ops: tuple[Op, ...], use: list[dict[str, float]]) -> tuple[float, ...]:
    """`fair_speeds` with what every operation uses worked out before (`unit_use`)."""
    speeds = [1.0] * len(ops)
    left: dict[str, float] = {}
    for wants in use:
        for unit in wants:
            left[unit] = 1.0
    for engine_first in (True, False):
        _share({i for i, op in enumerate(ops) if (op.engine == "tensor") is engine_first}, use, left, speeds)
    return tuple(speeds)


def _share(members: set[int], use: list[dict[str, float]], left: dict[str, float], speeds: list[float]) -> None:
    """Progressive filling among ``members``; updates what is ``left`` of every unit and the ``speeds``."""
    open_ops = set(members)
    while open_ops:
        level, tight = 1.0, ""
        for unit, room in left.items():
            load = sum(use[i].get(unit, 0.0) for i in open_ops)
            if load > 0 and room / load < level - 1e-12:
                level, tight = max(0.0, room / load), unit
        frozen = {i for i in open_ops if not tight or tight in use[i]}
        for i in frozen:
            speeds[i] = level
            for unit, cycles in use[i].items():
                left[unit] = max(0.0, left[unit] - level * cycles)
        open_ops -= frozen
