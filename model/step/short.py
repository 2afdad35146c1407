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
#: Queries from which on no kernel of short sequences is asked, most keys for which one is, and rows of a tile of other kernels, of a head of its own.
FULL_QUERIES, SHORT_KEYS, DENSE_ROWS = 256, 10239, 128
#: Most queries and most rows of a key head, and fewest keys, that go to the kernels that decode, and most rows of those whose keys others part, which
#: do so for heads of so many columns.
DECODED_QUERIES, DECODED_ROWS, DECODED_KEYS, DECODED_TILE, PARTED_COLUMNS = 16, 128, 512, 16, 128
#: Keys that kernels which part them take the others for, where there are fewer.
FEW_AS_KEYS = 1025
#: How many times as many tiles of 64 rows there may be as of a head's own, by columns of the kernel and by most keys.
SHORT_TILE = 64
MORE_TILES = {
    64: ((2047, 1.75), (10239, 1.9)),
    128: ((64, 1.5), (512, 1.4), (2047, 1.25), (8191, 1.9)),
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
    #: block less under way in those for more; where there are parts, of programs that take them in turn, ``at_once`` of them at once.  None: the same.
    many: ShortCode | None = None
    at_once: int = 0
    #: Fewest columns of the wider of Q and V; 0: heads have all.
    head_dim_min: int = 0
    #: Rows of a key head.
    rows_min: int = 1
    rows_max: int = 1 << 31
    #: (fewest keys, fewest parts of all tiles of a sequence, keys of a part, most tiles whose parts have programs of their own): the first that fits;
    #: and the launch that joins those of a tile; (): all keys are one part.
    parts: tuple[tuple[int, int, int, int], ...] = ()
    join: ShortCode | None = None

    def takes(self, work: Workload, rows: int, keys: int) -> bool:
        """Whether it is for such heads of so many ``rows`` of a key head on so many ``keys``."""
        dims = work.head_dim_qk, work.head_dim_v
        narrower = dims[0] <= self.head_dim_qk and dims[1] <= self.head_dim_v and 0 < self.head_dim_min <= max(dims)
        wide = dims == (self.head_dim_qk, self.head_dim_v) or narrower
        return wide and self.rows_min <= rows <= self.rows_max and keys <= self.keys

    def code(self, work: Workload, programs: int) -> ShortCode:
        """What runs of so many ``programs``, or of so many tiles that have parts."""
        whole = self.several is not None or (work.head_dim_qk, work.head_dim_v) == (self.head_dim_qk, self.head_dim_v)
        many = programs > self.at_once
        if self.parts:
            many = self.part(work)[0] > 1 and self.in_turn(work, programs) > 0
        if self.many is not None and many and whole:
            return self.many
        return self.several if self.several is not None and work.seqlen_k > self.tile_n else self.one

    def under_way(self, code: ShortCode) -> int:
        """Blocks of keys under way in what runs: of many programs on several blocks one less."""
        return self.stages - 1 if code is self.many and self.several is not None and not self.parts else self.stages

    def part(self, work: Workload) -> tuple[int, int, int]:
        """(parts, keys of one, most tiles whose parts have programs of their own) of a sequence's keys."""
        keys, tiles = work.seqlen_k, ceil(work.seqlen_q * work.group_size / self.tile_m) * work.heads_kv
        for least, fewest, each, most in self.parts:
            if keys >= least and tiles * ceil(keys / each) >= fewest:
                return ceil(keys / each), each, most
        return 1, keys, 0

    def in_turn(self, work: Workload, tiles: int) -> int:
        """Of so many ``tiles`` those of which one program takes all keys, parts in turn: all but a rest that is few."""
        parts, _, most = self.part(work)
        if parts == 1:
            return tiles
        rest = tiles if tiles <= most else tiles % self.at_once
        return tiles - rest if rest <= most else tiles


@lru_cache(maxsize=1)
def short_kernels() -> tuple[ShortKernel, ...]:
    """The kernels that ship, in the order in which they are asked."""
    found = []
    for row in tomllib.loads(KERNELS.read_text(encoding="utf-8"))["kernel"]:
        codes: dict[str, Any] = {name: ShortCode(**row.pop(name)) for name in CODES if name in row}
        row["parts"] = tuple(map(tuple, row.get("parts", ())))
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
    all_tiles = tiles * w.batch * w.heads_kv
    code, (parts, _, _) = kernel.code(w, all_tiles), kernel.part(w)
    # Programs that take all keys of a tile, and those that take a part.
    whole = kernel.in_turn(w, all_tiles)
    shared = (all_tiles - whole) * parts
    programs = whole + shared
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
    begin = (
        machine["launch.cta_start_cycles"] + each * code.instructions * near + 2.0 * machine["tma.latency_hbm_cycles"] + machine["l2.latency_cycles"]
    )  # fmt: skip
    block = steady_state(loop).ii_cycles
    program = begin + block * _blocks(w, kernel, tiles, whole > 0)
    of_part = begin + block * _blocks(w, kernel, tiles, False)
    first = code.instructions * (far - near)
    hz = machine["chip.clock_max_mhz"] * 1e6
    left = 0.0
    if shared and kernel.join is not None:
        # What joins them waits for the last program with nothing read, code included; then for what all have left.
        first += kernel.join.instructions * far + 3.0 * machine["l2.latency_cycles"]
        rows = w.batch * w.heads_q * w.seqlen_q * (1.0 - whole / all_tiles)
        numbers = 4.0 * rows * parts * (kernel.head_dim_v + 2)
        port = machine["l2.bytes_per_clk_per_sm"] * sms * hz
        left = numbers / (machine.get("l2.store_tbps", machine["hbm.tbps_achieved"]) * 1e12) + numbers / port
    places = sms * ctas
    busy = ceil(whole / places) * program + ceil(shared / places) * of_part
    low, high = w.key_range(0, w.seqlen_q)
    read = replace(w, seqlen_k=max(1, high - low), mask="none", window=None)
    moved = read.tensor_bytes / (machine["hbm.tbps_achieved"] * 1e12)
    seconds = first / hz + max(busy / hz, program / hz + moved) + left + machine["launch.kernel_us"] * 1e-6
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
    if decoded or w.seqlen_q >= FULL_QUERIES or w.seqlen_k > SHORT_KEYS:
        return None
    width = 192 if (w.head_dim_qk, w.head_dim_v) == OWN_WIDTHS else next((n for n in (64, 128) if widest <= n), 256)
    more = next((more for longest, more in MORE_TILES[width] if w.seqlen_k <= longest), 0.0)
    if ceil(rows / SHORT_TILE) * w.heads_kv > more * ceil(w.seqlen_q / DENSE_ROWS) * w.heads_q:
        return None
    return next((kernel for kernel in short_kernels() if kernel.takes(w, rows, keys)), None)


def _blocks(w: Workload, kernel: ShortKernel, tiles: int, whole: bool) -> int:
    """Most blocks of keys that a tile of a sequence's ``tiles`` takes in, those that its queries see, or a program that has a part of them."""
    if w.seqlen_k <= kernel.tile_n:
        return 1
    most = 0
    for first in range(0, tiles * kernel.tile_m, kernel.tile_m):
        behind = min((first + kernel.tile_m - 1) // w.group_size + 1, w.seqlen_q)
        low, high = w.key_range(first // w.group_size, behind)
        most = max(most, ceil(high / kernel.tile_n) - low // kernel.tile_n)
    _, each, _ = kernel.part(w)
    return most if whole else min(most, ceil(each / kernel.tile_n))
