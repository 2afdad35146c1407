"""Variants of Hopper's decoding kernel on the GPU at hand, beside the portable kernel that ships and FlashAttention-3.

    python tools/h200_decode_variants.py OUT.csv [--fp8] [--fa3 LIBRARY] [--rounds 7] [--variant KNOBS]... [--points 10]

Each is a CUDA graph of one launch, L2 evicted before, all in turns; the table has medians, the range, and the largest difference
from the portable kernel's output.  Variants are compiled first, each in a process of its own.  LIBRARY: see sweep_decode.py.
--fp8: the kernels for caches of e4m3; FlashAttention-3 then takes queries of e4m3 as well, here queries stay bfloat16.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

DIM = 128
#: (batch, keys, page, heads), most telling first.
POINTS = (
    (1, 8192, 16, (32, 8)), (128, 4096, 64, (64, 8)), (1, 131072, 64, (8, 1)), (32, 8192, 16, (32, 8)), (256, 1024, 16, (8, 1)),
    (1, 32768, 64, (32, 8)), (32, 512, 64, (32, 8)), (8, 8192, 64, (32, 8)), (1, 8192, 16, (8, 1)), (32, 8192, 16, (32, 32)), (8, 2048, 16, (32, 8)), (128, 1024, 64, (64, 8)),
)  # fmt: skip
VARIANTS = (
    "kv_stages=3", "kv_stages=2", "tile_n=32,kv_stages=4", "tile_n=32,kv_stages=6", "split_keys_of_many=512", "kv_stages=4", "whole_keys=65536",
    "kv_stages=2,split_keys=256",
)  # fmt: skip
VARIANTS_E4M3 = (
    "kv_stages=6",
    "kv_stages=4",
    "overlapped=1",
    "overlapped=1,kv_stages=4,wide_stages=3",
    "split_keys_of_many=2048",
    "whole_keys=65536",
)
SHIPPED = "triton_serve_decode_d128"
FIELDS = ("gpu", "date", "torch", "triton", "batch", "keys", "heads_q", "heads_kv", "page", "kernel", "us", "low_us", "high_us", "tbs",
          "speedup_over_fa3", "largest_difference")  # fmt: skip


def write(variant: str, path: Path, fp8: bool) -> None:
    """The source of a variant."""
    from tilecast.codegen.serving import generate_serving
    from tilecast.model.kernel.workload import Workload
    from tilecast.model.machine.machine import load_machine
    from tilecast.model.serving import HOPPER_SERVING, HOPPER_SERVING_E4M3, parse_serving

    machine = load_machine("h200-sxm")
    work = Workload(heads_q=32, heads_kv=8, seqlen_q=1, seqlen_k=8192, head_dim_qk=DIM, head_dim_v=DIM, mask="causal")
    chosen: Any = HOPPER_SERVING_E4M3.chosen(work, machine) if fp8 else HOPPER_SERVING.chosen(work, machine)
    path.write_text(generate_serving(work, machine, parse_serving(variant, chosen)).source)


def problem(pool: Any, batch: int, keys: int, page: int, heads: tuple[int, int]) -> dict[str, Any]:
    """Tensors of a decode step, pages in random order."""
    import torch

    pages = batch * keys // page
    size = pages * page * heads[1] * DIM
    k, v = (pool[i][:size].view(pages, page, heads[1], DIM) for i in (0, 1))
    table = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, -1)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, 1, heads[0], DIM, device="cuda").to(torch.bfloat16)
    return {"q": q, "k": k, "v": v, "table": table, "lengths": lengths, "starts": starts, "keys": keys}


def call_of(module: Any, x: dict[str, Any]) -> tuple[Callable[[], Any], Any]:
    """A launch of a module with memory of its own, and what it writes."""
    import torch

    q, k = x["q"], x["k"]
    out = torch.empty_like(q)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    sizes = module.scratch(q.shape[0], k.shape[2], q.shape[2] // k.shape[2], 1, x["keys"], sms)
    kinds = (torch.float32, torch.int32)
    work = [torch.zeros(n, dtype=kind, device="cuda") for n, kind in zip(sizes, kinds, strict=True)]
    return lambda: module.launch(
        q, k, x["v"], out, None, DIM**-0.5, seqused_k=x["lengths"], block_table=x["table"], max_seqlen_q=1, max_seqlen_k=x["keys"],
        window=(-1, 0), work=work, sms=sms,
    ), out  # fmt: skip


def compile_here(path: Path, fp8: bool) -> None:
    """Fill Triton's cache with a file, for both sizes of pages."""
    import torch

    from tilecast.base.module_file import module_of

    module = module_of(path)
    pool = [torch.zeros(1 << 21, device="cuda", dtype=torch.uint8 if fp8 else torch.bfloat16) for _ in range(2)]
    for page in sorted({point[2] for point in POINTS}):
        call_of(module, problem(pool, 1, 1024, page, (8, 1)))[0]()
    torch.cuda.synchronize()


def fa3_kind(pool: Any) -> Any:
    """What FlashAttention-3 calls the elements of a pool of bytes; None for other pools."""
    import torch

    return torch.float8_e4m3fn if pool[0].dtype == torch.uint8 else None


def measure(
    modules: dict[str, Any], fa3: Any, pool: Any, point: tuple[Any, ...], rounds: int, evict: Any
) -> list[dict[str, Any]]:
    """Rows of a point."""
    from measuring import graph_of, times_us

    batch, keys, page, heads = point
    x = problem(pool, batch, keys, page, heads)
    graphs, outs, rows = {}, {}, []
    calls = {}  # they hold what their graphs work in
    for name, module in modules.items():
        try:
            calls[name], outs[name] = call_of(module, x)
            graphs[name] = graph_of(calls[name])
        except Exception as error:  # one variant that fails must not cost the others
            print(f"{point} {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    if fa3 is not None:
        kind = fa3_kind(pool)
        theirs = [
            x["q"] if kind is None else x["q"].to(kind),
            *(x[n] if kind is None else x[n].view(kind) for n in "kv"),
        ]
        graphs["fa3"] = graph_of(lambda: fa3(*theirs, x["lengths"], x["table"], x["starts"]))
    found = times_us(graphs, rounds, evict)
    theirs = statistics.median(found["fa3"]) if fa3 is not None else None
    for name, values in found.items():
        median = statistics.median(values)
        row: dict[str, Any] = {
            "batch": batch,
            "keys": keys,
            "heads_q": heads[0],
            "heads_kv": heads[1],
            "page": page,
            "kernel": name,
        }
        row |= {"us": round(median, 2), "low_us": round(min(values), 2), "high_us": round(max(values), 2)}
        row["tbs"] = round(batch * keys * heads[1] * DIM * 2 * pool[0].element_size() / median * 1e-6, 3)
        if theirs is not None:
            row["speedup_over_fa3"] = round(theirs / median, 3)
        if name in outs:
            row["largest_difference"] = (
                f"{float((outs[name].float() - next(iter(outs.values())).float()).abs().max()):.1e}"
            )
        rows.append(row)
        print({key: row[key] for key in row if key != "page"}, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--fa3", help="FlashAttention-3's library, as vLLM builds it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--variant", action="append", help="knobs; again for more")
    parser.add_argument("--points", type=int, default=len(POINTS), help="how many of the points, from the first")
    parser.add_argument("--fp8", action="store_true", help="caches of e4m3")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.compile_only:
        compile_here(given.out, given.fp8)
        return
    import torch
    from measuring import csv_table, evicting
    from sweep_decode import load_fa3

    from tilecast.base.module_file import module_of
    from tilecast.kernels.registry import PACKAGE

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for number, variant in enumerate(given.variant or (VARIANTS_E4M3 if given.fp8 else VARIANTS)):
            paths[variant] = Path(folder) / f"decode_{number}.py"
            write(variant, paths[variant], given.fp8)
        name = f"{SHIPPED}_e4m3" if given.fp8 else SHIPPED
        shipped = importlib.import_module(f"{PACKAGE}.{name}")
        files = [Path(str(shipped.__file__)), *paths.values()]
        options = ["--compile-only", *(["--fp8"] if given.fp8 else [])]
        running = [subprocess.Popen([sys.executable, __file__, str(path), *options]) for path in files]
        for one in running:
            one.wait()
        print(f"compiled {len(files)} files in {time.perf_counter() - started:.0f} s", flush=True)
        modules = {name: shipped, **{variant: module_of(path) for variant, path in paths.items()}}
        fa3 = load_fa3(given.fa3) if given.fa3 else None
        points = POINTS[: given.points]
        longest = max(batch * keys * heads[1] for batch, keys, _, heads in points) * DIM
        pool = [torch.randn(longest, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        if given.fp8:
            pool = [x.to(torch.float8_e4m3fn).view(torch.uint8) for x in pool]
        evict = evicting()
        with csv_table(given.out, FIELDS) as add:
            for point in points:
                for row in measure(modules, fa3, pool, point, given.rounds, evict):
                    add(row)
    print(f"all in {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
