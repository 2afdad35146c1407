"""The report of `validate foreign` as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tilecast.validation.foreign.run import SHARES, Compared
from tilecast.validation.statistics import summarise


def report_text(found: Sequence[Compared], machine: str) -> str:
    """A line for each launch, and the errors in all."""
    kernels = len({one.point.kernel for one in found})
    wide = max(len(one.point.kernel) for one in found)
    lines = [
        f"{len(found)} launches of {kernels} kernels that are not ours, on {machine}: forecast from their machine code, "
        "in cycles as counters give them.",
        "Shares are of the launch's cycles, forecast less counted, in points.",
        "",
        f"{'kernel':<{wide}}  {'problem':<27}{'measured':>11}{'forecast':>11}{'error':>8}"
        + "".join(f"{name:>8}" for name in SHARES),
    ]
    for one in found:
        shares = "".join(f"{one.off_by[name]:>+8.1f}" for name in SHARES)
        lines.append(
            f"{one.point.kernel:<{wide}}  {one.point.label:<27}{one.point.cycles:>11,.0f}{one.found.cycles:>11,.0f}{one.error:>+8.1%}{shares}"
        )
    total = summarise(one.error for one in found)
    lines += [
        "",
        f"error  mean {total.mean:.1%}   median {total.median:.1%}   p90 {total.p90:.1%}   largest {total.worst:.1%}   bias {total.bias:+.1%}",
        "shares off by, mean and largest: "
        + ", ".join(f"{name} {off['mean']:.1f} and {off['largest']:.1f}" for name, off in _shares(found).items()),
    ]
    return "\n".join(lines)


def _shares(found: Sequence[Compared]) -> dict[str, dict[str, float]]:
    """Unit -> mean and largest distance of its busy share from the counted one, in points."""
    off = {name: [abs(one.off_by[name]) for one in found] for name in SHARES}
    return {name: {"mean": sum(far) / len(far), "largest": max(far)} for name, far in off.items()}


def report_dict(found: Sequence[Compared], machine: str) -> dict[str, Any]:
    """Plain values for --json."""
    return {
        "machine": machine,
        "level": "machine code",
        "summary": {
            "kernels": len({one.point.kernel for one in found}),
            **asdict(summarise(one.error for one in found)),
            "shares": _shares(found),
        },
        "rows": [
            {
                "kernel": one.point.kernel,
                "library": one.point.library,
                "problem": one.point.label,
                "measured_cycles": one.point.cycles,
                "forecast_cycles": one.found.cycles,
                "error": one.error,
                "cycles_per_iteration": one.cost.steady.cycles,
                "ends_cycles": one.cost.ends,
                "shares_off_by_points": one.off_by,
            }
            for one in found
        ],
    }
