"""What the template of the `hopper_ws` family needs to know: a warp-specialised FlashAttention-3 class forward.

Python decides here, `templates/hopper_ws.py.j2` only writes.  The order in which a consumer issues its matrix products
and the depth of the rings are read off the pipeline of the variant, the same value that the forecast simulates.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tilecast.codegen.exp2 import COEFFICIENTS, emulated_of_eight
from tilecast.model.families import build_pipeline
from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline

TEMPLATE = "hopper_ws.py.j2"
ROWS = 64
#: (consumer, producer) registers a thread and the cap at entry, by consumer warpgroups: 65536 registers in all.
_REGISTERS = {1: (240, 24, 240), 2: (232, 40, 168), 3: (160, 32, 128)}
_MASK_TEXT = {
    "none": "Every query sees every key.",
    "causal": "Causal: query i sees keys up to i + seqlen_k - seqlen_q; only blocks on that diagonal are masked.",
    "window": "Sliding window: query i sees keys from window_left before to window_right after position\n"
    "i + seqlen_k - seqlen_q (-1: no limit); only blocks on the two edges of that band are masked.",
}
_RESCALE_TEXT = {
    "always": "Online softmax: O is rescaled in every step.",
    "conditional": "Online softmax with conditional rescale: O is only rescaled when a row's maximum grew by more than\n"
    "2^threshold.",
    "anchored": "Anchored softmax: the row maximum of the first blocks is the\nreference of all exponentials, so the steady "
    "state has neither a row maximum nor a rescale of O.  That is exact as\nlong as no exponential leaves the range of "
    "its type; the row sums tell, and a tile where one did is done again with\nthe online softmax.",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns [offset, offset + width) of a head: Triton's tensors have power-of-two extents, heads of 96 do not."""

    offset: int
    width: int
    o: str = ""


def pieces(width: int, name: str = "") -> tuple[Piece, ...]:
    """``width`` columns as power-of-two pieces of at most 256, widest first."""
    out: list[Piece] = []
    offset = 0
    while offset < width:
        size = min(256, 1 << ((width - offset).bit_length() - 1))
        out.append(Piece(offset, size))
        offset += size
    if len(out) == 1:
        return (Piece(0, width, name),)
    return tuple(Piece(p.offset, p.width, f"{name}_{i}") for i, p in enumerate(out))


def issue_order(pipeline: Pipeline) -> tuple[str, ...]:
    """The matrix products a consumer issues in one iteration, in the pipeline's order: "qk" and "pv"."""
    role = next(role for role in pipeline.roles if role.name == "consumer0")
    return tuple(pipeline.op(step.op).kind for step in role.program if pipeline.op(step.op).engine == "tensor")


def ring_depth(pipeline: Pipeline, name: str) -> int:
    """Slots of a buffer of the pipeline."""
    return next(buffer.depth for buffer in pipeline.buffers if buffer.name == name)


def context(variant: Fa3Variant, workload: Workload, machine: Machine) -> dict[str, object]:
    """Everything `TEMPLATE` reads except ``header``.  The variant must be writable (`model.families.writable`)."""
    pipeline = build_pipeline(workload, variant, machine)
    qk, v = pieces(workload.head_dim_qk), pieces(workload.head_dim_v, "o")
    size = workload.dtype_bytes
    consumer, producer, cap = _REGISTERS[variant.warpgroups]
    eighths = emulated_of_eight(variant.emulated_share) or 0
    kv_stages, q_stages = ring_depth(pipeline, "K"), ring_depth(pipeline, "Q")
    ping_pong = variant.ping_pong and variant.warpgroups > 1
    wide = len(v) > 1
    return {
        "title": _title(workload),
        "description": _description(variant),
        "mask_text": _MASK_TEXT[workload.mask],
        "mask": workload.mask,
        "masked_right": workload.mask != "none",
        "warpgroups": variant.warpgroups,
        "rows": ROWS,
        "tile_m": ROWS * variant.warpgroups,
        "tile_n": variant.tile_n,
        "kv_stages": kv_stages,
        "q_stages": q_stages,
        "rescale": variant.rescale,
        "rescale_threshold": variant.rescale_threshold,
        "scheduler": variant.scheduler,
        "overlap": variant.overlap,
        "ping_pong": ping_pong,
        "turn_bars": ", turn_bars" if ping_pong else "",
        "issue_order": issue_order(pipeline),
        "emulated_eighths": eighths,
        "poly_degree": variant.poly_degree,
        "poly_bits": [_float_bits(c) for c in (1.0, *COEFFICIENTS[variant.poly_degree])],
        "exp2": "exp2" if eighths else "mufu_exp2",
        "qk_pieces": qk,
        "v_pieces": v,
        "o_names": ", ".join(p.o for p in v) if wide else "o",
        "q_bytes": f"{ROWS * workload.head_dim_qk * size}",
        "k_bytes": f"{variant.tile_n * workload.head_dim_qk * size}",
        "v_bytes": f"{variant.tile_n * workload.head_dim_v * size}",
        "kv_bytes": f"{variant.tile_n * (workload.head_dim_qk + workload.head_dim_v) * size}",
        "smem": (
            ("q_smem", qk, "q", "Q_STAGES * WARPGROUPS", "ROWS"),
            ("k_smem", qk, "k", "KV_STAGES", "TILE_N"),
            ("v_smem", v, "v", "KV_STAGES", "TILE_N"),
        ),
        **_descriptors(qk, v, variant),
        "head_dim_qk": workload.head_dim_qk,
        "head_dim_v": workload.head_dim_v,
        "worker_warps": [4] * (variant.warpgroups - 1) + [1],
        "worker_registers": [consumer] * (variant.warpgroups - 1) + [producer],
        "maxnreg": cap,
    }


def _descriptors(qk: tuple[Piece, ...], v: tuple[Piece, ...], variant: Fa3Variant) -> dict[str, object]:
    """Names of the kernel's tensor descriptors and the host expressions that make them."""
    names: list[str] = []
    calls: list[str] = []
    out: dict[str, object] = {}
    groups = [("q", "q", qk, ROWS), ("k", "k", qk, variant.tile_n), ("v", "v", v, variant.tile_n)]
    for name, tensor, parts, rows in groups:
        mine = [f"{name}_desc_{i}" for i in range(len(parts))] if len(parts) > 1 else [f"{name}_desc"]
        out[f"{name}_descs"] = ", ".join(mine)
        names += mine
        calls += [f"tiles({tensor}, {rows}, {part.width})" for part in parts]
    # One element tuples need their comma; longer ones do not.
    out["desc_args"] = "".join(f"{name}, " for name in names)
    out["desc_calls"] = calls
    out["desc_tensors"] = [(name, name[0]) for name in names]
    return out


def _float_bits(value: float) -> str:
    """A PTX literal of the float32 nearest ``value``."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def _title(workload: Workload) -> str:
    qk, v = workload.head_dim_qk, workload.head_dim_v
    mask = {"none": "no mask", "causal": "causal", "window": "sliding window"}[workload.mask]
    return f"Attention forward on Hopper: head_dim {qk if qk == v else f'{qk}/{v}'}, {mask}."


def _description(variant: Fa3Variant) -> str:
    parts = [_RESCALE_TEXT[variant.rescale]]
    if variant.overlap:
        parts.append("Each warpgroup issues Q K^T of the next\nkey block together with P V of this one and works on the next softmax while P V still runs.")  # fmt: skip
    if variant.ping_pong and variant.warpgroups > 1:
        parts.append(
            "Warpgroups take turns at\nissuing matrix products, so that one's softmax runs under another's products."
        )
    if variant.emulated_share:
        parts.append(f"A share of {variant.emulated_share:g} of the exponentials\nis a polynomial on the FMA pipe.")
    return "  ".join(parts)
