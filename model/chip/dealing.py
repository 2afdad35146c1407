"""How the programs of a launch come by their tiles, under each scheduler of a kernel class.

The rules are those of what the templates write (`codegen`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.chip.programs import most_keys, sms_abreast, soonest_launch, start_keys
from tilecast.model.kernel.workload import Workload


@dataclass(frozen=True, slots=True)
class Dealing:
    """One way to deal the tiles of all heads to programs."""

    #: Whether a program lives on from tile to tile, as against one program a tile.
    stays: bool
    #: "rows": head by head, first rows first; "last rows": head by head, last rows first; "longest": the longest tiles of
    #: all heads first; "longest by few": those of as many heads as L2 holds; "pairs": head by head, a long and a short tile
    #: together, unless there is a program for every tile.
    order: str
    #: "free": the next tile goes to who is free first; "turns": to one after the other; "zigzag": turns, to and fro.
    hand: str


_DEALINGS = {
    "grid": Dealing(False, "rows", "free"),
    "longest-first": Dealing(False, "longest by few", "free"),
    # The same where a kernel class means something else by that: FlashAttention-4's for causal masks on Hopper.
    "longest-grid": Dealing(False, "longest by few", "free"),
    "persistent": Dealing(True, "rows", "turns"),
    "work-stealing": Dealing(True, "rows", "free"),
    "paired": Dealing(True, "pairs", "zigzag"),
}
#: What a kernel class does otherwise.
_OF_FAMILY = {
    # Hopper's longest-first programs stay; its grid begins with the rows that see the most keys.
    # FlashAttention-3's own scheduler is the last: programs that stay take the longest tile left of a few heads.
    "fa3": {
        "grid": Dealing(False, "last rows", "free"),
        "longest-first": Dealing(True, "longest", "zigzag"),
        "work-stealing": Dealing(True, "longest by few", "free"),
    },
    # Portable Triton goes on with the next head when one is done.
    "fa2": {"longest-first": Dealing(False, "last rows", "free")},
}


def dealing(family: str, scheduler: str) -> Dealing:
    """How kernels of ``family`` deal tiles under ``scheduler``."""
    return _OF_FAMILY.get(family, {}).get(scheduler) or _DEALINGS[scheduler]


def launched(family: str, scheduler: str, workload: Workload, rows: int, keys: int, slots: int) -> str:
    """The scheduler that a launch on ``slots`` runs by: where tiles of Hopper kernels are done sooner otherwise, they are not paired.

    Tiles are of ``rows`` queries and go over blocks of ``keys`` keys.
    """
    if (family, scheduler, workload.mask) != ("fa3", "paired", "causal"):
        return scheduler
    programs, turns = in_pairs(workload, rows, keys, slots)
    if turns % 2 == 0 or (turns == 1 and programs <= slots):
        return scheduler
    return "grid" if turns == 1 else "longest-first"


def in_pairs(workload: Workload, rows: int, keys: int, slots: int) -> tuple[int, int]:
    """(programs, turns of each) of a launch of the paired scheduler of Hopper kernels (`soonest_launch`)."""
    w, dims = workload, (workload.head_dim_qk, workload.head_dim_v)
    heads, heads_kv = w.batch * w.heads_q, w.batch * w.heads_kv
    limits = start_keys(*dims), most_keys(*dims, w.dtype_bytes), sms_abreast(w.dtype_bytes)
    return soonest_launch(w.seqlen_q, w.seqlen_k, heads, heads_kv, slots, rows, keys, *limits)[1:]
