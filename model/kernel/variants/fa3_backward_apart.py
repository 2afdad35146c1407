"""A Hopper backward of two kernels for head dimensions above 128: knobs, legality, what the template writes, first choices.

Seven matrix products and no sum over programs.  dK and dV of 64 keys fill the registers of two warpgroups, one each, or at 192/128
those of one; dQ of 128 queries those of two.  With five products dQ would leave in float32 for every 64 keys, more bytes than an SM
can add, or there would be no registers for it beside those of 128.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilecast.model.kernel.verdict import LEGAL, Verdict, over_limit
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: The family, and the template that writes it.
NAMES = ("fa3_bwd_apart", "hopper_bwd_apart")
#: Rows of a warpgroup and of every tile: the M of wgmma.
TILE = 64
#: Tiles of Q, dO and P in the kernel of the keys, of K in that of the queries.
STAGES = 2
#: Registers a thread of a warpgroup that multiplies may have.
REGISTERS = 240
#: Query rows of the loop over queries that take as long as what a program does once, and the sum of parts (docs/notes/backward-kernels.md).
ONCE_ROWS = 160
#: Time of the programs of the queries over that of those of the keys, beside which they run (docs/notes/backward-kernels.md).
BESIDE = 0.6
#: (head_dim_qk, head_dim_v) that the template is written for.
WRITTEN = ((192, 128), (192, 192), (256, 256))
#: Columns of K and V up to which the kernel of the queries has two tiles of V.
_COLUMNS_OF_TWO = 320
#: Bytes beside the tiles: barriers, and what the compiler hands to the roles.
_MARGIN = 512


@dataclass(frozen=True, slots=True)
class Fa3BackwardApartVariant:
    """Heads whose blocks programs take by turns."""

    family: str = "fa3_bwd_apart"
    heads_abreast: int = 4


def _list(dims: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{qk}" if qk == v else f"{qk}/{v}" for qk, v in dims)


def own_keys(workload: Workload) -> bool:
    """Whether each warpgroup of the kernel of the keys has keys of its own: dK, dV and all else of them fit its registers.

    Not with a window: of 128 keys more tiles of queries are cut by it than of 64.
    """
    return workload.mask != "window" and _own_registers(workload.head_dim_qk + workload.head_dim_v) <= REGISTERS


def keys(workload: Workload) -> int:
    """Keys of a program of the kernel of the keys."""
    return 2 * TILE if own_keys(workload) else TILE


def value_stages(workload: Workload) -> int:
    """Tiles of V in the kernel of the queries: two, as of K, but where heads are so wide that both take the place."""
    return STAGES if workload.head_dim_qk + workload.head_dim_v <= _COLUMNS_OF_TWO else 1


def _own_registers(columns: int) -> int:
    """Registers a thread of a warpgroup that has keys of its own: dK and dV, P for the product, dP in float32, a row of terms."""
    return TILE * (columns + TILE // 2 + TILE + TILE // 4) // 128


def shared_bytes(variant: Fa3BackwardApartVariant, workload: Workload) -> int:
    """Shared memory of the tiles of the larger kernel: that of the keys has K, V, stages of Q and dO and of two terms a row, of P in
    float32 where warpgroups share keys; that of the queries Q, dO, and stages of K and V."""
    dims = workload.head_dim_qk, workload.head_dim_v
    own = own_keys(workload)
    rows, size = TILE * sum(dims), workload.dtype_bytes
    for_keys = size * ((2 if own else 1) + STAGES) * rows + STAGES * ((0 if own else 4 * TILE * TILE) + 8 * TILE)
    for_queries = size * (2 * rows + TILE * (STAGES * dims[0] + value_stages(workload) * dims[1]))
    return max(for_keys, for_queries)


def registers(variant: Fa3BackwardApartVariant, workload: Workload) -> int:
    """Registers a thread that tiles of the kernel of the queries take at least: dQ, P and dP in float32, dS for the product."""
    return TILE * (workload.head_dim_qk + 2 * TILE + TILE // 2) // 128


def legality(variant: Fa3BackwardApartVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the machine can run ``variant``."""
    if machine.tensor_kind != "wgmma":
        return Verdict(
            f"family fa3_bwd_apart multiplies with wgmma, which {machine.name} has not", "use family fa2_bwd"
        )
    need, limit = shared_bytes(variant, workload), machine["smem.per_cta_bytes"] - _MARGIN
    if need > limit:
        return over_limit("shared memory", need, limit, "bytes", "use family fa2_bwd")
    if (need := registers(variant, workload)) > REGISTERS:
        return over_limit("a thread that multiplies", need, REGISTERS, "registers", "use family fa2_bwd")
    return LEGAL


def writable(variant: Fa3BackwardApartVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the template can write a legal ``variant``."""
    if workload.dtype not in ("bf16", "fp16"):
        return Verdict(
            f"family fa3_bwd_apart is written for bf16 and fp16, got dtype '{workload.dtype}'", "use bf16 or fp16"
        )
    dims = workload.head_dim_qk, workload.head_dim_v
    if dims not in WRITTEN:
        return Verdict(
            f"family fa3_bwd_apart is written for head_dim {_list(WRITTEN)}, got {dims[0]}/{dims[1]}",
            "use family fa3_bwd or fa2_bwd",
        )
    return LEGAL


def space(workload: Workload, machine: Machine) -> Iterator[Fa3BackwardApartVariant]:
    """Every combination of knobs worth telling apart that can be written and run."""
    for abreast in (1, 2, 4, 8, 16, 32):
        found = Fa3BackwardApartVariant(NAMES[0], abreast)
        if legality(found, workload, machine).legal and writable(found, workload, machine).legal:
            yield found


def chosen(workload: Workload, machine: Machine) -> Fa3BackwardApartVariant:
    """The variant to start from for a shape: what ran fastest on an H200 (data/measured/h200_backward_kernels.csv)."""
    return Fa3BackwardApartVariant(heads_abreast=4 if workload.mask == "none" else 8)
