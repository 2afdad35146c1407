"""A GEMM forecast as text and as a dictionary with stable keys; the gains of the second accumulator as rows."""

from __future__ import annotations

from collections.abc import Sequence

from tilecast.base.words import significant
from tilecast.model.forecast.answer import WaterfallStep
from tilecast.model.gemm.answer import BufferGain, GemmForecast
from tilecast.model.gemm.variant import GemmVariant, gemm_variant_text

_BAR = 24
#: Facts that are listed.
_SHOWN = 4
#: What every answer says of itself.
#: Kernels and mean errors of `tilecast validate gemm`, before compilation and from machine code (a test compares).
MEASURED_KERNELS, MEASURED_ERROR, MEASURED_CODE_ERROR = 1530, 0.047, 0.044
#: The same of kernels that share k, before compilation (h200_gemm_by_parts.csv).
PARTED_KERNELS, PARTED_ERROR = 117, 0.067


def as_dict(f: GemmForecast) -> dict[str, object]:
    """Keys documented in docs/json.md."""
    run, tiling = f.run, f.run.own.loop.tiling
    return {
        "machine": f.machine.name,
        "gemm": f.gemm.as_dict(),
        "variant": gemm_variant_text(f.variant),
        "variant_origin": f.origin,
        "pipeline": run.own.loop.pipeline.name,
        "regime": f.regime,
        "level": "fluid" if f.code is None else "code",
        "time_ms": f.time_ms,
        "tflops": run.tflops,
        "tflops_interval": list(f.tflops_interval),
        "memory_gbps": run.gbps,
        "clock_mhz": run.clock.mhz,
        "clock_bound": run.clock.bound,
        "power_w": run.clock.power_w,
        "binding": {"kind": f.binding[0], "name": f.binding[1]},
        "apart_ms": run.apart_seconds * 1e3,
        "tile_cycles": run.own.tile_cycles,
        "in_step_tile_cycles": run.in_step.tile_cycles,
        "res_mii": {"cycles": f.bounds.res.cycles, "unit": f.bounds.res.unit},
        "rec_mii": {"cycles": f.bounds.rec.cycles, "ops": list(f.bounds.rec.ops_on_cycle)},
        "units": run.own.trace.unit_shares(),
        "tiles": tiling.tiles,
        "tiles_of_busiest_sm": tiling.most,
        "l2_bytes": tiling.l2_bytes,
        "hbm_bytes": tiling.hbm_bytes,
        "waterfall": [{"cause": w.cause, "cycles": w.cycles, "share": w.share} for w in f.waterfall],
        "fact_effects": [
            {"fact": e.fact, "kind": f.machine.fact(e.fact).kind, "tflops_low": e.at_low, "tflops_high": e.at_high}
            for e in f.fact_effects
        ],
        "notes": [checked_note(f)],
        **_code_dict(f),
    }


def _code_dict(f: GemmForecast) -> dict[str, object]:
    if f.code is None:
        return {}
    made = f.code
    compiled = {"target": made.target, "compiler": made.compiler, "registers": made.registers, "stack_bytes": made.stack_bytes}  # fmt: skip
    return {"before_ms": f.before_ms, "compiled": compiled}


def checked_note(f: GemmForecast) -> str:
    """What forecasts of the kernel's family were held against."""
    if f.variant.family != "gemm_hopper":
        return f"no forecast of family {f.variant.family} has been validated against a measurement yet"
    if f.variant.parts > 1:
        return f"forecasts of {PARTED_KERNELS} kernels that share k, on an H200, were off by {PARTED_ERROR:.1%} in the mean before compilation"
    off, how = (MEASURED_ERROR, "before compilation") if f.code is None else (MEASURED_CODE_ERROR, "from machine code")
    return f"forecasts of {MEASURED_KERNELS} kernels of this family in short runs on an H200 were off by {off:.1%} in the mean {how} (tilecast validate gemm)"


def as_html(f: GemmForecast) -> str:
    """Tables of the clock and of the time, and the sentences between them, for notebooks."""
    from tilecast.model.forecast.render import clocks_html, paragraph_html, steps_html

    answer = (f.regime, f.time_ms, f.run.tflops, f.run.clock.mhz)
    kernel = (
        f"Kernel: {f.run.own.loop.pipeline.name} ({f.origin}): {gemm_variant_text(f.variant)}; bound by {f.binding[1]}."
    )
    return "".join(
        (
            clocks_html(f"{f.machine.title}: {f.gemm.label()}", [answer]),
            paragraph_html(kernel),
            paragraph_html(f"{checked_note(f)}."),
            steps_html(f.waterfall),
        )
    )


def as_text(f: GemmForecast) -> str:
    """The report `tilecast gemm` prints."""
    run, clock = f.run, f.run.clock
    loop, tiling = run.own.loop, run.own.loop.tiling
    held = {
        "power": f"held by the {clock.limit_w:.0f} W limit",
        "boost": f"top clock, {clock.power_w:.0f} W of {clock.limit_w:.0f} W",
        "fixed": f"fixed by you, would draw {clock.power_w:.0f} W",
    }[clock.bound]
    shares = sorted(run.own.trace.unit_shares().items(), key=lambda item: -item[1])[:5]
    lines = [
        f"{f.machine.title}: {f.gemm.label()}",
        f"  {f.time_ms:.4g} ms   {significant(run.tflops)} TFLOP/s   {run.gbps:.0f} of {f.machine['hbm.tbps_achieved'] * 1e3:.0f} GB/s   {f.regime} clock",
        *_interval(f),
        f"  apart      {run.apart_seconds * 1e3:.4g} ms if SMs that wait left their share of the memory to others",
        f"  SM clock   {clock.mhz:.0f} MHz, {held}",
        f"  kernel     {loop.pipeline.name}  ({f.origin})",
        f"  variant    {knobs(f.variant)}",
        *_level(f),
        f"  tiles      {tiling.tiles} of {tiling.steps} k-steps, {tiling.most} on the busiest of "
        f"{tiling.slots // loop.pipeline.ctas_per_sm} {'pairs of SMs' if loop.pipeline.cta_group == 2 else 'SMs'}",
        "",
        f"Bound by {f.binding[1]} ({f.binding[0]})",
        f"  a tile takes an SM {run.own.tile_cycles:.0f} cycles, the memory {_memory_cycles(f):.0f}; busy in the SM's own pace: "
        f"{', '.join(f'{unit} {share:.0%}' for unit, share in shares)}",
        "",
        "From peak to achieved (cycles per SM at the predicted clock, share of the time)",
        *(_step(step) for step in f.waterfall if step.share >= 0.0005),
        "",
        *_rests_on(f),
        f"Note: {checked_note(f)}.",
    ]
    return "\n".join(lines)


def _level(f: GemmForecast) -> list[str]:
    """What a forecast from machine code is from."""
    if f.code is None:
        return []
    spills = f"{f.code.stack_bytes} bytes of stack" if f.code.stack_bytes else "no spills"
    return [
        f"  level      machine code for {f.code.target} by {f.code.compiler}, {f.code.registers} registers, {spills}",
        f"  before     {f.before_ms:.4g} ms before compilation",
    ]


def _interval(f: GemmForecast) -> list[str]:
    if not f.tflops_interval:
        return []
    low, high = f.tflops_interval
    return [f"  {significant(low)} to {significant(high)} TFLOP/s by the ranges of the machine's facts"]


def _rests_on(f: GemmForecast) -> list[str]:
    """The facts that move the forecast most."""
    lines = []
    for e in f.fact_effects[:_SHOWN]:
        fact = f.machine.fact(e.fact)
        ends = " to ".join(significant(end) for end in (e.at_low, e.at_high) if end is not None)
        lines.append(f"  {e.fact} = {fact.value:g} {fact.unit} ({fact.kind}): {ends} TFLOP/s at the end of its range")
    return ["Rests on", *lines, ""] if lines else []


def _memory_cycles(f: GemmForecast) -> float:
    """Cycles an SM has for a tile while the memory moves what its tiles need."""
    tiling = f.run.own.loop.tiling
    return f.run.hbm_seconds * f.run.clock.mhz * 1e6 * tiling.slots / f.run.own.loop.pipeline.ctas_per_sm / tiling.tiles


def _step(step: WaterfallStep) -> str:
    filled = max(0, round(step.share * _BAR))
    return f"  {step.cause:<76}{step.cycles:12.0f}  {step.share:6.1%}  {'█' * filled}".rstrip()


def knobs(v: GemmVariant) -> str:
    """The knobs of a variant that its family has."""
    return gemm_variant_text(v).partition(",")[2]


#: Columns of the table of gains.
GAIN_COLUMNS = ("k", "best with two, ms", "best with one, ms", "gain", "by that knob alone", "with two, bound by")


def gain_rows(gains: Sequence[BufferGain]) -> list[list[str]]:
    """One row a k; a gain is how many times as long one accumulator takes."""
    return [
        [
            f"{g.k}", f"{g.two_ms:.4g}", f"{g.one_ms:.4g}", f"{g.gain:.3f}x",
            "-" if g.knob_gain is None else f"{g.knob_gain:.3f}x", g.binding[1],
        ]
        for g in gains
    ]  # fmt: skip


def gain_dicts(gains: Sequence[BufferGain]) -> list[dict[str, object]]:
    """The same as values."""
    return [
        {
            "k": g.k, "two_ms": g.two_ms, "one_ms": g.one_ms, "gain": g.gain, "same_tile_ms": g.same_tile_ms,
            "same_tile_two_ms": g.same_tile_two_ms,
            "two": gemm_variant_text(g.two), "one": gemm_variant_text(g.one), "binding": g.binding[1],
        }
        for g in gains
    ]  # fmt: skip
