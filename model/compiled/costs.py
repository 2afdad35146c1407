"""What instructions cost on a machine: pipe occupancy with and without a matrix product running, latencies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tilecast.model.compiled.code import KernelCode
from tilecast.model.machine.machine import Machine

#: Warps of a warpgroup sit on four sub-partitions; what a file says per SM is a quarter of that here.
PARTITIONS = 4


@dataclass(frozen=True, slots=True)
class WarpCosts:
    """Cycles of one sub-partition."""

    #: Pipe -> cycles that one warp instruction occupies it, alone and while the tensor core runs.
    pipe: dict[str, float]
    pipe_under_mma: dict[str, float]
    #: Pipe -> cycles until another instruction of one of these pipes may issue while the tensor core runs; 0: at once.
    slot_under_mma: dict[str, float]
    #: Pipe -> cycles at least before the same warp's next instruction, whatever its stall count.
    least_stall: dict[str, int]
    #: Cycles of the SM's shared-memory port: of a row of 32 bytes of a product's operand ("row"), and of a word a lane
    #: of one warp of each sub-partition ("word").
    smem_port: dict[str, float]
    #: Cycles at least before a warp's next instruction that does not go through that port, beside a product that leaves nothing of it, after
    #: an arrival at a barrier, an access to shared memory (or a spilled word) and a shuffle.
    port_hold: dict[str, float]
    latency: dict[str, float]
    operand_release: float
    barrier: float
    barrier_spread: float
    #: An arrival seen by a warp that waits: by the producer, with the code around its next copy, and by itself.
    handover: float
    one_way: float
    #: From the end of a group of products to the warp that waits for it; from the issue of a product to its begin where A lies
    #: in shared memory and the tensor core is idle.
    mma_latency: float
    mma_fetch: float
    #: Share of the time of a bulk copy by which it lengthens products beside it.
    mma_beside_copy: float
    mma_queue: int
    tma_latency: float
    tma_latency_hbm: float
    tma_issue: float
    tma_bytes_per_clk: float
    #: Rates of one SM while all do the same: first reads from memory, and stores.
    memory_bytes_per_clk: float
    store_bytes_per_clk: float
    store_queue_bytes: float
    #: Words of spilled registers, of a warpgroup each, that L1 holds; latency of a reload that it does not hold.
    spill_words: int
    reload_latency: float
    #: Lines of code that the first and the second instruction cache hold; cycles of an SM for an instruction of a program
    #: just larger than the first, as large as the second, and twice as large.
    fetch_lines: float
    fetch_near_lines: float
    fetch_cycles: float
    fetch_full_cycles: float
    fetch_far_cycles: float
    #: CTA: what one mbarrier costs to set up, and everything else before its warps start.
    barrier_setup: float
    cta_setup: float


def pipe_cycles(machine: Machine) -> dict[str, float]:
    """Pipe -> cycles that one warp instruction occupies it on a sub-partition."""
    m, lanes = machine, 32 * PARTITIONS
    return {
        "alu": lanes / m["alu.lanes"],
        "fma": lanes / m.get("fma.achieved_lanes", m["fma.lanes"]),
        "mufu": lanes / m["mufu.ex2_per_clk"],
        "shared": lanes / m["shuffle.lanes"],
        "control": m["warp.control_cycles"],
        "uniform": 1.0,
        "tensor": 1.0,
        "other": 1.0,
    }


def latencies(machine: Machine) -> dict[str, float]:
    """Latency class (`model.compiled.code.LATENCIES`) -> cycles."""
    m = machine
    return {
        "fixed": m["warp.counted_latency_cycles"],
        "mufu": m["mufu.ex2_latency_cycles"],
        "shuffle": m["shuffle.latency_cycles"],
        "shared": m["smem.latency_cycles"],
        "local": m.get("local.latency_cycles", m["smem.latency_cycles"]),
        "constant": m["warp.constant_latency_cycles"],
        "special": m["warp.special_latency_cycles"],
        "global": m["hbm.latency_cycles"],
        "convert": m["warp.convert_latency_cycles"],
        "vote": m["warp.vote_latency_cycles"],
        "poll": m["sync.wait_done_cycles"],
        "l2": m["l2.latency_cycles"],
    }


@lru_cache(maxsize=64)
def _issue(m: Machine) -> tuple[dict[str, Any], ...]:
    """Pipes alone, pipes and slots under a product, least stalls, the shared-memory port and who it holds, latencies: the same objects at every clock."""
    pipe = pipe_cycles(m)
    # What was measured beside products was measured at the machine's own rates: at a slower one it takes at least what it takes alone.
    slow = {name: max(pipe[name], m.get(f"mma_load.{name}_cycles", 0.0)) for name in ("mufu", "shared")}
    slot = {name: m.get("mma_load.slot_cycles", 0.0) if name in ("alu", "fma") else 0.0 for name in pipe}
    least = {name: int(m.get("mufu.issue_cycles", 1.0)) if name == "mufu" else 1 for name in pipe}
    port = {"row": 32.0 / m["smem.bytes_per_clk"], "word": PARTITIONS * 32 * 4.0 / m["smem.bytes_per_clk"]}
    # What our kernels load past their copies are the factors of a key head (e4m3): a few bytes that every tile of the head reads, so
    # that L2 has them.
    hold = {name: m.get(f"mma_load.{name}_hold_cycles", 0.0) for name in ("arrive", "access", "shuffle")}
    return pipe, {**pipe, **slow}, slot, least, port, hold, {**latencies(m), "global": m["l2.latency_cycles"]}


@lru_cache(maxsize=256)
def warp_costs(machine: Machine, mhz: float) -> WarpCosts:
    """The costs of ``machine`` at an SM clock of ``mhz``; MachineError names a fact it lacks."""
    m = machine
    pipe, slow, slot, least, port, hold, latency = _issue(m)
    seen = m.get("tensor.mma_latency_register_cycles", m["tensor.mma_latency_cycles"])
    return WarpCosts(
        pipe=pipe,
        pipe_under_mma=slow,
        slot_under_mma=slot,
        least_stall=least,
        smem_port=port,
        port_hold=hold,
        latency=latency,
        operand_release=m["warp.operand_release_cycles"],
        barrier=m["sync.barrier_cycles"],
        barrier_spread=m.get("sync.barrier_spread_cycles", 0.0),
        handover=m["sync.mbarrier_roundtrip_cycles"],
        one_way=m.get("sync.mbarrier_one_way_cycles", m["sync.mbarrier_roundtrip_cycles"]),
        # Alone, a group whose A comes from shared memory takes that much longer; what does is its first product's begin.
        mma_latency=seen,
        mma_fetch=max(0.0, m["tensor.mma_latency_cycles"] - seen),
        mma_beside_copy=m["tma.bytes_per_clk"] * m.get("tensor.mma_cycles_per_copied_byte", 0.0),
        mma_queue=int(m["tensor.mma_queue_depth"]),
        tma_latency=m["tma.latency_l2_cycles"],
        tma_latency_hbm=m["tma.latency_hbm_cycles"],
        tma_issue=m["tma.issue_cycles"],
        tma_bytes_per_clk=m["tma.bytes_per_clk"],
        memory_bytes_per_clk=m.bytes_per_clk(m["hbm.tbps_achieved"], mhz),
        store_bytes_per_clk=m.bytes_per_clk(m.get("l2.store_tbps", m["hbm.tbps_achieved"]), mhz),
        spill_words=1 << 30,
        reload_latency=m["l2.latency_cycles"],
        fetch_lines=m["code.l1_bytes"] / 128,
        fetch_near_lines=m["code.l2_bytes"] / 128,
        fetch_cycles=m["code.fetch_cycles"],
        fetch_full_cycles=m["code.fetch_full_cycles"],
        fetch_far_cycles=m["code.fetch_far_cycles"],
        store_queue_bytes=128.0 * PARTITIONS * m.get("local.store_queue_depth", 0.0),
        barrier_setup=m["launch.barrier_setup_cycles"],
        cta_setup=m["launch.cta_setup_cycles"],
    )


#: Above this much shared memory a kernel, Triton asks the driver to prefer shared memory to L1 (its driver.c), which
#: leaves L1 what the largest shared memory of an SM leaves.
_PREFERS_SHARED = 48 << 10


def spill_costs(costs: WarpCosts, machine: Machine, code: KernelCode, ctas: int) -> WarpCosts:
    """``costs`` with the room that L1 has for spilled registers in ``code`` while ``ctas`` CTAs share the SM."""
    if not code.stack_bytes or not machine.has("l1.bytes"):
        return costs
    carved = machine["smem.per_sm_bytes"] if code.shared_bytes > _PREFERS_SHARED else ctas * code.shared_bytes
    room = machine["l1.bytes"] - carved - machine.get("l1.reserved_bytes", 0.0)
    # A word of a warpgroup takes a line of 128 bytes for each of its warps.
    return replace(costs, spill_words=max(0, int(room // (128 * PARTITIONS))))


def mma_cycles(machine: Machine, columns: int, from_registers: bool, dtype: str) -> float:
    """Cycles of one wgmma of 64 rows over 32 bytes of each: m64nNk16 in 16 bits, m64nNk32 in "fp8"."""
    from tilecast.model.pipeline.tensor_core import mma_instruction_cycles

    return mma_instruction_cycles(
        machine, 64, columns, "fp8" if dtype == "fp8" else "bf16", "register" if from_registers else "smem"
    )
