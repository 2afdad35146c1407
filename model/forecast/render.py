"""A prediction as text, as a dictionary with stable keys, and as HTML for notebooks.  No arithmetic of its own."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from tilecast.base.html_table import html_table
from tilecast.base.words import significant
from tilecast.model.chip.power import lasting_seconds
from tilecast.model.forecast.answer import Forecast, WaterfallStep
from tilecast.model.forecast.binding import OUTSIDE_LOOP
from tilecast.model.kernel.variant import short_text, variant_text

_BAR = 24
#: Effects of facts below this are counted, not listed.
_SMALL = 0.005


def as_dict(p: Forecast) -> dict[str, object]:
    """Keys documented in docs/json.md; existing keys keep their meaning between versions."""
    return {
        "machine": p.machine.name,
        "workload": p.workload.as_dict(),
        "variant": variant_text(p.variant),
        "variant_chosen": p.variant_origin != "as given",
        "variant_origin": p.variant_origin,
        "pipeline": p.pipeline.name,
        "level": p.level,
        "compiled": _compiled(p),
        "regime": p.regime,
        "time_ms": p.time_ms,
        "tflops": p.tflops,
        "tflops_interval": list(p.tflops_interval),
        "clock_mhz": p.clock_mhz,
        "clock_bound": p.clock.bound,
        "power_w": p.clock.power_w,
        "other_regimes": [
            {"regime": name, "time_ms": ms, "tflops": tflops, "clock_mhz": mhz}
            for name, ms, tflops, mhz in p.other_regimes
        ],
        "model_error": {
            "rows": p.model_error.rows,
            "mean": p.model_error.mean,
            "p90": p.model_error.p90,
            "bias": p.model_error.bias,
            "where": p.model_error.where,
        },
        "binding": p.binding.as_dict(),
        "units": p.units,
        "pipes": p.pipes,
        "ii_cycles": p.ii_cycles,
        "res_mii": {"cycles": p.bounds.res.cycles, "unit": p.bounds.res.unit},
        "rec_mii": {"cycles": p.bounds.rec.cycles, "ops": list(p.bounds.rec.ops_on_cycle)},
        "critical_recurrence": [
            {
                "op": s.op,
                "after": s.why,
                "alone_cycles": s.alone_cycles,
                "contention_cycles": s.contention_cycles,
                "wait_cycles": s.wait_cycles,
            }
            for s in p.critical
        ],
        "stalls": p.trace.stalls(),
        "waterfall": [{"cause": w.cause, "cycles": w.cycles, "share": w.share} for w in p.waterfall],
        "tiles": p.chip.tiles,
        "l2_bytes": p.chip.l2_bytes,
        "hbm_bytes": p.chip.hbm_bytes,
        "memory_gbps": p.memory_gbps,
        "flop_per_byte": p.flop_per_byte,
        "tensor_bytes": p.workload.tensor_bytes,
        "assumed_facts": list(p.assumed_facts),
        "fact_effects": [
            {"fact": e.fact, "kind": p.machine.fact(e.fact).kind, "tflops_low": e.at_low, "tflops_high": e.at_high}
            for e in p.fact_effects
        ],
        "notes": list(p.notes),
        "outside_calibrated_range": list(p.outside_calibrated_range),
    }


def _compiled(p: Forecast) -> dict[str, object] | None:
    if p.compiled is None:
        return None
    level = p.compiled
    return {
        "target": level.made.target,
        "compiler": level.made.compiler,
        "registers": level.made.registers,
        "spill_bytes": level.made.stack_bytes,
        "followed": level.made.followed,
        "before": {
            "time_ms": level.before_ms,
            "tflops": level.before_tflops,
            "clock_mhz": level.before_mhz,
            "ii_cycles": level.before_ii_cycles,
        },
        "fluid": None if level.fluid is None else {"variant": variant_text(level.fluid[0]), "time_ms": level.fluid[1]},
    }


def as_text(p: Forecast) -> str:
    """The report `tilecast predict` prints; every number is computed, and says in which unit."""
    return "\n".join((*_headline(p), "", *_why(p), "", *_units(p), "", *_waterfall(p), "", *_footing(p)))


def _headline(p: Forecast) -> list[str]:
    bound = p.clock.words(p.machine, p.regime)
    if p.clock.bound == "power" and lasting_seconds(p.regime) is not None:
        reacts = 1e3 * p.machine["power.reaction_s"]
        bound = f"on average of {p.regime}: {bound} once the limiter reacts, after {reacts:.0f} ms"
    lines = [
        f"{p.machine.title}: {p.workload.label()}",
        f"  {p.time_ms:.4g} ms   {significant(p.tflops)} TFLOP/s   {p.regime} clock",
        f"  {_interval(p)}",
        f"  SM clock   {p.clock_mhz:.0f} MHz, {bound}",
    ]
    lines += [
        f"  {name:<10} {ms:.4g} ms   {significant(tflops)} TFLOP/s at {mhz:.0f} MHz"
        for name, ms, tflops, mhz in p.other_regimes
    ]
    lines += [f"  memory     {_memory(p)}"]
    lines += [f"  kernel     {p.pipeline.name}  ({p.variant_origin})", f"  variant    {short_text(p.variant)}"]
    return lines + _level(p)


def _level(p: Forecast) -> list[str]:
    """What a forecast from machine code stands on; before compilation, nothing is said."""
    if p.compiled is None:
        return []
    level, made = p.compiled, p.compiled.made
    spills = f"{made.stack_bytes} bytes of stack" if made.stack_bytes else "no spills"
    return [
        f"  level      machine code for {made.target} by {made.compiler}, {made.registers} registers, {spills}",
        f"  simulated  {made.followed}",
        f"  before     {level.before_ms:.4g} ms   {significant(level.before_tflops)} TFLOP/s at {level.before_mhz:.0f} MHz before compilation, "
        f"{level.before_ii_cycles:.0f} cycles per iteration",
        *_fluid(p),
    ]


def _fluid(p: Forecast) -> list[str]:
    """What the search before compilation would have answered, where it chose another kernel."""
    if p.compiled is None or p.compiled.fluid is None or p.compiled.fluid[0] == p.variant:
        return []
    variant, ms = p.compiled.fluid
    return [
        f"  fluid pick {ms:.4g} ms   {significant(p.workload.flops / ms / 1e9)} TFLOP/s before compilation: {short_text(variant)}"
    ]


def _interval(p: Forecast) -> str:
    """Both kinds of doubt: what the machine's facts leave open, and how far the model was from measurements."""
    low, high = p.tflops_interval
    return f"{significant(low)} to {significant(high)} TFLOP/s by the ranges of the machine's facts alone; {p.model_error.sentence()}"


def _busiest_first(p: Forecast) -> list[tuple[str, float]]:
    return sorted(p.units.items(), key=lambda item: -item[1])


def _steps_that_show(waterfall: Sequence[WaterfallStep]) -> list[WaterfallStep]:
    """Steps that print as more than 0.0 %."""
    return [step for step in waterfall if abs(step.share) >= 0.0005]


def _memory(p: Forecast) -> str:
    """Traffic, its rate against what a copy reaches, arithmetic intensity, and the tensors against the capacity."""
    held = f"tensors {_bytes(p.workload.tensor_bytes)}"
    if p.machine.has("hbm.capacity_gb"):
        held += f" of {p.machine['hbm.capacity_gb']:g} GB"
    return (
        f"{_bytes(p.chip.hbm_bytes)} moved, {significant(p.memory_gbps)} of {p.machine['hbm.tbps_achieved'] * 1e3:.0f} GB/s, "
        f"{p.flop_per_byte:.3g} FLOP/B; {held}"
    )


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _why(p: Forecast) -> list[str]:
    answer = p.binding
    lines = ["What it waits for"]
    if answer.kind in OUTSIDE_LOOP:
        return [*lines, *_outside_loop(p)]
    lines += [
        f"  {p.ii_cycles:.0f} cycles per iteration of {p.pipeline.rows_per_cta} rows x "
        f"{p.pipeline.keys_per_iteration} keys; lower bounds: {p.bounds.res.unit} {p.bounds.res.cycles:.0f} (ResMII), "
        f"recurrence {p.bounds.rec.cycles:.0f} (RecMII)",
    ]
    if p.compiled is not None:
        lines.append(
            f"  {p.compiled.before_ii_cycles:.0f} before compilation; the rest is this machine code's order, waits and instructions"
        )
    kind, name = answer.kind, answer.name
    if kind == "unit":
        lines.append(f"  bound by the {name} unit")
    elif kind in ("memory", "power"):
        lines.append(
            f"  bound by {name}" if kind == "memory" else f"  bound by the {p.clock.limit_w:.0f} W power limit"
        )
    else:
        lines.append("  bound by a recurrence, the loop that each block must close before the next:")
    lines += [
        f"    {s.op:<10} {s.alone_cycles:6.0f} alone {s.contention_cycles:+6.0f} sharing "
        f"{s.wait_cycles:+6.0f} hand-over  after {s.why}"
        for s in p.critical
    ]
    return lines


def _outside_loop(p: Forecast) -> list[str]:
    """What holds a launch whose loop hardly counts."""
    share = {step.cause: step.share for step in p.waterfall}
    blocks = f"{p.chip.iterations / p.chip.tiles:.3g}"
    loop = f"the loop of a busy SM is {blocks} block{'' if blocks == '1' else 's'} a tile, {p.ii_cycles:.0f} cycles each in steady state"
    if p.binding.kind == "launch":
        return [f"  the launch itself: {share['launch']:.0%} of the time; {loop}"]
    if p.binding.kind == "start":
        return [f"  tiles start, fill their pipeline and end, and have little loop between; {loop}"]
    chain = " -> ".join(p.binding.chain) or "its busiest unit"
    return [
        f"  too few tiles: {p.chip.tiles} for {p.chip.slots} that the SMs can hold, more at once would take no longer",
        f"  {loop}, held by {chain}",
    ]


def _units(p: Forecast) -> list[str]:
    lines = ["Busy share of each unit in the loop (slack is what is left)"]
    for unit, share in _busiest_first(p):
        filled = round(min(1.0, share) * _BAR)
        cycles = share * p.ii_cycles
        lines.append(f"  {unit:<11}{'█' * filled}{'·' * (_BAR - filled)} {share:6.1%}   {cycles:6.0f} cycles")
    pipes = "  ".join(f"{name} {share:.1%}" for name, share in p.pipes.items())
    lines.append(f"  as a profiler counts pipes: {pipes}")
    return lines


def _waterfall(p: Forecast) -> list[str]:
    lines = ["From peak to achieved (cycles per SM at the predicted clock, share of the time)"]
    for step in _steps_that_show(p.waterfall):
        filled = max(0, round(step.share * _BAR))
        lines.append(f"  {step.cause:<58}{step.cycles:12.0f}  {step.share:6.1%}  {'█' * filled}")
    return lines


def _rests_on(p: Forecast) -> list[str]:
    """The facts whose ranges show in the interval, and how many do not."""
    lines, small = [], 0
    for effect in p.fact_effects:
        ends = [f"{end / p.tflops - 1:+.1%}" for end in (effect.at_low, effect.at_high) if end is not None]
        if effect.largest(p.tflops) < _SMALL:
            small += 1
            continue
        fact = p.machine.fact(effect.fact)
        lines.append(f"  {f'{effect.fact} = {fact.value:g} {fact.unit} ({fact.kind})':<62}{' to '.join(ends)}")
    if small:
        lines.append(
            f"  {'and ' if lines else ''}{small} fact{'s' if small > 1 else ''} of less than {_SMALL:.1%} each"
        )
    return lines or ["  no fact whose range moves it"]


def _footing(p: Forecast) -> list[str]:
    lines = ["Rests on (facts with a range, and how far it moves the forecast)", *_rests_on(p)]
    lines += [f"  NOTE {text}" for text in p.notes]
    if p.outside_calibrated_range:
        lines.append("  OUTSIDE the range the model was validated against: " + "; ".join(p.outside_calibrated_range))
    return lines


def as_html(p: Forecast) -> str:
    """Tables of the clocks, of the units and of the time, and the sentences between them, for notebooks."""
    clocks = [(p.regime, p.time_ms, p.tflops, p.clock_mhz), *p.other_regimes]
    answer = clocks_html(f"{p.machine.title}: {p.workload.label()}", clocks)
    units = html_table(
        "Busy share of each unit in the loop",
        ("unit", "busy", "cycles"),
        [(unit, f"{share:.1%}", f"{share * p.ii_cycles:.0f}") for unit, share in _busiest_first(p)],
    )
    kernel = f"Kernel: {p.pipeline.name} ({p.variant_origin}): {short_text(p.variant)}."
    outside = p.outside_calibrated_range
    warning = [f"Outside the range the model was validated against: {'; '.join(outside)}."] if outside else []
    waits = html_table(
        "The operations that set the period, in cycles",
        ("operation", "alone", "sharing", "hand-over", "after"),
        [
            (s.op, f"{s.alone_cycles:.0f}", f"{s.contention_cycles:+.0f}", f"{s.wait_cycles:+.0f}", s.why)
            for s in p.critical
        ],
    )
    why = [f"{line[2].upper()}{line[3:].rstrip(':')}." for line in _why(p)[1:] if not line.startswith("    ")]
    inside = [waits] if p.critical and p.binding.kind not in OUTSIDE_LOOP else []
    sentences = map(paragraph_html, (f"{_interval(p)}.", kernel, *p.notes, *warning, *why))
    return "".join((answer, *sentences, *inside, units, steps_html(p.waterfall)))


def clocks_html(title: str, clocks: Iterable[tuple[str, float, float, float]]) -> str:
    """A table of regimes with time in ms, TFLOP/s and clock in MHz."""
    rows = [(name, f"{ms:.4g}", significant(tflops), f"{mhz:.0f}") for name, ms, tflops, mhz in clocks]
    return html_table(title, ("clock", "time, ms", "TFLOP/s", "MHz"), rows)


def steps_html(waterfall: Sequence[WaterfallStep]) -> str:
    """A table of the waterfall."""
    rows = [(w.cause, f"{w.cycles:.0f}", f"{w.share:.1%}") for w in _steps_that_show(waterfall)]
    return html_table("From peak to achieved", ("cause", "cycles per SM", "share"), rows)


def paragraph_html(sentence: str) -> str:
    """A sentence between tables."""
    return f'<p style="font-size:12px;margin:4px 0">{html.escape(sentence)}</p>'
