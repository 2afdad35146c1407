"""A machine as text: one SM drawn with its numbers, then every fact with unit, kind, range and source."""

from __future__ import annotations

from tilecast.base.words import folded
from tilecast.model.machine.machine import Fact, Machine

_WIDTH = 100


def describe_machine(machine: Machine, width: int = 120) -> str:
    """The drawing (100 columns; left out where ``width`` is less) and the facts in lines of ``width`` characters."""
    drawing = draw_sm(machine) if width >= _WIDTH else draw_sm(machine)[-3:]
    return "\n".join((_title(machine), "", *drawing, "", *_facts(machine, width)))


def _title(m: Machine) -> str:
    return f"{m.title}  ({m.arch}, {m['chip.sm_count']:.0f} SMs, {m['chip.clock_max_mhz']:.0f} MHz max, {m['chip.tdp_w']:.0f} W)"


def _box(text: str, inner: int = _WIDTH - 4) -> str:
    return f"│ {text:<{inner}} │"


def _rule(left: str, right: str, label: str = "") -> str:
    return left + (f"─ {label} " if label else "").ljust(_WIDTH - 2, "─") + right


def _cells(rows: list[list[str]]) -> list[str]:
    """Four sub-partitions side by side."""
    width = (_WIDTH - 4 - 6) // 4 - 2
    top = "  ".join("┌" + "─" * width + "┐" for _ in range(4))
    bottom = "  ".join("└" + "─" * width + "┘" for _ in range(4))
    out = [_box(top)]
    for line in rows:
        out.append(_box("  ".join(f"│{cell:^{width}}│" for cell in line)))
    return [*out, _box(bottom)]


def draw_sm(m: Machine) -> list[str]:
    """One SM as boxes: sub-partitions, matrix unit, tensor memory, shared memory, copy engine, then L2 and memory."""
    part = [
        f"{m['issue.warp_inst_per_clk'] / 4:g} warp inst/clk",
        f"FMA {m['fma.lanes'] / 4:g}" + (" (f32x2)" if m["fma.packed_f32x2"] else ""),
        f"ALU {m['alu.lanes'] / 4:g}, {m['alu.minmax_inputs']:g}-input max",
        f"MUFU ex2 {m['mufu.ex2_per_clk'] / 4:g}/clk",
        f"{m['reg.file_bytes'] / 4096:.0f} KB registers",
    ]
    rates = [
        f"{d} {m[f'tensor.{d}_flop_per_clk']:.0f}" for d in ("bf16", "fp8", "fp4") if m.has(f"tensor.{d}_flop_per_clk")
    ]
    homes = {
        "tcgen05": "A in SMEM or TMEM, B in SMEM, D in TMEM; 1 or 2 CTAs",
        "wgmma": "A in SMEM or registers, B in SMEM, D in registers",
        "mma_sync": "A, B, D in registers",
    }[m.tensor_kind]
    lines = [_rule("┌", "┐", "one SM (per clock)"), *_cells([[row] * 4 for row in part])]
    lines += [_box(f"tensor core, {m.tensor_kind}: {', '.join(rates)} FLOP/clk"), _box(f"  {homes}")]
    if m.has("tmem.columns"):
        size = m["tmem.columns"] * 512 / 1024
        lines.append(
            _box(f"tensor memory {size:.0f} KB ({m['tmem.columns']:.0f} columns): read {m['tmem.read_bytes_per_clk']:.0f} B, "
                 f"write {m['tmem.write_bytes_per_clk']:.0f} B, load {m['tmem.load_latency_cycles']:.0f} clk under load")
        )  # fmt: skip
    if m.has("regs.mma_share"):
        lines.append(
            _box(f"register ports: a running wgmma takes {m['regs.mma_share']:.0%}, softmax arithmetic the rest")
        )
    lines += [
        _box(f"shared memory {m['smem.per_sm_bytes'] / 1024:.0f} KB ({m['smem.per_cta_bytes'] / 1024:.0f} KB a CTA): "
             f"{m['smem.bytes_per_clk']:.0f} B, {m['smem.latency_cycles']:.0f} clk"),
        _box(f"copies {m['tma.bytes_per_clk']:.0f} B, {m['tma.latency_l2_cycles']:.0f} clk from L2; barrier hand-over "
             f"{m['sync.mbarrier_roundtrip_cycles']:.0f} clk"),
        _rule("└", "┘"),
        f"  L2 {m['l2.bytes'] / 1e6:.4g} MB: {m['l2.bytes_per_clk_per_sm']:g} B/clk/SM, {m['l2.latency_cycles']:.0f} clk",
        f"  memory {m['hbm.tbps_achieved']:g} TB/s achieved",
        f"  matrix FLOP per exponential (bf16): {m['tensor.bf16_flop_per_clk'] / m['mufu.ex2_per_clk']:.0f}",
    ]  # fmt: skip
    return lines


def _facts(m: Machine, width: int) -> list[str]:
    lines = [f"{'fact':<32}{'value':>9}  {'unit':<15}{'range':<16}{'kind':<9} source"]
    section = ""
    for key, fact in sorted(m.facts.items()):
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            lines.append("")
        start = f"{key:<32}{fact.value:>9g}  {fact.unit:<15}{_range(fact):<16}{fact.kind:<9} "
        # Sources begin under each other where there is room, below their fact where there is not.
        if width - len(start) >= 24:
            lines.append(folded(start + _source(fact), width, len(start)))
        else:
            lines += [start.rstrip(), folded(f"    {_source(fact)}", width, 4)]
    return lines


def _range(fact: Fact) -> str:
    if fact.low is None and fact.high is None:
        return ""
    low = fact.value if fact.low is None else fact.low
    high = fact.value if fact.high is None else fact.high
    return f"{low:g} to {high:g}"


def _source(fact: Fact) -> str:
    via = f" [from {fact.inherited_from}]" if fact.inherited_from else ""
    note = f" ({fact.note})" if fact.note else ""
    return fact.source + note + via
