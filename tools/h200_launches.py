"""Launches of the forward kernels that ship, dealt in other ways, on the GPU at hand: what a program's own start costs, what pairs cost.

    python tools/h200_launches.py OUT.csv [--seed 1] [--rounds 11]

The 20 shapes of `h200_others.py`, the chunks of `h200_chunks.py` and the 36 of `h200_kernels.py`, bfloat16.  One compiled kernel runs them in up
to seven ways, which must give the same bits: ``planned``, as its file launches it; ``staying``, a program to an SM; ``even``, no more programs
than all turns need; ``tiles``, a program to a tile; ``couples``, a program to a pair of tiles, or to two; ``longest`` and ``longest even``, tiles of
all heads, the longest first, where a kernel makes pairs otherwise.  CUDA graphs of one call, L2 evicted before, in turns whose order is
drawn; medians.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from h200_chunks import SHAPES as CHUNKS
from h200_others import drawn
from measuring import csv_table, evicting, graph_of, nvidia_smi, times_us

from tilecast.kernels import registry
from tilecast.kernels.launching import launcher
from tilecast.model.kernel.header import read_header
from tilecast.model.kernel.workload import Workload

FIELDS = ("gpu", "date", "driver", "torch", "triton", "kind", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "causal",
          "module", "launch", "programs", "turns", "us", "low_us", "high_us", "tflops", "sm_clock_mhz")  # fmt: skip
Grid = tuple[int, int]


def ways(scheduler: str, tiles: int, blocks: int, sms: int) -> dict[str, Grid]:
    """(programs, turns of each) of the ways to deal ``tiles``, ``blocks`` to a head."""
    heads, pairs = tiles // blocks, scheduler == "paired"
    dealt, each = ((blocks + 1) // 2 * heads, 2) if pairs else (tiles, 1)
    turns = -(-dealt // sms)
    found = {"staying": (min(sms, dealt), each * turns), "even": (-(-dealt // turns), each * turns)}
    if tiles > sms:
        found |= {"tiles": (tiles, 1), "couples": (dealt, 2) if pairs else (-(-tiles // 2), 2)}
        if pairs:
            turns = -(-tiles // sms)
            found |= {"longest": (sms, turns | 1), "longest even": (-(-tiles // turns), turns | 1)}
    return found


def relaunched(module: Any, grid: Grid) -> Callable[..., None]:
    """``launch`` of a module's kernel by as many programs and turns."""

    def plan(*tensors_and_window: Any) -> Any:
        planned = module.plan(*tensors_and_window)
        return planned and ((grid[0], 1, 1), (*planned[1][:-1], grid[1]))

    return launcher(SimpleNamespace(plan=plan, attention=module.attention, OPTIONS=module.OPTIONS))


def shapes(seed: int) -> list[tuple[str, Workload]]:
    """Kind and problem."""
    chunks = [
        Workload(batch, heads, kv, rows, keys, dim, mask="causal") for dim, batch, heads, kv, rows, keys in CHUNKS
    ]
    paper = [
        Workload(16384 // length, 2048 // dim, 2048 // dim, length, length, dim, mask=mask)
        for dim in (64, 128, 256)
        for length in (512, 1024, 2048, 4096, 8192, 16384)
        for mask in ("none", "causal")
    ]
    return [*drawn(seed), *(("chunk", work) for work in chunks), *(("paper", work) for work in paper)]


def measure(s: Workload, rounds: int, evict: Any, sms: int) -> list[dict[str, Any]]:
    """Rows of one shape, without what is the same in all."""
    import torch

    entry = registry.select((9, 0), "bf16", s.head_dim_qk, s.head_dim_v, s.mask, s.seqlen_q, seqlen_k=s.seqlen_k)
    assert entry is not None
    module = importlib.import_module(f"{registry.PACKAGE}.{entry.module}")
    torch.manual_seed(0)
    sizes = ((s.heads_q, s.seqlen_q), (s.heads_kv, s.seqlen_k), (s.heads_kv, s.seqlen_k))
    q, k, v = (torch.randn(s.batch, *size, s.head_dim_qk, device="cuda").bfloat16() for size in sizes)
    out, lse, want = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda"), torch.empty_like(q)
    planned, arguments = module.plan(q, k, v, out, lse, -1, 0 if s.mask == "causal" else -1)
    blocks = -(-s.seqlen_q // module.TILE_M.value)
    assert module.__file__ is not None
    header = read_header(Path(module.__file__).read_text(encoding="utf-8"), module.__file__)
    scheduler = header["variant"].rpartition("scheduler=")[2]
    grids = {"planned": (planned[0], arguments[-1]), **ways(scheduler, blocks * s.batch * s.heads_q, blocks, sms)}
    calls, scale = {}, s.head_dim_qk**-0.5
    launcher(module)(q, k, v, want, lse, scale)
    for name, grid in grids.items():
        launch = relaunched(module, grid)
        calls[name] = lambda launch=launch: launch(q, k, v, out, lse, scale)
        out.fill_(float("nan"))
        calls[name]()
        if not torch.equal(out, want):
            raise SystemExit(f"{entry.module} on {s.label()}: {name} by {grid[0]} programs gives other bits")
    found = times_us({name: graph_of(call) for name, call in calls.items()}, rounds, evict)
    same = {
        "batch": s.batch, "heads_q": s.heads_q, "heads_kv": s.heads_kv, "seqlen_q": s.seqlen_q, "seqlen_k": s.seqlen_k,
        "head_dim": s.head_dim_qk, "causal": int(s.mask == "causal"), "module": entry.module, "sm_clock_mhz": nvidia_smi("clocks.sm"),
    }  # fmt: skip
    return [
        {
            **same, "launch": name, "programs": grids[name][0], "turns": grids[name][1], "us": round(statistics.median(us), 2),
            "low_us": round(min(us), 2), "high_us": round(max(us), 2), "tflops": round(s.flops_exact / statistics.median(us) * 1e-6, 1),
        }
        for name, us in found.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=11)
    given = parser.parse_args()
    import torch

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    evict = evicting()
    with csv_table(given.out, FIELDS) as add:
        for kind, shape in shapes(given.seed):
            rows = measure(shape, given.rounds, evict, sms)
            for row in rows:
                add({"kind": kind, **row})
            print(
                f"{kind}, {shape.label()}: "
                + "  ".join(f"{r['launch']} {r['programs']} x {r['turns']} {r['us']}" for r in rows),
                flush=True,
            )


if __name__ == "__main__":
    main()
