"""The plan of e4m3 attention kernels on the H200: the one that ships, some drawn of all, and some drawn of the loops that are kept.

    python tools/h200_fp8_plan.py > data/measured/h200_fp8_plan.toml

For each head dimension and mask; draws go by hash (`codegen.tune.structure.sample`).  Three lengths of 16k tokens and hidden size
2048, V given along its keys.
"""

from __future__ import annotations

from tilecast.codegen.shipping.loops import wanted
from tilecast.codegen.shipping.ship import read_e4m3_list
from tilecast.codegen.tune.structure import sample
from tilecast.model.families import parse_variant
from tilecast.model.kernel.variant import Variant, variant_text
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.search.best import search_space

DRAWN, KEPT = 5, 4
TOKENS, HIDDEN = 16384, 2048
LENGTHS = (1024, 4096, 16384)


def variants(work: Workload) -> list[Variant]:
    """The variants of one group."""

    def loop(other: Workload) -> bool:
        return (other.head_dim_qk, other.mask, other.dtype) == (work.head_dim_qk, work.mask, work.dtype)

    ships = [
        parse_variant(f"family=fa3,{kernel.variant}")
        for kernel in read_e4m3_list()
        if kernel.family == "hopper_ws" and loop(kernel.workload)
    ]
    space = search_space(work, load_machine("h200-sxm"), "fa3").variants
    kept = [variant for job, variant in wanted() if loop(job)]
    return list(dict.fromkeys((*ships, *sample(space, DRAWN), *sample(kept, KEPT))))


def plan() -> str:
    """The plan as TOML."""
    out = [
        "# e4m3 attention, written by h200_fp8_plan.py: docs/accuracy.md.",
        'title = "hopper_ws in e4m3: what ships, 5 drawn of all variants and 4 of the loops that are kept"',
    ]
    for dim in (128, 256, 64):
        for mask in ("none", "causal"):
            out += ["", "[[group]]", 'role = "held-out"', "variants = ["]
            work = Workload(4, 16, 16, 4096, 4096, dim, dim, mask, dtype="fp8")
            out += [f'  "hopper_ws:{variant_text(variant).partition(",")[2]}",' for variant in variants(work)]
            out += ["]", "shapes = ["]
            causal = ", causal = true" if mask == "causal" else ""
            for length in LENGTHS:
                shape = f"batch = {TOKENS // length}, heads = {HIDDEN // dim}"
                out.append(f'  {{ seqlen = {length}, head_dim = {dim}, {shape}{causal}, dtype = "fp8" }},')
            out.append("]")
    return "\n".join(out)


if __name__ == "__main__":
    print(plan())
