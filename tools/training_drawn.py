"""Problems of `tilecast.attention` of all kinds drawn by a rule, forward and gradients, beside PyTorch's kernels and FlashAttention-3.

    python tools/training_drawn.py OUT.csv [--fa3 LIBRARY] [--seed 1] [--count 64] [--rounds 5] [--share 0/1] [--seconds 1000]

A problem has a kind (training on prompts, images, cross attention, any lengths, chunks on keys before them, short, windows, long, a few queries), heads
(18 models', most query heads to a key head 71), head_dim 64 to 256 (80, 96, 192/128 and other multiples of 8 among them), bf16 or fp16, and tensors
that lie as users have them: heads outside or inside the lengths, batches inside, slices of one projection, of a longer cache or of wider rows, rows at
odd addresses, keys that a batch shares.  Problems of more than 4 GB or 30 TFLOP, forward and gradients, are passed over.

The forward is a CUDA graph of one call without gradients; the backward one of `torch.autograd.grad` alone, what runs before and after its products
included.  L2 is evicted before by reading, in turns, medians.  Peers run on the same tensors: SDPA's cuDNN and flash (for windows and
causal masks of unequal lengths PyTorch's flash operator, which SDPA does not give these), and FlashAttention-3's forward.  Results are held
against the first peer's: of the forward the largest difference, of gradients over the largest of each.  What no kernel here takes goes to
fallback="sdpa" and is timed there; `refused` has the sentence, `note` what peers say.  `host_us`: the host's time of a call where that on the
GPU is short.

LIBRARY: see sweep_decode.py.  --share 2/8 does each eighth problem from the second on: eight processes side by side compile what a run
alone then finds compiled.  After --seconds no further problem is begun.
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from measuring import (
    by_sdpa,
    drawing,
    evicting,
    first_line,
    geometric_summary,
    graph_of,
    host_us,
    measured,
    nvidia_smi,
    times_us,
)
from serving_drawn import HEADS
from sweep_decode import fa3_forward

#: (head_dim, head_dim_v); None: any other multiple of 8 from 64 to 256.
DIMS = (*((64, 64),) * 4, *((128, 128),) * 5, *((96, 96),) * 2, *((256, 256),) * 2, (192, 128), (80, 80), None)
KINDS = ("training", "training", "images", "cross", "any", "chunk", "short", "window", "long", "few queries")
LAYOUTS = (
    "bhsd",
    "bhsd",
    "bhsd",
    "bshd",
    "bshd",
    "bshd",
    "fused",
    "fused",
    "fused",
    "sbhd",
    "cache",
    "wide",
    "odd",
    "shared keys",
)
FIELDS = ("gpu", "date", "driver", "torch", "triton", "seed", "number", "kind", "batch", "heads_q", "heads_kv", "queries", "keys", "head_dim", "head_dim_v",
          "causal", "window", "layout", "dtype", "us", "cudnn_us", "flash_us", "fa3_us", "speedup", "apart", "host_us", "bwd_us", "bwd_cudnn_us",
          "bwd_flash_us", "bwd_speedup", "bwd_apart", "bwd_host_us", "sm_clock_mhz", "refused", "note")  # fmt: skip
#: Of a forward and a backward; microseconds on the GPU below which the host's time is measured.
MOST_BYTES, MOST_FLOP, SHORT_US = 4e9, 3e13, 300.0
Attend = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class Drawn:
    """Attention as one model has it; ``window``: keys before and after the diagonal, (-1, -1) for none."""

    kind: str
    batch: int
    heads: tuple[int, int]
    queries: int
    keys: int
    dims: tuple[int, int]
    causal: bool
    window: tuple[int, int]
    layout: str
    dtype: str

    @property
    def limits(self) -> tuple[str, int, int]:
        """(mask, left, right) of the cheapest mask that hides the same (`registry.reduce_mask`)."""
        from tilecast.kernels.registry import reduce_mask

        left, right = self.window
        return reduce_mask(left, 0 if self.causal else right, self.queries, self.keys)

    @property
    def tensor_bytes(self) -> float:
        """Of q, k, v, the output, its gradient and theirs, and of sums of dq in float32."""
        (heads_q, heads_kv), (dim, dim_v) = self.heads, self.dims
        rows = self.queries * heads_q * (8 * dim + 4 * dim_v) + self.keys * heads_kv * 4 * (dim + dim_v)
        return float(self.batch * rows)

    @property
    def flop(self) -> float:
        """Of the seven products of both passes where no mask hides anything."""
        from tilecast.kernels.flops import attention_flops

        _, left, right = self.limits
        (heads_q, heads_kv), (dim, dim_v) = self.heads, self.dims
        q, k = (self.batch, heads_q, self.queries, dim), (self.batch, heads_kv, self.keys, dim)
        return 3.5 * attention_flops(q, k, (*k[:3], dim_v), None, left, right)


def draw_one(draw: random.Random) -> Drawn:
    """One problem."""

    def length(least: int, most: int) -> int:
        return round(least * (most / least) ** draw.random())

    kind, heads, dims, layout = draw.choice(KINDS), draw.choice(HEADS), draw.choice(DIMS), draw.choice(LAYOUTS)
    if dims is None:
        dims = (draw.choice([n for n in range(64, 257, 8) if n not in (64, 80, 96, 128, 256)]),) * 2
    causal, window, batch = draw.random() < 0.5, (-1, -1), length(1, 16)
    queries = keys = length(1, 32768)
    if kind == "training":
        queries = keys = draw.choice((256, 512, 1024, 2048, 4096, 8192)) - draw.choice((0, 0, 0, 1, 37))
        causal = draw.random() < 0.8
    elif kind == "images":
        queries = keys = draw.choice((49, 50, 196, 197, 257, 577, 729, 1024, 1369, 4096))
        batch, causal = length(4, 256), False
    elif kind == "cross":
        queries, keys, causal = length(16, 16384), draw.choice((77, 154, 226, 256, 512, 1500)), False
    elif kind == "chunk":
        queries, causal = length(17, 4096), True
        keys = queries + length(1, 28000)
    elif kind == "short":
        queries = keys = draw.randint(1, 128)
        batch = length(8, 2048)
    elif kind == "window":
        queries = keys = length(200, 32768)
        size = draw.choice((31, 64, 128, 256, 1024, 4096))
        causal, window = draw.choice(((True, (size, 0)), (False, (size, size))))
    elif kind == "long":
        queries = keys = length(12000, 32768)
        batch, causal = 1, draw.random() < 0.8
    elif kind == "few queries":
        queries, keys = draw.choice((1, 1, 2, 4, 8, 16, 33)), length(64, 32768)
        batch = length(1, 64)
    return Drawn(kind, batch, heads, queries, keys, dims, causal, window, layout, draw.choice(("bfloat16",) * 3 + ("float16",)))  # fmt: skip


def drawn(seed: int, count: int) -> list[Drawn]:
    """The first ``count`` problems of a seed that are not too large."""
    draw = random.Random(seed)
    problems = (draw_one(draw) for _ in itertools.count())
    return list(itertools.islice((p for p in problems if p.tensor_bytes <= MOST_BYTES and p.flop <= MOST_FLOP), count))


def tensors(problem: Drawn, device: str = "cuda") -> tuple[Any, Any, Any, Any]:
    """q, k, v and the output's gradient, (batch, heads, seqlen, head_dim), which lie as the layout says."""
    import torch

    (heads_q, heads_kv), (dim, dim_v), batch, dtype = problem.heads, problem.dims, problem.batch, getattr(torch, problem.dtype)  # fmt: skip
    layout = problem.layout

    def numbers(*shape: int) -> Any:
        return torch.randn(shape, device=device, dtype=dtype)

    def one(heads: int, length: int, columns: int, layout: str = layout) -> Any:
        if layout == "bhsd":
            return numbers(batch, heads, length, columns)
        if layout == "sbhd":
            return numbers(length, batch, heads, columns).permute(1, 2, 0, 3)
        if layout == "cache":
            return numbers(batch, heads, length + 37, columns)[:, :, :length]
        if layout in ("wide", "odd"):
            more = 8 if layout == "wide" else 3
            return numbers(batch, length, heads, columns + more)[..., :columns].transpose(1, 2)
        return numbers(batch, length, heads, columns).transpose(1, 2)

    def sliced(length: int, *parts: tuple[int, int]) -> list[Any]:
        whole = numbers(batch, length, sum(heads * columns for heads, columns in parts))
        cut = whole.split([heads * columns for heads, columns in parts], dim=-1)
        return [x.unflatten(-1, part).transpose(1, 2) for x, part in zip(cut, parts, strict=True)]

    of_q, of_k, of_v = (heads_q, dim), (heads_kv, dim), (heads_kv, dim_v)
    if layout == "fused" and problem.queries == problem.keys:
        q, k, v = sliced(problem.keys, of_q, of_k, of_v)
    elif layout == "fused":
        q, (k, v) = one(heads_q, problem.queries, dim), sliced(problem.keys, of_k, of_v)
    elif layout == "shared keys":
        q = one(heads_q, problem.queries, dim)
        k, v = (numbers(1, heads_kv, problem.keys, n).expand(batch, -1, -1, -1) for n in (dim, dim_v))
    else:
        q, k, v = one(heads_q, problem.queries, dim), one(heads_kv, problem.keys, dim), one(heads_kv, problem.keys, dim_v)  # fmt: skip
    if layout == "odd":  # the gradient of a sum
        return q, k, v, torch.ones((), device=device, dtype=dtype).expand(batch, heads_q, problem.queries, dim_v)
    return q, k, v, one(heads_q, problem.queries, dim_v, "bhsd" if layout in ("bhsd", "cache") else "bshd")


def ours(problem: Drawn, fallback: str | None) -> Attend:
    """`tilecast.attention` of a problem."""
    import tilecast

    window = None if problem.window == (-1, -1) else problem.window

    def call(q: Any, k: Any, v: Any) -> Any:
        return tilecast.attention(q, k, v, problem.causal, window=window, fallback=fallback)

    return call


def peers(problem: Drawn, fa3: Any) -> dict[str, Attend]:
    """Name -> the same by another kernel; all but fa3's have gradients."""
    import torch

    mask, left, right = problem.limits
    causal = mask == "causal"

    def aligned(x: Any) -> Any:
        """Copied where rows do not start at 16 bytes: there PyTorch 2.11's flash kernel faults, and FA3 was not built for it."""
        return x.contiguous() if problem.layout == "odd" else x

    def of_pytorch(backend: str) -> Attend:
        attend = by_sdpa(backend, causal)
        return lambda q, k, v: attend(*map(aligned, (q, k, v)))

    def by_flash(q: Any, k: Any, v: Any) -> Any:
        rows = [aligned(x).transpose(1, 2) for x in (q, k, v)]
        window = {"window_size_left": left, "window_size_right": right} if mask == "window" else {}
        found = torch.ops.aten._flash_attention_forward(
            *rows, None, None, problem.queries, problem.keys, 0.0, causal, False, **window
        )
        return found[0].transpose(1, 2)

    @functools.cache
    def starts() -> list[Any]:
        of_both = (range(0, (problem.batch + 1) * n, n) for n in (problem.queries, problem.keys))
        return [torch.tensor([*of_each], dtype=torch.int32, device="cuda") for of_each in of_both]

    def by_fa3(q: Any, k: Any, v: Any) -> Any:
        # Of one row of tokens: this build has no other form.  A layout that is none is refused by `view`.
        rows = [aligned(x).transpose(1, 2) for x in (q, k, v)]
        rows = [x.view(-1, *x.shape[2:]) for x in rows]
        given = *starts(), None, problem.queries, problem.keys, None, problem.dims[0] ** -0.5, causal
        found = fa3(*rows, *given, left, right=right if mask == "window" else None)
        return found.view(problem.batch, problem.queries, *found.shape[1:]).transpose(1, 2)

    found: dict[str, Attend] = {}
    if mask == "none" or (causal and problem.queries == problem.keys):
        found["cudnn"], found["flash"] = of_pytorch("CUDNN"), of_pytorch("FLASH")
    else:  # SDPA's causal masks begin top left, and it has no windows
        found["flash"] = by_flash
    if fa3 is not None:
        found["fa3"] = by_fa3
    return found


def measure(problem: Drawn, fa3: Any, rounds: int, evict: Any) -> dict[str, Any]:
    """One row of the table, without what is the same in all."""
    import torch

    from tilecast.kernels.errors import UnsupportedError

    torch.manual_seed(0)
    q, k, v, dout = tensors(problem)
    row: dict[str, Any] = {
        "kind": problem.kind, "batch": problem.batch, "heads_q": problem.heads[0], "heads_kv": problem.heads[1], "queries": problem.queries,
        "keys": problem.keys, "head_dim": problem.dims[0], "head_dim_v": problem.dims[1], "causal": int(problem.causal),
        "window": "" if problem.window == (-1, -1) else "/".join(map(str, problem.window)), "layout": problem.layout, "dtype": problem.dtype,
    }  # fmt: skip
    notes: list[str] = []
    torch.cuda.synchronize()  # they were made on another stream than gradients run on
    try:
        wanted = [x.detach().requires_grad_() for x in (q, k, v)]
        ours(problem, None)(*wanted)
    except UnsupportedError as error:
        row["refused"] = first_line(error)
    calls = {"": ours(problem, "sdpa"), **peers(problem, fa3)}
    # Gradients run on the stream of their forward, which has to be the one that is captured.
    stream = torch.cuda.Stream()

    def gradients_of(attend: Attend) -> Callable[[], tuple[Any, ...]]:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.cuda.stream(stream):
            out = attend(*inputs)
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)

    def compare(prefix: str, calls: dict[str, Callable[[], Any]], apart: Callable[[Any, Any], float]) -> None:
        """Columns of one pass."""
        graphs, results = {}, []
        for name, call in calls.items():
            try:
                graph = graph_of(call, stream=stream)
                results += [call()] if len(results) < 2 else []
                graphs[name] = graph
            except Exception as error:  # one problem or peer that fails must not end the run
                notes.append(f"{prefix}{name or 'tilecast'}: {type(error).__name__}: {first_line(error)}")
        if "" in graphs and len(graphs) > 1:
            row[f"{prefix}apart"] = f"{apart(*results):.1e}"
        del results
        medians = {name: statistics.median(us) for name, us in times_us(graphs, rounds, evict, "reading").items()}
        for name, us in medians.items():
            row[f"{prefix}{name}_us" if name else f"{prefix}us"] = round(us, 1)
        mine = medians.pop("", None)
        if mine is not None and medians:
            row[f"{prefix}speedup"] = round(min(medians.values()) / mine, 3)
        if mine is not None and mine < SHORT_US:
            row[f"{prefix}host_us"] = round(host_us(calls[""], 20), 1)

    def largest(one: Any, other: Any) -> float:
        return float((one.float() - other.float()).abs().max())

    with torch.no_grad():
        compare("", {name: lambda call=call: call(q, k, v) for name, call in calls.items()}, largest)
    torch.cuda.empty_cache()
    backward: dict[str, Callable[[], Any]] = {}
    for name, call in calls.items():
        try:
            if name != "fa3":
                backward[name] = gradients_of(call)
        except Exception as error:
            notes.append(f"bwd_{name or 'tilecast'}: {type(error).__name__}: {first_line(error)}")
    compare("bwd_", backward, lambda a, b: max(largest(x, y) / max(float(y.abs().max()), 1e-9) for x, y in zip(a, b, strict=True)))  # fmt: skip
    return {**row, "sm_clock_mhz": nvidia_smi("clocks.sm"), "note": "; ".join(notes)}


def main() -> None:
    parser = drawing(__doc__, 64, 5)
    parser.add_argument("--fa3", help="FlashAttention-3's library, as vLLM builds it")
    given = parser.parse_args()
    fa3, evict = fa3_forward(given.fa3) if given.fa3 else None, evicting()
    problems = drawn(given.seed, given.count)
    rows = list(measured(given, FIELDS, problems, lambda problem: measure(problem, fa3, given.rounds, evict)))
    for name in ("speedup", "bwd_speedup"):
        print(name, geometric_summary([row[name] for row in rows if name in row]))


if __name__ == "__main__":
    main()
