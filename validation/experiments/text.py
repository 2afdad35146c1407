"""Natural experiments as text and dictionary; no arithmetic beyond summaries of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

from tilecast.validation.experiments.run import (
    FORECASTS,
    WITHIN,
    CycleRatio,
    ExperimentReport,
    Outcome,
    RatioRow,
    order,
    outcome,
    told_by_others,
)
from tilecast.validation.published.run import length_bucket

#: What each forecast takes from the newer machine.
MEANING = {
    "only_facts": "the what-if: only {says}, power limit as before",
    "one_clock": "the same at one clock: cycles alone",
    "with_power": "{says} and the newer board's power",
    "whole_file": "everything: the two machine files",
}
_DTYPES = ("16 bit", "fp8")


def report_text(reports: tuple[ExperimentReport, ...], cycles: tuple[CycleRatio, ...], with_rows: bool = False) -> str:
    """What `tilecast validate experiments` prints."""
    lines = [
        f"Natural experiments: forecast against measured ratio, new GPU over old, {reports[0].regime} clock",
        f"Right means within {WITHIN:g} percentage points of the ratio; nothing was fitted.",
    ]
    for report in reports:
        lines += ["", f"{report.experiment.name} ({report.experiment.says})"]
        lines += _experiment(report) if report.rows else ["  no kernel, version and shape was published for both GPUs"]
    lines += ["", *_cycles(cycles)]
    if with_rows:
        for report in reports:
            lines += ["", *_rows(report)] if report.rows else []
    return "\n".join(lines)


def _experiment(report: ExperimentReport) -> list[str]:
    rows = report.rows
    same = "any version of one kernel" if report.experiment.any_version else "one kernel and version on both"
    lines = [f"  {len(rows)} rows: {same}, forward, seqlen >= 2048", ""]
    lines.append(
        f"  {'forecast takes from the newer GPU':<58}{'dtype':<8}{'rows':>5}{'right':>7}{'median':>8}{'bias':>8}{'sign':>6}"
    )
    for name in FORECASTS:
        text = MEANING[name].format(says=report.experiment.says)
        for dtype in (*_DTYPES, "all"):
            found = outcome((r for r in rows if dtype in (r.dtype, "all")), name)
            if found.rows:
                lines.append(_outcome_line(text, dtype, found))
                text = ""
    pairs = order(rows)
    if pairs is not None:
        lines += ["", f"  fp8 against bf16, {pairs.pairs} pairs of one shape (median ratios)"]
        for name, (low, high) in pairs.medians.items():
            agree = (
                "" if name == "measured" else f"   order right in {pairs.agree[name]:.0%} of {pairs.clear} clear pairs"
            )
            lines.append(f"    {name:<12} bf16 {low:.3f}  fp8 {high:.3f}{agree}")
    lines += ["", *_evidence(report)]
    return lines


def _outcome_line(text: str, dtype: str, found: Outcome) -> str:
    return (
        f"  {text:<58}{dtype:<8}{found.rows:>5}{found.within:>7.0%}{found.median_error:>8.1f}{found.bias:>+8.1f}"
        f"{found.sign:>6.0%}"
    )


def implied_clock(rows: list[RatioRow]) -> float:
    """Median of measured ratio over the ratio of cycles: the clock ratio that would explain the rest."""
    return median(row.measured / row.one_clock for row in rows)


def _evidence(report: ExperimentReport) -> list[str]:
    """What the rows themselves say about the part that is not reached."""
    rows = list(report.rows)
    lines = ["  What the rows say about the rest"]
    for dtype in _DTYPES:
        chosen = [row for row in rows if row.dtype == dtype]
        if chosen:
            forecast = median(row.new_clock / row.old_clock for row in chosen)
            lines.append(
                f"    {dtype}: measured over cycles alone {implied_clock(chosen):.3f} (a clock ratio, if only the clock "
                f"differs besides); the machine files give {forecast:.3f}"
            )
    if report.spread_shapes:
        lines.append(
            f"    library versions of one kernel and shape disagree by {report.spread:.1f} points (median of "
            f"{report.spread_shapes} shapes; most {report.spread_worst:.1f})"
        )
    right, judged = told_by_others(rows)
    if judged:
        lines.append(
            f"    the median measured ratio of the other rows of a dtype, head_dim and mask, taken as the forecast of each row, "
            f"is right in {right / judged:.0%} of {judged}"
        )
    if report.experiment.any_version:
        lines.append(
            "    no library version ran on both GPUs: rows of cuDNN hold a year of software as well; FA2's did not change"
        )
    lines += _misses(rows)
    return lines


def _misses(rows: list[RatioRow]) -> list[str]:
    """Where the machine files' ratio is right, by what the rows have in common."""
    groups: tuple[tuple[str, Callable[[RatioRow], str]], ...] = (
        ("kernel", lambda r: r.kernel),
        ("head_dim", lambda r: f"{r.dtype} {r.workload.head_dim_qk}/{r.workload.head_dim_v}"),
        ("seqlen", lambda r: f"{r.dtype} {length_bucket(r.workload.seqlen_k)}"),
        ("mask", lambda r: f"{r.dtype} {r.workload.mask}"),
        ("version", lambda r: f"{r.kernel} {r.version}"[:44]),
    )
    lines = [f"    {'machine files, rows by':<56}{'rows':>5}{'right':>7}{'median':>8}{'bias':>8}"]
    for title, key in groups:
        names = sorted({key(row) for row in rows})
        for name in names if len(names) > 1 else []:
            found = outcome((row for row in rows if key(row) == name), "whole_file")
            lines.append(
                f"      {title:<9} {name:<44}{found.rows:>5}{found.within:>7.0%}{found.median_error:>8.1f}{found.bias:>+8.1f}"
            )
    return lines


def _cycles(cycles: tuple[CycleRatio, ...]) -> list[str]:
    lines = ["B200 -> B300 in cycles (counters; free of clock, power, SM count and library version)"]
    for row in cycles:
        lines.append(
            f"  {row.kernel} {row.dtype} d{row.head_dim}: measured {row.measured:.3f}; only ex2 rate {row.only_facts:.3f} "
            f"({100 * (row.only_facts - row.measured):+.1f} points); machine files {row.whole_file:.3f} "
            f"({100 * (row.whole_file - row.measured):+.1f} points)"
        )
    return lines


def _rows(report: ExperimentReport) -> list[str]:
    lines = [
        f"{report.experiment.name}: every row, worst first",
        f"  {'kernel and version':<44}{'dtype':<7}{'shape':<44}{'measured':>9}{'what-if':>9}{'1 clock':>9}{'+power':>9}{'files':>9}{'error':>8}",
    ]
    for row in sorted(report.rows, key=lambda r: -abs(r.points("whole_file"))):
        w = row.workload
        shape = (
            f"b{w.batch} h{w.heads_q}/{w.heads_kv} s{w.seqlen_q}/{w.seqlen_k} d{w.head_dim_qk}/{w.head_dim_v} {w.mask}"
        )
        lines.append(
            f"  {f'{row.kernel} {row.version}'[:43]:<44}{row.dtype:<7}{shape:<44}{row.measured:>9.3f}{row.only_facts:>9.3f}"
            f"{row.one_clock:>9.3f}{row.with_power:>9.3f}{row.whole_file:>9.3f}{row.points('whole_file'):>+8.1f}"
        )
    return lines


def report_dict(reports: tuple[ExperimentReport, ...], cycles: tuple[CycleRatio, ...]) -> dict[str, Any]:
    """Stable keys for --json."""
    out = []
    for report in reports:
        pairs = order(report.rows)
        out.append(
            {
                "experiment": report.experiment.name,
                "facts": list(report.experiment.facts),
                "regime": report.regime,
                "version_spread_points": {
                    "median": report.spread, "worst": report.spread_worst, "shapes": report.spread_shapes,
                },
                "right_by_measured_median": dict(zip(("right", "rows"), told_by_others(report.rows), strict=True)),
                "outcomes": {
                    name: {
                        dtype: asdict(outcome((r for r in report.rows if dtype in (r.dtype, "all")), name))
                        for dtype in (*_DTYPES, "all")
                    }
                    for name in FORECASTS
                },
                "order": None if pairs is None else asdict(pairs),
                "rows": [{**asdict(row), "workload": row.workload.as_dict()} for row in report.rows],
            }
        )  # fmt: skip
    return {"within_points": WITHIN, "experiments": out, "cycles": [asdict(row) for row in cycles]}
