"""Decoding on Blackwell: knobs, legality, what the template writes, first choices.

As on Hopper (`hopper_serving`) a warp copies K and V into rings in shared memory and another warpgroup merges splits; a warp
multiplies with tcgen05, and a warpgroup has a row of scores to a thread.  A tile has 128 rows, the lanes of tensor memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from tilecast.model.kernel.variants.hopper import serving as hopper_serving
from tilecast.model.kernel.variants.hopper.serving import HopperServingVariant
from tilecast.model.kernel.variants.serving import has_room
from tilecast.model.kernel.verdict import Verdict
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: The family, and the template that writes it.
NAMES = ("serving-blackwell", "blackwell_serving")
#: Rows of a tile: the lanes of tensor memory.
ROWS = 128
#: Bytes that barriers and the compiler's own exchanges add.
_MARGIN = 4096
_Q_TILES = 2
#: Bytes of K and V in flight: a B200's HBM brings an SM about 54 bytes a nanosecond, and a microsecond is a long wait.
_IN_FLIGHT = 1 << 17
#: Registers of O that a thread has room for when it stores it.
_MOST_COLUMNS_V = 128


@dataclass(frozen=True, slots=True)
class BlackwellServingVariant(HopperServingVariant):
    """The knobs of Hopper's kernel, with what a Blackwell GPU starts from."""

    family: str = "serving-blackwell"
    kv_stages: int = 4
    most_items: int = 148


def shared_bytes(variant: BlackwellServingVariant, workload: Workload) -> int:
    """Shared memory of the tiles: two of Q, and the rings of K and V."""
    return hopper_serving.shared_bytes(variant, workload, ROWS)


def tmem_columns(tile_n: int, head_dim_v: int) -> int:
    """Columns of tensor memory: scores of two blocks, P of one in 16 bits, O."""
    return 2 * tile_n + tile_n // 2 + head_dim_v


def legality(variant: BlackwellServingVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the machine can run ``variant``."""
    return has_room(variant.family, "tcgen05", shared_bytes(variant, workload) + _MARGIN, machine)


def writable(variant: BlackwellServingVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the template can write a legal ``variant`` that computes what it should."""
    if variant.kv_stages < 2:
        return Verdict(
            f"kv_stages must be 2 or more, got {variant.kv_stages}: scores are a block ahead", "use kv_stages=2"
        )
    if workload.head_dim_v > _MOST_COLUMNS_V:
        return Verdict(
            f"head_dim_v must be 64 or 128 for family serving-blackwell, got {workload.head_dim_v}",
            "use family serving",
        )
    return hopper_serving.writable(variant, workload, machine)


def space(workload: Workload, machine: Machine) -> Iterator[BlackwellServingVariant]:
    """Every combination of knobs worth telling apart that the machine can run."""
    for (n, stages), split, many in product(
        ((64, 4), (64, 3), (64, 2), (64, 6), (64, 8), (128, 2), (32, 8)), (512, 256), (1024, 512)
    ):
        found = BlackwellServingVariant(tile_n=n, kv_stages=stages, split_keys=split, split_keys_of_many=many)
        if legality(found, workload, machine).legal and writable(found, workload, machine).legal:
            yield found


def chosen(workload: Workload, machine: Machine) -> BlackwellServingVariant:
    """The variant to start from: 128 KB of K and V in flight, or as much as fits; splits as Hopper's were fastest.

    No GPU has measured it: Little's law asks for what HBM brings an SM while a copy is under way.
    """
    room = int(machine["smem.per_cta_bytes"]) - _MARGIN - _Q_TILES * ROWS * workload.head_dim_qk * workload.dtype_bytes
    block = 64 * (workload.head_dim_qk + workload.head_dim_v) * workload.dtype_bytes
    return BlackwellServingVariant(kv_stages=max(2, min(room // block, -(-_IN_FLIGHT // block))))
