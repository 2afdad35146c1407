"""A measured time held beside a forecast: where it lies, what of it the forecast explains, what else takes as long."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tilecast.model.chip.evaluate import PredictError, evaluate_seconds
from tilecast.model.families import FAMILIES, family_of, legality
from tilecast.model.forecast.answer import Forecast, WaterfallStep
from tilecast.model.kernel.variant import short_text
from tilecast.model.search.best import best

_UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_MEASURED = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(\D+?)\s*", re.IGNORECASE)
#: Name of what a forecast has no step for.
REMAINDER = "not in the forecast"
_BAR = 24
_LEAST_MHZ = 50.0


@dataclass(frozen=True, slots=True)
class Suspect:
    """Something else that would take about as long: what, and its forecast time."""

    what: str
    time_ms: float


@dataclass(frozen=True, slots=True)
class Placed:
    """A measured time in a forecast's waterfall; ``steps`` add up to the measured time, shares are of it."""

    forecast: Forecast
    time_ms: float
    tflops: float
    #: Measured over forecast time; above 1 is slower than forecast.
    ratio: float
    #: Of the tensor cores' peak at the top clock.
    peak_share: float
    inside_interval: bool
    steps: tuple[WaterfallStep, ...]
    #: Nearest first.
    suspects: tuple[Suspect, ...]

    def to_dict(self) -> dict[str, object]:
        """Keys documented in docs/json.md."""
        return {
            "time_ms": self.time_ms, "tflops": self.tflops, "ratio": self.ratio, "peak_share": self.peak_share,
            "inside_interval": self.inside_interval,
            "waterfall": [{"cause": s.cause, "cycles": s.cycles, "share": s.share} for s in self.steps],
            "suspects": [{"what": s.what, "time_ms": s.time_ms} for s in self.suspects],
        }  # fmt: skip

    def text(self) -> str:
        """What `tilecast predict --measured` adds to the forecast."""
        p = self.forecast
        if self.peak_share > 1.0:
            return (
                f"Your {self.time_ms:.4g} ms: {self.tflops:.0f} TFLOP/s, {self.peak_share:.0%} of what the tensor cores can do at the top "
                "clock\n  no kernel is that fast: check the time, its unit, the shape and the mask"
            )
        side = "slower" if self.ratio >= 1 else "faster"
        where = "inside" if self.inside_interval else "outside"
        lines = [
            f"Your {self.time_ms:.4g} ms: {self.tflops:.0f} TFLOP/s, {self.peak_share:.1%} of the tensor cores' peak at the top clock",
            f"  {abs(self.ratio - 1):.1%} {side} than the forecast of {p.time_ms:.4g} ms, {where} its interval",
            "  where that time goes, in microseconds (share of your time)",
        ]
        for step in self.steps:
            if abs(step.share) < 0.0005:
                continue
            micros = step.share * self.time_ms * 1e3
            lines.append(
                f"  {step.cause:<58}{micros:12.1f}  {step.share:6.1%}  {'█' * max(0, round(step.share * _BAR))}".rstrip()
            )
        lines.append("  other forecasts of the same model, the nearest to your time first")
        lines += [f"  {s.time_ms:>9.4g} ms  {s.what}" for s in self.suspects]
        return "\n".join(lines)


def parse_measured(text: str, flops: float) -> float:
    """Seconds from "0.95ms", "950us" or "600TFLOP/s" (of ``flops``); PredictError for anything else."""
    found = _MEASURED.fullmatch(text)
    refusal = PredictError(
        f"--measured: expected a time or a throughput with its unit (0.95ms, 950us, 600TFLOP/s), got '{text}'"
    )
    if found is None:
        raise refusal
    try:
        value = float(found[1])
    except ValueError:
        raise refusal from None
    unit = found[2].lower()
    if not 0 < value < math.inf:
        raise refusal
    if unit in _UNITS_S:
        return value * _UNITS_S[unit]
    if unit in ("tflop/s", "tflops", "tflop", "tf/s"):
        return flops / (value * 1e12)
    raise refusal


def placed(forecast: Forecast, seconds: float) -> Placed:
    """``seconds`` measured for the workload of ``forecast``, which should be the best kernel's or the measured one's.

    The forecast's steps keep their length; what is left, positive or negative, is a step of its own.
    """
    p = forecast
    total = seconds * 1e3
    peak = (
        p.machine[f"tensor.{p.workload.dtype}_flop_per_clk"]
        * p.machine["chip.sm_count"]
        * p.machine["chip.clock_max_mhz"]
        * 1e6
    )
    scale = p.time_ms / total
    steps = [WaterfallStep(s.cause, s.cycles, s.share * scale) for s in p.waterfall]
    rest = (total - p.time_ms) * 1e-3 * p.clock_mhz * 1e6
    steps.append(WaterfallStep(REMAINDER, rest, 1.0 - scale))
    tflops = p.workload.flops / seconds / 1e12
    low, high = p.tflops_interval
    return Placed(
        p, total, tflops, total / p.time_ms, p.workload.flops / seconds / peak, low <= tflops <= high, tuple(steps),
        tuple(sorted(_suspects(p, seconds), key=lambda s: abs(math.log(s.time_ms / total)))),
    )  # fmt: skip


def _suspects(p: Forecast, seconds: float) -> list[Suspect]:
    """Other clocks and other kernels whose forecasts may explain the time."""
    clock = p.regime if p.regime != "fixed" else p.clock_mhz
    found = [Suspect(f"this kernel at the {name} clock ({mhz:.0f} MHz)", ms) for name, ms, _, mhz in p.other_regimes]
    mhz = _clock_that_takes(p, seconds)
    if mhz is not None:
        found.append(Suspect(f"this kernel with the SM clock at {mhz:.0f} MHz", seconds * 1e3))
    own = family_of(p.variant)
    variants = [(f"the kernel as the authors of {own.name} ship it", own.published(p.workload, p.machine))]
    for family in FAMILIES.values():
        if family.name == own.name:
            continue
        try:
            variants.append((f"the best kernel of {family.name} ({family.about})", best(p.workload, p.machine, family.name, clock).variant))  # fmt: skip
        except PredictError:
            continue
    # The best with another value of each knob: which choice costs that much.
    variants += [(f"the variant {short_text(v)}", v) for v in best(p.workload, p.machine, own.name, clock).near]
    for what, variant in variants:
        if variant != p.variant and legality(variant, p.workload, p.machine).legal:
            found.append(Suspect(what, evaluate_seconds(p.workload, p.machine, variant, clock) * 1e3))
    return found


def _clock_that_takes(p: Forecast, seconds: float) -> float | None:
    """The fixed clock in MHz at which the kernel takes ``seconds``; None where no clock up to the top one does."""
    low, high = _LEAST_MHZ, p.machine["chip.clock_max_mhz"]

    def takes(mhz: float) -> float:
        return evaluate_seconds(p.workload, p.machine, p.variant, mhz)

    if not takes(high) <= seconds <= takes(low):
        return None
    while high - low > 0.5:
        middle = (low + high) / 2
        low, high = (middle, high) if takes(middle) > seconds else (low, middle)
    return (low + high) / 2
