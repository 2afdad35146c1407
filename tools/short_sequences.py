"""Short sequences drawn by a rule: every kernel that could run them, beside what `tilecast.attention` chooses and other libraries' kernels.

    python tools/short_sequences.py OUT.csv [--fa3 LIBRARY] [--seed 1] [--count 150] [--rounds 7] [--share 0/1] [--seconds 1000]

1 to 1,024 sequences of 1 to 64 queries (of five problems one has up to 256) on as many keys or on up to 700, eight layouts of heads, head_dim 64 to
256, half of them causal.  Forward passes as CUDA graphs, L2 evicted before by reading, in turns, medians: `us` as chosen, `own_us` by tiles of a head
of its own, `serving_us` by the kernels to serve with, `few_us` and `short_us` by those of short sequences in tiles of 16 and of 64 rows, and SDPA's
and FlashAttention-3's.  `alone`: whether a sequence alone gets the same bits; `apart`: the largest difference to `own_us`'s output.

LIBRARY: see sweep_decode.py.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from measuring import drawing, evicting, first_line, geometric_summary, graph_of, measured, times_us
from sweep_decode import fa3_forward
from training_drawn import Drawn, peers, tensors

HEADS = ((4, 1), (14, 2), (32, 8), (5, 5), (8, 1), (16, 16), (12, 12), (24, 8))
DIMS = (64, 64, 128, 128, 128, 96, 256, 256, 192, 80)
MOST_FLOP, MOST_NUMBERS = 3e11, 2e8
FIELDS = ("gpu", "date", "driver", "torch", "triton", "seed", "number", "batch", "heads_q", "heads_kv", "queries", "keys", "head_dim", "head_dim_v", "causal",
          "layout", "us", "own_us", "serving_us", "few_us", "short_us", "cudnn_us", "flash_us", "fa3_us", "speedup", "apart", "alone", "note")  # fmt: skip
#: Writes an output and its log-sum-exp.
Into = Callable[[Any, Any], object]


def problems(seed: int, count: int) -> list[Drawn]:
    """The first ``count`` problems of a seed that are not too large."""
    return [problem for problem, _ in zip(_drawn(random.Random(seed)), range(count), strict=False)]


def _drawn(draw: random.Random) -> Iterator[Drawn]:
    def length(least: int, most: int) -> int:
        return round(least * (most / least) ** draw.random())

    while True:
        heads, dim, causal = draw.choice(HEADS), draw.choice(DIMS), draw.random() < 0.5
        batch, queries = length(1, 1024), length(1, 64) if draw.random() < 0.8 else length(64, 256)
        keys = queries if draw.random() < 0.4 else length(queries if causal else 1, 700)
        dims = (dim, 128 if dim == 192 else dim)
        layout = draw.choice(("bhsd", "bshd", "fused"))
        problem = Drawn("short", batch, heads, queries, keys, dims, causal, (-1, -1), layout, "bfloat16")
        if problem.flop <= MOST_FLOP and batch * heads[0] * max(queries, keys) * dim <= MOST_NUMBERS:
            yield problem


def own_calls(problem: Drawn, q: Any, k: Any, v: Any) -> dict[str, Into]:
    """Column -> the problem as it is chosen, and by each kernel there is for such heads."""
    import torch

    from tilecast.kernels.operator import forward_into
    from tilecast.kernels.registry import candidates, launcher, shipped_short
    from tilecast.kernels.selection import find_kernels
    from tilecast.kernels.serving import operator

    mask, left, right = problem.limits
    scale, lengths = problem.dims[0] ** -0.5, (problem.queries, problem.keys)

    def own(out: Any, lse: Any) -> None:
        kernel = next(one for one in find_kernels(q, k, v, mask) if one.fits(*lengths))
        kernel.launch(q, k, v, out, lse, scale, *((left, right) if kernel.windowed else ()))

    def serving(out: Any, lse: Any) -> None:
        rows = (x.transpose(1, 2) for x in (q, k, v, out))
        operator.into(*rows, lse, (None,) * 8, scale, 0.0, *lengths, (left, right))

    def short(launch: Any, out: Any, lse: Any) -> None:
        launch(q, k, v, out, lse, scale, left, right)

    entries = candidates(torch.cuda.get_device_capability(), "bf16", *problem.dims, "window", shipped_short())
    return {
        "us": lambda out, lse: forward_into(out, lse, q, k, v, scale, left, right),
        "own_us": own,
        "serving_us": serving,
        **{"short_us" if e.seqlen_q_min else "few_us": partial(short, launcher(e)) for e in entries},
    }


def measure(problem: Drawn, fa3: Any, rounds: int, evict: Any) -> dict[str, Any]:
    """The row of a problem."""
    import torch

    from tilecast.kernels.operator import forward_into

    q, k, v, _ = tensors(problem)
    graphs, outs, notes = {}, {}, []
    with torch.no_grad():
        for name, into in own_calls(problem, q, k, v).items():
            out = torch.empty(
                problem.batch, problem.queries, problem.heads[0], problem.dims[1], device="cuda", dtype=q.dtype
            )
            outs[name] = out.transpose(1, 2), torch.empty(q.shape[:3], device="cuda")
            graphs[name] = graph_of(partial(into, *outs[name]))
        for name, attend in peers(problem, fa3).items():
            try:
                graphs[f"{name}_us"] = graph_of(partial(attend, q, k, v))
            except Exception as error:  # a peer that fails must not end the run
                notes.append(f"{name}: {first_line(error)}")
    medians = {name: statistics.median(us) for name, us in times_us(graphs, rounds, evict, "reading").items()}
    alone = torch.empty_like(outs["us"][0][:1]), torch.empty_like(outs["us"][1][:1])
    forward_into(*alone, q[:1], k[:1], v[:1], problem.dims[0] ** -0.5, *problem.limits[1:])
    best = min((us for name, us in medians.items() if name not in outs), default=None)
    (heads_q, heads_kv), (dim, dim_v) = problem.heads, problem.dims
    return {
        "batch": problem.batch, "heads_q": heads_q, "heads_kv": heads_kv, "queries": problem.queries, "keys": problem.keys, "head_dim": dim,
        "head_dim_v": dim_v, "causal": int(problem.causal), "layout": problem.layout, **{name: round(us, 1) for name, us in medians.items()},
        **({} if best is None else {"speedup": round(best / medians["us"], 3)}),
        "apart": f"{max(float((out.float() - outs['own_us'][0].float()).abs().max()) for out, _ in outs.values()):.1e}",
        "alone": int(all(torch.equal(one, all_of[:1]) for one, all_of in zip(alone, outs["us"], strict=True))),
        "note": "; ".join(notes),
    }  # fmt: skip


def main() -> None:
    parser = drawing(__doc__, 150, 7)
    parser.add_argument("--fa3", help="FlashAttention-3's library, as vLLM builds it")
    given = parser.parse_args()
    fa3, evict = fa3_forward(given.fa3) if given.fa3 else None, evicting()
    drawn = problems(given.seed, given.count)
    rows = list(measured(given, FIELDS, drawn, lambda problem: measure(problem, fa3, given.rounds, evict)))
    print(geometric_summary([row["speedup"] for row in rows if "speedup" in row]))


if __name__ == "__main__":
    main()
