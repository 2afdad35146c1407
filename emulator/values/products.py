"""Products of matrices, the same for a row wherever it lies in a tile and whatever CPU the emulator runs on."""

from __future__ import annotations

from typing import Any

import numpy as np


def matrix_product(a: Any, b: Any) -> Any:
    """a b as float32, (..., m, k) by (..., k, n), each element from its own row and column alone, as a tensor core sums it.

    A float32 product of BLAS adds up a row's terms in an order that depends on where the row lies in the tile and on the CPU, so
    that a sequence would get other bits in other company.  In float64 sums of operands of 8 or 16 bits are exact, or off by 2^-53,
    and are rounded once.
    """
    return np.matmul(a, b, dtype=np.float64).astype(np.float32)
