"""What parts of the query heads that share a key/value head are worth to the shipped backward passes, one problem after the other.

    python tools/backward_parts.py OUT.csv [--rounds 11] [--share 0/1] [--short]

Each problem by programs that take all query heads of a key/value head, and by such that take parts of them (`query_head_parts`), as CUDA
graphs of all launches of a pass, L2 evicted before by reading, in turns, medians.  `rule`: what the rule makes of the problem.
--short: short sequences instead, each in small and in large batches, and beside them PyTorch's cuDNN (`cudnn_us`) where it has the mask.
"""

from __future__ import annotations

import importlib
import statistics
from functools import partial
from typing import Any

from measuring import by_sdpa, evicting, graph_of, listing, nvidia_smi, tabulate, times_us

#: (module, batch, query heads, key/value heads, queries, keys, window before the diagonal).
PROBLEMS = (
    *(("hopper_bwd_d128_causal", *one, -1) for one in (
        (1, 16, 2, 4096, 4096), (8, 16, 2, 4096, 4096), (1, 48, 8, 1024, 1024), (15, 48, 8, 1024, 1024), (1, 14, 2, 1024, 1024),
        (6, 14, 2, 1024, 1024), (1, 28, 4, 2048, 2048), (8, 28, 4, 2048, 2048), (1, 32, 8, 2048, 2048), (8, 32, 8, 2048, 2048))),
    *(("hopper_bwd_d128_full", *one, -1) for one in (
        (6, 28, 4, 197, 197), (22, 14, 2, 197, 197), (1, 16, 2, 2048, 2048), (8, 16, 2, 2048, 2048))),
    *(("hopper_bwd_d64_causal", *one, -1) for one in ((1, 14, 2, 2048, 2048), (8, 14, 2, 2048, 2048))),
    ("hopper_bwd_d64_full", 2, 64, 8, 2778, 77, -1),
    *(("hopper_bwd_d256_causal", *one, -1) for one in ((1, 8, 2, 2048, 2048), (8, 8, 2, 2048, 2048))),
    ("hopper_bwd_d192_128_full", 2, 128, 8, 2778, 77, -1),
    *(("hopper_bwd_d128_window", *one, 512) for one in ((1, 32, 2, 4096, 4096), (8, 32, 2, 4096, 4096))),
)  # fmt: skip
#: (module, query heads, key/value heads, queries, keys, window before the diagonal), and batches.
SHORT = (
    *((("hopper_bwd_d128_causal", *heads, n, n, -1), (1, 4, 16, 64)) for n, heads in (
        (256, (8, 1)), (256, (28, 4)), (256, (96, 8)), (512, (4, 1)), (512, (16, 2)))),
    *((("hopper_bwd_d128_full", *one, -1), (1, 6, 24, 96)) for one in ((16, 2, 80, 80), (28, 4, 197, 197), (4, 1, 1024, 1024))),
    *((("hopper_bwd_d64_full", *one, -1), (1, 5, 20, 80)) for one in ((16, 2, 80, 80), (96, 8, 241, 256))),
    (("hopper_bwd_d64_causal", 8, 1, 1024, 1024, -1), (1, 8, 32)),
    (("hopper_bwd_d64_window", 16, 2, 454, 454, 128), (1, 4, 32)),
    *(((module, *one, -1), (1, 4, 16, 64)) for one in ((8, 1, 256, 256), (16, 2, 512, 512))
      for module in ("triton_tma_bwd_d64_causal", "hopper_bwd_d64_causal")),
    *((("hopper_bwd_d256_causal", *one, -1), (1, 4, 16)) for one in ((8, 1, 256, 256), (20, 4, 512, 512))),
    (("hopper_bwd_d192_128_causal", 28, 4, 256, 256, -1), (1, 4, 16, 64)),
)  # fmt: skip
FIELDS = ("gpu", "date", "driver", "torch", "triton", "module", "batch", "heads_q", "heads_kv", "queries", "keys", "window_left", "parts",
          "rule", "us", "sm_clock_mhz")  # fmt: skip
WITH_PEER = (*FIELDS[:-1], "cudnn_us", FIELDS[-1])


def main() -> None:
    """Measure all problems into a CSV."""
    parser = listing(__doc__, 11)
    parser.add_argument("--short", action="store_true", help="short sequences, beside cuDNN")
    given = parser.parse_args()
    evict, short = evicting(), [(name, batch, *sizes) for (name, *sizes), batches in SHORT for batch in batches]
    fields, problems = (WITH_PEER, short) if given.short else (FIELDS, PROBLEMS)
    tabulate(given, fields, problems, lambda problem: measure(problem, given.rounds, evict, given.short))


def cudnn_graph(q: Any, k: Any, v: Any, dout: Any, causal: bool) -> Any:
    """PyTorch's cuDNN backward pass of these tensors, without a mask or causal."""
    import torch

    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    # Gradients run on the stream of their forward, which has to be the one that is captured.
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        out = by_sdpa("CUDNN", causal)(*inputs)
    return graph_of(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True), stream=stream)


def measure(problem: tuple[Any, ...], rounds: int, evict: Any, peer: bool) -> list[dict[str, Any]]:
    """The rows of a problem."""
    import torch

    import tilecast
    from tilecast.kernels.launching import backward_launcher

    name, batch, heads_q, heads_kv, queries, keys, left = problem
    module = importlib.import_module(f"tilecast.kernels.generated.{name}")
    rule, ruled = module.query_head_parts, []

    def forced(parts: int, *numbers: int) -> int:
        ruled.append(rule(*numbers))
        return parts

    work = module.TILECAST["workload"]
    shapes = (
        (heads_q, queries, work["head_dim_qk"]),
        (heads_kv, keys, work["head_dim_qk"]),
        (heads_kv, keys, work["head_dim_v"]),
    )
    q, k, v = (torch.randn(batch, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    window = (left, 0) if left >= 0 else (-1, 0 if work["mask"] == "causal" else -1)
    out, lse = tilecast.attention(q, k, v, window=window, return_lse=True)
    made = torch.randn_like(out), torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    limits = window if work["mask"] == "window" else (-1, -1)
    group = heads_q // heads_kv
    graphs, kept = {}, []
    try:
        for heads in range(group, 0, -1):
            parts = -(-group // heads)
            if parts in graphs:
                continue
            module.query_head_parts = partial(forced, parts)
            launch = backward_launcher(module)
            kept.append(launch)
            graphs[parts] = graph_of(partial(launch, q, k, v, out, lse, *made, q.shape[3] ** -0.5, *limits))
    finally:
        module.query_head_parts = rule
    more = {"cudnn": cudnn_graph(q, k, v, made[0], work["mask"] == "causal")} if peer and left < 0 else {}
    times = times_us({**{str(parts): graph for parts, graph in graphs.items()}, **more}, rounds, evict, "reading")
    clock = nvidia_smi("clocks.sm")
    same = dict(zip(("module", "batch", "heads_q", "heads_kv", "queries", "keys", "window_left"), problem, strict=True))
    medians = {parts: round(statistics.median(times[str(parts)]), 1) for parts in graphs}
    if more:
        same["cudnn_us"] = round(statistics.median(times["cudnn"]), 1)
    return [
        {**same, "parts": parts, "rule": ruled[0], "us": us, "sm_clock_mhz": clock} for parts, us in medians.items()
    ]


if __name__ == "__main__":
    main()
