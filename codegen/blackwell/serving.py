"""What the template of Blackwell's serving kernels needs to know: paged, packed and split attention in Gluon with tcgen05.

Python decides here, `templates/blackwell_serving.py.j2` only writes.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import ClassVar

from tilecast.codegen.hopper.serving import HopperServingKernel, knobs
from tilecast.codegen.masks import SEEN_OF_SEQUENCE
from tilecast.model.kernel.header import dims_text
from tilecast.model.kernel.variants.blackwell_serving import ROWS, BlackwellServingVariant, tmem_columns
from tilecast.model.kernel.workload import Workload

TEMPLATE = "blackwell_serving.py.j2"
TARGETS = ("sm_100a", "sm_103a")


@dataclass(frozen=True, slots=True)
class BlackwellServingKernel(HopperServingKernel):
    """Everything `TEMPLATE` reads except the header, as ``k``."""

    beside: ClassVar[bool] = False
    narrower: ClassVar[bool] = False
    tile_m: ClassVar[int] = ROWS
    worker_warps: ClassVar[tuple[int, ...]] = (4, 1, 1)
    #: Powers of two that a row may outgrow its reference by: P is 16 bits, of which fp16 reaches to 2^16.
    rescale_threshold: ClassVar[float] = 8.0

    @property
    def worker_registers(self) -> tuple[int, ...]:
        """Registers of a thread of the warpgroup that merges, the matrix and the load warp; the softmax warpgroup has the rest."""
        return 168, 104, 104

    @property
    def tmem_columns(self) -> int:
        """Columns of tensor memory in use."""
        return tmem_columns(self.tile_n, self.head_dim_v)


def context(variant: BlackwellServingVariant, workload: Workload) -> BlackwellServingKernel:
    """The kernel of a legal variant."""
    return BlackwellServingKernel(_title(workload), _description(variant), **knobs(variant, workload))


def _title(workload: Workload) -> str:
    return f"Decoding on Blackwell for head_dim {dims_text(workload)}: attention to paged, packed or cached keys, split over keys"


def _description(variant: BlackwellServingVariant) -> str:
    lines = [
        SEEN_OF_SEQUENCE,
        f"A load warp copies blocks of {variant.tile_n} keys into rings in shared memory, {variant.kv_stages} of K and of V ahead; a "
        f"warp issues the products of {ROWS} rows, the query heads of one key head for consecutive queries; a warpgroup with a row to a "
        "thread takes their scores from tensor memory and leaves P there; another one merges.",
        f"Sequences of up to {ROWS} rows are split, whatever else is in the batch, and the program that finishes a tile last merges "
        "its splits in their order: what a sequence gets depends on it alone.  Runs on sm_100a and sm_103a with triton and torch alone.",
    ]
    return textwrap.fill("  ".join(lines), 120)
