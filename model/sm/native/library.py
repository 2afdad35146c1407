"""loop.c as a library, and how numbers are handed to it."""

from __future__ import annotations

import ctypes
from array import array
from pathlib import Path

from tilecast.base.native import load_native

_SOURCE = Path(__file__).with_name("loop.c")


def library() -> ctypes.CDLL | None:
    """loop.c as a library; None where there is no compiler."""
    return load_native(_SOURCE)


def pointer(values: array[int] | array[float]) -> ctypes.c_void_p:
    """Where an array's numbers stand; they must outlive the call that reads them."""
    return ctypes.c_void_p(values.buffer_info()[0])
