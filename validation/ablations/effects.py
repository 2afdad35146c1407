"""What a change is worth, measured and forecast, and how often the forecast knows sign and size.

An effect is a ratio of speed, changed kernel over the one before: 1.05 is 5 % faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import geometric_mean, median

#: Distance from 1 above which a measured effect has a sign that a forecast must know.
CLEAR = 0.03


@dataclass(frozen=True, slots=True)
class Effect:
    """A change: the range of its measured ratio (one value: both ends alike), and the ratio that each level forecasts."""

    low: float
    high: float
    forecast: Mapping[str, float]

    @property
    def measured(self) -> float:
        """Geometric middle of the range."""
        return geometric_mean((self.low, self.high))

    def clear(self, beyond: float = CLEAR) -> bool:
        """Whether the whole measured range lies more than ``beyond`` from 1 on one side."""
        return self.low - 1.0 > beyond or 1.0 - self.high > beyond

    def sign_right(self, level: str) -> bool:
        """Whether the forecast lies on the measured side of 1; exactly 1 lies on neither."""
        return (self.forecast[level] - 1.0) * (self.measured - 1.0) > 0.0

    def points(self, level: str) -> float:
        """Percentage points from the forecast to the nearest end of the measured range; 0 inside it."""
        ratio = self.forecast[level]
        return 100.0 * max(self.low - ratio, ratio - self.high, 0.0)


@dataclass(frozen=True, slots=True)
class Score:
    """How a level did on some effects: how many have a clear sign, how many of those it knows, and its error of size.

    ``median_points`` and ``within`` (share of effects no more than the given points off) are of all effects.
    """

    effects: int
    clear: int
    signs_right: int
    median_points: float
    within: float

    @property
    def sign_share(self) -> float | None:
        """Share of clear effects whose sign is right; None where none is clear."""
        return self.signs_right / self.clear if self.clear else None


def score(effects: Iterable[Effect], level: str, beyond: float = CLEAR, points: float = 3.0) -> Score:
    """Summary of the effects that have a forecast of ``level``; all zero where there are none."""
    known = [effect for effect in effects if level in effect.forecast]
    if not known:
        return Score(0, 0, 0, 0.0, 0.0)
    clear = [effect for effect in known if effect.clear(beyond)]
    errors = [effect.points(level) for effect in known]
    return Score(
        len(known), len(clear), sum(effect.sign_right(level) for effect in clear), median(errors),
        sum(error <= points for error in errors) / len(errors),
    )  # fmt: skip
