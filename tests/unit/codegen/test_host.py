"""The host side of generated kernels: what a launch prepares once for a shape, and what it does for empty tensors.

Refusals: test_triton_portable.py.  The emulator runs `launch` as it is written.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from tilecast.codegen.host import box_loops, box_statements
from tilecast.emulator.language.hostside import Array
from tilecast.emulator.run import kernel_path, load, new_session
from tilecast.emulator.source import Source
from tilecast.emulator.verify import reference
from tilecast.model.machine.machine import load_machine

KERNELS = {"hopper_ws_d64_window": "h200-sxm", "blackwell_ws_d64_window": "b200"}


class Launches:
    """A shipped kernel on the emulator; counts how often it works out what a shape needs."""

    def __init__(self, name: str) -> None:
        session = new_session(Source(kernel_path(name)), load_machine(KERNELS[name]), sms=2)
        self.module: ModuleType = load(session)
        self.prepared = 0
        prepare = self.module.prepare

        def counted(*arguments):
            self.prepared += 1
            return prepare(*arguments)

        self.module.prepare = counted

    def __call__(self, seed: int, rows: int, keys: int, window: tuple[int, int]) -> None:
        """Launch on random tensors of one shape and compare with float64."""
        rng = np.random.default_rng(seed)
        shapes = ((1, 2, rows, 64), (1, 1, keys, 64), (1, 1, keys, 64))
        q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
        out, lse = np.full(q.shape, np.nan, np.float16), np.full(q.shape[:3], np.nan, np.float32)
        arrays = (Array(data, name) for data, name in ((q, "q"), (k, "k"), (v, "v"), (out, "out"), (lse, "lse")))
        self.module.launch(*arrays, 0.125, *window)
        expected, expected_lse = reference(q, k, v, 0.125, window)
        assert np.abs(out - expected).max() < 2e-3
        assert np.abs(lse - expected_lse).max() < 2e-3


@pytest.mark.parametrize("name", KERNELS)
def test_one_shape_is_prepared_once_whatever_its_tensors(name: str) -> None:
    launch = Launches(name)
    launch(0, 70, 90, (30, 0))
    launch(1, 70, 90, (30, 0))
    assert launch.prepared == 1
    launch(2, 70, 90, (30, 5))
    launch(3, 70, 91, (30, 0))
    assert launch.prepared == 3
    launch(4, 70, 90, (30, 0))
    assert launch.prepared == 3
    # A plan keeps no tensor alive.
    assert all(made.base is None for plan in launch.module.PLANS.values() for made in plan[2])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_empty_tensors_give_zeros_every_time(name: str, lengths: tuple[int, int]) -> None:
    module = Launches(name).module
    rows, keys = lengths
    for _ in range(2):
        out, lse = np.full((1, 2, rows, 64), np.nan, np.float16), np.full((1, 2, rows), np.nan, np.float32)
        q, k = np.zeros((1, 2, rows, 64), np.float16), np.zeros((1, 1, keys, 64), np.float16)
        module.launch(Array(q, "q"), Array(k, "k"), Array(k, "v"), Array(out, "out"), Array(lse, "lse"), 0.125)
        assert not out.any() and np.isneginf(lse).all()


def test_plans_do_not_grow_without_end() -> None:
    launch = Launches("hopper_ws_d64_window")
    launch.module.PLANS.update(dict.fromkeys(range(256), ()))
    launch(0, 5, 5, (-1, -1))
    assert len(launch.module.PLANS) == 1


def test_descriptors_of_heads_in_pieces_follow_the_kernels_arguments() -> None:
    boxes = [("q", "ROWS", 64), ("q", "ROWS", 32), ("k", "TILE_N", 64), ("k", "TILE_N", 32), ("v", "TILE_N", 128)]
    assert box_loops(boxes) == (
        "for tensor, row_count, widths in ((q, ROWS, [64, 32]), (k, TILE_N, [64, 32]), (v, TILE_N, [128]))",
        "for columns in widths",
    )
    assert box_loops(boxes[::2], ["a", "a", "b"]) == (
        "for tensor, row_count, split, columns in ((q, ROWS, a, 64), (k, TILE_N, a, 64), (v, TILE_N, b, 128))",
    )
    assert box_statements(boxes)[1].endswith(":")
