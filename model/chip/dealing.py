"""How the programs of a launch come by their tiles, under each scheduler of a kernel class.

The rules are those of what the templates write (`codegen`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilecast.model.chip.programs import finer_launch, most_keys, sms_abreast, soonest_launch, start_keys
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
    #: Of "pairs" how many rounds of all slots deal such, where that is not all: then come the tiles of the heads that are left, the
    #: longest of all first.
    rounds: int | None = None


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


def dealt(family: str, scheduler: str, workload: Workload, rows: int, keys: int, slots: int) -> Dealing:
    """How a launch on ``slots`` deals its tiles (`launched`)."""
    made = dealing(family, launched(family, scheduler, workload, rows, keys, slots))
    rounds = rounds_of_pairs(family, scheduler, workload, rows, keys, slots) if made.order == "pairs" else None
    return made if rounds is None else replace(made, rounds=rounds)


def in_pairs(workload: Workload, rows: int, keys: int, slots: int) -> tuple[int, int]:
    """(programs, turns of each) of a launch of the paired scheduler of Hopper kernels (`soonest_launch`)."""
    return soonest_launch(*_launch(workload, rows, keys, slots))[1:]


def rounds_of_pairs(family: str, scheduler: str, workload: Workload, rows: int, keys: int, slots: int) -> int | None:
    """How many tiles of each program are the long ones of pairs, where not all tiles are pairs' (`finer_launch`, which kernels of 8 bits
    ask); None where they are, or none is."""
    if (family, scheduler, workload.mask, workload.dtype_bytes) != ("fa3", "paired", "causal", 1):
        return None
    asked = _launch(workload, rows, keys, slots)
    _, _, turns, pair_turns = finer_launch(*asked)
    return pair_turns // 2 if soonest_launch(*asked)[2] % 2 == 0 and pair_turns < turns else None


def _launch(
    workload: Workload, rows: int, keys: int, slots: int
) -> tuple[int, int, int, int, int, int, int, int, int, int]:
    """What `soonest_launch` is asked."""
    w, dims = workload, (workload.head_dim_qk, workload.head_dim_v)
    heads, heads_kv = w.batch * w.heads_q, w.batch * w.heads_kv
    limits = start_keys(*dims), most_keys(*dims, w.dtype_bytes), sms_abreast(w.dtype_bytes)
    return w.seqlen_q, w.seqlen_k, heads, heads_kv, slots, rows, keys, *limits
