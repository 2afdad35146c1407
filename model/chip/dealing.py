"""How the programs of a launch come by their tiles, under each scheduler of a kernel class.

The rules are those of what the templates write (`codegen`).
"""

from __future__ import annotations

from dataclasses import dataclass


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
