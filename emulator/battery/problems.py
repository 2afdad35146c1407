"""The problems of the battery: lengths, heads, windows, inputs, scales and schedules that kernels get wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

#: Of inputs with one key above all others: how far, and from one row's key to the next.
_FAR, _STRIDE = 256.0, 7
STAGES = ("first", "tiles", "inputs", "schedules", "lengths", "window")


@dataclass(frozen=True, slots=True)
class Problem:
    """One launch, or two of one shape."""

    stage: str
    name: str
    batch: int = 1
    heads: tuple[int, int] = (1, 1)
    rows: int = 1
    keys: int = 1
    window: tuple[int, int] = (-1, -1)
    dtype: str = "fp16"
    mode: str = "late"
    seed: int = 0
    sms: int = 2
    #: How q, k and v are made: `inputs`.
    kind: str = "normal"
    #: None: 1 / sqrt(head_dim).
    scale: float | None = None
    with_lse: bool = True
    #: A second launch of the shape, with other numbers and another scale: "", "launch", or "plan" for what
    #: ``plan`` worked out before.
    again: str = ""
    #: Heads whose K and V are said to fit in L2, of kernels that group heads by it (None: what the file says).
    heads_in_l2: int | None = None
    #: Whether indices are followed to far larger problems: not in each of many that differ by a residue.
    followed: bool = True
    #: Columns that heads of queries and keys, and of values, have less than the kernel.
    fewer: tuple[int, int] = (0, 0)

    def label(self) -> str:
        """For messages, and for ``--case``."""
        words = [
            f"{self.rows}x{self.keys}", f"batch {self.batch}", f"heads {self.heads[0]}/{self.heads[1]}",
            *([f"window {self.window[0]},{self.window[1]}"] if self.stage == "window" or self.window[0] >= 0 else []),
            self.dtype, f"{self.kind} inputs", f"{self.mode}" + (f" (seed {self.seed})" if self.mode == "random" else ""),
            *([f"scale {self.scale:g}"] if self.scale is not None else []),
            *(["{} and {} columns fewer".format(*self.fewer)] if any(self.fewer) else []),
        ]  # fmt: skip
        return f"{self.name}: {', '.join(words)}"


@dataclass(frozen=True, slots=True)
class Shape:
    """What the problems depend on: a kernel's mask, tile of query rows, rows of one warpgroup or softmax group, block of keys."""

    mask: str
    tile_rows: int
    group_rows: int
    block_keys: int
    #: The window that the file was written for.
    window: tuple[int, int]
    #: CTAs that share a tile.
    ctas: int = 1

    @property
    def limits(self) -> tuple[int, int]:
        """What a launch gets where no window is asked for: of window kernels one that binds within two blocks."""
        if self.mask == "window":
            return self.block_keys - 2, self.block_keys // 3
        return self.window


def problems(shape: Shape) -> Iterator[Problem]:
    """All problems of the battery, those that find most first."""
    base = Problem("first", "", window=shape.limits, sms=2 * shape.ctas)
    yield from _first(shape, base)
    yield from _tiles(shape, replace(base, stage="tiles"))
    yield from _inputs(shape, replace(base, stage="inputs"))
    yield from _schedules(shape, replace(base, stage="schedules"))
    yield from _lengths(shape, replace(base, stage="lengths"))
    if shape.mask == "window":
        yield from _windows(shape, replace(base, stage="window"))


def _first(shape: Shape, base: Problem) -> Iterator[Problem]:
    m, n = shape.tile_rows, shape.block_keys
    yield replace(base, name="one query, one key")
    yield replace(
        base, name="without log-sum-exp", heads=(3, 1), rows=m // 2 + 3, keys=n + 5, with_lse=False, dtype="bf16"
    )
    yield replace(base, name="no keys", rows=3, keys=0)
    yield replace(base, name="second launch", rows=m // 2 + 3, keys=n + 5, heads=(2, 1), again="launch")
    yield replace(base, name="kept plan", rows=m // 2 + 3, keys=n + 5, heads=(2, 1), again="plan")


def _tiles(shape: Shape, base: Problem) -> Iterator[Problem]:
    """Several tiles, batch 2, four query heads on two; rings that start over; rows that see no key."""
    m, n = shape.tile_rows, shape.block_keys
    yield replace(base, name="several tiles", batch=2, heads=(4, 2), rows=m + 44, keys=n + 72, kind="steep")
    yield replace(base, name="many blocks", rows=m // 2 + 9, keys=9 * n + 5, dtype="bf16", window=shape.window)
    yield replace(base, name="narrower heads", heads=(2, 1), rows=m // 2 + 9, keys=n + 9, fewer=(16, 24))
    yield replace(base, name="more rows than keys", heads=(3, 1), rows=m + 1, keys=70, dtype="bf16", kind="steep")
    yield replace(base, name="heads in groups", heads=(3, 3), rows=m + 3, keys=n + 3, heads_in_l2=2)
    if shape.mask == "causal":
        # The longest tile takes as long as the others together: fewer programs than SMs would be over later.
        yield replace(base, name="a tile more than SMs", rows=4 * m, keys=4 * m, sms=3 * shape.ctas)
        # Equal tiles that do not go into the turns of all SMs: a program to each might be over sooner.
        yield replace(base, name="tiles alike", heads=(7, 1), rows=m, keys=8 * m, sms=3 * shape.ctas)


def _inputs(shape: Shape, base: Problem) -> Iterator[Problem]:
    """Scores that grow, NaN and infinity, scales."""
    m, n = shape.tile_rows, shape.block_keys
    wide = replace(base, rows=m + 9, keys=3 * n + 7, window=_wide(shape, n))
    # More tiles that are done over than Hopper's ring of Q has slots.
    yield replace(wide, name="rising scores", kind="rising", heads=(6, 2))
    yield replace(wide, name="rising scores", kind="rising", heads=(2, 1), dtype="bf16", mode="random", seed=4)
    yield replace(wide, name="falling scores", kind="falling", keys=2 * n + 7)
    # From one block to the next by more than the exponent of a float32: a reference must not follow them down.
    yield replace(wide, name="falling scores", kind="falling far", keys=2 * n + 7)
    # Rows done over go through keys from the first to the last, and their maxima grow too.
    yield replace(wide, name="scores rise and fall", kind="rising and falling")
    # One key of a row is above all others by more than the exponent of a float32: a maximum that misses it overflows.
    yield replace(wide, name="one key above all", kind="lone", rows=m, keys=n + n // 2)
    for kind in ("NaN and infinity first", "NaN and infinity last"):
        # Each special key is told apart by a column of its own: two heads where there are more keys than columns.
        # Every row sees some of the keys that are finite.
        yield replace(wide, name="not finite", heads=(2, 2), kind=kind, rows=137, keys=288,
                      window=(200, 20) if shape.mask == "window" else shape.window)  # fmt: skip
    # The first block that kernels come to has no score but -inf, and what follows is far below 1.
    yield replace(base, name="scores of -inf", rows=9, keys=2 * n + 9, kind="minus infinity", window=_wide(shape, n))
    for scale in (1e-30, 4.0, 2e38):
        kind = "zero queries" if scale > 1e30 else "normal"
        yield replace(base, name="scale", rows=m // 2 + 1, keys=n + 9, scale=scale, kind=kind)


def _schedules(shape: Shape, base: Problem) -> Iterator[Problem]:
    """Asynchronous operations at random moments."""
    m, n = shape.tile_rows, shape.block_keys
    for seed in (1, 2, 3):
        yield replace(base, name="several tiles", mode="random", seed=seed, heads=(2, 1), rows=2 * m + 30, keys=n + 60,
                      window=_wide(shape, n))  # fmt: skip
        yield replace(base, name="many blocks", mode="random", seed=seed, rows=m // 2 + 9, keys=5 * n + 3, dtype="bf16",
                      window=shape.window)  # fmt: skip


def _lengths(shape: Shape, base: Problem) -> Iterator[Problem]:
    """Every difference of the lengths, and number of keys, modulo a block of keys; lengths about tiles."""
    m, n, rows = shape.tile_rows, shape.block_keys, shape.group_rows
    window = shape.window if shape.mask != "window" else (2 * m + n, 0)
    for count in sorted({rows - 1, rows, rows + 1, m - 1, m, m + 1}):
        yield replace(base, name="rows about a tile", rows=count, keys=n, kind="flat", window=window)
    for residue in range(n):
        yield replace(base, name=f"offset {residue} modulo {n}", rows=rows, keys=rows + residue, kind="flat",
                      window=window, **_moment(residue))  # fmt: skip


def _windows(shape: Shape, base: Problem) -> Iterator[Problem]:
    """One-sided and narrow windows, and every left limit modulo a block of keys."""
    m, n, rows = shape.tile_rows, shape.block_keys, shape.group_rows
    for window in ((n // 2, -1), (-1, n // 2), (0, 0), (1, 0), (-1, -1), (0, -1)):
        yield replace(base, name="one-sided or narrow", rows=m + 5, keys=m + n + 9, kind="flat", window=window)
    for residue in range(n):
        # Rows at the end of the keys, all of which they see to the right: blocks are cut by the left edge alone, and not the
        # first that is worked on.  Right edges of every residue come with the offsets.
        yield replace(base, name=f"left limit {residue} modulo {n}", rows=rows, keys=rows + 2 * n, kind="flat",
                      window=(residue + n, -1), **_moment(residue))  # fmt: skip


def _moment(residue: int) -> dict[str, Any]:
    """Every fourth at random moments: more schedules at no cost; every eighth followed to far larger problems."""
    moment = {"mode": "random", "seed": residue} if residue % 4 == 3 else {}
    return {**moment, "followed": residue % 8 == 0}


def _wide(shape: Shape, block: int) -> tuple[int, int]:
    return (block + block // 2, 20) if shape.mask == "window" else shape.window


def inputs(problem: Problem, head_dim_qk: int, head_dim_v: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """q, k, v of a problem: numpy, in its type."""
    import ml_dtypes

    dtype = {
        "bf16": ml_dtypes.bfloat16, "fp16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
    }[problem.dtype]  # fmt: skip
    rng, (hq, hk), rows, keys = np.random.default_rng(seed), problem.heads, problem.rows, problem.keys
    q = rng.standard_normal((problem.batch, hq, rows, head_dim_qk), np.float32)
    k = rng.standard_normal((problem.batch, hk, keys, head_dim_qk), np.float32)
    v = rng.standard_normal((problem.batch, hk, keys, head_dim_v), np.float32)
    if problem.kind == "flat":
        # Every key weighs about as much as the others: one too many or too few shows.
        q *= 0.1
    elif problem.kind == "steep":
        q[:, :, : rows // 2] *= 4
    elif problem.kind in ("rising", "falling", "falling far", "rising and falling"):
        slope = np.linspace(6, 0.1, keys, dtype=np.float32)
        slope = slope if problem.kind == "rising" else slope[::-1]
        if problem.kind == "rising and falling":
            slope = np.minimum(slope, slope[::-1]) * 2
        q, k = np.abs(q) * (8 if problem.kind == "falling far" else 1), np.abs(k) * slope[None, None, :, None]
    elif problem.kind == "zero queries":
        q *= 0
    elif problem.kind == "lone" and keys:
        # Signs: a query and its key agree everywhere, others as coins fall.
        k = np.sign(k)
        own = np.repeat(k, hq // hk, 1)[:, :, (np.arange(rows) * _STRIDE + keys - 1) % keys]
        q = _FAR * own * (head_dim_qk**-0.5)
    elif problem.kind == "minus infinity":
        q[...], k[...] = -4 * np.abs(q) - 0.1, np.abs(k)
        k[:, :, keys // 2 :, 0] = np.inf
    elif problem.kind.startswith("NaN"):
        _not_finite(q, k, problem.kind.endswith("first"))
    return tuple(x.astype(dtype) for x in (q, k, v))  # type: ignore[return-value]


def _not_finite(q: Any, k: Any, first: bool) -> None:
    """Keys that are infinite in one number each: a score of -inf in most rows, NaN in one, +inf in another."""
    width, keys = q.shape[3], k.shape[2]
    q[...] = -np.abs(q) - 0.1
    for head in range(k.shape[1]):
        for number in range(min(width, keys // 2)):
            # The second head goes on where the first one ends.
            key = (number + head * width) % (keys // 2)
            k[:, head, key if first else keys - 1 - key, number] = np.inf
    for row in range(q.shape[2]):
        # Every fourth row stays finite.
        if row % 4 < 3:
            q[:, :, row, row // 2 % width] = row % 2
