"""Plain-text tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilecast.model.forecast.predict import Prediction
    from tilecast.model.machine.machine import Machine


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned: text left, numbers right."""
    widths = [
        max(len(header[i]), *(len(row[i]) for row in rows)) if rows else len(header[i]) for i in range(len(header))
    ]
    numeric = [all(_is_number(row[i]) for row in rows) and bool(rows) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        parts = (c.rjust(w) if right else c.ljust(w) for c, w, right in zip(cells, widths, numeric, strict=True))
        return "  ".join(parts).rstrip()

    return "\n".join((line(header), line(["-" * w for w in widths]), *(line(row) for row in rows)))


def _is_number(text: str) -> bool:
    try:
        float(text.rstrip("%").replace(",", "") or "x")
    except ValueError:
        return text in ("", "-")
    return True


def shapes_table(answers: Sequence[Prediction]) -> str:
    """One line a shape."""
    rows = []
    for a in answers:
        w = a.workload
        rows.append(
            [w.label(), f"{a.time_ms:.4g}", f"{a.tflops:.0f}", f"{a.tflops_interval[0]:.0f}-{a.tflops_interval[1]:.0f}",
             f"{a.clock_mhz:.0f}", str(a.binding.as_dict()["name"]), a.pipeline.name]
        )  # fmt: skip
    return table(["shape", "time ms", "TFLOP/s", "interval", "MHz", "bound by", "kernel"], rows)


def machines_table() -> str:
    """All shipped machines with the numbers people compare."""
    from tilecast.model.machine.machine import load_machine, machine_names

    rows = []
    for name in machine_names():
        m = load_machine(name)
        peak = m["tensor.bf16_flop_per_clk"] * m["chip.sm_count"] * m["chip.clock_max_mhz"] / 1e6
        fp8 = f"{m['tensor.fp8_flop_per_clk']:.0f}" if m.has("tensor.fp8_flop_per_clk") else "-"
        rows.append(
            [name, m.title, m.arch, f"{m['chip.sm_count']:.0f}", f"{m['chip.clock_max_mhz']:.0f}", f"{m['chip.tdp_w']:.0f}",
             f"{m['tensor.bf16_flop_per_clk']:.0f}", fp8, f"{m['mufu.ex2_per_clk']:.0f}", f"{peak:.0f}",
             f"{m['hbm.tbps_achieved']:.3g}"]
        )  # fmt: skip
    header = [
        "name",
        "machine",
        "arch",
        "SMs",
        "MHz max",
        "W",
        "bf16 FLOP/clk/SM",
        "fp8",
        "ex2/clk/SM",
        "bf16 TFLOP/s at max",
        "TB/s",
    ]
    return table(header, rows)


def presets_table() -> str:
    """All presets."""
    from tilecast.model.kernel.presets import presets

    rows = [
        [p.name, str(p.heads_q), str(p.heads_kv), str(p.head_dim_qk), str(p.head_dim_v), str(p.seqlen),
         p.mask if p.window is None else f"window {p.window[0]},{p.window[1]}", p.source]
        for p in presets().values()
    ]  # fmt: skip
    return table(["preset", "heads", "kv", "d_qk", "d_v", "seqlen", "mask", "source"], rows)


def variants_table(machine: Machine) -> str:
    """Knobs of every family with their defaults; the machine's own family is marked."""
    from tilecast.model.families import FAMILIES, native_family

    rows = []
    for family, record in FAMILIES.items():
        mark = f"{family} (own family of {machine.name})" if family == native_family(machine).name else family
        default = record.variant()
        rows += [[mark, f.name, str(getattr(default, f.name)).lower()] for f in fields(default) if f.name != "family"]
    return table(["family", "knob", "default"], rows)
