"""How long work tells its caller how far it is, whoever shows it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told at the beginning of a stage (``done`` 0), after each step, and at its end (``done`` equals ``total``)."""

    def __call__(self, stage: str, done: float, total: float, detail: str = "", /) -> None:
        """``done`` of ``total`` steps or seconds of ``stage`` are behind; ``detail`` names the item at hand."""


def silent(_stage: str, _done: float, _total: float, _detail: str = "", /) -> None:
    """The `Progress` that nobody sees."""
