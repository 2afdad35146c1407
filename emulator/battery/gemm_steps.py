"""Which step of a matrix product departs first: what was copied, multiplied and summed up, as the battery watches it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilecast.emulator.battery.gemm_problems import Product
from tilecast.emulator.battery.launches import Trail
from tilecast.emulator.hardware.memory import Shared

#: Arguments of a call that asks for a product.
_ASKED = 5
#: Error of an accumulator of the tensor core, of the sum of absolute products.
_STEP = 1e-4


def _same(one: Any, other: Any) -> bool:
    """Whether two tiles have the same bits."""
    first, second = (np.ascontiguousarray(x).view(np.uint8) for x in (one, other))
    return one.shape == other.shape and bool((first == second).all())


@dataclass(frozen=True, slots=True)
class _Tile:
    """What a buffer of shared memory holds: rows and columns of A or B from here on."""

    tensor: str
    row: int
    column: int
    calls: tuple[int, ...]
    #: The numbers, rows of A or B down.
    values: Any = field(compare=False, hash=False)


class GemmSteps(Trail):
    """Which product or sum departs first."""

    def __init__(self, problem: Product, rows: int) -> None:
        super().__init__()
        #: Of a tile.
        self._rows = rows
        self._turned = {"a": problem.a == "columns", "b": problem.b == "columns"}
        self._cells: dict[tuple[int, int], _Tile] = {}
        self._sums: dict[Any, Any] = {}
        #: First row of A and first column of B -> first columns of A that were multiplied.
        self._multiplied: dict[tuple[int, int], set[int]] = {}
        #: What is wrong, where a step is.
        self.departs = ""

    def copied(self, copy: Any) -> None:
        """Note what the cells of a tile hold now."""
        super().copied(copy)
        name = copy.desc.memory.name
        if name not in self._turned:
            return
        first, second = (int(n) for n in copy.corner)
        row, column = (second, first) if self._turned[name] else (first, second)
        whole = np.asarray(copy.desc.tile(copy.corner))
        tile = _Tile(name, row, column, copy.calls[:3], whole.T if self._turned[name] else whole)
        for cell in copy.target.cells_of(copy.cta):
            self._cells[id(copy.program), int(cell)] = tile

    def multiplied(self, product: Any, a: Any, result: Any) -> None:
        """Whether A and B have the same part of K, and the sum is that of the operands."""
        super().multiplied(product, a, result)
        if self.departs or not isinstance(a, Shared):
            return
        left, right = (self._tile(product, one) for one in (a, product.b))
        if left is not None and right is not None and left.column != right.row:
            self.departs = f"products. Columns of A from {left.column} are multiplied with rows of B from {right.row}"
            self.step = [(product.calls[:3], None), (left.calls, 1), (right.calls, 1), (product.calls[:3], 0)]
            return
        for number, (name, tile, operand) in enumerate((("A", left, a), ("B", right, product.b))):
            if tile is not None and tile.values.size == operand.a.size and not _same(operand.a, tile.values):
                self.departs = f"products. The operand with rows of {name} from {tile.row} and columns from {tile.column} has rows for columns, or others"
                call = product.calls[:3]
                self.step = [
                    (call, None),
                    (call, number),
                    (tile.calls, 1),
                    *((product.calls[i:], "around") for i in (0, 1)),
                ]
                self.step += [(product.calls[i:3], place) for i in (1,) for place in range(_ASKED)]
                return
        accumulator = getattr(product.acc, "byte", None)
        # Where sums are in registers a role has one accumulator, or one for each piece of its rows.
        role = (id(getattr(product, "role", None)), None if left is None else left.row % self._rows)
        place = (id(product.program), accumulator if accumulator is not None else role)
        with np.errstate(all="ignore"):
            exact = np.asarray(a.a, np.float64) @ np.asarray(product.b.a, np.float64)
            size = np.abs(np.asarray(a.a, np.float64)) @ np.abs(np.asarray(product.b.a, np.float64))
            before = self._sums.get(place)
            key = None if left is None else left.column
            if before is not None and key is not None and key > 0:
                exact, size = exact + before[0], size + before[1]
            off = np.abs(np.asarray(result, np.float64) - exact) / np.maximum(size, 1e-3)
        if key is not None and float(np.nan_to_num(off, nan=np.inf).max(initial=0.0)) > _STEP:
            self.departs = f"sums. After columns of A from {key} an accumulator is not the sum of its products"
            call = product.calls[:3]
            self.step = [(call, None), (call, "use_acc"), (call, 2), (call, 0)]
            return
        if left is not None and right is not None:
            self._multiplied.setdefault((left.row, right.column), set()).add(left.column)
        self._sums[place] = (exact, size)

    def left_out(self, problem: Product, at: Sequence[int], tile: tuple[int, int]) -> str:
        """What of the products for an element is missing; empty where nothing is."""
        width = min(
            (b - a for steps in self._multiplied.values() for a, b in itertools.pairwise(sorted(steps))),
            default=problem.k,
        )
        said = ""
        near = [
            place
            for place in self._multiplied
            if place[0] <= at[0] < place[0] + tile[0] and place[1] <= at[1] < place[1] + tile[1]
        ]
        if not near:
            said = f"products. None is about row {at[0]} and column {at[1]}: a tile is left out, or its A or B copied from elsewhere"
        else:
            steps = self._multiplied[near[0]]
            missing = [k for k in range(0, problem.k, width) if k not in steps]
            if (missing and len(steps) > 1) or (missing and width >= problem.k):
                said = (
                    f"products. Columns of A from {missing[0]} are never multiplied for row {at[0]} and column {at[1]}"
                )
        if said:
            chains = [chain for name in "ab" for chain in self.copies.get(name, {})]
            self.step = [(chain, 1) for chain in chains] + [(chain, None) for chain in self.products]
        return said

    def _tile(self, product: Any, operand: Any) -> _Tile | None:
        """What an operand is made of; None where it is not of one tile."""
        found = {self._cells.get((id(product.program), int(cell))) for cell in operand.cells.reshape(-1)}
        return found.pop() if len(found) == 1 else None
