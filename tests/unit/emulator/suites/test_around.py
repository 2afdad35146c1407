"""Launches as they stand in host code: `tilecast.emulate` and `tilecast.emulation`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilecast
from tilecast.emulator.errors import BoundsError, LayoutError, RequestError, UnsupportedError

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


#: Host code with what it has from Triton: a grid, a type, layouts, tensor maps, a constant.
COPIES = """
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SIDE = gl.constexpr(64)

@gluon.jit
def twice(a, b, side: gl.constexpr, dtype: gl.constexpr, layouts):
    tile = gl.allocate_shared_memory(dtype, a.block_type.shape, a.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, a.block_type.nbytes)
    row = gl.program_id(0) * side
    tma.async_copy_global_to_shared(a, [row, 0], bar, tile)
    mbarrier.wait(bar, 0)
    x = tile.load(layouts[0])
    tile.store(x + x)
    fence_async_shared()
    tma.async_copy_shared_to_global(b, [row, 0], tile)
    tma.store_wait(0)

def launch(x, y, warps):
    shared = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    a, b = (TensorDescriptor.from_tensor(t, [64, 64], shared) for t in (x, y))
    layouts = (gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0]),)
    twice[(triton.cdiv(x.shape[0], 64),)](a, b, SIDE, gl.float16, layouts)
"""


def imported(folder: Path, text: str = KERNEL) -> Any:
    """The file as a module, whatever Triton is just now."""
    path = folder / "own_kernels.py"
    path.write_text(text)
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


def test_host_code_hands_on_what_it_has_from_triton(tmp_path: Path) -> None:
    pytest.importorskip("triton.experimental.gluon")
    torch = pytest.importorskip("torch")
    module = imported(tmp_path, COPIES)
    x = torch.arange(128 * 64, dtype=torch.float16).reshape(128, 64) / 64
    out = torch.zeros_like(x)
    with tilecast.emulation("h200") as found:
        module.launch(x, out, 4)
    assert torch.equal(out, x + x) and (found.launches, found.programs) == (1, 2)
    # Its layouts are looked at as those that a file makes for itself.
    with pytest.raises(LayoutError, match="made for 8 warps, the role has 4"), tilecast.emulation("h200"):
        module.launch(x, out, 8)
    # Outside, Triton is as it was.
    assert module.triton.cdiv(130, 64) == 3 and type(module.SIDE).__module__ == "triton.language.core"


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((300,), {}, "double: missing a required argument: 'BLOCK'"),
        ((300, 128, 4), {}, "double: too many positional arguments"),
        ((300, 128), {"num_wraps": 4}, "double has no parameter num_wraps, and Triton no such option"),
        (([300], 128), {}, "double: n: expected a tensor, an array or a number, got a list"),
    ],
)
def test_arguments_that_a_launch_cannot_take(tmp_path: Path, arguments: Any, options: Any, said: str) -> None:
    x, out = numbers()
    with tilecast.emulation("h200"):
        double = imported(tmp_path).double
        with pytest.raises(RequestError, match=said):
            double[(3,)](x, out, *arguments, **options)
        with pytest.raises(RequestError, match=r"launch it as double\[grid\]"):
            double(x, out, 300, 128)
        with pytest.raises(UnsupportedError, match="no Gluon type for numpy's complex128"):
            double[(3,)](x.astype(complex), out, 300, 128)


def test_what_cannot_be_launched_is_said() -> None:
    with pytest.raises(RequestError, match="expected a Gluon kernel"):
        tilecast.emulate(3)
    with pytest.raises(RequestError, match="mode: expected late or random"), tilecast.emulation(mode="early"):
        pass
