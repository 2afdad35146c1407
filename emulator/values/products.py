"""Products of matrices, the same for a row wherever it lies in a tile and whatever CPU the emulator runs on."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

#: Bytes of the types whose values are looked up, and how many there are.
_SHORT, _VALUES = 1, 256


def matrix_product(a: Any, b: Any) -> Any:
    """a b as float32, (..., m, k) by (..., k, n), each element from its own row and column alone, as a tensor core sums it.

    A float32 product of BLAS adds up a row's terms in an order that depends on where the row lies in the tile and on the CPU, so
    that a sequence would get other bits in other company.  In float64 sums of operands of 8 or 16 bits are exact, or off by 2^-53,
    and are rounded once.
    """
    return np.matmul(a, b, dtype=np.float64).astype(np.float32)


def accumulated(before: Any, a: Any, b: Any, step: int) -> Any:
    """before + a b as float32, (m, n), added up as instructions of ``step`` terms do, one after the other; ``before`` None is zeros.

    So a product has the same bits in one call and in several that follow each other.
    """
    for first in range(0, a.shape[1], step):
        product = matrix_product(a[:, first : first + step], b[first : first + step])
        before = product if before is None else before + product
    return before


def wide(values: Any) -> Any:
    """Operands as float32; of 8 bits looked up, which takes a third of the time that a conversion of each takes."""
    if values.dtype.itemsize != _SHORT:
        return values.astype(np.float32)
    return _every(values.dtype)[values.view(np.uint8)]


@functools.lru_cache(maxsize=8)
def _every(dtype: Any) -> Any:
    """What each pattern of 8 bits stands for."""
    return np.arange(_VALUES, dtype=np.uint8).view(dtype).astype(np.float32)
