"""Decode steps of `tilecast.attention_kvcache` on the GPU at hand, beside FlashAttention-3.

    python tools/sweep_decode.py OUT.csv [--fa3 LIBRARY] [--rounds 9] [--fp8] [--drawn SEED]

40 points: batch 1 to 256, keys 512 to 128k, heads 32/8, 64/8, 32/32 and 8/1, pages of 16, 64 and 128, head_dim 128, bfloat16.
Each is a CUDA graph of one call, L2 evicted before by writing, the kernels in turns; the table has medians and the range, and in
columns "read" medians after an eviction by reading: an engine's projections leave weights in L2 that nothing has to write back.  LIBRARY is
FlashAttention-3 as vLLM builds it (_vllm_fa3_C.abi3.so, which takes packed queries); without it its columns stay empty.
--fp8: caches of e4m3; FlashAttention-3 then takes queries of e4m3 as well, here queries stay bfloat16.
--drawn: 24 batches of sequences of unequal lengths instead, drawn from SEED: 4 to 256 of them, the logarithm of each length even between
those of 64 and of a most that the batch has; `keys` is the mean, `longest` the most.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from measuring import csv_table, evicting, graph_of, host_us, nvidia_smi, times_us

HEADS = ((32, 8), (64, 8), (32, 32), (8, 1))
#: (batch, keys, page)
BATCHES = ((1, 8192, 16), (1, 32768, 64), (1, 131072, 128), (8, 2048, 16), (8, 8192, 64), (32, 512, 128), (32, 8192, 16),
           (128, 1024, 64), (128, 4096, 128), (256, 1024, 16))  # fmt: skip
DIM = 128
FIELDS = ("gpu", "date", "driver", "torch", "triton", "seed", "batch", "keys", "longest", "heads_q", "heads_kv", "page", "cache", "mbytes", "tilecast_us",
          "tilecast_low_us", "tilecast_high_us", "tilecast_tbs", "fa3_us", "fa3_low_us", "fa3_high_us", "speedup",
          "read_tilecast_us", "read_fa3_us", "host_us", "largest_difference", "sm_clock_mhz")  # fmt: skip


def fa3_forward(path: str) -> Callable[..., Any]:
    """FlashAttention-3 as vLLM builds it (``path``) as (q, k, v, starts of queries and of keys, keys of each sequence, most queries,
    most keys, block table, scale, causal, keys before the diagonal, soft cap, sinks, keys after it) -> out, packed; of keys either starts, or
    numbers and a table; without any of these (batch, seqlen, heads, head_dim)."""
    import torch

    torch.ops.load_library(path)
    forward = torch.ops._vllm_fa3_C.fwd

    def call(
        q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, used_k: Any, longest_q: int, longest_k: int, table: Any, scale: float, causal: bool,
        left: int = -1, softcap: float = 0.0, sinks: Any = None, right: int | None = None,
    ) -> Any:  # fmt: skip
        return forward(
            q, k, v, None, None, None, None, starts_q, starts_k, None, None, used_k, longest_q, longest_k, table, *(None,) * 8,
            scale, causal, left, (-1 if left < 0 else 0) if right is None else right, softcap, False, None, 0, None, 0, sinks, 1, 0, None,
        )[0]  # fmt: skip

    return call


def load_fa3(path: str) -> Callable[..., Any]:
    """FlashAttention-3 as (q, k, v, lengths, table) -> out, of one query a sequence."""
    forward = fa3_forward(path)

    def call(q: Any, k: Any, v: Any, lengths: Any, table: Any, starts: Any) -> Any:
        longest = table.shape[1] * k.shape[1]
        return forward(q.flatten(0, 1), k, v, starts, None, lengths, 1, longest, table, DIM**-0.5, True)

    return call


def block_table(lengths: Sequence[int], page: int) -> tuple[Any, int]:
    """(int32 (sequences, most pages of one) on the GPU, pages in all) for sequences of so many keys: pages in random order, as an engine
    would have them."""
    import torch

    counts = [-(-keys // page) for keys in lengths]
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, pages in enumerate(torch.randperm(sum(counts)).to(torch.int32).split(counts)):
        table[row, : len(pages)] = pages
    return table.cuda(), sum(counts)


def drawn(seed: int, count: int = 24) -> list[tuple[tuple[int, ...], int, tuple[int, int]]]:
    """(keys of each sequence, page, heads) of ``count`` batches of at most 2^23 keys of all key heads."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        most, batch = draw.choice((2048, 8192, 32768, 65536)), draw.randint(4, 256)
        lengths = tuple(round(2 ** draw.uniform(6, math.log2(most))) for _ in range(batch))
        page, heads = draw.choice((16, 64, 128)), draw.choice(HEADS)
        if sum(lengths) * heads[1] <= 8 << 20:
            found.append((lengths, page, heads))
    return found


def measure(
    pool: Any, lengths_of: tuple[int, ...], page: int, heads: tuple[int, int], fa3: Any, rounds: int, evict: Any
) -> dict[str, Any]:
    """One row of the table, without what is the same in all."""
    import torch

    import tilecast

    batch, longest = len(lengths_of), max(lengths_of)
    table, pages = block_table(lengths_of, page)
    size = pages * page * heads[1] * DIM
    k, v = (pool[i][:size].view(pages, page, heads[1], DIM) for i in (0, 1))
    lengths = torch.tensor(lengths_of, dtype=torch.int32, device="cuda")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, 1, heads[0], DIM, device="cuda").to(torch.bfloat16)
    size_bytes = 2 * sum(lengths_of) * heads[1] * DIM * pool[0].element_size()
    calls = {"tilecast": lambda: tilecast.attention_kvcache(q, k, v, lengths, table, causal=True)}
    if fa3 is not None:
        theirs_q = q.to(pool[0].dtype)
        calls["fa3"] = lambda: fa3(theirs_q, k, v, lengths, table, starts)
    graphs = {name: graph_of(call) for name, call in calls.items()}
    found, after_reading = (times_us(graphs, rounds, evict, by) for by in ("writing", "reading"))
    medians = {name: statistics.median(values) for name, values in found.items()}
    row: dict[str, Any] = {
        "batch": batch, "keys": round(sum(lengths_of) / batch), "longest": longest, "heads_q": heads[0], "heads_kv": heads[1], "page": page,
    }  # fmt: skip
    row |= {"mbytes": round(size_bytes / 1e6, 1), "tilecast_tbs": round(size_bytes / medians["tilecast"] * 1e-6, 3)}
    row["cache"] = "e4m3" if pool[0].element_size() == 1 else "bf16"
    for name, values in found.items():
        row |= {
            f"{name}_us": round(medians[name], 2),
            f"{name}_low_us": round(min(values), 2),
            f"{name}_high_us": round(max(values), 2),
            f"read_{name}_us": round(statistics.median(after_reading[name]), 2),
        }
    if fa3 is not None:
        row["speedup"] = round(medians["fa3"] / medians["tilecast"], 3)
        ours, theirs = calls["tilecast"]().flatten(0, 1).float(), calls["fa3"]().view(batch, *q.shape[2:]).float()
        row["largest_difference"] = f"{float((ours - theirs).abs().max()):.2e}"
    return {**row, "host_us": round(host_us(calls["tilecast"]), 1), "sm_clock_mhz": nvidia_smi("clocks.sm")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--fa3", help="FlashAttention-3's library, as vLLM builds it")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--fp8", action="store_true", help="caches of e4m3")
    parser.add_argument("--drawn", type=int, metavar="SEED", help="batches of unequal lengths, drawn from SEED")
    given = parser.parse_args()
    import torch

    fa3 = load_fa3(given.fa3) if given.fa3 else None
    if given.drawn is None:
        points = [((keys,) * batch, page, heads) for heads in HEADS for batch, keys, page in BATCHES]
    else:
        points = drawn(given.drawn)
    most = max(sum(-(-n // page) * page for n in lengths) * heads[1] for lengths, page, heads in points) * DIM
    kind = torch.float8_e4m3fn if given.fp8 else torch.bfloat16
    pool = [torch.randn(most, device="cuda", dtype=torch.bfloat16).to(kind) for _ in range(2)]
    evict = evicting()
    with csv_table(given.out, FIELDS) as add:
        for lengths, page, heads in points:
            row = measure(pool, lengths, page, heads, fa3, given.rounds, evict)
            add({"seed": given.drawn, **row})
            print(row, flush=True)


if __name__ == "__main__":
    main()
