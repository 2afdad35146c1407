"""FlashAttention-3 class backward for Hopper: knobs, legality, what the template writes, space, first choices.

One kernel and five matrix products: two warpgroups have 64 keys each, keep dK and dV of them and walk over the queries; dQ
goes through shared memory to a float32 sum in global memory, where programs add in the order of their keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from tilecast.model.kernel.verdict import LEGAL, Verdict, over_limit
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: The family, and the template that writes it.
NAMES = ("fa3_bwd", "hopper_bwd")
#: Keys of a program: two warpgroups with as many rows each as a wgmma has.
TILE_N, KEYS = 128, 64
#: Tiles of Q and dO that are on their way or in use, and of dS.
STAGES = 2
#: Registers a thread of a warpgroup that multiplies may have.
REGISTERS = 240
#: Bytes beside the tiles: barriers, and what the compiler hands to the roles.
_MARGIN = 512


@dataclass(frozen=True, slots=True)
class Fa3BackwardVariant:
    """Query rows of a step, tiles of dQ on their way out, heads whose keys programs take by turns, order of the last two
    products, warps that add, what runs while dQ is stored, and how it lies then."""

    family: str = "fa3_bwd"
    tile_m: int = 64
    dq_slots: int = 2
    heads_abreast: int = 16
    #: Whether dK is issued before dQ, which waits for the other warpgroup.
    dk_first: bool = False
    #: Warps that add up dQ, tiles by turns: a tile is added for longer than a step takes.
    adders: int = 2
    #: Whether dK runs while the other warpgroup's dS comes, and the next step's S^T while dQ is stored.
    ahead: bool = False
    #: Whether dQ is stored, and summed, in the order in which registers hold it: 16 bytes of a thread at a time, which no two
    #: threads write to one bank of shared memory.
    fragments: bool = False


def shared_bytes(variant: Fa3BackwardVariant, workload: Workload) -> int:
    """Shared memory of the tiles: K, V, stages of Q, dO and dS, dQ in float32, and two float32 terms for each row."""
    v, d = variant, workload.head_dim_qk
    halves = TILE_N * 2 * d + STAGES * (2 * v.tile_m * d + TILE_N * v.tile_m)
    return workload.dtype_bytes * halves + 4 * v.dq_slots * v.tile_m * d + 8 * STAGES * v.tile_m


def registers(variant: Fa3BackwardVariant, workload: Workload) -> int:
    """Registers a thread that sums and score tiles take at least: dK, dV, P in float32 and for the product, dP.

    Steps of 128 queries go in two halves, of which P, dP and the next S are there at a time.
    """
    tiles = 2 * workload.head_dim_qk + (64 + 64 + 32 if variant.tile_m == 64 else 3 * 64 + 32)
    return KEYS * tiles // 128


def legality(variant: Fa3BackwardVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the machine can run ``variant``."""
    if machine.tensor_kind != "wgmma":
        return Verdict(f"family fa3_bwd multiplies with wgmma, which {machine.name} has not", "use family fa2_bwd")
    need, limit = shared_bytes(variant, workload), machine["smem.per_cta_bytes"] - _MARGIN
    if need > limit:
        return over_limit("shared memory", need, limit, "bytes", "use a smaller tile_m or dq_slots=1")
    if (need := registers(variant, workload)) > REGISTERS:
        return over_limit("a thread that multiplies", need, REGISTERS, "registers", "use family fa2_bwd")
    return LEGAL


def writable(variant: Fa3BackwardVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the template can write a legal ``variant``."""
    if workload.dtype not in ("bf16", "fp16"):
        return Verdict(f"family fa3_bwd is written for bf16 and fp16, got dtype '{workload.dtype}'", "use bf16 or fp16")
    dims = workload.head_dim_qk, workload.head_dim_v
    if dims not in ((64, 64), (128, 128)):
        return Verdict(
            f"family fa3_bwd is written for head_dim 64 and 128, got {dims[0]}/{dims[1]}", "use family fa2_bwd"
        )
    if workload.mask == "window":
        return Verdict("family fa3_bwd is not written for windows", "use family fa2_bwd")
    if variant.tile_m * dims[0] != TILE_N * KEYS:
        # dQ of a step is one 64x64 tile for each warpgroup.
        return Verdict(f"tile_m must be {TILE_N * KEYS // dims[0]} at head_dim {dims[0]}, got {variant.tile_m}",
                       f"use tile_m={TILE_N * KEYS // dims[0]}")  # fmt: skip
    if variant.dq_slots not in (1, 2):
        return Verdict(f"dq_slots must be 1 or 2, got {variant.dq_slots}", "use dq_slots=2")
    if variant.adders not in (1, 2):
        return Verdict(f"adders must be 1 or 2, got {variant.adders}", "use adders=2")
    if variant.ahead and variant.dk_first:
        return Verdict("with ahead=true dK goes before dQ already, got dk_first=true as well", "use dk_first=false")
    return LEGAL


def space(workload: Workload, machine: Machine) -> Iterator[Fa3BackwardVariant]:
    """Every combination of knobs worth telling apart that can be written and run."""
    switch = (False, True)
    # At head_dim 128, 64 heads were slower at every length measured: L2 has less to share the more Q and dO there are.
    abreast = (1, 2, 4, 8, 16, 32, *((64,) if workload.head_dim_qk <= 64 else ()))
    for knobs in product((64, 128), (1, 2), abreast, switch, (1, 2), switch, switch):
        found = Fa3BackwardVariant(NAMES[0], *knobs)
        if legality(found, workload, machine).legal and writable(found, workload, machine).legal:
            yield found


def chosen(workload: Workload, machine: Machine) -> Fa3BackwardVariant:
    """The variant to start from for a shape: what ran fastest on an H200 (data/measured/h200_backward_kernels.csv).

    The more heads abreast, the less programs of one wait for each other; the fewer, the more of Q and dO they share in L2.
    """
    wide = max(workload.head_dim_qk, workload.head_dim_v) > 64
    abreast = 16 if wide else 32 if workload.mask == "none" else 64
    return Fa3BackwardVariant(tile_m=64 if wide else 128, heads_abreast=abreast, ahead=not wide, fragments=True)
