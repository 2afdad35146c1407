"""Blocks of inline PTX that do the same to many of the neighbours they get at a time: run on whole arrays at once.

Most packed blocks are such (two columns through one ``fma.rn.f32x2``), and those that compute some exponentials one way and some
another.  Run register by register they need the neighbours taken apart and put together again around a few operations.  Here a
block is followed once, by its registers: outputs that are the same expression of their own neighbours are evaluated together, all
of them on the operands as they are, broadcast as numpy does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tilecast.emulator.language.ptx import Arithmetic, Statement, is_normal, own_names, parsed

#: A value: ("in", operand, neighbour), ("bits", constant), or (operation, values it is made of), by number.
_Node = tuple[Any, ...]


class Elementwise:
    """One expression of the operands."""

    def __init__(self, steps: Sequence[_Node]) -> None:
        self._steps: list[Any] = []
        normal: list[bool] = []
        for step in steps:
            run = step[0]
            if run == "bits":
                self._steps.append(np.array([step[1]], np.uint32))
                normal.append(is_normal(step[1]))
            elif run == "in":
                self._steps.append(step[1])
                normal.append(False)
            else:
                flushes = isinstance(run, Arithmetic)
                run = run.of_normal(tuple([normal[number] for number in step[1:]])) if flushes else run
                self._steps.append((run, *step[1:]))
                normal.append(flushes and run.flushes)

    def __call__(self, operands: Sequence[Any]) -> Any:
        """uint32 of the operands' common shape; operands: arrays of 32-bit numbers that broadcast, of one dimension or more."""
        bits = [operand.view(np.uint32) for operand in operands]
        found: list[Any] = []
        with np.errstate(all="ignore"):
            for step in self._steps:
                if type(step) is int:
                    found.append(bits[step])
                elif type(step) is tuple:
                    found.append(step[0](*(found[number] for number in step[1:])))
                else:
                    found.append(step)
        # What is only handed on is no other's either.
        return found[-1].copy() if type(self._steps[-1]) is not tuple else found[-1]


class _Followed:
    """The registers of a block while it is followed: numbers of values, one of a 32-bit register, two of a 64-bit one."""

    def __init__(self, outputs: int, size: int, operands: int) -> None:
        self._numbers: dict[_Node, int] = {}
        self.nodes: list[_Node] = []
        self.registers: dict[str, tuple[int, ...]] = {
            f"${outputs + operand * size + place}": (self.number(("in", operand, place)),)
            for operand in range(operands)
            for place in range(size)
        }

    def number(self, node: _Node) -> int:
        """Equal values have one number."""
        if node not in self._numbers:
            self._numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self._numbers[node]

    def read(self, name: str) -> tuple[int, ...] | None:
        """What a register or a constant holds; None of what no block of this kind reads."""
        if name in self.registers:
            return self.registers[name]
        try:
            value = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        except ValueError:
            return None
        low = self.number(("bits", value & 0xFFFFFFFF))
        return (low, self.number(("bits", value >> 32))) if value >= 1 << 32 else (low,)

    def step(self, statement: Statement) -> bool:
        """Follow one statement; False where it is of another kind."""
        groups = [[self.read(name) for name in group] for group in statement.sources]
        if any(part is None for group in groups for part in group):
            return False
        values = [tuple(number for part in group for number in part or ()) for group in groups]
        if statement.run is None:
            made = values[0]
        elif not statement.by_itself:
            return False
        else:
            wide = 2 if statement.packed else 1
            if any(len(value) != wide for value in values):
                return False
            made = tuple(self.number((statement.run, *parts)) for parts in zip(*values, strict=True))
        targets = statement.targets
        if len(targets) == 1:
            self.registers[targets[0]] = made
        elif len(made) == len(targets):
            self.registers.update({name: (number,) for name, number in zip(targets, made, strict=True)})
        else:
            return False
        return True

    def expression(self, root: int, place: int) -> tuple[_Node, ...] | None:
        """What a value is made of, in the order of its evaluation, operands without their neighbour's number; None where it is
        made of another neighbour than ``place``."""
        order: dict[int, int] = {}
        steps: list[_Node] = []
        waiting = [(root, False)]
        while waiting:
            number, ready = waiting.pop()
            if number in order:
                continue
            node = self.nodes[number]
            if node[0] == "in" and node[2] != place:
                return None
            if isinstance(node[0], str):
                steps.append(node[:2])
            elif ready:
                steps.append((node[0], *(order[part] for part in node[1:])))
            else:
                waiting += [(number, True), *((part, False) for part in reversed(node[1:]))]
                continue
            order[number] = len(steps) - 1
        return tuple(steps)


@lru_cache(maxsize=512)
def elementwise(
    text: str, outputs: int, size: int, operands: int
) -> tuple[tuple[tuple[int, ...], Elementwise], ...] | None:
    """A block of ``size`` neighbours as expressions, and which neighbours each is for; None where an output takes in other
    neighbours than its own, or the block reads or leaves what outlives it."""
    if outputs != size:
        return None
    followed, own = _Followed(outputs, size, operands), own_names(text)
    for statement in parsed(text):
        if any(name[0] not in "$%" and name not in own for name in statement.targets) or not followed.step(statement):
            return None
    alike: dict[tuple[_Node, ...], list[int]] = {}
    for place in range(size):
        value = followed.registers.get(f"${place}", ())
        found = followed.expression(value[0], place) if len(value) == 1 else None
        if found is None:
            return None
        alike.setdefault(found, []).append(place)
    return tuple((tuple(places), Elementwise(steps)) for steps, places in alike.items())


def elementwise_or_none(text: str, outputs: int, size: int, given: Sequence[Any], dtype: Any) -> Any:
    """What a block makes of arrays that broadcast, as ``dtype``; None where it is no expression of 32-bit numbers."""
    if dtype.numpy().itemsize != 4 or any(array.itemsize != 4 for array in given):
        return None
    block = elementwise(text, outputs, size, len(given))
    if block is None:
        return None
    shape = np.broadcast_shapes(*(array.shape for array in given))
    if math.prod(shape) % size:
        return None
    if len(block) == 1:
        made = block[0][1]([array if array.ndim else array[None] for array in given]).view(dtype.numpy)
        # A block may leave operands out.
        return made if made.shape == shape else np.ascontiguousarray(np.broadcast_to(made, shape))
    apart = [np.broadcast_to(array, shape).reshape(-1, size) for array in given]
    made = np.empty((math.prod(shape) // size, size), np.uint32)
    for places, expression in block:
        made[:, places] = expression([array[:, places] for array in apart])
    return made.view(dtype.numpy).reshape(shape)
