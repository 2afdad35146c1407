"""`PublishedReport` as text, dictionary and picture; no arithmetic beyond formatting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilecast.model.forecast.checked_range import COMPILED
from tilecast.validation.published.harness import RUN
from tilecast.validation.published.points import reasons
from tilecast.validation.published.run import CycleRow, PublishedReport, Row, share_within
from tilecast.validation.statistics import ErrorSummary, HeldOut

#: A regime in words, where its name does not say it.
#: A launch gets what a short run does or less, and what it sustains or more.
_CLOCK = {
    RUN: "clock by run length (the forecast)",
    "short": "short clock (upper bound)",
    "sustained": "sustained clock (lower bound)",
}


def _clock(report: PublishedReport) -> str:
    """The clock of a report's forecasts, in words."""
    return _CLOCK[report.regime]


def report_text(report: PublishedReport, with_rows: bool = False, *others: PublishedReport) -> str:
    """The report for people; errors are relative, predicted over measured; ``others`` add their regimes' headlines."""
    lines = [
        f"Predicted against {len(report.rows)} published forward rows, {_clock(report)} "
        f"(locked, and the board's power, where the source says so); rank correlation (Kendall) {report.tau:.3f}",
        "No constant was fitted on these rows.",
        "Each row is forecast for as long as its harness keeps launching: one launch where its source does not say, "
        "the short clock where the board's reaction time is not known.",
        *_levels(report),
        "",
    ]
    shown: list[tuple[str, ErrorSummary]] = []
    for one in (report, *others):
        # Sets of which no harness is known have the same line at the short clock.
        known = [
            entry for entry in one.headline.items() if entry[1].count and (one.regime != RUN or entry not in shown)
        ]
        shown += known
        if known:
            lines += [
                _header(f"Headline, {_clock(one)}"),
                *(_line(*entry) for entry in known),
                "",
            ]
    lines.pop()
    told: list[tuple[str, HeldOut]] = []
    for one in (report, *others):
        if one.coverage:
            lines += [
                "",
                f"Inside the forecast's interval, {_clock(one)} (ranges of the machine's facts, no model error)",
            ]
            lines += [f"  {name:<64}{share:>6.0%}" for name, share in one.coverage.items()]
        beside = [entry for entry in one.held_out.items() if one.regime != RUN or entry not in told]
        told += beside
        if beside:
            lines += [
                "",
                f"Where 80 % of measurements lie beside the forecast, {_clock(one)}, and of how many other shapes that holds",
            ]
            lines += [
                f"  {name:<64}{found.low:>+6.0%} to {found.high:>+4.0%}   {found.coverage:.0%} of {found.count}"
                for name, found in beside
            ]
    close = share_within(report.speed_ups, 6.0)
    if report.speed_ups:
        lines += [
            "",
            f"GB300 over GB200, {len(report.speed_ups)} shapes: {close:.0%} within 6 points of the measured speed-up",
        ]
    if report.cycles:
        lines += ["", *_cycles(report)]
    for title, summaries in report.groups.items():
        lines += ["", _header(f"All rows by {title}")]
        lines += [_line(name, summary) for name, summary in summaries.items()]
    if with_rows:
        lines += ["", *_rows(report.rows)]
    lines += ["", f"Not predicted: {len(report.excluded)} rows"]
    lines += [f"  {count:4d}  {why}" for why, count in reasons(list(report.excluded)).items()]
    if report.refused:
        lines += [f"Refused: {len(report.refused)} rows"]
        sentences: dict[str, int] = {}
        for row in report.refused:
            sentences[row.refused] = sentences.get(row.refused, 0) + 1
        lines += [f"  {count:4d}  {why}" for why, count in sentences.items()]
    return "\n".join(lines)


def _levels(report: PublishedReport) -> list[str]:
    """On which level the rows stand."""
    followed = sum(row.level == COMPILED for row in report.rows)
    if not followed:
        return []
    return [
        f"{followed} rows of FlashAttention-4 are forecast from the machine code of its releases, the others before compilation."
    ]


def _header(title: str) -> str:
    return f"{title:<66}{'rows':>6}{'mean':>8}{'median':>8}{'p90':>8}{'max':>8}{'bias':>8}"


def _line(name: str, s: ErrorSummary) -> str:
    return f"  {name:<64}{s.count:>6}{s.mean:>8.1%}{s.median:>8.1%}{s.p90:>8.1%}{s.worst:>8.1%}{s.bias:>+8.1%}"


def _cycles(report: PublishedReport) -> list[str]:
    lines = [
        "In cycles, free of the clock (per 128x128 tile; shares: predicted minus measured, points)",
        *map(_cycle_line, report.cycles),
        "  No constant was chosen on these but the bookkeeping instructions a step, on the issue and ALU shares of b300 bf16; "
        "some structure was, with the fa4 cells in view (docs/accuracy.md)",
    ]
    if report.loops:
        lines += [
            "The same from machine code: the steady loop of flash-attn-4 as released when they were profiled, but bf16 on a B200 of 4.0.0b36",
            *map(_cycle_line, report.loops),
            "  Constants are the machine files', none chosen on these; rules of the simulator were, with these cells in view "
            "(docs/machine-code.md)",
        ]
    return lines


def _cycle_line(row: CycleRow) -> str:
    p = row.point
    shares = "  ".join(f"{k} {v:+.1f}" for k, v in row.share_differences.items())
    return (
        f"  {p.machine} {p.dtype} d{p.head_dim} {p.kernel:<34} measured {p.cycles:6.0f}  "
        f"predicted {row.cycles:6.0f}  {row.error:+.1%}   {shares}"
    )


def _rows(rows: tuple[Row, ...]) -> list[str]:
    lines = [
        "machine   kernel                      dtype  shape                                        measured predicted   error    MHz  as"
    ]
    for row in sorted(rows, key=lambda r: (r.point.machine, r.point.kernel, r.point.row)):
        p, w = row.point, row.point.workload
        shape = f"b{w.batch} h{w.heads_q}/{w.heads_kv} s{w.seqlen_q} d{w.head_dim_qk}/{w.head_dim_v} {w.mask}"
        lines.append(
            f"{p.machine:<9} {p.kernel[:27]:<27} {p.dtype_as_written:<6} {shape:<44} {p.tflops:8.1f} {row.tflops:9.1f} "
            f"{row.error:+7.1%} {row.clock_mhz:6.0f}  {row.kernel}{', from machine code' if row.level == COMPILED else ''}"
        )
    return lines


def report_dict(report: PublishedReport) -> dict[str, Any]:
    """Stable keys for --json."""

    def summary(s: ErrorSummary) -> dict[str, float]:
        return {"count": s.count, "mean": s.mean, "median": s.median, "p90": s.p90, "max": s.worst, "bias": s.bias}

    return {
        "regime": report.regime,
        "kendall_tau": report.tau,
        "coverage": {name.strip(): share for name, share in report.coverage.items()},
        "held_out": {
            name: {"low": one.low, "high": one.high, "coverage": one.coverage, "count": one.count}
            for name, one in report.held_out.items()
        },
        "headline": {name.strip(): summary(s) for name, s in report.headline.items()},
        "groups": {title: {n: summary(s) for n, s in group.items()} for title, group in report.groups.items()},
        "speed_up_gb300_over_gb200": {
            "shapes": len(report.speed_ups),
            "share_within_6_points": share_within(report.speed_ups, 6.0),
            "rows": [
                {"workload": s.workload.as_dict(), "dtype": s.dtype, "predicted": s.predicted, "measured": s.measured}
                for s in report.speed_ups
            ],
        },
        "cycles": [_cycle_dict(r, "before compilation") for r in report.cycles]
        + [_cycle_dict(r, "machine code") for r in report.loops],
        "rows": [
            {"row": r.point.row, "machine": r.point.machine, "kernel": r.point.kernel, "dtype": r.point.dtype_as_written,
             "workload": r.point.workload.as_dict(), "convention": r.point.convention, "board_power_w": r.point.board_power_w, "measured_tflops": r.point.tflops,
             "predicted_tflops": r.tflops, "error": r.error, "clock_mhz": r.clock_mhz, "predicted_as": r.kernel, "level": r.level}
            for r in report.rows
        ],
        "excluded": reasons(list(report.excluded)),
        "refused": [{"row": r.point.row, "reason": r.refused} for r in report.refused],
    }  # fmt: skip


def _cycle_dict(row: CycleRow, level: str) -> dict[str, Any]:
    p = row.point
    return {
        "machine": p.machine, "kernel": p.kernel, "dtype": p.dtype, "head_dim": p.head_dim, "level": level,
        "measured": p.cycles, "predicted": row.cycles, "error": row.error, "share_differences": row.share_differences,
    }  # fmt: skip


def write_scatter(report: PublishedReport, path: str | Path) -> None:
    """Log-log scatter of predicted over measured TFLOP/s, one colour a GPU (PNG or SVG by the file's ending)."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--picture needs matplotlib: install tilecast[report]") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 7))
    machines = sorted({row.point.machine for row in report.rows})
    for index, machine in enumerate(machines):
        chosen = [row for row in report.rows if row.point.machine == machine]
        axes.scatter(
            [r.point.tflops for r in chosen], [r.tflops for r in chosen], s=12, alpha=0.6, label=f"{machine} ({len(chosen)})",
            color=f"C{index}", linewidths=0,
        )  # fmt: skip
    low = 0.8 * min(min(r.point.tflops, r.tflops) for r in report.rows)
    high = 1.2 * max(max(r.point.tflops, r.tflops) for r in report.rows)
    axes.plot([low, high], [low, high], color="black", linewidth=1)
    for factor, style in ((0.1, "--"), (0.25, ":")):
        for side in (1 + factor, 1 - factor):
            axes.plot([low, high], [low * side, high * side], color="grey", linewidth=0.8, linestyle=style)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set_xlabel("measured TFLOP/s (published)")
    axes.set_ylabel(f"predicted TFLOP/s ({report.regime} clock)")
    axes.set_title("Every published forward row; dashed 10 %, dotted 25 %")
    axes.legend(loc="upper left", frameon=False)
    axes.set_aspect("equal")
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    plt.close(figure)
