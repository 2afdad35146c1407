"""The structs of sm.c, field by field in its order."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


def _record(doubles: str, integers: str, triples: str = "", last: str = "") -> np.dtype[Any]:
    fields: list[tuple[Any, ...]] = [(name, "f8") for name in doubles.split()]
    fields += [(name, "i4") for name in integers.split()]
    fields += [(name, "i4", (3,)) for name in triples.split()]
    fields += [(name, "f8") for name in last.split()]
    return np.dtype(fields, align=True)


INSTRUCTION = _record(
    "taken taken_under_mma slot stall latency mma_cycles port hold",
    "pipe waits write_counter read_counter kind conditional amount commits fetched word",
)
PIECE = _record("", "code length begin", "tags count")
PROGRAM = _record("", "cta number pieces piece_count mark_offset has_lines", last="begins")
COPY = _record("size latency share", "tag number slots of_query")
OWN = _record("size latency share", "")
CTA = _record("", "programs copies copy_count own", last="begins")

_DOUBLES = """operand_release barrier barrier_spread handover one_way mma_latency mma_fetch mma_beside_copy port_left tma_issue tma_bytes_per_clk
memory_bytes_per_clk store_bytes_per_clk store_queue_bytes reload_latency fetch_cycles"""
_LONGS = "mma_queue spill_words fetch_room"
_INTEGERS = "ctas programs stride names words lines has_cache held"


class Facts(ctypes.Structure):
    """What holds for the whole run."""

    _fields_ = [
        *((name, ctypes.c_double) for name in _DOUBLES.split()),
        *((name, ctypes.c_int64) for name in _LONGS.split()),
        *((name, ctypes.c_int32) for name in _INTEGERS.split()),
    ]
