"""The plan of the tuner's exhaustive experiment on the H200, by a rule that asks no forecast (`codegen.choosing.sample`).

    python tools/h200_tuner_plan.py > data/measured/h200_tuner_plan.toml

Every writable variant of `hopper_ws` for a head dimension and mask is in the drum; those that ship go in first.
"""

from __future__ import annotations

from tilecast.codegen.shipping.ship import read_list
from tilecast.codegen.tune.structure import sample
from tilecast.model.families import Family, find_family, parse_variant, writable
from tilecast.model.kernel.variant import Variant, variant_text
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

MACHINE = "h200-sxm"
HOPPER, TRITON = 102, 4
#: (head_dim, causal) -> (seqlen, batch, heads); 16k tokens and hidden size 2048, as in the FlashAttention papers.
SHAPES = {
    (64, True): ((1024, 16, 32), (8192, 2, 32)),
    (128, False): ((1024, 16, 16), (4096, 4, 16), (16384, 1, 16)),
    (128, True): ((2048, 8, 16), (16384, 1, 16)),
    (256, False): ((2048, 8, 8), (8192, 2, 8)),
}


def writable_variants(family: Family, work: Workload) -> tuple[Variant, ...]:
    """Every variant of the family that is written for the problem."""
    machine = load_machine(MACHINE)
    return tuple(v for v in family.space(work, machine) if writable(v, work, machine).legal)


def shipped_variants(family: Family, work: Workload) -> list[Variant]:
    """What ships for the head dimensions and mask, as the list has it."""
    rows = [
        row
        for row in read_list()
        if find_family(row.family) == family
        and (row.workload.head_dim_qk, row.workload.head_dim_v) == (work.head_dim_qk, work.head_dim_v)
        and row.workload.mask == work.mask
    ]
    return [parse_variant(f"family={family.name},{row.variant}") for row in rows]


def plan() -> str:
    """The plan as TOML."""
    out = [
        "# The tuner's exhaustive experiment, written by h200_tuner_plan.py: docs/tuning.md.  No forecast chose these variants.",
        'title = "hopper_ws and triton, at least 100 variants a shape"',
    ]
    for (dim, causal), shapes in SHAPES.items():
        work = Workload(4, 16, 16, 4096, 4096, dim, dim, "causal" if causal else "none")
        out += ["", "[[group]]", 'role = "held-out"', "variants = ["]
        for name, count in (("hopper_ws", HOPPER), ("triton", TRITON)):
            family = find_family(name)
            for variant in sample(writable_variants(family, work), count, shipped_variants(family, work)):
                out.append(f'  "{name}:{variant_text(variant).partition(",")[2]}",')
        out += ["]", "shapes = ["]
        mask = ", causal = true" if causal else ""
        for seqlen, batch, heads in shapes:
            out.append(f"  {{ seqlen = {seqlen}, head_dim = {dim}, batch = {batch}, heads = {heads}{mask} }},")
        out.append("]")
    return "\n".join(out)


if __name__ == "__main__":
    print(plan())
