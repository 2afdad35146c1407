"""Matrix instructions: what one costs as a function of shape, operand home and CTA mode.

tcgen05 (SA's raw log, 48 shapes on B200, hardware.md 3.1): an instruction covers 32 bytes of K and takes the longer
of the array's time and the shared-memory operand read.  wgmma (HOP1's sweep, 3.2) likewise.  mma.sync machines are
described by their rate.  All cycles are for machines at the rates of their file, so a what-if on a rate scales.
"""

from __future__ import annotations

from tilecast.model.machine.machine import Machine

#: Bytes of K one instruction covers.
K_BYTES = 32
#: Scalar instructions that the matrix and load warps issue around one matrix instruction (descriptor, predicate, issue).
INSTRUCTIONS_PER_MMA = 4.0
_SIZES = {"bf16": 2, "fp16": 2, "fp8": 1}
#: Array time of an instruction with N columns is N/2 at this bf16 rate (128 rows x 16 x 2 FLOP per cycle pair).
_TCGEN05_RATE = 8192.0
_WGMMA_RATE = 4096.0


def element_bytes(dtype: str) -> int:
    """Bytes of one element; ValueError for a dtype without matrix instructions here."""
    if dtype not in _SIZES:
        raise ValueError(f"no matrix instruction for dtype '{dtype}': use bf16, fp16 or fp8")
    return _SIZES[dtype]


def mma_instruction_cycles(machine: Machine, m: int, n: int, dtype: str, a_home: str, cta_group: int = 1) -> float:
    """Initiation interval (cycles) of one K-step instruction of shape m x n.

    ``a_home`` is "smem", "tmem" or "register"; ``m`` counts the rows of the whole CTA pair when ``cta_group`` is 2.
    Raises ValueError for shapes the unit does not have.
    """
    size = element_bytes(dtype)
    port = 128.0 / machine["smem.bytes_per_clk"]
    if machine.tensor_kind == "tcgen05":
        return _tcgen05_cycles(_array_scale(machine, dtype, _TCGEN05_RATE), port, m, n, a_home, cta_group)
    if machine.tensor_kind == "wgmma":
        if m != 64 or cta_group != 1 or a_home not in ("smem", "register") or not 8 <= n <= 256:
            raise ValueError(
                f"wgmma is m64 x n8..256 with A in smem or register, one CTA; got m={m} n={n} {a_home} x{cta_group}"
            )
        array = n / 2 * _array_scale(machine, dtype, _WGMMA_RATE)
        if a_home == "register":
            return max(array, machine.get("tensor.mma_rs_floor_cycles", 0.0))
        return max(array, (16 + n / 4) * port)
    if a_home != "register" or cta_group != 1:
        raise ValueError(f"mma.sync reads A from registers of one CTA, got {a_home} x{cta_group}")
    return 2.0 * m * n * (K_BYTES / size) / machine[f"tensor.{dtype}_flop_per_clk"]


def _array_scale(machine: Machine, dtype: str, rate: float) -> float:
    """1 at the rate the formulas were measured at; a what-if machine with twice the rate gives 0.5."""
    factor = 2.0 if dtype == "fp8" else 1.0
    return rate * factor / machine[f"tensor.{dtype}_flop_per_clk"]


def _tcgen05_cycles(scale: float, port: float, m: int, n: int, a_home: str, cta_group: int) -> float:
    allowed = {1: (64, 128), 2: (128, 256)}
    if cta_group not in allowed or m not in allowed[cta_group] or a_home not in ("smem", "tmem") or not 8 <= n <= 256:
        raise ValueError(
            f"tcgen05.mma is m64/128 (one CTA) or m128/256 (pair) x n8..256 with A in smem or tmem; "
            f"got m={m} n={n} {a_home} x{cta_group}"
        )
    from_smem = a_home == "smem"
    if cta_group == 1:
        # M=64 keeps the full array busy for the same time: half the rate (SA).
        return max(n / 2 * scale, ((m / 4 if from_smem else 0) + n / 4) * port)
    if m == 256:
        array, read = n / 2 * scale, ((32 if from_smem else 0) + n / 8) * port
        # SMEM-bound pairs ran 1.4 to 3.4 cycles over the formula: bank arbitration between the CTAs (SA).
        return max(array, read + (2.4 if from_smem and read > array else 0.0))
    array, read = n / 4 * scale, ((16 if from_smem else 0) + n / 8 + 1) * port
    # A in tensor memory has a floor of 18 cycles (SA, N=64).
    return max(array, read) if from_smem else max(array, 18.0)


def mma_tile_cycles(machine: Machine, m: int, n: int, k: int, dtype: str, a_home: str, cta_group: int = 1) -> float:
    """Cycles the matrix unit is busy with an m x n tile over ``k`` elements (tiles wider than 256 are split)."""
    steps = k * element_bytes(dtype) / K_BYTES
    if machine.tensor_kind != "mma_sync" and n > 256:
        half = n // 2
        return mma_tile_cycles(machine, m, half, k, dtype, a_home, cta_group) + mma_tile_cycles(
            machine, m, n - half, k, dtype, a_home, cta_group
        )
    return steps * mma_instruction_cycles(machine, m, n, dtype, a_home, cta_group)


def mma_completion_latency_cycles(
    machine: Machine, m: int, n: int, dtype: str, a_home: str, cta_group: int = 1
) -> float:
    """Cycles from the end of the last instruction's array time to its result being visible to a waiter.

    SA's issue-to-barrier times less the array time of one instruction; includes the barrier of the commit.
    """
    element_bytes(dtype)
    if machine.tensor_kind != "tcgen05":
        return machine["tensor.mma_latency_cycles"]
    suffix = {(1, "smem"): "", (1, "tmem"): "_ts", (2, "smem"): "_2cta", (2, "tmem"): "_2cta_ts"}[(cta_group, a_home)]
    return machine[f"tensor.mma_latency{suffix}_cycles"]


def mma_smem_bytes(m: int, n: int, k: int, dtype: str, a_home: str, cta_group: int = 1) -> float:
    """Bytes one CTA reads from shared memory for an m x n tile over ``k`` elements (a pair splits A and B)."""
    rows = (m if a_home == "smem" else 0) + n
    return rows * k * element_bytes(dtype) / cta_group


def mma_sync_tile_cycles(machine: Machine, m: int, n: int, k: int, dtype: str) -> float:
    """Cycles of an m x n x k tile through mma.sync: the machine's own path, or the legacy one it still has."""
    rate = machine[f"tensor.{dtype}_flop_per_clk"]
    if machine.tensor_kind != "mma_sync":
        legacy = machine.get("tensor.mma_sync_flop_per_clk", machine["tensor.bf16_flop_per_clk"] / 4)
        rate = min(rate, legacy * 2 / element_bytes(dtype))
    return 2.0 * m * n * k / rate
