"""The battery of matrix products: D = alpha A B + beta C."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tilecast.emulator.battery.gemm_problems import TYPES, Product, Tensors, as_f64, kind_of, tensors_maker
from tilecast.emulator.battery.gemm_steps import GemmSteps
from tilecast.emulator.battery.host import handed_on, unstored
from tilecast.emulator.battery.launches import LaunchBench, compare, explain, must_refuse, stored_at
from tilecast.emulator.errors import WrongResultError
from tilecast.emulator.extremes import Call, Vast, dense, far_calls
from tilecast.emulator.language.arrays import Array
from tilecast.emulator.session import Watcher
from tilecast.emulator.values import dtypes

#: Share of a rounding by which sums may fall on the other side of a tie.
_TIE = {"bf16": 2.0**-13, "fp16": 2.0**-16, "fp32": 2.0**-29}
#: Rows, columns and sums of products of which D, A or B have 2^34 elements.
_LARGE = ((2**18, 2**16, 64), (2**20, 64, 2**14), (64, 2**20, 2**14))
#: Error of float32 sums, of the sum of absolute products.
_SUM = 4e-7


class GemmBench(LaunchBench):
    """A GEMM kernel under its battery."""

    def todo(self) -> Sequence[Product]:
        """Every layout, factor and edge; tiles by turns; schedules."""
        return list(self._problems())

    def _problems(self) -> Iterator[Product]:
        m, n, k = (self.number(name, 64) for name in ("TILE_M", "TILE_N", "TILE_K"))
        stages, group = self.number("STAGES", 4), self.number("GROUP_M", 8)
        base = Product("", m + 8, 2 * n + 8, 3 * k + 8)
        yield replace(base, name="one small tile", m=3, n=8, k=8)
        yield replace(base, name="no rows", m=0, n=16)
        yield replace(base, name="no C", m=m // 2 + 3, n=n + 24, beta=0.0, dtype="fp16")
        yield replace(base, name="without C", m=m // 2 + 3, n=n + 24, without_c=True)
        yield replace(base, name="C that is not read", m=m // 2 + 3, n=n - 8, beta=0.0, poisoned=True)
        yield replace(base, name="several tiles", m=3 * m + 9, n=2 * n + 8, again=True, gap=8)
        yield replace(base, name="one step", m=2 * m + 1, k=k, mode="random", seed=1)
        yield replace(base, name="more steps than slots", m=m + 2, n=n + 8, k=(2 * stages + 1) * k + 16, sms=2)
        yield replace(base, name="more rows of tiles than are walked together", m=(group + 1) * m + 3, n=2 * n + 8, k=k)
        # A program that takes one tile too many finds no row of tiles left.
        yield replace(base, name="all rows of tiles walked together", m=group * m, n=16, k=k, sms=3)
        for number, (a, b) in enumerate((("rows", "columns"), ("columns", "rows"), ("columns", "columns"))):
            yield replace(base, name="layouts", a=a, b=b, m=m + 24, dtype="fp16" if number == 1 else "bf16")
        for alpha, beta in ((0.5, -2.0), (1.0, 0.5), (-3.0, 1.0), (2.0, 0.0), (0.0, 1.0)):
            yield replace(base, name="factors", alpha=alpha, beta=beta, n=n + 8, gap=16)
        for lies in ("row", "column", "number", "columns"):
            yield replace(base, name="C that lies anyhow", c=lies, beta=2.0, n=n + 8, gap=8)
            yield replace(
                base,
                name="D at odd steps",
                c=lies,
                m=m // 2 + 3,
                n=n + 9,
                gap=0 if n % 2 == 0 else 1,
                mode="random",
                seed=5,
            )
        yield replace(base, name="D at odd steps", alpha=0.5, beta=2.0, n=n + 3, gap=2, in_place=True)
        yield replace(base, name="in place", in_place=True, alpha=0.5, beta=2.0, gap=8)
        for seed in (2, 3, 4):
            yield replace(
                base, name="several tiles", mode="random", seed=seed, m=3 * m + 9, in_place=seed == 3, beta=2.0
            )
            yield replace(base, name="one program", mode="random", seed=seed, m=2 * m + 9, sms=1, beta=float(seed > 2))
        if self._parted:
            for parts, steps in ((1, 3), (3, 7), (5, 4), (4, 2 * stages)):
                # Steps that no whole number of parts has; a part that has none.
                yield replace(
                    base, name=f"{parts} parts", parts=parts, k=steps * k, m=m + 9, n=n + 5, mode="random", seed=parts
                )
        for extent in ("m", "n", "k"):
            size, step = {"m": (m, 1), "n": (n, 8), "k": (k, 8)}[extent]
            for count in (size - step, size, size + step):
                yield replace(base, name=f"{extent} about a tile", **{extent: count})  # type: ignore[arg-type]

    def synchronises(self, problem: Product) -> bool:
        """Whether it is about more than extents and factors."""
        return "about a tile" not in problem.name and problem.name != "factors"

    def solve(self, problem: Product) -> None:
        """Run it, and once more with other numbers where that is asked for."""
        self._run(problem, problem.seed)
        if problem.again:
            self._run(replace(problem, alpha=problem.alpha + 0.5, beta=problem.beta - 3.0), problem.seed + 1)

    def _met(self, before: int) -> tuple[Array, ...]:
        """What programs that wait for each other count in, which launches leave as they find it; () where they do not."""
        return (
            (Array(np.full(self.number("COUNTERS", 1), before, np.int32), "met"),) if self.number("IN_STEP", 0) else ()
        )

    def _sums(self, m: int, n: int, parts: int) -> tuple[Array, ...]:
        """Room for the sums of the parts of k, which a launch has to write before it reads them; () where k is not parted."""
        shape = self.loaded.module.sums_shape(m, n, parts) if self._parted else ()
        return (Array(np.full(shape, np.nan, np.float32), "sums"),) if shape else ()

    @property
    def _parted(self) -> bool:
        """Whether the file adds up sums of parts of k, and reads C and writes D anyhow."""
        return hasattr(self.loaded.module, "sums_shape")

    def _checked(self, *given: Any) -> Any:
        """A call of which something is wrong."""
        m, n = given[0].shape[0], given[1].shape[1]
        return self.loaded.module.launch(*given, 1.0, 1.0, *self._met(0), *self._sums(m, n, 2))

    @property
    def _wide(self) -> str:
        """Type of C and D that the file is for."""
        return str(self.loaded.header["workload"]["d_dtype"])

    def _run(self, problem: Product, seed: int) -> None:
        made = tensors_maker(problem, self._wide, seed)
        met, sums = self._met(seed % 2), functools.partial(self._sums, problem.m, problem.n, problem.parts)

        def launched(watcher: Watcher | None = None) -> Tensors:
            tensors = made()
            given = (
                tensors.a,
                tensors.b,
                tensors.c if (problem.beta and not problem.without_c) or problem.poisoned else None,
                tensors.d,
            )
            session = self.loaded.session
            if session.far_launches is None:
                session.far_launches = far_calls(session, self._large(met))
            self.launch(
                lambda: self.loaded.module.launch(*given, problem.alpha, problem.beta, *met, *sums()), problem.mode, problem.seed, problem.sms,
                watcher, counted=watcher is None,
            )  # fmt: skip
            return tensors

        done = launched()
        if met and (met[0].data != seed % 2).any():
            raise WrongResultError(f"met: expected {seed % 2} again, got {met[0].data.tolist()}")
        beyond = done.holder[:, problem.n :]
        if not np.array_equal(beyond, done.beyond, equal_nan=True):
            raise WrongResultError("columns of D beyond its last one were written")
        adds = problem.beta and not problem.without_c
        want = problem.alpha * (as_f64(done.a) @ as_f64(done.b)) + (problem.beta * done.before if adds else 0.0)
        size = abs(problem.alpha) * (np.abs(as_f64(done.a)) @ np.abs(as_f64(done.b)))
        size = size + (abs(problem.beta * done.before) if adds else 0.0)
        kind = kind_of(problem, self._wide)
        rounded = np.abs(want.astype(TYPES[kind]).astype(np.float64) - want)
        allowed = 1.01 * rounded + _SUM * size + _TIE[kind] * np.abs(want) + 2.0**-40
        off = compare(done.d.data, want, allowed, ("row", "column"), "D")
        if off.text:
            trail = GemmSteps(problem, self.number("TILE_M", 64))
            self.source.dataflow.left_out = self.coverage.left_out(lambda: launched(trail))
            raise self._explained(problem, trail, off.text + stored_at(self.source, done.d, off.at), off.at)
        self.out_error = max(self.out_error, off.share)

    def _explained(self, problem: Product, trail: GemmSteps, what: str, at: tuple[int, ...]) -> WrongResultError:
        """The error, with the first step that departs; where all products are right, what comes after."""
        host = ""
        step = trail.departs or trail.left_out(problem, at, (self.number("TILE_M", 64), self.number("TILE_N", 64)))
        if not step:
            step = "after. Every product and sum is right: the factors, C, or the place where a tile is stored"
            chains = list(trail.stores.get("d", {})) or list(trail.products)
            trail.step = [(chain, argument) for chain in chains for argument in (2, 1)]
            trail.step += [(chain, 1) for chain in trail.copies.get("c", {})]
            if (problem.alpha, problem.beta) != (1, 1):
                host = handed_on(
                    self.source, "with factors of 1 it may be right", ("alpha", "beta") if problem.beta else ("adds",)
                )
        elif not trail.departs:
            host = handed_on(
                self.source, "how many tiles and steps there are", ("sizes", "rows, columns", "TILE_", "[grid]")
            )
        error = explain(self.source, trail, what, ["d"], step)
        return WrongResultError(
            str(error) + (host if "nothing was stored" not in what else unstored(self.source, what))
        )

    def _large(self, met: tuple[Array, ...]) -> list[Call]:
        """Products of which one matrix or more outgrow 32 bits, in every layout of A and B."""
        wide = dtypes.FP32 if self._wide == "fp32" else dtypes.BF16

        def start(m: int, n: int, k: int, a: str, b: str) -> None:
            def matrix(rows: int, columns: int, how: str, name: str) -> Vast:
                strides = (columns, 1) if how == "rows" else (1, rows)
                return Vast((rows, columns), strides, dtypes.BF16, name)

            c, d = (dense((m, n), wide, name) for name in "cd")
            sums = [dense(self.loaded.module.sums_shape(m, n, 2), dtypes.FP32, "sums")] if self._parted else []
            self.loaded.module.launch(matrix(m, k, a, "a"), matrix(k, n, b, "b"), c, d, 1.0, 1.0, *met, *sums)

        hows = ("rows", "columns")
        return [
            (f"{m}x{n}x{k}, A by {a}, B by {b}", functools.partial(start, m, n, k, a, b), {})
            for (m, n, k), a, b in itertools.product(_LARGE, hows, hows)
        ]

    def refused(self) -> int:
        """Wrong calls."""
        problem = Product("", 16, 24, 32)
        tensors = tensors_maker(problem, self._wide, 0)()
        launch = self._checked
        right = {name: getattr(tensors, name) for name in "abcd"}

        def call(name: str, change: Callable[[Any], Any]) -> Callable[[], Any]:
            given = {**right, name: Array(change(right[name].data), name)}
            return lambda: launch(*(given[one] for one in "abcd"))

        def summed(wrong: Callable[[Any], Any]) -> Any:
            sums = Array(wrong(self._sums(problem.m, problem.n, 2)[0].data), "sums")
            return self.loaded.module.launch(*(right[one] for one in "abcd"), 1.0, 1.0, sums)

        sums = [
            ("sums of half a part", lambda: summed(lambda x: x[: len(x) // 4])),
            ("sums of fewer columns", lambda: summed(lambda x: x[:, :-4].copy())),
        ]
        return must_refuse(
            self.source,
            [
                *(sums if self._parted else ()),
                ("an a of another k than b", call("a", lambda x: x[:, :-8].copy())),
                ("a b of another type than a", call("b", lambda x: x.astype(np.float16))),
                ("a float32 a", call("a", lambda x: x.astype(np.float32))),
                ("a c of another shape than d", call("c", lambda x: x[:-1].copy())),
                ("a c of another type than d", call("c", lambda x: x.astype(np.float64))),
                (
                    "a float64 d",
                    lambda: launch(right["a"], right["b"], None, Array(right["d"].data.astype(np.float64), "d")),
                ),
                ("a d of another shape", call("d", lambda x: x[:, :-8].copy())),
                ("rows of b that are not 16 bytes apart", call("b", lambda x: np.pad(x, [(0, 0), (0, 4)])[:, :-4])),
                ("rows of a that are not 16 bytes apart", call("a", lambda x: np.pad(x, [(0, 0), (0, 4)])[:, :-4])),
                ("an a whose columns are not neighbours", call("a", lambda x: np.repeat(x, 2, 1)[:, ::2])),
                ("a b whose columns are not neighbours", call("b", lambda x: np.repeat(x, 2, 1)[:, ::2])),
            ],
        )
