"""Batches that are put to serving kernels: lengths and layouts, their tensors, and what the result must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from tilecast.emulator.language.arrays import Array
from tilecast.emulator.verify import visible

_TYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}


@dataclass(frozen=True, slots=True)
class Batch:
    """One launch; ``lengths``: (queries, keys) of each sequence."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 1)
    #: "packed", "cache", "cache in order" (of sequences) or "paged", and tokens of a page; whether queries are packed.
    layout: str = "paged"
    page: int = 64
    packed_q: bool = True
    window: tuple[int, int] = (-1, 0)
    softcap: float = 0.0
    sinks: bool = False
    dtype: str = "fp16"
    scale: float | None = None
    #: How far scores rise from the first key to the last, in octaves of their maximum.
    slope: float = 0.0
    mode: str = "late"
    seed: int = 0
    sms: int = 3
    #: Whether keys and values have factors, and launch is told how many rows and keys a sequence has.
    descale: bool = False
    told: bool = True
    #: Whether values are the first columns of the keys.
    latent: bool = False
    #: Whether splits are made small; launches in the same scratch memory.
    small: bool = True
    #: Fewest keys of a part that a prefill takes in by itself; 0: as shipped.
    part_keys: int = 0
    launches: int = 1
    with_lse: bool = True
    #: Fewest and most rows of the sequences that are asked for.
    rows: tuple[int, int] = (1, 1 << 29)
    #: Whether launch makes its scratch memory itself.
    own: bool = False
    #: Columns that heads of queries and keys, and of values, have less than the kernel.
    fewer: tuple[int, int] = (0, 0)

    def parts(self) -> tuple[Batch, ...]:
        """The launch with one of its sequences only, the shortest first."""
        if len(self.lengths) < 2:
            return ()
        return tuple(replace(self, lengths=(one,)) for one in sorted(set(self.lengths), key=sum) if min(one))

    def label(self) -> str:
        """For messages, and for ``--case``."""
        some = ", ".join(f"{rows}x{keys}" for rows, keys in self.lengths[:4]) + (
            ", .." if len(self.lengths) > 4 else ""
        )
        words = [
            f"{len(self.lengths)} sequences ({some})", f"heads {self.heads[0]}/{self.heads[1]}", self.layout,
            *([f"pages of {self.page}"] if self.layout == "paged" else []), f"window {self.window[0]},{self.window[1]}", self.dtype,
            *([f"softcap {self.softcap:g}"] if self.softcap else []), *(["sinks"] if self.sinks else []),
            *(["{} and {} columns fewer".format(*self.fewer)] if any(self.fewer) else []),
            *([f"scale {self.scale:g}"] if self.scale is not None else []),
            self.mode + (f" (seed {self.seed})" if self.mode == "random" else ""),
        ]  # fmt: skip
        return f"{self.name}: {', '.join(words)}"


@dataclass
class Tensors:
    """Tensors of a launch, and each sequence's own q, k, v in float64."""

    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    sinks: Array | None
    lists: dict[str, Array]
    sequences: list[tuple[Any, Any, Any]]
    #: (page or row of a cache, token in it) -> (sequence, key) that lies there.
    places: dict[tuple[int, int], tuple[int, int]]


def make(problem: Batch, dims: tuple[int, int], seed: int, narrow: bool) -> Tensors:
    """The tensors of a problem; what must not be read is NaN or infinite, and tables point nowhere beyond their sequences.

    narrow: whether caches hold bytes of e4m3, whose infinities are NaN too.
    """
    rng, kind = np.random.default_rng(seed), _TYPES[problem.dtype]
    of_cache: Any = ml_dtypes.float8_e4m3fn if narrow else kind
    hq, hk = problem.heads

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32).astype(kind)

    sequences = []
    for rows, keys in problem.lengths:
        q, k = draw(rows, hq, dims[0]), draw(keys, hk, dims[0])
        v = k[..., : dims[1]] if problem.latent else draw(keys, hk, dims[1])
        if problem.slope:
            # Each head's queries look along one column, in which keys rise or fall.
            ramp = np.linspace(0, problem.slope, max(keys, 1), dtype=np.float32)[:keys]
            q[..., 0], k[..., 0] = 4.0, (ramp - max(problem.slope, 0))[:, None] * dims[0] ** 0.5 / 4
        sequences.append((q, k.astype(of_cache), v.astype(of_cache)))
    sinks = Array(rng.standard_normal(hq).astype(np.float32), "sinks") if problem.sinks else None
    q = np.concatenate([one[0] for one in sequences])
    lists = {}
    counts = np.array([keys for _, keys in problem.lengths], np.int32)
    if problem.packed_q:
        lists["cu_seqlens_q"] = _starts([rows for rows, _ in problem.lengths], "cu_seqlens_q")
    else:
        q = q.reshape(len(sequences), -1, hq, dims[0])
    places: dict[tuple[int, int], tuple[int, int]] = {}
    if problem.layout == "packed":
        starts = np.cumsum([0, *counts])
        places = {
            (0, int(starts[b]) + key): (b, key) for b, (_, keys) in enumerate(problem.lengths) for key in range(keys)
        }
        k, v = (np.concatenate([one[i] for one in sequences]) for i in (1, 2))
        lists["cu_seqlens_k"] = _starts([keys for _, keys in problem.lengths], "cu_seqlens_k")
    elif problem.layout.startswith("cache"):
        in_order = problem.layout == "cache in order"
        slots = rng.permutation(len(sequences) + (not in_order))[: len(sequences)].astype(np.int32)
        slots = np.sort(slots) if in_order else slots
        places = {(int(slots[b]), key): (b, key) for b, (_, keys) in enumerate(problem.lengths) for key in range(keys)}
        k, v = (_caches(problem, sequences, slots, i, of_cache) for i in (1, 2))
        lists["seqused_k"] = Array(counts, "seqused_k")
        if not in_order:
            lists["cache_batch_idx"] = Array(slots, "cache_batch_idx")
    else:
        needed = [-(-int(keys) // problem.page) for keys in counts]
        order = rng.permutation(sum(needed) + 2)
        table = np.full((len(sequences), max(1, *needed)), 2**30, np.int32)
        k, v = (_pages(problem, sequences, order, table, i, of_cache) for i in (1, 2))
        for b, (_, keys) in enumerate(problem.lengths):
            places |= {(int(table[b, key // problem.page]), key % problem.page): (b, key) for key in range(keys)}
        lists |= {"seqused_k": Array(counts, "seqused_k"), "block_table": Array(table, "block_table")}
    if problem.descale:
        for name in ("k_descale", "v_descale"):
            lists[name] = Array((0.5 + rng.random((len(counts), hk))).astype(np.float32), name)
    if narrow:
        k, v = k.view(np.uint8), v.view(np.uint8)
    v = k[..., : dims[1]] if problem.latent else v
    out = np.full((*q.shape[:-1], dims[1]), np.nan, kind)
    lse = np.full((hq, q.shape[0]) if problem.packed_q else (q.shape[0], hq, q.shape[1]), np.nan, np.float32)
    return Tensors(
        Array(q, "q"), Array(k, "k"), Array(v, "v"), Array(out, "out"), Array(lse, "lse"), sinks, lists,
        [tuple(x.astype(np.float64) for x in one) for one in sequences], places,
    )  # fmt: skip


def _starts(counts: Sequence[int], name: str) -> Array:
    return Array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), name)


def _caches(problem: Batch, sequences: Sequence[Any], slots: Any, which: int, kind: Any) -> Any:
    """Caches longer than any sequence, in slots that may be shuffled; of shuffled ones a slot belongs to no sequence."""
    longest = max(keys for _, keys in problem.lengths) + 9
    unused = problem.layout != "cache in order"
    cache = np.full((len(sequences) + unused, longest, *sequences[0][which].shape[1:]), np.nan, kind)
    for slot, one in zip(slots, sequences, strict=True):
        cache[slot, : len(one[which])] = one[which]
    return cache


def _pages(problem: Batch, sequences: Sequence[Any], order: Any, table: Any, which: int, kind: Any) -> Any:
    """A pool of shuffled pages, and the table that says whose they are."""
    pool = np.full((len(order), problem.page, *sequences[0][which].shape[1:]), np.nan, kind)
    pool[::2] = np.inf
    at = 0
    for number, one in enumerate(sequences):
        for page in range(-(-len(one[which]) // problem.page)):
            rows = one[which][page * problem.page : (page + 1) * problem.page]
            pool[order[at], : len(rows)] = rows
            table[number, page] = order[at]
            at += 1
    return pool


def reference(
    problem: Batch, dims: tuple[int, int], q: Any, k: Any, v: Any, sinks: Array | None
) -> tuple[Any, Any, Any]:
    """(out (rows, heads, columns), lse (heads, rows), the largest |v| that a row sees (rows, heads)) of one sequence in float64."""
    group = problem.heads[0] // problem.heads[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scale = dims[0] ** -0.5 if problem.scale is None else problem.scale
    s = np.einsum("qhd,khd->hqk", q, k) * scale
    if problem.softcap:
        s = problem.softcap * np.tanh(s / problem.softcap)
    s = np.where(visible(q.shape[0], k.shape[0], problem.window), s, -np.inf)
    if sinks is not None:
        extra = np.broadcast_to(sinks.data.astype(np.float64)[:, None, None], (*s.shape[:2], 1))
        s = np.concatenate([s, extra], 2)
    most = s.max(2, keepdims=True, initial=-np.inf)
    base = np.where(np.isneginf(most), 0.0, most)
    p = np.exp(s - base)
    total = p.sum(2, keepdims=True)
    with np.errstate(all="ignore"):
        lse = (np.log(total) + base)[..., 0]
        weights = np.where(total > 0, p / total, 0.0)[..., : k.shape[0]]
    size = np.abs(v).max(initial=0.0)
    return np.einsum("hqk,khd->qhd", weights, v), lse, np.full((q.shape[0], q.shape[1]), size)
