"""The plan of pairs for `tilecast validate ablations`, by a rule that asks no forecast (`codegen.tune.structure.sample`).

    python tools/h200_pairs_plan.py > data/measured/h200_pairs_plan.toml

Knobs of which the first table has few pairs: emulated exponentials (none, an eighth and a quarter of them) and turns. For each head
dimension and mask five kernels are drawn for the one (the first is the table's own pair) and four with overlap for the other, all
with the persistent scheduler of the mask and with no more registers than fit.
"""

from __future__ import annotations

from dataclasses import replace

from tilecast.codegen.tune.structure import sample
from tilecast.model.families import find_family, writable
from tilecast.model.kernel.variant import Variant, variant_text
from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

MACHINE, SEQLEN, BATCH = "h200-sxm", 4096, 4
SHARES = (0.0, 0.125, 0.25)
EMULATED, TURNS = 5, 4
CELLS = ((128, False), (64, False), (128, True), (64, True))
#: Keys of a tile times warpgroups beyond the first: beyond that S, P and O do not fit the registers.
_FITS = 128


def _known(v: Fa3Variant) -> bool:
    """The kernel whose pairs the first table has."""
    knobs = (v.warpgroups, v.tile_n, v.kv_stages, v.q_stages, v.overlap, v.ping_pong, v.rescale)
    return knobs == (2, 64, 4, 2, True, False, "anchored")


def kernels(work: Workload) -> list[Variant]:
    """Kernels for ``work``, pairs next to each other."""
    machine, scheduler = load_machine(MACHINE), "persistent" if work.mask == "none" else "paired"
    space = {
        v
        for v in find_family("hopper_ws").space(work, machine)
        if isinstance(v, Fa3Variant)
        and v.scheduler == scheduler
        and v.tile_n * max(1, v.warpgroups - 1) <= _FITS
        and writable(v, work, machine).legal
    }
    plain = [v for v in space if v.emulated_share == 0.0]
    emulated = [v for v in plain if all(replace(v, emulated_share=share) in space for share in SHARES)]
    alone = [v for v in plain if v.warpgroups > 1 and v.overlap and not v.ping_pong]
    turns = [v for v in alone if replace(v, ping_pong=True) in space]
    found: list[Variant] = []
    for drawn in sample(emulated, EMULATED, [v for v in emulated if _known(v)]):
        found += [replace(drawn, emulated_share=share) for share in SHARES]  # type: ignore[call-arg]
    for drawn in sample(turns, TURNS):
        found += [drawn, replace(drawn, ping_pong=True)]  # type: ignore[call-arg]
    return list(dict.fromkeys(found))


def plan() -> str:
    """The plan as TOML."""
    out = [
        "# Pairs that differ in emulated exponentials or turns, written by h200_pairs_plan.py: docs/ablations.md.",
        'title = "hopper_ws, pairs that differ in emulated_share or ping_pong"',
    ]
    for dim, causal in CELLS:
        work = Workload(BATCH, 2048 // dim, 2048 // dim, SEQLEN, SEQLEN, dim, dim, "causal" if causal else "none")
        out += ["", "[[group]]", 'role = "held-out"', "variants = ["]
        out += [f'  "hopper_ws:{variant_text(v).partition(",")[2]}",' for v in kernels(work)]
        mask = ", causal = true" if causal else ""
        shape = f"{{ seqlen = {SEQLEN}, head_dim = {dim}, batch = {BATCH}, heads = {2048 // dim}{mask} }}"
        out += ["]", "shapes = [", f"  {shape},", "]"]
    return "\n".join(out)


if __name__ == "__main__":
    print(plan())
