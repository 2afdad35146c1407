"""The battery of forward passes in 8 bits: the problems of those in 16, with factors, held against what rounding P to e4m3 explains."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from tilecast.emulator.battery.bench import Bench
from tilecast.emulator.battery.host import NO_STEP, WITHOUT_KEYS, handed_on, tensor_maps, unstored
from tilecast.emulator.battery.launches import always, compare, must_refuse, run_host, stored_at
from tilecast.emulator.battery.problems import Problem, inputs
from tilecast.emulator.departure import explained
from tilecast.emulator.errors import WrongResultError
from tilecast.emulator.extremes import far_launches
from tilecast.emulator.language.arrays import Array
from tilecast.emulator.session import Watcher
from tilecast.emulator.steps import Steps
from tilecast.emulator.values import dtypes
from tilecast.emulator.verify import LSE_RELATIVE, LSE_TOLERANCE, Verdict, polynomial_error, reference, weights

#: Rounding P to e4m3: relative, and absolute below its smallest normal number, of exponentials that start at 2^4.
_RELATIVE, _ABSOLUTE = 2.0**-4, 2.0**-14
#: The whole error over that of rounding P alone, at the row's own maximum; rounding to bf16.
_FLOORS, _BF16 = 1.5, 2.0**-8
_NAMES = ("q_descale", "k_descale", "v_descale")


class NarrowBench(Bench):
    """A forward pass in e4m3 (on Blackwell e5m2 too) under the battery."""

    def todo(self) -> Sequence[Problem]:
        """Those of 16 bits, but for scores that 8 bits have no numbers for, and kept plans."""
        wide = "e5m2" if self.kernel.header["family"] == "blackwell_ws" else "e4m3"
        kept = [one for one in super().todo() if "infinity" not in one.kind and one.again != "plan"]
        found = [replace(one, dtype="e4m3" if one.dtype == "fp16" else wide) for one in kept]
        # Every factor by head, as one number and not at all where there are several key heads.
        several = next(one for one in found if one.heads[1] > 1)
        return [*found, *(replace(several, name="factors", rows=several.rows + more) for more in (1, 2))]

    def _launch(self, problem: Problem, scale: float, seed: int, planned: bool = False) -> None:
        work = self.workload
        q, k, v = inputs(problem, work.head_dim_qk, work.head_dim_v, seed)
        rng = np.random.default_rng(seed)
        by_head = (problem.batch, problem.heads[1])
        # A factor for each key head, one number, none, by turns: each of the three has been each of these.
        kinds = [rng.uniform(0.5, 1.5, by_head), np.array([0.8]), None]
        turn = problem.rows % 3
        factors: list[Any] = [*kinds[turn:], *kinds[:turn]]
        factors = [
            None if one is None else Array(one.astype(np.float32), name)
            for one, name in zip(factors, _NAMES, strict=True)
        ]
        if problem.name == "falling scores":
            # V by columns, which a kernel may ask about.
            v = (
                np.ascontiguousarray(v.swapaxes(2, 3)).swapaxes(2, 3)
                if self.kernel.header["family"] == "hopper_ws"
                else v
            )

        def launched(watcher: Watcher | None = None) -> tuple[Array, Array]:
            out = Array(np.full((*q.shape[:3], v.shape[3]), np.nan, ml_dtypes.bfloat16), "out")
            lse = Array(np.full(q.shape[:3], np.nan, np.float32), "lse")
            given = [Array(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
            self.kernel.begin(problem.mode, problem.seed, problem.sms, watcher)
            session = self.kernel.session
            if session.far_launches is None:
                kinds = (dtypes.FP8E4, dtypes.BF16)
                session.far_launches = far_launches(
                    session, self.kernel.module.launch, (work.head_dim_qk, work.head_dim_v), self.shape().limits, kinds
                )
            launch = self.kernel.module.launch
            run_host(
                self.kernel,
                lambda: launch(
                    *given, out, lse if problem.with_lse else None, scale, *problem.window, **dict(zip(_NAMES, factors, strict=True))
                ),
            )  # fmt: skip
            return out, lse

        out, lse = launched()
        self._count()
        wide = [_descaled(x, factor) for x, factor in zip((q, k, v), factors, strict=True)]
        wrong = self._judged(problem, wide, scale, out, lse)
        if not wrong.wrong:
            return
        source = self.kernel.source
        # On Hopper V is turned before, and its keys shuffled.
        shuffled = self.kernel.header["family"] == "hopper_ws"
        steps = Steps(wide[0], wide[1], v, scale, problem.window, source, coarse=True, shuffled=shuffled)
        source.dataflow.left_out = self.coverage.left_out(launched)
        launched(steps)
        found = steps.finish(wrong, self.kernel.mask_lines(), self.kernel.session.mask_calls)
        said = explained(wrong.wrong, found, source)
        reason = WITHOUT_KEYS if not problem.keys else None if found else NO_STEP
        host = handed_on(source, *reason) if reason else unstored(source, said)
        raise WrongResultError(said + host + ("" if found else tensor_maps(source)))

    def _count(self) -> None:
        traces = self.kernel.session.traces
        self.programs += len(traces)
        self.operations += sum(len(role.events) for one in traces for role in one.roles)

    def _judged(self, problem: Problem, wide: Sequence[Any], scale: float, out: Array, lse: Array) -> Verdict:
        """The results against float64."""
        q, k, v = wide
        weighed = weights(q, k, scale, problem.window)
        want, want_lse = reference(q, k, v, scale, problem.window, weighed)
        allowed, floor = _explained(*weighed[:2], v, want)
        got, sums_got = out.data.astype(np.float64), lse.data if problem.with_lse else want_lse
        off = compare(got, want, allowed, ("batch", "head", "row", "column"), "out, the output,")
        finite = np.abs(want_lse[np.isfinite(want_lse)]).max(initial=0.0)
        limit = LSE_TOLERANCE + polynomial_error(self.kernel.header) + LSE_RELATIVE * finite
        sums = compare(sums_got, want_lse, limit, ("batch", "head", "row"), "lse, the log-sum-exp,")
        self.out_error, self.lse_error = max(self.out_error, min(off.share, 1)), max(self.lse_error, min(sums.share, 1))
        size, text = float(np.linalg.norm(want)), off.text
        error, allowance = float(np.linalg.norm(got - want)), _FLOORS * floor + _BF16 * size
        if not text and error > allowance:
            text = f"the output is off by {error / size:.3g} of its size, where rounding P to e4m3 explains {allowance / size:.3g}"
        out_right, lse_right = not text, not sums.text
        if text:
            known = "; the log-sum-exp is " + ("right" if lse_right else "wrong too") if problem.with_lse else ""
            text += known + (stored_at(self.kernel.source, out, off.at) if off.at else "")
        elif sums.text:
            text = f"{sums.text}; the output is right" + stored_at(self.kernel.source, lse, sums.at)
        with np.errstate(all="ignore"):
            bad = ~(np.abs(got - want) <= allowed).all(-1) | ~(
                (np.abs(sums_got - want_lse) <= limit) | (sums_got == want_lse)
            )
        rows = tuple(tuple(int(n) for n in place) for place in np.argwhere(bad)[:64])
        return Verdict(off.share, 1.0, sums.share, 1.0, text, rows, out_right, lse_right)

    def refused(self) -> int:
        """Wrong calls."""
        problem = Problem("", "", heads=(2, 1), rows=16, keys=24, dtype="e4m3")
        work, launch = self.workload, self.kernel.module.launch
        q, k, v = (
            Array(x, name) for x, name in zip(inputs(problem, work.head_dim_qk, work.head_dim_v), "qkv", strict=True)
        )
        out = Array(np.zeros((1, 2, 16, work.head_dim_v), ml_dtypes.bfloat16), "out")
        lse = Array(np.zeros((1, 2, 16), np.float32), "lse")
        window = (-1, 0) if work.mask == "causal" else (-1, -1)
        right = {
            "q": q,
            "k": k,
            "v": v,
            "out": out,
            "lse": lse,
            "scale": 0.1,
            "window_left": window[0],
            "window_right": window[1],
        }

        def call(name: str, change: Callable[[Any], Any]) -> Callable[[], Any]:
            value = right.get(name)
            changed = Array(change(value.data), name) if isinstance(value, Array) else change(value)
            return lambda: launch(**{**right, name: changed})

        return must_refuse(
            self.kernel.source,
            [
                ("a q of another head_dim than k's", call("q", lambda x: x[..., :-16].copy())),
                ("a v of another length than k", call("v", lambda x: x[:, :, :-1].copy())),
                ("a v of other heads than k", call("v", lambda x: np.repeat(x, 2, 1))),
                ("an out of another shape than q", call("out", lambda x: x[:, :, :-1].copy())),
                ("an e4m3 out", call("out", lambda x: x.astype(ml_dtypes.float8_e4m3fn))),
                ("a float16 q", call("q", lambda x: x.astype(np.float16))),
                ("a float16 v", call("v", lambda x: x.astype(np.float16))),
                ("an lse of another shape", call("lse", lambda x: x[:, :, :-1].copy())),
                ("a float16 lse", call("lse", lambda x: x.astype(np.float16))),
                (
                    "rows of k that are not 16 bytes apart",
                    call("k", lambda x: np.pad(x, [(0, 0)] * 3 + [(0, 8)])[..., :-8]),
                ),
                (
                    "a q_descale of another shape",
                    call("q_descale", lambda _: Array(np.ones((1, 3), np.float32), "q_descale")),
                ),
                ("a float16 v_descale", call("v_descale", lambda _: Array(np.ones(1, np.float16), "v_descale"))),
                *(
                    (f"scale={scale:g}", call("scale", functools.partial(always, scale)))
                    for scale in (float("nan"), float("inf"))
                ),
            ],
        )


def _descaled(x: Any, factor: Array | None) -> Any:
    """What a tensor stands for, in float64; ``factor``: one number, or one for each key head."""
    if factor is None:
        return x.astype(np.float64)
    numbers = factor.data.astype(np.float64)
    if numbers.ndim == 2:
        numbers = np.repeat(numbers, x.shape[1] // numbers.shape[1], 1)[..., None, None]
    return x.astype(np.float64) * numbers


def _explained(p: Any, total: Any, v: Any, want: Any) -> tuple[Any, float]:
    """(error of each element, size of the error of all) that rounding P, exponentials whose rows sum to ``total``, to e4m3 explains."""
    values = np.repeat(v, p.shape[1] // v.shape[1], 1)
    with np.errstate(all="ignore"):
        rounded = (p * 256).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / 256
        floor = np.where(total > 0, rounded @ values / total, 0) - want
        # |V| weighed as V is, and every key's |V|.
        sizes = np.where(total > 0, p @ np.abs(values) / total, 0)
    every = np.abs(values).sum(2, keepdims=True)
    allowed = 1.1 * (_RELATIVE * sizes + _ABSOLUTE * every + _BF16 * np.abs(want)) + 1e-6
    return allowed, float(np.linalg.norm(floor))
