"""Cycles of what a role executed, at the rates of a machine file: the same unit rates that the pipelines use.

The pipelines count what an algorithm needs; this counts what the source did.  Where the two differ, docs/emulator.md says
why.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from tilecast.emulator.trace import CopyIssue, MatrixIssue, Work
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import softmax_cost as common
from tilecast.model.pipeline.graph import Op
from tilecast.model.pipeline.tensor_core import (
    INSTRUCTIONS_PER_MMA,
    mma_completion_latency_cycles,
    mma_smem_bytes,
    mma_tile_cycles,
)

DTYPES = {"fp16": "fp16", "bf16": "bf16", "fp8e4nv": "fp8", "fp8e5": "fp8"}


@dataclass(frozen=True, slots=True)
class Synchronisation:
    """What barriers cost a role, in cycles, as machines are measured for it."""

    #: A wait whose phase is complete already.
    poll: float
    #: From an arrival until who waits for it goes on, in the CTA and across a pair.
    handover: float
    across: float
    #: An arrival itself, and the barrier of all warps of the role that Triton puts before it.
    arrive: float
    meet: float

    def arrival(self, warps: int) -> float:
        """What an arrival takes a role of so many warps."""
        return self.arrive + (self.meet if warps > 1 else 0.0)


def synchronisation(machine: Machine) -> Synchronisation:
    """From the ``sync`` facts of a machine file."""
    m = machine
    local = m.get("sync.mbarrier_one_way_cycles", m["sync.mbarrier_roundtrip_cycles"])
    return Synchronisation(
        m["sync.wait_done_cycles"], local, max(local, m.get("sync.cluster_arrive_cycles", 0.0)),
        m.get("sync.arrive_cycles", 0.0), m.get("sync.barrier_cycles", m["sync.named_barrier_cycles"]),
    )  # fmt: skip


def start_cycles(machine: Machine, barriers: int) -> float:
    """From the start of a CTA until its roles begin; it initialises so many barriers."""
    per_barrier = machine.get("launch.barrier_setup_cycles", 0.0)
    return machine["launch.cta_start_cycles"] + machine.get("launch.cta_setup_cycles", 0.0) + barriers * per_barrier


def copy_latency(machine: Machine, cold: bool) -> float:
    """From the last byte that the copy engine has moved until who waits for it may go on; ``cold``: not from L2."""
    return machine["tma.latency_hbm_cycles" if cold else "tma.latency_l2_cycles"]


def uses_mufu(work: Work) -> bool:
    """Whether the work has exponentials of more than row statistics."""
    return work.counts.get("mufu", 0.0) > work.chain.get("mufu", 0) * 128 + 128


def is_rescale(work: Work) -> bool:
    """Whether the work takes an accumulator through registers and puts it back."""
    return bool(work.counts.get("tmem_read") and work.counts.get("tmem_write") and not work.counts.get("mufu"))


def work_op(work: Work, role: str, machine: Machine, pipe_is_full: bool) -> Op:
    """Arithmetic between two synchronising operations as one operation of the role.

    ``pipe_is_full``: exponentials went before without a wait, so that the depth of their pipe is hidden.
    """
    counts = work.counts
    packed = 2.0 if machine.get("fma.packed_f32x2", 0.0) > 0 else 1.0
    maxima = counts.get("max", 0.0) / (machine["alu.minmax_inputs"] - 1.0)
    packs = counts.get("cvt", 0.0)
    alu = counts.get("alu", 0.0) + maxima + packs
    fma = counts.get("fma", 0.0) + counts.get("div", 0.0)
    mufu = counts.get("mufu", 0.0) + counts.get("div", 0.0)
    cycles = {
        "mufu": mufu / machine["mufu.ex2_per_clk"],
        "fma": fma / machine["fma.lanes"],
        "alu": alu / machine["alu.lanes"],
        "cvt": packs / machine["cvt.f32x2_to_bf16x2_per_clk"],
        "smem": counts.get("smem", 0.0) / machine["smem.bytes_per_clk"],
    }
    for port in ("read", "write"):
        if counts.get(f"tmem_{port}"):
            cycles[f"tmem_{port}"] = counts[f"tmem_{port}"] / machine[f"tmem.{port}_bytes_per_clk"]
    instructions = {"mufu": mufu / 128, "fma": fma / 128 / packed, "alu": alu / 128}
    done = common.work(machine, cycles, instructions)
    least = common.one_warp_cycles(machine, done) + _latency(work, machine)
    least += common.ramp_latency(machine) if uses_mufu(work) and not pipe_is_full else 0.0
    least = max(least, counts.get("global", 0.0) / machine["tma.bytes_per_clk"])
    return Op(
        f"line {work.line}", "work", role, done.cycles, max(least, done.busiest()), instructions=done.instructions
    )


def _latency(work: Work, machine: Machine) -> float:
    """What cannot overlap: the first load, and operations on row statistics that wait for each other."""
    total = 0.0
    if work.loads:
        # Later loads go out while what came before is worked on.
        total += machine["tmem.load_latency_cycles"] * (1 + (work.loads - 1) / 2)
    latency = {
        "fma": machine["fma.latency_cycles"],
        "alu": machine["alu.latency_cycles"],
        "mufu": machine["mufu.ex2_latency_cycles"],
        "div": machine["mufu.ex2_latency_cycles"] + 2 * machine["fma.latency_cycles"],
        "smem": machine["smem.latency_cycles"],
        # All warps of the role meet over shared memory.
        "vote": machine["shuffle.latency_cycles"] + 2 * machine["smem.latency_cycles"],
        "global": machine["l2.latency_cycles"],
    }
    return total + sum(count * latency.get(pipe, 0.0) for pipe, count in work.chain.items())


def product_op(issue: MatrixIssue, role: str, machine: Machine) -> Op:
    """A matrix product on the tensor core."""
    dtype, rows = DTYPES[issue.dtype], _instruction_rows(issue, machine)
    # A taller wgmma product is one of 64 rows after the other.
    tall = issue.m * issue.pair / rows
    cycles = tall * mma_tile_cycles(machine, rows, issue.n, issue.k, dtype, issue.a_home, issue.pair)
    read = (
        tall * mma_smem_bytes(rows, issue.n, issue.k, dtype, issue.a_home, issue.pair) / machine["smem.bytes_per_clk"]
    )
    steps = tall * issue.k * (1 if dtype == "fp8" else 2) / 32
    # All four warps of a warpgroup issue a wgmma; one warp issues tcgen05, for both CTAs of a pair.
    wgmma = machine.tensor_kind == "wgmma"
    count = steps * INSTRUCTIONS_PER_MMA / (1 if wgmma else 4 * issue.pair)
    demand = [("tensor", cycles), ("smem", min(read, cycles)), ("issue", min(count, cycles))]
    if machine.has("regs.mma_share"):
        demand.append(("regs", cycles * machine["regs.mma_share"]))
    return Op(
        issue.name, "product", role, tuple(demand), cycles, engine="tensor", issue_cycles=count if wgmma else steps,
        hidden_fma=machine.get("tensor.mma_hidden_fma_share", inf) if wgmma else inf,
    )  # fmt: skip


def completion_cycles(issue: MatrixIssue, machine: Machine) -> float:
    """From the end of a product to whoever waits for it."""
    return mma_completion_latency_cycles(
        machine, _instruction_rows(issue, machine), issue.n, DTYPES[issue.dtype], issue.a_home, issue.pair
    )


def _instruction_rows(issue: MatrixIssue, machine: Machine) -> int:
    """Rows of one matrix instruction: of wgmma 64, however tall the product."""
    rows = issue.m * issue.pair
    return min(rows, 64) if machine.tensor_kind == "wgmma" else rows


def copy_op(issue: CopyIssue, role: str, machine: Machine) -> Op:
    """A tile through the copy engine."""
    busy = common.load_cycles(machine, issue.bytes)
    return Op(
        issue.name, "copy", role, (("tma", busy),), max(busy, 1e-3), engine="tma", issue_cycles=machine["tma.issue_cycles"],
    )  # fmt: skip
