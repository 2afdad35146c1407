"""A function over many inputs, on several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spread(function: Callable[[_In], _Out], inputs: Sequence[_In], workers: int = 0) -> Iterator[_Out]:
    """``function`` of each input, in the order of ``inputs``, as soon as it is known.

    ``workers`` processes (0: one a core) share the inputs one by one; with one worker or one input all happens in this
    process.  ``function`` must be importable by name, and an exception that it raises ends the run.  For work that may take
    its process down with it use worker processes that are asked through a pipe (`validation.lab.worker.process`).
    """
    count = min(workers or cores(), len(inputs))
    if count <= 1:
        yield from map(function, inputs)
        return
    # Spawned, not forked: a process that has threads or a CUDA context does not survive a fork.
    context: Any = multiprocessing.get_context("spawn")
    with context.Pool(count, initializer=_leave_interrupts_to_the_parent) as pool:
        yield from pool.imap(function, inputs, chunksize=1)


def _leave_interrupts_to_the_parent() -> None:
    """Ctrl-C goes to every process of a terminal: the parent alone answers it, and ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
