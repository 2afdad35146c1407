"""Time serving steps of `tilecast.attention_kvcache` on the GPU at hand: decode, packed, paged, mixed batches.

    python tools/time_batches.py OUT.csv [--rounds 11] [--points PART]

Each batch is a CUDA graph of one call, timed by events with the L2 cache full of other data that was only read: a cache full of
written data has to write it back first, which "evicted by: writing" shows for some of the points.  Rows named "nothing" time a
graph of a kernel that does nothing: what the events and the replay themselves take.  Rows named "split" time decode
kernels generated with other splits.  `tilecast validate serving` holds the forecast against the table.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measuring import csv_table, evicting, graph_of, nvidia_smi, times_us
from sweep_decode import BATCHES, DIM, HEADS

from tilecast.base.module_file import module_of
from tilecast.model.step.batch import Lengths, parse_requests, requests_text

#: Chunks of prefill beside decodes: (queries of the chunk, keys of the chunk, decodes, their keys).
MIXED = ((512, 512, 8, 8192), (512, 4096, 32, 4096), (512, 16384, 128, 2048), (1024, 1024, 16, 8192), (1024, 8192, 64, 2048),
         (2048, 2048, 32, 8192), (2048, 8192, 128, 1024), (2048, 32768, 8, 32768))  # fmt: skip
#: Keys of a split that are compared, on batches of (batch, keys, heads).
SPLITS = (256, 512, 1024, 2048)
SPLIT_POINTS = ((1, 8192, (32, 8)), (1, 65536, (32, 8)), (4, 16384, (32, 8)), (8, 8192, (32, 8)), (32, 8192, (32, 8)),
                (16, 4096, (8, 1)), (128, 1024, (64, 8)))  # fmt: skip
FIELDS = ("gpu", "date", "driver", "torch", "triton", "point", "requests", "heads_q", "heads_kv", "page", "decode", "prefill", "evicted_by",
          "us", "low_us", "high_us", "sm_clock_mhz")  # fmt: skip


def points() -> Iterator[tuple[str, str, tuple[int, int], int, str, str]]:
    """(name, requests, heads, page, split of a generated variant, what evicts) of every row."""
    yield "nothing", "1x16", (8, 1), 16, "", "reading"
    for heads in HEADS:
        for batch, keys, page in BATCHES:
            yield "decode", f"{batch}x{keys}", heads, page, "", "reading"
    for batch, keys, page in BATCHES:
        yield "decode", f"{batch}x{keys}", (32, 8), page, "", "writing"
    draw = random.Random(7)
    for number, count in enumerate((16, 48, 64, 128, 200, 256)):
        lengths = tuple((1, 16 * round(2 ** draw.uniform(5, 10 - number / 3))) for _ in range(count))
        yield "ragged", requests_text(lengths), HEADS[number % 2], 16 if number % 2 else 64, "", "reading"
    for queries in (2, 4, 8):
        yield "speculative", f"32x{queries}:8192", (32, 8), 64, "", "reading"
    for queries, keys, decodes, cached in MIXED:
        yield "mixed", f"{decodes}x{cached},1x{queries}:{keys}", (32, 8), 64, "", "reading"
    yield "prefill", "4x4096:4096", (32, 8), 64, "", "reading"
    yield "prefill", "1x512:512,1x1024:1024,1x2048:2048,1x4096:4096", (32, 8), 64, "", "reading"
    for batch, keys, heads in SPLIT_POINTS:
        for split in SPLITS:
            yield "split", f"{batch}x{keys}", heads, 64, str(split), "reading"


def inputs(pool: Any, lengths: Lengths, heads: tuple[int, int], page: int) -> dict[str, Any]:
    """Tensors of a batch: pages in random order, as an engine would have them."""
    import torch

    counts = [-(-keys // page) for _, keys in lengths]
    pages = sum(counts)
    size = pages * page * heads[1] * DIM
    k, v = (pool[i][:size].view(pages, page, heads[1], DIM) for i in (0, 1))
    order = torch.randperm(pages).to(torch.int32)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    first = 0
    for row, count in enumerate(counts):
        table[row, :count] = order[first : first + count]
        first += count
    starts = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).to(torch.int32)
    used = torch.tensor([keys for _, keys in lengths], dtype=torch.int32)
    q = torch.randn(int(starts[-1]), heads[0], DIM, device="cuda").to(pool[0].dtype)
    there = {name: x.cuda() for name, x in (("table", table), ("starts", starts), ("used", used))}
    most = {"queries": max(q for q, _ in lengths), "keys": max(keys for _, keys in lengths)}
    return {"q": q, "k": k, "v": v, **there, **most}


def shipped_call(x: dict[str, Any]) -> Callable[[], Any]:
    """The call as users make it."""
    import tilecast

    if x["q"].shape[0] == x["used"].shape[0]:
        q = x["q"].unsqueeze(1)
        return lambda: tilecast.attention_kvcache(
            q, x["k"], x["v"], x["used"], x["table"], causal=True, max_seqlen_k=x["keys"]
        )
    return lambda: tilecast.attention_kvcache(
        x["q"], x["k"], x["v"], x["used"], x["table"], causal=True, cu_seqlens_q=x["starts"], max_seqlen_q=x["queries"],
        max_seqlen_k=x["keys"],
    )  # fmt: skip


def variant_call(x: dict[str, Any], split: str, folder: Path, made: dict[str, Any]) -> Callable[[], Any]:
    """The same by a decode kernel generated with splits of that many keys."""
    import torch

    if split not in made:
        from tilecast.codegen.serving import generate_serving
        from tilecast.model.kernel.workload import Workload
        from tilecast.model.machine.machine import load_machine
        from tilecast.model.serving import HOPPER_SERVING, parse_serving

        machine = load_machine("h200-sxm")
        work = Workload(heads_q=32, heads_kv=8, seqlen_q=1, seqlen_k=8192, head_dim_qk=DIM, mask="causal")
        variant = parse_serving(f"split_keys={split},split_keys_of_many={split}", HOPPER_SERVING.chosen(work, machine))
        file = folder / f"decode_{split}.py"
        file.write_text(generate_serving(work, machine, variant).source, encoding="utf-8")
        made[split] = module_of(file)
    module, q = made[split], x["q"].unsqueeze(1)
    out = torch.empty_like(q)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    sizes = module.scratch(q.shape[0], x["k"].shape[2], q.shape[2] // x["k"].shape[2], 1, x["keys"], sms)
    kinds = (torch.float32, torch.int32)
    work = [torch.zeros(n, dtype=kind, device="cuda") for n, kind in zip(sizes, kinds, strict=True)]
    return lambda: module.launch(
        q, x["k"], x["v"], out, None, DIM**-0.5, seqused_k=x["used"], block_table=x["table"], max_seqlen_q=1,
        max_seqlen_k=x["keys"], window=(-1, 0), work=work, sms=sms,
    )  # fmt: skip


def kernels_of(name: str, split: str, made: dict[str, Any]) -> dict[str, str]:
    """The variants that a row timed: of the kernel that decodes, and of the one that prefills."""
    if name == "nothing":
        return {"decode": "", "prefill": ""}
    if split:
        return {"decode": made[split].TILECAST["variant"], "prefill": ""}
    import torch

    from tilecast.kernels import registry

    shipped = registry.candidates(
        torch.cuda.get_device_capability(), "bf16", DIM, DIM, "window", registry.shipped_serving()
    )
    texts = [
        importlib.import_module(f"{registry.PACKAGE}.{e.module}").TILECAST["variant"]
        for e in sorted(shipped, key=lambda e: e.seqlen_q_min)
    ]
    return {"decode": texts[0], "prefill": texts[-1]}


def empty_call() -> Callable[[], Any]:
    """A kernel of one thread block that does next to nothing."""
    import torch

    one = torch.zeros(1, device="cuda")
    return lambda: one.zero_()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--points", help="only those of this name")
    given = parser.parse_args()
    import torch

    wanted = [point for point in points() if given.points in (None, point[0])]
    longest = max(
        sum(-(-n // page) * page for _, n in parse_requests(text)) * heads[1] for _, text, heads, page, _, _ in wanted
    )
    pool = [torch.randn(longest * DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    evict = evicting()
    made: dict[str, Any] = {}
    with csv_table(given.out, FIELDS) as add, tempfile.TemporaryDirectory() as folder:
        for name, text, heads, page, split, evicted in wanted:
            try:
                x = inputs(pool, parse_requests(text), heads, page)
                call = (
                    empty_call()
                    if name == "nothing"
                    else variant_call(x, split, Path(folder), made)
                    if split
                    else shipped_call(x)
                )
                found = times_us({name: graph_of(call)}, given.rounds, evict, evicted)[name]
            except Exception as error:  # one point that fails must not cost the others
                print(f"{name} {text[:60]}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                continue
            row = {
                "point": name, "requests": text, "heads_q": heads[0], "heads_kv": heads[1], "page": page,
                **kernels_of(name, split, made), "evicted_by": evicted, "us": round(statistics.median(found), 2),
                "low_us": round(min(found), 2), "high_us": round(max(found), 2), "sm_clock_mhz": nvidia_smi("clocks.sm"),
            }  # fmt: skip
            add(row)
            print(f"{name} {text[:50]} {heads} {page} {split} {evicted}: {row['us']} us", flush=True)


if __name__ == "__main__":
    main()
