"""FlashAttention-4 class backward on tcgen05: knobs, legality, space, first choices.  No template writes it yet.

Structures and orders of the published kernels (flash-attention 4.0.0b36, docs/sources.md): one CTA or a pair with 128 keys each, S^T
and dP^T in tensor memory, where P^T and dS^T are the left operands of dV and dK; dQ leaves through registers and shared memory
to a float32 sum.  A pair exchanges halves of dS, so that each CTA sums dQ of half the queries over the keys of both.  At
head_dim 256 two kernels without a sum over programs.

Where query heads share keys, FlashAttention-4's one kernel has programs for each query head, which add dK and dV to float32 sums,
and its two go through the heads; cuDNN has each head's dK and dV, and then their sum (`dK_fullhead` of cudnn-frontend's graph).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from tilecast.model.kernel.verdict import LEGAL, Verdict, over_limit
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: The family, and the name that a template would have.
NAMES = ("fa4_bwd", "blackwell_bwd")
#: Query rows of a step, keys of a CTA; keys of a CTA of a pair where dK and dV are 256 wide.
TILE_M, TILE_N, NARROW_N = 128, 128, 64
#: Orders of a step: the next S and dP before this step's dQ is done, with slots of their own for P and dS, or one product after
#: the other.
ORDERS = ("pipelined", "own slots", "serial")
#: Columns of dQ that leave at a time, by CTAs of a pair, and tiles of them on their way.
DQ_COLUMNS, DQ_SLOTS = {1: 32, 2: 8}, {1: 2, 2: 4}
#: Bytes beside the tiles: barriers, LSE and D.
_MARGIN = 3 * 1024


@dataclass(frozen=True, slots=True)
class Fa4BackwardVariant:
    """CTAs that work together, order of a step, tiles of Q on their way, whether dK/dV and dQ have a kernel each, and whether query
    heads that share keys have programs of their own."""

    family: str = "fa4_bwd"
    cta_group: int = 1
    order: str = "pipelined"
    q_stages: int = 2
    apart: bool = False
    heads_apart: bool = False


def shared_bytes(variant: Fa4BackwardVariant, workload: Workload) -> int:
    """Shared memory of the tiles of a CTA, of the larger kernel of two."""
    v, size = variant, workload.dtype_bytes
    d, dv = workload.head_dim_qk, workload.head_dim_v
    if v.apart:
        # Keys: K and V of 64, halves of Q and dO as rows and as columns.  Queries: Q, dO of 128, halves of 64 rows of K, K by columns and V.
        keys = NARROW_N * (d + dv) + 2 * (TILE_M // 2) * (d + dv)
        queries = TILE_M * (d + dv) + NARROW_N * (2 * d + dv) // 2
        return size * max(keys, queries)
    scores = TILE_M * TILE_N
    if v.cta_group == 1:
        tiles = v.q_stages * TILE_M * d + TILE_N * (d + dv) + TILE_M * dv + scores
        return size * tiles + 4 * DQ_SLOTS[1] * TILE_M * DQ_COLUMNS[1]
    # Q, dO by halves in both orientations, K in both; the other CTA's half of dS.  One after the other, orientations take turns.
    serial = v.order == "serial"
    tiles = (1 if serial else 2) * (TILE_M // 2) * (v.q_stages * d + dv) + 2 * TILE_N * d + TILE_N * dv + scores
    # The other CTA's half of dS has a place of its own, or that of dQ on its way out.
    leaving, coming = 4 * DQ_SLOTS[2] * TILE_M * DQ_COLUMNS[2], size * scores // 2
    return size * tiles + (max(leaving, coming) if serial else leaving + coming)


def columns(variant: Fa4BackwardVariant, workload: Workload) -> int:
    """Columns of tensor memory that sums and score tiles take; a 64-row tile of a pair takes half as many."""
    v, d, dv = variant, workload.head_dim_qk, workload.head_dim_v
    if v.apart:
        return max((d + dv + 2 * TILE_M) // 2, d + 2 * TILE_N)
    if v.order == "own slots":
        return 2 * TILE_M + TILE_M + d + dv
    if v.order == "serial":
        # dP lies over half of S, dQ over both.
        return d + dv + 3 * TILE_M // 2
    # P over S; dS over dP, and dQ over it (a CTA) or over the tail of S (a pair).
    return 2 * max(TILE_M, d if v.cta_group == 1 else 0) + d + dv


def legality(variant: Fa4BackwardVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the machine can run ``variant``."""
    v = variant
    if machine.tensor_kind != "tcgen05":
        return Verdict(f"family fa4_bwd multiplies with tcgen05, which {machine.name} has not", "use family fa2_bwd")
    if v.order not in ORDERS:
        return Verdict(f"order must be one of {', '.join(ORDERS)}, got '{v.order}'", "use order=pipelined")
    if v.cta_group not in (1, 2) or v.q_stages not in (1, 2):
        return Verdict(f"cta_group and q_stages must be 1 or 2, got {v.cta_group} and {v.q_stages}", "use one of them")
    if v.order == "own slots" and v.cta_group == 2:
        return Verdict("slots of their own for P and dS go with one CTA, got cta_group 2", "use order=pipelined")
    if v.cta_group == 1 and v.order != "serial" and v.q_stages == 1:
        return Verdict(
            "the next S is issued before dK, which reads the Q before: one CTA needs q_stages 2", "use q_stages=2"
        )
    if v.apart and (v.cta_group != 2 or v.order != "pipelined" or v.q_stages != 1):
        return Verdict("two kernels go with cta_group 2, order pipelined and q_stages 1", "use those, or apart=false")
    if v.heads_apart and workload.group_size == 1:
        return Verdict("heads_apart goes with query heads that share keys, got one to each", "use heads_apart=false")
    need = columns(v, workload)
    if need > machine["tmem.columns"]:
        return over_limit("tensor memory", need, machine["tmem.columns"], "columns", "use order=serial with cta_group=2, or apart=true")  # fmt: skip
    need, limit = shared_bytes(v, workload), machine["smem.per_cta_bytes"] - _MARGIN
    if need > limit:
        return over_limit("shared memory", need, limit, "bytes", "use q_stages=1 or apart=true")
    return LEGAL


def writable(variant: Fa4BackwardVariant, workload: Workload, machine: Machine) -> Verdict:
    """No template writes the class yet."""
    return Verdict("family fa4_bwd is forecast but not written", "use family fa2_bwd to write one")


def space(workload: Workload, machine: Machine) -> Iterator[Fa4BackwardVariant]:
    """Every legal combination of knobs worth telling apart."""
    for apart, pair, order, stages, heads in product((False, True), (2, 1), ORDERS, (2, 1), (False, True)):
        found = Fa4BackwardVariant(NAMES[0], pair, order, stages, apart, heads)
        if workload.dtype in ("bf16", "fp16") and legality(found, workload, machine).legal:
            yield found


def published(workload: Workload, machine: Machine) -> Iterator[Fa4BackwardVariant]:
    """`space` without what nobody ships: one kernel whose programs go through the query heads that share their keys."""
    shared = workload.group_size > 1
    return (v for v in space(workload, machine) if v.apart or v.heads_apart == shared)


def chosen(workload: Workload, machine: Machine) -> Fa4BackwardVariant:
    """What flash-attention 4.0.0b36 takes for a shape."""
    wide, shared = max(workload.head_dim_qk, workload.head_dim_v), workload.group_size > 1
    if wide > 192:
        return Fa4BackwardVariant(NAMES[0], 2, "pipelined", 1, True)
    if wide > 128:
        return Fa4BackwardVariant(NAMES[0], 2, "serial", 1, heads_apart=shared)
    if wide > 64:
        return Fa4BackwardVariant(NAMES[0], 2, "pipelined", 1, heads_apart=shared)
    return Fa4BackwardVariant(NAMES[0], 1, "own slots", 2, heads_apart=shared)
