"""`run_loop`: what `sm/run.py` does, in C where a compiler is at hand (`loop.c`), else in Python; the digits are the same."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, chain

import numpy as np

from tilecast.model.sm import run as in_python
from tilecast.model.sm.loop import Body, Loop
from tilecast.model.sm.native.library import library, pointer
from tilecast.model.sm.run import Ran

_DONE = 0


def run_loop(loop: Loop, blocks: int, masked: int, *, stop_early: bool) -> Ran:
    """What `run_loop` of `sm/run.py` returns and raises."""
    native = library()
    found = _run(native, loop, blocks, masked, stop_early) if native is not None else None
    # What cannot go on there cannot here either, and here says why.
    return in_python.run_loop(loop, blocks, masked, stop_early=stop_early) if found is None else found


@lru_cache(maxsize=1024)
def _written(body: Body) -> tuple[array[int], array[float]]:
    """A body as loop.c reads it (`loop_read`)."""
    units = sorted({unit for use in body.uses for unit, _ in use.shares})
    number = {unit: at for at, unit in enumerate(units)}
    integers = [
        body.count, len(body.programs), len(body.uses), len(units), number.get("tensor", -1), body.pacer,
        *body.engine, *body.role_of, *body.use_of, *_begins(map(len, body.programs)),
        *chain.from_iterable(chain.from_iterable(body.programs)), *(use.tensor for use in body.uses),
        *_begins(len(use.shares) for use in body.uses), *(number[unit] for use in body.uses for unit, _ in use.shares),
    ]  # fmt: skip
    doubles = [
        *body.alone, *body.issue, *(use.fma for use in body.uses), *(use.hidden_fma for use in body.uses),
        *(use.most_beside_mma for use in body.uses), *(share for use in body.uses for _, share in use.shares),
    ]  # fmt: skip
    return array("i", integers), array("d", doubles)


def _begins(lengths: Iterable[int]) -> list[int]:
    """Where stretches of these lengths begin that follow each other, and where the last ends."""
    return list(accumulate(lengths, initial=0))


def _run(native: ctypes.CDLL, loop: Loop, blocks: int, masked: int, stop_early: bool) -> Ran | None:
    """The run, or None where loop.c gave up."""
    integers, doubles = _written(loop.body)
    links, latencies = array("i", loop.src + loop.dst + loop.back), array("d", loop.latency)
    table = np.empty((3, loop.body.count, blocks))
    found = array("d", (0.0, 0.0, 0.0))
    result = native.run_loop(
        pointer(integers), pointer(doubles), len(latencies), pointer(links), pointer(latencies), blocks, masked,
        stop_early, ctypes.c_void_p(table.ctypes.data), pointer(found),
    )  # fmt: skip
    if result != _DONE:
        return None
    run, laps, cycles = found
    return Ran(loop.body.names, int(run), masked, (int(laps), cycles) if laps else None, table[:, :, : int(run)])
