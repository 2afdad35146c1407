"""The battery of serving kernels: attention of a batch of sequences to packed, cached or paged keys, split over keys and merged."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from tilecast.emulator.battery.host import handed_on, taken
from tilecast.emulator.battery.large_serving import large_batches
from tilecast.emulator.battery.launches import LaunchBench, Trail, always, compare, explain, must_refuse, stored_at
from tilecast.emulator.battery.serving_batches import Batch, Tensors, make, reference
from tilecast.emulator.battery.serving_steps import ServingSteps, by_row
from tilecast.emulator.errors import WrongResultError
from tilecast.emulator.language.arrays import Array
from tilecast.emulator.session import Watcher
from tilecast.emulator.values.scalars import constexpr

_ULP = {"bf16": 2.0**-8, "fp16": 2.0**-11}
#: Error of the output that rounding explains, in units in the last place of the largest |v| a row sees; of the log-sum-exp.
_ROUNDINGS, _LSE = 2.0, 2e-5
#: (queries, keys) of each sequence.
Lengths = tuple[tuple[int, int], ...]
#: Splits so small that short sequences have many, and groups of them: numbers at the top of the file.
_SMALL = {"SPLIT": 64, "SPLIT_OF_MANY": 128, "MANY_HEADS": 2, "WHOLE": 64, "MOST_ITEMS": 40}


def _scores(base: Batch, many: Lengths, n: int) -> Iterator[Batch]:
    """What is hidden from a row, and what is done to scores before their softmax."""
    for window in ((-1, -1), (100, 0), (13, 7), (0, 0), (-1, 3), (n, n)):
        yield replace(base, name="windows", window=window, lengths=many)
    yield replace(base, name="sinks", sinks=True, lengths=(*many, (1, 0)))
    yield replace(base, name="softcap and sinks", sinks=True, softcap=2.0)
    yield replace(base, name="softcap", softcap=0.5, lengths=many, dtype="bf16")
    for slope in (8.0, -8.0):
        yield replace(base, name="scores that rise or fall", slope=slope, lengths=many)
        yield replace(base, name="scores that rise or fall", slope=slope, lengths=((1, 300), (2, 200)), sinks=True)
    # In one split, by more than a kernel may leave to the range of P.
    yield replace(base, name="scores that rise far", slope=60.0, lengths=((1, 300), (2, 200)), small=False)
    for scale in (1e-30, 2.0):
        yield replace(base, name="scale", scale=scale, lengths=((1, 300), (2, 40)))


def _scratch_and_splits(base: Batch, many: Lengths, n: int) -> Iterator[Batch]:
    """Launches in the same scratch memory, and splits as many and as long as those that ship."""
    yield replace(base, name="another launch in the same scratch", lengths=many, launches=2)
    # One query of each of several sequences: a scratch memory for fewer is too small.
    yield replace(
        base, name="scratch memory of its own", lengths=((1, 700),) * 4, packed_q=False, layout="cache", own=True
    )
    yield replace(base, name="splits as shipped", lengths=((1, 1200), (2, 1100), (1, 1024)), small=False, heads=(2, 1))
    yield replace(base, name="groups of splits", lengths=((1, 1500), (1, 17 * max(64, n))), heads=(2, 1), slope=3.0)


def _parts(base: Batch, n: int) -> Iterator[Batch]:
    """Tiles whose keys are parted among programs."""
    parts = replace(base, name="keys in parts", part_keys=n, lengths=((7, 330),), sms=4)
    # Parts of programs of their own, and, where there are few, of one after the other, but for a far longer sequence's.
    yield from (parts, replace(parts, sms=1, lengths=((70, 330), (3, 150)), heads=(4, 2)))
    some = replace(parts, sms=3, lengths=((7, 700), (9, 90), (5, 70)))
    # Where each part has a program, a launch of its own merges those of sequences with some parts and with many, and finds fewer tiles than
    # there might be.
    yield from (replace(parts, sms=1), some, replace(some, sms=80, lengths=((60, 700), (9, 90), (5, 70))))
    yield replace(parts, launches=2, lengths=((7, 330), (2, 3 * n)), heads=(2, 2), layout="packed", dtype="bf16")
    yield replace(parts, window=(n + 9, 3), sinks=True, softcap=2.0, slope=8.0)
    for seed in (1, 2):
        yield replace(parts, mode="random", seed=seed, lengths=((9, 200), (30, 450)), page=32)


def _residues(base: Batch, n: int) -> Iterator[Batch]:
    """Every number of keys, offset and left limit modulo a block."""
    for first in range(0, n, 16):
        # Every number of keys modulo a block: one sequence each, of one and of two blocks.
        counts = [(1, first + i + 1 + n * (i % 2)) for i in range(16)]
        yield replace(base, name="keys of every residue", lengths=tuple(counts), heads=(2, 1), layout="packed")
        counts = [(3, 3 + first + i) for i in range(16)]
        # With no left edge, which would have every block masked.
        yield replace(base, name="offsets of every residue", lengths=tuple(counts), heads=(1, 1), layout="cache")
        yield replace(base, name="offsets of every residue", lengths=tuple(counts), heads=(1, 1), window=(n // 2, 0),
                      layout="cache", mode="random", seed=first)  # fmt: skip
    # One query each, and the left limit in every place of a block.
    counts = [(1, n + n // 2 + i) for i in range(n)]
    yield replace(base, name="left limits of every residue", lengths=tuple(counts), heads=(1, 1), window=(n // 2, 0),
                  layout="packed")  # fmt: skip


class ServingBench(LaunchBench):
    """A serving kernel under its battery."""

    def todo(self) -> Sequence[Batch]:
        """Layouts, masks, splits, every residue of the number of keys, schedules."""
        if self.loaded.header["family"] != "hopper_mla":
            return list(self._problems())
        # Values are the first columns of the keys, which have one head.
        return [replace(one, heads=(one.heads[0], 1), latent=True) for one in self._problems()]

    def _problems(self) -> Iterator[Batch]:
        n, m = self.number("TILE_N", 64), self.number("TILE_M", 64)
        base = Batch("", ((1, 5), (1, 70), (1, n), (1, 0), (4, 33), (2, 130)))
        many = ((1, 700), (3, 450), (1, n), (1, n + 1))
        yield from self._layouts(base, many, n)
        yield from _scores(base, many, n)
        yield from self._rows_and_sequences(base, many, m)
        yield from _scratch_and_splits(base, many, n)
        if self.number("PART_KEYS", 0):
            yield from _parts(base, n)
        for seed in (1, 2, 3):
            yield replace(base, name="schedules", mode="random", seed=seed, lengths=many)
            yield replace(base, name="schedules", mode="random", seed=seed, sms=1, dtype="bf16", page=32)
        yield from _residues(base, n)

    def _layouts(self, base: Batch, many: Lengths, n: int) -> Iterator[Batch]:
        """How queries, keys and tables lie, and how many heads and columns there are."""
        yield replace(base, name="one query, one key", lengths=((1, 1),), layout="cache")
        for layout in ("packed", "cache", "paged"):
            yield replace(base, name="layouts", layout=layout, page=16)
            yield replace(base, name="layouts", layout=layout, lengths=many, dtype="bf16", page=32)
        yield replace(base, name="layouts", layout="cache in order", lengths=many)
        for page in (128, 256):
            yield replace(base, name="pages", page=page, lengths=many)
        yield replace(base, name="a table as wide as its longest sequence", page=16, lengths=((1, 3), (1, 2 * n)))
        yield replace(
            base, name="queries not packed", lengths=((4, 5), (4, 190), (4, 0)), packed_q=False, layout="cache"
        )
        if self._takes_fewer:
            for fewer in ((24, 24), (8, 40)):
                yield replace(base, name="heads of fewer columns", fewer=fewer, lengths=many, dtype="bf16")
        yield replace(base, name="without log-sum-exp", with_lse=False, lengths=((1, 1), (2, 99)))
        for heads in ((2, 2), (16, 2), (3, 1), (12, 4), (8, 8)):
            yield replace(base, name="heads", heads=heads, lengths=many[:2])

    def _rows_and_sequences(self, base: Batch, many: Lengths, m: int) -> Iterator[Batch]:
        """Rows about a tile, more sequences than a program plans at a time, lengths that the call does not tell."""
        # As many rows as a tile has, and more than one tile, which is not split.
        group = 4
        rows = m // group
        yield replace(
            base, name="rows about a tile", lengths=((rows, 200), (rows + 1, 200), (rows - 1, 90), (2 * rows + 8, 300))
        )
        yield replace(base, name="more rows than keys", lengths=((rows, 3), (9, 1), (rows + 4, 20)))
        yield replace(base, name="some rows are asked for", lengths=((1, 90), (2, 150), (9, 40)), rows=(5, 12))
        # More sequences than a program plans at a time; the last of them are split.
        few = self.number("FEW_PLANNED", 32)
        yield replace(
            base, name="many sequences", lengths=((1, 3),) * (few + 2) + ((1, 190),) * 3, heads=(1, 1), packed_q=False
        )
        yield replace(
            base, name="very many sequences", lengths=((1, 2),) * (4 * few + 1) + ((1, 90),) * 2, heads=(1, 1)
        )
        yield replace(
            base,
            name="few of many are asked for",
            lengths=((1, 3),) * (4 * few + 1) + ((2, 90),),
            heads=(1, 1),
            rows=(2, 9),
        )
        yield replace(base, name="factors of keys and values", lengths=many, heads=(4, 2), descale=True)
        yield replace(base, name="longest sequence not told", lengths=((2, 70), (2, 130)), told=False, packed_q=False)
        yield replace(base, name="longest sequence not told", lengths=((1, 200), (2, 3)), told=False, layout="packed")

    def synchronises(self, problem: Batch) -> bool:
        """Whether it is about more than lengths, windows and scales."""
        return problem.scale is None and not problem.name.endswith("residue") and problem.name != "windows"

    def solve(self, problem: Batch) -> None:
        """Run it; twice in the same scratch memory where that is asked for."""
        module, saved = self.loaded.module, {}
        small = _SMALL if problem.small else {}
        for name, value in (small | {"PART_KEYS": problem.part_keys} if problem.part_keys else small).items():
            if hasattr(module, name):
                saved[name] = getattr(module, name)
                value = max(value, self.number("TILE_N", 64)) if name == "SPLIT" else value
                setattr(module, name, constexpr(value) if hasattr(saved[name], "value") else value)
        try:
            with self.loaded.torch.makes(problem.sms) as made:
                self._run(problem, made)
        finally:
            for name, value in saved.items():
                setattr(module, name, value)

    def _run(self, problem: Batch, own: list[Array]) -> None:
        work: list[Array] = own if problem.own else []

        def launched(number: int, watcher: Watcher | None = None) -> Tensors:
            dims = self._dims_of(problem)
            made = make(problem, dims, problem.seed + 1000 * number, self._narrow)
            scale = dims[0] ** -0.5 if problem.scale is None else problem.scale
            most_q, most_k = (max(pair[i] for pair in problem.lengths) for i in (0, 1))
            batch, (hq, hk) = len(problem.lengths), problem.heads
            if not problem.told:
                # What launch takes them to be.
                whole = made.k.shape[0 if problem.layout == "packed" else 1]
                most_q = made.q.shape[0 if problem.packed_q else 1]
                most_k = whole * (made.lists["block_table"].shape[1] if problem.layout == "paged" else 1)
            if problem.own:
                work.clear()
            elif not work or watcher is not None:
                sizes = self.loaded.module.scratch(batch, hk, hq // hk, max(most_q, 1), max(most_k, 1), problem.sms)
                work[:] = [
                    Array(np.full(sizes[0], np.nan, np.float32), "partials"), Array(np.zeros(sizes[1], np.int32), "arrived"),
                ]  # fmt: skip
            session = self.loaded.session
            if session.far_launches is None:
                session.far_launches = large_batches(
                    session, self.loaded.module, self._dims, problem.latent, self._narrow
                )
            given = {} if problem.own else {"work": work, "sms": problem.sms}
            self.launch(
                lambda: self.loaded.module.launch(
                    made.q, made.k, made.v, made.out, made.lse if problem.with_lse else None, scale, sinks=made.sinks,
                    **({"max_seqlen_q": max(most_q, 1), "max_seqlen_k": max(most_k, 1)} if problem.told else {}), window=problem.window, softcap=problem.softcap,
                    rows=problem.rows, **given, **made.lists,
                ),
                problem.mode, problem.seed, problem.sms, watcher, counted=watcher is None,
            )  # fmt: skip
            return made

        for number in range(problem.launches):
            made = launched(number)
            where = self._wrong(problem, made)
            if where is not None:
                group = problem.heads[0] // problem.heads[1]
                scale = self._dims_of(problem)[0] ** -0.5 if problem.scale is None else problem.scale
                factors = made.lists["k_descale"].data if problem.descale else None
                scores = by_row(made.sequences, scale, problem.softcap, group, factors)
                steps = ServingSteps(problem.lengths, group, problem.window, made.places, scores, problem.latent)
                self.source.dataflow.left_out = self.coverage.left_out(functools.partial(launched, number, steps))
                again = "the first launch in this scratch memory was right; " if number else ""
                name, place = where.stored
                array = made.out if name == "out" else made.lse
                stored = steps.stored_last(name, sum(n * step for n, step in zip(place, array.stride(), strict=True)))
                said = steps.finish(where.at, sorted(self.loaded.session.mask_calls), where.lse_right, stored)
                # Weights that are right need no mask, cap or factor.
                late = said.startswith(("after", "merge"))
                host = handed_on(self.source, *about) if (about := _host(problem)) and not late else ""
                host += taken(self.source) if "nothing was stored there" in where.text else ""
                raise WrongResultError(str(explain(self.source, steps, again + where.text, [], said)) + host)
            counters = work[1].data
            if counters.any():
                trail = Trail()
                launched(number, trail)
                raise explain(self.source, trail, f"the launch leaves counter {int(np.flatnonzero(counters)[0])} at {int(counters.max())}: the next one "
                                 "needs 0", ["arrived"])  # fmt: skip

    @property
    def _narrow(self) -> bool:
        return str(self.loaded.header["family"]).endswith("_e4m3")

    @property
    def _dims(self) -> tuple[int, int]:
        shape = self.loaded.header["workload"]
        return int(shape["head_dim_qk"]), int(shape["head_dim_v"])

    def _dims_of(self, problem: Batch) -> tuple[int, int]:
        dim, dim_v = self._dims
        return dim - problem.fewer[0], dim_v - problem.fewer[1]

    @property
    def _takes_fewer(self) -> bool:
        """Whether heads may have fewer columns than the kernel."""
        return "eighths_v" in inspect.signature(self.loaded.module.attention.fn).parameters

    def _bent(self, problem: Batch) -> float:
        """How far scores may be off that a kernel bends by `tanh.approx`: 2^-11 of the soft cap."""
        return problem.softcap * 2.0**-11 if "tanh.approx" in self.source.text else 0.0

    def _wrong(self, problem: Batch, made: Tensors) -> _Wrong | None:
        """What is wrong with the results; None where they are right."""
        ulp, at, found = _ULP[problem.dtype], 0, None
        for number, ((rows, keys), (q, k, v)) in enumerate(zip(problem.lengths, made.sequences, strict=True)):
            if problem.descale:
                lists = (made.lists[name].data[number][None, :, None] for name in ("k_descale", "v_descale"))
                k, v = (x * factors for x, factors in zip((k, v), lists, strict=True))
            got = made.out.data[at : at + rows] if problem.packed_q else made.out.data[number]
            sums = made.lse.data[:, at : at + rows] if problem.packed_q else made.lse.data[number]
            first, at = at, at + rows
            if not problem.rows[0] <= rows * (problem.heads[0] // problem.heads[1]) <= problem.rows[1]:
                if not np.isnan(got.astype(np.float32)).all():
                    found = found or _Wrong(
                        f"rows of sequence {number} were stored, which were not asked for", (number, 0, 0), True,
                        ("out", (first, 0, 0) if problem.packed_q else (number, 0, 0, 0)),
                    )  # fmt: skip
                continue
            want, want_lse, size = reference(problem, self._dims_of(problem), q, k, v, made.sinks)
            name, bent = f"sequence {number} ({rows}x{keys})", self._bent(problem)
            allowed = (_ROUNDINGS * ulp + 2.0 * bent) * np.maximum(size, 1e-3)[..., None]
            off = compare(got, want, allowed, ("row", "head", "column"), name)
            finite = np.abs(want_lse[np.isfinite(want_lse)]).max(initial=0.0)
            lse = compare(
                sums, want_lse, _LSE + 5e-7 * finite + bent, ("head", "row"), f"lse, the log-sum-exp of {name}"
            )
            right = not problem.with_lse or not lse.text
            if off.text and found is None:
                place = (first + off.at[0], *off.at[1:]) if problem.packed_q else (number, *off.at)
                known = "" if not problem.with_lse else "; its log-sum-exp is " + ("right" if right else "wrong too")
                found = _Wrong(
                    off.text + known + stored_at(self.source, made.out, place), (number, off.at[0], off.at[1]), right,
                    # The sums say more than what is divided by them.
                    ("out", place) if right else ("lse", _of_sums(problem, number, first, off.at[1], off.at[0])),
                )  # fmt: skip
            elif not right and found is None:
                head, row = lse.at
                place = _of_sums(problem, number, first, head, row)
                at_row = stored_at(self.source, made.lse, place)
                found = _Wrong(f"{lse.text}; the output is right{at_row}", (number, row, head), False, ("lse", place))
            self.out_error = max(self.out_error, off.share if np.isfinite(off.share) else 0.0)
            self.lse_error = max(self.lse_error, lse.share if problem.with_lse and np.isfinite(lse.share) else 0.0)
        return found

    def refused(self) -> int:
        """Wrong calls."""
        problem = Batch("", ((2, 40), (2, 17)), packed_q=False, layout="cache")
        made = make(problem, self._dims, 0, self._narrow)
        launch, sizes = self.loaded.module.launch, self.loaded.module.scratch(2, 1, 4, 2, 49, 3)
        work = [Array(np.zeros(sizes[0], np.float32), "partials"), Array(np.zeros(sizes[1], np.int32), "arrived")]
        right = {"q": made.q, "k": made.k, "v": made.v, "out": made.out, "lse": made.lse, "scale": 0.1}

        def call(name: str, change: Callable[[Any], Any]) -> Callable[[], Any]:
            value = right[name]
            changed = Array(change(value.data), name) if isinstance(value, Array) else change(value)
            return lambda: launch(**{**right, name: changed}, work=work, sms=3, **made.lists)

        return must_refuse(
            self.source,
            [
                ("a q of another head_dim", call("q", lambda x: x[..., :-8].copy())),
                ("a v of another head_dim", call("v", lambda x: x[..., :-8].copy())),
                ("a float32 q", call("q", lambda x: x.astype(np.float32))),
                ("a k of another type than q", call("k", lambda x: x.astype(ml_dtypes.bfloat16))),
                ("an out of another type than q", call("out", lambda x: x.astype(np.float32))),
                ("three query heads on two of k", call("k", lambda x: np.repeat(x, 3, 2))),
                (
                    "rows of k that are not 16 bytes apart",
                    call("k", lambda x: np.pad(x, [(0, 0)] * 3 + [(0, 4)])[..., :-4]),
                ),
                ("a v whose columns are not neighbours", call("v", lambda x: np.repeat(x, 2, 3)[..., ::2])),
                (
                    "a k without heads' strides",
                    call("k", lambda x: np.broadcast_to(x[:, :, :1], (*x.shape[:2], 2, x.shape[3]))),
                ),
                *(
                    (f"scale={scale:g}", call("scale", functools.partial(always, scale)))
                    for scale in (0.0, -0.1, float("nan"), 3e38)
                ),
            ],
        )


def _host(problem: Batch) -> tuple[str, tuple[str, ...]] | None:
    """What of a problem the host hands on, and words of its lines."""
    if problem.softcap:
        return "there is a soft cap", ("softcap",)
    if problem.descale:
        return "keys and values have factors", ("scales", "descale")
    return ("there is a mask", ("window", "left, right")) if problem.window != (-1, -1) else None


def _of_sums(problem: Batch, number: int, first: int, head: int, row: int) -> tuple[int, ...]:
    """Where the log-sum-exp of a row lies; ``first``: of the sequence among packed rows."""
    return (head, first + row) if problem.packed_q else (number, head, row)


@dataclass(frozen=True, slots=True)
class _Wrong:
    """A result that is wrong: (sequence, row, head), and whether the row sums are right."""

    text: str
    at: tuple[int, int, int]
    lse_right: bool
    #: The tensor, and the element of it.
    stored: tuple[str, tuple[int, ...]]
