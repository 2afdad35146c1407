"""The report of `validate ablations` as text, JSON and picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilecast.model.families import parse_variant
from tilecast.model.forecast.answer import BEFORE, COMPILED
from tilecast.model.kernel.variant import short_text
from tilecast.validation.ablations import published
from tilecast.validation.ablations.effects import CLEAR, Effect, Score, score
from tilecast.validation.ablations.pairs import Pair
from tilecast.validation.ablations.published import Case
from tilecast.validation.ablations.run import AblationReport, by_knob
from tilecast.validation.measured.kept import AGAIN
from tilecast.validation.measured.run import LEVELS

#: A published range that does not hold 1 has a sign, however small the effect: its authors measured both sides in turns.
_ANY = 0.0
_POINTS = 3.0


def report_text(report: AblationReport, rows: bool) -> str:
    """Tables for people; ``rows`` adds every line and every pair."""
    parts = [_published(report, rows)] if report.cases else []
    return "\n\n".join([*parts, _measured(report, rows)])


def _percent(ratio: float) -> str:
    return f"{100.0 * (ratio - 1.0):+.1f}"


def _range(effect: Effect) -> str:
    low, high = _percent(effect.low), _percent(effect.high)
    return low if low == high else f"{low} to {high}"


def _published(report: AblationReport, rows: bool) -> str:
    lines = [
        f"Published ablations: {len(report.cases)} forward cases, {len(report.excluded)} more that cannot be forecast. "
        f"What the change does to speed, percent; {report.regime} clock.",
        "",
        f"{'':<22}{'GPU':<7}{'measured':>15}{'free clock':>12}{'off by':>8}{'one clock':>11}{'off by':>8}  change",
    ]
    for case in report.cases:
        lines.append(
            _case_line(
                case.name, case.lines[0].gpu, case.effect, f"{case.lines[0].said_from} -> {case.lines[0].said_to}"
            )
        )
        if rows:
            for line, forecast in zip(case.lines, case.forecasts, strict=True):
                shape = f"{line.workload.label()}, {'shape stated' if line.stated else 'shape chosen'}"
                lines.append(_case_line("", "", Effect(line.low, line.high, forecast), shape))
    effects = [case.effect for case in report.cases]
    lines.append("")
    for level in published.LEVELS:
        found = score(effects, level, _ANY, _POINTS)
        lines.append(
            f"{level}: sign right in {found.signs_right} of {found.clear}, within {_POINTS:g} points of the published range in "
            f"{found.within * found.effects:.0f} of {found.effects}, median {found.median_points:.1f} points off"
        )
    lines += ["", "Without a forecast:"]
    reasons: dict[str, list[str]] = {}
    for left_out in report.excluded:
        reasons.setdefault(left_out.reason, []).append(left_out.case)
    return "\n".join([*lines, *(f"  {reason}: {', '.join(names)}" for reason, names in reasons.items())])


def _case_line(name: str, gpu: str, effect: Effect, says: str) -> str:
    told = "".join(
        f"{_percent(effect.forecast[level]):>{width}}{effect.points(level):>8.1f}"
        for level, width in zip(published.LEVELS, (12, 11), strict=True)
    )
    return f"{name:<22}{gpu:<7}{_range(effect):>15}{told}  {says}"


def _measured(report: AblationReport, rows: bool) -> str:
    again = f"; {report.again} of {AGAIN.name}, as their kernels are written now" if report.again else ""
    lines = [
        f"Measured pairs: {len(report.pairs)} of one shape whose variants differ in one knob ({', '.join(report.gpus)}; "
        f"{Path(report.table).name}{again}).",
        f"Signs are counted where the measured effect on speed exceeds {CLEAR:.0%}; off by: median, percentage points.",
        "",
        f"{'':<24}" + "".join(f"{level:>33}" for level in LEVELS),
        f"{'knob':<16}{'pairs':>8}" + f"{'signs right':>16}{'':>8}{'off by':>9}" * 2,
    ]
    scores = [by_knob(report.pairs, level) for level in LEVELS]
    counts = {name: sum(pair.knob == name for pair in report.pairs) for name in sorted({p.knob for p in report.pairs})}
    for name, count in counts.items():
        lines.append(f"{name:<16}{count:>8}" + "".join(_score_cells(found.get(name)) for found in scores))
    everything = [score((pair.effect for pair in report.pairs), level) for level in LEVELS]
    lines.append(f"{'all':<16}{len(report.pairs):>8}" + "".join(map(_score_cells, everything)))
    if report.refused:
        lines += ["", f"{report.refused} rows without a forecast, for example: {report.refusal}"]
    level = COMPILED if everything[LEVELS.index(COMPILED)].effects else BEFORE
    shown = report.pairs if rows else _wrong(report.pairs, level)
    title = "Every pair" if rows else f"Wrong signs {level}: {len(shown)}"
    lines += ["", f"{title}, largest effects first (effect on speed, percent):" if shown else f"{title}."]
    if shown:
        lines += [f"{'measured':>9}{'from code':>10}{'before':>8}  change, shape, the kernel before"]
        lines += [_pair_line(pair) for pair in sorted(shown, key=_size)]
    return "\n".join(lines)


def _score_cells(found: Score | None) -> str:
    if found is None or not found.effects:
        return f"{'-':>16}{'':>8}{'-':>9}"
    share = "" if found.sign_share is None else f"{found.sign_share:.0%}"
    return f"{f'{found.signs_right} of {found.clear}':>16}{share:>8}{found.median_points:>9.1f}"


def _wrong(pairs: Iterable[Pair], level: str) -> list[Pair]:
    """Pairs with a clear effect whose sign ``level`` has wrong."""
    return [p for p in pairs if level in p.effect.forecast and p.effect.clear() and not p.effect.sign_right(level)]


def _size(pair: Pair) -> float:
    return -abs(pair.effect.measured - 1.0)


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _pair_line(pair: Pair) -> str:
    told = (_percent(pair.effect.forecast[level]) if level in pair.effect.forecast else "-" for level in LEVELS)
    code, before = told
    change = f"{pair.knob} {_plain(pair.value_from)} -> {_plain(pair.value_to)}"
    point = pair.row_from.point
    return (
        f"{_percent(pair.effect.measured):>9}{code:>10}{before:>8}  {change}, {point.workload().label()}, of "
        f"{short_text(parse_variant(point.variant))}"
    )


def report_dict(report: AblationReport) -> dict[str, Any]:
    """The report with stable keys; ratios of speed, changed kernel over the one before."""
    effects = [case.effect for case in report.cases]
    return {
        "regime": report.regime,
        "clear_beyond": CLEAR,
        "published": {
            "scores": {level: _score_dict(score(effects, level, _ANY, _POINTS)) for level in published.LEVELS},
            "cases": [_case_dict(case) for case in report.cases],
            "excluded": [asdict(case) for case in report.excluded],
        },
        "measured": {
            "table": report.table,
            "gpus": list(report.gpus),
            "again": report.again,
            "scores": {
                level: {
                    **{name: _score_dict(found) for name, found in by_knob(report.pairs, level).items()},
                    "all": _score_dict(score((pair.effect for pair in report.pairs), level)),
                }
                for level in LEVELS
            },
            "pairs": [_pair_dict(pair) for pair in report.pairs],
            "refused": report.refused,
        },
    }


def _score_dict(found: Score) -> dict[str, float]:
    return {**asdict(found)}


def _case_dict(case: Case) -> dict[str, Any]:
    return {
        "case": case.name, "gpu": case.lines[0].gpu, "from": case.lines[0].said_from, "to": case.lines[0].said_to,
        "source": case.lines[0].source, "measured_low": case.effect.low, "measured_high": case.effect.high,
        "forecast": dict(case.effect.forecast),
        "lines": [
            {
                "workload": line.workload.as_dict(), "shape_stated": line.stated, "measured_low": line.low,
                "measured_high": line.high, "forecast": forecast,
            }
            for line, forecast in zip(case.lines, case.forecasts, strict=True)
        ],
    }  # fmt: skip


def _pair_dict(pair: Pair) -> dict[str, Any]:
    return {
        "knob": pair.knob, "value_from": pair.value_from, "value_to": pair.value_to, "kernel": pair.row_from.point.kernel,
        "variant_from": pair.row_from.point.variant, "variant_to": pair.row_to.point.variant,
        "workload": pair.row_from.point.workload().as_dict(), "measured": pair.effect.measured,
        "forecast": dict(pair.effect.forecast),
    }  # fmt: skip


#: Okabe and Ito's palette, readable without colour vision; more knobs than colours differ by marker.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
_MARKERS = "o^s"


def write_picture(report: AblationReport, path: str) -> None:
    """Forecast over measured effect: published cases, and measured pairs by level; right signs lie on white ground."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    count = len(LEVELS) + bool(report.cases)
    figure, axes = plt.subplots(1, count, figsize=(5.2 * count, 4.9), constrained_layout=True, squeeze=False)
    panels = list(axes[0])
    if report.cases:
        _published_panel(report.cases, panels.pop(0))
    knobs = sorted({pair.knob for pair in report.pairs})
    for axis, level in zip(panels, LEVELS, strict=True):
        for i, knob in enumerate(knobs):
            known = [p.effect for p in report.pairs if p.knob == knob and level in p.effect.forecast]
            axis.scatter(
                [100 * (e.measured - 1) for e in known], [100 * (e.forecast[level] - 1) for e in known], s=14, alpha=0.7,
                linewidths=0, color=_COLOURS[i % len(_COLOURS)], marker=_MARKERS[i // len(_COLOURS) % len(_MARKERS)], label=knob,
            )  # fmt: skip
        _frame(axis, f"measured pairs, forecast {level}")
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _published_panel(cases: Sequence[Case], axis: Any) -> None:
    shown: tuple[tuple[str, str, str], ...] = ((published.FREE, "o", "#0072B2"), (published.ONE_CLOCK, "^", "#D55E00"))
    percent: Callable[[float], float] = lambda ratio: 100 * (ratio - 1)  # noqa: E731
    for level, marker, colour in shown:
        middle = [percent(case.effect.measured) for case in cases]
        axis.errorbar(
            middle, [percent(case.effect.forecast[level]) for case in cases],
            xerr=[
                [m - percent(case.effect.low) for m, case in zip(middle, cases, strict=True)],
                [percent(case.effect.high) - m for m, case in zip(middle, cases, strict=True)],
            ],
            fmt=marker, color=colour, markersize=5, elinewidth=0.8, label=level,
        )  # fmt: skip
    _frame(axis, "published ablations, before compilation")
    axis.legend(frameon=False, fontsize=8)


def _frame(axis: Any, title: str) -> None:
    low = min(axis.get_xlim()[0], axis.get_ylim()[0])
    high = max(axis.get_xlim()[1], axis.get_ylim()[1])
    axis.fill_between([low, 0], 0, high, color="0.93", zorder=0, linewidth=0)
    axis.fill_between([0, high], low, 0, color="0.93", zorder=0, linewidth=0)
    axis.plot([low, high], [low, high], color="0.5", linewidth=0.8, zorder=1)
    axis.set(
        xlim=(low, high),
        ylim=(low, high),
        title=title,
        xlabel="measured effect on speed, percent",
        ylabel="forecast, percent",
    )
