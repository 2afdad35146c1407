"""The report of `validate compare` as text and JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tilecast.validation.bundle.compare import LEVELS, Comparison, PointRow, best_times
from tilecast.validation.lab.bundle.manifest import failure_lines
from tilecast.validation.lab.measure.records import Measured
from tilecast.validation.statistics import ErrorSummary

_HEAD = f"{'':<44}{'n':>5}{'mean':>8}{'median':>8}{'p90':>8}{'max':>8}{'bias':>8}"


def _line(name: str, s: ErrorSummary) -> str:
    return f"{name:<44}{s.count:>5}{s.mean:>8.1%}{s.median:>8.1%}{s.p90:>8.1%}{s.worst:>8.1%}{s.bias:>+8.1%}"


def report_text(report: Comparison, rows: bool) -> str:
    """Tables for people; ``rows`` adds every point, worst first."""
    m = report.manifest
    lines = [
        f"{report.path}: {m.gpu} (sm_{m.capability}), driver {m.driver}, torch {m.torch}, triton {m.triton}, tilecast "
        f"{m.tilecast}, {m.date}",
        f"`{m.command}`, plan {m.plan}, {sum(m.seconds.values()):.0f} s; all {len(m.files)} files are as the manifest says",
    ]
    lines += _facts(report) + _errors(report) + _clocks(report) + _peers(report) + _failures(report)
    if rows:
        lines += _rows(report)
    return "\n".join(lines)


def _facts(report: Comparison) -> list[str]:
    if not report.facts:
        return ["", "No calibrated facts."]
    lines = ["", f"Facts of machine {report.machine} against calibrated ones",
             f"{'fact':<42}{'cited':>12}{'calibrated':>12}{'diff':>9}  unit"]  # fmt: skip
    for fact in report.facts:
        cited = "-" if fact.cited is None else f"{fact.cited:.4g}"
        diff = f"{fact.measured / fact.cited - 1:+.1%}" if fact.cited else ""
        lines.append(f"{fact.key:<42}{cited:>12}{fact.measured:>12.4g}{diff:>9}  {fact.unit}")
    return lines


def _errors(report: Comparison) -> list[str]:
    if not report.points:
        return ["", "No short runs of generated kernels."]
    lines = [
        "",
        f"{len(report.points)} short runs of generated kernels: cycles per launch, predicted over measured less one",
        _HEAD,
    ]
    lines += [_line(f"{how}, {facts}", summary) for (how, facts), summary in report.summary.items()]
    for level, groups in report.groups.items():
        lines += ["", f"{level[0]}, {level[1]}, by kernel, head_dim, mask", _HEAD]
        lines += [_line(name, summary) for name, summary in groups.items()]
    missing = [reason for row in report.points for reason in row.refused.values()]
    if missing:
        lines += ["", f"{len(missing)} forecasts are missing, for example: {missing[0]}"]
    return lines


def _name(point: Measured) -> str:
    return f"{point.kernel} {point.variant.partition(',')[2] if point.source_sha else point.variant}, {point.workload().label()}"


def _clocks(report: Comparison) -> list[str]:
    if not report.clocks:
        return ["", "No sustained runs."]
    lines = ["", "Settled SM clocks of sustained runs, MHz (effective: cycles over time)",
             f"{'measured':>9}{'cited':>8}{'error':>8}{'calibr.':>9}{'error':>8}{'W':>6}  kernel, shape"]  # fmt: skip
    for row in report.clocks:
        cells = ""
        for name, width in (("cited facts", 8), ("calibrated facts", 9)):
            mhz = row.mhz.get(name)
            cells += f"{'-' if mhz is None else f'{mhz:.0f}':>{width}}"
            cells += f"{'' if mhz is None else f'{mhz / row.point.effective_mhz - 1:+.1%}':>8}"
        lines.append(f"{row.point.effective_mhz:>9.0f}{cells}{row.point.power_w:>6.0f}  {_name(row.point)}")
    return lines


def _peers(report: Comparison) -> list[str]:
    if not report.peers:
        return ["", "No peers were measured."]
    best = best_times(report.points)
    lines = ["", "Peers (short runs)", f"{'ms':>9}{'TFLOP/s':>9}{'our best':>10}{'ratio':>7}  peer, shape"]
    for peer in report.peers:
        own = best.get(peer.workload())
        cells = f"{'-':>10}{'':>7}" if own is None else f"{own.point.ms:>10.4g}{peer.ms / own.point.ms:>7.3f}"
        lines.append(f"{peer.ms:>9.4g}{peer.workload().flops / peer.ms / 1e9:>9.0f}{cells}  {_name(peer)}")
    return lines


def _failures(report: Comparison) -> list[str]:
    m = report.manifest
    lines = (
        ["", f"{len(m.failed)} failed while it was made:"] if m.failed else ["", "Nothing failed while it was made."]
    )
    lines += [f"  {line}" for line in failure_lines(m.failed)]
    if m.left_out:
        lines.append(f"{len(m.left_out)} plan entries were left out, for example: {m.left_out[0]}")
    return lines


def _worst(row: PointRow) -> float:
    return -max((abs(row.error(level)) for level in row.cycles), default=0.0)


def _rows(report: Comparison) -> list[str]:
    lines = [
        "",
        "Every short run, worst first: measured cycles, then predicted and error by "
        + "; ".join(f"{a}, {b}" for a, b in LEVELS),
    ]
    for row in sorted(report.points, key=_worst):
        cells = "".join(
            f"{row.cycles[level]:>11.0f}{row.error(level):>+8.1%}" if level in row.cycles else f"{'-':>11}{'':>8}"
            for level in LEVELS
        )
        lines.append(f"{row.point.cycles:>11.0f}{cells}  {_name(row.point)}")
    return lines


# --- JSON -------------------------------------------------------------------------------------------------------


def _summary(s: ErrorSummary) -> dict[str, float]:
    return {"n": s.count, "mean": s.mean, "median": s.median, "p90": s.p90, "max": s.worst, "bias": s.bias}


def _key(level: tuple[str, str]) -> str:
    return ", ".join(level)


def _shape(point: Measured) -> dict[str, Any]:
    return {"kernel": point.kernel, "variant": point.variant, "workload": point.workload().as_dict(), "ms": point.ms}


def report_dict(report: Comparison) -> dict[str, Any]:
    """The report with stable keys."""
    return {
        "bundle": report.path,
        "manifest": asdict(report.manifest),
        "machine": report.machine,
        "facts": [asdict(fact) for fact in report.facts],
        "summary": {_key(level): _summary(s) for level, s in report.summary.items()},
        "groups": {_key(level): {name: _summary(s) for name, s in groups.items()} for level, groups in report.groups.items()},
        "points": [
            {
                **_shape(row.point), "measured_cycles": row.point.cycles,
                "cycles": {_key(level): cycles for level, cycles in row.cycles.items()},
                "refused": {_key(level): reason for level, reason in row.refused.items()},
            }
            for row in report.points
        ],
        "clocks": [{**_shape(row.point), "measured_mhz": row.point.effective_mhz, "mhz": row.mhz} for row in report.clocks],
        "peers": [_shape(peer) for peer in report.peers],
    }  # fmt: skip
