"""The lines that a step of attention comes from: what its operands are computed from, and what decides that it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tilecast.emulator.hardware.engines import Product, Wgmma
from tilecast.emulator.hardware.tensor_memory import Tmem
from tilecast.emulator.origins import by_turns
from tilecast.emulator.source import Source
from tilecast.emulator.tiles import Tile

#: Lines that a value is followed back to, and the coordinates of a copy.
_BEHIND, _COORDINATES = 20, 6
#: What names of row maxima, and of what is subtracted in the exponent, have in them.
_MAXIMUM = "reference base max"


class StepLines:
    """Slices of one file, S aside: it was right."""

    def __init__(self, source: Source) -> None:
        self.source = source
        #: Tensor memory of S, by the last part of its name.
        self.s_memories: set[str] = set()
        #: Where results, and what goes by way of other memory, are stored, by tensor.
        self.stores: dict[str, dict[tuple[int, ...], None]] = {}

    def copied_from(self, *tiles: Tile) -> Iterator[Sequence[int]]:
        """What the coordinates of copies are computed from."""
        yield by_turns([self.source.values(tile.calls, _COORDINATES, 1)[1:] for tile in tiles])

    def around(self, calls: Sequence[int]) -> list[int]:
        """What decides that a call is made, its callers' loops too."""
        return by_turns([self.source.values(calls[i:], _COORDINATES, "around") for i in range(len(calls[:3]))])

    def put_there(self, tile: Tile | None) -> Iterator[Sequence[int]]:
        """Where memory by way of which V comes was stored to, and what values and places come from; nothing of V itself."""
        if tile is None or tile.tensor == "v":
            return
        stores = list(self.stores.get(tile.tensor, {}))
        yield [chain[0] for chain in stores]
        for chain in stores:
            for argument in (1, 0):
                yield self.behind(chain, argument)

    def of_p(self, product: Product | Wgmma, a: Any, prefer: str = "") -> tuple[int, ...]:
        """Where P was stored, or where its product was called for; and what it is computed from, names with ``prefer`` first."""
        if not isinstance(a, Tmem):
            return (*product.calls[:2], *self.behind(product.calls, prefer=prefer))
        # The last quarter, as a rule: the others are alike.
        return self.stored_p(product.program.tmem.written_at(a.cells_of(0)), prefer)

    def of_maximum(self, product: Product | Wgmma, a: Any) -> list[int]:
        """What P is computed from, and by turns what its row maximum is."""
        return list(dict.fromkeys(by_turns([self.of_p(product, a), self.of_p(product, a, _MAXIMUM)])))

    def behind(self, chain: Sequence[int], argument: int = 0, products: bool = False, prefer: str = "") -> list[int]:
        """What an argument of a call is computed from, S aside: it was right."""
        return self.source.values(chain, _BEHIND, argument, right=self.s_memories, products=products, prefer=prefer)

    def stored_p(self, places: Sequence[int], prefer: str = "") -> tuple[int, ...]:
        """Where P was stored, the last places first, and what it is computed from."""
        each = [self.behind((place,), prefer=prefer) for place in reversed(places)]
        return (*(lines[0] for lines in each if lines), *(line for lines in each for line in lines))

    def of_o(self, product: Product | Wgmma) -> tuple[int, ...]:
        """Where the product was called for, and what is done with its accumulator before."""
        if isinstance(product, Wgmma):
            return (*product.calls[:2], *self.behind(product.calls, 2, products=True))
        stores = self.source.dataflow.stores(product.acc.name.rpartition(".")[2])
        return (*product.calls, *(line for place in stores for line in self.behind((place,))))

    def sources(self, places: Sequence[int], what: str = "around") -> tuple[int, ...]:
        """What decides about places, or about their values."""
        found: dict[int, None] = {}
        for place in places:
            found.update(dict.fromkeys(self.source.computed(place, what)))
        return tuple(found)
