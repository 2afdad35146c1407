"""FlashAttention-3 class backward for Hopper: knobs, legality, what the template writes, space, first choices.

One kernel and five matrix products: two warpgroups have 64 keys each, keep dK and dV of them and walk over the queries; dQ
goes through shared memory to a float32 sum in global memory, where programs add in the order of their keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from tilecast.model.kernel.verdict import LEGAL, Verdict, over_limit
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: The family, and the template that writes it.
NAMES = ("fa3_bwd", "hopper_bwd")
#: Keys of a program: two warpgroups with as many rows each as a wgmma has.
TILE_N, KEYS = 128, 64
#: Query rows of a step: whole tiles of 64 columns of S^T.
TILES_M = (64, 128)
#: Tiles of Q and dO that are on their way or in use, and of dS.
STAGES = 2
#: Heads that are abreast however long they are, and what L2 is to hold of more: measured, docs/notes/backward-kernels.md.
LEAST_ABREAST, _L2_BYTES = 16, 2**25
#: Heads abreast where sums of dQ may have any order: no program waits then, and few share L2 (docs/notes/backward-kernels.md).
ANY_ORDER_ABREAST = 8
#: Query rows of a program's loop that take as long as what it does once (K and V come, dK and dV go), and their part of the sum of parts
#: (docs/notes/backward-kernels.md).
ONCE_ROWS = 96
#: Items that a program was dealt and not all of its roles have taken.
DEALT = 2
#: Numbers of a row that products subtract, and bf16 pieces of a row: the K of a wgmma.
FOLDED, PIECES = ("none", "lse", "both"), 16
#: Knobs that were fastest at every shape measured on an H100 and an H200, and are all that the template writes
#: (docs/notes/backward-kernels.md has what the others cost): at head_dim 128 K and V do not fit into registers, nor what "both" takes.
_EVERYWHERE: dict[str, Any] = {"dk_first": False, "fragments": True, "persistent": True}
_WRITTEN: dict[int, dict[str, Any]] = {
    64: {"tile_m": 128, "ahead": True, "folded": "both", "held": True, **_EVERYWHERE},
    128: {"tile_m": 64, "ahead": False, "folded": "lse", "held": False, **_EVERYWHERE},
}
#: The same of 192 columns with values of 128 (`thirds`): all tiles have one slot but Q and dS, and dS of dK is shared memory's too.
_THIRDS: dict[str, Any] = {
    "tile_m": 64, "ahead": False, "folded": "none", "held": False, **_EVERYWHERE, "dk_first": True, "dq_slots": 1
}  # fmt: skip
#: Columns of a tile of Q, K or dQ where a head has three.
COLUMNS = 64
#: Registers a thread of a warpgroup that multiplies may have.
REGISTERS = 240
#: Bytes beside the tiles: barriers, and what the compiler hands to the roles.
_MARGIN = 512


@dataclass(frozen=True, slots=True)
class Fa3BackwardVariant:
    """Query rows of a step, tiles of dQ on their way out, heads whose keys programs take by turns, order of the last two
    products, warps that add, what runs while dQ is stored, how it lies then, what products take of shared memory, and for how many
    blocks of keys a program is there."""

    family: str = "fa3_bwd"
    tile_m: int = 64
    dq_slots: int = 2
    #: Heads whose blocks of keys programs take by turns; above `LEAST_ABREAST` at most, as L2 has room for (`abreast`).
    heads_abreast: int = 16
    #: Whether dK is issued before dQ, which waits for the other warpgroup.
    dk_first: bool = False
    #: Warps that add up dQ, tiles by turns: a tile is added for longer than a step takes.
    adders: int = 2
    #: Whether dK runs while the other warpgroup's dS comes, and the next step's S^T while dQ is stored.
    ahead: bool = False
    #: Whether dQ is stored, and summed, in the order in which registers hold it: 16 bytes of a thread at a time, which no two
    #: threads write to one bank of shared memory.
    fragments: bool = True
    #: What products subtract of each query, as three bf16 pieces that lie beside Q and dO: "none", the LSE of its scores ("lse"), or
    #: D of its dP too ("both").  What is left all threads load, eight bytes at a time, and shared memory gives that to each.
    folded: str = "lse"
    #: Whether K and V of a warpgroup stay in registers, of which a product reads shared memory less.
    held: bool = False
    #: Whether programs stay, as many as there are SMs, and are dealt one block of keys after the other.
    persistent: bool = False


def thirds(workload: Workload) -> bool:
    """Whether a head is three tiles of Q, K and dQ, of which each warpgroup makes one and by turns the last."""
    return (workload.head_dim_qk, workload.head_dim_v) == (3 * COLUMNS, 2 * COLUMNS) and workload.mask != "window"


def dout_stages(workload: Workload) -> int:
    """Tiles of dO on their way or in use: where thirds of dQ leave there is room for one."""
    return 1 if thirds(workload) else STAGES


def _written(workload: Workload) -> dict[str, Any] | None:
    """Knobs that the template is written for, None where it is not."""
    if thirds(workload):
        return _THIRDS
    return _WRITTEN.get(workload.head_dim_qk) if workload.head_dim_qk == workload.head_dim_v else None


def abreast_rows(variant: Fa3BackwardVariant, mask: str) -> int:
    """Queries of heads abreast for whose tiles of Q and dO, 2 bytes an element, and sums of dQ, 4, L2 has room; 0: as many as there are.

    With a causal mask programs are at half of them at a time, and half as much again was fastest.  Kernels that loaded all numbers of a row counted no such rows.
    """
    if variant.heads_abreast <= LEAST_ABREAST or variant.folded == "none":
        return 0
    return _L2_BYTES * (3 if mask == "causal" else 2) // (16 * TILE_N * KEYS // variant.tile_m)


def dq_chains(heads: int, steps: int, key_blocks: int) -> int:
    """Chains of a head's blocks of keys, dealt to them in turn: the programs of each add to a sum of dQ of their own, in order.

    Not in the batch at hand, on which no bit of dQ may depend: `heads` of dK and dV are those of one sequence, `steps` those of a program.
    The next program of a chain adds some two steps later, so 132 SMs are at work from 264 chains over two more than the steps on
    (`heads_abreast`).  A chain has 8 blocks at least: its sum is written and read once more.
    """
    return max(1, min(264 // ((steps + 2) * heads), key_blocks // 8))


def dq_sums(chains: int, heads: int, steps: int, key_blocks: int, seen_by_all: int) -> int:
    """Sums of a block of dQ: one for each chain; where there is one chain, one for each block of keys if programs would wait for each other.

    The sums of blocks are added up in the order of the blocks and have the bits of programs that add in turn, so the batch may decide:
    `heads` of dK and dV are all of a launch.  Nobody waits then, and each sum is written and read once more.  With a causal mask programs of
    later keys have fewer steps and wait for nothing; `seen_by_all`: blocks of keys that all queries see.
    """
    waits = 2 * seen_by_all >= key_blocks and 264 // ((steps + 2) * heads) > 1
    return key_blocks if chains == 1 and waits else chains


def heads_abreast(
    most: int,
    rows: int,
    seqlen_q: int,
    steps: int,
    group: int,
    key_blocks: int,
    heads: int,
    causal: bool,
    in_order: bool,
) -> int:
    """Heads of dK and dV, of `heads`, whose blocks of keys programs take by turns (all numbers measured, docs/notes/backward-kernels.md).

    The fewer programs of one head run together, the less they wait at its first block of dQ; the more heads, the less L2 has for each.
    `most`: of a variant, or where sums may have any order, for which nobody waits; `rows`: queries of all heads abreast for which L2 has room, 0: any; `steps`: of a program for a block without a mask; `group`:
    query heads that share keys; `in_order`: whether sums of dQ wait for each other.
    """
    if in_order and rows:
        most = max(min(most, rows // seqlen_q), 16)
    if in_order and steps <= 4:
        # The next program of a head waits longer for its turn than its own item takes.
        most = max(most, 264 // (steps + 2))
    if causal and group > 1:
        # Items of several query heads are few and long: with few heads abreast the last ones dealt are the longest of their head.
        most = max(most, 32 if key_blocks <= 16 else 16 if key_blocks <= 48 else 0)
        # Nor may a few heads come last, with their longest blocks.
        most = max(most, heads) if heads < 2 * most else most
    return most


def abreast(variant: Fa3BackwardVariant, workload: Workload, parts: int = 1) -> int:
    """`heads_abreast` of a problem, where each key/value head has ``parts`` of its query heads."""
    w, rows = workload, abreast_rows(variant, workload.mask)
    if not variant.persistent:
        return max(min(variant.heads_abreast, rows // w.seqlen_q), LEAST_ABREAST) if rows else variant.heads_abreast
    steps = -(-w.seqlen_q // variant.tile_m) * -(-w.group_size // parts)
    blocks, heads = -(-w.seqlen_k // TILE_N), w.batch * w.heads_kv * parts
    return heads_abreast(
        variant.heads_abreast, rows, w.seqlen_q, steps, w.group_size, blocks, heads, w.mask == "causal", True
    )


def chains(variant: Fa3BackwardVariant, workload: Workload, parts: int = 1) -> int:
    """`dq_chains` of a problem, where each key/value head has ``parts`` of its query heads; with a window there is one."""
    w = workload
    if w.mask == "window" or not variant.persistent:
        return 1
    steps = -(-w.seqlen_q // variant.tile_m) * -(-w.group_size // parts)
    return dq_chains(w.heads_kv * parts, steps, -(-w.seqlen_k // TILE_N))


def sums(variant: Fa3BackwardVariant, workload: Workload, parts: int = 1) -> int:
    """`dq_sums` of a problem likewise."""
    w = workload
    if w.mask == "window" or not variant.persistent:
        return 1
    steps, blocks = -(-w.seqlen_q // variant.tile_m) * -(-w.group_size // parts), -(-w.seqlen_k // TILE_N)
    seen = max(w.seqlen_k - w.seqlen_q, 0) // TILE_N if w.mask == "causal" else blocks
    return dq_sums(chains(variant, w, parts), w.batch * w.heads_kv * parts, steps, blocks, seen)


def piece_slots(variant: Fa3BackwardVariant) -> int:
    """Tiles of pieces that are on their way or in use: where K and V take all the room, one."""
    return 0 if variant.folded == "none" else STAGES if variant.held else 1


def loaded_terms(variant: Fa3BackwardVariant) -> int:
    """Numbers of a row that threads load as float32: LSE and D, D, or none."""
    return len(FOLDED) - 1 - FOLDED.index(variant.folded)


def piece_bytes(variant: Fa3BackwardVariant) -> int:
    """Bytes of a row's pieces, in memory and in a tile of them."""
    return 0 if variant.folded == "none" else 2 * PIECES


def term_bytes(variant: Fa3BackwardVariant) -> int:
    """Shared memory of the rows' numbers: float32 that are loaded, and pieces."""
    return variant.tile_m * (4 * loaded_terms(variant) * STAGES + piece_bytes(variant) * piece_slots(variant))


def shared_bytes(variant: Fa3BackwardVariant, workload: Workload) -> int:
    """Shared memory of the tiles: K, V unless it is held, which comes as if it were dO, stages of Q, dO and dS, dQ in float32, terms."""
    v, d, dv = variant, workload.head_dim_qk, workload.head_dim_v
    owned = TILE_N * (d if v.held else d + dv)
    halves = owned + STAGES * (v.tile_m * d + TILE_N * v.tile_m) + dout_stages(workload) * v.tile_m * dv
    return workload.dtype_bytes * halves + 4 * v.dq_slots * v.tile_m * d + term_bytes(v)


def registers(variant: Fa3BackwardVariant, workload: Workload) -> int:
    """Registers a thread that sums and score tiles take at least: dK, dV, P in float32 and for the product, dP.

    Steps of 128 queries go in two halves, of which P, dP and the next S are there at a time.  K and V that are held take half as
    many each as their sums.
    """
    tiles = workload.head_dim_qk + workload.head_dim_v + (64 + 64 + 32 if variant.tile_m == 64 else 3 * 64 + 32)
    held = workload.head_dim_qk if variant.held else 0
    return KEYS * (tiles + held) // 128


def legality(variant: Fa3BackwardVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the machine can run ``variant``."""
    if machine.tensor_kind != "wgmma":
        return Verdict(f"family fa3_bwd multiplies with wgmma, which {machine.name} has not", "use family fa2_bwd")
    if variant.folded not in FOLDED:
        return Verdict(f"folded must be one of {', '.join(FOLDED)}, got '{variant.folded}'", "use folded=lse")
    if variant.tile_m not in TILES_M:
        return Verdict(f"tile_m must be {TILES_M[0]} or {TILES_M[1]}, got {variant.tile_m}", f"use tile_m={TILES_M[0]}")
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
    dims, written = (workload.head_dim_qk, workload.head_dim_v), _written(workload)
    if written is None:
        known = "head_dim 64, 128 and, without a window, 192/128"
        return Verdict(f"family fa3_bwd is written for {known}, got {dims[0]}/{dims[1]}", "use family fa2_bwd")
    for name, value in written.items():
        if (got := getattr(variant, name)) != value:
            want, got = (str(x).lower() for x in (value, got))
            return Verdict(f"{name} must be {want} at head_dim {workload.dims}, got {got}", f"use {name}={want}")
    if variant.dq_slots not in (1, 2):
        return Verdict(f"dq_slots must be 1 or 2, got {variant.dq_slots}", "use dq_slots=2")
    if variant.adders not in (1, 2):
        return Verdict(f"adders must be 1 or 2, got {variant.adders}", "use adders=2")
    return LEGAL


def _abreast(workload: Workload) -> tuple[int, ...]:
    # At head_dim 128, 64 heads were slower at every length measured: L2 has less to share the more Q and dO there are.
    return (1, 2, 4, 8, 16, 32, *((64,) if workload.head_dim_qk <= 64 else ()))


def space(workload: Workload, machine: Machine) -> Iterator[Fa3BackwardVariant]:
    """Every combination of knobs worth telling apart that can be written and run."""
    written = _written(workload) or {}
    for slots, heads, adders in product((1, 2), _abreast(workload), (1, 2)):
        found = Fa3BackwardVariant(NAMES[0], heads_abreast=heads, adders=adders, **{"dq_slots": slots, **written})
        if found.dq_slots != slots:
            continue
        if legality(found, workload, machine).legal and writable(found, workload, machine).legal:
            yield found


def published(workload: Workload, machine: Machine) -> Iterator[Fa3BackwardVariant]:
    """FlashAttention-3's form, in which threads load LSE and D and products read K and V from shared memory, with any other knobs."""
    written = _WRITTEN.get(workload.head_dim_qk)
    if written is None or workload.mask == "window":
        return
    switch = (False, True)
    for slots, heads, dk_first, adders, ahead, fragments in product(
        (1, 2), _abreast(workload), switch, (1, 2), switch, switch
    ):
        found = Fa3BackwardVariant(
            NAMES[0], written["tile_m"], slots, heads, dk_first, adders, ahead, fragments, folded="none", held=False
        )
        if not (ahead and dk_first) and legality(found, workload, machine).legal:
            yield found


def chosen(workload: Workload, machine: Machine) -> Fa3BackwardVariant:
    """The variant to start from for a shape: what ran fastest on an H100 and an H200 (data/measured, h100_ and h200_backward_kernels.csv).

    The more heads abreast, the less programs of one wait for each other; the fewer, the more of Q and dO they share in L2.
    """
    if thirds(workload):
        return Fa3BackwardVariant(heads_abreast=16, **_THIRDS)
    wide = max(workload.head_dim_qk, workload.head_dim_v) > 64
    most = 16 if wide else 64 if workload.mask == "causal" else 32
    return Fa3BackwardVariant(heads_abreast=most, **_WRITTEN[128 if wide else 64])
