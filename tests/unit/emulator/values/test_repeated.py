"""A thread computes once what its columns have in common, and constants not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tilecast.emulator.any_kernel import load_any
from tilecast.emulator.trace import Work
from tilecast.emulator.values.layouts import DistributedLinearLayout, SliceLayout
from tilecast.emulator.values.repeated import Columns, of_range, of_values, together
from tilecast.model.machine.machine import load_machine

ROW_TO_A_LANE = DistributedLinearLayout(
    [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]], [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [[32, 0], [64, 0]], [], [128, 32]
)  # fmt: skip
COLUMNS_TO_LANES = DistributedLinearLayout(
    [[0, 1], [16, 0]], [[0, 2], [0, 4], [0, 8], [0, 16], [1, 0]], [[2, 0], [4, 0], [8, 0]], [], [32, 32]
)  # fmt: skip


def test_numbers_of_columns_are_constants_where_a_thread_has_the_row() -> None:
    numbers = np.arange(32)
    known = of_range(SliceLayout(0, ROW_TO_A_LANE), numbers)
    assert known is not None and known.known and known.share == 0.0
    assert of_range(SliceLayout(0, COLUMNS_TO_LANES), numbers) is None
    assert of_range(SliceLayout(1, ROW_TO_A_LANE), numbers) is None
    assert of_range(None, numbers) is None


def test_what_is_computed_from_alike_columns_is_alike() -> None:
    chunks = of_values(np.arange(32) & -16)
    assert chunks.known and chunks.kinds == (0,) * 16 + (1,) * 16
    row = Columns((0,) * 32, False)
    assert together(row, chunks).share == 2 / 32
    assert together(together(row, chunks), of_values(np.arange(32) & 15)).share == 1.0


KERNEL = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
import numpy as np

@gluon.constexpr_function
def row_to_a_lane():
    lanes = [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]], lanes, [[32, 0], [64, 0]], [], [128, 32])

@gluon.jit
def kernel(x, n):
    rows = gl.arange(0, 128, gl.SliceLayout(1, row_to_a_lane()))
    columns = gl.arange(0, 32, gl.SliceLayout(0, row_to_a_lane()))[None, :]
    s = gl.load(x + rows[:, None] * 32 + columns)
    LINES
    gl.store(x + rows[:, None] * 32 + columns, s)

def run():
    kernel[(1,)](np.ones((128, 32), np.float32), 5, num_warps=4)
"""
BITS = "seen = (1 << gl.minimum(rows[:, None] - (columns & -16), 16)) - 1"


@pytest.mark.parametrize(
    ("lines", "a_score"),
    [
        ("pass", 0.0),
        # A subtraction, a minimum, a shift and a subtraction for each of two kinds of columns.
        (BITS, 4 * 2 / 32),
        # Then the bit, compared with zero as it is taken, and a selection.
        (f"{BITS}; s = gl.where((seen & (1 << (columns & 15))) != 0, s, 0.0)", 4 * 2 / 32 + 2.0),
        ("s = gl.where(columns < rows[:, None], s, 0.0)", 2.0),
        # One row of comparisons, which the launch's number keeps from being constants.
        ("s = gl.where(columns < n, s, 0.0)", 1.0 + 1 / 128),
    ],
)
def test_operations_that_a_thread_does(lines: str, a_score: float, tmp_path: Path) -> None:
    def alu(inside: str) -> float:
        (tmp_path / "kernel.py").write_text(KERNEL.replace("LINES", inside))
        session, module = load_any(str(tmp_path / "kernel.py"), machine=load_machine("b200"), sms=1)
        module.run()
        events = [event for event in session.traces[0].roles[0].events if isinstance(event, Work)]
        return sum(event.counts.get("alu", 0.0) for event in events)

    assert (alu(lines) - alu("pass")) / (128 * 32) == pytest.approx(a_score)
