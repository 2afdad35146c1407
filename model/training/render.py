"""The forecast of a backward pass, and of both passes, as text and as dictionaries with stable keys.  No arithmetic of its own."""

from __future__ import annotations

from tilecast.base.html_table import html_table
from tilecast.base.words import significant
from tilecast.model.forecast.answer import KernelAnswer
from tilecast.model.forecast.binding import OUTSIDE_LOOP
from tilecast.model.kernel.variant import variant_text
from tilecast.model.training.answer import BackwardForecast, TrainingForecast
from tilecast.model.training.evaluate import FLOP_RATIO

_BAR = 24
#: Effects of facts below this are counted, not listed; units of a loop that are listed.
_SMALL, _UNITS = 0.005, 6


def as_dict(p: BackwardForecast) -> dict[str, object]:
    """Keys documented in docs/json.md."""
    run = p.run
    return {
        "pass": "bwd",
        "machine": p.machine.name,
        "workload": p.workload.as_dict(),
        "variant": variant_text(p.variant),
        "variant_origin": p.variant_origin,
        "written": not p.unwritten,
        "regime": p.regime,
        "time_ms": p.time_ms,
        "tflops": p.tflops,
        "tflops_interval": list(p.tflops_interval) if p.fact_effects else [],
        "flops_per_forward_flop": FLOP_RATIO,
        "clock_mhz": run.clock.mhz,
        "clock_bound": run.clock.bound,
        "power_w": run.clock.power_w,
        "other_regimes": [
            {"regime": name, "time_ms": ms, "tflops": tflops, "clock_mhz": mhz}
            for name, ms, tflops, mhz in p.other_regimes
        ],
        "binding": {"kernel": p.main.name, **p.main.binding.as_dict()},
        "launches": [
            {"name": one.kernel.name, "time_ms": one.seconds * 1e3, "hbm_bytes": one.hbm_bytes, "launch_ms": one.launch_seconds * 1e3}
            for one in run.launches
        ],
        "kernels": [_kernel_dict(k) for k in p.kernels],
        "hbm_bytes": run.hbm_bytes,
        "waterfall": [{"cause": w.cause, "cycles": w.cycles, "share": w.share} for w in p.waterfall],
        "fact_effects": [
            {"fact": e.fact, "kind": p.machine.fact(e.fact).kind, "tflops_low": e.at_low, "tflops_high": e.at_high}
            for e in p.fact_effects
        ],
    }  # fmt: skip


def _kernel_dict(k: KernelAnswer) -> dict[str, object]:
    p = k.trace.pipeline
    return {
        "name": k.name,
        "time_ms": k.time_ms,
        "pipeline": p.name,
        "rows_per_cta": p.rows_per_cta,
        "rows_per_iteration": p.keys_per_iteration,
        "ctas_per_sm": p.ctas_per_sm,
        "ii_cycles": k.trace.ii_cycles,
        "res_mii": {"cycles": k.bounds.res.cycles, "unit": k.bounds.res.unit},
        "rec_mii": {"cycles": k.bounds.rec.cycles, "ops": list(k.bounds.rec.ops_on_cycle)},
        "units": k.trace.unit_shares(),
        "binding": k.binding.as_dict(),
        "critical_recurrence": [
            {
                "op": s.op, "after": s.why, "alone_cycles": s.alone_cycles, "contention_cycles": s.contention_cycles,
                "wait_cycles": s.wait_cycles,
            }
            for s in k.critical
        ],
        "tiles": k.chip.tiles,
        "l2_bytes": k.chip.l2_bytes,
        "hbm_bytes": k.chip.hbm_bytes,
    }  # fmt: skip


def as_text(p: BackwardForecast) -> str:
    """The report of `tilecast predict --pass bwd`."""
    lines = [*_headline(p), "", *_launches(p)]
    for kernel in p.kernels:
        lines += ["", *_why(kernel, p.run.clock.limit_w)]
    return "\n".join((*lines, "", *_waterfall(p), "", *_rests_on(p)))


def as_html(p: BackwardForecast) -> str:
    """Tables of the clocks, the launches and the time, for notebooks."""
    from tilecast.model.forecast.render import clocks_html, paragraph_html, steps_html

    launches = html_table(
        "Launches",
        ("kernel", "time, ms", "share", "MB to and from memory"),
        [
            (one.kernel.name, f"{one.seconds * 1e3:.4g}", f"{one.seconds / p.run.seconds:.1%}", f"{one.hbm_bytes / 1e6:.0f}")
            for one in p.run.launches
        ],
    )  # fmt: skip
    clocks = [(p.regime, p.time_ms, p.tflops, p.clock_mhz), *p.other_regimes]
    kernel = f"Kernels: {variant_text(p.variant)} ({p.variant_origin}; before compilation)."
    return "".join(
        (
            clocks_html(f"{p.machine.title}: {p.subject}", clocks),
            paragraph_html(kernel),
            launches,
            steps_html(p.waterfall),
        )
    )


def _headline(p: BackwardForecast) -> list[str]:
    clock = p.run.clock
    held = clock.words(p.machine, p.regime)
    lines = [
        f"{p.machine.title}: backward pass of {p.workload.label()}",
        f"  {p.time_ms:.4g} ms   {significant(p.tflops)} TFLOP/s ({FLOP_RATIO:g} times the forward's FLOP)   {p.regime} clock",
    ]
    if p.fact_effects:
        low, high = p.tflops_interval
        lines.append(f"  {significant(low)} to {significant(high)} TFLOP/s by the ranges of the machine's facts alone")
    lines.append(f"  SM clock   {clock.mhz:.0f} MHz, {held}")
    lines += [
        f"  {name:<10} {ms:.4g} ms   {significant(tflops)} TFLOP/s at {mhz:.0f} MHz"
        for name, ms, tflops, mhz in p.other_regimes
    ]
    lines.append(f"  variant    {variant_text(p.variant)}")
    lines.append(f"             {p.variant_origin}; before compilation")
    return lines


def _launches(p: BackwardForecast) -> list[str]:
    lines = ["Launches (each with what it takes to start one)"]
    for one in p.run.launches:
        share = one.seconds / p.run.seconds
        bar = "█" * round(share * _BAR)
        lines.append(
            f"  {one.kernel.name:<18}{one.seconds * 1e3:9.4g} ms  {share:6.1%}  {one.hbm_bytes / 1e6:8.0f} MB to and from memory  {bar}".rstrip()
        )
    return lines


def _why(k: KernelAnswer, limit_w: float) -> list[str]:
    p, bound = k.trace.pipeline, k.binding
    moving = "queries" if "key" in k.name or "value" in k.name or k.name == "gradients" else "keys"
    still = "keys" if moving == "queries" else "queries"
    lines = [
        f"What {k.name} waits for ({p.name})",
        f"  {k.trace.ii_cycles:.0f} cycles per step of {p.rows_per_cta} {still} x {p.keys_per_iteration} {moving}"
        + (f", {p.ctas_per_sm} programs on an SM" if p.ctas_per_sm > 1 else "")
        + f"; lower bounds: {k.bounds.res.unit} {k.bounds.res.cycles:.0f} (ResMII), recurrence {k.bounds.rec.cycles:.0f} (RecMII)",
    ]
    if bound.kind == "unit":
        lines.append(f"  bound by the {bound.name} unit")
    elif bound.kind in ("memory", *OUTSIDE_LOOP):
        lines.append(f"  bound by {bound.name}")
    elif bound.kind == "power":
        lines.append(f"  bound by the {limit_w:.0f} W power limit")
    else:
        lines.append("  bound by a recurrence, the loop that each step must close before the next:")
        lines += [
            f"    {s.op:<10} {s.alone_cycles:6.0f} alone {s.contention_cycles:+6.0f} sharing "
            f"{s.wait_cycles:+6.0f} hand-over  after {s.why}"
            for s in k.critical
        ]
    busy = sorted(k.trace.unit_shares().items(), key=lambda item: -item[1])[:_UNITS]
    lines.append("  busy: " + ", ".join(f"{unit} {share:.0%}" for unit, share in busy))
    return lines


def _waterfall(p: BackwardForecast) -> list[str]:
    lines = ["From peak to achieved (cycles per SM at the predicted clock, share of the time)"]
    for step in p.waterfall:
        if abs(step.share) >= 0.0005:
            filled = max(0, round(step.share * _BAR))
            lines.append(f"  {step.cause:<72}{step.cycles:12.0f}  {step.share:6.1%}  {'█' * filled}".rstrip())
    return lines


def _rests_on(p: BackwardForecast) -> list[str]:
    lines, small = ["Rests on (facts with a range, and how far it moves the forecast)"], 0
    for effect in p.fact_effects:
        if effect.largest(p.tflops) < _SMALL:
            small += 1
            continue
        ends = [f"{end / p.tflops - 1:+.1%}" for end in (effect.at_low, effect.at_high) if end is not None]
        fact = p.machine.fact(effect.fact)
        lines.append(f"  {f'{effect.fact} = {fact.value:g} {fact.unit} ({fact.kind})':<62}{' to '.join(ends)}")
    if small:
        lines.append(f"  and {small} fact{'s' if small > 1 else ''} of less than {_SMALL:.1%} each")
    if p.unwritten:
        lines.append(f"  NOTE forecast only: {p.unwritten}")
    return lines


def both_as_dict(p: TrainingForecast) -> dict[str, object]:
    """Keys documented in docs/json.md."""
    return {
        "pass": "both",
        "machine": p.backward.machine.name,
        "workload": p.backward.workload.as_dict(),
        "time_ms": p.time_ms,
        "tflops": p.tflops,
        "forward": _forward_dict(p),
        "backward": as_dict(p.backward),
    }


def _forward_dict(p: TrainingForecast) -> dict[str, object]:
    from tilecast.model.forecast.render import as_dict as forward_as_dict

    return forward_as_dict(p.forward)


def both_as_html(p: TrainingForecast) -> str:
    """Both passes as one answer, then the tables of each, for notebooks."""
    from tilecast.model.forecast.render import as_html as forward_as_html
    from tilecast.model.forecast.render import paragraph_html

    both = f"Forward and backward: {p.time_ms:.4g} ms, {significant(p.tflops)} TFLOP/s."
    return paragraph_html(both) + forward_as_html(p.forward) + as_html(p.backward)


def both_as_text(p: TrainingForecast) -> str:
    """The report of `tilecast predict --pass both`."""
    from tilecast.model.forecast.render import as_text as forward_as_text

    first, then = p.forward, p.backward
    head = [
        f"{then.machine.title}: forward and backward pass of {then.workload.label()}",
        f"  {p.time_ms:.4g} ms   {significant(p.tflops)} TFLOP/s   forward {first.time_ms:.4g} ms, backward {then.time_ms:.4g} ms, "
        f"{then.time_ms / first.time_ms:.2f} times as long",
    ]
    return "\n".join((*head, "", forward_as_text(first), "", as_text(then)))
