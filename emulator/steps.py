"""Which step of attention departs first from float64: S, the row maximum, P, O, or what comes after them.

A `Steps` watches the copies, matrix products and stores of a launch.  It knows which rows of Q, K and V every cell of shared memory
holds, hence which queries and keys a product is about, and compares P and O of each with what they should be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilecast.emulator.departure import Departure
from tilecast.emulator.hardware.engines import Copy, Product, Wgmma
from tilecast.emulator.hardware.memory import Shared
from tilecast.emulator.hardware.tensor_memory import Tmem
from tilecast.emulator.origins import by_turns
from tilecast.emulator.rows import Rows
from tilecast.emulator.source import Source
from tilecast.emulator.step_lines import StepLines
from tilecast.emulator.tiles import Tile, Tiles
from tilecast.emulator.values.tensors import Tensor
from tilecast.emulator.verify import Verdict, scores, visible
from tilecast.emulator.weights import LARGEST_E4M3, Weights, hidden, judge_sum, judge_weights

_LOG2E = 1.4426950408889634


@dataclass
class _Accumulated:
    """What has been added up in an accumulator of O."""

    q: Tile
    keys: list[slice] = field(default_factory=list)


class Steps:
    """Watches one launch; see the module docstring."""

    def __init__(
        self, q: Any, k: Any, v: Any, scale: float, window: tuple[int, int], source: Source, coarse: bool = False,
        shuffled: bool = False,
    ) -> None:  # fmt: skip
        """``coarse``: P has 8 bits; ``shuffled``: V comes by way of other memory, its keys in an order of the kernel's own."""
        self._coarse = coarse
        self._v_rows = Rows({"v": v}) if shuffled else None
        self._s = scores(q, k, scale) * _LOG2E
        self._v = np.asarray(v).astype(np.float64)
        self._seen = visible(q.shape[2], k.shape[2], window)
        self._group = q.shape[1] // k.shape[1]
        self._lines = StepLines(source)
        self._tiles = Tiles()
        #: Last Q (and its product) of S: by bytes of tensor memory, by role.
        self._s_of: dict[Any, Tile] = {}
        #: K of its last two, as S of the next block may be there before P of this one is multiplied.
        self._k_of: dict[Any, list[Tile]] = {}
        self._o_of: dict[Any, _Accumulated] = {}
        self._weighed = np.zeros(self._s.shape, bool)
        #: Where products were called for, and results stored.
        self._products: dict[tuple[int, ...], None] = {}
        self._v_products: dict[tuple[int, ...], None] = {}
        self._p_lines: dict[int, None] = {}
        #: Where copies of Q were called for.
        self._q_copies: dict[tuple[int, ...], None] = {}
        #: First departure of a tile of queries (batch, head, first row), and which copy of Q it is about.
        self._found: dict[tuple[int, int, int], tuple[int, Departure]] = {}

    # -- what a launch tells -----------------------------------------------------------------------------------------

    def copied(self, copy: Copy) -> None:
        """Note which rows the cells of a tile hold now."""
        if self._tiles.copied(copy).tensor == "q":
            self._q_copies[copy.calls[:3]] = None

    def multiplied(self, product: Product | Wgmma, a: Any, result: Any) -> None:
        """S when Q meets K; P and O when something meets V."""
        right = self._tiles.of(product, product.b)
        if self._v_rows is not None and isinstance(product, Wgmma) and (right is None or right.tensor != "k"):
            self._unshuffled(product, np.asarray(a), right, np.asarray(result))
            return
        if right is None:
            return
        if right.tensor == "k" and isinstance(a, Shared):
            left = self._tiles.of(product, a)
            if left is not None and left.tensor == "q":
                self._scored(product, left, right)
        elif right.tensor == "v":
            self._weighted(product, a, right, np.asarray(result))

    def stored(self, name: str, calls: tuple[int, ...], at: Any = None) -> None:
        """Remember where results are stored."""
        self._lines.stores.setdefault(name, {})[calls[:3]] = None

    def loaded(self, calls: tuple[int, ...], unwritten: bool) -> None:
        """No step is about that."""

    # -- S -----------------------------------------------------------------------------------------------------------

    def _scored(self, product: Product | Wgmma, q: Tile, k: Tile) -> None:
        place = self._place(product)
        self._s_of[place] = q
        self._k_of[place] = [*self._k_of.get(place, []), k][-_ABREAST:]
        self._products[product.calls[:3]] = None
        if isinstance(product, Product):
            self._lines.s_memories.add(product.acc.name.rpartition(".")[2])
        # Rows that are done over start again.
        if self._found.get(_of(q), (q.number,))[0] != q.number:
            del self._found[_of(q)]
        if (k.batch, k.head) != (q.batch, q.head // self._group) and self._real(q):
            self._depart(
                q, "S", f"S of batch {q.batch}, head {q.head}, rows from {q.first} is a product with K of batch {k.batch}, head {k.head}, "
                f"not of batch {q.batch}, head {q.head // self._group}", product.calls[:2], k.calls, q.calls, self._lines.sources(k.calls[1:2], what="values"),
            )  # fmt: skip

    def _place(self, product: Product | Wgmma) -> Any:
        """Where S lies: columns of tensor memory, or the registers of a role."""
        if isinstance(product, Product):
            return id(product.program), product.acc.byte, product.acc.byte + 4 * product.acc.columns
        return id(product.program), id(product.role)

    def _real(self, q: Tile) -> bool:
        """Whether a tile has rows that are stored."""
        batches, heads, rows, _ = self._s.shape
        return bool(0 <= q.batch < batches and 0 <= q.head < heads and 0 <= q.first < rows)

    def _scores_of(self, product: Product | Wgmma, a: Any) -> Any:
        """Where the scores were that P was made of; None where it is not known."""
        if isinstance(product, Wgmma):
            return id(product.program), id(product.role)
        if not isinstance(a, Tmem):
            return None
        for place in self._s_of:
            if place[0] == id(product.program) and place[1] <= a.byte < place[2]:
                return place
        return None

    def _q_of(self, product: Product | Wgmma, a: Any) -> Tile | None:
        """The Q whose scores P was made of."""
        return self._s_of.get(self._scores_of(product, a))

    # -- P and O -----------------------------------------------------------------------------------------------------

    def _weighted(self, product: Product | Wgmma, a: Any, v: Tile, result: Any, by_way_of: Tile | None = None) -> None:
        q = self._q_of(product, a)
        if q is None or not self._real(q) or _of(q) in self._found:
            return
        self._products[product.calls[:3]] = self._v_products[product.calls[:3]] = None
        if (v.batch, v.head) != (q.batch, q.head // self._group):
            self._depart(
                q, "O", f"O of batch {q.batch}, head {q.head}, rows from {q.first} is a product with V of batch {v.batch}, head {v.head}, "
                f"not of batch {q.batch}, head {q.head // self._group}", product.calls[:2], v.calls, self._lines.sources(v.calls[1:2], what="values"),
                *self._lines.put_there(by_way_of),
            )  # fmt: skip
            return
        if v.first < 0:
            self._depart(
                q, "O", f"O of batch {q.batch}, head {q.head}, rows from {q.first} is a product with V of keys from {v.first}", product.calls[:2], v.calls,
                self._lines.sources(v.calls[1:2], what="values"),
            )  # fmt: skip
            return
        if v.column + result.shape[1] > self._v.shape[3]:
            self._depart(
                q, "O", f"O of batch {q.batch}, head {q.head}, rows from {q.first} is a product with columns {v.column} to "
                f"{v.column + result.shape[1] - 1} of V, which has {self._v.shape[3]}", product.calls[:2], v.calls,
                self._lines.sources(v.calls[1:2], what="values"),
            )  # fmt: skip
            return
        near = self._k_of.get(self._scores_of(product, a), [])
        together = any(
            0 <= v.first - k.first < max(k.count, v.count) and (v.first - k.first) % v.count == 0 for k in near
        )
        if near and not together and by_way_of is None:
            self._depart(
                q, "O", f"P of batch {q.batch}, head {q.head}, rows from {q.first} and keys from {near[-1].first} is multiplied with V of keys from "
                f"{v.first}", product.calls[:2], v.calls, near[-1].calls, self._lines.around(product.calls), *self._lines.copied_from(v, near[-1]),
            )  # fmt: skip
            return
        p = np.asarray(a.values() if isinstance(a, Tmem) else a.a if isinstance(a, (Shared, Tensor)) else a, np.float64)
        if isinstance(a, Tmem):
            self._p_lines.update(dict.fromkeys(product.program.tmem.written_at(a.cells_of(0))))
        else:
            self._p_lines[product.calls[1] if len(product.calls) > 1 else product.line] = None
        reference = self._check_p(product, a, p, q, v)
        if reference is None:
            return
        keys = slice(v.first, min(v.first + v.count, self._s.shape[3]))
        rows = slice(q.first, min(q.first + q.count, self._s.shape[2]))
        self._weighed[q.batch, q.head, rows, keys] = True
        place: Any = (id(product.program), product.acc.byte) if isinstance(product, Product) else self._place(product)
        state = self._o_of.get(place)
        if state is None or state.q != q or not product.use_acc or keys in state.keys:
            state = self._o_of[place] = _Accumulated(q)
        state.keys.append(keys)
        self._check_o(product, a, state, reference, result, slice(v.column, v.column + result.shape[1]))

    def _unshuffled(self, product: Wgmma, p: Any, tile: Tile | None, result: Any) -> None:
        """P and V, the keys in their order: which they are V's values tell."""
        assert self._v_rows is not None
        rows = self._v_rows.of(np.asarray(product.b.a))
        known = {one[3]: place for place, one in enumerate(rows) if one is not None}
        one = next((one for one in rows if one is not None), None)
        q = self._q_of(product, p)
        if q is None or (one is None and (tile is None or tile.column >= self._s.shape[3])):
            return
        batch, head = one[1:3] if one is not None else (q.batch, q.head // self._group)
        first, calls = min(known) if known else tile.column if tile else 0, tile.calls if tile is not None else ()
        v = Tile("v", batch, head, first, len(rows), 0, calls)
        missing = [key for key in range(first, min(first + len(rows), self._s.shape[3])) if key not in known]
        if missing and self._real(q) and _of(q) not in self._found:
            self._depart(
                q, "O", f"P of batch {q.batch}, head {q.head}, rows from {q.first} is multiplied with what is not V of key {missing[0]}", product.calls[:2], calls,
                (), *self._lines.put_there(tile),
            )  # fmt: skip
            return
        order = [known[key] for key in sorted(known)] + [place for place, row in enumerate(rows) if row is None]
        self._weighted(product, p[:, order], v, result, tile)

    def _check_p(self, product: Product | Wgmma, a: Any, p: Any, q: Tile, v: Tile) -> Any:
        """Binary logarithm of what each row's exponentials were divided by; None when P departs."""
        count, keys = min(q.count, self._s.shape[2] - q.first, p.shape[0]), min(v.count, self._s.shape[3] - v.first)
        p, rows = p[:count], slice(q.first, q.first + count)
        if keys <= 0:
            if p.any() and np.isfinite(p).all():
                self._hidden(product, a, q, v, hidden(p != 0))
            return None
        found = judge_weights(p, self._s[q.batch, q.head, rows], self._seen[rows], v.first, keys, self._coarse)
        of_row = self._row(q, found.row)
        if found.wrong == "hidden":
            self._hidden(product, a, q, v, found)
        elif found.wrong == "none":
            self._depart(
                q, "P", f"P of {of_row} is at most {found.got:.2g} for the keys from {v.first}, among which its largest score is",
                (*product.calls[:1], *self._lines.of_p(product, a)), q.calls, masks=found.got == 0,
            )  # fmt: skip
        elif found.wrong == "scale":
            self._depart(
                q, "P", f"exponents of {of_row} grow {found.got:.3g} times as its scores do: they are scaled by another number",
                self._lines.of_p(product, a, "scale"), q.calls,
            )  # fmt: skip
        elif found.wrong == "off":
            says = "0: it is hidden, but the row sees it" if found.got == 0 else f"{found.got:.4g}"
            self._depart(
                q, "P", f"P of {of_row}, key {v.first + found.key} is {says}, not {found.wanted:.4g} as the row's other keys of the block "
                "have it", self._lines.of_p(product, a), q.calls, masks=found.got == 0,
            )  # fmt: skip
        elif found.wrong == "saturated":
            said = f"P of {of_row} reaches {LARGEST_E4M3:g}, the largest number of e4m3: what it should be may be more"
            self._depart(q, "row maximum", said, self._lines.of_maximum(product, a))
        elif found.wrong == "large":
            said = f"exponentials of {of_row} reach {found.got:.3g}: the maximum that was subtracted is not that of its scores"
            self._depart(q, "row maximum", said, self._lines.of_maximum(product, a))
        return found.reference

    def _hidden(self, product: Product | Wgmma, a: Any, q: Tile, v: Tile, found: Weights) -> None:
        # A block that no row sees should not be here, or is another one.
        near = [k for k in self._k_of.get(self._scores_of(product, a), []) if k.first == v.first]
        seen = self._seen[q.first : q.first + q.count, max(v.first, 0) : v.first + v.count]
        self._depart(
            q, "P", f"{self._row(q, found.row)} does not see key {v.first + found.key}, but P weighs it ({found.rows} such rows in the block "
            f"of keys from {v.first})", [*product.calls[:2], *(self._lines.behind(product.calls)[:_SHUFFLED] if self._v_rows else ())], q.calls,
            *(self._lines.copied_from(*near) if not seen.any() else ()), masks=True,
        )  # fmt: skip

    def _check_o(
        self, product: Product | Wgmma, a: Any, state: _Accumulated, reference: Any, result: Any, columns: slice
    ) -> None:
        q, head = state.q, state.q.head // self._group
        rows = slice(q.first, q.first + len(reference))
        total, size = 0.0, 0.0
        with np.errstate(all="ignore"):
            for keys in state.keys:
                s = np.where(self._seen[rows, keys], self._s[q.batch, q.head, rows, keys], -np.inf)
                p = np.exp2(s - reference[:, None])
                total = total + p @ self._v[q.batch, head, keys, columns]
                size = size + p @ np.abs(self._v[q.batch, head, keys, columns])
        row, share = judge_sum(result, total, size, reference, self._coarse)
        if share:
            self._depart(
                q, "O", f"O of {self._row(q, row)} is off by {share:.2g} of its size after the keys from "
                f"{min(keys.start for keys in state.keys)}: what was added before is not on the scale of this P, or another O",
                by_turns([self._lines.of_o(product), self._lines.of_p(product, a, "reference")]),
            )  # fmt: skip

    # -- what is left ------------------------------------------------------------------------------------------------

    def finish(
        self, verdict: Verdict, mask_lines: Sequence[int], mask_calls: Iterable[tuple[int, ...]] = ()
    ) -> Departure | None:  # fmt: skip
        """The departure; where S, P and O of the wrong rows are right: what is missing, or comes after.

        ``mask_calls``: the chains of calls that hid scores.
        """
        if not self._products:
            return None
        wrong = {row[:2] for row in verdict.wrong_rows}
        for _, (_, departure) in sorted(self._found.items(), key=lambda one: one[0][:2] not in wrong):
            # What hides scores decides about P, too.
            masks: tuple[int, ...] = ()
            if departure.masks:
                # Where nothing was hidden: what the functions decide that called for the product.
                calls = departure.lines[1:2] if not mask_lines else ()
                hiding = sorted(mask_calls)[:_MASKS]
                behind = by_turns([self._lines.behind(chain) for chain in hiding])
                around = by_turns(
                    [self._lines.source.values(chain[1:], _AROUND_MASKS, "conditions") for chain in hiding]
                )
                masks = (
                    *by_turns([mask_lines[:_BESIDE_MASKS], behind, around, departure.lines[1:_BESIDE_MASKS]]),
                    *self._lines.sources(calls, what="function"),
                )
            lines = departure.lines[:1] if departure.masks else departure.lines
            return Departure(departure.step, departure.what, (*lines, *masks))
        for batch, head, row in verdict.wrong_rows:
            found = self._odd_row(batch, head, row)
            if found is not None:
                return found
        what = {
            (False, True): "the division or the store of the output",
            (True, False): "the row maximum, the logarithm of the sums or its store",
        }.get((verdict.out_right, verdict.lse_right), "the row sums, the division or the stores")
        # The sums, which both need, first.
        names = [name for name, right in (("lse", verdict.lse_right), ("out", verdict.out_right)) if not right]
        chains = {chain[0]: chain for name in names for chain in self._lines.stores.get(name, {})}
        # Where the output is right, the sums are: to what is stored the maximum is added.
        prefer = "max" if verdict.out_right else ""
        sums = [line for chain in chains.values() for line in self._lines.behind(chain, 1, prefer=prefer)]
        # The sums must be of this P, and on its scale.
        weights = self._lines.stored_p(tuple(self._p_lines)[-1:]) if not verdict.lse_right else ()
        # Where they are stored, and who asks for that: it may be the wrong place.
        asked = [
            chain[i] for i in (0, 1) for name in names for chain in self._lines.stores.get(name, {}) if len(chain) > i
        ]
        lines = (*asked, *by_turns([sums, weights]))
        return Departure("after", f"S, P and O of every block are right: {what} is wrong", lines)

    def _odd_row(self, batch: int, head: int, row: int) -> Departure | None:
        """Blocks of keys that no step weighed for a row, or scores that are not finite."""
        seen = self._seen[row]
        missing = np.flatnonzero(seen & ~self._weighed[batch, head, row])
        if len(missing):
            places = tuple(dict.fromkeys(place for calls in self._products for place in calls))
            if self._weighed[batch, head, row].any():
                # The products with V stand beside the one that is left out.
                first = [calls[0] for calls in self._v_products][:_PRODUCTS]
            else:
                # No role took it: which rows of Q are whose.
                first = [one for calls in self._q_copies for one in self._lines.source.values(calls, _WHOSE, 1)]
            return Departure(
                "keys", f"no product with V is about batch {batch}, head {head}, row {row} and keys {missing[0]} to {missing[-1]}, which "
                "it sees: blocks are left out", (*first, *self._lines.sources(places, what="function")[:14], *(p for c in self._q_copies for p in c[1:])),
            )  # fmt: skip
        s = self._s[batch, head, row]
        odd = np.flatnonzero(seen & (np.isnan(s) | np.isposinf(s)))
        if len(odd):
            return Departure(
                "P", f"the score of batch {batch}, head {head}, row {row}, key {odd[0]} is {s[odd[0]]}, and does not make the row NaN",
                self._lines.stored_p(tuple(self._p_lines)[-1:]),
            )  # fmt: skip
        return None

    def _row(self, q: Tile, row: int) -> str:
        return f"batch {q.batch}, head {q.head}, row {q.first + row}"

    def _depart(self, q: Tile, step: str, what: str, *calls: Sequence[int], masks: bool = False) -> None:
        places: list[int] = []
        # Where the product was called for; then, of what it read, where that was copied.
        for number, one in enumerate(calls):
            # Of copies, the place and who called for it.
            shown = one[:2] if number in (1, 2) else one[:_SHOWN]
            places += [place for place in shown if place not in places]
        self._found.setdefault(_of(q), (q.number, Departure(step, what, tuple(places), masks)))


def _of(q: Tile) -> tuple[int, int, int]:
    return q.batch, q.head, q.first


#: Places of the first thing that a departure is about.
_SHOWN = 22
#: Lines that what decides about masks is followed back to.
_AROUND_MASKS = 20
#: Blocks whose S may be there at once, of one tile of queries.
_ABREAST = 2
#: Products with V that are quoted where others are left out.
_PRODUCTS = 4
#: Lines that tell which rows of Q a role takes.
_WHOSE = 15
#: Lines that may put the keys of P into another order.
_SHUFFLED = 4
#: Chains of calls that hid scores, which are followed back.
_MASKS = 3
#: Lines about P where what hides scores is concerned.
_BESIDE_MASKS = 8
