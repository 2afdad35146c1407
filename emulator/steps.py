"""Which step of attention departs first from float64: S, the row maximum, P, O, or what comes after them.

A `Steps` watches the copies, matrix products and stores of a launch.  It knows which rows of Q, K and V every cell of shared memory
holds, hence which queries and keys a product is about, and compares P and O of each with what they should be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
from tilecast.emulator.values.tensors import Tensor
from tilecast.emulator.verify import Verdict, scaled_by, scores, visible

_LOG2E = 1.4426950408889634
#: Relative error that rounding P to bf16, or a polynomial, explains; and of O against what is added up in it.
_P_TOLERANCE, _O_TOLERANCE = 0.02, 0.03
_LARGEST_E4M3 = 448.0
#: Of e4m3, numbers below this are too coarse to be compared.
_LEAST_E4M3 = 2.0**-4
#: Weights that rounding makes inexact: those below this part of the largest are not compared.
_SMALL = 2.0**-9
#: What names of row maxima, and of what is subtracted in the exponent, have in them.
_MAXIMUM = "reference base max"
#: Exponentials beyond these mean that the row maximum is not the one of the scores.
_HIGHEST = 2.0**14


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows of one tensor, as shared memory holds them: (tensor, batch, head, first row, how many), from a column on."""

    tensor: str
    batch: int
    head: int
    first: int
    count: int
    #: The copy that brought it.
    number: int
    calls: tuple[int, ...]
    column: int = 0


@dataclass
class _Accumulated:
    """What has been added up in an accumulator of O."""

    q: _Tile
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
        self._source = source
        self._cells: dict[tuple[int, int], tuple[_Tile, int]] = {}
        #: Last Q (and its product) of S: by bytes of tensor memory, by role.
        self._s_of: dict[Any, _Tile] = {}
        #: K of its last two, as S of the next block may be there before P of this one is multiplied.
        self._k_of: dict[Any, list[_Tile]] = {}
        self._o_of: dict[Any, _Accumulated] = {}
        #: Tensor memory of S, by the last part of its name.
        self._s_memories: set[str] = set()
        self._weighed = np.zeros(self._s.shape, bool)
        #: Where products were called for, and results stored.
        self._products: dict[tuple[int, ...], None] = {}
        self._v_products: dict[tuple[int, ...], None] = {}
        self._p_lines: dict[int, None] = {}
        #: Where copies of Q were called for.
        self._q_copies: dict[tuple[int, ...], None] = {}
        self._stores: dict[str, dict[tuple[int, ...], None]] = {}
        #: First departure of a tile of queries (batch, head, first row), and which copy of Q it is about.
        self._found: dict[tuple[int, int, int], tuple[int, Departure]] = {}

    # -- what a launch tells -----------------------------------------------------------------------------------------

    def copied(self, copy: Copy) -> None:
        """Note which rows the cells of a tile hold now."""
        batch, head, row = (int(n) for n in copy.corner[:3])
        desc: Any = copy.desc
        rows = int(desc.block_shape[2])
        tile = _Tile(desc.memory.name, batch, head, row, rows, copy.number - copy.cta, copy.calls, int(copy.corner[3]))
        if tile.tensor == "q":
            self._q_copies[copy.calls[:3]] = None
        cells = copy.target.cells.reshape(rows, -1)
        for number in range(rows):
            for cell in cells[number]:
                self._cells[id(copy.program), int(cell)] = (tile, number)

    def multiplied(self, product: Product | Wgmma, a: Any, result: Any) -> None:
        """S when Q meets K; P and O when something meets V."""
        right = self._tile(product, product.b)
        if self._v_rows is not None and isinstance(product, Wgmma) and (right is None or right.tensor != "k"):
            self._unshuffled(product, np.asarray(a), right, np.asarray(result))
            return
        if right is None:
            return
        if right.tensor == "k" and isinstance(a, Shared):
            left = self._tile(product, a)
            if left is not None and left.tensor == "q":
                self._scored(product, left, right)
        elif right.tensor == "v":
            self._weighted(product, a, right, np.asarray(result))

    def stored(self, name: str, calls: tuple[int, ...], at: Any = None) -> None:
        """Remember where results are stored."""
        self._stores.setdefault(name, {})[calls[:3]] = None

    def loaded(self, calls: tuple[int, ...], unwritten: bool) -> None:
        """No step is about that."""

    def _tile(self, product: Product | Wgmma, operand: Shared) -> _Tile | None:
        """The rows that an operand is made of; None where they are not of one tile."""
        cells = operand.cells.reshape(-1)
        found = [self._cells.get((id(product.program), int(cell))) for cell in cells]
        if not found or found[0] is None or any(one is None or one[0] != found[0][0] for one in found):
            return None
        tile, numbers = found[0][0], [one[1] for one in found if one is not None]
        count = max(numbers) - min(numbers) + 1
        return _Tile(
            tile.tensor, tile.batch, tile.head, tile.first + min(numbers), count, tile.number, tile.calls, tile.column
        )

    # -- S -----------------------------------------------------------------------------------------------------------

    def _scored(self, product: Product | Wgmma, q: _Tile, k: _Tile) -> None:
        place = self._place(product)
        self._s_of[place] = q
        self._k_of[place] = [*self._k_of.get(place, []), k][-_ABREAST:]
        self._products[product.calls[:3]] = None
        if isinstance(product, Product):
            self._s_memories.add(product.acc.name.rpartition(".")[2])
        # Rows that are done over start again.
        if self._found.get(_of(q), (q.number,))[0] != q.number:
            del self._found[_of(q)]
        if (k.batch, k.head) != (q.batch, q.head // self._group) and self._real(q):
            self._depart(
                q, "S", f"S of batch {q.batch}, head {q.head}, rows from {q.first} is a product with K of batch {k.batch}, head {k.head}, "
                f"not of batch {q.batch}, head {q.head // self._group}", product.calls[:2], k.calls, q.calls, self._sources(k.calls[1:2], what="values"),
            )  # fmt: skip

    def _place(self, product: Product | Wgmma) -> Any:
        """Where S lies: columns of tensor memory, or the registers of a role."""
        if isinstance(product, Product):
            return id(product.program), product.acc.byte, product.acc.byte + 4 * product.acc.columns
        return id(product.program), id(product.role)

    def _copied_from(self, *tiles: _Tile) -> Iterator[Sequence[int]]:
        """What the coordinates of copies are computed from."""
        yield by_turns([self._source.values(tile.calls, _COORDINATES, 1)[1:] for tile in tiles])

    def _around(self, calls: Sequence[int]) -> list[int]:
        """What decides that a call is made, its callers' loops too."""
        return by_turns([self._source.values(calls[i:], _COORDINATES, "around") for i in range(len(calls[:3]))])

    def _real(self, q: _Tile) -> bool:
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

    def _q_of(self, product: Product | Wgmma, a: Any) -> _Tile | None:
        """The Q whose scores P was made of."""
        return self._s_of.get(self._scores_of(product, a))

    # -- P and O -----------------------------------------------------------------------------------------------------

    def _weighted(
        self, product: Product | Wgmma, a: Any, v: _Tile, result: Any, by_way_of: _Tile | None = None
    ) -> None:
        q = self._q_of(product, a)
        if q is None or not self._real(q) or _of(q) in self._found:
            return
        self._products[product.calls[:3]] = self._v_products[product.calls[:3]] = None
        if (v.batch, v.head) != (q.batch, q.head // self._group):
            self._depart(
                q, "O", f"O of batch {q.batch}, head {q.head}, rows from {q.first} is a product with V of batch {v.batch}, head {v.head}, "
                f"not of batch {q.batch}, head {q.head // self._group}", product.calls[:2], v.calls, self._sources(v.calls[1:2], what="values"),
                *self._put_there(by_way_of),
            )  # fmt: skip
            return
        if v.first < 0:
            self._depart(
                q, "O", f"O of batch {q.batch}, head {q.head}, rows from {q.first} is a product with V of keys from {v.first}", product.calls[:2], v.calls,
                self._sources(v.calls[1:2], what="values"),
            )  # fmt: skip
            return
        if v.column + result.shape[1] > self._v.shape[3]:
            self._depart(
                q, "O", f"O of batch {q.batch}, head {q.head}, rows from {q.first} is a product with columns {v.column} to "
                f"{v.column + result.shape[1] - 1} of V, which has {self._v.shape[3]}", product.calls[:2], v.calls,
                self._sources(v.calls[1:2], what="values"),
            )  # fmt: skip
            return
        near = self._k_of.get(self._scores_of(product, a), [])
        together = any(
            0 <= v.first - k.first < max(k.count, v.count) and (v.first - k.first) % v.count == 0 for k in near
        )
        if near and not together and by_way_of is None:
            self._depart(
                q, "O", f"P of batch {q.batch}, head {q.head}, rows from {q.first} and keys from {near[-1].first} is multiplied with V of keys from "
                f"{v.first}", product.calls[:2], v.calls, near[-1].calls, self._around(product.calls), *self._copied_from(v, near[-1]),
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

    def _unshuffled(self, product: Wgmma, p: Any, tile: _Tile | None, result: Any) -> None:
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
        v = _Tile("v", batch, head, first, len(rows), 0, calls)
        missing = [key for key in range(first, min(first + len(rows), self._s.shape[3])) if key not in known]
        if missing and self._real(q) and _of(q) not in self._found:
            self._depart(
                q, "O", f"P of batch {q.batch}, head {q.head}, rows from {q.first} is multiplied with what is not V of key {missing[0]}", product.calls[:2], calls,
                (), *self._put_there(tile),
            )  # fmt: skip
            return
        order = [known[key] for key in sorted(known)] + [place for place, row in enumerate(rows) if row is None]
        self._weighted(product, p[:, order], v, result, tile)

    def _put_there(self, tile: _Tile | None) -> Iterator[Sequence[int]]:
        """Where memory by way of which V comes was stored to, and what values and places come from; nothing of V itself."""
        if tile is None or tile.tensor == "v":
            return
        stores = list(self._stores.get(tile.tensor, {}))
        yield [chain[0] for chain in stores]
        for chain in stores:
            for argument in (1, 0):
                yield self._behind(chain, argument)

    def _of_p(self, product: Product | Wgmma, a: Any, prefer: str = "") -> tuple[int, ...]:
        """Where P was stored, or where its product was called for; and what it is computed from, names with ``prefer`` first."""
        if not isinstance(a, Tmem):
            return (*product.calls[:2], *self._behind(product.calls, prefer=prefer))
        # The last quarter, as a rule: the others are alike.
        return self._stored_p(product.program.tmem.written_at(a.cells_of(0)), prefer)

    def _of_maximum(self, product: Product | Wgmma, a: Any) -> list[int]:
        """What P is computed from, and by turns what its row maximum is."""
        return list(dict.fromkeys(by_turns([self._of_p(product, a), self._of_p(product, a, _MAXIMUM)])))

    def _behind(self, chain: Sequence[int], argument: int = 0, products: bool = False, prefer: str = "") -> list[int]:
        """What an argument of a call is computed from, S aside: it was right."""
        return self._source.values(chain, _BEHIND, argument, right=self._s_memories, products=products, prefer=prefer)

    def _stored_p(self, places: Sequence[int], prefer: str = "") -> tuple[int, ...]:
        """Where P was stored, the last places first, and what it is computed from."""
        each = [self._behind((place,), prefer=prefer) for place in reversed(places)]
        return (*(lines[0] for lines in each if lines), *(line for lines in each for line in lines))

    def _check_p(self, product: Product | Wgmma, a: Any, p: Any, q: _Tile, v: _Tile) -> Any:
        """Binary logarithm of what each row's exponentials were divided by; None when P departs."""
        count, keys = min(q.count, self._s.shape[2] - q.first, p.shape[0]), min(v.count, self._s.shape[3] - v.first)
        if keys <= 0:
            if p[:count].any() and np.isfinite(p).all():
                self._hidden(product, a, q, v, p[:count] != 0)
            return None
        s = self._s[q.batch, q.head, q.first : q.first + count, v.first : v.first + keys]
        seen = self._seen[q.first : q.first + count, v.first : v.first + keys]
        wide = np.zeros((count, p.shape[1]), bool)
        wide[:, :keys] = seen
        p = p[:count]
        # Rows with a score that is not finite become NaN, which no step compares.
        sound = np.isfinite(np.where(seen, s, 0)).all(1) & np.isfinite(p).all(1)
        if ((p != 0) & ~wide & sound[:, None]).any():
            self._hidden(product, a, q, v, (p != 0) & ~wide & sound[:, None])
            return None
        with np.errstate(all="ignore"):
            p, large = p[:, :keys], np.where(seen, p[:, :keys], 0)
            largest = large.max(1, initial=0.0)
            least = _LEAST_E4M3 if self._coarse else 2.0**-12
            counted = (large > _SMALL * largest[:, None]) & (large > least) & sound[:, None]
            logarithm = np.where(counted, s - np.log2(np.where(counted, p, 1)), np.nan)
            reference = np.array(
                [np.median(row[~np.isnan(row)]) if (~np.isnan(row)).any() else np.nan for row in logarithm]
            )
            wanted = np.exp2(np.where(seen, s, -np.inf) - reference[:, None])
            off = np.where(np.isnan(reference)[:, None], 0, np.abs(p - wanted) / np.maximum(wanted, max(_SMALL, least)))
            off = np.where((wanted > _SMALL * largest[:, None]) | (p > _SMALL), off, 0)
        # Where a row's largest score of all is, there is a weight, whatever is subtracted.
        every = np.where(
            self._seen[q.first : q.first + count], self._s[q.batch, q.head, q.first : q.first + count], -np.inf
        )
        best = (
            sound & np.isfinite(every.max(1)) & (np.where(seen, s, -np.inf).max(1) == every.max(1)) & (largest < least)
        )
        if best.any():
            row = int(best.argmax())
            self._depart(
                q, "P", f"P of {self._row(q, row)} is at most {largest[row]:.2g} for the keys from {v.first}, among which its largest "
                "score is", (*product.calls[:1], *self._of_p(product, a)), q.calls,
            )  # fmt: skip
            return None
        saturated = self._coarse and float(large.max(initial=0)) >= _LARGEST_E4M3
        if not saturated and float(np.nan_to_num(off).max(initial=0)) > (6 if self._coarse else 3) * _P_TOLERANCE:
            row, key = (int(n) for n in np.unravel_index(int(np.nan_to_num(off).argmax()), off.shape))
            times = scaled_by(logarithm[row], s[row])
            if times is not None:
                self._depart(
                    q, "P", f"exponents of {self._row(q, row)} grow {times:.3g} times as its scores do: they are scaled by another number",
                    self._of_p(product, a, "scale"), q.calls,
                )  # fmt: skip
                return None
            says = "0: it is hidden, but the row sees it" if p[row, key] == 0 else f"{p[row, key]:.4g}"
            self._depart(
                q, "P", f"P of {self._row(q, row)}, key {v.first + key} is {says}, not {wanted[row, key]:.4g} as the row's other keys "
                "of the block have it", self._of_p(product, a), q.calls, masks=bool(p[row, key] == 0),
            )  # fmt: skip
            return None
        if saturated:
            row = int(large.max(1).argmax())
            self._depart(q, "row maximum", f"P of {self._row(q, row)} reaches {_LARGEST_E4M3:g}, the largest number of e4m3: what it should be may be more",
                         self._of_maximum(product, a))  # fmt: skip
            return None
        if float(large.max(initial=0)) > _HIGHEST:
            row = int(large.max(1).argmax())
            self._depart(q, "row maximum", f"exponentials of {self._row(q, row)} reach {large[row].max():.3g}: the maximum that was "
                         "subtracted is not that of its scores", self._of_maximum(product, a))  # fmt: skip
            return None
        return reference

    def _hidden(self, product: Product | Wgmma, a: Any, q: _Tile, v: _Tile, wrong: Any) -> None:
        row, key = (int(n) for n in np.argwhere(wrong)[0])
        # A block that no row sees should not be here, or is another one.
        near = [k for k in self._k_of.get(self._scores_of(product, a), []) if k.first == v.first]
        seen = self._seen[q.first : q.first + q.count, max(v.first, 0) : v.first + v.count]
        self._depart(
            q, "P", f"{self._row(q, row)} does not see key {v.first + key}, but P weighs it ({int(wrong.any(1).sum())} such rows in the block "
            f"of keys from {v.first})", [*product.calls[:2], *(self._behind(product.calls)[:_SHUFFLED] if self._v_rows else ())], q.calls,
            *(self._copied_from(*near) if not seen.any() else ()), masks=True,
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
            off = np.abs(np.asarray(result, np.float64)[: len(reference)] - total)
            sound = ~np.isnan(reference)[:, None] & np.isfinite(total)
            share = np.where(sound & (off > 1e-3), off / np.maximum(size, 1e-2), 0)
        if float(np.nan_to_num(share).max(initial=0)) > (9 if self._coarse else 3) * _O_TOLERANCE:
            row = int(np.nan_to_num(share).max(1).argmax())
            self._depart(
                q, "O", f"O of {self._row(q, row)} is off by {float(share[row].max()):.2g} of its size after the keys from "
                f"{min(keys.start for keys in state.keys)}: what was added before is not on the scale of this P, or another O",
                by_turns([self._of_o(product), self._of_p(product, a, "reference")]),
            )  # fmt: skip

    def _of_o(self, product: Product | Wgmma) -> tuple[int, ...]:
        """Where the product was called for, and what is done with its accumulator before."""
        if isinstance(product, Wgmma):
            return (*product.calls[:2], *self._behind(product.calls, 2, products=True))
        stores = self._source.dataflow.stores(product.acc.name.rpartition(".")[2])
        return (*product.calls, *(line for place in stores for line in self._behind((place,))))

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
                behind = by_turns([self._behind(chain) for chain in hiding])
                around = by_turns([self._source.values(chain[1:], _BEHIND, "conditions") for chain in hiding])
                masks = (
                    *by_turns([mask_lines[:_BESIDE_MASKS], behind, around, departure.lines[1:_BESIDE_MASKS]]),
                    *self._sources(calls, what="function"),
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
        chains = {chain[0]: chain for name in names for chain in self._stores.get(name, {})}
        # Where the output is right, the sums are: to what is stored the maximum is added.
        prefer = "max" if verdict.out_right else ""
        sums = [line for chain in chains.values() for line in self._behind(chain, 1, prefer=prefer)]
        # The sums must be of this P, and on its scale.
        weights = self._stored_p(tuple(self._p_lines)[-1:]) if not verdict.lse_right else ()
        # Where they are stored, and who asks for that: it may be the wrong place.
        asked = [chain[i] for i in (0, 1) for name in names for chain in self._stores.get(name, {}) if len(chain) > i]
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
                first = [one for calls in self._q_copies for one in self._source.values(calls, _WHOSE, 1)]
            return Departure(
                "keys", f"no product with V is about batch {batch}, head {head}, row {row} and keys {missing[0]} to {missing[-1]}, which "
                "it sees: blocks are left out", (*first, *self._sources(places, what="function")[:14], *(p for c in self._q_copies for p in c[1:])),
            )  # fmt: skip
        s = self._s[batch, head, row]
        odd = np.flatnonzero(seen & (np.isnan(s) | np.isposinf(s)))
        if len(odd):
            return Departure(
                "P", f"the score of batch {batch}, head {head}, row {row}, key {odd[0]} is {s[odd[0]]}, and does not make the row NaN",
                self._stored_p(tuple(self._p_lines)[-1:]),
            )  # fmt: skip
        return None

    def _row(self, q: _Tile, row: int) -> str:
        return f"batch {q.batch}, head {q.head}, row {q.first + row}"

    def _depart(self, q: _Tile, step: str, what: str, *calls: Sequence[int], masks: bool = False) -> None:
        places: list[int] = []
        # Where the product was called for; then, of what it read, where that was copied.
        for number, one in enumerate(calls):
            # Of copies, the place and who called for it.
            shown = one[:2] if number in (1, 2) else one[:_SHOWN]
            places += [place for place in shown if place not in places]
        self._found.setdefault(_of(q), (q.number, Departure(step, what, tuple(places), masks)))

    def _sources(self, places: Sequence[int], what: str = "around") -> tuple[int, ...]:
        """What decides about places, or about their values."""
        found: dict[int, None] = {}
        for place in places:
            found.update(dict.fromkeys(self._source.computed(place, what)))
        return tuple(found)


def _of(q: _Tile) -> tuple[int, int, int]:
    return q.batch, q.head, q.first


#: Places of the first thing that a departure is about.
_SHOWN = 22
#: Lines that a value is followed back to, and the coordinates of a copy.
_BEHIND, _COORDINATES = 20, 6
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
