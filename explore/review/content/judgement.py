"""Question, verdict and risks: sentences computed from the forecast, never written for one machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilecast.base.words import significant
from tilecast.explore.review.content.considered import TIE, binding_name
from tilecast.explore.review.content.content import (
    Assumption,
    Ceiling,
    Change,
    Region,
    Risk,
    Tornado,
    Variants,
)
from tilecast.model.forecast.answer import Explained
from tilecast.model.whatif.answers import Sensitivity

#: A cause of uncertainty below this share of the answer is not worth a reviewer's time.
_WORTH = 0.02
#: L2 or HBM busy for more than this is one change away from binding.
_NEAR_MEMORY = 0.7


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the sentences are computed from."""

    forecast: Explained
    ceilings: Sequence[Ceiling]
    assumptions: Sequence[Assumption]
    variants: Variants
    regions: Sequence[Region]
    tornado: Tornado
    change: Change | None


def question(p: Explained, change: Change | None) -> str:
    """What the report answers."""
    ask = f"How fast can {p.subject} run on {p.machine.title}, what stops it, and what would help most?"
    if change is None:
        return ask
    return f"What does {p.machine.title} gain on {p.subject} when {_changes(change)}?"


def _changes(change: Change) -> str:
    return " and ".join(f"{name} goes from {old:g} to {new:g} {unit}" for name, old, new, unit in change.changes)


def peak_share(p: Explained) -> float:
    """Share of the tensor cores' peak at the top clock."""
    m = p.machine
    peak = m[f"tensor.{p.workload.dtype}_flop_per_clk"] * m["chip.sm_count"] * m["chip.clock_max_mhz"] * 1e6
    return p.tflops * 1e12 / peak


def verdict(e: Evidence) -> tuple[str, str]:
    """Two sentences: what it reaches, and what binds and would help (or what the change brings)."""
    p = e.forecast
    low, high = p.tflops_interval
    others = "".join(f", {significant(tflops)} at the {name} clock" for name, _, tflops, _ in p.other_regimes)
    first = (
        f"Forecast: {p.time_ms:.4g} ms, {significant(p.tflops)} TFLOP/s (interval {significant(low)} to {significant(high)}) at the {p.regime} clock"
        f"{others}; that is {percent(peak_share(p))} of the tensor cores' peak at top clock."
    )
    if e.change is not None:
        c = e.change
        second = f"When {_changes(c)}, {_gain(c)}."
        return first, second
    what = f"Its {p.main.name} take longest and are" if len(p.kernels) > 1 else "It is"
    return first, f"{what} bound by {binding_name(p)}; {_largest_loss(p)}; {_help(e)}."


def percent(share: float) -> str:
    """Whole percent, or one digit more below ten."""
    return f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g}%"


def _gain(change: Change) -> str:
    """What the change brings, kernel chosen again and kernel kept."""
    gain, after = change.speed_up - 1.0, change.after
    if abs(gain) < 5e-4:
        return f"nothing changes: it still takes {after.time_ms:.4g} ms, bound by {after.binding}"
    word = "faster" if gain > 0 else "slower"
    return (
        f"it becomes {abs(gain):.1%} {word} ({significant(after.tflops)} TFLOP/s) with the kernel chosen again and is then bound by {after.binding}"
        f"{_clock_moved(change)}; {_kept(change)}"
    )


def _clock_moved(change: Change) -> str:
    """That the limiter takes back part of a gain, where the clock falls by a percent or more."""
    before, after = change.before.clock_mhz, change.after.clock_mhz
    if after > 0.99 * before:
        return ""
    return f", at {after:.0f} instead of {before:.0f} MHz: busier units draw more power, and the limiter takes back part of the gain"


def _kept(change: Change) -> str:
    if change.kept_refused:
        return f"the kernel of before cannot run there: {change.kept_refused}"
    return f"with the kernel left as it is, {change.speed_up_kept - 1:+.1%}"


def _largest_loss(p: Explained) -> str:
    loss = max(p.waterfall[1:], key=lambda step: step.share)
    return f"the largest loss from peak is “{loss.cause}”, {loss.share:.0%} of the time"


def _help(e: Evidence) -> str:
    """The fact with the most to give, and the best of rates and latencies where that is another one."""
    rows = [
        row
        for row in e.tornado.rows
        if (row.group in ("rate", "latency") or row.fact in ("chip.tdp_w", "chip.clock_max_mhz")) and not row.one_sided
    ]
    if not rows:
        return "no single fact would change the time by more than a hundredth of its own change"
    best = max(rows, key=lambda row: abs(row.reoptimised))
    text = f"what helps most is {_lever(best)}"
    if best.group in ("rate", "latency"):
        return text
    others = [row for row in rows if row.group in ("rate", "latency")]
    if not others:
        return f"{text}; no rate or latency changes the time by more than a hundredth of its own change"
    return f"{text}, and among rates and latencies {_lever(max(others, key=lambda row: abs(row.reoptimised)))}"


def _lever(row: Sensitivity) -> str:
    """Which way to move a fact, and what a percent of it brings with the kernel chosen again."""
    way = "more" if row.reoptimised < 0 else "less"
    return f"{row.fact} (1 % {way} takes {abs(row.reoptimised):.2g} % off the time)"


def risks(e: Evidence) -> tuple[Risk, ...]:
    """Everything that may make the answer wrong or the design fragile, heaviest first."""
    found = [*_about_the_model(e), *_about_facts(e), *_about_the_loop(e), *_about_the_chip(e), *_about_variants(e)]
    return tuple(sorted(found, key=lambda risk: (-risk.weight, risk.title)))


def _about_the_model(e: Evidence) -> Iterator[Risk]:
    outside = e.forecast.outside_calibrated_range
    if outside:
        yield Risk(
            "Outside what was checked",
            f"The model was never validated against measurements here: {'; '.join(outside)}.",
            1.0,
        )
    best = min((r for r in e.regions if r.count), key=lambda r: r.p90, default=None)
    if best is None:
        yield Risk(
            "No measured point",
            "No measurement of this kind of GPU is at hand, so the error of the forecast is unknown.",
            1.0,
        )
    for region in e.regions:
        if region.count and region.p90 > 0.10:
            yield Risk(
                f"Error in this region ({region.kind})",
                f"Of {region.count} {region.kind} points {region.nearness}, a tenth are off by more than {region.p90:.0%} "
                f"(mean {region.mean:.0%}, bias {region.bias:+.0%}).",
                region.p90,
            )


def _about_facts(e: Evidence) -> Iterator[Risk]:
    for fact in e.assumptions:
        if fact.effect >= _WORTH and fact.low is not None and fact.high is not None:
            yield Risk(
                f"{fact.fact} {'has a range' if fact.kind == 'spec' else f'is {fact.kind}'}",
                f"{fact.value:g} {fact.unit}, anywhere from {fact.low:g} to {fact.high:g}: moves the forecast by up to {fact.effect:.1%}.",
                fact.effect,
            )


def _about_the_loop(e: Evidence) -> Iterator[Risk]:
    p = e.forecast.main
    bound, cycles = p.binding.as_dict(), p.trace.ii_cycles
    gap = cycles / p.bounds.res.cycles - 1.0 if p.bounds.res.cycles else 0.0
    if bound["kind"] == "recurrence":
        yield Risk(
            "Bound by a recurrence",
            f"No unit is full: the loop{_of_one(e.forecast)} takes {cycles:.0f} cycles where {p.bounds.res.unit} needs {p.bounds.res.cycles:.0f}; "
            "latencies and hand-overs decide, and a faster unit alone brings less than its share.",
            gap,
        )
    if not p.trace.periodic:
        yield Risk(
            "The loop does not settle", "The simulated loop has no period; cycles per iteration are an average.", 0.05
        )
    lowest = [c for c in e.ceilings if c.cycles is not None][:2]
    if len(lowest) == 2 and lowest[1].tflops <= 1.05 * lowest[0].tflops:
        near = lowest[1].tflops / lowest[0].tflops - 1.0
        yield Risk(
            "Two units are nearly as busy",
            f"{lowest[1].unit} has its ceiling {near:.1%} above {lowest[0].unit}'s: making only one of them faster gains little.",
            0.05 - near,
        )


def _of_one(p: Explained) -> str:
    """Whose loop it is, where there are several."""
    return f" of {p.main.name}" if len(p.kernels) > 1 else ""


def _about_the_chip(e: Evidence) -> Iterator[Risk]:
    p = e.forecast
    rates = [p.tflops, *(tflops for _, _, tflops, _ in p.other_regimes)]
    spread = max(rates) / min(rates) - 1.0
    if spread > 0.05 and p.regime != "fixed":
        yield Risk(
            "Clock regimes differ",
            f"Short runs and sustained work are {spread:.0%} apart: a benchmark of milliseconds shows another number than a job of hours.",
            spread,
        )
    if p.clock.bound == "power":
        yield Risk(
            "Held by the power limit",
            f"The clock settles at {p.clock.mhz:.0f} MHz under {p.clock.limit_w:.0f} W; it depends on data values, cooling and the board's cap.",
            0.05,
        )
    for row in e.ceilings:
        if row.unit in ("L2", "HBM") and row.busy > _NEAR_MEMORY:
            yield Risk(f"{row.unit} is near its ceiling", f"{row.unit} is busy {row.busy:.0%} of the time: neighbours on the GPU or a worse hit rate would show.", row.busy - _NEAR_MEMORY)  # fmt: skip
    for step in p.waterfall:
        if step.cause.startswith("tail") and step.share > 0.05:
            yield Risk("Last wave", f"SMs that idle at the end take {step.share:.0%}: the result is sensitive to batch x heads and SM count.", step.share)  # fmt: skip
        if step.cause in ("launch", "launches") and step.share > 0.05:
            yield Risk("Short kernel", f"Launching takes {step.share:.0%} of the time: a CUDA graph or a batch changes the result.", step.share)  # fmt: skip


def _about_variants(e: Evidence) -> Iterator[Risk]:
    ties = [row for row in e.variants.rows if row.verdict == "tie"]
    if ties:
        yield Risk(
            "Near ties",
            f"{len(ties)} other variant{'s are' if len(ties) > 1 else ' is'} within {TIE:.1%} by forecast: only a measurement chooses between them.",
            TIE,
        )
    best = min(
        (row for row in e.variants.rows if row.verdict == "faster"), key=lambda row: row.slower or 0.0, default=None
    )
    if best is not None and best.slower is not None:
        yield Risk(
            "A faster variant exists",
            f"“{best.change}” beside the variant of this report: {best.reason}.",
            -best.slower,
        )
