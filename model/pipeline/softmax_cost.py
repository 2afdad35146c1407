"""What softmax work costs on a machine: the same arithmetic for every pipeline builder.

Counts are per score tile of ``rows x keys`` elements; a unit's cycles are elements over its lanes.  Instruction
counts are warp instructions per SM sub-partition (elements / 128 for one scalar instruction per element).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: Scalar instructions of a softmax or correction step that do not scale with the tile (barrier polls, statistics,
#: addresses, branches) and how many of them run on the ALU pipe.  Inferred, not counted: what the issue and ALU shares
#: of FA4 bf16 on B300 (flash-attention #2701) leave after the instructions that do scale, split between the roles.
STEP_INSTRUCTIONS = 28
STEP_ALU_INSTRUCTIONS = 14
CORRECTION_INSTRUCTIONS = 30
CORRECTION_ALU_INSTRUCTIONS = 14
#: ALU instructions that mask a score on Hopper where one side bounds the keys, and where two do: counted in the masked blocks
#: of generated kernels (2.4 to 3.4, and 4.4 to 4.5 beyond what plain blocks have).
_MASKS, _MASKS_BOTH_SIDES = 2.5, 4.5

Pairs = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Work:
    """Demand of a piece of arithmetic: cycles per unit and warp instructions per pipe."""

    cycles: Pairs
    instructions: Pairs

    def busiest(self) -> float:
        """Cycles of the busiest unit: the fastest this work can go with the SM to itself."""
        return max((c for _, c in self.cycles), default=0.0)

    def scaled(self, factor: float) -> Work:
        """The same work for ``factor`` times as many elements."""
        return Work(
            tuple((u, c * factor) for u, c in self.cycles), tuple((p, n * factor) for p, n in self.instructions)
        )


def work(machine: Machine, cycles: dict[str, float], instructions: dict[str, float]) -> Work:
    """A `Work` whose issue cycles follow from its instruction counts."""
    total = sum(instructions.values())
    issue = total * 4.0 / machine["issue.warp_inst_per_clk"]
    merged = {unit: c for unit, c in cycles.items() if c > 0}
    merged["issue"] = merged.get("issue", 0.0) + issue
    if machine.has("regs.mma_share"):
        # Accumulators in registers: arithmetic and wgmma share the register file ports.
        merged["regs"] = sum(
            count * machine[f"regs.cycles_per_{pipe}"] for pipe, count in instructions.items() if pipe != "other"
        )
    return Work(tuple(merged.items()), tuple((p, n) for p, n in instructions.items() if n > 0))


def add(*parts: Work) -> Work:
    """Sum of several pieces of work (unit by unit, pipe by pipe)."""
    cycles: dict[str, float] = {}
    instructions: dict[str, float] = {}
    for part in parts:
        for unit, c in part.cycles:
            cycles[unit] = cycles.get(unit, 0.0) + c
        for pipe, n in part.instructions:
            instructions[pipe] = instructions.get(pipe, 0.0) + n
    return Work(tuple(cycles.items()), tuple(instructions.items()))


def fma_cost(machine: Machine, elements: float) -> tuple[float, float]:
    """(cycles, warp instructions) of one FP32 operation per element; packed f32x2 halves the instructions."""
    packed = machine.get("fma.packed_f32x2", 0.0) > 0
    return elements / machine["fma.lanes"], elements / 128.0 / (2.0 if packed else 1.0)


@lru_cache(maxsize=1024)
def row_max_work(machine: Machine, elements: float) -> Work:
    """Running maximum of every row; 3-input min/max consumes two elements an instruction."""
    per = machine["alu.minmax_inputs"] - 1.0
    count = elements / per
    return work(machine, {"alu": count / machine["alu.lanes"]}, {"alu": count / 128.0})


@lru_cache(maxsize=1024)
def bookkeeping_work(
    machine: Machine, alu: float = STEP_ALU_INSTRUCTIONS, instructions: float = STEP_INSTRUCTIONS
) -> Work:
    """What a softmax step does besides its elements: barrier polls, statistics, addresses, branches."""
    return work(
        machine,
        {"alu": alu * 128 / machine["alu.lanes"]},
        {"alu": alu, "other": instructions - alu},
    )


@lru_cache(maxsize=1024)
def row_sum_work(machine: Machine, elements: float) -> Work:
    """FP32 sum of the exponentials of every row."""
    cycles, count = fma_cost(machine, elements)
    return work(machine, {"fma": cycles}, {"fma": count})


def barrier_cycles(machine: Machine) -> float:
    """A barrier of the warps of one warpgroup; where that was not measured, one between two warps."""
    return machine.get("sync.barrier_cycles", machine["sync.named_barrier_cycles"])


def packing_fact(workload: Workload) -> str:
    """The fact that gives the rate of packing probabilities to the workload's dtype."""
    return "cvt.f32x2_to_fp8x2_per_clk" if workload.dtype == "fp8" else "cvt.f32x2_to_bf16x2_per_clk"


@lru_cache(maxsize=4096)
def exp_work(
    machine: Machine, workload: Workload, elements: float, emulated_share: float, degree: int, packed: bool = True
) -> Work:
    """Scale, exponentiate and, where ``packed``, pack ``elements`` scores; ``emulated_share`` of them on the FMA pipe.

    A hardware exponential is one MUFU.EX2; an emulated one costs ``mufu.ex2_emulation_fma_slots`` FMA lane slots
    at degree 3 (CF1178), one more or less per degree, and one shift-and-add on the ALU (FA4C, utils.py).
    """
    emulated = elements * emulated_share
    hardware = elements - emulated
    scale_cycles, scale_count = fma_cost(machine, elements)
    slots = machine["mufu.ex2_emulation_fma_slots"] + (degree - 3)
    at_once = 2.0 if machine.get("fma.packed_f32x2", 0.0) > 0 else 1.0
    emulation_count = emulated / 128.0 * ((degree + 2) / at_once + 1.0)
    # F2FP packs two floats; FP8 pairs are 16 bit and need one more byte permute for every four elements.
    packs = elements / 2.0 if packed else 0.0
    rate = machine[packing_fact(workload)]
    permutes = elements / 4.0 if workload.dtype == "fp8" and packed else 0.0
    alu_count = (packs + permutes + emulated) / 128.0
    return work(
        machine,
        {
            "mufu": hardware / machine["mufu.ex2_per_clk"],
            "fma": scale_cycles + emulated * slots / machine["fma.lanes"],
            "cvt": packs / rate,
            "alu": (packs + permutes + emulated) / machine["alu.lanes"],
        },
        {"mufu": hardware / 128.0, "fma": scale_count + emulation_count, "alu": alu_count},
    )


@lru_cache(maxsize=1024)
def pack_work(machine: Machine, workload: Workload, elements: float) -> Work:
    """Pack ``elements`` probabilities to the workload's dtype, as part of `exp_work` elsewhere."""
    packs = elements / 2.0
    alu = packs + (elements / 4.0 if workload.dtype == "fp8" else 0.0)
    return work(
        machine,
        {"cvt": packs / machine[packing_fact(workload)], "alu": alu / machine["alu.lanes"]},
        {"alu": alu / 128.0},
    )


def mask_instructions(workload: Workload) -> float:
    """ALU instructions for a score of a block that crosses the mask's boundary, on Hopper."""
    return _MASKS_BOTH_SIDES if workload.mask == "window" else _MASKS


def mask_work(machine: Machine, instructions: float) -> Pairs:
    """Extra ALU cycles to mask a block that crosses the boundary, in so many scalar instructions."""
    return (("alu", instructions / machine["alu.lanes"]), ("issue", instructions / 128.0))


def one_warp_cycles(machine: Machine, done: Work) -> float:
    """Time of straight-line work on one warp per sub-partition: its busiest pipe, plus the part of the other
    pipes' work that a single in-order warp does not hide under it (``issue.one_warp_exposed_share``)."""
    pipes = [c for unit, c in done.cycles if unit in ("mufu", "fma", "alu")]
    if not pipes:
        return done.busiest()
    exposed = machine.get("issue.one_warp_exposed_share", 0.0) * (sum(pipes) - max(pipes))
    return max(done.busiest(), max(pipes) + exposed)


def statistics_latency(machine: Machine) -> float:
    """Dependent tail of the row statistics: combine partial maxima, compare, form the scale with one ex2, store."""
    return (
        4 * machine["alu.latency_cycles"]
        + 2 * machine["fma.latency_cycles"]
        + machine["mufu.ex2_latency_cycles"]
        + machine["smem.latency_cycles"]
    )


def ramp_latency(machine: Machine) -> float:
    """Depth of the scale -> ex2 -> pack pipe before the first packed value comes out."""
    return 2 * machine["fma.latency_cycles"] + machine["mufu.ex2_latency_cycles"] + machine["alu.latency_cycles"]


def load_cycles(machine: Machine, size_bytes: float) -> float:
    """Cycles the bulk copy engine of one SM is busy with ``size_bytes``."""
    return size_bytes / machine["tma.bytes_per_clk"]


def beside_mma_cycles(machine: Machine, done: Work, exchanges: int = 0) -> float:
    """Shortest time of straight-line work on one warp per sub-partition while its tensor core runs wgmma; 0 where that slows nothing.

    An instruction has the register ports for so long, and the warp's next one waits a little longer (measured: 14.1 to 14.9
    cycles an element of an anchored softmax, 16.3 of an online one, where two warps take 12.0 and 13.5 between them).
    Each of ``exchanges`` (shuffles, words to and from shared memory) takes longer by what was measured of shuffles.
    """
    m = machine
    if not m.has("mma_load.mufu_port_cycles"):
        return 0.0
    counts = [(pipe, count) for pipe, count in done.instructions if pipe in ("mufu", "fma", "alu")]
    ports = sum(
        count * (m[f"mma_load.{pipe}_port_cycles"] + m[f"mma_load.{pipe}_gap_cycles"]) for pipe, count in counts
    )
    pipes = max((count * m[f"mma_load.{pipe}_cycles"] for pipe, count in counts), default=0.0)
    return max(ports, pipes) + exchanges * (m["mma_load.shared_cycles"] - 128.0 / m["shuffle.lanes"])
