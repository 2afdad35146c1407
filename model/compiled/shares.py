"""What a compiled kernel executes in all, by pipe, and which share of each unit's time that is: what counters can check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial

from tilecast.base.same import Same
from tilecast.model.compiled.code import KernelCode, WarpInstruction
from tilecast.model.compiled.costs import mma_cycles, warp_costs
from tilecast.model.compiled.counts import BLOCK_COUNTS
from tilecast.model.compiled.program import TileCounts
from tilecast.model.families import build_pipeline, parse_variant
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine


@dataclass(frozen=True, slots=True)
class Executed:
    """Totals of one launch over the chip: warp instructions by pipe, and cycles and FLOP of the tensor cores of all SMs."""

    instructions: dict[str, float]
    tensor_cycles: float
    flop: float

    def shares(self, machine: Machine, cycles: float) -> dict[str, float]:
        """Busy share (0..1) of tensor cores, MUFU ("xu"), FMA, ALU and issue slots over ``cycles`` of every SM."""
        sms = machine["chip.sm_count"]
        pipe = warp_costs(machine, 1700.0).pipe
        slots = 4.0 * sms * cycles
        return {
            "tensor": self.tensor_cycles / (sms * cycles),
            "xu": self.instructions.get("mufu", 0.0) * pipe["mufu"] / slots,
            "fma": self.instructions.get("fma", 0.0) / slots,
            "alu": self.instructions.get("alu", 0.0) * pipe["alu"] / slots,
            "issue": sum(self.instructions.values()) / slots,
        }


def executed(code: KernelCode, work: Workload, machine: Machine) -> Executed:
    """Instructions of the warpgroups that multiply (a producer warp adds about a hundredth)."""
    variant = parse_variant(code.variant)
    heads = work.batch * work.heads_q
    counts: Counter[str] = Counter()
    tensor = flop = 0.0
    depth = 32 / work.dtype_bytes  # a wgmma's k-step is 32 bytes
    cycles = cache(partial(mma_cycles, machine, dtype=code.dtype))
    rows = build_pipeline(work, variant, machine).rows_per_cta
    tiles = -(-work.seqlen_q // rows)
    for consumer, blocks in zip(code.consumers, _blocks(work, variant, tiles, len(code.consumers)), strict=True):
        looped = False
        for role, instructions in consumer:
            times = tiles
            if role == "pass":
                times = blocks.passed_after if looped else blocks.passed
            elif role != "once":
                looped, times = True, getattr(blocks, role)
            if not times:
                continue
            pipes, products = _held(Same(instructions))
            for pipe, n in pipes.items():
                counts[pipe] += times * 4 * n  # the four warps of the warpgroup
            for columns, from_registers in products:
                # Counters see the array work, not the wait for operands of narrow products.
                tensor += times * min(columns / 2.0, cycles(columns, from_registers))
                flop += times * 2.0 * 64 * columns * depth
    return Executed({pipe: float(n * heads) for pipe, n in counts.items()}, tensor * heads, flop * heads)


@lru_cache(maxsize=1024)
def _blocks(work: Workload, variant: Variant, tiles: int, consumers: int) -> tuple[TileCounts, ...]:
    """Blocks of all tiles of a head together, by the warpgroup that takes them."""
    counted = BLOCK_COUNTS[variant.family]
    by_tile = [[counts.as_tuple() for counts in counted(work, block, variant, consumers)] for block in range(tiles)]
    return tuple(TileCounts(*map(sum, zip(*mine, strict=True))) for mine in zip(*by_tile, strict=True))


@lru_cache(maxsize=1024)
def _held(code: Same[Sequence[WarpInstruction]]) -> tuple[Counter[str], tuple[tuple[int, bool], ...]]:
    """Instructions by pipe, and (columns, A from registers) of the matrix products, in order."""
    products = tuple((i.amount, i.from_registers) for i in code.value if i.kind == "mma")
    return Counter(i.pipe for i in code.value), products
