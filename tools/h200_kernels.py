"""Shipped kernels against the best hand-written ones on the GPU at hand, launch by launch in turns.

    python tools/h200_kernels.py OUT.csv [--quick] [--fa3 LIBRARY] [--peers cuDNN,FlashAttention-3]

Every round runs each kernel once, in the same order, after a write that evicts L2 and a filler that keeps the queue
busy, so that host time does not show; medians over the rounds, SM clock sampled by NVML during them.  Shapes are those
of the FlashAttention papers: 16k tokens, hidden size 2048.  Peers that are not installed are left out and named.
LIBRARY is FlashAttention-3 as vLLM builds it (_vllm_fa3_C.abi3.so, which takes packed sequences); --peers times those alone whose
names begin so.  flash-attn-4 keeps what it compiles where FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 asks for it; without that its
compilations come one by one between the timings.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import sys
import time
from functools import partial

import torch
from measuring import by_sdpa, csv_table, evicting, in_turns
from sweep_decode import fa3_forward

from tilecast.validation.lab.measure.telemetry import Nvml

DIMS, LENGTHS, TOKENS, HIDDEN = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384), 16384, 2048
ROUNDS, WARMUP = 15, 2
FIELDS = ("gpu", "date", "driver", "torch", "triton", "kernel", "version", "dtype", "batch", "heads", "seqlen",
          "head_dim", "causal", "ms", "ms_low", "ms_high", "tflops", "sm_clock_mhz", "rounds")  # fmt: skip


def tensors(dim: int, length: int) -> tuple[torch.Tensor, ...]:
    """q, k, v (batch, heads, length, dim) in bfloat16, 16k tokens in all."""
    torch.manual_seed(0)
    shape = (TOKENS // length, HIDDEN // dim, length, dim)
    return tuple(torch.randn(shape, device="cuda", dtype=torch.float32).to(torch.bfloat16) for _ in range(3))


def flex(causal: bool, length: int):  # type: ignore[no-untyped-def]
    """FlexAttention, compiled, as (q, k, v) -> out."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 200
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length) if causal else None
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def ours(family: str, dim: int, length: int, causal: bool):  # type: ignore[no-untyped-def]
    """(the shipped kernel of a family for a shape as (q, k, v) -> out, its file); None and "" where there is none."""
    from tilecast.kernels import registry

    entries = tuple(e for e in registry.shipped() if e.family == family)
    entry = registry.select((9, 0), "bf16", dim, dim, "causal" if causal else "none", length, entries)
    if entry is None:
        return None, ""
    launch = registry.launcher(entry)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        launch(q, k, v, out, None, dim**-0.5)
        return out

    return run, entry.module


def _version() -> str:
    import tilecast

    return f"tilecast {tilecast.__version__}"


def fa3(library: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool):  # type: ignore[no-untyped-def]
    """FlashAttention-3 on packed copies of q, k and v; its output is (batch, seqlen, heads, head_dim)."""
    forward, (batch, _, length, dim) = fa3_forward(library), q.shape
    starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
    packed = [x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v)]

    def run() -> torch.Tensor:
        out = forward(*packed, starts, starts, None, length, length, None, dim**-0.5, causal)
        return out.view(batch, length, -1, dim)

    return run


def kernels(dim: int, length: int, causal: bool, absent: set[str]):  # type: ignore[no-untyped-def]
    """name -> (function of nothing, version)."""
    q, k, v = tensors(dim, length)
    found = {}
    for family in ("hopper_ws", "triton"):
        run, module = ours(family, dim, length, causal)
        if run is not None:
            found[module] = ((lambda run=run: run(q, k, v)), _version())

    found["cuDNN (torch SDPA)"] = (partial(by_sdpa("CUDNN", causal), q, k, v), str(torch.backends.cudnn.version()))
    found["FlashAttention-2 (torch SDPA)"] = (partial(by_sdpa("FLASH", causal), q, k, v), torch.__version__)
    if "--fa3" in sys.argv:
        found["FlashAttention-3 (vLLM)"] = (fa3(sys.argv[sys.argv.index("--fa3") + 1], q, k, v, causal), "vLLM 0.33.0")
    wanted = tuple(sys.argv[sys.argv.index("--peers") + 1].split(",")) if "--peers" in sys.argv else ("",)
    if "FlexAttention".startswith(wanted):
        compiled = flex(causal, length)
        found["FlexAttention"] = ((lambda: compiled(q, k, v)), torch.__version__)
    try:
        from importlib.metadata import version

        from flash_attn.cute import flash_attn_func

        bshd = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        found["flash-attn-4 (sm_90)"] = ((lambda: flash_attn_func(*bshd, causal=causal)), version("flash-attn-4"))
    except ImportError as error:
        absent.add(f"flash-attn-4: {error}")
    return {n: f for n, f in found.items() if n.startswith((*wanted, "hopper_ws", "triton"))}, (q, k, v)


def measure(functions, rounds: int):  # type: ignore[no-untyped-def]
    """Milliseconds of each, ascending."""
    found = in_turns([run for run, _ in functions.values()], rounds, evicting(), warmup=WARMUP, filler=400_000)
    return {name: sorted(ms) for name, ms in zip(functions, found, strict=True)}


def shapes(quick: bool) -> list[tuple[int, int, bool]]:
    """(head_dim, seqlen, causal) in the order in which they are timed."""
    lengths = (512, 4096) if quick else LENGTHS
    return [(dim, length, causal) for dim in DIMS for length in lengths for causal in (False, True)]


def _warm(shape: tuple[int, int, bool]) -> str:
    """Fills the on-disk compile caches, so that the timing process does not wait for compilers."""
    dim, length, causal = shape
    try:
        functions, _ = kernels(dim, length, causal, set())
        kept = os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED") == "1"
        for name in [n for n in functions if kept or "flash-attn-4" not in n]:
            functions[name][0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{shape}: {error!r}"[:300]
    return ""


def check(functions, inputs, causal: bool) -> str:  # type: ignore[no-untyped-def]
    """Largest difference of every kernel from the first, to catch a peer that computes something else."""
    first = None
    worst = 0.0
    for name, (run, _) in functions.items():
        out = run()
        out = out[0] if isinstance(out, tuple) else out
        out = out.transpose(1, 2) if name.startswith(("flash-attn-4", "FlashAttention-3")) else out
        first = out if first is None else first
        worst = max(worst, (out.float() - first.float()).abs().max().item())
    return f"{worst:.1e}"


def main() -> None:
    target, quick = sys.argv[1], "--quick" in sys.argv
    todo = shapes(quick)
    begin = time.time()
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        failed = [message for message in pool.map(_warm, todo, chunksize=1) if message]
    print(f"compiled in {time.time() - begin:.0f} s", *failed, sep="\n", flush=True)
    nvml, absent, ratios = Nvml(), set(), {"hopper_ws": [], "triton": []}
    with csv_table(target, FIELDS) as add:
        for dim, length, causal in todo:
            functions, inputs = kernels(dim, length, causal, absent)
            apart = check(functions, inputs, causal)
            with nvml.watch() as seen:
                times = measure(functions, ROUNDS)
            mhz = f"{seen.result().sm_mhz:.0f}"
            batch, heads = TOKENS // length, HIDDEN // dim
            flop = 4 * batch * heads * length * length * dim * (0.5 if causal else 1.0)
            speed = {}
            for name, found in times.items():
                median = statistics.median(found)
                speed[name] = flop / median / 1e9
                low, high = found[len(found) // 6], found[-1 - len(found) // 6]
                add({
                    "kernel": name, "version": functions[name][1], "dtype": "bf16", "batch": batch, "heads": heads, "seqlen": length, "head_dim": dim,
                    "causal": int(causal), "ms": f"{median:.4f}", "ms_low": f"{low:.4f}", "ms_high": f"{high:.4f}", "tflops": f"{speed[name]:.1f}",
                    "sm_clock_mhz": mhz, "rounds": ROUNDS,
                })  # fmt: skip
            peers = {n: s for n, s in speed.items() if not n.startswith(("hopper_ws", "triton"))}
            mine = next((s for n, s in speed.items() if n.startswith("hopper_ws")), math.nan)
            port = next((s for n, s in speed.items() if n.startswith("triton")), math.nan)
            ratios["hopper_ws"].append(mine / max(peers.values()))
            ratios["triton"].append(port / speed.get("FlexAttention", math.nan))
            print(f"d{dim} {length} {'causal' if causal else 'full'}: " + "  ".join(f"{n} {s:.0f}" for n, s in speed.items())
                  + f"  | x best peer {ratios['hopper_ws'][-1]:.3f}  apart {apart}  {mhz} MHz", flush=True)  # fmt: skip
    for family, against in (("hopper_ws", "best peer"), ("triton", "FlexAttention")):
        values = ratios[family]
        mean = math.exp(statistics.fmean(math.log(v) for v in values))
        print(f"{family}: geometric mean {mean:.3f}x the {against}, lowest {min(values):.3f}x")
    for message in sorted(absent):
        print("left out:", message)


if __name__ == "__main__":
    main()
