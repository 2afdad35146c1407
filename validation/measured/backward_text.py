"""The report of `tilecast validate backward`: our own passes and loops as measured, and the published ones."""

from __future__ import annotations

from tilecast.validation.measured.backward import BackwardReport, worst
from tilecast.validation.published.backward import PublishedBackward, by_machine
from tilecast.validation.statistics import ErrorSummary, summarise

_SUMMARY = ("count", "mean", "median", "p90", "worst", "bias")


def as_text(report: BackwardReport, published: dict[str, tuple[PublishedBackward, ...]], rows: bool = False) -> str:
    """Tables for people; ``published`` by clock."""
    lines = [
        f"Backward passes on {report.machine}, forecast before compilation against measured times",
        "",
        _HEAD,
        *(_line(name, s) for name, s in report.groups().items()),
        _line("whole passes", report.of("pass")),
        _line("loops alone", report.of("loop")),
        "",
        f"Order of the variants of one shape (Kendall's tau, mean): whole passes {report.tau('pass'):.2f} ({report.tau('pass', True):.2f} of those timed in turns), loops {report.tau('loop'):.2f}",
        *_code_lines(report),
        "Left out: " + (", ".join(f"{count} {reason}" for reason, count in report.left_out) or "nothing"),
    ]
    for clock, found in published.items():
        lines += ["", f"Published, the fastest kernel of each shape, TFLOP/s, {clock} clock", _HEAD]
        lines += [_line(name, s) for name, s in by_machine(found).items()]
        lines.append(_line("all", summarise(row.error for row in found)))
    if rows:
        lines += ["", f"{'error':>7}{'forecast ms':>13}{'measured ms':>13}"]
        lines += [
            f"{r.error:+7.1%}{r.predicted_ms:13.4g}{r.measured_ms:13.4g}  {r.name}  {r.workload.label()}  {r.knobs}"
            for r in worst(report.rows)
        ]
        for clock, found in published.items():
            lines += [
                f"{r.error:+7.1%}{r.predicted_ms:13.4g}{r.measured_ms:13.4g}  {clock} {r.machine} {r.kernel}  {r.workload.label()}  {r.variant}"
                for r in sorted(found, key=lambda row: -abs(row.error))
            ]
    return "\n".join(lines)


def _code_lines(report: BackwardReport) -> list[str]:
    """The passes whose loops are recorded, by machine code and before compilation; none without."""
    coded, before = report.coded(), report.before()
    if not coded.rows:
        return []
    lines = ["", "Passes of the Hopper classes, from the machine code of their loops and before compilation", _HEAD]
    for level, found in (("machine code", coded), ("before compilation", before)):
        lines += [_line(f"{level}, {name.removeprefix('pass ')}", s) for name, s in found.groups().items()]
        lines.append(_line(f"{level}, all", found.of("pass")))
    lines.append(
        f"Kendall's tau, mean: from machine code {coded.tau('pass'):.2f} ({coded.tau('pass', True):.2f} of those timed in turns), "
        f"before compilation {before.tau('pass'):.2f} ({before.tau('pass', True):.2f})"
    )
    lines.append(
        f"Of those in turns, pairs that differ by more than twice their noise: from machine code {coded.tau_beyond_noise('pass'):.2f}, "
        f"before compilation {before.tau_beyond_noise('pass'):.2f}; the measurements repeated would reach {coded.tau_repeated('pass'):.2f} of all pairs"
    )
    return [*lines, ""]


_HEAD = f"{'':<44}{'rows':>6}{'mean':>8}{'median':>8}{'p90':>8}{'worst':>8}{'bias':>8}"


def _line(name: str, s: ErrorSummary) -> str:
    return f"{name:<44}{s.count:>6}{s.mean:>8.1%}{s.median:>8.1%}{s.p90:>8.1%}{s.worst:>8.1%}{s.bias:>+8.1%}"


def as_dict(report: BackwardReport, published: dict[str, tuple[PublishedBackward, ...]]) -> dict[str, object]:
    """Keys documented in docs/json.md; errors are shares."""

    def summary(s: ErrorSummary) -> dict[str, float]:
        return {name: getattr(s, name) for name in _SUMMARY}

    return {
        "machine": report.machine,
        "passes": {**summary(report.of("pass")), "tau": report.tau("pass"), "tau_in_turns": report.tau("pass", True)},
        "coded": {
            name: {**summary(one.of("pass")), "tau": one.tau("pass"), "tau_in_turns": one.tau("pass", True), "tau_beyond_noise": one.tau_beyond_noise("pass"), "tau_repeated": one.tau_repeated("pass")}
            for name, one in (("machine_code", report.coded()), ("before", report.before()))
        },
        "loops": {**summary(report.of("loop")), "tau": report.tau("loop")},
        "groups": {name: summary(s) for name, s in report.groups().items()},
        "left_out": dict(report.left_out),
        "published": {clock: {name: summary(s) for name, s in by_machine(found).items()} for clock, found in published.items()},
        "rows": [
            {"kind": r.kind, "name": r.name, "workload": r.workload.as_dict(), "knobs": r.knobs, "clock_mhz": r.clock_mhz,
             "measured_ms": r.measured_ms, "predicted_ms": r.predicted_ms, "error": r.error, "code_ms": r.code_ms}
            for r in report.rows
        ],
        "published_rows": [
            {"clock": clock, "machine": r.machine, "workload": r.workload.as_dict(), "kernel": r.kernel, "source": r.source,
             "family": r.variant, "measured_ms": r.measured_ms, "predicted_ms": r.predicted_ms, "error": r.error}
            for clock, found in published.items() for r in found
        ],
    }  # fmt: skip
