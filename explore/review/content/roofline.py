"""The roofline of every unit: what the workload would reach if that unit alone had to do its share of the work."""

from __future__ import annotations

from typing import Any

from tilecast.explore.review.content.content import Ceiling
from tilecast.model.chip.launch import ChipRun
from tilecast.model.families import family_of
from tilecast.model.forecast.predict import Prediction
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import unfused

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


def ceilings(p: Prediction) -> tuple[Ceiling, ...]:
    """Every unit, L2 and HBM, lowest ceiling first, at the forecast's clock."""
    machine, seconds = p.machine, p.time_ms / 1e3
    hertz = p.clock_mhz * 1e6
    rows = []
    demand = p.pipeline.demand()
    for unit, busy_cycles in busy_cycles_per_sm(p).items():
        time = busy_cycles / hertz
        rows.append(
            Ceiling(
                unit,
                _about(unit, machine, p.workload.dtype),
                demand.get(unit),
                time / seconds,
                p.workload.flops / time / 1e12,
            )
        )
    rows += _memory(p, p.chip, seconds, hertz)
    return tuple(sorted(rows, key=lambda row: (row.tflops, row.unit)))


def busy_cycles_per_sm(p: Prediction) -> dict[str, float]:
    """Cycles of the whole launch in which each unit of an average SM is busy."""
    sms = p.machine["chip.sm_count"]
    totals: dict[str, float] = {}
    variant: Any = p.variant
    if not family_of(variant).fused:
        for part in unfused.kernels(p.workload, variant, p.machine):
            for unit, cycles in part.pipeline.demand().items():
                totals[unit] = totals.get(unit, 0.0) + cycles * part.iterations
    else:
        # Demand is that of all CTAs of an SM; a pair of CTAs does one tile's iteration on both of its SMs.
        each = p.chip.iterations / p.pipeline.ctas_per_sm * p.pipeline.cta_group
        totals = {unit: cycles * each for unit, cycles in p.pipeline.demand().items()}
    return {unit: cycles / sms for unit, cycles in totals.items() if cycles > 0}


def _about(unit: str, machine: Machine, dtype: str) -> str:
    key, text = UNIT_FACTS.get(unit, ("", unit))
    key = key.format(dtype=dtype)
    if unit == "cvt" and dtype == "fp8" and machine.has("cvt.f32x2_to_fp8x2_per_clk"):
        key = "cvt.f32x2_to_fp8x2_per_clk"
    return f"{text}, {machine[key]:g} {machine.fact(key).unit}" if machine.has(key) else text


def _memory(p: Prediction, chip: ChipRun, seconds: float, hertz: float) -> list[Ceiling]:
    m = p.machine
    rows = []
    if chip.l2_floor_cycles > 0:
        time = chip.l2_floor_cycles / hertz
        text = f"L2 cache, {chip.l2_bytes / 1e9:.3g} GB at {m['l2.bytes_per_clk_per_sm']:g} B/clk/SM"
        rows.append(Ceiling("L2", text, None, time / seconds, p.workload.flops / time / 1e12))
    time = chip.hbm_bytes / (m["hbm.tbps_achieved"] * 1e12)
    text = f"memory, {chip.hbm_bytes / 1e9:.3g} GB at {m['hbm.tbps_achieved']:g} TB/s"
    rows.append(Ceiling("HBM", text, None, time / seconds, p.workload.flops / time / 1e12))
    return rows
