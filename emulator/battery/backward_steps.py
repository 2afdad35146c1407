"""Which step of a backward pass departs first: rows that do not belong together, P, dS, products left out, or what follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilecast.emulator.battery.launches import Trail
from tilecast.emulator.hardware.memory import Shared
from tilecast.emulator.rows import Row, Rows

#: Differences of P and dS that rounding explains: relative, and absolute.
_RELATIVE, _ABSOLUTE = 0.03, 1e-6
#: Of a row's P, what is compared, as a part of its largest; what differs by one factor (in octaves) from it.
_COUNTED, _ONE_FACTOR = 2.0**-8, 0.1
_PAIRS, _HALVES = {"q": "k", "dout": "v"}, 2


class BackwardSteps(Trail):
    """Watches one launch.

    ``given``: q, k, v, dout as the launch gets them; ``p``, ``dp``, ``delta``: (batch, heads_q, queries, keys), and of ``delta`` 1 key, in float64.
    """

    def __init__(self, given: dict[str, Any], p: Any, dp: Any, delta: Any) -> None:
        super().__init__()
        self._rows = Rows({name: given[name] for name in ("q", "k", "v", "dout")}, (64,))
        self._group = given["q"].shape[1] // given["k"].shape[1]
        self._p, self._dp, self._delta = p, dp, delta
        #: Of each role, its last two S^T (halves of a tile): by their queries, the keys.
        self._keys: dict[int, dict[tuple[Any, ...], list[Row | None]]] = {}
        #: Products for dV and dK: queries and keys that were in one.
        self._added = {name: np.zeros(p.shape, bool) for name in ("dv", "dk")}
        self._of_sums: dict[str, dict[tuple[int, ...], None]] = {"dq": {}, "dk": {}, "dv": {}}
        #: What is wrong, where a step is.
        self.departs = ""

    def multiplied(self, product: Any, a: Any, result: Any) -> None:
        """S^T and dP^T, or what P^T and dS^T add to dV and dK."""
        super().multiplied(product, a, result)
        right = np.asarray(product.b.a)
        below = self._rows.of(right)
        across = self._rows.of(right.T) if all(one is None for one in below) else []
        if any(across):
            # K and V are in shared memory or, held, in registers.
            self._scored(product, self._rows.of(np.asarray(a.a if isinstance(a, Shared) else a)), across)
        elif any(below):
            name = next(one[0] for one in below if one is not None)
            gradient = {"dout": "dv", "q": "dk", "k": "dq"}.get(name, "")
            if gradient:
                self._of_sums[gradient][product.calls[:3]] = None
            if gradient in self._added and not isinstance(a, Shared):
                self._summed(product, gradient, np.asarray(a, np.float64), below)

    def _scored(self, product: Any, left: Sequence[Row | None], right: Sequence[Row | None]) -> None:
        keys, queries = (next((one for one in rows if one is not None), None) for rows in (left, right))
        if keys is None or queries is None:
            return
        if queries[0] == "q":
            last = self._keys.setdefault(id(product.role), {})
            last.pop(_numbers(right), None)
            last[_numbers(right)] = list(left)
            if len(last) > _HALVES:
                del last[next(iter(last))]
        wanted = (_PAIRS.get(queries[0]), queries[1], queries[2] // self._group)
        if not self.departs and keys[:3] != wanted:
            self.departs = f"{'S' if queries[0] == 'q' else 'dP'}. Rows of {_said(queries)} are multiplied with {_said(keys)}, not with those of {wanted[0]}, head {wanted[2]}"
            self._from_copies(product, queries[0], keys[0])

    def _from_copies(self, product: Any, *names: str) -> None:
        """The step's lines: the product, and where its operands are copied from."""
        self.step = [(product.calls[:3], None), *((chain, 1) for name in names for chain in self.copies.get(name, {}))]

    def _summed(self, product: Any, gradient: str, a: Any, queries: Sequence[Row | None]) -> None:
        """P^T (for dV) or dS^T (for dK), keys down and queries across."""
        of_role = self._keys.get(id(product.role), {})
        keys = of_role.get(_numbers(queries))
        if self.departs:
            return
        if keys is None or len(keys) != len(a):
            if of_role and any(queries):
                self.departs = f"{gradient}. {'P' if gradient == 'dv' else 'dS'} is multiplied with {_said(next(one for one in queries if one))}, of which the role has no scores"
                self._from_copies(product, "q", "dout")
            return
        first = next((one for one in queries if one is not None), None)
        if first is None:
            return
        _, batch, head, _ = first
        across = [number for number, one in enumerate(queries) if one is not None]
        down = [number for number, one in enumerate(keys) if one is not None]
        beyond = [number for number, one in enumerate(keys) if one is None]
        numbers: Any = [one[3] for one in queries if one is not None]
        their: Any = [one[3] for one in keys if one is not None]
        places = np.ix_(numbers, their)
        got = a[np.ix_(down, across)].T
        letter = "P" if gradient == "dv" else "dS"
        if not np.isfinite(a[beyond]).all():
            self._depart(
                product,
                f"{letter}. Of keys past the last one it is not finite, and their rows of K are 0: the sum is NaN",
            )
            return
        p = self._p[batch, head][places]
        if gradient == "dv":
            want = size = p
        else:
            difference = self._dp[batch, head][places] - self._delta[batch, head][numbers]
            want = p * difference
            size = p * (np.abs(self._dp[batch, head][places]) + np.abs(difference))
        with np.errstate(all="ignore"):
            wrong = ~(np.abs(got - want) <= _RELATIVE * size + _ABSOLUTE * (1 + np.abs(size).max(initial=0.0)))
        if wrong.any():
            row, key = (int(n) for n in np.argwhere(wrong)[0])
            where = f"head {head}, query {numbers[row]}, key {their[key]}"
            text = f"{letter}. Of batch {batch}, {where} it is {got[row, key]:.4g}, not {want[row, key]:.4g}"
            self._depart(
                product,
                text + self._how(letter, got[row], want[row], p[row]),
                terms=letter == "dS" or "factor" in self._how(letter, got[row], want[row], p[row]),
            )
            return
        self._added[gradient][batch, head][places] = True

    def _depart(self, product: Any, what: str, terms: bool = False) -> None:
        self.departs = what
        call = product.calls[:3]
        self.step = [(call, 0), (call[1:], "around"), (call[2:], "around")]
        if terms:
            # What each query brings along, its log-sum-exp and D, was stored before: through memory that no other tensor names.
            # D is stored after the log-sum-exp.
            stored = [
                (chain, 1)
                for name in sorted(self.in_global, reverse=True)
                for chain in reversed(self.in_global[name])
                if name not in ("dq", "dk", "dv") and len(chain) == 1
            ]
            self.alike = True
            self.step = (
                [(call, None), *stored, *self.step]
                if what.startswith("dS")
                else [*self.step[:1], *stored, *self.step[1:]]
            )

    def _how(self, letter: str, got: Any, want: Any, p: Any) -> str:
        """In which way a query's numbers are wrong, as text to append."""
        if letter == "dS":
            with np.errstate(all="ignore"):
                off = ((got - want) / p)[p > _COUNTED * p.max(initial=0.0)]
            same = len(off) > 1 and np.ptp(off) <= _ONE_FACTOR * max(float(np.abs(off).max()), 1e-30)
            return (
                ", off by one number times P for all keys of the query: D, or what is subtracted for it" if same else ""
            )
        hidden = bool((got[want == 0] != 0).any())
        if hidden:
            return ": the query does not see the key, and weighs it"
        if (got[want > _COUNTED * want.max(initial=0.0)] == 0).any():
            return ": the query sees the key, and it is hidden"
        with np.errstate(all="ignore"):
            off = np.log2(got / want)[want > _COUNTED * want.max(initial=0.0)]
        if len(off) and np.ptp(off) < _ONE_FACTOR:
            return ", off by one factor for all keys of the query: its log-sum-exp, or where that is read"
        return ", which its other keys do not explain: the scores or their scale"

    def finish(self, wrong: Sequence[str], at: Sequence[int], last: tuple[int, ...] = ()) -> str:
        """The first step that departs; ``wrong``: gradients that are; ``at``: an element of the first one, ``last``: where it was stored."""
        if self.departs:
            return self.departs
        for name in wrong:
            missing = self._missing(name, at) if name in self._added and name == wrong[0] else ""
            if missing:
                self.step = [(chain[i:], "around") for chain in self._of_sums[name] for i in (1, 2) if len(chain) > i]
                self.step += [(chain, 1) for tensor in ("k", "q") for chain in self.copies.get(tensor, {})]
                return missing
        name = wrong[0]
        inner = {"dq": [one for one in self.stores if one not in ("dq", "dk", "dv", "v")]}.get(name, [])
        # A sum in global memory that a program writes and others add to: who decides which.
        asked = [(chain[i:], "around") for one in inner for chain in self.stores[one] for i in (1, 0) if len(chain) > i]
        stored = [(chain, argument) for chain in self.stores.get(name, {}) for argument in (1, 0, 2)]
        stored = [*((last[:4], argument) for argument in (1, 0) if last), *stored]
        self.step = [
            *stored[:2],
            *asked[:4],
            *stored[2:],
            *((chain, argument) for chain in self._of_sums[name] for argument in (0, 1)),
        ]
        return f"after. P and dS are right: the sums of {', '.join(wrong)}, their scale, or where they are stored"

    def _missing(self, name: str, at: Sequence[int]) -> str:
        """Queries that add nothing to an element of dK or dV; empty where none are missing."""
        batch, head, key = at[:3]
        heads = slice(head * self._group, (head + 1) * self._group)
        left_out = np.argwhere((self._p[batch, heads, :, key] > 0) & ~self._added[name][batch, heads, :, key])
        if not len(left_out):
            return ""
        return f"products. None for {name} is about key {key} and query {left_out[0][1]} of head {head * self._group + left_out[0][0]}: blocks are left out"


def _numbers(rows: Sequence[Row | None]) -> tuple[Any, ...]:
    """What says which queries rows of Q or dO are of."""
    return tuple(None if one is None else one[1:] for one in rows)


def _said(row: Row) -> str:
    return f"{row[0]}, batch {row[1]}, head {row[2]}, from row {row[3]}"
