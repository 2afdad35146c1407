"""FlashAttention-3 class forward on Hopper: knobs, legality, what the Gluon template writes, space, published variant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from tilecast.model.kernel import e4m3
from tilecast.model.kernel.alike import Alike
from tilecast.model.kernel.grid import Grid
from tilecast.model.kernel.verdict import LEGAL, Verdict, over_limit
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: Query rows of a warpgroup: the M of wgmma.
ROWS = 64
#: Registers a consumer thread may use, by consumer warpgroups: 65536 in all, less the producer's.
CONSUMER_REGISTERS = {1: 255, 2: 240, 3: 160}
#: Registers a consumer thread needs beside accumulators: addresses, row statistics, loop state.
_SCALAR_REGISTERS = 24
#: Registers that Triton's code needs beyond what the model counts for a hand-written kernel (pointers of the epilogue,
#: barrier addresses); read off compilations: variants within it spill.
_COMPILER_REGISTERS = 16
#: Shared memory a CTA needs beside its tiles: barriers, row statistics, scheduler slots.
_SMEM_BOOKKEEPING_BYTES = 3 * 1024
#: The same under Triton, which takes more for reductions across warps and for the state of its partitions.
_COMPILER_BYTES = 6 * 1024
SCHEDULERS = ("grid", "persistent", "longest-first", "paired")
_WRITTEN_TILES = (32, 64, 128, 256)
#: Heads that are written as one tile of more columns: in two of their own the wait for O comes too early (docs/notes/forward-kernels.md).
_WRITTEN_COLUMNS = {96: 128}
#: Heads in e4m3, and the most columns of a block's product that are added to O at a time.
_E4M3_HEADS = (32, 64, 128, 256)
E4M3_PART = 128
#: Columns of V from which on registers are scarce: O takes half as many in each thread.
WIDE = 192
#: Key tiles: wgmma takes N in steps of 8, the published kernels use steps of 16.
_TILES = (128, 64, 32, 48, 80, 96, 112, 144, 160, 176, 192, 256)
_SHARES = (0.0, 0.125, 0.25)
ALIKE = Alike(
    same_demand={"kv_stages": 1, "q_stages": 1, "overlap": False, "ping_pong": False, "scheduler": "grid"},
    least_waiting={"kv_stages": 32, "q_stages": 1, "scheduler": "grid"},
    # rescale: where O is added to in float32, e4m3 kernels need registers for the product of a block.
    fit=("warpgroups", "tile_n", "kv_stages", "q_stages", "overlap", "rescale"),
    written=("warpgroups", "tile_n", "kv_stages", "q_stages", "overlap", "rescale"),
)


@dataclass(frozen=True, slots=True)
class Fa3Variant:
    """A TMA producer warp and wgmma consumer warpgroups of 64 rows."""

    family: str = "fa3"
    warpgroups: int = 2
    tile_n: int = 128
    kv_stages: int = 2
    q_stages: int = 1  # 2: the next work tile's Q lands under this one's loop
    overlap: bool = True  # intra-warpgroup: QK of the next block in flight under the softmax
    ping_pong: bool = True  # inter-warpgroup: one warpgroup's softmax under the other's GEMMs
    #: always: online softmax; conditional: O is rescaled only when the row max grew by more than the threshold;
    #: anchored: the row max of the first blocks is the reference, moved only in blocks whose sums outgrow a limit.
    rescale: str = "always"
    rescale_threshold: float = 8.0
    emulated_share: float = 0.0
    poly_degree: int = 3
    scheduler: str = "grid"


def in_words(promoted: bool, overlap: bool, warpgroups: int) -> bool:
    """Whether P of 8 bits, whose products are promoted, becomes words of four bytes right behind its exponentials, and row maxima come from
    several chains: where two warpgroups take all there is, no other fills the gaps; of three, with an eighth more time, the others do (measured
    at head_dim 64)."""
    return promoted and not overlap and warpgroups < 3


def ends_in_halves(mask: str, words: bool, warpgroups: int, tile_n: int) -> bool:
    """Whether causal tiles end in blocks that are counted from the diagonal by halves: long blocks in ``words``, no shorter than two tiles."""
    return mask == "causal" and words and tile_n >= max(256, 2 * 64 * warpgroups)


def registers(variant: Fa3Variant, workload: Workload) -> int:
    """Registers a consumer thread needs: O and S accumulators, P, and with overlap the next S as well."""
    score = variant.tile_n // 2
    pending = variant.tile_n * workload.dtype_bytes // 8 if variant.overlap else 0
    return workload.head_dim_v // 2 + score + pending + _SCALAR_REGISTERS


def written_registers(variant: Fa3Variant, workload: Workload) -> int:
    """Registers a consumer thread needs as the Gluon template writes it and Triton compiles it."""
    need = registers(variant, _as_written(workload)) + _COMPILER_REGISTERS
    if workload.dtype == "fp8" and variant.rescale == "always":
        # The product of a block is added to O outside the matrix unit, which keeps too few bits of a long sum.
        product = workload.head_dim_v // 2
        part = min(product, E4M3_PART // 2)
        # Without overlap it is there before S is, beside O and P; of a mask rows and bounds are kept (read off compilations).
        kept = _SCALAR_REGISTERS + (8 if workload.mask != "none" else 0)
        need = need + product if variant.overlap else max(need, product + part + variant.tile_n // 8 + kept)
    return need


def _as_written(workload: Workload) -> Workload:
    """``workload`` with heads of as many columns as its tiles have."""
    qk, v = written_columns(workload.head_dim_qk), written_columns(workload.head_dim_v)
    return replace(workload, head_dim_qk=qk, head_dim_v=v)


def _tile_bytes(variant: Fa3Variant, workload: Workload) -> int:
    """Shared memory of Q tiles and the K/V ring."""
    size = workload.dtype_bytes
    query = ROWS * variant.warpgroups * workload.head_dim_qk * size * variant.q_stages
    ring = variant.kv_stages * variant.tile_n * (workload.head_dim_qk + workload.head_dim_v) * size
    return query + ring


def legality(variant: Fa3Variant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the machine can run ``variant``."""
    if machine.tensor_kind != "wgmma":
        return Verdict(f"family fa3 takes wgmma, which {machine.name} does not have", "use family fa4 on data-centre Blackwell or fa2 elsewhere")  # fmt: skip
    if workload.dtype == "fp8" and not (refused := _in_range_of_e4m3(variant)).legal:
        return refused
    limit = CONSUMER_REGISTERS[variant.warpgroups]
    need = registers(variant, workload)
    if need > limit:
        return over_limit("a consumer thread", need, limit, "registers", "use a smaller tile_n, fewer warpgroups or overlap=false")  # fmt: skip
    total = _tile_bytes(variant, workload) + _SMEM_BOOKKEEPING_BYTES
    if total > machine["smem.per_cta_bytes"]:
        return over_limit("shared memory (Q tile and K/V ring)", total, machine["smem.per_cta_bytes"], "bytes", "use a smaller tile_n, fewer warpgroups or fewer kv_stages")  # fmt: skip
    return LEGAL


def written_columns(head_dim: int) -> int:
    """Columns of the tiles in shared memory and registers that the Gluon template writes for heads of ``head_dim``."""
    return _WRITTEN_COLUMNS.get(head_dim, head_dim)


def writable(variant: Fa3Variant, workload: Workload, machine: Machine) -> Verdict:
    """Whether the Gluon template can write a legal ``variant``: the rules of the template and of Triton's compiler."""
    if workload.dtype == "fp8" and not (refused := _writable_in_e4m3(variant, workload)).legal:
        return refused
    if variant.tile_n not in _WRITTEN_TILES:
        return Verdict(f"family fa3 is written with tile_n 32, 64, 128 or 256 (Triton's tensors have power-of-two extents), got {variant.tile_n}", "use one of them")  # fmt: skip
    for name, width in (("head_dim_qk", workload.head_dim_qk), ("head_dim_v", workload.head_dim_v)):
        if width % 32 or width > 256:
            return Verdict(f"{name} must be a multiple of 32 up to 256, got {width}", "pad the head")
    need = written_registers(variant, workload)
    limit = CONSUMER_REGISTERS[variant.warpgroups]
    if need > limit:
        return over_limit("a consumer thread under Triton", need, limit, "registers", "use a smaller tile_n or fewer warpgroups")  # fmt: skip
    if variant.emulated_share and emulated_of_eight(variant.emulated_share) is None:
        return Verdict(f"emulated_share must be a multiple of 0.125, got {variant.emulated_share:g}", f"use {round(variant.emulated_share * 8) / 8:g}")  # fmt: skip
    if variant.scheduler not in SCHEDULERS:
        return Verdict(f"family fa3 is written with scheduler {', '.join(SCHEDULERS)}, got '{variant.scheduler}'", "use one of them")  # fmt: skip
    total = _tile_bytes(variant, _as_written(workload)) + _COMPILER_BYTES
    if total > machine["smem.per_cta_bytes"]:
        return over_limit("shared memory under Triton", total, machine["smem.per_cta_bytes"], "bytes", "use fewer kv_stages, q_stages or a smaller tile_n")  # fmt: skip
    return LEGAL


def _in_range_of_e4m3(variant: Fa3Variant) -> Verdict:
    """Whether exponentials, of which e4m3 has 2^-9 to 448, neither saturate nor vanish."""
    if variant.rescale == "anchored":
        return Verdict("rescale=anchored lets exponentials outgrow their reference by far more than e4m3 has range for", "use rescale=always or conditional")  # fmt: skip
    return e4m3.growth_in_range(variant.rescale_threshold) if variant.rescale == "conditional" else LEGAL


def _writable_in_e4m3(variant: Fa3Variant, workload: Workload) -> Verdict:
    """What the template asks of e4m3 kernels besides."""
    if variant.rescale == "conditional" and variant.rescale_threshold % 1:
        return Verdict(f"rescale_threshold must be a whole number in e4m3, got {variant.rescale_threshold:g}", f"use {e4m3.MOST_GROWTH:g}")  # fmt: skip
    for name, width in (("head_dim_qk", workload.head_dim_qk), ("head_dim_v", workload.head_dim_v)):
        if width not in _E4M3_HEADS:
            return Verdict(f"{name} must be {', '.join(map(str, _E4M3_HEADS))} in e4m3, got {width}", "pad the head")
    return LEGAL


def emulated_of_eight(share: float) -> int | None:
    """How many of eight neighbouring exponentials are emulated; None when ``share`` is no multiple of an eighth."""
    count = round(share * 8)
    return count if abs(share * 8 - count) < 1e-9 and 0 <= count <= 8 else None


def space(workload: Workload, _machine: Machine) -> Grid[Fa3Variant]:
    """Every combination of knobs worth telling apart, in order of preference among equals."""
    schedulers: tuple[str, ...] = ("persistent", "grid")
    if workload.mask != "none":
        paired = ("paired",) if workload.mask == "causal" else ()
        schedulers = (*paired, "longest-first", "persistent", "grid")
    return _combinations(schedulers, workload.dtype == "fp8")


@lru_cache(maxsize=8)
def _combinations(schedulers: tuple[str, ...], narrow: bool) -> Grid[Fa3Variant]:
    knobs = (
        "scheduler", "rescale", "warpgroups", "tile_n", "kv_stages", "q_stages", "overlap", "ping_pong", "emulated_share",
    )  # fmt: skip
    # One warpgroup has no other to take turns with; a CTA of one tile has no next Q to prefetch.
    rows = (
        (scheduler, rescale, groups, tile_n, kv_stages, q_stages, overlap, turns, share)
        for scheduler, rescale, groups, tile_n, kv_stages, q_stages, overlap, turns, share in product(
            schedulers, ("always",) if narrow else ("anchored", "conditional", "always"),
            (2, 3, 1), _TILES, (4, 3, 2), (2, 1), (True, False), (False, True), _SHARES,
        )
        if not (turns and groups == 1) and not (q_stages == 2 and scheduler in ("grid", "longest-first"))
    )  # fmt: skip
    return Grid(Fa3Variant, knobs, rows, rescale_threshold=e4m3.MOST_GROWTH if narrow else 8.0)


def published(workload: Workload, _machine: Machine) -> Fa3Variant:
    """The variant that FlashAttention-3 ships for this shape (FA3C: tile_size.h, flash_fwd_launch_template.h)."""
    masked, wide = workload.mask != "none", max(workload.head_dim_qk, workload.head_dim_v)
    groups, tile_n, overlap = _tile_of_eight_bits(wide) if workload.dtype == "fp8" else _tile_of_sixteen_bits(workload)
    turns = wide >= 128 if workload.dtype == "fp8" else wide <= 128
    return Fa3Variant(
        warpgroups=groups, tile_n=tile_n, overlap=overlap, ping_pong=turns if overlap else groups == 2,
        scheduler="work-stealing" if masked else "persistent",
    )  # fmt: skip


def _tile_of_sixteen_bits(workload: Workload) -> tuple[int, int, bool]:
    """(warpgroups, tile_n, overlap) of FlashAttention-3 in bf16 and fp16."""
    masked, wide = workload.mask != "none", max(workload.head_dim_qk, workload.head_dim_v)
    if wide <= 64:
        return 3, 128 if masked else 192, masked
    if wide <= 96:
        # Its P goes through shared memory here, which leaves registers for the overlap that they would not hold otherwise.
        return 3, 128 if masked else 144, False
    if wide <= 128:
        return 2, 128 if masked else 176, True
    if wide <= 192:
        local = workload.mask == "window"
        return 2, 96 if local else 128 if workload.head_dim_v <= 128 else 112, True
    return 2, 64 if workload.mask == "window" else 80, True


def _tile_of_eight_bits(wide: int) -> tuple[int, int, bool]:
    """The same in e4m3; ``wide`` is the wider of the head dimensions."""
    if wide <= 96:
        return 3, 160 if wide <= 64 else 128, True
    return 2, 224 if wide <= 128 else 160 if wide <= 192 else 128, True


def published_by_fa4(workload: Workload) -> Fa3Variant:
    """The variant that FlashAttention-4 ships for this shape on Hopper (FA4C: interface.py, flash_fwd_sm90.py)."""
    masked, wide = workload.mask != "none", max(workload.head_dim_qk, workload.head_dim_v)
    groups, tile_n, overlap = _tile_of_sixteen_bits(workload)
    if wide <= 128 and not 64 < wide <= 96:
        tile_n, overlap = 128, True
    return Fa3Variant(
        warpgroups=groups, tile_n=tile_n, overlap=overlap, ping_pong=wide <= 128 if overlap else groups == 2,
        scheduler="longest-grid" if masked and workload.mask != "window" else "grid",
    )  # fmt: skip


def structure(v: Fa3Variant) -> tuple[object, ...]:
    """What decides the shape of the loop: variants of one structure differ in depths, orders and shares only."""
    return (v.warpgroups, v.tile_n, v.overlap, v.ping_pong, v.rescale)


def tile(v: Fa3Variant) -> tuple[object, ...]:
    """The tile alone: what a compiler has to keep in registers."""
    return (v.warpgroups, v.tile_n)


def plainness(v: Fa3Variant) -> tuple[float, ...]:
    """Smaller is plainer: how many features a kernel uses beyond its tile, then how many slots its rings have."""
    features = (v.emulated_share > 0, v.ping_pong, v.rescale != "always", v.q_stages > 1)
    return (sum(features), v.kv_stages)


def ring_depth(v: Fa3Variant) -> float:
    """Slots of the K/V ring."""
    return v.kv_stages
