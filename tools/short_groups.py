"""Short sequences whose query heads share keys: tiles of a head of its own beside tiles that a group shares.

    python tools/short_groups.py OUT.csv [--rounds 11] [--share 0/1]

Forward passes as CUDA graphs, L2 evicted before by reading, in turns, medians: `own_us` by the kernels of `tilecast.attention`, `shared_us`
by those to serve with, `us` as `tilecast.attention` chooses, `cudnn_us` SDPA's (no mask alone).
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from measuring import evicting, first_line, graph_of, listing, nvidia_smi, tabulate, times_us

#: (batch, query heads, key/value heads, queries, keys, head_dim).
PROBLEMS = (
    (206, 128, 8, 22, 22, 128), (26, 96, 8, 16, 1687, 256), (91, 14, 2, 23, 23, 256), (239, 20, 4, 50, 50, 128), (14, 128, 8, 165, 512, 96),
    (125, 20, 4, 196, 196, 64), (158, 40, 8, 197, 197, 64), (40, 96, 8, 128, 128, 64), (27, 14, 2, 257, 257, 128), (14, 64, 8, 172, 226, 224),
    (8, 32, 8, 64, 1024, 128), (4, 32, 4, 100, 100, 128), (8, 20, 4, 36, 36, 128), (5, 64, 8, 55, 77, 96), (64, 32, 8, 40, 40, 128),
    (16, 28, 4, 80, 80, 128), (32, 16, 2, 100, 600, 64),
)  # fmt: skip
FIELDS = ("gpu", "date", "driver", "torch", "triton", "batch", "heads_q", "heads_kv", "queries", "keys", "head_dim", "causal", "us",
          "own_us", "shared_us", "cudnn_us", "apart", "sm_clock_mhz", "note")  # fmt: skip


def main() -> None:
    """Measure all problems into a CSV."""
    given = listing(__doc__, 11).parse_args()
    evict = evicting()
    tabulate(given, FIELDS, PROBLEMS, lambda problem: [measure(problem, causal, given.rounds, evict) for causal in (False, True)])  # fmt: skip


def measure(problem: tuple[int, ...], causal: bool, rounds: int, evict: Any) -> dict[str, Any]:
    """The row of a problem."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from tilecast.kernels.operator import forward_into
    from tilecast.kernels.serving import few_rows

    batch, heads_q, heads_kv, queries, keys, dim = problem
    shapes = ((heads_q, queries), (heads_kv, keys), (heads_kv, keys))
    q, k, v = (torch.randn(batch, *shape, dim, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    graphs, outs, note = {}, {}, ""
    chosen = few_rows.EMPTIER
    try:
        for name, emptier in (("us", chosen), ("own_us", 1e9), ("shared_us", 0.0)):
            few_rows.EMPTIER = emptier
            outs[name] = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
            graphs[name] = graph_of(partial(forward_into, *outs[name], q, k, v, dim**-0.5, -1, 0 if causal else -1))
    finally:
        few_rows.EMPTIER = chosen
    kept = []

    def cudnn() -> None:
        kept.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True))

    if not causal:
        try:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                graphs["cudnn_us"] = graph_of(cudnn)
        except RuntimeError as error:
            note = f"cudnn: {first_line(error)}"
    medians = {name: round(statistics.median(us), 1) for name, us in times_us(graphs, rounds, evict, "reading").items()}
    apart = (outs["own_us"][0].float() - outs["shared_us"][0].float()).abs().max().item()
    same = dict(zip(("batch", "heads_q", "heads_kv", "queries", "keys", "head_dim"), problem, strict=True))
    return {
        **same,
        "causal": int(causal),
        **medians,
        "apart": f"{apart:.1e}",
        "sm_clock_mhz": nvidia_smi("clocks.sm"),
        "note": note,
    }


if __name__ == "__main__":
    main()
