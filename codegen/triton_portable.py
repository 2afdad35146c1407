"""What the template of the `triton` family needs to know: a FlashAttention-2 forward in plain Triton.

Python decides here, `templates/triton.py.j2` only writes.  The kernels run from sm_80 on and in Triton's interpreter.
"""

from __future__ import annotations

from tilecast.model.kernel.variants.fa2 import Fa2Variant, needs_pipeline, tile_widths
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

TEMPLATE = "triton.py.j2"
#: How tiles reach shared memory: by cp.async from pointers, or by the bulk copy engine from tensor descriptors, which
#: saves the registers and instructions of addresses.  Before sm_90 Triton turns descriptors back into pointers, badly.
LOADS = ("pointers", "descriptors")
#: Smallest extent of a tl.dot operand.
_SMALLEST_DOT = 16
_MASK_TEXT = {
    "none": "Every query sees every key.",
    "causal": "Query i sees keys up to i + seqlen_k - seqlen_q.",
    "window": "Query i sees keys from window_left before to window_right after position i + seqlen_k - seqlen_q.",
}
_BLOCK_TEXT = {
    "none": "Only the block that reaches over the last key is masked.",
    "causal": "Only blocks on the diagonal are masked.",
    "window": "Only blocks on the two edges of that band are masked.",
}
#: What `attend` compares the keys of a masked block with: its arguments, and the condition.
_MASK_CODE = {
    "none": ("seqlen_k", "keys < seqlen_k"),
    "causal": ("last_key", "keys <= last_key[:, None]"),
    "window": ("first_key, last_key", "(keys >= first_key[:, None]) & (keys <= last_key[:, None])"),
}


def context(variant: Fa2Variant, workload: Workload, machine: Machine, loads: str | None = None) -> dict[str, object]:
    """Everything `TEMPLATE` reads except `header`; `loads` is one of LOADS, by default what suits the machine.

    Raises VariantError where Triton cannot express the variant.
    """
    for name, tile in (("tile_m", variant.tile_m), ("tile_n", variant.tile_n)):
        if tile < _SMALLEST_DOT or tile & (tile - 1):
            raise VariantError(f"triton: {name} must be a power of two of at least {_SMALLEST_DOT}, got {tile}")
    if workload.dtype not in ("bf16", "fp16"):
        raise VariantError(f"triton: dtype must be bf16 or fp16, got '{workload.dtype}'")
    if variant.scheduler not in ("grid", "longest-first"):
        raise VariantError(f"triton: scheduler must be grid or longest-first, got '{variant.scheduler}'")
    if loads is None:
        loads = "descriptors" if machine.tensor_kind in ("wgmma", "tcgen05") else "pointers"
    if loads not in LOADS:
        raise VariantError(f"triton: loads must be {' or '.join(LOADS)}, got '{loads}'")
    must_pipeline = len(tile_widths(workload.head_dim_v)) > 1 or needs_pipeline(variant, workload, machine)
    limits, visible = _MASK_CODE[workload.mask]
    if loads == "pointers" and workload.mask != "none":
        limits += ", seqlen_k"  # loads of masked blocks must stop at the last key
    sizes = ["heads_q", "group_size", "seqlen_q", "seqlen_k"]
    if workload.mask == "window":
        sizes += ["window_left", "window_right"]
    return {
        "title": _title(workload),
        "description": _description(variant, workload),
        "mask": workload.mask,
        "limits": limits,
        "visible": visible,
        "sizes": sizes,
        "tile_m": variant.tile_m,
        "tile_n": variant.tile_n,
        "warps": variant.warps,
        "stages": variant.stages,
        # A loop that runs at most once needs no pipeline, unless it has to have one.
        "edge_stages": 1 if workload.mask == "none" and not must_pipeline else variant.stages,
        "loads": loads,
        "longest_first": variant.scheduler == "longest-first",
        "qk_parts": _parts(workload.head_dim_qk),
        "v_parts": _parts(workload.head_dim_v),
    }


def _title(workload: Workload) -> str:
    mask = {"none": "Attention", "causal": "Causal attention", "window": "Sliding-window attention"}[workload.mask]
    dims = f"{workload.head_dim_qk}"
    if workload.head_dim_v != workload.head_dim_qk:
        dims += f" (queries, keys) and {workload.head_dim_v} (values)"
    return f"{mask} forward for head_dim {dims}: FlashAttention-2 in plain Triton"


def _description(variant: Fa2Variant, workload: Workload) -> str:
    lines = [
        _MASK_TEXT[workload.mask],
        f"A program owns {variant.tile_m} query rows of one head and takes in {variant.tile_n} keys at a time.",
        _BLOCK_TEXT[workload.mask],
    ]
    if variant.scheduler == "longest-first":
        lines.append("Programs of a head start with its last rows, which see the most keys.")
    split = [dim for dim in (workload.head_dim_qk, workload.head_dim_v) if dim & (dim - 1)]
    if split:
        sums = " + ".join(str(part["width"]) for part in _parts(split[0]))
        lines.append(f"Triton's blocks are powers of two: head_dim {split[0]} goes as {sums}, nothing is padded.")
    return "\n".join(lines)


def _parts(head_dim: int) -> list[dict[str, object]]:
    """Powers of two, largest first, that add up to `head_dim`; each is one tl.dot."""
    widths = tile_widths(head_dim)
    if widths[-1] < _SMALLEST_DOT:
        raise VariantError(f"triton: head_dim must be a multiple of {_SMALLEST_DOT}, got {head_dim}")
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return [
        {
            "suffix": f"_{start}" if len(widths) > 1 else "",
            "offset": f" + {start}" if start else "",
            "start": start,
            "width": width,
        }
        for start, width in zip(starts, widths, strict=True)
    ]
