"""What `tilecast.attention` takes on the kernels of short sequences (`triton_short`), which no search of variants has.

Their tiles' rows are those of the heads that share keys, a program has one tile, and most of what it takes is not its products: code that
no cache holds, Q, then K and V, one after the other out of memory.  Instructions, registers and shared memory are those of what ships, as
Triton 3.6 compiles it; what a block of keys takes is that of `triton` kernels with the same tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from tilecast.model.compiled.units.fetch import far_cycles, near_cycles
from tilecast.model.kernel.variants.fa2 import Fa2Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.fa2 import build_of
from tilecast.model.sm.simulate import steady_state

#: Tile rows, keys of a block, warps; rows of a tile of other kernels, of a head of its own.
FEW, ROWS, BLOCK, WARPS, DENSE_ROWS = 16, 64, 64, 4, 128
#: Most queries and most rows of a key head, and fewest keys, that go to the kernels that decode.
DECODED_QUERIES, DECODED_ROWS, DECODED_KEYS = 16, 128, 512
#: How many times as many tiles there may be as of a head's own, the same where keys are one block, of heads of up to so many columns.
MORE_TILES, MORE_OF_BLOCK, BLOCK_COLUMNS = 1.25, 1.5, 128
_INSTRUCTION_BYTES, _KEPT_BYTES = 16, 1024


@dataclass(frozen=True, slots=True)
class _Code:
    """A compiled kernel."""

    instructions: int
    shared_bytes: int
    registers: int


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel that ships: most keys, tiles on their way, and its code where all keys are one block, and where they are several."""

    keys: int
    stages: int
    one: _Code
    several: _Code


#: (columns of Q and K, of V, rows of a tile) -> the kernel.
_KERNELS = {
    (64, 64, FEW): _Kernel(128, 2, _Code(736, 10240, 65), _Code(1008, 36864, 80)),
    (64, 64, ROWS): _Kernel(512, 3, _Code(1192, 24576, 80), _Code(1416, 57344, 142)),
    (128, 128, FEW): _Kernel(128, 2, _Code(960, 20480, 96), _Code(1344, 71680, 122)),
    (128, 128, ROWS): _Kernel(128, 3, _Code(1680, 49152, 128), _Code(2072, 114688, 233)),
    (192, 128, FEW): _Kernel(64, 2, _Code(1232, 24576, 122), _Code(1920, 108544, 96)),
    (192, 128, ROWS): _Kernel(64, 2, _Code(2208, 81920, 128), _Code(2960, 180224, 175)),
    (256, 256, FEW): _Kernel(64, 2, _Code(1400, 40960, 168), _Code(2120, 141312, 218)),
    (256, 256, ROWS): _Kernel(64, 2, _Code(2560, 98304, 255), _Code(3560, 229376, 255)),
}


@dataclass(frozen=True, slots=True)
class ShortRun:
    """One launch."""

    kernel: str
    seconds: float
    programs: int


def short_run(workload: Workload, machine: Machine) -> ShortRun | None:
    """The launch at the machine's highest clock; None where `tilecast.attention` would take another kernel, or none is modelled."""
    w = workload
    kernel = _chosen(w) if machine.tensor_kind == "wgmma" and w.dtype != "fp8" else None
    if kernel is None:
        return None
    (d, dv, tile), found = kernel
    code = found.one if w.seqlen_k <= BLOCK else found.several
    programs = ceil(w.seqlen_q * w.group_size / tile) * w.batch * w.heads_kv
    sms = int(machine["chip.sm_count"])
    # Programs go to SMs that have none before they share one.
    ctas = min(_fit(code, machine), -(-programs // sms))
    # Heads of fewer columns have tiles of all.
    seen = replace(
        w, heads_q=w.heads_kv, batch=1, seqlen_q=tile, mask="none", window=None, head_dim_qk=d, head_dim_v=dv
    )
    loop = build_of(seen, Fa2Variant(tile_m=tile, tile_n=BLOCK, warps=WARPS, kv_stages=found.stages), machine, ctas)
    far, near = far_cycles(machine), near_cycles(machine)
    each = ctas if _INSTRUCTION_BYTES * code.instructions > machine.get("code.l1_bytes", 0.0) else 1
    program = (
        machine["launch.cta_start_cycles"] + each * code.instructions * near + 2.0 * machine["tma.latency_hbm_cycles"]
        + steady_state(loop).ii_cycles * ceil(w.seqlen_k / BLOCK) + machine["l2.latency_cycles"]
    )  # fmt: skip
    first = code.instructions * (far - near)
    hz = machine["chip.clock_max_mhz"] * 1e6
    turns = ceil(programs / (sms * ctas))
    moved = w.tensor_bytes / (machine["hbm.tbps_achieved"] * 1e12)
    seconds = first / hz + max(turns * program / hz, program / hz + moved) + machine["launch.kernel_us"] * 1e-6
    columns = f"d{d}" if d == dv else f"d{d}_{dv}"
    return ShortRun(f"triton_short_{columns}{'_few' if tile == FEW else ''}", seconds, programs)


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


def _chosen(w: Workload) -> tuple[tuple[int, int, int], _Kernel] | None:
    """The kernel that the lengths and heads of a sequence ask for (`kernels/serving/few_rows.py`)."""
    rows = w.seqlen_q * w.group_size
    decoded = w.seqlen_q <= DECODED_QUERIES and rows <= DECODED_ROWS and w.seqlen_k >= DECODED_KEYS
    if w.head_dim_qk % 8 or w.head_dim_v % 8 or decoded:
        return None
    shared = ceil(rows / ROWS) * w.heads_kv
    more = MORE_OF_BLOCK if w.seqlen_k <= BLOCK and w.head_dim_qk <= BLOCK_COLUMNS else MORE_TILES
    if shared > more * ceil(w.seqlen_q / DENSE_ROWS) * w.heads_q:
        return None
    for (d, dv, tile), kernel in _KERNELS.items():
        if w.head_dim_qk <= d and w.head_dim_v <= dv and (rows <= FEW) == (tile == FEW):
            return ((d, dv, tile), kernel) if w.seqlen_k <= kernel.keys else None
    return None


def _fit(code: _Code, machine: Machine) -> int:
    """Programs that fit an SM."""
    each = -(-code.registers // 8) * 8
    return max(
        1,
        min(
            int(machine["smem.per_sm_bytes"] // (code.shared_bytes + _KEPT_BYTES)),
            int(machine["reg.file_bytes"] // (4 * 32 * WARPS * each)),
            int(machine["sm.max_warps"]) // WARPS,
        ),
    )
