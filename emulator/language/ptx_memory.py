"""Inline PTX of one thread that touches global memory: flags that programs set and wait for, in loops, and waits for copies.

Scalars only.  A loop that reads a flag gives way to the other roles until its element changes.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tilecast.emulator.errors import BoundsError, UnsupportedError
from tilecast.emulator.hardware.program import Program
from tilecast.emulator.language import atomics
from tilecast.emulator.values.tensors import Pointer

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
_COMPUTE: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "sub": operator.sub, "and": operator.and_, "or": operator.or_, "xor": operator.xor, "min": min,
    "max": max, "exch": lambda _, new: new,
}  # fmt: skip
#: ld, st, red or atom; what of ordering, scope and operation follows; the type.
_MEMORY = re.compile(r"(ld|st|red|atom)((?:\.\w+)*)\.global((?:\.\w+)*)\.([sub]32)$")
#: What orders nothing here: for global memory atomics say what is known.
_FENCES = (
    "membar.gl",
    "membar.sys",
    "fence.acq_rel.gpu",
    "fence.acq_rel.sys",
    "nanosleep.u32",
)
#: Between what ordinary instructions and what the copy engine do: of all memory, of shared memory, of global memory.
_PROXY_FENCES = ("fence.proxy.async", "fence.proxy.async.shared::cta", "fence.proxy.async.global")
_ORDERINGS = {"acquire", "release", "acq_rel", "relaxed", "volatile"}


def touches_memory(text: str) -> bool:
    """Whether a block is one of these."""
    return any(name in text for name in (".global.", "cp.async.bulk.wait_group", "fence.proxy."))


@dataclass(frozen=True)
class _Step:
    text: str
    label: str = ""
    #: Register that decides, and whether it has to be set.
    predicate: str = ""
    wanted: bool = True
    op: str = ""
    operands: tuple[str, ...] = ()


@lru_cache(maxsize=64)
def _steps(text: str) -> tuple[_Step, ...]:
    """The statements of a block, labels apart."""
    body = re.sub(r"//[^\n]*", "", text).replace("{", " ").replace("}", " ")
    found = []
    for piece in body.split(";"):
        rest = " ".join(piece.split())
        while label := re.match(r"(\w+):\s*", rest):
            found.append(_Step(rest, label=label[1]))
            rest = rest[label.end() :]
        if not rest or rest.startswith(".reg"):
            continue
        guard = re.match(r"@(!?)(\w+)\s+", rest)
        code = rest[guard.end() :] if guard else rest
        op, _, operands = code.partition(" ")
        names = tuple(one.strip() for one in operands.split(",")) if operands else ()
        found.append(_Step(rest, "", guard[2] if guard else "", not (guard and guard[1]), op, names))
    return tuple(found)


def run(program: Program, text: str, outputs: int, arguments: Sequence[Any]) -> int:
    """Execute a block; its first output as a signed number."""
    return _Thread(program, outputs, arguments).run(_steps(text))


class _Thread:
    """Registers of the first lane."""

    def __init__(self, program: Program, outputs: int, arguments: Sequence[Any]) -> None:
        self.program = program
        self.values: dict[str, Any] = {f"${outputs + i}": one for i, one in enumerate(arguments)}
        self.values["%laneid"] = 0
        #: The element that was read last: what a loop waits for.
        self.watched: tuple[Any, int] | None = None

    def run(self, steps: Sequence[_Step]) -> int:
        labels = {step.label: at for at, step in enumerate(steps) if step.label}
        at = 0
        while at < len(steps):
            step = steps[at]
            at += 1
            if not step.op or (step.predicate and bool(self.values[step.predicate]) != step.wanted):
                continue
            if step.op == "bra":
                target = labels[step.operands[0]]
                if target < at:
                    self._give_way(step)
                at = target
            else:
                self._do(step)
        return _signed(int(self.values.get("$0", 0)))

    def _give_way(self, step: _Step) -> None:
        """Let other roles run until the element changes that the loop reads."""
        if self.watched is None:
            raise UnsupportedError(f"{self.program.here()}: a loop in PTX that reads no memory: '{step.text}'")
        memory, place = self.watched
        self.program.poll(
            f"element {place} of {memory.name} to change, which earlier programs leave at {self._number(memory.flat[place])}",
            atomics.changes_after(self.program, memory, place),
        )

    def _read(self, name: str) -> int:
        value = self.values.get(name, name)
        try:
            return int(value, 0) if isinstance(value, str) else int(value)
        except ValueError:
            raise UnsupportedError(f"{self.program.here()}: PTX reads '{name}', which nothing has written") from None

    def _do(self, step: _Step) -> None:
        op, operands, memory = step.op, step.operands, _MEMORY.match(step.op)
        first, _, rest = op.partition(".")
        if memory:
            self._access(memory, operands)
        elif first == "mov":
            self.values[operands[0]] = self._read(operands[1])
        elif first == "setp" and rest.split(".")[0] in _COMPARE:
            compared = _COMPARE[rest.split(".")[0]](_signed(self._read(operands[1])), _signed(self._read(operands[2])))
            self.values[operands[0]] = int(compared)
        elif first in ("add", "sub", "and", "or", "xor") and rest in ("s32", "u32", "b32"):
            self.values[operands[0]] = _COMPUTE[first](self._read(operands[1]), self._read(operands[2]))
        elif op in _PROXY_FENCES:
            for agent in self.program.role().agents:
                if op != "fence.proxy.async.global":
                    agent.fence()
                if op != "fence.proxy.async.shared::cta":
                    agent.knowledge.ordinary = frozenset()
        elif op in ("cp.async.bulk.wait_group", "cp.async.bulk.wait_group.read"):
            role = self.program.role()
            role.stores.wait(self._read(operands[0]), role.agents)
        elif op not in _FENCES:
            raise UnsupportedError(
                f"{self.program.here()}: the emulator does not know the PTX instruction '{step.text}'"
            )

    def _access(self, found: re.Match[str], operands: tuple[str, ...]) -> None:
        """ld d, [a]; st [a], b; red [a], b; atom d, [a], b."""
        kind, words = found[1], {*found[2].split("."), *found[3].split(".")}
        address = next(one for one in operands if one.startswith("["))
        pointer = self.values[address.strip("[]")]
        if not isinstance(pointer, Pointer):
            raise UnsupportedError(
                f"{self.program.here()}: PTX accesses {address}, which is no pointer of the kernel's"
            )
        memory, place = pointer.memory, int(pointer.offset)
        if not 0 <= place < memory.flat.size or memory.flat.itemsize != 4:
            raise BoundsError(
                f"{self.program.here()}: {kind} of element {place} of {memory.name}, which has {memory.flat.size}"
            )
        self.program.step_of_programs()
        ordering = next((word for word in words if word in _ORDERINGS), "relaxed")
        if kind == "ld":
            self.watched = memory, place
            self.values[operands[0]] = self._number(atomics.read(self.program, memory, place, ordering))
            return
        operand, compute = self._read(operands[-1]), _COMPUTE["exch"]
        if kind != "st":
            word = next((word for word in words if word in _COMPUTE), None)
            if word is None:
                raise UnsupportedError(
                    f"{self.program.here()}: the emulator does not know the PTX operation '{found[0]}'"
                )
            compute = _COMPUTE[word]

        def new(_: int, old: Any) -> Any:
            return np.array(_signed(compute(self._number(old), operand)), np.int32).view(memory.flat.dtype)

        before = atomics.write(self.program, memory, [place], ordering, new, modifies=kind != "st")
        if kind == "atom":
            self.values[operands[0]] = self._number(before[0])

    def _number(self, bits: Any) -> int:
        """32 bits of any type as a signed number."""
        return int(np.asarray(bits).view(np.int32))


def _signed(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31
