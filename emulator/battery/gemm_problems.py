"""Problems of the battery of matrix products, and tensors for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tilecast.emulator.language.arrays import Array

#: numpy's types by their names in headers.
TYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}


@dataclass(frozen=True, slots=True)
class Product:
    """One launch: D (m, n) of A (m, k) and B (k, n)."""

    name: str
    m: int
    n: int
    k: int
    dtype: str = "bf16"
    alpha: float = 1.0
    beta: float = 1.0
    #: Whether rows ("rows") or columns of A and B are without gaps.
    a: str = "rows"
    b: str = "rows"
    #: How C lies: "rows" as D, "columns", one "row", "column" or "number" for all of it.
    c: str = "rows"
    #: Whether D is C; columns of C and D beyond those that count; whether C is NaN and must not be read.
    in_place: bool = False
    gap: int = 0
    poisoned: bool = False
    #: Whether there is no C, whatever beta is.
    without_c: bool = False
    mode: str = "late"
    seed: int = 0
    sms: int = 3
    #: A second launch with other numbers and factors.
    again: bool = False
    #: Of k, where the kernel shares it among programs.
    parts: int = 2

    def label(self) -> str:
        """For messages, and for ``--case``."""
        words = [
            f"{self.m}x{self.n}x{self.k}", self.dtype, f"alpha {self.alpha:g}", f"beta {self.beta:g}",
            *([f"A by {self.a}, B by {self.b}"] if "columns" in (self.a, self.b) else []),
            *([f"C by {self.c}" if self.c == "columns" else f"one {self.c} of C"] if self.c != "rows" else []),
            *(["in place"] if self.in_place else []), self.mode + (f" (seed {self.seed})" if self.mode == "random" else ""),
        ]  # fmt: skip
        return f"{self.name}: {', '.join(words)}"


@dataclass
class Tensors:
    """A, B, C and D of a launch."""

    a: Array
    b: Array
    c: Array
    d: Array
    #: Memory of D with the columns beyond, and those and C as they were.
    holder: Any
    beyond: Any
    before: Any


def as_f64(array: Array) -> Any:
    """Its numbers in float64."""
    return array.data.astype(np.float64)


def kind_of(problem: Product, wide: str) -> str:
    """Type of C and D."""
    return "fp16" if wide == "bf16" and problem.dtype == "fp16" else wide


def tensors_maker(problem: Product, wide: str, seed: int) -> Callable[[], Tensors]:
    """What makes the tensors of a problem, the same each time."""
    kind = TYPES[kind_of(problem, wide)]

    def make() -> Tensors:
        rng = np.random.default_rng(seed)

        def matrix(rows: int, columns: int, how: str, name: str) -> Array:
            first, second = (rows, columns) if how == "rows" else (columns, rows)
            # Rows start at whole 16 bytes.
            whole = rng.standard_normal((first, -(-second // 8) * 8), np.float32).astype(TYPES[problem.dtype])[
                :, :second
            ]
            return Array(whole if how == "rows" else whole.T, name)

        a, b = matrix(problem.m, problem.k, problem.a, "a"), matrix(problem.k, problem.n, problem.b, "b")
        # Rows of D start at whole 16 bytes, or nowhere in particular.
        columns = problem.n + problem.gap if "odd" in problem.name else -(-problem.n // 8) * 8 + problem.gap
        holder = rng.standard_normal((problem.m, columns), np.float32).astype(kind)
        if problem.poisoned:
            holder[:] = np.nan
        lying = holder[:, : problem.n]
        one = {"row": lying[:1], "column": lying[:, :1], "number": lying[:1, :1]}.get(problem.c)
        if one is not None:
            lying = np.broadcast_to(one, lying.shape)
        elif problem.c == "columns":
            lying = np.asfortranarray(lying)
        before = lying.astype(np.float64)
        beyond = holder[:, problem.n :].copy()
        c = Array(lying, "c")
        if problem.in_place:
            d = Array(holder[:, : problem.n], "d")
            return Tensors(a, b, d, d, holder, beyond, before)
        own = np.full_like(holder, np.nan)
        return Tensors(a, b, c, Array(own[:, : problem.n], "d"), own, own[:, problem.n :].copy(), before)

    return make
