"""The battery of backward passes: gradients of attention, in order and, where a launch may leave it to programs, in any order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from tilecast.emulator.battery.backward_steps import BackwardSteps
from tilecast.emulator.battery.host import WITHOUT_KEYS, handed_on, tensor_maps, unstored
from tilecast.emulator.battery.launches import LaunchBench, always, compare, explain, must_refuse, stored_at
from tilecast.emulator.errors import WrongResultError
from tilecast.emulator.extremes import LARGE, Call, Large, far_calls, sums, vast
from tilecast.emulator.language.arrays import Array
from tilecast.emulator.session import Watcher
from tilecast.emulator.values import dtypes
from tilecast.emulator.verify import visible

_TYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
_ULP = {"bf16": 2.0**-8, "fp16": 2.0**-11}
#: Rounding of numbers below the smallest normal one.
_TINY = {"bf16": 2.0**-134, "fp16": 2.0**-25}
#: Roundings of P and dS, and of a gradient, that are allowed; float32 differences of dP and D.
_ROUNDINGS, _FLOAT = 1.5, 4e-6
_GRADIENTS = ("dq", "dk", "dv")
_NAMES = ("batch", "head", "row", "column")
#: SMs where query heads share keys: as many as programs have to be there together, and so few that one takes several heads.
_SHARING_SMS = 16


@dataclass(frozen=True, slots=True)
class Gradient:
    """One launch, or two of one shape."""

    name: str
    batch: int = 1
    heads: tuple[int, int] = (1, 1)
    rows: int = 1
    keys: int = 1
    dtype: str = "fp16"
    #: Scores: "normal", "flat" (every key weighs alike), "steep", or "far below 0".
    kind: str = "normal"
    #: None: 1 / sqrt(head_dim).
    scale: float | None = None
    #: Whether the log-sum-exp has a gradient; whether q, dout and dq have gaps between rows; a second launch.
    with_dlse: bool = False
    #: Whether programs may add to dQ in any order.
    any_order: bool = False
    #: Whether each block of keys has a sum of dQ of its own, which the rule gives to few programs; else they add in turn.
    own_sums: bool = False
    gaps: bool = False
    again: bool = False
    mode: str = "late"
    seed: int = 0
    #: None: what the kernel is about.
    window: tuple[int, int] | None = None
    #: Columns that heads of queries and keys, and of values, have less than the kernel.
    fewer: tuple[int, int] = (0, 0)
    #: As many as items, or 1, whose program has all: where programs run one after the other, the first of two that stay would wait for
    #: the second.
    sms: int = 4096

    def label(self) -> str:
        """For messages, and for ``--case``."""
        words = [
            f"{self.rows}x{self.keys}", f"batch {self.batch}", f"heads {self.heads[0]}/{self.heads[1]}", self.dtype, f"{self.kind} inputs",
            self.mode + (f" (seed {self.seed})" if self.mode == "random" else ""), *(["dlse"] if self.with_dlse else []), *(["any order"] if self.any_order else []), *(["own sums"] if self.own_sums else []),
            *([f"{self.sms} SMs"] if self.sms < _SHARING_SMS else []),
            *([f"scale {self.scale:g}"] if self.scale is not None else []),
            *(["{} and {} columns fewer".format(*self.fewer)] if any(self.fewer) else []),
            *(["window {},{}".format(*self.window)] if self.window is not None else []),
        ]  # fmt: skip
        return f"{self.name}: {', '.join(words)}"


class BackwardBench(LaunchBench):
    """A backward pass under its battery."""

    def todo(self) -> Sequence[Gradient]:
        """Tiles, heads, schedules, lengths of every eighth residue."""
        sharing = (replace(p, sms=min(p.sms, _SHARING_SMS)) if p.heads[0] > p.heads[1] else p for p in self._problems())
        return list(sharing)

    def _problems(self) -> Iterator[Gradient]:
        m, n = self.number("TILE_M", 64), self.number("TILE_N", 128)
        base = Gradient("", rows=m + 9, keys=n + 7)
        yield replace(base, name="one query, one key", rows=1, keys=1)
        yield replace(base, name="no keys", rows=5, keys=0)
        yield replace(base, name="several tiles", batch=2, heads=(4, 2), dtype="bf16", kind="steep")
        if self.number("DEALT", 0):
            stays = replace(base, name="a program that stays", sms=1, heads=(4, 2), rows=3 * m + 9, keys=2 * n + 60)
            yield from (stays, replace(stays, batch=2, rows=m // 2, keys=3 * n + 5, dtype="bf16", any_order=True))
            yield from (replace(stays, mode="random", seed=seed, sms=seed, any_order=seed == 3) for seed in (1, 2, 3))
            yield replace(
                stays, name="a program that stays, more rows than keys", rows=2 * m + n + 5, keys=n + 3, again=True
            )
        yield replace(base, name="second launch", heads=(2, 1), again=True, with_dlse=True)
        yield replace(base, name="many blocks of queries", rows=5 * m + 3, keys=n // 2)
        yield replace(base, name="many blocks of keys", rows=m, keys=3 * n + 5, heads=(2, 2), dtype="bf16")
        heads = self.number("HEADS_ABREAST", 4) + 1
        # Where programs wait for each other more heads go abreast that have few steps.
        rows = 4 * m + 1 if self.number("ANY_ORDER_ABREAST", 0) else 3
        yield replace(base, name="more heads than go abreast", heads=(heads, heads), rows=rows, keys=n + 1)
        yield replace(base, name="heads of a group", heads=(6, 2), rows=m - 1, keys=n + 1, gaps=True)
        # Queries enough of heads enough for a sum to have parts, the last of a head less; a rule says so that counts what programs do once.
        heads, rows = (14, 150) if self.number("DEALT", 0) else (31, 180)
        yield replace(base, name="parts of a group", heads=(heads, 1), rows=rows, keys=rows, kind="flat")
        if hasattr(self.loaded.module, "within"):
            narrow = replace(base, name="narrower heads", rows=m + 9, keys=n + 7, fewer=(16, 24))
            yield from (narrow, replace(narrow, heads=(heads, 1), rows=rows, keys=rows, dtype="bf16", fewer=(8, 0)))
        yield replace(base, name="more rows than keys", rows=2 * m + n + 5, keys=n - 30, kind="flat")
        yield replace(base, name="gradient of the log-sum-exp", with_dlse=True, heads=(2, 1), batch=2, rows=m // 2)
        for scale in (1e-30, 1.0):
            yield replace(base, name="scale", scale=scale, rows=m // 2 + 1)
        if abreast := self.number("ANY_ORDER_ABREAST", 0):
            loose = replace(base, name="sums in any order", keys=3 * n + 5, heads=(2, 1), any_order=True)
            yield from (loose, replace(loose, mode="random", seed=4, rows=2 * m + 9, dtype="bf16"))
            yield replace(
                loose, name="more heads than go abreast", heads=(abreast + 1, abreast + 1), rows=3, keys=n + 1
            )
        if hasattr(self.loaded.module, "dq_chains"):
            # Two chains of a head's blocks of keys, and with a mask queries that see the keys of one alone.
            chained = replace(base, name="sums by chains", rows=9, keys=16 * n + 7)
            yield from (chained, replace(chained, heads=(2, 1), rows=m + 3, any_order=True, mode="random", seed=5))
            yield replace(chained, rows=16 * n + m + 9, dtype="bf16")
            alone = replace(base, name="sums of blocks", rows=m + 9, keys=11 * n + 7, heads=(2, 1), own_sums=True)
            yield from (alone, replace(alone, keys=2 * n + 60, batch=2, dtype="bf16", mode="random", seed=6))
            yield replace(alone, rows=3 * n + 5, keys=3 * n + 60, any_order=True, with_dlse=True, again=True)
            yield replace(alone, rows=3 * n + m, keys=n + 9, sms=1)
        if self._mask == "window":
            yield from self._windows(replace(base, name="windows", heads=(2, 1), kind="flat"), m, n)
        # Keys beyond the last one, which score 0, would weigh infinitely much.
        yield replace(base, name="scores far below 0", kind="far below 0", keys=n + n // 2 + 3, heads=(2, 1))
        for seed in (1, 2, 3):
            yield replace(base, name="schedules", mode="random", seed=seed, heads=(2, 1), rows=2 * m + 9, keys=n + 60)
            yield replace(base, name="schedules", mode="random", seed=seed, rows=m // 2, keys=2 * n + 60, dtype="bf16")
        for rows in (m - 1, m, m + 1):
            yield replace(base, name="rows about a tile", rows=rows, keys=n, kind="flat")
        for residue in range(0, n, 8):
            # Odd ones in between, so that no power of two is hit alone.
            keys = n // 2 + residue + residue // 8 % 2
            one = replace(base, name=f"keys {keys % n} modulo {n}", rows=m + residue // 8 % 3, keys=keys, kind="flat")
            yield replace(one, mode="random", seed=residue) if residue % 32 == 24 else one
        for count in (n - 1, n, n + 1):
            yield replace(base, name="keys about a tile", rows=m + 1, keys=count, kind="flat")
            yield replace(base, name="a diagonal about a tile", rows=count, keys=count, kind="flat")

    def _windows(self, base: Gradient, m: int, n: int) -> Iterator[Gradient]:
        """One-sided and narrow ones, keys that no query sees, queries that see no key, a left limit of each residue of a block."""
        loose = self.number("ANY_ORDER_ABREAST", 0) > 0
        for window in ((0, 0), (-1, 3), (17, -1), (-1, -1), (1, 0), (0, n), (m, -1)):
            yield replace(base, rows=2 * m + 5, keys=2 * n + 9, window=window)
        yield replace(base, rows=m + 9, keys=5 * n + 7, window=(20, 0), dtype="bf16")
        yield replace(base, rows=m + 9, keys=5 * n + 7, window=(20, 5), any_order=loose, mode="random", seed=2)
        yield replace(base, rows=3 * m + n, keys=n - 7, window=(30, 40))
        if self.number("DEALT", 0):
            yield replace(base, rows=2 * m + 9, keys=4 * n + 60, window=(n + 3, 0), sms=1)
        for residue in range(0, n, 16):
            yield replace(
                base, heads=(1, 1), rows=2 * m + 3, keys=2 * n, window=(m + residue + residue // 16 % 2, residue)
            )

    def synchronises(self, problem: Gradient) -> bool:
        """Whether it is about more than lengths and scales."""
        return (
            problem.scale is None
            and " modulo " not in problem.name
            and problem.window is None
            and not problem.name.endswith("tile")
        )

    @property
    def _dims(self) -> tuple[int, int]:
        shape = self.loaded.header["workload"]
        return int(shape["head_dim_qk"]), int(shape["head_dim_v"])

    @property
    def _mask(self) -> str:
        return str(self.loaded.header["workload"]["mask"])

    @property
    def _window(self) -> tuple[int, int]:
        """What a launch is about where no window is asked for: of window kernels one that hides keys on both sides within two blocks."""
        if self._mask == "window":
            return self.number("TILE_N", 128) - 2, self.number("TILE_M", 64) // 3
        return (-1, 0) if self._mask == "causal" else (-1, -1)

    def solve(self, problem: Gradient) -> None:
        """Run it, and once more with other numbers and another scale where that is asked for."""
        scale = self._dims[0] ** -0.5 if problem.scale is None else problem.scale
        self._run(problem, scale, problem.seed)
        if problem.again:
            self._run(problem, 0.7 * scale, problem.seed + 1)

    def _run(self, problem: Gradient, scale: float, seed: int) -> None:
        dims = self._dims[0] - problem.fewer[0], self._dims[1] - problem.fewer[1]
        window = self._window if problem.window is None else problem.window
        given = _inputs(problem, dims, window, scale, seed)

        def launched(watcher: Watcher | None = None) -> dict[str, Array]:
            tensors = {name: Array(value, name) for name, value in given.items()}
            for name in _GRADIENTS:
                tensors[name] = Array(np.full_like(given[name[1:]], np.nan, subok=False), name)
            if problem.gaps:
                tensors["dq"] = Array(
                    np.full((*given["q"].shape[:3], given["q"].shape[3] + 8), np.nan, given["q"].dtype)[..., :-8], "dq"
                )
            order = ("q", "k", "v", "out", "lse", "dout", *_GRADIENTS)
            more: dict[str, Any] = {"dlse": tensors["dlse"]} if problem.with_dlse else {}
            more |= {"deterministic": False} if problem.any_order else {}
            launch = self.loaded.module.launch
            if hasattr(self.loaded.module, "dq_sums"):
                self.loaded.module.__dict__["dq_sums"] = _sums_of_blocks if problem.own_sums else _sums_of_chains
            session = self.loaded.session
            session.sums_in_order = not problem.any_order
            if session.far_launches is None:
                calls: list[Call] = [(one.label(), functools.partial(self._large, one), {}) for one in LARGE]
                session.far_launches = far_calls(session, calls)
            self.launch(
                lambda: launch(*(tensors[name] for name in order), scale, *window, **more), problem.mode, problem.seed, problem.sms,
                watcher, counted=watcher is None,
            )  # fmt: skip
            return tensors

        done = launched()
        wanted = gradients(given, scale, window, problem.with_dlse)
        ulp = _ULP[problem.dtype]
        found = {}
        for name in _GRADIENTS:
            want, by_rounding, by_floats, by_tiny = wanted[name]
            tiny = _TINY[problem.dtype]
            allowed = _ROUNDINGS * (ulp * (by_rounding + np.abs(want)) + tiny * (by_tiny + 1)) + _FLOAT * by_floats
            found[name] = compare(done[name].data, want, allowed, _NAMES, name)
            self.out_error = max(self.out_error, min(found[name].share, 1.0))
        wrong = [name for name in _GRADIENTS if found[name].text]
        if not wrong:
            return
        steps = BackwardSteps(given, *parts(given, scale, window, problem.with_dlse))
        self.source.dataflow.left_out = self.coverage.left_out(lambda: launched(steps))
        right = [name for name in _GRADIENTS if name not in wrong]
        first = found[wrong[0]]
        text = first.text + (
            f"; {' and '.join(right)} {'are' if len(right) > 1 else 'is'} right" if right else "; all three are wrong"
        )
        strides = done[wrong[0]].stride()
        element = sum(n * step for n, step in zip(first.at, strides, strict=True))
        said = steps.finish(wrong, first.at, steps.stored_last(wrong[0], element))
        host = ""
        if not problem.keys:
            host = handed_on(self.source, *WITHOUT_KEYS)
        elif not steps.departs or "it is nan" in said:
            # Of scratch memory that was never stored to, too.
            host = handed_on(
                self.source,
                "how many blocks there are, and by what they are multiplied",
                ("key_blocks", "row_blocks", "scale", "[grid]"),
            )
        elif "not with those of" in said:
            host = tensor_maps(self.source)
        error = explain(self.source, steps, text + stored_at(self.source, done[wrong[0]], first.at), [], said)
        raise WrongResultError(str(error) + (host or unstored(self.source, str(error))))

    def _large(self, problem: Large) -> None:
        """The launch of a problem that outgrows 32 bits."""
        wide, narrow = self._dims
        named = {name: vast(problem, wide, dtypes.FP16, name) for name in ("q", "k", "dq", "dk")}
        named |= {name: vast(problem, narrow, dtypes.FP16, name) for name in ("v", "out", "dout", "dv")}
        order = ("q", "k", "v", "out", "lse", "dout", *_GRADIENTS)
        given = (sums(problem, "lse") if name == "lse" else named[name] for name in order)
        self.loaded.module.launch(*given, wide**-0.5, *self._window)

    def refused(self) -> int:
        """Wrong calls."""
        problem = Gradient("", heads=(2, 1), rows=16, keys=24)
        given = _inputs(problem, self._dims, self._window, 0.1, 0)
        tensors: dict[str, Any] = {name: Array(value, name) for name, value in given.items()}
        tensors |= {name: Array(np.zeros_like(given[name[1:]]), name) for name in _GRADIENTS}
        order = ("q", "k", "v", "out", "lse", "dout", *_GRADIENTS)
        right = {
            **{name: tensors[name] for name in order},
            "scale": 0.1,
            "window_left": self._window[0],
            "window_right": self._window[1],
        }
        launch = self.loaded.module.launch

        def call(name: str, change: Callable[[Any], Any]) -> Callable[[], Any]:
            value = right.get(name)
            changed = Array(change(value.data), name) if isinstance(value, Array) else change(value)
            return lambda: launch(**{**right, name: changed})

        return must_refuse(
            self.source,
            [
                ("a q of another head_dim than k's", call("q", lambda x: x[..., :-8].copy())),
                ("a v of another length than k", call("v", lambda x: x[:, :, :-1].copy())),
                ("a dout of another shape than out", call("dout", lambda x: x[:, :, :-1].copy())),
                ("a dq of another shape than q", call("dq", lambda x: x[:, :, :-1].copy())),
                ("a dk of another length than k", call("dk", lambda x: x[:, :, :-1].copy())),
                ("a dv of other heads than v", call("dv", lambda x: np.repeat(x, 2, 1))),
                ("a float32 q", call("q", lambda x: x.astype(np.float32))),
                ("a dk of another type than k", call("dk", lambda x: x.astype(ml_dtypes.bfloat16))),
                ("an lse of another shape", call("lse", lambda x: x[:, :, :-1].copy())),
                ("a float16 lse", call("lse", lambda x: x.astype(np.float16))),
                ("a dlse of another shape", call("dlse", lambda _: Array(np.zeros((1, 2, 15), np.float32), "dlse"))),
                ("rows of k that are not 16 bytes apart", call("k", lambda x: np.pad(x, [(0, 0)] * 3 + [(0, 4)])[..., :-4])),
                ("a dout whose columns are not neighbours", call("dout", lambda x: np.repeat(x, 2, 3)[..., ::2])),
                ("three query heads on two of k", call("q", lambda x: np.repeat(x, 2, 1)[:, :3])),
                ("a window that the kernel does not have", call("window_left", functools.partial(always, -2 if self._mask == "window" else 3))),
                *((f"scale={scale:g}", call("scale", functools.partial(always, scale))) for scale in (0.0, -0.1, float("nan"), 3e38)),
            ],
        )  # fmt: skip


def _sums_of_chains(chains: int, *_: int) -> int:
    """What a kernel's host says where programs add in turn."""
    return chains


def _sums_of_blocks(chains: int, heads: int, steps: int, key_blocks: int, *_: int) -> int:
    """The same where each block of keys has a sum of its own: of up to 15, more go by several chains."""
    return key_blocks if chains == 1 and key_blocks < 16 else chains


def _inputs(
    problem: Gradient, dims: tuple[int, int], window: tuple[int, int], scale: float, seed: int
) -> dict[str, Any]:
    """What a launch is given: q, k, v, what the forward pass made of them, and the gradients of that."""
    rng, kind, (hq, hk) = np.random.default_rng(seed), _TYPES[problem.dtype], problem.heads
    shapes = {
        "q": (hq, problem.rows, dims[0]), "k": (hk, problem.keys, dims[0]), "v": (hk, problem.keys, dims[1]),
        "dout": (hq, problem.rows, dims[1]),
    }  # fmt: skip
    made = {name: rng.standard_normal((problem.batch, *shape), np.float32) for name, shape in shapes.items()}
    made["q"] *= {"flat": 0.1, "steep": 3.0}.get(problem.kind, 1.0)
    if problem.kind == "far below 0":
        made["q"], made["k"] = -4 * np.abs(made["q"]), 4 * np.abs(made["k"])
    given: dict[str, Any] = {name: value.astype(kind) for name, value in made.items()}
    if problem.gaps:
        for name in ("q", "dout"):
            given[name] = np.concatenate([given[name], np.full((*given[name].shape[:3], 8), np.nan, kind)], 3)[..., :-8]
    p, lse = _weights(given, scale, window)
    v = np.repeat(given["v"].astype(np.float64), hq // hk, 1)
    given["out"], given["lse"] = (p @ v).astype(kind), lse.astype(np.float32)
    given["dlse"] = rng.standard_normal(lse.shape).astype(np.float32)
    return given


def _weights(given: dict[str, Any], scale: float, window: tuple[int, int]) -> tuple[Any, Any]:
    """(P, logarithm of the row sums) in float64; rows without a key have zeros and -inf."""
    q, k = given["q"].astype(np.float64), given["k"].astype(np.float64)
    s = (q @ np.repeat(k, q.shape[1] // k.shape[1], 1).transpose(0, 1, 3, 2)) * scale
    s = np.where(visible(s.shape[2], s.shape[3], window), s, -np.inf)
    most = s.max(-1, keepdims=True, initial=-np.inf)
    base = np.where(np.isneginf(most), 0.0, most)
    p = np.exp(s - base)
    total = p.sum(-1, keepdims=True)
    with np.errstate(all="ignore"):
        return np.where(total > 0, p / total, 0.0), (np.log(total) + base)[..., 0]


def parts(given: dict[str, Any], scale: float, window: tuple[int, int], with_dlse: bool) -> tuple[Any, Any, Any]:
    """(P, dP, D) in float64: (batch, heads_q, queries, keys), of D one number for all keys."""
    v, out, dout = (given[name].astype(np.float64) for name in ("v", "out", "dout"))
    v = np.repeat(v, dout.shape[1] // v.shape[1], 1)
    delta = (dout * out).sum(-1, keepdims=True) - (given["dlse"].astype(np.float64)[..., None] if with_dlse else 0.0)
    return _weights(given, scale, window)[0], dout @ v.transpose(0, 1, 3, 2), delta


def gradients(
    given: dict[str, Any], scale: float, window: tuple[int, int], with_dlse: bool
) -> dict[str, tuple[Any, Any, Any, Any]]:  # fmt: skip
    """By name: (gradient in float64, what roundings of P and dS are in proportion to, what those of dP - D in float32 are, what
    those of the smallest P and dS are)."""
    q, k, v, out, dout = (given[name].astype(np.float64) for name in ("q", "k", "v", "out", "dout"))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    p, dp, delta = parts(given, scale, window, with_dlse)
    ds = p * (dp - delta)
    # dP is as exact as the sum of its products' sizes.
    floats = p * (np.abs(dout) @ np.abs(v).transpose(0, 1, 3, 2) + np.abs(dout * out).sum(-1, keepdims=True))

    def keys(x: Any) -> Any:
        """Of the query heads of a key head, their sum."""
        return x.reshape(x.shape[0], x.shape[1] // group, group, *x.shape[2:]).sum(2)

    def turned(x: Any) -> Any:
        return x.transpose(0, 1, 3, 2)

    ones = np.ones_like(p)

    def of_keys(b: Any, *weights: Any) -> Any:
        return tuple(keys(turned(a) @ one) for a, one in zip(weights, (b, *[np.abs(b)] * 3), strict=True))

    return {
        "dq": (scale * ds @ k, *(scale * a @ np.abs(k) for a in (np.abs(ds), floats, ones))),
        "dk": of_keys(q, *(scale * a for a in (ds, np.abs(ds), floats, ones))),
        "dv": of_keys(dout, p, p, p, ones),
    }
