"""What the template of the `blackwell_ws` family needs to know: a FlashAttention-4 forward in Gluon for sm_100 and sm_103.

Python decides here, `templates/blackwell_ws.py.j2` only writes.  The order of the matrix role, the depth of the K/V ring
and the statistics hand-shake are read from the `Pipeline`, the same value the forecast is made from.
"""

from __future__ import annotations

from tilecast.codegen.exp2 import COEFFICIENTS
from tilecast.model.families import build_pipeline, legality
from tilecast.model.kernel.variants.fa4 import Fa4Variant
from tilecast.model.kernel.variants.fa4 import smem_bytes as fa4_smem_bytes
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline, Role, Step

TEMPLATE = "blackwell_ws.py.j2"
#: Name of the kernel in the generated file.
KERNEL = "attention"

SCHEDULERS = ("grid", "persistent", "longest-first")

#: Registers of a (softmax, other) thread by (CTA pair, causal, head_dim, 32 ex2 a clock): fa4.md (d), table of
#: flash_fwd_sm100.py.  The correction role gets the rest of the file.
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
_REGISTERS_BY_KEYS = (184, 72)  # ours: operand addresses of 256 wide heads need more than 48; 176 spills with a mask
_REGISTER_FILE = 65536
#: Heads whose K and V stay in L2 together (fa4.md (h)).
_L2_MEGABYTES = 50
#: Columns of O that the correction role holds at a time; when it stores, a 32-byte sector a row.
_O_COLUMNS = 16
#: Periods of the emulation rule in flash_fwd_sm100.py (fa4.md (d)), and 4, which emulates everything.
_EMULATION_PERIODS = (32, 16, 10, 8, 14, 4)
#: ... when it rescales in every step, has the registers, and should therefore make few round trips.
_O_COLUMNS_BRANCH_FREE, _REGISTERS_BRANCH_FREE = 32, 80
_ELEMENT_BYTES = 2
#: Shared memory beside tiles, statistics and barriers: what the compiler takes for itself, read off compilations.
_COMPILER_BYTES = 640
_MASK_TEXT = {
    "none": "Every query sees every key.",
    "causal": "Query i sees keys up to i + seqlen_k - seqlen_q.",
    "window": "Query i sees keys from window_left before to window_right after position i + seqlen_k - seqlen_q.",
}


def context(
    variant: Fa4Variant, workload: Workload, machine: Machine, pipeline: Pipeline | None = None
) -> dict[str, object]:
    """Everything `TEMPLATE` reads except `header`.

    ``pipeline`` is the variant's pipeline, by default as built; pass `patterns.with_discovered_order` of it to generate
    the order that a schedule found.  Raises VariantError, one sentence, for what is illegal or Gluon cannot express.
    """
    _refuse(variant, workload, machine)
    pipeline = pipeline or build_pipeline(workload, variant, machine)
    by_keys = variant.split == "k" and variant.stages > 1
    quarter = variant.tile_n // 4
    tile_rows = 128 * variant.cta_group
    rows = tile_rows * (1 if by_keys else variant.stages)
    qk_parts, v_parts = _parts(workload.head_dim_qk), _parts(workload.head_dim_v)
    shared_ring = workload.head_dim_qk == workload.head_dim_v and variant.cta_group == 1
    _, _, slots = fa4_smem_bytes(variant, workload, machine)
    first, loop, last = _issue(pipeline, variant.stages, by_keys)
    emulated = emulated_columns(variant)
    softmax_registers, other_registers, at_launch = _registers(variant, workload, machine)
    correction_registers = _REGISTER_FILE // 128 - variant.stages * softmax_registers - other_registers
    # Threshold 0 moves most maxima, so a test would only cost.  A pair would have to vote across its two CTAs.
    branch_free = variant.rescale_threshold == 0 or variant.cta_group == 2
    roomy = branch_free and correction_registers >= _REGISTERS_BRANCH_FREE
    rescale_columns = _O_COLUMNS_BRANCH_FREE if roomy else _O_COLUMNS
    tmem = _tmem_map(variant, workload, by_keys)
    sizes = _sizes(variant, workload)
    barriers = _barriers(variant, by_keys, shared_ring)
    k_slots, v_slots = (slots, slots) if shared_ring else (slots - slots // 2, slots // 2)
    _check_shared_memory(variant, workload, machine, by_keys, (k_slots, 0 if shared_ring else v_slots), barriers)
    return {
        "title": _title(workload),
        "description": _description(variant, workload),
        "mask": workload.mask,
        "head_dim_qk": workload.head_dim_qk,
        "head_dim_v": workload.head_dim_v,
        "stages": variant.stages,
        "split": "k" if by_keys else "q",
        "cta_group": variant.cta_group,
        "tile_n": variant.tile_n,
        "tile_rows": tile_rows,
        "rows": rows,
        "quarter": quarter,
        "quarter_bits": quarter.bit_length() - 1,
        "rescale_columns": rescale_columns,
        "store_columns": _O_COLUMNS,
        "keys_step": variant.stages if by_keys else 1,
        "qk_parts": qk_parts,
        "v_parts": v_parts,
        "shared_ring": shared_ring,
        "k_slots": k_slots,
        "v_slots": v_slots,
        "q_bytes": 128 * workload.head_dim_qk * _ELEMENT_BYTES,
        "k_bytes": variant.tile_n * workload.head_dim_qk * _ELEMENT_BYTES // variant.cta_group,
        "v_bytes": variant.tile_n * workload.head_dim_v * _ELEMENT_BYTES // variant.cta_group,
        "kv_bytes_per_key": (workload.head_dim_qk + workload.head_dim_v) * _ELEMENT_BYTES,
        "l2_megabytes": _L2_MEGABYTES,
        "first_issue": first,
        "loop_issue": loop,
        "last_issue": last,
        "issue_text": _issue_text(first, loop, last),
        "first_loads": _loads(first, by_keys),
        "loop_loads": _loads(loop, by_keys),
        "last_loads": _loads(last, by_keys),
        "split_p": variant.split_p,
        "p_parts": _p_parts(variant),
        "stats_slots": variant.stats_slots,
        "stats_lag": _stats_lag(pipeline, variant),
        "correction": _correction(pipeline, variant, by_keys),
        "branch_free": branch_free,
        "rescale_threshold": float(variant.rescale_threshold),
        "load_max": variant.load_max,
        "emulated": emulated,
        "emulated_count": 2 * sum(len(columns) for columns in emulated),
        "poly_degree": variant.poly_degree,
        "polynomial": (1.0, *COEFFICIENTS[variant.poly_degree]),
        "softmax_registers": softmax_registers,
        "other_registers": other_registers,
        "registers_at_launch": at_launch,
        "tmem_columns": sum(columns for _, _, columns in tmem),
        "tmem_map": tmem,
        "tmem_text": ", ".join(f"{name} at {start}" for name, start, _ in tmem),
        "barriers": barriers,
        "scheduler": variant.scheduler,
        "sizes": [name for name, _ in sizes],
        "size_values": [value for _, value in sizes],
    }


def _refuse(variant: Fa4Variant, workload: Workload, machine: Machine) -> None:
    verdict = legality(variant, workload, machine)
    if not verdict.legal:
        raise VariantError(f"blackwell_ws: {verdict.sentence()}")
    if workload.dtype not in ("bf16", "fp16"):
        raise VariantError(f"blackwell_ws: dtype must be bf16 or fp16, got '{workload.dtype}'")
    if variant.scheduler not in SCHEDULERS:
        raise VariantError(f"blackwell_ws: scheduler must be {', '.join(SCHEDULERS)}, got '{variant.scheduler}'")
    if variant.stages > 2:
        raise VariantError(f"blackwell_ws: the register file holds two softmax groups, got stages={variant.stages}")
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
    dims = f"{workload.head_dim_qk}"
    if workload.head_dim_v != workload.head_dim_qk:
        dims += f" (queries, keys) and {workload.head_dim_v} (values)"
    return f"{mask} forward for head_dim {dims} on Blackwell: FlashAttention-4 in Gluon"


def _description(variant: Fa4Variant, workload: Workload) -> str:
    pair, by_keys = variant.cta_group == 2, variant.split == "k" and variant.stages > 1
    tile = "256 query rows (128 in each of two CTAs that multiply together)" if pair else "128 query rows"
    lines = [_MASK_TEXT[workload.mask]]
    if variant.stages == 1:
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
    return "\n".join(lines)


def _sizes(variant: Fa4Variant, workload: Workload) -> list[tuple[str, str]]:
    """(name in the kernel, expression in `launch`) of the integers that every role gets.

    What several roles need is worked out once, by `launch`: the compiler would otherwise compute it before the roles
    part and hold it in registers, or in local memory, through all of them.
    """
    out = [(name, name) for name in ("heads", "group_size", "seqlen_q", "seqlen_k")]
    out[1] = ("group_size", "heads // heads_kv")
    if workload.mask != "none":
        out.append(("shift", "seqlen_k - seqlen_q"))
    if workload.mask == "window":
        out += [("window_left", "window_left"), ("window_right", "window_right")]
    out += [("programs", "programs"), ("units", "units"), ("units_per_head", "units_per_head")]
    if variant.scheduler == "longest-first":
        out += [
            ("all_heads", "batch * heads"),
            ("heads_at_once", "heads_at_once"),
            ("units_at_once", "heads_at_once * units_per_head"),
        ]
    return out


def _parts(head_dim: int) -> list[dict[str, object]]:
    """Powers of two, largest first, that add up to ``head_dim``: Triton's shapes are powers of two; each is one MMA."""
    widths = [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1]
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return [
        {"suffix": f"_{start}" if len(widths) > 1 else "", "start": start, "width": width}
        for start, width in zip(starts, widths, strict=True)
    ]


# --- what the pipeline decides --------------------------------------------------------------------------------------


def _role(pipeline: Pipeline, name: str) -> Role:
    return next(role for role in pipeline.roles if role.name == name)


def _issue(
    pipeline: Pipeline, stages: int, by_keys: bool
) -> tuple[list[dict[str, object]], list[dict[str, object]], list[dict[str, object]]]:
    """The matrix role's steps before the loop, in it and after it, from the program of the pipeline's role.

    The loop holds PV of this block and QK of the next, so the first QK stand before it and the last PV after it.  A
    step says which K or V it takes first (`take`) and gives back last (`release`).
    """
    program = _role(pipeline, "mma").program
    _check_order(program, pipeline, stages)
    steps = []
    for step in program:
        op = pipeline.op(step.op)
        part = 1 if op.kind == "pv" and step.op.endswith("b") else 0
        steps.append((op.kind.upper(), op.tile, part))
    first = [step for step in steps if step[0] == "QK"]
    last = [step for step in steps if step[0] == "PV"]
    return _with_buffers(first, by_keys), _with_buffers(steps, by_keys), _with_buffers(last, by_keys)


def _check_order(program: tuple[Step, ...], pipeline: Pipeline, stages: int) -> None:
    """P lies where S was: QK of a tile's next block must follow its PV, and nothing may run further ahead."""
    place = {step.op: n for n, step in enumerate(program)}
    for step in program:
        op = pipeline.op(step.op)
        if step.shift != (1 if op.kind == "qk" else 0):
            raise VariantError(
                f"blackwell_ws: the kernel has one S a tile, so '{step.op}' cannot run {step.shift} ahead"
            )
    for tile in range(stages):
        parts = [name for name in place if name.startswith(f"pv{tile}")]
        if any(place[name] > place[f"qk{tile}"] for name in parts):
            raise VariantError(f"blackwell_ws: qk{tile} must come after pv{tile}, whose P it overwrites")
        if sorted(parts, key=lambda name: place[name]) != sorted(parts) or (
            max(place[name] for name in parts) - min(place[name] for name in parts) != len(parts) - 1
        ):
            raise VariantError(f"blackwell_ws: the parts of pv{tile} must follow each other")


def _with_buffers(steps: list[tuple[str, int, int]], by_keys: bool) -> list[dict[str, object]]:
    """Mark where a K or V block is first used and where it is free again; Q tiles likewise."""
    out: list[dict[str, object]] = []
    for n, (op, tile, part) in enumerate(steps):
        same = [m for m, other in enumerate(steps) if other[0] == op and (other[1] == tile or not by_keys)]
        parts = [other[2] for other in steps if other[:2] == (op, tile)]
        out.append(
            {
                "op": op,
                "tile": tile,
                "part": part,
                "last_part": part == max(parts),
                "q_tile": 0 if by_keys else tile,
                "o_tile": 0 if by_keys else tile,
                "take": n == same[0],
                "release": n == same[-1],
                "first_of_q": op == "QK" and not (by_keys and any(o[0] == "QK" for o in steps[:n])),
            }
        )
    return out


def _loads(steps: list[dict[str, object]], by_keys: bool) -> list[dict[str, object]]:
    """What the load role copies for these steps; `tile` is by how many blocks it lies behind the iteration's first."""
    return [
        {"what": "K" if step["op"] == "QK" else "V", "tile": step["tile"] if by_keys else 0}
        for step in steps
        if step["take"]
    ]


def _issue_text(*phases: list[dict[str, object]]) -> str:
    """The order in words: "before the loop QK0 QK1; in it PV0 QK0 PV1 QK1; after it PV0 PV1"."""
    names = []
    for steps in phases:
        names.append(" ".join(f"{step['op']}{step['tile']}" for step in steps if step["last_part"]))
    return f"Before the loop {names[0]}; in it {names[1]}, QK of the next block; after it {names[2]}."


def _stats_lag(pipeline: Pipeline, variant: Fa4Variant) -> list[int]:
    """By how many steps the release of a statistics slot may lag behind, per softmax group."""
    lags = []
    for tile in range(variant.stages):
        edge = next(e for e in pipeline.edges if e.dst == f"sum{tile}" and e.why == "statistics slot")
        if not 0 <= edge.distance <= variant.stats_slots:
            raise VariantError(
                f"blackwell_ws: statistics of tile {tile} wait {edge.distance} steps back, more than the slots"
            )
        lags.append(edge.distance)
    return lags


def _correction(pipeline: Pipeline, variant: Fa4Variant, by_keys: bool) -> list[dict[str, object]]:
    """The correction role's steps in order, with the group whose statistics slot each one releases."""
    steps: list[dict[str, object]] = []
    for step in _role(pipeline, "correction").program:
        tile = pipeline.op(step.op).tile
        edge = next(e for e in pipeline.edges if e.src == step.op and e.why == "statistics slot")
        steps.append({"tile": tile, "o_tile": 0 if by_keys else tile, "releases": pipeline.op(edge.dst).tile})
    if [step["tile"] for step in steps] != list(range(variant.stages)):
        raise VariantError("blackwell_ws: the correction role must serve the softmax groups in turn, first to last")
    return steps


# --- what the hardware decides --------------------------------------------------------------------------------------


def emulated_columns(variant: Fa4Variant) -> tuple[tuple[int, ...], ...]:
    """Per quarter of a row, the even columns whose pair of exponentials goes to the FMA pipe.

    FlashAttention-4's rule (fa4.md (f)) where one of its settings gives the share: in quarters `start` to 2, element k
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


def _p_parts(variant: Fa4Variant) -> list[list[tuple[int, int]]]:
    """(first column, columns) of P that each part of a PV multiplies, in powers of two."""
    n = variant.tile_n
    if not variant.split_p:
        return [[(0, n)]]
    return [[(0, n // 2), (n // 2, n // 4)], [(3 * n // 4, n // 4)]]


def _registers(variant: Fa4Variant, workload: Workload, machine: Machine) -> tuple[int, int, int]:
    """Registers of a softmax thread, of a thread of the matrix and load warps, and of every thread at launch."""
    wide = max(workload.head_dim_qk, workload.head_dim_v)
    key = (variant.cta_group == 2, workload.mask != "none", wide, machine["mufu.ex2_per_clk"] >= 32)
    # One warp each for the matrix and the load role, and two that idle: registers are handed out to four at a time.
    warps = 4 * variant.stages + 4 + 4
    at_launch = _REGISTER_FILE // (32 * warps) // 8 * 8
    if variant.stages == 1:
        return 240, _REGISTERS_DEFAULT[1], at_launch
    if variant.split == "k":
        return *_REGISTERS_BY_KEYS, at_launch
    softmax, other = _REGISTERS.get(key, _REGISTERS_SMALL if wide < 96 else _REGISTERS_DEFAULT)
    return softmax, other, at_launch


def _check_shared_memory(
    variant: Fa4Variant,
    workload: Workload,
    machine: Machine,
    by_keys: bool,
    slots: tuple[int, int],
    barriers: list[dict[str, object]],
) -> None:
    """Refuse what the model's allowance for bookkeeping does not hold: two statistics slots, many barriers."""
    query, _, _ = fa4_smem_bytes(variant, workload, machine)
    ring = sum(
        count * variant.tile_n * width * _ELEMENT_BYTES // variant.cta_group
        for count, width in zip(slots, (workload.head_dim_qk, workload.head_dim_v), strict=True)
    )
    rows = variant.stages * (variant.stats_slots + by_keys) * 128 * 4
    names = {"RING_SLOTS": slots[0], "K_SLOTS": slots[0], "V_SLOTS": slots[1], "STATS_SLOTS": variant.stats_slots}
    count = sum(names.get(str(b["count"]), 0) or int(str(b["count"])) for b in barriers)
    beside = rows + 8 * count + _COMPILER_BYTES
    limit = int(machine["smem.per_cta_bytes"])
    if query + ring + beside > limit:
        raise VariantError(
            f"blackwell_ws: row statistics and barriers need {beside} bytes of shared memory beside the tiles, "
            f"{limit - query - ring} are left: use stats_slots=1 or fewer kv_stages"
        )


def _tmem_map(variant: Fa4Variant, workload: Workload, by_keys: bool) -> list[tuple[str, int, int]]:
    """(name, first column, columns) of tensor memory; P_i is the right half of S_i."""
    out: list[tuple[str, int, int]] = []
    names = [(f"S{tile}", variant.tile_n) for tile in range(variant.stages)]
    names += [(f"O{tile}", workload.head_dim_v) for tile in range(1 if by_keys else variant.stages)]
    column = 0
    for name, columns in names:
        out.append((name, column, columns))
        column += columns
    return out


def _barriers(variant: Fa4Variant, by_keys: bool, shared_ring: bool) -> list[dict[str, object]]:
    """Barriers in the order they are made: how many, arrivals that complete them, and for a CTA pair whether they are
    one for both CTAs (those the matrix role waits for)."""
    q_tiles = "1" if by_keys else str(variant.stages)
    stages = str(variant.stages)
    out = [
        ("q_full", q_tiles, 1, True, "Q has arrived"),
        ("q_free", q_tiles, 1, False, "Q is no longer needed"),
    ]
    if shared_ring:
        rings = [("ring", "RING_SLOTS", "K or V")]
    else:
        rings = [("k_ring", "K_SLOTS", "K"), ("v_ring", "V_SLOTS", "V")]
    for ring, count, what in rings:
        out += [
            (f"{ring}_full", count, 1, True, f"{what} has arrived"),
            (f"{ring}_free", count, 1, False, f"the slot of {what} is free"),
        ]
    out += [
        ("s_full", stages, 1, False, "S is complete"),
        ("p_ready", stages, 2, True, "three quarters of P are stored, and O is rescaled" if variant.split_p else "P is stored, and O is rescaled"),
    ]  # fmt: skip
    if variant.split_p:
        out.append(("p_rest", stages, 1, True, "the last quarter of P is stored"))
    out.append(("o_full", stages, 1, False, "O has taken in a block" if by_keys else "O is complete"))
    for tile in range(variant.stages):
        out += [
            (f"stats_full{tile}", "STATS_SLOTS", 1, False, f"row factors of group {tile} are published"),
            (f"stats_free{tile}", "STATS_SLOTS", 1, False, f"group {tile} may publish the next"),
        ]
    if by_keys:
        out.append(("max_full", stages, 1, False, "a group has passed its row maxima on"))
    keys = ("name", "count", "arrivals", "by_pair", "text")
    return [dict(zip(keys, barrier, strict=True)) for barrier in out]
