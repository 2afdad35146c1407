"""What `tilecast.attention` takes on the kernels of short sequences (`triton_short`), which no search of variants has.

Their tiles' rows are those of the heads that share keys, a program has one tile, and most of what it takes is not its products: code that
no cache holds, Q, then K and V, one after the other out of memory.  Instructions, registers and shared memory are those of what ships, as
Triton 3.6 compiles it for heads that have all columns (`short_kernels.toml`); what a block of keys takes is that of `triton` kernels with
the same tile.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any

from tilecast.model.compiled.units.fetch import beyond_first_cache, far_cycles, near_cycles
from tilecast.model.kernel.variants.fa2 import Fa2Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.machine.occupancy import ctas_that_fit
from tilecast.model.pipeline.fa2 import build_of
from tilecast.model.sm.simulate import steady_state

WARPS = 4
#: Queries and keys from which on no kernel of short sequences is asked, and rows of a tile of other kernels, of a head of its own.
FULL_QUERIES, PARTED_KEYS, DENSE_ROWS = 256, 2048, 128
#: Most queries and most rows of a key head, and fewest keys, that go to the kernels that decode, and most rows of those whose keys others part, which
#: do so for heads of so many columns.
DECODED_QUERIES, DECODED_ROWS, DECODED_KEYS, DECODED_TILE, PARTED_COLUMNS = 16, 128, 512, 16, 128
#: Keys that kernels which part them take the others for, where there are fewer.
FEW_AS_KEYS = 1025
#: How many times as many tiles of 64 rows there may be as of a head's own, by columns of the kernel and by most keys.
SHORT_TILE = 64
MORE_TILES = {
    64: ((2047, 1.75),),
    128: ((64, 1.5), (512, 1.4), (2047, 1.25)),
    192: ((64, 1.25), (256, 1.0), (640, 0.75)),
    256: ((144, 1.25), (256, 0.8), (512, 0.5)),
}
#: Columns of Q and K, and of V, that have kernels of their own.
OWN_WIDTHS = 192, 128
#: What there is of a kernel's code.
CODES = ("one", "several", "many", "join")
#: The kernels, as compiled.
KERNELS = Path(__file__).parent / "short_kernels.toml"


@dataclass(frozen=True, slots=True)
class ShortCode:
    """A compiled kernel: instructions, bytes of shared memory a program, registers a thread."""

    instructions: int
    shared_bytes: int
    registers: int


@dataclass(frozen=True, slots=True)
class ShortKernel:
    """A kernel that ships: its heads and tile, what it takes, and its code where all keys are one block, where they are several, and of
    many programs."""

    module: str
    #: Hash of the source that was compiled, without its header.
    source: str
    head_dim_qk: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    stages: int
    #: Most keys.
    keys: int
    one: ShortCode
    #: None: it takes no more keys than a block.
    several: ShortCode | None = None
    #: Of more programs than ``at_once``, which an SM has more of: by halves of V and O, of heads with all columns, in files for one block, and with a
    #: block less under way in those for more; where there are parts, of more tiles, which take them in turn.  None: the same.
    many: ShortCode | None = None
    at_once: int = 0
    #: Fewest columns of the wider of Q and V; 0: heads have all.
    head_dim_min: int = 0
    #: Rows of a key head.
    rows_min: int = 1
    rows_max: int = 1 << 31
    #: Keys of a part, which has a program of its own where tiles are few, and the launch that joins those of a tile; 0: there are none.
    part_keys: int = 0
    join: ShortCode | None = None

    def takes(self, work: Workload, rows: int, keys: int) -> bool:
        """Whether it is for such heads of so many ``rows`` of a key head on so many ``keys``."""
        dims = work.head_dim_qk, work.head_dim_v
        narrower = dims[0] <= self.head_dim_qk and dims[1] <= self.head_dim_v and 0 < self.head_dim_min <= max(dims)
        wide = dims == (self.head_dim_qk, self.head_dim_v) or narrower
        return wide and self.rows_min <= rows <= self.rows_max and keys <= self.keys

    def code(self, work: Workload, programs: int) -> ShortCode:
        """What runs of so many ``programs``."""
        whole = self.several is not None or (work.head_dim_qk, work.head_dim_v) == (self.head_dim_qk, self.head_dim_v)
        if self.many is not None and programs > self.at_once and whole:
            return self.many
        return self.several if self.several is not None and work.seqlen_k > self.tile_n else self.one

    def under_way(self, code: ShortCode) -> int:
        """Blocks of keys under way in what runs: of many programs on several blocks one less."""
        return self.stages - 1 if code is self.many and self.several is not None and not self.part_keys else self.stages

    def parts(self, work: Workload, tiles: int) -> int:
        """Programs that share a tile."""
        return ceil(work.seqlen_k / self.part_keys) if self.part_keys > 0 and tiles <= self.at_once else 1


@lru_cache(maxsize=1)
def short_kernels() -> tuple[ShortKernel, ...]:
    """The kernels that ship, in the order in which they are asked."""
    found = []
    for row in tomllib.loads(KERNELS.read_text(encoding="utf-8"))["kernel"]:
        codes: dict[str, Any] = {name: ShortCode(**row.pop(name)) for name in CODES if name in row}
        found.append(ShortKernel(**row, **codes))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class ShortRun:
    """One launch."""

    kernel: str
    seconds: float
    programs: int
    #: Whether it is the form of many programs.
    many: bool


def short_run(workload: Workload, machine: Machine) -> ShortRun | None:
    """The launch at the machine's highest clock; None where `tilecast.attention` would take another kernel, or none is modelled."""
    w = workload.reduced()
    kernel = _chosen(w) if machine.tensor_kind == "wgmma" and w.dtype != "fp8" else None
    if kernel is None:
        return None
    tile = kernel.tile_m
    tiles = ceil(w.seqlen_q * w.group_size / tile)
    programs = tiles * w.batch * w.heads_kv
    code, parts = kernel.code(w, programs), kernel.parts(w, programs)
    programs *= parts
    sms = int(machine["chip.sm_count"])
    # Programs go to SMs that have none before they share one.
    ctas = min(ctas_that_fit(machine, code.shared_bytes, code.registers, WARPS), -(-programs // sms))
    # Heads of fewer columns have tiles of all.
    seen = replace(
        w, heads_q=w.heads_kv, batch=1, seqlen_q=tile, mask="none", window=None,
        head_dim_qk=kernel.head_dim_qk, head_dim_v=kernel.head_dim_v,
    )  # fmt: skip
    variant = Fa2Variant(tile_m=tile, tile_n=kernel.tile_n, warps=WARPS, kv_stages=kernel.under_way(code))
    loop = build_of(seen, variant, machine, ctas)
    far, near = far_cycles(machine), near_cycles(machine)
    each = ctas if beyond_first_cache(code.instructions, machine) else 1
    program = (
        machine["launch.cta_start_cycles"] + each * code.instructions * near + 2.0 * machine["tma.latency_hbm_cycles"]
        + steady_state(loop).ii_cycles * _blocks(w, kernel, tiles, parts) + machine["l2.latency_cycles"]
    )  # fmt: skip
    first = code.instructions * (far - near)
    hz = machine["chip.clock_max_mhz"] * 1e6
    left = 0.0
    if parts > 1 and kernel.join is not None:
        # What joins them waits for the last program with nothing read, code included; then for what all have left.
        first += kernel.join.instructions * far + 3.0 * machine["l2.latency_cycles"]
        numbers = 4.0 * w.batch * w.heads_q * w.seqlen_q * parts * (kernel.head_dim_v + 2)
        port = machine["l2.bytes_per_clk_per_sm"] * sms * hz
        left = numbers / (machine.get("l2.store_tbps", machine["hbm.tbps_achieved"]) * 1e12) + numbers / port
    turns = ceil(programs / (sms * ctas))
    low, high = w.key_range(0, w.seqlen_q)
    read = replace(w, seqlen_k=max(1, high - low), mask="none", window=None)
    moved = read.tensor_bytes / (machine["hbm.tbps_achieved"] * 1e12)
    seconds = first / hz + max(turns * program / hz, program / hz + moved) + left + machine["launch.kernel_us"] * 1e-6
    return ShortRun(kernel.module, seconds, programs, code is kernel.many)


def short_note(workload: Workload, machine: Machine, seconds: float) -> tuple[str, ...]:
    """A sentence on what runs in place of the kernel that takes ``seconds``; empty where nothing does."""
    run = short_run(workload, machine)
    if run is None:
        return ()
    instead = f"instead of the {seconds * 1e6:.3g} us above" if run.seconds < seconds else "and not the kernel above"
    return (
        f"{workload.seqlen_q} on {workload.seqlen_k} keys: tilecast.attention takes {run.kernel} here, whose tiles have rows of all heads "
        f"that share keys: {run.seconds * 1e6:.3g} us by its forecast {instead} (docs/accuracy.md)",
    )


def _chosen(w: Workload) -> ShortKernel | None:
    """The kernel that the lengths and heads of a sequence ask for (`kernels/serving/few_rows.py`, which this must say again: nothing of the
    model may need what runs on a GPU)."""
    rows = w.seqlen_q * w.group_size
    widest = max(w.head_dim_qk, w.head_dim_v)
    decoded = w.seqlen_q <= DECODED_QUERIES and rows <= DECODED_ROWS and w.seqlen_k >= DECODED_KEYS
    keys = max(w.seqlen_k, FEW_AS_KEYS) if decoded else w.seqlen_k
    decoded = decoded and (rows <= DECODED_TILE or widest > PARTED_COLUMNS)
    if decoded or w.seqlen_q >= FULL_QUERIES or w.seqlen_k >= PARTED_KEYS:
        return None
    width = 192 if (w.head_dim_qk, w.head_dim_v) == OWN_WIDTHS else next((n for n in (64, 128) if widest <= n), 256)
    more = next((more for longest, more in MORE_TILES[width] if w.seqlen_k <= longest), 0.0)
    if ceil(rows / SHORT_TILE) * w.heads_kv > more * ceil(w.seqlen_q / DENSE_ROWS) * w.heads_q:
        return None
    return next((kernel for kernel in short_kernels() if kernel.takes(w, rows, keys)), None)


def _blocks(w: Workload, kernel: ShortKernel, tiles: int, parts: int) -> int:
    """Most blocks of keys that a tile, or a program of several ``parts``, takes in: those that its queries see."""
    if w.seqlen_k <= kernel.tile_n:
        return 1
    most = 0
    for first in range(0, tiles * kernel.tile_m, kernel.tile_m):
        behind = min((first + kernel.tile_m - 1) // w.group_size + 1, w.seqlen_q)
        low, high = w.key_range(first // w.group_size, behind)
        most = max(most, ceil(high / kernel.tile_n) - low // kernel.tile_n)
    return most if parts == 1 else min(most, kernel.part_keys // kernel.tile_n)
