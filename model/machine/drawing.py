"""A machine as text: one SM drawn with its numbers, then every fact with unit, kind, range and source."""

from __future__ import annotations

from tilecast.model.machine.machine import Fact, Machine

_WIDTH = 100


def describe_machine(machine: Machine) -> str:
    """The drawing and the table, at most 110 columns wide in the drawing."""
    return "\n".join((_title(machine), "", *draw_sm(machine), "", *_facts(machine)))


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


def _facts(m: Machine) -> list[str]:
    lines = [f"{'fact':<34}{'value':>12}  {'unit':<20}{'range':<18}{'kind':<10}source"]
    section = ""
    for key, fact in sorted(m.facts.items()):
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            lines.append("")
        lines.append(f"{key:<34}{fact.value:>12g}  {fact.unit:<20}{_range(fact):<18}{fact.kind:<10}{_source(fact)}")
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
