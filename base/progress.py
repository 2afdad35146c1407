"""How long work tells its caller how far it is, however that is shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

_Step = TypeVar("_Step")


class Progress(Protocol):
    """Told at the beginning of a stage (``done`` 0), after each step, and at its end (``done`` equals ``total``)."""

    def __call__(self, stage: str, done: float, total: float, detail: str = "", /) -> None:
        """``done`` of ``total`` steps or seconds of ``stage`` are behind; ``detail`` names the item at hand."""


def silent(_stage: str, _done: float, _total: float, _detail: str = "", /) -> None:
    """The `Progress` that is not shown."""


def reported(steps: Iterable[_Step], stage: str, total: int, progress: Progress) -> Iterator[_Step]:
    """``steps`` as they come, ``total`` in all; ``progress`` is told before the first and after each."""
    progress(stage, 0, total)
    for done, step in enumerate(steps, start=1):
        progress(stage, done, total)
        yield step
