"""Where barriers and memories are: what they ask of the program they belong to, for its messages most of all."""

from __future__ import annotations

from typing import Any, Protocol

from tilecast.emulator.hardware.clocks import Agent
from tilecast.emulator.session import Session


class Context(Protocol):
    """A running program (`program.Program`) as seen from below."""

    @property
    def session(self) -> Session:
        """The emulation that it is part of."""

    @property
    def ctas(self) -> int:
        """CTAs of its cluster: 1, 2 for a pair, or more."""

    def agents(self) -> list[Agent]:
        """The running role in each CTA."""

    def line(self) -> int:
        """Line of the kernel that runs now."""

    def too_weak(self, code: int) -> str:
        """For a message about an event that no role knows of: the wait that left it in flight; empty without one."""

    def coming(self, memory: Any, cell: int) -> str:
        """For a message about a cell of a memory that was never written: the copy that is on its way there; empty without one."""

    def here(self) -> str:
        """The running line, quoted."""

    def actor(self, code: int) -> str:
        """Who an event code belongs to."""
