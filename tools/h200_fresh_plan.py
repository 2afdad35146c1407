"""The plan of variants and shapes that nobody looked at: both drawn by a seed, no forecast asked.

    python tools/h200_fresh_plan.py --seed 1 > data/measured/h200_fresh_plan.toml

Twenty-four shapes of `hopper_ws`, their lengths odd more often than not, heads with and without groups, every mask; of each the
kernel that ships for it and ten of all its writable variants.
"""

from __future__ import annotations

import argparse
import random

from h200_tuner_plan import shipped_variants, writable_variants

from tilecast.model.families import find_family
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.workload import Workload

FAMILY = "hopper_ws"
SHAPES, VARIANTS = 24, 10
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
HEADS = ((8, 8), (16, 16), (32, 32), (32, 8), (14, 2), (24, 3), (10, 10))
#: Tokens of all sequences, and FLOPs that a measurement of milliseconds allows.
TOKENS, FLOPS = (4096, 32768), 4e12


def shape(draw: random.Random) -> Workload:
    """One problem of the drum."""
    while True:
        dim, dim_v = draw.choice(DIMS)
        heads, heads_kv = draw.choice(HEADS)
        seqlen = round(2 ** draw.uniform(8.5, 14.0))
        batch = max(1, draw.randint(*TOKENS) // seqlen)
        mask = draw.choice(("none", "none", "causal", "causal", "window"))
        left = draw.choice((128, 200, 512, 1024, 1500))
        window = (left, draw.choice((0, left))) if mask == "window" else None
        work = Workload(batch, heads, heads_kv, seqlen, seqlen, dim, dim_v, mask, window)
        if work.flops < FLOPS and (window is None or left < seqlen // 2):
            return work


def plan(seed: int) -> str:
    """The plan as TOML."""
    draw, family = random.Random(seed), find_family(FAMILY)
    out = [
        f"# Variants and shapes of seed {seed}, written by h200_fresh_plan.py: docs/accuracy.md.  No forecast chose them.",
        f'title = "hopper_ws drawn, seed {seed}"',
    ]
    for _ in range(SHAPES):
        work = shape(draw)
        space = writable_variants(family, work)
        first = [v for v in shipped_variants(family, work) if v in space][:1]
        chosen = [*first, *draw.sample([v for v in space if v not in first], VARIANTS)]
        out += ["", "[[group]]", 'role = "held-out"', "variants = ["]
        out += [f'  "{FAMILY}:{variant_text(v).partition(",")[2]}",' for v in chosen]
        fields = {
            "seqlen": work.seqlen_q,
            "head_dim": work.head_dim_qk,
            "head_dim_v": work.head_dim_v,
            "batch": work.batch,
        }
        fields |= {"heads": work.heads_q, "heads_kv": work.heads_kv}
        shaped = ", ".join(f"{name} = {value}" for name, value in fields.items())
        mask = ", causal = true" if work.mask == "causal" else ""
        if work.window is not None:
            mask = f', window = "{work.window[0]},{work.window[1]}"'
        out += ["]", f"shapes = [{{ {shaped}{mask} }}]"]
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    print(plan(parser.parse_args().seed))


if __name__ == "__main__":
    main()
