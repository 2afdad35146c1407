"""What one emulation shares: the source, the options, the machine's limits, and the program that runs now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from tilecast.emulator.source import Source
from tilecast.emulator.trace import ProgramTrace

#: Names that Triton's releases differ in: the release whose names a kernel sees.
RELEASES = ("3.6", "3.9")


class Charged(Protocol):
    """The program that runs (`hardware.program.Program`), as far as values need it: it counts their work."""

    def charge(self, pipe: str, count: float, chain: bool = False) -> None:
        """Account for work of the role that runs."""


@dataclass
class Session:
    """Mutable state of one emulation."""

    source: Source
    mode: str
    seed: int
    sms: int
    smem_limit: int
    tmem_columns: int
    release: str
    #: Whether the machine has tcgen05.ld.red.
    load_reduce: bool = False
    #: Whether products are contracted into sums (a launch option).
    fusion: bool = False
    program: Charged | None = None
    traces: list[ProgramTrace] = field(default_factory=list)
    #: Lines that put -inf into a tensor of scores.
    mask_lines: set[int] = field(default_factory=set)

    def here(self) -> str:
        """The running line, quoted."""
        return self.source.quote(self.source.line())

    def charge(self, pipe: str, count: float, chain: bool = False) -> None:
        """Account for work of the role that runs."""
        if self.program is not None:
            self.program.charge(pipe, count, chain)
