"""Programs of warps: pieces of code one after the other, every wait, arrival and load in them given its meaning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

from tilecast.model.compiled.code import WarpInstruction
from tilecast.model.compiled.units.fetch import LINE

#: What a wait, an arrival or a load is about: (name, number), number counting blocks ("K", "V") or tiles ("Q").
Tag = tuple[str, int]
#: One step of a program: an instruction and its tag.
Step = tuple[WarpInstruction, Tag | None]


class Piece(NamedTuple):
    """Straight-line code once: tags of the instructions of a kind in order; those beyond the list carry none."""

    code: Sequence[WarpInstruction]
    #: Where the code stands, in instructions.
    begin: int
    tags: dict[str, list[Tag | None]]

    @property
    def lines(self) -> range:
        """Lines of code it is on."""
        return range(self.begin // LINE, (self.begin + len(self.code) - 1) // LINE + 1)

    def steps(self) -> Iterator[Step]:
        """Instructions with their tags."""
        taken = dict.fromkeys(self.tags, 0)
        for instruction in self.code:
            tag = None
            if instruction.kind in self.tags:
                number = taken[instruction.kind]
                taken[instruction.kind] += 1
                tag = self.tags[instruction.kind][number] if number < len(self.tags[instruction.kind]) else None
            yield instruction, tag


@dataclass(frozen=True)
class Program(Sequence[Step]):
    """Pieces as the steps they stand for, which are only written out where they are read."""

    pieces: tuple[Piece, ...]

    @cached_property
    def _steps(self) -> tuple[Step, ...]:
        return tuple(step for piece in self.pieces for step in piece.steps())

    @cached_property
    def lines(self) -> tuple[int, ...]:
        """The line of code that holds each step."""
        return tuple((p.begin + i) // LINE for p in self.pieces for i in range(len(p.code)))

    def __len__(self) -> int:
        return sum(len(piece.code) for piece in self.pieces)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | Sequence[Step]:
        return self._steps[index]

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)
