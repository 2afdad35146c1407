"""What the template of the `blackwell_ws` family needs to know: a FlashAttention-4 forward in Gluon for sm_100 and sm_103.

Python decides here, `templates/blackwell_ws.py.j2` only writes.  The order of work in the roles is read from the
`Pipeline`, the same value the forecast is made from: see `blackwell_order`.
"""

from __future__ import annotations

import textwrap

from tilecast.codegen.blackwell import order as blackwell_order
from tilecast.codegen.blackwell.forward_kernel import BlackwellKernel, KvRing, Piece
from tilecast.codegen.blackwell.order import Rings
from tilecast.codegen.masks import keys_seen
from tilecast.model.families import build_pipeline, legality
from tilecast.model.kernel.header import dims_text
from tilecast.model.kernel.variants.fa4 import Fa4Variant
from tilecast.model.kernel.variants.fa4 import smem_bytes as fa4_smem_bytes
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline

TEMPLATE = "blackwell_ws.py.j2"
#: Name of the kernel in the generated file.
KERNEL = "attention"

SCHEDULERS = ("grid", "persistent", "longest-first")

#: Registers of a (softmax, other) thread by (CTA pair, causal, head_dim, 32 ex2 a clock): the table of
#: flash_fwd_sm100.py (FA4C).  The correction role gets the rest of the file.
_REGISTERS: dict[tuple[bool, bool, int, bool], tuple[int, int]] = {
    (True, False, 128, False): (176, 72),
    (False, True, 128, False): (192, 56),
    (True, False, 192, False): (184, 64),
    (False, True, 192, False): (192, 56),
    (True, False, 128, True): (176, 80),
    (False, True, 128, True): (176, 96),
    (True, False, 192, True): (176, 96),
    (False, True, 192, True): (176, 88),
    # Ours, where the defaults below spill.
    (False, False, 192, False): (200, 56),
    (True, False, 64, True): (192, 56),
}
_REGISTERS_SMALL = (200, 48)  # head_dim below 96
_REGISTERS_DEFAULT = (192, 48)
#: In 8 bits the correction role also keeps factors: with 64 registers or fewer it spills.
_MOST_SOFTMAX_REGISTERS_8_BITS = 192
_REGISTERS_BY_KEYS = (184, 72)  # ours: operand addresses of 256 wide heads need more than 48; 176 spills with a mask
_REGISTER_FILE = 65536
#: Columns of O that the correction role holds at a time.
_O_COLUMNS = 16
#: Periods of the emulation rule in flash_fwd_sm100.py (FA4C), and 4, which emulates everything.
_EMULATION_PERIODS = (32, 16, 10, 8, 14, 4)
#: ... when it rescales in every step, has the registers, and should therefore make few round trips.
_O_COLUMNS_BRANCH_FREE, _REGISTERS_BRANCH_FREE = 32, 80
#: Shared memory beside tiles, statistics and barriers: what the compiler takes for itself, read off compilations.
_COMPILER_BYTES = 640


def context(
    variant: Fa4Variant, workload: Workload, machine: Machine, pipeline: Pipeline | None = None
) -> BlackwellKernel:
    """The kernel of a variant.

    ``pipeline`` is the variant's pipeline, by default as built; pass `patterns.with_discovered_order` of it to generate
    the order that a schedule found.  Raises VariantError, one sentence, for what is illegal or Gluon cannot express.
    """
    _refuse(variant, workload, machine)
    pipeline = pipeline or build_pipeline(workload, variant, machine)
    groups, by_keys = variant.softmax_tiles, variant.split == "k" and variant.softmax_tiles > 1
    persistent = variant.scheduler == "persistent"
    order = blackwell_order.matrix_order(pipeline, groups, by_keys)
    kv_rings = _kv_rings(variant, workload, machine)
    rings = Rings(kv_rings[0].name, kv_rings[-1].name)
    softmax_registers, other_registers, at_launch = _registers(variant, workload, machine)
    correction_registers = _REGISTER_FILE // 128 - groups * softmax_registers - other_registers
    # Threshold 0 moves most maxima, so a test would only cost.  A pair would have to vote across its two CTAs.
    branch_free = variant.rescale_threshold == 0 or variant.cta_group == 2
    roomy = branch_free and correction_registers >= _REGISTERS_BRANCH_FREE
    _check_shared_memory(variant, workload, machine, by_keys, kv_rings)
    return BlackwellKernel(
        title=_title(workload),
        description=_description(variant, workload),
        mask=workload.mask,
        head_dim_qk=workload.head_dim_qk,
        head_dim_v=workload.head_dim_v,
        scheduler=variant.scheduler,
        softmax_tiles=groups,
        by_keys=by_keys,
        cta_group=variant.cta_group,
        tile_n=variant.tile_n,
        split_p=variant.split_p,
        stats_slots=variant.stats_slots,
        rescale_threshold=float(variant.rescale_threshold),
        branch_free=branch_free,
        load_max=variant.load_max,
        poly_degree=variant.poly_degree,
        emulated=emulated_columns(variant),
        rescale_columns=_O_COLUMNS_BRANCH_FREE if roomy else _O_COLUMNS,
        qk_pieces=_pieces(workload.head_dim_qk),
        v_pieces=_pieces(workload.head_dim_v),
        kv_rings=kv_rings,
        rings=rings,
        issue_text=order.text(),
        load=blackwell_order.load_statements(order, rings, groups, by_keys),
        mma=blackwell_order.matrix_statements(order, rings, groups, by_keys, persistent),
        correction=blackwell_order.correction_statements(pipeline, groups, by_keys, persistent),
        stats_lag=blackwell_order.stats_lag(pipeline, variant),
        softmax_registers=softmax_registers,
        other_registers=other_registers,
        registers_at_launch=at_launch,
        tmem_map=_tmem_map(variant, workload, by_keys),
        fp8=workload.dtype == "fp8",
    )


def _refuse(variant: Fa4Variant, workload: Workload, machine: Machine) -> None:
    verdict = legality(variant, workload, machine)
    if not verdict.legal:
        raise VariantError(f"blackwell_ws: {verdict.sentence()}")
    if workload.dtype not in ("bf16", "fp16", "fp8"):
        raise VariantError(f"blackwell_ws: dtype must be bf16, fp16 or fp8, got '{workload.dtype}'")
    if variant.scheduler not in SCHEDULERS:
        raise VariantError(f"blackwell_ws: scheduler must be {', '.join(SCHEDULERS)}, got '{variant.scheduler}'")
    if variant.softmax_tiles > 2:
        raise VariantError(
            f"blackwell_ws: the register file holds two softmax groups, got softmax_tiles={variant.softmax_tiles}"
        )
    if variant.tile_n not in (64, 128):
        raise VariantError(
            f"blackwell_ws: tile_n must be 64 or 128 (powers of two in Triton, a row of S in registers), got {variant.tile_n}"
        )
    if not 3 <= variant.poly_degree <= 5:
        raise VariantError(f"blackwell_ws: poly_degree must be 3, 4 or 5, got {variant.poly_degree}")
    if workload.head_dim_v % _O_COLUMNS_BRANCH_FREE:
        raise VariantError(
            f"blackwell_ws: head_dim_v must be a multiple of {_O_COLUMNS_BRANCH_FREE}, got {workload.head_dim_v}"
        )


def _title(workload: Workload) -> str:
    mask = {"none": "Attention", "causal": "Causal attention", "window": "Sliding-window attention"}[workload.mask]
    return f"{mask} forward for head_dim {dims_text(workload)} on Blackwell: FlashAttention-4 in Gluon"


def _description(variant: Fa4Variant, workload: Workload) -> str:
    pair, by_keys = variant.cta_group == 2, variant.split == "k" and variant.softmax_tiles > 1
    tile = "256 query rows (128 in each of two CTAs that multiply together)" if pair else "128 query rows"
    lines = [keys_seen(workload.mask)]
    if variant.softmax_tiles == 1:
        lines.append(f"A unit of work is {tile} of one head; one softmax group of four warps serves it.")
    elif by_keys:
        lines.append(
            f"A unit of work is {tile} of one head; two softmax groups of four warps take turns at its key blocks."
        )
    else:
        lines.append(
            f"A unit of work is two tiles of {tile}; each has a softmax group of four warps, and they share K and V."
        )
    lines.append("One warp loads, one issues matrix products, four warps correct the output and store it.")
    lines.append("S, P and O stay in tensor memory; keys go from the last block to the first, masked blocks first.")
    if variant.emulated_share:
        lines.append(
            f"{variant.emulated_share:.4g} of the exponentials run on the FMA pipe, degree {variant.poly_degree}."
        )
    order = {
        "grid": "One program a unit.",
        "persistent": "Programs stay and take every n-th unit.",
        "longest-first": "One program a unit, the longest units first.",
    }
    lines.append(order[variant.scheduler])
    return textwrap.fill("  ".join(lines), 120)


# --- what the hardware decides --------------------------------------------------------------------------------------


def emulated_columns(variant: Fa4Variant) -> tuple[tuple[int, ...], ...]:
    """Per quarter of a row, the even columns whose pair of exponentials goes to the FMA pipe.

    FlashAttention-4's rule (FA4C) where one of its settings gives the share: in quarters `start` to 2, element k
    is emulated when k mod freq >= freq - 4.  Other shares are spread evenly over the quarters but the last, which the
    tensor core waits for on its own; beyond three quarters of the exponentials it takes part as well.
    """
    pairs = variant.emulated_share * variant.tile_n / 2
    if pairs != int(pairs):
        low, high = (int(pairs) * 2 / variant.tile_n, (int(pairs) + 1) * 2 / variant.tile_n)
        raise VariantError(
            f"blackwell_ws: emulated_share must be whole pairs of {variant.tile_n} columns, got {variant.emulated_share:g}; "
            f"nearest: {low:g} and {high:g}"
        )
    quarter = variant.tile_n // 4
    if not pairs:
        return ((),) * 4
    for start in (1, 0):
        for freq in _EMULATION_PERIODS:
            columns = tuple(k for k in range(0, quarter, 2) if k % freq >= freq - 4)
            if len(columns) * (3 - start) == pairs:
                return tuple(columns if start <= index < 3 else () for index in range(4))
    used = 3 if pairs <= 3 * quarter // 2 else 4
    out = []
    for index in range(4):
        count = int(pairs) * (index + 1) // used - int(pairs) * index // used if index < used else 0
        slots = quarter // 2
        out.append(tuple(2 * k for k in range(slots) if (k + 1) * count // slots > k * count // slots))
    return tuple(out)


def _registers(variant: Fa4Variant, workload: Workload, machine: Machine) -> tuple[int, int, int]:
    """Registers of a softmax thread, of a thread of the matrix and load warps, and of every thread at launch."""
    wide = max(workload.head_dim_qk, workload.head_dim_v)
    key = (variant.cta_group == 2, workload.mask != "none", wide, machine["mufu.ex2_per_clk"] >= 32)
    # One warp each for the matrix and the load role, and two that idle: registers are handed out to four at a time.
    warps = 4 * variant.softmax_tiles + 4 + 4
    at_launch = _REGISTER_FILE // (32 * warps) // 8 * 8
    if variant.softmax_tiles == 1:
        return 240, _REGISTERS_DEFAULT[1], at_launch
    if variant.split == "k":
        return *_REGISTERS_BY_KEYS, at_launch
    softmax, other = _REGISTERS.get(key, _REGISTERS_SMALL if wide < 96 else _REGISTERS_DEFAULT)
    if workload.dtype == "fp8":
        softmax = min(softmax, _MOST_SOFTMAX_REGISTERS_8_BITS)
    return softmax, other, at_launch


def _pieces(head_dim: int) -> tuple[Piece, ...]:
    """Powers of two, largest first, that add up to ``head_dim``: Triton's shapes are powers of two; each is one MMA."""
    widths = [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1]
    return tuple(Piece(sum(widths[:i]), width) for i, width in enumerate(widths))


def _kv_rings(variant: Fa4Variant, workload: Workload, machine: Machine) -> tuple[KvRing, ...]:
    """One ring where K and V tiles are alike, else one each; as many slots as the model counts."""
    _, _, slots = fa4_smem_bytes(variant, workload, machine)
    if workload.head_dim_qk == workload.head_dim_v and variant.cta_group == 1:
        return (KvRing("kv", "KV_STAGES", slots, "K and V blocks in flight; they take turns in one ring"),)
    return (
        KvRing("k", "K_STAGES", slots - slots // 2, "K blocks in flight"),
        KvRing("v", "V_STAGES", slots // 2, "V blocks in flight"),
    )


def _check_shared_memory(
    variant: Fa4Variant, workload: Workload, machine: Machine, by_keys: bool, rings: tuple[KvRing, ...]
) -> None:
    """Refuse what the model's allowance for bookkeeping does not hold: two statistics slots, many barriers."""
    query, _, _ = fa4_smem_bytes(variant, workload, machine)
    widths = (workload.head_dim_qk, workload.head_dim_v)
    ring_bytes = sum(
        ring.slots * variant.tile_n * width * workload.dtype_bytes // variant.cta_group
        for ring, width in zip(rings, widths, strict=False)
    )
    rows = variant.softmax_tiles * (variant.stats_slots + by_keys) * 128 * 4
    # Full and empty ones of Q and the rings; each group's for S, P, its rest, O, its statistics and its maximum.
    barriers = 2 * (1 if by_keys else variant.softmax_tiles) + 2 * sum(ring.slots for ring in rings)
    barriers += variant.softmax_tiles * (3 + variant.split_p + 2 * variant.stats_slots + by_keys)
    beside = rows + 8 * barriers + _COMPILER_BYTES
    limit = int(machine["smem.per_cta_bytes"])
    if query + ring_bytes + beside > limit:
        raise VariantError(
            f"blackwell_ws: row statistics and barriers need {beside} bytes of shared memory beside the tiles, "
            f"{limit - query - ring_bytes} are left: use stats_slots=1 or fewer kv_stages"
        )


def _tmem_map(variant: Fa4Variant, workload: Workload, by_keys: bool) -> tuple[tuple[str, int, int], ...]:
    """(name, first column, columns) of tensor memory in the order of allocation."""
    s, o = variant.tile_n, workload.head_dim_v
    if by_keys:
        names = [("O", o), *((f"S{group}", s) for group in range(variant.softmax_tiles))]
    else:
        names = [pair for group in range(variant.softmax_tiles) for pair in ((f"S{group}", s), (f"O{group}", o))]
    return tuple((name, sum(n for _, n in names[:i]), columns) for i, (name, columns) in enumerate(names))
