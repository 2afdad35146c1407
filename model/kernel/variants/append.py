"""New keys and values into a cache, queries and keys rotated on the way: knobs and what the template writes.

It moves bytes and computes next to nothing, so there is little to choose: how many heads of a token a program takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.kernel.verdict import LEGAL, Verdict
from tilecast.model.kernel.workload import Workload

#: The family, and the template that writes it.
NAMES = ("append", "triton_append")
#: Columns of the widest head that there is (latent attention has 576), as the compiler pads it, and how many elements of a
#: program's tile a thread holds without spilling: each as float32, beside the other of its pair.
_WIDEST, _MOST_ELEMENTS = 1024, 64


@dataclass(frozen=True, slots=True)
class AppendVariant:
    """Heads of a token to a program, its warps, and bits of an element of the cache (8: e4m3)."""

    family: str = "append"
    rows: int = 8
    warps: int = 4
    cache_bits: int = 16


def writable(variant: AppendVariant, workload: Workload) -> Verdict:
    """Whether the template can write ``variant``; what it writes takes heads of any width."""
    if workload.dtype not in ("bf16", "fp16"):
        return Verdict(f"family append is written for bf16 and fp16, got dtype '{workload.dtype}'", "use bf16 or fp16")
    if variant.rows < 1 or variant.rows & (variant.rows - 1):
        return Verdict(f"rows must be a power of two, got {variant.rows}", "use 4, 8 or 16")
    if variant.cache_bits not in (8, 16):
        return Verdict(f"cache_bits must be 8 or 16, got {variant.cache_bits}", "use 16")
    held = variant.rows * _WIDEST // (32 * variant.warps)
    if held > _MOST_ELEMENTS:
        return Verdict(
            f"a thread would hold {held} elements of {variant.rows} heads of {_WIDEST}, more than {_MOST_ELEMENTS}",
            "use fewer rows or more warps",
        )
    return LEGAL
