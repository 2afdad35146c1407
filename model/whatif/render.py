"""A what-if as text, as a dictionary with stable keys, and as HTML for notebooks.  No forecast of its own."""

from __future__ import annotations

from tilecast.base.data import LOOP_TARGETS
from tilecast.base.html_table import html_table
from tilecast.base.words import folded, percent_more, significant
from tilecast.model.forecast.binding import critical_unit
from tilecast.model.forecast.predict import Prediction
from tilecast.model.forecast.render import as_dict as prediction_dict
from tilecast.model.kernel.variant import short_text
from tilecast.model.machine.followed import changed_unfollowed
from tilecast.model.sm.timeline import side_by_side
from tilecast.model.whatif.comparison import Comparison


def as_dict(w: Comparison) -> dict[str, object]:
    """Keys documented in docs/json.md; existing keys keep their meaning between versions."""
    return {
        "machine": w.machine.name,
        "workload": w.workload.as_dict(),
        "changes": [{"fact": c.fact, "unit": c.unit, "before": c.before, "after": c.after} for c in w.changes],
        "speedup": w.speedup,
        "speedup_kept": w.speedup_kept if w.kept is not None else None,
        "knob_changes": [{"knob": k.knob, "before": k.before, "after": k.after} for k in w.knob_changes],
        "variants_simulated": w.simulated,
        "variants_skipped": w.skipped,
        "kept_refused": w.kept_refused,
        "before": prediction_dict(w.before),
        "kept": prediction_dict(w.kept) if w.kept is not None else None,
        "after": prediction_dict(w.after),
    }


def as_text(w: Comparison, width: int = 120) -> str:
    """The comparison `tilecast whatif` prints."""
    lines = (*_headline(w), "", *_table(w, width), "", *_kernel(w), "", *_waterfall(w, width), "")
    return "\n".join((*(folded(line, width, 10) for line in lines), *_timelines(w, width)))


def as_html(w: Comparison) -> str:
    """A small table of before and after, for notebooks."""
    title = _headline(w)
    columns = _columns(w)
    rows = [
        ("time, ms", *(f"{p.time_ms:.4g}" for _, p in columns)),
        ("TFLOP/s", *(significant(p.tflops) for _, p in columns)),
        ("SM clock, MHz", *(f"{p.clock_mhz:.0f}" for _, p in columns)),
        ("bound by", *(binding_word(p) for _, p in columns)),
        ("kernel", *(short_text(p.variant) for _, p in columns)),
    ]
    return html_table("; ".join(" ".join(line.split()) for line in title), ("", *(name for name, _ in columns)), rows)


def _headline(w: Comparison) -> list[str]:
    lines = [f"What if {w.machine.title} were different: {w.workload.label()}"]
    lines += [f"  {c.fact:<34} {c.before:g} -> {c.after:g} {c.unit}" for c in w.changes]
    gain = percent_more(w.speedup - 1.0)
    how = "as fast" if gain == "+0.0%" else f"{gain[1:]} {'faster' if gain[0] == '+' else 'slower'}"
    lines.append(f"  {how}, the kernel chosen again" + _kept_share(w))
    if w.before.compiled is not None:
        lines.append(
            f"  all forecasts {w.before.level} ({w.before.compiled.made.compiler}), timed again under the changed facts"
        )
    elif w.machine.arch in LOOP_TARGETS and (missed := changed_unfollowed(w.changed)):
        lines.append(f"  all forecasts {w.before.level}: those from machine code do not follow {', '.join(missed)}")
    return lines


def _kept_share(w: Comparison) -> str:
    if w.kept is None:
        return f"; the old kernel is not legal any more: {w.kept_refused}"
    return f"; {percent_more(w.speedup_kept - 1)} with the kernel of before"


def _columns(w: Comparison) -> list[tuple[str, Prediction]]:
    columns = [("before", w.before)]
    if w.kept is not None:
        columns.append(("kept", w.kept))
    return [*columns, ("after", w.after)]


def binding_word(p: Prediction) -> str:
    """What binds, in few words: a unit, memory, a recurrence, or what of the launch outweighs the loop."""
    return "tile starts" if p.binding.kind == "start" else p.binding.name


def _table(w: Comparison, width: int) -> list[str]:
    columns = _columns(w)
    cell = max(13, min(16, (width - 34) // len(columns)))

    def row(name: str, cells: list[str]) -> str:
        return f"  {name:<32}" + "".join(f"{text:>{cell}}" for text in cells)

    lines = [row("", [name for name, _ in columns])]
    lines += [
        row("time, ms", [f"{p.time_ms:.4g}" for _, p in columns]),
        row("TFLOP/s", [significant(p.tflops) for _, p in columns]),
        row(f"SM clock, MHz ({w.before.regime})", [f"{p.clock_mhz:.0f}" for _, p in columns]),
        row("clock held by", [p.clock.bound for _, p in columns]),
        row("bound by", [binding_word(p) for _, p in columns]),
        row("  most of the critical lap", [critical_unit(p.trace) or "-" for _, p in columns]),
        row("cycles per iteration", [f"{p.ii_cycles:.0f}" for _, p in columns]),
        row("  of rows x keys", [f"{p.pipeline.rows_per_cta} x {p.pipeline.keys_per_iteration}" for _, p in columns]),
        row("  busiest unit (ResMII)", [f"{p.bounds.res.unit} {p.bounds.res.cycles:.0f}" for _, p in columns]),
        row("  recurrence (RecMII)", [f"{p.bounds.rec.cycles:.0f}" for _, p in columns]),
    ]
    names = [u for u in w.before.units if any(p.units.get(u, 0) > 0.25 for _, p in columns)]
    lines += [row(f"  {name} busy", [f"{p.units.get(name, 0.0):.1%}" for _, p in columns]) for name in names]
    if any(p.tflops_interval[0] < p.tflops_interval[1] for _, p in columns):
        lines.append(row("TFLOP/s interval", [" to ".join(map(significant, p.tflops_interval)) for _, p in columns]))
    return lines


def _kernel(w: Comparison) -> list[str]:
    lines = [f"Kernel ({w.simulated} variants simulated, {w.skipped} could not win)"]
    if w.knob_changes:
        lines += [f"  {k.knob:<20} {_plain(k.before)} -> {_plain(k.after)}" for k in w.knob_changes]
    else:
        lines.append("  stays the best: no knob changes")
    lines.append(f"  before  {short_text(w.before.variant)}")
    if w.knob_changes:
        lines.append(f"  after   {short_text(w.after.variant)}")
    return lines


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _waterfall(w: Comparison, width: int) -> list[str]:
    """Steps in microseconds, because the clocks of the columns differ; each column adds up to its time."""
    columns = _columns(w)
    times = [{s.cause: s.cycles / p.clock_mhz for s in p.waterfall} for _, p in columns]
    totals = [p.time_ms * 1e3 for _, p in columns]
    few = 1 if max(totals) >= 100 else 2
    causes = list(dict.fromkeys(cause for part in times for cause in part))
    head = "".join(f"{name:>12}" for name, _ in columns)
    # A narrow terminal keeps the numbers and cuts the causes short.
    wide = max(24, min(58, width - 2 - 12 * len(columns) - 14))
    lines = [f"{'From peak to achieved, microseconds':<{wide + 2}}{head}{'after-before':>14}"]
    for cause in causes:
        cells = [part.get(cause, 0.0) for part in times]
        if max(abs(cell) for cell in cells) < 5e-4 * w.before.time_ms * 1e3:
            continue
        lines.append(
            f"  {_shortened(cause, wide):<{wide}}"
            + "".join(f"{c:12.{few}f}" for c in cells)
            + f"{cells[-1] - cells[0]:+14.{few}f}"
        )
    lines.append(
        f"  {'time':<{wide}}" + "".join(f"{c:12.{few}f}" for c in totals) + f"{totals[-1] - totals[0]:+14.{few}f}"
    )
    return lines


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _timelines(w: Comparison, width: int) -> list[str]:
    titles = tuple(
        f"{name}: {p.pipeline.name}, {p.ii_cycles:.0f} cycles" for name, p in (("before", w.before), ("after", w.after))
    )
    lines = ["Steady state of one SM as simulated, both on one scale (cycles)"]
    return lines + side_by_side(w.before.trace, w.after.trace, (titles[0], titles[1]), width)
