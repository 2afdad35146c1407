"""FlashAttention-2 class forward on mma.sync: knobs, legality, what the portable template writes, space, published variant."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from tilecast.model.kernel.alike import Alike
from tilecast.model.kernel.grid import Grid
from tilecast.model.kernel.verdict import LEGAL, Verdict, over_limit
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.machine.occupancy import ctas_that_fit

SCHEDULERS = ("grid", "longest-first")
#: Smallest extent of a tl.dot operand.
SMALLEST_DOT = 16
#: How tiles reach shared memory: by cp.async from pointers, or by the bulk copy engine from tensor descriptors, which
#: saves the registers and instructions of addresses.  Before sm_90 Triton turns descriptors back into pointers, badly.
LOADS = ("pointers", "descriptors")
#: Rows from which a tl.dot becomes a wgmma, where the machine has it.
_WGMMA_ROWS = 64
#: What compilations for sm_90a take beside tiles (Triton 3.6): bytes of barriers for a stage.
_BARRIER_BYTES = 16
#: Widest swizzle of a tile in shared memory; narrower rows are swizzled by their own width.
_SWIZZLE_BYTES = 128
#: Stages are missing: they decide how many CTAs fit an SM.
ALIKE = Alike(
    same_demand={"scheduler": "grid"}, least_waiting={"scheduler": "grid"},
    fit=("tile_m", "tile_n", "warps", "kv_stages"), written=("tile_m", "tile_n", "warps", "kv_stages"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fa2Variant:
    """Every warp loads, multiplies and exponentiates in turn."""

    family: str = "fa2"
    tile_m: int = 128
    tile_n: int = 64
    warps: int = 4
    kv_stages: int = 1
    scheduler: str = "grid"


def registers(variant: Fa2Variant, workload: Workload) -> int:
    """Registers a thread needs: O and S accumulators of its rows, packed P, addresses."""
    rows = variant.tile_m / (variant.warps * 32)
    return int(rows * (workload.head_dim_v + variant.tile_n)) + 40


def _tile_bytes(variant: Fa2Variant, workload: Workload) -> int:
    """Shared memory of the Q tile and the K/V tiles."""
    keys = variant.kv_stages * variant.tile_n * (workload.head_dim_qk + workload.head_dim_v)
    return workload.dtype_bytes * (variant.tile_m * workload.head_dim_qk + keys)


def ctas_per_sm(variant: Fa2Variant, workload: Workload, machine: Machine) -> int:
    """CTAs that fit one SM by shared memory, registers and warps (at least 1)."""
    used, need = _tile_bytes(variant, workload), float(registers(variant, workload))
    if by_wgmma(variant, machine):
        # As compiled: packed P beside O and S, and K's tile where V's was in a loop that is not pipelined.
        need += rows_of_stream(variant, machine) / 128 * variant.tile_n / 2
        if variant.kv_stages == 1:
            narrow = min(workload.head_dim_qk, workload.head_dim_v)
            used -= workload.dtype_bytes * variant.tile_n * narrow
        used += _BARRIER_BYTES * variant.kv_stages
    return min(4, ctas_that_fit(machine, used, min(255, int(need)), variant.warps))


def by_wgmma(variant: Fa2Variant, machine: Machine) -> bool:
    """Whether Triton writes products of ``variant`` as wgmma."""
    return machine.tensor_kind == "wgmma" and variant.tile_m >= _WGMMA_ROWS


def rows_of_stream(variant: Fa2Variant, machine: Machine) -> int:
    """Query rows that four warps work on, one warp on each sub-partition.

    wgmma takes 64 rows and more: eight warps of a tile of 64 split the columns of O, and each four have all of S.
    """
    rows = variant.tile_m * 4 // variant.warps
    return max(_WGMMA_ROWS, rows) if by_wgmma(variant, machine) else rows


def legality(variant: Fa2Variant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the machine can run ``variant``."""
    if workload.dtype == "fp8" and not machine.has("tensor.fp8_flop_per_clk"):
        return Verdict(f"{machine.name} has no fp8 matrix rate", "use bf16 or fp16")
    need_bytes = _tile_bytes(variant, workload)
    if need_bytes > machine["smem.per_cta_bytes"]:
        return over_limit("shared memory (Q tile and K/V tiles)", need_bytes, machine["smem.per_cta_bytes"], "bytes", "use a smaller tile_m or tile_n")  # fmt: skip
    need = registers(variant, workload)
    if need > machine["reg.max_per_thread"]:
        return over_limit("a thread", need, machine["reg.max_per_thread"], "registers", "use 8 warps or a smaller tile_m or tile_n")  # fmt: skip
    return LEGAL


def writable(variant: Fa2Variant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the portable Triton template can write a legal ``variant``."""
    for name, extent in (("tile_m", variant.tile_m), ("tile_n", variant.tile_n)):
        if extent < SMALLEST_DOT or extent & (extent - 1):
            return Verdict(f"{name} must be a power of two of at least {SMALLEST_DOT}, got {extent}", "use 64 or 128")
    if workload.dtype not in ("bf16", "fp16"):
        return Verdict(f"family fa2 is written for bf16 and fp16, got dtype '{workload.dtype}'", "use bf16 or fp16")
    if variant.scheduler not in SCHEDULERS:
        return Verdict(f"family fa2 is written with scheduler {' or '.join(SCHEDULERS)}, got '{variant.scheduler}'", "use one of them")  # fmt: skip
    for name, width in (("head_dim_qk", workload.head_dim_qk), ("head_dim_v", workload.head_dim_v)):
        if width % SMALLEST_DOT:
            return Verdict(f"{name} must be a multiple of {SMALLEST_DOT}, got {width}", "pad the head")
    if variant.kv_stages == 1 and needs_pipeline(variant, workload, machine):
        widths = dict.fromkeys((*tile_widths(workload.head_dim_qk), *tile_widths(workload.head_dim_v)))
        return Verdict(
            f"kv_stages must be 2 or more on {machine.name} for tiles of K and V that are {' and '.join(map(str, widths))} wide, "
            "got 1: Triton 3.6 loses a wgmma descriptor of tiles that share an address under different swizzles",
            "use kv_stages=2, or tile_m=32",
        )
    return LEGAL


def needs_pipeline(variant: Fa2Variant, workload: Workload, machine: Machine) -> bool:
    """Whether every loop must be pipelined, also one that runs at most once.

    Without a pipeline the tiles of K and V share one address.  Where their swizzles differ, ptxas 12.8 (Triton 3.6) loses a
    wgmma descriptor of one of them: the wgmma reads registers that nothing wrote, so scores are wrong or the GPU faults.
    """
    widths = {*tile_widths(workload.head_dim_qk), *tile_widths(workload.head_dim_v)}
    swizzles = {min(_SWIZZLE_BYTES, width * workload.dtype_bytes) for width in widths}
    return machine.tensor_kind == "wgmma" and variant.tile_m >= _WGMMA_ROWS and len(swizzles) > 1


def tile_widths(head_dim: int) -> tuple[int, ...]:
    """Powers of two, largest first, that add up to ``head_dim``; each is one tl.dot."""
    return tuple(1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1)


def space(workload: Workload, _machine: Machine) -> Grid[Fa2Variant]:
    """Every combination of knobs worth telling apart, in order of preference among equals."""
    schedulers = ("grid",) if workload.mask == "none" else ("longest-first", "grid")
    tiles = ((128, 8), (128, 4), (64, 4), (64, 8), (256, 8), (32, 4))
    rows = product(schedulers, tiles, (128, 64, 32, 16, 96, 256), (3, 2, 4, 1))
    knobs = ("scheduler", "tile_m", "warps", "tile_n", "kv_stages")
    return Grid(Fa2Variant, knobs, ((scheduler, *tile, *others) for scheduler, tile, *others in rows))


def published(workload: Workload, machine: Machine) -> Fa2Variant:
    """The variant that FlashAttention-2 ships for this shape."""
    wide = workload.head_dim_v > 64
    return Fa2Variant(
        tile_n=64 if wide or machine["smem.per_cta_bytes"] < 120_000 else 128,
        tile_m=128 if workload.head_dim_v <= 128 else 64,
    )


def structure(v: Fa2Variant) -> tuple[object, ...]:
    """What decides the shape of the loop."""
    return (v.tile_m, v.tile_n, v.warps)


def plainness(v: Fa2Variant) -> tuple[float, ...]:
    """Smaller is plainer."""
    return (v.scheduler != "grid", v.kv_stages)
