"""Cluster launch control: a program takes over one that has not started (nvidia.blackwell.clc)."""

from __future__ import annotations

import numpy as np

from tilecast.emulator.errors import LayoutError
from tilecast.emulator.hardware.barriers import Barrier, Instance
from tilecast.emulator.hardware.clocks import COPY, MATRIX_ENGINE
from tilecast.emulator.hardware.engines import InFlight
from tilecast.emulator.hardware.memory import Shared
from tilecast.emulator.hardware.program import Program
from tilecast.emulator.hardware.shadow import Access
from tilecast.emulator.values.scalars import Int, undefined

#: Bytes of an answer; how often, at random moments, the hardware has started the next program itself.
_BYTES, _LATE = 16, 0.2


class Request(InFlight):
    """A request of a program, whose answer lands in shared memory of each CTA and counts bytes at its barrier."""

    def __init__(self, program: Program, result: Shared, bar: Barrier) -> None:
        role = program.role()
        self._program, self._result, self._bar, self._line = program, result, bar, program.line()
        self._actor = f"the request that {role.name} issues"
        self._known, self._fenced = role.agents[0].release(), role.fenced_by_compiler(0)
        self._numbers = [program.next_copy() for _ in range(program.ctas)]
        for cta, number in enumerate(self._numbers):
            bar.of_cta(cta).require(self._known, 0, self._line)
            program.issued_copies[cta][number] = (self._line, int(result.cells_of(cta)[0]))

    def wakes(self) -> list[Instance]:
        """The barrier in each CTA."""
        return self._bar.instances

    def take_effect(self) -> None:
        """Take the next program that has not started, if there is one, and write its number."""
        program = self._program
        session = program.session
        waiting = [n for n in session.pending if n > session.started and n not in session.cancelled]
        taken = 0
        if waiting and (program.late or program.random.random() >= _LATE):
            session.cancelled.add(waiting[0])
            taken = waiting[0] + 1
        for cta, number in enumerate(self._numbers):
            access = Access(COPY + number, MATRIX_ENGINE, self._known, self._line, self._actor, True, self._fenced)
            program.smem.write(self._result.cells_of(cta), access, self._result.dtype.bits)
            self._bar.of_cta(cta).deliver(_BYTES, number)
        self._result.a[...] = np.array([taken, 0], np.int64)


def try_cancel(program: Program, result: Shared, barrier: Barrier) -> None:
    """Ask for a program that has not started; LayoutError for an answer that is not two 64-bit integers."""
    program.step()
    program.meet(certain=False)
    if result.shape != [2] or result.dtype.bits != 64:
        raise LayoutError(f"{program.here()}: an answer is two 64-bit integers, got {result.dtype} {result.shape}")
    program.copies.append(Request(program, result, barrier))


class Answer:
    """What was taken over, if anything."""

    def __init__(self, program: Program, taken: int, where: tuple[tuple[str, int], ...]) -> None:
        self._program, self._taken, self._where = program, taken, where

    def is_canceled(self) -> Int:
        """Whether a program was taken over."""
        return Int(self._taken > 0)

    def program_id(self, dim: object) -> Int:
        """Its number along a dimension; not defined where none was."""
        if not self._taken:
            return undefined("the number of a program that was not taken over (is_canceled() is false)", self._where)
        number, axis = self._taken - 1, int(dim)  # type: ignore[call-overload]
        grid = self._program.grid
        for extent in grid[:axis]:
            number //= extent
        return Int(number % grid[axis] if axis < len(grid) else 0)
