"""What a computation reads of a machine: facts that it did not read cannot have moved what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from tilecast.model.machine.machine import Fact, Machine


class _Read(dict[str, Any]):
    """Facts or their values, which note what is asked of them in ``read``."""

    def __init__(self, values: Any, read: set[str]) -> None:
        super().__init__(values)
        self.read = read

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        self.read.update(super().keys())
        return super().__iter__()

    def keys(self) -> Any:
        self.read.update(super().keys())
        return super().keys()

    def values(self) -> Any:
        self.read.update(super().keys())
        return super().values()

    def items(self) -> Any:
        self.read.update(super().keys())
        return super().items()


class ReadMachine(Machine):
    """A machine that notes in ``read`` the names of the facts that are asked of it, found or not.

    It is equal to itself alone, so that no cache answers in its place and leaves reads unseen.
    """

    read: set[str]

    @classmethod
    def of(cls, machine: Machine) -> ReadMachine:
        """``machine``, of which nothing was read yet."""
        return cls(machine.name, machine.title, machine.arch, machine.family, machine.tensor_kind, machine.facts)

    def __post_init__(self) -> None:
        super().__post_init__()
        read: set[str] = set()
        facts: dict[str, Fact] = _Read(self.facts, read)
        object.__setattr__(self, "facts", MappingProxyType(facts))
        object.__setattr__(self, "_values", _Read(self._values, read))  # type: ignore[attr-defined]
        read.clear()
        object.__setattr__(self, "read", read)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other
