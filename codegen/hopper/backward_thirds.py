"""The form of the `hopper_bwd` family for heads of 192 columns with values of 128: tiles of 128 and 64 columns, dQ in thirds.

dK and dV of 64 keys take 160 registers of a thread, so a tile of dQ, 64 x 192, may not be there at once: each warpgroup makes 64 of its
columns, and by turns the last.  All of shared memory is taken: dO has one tile, dQ one whose thirds leave, and are told of, on their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.codegen.gluon import in_lines
from tilecast.codegen.hopper import backward
from tilecast.codegen.hopper.backward import HopperBackward
from tilecast.model.kernel.variants.fa3_backward import COLUMNS, Fa3BackwardVariant
from tilecast.model.kernel.workload import Workload

#: What the kernel of the products takes: (its name, tensor, constants of its box's rows and columns).
_BOXES = (
    ("q", "q", "TILE_M", "FIRST_COLUMNS"),
    ("q_last", "q", "TILE_M", "COLUMNS"),
    ("dout", "dout", "TILE_M", "COLUMNS_V"),
    ("k", "k", "TILE_N", "FIRST_COLUMNS"),
    ("k_last", "k", "TILE_N", "COLUMNS"),
    ("v", "v", "TILE_N", "COLUMNS_V"),
    ("sums", "sums", "THIRD_ROWS", "SUM_COLUMNS"),
    ("dk", "made_dk", "KEYS", "COLUMNS"),
    ("dv", "made_dv", "KEYS", "COLUMNS"),
)


@dataclass(frozen=True, slots=True)
class HopperBackwardThirds(HopperBackward):
    """The same of three tiles."""

    @property
    def form(self) -> str:
        """Its parts of the template."""
        return "thirds"

    @property
    def in_pieces(self) -> bool:
        """There is no room for pieces beside all the tiles: LSE and D are loaded."""
        return False

    @property
    def keeps_deltas(self) -> bool:
        """D is one of the terms."""
        return False

    @property
    def tiles(self) -> int:
        """Thirds of a tile of dQ."""
        return self.head_dim // COLUMNS

    @property
    def sizes_of_a_head(self) -> str:
        """Columns of a third of dQ, of the first and the last tile of Q and K, and of a tile of V and dO; rows of a third of dQ."""
        third = self.variant.tile_m * COLUMNS // self.sum_columns
        return (
            f"COLUMNS, FIRST_COLUMNS = gl.constexpr({COLUMNS}), gl.constexpr({self.head_dim - COLUMNS})  # of the last tile of Q and K, and the first\n"
            f"COLUMNS_V = gl.constexpr({self.head_dim_v})  # of a tile of V and dO\n"
            f"TILES = gl.constexpr({self.tiles})  # of COLUMNS that dQ leaves in\n"
            f"THIRD_ROWS = gl.constexpr({third})  # of one of them in its workspace"
        )

    @property
    def columns_text(self) -> str:
        """Columns of tensors, for a docstring."""
        return f"{self.head_dim} or {self.head_dim_v}"

    @property
    def _in_shared(self) -> tuple[tuple[str, str], ...]:
        names = ("q", "q_last", "dout", "k", "k_last", "v", "ds", "dq", "dealt", "lse2", "delta")
        return (*((name, name) for name in names), ("barriers", "made"))

    @property
    def _barrier_slots(self) -> dict[str, int]:
        slots = {"Q_FULL": self.stages, "Q_EMPTY": self.stages, "DOUT_FULL": 1, "DOUT_EMPTY": 1}
        slots |= {"DQ_FULL": self.tiles * self.stages, "DQ_EMPTY": self.tiles, "DS_FULL": self.stages}
        return slots | {"DEALT_FULL": self.dealt, "DEALT_EMPTY": self.dealt, "KV_FULL": 1, "KV_EMPTY": 1}

    @property
    def _pointers(self) -> tuple[str, ...]:
        return ("terms", "counters")

    @property
    def _described(self) -> tuple[str, ...]:
        return tuple(name for name, *_ in _BOXES)

    @property
    def last_signature(self) -> str:
        """The head of the kernel that adds up the sums of chains and rounds dQ."""
        return self._of_sums("round_dq", "heads_q", "seqlen_q", "padded", "chains", "eighths")

    @property
    def _boxes(self) -> tuple[str, ...]:
        boxes = ", ".join(f"({', '.join(box)})" for _, *box in _BOXES)
        return (
            *in_lines(boxes, "for x, count, columns in (", "):", 116).split("\n"),
            "    block = [1, 1, count.value, columns.value]",
        )

    @property
    def _of_dq(self) -> tuple[str, ...]:
        return ("of_dq = (round_dq, (TILES.value * dq_blocks, 1, 1), for_dq)",)


def context(variant: Fa3BackwardVariant, workload: Workload) -> HopperBackward:
    """The kernels of a variant, which must be writable (`fa3_backward.writable`)."""
    return backward.context(variant, workload, HopperBackwardThirds)
