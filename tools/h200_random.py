"""`tilecast.attention` on random problems against float64, forward and gradients, on the GPU at hand.

    python tools/h200_random.py OUT.csv [--problems 2000] [--gradients 500] [--seed 1] [--dims 64,128]

For each head dimension and dtype, in a process of its own, so many problems are drawn: mask, heads, unequal and odd lengths, and inputs that
are hard for an online softmax (q and k scaled, a sink of 5 to 80 nats at some key, scores that rise along the keys, hot rows, one
dominant key a row).  A forward fails where any element is further from float64 than max(2 x the largest error of attention in
PyTorch operations of that dtype, one step of the dtype at the true value); a gradient by FlashAttention's criterion, 2 x the error of
PyTorch's autograd through those operations plus twice what an addition of 0.3 rounds away.  Beside it stands what PyTorch's own flash
kernel does with those of the problems that it takes (`sdpa_...`): both recompute P and take D from the rounded output.
OUT has a row for each head dimension, dtype and kind of input; failing problems are printed.
"""

from __future__ import annotations

import argparse
import csv
import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from measuring import by_sdpa, measured_on

DIMS = ("64", "96", "128", "192/128", "256")
KINDS = ("normal", "scaled", "sink", "rising", "hot rows", "dominant")
FIELDS = (
    "gpu",
    "date",
    "torch",
    "triton",
    "head_dim",
    "dtype",
    "pass",
    "inputs",
    "problems",
    "failed",
    "worst_ratio",
    "sdpa_problems",
    "sdpa_failed",
    "sdpa_worst_ratio",
    "worst",
)


def draw(number: int, dims: tuple[int, int], seed: int) -> dict[str, Any]:
    """A problem."""
    pick = random.Random(f"{seed}/{dims}/{number}")
    mask = pick.choice(("none", "causal", "window"))
    rows = pick.choice((1, pick.randint(1, 64), pick.randint(65, 600)))
    keys = pick.choice((rows, pick.randint(1, 64), pick.randint(65, 900)))
    window = (pick.randint(0, keys), pick.choice((0, pick.randint(0, 64)))) if mask == "window" else None
    heads_kv = pick.randint(1, 3)
    return {
        "number": number, "mask": mask, "window": window, "batch": pick.randint(1, 3), "rows": rows, "keys": keys,
        "heads_kv": heads_kv, "heads_q": heads_kv * pick.choice((1, 1, 2, 4)), "kind": pick.choice(KINDS),
        "strength": pick.uniform(1.0, 8.0), "nats": pick.uniform(5.0, 80.0), "at": pick.randrange(keys),
    }  # fmt: skip


def tensors(problem: dict[str, Any], dims: tuple[int, int], dtype: Any, seed: int) -> tuple[Any, Any, Any, Any]:
    """q, k, v and the gradient of the output, (batch, seqlen, heads, head_dim)."""
    import torch

    source = torch.Generator("cuda").manual_seed(seed * 1_000_003 + problem["number"])

    def normal(length: int, heads: int, dim: int) -> Any:
        return torch.randn(problem["batch"], length, heads, dim, device="cuda", generator=source)

    q, k = normal(problem["rows"], problem["heads_q"], dims[0]), normal(problem["keys"], problem["heads_kv"], dims[0])
    v, dout = (
        normal(problem["keys"], problem["heads_kv"], dims[1]),
        normal(problem["rows"], problem["heads_q"], dims[1]),
    )
    kind, root = problem["kind"], dims[0] ** 0.5
    if kind == "scaled":
        q, k = q * problem["strength"], k * problem["strength"]
    elif kind in ("sink", "rising"):
        # One direction that all queries share carries the score: nats at a key, or growing along the keys.
        q[..., 0] = root**0.5
        share = torch.zeros(problem["keys"], device="cuda")
        if kind == "sink":
            share[problem["at"]] = 1.0
        else:
            share = torch.linspace(0, 1, problem["keys"], device="cuda")
        k[..., 0] = (problem["nats"] * root**0.5 * share)[None, :, None]
    elif kind == "hot rows":
        hot = torch.rand(q.shape[:3], device="cuda", generator=source) < 0.05
        q = torch.where(hot[..., None], q * 8 * problem["strength"], q)
    elif kind == "dominant":
        group = problem["heads_q"] // problem["heads_kv"]
        wanted = torch.randint(0, problem["keys"], (problem["rows"],), device="cuda", generator=source)
        q = k[:, wanted].repeat_interleave(group, 2) * (problem["nats"] / root)
    return tuple(x.to(dtype) for x in (q, k, v, dout))


def visible(problem: dict[str, Any]) -> Any:
    """(rows, keys): which key a row sees; None without a mask."""
    import torch

    if problem["mask"] == "none":
        return None
    left, right = problem["window"] or (-1, 0)
    at = torch.arange(problem["rows"], device="cuda")[:, None] + problem["keys"] - problem["rows"]
    key = torch.arange(problem["keys"], device="cuda")[None, :]
    seen = key <= at + right
    return seen & (key >= at - left) if left >= 0 else seen


def by_operations(q: Any, k: Any, v: Any, seen: Any, scale: float) -> Any:
    """Attention in operations of PyTorch, of the tensors' dtype; rows that see no key give 0."""
    import torch

    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q * scale, k)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    wide = scores if scores.dtype == torch.float64 else scores.float()
    probabilities = torch.softmax(wide, -1).nan_to_num(0.0).to(v.dtype)
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v)


def step_of(true: Any, dtype: Any) -> Any:
    """Distance of neighbours of ``dtype`` at these values."""
    import torch

    facts = torch.finfo(dtype)
    return torch.exp2(torch.floor(torch.log2(true.abs().clamp(min=facts.smallest_normal)))) * facts.eps


def forward_ratio(problem: dict[str, Any], dims: tuple[int, int], dtype: Any, seed: int) -> float:
    """Largest error over what is allowed."""
    import tilecast

    q, k, v, _ = tensors(problem, dims, dtype, seed)
    seen, scale = visible(problem), dims[0] ** -0.5
    true = by_operations(q.double(), k.double(), v.double(), seen, scale)
    theirs = (by_operations(q, k, v, seen, scale).double() - true).abs().max()
    ours = tilecast.attention(
        q, k, v, causal=problem["mask"] == "causal", window=problem["window"], layout="bshd"
    ).double()
    if not bool(ours.isfinite().all()):
        return float("inf")
    return float(((ours - true).abs() / step_of(true, dtype).clamp(min=2 * theirs)).max())


def by_flash(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """PyTorch's flash kernel, of (batch, seqlen, heads, head_dim)."""
    return by_sdpa("FLASH", causal)(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def gradient_ratios(
    problem: dict[str, Any], dims: tuple[int, int], dtype: Any, seed: int
) -> tuple[float, float | None]:
    """Largest error of dq, dk and dv over what is allowed: tilecast's, and PyTorch's flash kernel's where it takes the problem."""
    import torch

    import tilecast

    q, k, v, dout = tensors(problem, dims, dtype, seed)
    seen, scale = visible(problem), dims[0] ** -0.5

    def gradients(call: Any, wide: bool) -> list[Any]:
        given = [(x.double() if wide else x).detach().requires_grad_() for x in (q, k, v)]
        return list(torch.autograd.grad(call(*given), given, dout.double() if wide else dout))

    true = gradients(lambda *x: by_operations(*x, seen, scale), True)
    theirs = gradients(lambda *x: by_operations(*x, seen, scale), False)
    ours = gradients(
        lambda *x: tilecast.attention(*x, causal=problem["mask"] == "causal", window=problem["window"], layout="bshd"), False
    )  # fmt: skip
    allowed = []
    for t, p in zip(true, theirs, strict=True):
        narrow = t.to(dtype)
        lost = float(((narrow + 0.3 - 0.3) - narrow).abs().max())
        allowed.append(2 * float((p.double() - t).abs().max()) + 2 * lost + 1e-5)

    def worst(found: list[Any]) -> float:
        if not all(bool(x.isfinite().all()) for x in found):
            return float("inf")
        errors = (float((x.double() - t).abs().max()) for x, t in zip(found, true, strict=True))
        return max(error / limit for error, limit in zip(errors, allowed, strict=True))

    causal = problem["mask"] == "causal"
    if problem["mask"] == "window" or dims[0] != dims[1] or (causal and problem["rows"] != problem["keys"]):
        return worst(ours), None
    return worst(ours), worst(gradients(lambda *x: by_flash(*x, causal), False))


def work(dim: str, dtype: str, given: argparse.Namespace) -> None:
    """All problems of a head dimension and dtype; rows to stdout as CSV without a header."""
    import torch

    sizes = [int(x) for x in dim.split("/")]
    dims, kind = (sizes[0], sizes[-1]), {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    writer = csv.DictWriter(sys.stdout, FIELDS, extrasaction="ignore", lineterminator="\n")
    same = {**measured_on(), "head_dim": dim, "dtype": dtype}
    for name, count in (("fwd", given.problems), ("bwd", given.gradients)):
        found: dict[str, list[tuple[float, dict[str, Any]]]] = defaultdict(list)
        peer: dict[str, list[float]] = defaultdict(list)
        for number in range(count):
            problem = draw(number, dims, given.seed)
            if name == "fwd":
                ratio = forward_ratio(problem, dims, kind, given.seed)
            else:
                ratio, sdpa = gradient_ratios(problem, dims, kind, given.seed)
                peer[problem["kind"]] += [] if sdpa is None else [sdpa]
            found[problem["kind"]].append((ratio, problem))
            if ratio > 1.0:
                print(f"above: {name} {dim} {dtype} {ratio:.3f} {problem}", file=sys.stderr, flush=True)
        for inputs, ratios in sorted(found.items()):
            worst, problem = max(ratios, key=lambda pair: pair[0])
            writer.writerow({**same, "pass": name, "inputs": inputs, "problems": len(ratios), "failed": sum(r > 1.0 for r, _ in ratios),
                             "worst_ratio": round(worst, 3), "sdpa_problems": len(peer[inputs]), "sdpa_failed": sum(r > 1.0 for r in peer[inputs]),
                    "sdpa_worst_ratio": round(max(peer[inputs], default=0.0), 3), "worst": problem["number"]})  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--gradients", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dims", default=",".join(DIMS))
    parser.add_argument("--one", nargs=2, metavar=("DIM", "DTYPE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        work(*given.one, given)
        return
    same = ["--problems", str(given.problems), "--gradients", str(given.gradients), "--seed", str(given.seed)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(given.out), *same, "--one", dim, dtype], stdout=subprocess.PIPE, text=True
        )
        for dim in given.dims.split(",")
        for dtype in ("bf16", "fp16")
    ]
    rows = "".join(process.communicate()[0] for process in processes)
    given.out.write_text(",".join(FIELDS) + "\n" + rows, encoding="utf-8")
    failed = [process.args for process in processes if process.returncode]
    if failed:
        raise SystemExit(f"these processes failed: {failed}")


if __name__ == "__main__":
    main()
