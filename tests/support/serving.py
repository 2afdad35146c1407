"""Serving problems for tests: batches of sequences laid out packed, in caches or in pages, and what attention of each must be.

A problem is drawn from a seed on the CPU, so that the interpreter and a GPU see the same numbers; unused memory is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

LAYOUTS = ("packed", "cache", "paged")


@dataclass(frozen=True)
class Problem:
    """Sequences of ``lengths`` (queries, keys); ``layout`` is one of LAYOUTS, ``page`` tokens of a page."""

    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 1)
    dims: tuple[int, int] = (64, 64)
    layout: str = "paged"
    page: int = 16
    window: tuple[int, int] = (-1, 0)
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    dtype: str = "float16"
    #: Whether keys and values are e4m3 bytes, with a factor for each sequence and head.
    narrow: bool = False
    #: Whether values are the first columns of the keys.
    latent: bool = False
    #: Whether queries are packed; otherwise all sequences have as many.
    packed_q: bool = True
    seed: int = 0

    @property
    def factor(self) -> float:
        return 1.0 / math.sqrt(self.dims[0]) if self.scale is None else self.scale


@dataclass
class Made:
    """Tensors of a problem: what a kernel is given, and each sequence's own q, k, v."""

    q: Any
    k: Any
    v: Any
    lists: dict[str, Any]
    sequences: list[tuple[Any, Any, Any]] = field(default_factory=list)
    sinks: Any = None


def make(problem: Problem, device: str = "cpu") -> Made:
    """The tensors of a problem."""
    import torch

    made = torch.Generator().manual_seed(problem.seed)
    dtype = getattr(torch, problem.dtype)
    (heads_q, heads_kv), (dim, dim_v) = problem.heads, problem.dims

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=made).to(dtype)

    sequences = []
    for number, (rows, keys) in enumerate(problem.lengths):
        # What a sequence holds depends on its own number only, so that it can be met again alone.
        made.manual_seed(1000003 * problem.seed + number)
        q, k = draw(rows, heads_q, dim), draw(keys, heads_kv, dim)
        sequences.append((q, k, k[..., :dim_v] if problem.latent else draw(keys, heads_kv, dim_v)))
    sinks = draw(heads_q).float() if problem.sinks else None
    q = torch.cat([one[0] for one in sequences])
    lists: dict[str, Any] = {}
    stored = sequences
    if problem.narrow:
        stored, sequences, lists = _narrowed(sequences, lists)
    if problem.packed_q:
        lists["cu_seqlens_q"] = _starts([rows for rows, _ in problem.lengths])
    else:
        q = q.view(len(sequences), -1, heads_q, dim)
    keys = [count for _, count in problem.lengths]
    if problem.layout == "packed":
        k, v = (torch.cat([one[i] for one in stored]) for i in (1, 2))
        lists["cu_seqlens_k"] = _starts(keys)
    elif problem.layout == "cache":
        k, v, slots = _caches(problem, stored, made)
        lists |= {"seqused_k": torch.tensor(keys, dtype=torch.int32), "cache_batch_idx": slots}
    else:
        k, v, table = _pages(problem, stored, made)
        lists |= {"seqused_k": torch.tensor(keys, dtype=torch.int32), "block_table": table}
    k, v = k.to(device), v.to(device)
    if problem.latent:
        v = k[..., :dim_v]
    lists = {name: value.to(device) for name, value in lists.items()}
    sequences = [tuple(x.to(device) for x in one) for one in sequences]  # type: ignore[misc]
    return Made(q.to(device), k, v, lists, sequences, None if sinks is None else sinks.to(device))


def _narrowed(sequences: list[Any], lists: dict[str, Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """(what caches hold, what it stands for, lists with the factors) of sequences whose keys and values are e4m3."""
    import torch

    stored, meant, factors = [], [], []
    for number, (q, k, v) in enumerate(sequences):
        # Of a sequence's own number, and other ones for each head.
        scales = [(1 + (number + i) % 3 + torch.arange(x.shape[1])) / (8.0 * (i + 1)) for i, x in enumerate((k, v))]
        narrow = [(x.float() * 2.0).to(torch.float8_e4m3fn) for x in (k, v)]
        stored.append((q, *(x.view(torch.uint8) for x in narrow)))
        meant.append((q, *(x.float() * s[None, :, None] for x, s in zip(narrow, scales, strict=True))))
        factors.append(scales)
    k_scales, v_scales = (torch.stack([pair[i] for pair in factors]).float() for i in (0, 1))
    return stored, meant, {**lists, "k_descale": k_scales, "v_descale": v_scales}


def _nothing(problem: Problem, *shape: int) -> Any:
    """Memory that no numbers were written to."""
    import torch

    if problem.narrow:
        return torch.full(shape, 0x7F, dtype=torch.uint8)
    return torch.full(shape, math.nan, dtype=getattr(torch, problem.dtype))


def _starts(counts: list[int]) -> Any:
    import torch

    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


def _caches(problem: Problem, sequences: list[Any], made: Any) -> tuple[Any, Any, Any]:
    """Caches longer than any sequence, in shuffled slots, NaN where nothing is."""
    import torch

    longest, count = max(keys for _, keys in problem.lengths) + 9, len(sequences)
    slots = torch.randperm(count + 1, generator=made)[:count].to(torch.int32)
    caches = []
    for i, dim in enumerate(problem.dims, 1):
        cache = _nothing(problem, count + 1, longest, problem.heads[1], dim)
        for slot, one in zip(slots.tolist(), sequences, strict=True):
            cache[slot, : one[i].shape[0]] = one[i]
        caches.append(cache)
    return caches[0], caches[1], slots


def _pages(problem: Problem, sequences: list[Any], made: Any) -> tuple[Any, Any, Any]:
    """A pool of shuffled pages, NaN or infinite in rows that no sequence uses; the table points nowhere beyond its sequences."""
    import torch

    needed = [-(-keys // problem.page) for _, keys in problem.lengths]
    order = torch.randperm(sum(needed) + 2, generator=made)
    table = torch.full((len(sequences), max(1, *needed) + 1), 2**30, dtype=torch.int32)
    pools = []
    for i, dim in enumerate(problem.dims, 1):
        pool = _nothing(problem, len(order), problem.page, problem.heads[1], dim)
        if not problem.narrow:
            pool[::2] = math.inf
        at = 0
        for number, one in enumerate(sequences):
            for page in range(needed[number]):
                rows = one[i][page * problem.page : (page + 1) * problem.page]
                pool[order[at], : rows.shape[0]] = rows
                table[number, page] = int(order[at])
                at += 1
        pools.append(pool)
    return pools[0], pools[1], table


def reference(problem: Problem, made: Made, precise: bool = True) -> list[tuple[Any, Any]]:
    """(out (rows, heads, dim_v), lse (heads, rows)) of each sequence from the definition, in float64, or with scores and
    weights rounded to the problem's dtype as PyTorch's own attention at that precision does."""
    return [one_reference(problem, *one, made.sinks, precise) for one in made.sequences]


def one_reference(problem: Problem, q: Any, k: Any, v: Any, sinks: Any, precise: bool) -> tuple[Any, Any]:
    """The same of one sequence."""
    import torch

    group = problem.heads[0] // problem.heads[1]
    wide = torch.float64 if precise else torch.float32
    q, k, v = q.to(wide), k.to(wide).repeat_interleave(group, 1), v.to(wide).repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * problem.factor
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    rows, keys = q.shape[0], k.shape[0]
    distance = torch.arange(keys, device=q.device)[None] - torch.arange(rows, device=q.device)[:, None] - (keys - rows)
    left, right = problem.window
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(wide)[:, None, None].expand(-1, rows, 1)], 2)
    lse = (
        torch.logsumexp(scores, 2)
        if scores.shape[2]
        else torch.full(scores.shape[:2], -math.inf, dtype=wide, device=q.device)
    )
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)[..., :keys]
    if not precise:
        weights, v = weights.to(getattr(torch, problem.dtype)).float(), v.float()
        return torch.einsum("hqk,khd->qhd", weights, v).to(getattr(torch, problem.dtype)).double(), lse.double()
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def outputs(made: Made, problem: Problem, device: str = "cpu") -> tuple[Any, Any]:
    """(out, lse) to write, NaN."""
    import torch

    shape = made.q.shape
    out = torch.full((*shape[:-1], problem.dims[1]), math.nan, dtype=made.q.dtype, device=device)
    lse_shape = (shape[1], shape[0]) if problem.packed_q else (shape[0], shape[2], shape[1])
    return out, torch.full(lse_shape, math.nan, dtype=torch.float32, device=device)


def parted(problem: Problem, out: Any, lse: Any) -> list[tuple[Any, Any]]:
    """(out (rows, heads, dim_v), lse (heads, rows)) of each sequence of a launch."""
    found, at = [], 0
    for number, (rows, _) in enumerate(problem.lengths):
        if problem.packed_q:
            found.append((out[at : at + rows], lse[:, at : at + rows]))
        else:
            found.append((out[number], lse[number]))
        at += rows
    return found


def error_of(problem: Problem, made: Made, out: Any, lse: Any) -> float:
    """The largest error over what twice the error of the same in PyTorch's operations allows: above 1 it is wrong."""
    import torch

    worst = 0.0
    close = 2.0**-10 if problem.dtype == "float16" else 2.0**-7
    for (got, sums), (exact, exact_lse), (rough, _) in zip(
        parted(problem, out, lse), reference(problem, made), reference(problem, made, False), strict=True
    ):
        if not exact.numel():
            continue
        if not torch.isfinite(got).all():
            return math.inf
        allowed = 2.0 * float((rough - exact).abs().max()) + close * max(float(exact.abs().max()), 1e-3)
        worst = max(worst, float((got.double() - exact).abs().max()) / allowed)
        empty = torch.isinf(exact_lse)
        if not torch.equal(empty, torch.isinf(sums)):
            return math.inf
        worst = max(worst, float((sums.double() - exact_lse)[~empty].abs().max() if (~empty).any() else 0.0) / 1e-2)
    return worst


def heads(dims: tuple[int, int] = (64, 64), **more: int) -> Any:
    """A workload with such head dimensions."""
    from tilecast.model.kernel.workload import Workload

    return Workload(head_dim_qk=dims[0], head_dim_v=dims[1], **more)


def emulated_kernels(factory: Any, written_for: str, runs_on: str) -> Any:
    """(variant, head dims) -> its kernel on the emulator, made once; ``factory``: pytest's of folders."""
    from tilecast.codegen.serving import generate_serving
    from tilecast.emulator.any_kernel import emulated
    from tilecast.model.machine.machine import load_machine

    made: dict[Any, Any] = {}

    def of(variant: Any, dims: tuple[int, int], mode: str = "late", seed: int = 0, machine: str = runs_on) -> Any:
        key = variant, dims, mode, seed, machine
        if key not in made:
            path = factory.mktemp("kernels") / f"made{len(made)}.py"
            path.write_text(generate_serving(heads(dims), load_machine(written_for), variant).source)
            made[key] = emulated(str(path), machine=machine, mode=mode, seed=seed)
        return made[key]

    return of


def launch(module: Any, problem: Problem, made: Made | None = None, sms: int = 3, **options: Any) -> tuple[Made, Any, Any]:  # fmt: skip
    """(what was made, out, lse) of a launch of a serving kernel."""
    made = make(problem) if made is None else made
    out, lse = outputs(made, problem)
    most_q, most_k = (max(pair[i] for pair in problem.lengths) for i in (0, 1))
    module.launch(
        made.q, made.k, made.v, out, lse, problem.factor, sinks=made.sinks, max_seqlen_q=max(most_q, 1),
        max_seqlen_k=max(most_k, 1), window=problem.window, softcap=problem.softcap, sms=sms, **made.lists, **options,
    )  # fmt: skip
    return made, out, lse
