"""Tiles of a GEMM on the chip: how many, in which order, the bytes that they move, and how fast L2 and the memory move them.

L2 keeps a clock of its own: what it delivers was measured with the SMs at their highest clock, and is more a cycle of an SM
that runs slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tilecast.model.gemm.families import ctas_per_sm
from tilecast.model.gemm.variant import GemmVariant
from tilecast.model.gemm.workload import Gemm
from tilecast.model.machine.machine import Machine

#: L2 that data read by every SM can use: half of a two-partition cache, where each partition keeps a copy (as for K and V).
_SHARED_L2 = 0.5

#: Share of L2 up to which columns of B stay from one group of rows of tiles to the next, and from which on none do, by what passes
#: in between: B itself, the group's rows of A, of C and of D.  By clocks in kernels at 8192 x 8192 (h200_gemm_waits.csv): at 13 and 17 MB
#: B is there as soon as A, which L2 holds, at 21 MB now and then later, at 26 MB mostly, and at 36 MB as late as what the memory sends.
_STAYS, _GOES = 0.36, 0.5

#: (bytes of a box's rows, share of the memory's rate that tiles of such rows reach): kernels that copy C and D and multiply what
#: lies in shared memory, m = n = 8192, k = 256, on an H100, by the fastest of each width (h100_gemm_parts.csv, programs in groups of
#: 8 rows: 113.1, 107.4 and 101.4 us).  Of these are an empty launch 2.8 us, and 3.7 us (6700 cycles at 1.81 GHz) the start of a
#: CTA 1100, code 620, a map 860 and the way of the first C 1320, a first epilogue 2200, the last store 600; the rest moves 268 MB at
#: 2.52, 2.66 and 2.83 of 2.99 TB/s.
_ROW_SHARES = ((64, 0.84), (128, 0.89), (256, 0.95))


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
    #: Share of the tiles whose rows of A or columns of B no earlier wave of tiles has brought to L2.
    fresh_share: float

    @property
    def tiles(self) -> int:
        """Tiles of the launch."""
        return self.rows * self.columns

    @property
    def hbm_bytes(self) -> float:
        """Memory traffic of the launch."""
        return self.hbm_input_bytes + self.hbm_c_bytes + self.hbm_d_bytes


def part_of(gemm: Gemm, v: GemmVariant) -> Gemm:
    """What each of the ``v.parts`` programs that share a tile computes: float32 sums of so much of k; ``gemm`` where they are one."""
    if v.parts == 1:
        return gemm
    steps = -(-gemm.k // v.tile_k)
    depth = min(gemm.k, -(-steps // v.parts) * v.tile_k)
    return replace(gemm, k=depth, c_dtype="fp32", d_dtype="fp32", alpha=1.0, beta=0.0, in_place=False)


def merge_seconds(gemm: Gemm, v: GemmVariant, machine: Machine) -> float:
    """What the second launch takes that adds up sums of parts of k and C: it begins, waits for sums, from L2 where that holds them, and for
    C, and moves them and D; 0 where k is in one part."""
    if v.parts == 1:
        return 0.0
    hertz = machine["chip.clock_max_mhz"] * 1e6
    elements = float(gemm.m) * gemm.n
    sums, outer = elements * 4.0 * v.parts, elements * (gemm.c_bytes + gemm.d_bytes)
    l2 = machine["l2.bytes_per_clk_per_sm"] * machine["chip.sm_count"] * hertz
    hbm = machine["hbm.tbps_achieved"] * 1e12
    held = sums <= _SHARED_L2 * machine["l2.bytes"]
    waits = machine["launch.cta_start_cycles"] + machine["tma.latency_l2_cycles"] + machine["tma.latency_hbm_cycles"]
    return (
        machine["launch.kernel_us"] * 1e-6 + waits / hertz + (sums / l2 + outer / hbm if held else (sums + outer) / hbm)
    )


def tiling(gemm: Gemm, v: GemmVariant, machine: Machine) -> Tiling:
    """The tiles of ``v`` and their traffic: A and B once each where L2 holds what is read again, C and D once; of parts of k, each of
    which is ``gemm`` (`part_of`), the tiles of one after the other.

    ``group_m`` rows of tiles are walked column by column: A's rows of a group stay while they are used, B comes again
    for every group where L2 cannot hold it beside the C and D that pass, and A where it cannot even hold a group's rows.
    """
    rows = -(-gemm.m // (v.tile_m * v.cta_group))
    columns = -(-gemm.n // v.tile_n)
    steps = -(-gemm.k // v.tile_k)
    sms = int(machine["chip.sm_count"]) // v.cta_group
    slots = sms * ctas_per_sm(v, gemm, machine)
    tiles = rows * columns * v.parts
    room = _SHARED_L2 * machine["l2.bytes"]
    a, b = float(gemm.m) * gemm.k * gemm.dtype_bytes, float(gemm.n) * gemm.k * gemm.dtype_bytes
    group = grouped(v, rows)
    group_rows = group * v.tile_m * v.cta_group * float(gemm.k) * gemm.dtype_bytes
    # A wave of tiles: the group's rows, and as many columns of B as the slots reach.
    wave_columns = min(columns, -(-min(slots, tiles) // group))
    wave_b = wave_columns * v.tile_n * float(gemm.k) * gemm.dtype_bytes
    streams = (gemm.c_bytes if gemm.adds_c else 0) + (0 if gemm.in_place and gemm.adds_c else gemm.d_bytes)
    passing = b + group_rows + group * v.tile_m * v.cta_group * float(gemm.n) * streams
    gone = min(1.0, max(0.0, (passing / machine["l2.bytes"] - _STAYS) / (_GOES - _STAYS)))
    b_passes = 1.0 + (-(-rows // group) - 1.0) * gone
    a_passes = 1.0 if group_rows + wave_b <= room else float(-(-columns // wave_columns))
    # What a later wave reads again L2 has, unless it goes over it once a pass.
    fresh_a = min(1.0, wave_columns / columns) if a_passes == 1.0 else 1.0
    fresh_b = min(1.0, group / rows * b_passes)
    c, d = (float(gemm.m) * gemm.n * size * v.parts for size in (gemm.c_bytes, gemm.d_bytes))
    step_bytes = (v.tile_m * v.cta_group + v.tile_n) * v.tile_k * gemm.dtype_bytes
    return Tiling(
        rows * v.parts, columns, steps, slots, -(-tiles // sms), (a * a_passes + b * b_passes) * v.parts, c, d,
        float(tiles) * steps * step_bytes + c + d, 1.0 - (1.0 - fresh_a) * (1.0 - fresh_b),
    )  # fmt: skip


def grouped(v: GemmVariant, rows: int) -> int:
    """Of so many rows of tiles, those that are walked column by column."""
    return min(v.group_m or rows, rows)


#: Share of the memory's rate at which `tma.latency_hbm_loaded_cycles` was measured: 11.15 of 17.46 bytes a clock and SM
#: (h200_calibrate.csv: tma/load_bandwidth, all SMs, hbm, one box of 16 KB under way, and four of 32 KB); where the queue grows no more.
_LOADED_BUSY, _MOST_BUSY = 0.64, 0.8


def memory_share(row_bytes: float) -> float:
    """Share of the rate of one long copy that copies of boxes with rows of ``row_bytes`` reach, between those measured the line."""
    (least, share), *rest = _ROW_SHARES
    for wide, reached in rest:
        if row_bytes < wide:
            return share + (reached - share) * max(0.0, row_bytes - least) / (wide - least)
        least, share = wide, reached
    return share


@dataclass(frozen=True, slots=True)
class L2Rates:
    """Bytes a cycle of one SM's clock."""

    inputs: float
    reads: float
    #: 0: not known, no limit.
    writes: float


def l2_rates(v: GemmVariant, machine: Machine, mhz: float, rows: int, tiles: float = math.inf) -> L2Rates:
    """Rates of a launch of ``rows`` rows of tiles, ``tiles`` in all, the SMs at ``mhz``.

    Programs that are neighbours have tiles of the same columns, and ask for the same lines of B at about the same time: those
    come at the rate measured for SMs that read in step.  The same rows of A are asked for by programs a group apart, at times
    of their own: at the rate of SMs that each read lines of their own, as C is, which is what L2 gives to all of them: where fewer have
    a tile these have more.  Programs that meet do the same.
    """
    slower = machine["chip.clock_max_mhz"] / mhz
    together = machine.get("l2.bytes_per_clk_per_sm_lockstep", machine["l2.bytes_per_clk_per_sm"]) * slower
    idle = machine["chip.sm_count"] / min(machine["chip.sm_count"], tiles * v.cta_group)
    alone = min(together, machine["l2.bytes_per_clk_per_sm"] * slower * idle)
    a, b = float(v.tile_m), v.tile_n / v.cta_group
    shared = together if grouped(v, rows) > 1 else alone
    writes = machine.bytes_per_clk(machine.get("l2.store_tbps", 0.0), mhz)
    return L2Rates((a + b) / (a / alone + b / shared), alone, writes)


def memory_latency_cycles(machine: Machine, busy: float) -> float:
    """Cycles from a copy's order to its being there less its transfer, while all SMs copy and the memory is ``busy`` (0..1).

    Between that of an idle memory and that measured while all SMs have one copy under way it goes by the queue before a memory
    that is busy for a share u of the time, u / (1 - u), and beyond the second as well.
    """
    idle = machine["tma.latency_hbm_cycles"]
    loaded = machine.get("tma.latency_hbm_loaded_cycles", idle)
    return idle + (loaded - idle) * _queue(min(busy, _MOST_BUSY)) / _queue(_LOADED_BUSY)


def _queue(busy: float) -> float:
    return busy / (1.0 - busy)


def memory_bytes(gemm: Gemm, v: GemmVariant, on_chip: Tiling) -> tuple[float, float, float]:
    """Bytes of A and B, of C and of D that one long copy would move in the time that the memory takes for the launch's boxes."""
    columns = v.tile_n / v.c_parts
    return (
        on_chip.hbm_input_bytes / memory_share(v.tile_k * gemm.dtype_bytes),
        on_chip.hbm_c_bytes / memory_share(columns * gemm.c_bytes),
        on_chip.hbm_d_bytes / memory_share(columns * gemm.d_bytes),
    )
