"""Prefill of packed and paged sequences on the GPU at hand, alone and mixed with decodes, beside FlashAttention-3 and flash-attn-4.

    python tools/sweep_prefill.py OUT.csv [--fa3 LIBRARY] [--rounds 9] [--only mixed]

Mixed batches: a chunk of 512 to 2048 queries of one sequence beside 8 to 128 sequences that decode, 32/8 heads, head_dim 128, pages of
16, 64 and 128, in one call of `tilecast.attention_kvcache`.  Packed: sequences of unequal lengths drawn as training draws them, in one
call of `tilecast.attention_varlen` with one list of where queries and keys begin; `two_lists_us` with a copy of it for the keys, whose
result has the `same_bits`.  Each is a CUDA graph of one call, L2 evicted before, in turns; medians and the range.
`kernel_us` and `portable_us` time the launch for many rows alone, by the kernel for Hopper and by the portable one.  LIBRARY is
FlashAttention-3 as vLLM builds it; flash-attn-4 is timed where it can be imported, on packed sequences.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import csv_table, evicting, graph_of, nvidia_smi, times_us
from sweep_decode import block_table, fa3_forward

#: Chunks beside decodes: (queries of the chunk, its keys, decodes, their keys, page).
MIXED = ((512, 2048, 8, 8192, 16), (512, 4096, 32, 4096, 64), (512, 8192, 64, 2048, 128), (512, 16384, 128, 2048, 16),
         (1024, 4096, 8, 16384, 64), (1024, 8192, 32, 8192, 128), (1024, 2048, 64, 4096, 16), (1024, 16384, 128, 2048, 64),
         (2048, 8192, 8, 16384, 128), (2048, 2048, 32, 8192, 16), (2048, 16384, 64, 4096, 64), (2048, 4096, 128, 2048, 128))  # fmt: skip
#: Packed batches: (tokens, longest, seed, query heads, key heads, head_dim, causal).
PACKED = ((16384, 4096, 1, 32, 8, 128, True), (16384, 4096, 2, 16, 16, 128, True), (32768, 8192, 3, 32, 8, 128, True), (32768, 32768, 4, 32, 8, 128, True),
          (32768, 2048, 5, 32, 32, 64, True), (16384, 1024, 6, 32, 8, 128, True), (16384, 8192, 7, 32, 8, 128, False), (32768, 4096, 8, 32, 32, 64, False))  # fmt: skip
#: Rows of a sequence, queries times query heads to a key head, from which on these kernels take it.
LEAST_ROWS = 65
FIELDS = ("gpu", "date", "driver", "torch", "triton", "point", "lengths", "heads_q", "heads_kv", "head_dim", "page", "causal", "tilecast_us",
          "tilecast_low_us", "tilecast_high_us", "kernel_us", "portable_us", "fa3_us", "fa3_low_us", "fa3_high_us", "fa4_us", "fa4_low_us",
          "fa4_high_us", "two_lists_us", "same_bits", "prefill_tflops", "largest_difference", "sm_clock_mhz")  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A batch: (queries, keys) of each sequence."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    dim: int
    page: int
    causal: bool

    @property
    def flops(self) -> float:
        """Of the sequences that are no decodes."""
        total = 0
        for queries, keys in self.lengths:
            if queries > 1:
                total += sum(min(keys, keys - queries + 1 + i) if self.causal else keys for i in range(queries))
        return 4.0 * total * self.heads[0] * self.dim


def points() -> Iterator[Point]:
    """All batches."""
    for queries, keys, decodes, cached, page in MIXED:
        yield Point("mixed", (*((1, cached),) * decodes, (queries, keys)), (32, 8), 128, page, True)
    for tokens, longest, seed, heads_q, heads_kv, dim, causal in PACKED:
        lengths = tuple((n, n) for n in drawn(tokens, longest, seed))
        yield Point("packed", lengths, (heads_q, heads_kv), dim, 0, causal)


def drawn(tokens: int, longest: int, seed: int) -> tuple[int, ...]:
    """Lengths that add up to ``tokens``, logarithms evenly from 64 to ``longest``."""
    draw, found = random.Random(seed), list[int]()
    while sum(found) < tokens:
        found.append(min(round(64 * (longest / 64) ** draw.random()), tokens - sum(found)))
    return tuple(found)


def inputs(point: Point) -> dict[str, Any]:
    """Tensors of a batch; pages in random order, as an engine would have them."""
    import torch

    def whole(values: list[int]) -> Any:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    def numbers(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    (heads_q, heads_kv), dim = point.heads, point.dim
    queries, keys = ([pair[i] for pair in point.lengths] for i in (0, 1))
    starts = [[sum(values[:i]) for i in range(len(values) + 1)] for values in (queries, keys)]
    made: dict[str, Any] = {
        "q": numbers(sum(queries), heads_q, dim), "starts_q": whole(starts[0]), "most": (max(queries), max(keys)),
        "starts_k": None, "used": None, "table": None,
    }  # fmt: skip
    if not point.page:
        shape = (sum(keys), heads_kv, dim)
        starts_k = made["starts_q"] if queries == keys else whole(starts[1])
        return {**made, "k": numbers(*shape), "v": numbers(*shape), "starts_k": starts_k}
    table, pages = block_table(keys, point.page)
    shape = (pages, point.page, heads_kv, dim)
    return {**made, "k": numbers(*shape), "v": numbers(*shape), "used": whole(keys), "table": table}


def ours(x: dict[str, Any], causal: bool) -> Callable[[], Any]:
    """The call as users make it."""
    import tilecast

    if x["table"] is None:
        return lambda: tilecast.attention_varlen(
            x["q"], x["k"], x["v"], x["starts_q"], x["starts_k"], *x["most"], causal=causal
        )
    return lambda: tilecast.attention_kvcache(
        x["q"], x["k"], x["v"], x["used"], x["table"], causal=causal, cu_seqlens_q=x["starts_q"], max_seqlen_q=x["most"][0],
        max_seqlen_k=x["most"][1],
    )  # fmt: skip


def one_kernel(name: str, x: dict[str, Any], causal: bool) -> Callable[[], Any]:
    """The launch of one generated kernel for the sequences of many rows."""
    import torch

    module = importlib.import_module(f"tilecast.kernels.generated.{name}")
    parted = {}
    if hasattr(module, "parts"):
        parted = {"tokens": x["q"].shape[0], "least": LEAST_ROWS, "alike": x["starts_q"] is x["starts_k"]}
    out, sms = torch.empty_like(x["q"]), torch.cuda.get_device_properties(0).multi_processor_count
    batch, heads_kv = x["starts_q"].shape[0] - 1, x["k"].shape[-2]
    sizes = module.scratch(batch, heads_kv, x["q"].shape[1] // heads_kv, *x["most"], sms, **parted)
    kinds = (torch.float32, torch.int32)
    work = [torch.zeros(n, dtype=kind, device="cuda") for n, kind in zip(sizes, kinds, strict=True)]
    lists = (x["starts_q"], x["starts_k"], x["used"], x["table"], None, None, None, None)
    window = (-1, 0) if causal else (-1, -1)

    def call() -> Any:
        module.launch(
            x["q"], x["k"], x["v"], out, None, x["q"].shape[-1] ** -0.5, *lists, *x["most"], window, rows=(LEAST_ROWS, 1 << 29),
            work=work, sms=sms,
        )  # fmt: skip
        return out

    return call


def peers(x: dict[str, Any], causal: bool, fa3: Any) -> dict[str, Callable[[], Any]]:
    """Calls of other libraries."""
    found: dict[str, Callable[[], Any]] = {}
    if fa3 is not None:
        found["fa3"] = lambda: fa3(
            x["q"], x["k"], x["v"], x["starts_q"], x["starts_k"], x["used"], *x["most"], x["table"], x["q"].shape[-1] ** -0.5, causal
        )  # fmt: skip
    if x["table"] is None and importlib.util.find_spec("flash_attn") and importlib.util.find_spec("cutlass"):
        from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found]

        def fa4() -> Any:
            made = flash_attn_varlen_func(
                x["q"], x["k"], x["v"], cu_seqlens_q=x["starts_q"], cu_seqlens_k=x["starts_k"], max_seqlen_q=x["most"][0],
                max_seqlen_k=x["most"][1], causal=causal,
            )  # fmt: skip
            return made[0] if isinstance(made, tuple) else made

        found["fa4"] = fa4
    return found


def measure(point: Point, fa3: Any, rounds: int, evict: Any) -> dict[str, Any]:
    """One row of the table, without what is the same in all."""
    x = inputs(point)
    calls = {"tilecast": ours(x, point.causal), **peers(x, point.causal, fa3)}
    if x["starts_k"] is x["starts_q"]:
        calls["two_lists"] = ours({**x, "starts_k": x["starts_q"].clone()}, point.causal)
    for name, module in (("kernel", "hopper_prefill_d"), ("portable", "triton_serve_prefill_d")):
        suffix = "_h200" if name == "portable" else ""
        calls[name] = one_kernel(f"{module}{point.dim}{suffix}", x, point.causal)
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = graph_of(call)
        except Exception as error:  # a peer that does not take a batch leaves its columns empty
            if name not in ("fa3", "fa4"):
                raise
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    found = times_us(graphs, rounds, evict)
    medians = {name: statistics.median(values) for name, values in found.items()}
    alike = ",".join(f"{q}:{k}" for q, k in point.lengths if q > 1)
    decodes = sum(q == 1 for q, _ in point.lengths)
    row: dict[str, Any] = {
        "point": point.name, "lengths": f"{decodes}x{point.lengths[0][1]},{alike}" if decodes else alike, "heads_q": point.heads[0],
        "heads_kv": point.heads[1], "head_dim": point.dim, "page": point.page, "causal": point.causal,
        "prefill_tflops": round(point.flops / medians["kernel"] * 1e-6, 1), "sm_clock_mhz": nvidia_smi("clocks.sm"),
    }  # fmt: skip
    for name, values in found.items():
        row[f"{name}_us"] = round(medians[name], 2)
        if name not in ("kernel", "portable", "two_lists"):
            row |= {f"{name}_low_us": round(min(values), 2), f"{name}_high_us": round(max(values), 2)}
    if "two_lists" in calls:
        row["same_bits"] = bool((calls["tilecast"]() == calls["two_lists"]()).all())
    theirs = next((name for name in ("fa3", "fa4") if name in graphs), "")
    if theirs:
        row["largest_difference"] = f"{float((calls['tilecast']().float() - calls[theirs]().float()).abs().max()):.2e}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--fa3", help="FlashAttention-3's library, as vLLM builds it")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=("mixed", "packed"), help="these batches alone")
    given = parser.parse_args()
    fa3 = fa3_forward(given.fa3) if given.fa3 else None
    evict = evicting()
    with csv_table(given.out, FIELDS) as add:
        for point in points():
            if given.only in (None, point.name):
                row = measure(point, fa3, given.rounds, evict)
                add(row)
                print({name: value for name, value in row.items() if name != "lengths"}, flush=True)


if __name__ == "__main__":
    main()
