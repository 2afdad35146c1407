"""The roofline of every unit: what the workload would reach if that unit alone had to do its share of the work."""

from __future__ import annotations

from collections.abc import Iterable

from tilecast.explore.review.content.content import Ceiling
from tilecast.model.forecast.answer import Explained
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline

#: The loops of a pass, each with the iterations that all SMs do of it together.
Work = Iterable[tuple[Pipeline, float]]

#: Fact that says how fast a unit is, and what the unit is.
UNIT_FACTS: dict[str, tuple[str, str]] = {
    "tensor": ("tensor.{dtype}_flop_per_clk", "tensor cores"),
    "mufu": ("mufu.ex2_per_clk", "exponential unit"),
    "fma": ("fma.lanes", "FP32 pipe"),
    "alu": ("alu.lanes", "integer and min/max pipe"),
    "cvt": ("cvt.f32x2_to_bf16x2_per_clk", "conversion to 16 or 8 bit"),
    "issue": ("issue.warp_inst_per_clk", "warp schedulers"),
    "regs": ("regs.mma_share", "register ports that a running matrix product leaves"),
    "smem": ("smem.bytes_per_clk", "shared memory port"),
    "tmem_read": ("tmem.read_bytes_per_clk", "tensor memory to registers"),
    "tmem_write": ("tmem.write_bytes_per_clk", "registers to tensor memory"),
    "tma": ("tma.bytes_per_clk", "copy engine"),
}


def ceilings(p: Explained, work: Work) -> tuple[Ceiling, ...]:
    """Every unit, L2 and HBM, lowest ceiling first, at the forecast's clock; ``work`` is all that the pass does."""
    machine, seconds = p.machine, p.time_ms / 1e3
    hertz = p.clock.mhz * 1e6
    rows = []
    demand = p.main.pipeline.demand()
    for unit, busy_cycles in busy_cycles_per_sm(work, machine).items():
        time = busy_cycles / hertz
        rows.append(
            Ceiling(
                unit, _about(unit, machine, p.workload.dtype), demand.get(unit), time / seconds, p.flops / time / 1e12
            )
        )
    rows += _memory(p, seconds, hertz)
    return tuple(sorted(rows, key=lambda row: (row.tflops, row.unit)))


def busy_cycles_per_sm(work: Work, machine: Machine) -> dict[str, float]:
    """Cycles of the whole pass in which each unit of an average SM is busy."""
    totals: dict[str, float] = {}
    for pipeline, iterations in work:
        for unit, cycles in pipeline.demand().items():
            totals[unit] = totals.get(unit, 0.0) + cycles * iterations
    return {unit: cycles / machine["chip.sm_count"] for unit, cycles in totals.items() if cycles > 0}


def loop_work(p: Explained) -> list[tuple[Pipeline, float]]:
    """The work of the kernels of a pass."""
    # Demand is that of all CTAs of an SM; a pair of CTAs does one tile's iteration on both of its SMs.
    return [(k.pipeline, k.chip.iterations / k.pipeline.ctas_per_sm * k.pipeline.cta_group) for k in p.kernels]


def _about(unit: str, machine: Machine, dtype: str) -> str:
    key, text = UNIT_FACTS.get(unit, ("", unit))
    key = key.format(dtype=dtype)
    if unit == "cvt" and dtype == "fp8" and machine.has("cvt.f32x2_to_fp8x2_per_clk"):
        key = "cvt.f32x2_to_fp8x2_per_clk"
    return f"{text}, {machine[key]:g} {machine.fact(key).unit}" if machine.has(key) else text


def _memory(p: Explained, seconds: float, hertz: float) -> list[Ceiling]:
    m = p.machine
    rows = []
    floor, l2 = (sum(getattr(k.chip, name) for k in p.kernels) for name in ("l2_floor_cycles", "l2_bytes"))
    if floor > 0:
        time = floor / hertz
        rate = m["l2.bytes_per_clk_per_sm"]
        text = f"L2 cache, {l2 / 1e9:.3g} GB at {rate:g} B/clk/SM"
        mean = l2 / floor / m["chip.sm_count"]
        if mean < 0.99 * rate:
            text += f", sums in it slower: {mean:.3g} in the mean"
        rows.append(Ceiling("L2", text, None, time / seconds, p.flops / time / 1e12))
    time = p.hbm_bytes / (m["hbm.tbps_achieved"] * 1e12)
    text = f"memory, {p.hbm_bytes / 1e9:.3g} GB at {m['hbm.tbps_achieved']:g} TB/s"
    rows.append(Ceiling("HBM", text, None, time / seconds, p.flops / time / 1e12))
    return rows
