"""Batches of serving whose tensors outgrow 32 bits, as a kernel's own ``launch`` plans them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilecast.emulator.extremes import Call, Vast, dense, far_calls
from tilecast.emulator.far import Larger
from tilecast.emulator.session import Session
from tilecast.emulator.values import dtypes

_SMS = 3


@dataclass(frozen=True, slots=True)
class LargeBatch:
    """``count`` sequences of ``queries`` and ``keys`` each."""

    count: int
    queries: int
    keys: int
    heads: tuple[int, int]
    packed_q: bool
    #: As `serving_batches.Batch` has it; tokens of a page.
    layout: str
    page: int = 64
    #: Whether all rows of a head of a sequence are neighbours in memory, in place of all heads of a row.
    by_head: bool = False

    def label(self) -> str:
        """For messages."""
        rows = "packed" if self.packed_q else "padded, by head" if self.by_head else "padded"
        return f"{self.count} sequences of {self.queries} queries, {rows}, and {self.keys} keys, {self.layout}, heads {self.heads[0]}/{self.heads[1]}"

    def memory(self) -> dict[str, tuple[int, int]]:
        """Between what the integers of the lists lie."""
        return {
            "cu_seqlens_q": (0, self.count * self.queries), "cu_seqlens_k": (0, self.count * self.keys), "seqused_k": (0, self.keys),
            "block_table": (0, self.count * self.keys // self.page - 1), "cache_batch_idx": (0, self.count - 1),
        }  # fmt: skip


#: Of many queries and keys each, and of many sequences; every tensor of rows has 2^32 elements or more at head_dim 64.
LARGE = (
    LargeBatch(8, 2**17, 2**17, (64, 8), False, "cache"),
    LargeBatch(8, 2**17, 2**17, (64, 64), True, "packed"),
    LargeBatch(8, 2**17, 2**17, (64, 8), True, "paged"),
    LargeBatch(2, 2**20, 2**20, (64, 64), True, "paged", 256),
    LargeBatch(2**20, 1, 2**10, (64, 8), False, "paged", 16),
    LargeBatch(2**20, 1, 2**10, (64, 8), False, "cache"),
    LargeBatch(128, 2**14, 2**14, (64, 8), False, "cache", by_head=True),
    LargeBatch(2**15, 32, 2**10, (64, 4), True, "packed"),
)


def large_batches(
    session: Session, module: Any, dims: tuple[int, int], latent: bool, narrow: bool
) -> Mapping[str, Larger]:
    """The larger batches of every kernel of a serving file; ``latent``: V is the first columns of K; ``narrow``: e4m3 caches."""
    calls: list[Call] = [
        (one.label(), functools.partial(_start, module, one, dims, latent, narrow), one.memory()) for one in LARGE
    ]
    return far_calls(session, calls)


def _start(module: Any, problem: LargeBatch, dims: tuple[int, int], latent: bool, narrow: bool) -> None:
    hq, hk = problem.heads[0], 1 if latent else problem.heads[1]
    count, queries, keys = problem.count, problem.queries, problem.keys
    rows = (count * queries,) if problem.packed_q else (count, queries)
    of_cache = dtypes.UINT8 if narrow else dtypes.FP16
    pages = count * keys // problem.page
    tokens = {"packed": (count * keys,), "paged": (pages, problem.page)}.get(problem.layout, (count, keys))
    k = dense((*tokens, hk, dims[0]), of_cache, "k")
    v = (
        Vast((*tokens, hk, dims[1]), k.stride(), of_cache, "v")
        if latent
        else dense((*tokens, hk, dims[1]), of_cache, "v")
    )
    lists = {"cu_seqlens_q": dense((count + 1,), dtypes.INT32, "cu_seqlens_q")} if problem.packed_q else {}
    if problem.layout == "packed":
        lists["cu_seqlens_k"] = dense((count + 1,), dtypes.INT32, "cu_seqlens_k")
    else:
        lists["seqused_k"] = dense((count,), dtypes.INT32, "seqused_k")
    if problem.layout == "paged":
        lists["block_table"] = dense((count, -(-keys // problem.page)), dtypes.INT32, "block_table")
    sizes = module.scratch(count, hk, hq // hk, queries, keys, _SMS)
    work = [dense((sizes[0],), dtypes.FP32, "partials"), dense((sizes[1],), dtypes.INT32, "arrived")]
    lse = dense((hq, rows[0]) if problem.packed_q else (count, hq, queries), dtypes.FP32, "lse")

    def of_rows(width: int, name: str) -> Vast:
        strides = (hq * queries * width, width, queries * width, 1)
        shape = (*rows, hq, width)
        return Vast(shape, strides, dtypes.FP16, name) if problem.by_head else dense(shape, dtypes.FP16, name)

    module.launch(
        of_rows(dims[0], "q"), k, v, of_rows(dims[1], "out"), lse, dims[0] ** -0.5,
        max_seqlen_q=queries, max_seqlen_k=keys, work=work, sms=_SMS, **lists,
    )  # fmt: skip
