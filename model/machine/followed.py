"""Which facts of a machine a forecast from machine code does not follow.

A compiled loop has its registers, stall counts and order from the compiler, and what products do to the instructions beside
them is described by other facts than before compilation (`mma_load`).  A what-if of one of these facts is therefore forecast
before compilation: from machine code it would seem to change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilecast.model.machine.machine import Machine

NOT_FOLLOWED = frozenset(
    {
        "alu.latency_cycles", "chip.clock_rated_mhz", "cvt.f32x2_to_bf16x2_per_clk", "cvt.f32x2_to_fp8x2_per_clk",
        "fma.fresh_sources_cycles", "fma.latency_cycles", "issue.one_warp_exposed_share", "issue.warp_inst_per_clk",
        "launch.cta_start_cycles", "mma_load.alu_cycles", "mma_load.alu_gap_cycles", "mma_load.alu_port_cycles",
        "mma_load.fma_cycles", "mma_load.fma_gap_cycles", "mma_load.fma_port_cycles", "mma_load.mufu_gap_cycles",
        "mma_load.mufu_port_cycles", "reg.file_bytes", "regs.cycles_per_alu", "regs.cycles_per_fma", "regs.cycles_per_mufu",
        "regs.mma_share", "sync.named_barrier_cycles", "tensor.mma_hidden_fma_share",
    }
)  # fmt: skip


def not_followed(facts: Iterable[str]) -> tuple[str, ...]:
    """Those of ``facts`` that no forecast from machine code follows."""
    return tuple(fact for fact in facts if fact in NOT_FOLLOWED)


def changed_unfollowed(machine: Machine) -> tuple[str, ...]:
    """Facts of ``machine`` that a what-if changed and no forecast from machine code follows."""
    return not_followed(name for name, fact in machine.facts.items() if fact.kind == "what-if")
