"""Products plus C of all kinds drawn by a rule: `tilecast.addmm` beside PyTorch's, which is cuBLAS.

    python tools/gemm_drawn.py OUT.csv [--seed 1] [--count 128] [--rounds 7] [--share 0/1] [--seconds 1000] [--before MODULE]

A problem has a kind (a linear layer with its bias, with a residual, few rows, few columns, an update of low rank, a gradient added to fp32 sums,
any sizes), sizes from 1 to 16384 (k from 16 to 8192; whole tiles, multiples of 8 or any), bf16 or fp16, a C of that dtype or of float32, whole, by rows,
a bias of a row, a column or a number; A and B by rows, by columns, slices of wider ones or at odd addresses; D new, in place or given by the caller.
Problems of more than 4 GB or 15 TFLOP are passed over.

Each is a CUDA graph of one call, L2 evicted before by reading, in turns, medians.  Beside it torch.addmm; for a float32 C torch.addmm with
out_dtype, and a product and an addition, the better of which counts.  `apart`: the largest difference from the first of them over its largest
value.  `note` has what peers refuse.  `host_us`: the host's time of a call where that on the GPU is short.  --before: a module whose `addmm`, ours in an earlier form, is timed in the same
turns.

--share 2/8 does each eighth problem from the second on: eight processes side by side compile what a run alone then finds compiled.  After
--seconds no further problem is begun.
"""

from __future__ import annotations

import importlib
import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from measuring import (
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

KINDS = ("linear", "residual", "few rows", "few columns", "low rank", "accumulate", "any", "any")
#: How A and B lie, and C, which has a shape of its own where it is broadcast.
LAYOUTS, C_LAYOUTS = (
    ("rows", "rows", "columns", "columns", "slice", "odd"),
    ("rows", "rows", "slice", "columns", "row", "column", "number"),
)
FIELDS = ("gpu", "date", "driver", "torch", "triton", "seed", "number", "kind", "m", "n", "k", "dtype", "c_dtype", "a", "b", "c", "place", "alpha", "beta",
          "us", "before_us", "addmm_us", "apart_us", "speedup", "gbps", "tflops", "difference", "host_us", "addmm_host_us", "sm_clock_mhz", "refused", "note")  # fmt: skip
MOST_BYTES, MOST_FLOP, SHORT_US = 4e9, 1.5e13, 300.0


@dataclass(frozen=True)
class Drawn:
    """D = beta C + alpha A B; ``a``, ``b`` and ``c`` say how these lie, ``place`` where D does: new, in place, given."""

    kind: str
    m: int
    n: int
    k: int
    dtype: str
    c_dtype: str
    a: str
    b: str
    c: str
    place: str
    alpha: float
    beta: float

    @property
    def least_bytes(self) -> float:
        """Of A, B, D and a whole C that is read."""
        wide = 4 if self.c_dtype == "float32" else 2
        reads = self.beta != 0 and self.c not in ("row", "column", "number")
        return 2.0 * self.k * (self.m + self.n) + wide * (1.0 + reads) * self.m * self.n

    @property
    def flop(self) -> float:
        """2 m n k."""
        return 2.0 * self.m * self.n * self.k


def draw_one(draw: random.Random) -> Drawn:
    """One problem."""

    def size(least: int, most: int) -> int:
        value = least * (most / least) ** draw.random()
        step = draw.choice((1, 8, 64, 128))
        return min(most, max(least, step * round(value / step)))

    kind = draw.choice(KINDS)
    m, n, k = size(1, 16384), size(1, 16384), size(16, 8192)
    a, b, c, place = draw.choice(LAYOUTS), draw.choice(LAYOUTS), draw.choice(C_LAYOUTS), draw.choice(("new", "in place", "given"))  # fmt: skip
    c_dtype = dtype = draw.choice(("bfloat16",) * 3 + ("float16",))
    if kind == "linear":
        m, n, k = size(128, 16384), size(512, 16384), size(512, 8192)
        a, b, c, place = "rows", "columns", "row", "new"
    elif kind == "residual":
        m, n, k = size(128, 16384), size(512, 16384), size(64, 8192)
        a, b, c = "rows", "columns", "rows"
    elif kind == "few rows":
        m, n, k = size(1, 64), size(512, 16384), size(512, 8192)
    elif kind == "few columns":
        m, n, k = size(512, 16384), size(1, 64), size(512, 8192)
    elif kind == "low rank":
        m, n, k = size(512, 16384), size(512, 16384), draw.choice((16, 32, 64, 128, 24, 100))
    elif kind == "accumulate":
        m, n, k = size(512, 16384), size(512, 16384), size(512, 8192)
        a, b, c, place, c_dtype = "columns", "rows", "rows", "in place", draw.choice(("float32", dtype))
    elif draw.random() < 0.25:
        c_dtype = "float32"
    if place == "in place" and c in ("row", "column", "number"):
        place = "new"
    alpha, beta = draw.choice(((1.0, 1.0),) * 5 + ((0.5, 1.0), (1.0, 0.0), (0.125, 0.9)))
    return Drawn(kind, m, n, k, dtype, c_dtype, a, b, c, place, alpha, beta)


def drawn(seed: int, count: int) -> list[Drawn]:
    """The first ``count`` problems of a seed that are not too large."""
    draw = random.Random(seed)
    problems = (draw_one(draw) for _ in itertools.count())
    return list(itertools.islice((p for p in problems if p.least_bytes <= MOST_BYTES and p.flop <= MOST_FLOP), count))


def matrix(rows: int, columns: int, layout: str, dtype: Any, device: str = "cuda") -> Any:
    """(rows, columns) random numbers which lie as `LAYOUTS` and `C_LAYOUTS` say; "row", "column" and "number" are to be broadcast."""
    import torch

    def numbers(*shape: int) -> Any:
        return torch.randn(shape, device=device, dtype=dtype)

    if layout == "columns":
        return numbers(columns, rows).t()
    if layout in ("slice", "odd"):
        return numbers(rows, columns + (64 if layout == "slice" else 1))[:, :columns]
    if layout in ("row", "column", "number"):
        return numbers(*{"row": (columns,), "column": (rows, 1), "number": (1,)}[layout])
    return numbers(rows, columns)


def tensors_of(problem: Drawn) -> tuple[Any, Any, Any, Any]:
    """C, A, B and ``out`` of a problem, as they lie; None for a new D."""
    import torch

    dtype, wide = getattr(torch, problem.dtype), getattr(torch, problem.c_dtype)
    a, b = matrix(problem.m, problem.k, problem.a, dtype), matrix(problem.k, problem.n, problem.b, dtype)
    c = matrix(problem.m, problem.n, problem.c, wide)
    out = {"new": None, "in place": c, "given": a.new_empty(problem.m, problem.n, dtype=wide)}[problem.place]  # fmt: skip
    return c, a, b, out


def calls_of(
    problem: Drawn, tensors: tuple[Any, Any, Any, Any], before: Callable[..., Any] | None = None
) -> dict[str, Callable[[], Any]]:
    """Column -> call that returns D, of `tensors_of`, the first of which is ours; ``before``: ours in an earlier form."""
    import torch

    import tilecast

    c, a, b, out = tensors
    dtype, wide, factors = a.dtype, c.dtype, {"alpha": problem.alpha, "beta": problem.beta}

    def addmm() -> Any:
        if wide is dtype:
            return torch.addmm(c, a, b, **factors) if out is None else torch.addmm(c, a, b, out=out, **factors)
        return torch.addmm(c, a, b, wide, **factors) if out is None else torch.addmm(c, a, b, wide, out=out, **factors)

    def apart() -> Any:
        """A product in the dtype of A, then an addition in float32."""
        product = a @ b
        if problem.beta == 0:
            return torch.mul(product, problem.alpha, out=out)
        return torch.add(c if problem.beta == 1 else c * problem.beta, product, alpha=problem.alpha, out=out)

    found = {"us": lambda: tilecast.addmm(c, a, b, out=out, **factors), "addmm_us": addmm}
    if wide is not dtype:
        found["apart_us"] = apart
    if before is not None:
        found["before_us"] = lambda: before(c, a, b, out=out, **factors)
    return found


def difference(one: Callable[[], Any], other: Callable[[], Any], c: Any, kept: Any) -> float:
    """The largest one of both results over the largest value, each from a C of the numbers ``kept``."""
    results = []
    for call in (one, other):
        c.copy_(kept)
        results.append(call().double())
    return float((results[0] - results[1]).abs().max() / results[1].abs().max().clamp(min=1e-9))


def measure(problem: Drawn, rounds: int, evict: Any, before: Callable[..., Any] | None = None) -> dict[str, Any]:
    """One row of the table, without what is the same in all."""
    import torch

    from tilecast.kernels.errors import UnsupportedError

    torch.manual_seed(0)
    row: dict[str, Any] = {name: getattr(problem, name) for name in Drawn.__dataclass_fields__}
    tensors = tensors_of(problem)
    c, calls, notes, graphs = tensors[0], calls_of(problem, tensors, before), [], {}
    kept = c.clone()
    for name, call in calls.items():
        try:
            call()
            graphs[name] = graph_of(call)
        except UnsupportedError as error:
            row["refused"] = first_line(error)
        except Exception as error:  # one problem or peer that fails must not end the run
            notes.append(f"{name}: {type(error).__name__}: {first_line(error)}")
    medians = {name: statistics.median(us) for name, us in times_us(graphs, rounds, evict, "reading").items()}
    row |= {name: round(us, 2) for name, us in medians.items()}
    mine = medians.pop("us", None)
    medians.pop("before_us", None)
    if mine is not None:
        row |= {"gbps": round(problem.least_bytes / mine * 1e-3, 1), "tflops": round(problem.flop / mine * 1e-6, 1)}
        if medians:
            row["speedup"] = round(min(medians.values()) / mine, 3)
            row["difference"] = f"{difference(calls['us'], calls[next(iter(medians))], c, kept):.1e}"
        if mine < SHORT_US:
            row["host_us"] = round(host_us(calls["us"], 20), 1)
            if "addmm_us" in medians:
                row["addmm_host_us"] = round(host_us(calls["addmm_us"], 20), 1)
    return {**row, "sm_clock_mhz": nvidia_smi("clocks.sm"), "note": "; ".join(notes)}


def main() -> None:
    parser = drawing(__doc__, 128, 7)
    parser.add_argument("--before", help="a module whose addmm is timed beside")
    given = parser.parse_args()
    evict, before = evicting(), importlib.import_module(given.before).addmm if given.before else None
    problems = drawn(given.seed, given.count)
    rows = measured(given, FIELDS, problems, lambda problem: measure(problem, given.rounds, evict, before))
    print(geometric_summary([row["speedup"] for row in rows if "speedup" in row]))


if __name__ == "__main__":
    main()
