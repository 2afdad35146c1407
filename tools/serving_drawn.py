"""Serving problems of all kinds drawn by a rule, `tilecast.attention_varlen` and `attention_kvcache` beside FlashAttention-3.

    python tools/serving_drawn.py OUT.csv --fa3 LIBRARY [--seed 1] [--count 96] [--rounds 5] [--share 0/1] [--only 3,17] [--seconds 1000]

A problem has a kind (sequences of even lengths, of unequal ones, one giant among short ones, tiny ones; 2 to 8 queries each, 16 to 100, a
mixture of decodes and chunks, chunks of prompts, whole prompts packed), heads (18 models', most query heads to a key head 71), head_dim 64 to 256
(80, 96 and 192/128 among them), a page of 16 to 256, and at times a window, a soft cap, sinks or fp16.  Each is a CUDA graph of one call, L2
evicted before by reading, in turns; medians.  The results of both are held against each other.  Problems of more than 6 GB or 30 TFLOP are passed over.

LIBRARY: see sweep_decode.py.  --share 2/8 does each eighth problem from the second on: eight processes side by side compile what a run
alone then finds compiled.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import dataclass
from typing import Any

from measuring import drawing, evicting, first_line, geometric_summary, graph_of, measured, nvidia_smi, times_us
from sweep_decode import block_table, fa3_forward

from tilecast.model.step.batch import requests_text

HEADS = ((32, 8), (64, 8), (28, 4), (40, 8), (16, 16), (14, 2), (96, 8), (128, 8), (8, 1), (71, 1), (16, 2), (4, 1), (24, 8), (12, 12), (64, 64),
         (5, 5), (48, 8), (20, 4))  # fmt: skip
DIMS = ((64, 64), (64, 64), (128, 128), (128, 128), (128, 128), (128, 128), (96, 96), (256, 256), (192, 128), (80, 80))
KINDS = ("even", "unequal", "giant", "tiny", "few queries", "few queries", "some queries", "mixed", "chunks", "packed")
FIELDS = ("gpu", "date", "driver", "torch", "triton", "seed", "number", "kind", "requests", "sequences", "keys", "longest", "queries", "most_queries", "heads_q",
          "heads_kv", "head_dim", "head_dim_v", "page", "window", "softcap", "sinks", "dtype", "us", "fa3_us", "speedup", "apart", "sm_clock_mhz", "note")  # fmt: skip
MOST_BYTES, MOST_FLOP = 6e9, 3e13


@dataclass(frozen=True)
class Drawn:
    """A batch of sequences for one model's heads."""

    kind: str
    heads: tuple[int, int]
    dims: tuple[int, int]
    keys: tuple[int, ...]
    queries: tuple[int, ...]
    page: int
    window: int
    softcap: float
    sinks: bool
    dtype: str

    @property
    def cache_bytes(self) -> float:
        """Of K and V in whole pages."""
        return 2.0 * sum(-(-n // self.page) * self.page for n in self.keys) * self.heads[1] * sum(self.dims)

    @property
    def flop(self) -> float:
        """Of all products that no mask makes needless but the causal one."""
        return sum(2.0 * q * k * self.heads[0] * sum(self.dims) for q, k in zip(self.queries, self.keys, strict=True))


def draw_one(draw: random.Random) -> Drawn:
    """One problem."""
    dims, heads, kind = draw.choice(DIMS), draw.choice(HEADS), draw.choice(KINDS)
    most, count = draw.choice((512, 2048, 8192, 32768, 131072)), round(2 ** draw.uniform(0.0, 8.6))
    if kind == "tiny":
        keys = [draw.randint(1, 300) for _ in range(count)]
    elif kind == "giant":
        keys = [most * 4, *(draw.randint(50, 2000) for _ in range(count))]
    elif kind == "unequal":
        keys = [round(2 ** draw.uniform(5.0, math.log2(most))) for _ in range(count)]
    elif kind in ("chunks", "packed"):
        keys = [round(2 ** draw.uniform(5.0, 13.0)) for _ in range(min(count, 48))]
    else:
        keys = [draw.randint(most // 2, most)] * count
    queries = [1] * len(keys)
    if kind == "few queries":
        queries = [draw.randint(2, 8)] * len(keys)
    elif kind == "some queries":
        queries = [draw.choice((16, 24, 33, 64, 100))] * len(keys)
    elif kind == "mixed":
        some = max(1, len(keys) // 10)
        queries[:some] = [draw.choice((64, 200, 512, 1000)) for _ in range(some)]
    elif kind == "chunks":
        queries = [max(1, n // draw.choice((1, 2, 4, 16))) for n in keys]
    elif kind == "packed":
        queries = keys
    queries = [min(pair) for pair in zip(queries, keys, strict=True)]
    page, window = draw.choice((16, 16, 32, 64, 128, 256)), draw.choice((-1, -1, -1, -1, -1, 128, 1024, 4096))
    softcap, sinks = draw.choice((0.0,) * 6 + (30.0,)), draw.random() < 0.15
    dtype = draw.choice(("bfloat16",) * 4 + ("float16",))
    return Drawn(kind, heads, dims, tuple(keys), tuple(queries), page, window, softcap, sinks, dtype)


def drawn(seed: int, count: int) -> list[Drawn]:
    """The first ``count`` problems of a seed that are not too large."""
    draw = random.Random(seed)
    problems = (draw_one(draw) for _ in itertools.count())
    return list(itertools.islice((p for p in problems if p.cache_bytes <= MOST_BYTES and p.flop <= MOST_FLOP), count))


def measure(problem: Drawn, forward: Any, rounds: int, evict: Any) -> dict[str, Any]:
    """One row of the table, without what is the same in all."""
    import torch

    import tilecast

    (heads_q, heads_kv), (dim, dim_v), dtype = problem.heads, problem.dims, getattr(torch, problem.dtype)
    torch.manual_seed(0)

    def numbers(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", dtype=dtype)

    def whole(values: Any) -> Any:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    q, packed = numbers(sum(problem.queries), heads_q, dim), problem.kind == "packed"
    table, count = (None, 0) if packed else block_table(problem.keys, problem.page)
    rows = (sum(problem.keys),) if packed else (count, problem.page)
    k, v = (numbers(*rows, heads_kv, columns) for columns in (dim, dim_v))
    starts_q, starts_k = (whole([0, *itertools.accumulate(n)]) for n in (problem.queries, problem.keys))
    used, most_q, most_k = whole(problem.keys), max(problem.queries), max(problem.keys)
    sinks = torch.randn(heads_q, device="cuda") if problem.sinks else None
    window = None if problem.window < 0 else (problem.window, 0)
    options: dict[str, Any] = {"causal": True, "window": window, "softcap": problem.softcap, "sinks": sinks}

    def ours() -> Any:
        if most_q == 1:
            return tilecast.attention_kvcache(q[:, None], k, v, used, table, **options)
        if packed:
            return tilecast.attention_varlen(q, k, v, starts_q, starts_k, most_q, most_k, **options)
        return tilecast.attention_varlen(
            q, k, v, starts_q, None, most_q, most_k, seqused_k=used, block_table=table, **options
        )

    their_sinks = None if sinks is None else sinks.to(torch.bfloat16)

    def theirs() -> Any:
        return forward(
            q, k, v, starts_q, starts_k if packed else None, None if packed else used, most_q, most_k, table, dim**-0.5, True, problem.window,
            problem.softcap, their_sinks,
        )  # fmt: skip

    graphs = {"us": graph_of(ours)}
    apart = ""
    try:
        graphs["fa3_us"] = graph_of(theirs)
        ours_now, theirs_now = ours().reshape(-1, heads_q, dim_v).float(), theirs().float()
        apart = f"{float((ours_now - theirs_now).abs().max()):.1e}"
    except RuntimeError as error:  # a combination that it refuses
        print(first_line(error))
    medians = {name: statistics.median(found) for name, found in times_us(graphs, rounds, evict, "reading").items()}
    row: dict[str, Any] = {
        "kind": problem.kind, "requests": requests_text(tuple(zip(problem.queries, problem.keys, strict=True))), "sequences": len(problem.keys), "keys": sum(problem.keys), "longest": most_k, "queries": sum(problem.queries),
        "most_queries": most_q, "heads_q": heads_q, "heads_kv": heads_kv, "head_dim": dim, "head_dim_v": dim_v, "page": 0 if packed else problem.page,
        "window": problem.window, "softcap": problem.softcap, "sinks": int(problem.sinks), "dtype": problem.dtype, "apart": apart,
        "sm_clock_mhz": nvidia_smi("clocks.sm"), **{name: round(us, 1) for name, us in medians.items()},
    }  # fmt: skip
    if "fa3_us" in medians:
        row["speedup"] = round(medians["fa3_us"] / medians["us"], 3)
    return row


def main() -> None:
    parser = drawing(__doc__, 96, 5)
    parser.add_argument("--fa3", required=True, help="FlashAttention-3's library, as vLLM builds it")
    given = parser.parse_args()
    forward, evict = fa3_forward(given.fa3), evicting()
    problems = drawn(given.seed, given.count)
    rows = measured(given, FIELDS, problems, lambda problem: measure(problem, forward, given.rounds, evict))
    print(geometric_summary([row["speedup"] for row in rows if "speedup" in row]))


if __name__ == "__main__":
    main()
