"""What sensitivities and break-evens say of one fact.  Values only."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.forecast.answer import BEFORE


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Percent of time per percent of one fact; negative: more of it is faster.

    ``fixed`` keeps the kernel, ``reoptimised`` chooses it again at both ends.  ``low_ms`` and ``high_ms`` are the times
    with the fact at ``value * (1 - step)`` and ``value * (1 + step)`` (nearest whole SMs), kernel kept, and
    ``*_reoptimised_ms`` the kernel chosen again; ``base_ms`` is the time as it is.
    """

    fact: str
    meaning: str
    #: rate, latency, chip (SMs, clock, launch), power.
    group: str
    value: float
    unit: str
    kind: str
    fixed: float
    reoptimised: float
    base_ms: float
    low: float
    high: float
    low_ms: float
    high_ms: float
    low_reoptimised_ms: float
    high_reoptimised_ms: float

    @property
    def one_sided(self) -> bool:
        """Whether the fact stands at an end of what it can be, so that it was moved one way only."""
        return self.value in (self.low, self.high)

    def to_dict(self) -> dict[str, object]:
        """Keys as documented in docs/json.md."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Solved:
    """ResMII, closed form: at ``value`` of the fact, ``unit`` and ``other`` are equally busy.

    ``equation`` has the numbers of this kernel with x the fact, ``formula`` the textbook solution from demand.py
    (empty where it has none); below ``value`` the loop's busiest unit is ``unit``, above it ``other``.
    """

    value: float
    unit: str
    other: str
    equation: str
    formula: str


@dataclass(frozen=True, slots=True)
class Crossing:
    """Simulation: what holds the loop just below and just above ``value`` (bisection, to 0.1 %)."""

    value: float
    below: str
    above: str


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Break-evens of one fact, the kernel kept; None where there is none between 1/64 and 64 times its value.

    ``useful_until`` is where further improvement of the fact alone stops to be worth 1 % of the time (for a latency:
    below which less is no use); it equals ``value`` when that is so today already.
    """

    fact: str
    meaning: str
    value: float
    unit: str
    bound_now: str
    solved: Solved | None
    simulated: Crossing | None
    useful_until: float | None
    #: Percent of time that unlimited improvement of the fact alone would save.
    at_most_percent: float
    #: What this row was made from: before compilation where forecasts from machine code do not follow the fact.
    level: str = BEFORE

    def to_dict(self) -> dict[str, object]:
        """Keys as documented in docs/json.md."""
        out: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        for name, part in (("solved", self.solved), ("simulated", self.simulated)):
            out[name] = None if part is None else {key: getattr(part, key) for key in part.__slots__}
        return out
