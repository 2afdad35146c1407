"""What the instructions of warp roles cost on a machine, from its file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tilecast.model.compiled.costs import PARTITIONS, WarpCosts, latencies, pipe_cycles, warp_costs
from tilecast.model.compiled.roles.code import RoleInstruction
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.backward.kernels import add_rate
from tilecast.model.pipeline.softmax_cost import barrier_cycles
from tilecast.model.pipeline.tensor_core import (
    mma_completion_latency_cycles,
    mma_instruction_cycles,
    mma_smem_bytes,
)

#: Lanes of a warp, bytes of a register.
_LANES, _WORD = 32, 4
#: Bits of a number of mma.sync's operands.  Its rates go by them (NVIDIA A100 data sheet: 156, 312, 624, 1248 and 4992 T/s).
_BITS = {"tf32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int4": 4, "b1": 1}


@dataclass(frozen=True, slots=True)
class RoleCosts:
    """Cycles on one sub-partition."""

    machine: Machine
    #: Pipe -> cycles that one instruction of a warp occupies it.
    pipe: dict[str, float]
    latency: dict[str, float]
    operand_release: float
    #: A wait whose phase is complete; an arrival until who waits for it goes on, by a thread of the CTA and of the pair's other.
    poll: float
    handover: float
    remote: float
    #: A named barrier: from the last arrival until others go on, and for who arrives last.
    named: float
    met: float
    fence: float
    #: Tensor memory (0: none): bytes a cycle in and out, and cycles until a load without competition is done.
    read_bytes: float
    write_bytes: float
    tensor_memory: float
    copy_latency: float
    copy_bytes: float
    #: Bytes a cycle that an SM copies by lanes from L2, and their latency.
    lane_bytes: float
    lane_latency: float
    #: Bytes a cycle of the shared-memory port; beside wgmma, cycles of a register that a warp loads and of one that it stores.
    port_bytes: float
    load_register: float
    store_register: float
    #: Accesses that wait for the port while their warps go on, at least and at most.
    line_least: int
    line_most: int
    #: Copies out: bytes a cycle where they are stored and where they are added up in L2, cycles from the last of them until they
    #: are there.
    out_bytes: float
    add_bytes: float
    out_latency: float
    #: Pipes beside wgmma, and its queue; None where there is none.
    wgmma: WarpCosts | None

    def occupies(self, one: RoleInstruction) -> float:
        """Cycles of its pipe."""
        if one.kind == "tensor_load":
            return _LANES * _WORD * one.amount / self.read_bytes
        if one.kind == "tensor_store":
            return _LANES * _WORD * one.amount / self.write_bytes
        return self.pipe[one.pipe] * max(1, one.amount if one.kind == "plain" else 1)

    def port(self, one: RoleInstruction) -> float:
        """Cycles of the shared-memory port of the SM."""
        if one.kind == "wgmma":
            m, n, k = one.shape
            return mma_smem_bytes(m, n, k, one.dtype, one.source) / self.port_bytes
        wavefronts, warps, _ = one.shape
        return wavefronts * warps * _LANES * _WORD / self.port_bytes

    def product(self, one: RoleInstruction) -> tuple[float, float]:
        """(cycles of the tensor core, cycles from their end until who waits for it goes on)."""
        m, n, k = one.shape
        if one.kind == "mma_sync":
            # A warp has the tensor core of its sub-partition, at the rate that mma.sync reaches for as many bytes of 16-bit numbers.
            rate = self.machine["tensor.mma_sync_flop_per_clk"] * 16 / _BITS[one.dtype]
            return 2.0 * m * n * k / (rate / PARTITIONS), 0.0
        if one.kind == "wgmma":
            # The array takes as long for twice the k of half the size.
            return mma_instruction_cycles(self.machine, m, n, one.dtype, one.source), self.machine[
                "tensor.mma_latency_cycles"
            ]
        ctas = 2 if one.pair else 1
        return (
            mma_instruction_cycles(self.machine, m, n, one.dtype, one.source, ctas),
            mma_completion_latency_cycles(self.machine, m, n, one.dtype, one.source, ctas),
        )


@lru_cache(maxsize=64)
def role_costs(machine: Machine) -> RoleCosts:
    """The costs of ``machine``; MachineError names a fact it lacks."""
    m = machine
    tensor_memory = m.tensor_kind == "tcgen05"
    # Rates of shared memory are those of four sub-partitions with a warp each.
    register = _LANES * _WORD * PARTITIONS
    wgmma = warp_costs(m, m["chip.clock_rated_mhz"]) if m.tensor_kind == "wgmma" else None
    return RoleCosts(
        machine,
        pipe={**pipe_cycles(m), "tmem": 1.0},
        latency=latencies(m),
        operand_release=m["warp.operand_release_cycles"],
        poll=m["sync.wait_done_cycles"],
        # Measured one way where it is; a round trip's half holds code as well.
        handover=m.get("sync.mbarrier_one_way_cycles", m["sync.mbarrier_roundtrip_cycles"]),
        remote=m["sync.cluster_arrive_cycles"],
        named=m["sync.named_barrier_cycles"],
        met=barrier_cycles(m),
        fence=m["sync.fence_async_cycles"],
        read_bytes=m["tmem.read_bytes_per_clk"] / PARTITIONS if tensor_memory else 0.0,
        write_bytes=m["tmem.write_bytes_per_clk"] / PARTITIONS if tensor_memory else 0.0,
        tensor_memory=m["tmem.idle_latency_cycles"] if tensor_memory else 0.0,
        copy_latency=m["tma.latency_l2_cycles"],
        copy_bytes=m["tma.bytes_per_clk"],
        # SMs of a grid read the same tiles at about the same time.
        lane_bytes=m.get("l2.bytes_per_clk_per_sm_lockstep", m["tma.bytes_per_clk"]),
        lane_latency=m["l2.latency_cycles"],
        port_bytes=m["smem.bytes_per_clk"],
        load_register=register / m.get("smem.load_bytes_per_clk_under_mma", m["smem.bytes_per_clk"]),
        store_register=register / m.get("smem.store_bytes_per_clk_under_mma", m["smem.bytes_per_clk"]),
        # Where it was not measured an access holds its warp.
        line_least=int(m.get("smem.line_least", 1.0)),
        line_most=int(m.get("smem.line_most", 1.0)),
        out_bytes=m.get("tma.store_bytes_per_clk", m["tma.bytes_per_clk"]),
        add_bytes=add_rate(m, together=True),
        out_latency=m.get("tma.reduce_latency_cycles", m["l2.latency_cycles"]),
        wgmma=wgmma,
    )
