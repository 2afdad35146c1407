"""Which rows of which tensors a tile holds, told by their values: however they came there, turned, shuffled or through other memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

#: A row: its tensor, batch, head and number.
Row = tuple[str, int, int, int]


class Rows:
    """Rows of tensors of (batch, heads, rows, columns), and parts of them of ``widths`` columns, found by their values."""

    def __init__(self, tensors: Mapping[str, Any], widths: Sequence[int] = ()) -> None:
        self._of: dict[bytes, Row] = {}
        for name, tensor in tensors.items():
            columns = tensor.shape[3]
            for width in {columns, *(one for one in widths if one < columns and columns % one == 0)}:
                # Of two rows that are the same it cannot be told which it is: the first.
                for start in range(0, columns, width):
                    part = np.ascontiguousarray(tensor[..., start : start + width])
                    for place in np.ndindex(*part.shape[:3]):
                        self._of.setdefault(part[place].tobytes(), (name, *place))

    def of(self, tile: Any) -> list[Row | None]:
        """Of each row of a tile (rows, columns) what it is; None where it is none of the tensors', as past the end of one."""
        return [self._of.get(row.tobytes()) for row in np.ascontiguousarray(tile)]
