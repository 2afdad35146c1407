"""What the template of Hopper's kernel for latent attention (MLA) needs to know: decoding with one latent key head, in Gluon.

Python decides here, `templates/hopper_mla.py.j2` only writes.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import ClassVar

from tilecast.codegen.hopper.serving import HopperServingKernel
from tilecast.codegen.masks import SEEN_OF_SEQUENCE
from tilecast.model.kernel.header import dims_text
from tilecast.model.kernel.variants.hopper.mla import (
    KEYS,
    MOST_APART,
    MOST_LEFT,
    TURNED_ROWS,
    TURNED_STAGES,
    HopperMlaVariant,
)
from tilecast.model.kernel.variants.hopper.serving import ROWS
from tilecast.model.kernel.workload import Workload

TEMPLATE = "hopper_mla.py.j2"
TARGETS = ("sm_90a",)
#: Columns of O that are blended at a time.
PART = 64


@dataclass(frozen=True, slots=True)
class HopperMlaKernel(HopperServingKernel):
    """Everything `TEMPLATE` reads except the header, as ``k``."""

    latent: ClassVar[bool] = True
    part: ClassVar[int] = PART
    most_apart: ClassVar[int] = MOST_APART
    most_left: ClassVar[int] = MOST_LEFT
    turned_rows: ClassVar[tuple[int, ...]] = TURNED_ROWS
    turned_stages: ClassVar[int] = TURNED_STAGES
    beside: ClassVar[bool] = False
    last_constants: ClassVar[tuple[str, ...]] = ("Q_ROWS", "CHAINED", "BOXED")
    #: The copy engine brings Q as well; V is K.
    second_boxes: ClassVar[str] = "q_desc"
    own_options: ClassVar[str] = "CHAINED"

    def turned_warps(self, rows: int) -> list[list[int]]:
        """Rows that the warps of a warpgroup have, of tiles of so few: of 8 all have the same."""
        return [[8, 0] if rows > 8 else [0, 0], [16, 0] if rows > 16 else [0, 0]]

    def of_rows(self, name: str) -> str:
        """The constant of this name for the rows that a tile holds."""
        *fewer, most = self.turned_rows
        return "".join(f"{name}_{rows} if held == {rows} else " for rows in fewer) + f"{name}_{most}"

    @property
    def half(self) -> int:
        """Columns of V and O that a warpgroup has."""
        return self.head_dim_v // 2

    @property
    def parts_log2(self) -> int:
        """Two to this is the number of parts of 64 columns that half of O is blended in."""
        return (self.half // PART).bit_length() - 1

    @property
    def parked_bases(self) -> list[list[int]]:
        """Where a thread's registers of a part lie in memory: rows and columns of a pair, then each 8 columns' 512 numbers."""
        return [[1], [2], *([512 << bit] for bit in range((PART // 8).bit_length() - 1))]

    @property
    def register_option(self) -> str:
        """What the options of a launch say about registers: 65536 for the threads of four warpgroups."""
        return ', "maxnreg": 128'

    @property
    def worker_registers(self) -> tuple[int, ...]:
        """Registers of a thread of the warpgroups of O's right half and of the merge, and of the load warp; the first has the rest."""
        return 160, 104, 40

    @property
    def chained_registers(self) -> int:
        """Registers of a thread at launch where programs take in splits one after the other: of three warpgroups."""
        return 168

    @property
    def chained_worker_registers(self) -> tuple[int, ...]:
        """Registers of a thread of O's right half and of the load warp then."""
        return 224, 40


def context(variant: HopperMlaVariant, workload: Workload) -> HopperMlaKernel:
    """The kernel of a legal variant."""
    return HopperMlaKernel(
        title=f"Latent attention (MLA) on Hopper for head_dim {dims_text(workload)}: decoding with one key head, split over keys",
        description=_description(variant),
        head_dim_qk=workload.head_dim_qk,
        head_dim_v=workload.head_dim_v,
        tile_n=KEYS,
        kv_stages=variant.kv_stages,
        split_keys=variant.split_keys,
        split_keys_of_many=variant.split_keys_of_many,
        many_heads=variant.many_heads,
        whole_keys=variant.whole_keys,
        most_splits=variant.most_splits,
        most_items=variant.most_splits,
        merged=variant.merged,
        planned=variant.planned,
    )


def _description(variant: HopperMlaVariant) -> str:
    lines = [
        SEEN_OF_SEQUENCE,
        f"A load warp copies blocks of {KEYS} latent keys, {variant.kv_stages} at a time; a warpgroup makes the scores of {ROWS} rows "
        "and the left half of O, another one the right half, and a third one merges splits.",
        f"Where splits are dealt out and have up to {TURNED_ROWS[-1]} rows, keys are the M of the products: one warpgroup makes the scores, another one O, "
        "and where each split has a program of its own the one that merges does the softmax.",
        "Sequences of up to 4 queries are split, whatever else is in the batch, and when the splits of a tile are done their programs merge "
        "them, a share each, in the order of the keys.  In larger batches programs take runs of splits, one after the other, and merge as they go; where a run "
        "ends inside a tile another program goes on with it.  What a sequence gets depends on it alone.  Runs on sm_90a with triton "
        "and torch alone.",
    ]
    return textwrap.fill("  ".join(lines), 120)
