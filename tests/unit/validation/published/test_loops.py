"""The published cells from flash-attn-4's own machine code: what the docs claim of them holds."""

from __future__ import annotations

import pytest

from tilecast.validation.published.loops import loop_of, read_loops, simulated
from tilecast.validation.published.points import load_cycles

CELLS = {
    ("b200", "bf16"): (1238, 0.060),
    ("b200", "fp8"): (1129, -0.038),
    ("b300", "bf16"): (1040, 0.015),
    ("b300", "fp8"): (880, -0.051),
}


def test_every_cell_keeps_its_error() -> None:
    loops = read_loops()
    found = {}
    for point in load_cycles():
        kernel = loop_of(point, loops)
        if kernel is not None:
            found[point.machine, point.dtype] = (point, *simulated(point, kernel))
    assert found.keys() == CELLS.keys()
    errors = []
    for cell, (point, cycles, shares) in found.items():
        expected, error = CELLS[cell]
        assert cycles == pytest.approx(expected, abs=1.0), cell
        errors.append(cycles / point.cycles - 1.0)
        assert errors[-1] == pytest.approx(error, abs=1e-3), cell
        # ALU apart: its own error is told in docs/machine-code.md.
        assert all(abs(points) <= 5.1 for unit, points in shares.items() if unit != "alu"), (cell, shares)
    assert sum(map(abs, errors)) / len(errors) <= 0.042
