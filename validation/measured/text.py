"""The report of `validate measured` as text, JSON and picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilecast.model.forecast.answer import BEFORE, COMPILED
from tilecast.validation.measured import settled
from tilecast.validation.measured.kept import picks_text
from tilecast.validation.measured.run import LEVELS, MeasuredReport
from tilecast.validation.statistics import ErrorSummary, held_out, summarise

_HEAD = f"{'':<44}{'n':>5}{'mean':>8}{'median':>8}{'p90':>8}{'max':>8}{'bias':>8}"


#: Relative error of a settled clock that counts as right.
_CLOSE = 0.03


def _line(name: str, s: ErrorSummary) -> str:
    return f"{name:<44}{s.count:>5}{s.mean:>8.1%}{s.median:>8.1%}{s.p90:>8.1%}{s.worst:>8.1%}{s.bias:>+8.1%}"


def _held_out(report: MeasuredReport) -> list[str]:
    """The 80 % interval of errors by level, tried on other shapes."""
    found = {}
    for level in LEVELS:
        rows = [row for row in report.rows if level in row.cycles]
        found[level] = held_out(
            [row.point.cycles / row.cycles[level] for row in rows], [row.point.workload() for row in rows]
        )
    lines = [
        f"  {level}: {one.low:+.1%} to {one.high:+.1%}, {one.coverage:.0%} of {one.count}"
        for level, one in found.items()
        if one.count
    ]
    head = (
        "Where 80 % of measurements lie beside the forecast (cycles), and of how many rows of other shapes that holds:"
    )
    return ["", head, *lines] if lines else []


def report_text(report: MeasuredReport, rows: bool) -> str:
    """Tables for people; every number is computed from the rows of ``report.table``."""
    gpus = sorted({row.point.gpu for row in report.rows})
    lines = [
        f"{len(report.rows)} measured points of generated kernels ({', '.join(gpus)}; {Path(report.table).name}), errors of "
        "cycles per launch, predicted over measured less one.",
        "",
        _HEAD,
    ]
    for level, roles in report.headline.items():
        for role, summary in roles.items():
            lines.append(_line(f"forecast {level}, {role}", summary))
    if report.same_rows is not None:
        lines.append(_line(f"forecast {BEFORE}, rows with a loop", report.same_rows))
    lines += picks_text(report.picks)
    lines += ["", "Choice between the variants of a shape (3 or more measured):"]
    for level, by_role in report.choices.items():
        for role, found in by_role.items():
            if found.shapes:
                lines.append(
                    f"  {level}, {role}: {len(found.shapes)} shapes, Kendall tau {found.median_tau:.2f} (median); "
                    f"first pick behind the best by {found.median_regret:.1%} (median), {found.worst_regret:.1%} (worst)"
                )
    without = sum(row.level == BEFORE for row in report.rows)
    level = BEFORE if without == len(report.rows) else COMPILED
    if report.kept and without:
        level = f"{COMPILED} where a loop is at hand"
    for title, groups in report.groups.items():
        lines += ["", f"By {title} ({level}, all roles):", _HEAD]
        lines += [_line(name, summary) for name, summary in groups.items()]
    lines += _settled(report, rows)
    lines += _held_out(report)
    if without:
        why = "no profile of their machine code is at hand (tilecast profile PLAN.toml -o codes.txt makes them, --code codes.txt reads them)"
        if report.kept:
            why = "no loop of theirs is at hand"
        lines += ["", f"{without} of {len(report.rows)} rows stand on the forecast {BEFORE}: {why}."]
    if report.refused:
        lines += ["", f"{len(report.refused)} rows without a forecast, for example: {report.refused[0].refused}"]
    if rows:
        lines += ["", f"{'measured':>12}{'from code':>11}{'error':>8}{'before':>11}{'error':>8}  kernel, shape"]
        for row in sorted(report.rows, key=lambda r: -abs(r.error(r.level))):
            told = "".join(
                f"{row.cycles[level]:>11.0f}{row.error(level):>+8.1%}" if level in row.cycles else f"{'-':>11}{'':>8}"
                for level in LEVELS
            )
            lines.append(
                f"{row.point.cycles:>12.0f}{told}  {row.point.kernel} {row.point.variant} {row.point.workload().label()}"
            )
    return "\n".join(lines)


def _settled(report: MeasuredReport, every: bool) -> list[str]:
    """Errors of the clock by level, then the rows whose forecast is not within `_CLOSE`, or ``every`` row."""
    if not report.settled:
        return []
    lines = [
        "",
        "Settled SM clock of sustained runs, predicted over measured less one:",
        f"{_HEAD}   within {_CLOSE:.0%}",
    ]
    for level in settled.LEVELS:
        errors = [row.error(level) for row in report.settled if level in row.mhz]
        if errors:
            lines.append(
                f"{_line(level, summarise(errors))}{sum(abs(e) <= _CLOSE for e in errors):>7} of {len(errors)}"
            )
    for row in sorted(report.settled, key=lambda r: -abs(r.error(r.forecast))):
        error = row.error(row.forecast)
        if every or abs(error) > _CLOSE:
            lines.append(
                f"  measured {row.point.effective_mhz:5.0f} MHz, predicted {row.mhz[row.forecast]:5.0f} ({error:+.1%})  "
                f"{row.point.kernel} {row.point.variant.split(',', 1)[1]} {row.point.workload().label()}"
            )
    return lines


def _summary(s: ErrorSummary) -> dict[str, float]:
    return {"n": s.count, "mean": s.mean, "median": s.median, "p90": s.p90, "max": s.worst, "bias": s.bias}


def report_dict(report: MeasuredReport) -> dict[str, Any]:
    """The report with stable keys."""
    return {
        "table": report.table,
        "headline": {level: {role: _summary(s) for role, s in roles.items()} for level, roles in report.headline.items()},
        "choices": {
            level: {
                role: {
                    "shapes": len(found.shapes), "median_tau": found.median_tau, "median_regret": found.median_regret,
                    "worst_regret": found.worst_regret,
                }
                for role, found in by_role.items()
            }
            for level, by_role in report.choices.items()
        },
        "groups": {title: {name: _summary(s) for name, s in groups.items()} for title, groups in report.groups.items()},
        "rows": [
            {
                "kernel": r.point.kernel, "variant": r.point.variant, "workload": r.point.workload().as_dict(),
                "role": r.point.role, "measured_cycles": r.point.cycles, "level": r.level,
                "compiled_cycles": r.cycles.get(COMPILED), "analytical_cycles": r.cycles[BEFORE],
            }
            for r in report.rows
        ],
        "settled": [
            {
                "kernel": r.point.kernel, "variant": r.point.variant, "workload": r.point.workload().as_dict(),
                "measured_mhz": r.point.effective_mhz, "predicted_mhz": dict(r.mhz),
            }
            for r in report.settled
        ],
        "same_rows": None if report.same_rows is None else _summary(report.same_rows),
        "picks": [{name: getattr(p, name) for name in p.__slots__} for p in report.picks],
        "refused": [{"kernel": r.point.kernel, "variant": r.point.variant, "reason": r.refused} for r in report.refused],
    }  # fmt: skip


def write_scatter(report: MeasuredReport, path: str) -> None:
    """Predicted over measured cycles for both levels, one dot a point."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    for axis, level in zip(axes, LEVELS, strict=True):
        for kernel, colour in (("hopper_ws", "#0072b2"), ("triton", "#d55e00")):
            for role, marker in (("build", "o"), ("held-out", "^")):
                known = [r for r in report.rows if level in r.cycles]
                mine = [r for r in known if r.point.kernel == kernel and r.point.role == role]
                axis.scatter(
                    [r.point.cycles for r in mine], [100 * r.error(level) for r in mine], s=10, marker=marker, color=colour,
                    alpha=0.6, linewidths=0, label=f"{kernel}, {role}",
                )  # fmt: skip
        axis.axhspan(-5, 5, color="0.9", zorder=0)
        axis.axhline(0, color="0.4", linewidth=0.8)
        axis.set(xscale="log", xlabel="measured cycles per launch", title=f"forecast {level}")
    axes[0].set_ylabel("predicted over measured, percent")
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
