"""`tilecast.attention` at 20 forward shapes drawn by a rule, beside the best hand-written kernels, on the GPU at hand.

    python tools/h200_others.py OUT.csv [--fa3 LIBRARY] [--before FOLDER] [--seed 1] [--rounds 15]

Four shapes each of five kinds are drawn from the seed: grouped heads, odd lengths, chunks of a prompt (few queries on many keys,
causal to the lower right), long sequences, and small ones as vision models have.  bf16, head_dim 64, 128 or 256; every kernel of a shape
is a CUDA graph of one call, L2 evicted before, in turns whose order is drawn; medians.  Each peer's result is held against ours before it
is timed.  cuDNN takes causal masks to the upper left only and is left out of chunks.  LIBRARY: see sweep_decode.py; flash-attn-4 is timed
where it is installed.  FOLDER has kernels of another version, which run beside and must give the same bits.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from h200_before_after import load
from measuring import by_sdpa, csv_table, evicting, graph_of, nvidia_smi, times_us
from sweep_decode import fa3_forward

from tilecast.kernels import registry
from tilecast.model.kernel.workload import Workload

KINDS = ("grouped", "odd", "chunk", "long", "small")
EACH, MOST_APART, BEFORE = 4, 3e-2, "tilecast before"
FIELDS = ("gpu", "date", "driver", "torch", "triton", "seed", "kind", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "causal",
          "kernel", "us", "low_us", "high_us", "tflops", "apart", "sm_clock_mhz")  # fmt: skip


def drawn(seed: int) -> list[tuple[str, Workload]]:
    """Kind and problem of EACH shapes of every kind."""
    draw = random.Random(seed)

    def shape(kind: str) -> Workload:
        dim, causal = draw.choice((64, 128, 256)), draw.random() < 0.5
        batch, heads = 1, 2048 // dim
        heads_kv = heads
        if kind == "grouped":
            length, group = draw.choice((1024, 2048, 4096, 8192)), draw.choice((2, 4, 8))
            batch, heads_kv, sizes = 16384 // length, heads // group, (length, length)
        elif kind == "odd":
            length = 2 * draw.randint(150, 4500) + 1
            batch, sizes = max(1, 16384 // length), (length, length)
        elif kind == "chunk":
            heads, heads_kv, causal = 32, 8, True
            sizes = (128 * draw.randint(4, 16), 8192 * draw.randint(1, 8))
        elif kind == "long":
            length = draw.choice((32768, 49152, 65536))
            heads, heads_kv, sizes = 8, draw.choice((2, 8)), (length, length)
        else:
            length = draw.randint(128, 600)
            batch, heads, dim = draw.choice((8, 16, 32)), draw.choice((12, 16)), draw.choice((64, 128))
            heads_kv, causal, sizes = heads, False, (length, length)
        return Workload(batch, heads, heads_kv, *sizes, dim, dim, "causal" if causal else "none")

    return [(kind, shape(kind)) for kind in KINDS for _ in range(EACH)]


def calls_of(s: Workload, fa3: Any, before: Path | None) -> dict[str, Callable[[], Any]]:
    """Name -> call that returns (batch, heads, seqlen, head_dim)."""
    import torch

    import tilecast

    torch.manual_seed(0)
    causal, scale = s.mask == "causal", s.head_dim_qk**-0.5
    sizes = ((s.seqlen_q, s.heads_q), (s.seqlen_k, s.heads_kv), (s.seqlen_k, s.heads_kv))
    rows = [torch.randn(s.batch, n, heads, s.head_dim_qk, device="cuda").bfloat16() for n, heads in sizes]
    q, k, v = (x.transpose(1, 2).contiguous() for x in rows)
    found: dict[str, Callable[[], Any]] = {"tilecast": lambda: tilecast.attention(q, k, v, causal=causal)}
    if before is not None:
        entry = registry.select((9, 0), "bf16", s.head_dim_qk, s.head_dim_v, s.mask, s.seqlen_q, seqlen_k=s.seqlen_k)
        assert entry is not None
        module = load(before / f"{entry.module}.py", f"before_{entry.module}")

        def launch_before() -> Any:
            out = torch.empty_like(q)
            module.launch(q, k, v, out, None, scale)
            return out

        found[BEFORE] = launch_before
    if not causal or s.seqlen_q == s.seqlen_k:
        found["cuDNN"] = partial(by_sdpa("CUDNN", causal), q, k, v)
    if fa3 is not None:
        packed = [x.flatten(0, 1) for x in rows]
        starts = [torch.arange(s.batch + 1, device="cuda", dtype=torch.int32) * n for n in (s.seqlen_q, s.seqlen_k)]
        found["FlashAttention-3"] = lambda: (
            fa3(*packed, *starts, None, s.seqlen_q, s.seqlen_k, None, scale, causal)
            .unflatten(0, (s.batch, -1))
            .transpose(1, 2)
        )
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]

        def fa4() -> Any:
            out = flash_attn_func(*rows, causal=causal)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        found["flash-attn-4"] = fa4
    return found


def measure(s: Workload, fa3: Any, before: Path | None, rounds: int, evict: Any) -> list[dict[str, Any]]:
    """Rows of one shape but for its kind; a peer that refuses it or computes something else is named and left out."""
    calls = calls_of(s, fa3, before)
    ours, apart = calls["tilecast"]().float(), {}
    for name, call in list(calls.items()):
        try:
            apart[name] = float((call().float() - ours).abs().max())
        except (RuntimeError, ValueError, AssertionError) as error:
            print(f"{name} on {s.label()}: {str(error).splitlines()[0][:160]}: left out", flush=True)
            del calls[name]
            continue
        if not apart[name] <= (0.0 if name == BEFORE else MOST_APART):
            print(f"{name} on {s.label()}: {apart[name]:.2e} from ours: not timed", flush=True)
            del calls[name]
    found = times_us({name: graph_of(call) for name, call in calls.items()}, rounds, evict)
    medians = {name: statistics.median(us) for name, us in found.items()}
    same = {
        "batch": s.batch, "heads_q": s.heads_q, "heads_kv": s.heads_kv, "seqlen_q": s.seqlen_q, "seqlen_k": s.seqlen_k,
        "head_dim": s.head_dim_qk, "causal": int(s.mask == "causal"), "sm_clock_mhz": nvidia_smi("clocks.sm"),
    }  # fmt: skip
    return [
        {
            **same, "kernel": name, "us": round(us, 2), "low_us": round(min(found[name]), 2), "high_us": round(max(found[name]), 2),
            "tflops": round(s.flops_exact / us * 1e-6, 1), "apart": f"{apart[name]:.1e}",
        }
        for name, us in medians.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--fa3", help="FlashAttention-3's library, as vLLM builds it")
    parser.add_argument("--before", type=Path, help="folder of other kernels")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    ratios = []
    fa3 = fa3_forward(given.fa3) if given.fa3 else None
    evict = evicting()
    with csv_table(given.out, FIELDS) as add:
        for kind, shape in drawn(given.seed):
            rows = measure(shape, fa3, given.before, given.rounds, evict)
            for row in rows:
                add({"seed": given.seed, "kind": kind, **row})
            speed = {row["kernel"]: row["tflops"] for row in rows}
            mine, other = speed.pop("tilecast"), speed.pop(BEFORE, None)
            ratios.append(mine / max(speed.values()))
            peers = "  ".join(f"{name} {tflops}" for name, tflops in speed.items())
            print(
                f"{kind}, {shape.label()}: tilecast {mine}  {peers}  | x best peer {ratios[-1]:.3f}"
                + (f"  x before {mine / other:.3f}" if other else ""),
                flush=True,
            )
    print(f"geometric mean {statistics.geometric_mean(ratios):.3f}x the best peer, lowest {min(ratios):.3f}x")


if __name__ == "__main__":
    main()
