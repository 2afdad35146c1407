"""Launches as they stand in host code: `tilecast.emulate` and `tilecast.emulation`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilecast
from tilecast.emulator.errors import BoundsError, RequestError

KERNEL = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

@gluon.jit
def double(x, out, n, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    gl.store(out + at, gl.load(x + at, mask=at < n) * 2, mask=at < n)

def launch(x, out):
    double[(3,)](x, out, len(x), BLOCK=128)
"""


def imported(folder: Path) -> Any:
    """The file as a module, whatever Triton is just now."""
    path = folder / "own_kernels.py"
    path.write_text(KERNEL)
    spec = importlib.util.spec_from_file_location("own_kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers() -> tuple[Any, Any]:
    return np.arange(300, dtype=np.float32), np.zeros(300, np.float32)


def test_launches_in_a_with_statement_run_on_the_cpu_and_nothing_is_left_behind(tmp_path: Path) -> None:
    before = {name for name in sys.modules if name.split(".")[0] == "triton"}
    x, out = numbers()
    with tilecast.emulation("h200", mode="random", seed=1) as found:
        imported(tmp_path).launch(x, out)
    assert (out == 2 * x).all()
    assert (found.launches, found.programs) == (1, 3) and "H200" in found.machine
    assert {name for name in sys.modules if name.split(".")[0] == "triton"} == before


def test_what_is_wrong_inside_is_raised_with_its_line(tmp_path: Path) -> None:
    x, out = numbers()
    with pytest.raises(BoundsError, match=r"own_kernels.py line \d+: gl.store"), tilecast.emulation():
        imported(tmp_path).double[(3,)](x, out[:200], 300, BLOCK=128)


def test_a_launch_of_a_kernel_that_triton_decorated(tmp_path: Path) -> None:
    pytest.importorskip("triton.experimental.gluon")
    module = imported(tmp_path)
    x, out = numbers()
    tilecast.emulate(module.double[(3,)], x, out, 300, BLOCK=128, machine="h200", mode="random")
    assert (out == 2 * x).all()
    out[:] = 0
    tilecast.emulate(module.launch, x, out)
    assert (out == 2 * x).all()
    out[:] = 0
    with tilecast.emulation("h200") as found:
        module.double[(3,)](x, out, 300, BLOCK=128)
    assert (out == 2 * x).all() and (found.launches, found.programs) == (1, 3)


def test_what_cannot_be_launched_is_said() -> None:
    with pytest.raises(RequestError, match="expected a Gluon kernel"):
        tilecast.emulate(3)
    with pytest.raises(RequestError, match="mode: expected late or random"), tilecast.emulation(mode="early"):
        pass
