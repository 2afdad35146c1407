"""What the instructions of warp roles cost on a machine with tensor memory, from its file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tilecast.model.compiled.roles.code import RoleInstruction
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.tensor_core import mma_completion_latency_cycles, mma_instruction_cycles

#: Sub-partitions of an SM: what a file says per SM is a quarter of that here.
PARTITIONS = 4
_LANES = 32
_WORD = 4


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
    named: float
    fence: float
    #: Tensor memory: bytes a cycle in and out, and cycles until a load nobody competes with is done.
    read_bytes: float
    write_bytes: float
    tensor_memory: float
    copy_latency: float
    copy_bytes: float

    def occupies(self, one: RoleInstruction) -> float:
        """Cycles of its pipe."""
        if one.kind == "tensor_load":
            return _LANES * _WORD * one.amount / self.read_bytes
        if one.kind == "tensor_store":
            return _LANES * _WORD * one.amount / self.write_bytes
        return self.pipe[one.pipe] * max(1, one.amount if one.kind == "plain" else 1)

    def product(self, one: RoleInstruction) -> tuple[float, float]:
        """(cycles of the tensor core, cycles from their end until who waits for the commit goes on)."""
        m, n, _ = one.shape
        ctas = 2 if one.pair else 1
        return (
            mma_instruction_cycles(self.machine, m, n, one.dtype, one.source, ctas),
            mma_completion_latency_cycles(self.machine, m, n, one.dtype, one.source, ctas),
        )


@lru_cache(maxsize=64)
def role_costs(machine: Machine) -> RoleCosts:
    """The costs of ``machine``; MachineError names a fact it lacks."""
    m = machine
    lanes = _LANES * PARTITIONS
    return RoleCosts(
        machine,
        pipe={
            "alu": lanes / m["alu.lanes"],
            "fma": lanes / m["fma.achieved_lanes"],
            "mufu": lanes / m["mufu.ex2_per_clk"],
            "shared": lanes / m["shuffle.lanes"],
            "control": m["warp.control_cycles"],
            "uniform": 1.0,
            "tensor": 1.0,
            "tmem": 1.0,
            "other": 1.0,
        },
        latency={
            "fixed": m["warp.counted_latency_cycles"],
            "mufu": m["mufu.ex2_latency_cycles"],
            "shuffle": m["shuffle.latency_cycles"],
            "shared": m["smem.latency_cycles"],
            "local": m["smem.latency_cycles"],
            "constant": m["warp.constant_latency_cycles"],
            "special": m["warp.special_latency_cycles"],
            "global": m["hbm.latency_cycles"],
            "convert": m["warp.convert_latency_cycles"],
            "vote": m["warp.vote_latency_cycles"],
            "poll": m["sync.wait_done_cycles"],
        },
        operand_release=m["warp.operand_release_cycles"],
        poll=m["sync.wait_done_cycles"],
        handover=m["sync.mbarrier_roundtrip_cycles"],
        remote=m["sync.cluster_arrive_cycles"],
        named=m["sync.named_barrier_cycles"],
        fence=m["sync.fence_async_cycles"],
        read_bytes=m["tmem.read_bytes_per_clk"] / PARTITIONS,
        write_bytes=m["tmem.write_bytes_per_clk"] / PARTITIONS,
        tensor_memory=m["tmem.idle_latency_cycles"],
        copy_latency=m["tma.latency_l2_cycles"],
        copy_bytes=m["tma.bytes_per_clk"],
    )
