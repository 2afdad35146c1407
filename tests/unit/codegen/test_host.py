"""The host side of generated kernels: what a launch does for empty tensors, and how descriptors are made.

Refusals: test_triton_portable.py.  What is kept between launches: tests/unit/kernels/test_launching.py.  The emulator
runs `launch` as it is written.
"""

from __future__ import annotations

import numpy as np
import pytest

from tilecast.codegen.gluon import in_lines, problem_statement
from tilecast.codegen.host import box_loops, box_statements
from tilecast.emulator.language.arrays import Array
from tilecast.emulator.run import kernel_path, load, new_session
from tilecast.emulator.source import Source
from tilecast.model.machine.machine import load_machine

KERNELS = {"hopper_ws_d64_window": "h200-sxm", "blackwell_ws_d64_window": "b200"}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_empty_tensors_give_zeros_every_time(name: str, lengths: tuple[int, int]) -> None:
    module = load(new_session(Source(kernel_path(name)), load_machine(KERNELS[name]), sms=2))
    rows, keys = lengths
    for _ in range(2):
        out, lse = np.full((1, 2, rows, 64), np.nan, np.float16), np.full((1, 2, rows), np.nan, np.float32)
        q, k = np.zeros((1, 2, rows, 64), np.float16), np.zeros((1, 1, keys, 64), np.float16)
        module.launch(Array(q, "q"), Array(k, "k"), Array(k, "v"), Array(out, "out"), Array(lse, "lse"), 0.125)
        assert not out.any() and np.isneginf(lse).all()


def test_descriptors_of_heads_in_pieces_follow_the_kernels_arguments() -> None:
    boxes = [("q", "ROWS", 64), ("q", "ROWS", 32), ("k", "TILE_N", 64), ("k", "TILE_N", 32), ("v", "TILE_N", 128)]
    assert box_loops(boxes) == (
        (
            "for x, count, widths in ((q, ROWS, [64, 32]), (k, TILE_N, [64, 32]), (v, TILE_N, [128]))",
            "for columns in widths",
        ),
        "columns",
    )
    assert box_loops(boxes[::2], ["a", "a", "b"]) == (
        ("for x, count, split, columns in ((q, ROWS, a, 64), (k, TILE_N, a, 64), (v, TILE_N, b, 128))",),
        "columns",
    )
    assert box_statements(boxes)[1].endswith(":")


def test_columns_that_all_descriptors_have_are_written_once() -> None:
    boxes = [("q", "ROWS", 64), ("q", "ROWS", 32), ("k", "TILE_N", 64), ("k", "TILE_N", 32)]
    assert box_loops(boxes) == (("for x, count in ((q, ROWS), (k, TILE_N))", "for columns in [64, 32]"), "columns")
    assert box_loops(boxes[::2]) == (("for x, count in ((q, ROWS), (k, TILE_N))",), "64")
    assert (
        box_statements(boxes[::2])[2].strip()
        == "for x, block in ((q, [1, 1, ROWS.value, 64]), (k, [1, 1, TILE_N.value, 64]))"
    )
    # A width that comes twice is two descriptors.
    twice = [("q", "ROWS", 256), ("q", "ROWS", 256)]
    assert "([1, 1, count.value, 256], [1, 1, count.value, 256])" in box_statements(twice)[3]


def test_long_lists_of_arguments_are_cut_where_lines_end() -> None:
    names = [f"argument_{i}" for i in range(12)]
    for text in (in_lines(", ".join(names), "def attention(", "):"), problem_statement(names[:8])):
        assert max(map(len, text.splitlines())) <= 120 and len(text.splitlines()) > 1
        assert text.endswith("  # fmt: skip")
        assert all(name in text for name in names[:8])
    assert in_lines("a, b", "f(", ")") == "f(a, b)"
