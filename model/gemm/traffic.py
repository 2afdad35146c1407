"""Tiles of a GEMM on the chip: how many, in which order, and the bytes that they move."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.gemm.families import ctas_per_sm
from tilecast.model.gemm.variant import GemmVariant
from tilecast.model.gemm.workload import Gemm
from tilecast.model.machine.machine import Machine

#: L2 that data read by every SM can use: half of a two-partition cache, where each partition keeps a copy (as for K and V).
_SHARED_L2 = 0.5


@dataclass(frozen=True, slots=True)
class Tiling:
    """One launch: tiles of one CTA (or of a pair), and bytes of the whole launch."""

    rows: int
    columns: int
    #: k in steps of tile_k.
    steps: int
    #: CTAs or pairs that run at a time.
    slots: int
    #: Tiles that the busiest SM (or pair) gets.
    most: int
    hbm_input_bytes: float
    hbm_c_bytes: float
    hbm_d_bytes: float
    l2_bytes: float

    @property
    def tiles(self) -> int:
        """Tiles of the launch."""
        return self.rows * self.columns

    @property
    def hbm_bytes(self) -> float:
        """Memory traffic of the launch."""
        return self.hbm_input_bytes + self.hbm_c_bytes + self.hbm_d_bytes


def tiling(gemm: Gemm, v: GemmVariant, machine: Machine) -> Tiling:
    """The tiles of ``v`` and their traffic: A and B once each where L2 holds what is read again, C and D once.

    ``group_m`` rows of tiles are walked column by column: A's rows of a group stay while they are used, B comes again
    for every group where L2 cannot hold it, and A where it cannot even hold a group's rows.
    """
    rows = -(-gemm.m // (v.tile_m * v.cta_group))
    columns = -(-gemm.n // v.tile_n)
    steps = -(-gemm.k // v.tile_k)
    sms = int(machine["chip.sm_count"]) // v.cta_group
    slots = sms * ctas_per_sm(v, gemm, machine)
    tiles = rows * columns
    room = _SHARED_L2 * machine["l2.bytes"]
    a, b = float(gemm.m) * gemm.k * gemm.dtype_bytes, float(gemm.n) * gemm.k * gemm.dtype_bytes
    group = min(v.group_m, rows)
    group_rows = group * v.tile_m * v.cta_group * float(gemm.k) * gemm.dtype_bytes
    # A wave of tiles: the group's rows, and as many columns of B as the slots reach.
    wave_columns = min(columns, -(-min(slots, tiles) // group))
    wave_b = wave_columns * v.tile_n * float(gemm.k) * gemm.dtype_bytes
    b_passes = 1.0 if b + group_rows <= room else float(-(-rows // group))
    a_passes = 1.0 if group_rows + wave_b <= room else float(-(-columns // wave_columns))
    c, d = (float(gemm.m) * gemm.n * size for size in (gemm.c_bytes, gemm.d_bytes))
    step_bytes = (v.tile_m * v.cta_group + v.tile_n) * v.tile_k * gemm.dtype_bytes
    return Tiling(
        rows, columns, steps, slots, -(-tiles // sms), a * a_passes + b * b_passes, c, d,
        float(tiles) * steps * step_bytes + c + d,
    )  # fmt: skip
