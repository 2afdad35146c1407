"""Numbers that stand for what varies from one time to the next without a rule of its own: evenly spread, always the same sequence."""

from __future__ import annotations

#: The numbers are whole, from 0 to one less.
SPREAD = 1 << 23


class Spread:
    """A sequence of numbers in [0, `SPREAD`): a linear congruential generator's upper bits (the constants of C's rand; sm.c has the same)."""

    def __init__(self) -> None:
        self._seed = 1

    def next(self) -> int:
        """The next number."""
        self._seed = (self._seed * 1103515245 + 12345) & 0x7FFFFFFF
        return self._seed >> 8
