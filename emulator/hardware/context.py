"""Where barriers and memories are: what they ask of the program they belong to, for its messages most of all."""

from __future__ import annotations

from typing import Protocol

from tilecast.emulator.session import Session


class Context(Protocol):
    """A running program (`program.Program`) as seen from below."""

    @property
    def session(self) -> Session:
        """The emulation that it is part of."""

    @property
    def ctas(self) -> int:
        """1, or 2 for a pair."""

    def here(self) -> str:
        """The running line, quoted."""

    def actor(self, code: int) -> str:
        """Who an event code belongs to."""
