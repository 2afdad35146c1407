"""Sensitivities, break-evens and the asymmetry map as text; no arithmetic beyond formatting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilecast.base.words import folded
from tilecast.model.forecast.answer import BEFORE

if TYPE_CHECKING:
    from tilecast.model.machine.machine import Machine
    from tilecast.model.whatif.answers import BreakEven, Sensitivity
    from tilecast.model.whatif.asymmetry import AsymmetryMap

_BAR = 20
#: One letter a unit on the map: capital where the unit is full, small where it is most of the loop's critical lap.
LETTERS = {
    "tensor": "t", "mufu": "m", "fma": "f", "alu": "a", "cvt": "c", "issue": "i", "regs": "r", "smem": "s",
    "tmem_read": "e", "tmem_write": "w", "tma": "d", "HBM bandwidth": "h", "L2 bandwidth": "l", "hand-over": "o", "power limit": "p",
    "kernel launch": "k", "start, fill and end of tiles": "b", "idle SMs": "n",
}  # fmt: skip


def sensitivities_text(
    rows: Sequence[Sensitivity], machine: Machine, subject: str, clock: str, width: int = 120
) -> str:
    """The table `tilecast sensitivity` prints, with bars where ``width`` has room: left is faster, right is slower."""
    size = min(_BAR, (width - 88) // 2)
    wide = 34 if width >= 88 else 30
    lines = [
        f"{machine.title}: {subject}, {clock}: {rows[0].base_ms:.4g} ms",
        "Percent of time per percent of each fact; negative: more of it is faster",
        "",
        f"{'fact':<{wide}}{'value':>10} {'unit':<13}{'kernel kept':>12}{'chosen again':>13}",
    ]
    for row in rows:
        bar = ""
        if size >= 4:
            side = min(size, round(abs(row.reoptimised) * size))
            empty, full = " " * size, "█" * side
            bar = f"  {empty}|{full}" if row.reoptimised > 0 else f"  {full.rjust(size)}|"
        lines.append(
            f"{row.fact:<{wide}}{row.value:>10.5g} {row.unit:<13}{row.fixed:>+12.3f}{row.reoptimised:>+13.3f}"
            f"{'*' + bar[1:] if row.one_sided else bar}".rstrip()
        )
    if any(row.one_sided for row in rows):
        lines += ["", "* stands at an end of what it can be: moved one way only, the other way is not open"]
    return "\n".join(lines)


def break_evens_text(
    rows: Sequence[BreakEven], machine: Machine, subject: str, clock: str, width: int = 120, level: str = BEFORE
) -> str:
    """What `tilecast breakeven` prints; each number says how it was found."""
    lines = [f"{machine.title}: {subject}, {clock}; break-even points, the kernel kept"]
    for row in rows:
        apart = f", {row.level}" if row.level != level else ""
        lines += ["", f"{row.fact} = {row.value:g} {row.unit} ({row.meaning}); bound by {row.bound_now} now{apart}"]
        if row.solved is not None:
            s = row.solved
            lines.append(
                f"  solved     up to {s.value:.6g} {s.unit} is the busiest, then {s.other}:  {s.equation}  (ResMII)"
            )
            if s.formula:
                lines.append(f"             textbook: {s.formula}  (docs/model.md, 1; no bookkeeping)")
        if row.simulated is not None:
            c = row.simulated
            lines.append(
                f"  simulated  up to {c.value:.5g} bound by {c.below}, then by {c.above}  (bisection on the simulation)"
            )
        if row.at_most_percent < 1.0:
            lines.append(
                f"  useful     not beyond today's: unlimited, it alone would save {row.at_most_percent:.2f} % of time"
            )
        elif row.useful_until is None:
            lines.append(
                f"  useful     beyond 64 times today's; all of it would save {row.at_most_percent:.1f} % of time"
            )
        else:
            lines.append(
                f"  useful     until {row.useful_until:.5g} (then less than 1 % is left); "
                f"all of it would save {row.at_most_percent:.1f} % of time"
            )
    return "\n".join(folded(line, width, 13) for line in lines)


def letter(bound_by: str, lap: str) -> str:
    """The map's letter of a cell."""
    if bound_by != "recurrence":
        return LETTERS.get(bound_by, "?").upper()
    return LETTERS.get(lap, "?")


def map_text(found: AsymmetryMap, width: int = 120) -> str:
    """The map as a grid of TFLOP/s and what binds; the machines' places below."""
    used = {
        letter(b, lap)
        for row, laps in zip(found.bound_by, found.lap, strict=True)
        for b, lap in zip(row, laps, strict=True)
    }
    legend = [f"{LETTERS[name].upper()} {name}" for name in LETTERS if LETTERS[name].upper() in used]
    legend += [f"{LETTERS[name]} recurrence, mostly {name}" for name in LETTERS if LETTERS[name] in used]
    lines = [
        f"{found.machine}, {found.words}{found.workload.label()}, at {found.clock_mhz:.0f} MHz{found.level_note}; everything but the two axes is {found.machine}'s",
        f"across: {found.x_fact} ({found.x_unit}); up: {found.y_fact} ({found.y_unit})",
        "",
        f"{'TFLOP/s and what binds':>24}",
    ]
    cell = min(8, max(6, (width - 11) // len(found.x)))
    for j in reversed(range(len(found.y))):
        cells = (
            f"{found.tflops[j][i]:.0f} {letter(found.bound_by[j][i], found.lap[j][i])}".rjust(cell)
            for i in range(len(found.x))
        )
        lines.append(f"{found.y[j]:>9.4g} |" + "".join(cells))
    lines.append(
        " " * 10 + "+" + "".join(f"{x:.0f}  ".rjust(cell) if x >= 100 else f"{x:.4g}  ".rjust(cell) for x in found.x)
    )
    lines += ["", "  " + "; ".join(legend), "", "Where GPUs lie (their two rates; not forecasts for them)"]
    for point in found.points:
        lines.append(f"  {point.label:<8} {point.x:>8g} {point.y:>8g}   {point.kind:<9} {point.source}")
    return "\n".join(lines)
