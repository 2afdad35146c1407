"""Which step of a serving kernel departs first: keys of another sequence, V of other keys than K, a mask, keys left out, or what follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilecast.emulator.battery.launches import Trail
from tilecast.emulator.hardware.engines import Wgmma
from tilecast.emulator.hardware.memory import Shared
from tilecast.emulator.hardware.tensor_memory import Tmem
from tilecast.emulator.values.tensors import Tensor
from tilecast.emulator.verify import visible

#: Of a row's largest weight, what says that a key is weighed.
_WEIGHED = 2.0**-9
_LOG2E = 1.4426950408889634
#: Difference of the logarithms of weights and scores, in octaves, that rounding P explains.
_OFF = 0.1
#: Loads of what was never stored that are followed back.
_LOADS = 3

#: A chain of calls, with the argument that is followed (None: only quoted).
Place = tuple[tuple[int, ...], int | str | None]
#: A key: its sequence and number.
Key = tuple[int, int]


class ServingSteps(Trail):
    """Watches one launch; ``lengths``: (queries, keys) of each sequence, ``group``: query heads of a key head.

    ``scores``: of (sequence, query, query head) those of every key (`by_row`); ``places``: of (page or row of the cache, token in it) the key that lies there;
    ``latent``: V is part of K.
    """

    def __init__(
        self, lengths: Sequence[tuple[int, int]], group: int, window: tuple[int, int], places: Mapping[tuple[int, int], Key], scores: Any = None,
        latent: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._lengths, self._group, self._places, self._scores, self._latent = lengths, group, places, scores, latent
        self._seen = [visible(q, k, window) for q, k in lengths]
        #: Of each cell of shared memory: tensor, page, head, token, and where the copy was called for.
        self._cells: dict[tuple[int, int], tuple[str, int, int, int, tuple[int, ...]]] = {}
        #: Of each role or, by tcgen05, program, the keys of its last S (two of them), by column; weights by (sequence, key head).
        self._scored: dict[Any, list[list[Key | None]]] = {}
        self._weighed: dict[tuple[int, int], dict[int, set[Any]]] = {}
        self._p_products: dict[tuple[int, ...], None] = {}
        #: (sequence, key head) that products with V are about, and those of several tiles, whose keys are not counted.
        self._met: set[tuple[int, int]] = set()
        self._in_tiles: set[tuple[int, int]] = set()
        #: What is wrong, where a step is; whether masks are concerned.
        self.departs, self._masked = "", False

    def copied(self, copy: Any) -> None:
        """Note what the cells of a box hold now."""
        super().copied(copy)
        name = copy.desc.memory.name
        if name not in ("k", "v"):
            return
        page, head, token = (int(n) for n in copy.corner[:3])
        cells = copy.target.cells.reshape(copy.desc.block_shape[2], -1)
        for row, of_row in enumerate(cells):
            for cell in of_row:
                self._cells[id(copy.program), int(cell)] = (name, page, head, token + row, copy.calls[:3])

    def multiplied(self, product: Any, a: Any, result: Any) -> None:
        """S when Q meets K; P when something meets V."""
        super().multiplied(product, a, result)
        if self.departs:
            return
        # Of S keys are across, of V down; one column or row tells which.
        cells = product.b.by_element()
        found = [
            [self._cells.get((id(product.program), int(cell))) for cell in line] for line in (cells[0], cells[:, 0])
        ]
        if any(one is None for line in found for one in line):
            return
        across, down = ([one for one in line if one is not None] for line in found)
        scored = across[0][3] != across[-1][3] or len(down) == 1
        known = across if scored else down
        keys = [self._places.get((page, token)) for _, page, _, token, _ in known]
        # Wgmma is of its role; by tcgen05 S may be there a block ahead of P.
        place = id(product.role) if isinstance(product, Wgmma) else id(product.program)
        if scored and known[0][0] == "k":
            before = self._scored.setdefault(place, [])
            if keys not in before[-1:]:
                before[:] = [*before, keys][-1 if isinstance(product, Wgmma) else -2 :]
        elif scored:
            _, page, head, token, calls = known[0]
            self._depart(
                f"S. Q is multiplied with V (page or row {page}, head {head}, from token {token}), not with K", (product.calls[:3], None),
                (calls, 1), *((calls[i:], 0) for i in range(1, len(calls))),
            )  # fmt: skip
        elif known[0][0] == "v" or self._latent:
            of_k = self._scored.get(place, [])
            mine = next((one for one in of_k if one == keys), of_k[0] if of_k else [])
            p = a.values() if isinstance(a, Tmem) else a.a if isinstance(a, (Shared, Tensor)) else a
            self._weighted(product, np.asarray(p, np.float64), mine, keys, known, np.asarray(result))

    def _depart(self, what: str, *chains: tuple[tuple[int, ...], int | str | None], masked: bool = False) -> None:
        self.departs, self._masked = what, masked
        self.step = list(chains)

    def _weighted(
        self, product: Any, p: Any, of_k: Sequence[Key | None], keys: Sequence[Key | None], known: Sequence[Any], result: Any
    ) -> None:  # fmt: skip
        """P of one block against the mask, and V against K, whose keys are ``of_k``."""
        self._met.update((key[0], int(known[0][2])) for key in keys if key is not None)
        call = product.calls[:3]
        self._p_products[call] = None
        pairs = [(k, v) for k, v in zip(of_k, keys, strict=False) if k is not None and v is not None and k != v]
        if pairs:
            (mine, other), chain = pairs[0], known[0][4]
            self._depart(
                f"O. P of sequence {mine[0]}, key {mine[1]} is multiplied with V of sequence {other[0]}, key {other[1]}",
                (call, None),
                (chain, 1),
            )
            return
        there = [key for key in of_k if key is not None]
        if not there:
            return
        b, head, columns = there[0][0], int(known[0][2]), known[0][3]
        rows, count = self._lengths[b]
        with np.errstate(all="ignore"):
            v = np.asarray(product.b.a, np.float64)
            if np.isfinite(p).all() and not np.isfinite(v).all() and np.isnan(result).any():
                cleared = self._cleared()
                self._depart(
                    "O. P is 0 for what follows the last key, but V is not finite there, and 0 times that is NaN", (call, None),
                    *((chain[i:], "around") for chain in cleared for i in (1, 0)), *((chain, 0) for chain in cleared),
                    *((call[i:], "around") for i in range(len(call))),
                )  # fmt: skip
                return
        if not rows or rows * self._group > len(p):
            # Which of its tiles this is, is not known.
            self._in_tiles.add((b, head))
            return
        with np.errstate(all="ignore"):
            sound = np.isfinite(p).all(1)
            weighs = p > np.maximum(p.max(1, initial=0.0, keepdims=True) * _WEIGHED, 1e-30)
        numbers = np.array([key[1] if key is not None and key[0] == b else -1 for key in of_k])
        for row in range(int(rows) * self._group):
            seen = (numbers >= 0) & self._seen[b][row // self._group, np.maximum(numbers, 0)]
            if not sound[row] and seen.any() and not seen.all():
                self._depart(
                    f"P. Row {row // self._group} of sequence {b} ({rows}x{count}) is not finite: scores of what is no key of it, or that it does not see, are not hidden",
                    (call, None), masked=True,
                )  # fmt: skip
                return
            wrong = weighs[row] & ~seen & sound[row]
            if wrong.any() and seen.any():
                number = int(numbers[int(np.argmax(wrong))])
                what = "what is no key of it" if number < 0 else f"key {number}, which it does not see"
                self._depart(
                    f"P. Row {row // self._group} of sequence {b} ({rows}x{count}) weighs {what}",
                    (call, None),
                    masked=True,
                )
                return
            if self._p_off(p[row], b, row, head, numbers, seen & weighs[row]):
                self._depart(
                    f"P. Row {row // self._group} of sequence {b} ({rows}x{count}) weighs keys from {numbers[0]} otherwise than their scores say",
                    (call, 0), *((chain, 1) for chain in self.stores.get("q", {})),
                )  # fmt: skip
                return
        weighed = self._weighed.setdefault((b, head), {})
        role = id(product.role) if isinstance(product, Wgmma) else None
        for number in numbers[numbers >= 0].tolist():
            # A block of V may be multiplied in pieces.
            weighed.setdefault(number, set()).add((role, id(product.program), columns))

    def _cleared(self) -> list[tuple[int, ...]]:
        """Where rows of V are cleared: stores to it."""
        return [chain for name, chains in self.stores.items() if name.startswith("v") for chain in chains]

    def _p_off(self, p: Any, b: int, row: int, head: int, numbers: Any, compared: Any) -> bool:
        """Whether the weights of a row differ from those of its scores by more than rounding, up to a factor."""
        if self._scores is None or compared.sum() < 2:
            return False
        s = self._scores(b, row // self._group, head * self._group + row % self._group)[numbers[compared]]
        off = np.log2(p[compared]) - s * _LOG2E
        return bool(np.ptp(off) > _OFF)

    def finish(
        self, at: tuple[int, int, int], mask_chains: Sequence[tuple[int, ...]], lse_right: bool, stored: tuple[int, ...] = ()
    ) -> str:  # fmt: skip
        """The first step that departs, of wrong row ``at`` (sequence, row, head); `step_lines` then has its lines.

        ``stored``: where an element of the row was stored.
        """
        b, row, head = at
        if self.departs:
            if self._masked:
                self._about_masks(mask_chains)
            return self.departs
        place = b, head // self._group
        counted = bool(self._lengths[b][1]) and bool(self._met) and place not in self._in_tiles
        needed = set(np.flatnonzero(self._seen[b][row]).tolist()) if counted else set()
        weighed = self._weighed.get(place, {})
        missing = sorted(needed - set(weighed))
        twice = sorted(
            number
            for number, by in weighed.items()
            if len({one[1:] for one in by}) < len(by) or len({one[1] for one in by}) > 1
        )
        said = ""
        copied: list[Place] = [(chain, 1) for name in "kv" for chain in self.copies.get(name, {})]
        if missing and twice and not lse_right:
            self.step = copied
            return f"keys. Keys {twice[0]} to {twice[-1]} of sequence {b} are weighed more than once, {missing[0]} to {missing[-1]} never: blocks are copied from elsewhere"
        if missing and not weighed:
            # No program took it: which lines hand out work.
            outer: list[Place] = [
                (chain[i:], "around") for chain in list(self._p_products)[:2] for i in range(len(chain) - 1, -1, -1)
            ]
            self.step = [*outer, *copied]
            return f"items. No product with V is about sequence {b} and key head {head // self._group}: it is left out as a whole"
        if missing and not lse_right:
            said = f"keys. No product with V is about keys {missing[0]} to {missing[-1]} of sequence {b} and key head {head // self._group}: blocks are left out"
        elif twice and not lse_right:
            said = f"keys. Keys {twice[0]} to {twice[-1]} of sequence {b} are weighed twice"
        if said:
            loops = [(chain[i:], "around") for chain in list(self._p_products)[:2] for i in (1, 0, 2) if i < len(chain)]
            self.step = [*loops, *copied]
            return said
        if self.unwritten:
            loads = list(self.unwritten)[:_LOADS]
            kept = [(chain[i:], i) for i in (0, 1) for chain in self.in_global.get("partials", {})]
            self.step, self.alike = [*((chain, argument) for argument in (0, "mask") for chain in loads), *kept], True
            return "merge. Elements of partial results are loaded that were never stored"
        names = ("lse", "partials", "out") if not lse_right else ("out", "partials")
        chains = [chain for name in names for chain in self.stores.get(name, {}) if not stored or name == "partials"]
        first: list[Place] = [(stored[:4], argument) for argument in (1, 0)] if stored else []
        if not stored:
            # No program stored it: which lines decide about that.
            first = [
                (chain[i:], "around")
                for name in names[::2]
                for chain in self.stores.get(name, {})
                for i in range(len(chain) - 1, -1, -1)
            ]
        of_chains: list[Place] = [(chain, argument) for argument in (1, 0) for chain in chains]
        # What was merged may have been loaded from elsewhere.
        loads = list(self.loads)[:: -1 if lse_right else 1]
        loaded: list[Place] = [(chain, 0) for chain in loads[:_LOADS]]
        self.step = [*first[:1], *loaded, *of_chains[: len(chains)], *first[1:], *of_chains[len(chains) :]]
        if not self._met and not self._in_tiles:
            self._about_masks(mask_chains)
            self.alike = True
            return "unknown. Keys go by way of other memory, so that products are not followed: masks, sums, factors, the merge of splits, or the stores"
        return (
            "after. Keys, masks and weights of every block are right: sums, factors, the merge of splits, or the stores"
        )

    def _about_masks(self, mask_chains: Sequence[tuple[int, ...]]) -> None:
        """Follow what decides whether scores are hidden, and which."""
        chains = [tuple(chain[:4]) for chain in mask_chains][:3]
        self.step = [*((chain, "around") for chain in chains), *((chain, 0) for chain in chains), *self.step]


def by_row(sequences: Sequence[Any], scale: float, softcap: float, group: int, factors: Any = None) -> Any:
    """What gives the scores of a (sequence, query, query head) with every key, in float64."""

    def scores(b: int, query: int, head: int) -> Any:
        q, k, _ = sequences[b]
        s = (
            k[:, head // group]
            @ q[query, head]
            * scale
            * (1.0 if factors is None else float(factors[b, head // group]))
        )
        return softcap * np.tanh(s / softcap) if softcap else s

    return scores
