"""A tuning run as text, as a dictionary with stable keys and as rows of a table.  No arithmetic of its own."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from tilecast.base.html_table import html_table
from tilecast.codegen.tune.trail import Candidate, Trail
from tilecast.model.kernel.variant import short_text, variant_text

_SHOWN = 10
#: Fates in words, as the counts show them.
_WORDS = {
    "illegal": "illegal on the machine", "not writable": "cannot be written by the generator",
    "fewer stages": "same kernel with fewer K/V stages", "floor": "dropped by its floor, never forecast",
    "forecast": "behind by forecast", "compile": "no machine code to compare (--audit says why)", "machine code": "behind from machine code",
    "measured": "measured and behind", "winner": "winner",
}  # fmt: skip
_BY = {
    "forecast": "forecast before compilation",
    "machine code": "forecast from machine code",
    "measured": "measurement",
}
#: Columns of the audit trail: Candidate's fields, times in milliseconds.
_TIMES = ("floor", "forecast", "compiled", "measured", "measured_low", "measured_high")


def _knobs(candidates: Sequence[Candidate]) -> tuple[list[str], str]:
    """(what tells each candidate from the others, what they have in common), as --variant takes knobs."""
    split = [variant_text(c.variant).split(",") for c in candidates]
    common = [knob for knob in split[0] if all(knob in other for other in split)]
    return [",".join(knob for knob in knobs if knob not in common) for knobs in split], ",".join(common)


def as_text(tuning: Trail) -> str:
    """Counts, the shortlist, the winner, and how far the run could go."""
    winner = tuning.winner
    total = len(tuning.candidates)
    lines = [
        f"{tuning.family} for {tuning.workload.label()} on {tuning.machine.title}: {total} variants",
        "",
        *(f"  {count:>6}  {_WORDS[fate]}" for fate, count in tuning.counts().items()),
        "",
        f"{'forecast':>9}{'from code':>11}{'measured':>10}{'regs':>6}{'spill':>7}  variant (times in ms)",
    ]
    shown = tuning.shortlist[:_SHOWN]
    different, common = _knobs(shown)
    for c, knobs in zip(shown, different, strict=True):
        mark = "*" if c is winner else " "
        lines.append(
            f"{_ms(c.forecast_s):>9}{_ms(c.compiled_s):>11}{_ms(c.measured_s):>10}{_number(c.registers):>6}"
            f"{_number(c.spill_bytes):>7} {mark}{knobs}".rstrip()
        )
    guess = winner.best_guess_s
    speed = f", {tuning.workload.flops / guess / 1e12:.0f} TFLOP/s" if guess else ""
    lines += [
        f"all of them: {common}",
        "",
        f"winner (*) by {_BY[tuning.by]}{speed}: {winner.reason}",
        *(f"note: {note}" for note in tuning.notes),
    ]
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.4g}"


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def as_dict(tuning: Trail) -> dict[str, object]:
    """Keys documented in docs/tuning.md; existing keys keep their meaning between versions."""
    return {
        "machine": tuning.machine.name,
        "workload": tuning.workload.as_dict(),
        "family": tuning.family,
        "clock": tuning.clock,
        "budget": tuning.budget,
        "by": tuning.by,
        "winner": variant_text(tuning.winner.variant),
        "counts": tuning.counts(),
        "notes": list(tuning.notes),
        "candidates": [_row(c) for c in tuning.candidates],
    }


def as_csv(tuning: Trail) -> str:
    """The candidates, one a line."""
    out = io.StringIO()
    rows = [_row(c) for c in tuning.candidates]
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _row(c: Candidate) -> dict[str, object]:
    times = {f"{name}_ms": _rounded(getattr(c, f"{name}_s")) for name in _TIMES}
    return {
        "order": c.order, "variant": variant_text(c.variant), "fate": c.fate, "reason": c.reason, **times,
        "registers": c.registers, "spill_bytes": c.spill_bytes,
    }  # fmt: skip


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{1e3 * seconds:.6g}")


def as_html(tuning: Trail) -> str:
    """The shortlist as a small table, for notebooks."""
    title = f"{tuning.family} for {tuning.workload.label()} on {tuning.machine.title}: best of {len(tuning.candidates)} variants by {_BY[tuning.by]}"
    rows = [
        (short_text(c.variant), _ms(c.forecast_s), _ms(c.compiled_s), _ms(c.measured_s), _number(c.registers), _number(c.spill_bytes))
        for c in tuning.shortlist[:_SHOWN]
    ]  # fmt: skip
    return html_table(
        title, ("variant", "forecast, ms", "from code, ms", "measured, ms", "registers", "spill bytes"), rows
    )
