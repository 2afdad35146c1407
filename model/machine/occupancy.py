"""How many CTAs an SM holds at a time."""

from __future__ import annotations

from tilecast.model.machine.machine import Machine

#: Bytes of shared memory that the system keeps for each CTA (CUDA C++ Programming Guide, compute capability 8.0 and later).
KEPT_BYTES = 1024
#: Registers of a thread are given out by so many.
_REGISTERS_AT_ONCE = 8


def ctas_that_fit(machine: Machine, shared_bytes: float, registers: int, warps: int) -> int:
    """CTAs of ``warps`` warps, ``registers`` a thread and so many bytes of shared memory that an SM holds, at least 1."""
    given = -(-registers // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE
    by_shared = machine["smem.per_sm_bytes"] // (shared_bytes + KEPT_BYTES)
    by_registers = machine["reg.file_bytes"] // (4 * 32 * warps * given)
    return max(1, int(min(by_shared, by_registers, machine["sm.max_warps"] // warps)))
