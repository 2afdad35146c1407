"""Which rows of which tensor a tile in shared memory is, told by the copies that brought it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilecast.emulator.hardware.engines import Copy, Product, Wgmma
from tilecast.emulator.hardware.memory import Shared


@dataclass(frozen=True, slots=True)
class Tile:
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


class Tiles:
    """What the cells of shared memory hold."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], tuple[Tile, int]] = {}

    def copied(self, copy: Copy) -> Tile:
        """Note which rows the cells of a tile hold now; the tile."""
        batch, head, row = (int(n) for n in copy.corner[:3])
        desc: Any = copy.desc
        rows = int(desc.block_shape[2])
        tile = Tile(desc.memory.name, batch, head, row, rows, copy.number - copy.cta, copy.calls, int(copy.corner[3]))
        cells = copy.target.cells.reshape(rows, -1)
        for number in range(rows):
            for cell in cells[number]:
                self._cells[id(copy.program), int(cell)] = (tile, number)
        return tile

    def of(self, product: Product | Wgmma, operand: Shared) -> Tile | None:
        """The rows that an operand is made of; None where they are not of one tile."""
        cells = operand.cells.reshape(-1)
        found = [self._cells.get((id(product.program), int(cell))) for cell in cells]
        if not found or found[0] is None or any(one is None or one[0] != found[0][0] for one in found):
            return None
        tile, numbers = found[0][0], [one[1] for one in found if one is not None]
        count = max(numbers) - min(numbers) + 1
        return Tile(
            tile.tensor, tile.batch, tile.head, tile.first + min(numbers), count, tile.number, tile.calls, tile.column
        )
