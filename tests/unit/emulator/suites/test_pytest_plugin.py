"""The pytest plugin, in processes of its own: rerouted launches, modes, what a failure shows, and what it costs unused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

HEAD = """
import sys
import numpy as np
import pytest
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton._internal_testing import is_blackwell, is_hopper

FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""

#: One block copied in by the copy engine, doubled and stored; WAIT stands where the copy is waited for.
COPY = """
@gluon.jit
def double(desc, out, BLOCK: gl.constexpr):
    smem = gl.allocate_shared_memory(gl.float32, [16, BLOCK], desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [0, 0], bar, smem)
    WAIT
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    rows = gl.arange(0, 16, layout=gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))[None, :]
    gl.store(out + rows * BLOCK + columns, smem.load(layout) * 2)
    mbarrier.invalidate(bar)


def test_double():
    x, out = np.random.default_rng(0).standard_normal((16, 64), np.float32), np.zeros((16, 64), np.float32)
    layout = gl.NVMMASharedLayout.get_default_for([16, 64], gl.float32)
    double[(1,)](TensorDescriptor.from_tensor(x, [16, 64], layout), out, 64)
    assert (out == 2 * x).all()
"""


def run(folder: Path, body: str, *options: str, blocked: tuple[str, ...] = ("torch",)) -> str:
    """What pytest prints of a suite of one file; ``blocked``: packages that the process does not have."""
    (folder / "test_own.py").write_text(HEAD + body)
    return pytest_in(folder, *options, blocked=blocked)


def pytest_in(folder: Path, *options: str, blocked: tuple[str, ...] = ("torch",)) -> str:
    arguments = ["-p", "tilecast.emulator.suites.pytest_plugin", "-p", "no:cacheprovider", "-rs", *options, str(folder)]
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import pytest; pytest.main({arguments!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, timeout=120,
        # Named by -p, installed or not; found by its entry point as well, it would be there twice.
        env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    return done.stdout + done.stderr


def test_a_suite_runs_in_each_mode_without_torch_and_triton(tmp_path: Path) -> None:
    said = run(tmp_path, COPY.replace("WAIT", "mbarrier.wait(bar, 0)"), "--gluon-emulate")
    assert "3 passed" in said, said
    assert "gluon: 3 launches, 3 programs emulated on NVIDIA B200" in said


BY_WHOLE_NAMES = """
import triton.experimental.gluon.language.nvidia.hopper.tma as whole
import triton.language.extra.libdevice
from triton.experimental.gluon.language.nvidia.hopper.mbarrier import wait
from triton.experimental.gluon.language.nvidia.hopper import tma

def test_names():
    assert whole is tma and callable(whole.async_load) and wait is mbarrier.wait
"""


def test_modules_are_imported_by_their_whole_names_too(tmp_path: Path) -> None:
    """And stay what they are for the files that follow."""
    (tmp_path / "test_before.py").write_text(HEAD + BY_WHOLE_NAMES)
    said = run(tmp_path, COPY.replace("WAIT", "mbarrier.wait(bar, 0)"), "--gluon-emulate", "--gluon-modes", "late")
    assert "2 passed" in said, said


def test_a_missing_wait_fails_with_the_lines_of_the_kernel_and_of_its_launch(tmp_path: Path) -> None:
    said = run(tmp_path, COPY.replace("WAIT", "pass"), "--gluon-emulate", "--gluon-modes", "late,random:7")
    assert "2 failed" in said, said
    assert "smem.load(layout) * 2" in said
    launch = next(
        n for n, text in enumerate((tmp_path / "test_own.py").read_text().splitlines(), 1) if "double[(1,)]" in text
    )
    assert f"test_own.py:{launch}: launched here" in said
    assert "hardware/memory.py" not in said


def test_kernels_in_functions_and_in_imported_files_run_and_every_test_starts_afresh(tmp_path: Path) -> None:
    (tmp_path / "own_kernels.py").write_text(
        HEAD
        + "@gluon.jit\ndef twice(out):\n    at = gl.arange(0, 32, layout=FLAT)\n    gl.store(out + at, at + gl.program_id(0))\n"
    )
    body = """
import own_kernels
SHARED = np.zeros(32, np.int32)

@pytest.mark.parametrize("number", [1, 2])
def test_inside(number):
    @gluon.jit
    def kernel(out, NUMBER: gl.constexpr):
        at = gl.arange(0, 32, layout=FLAT)
        for i in range(NUMBER):
            gl.store(out + at, at * NUMBER)
    kernel[(1,)](SHARED, number)
    assert (SHARED == number * np.arange(32)).all()

def test_beside():
    own_kernels.twice[(2,)](SHARED)
"""
    said = run(tmp_path, body, "--gluon-emulate", "--gluon-modes=late")
    assert "1 failed, 2 passed" in said, said
    assert "own_kernels.py line" in said and "program 0 has stored to it" in said


def test_what_is_not_emulated_is_skipped_by_name_or_fails_where_asked(tmp_path: Path) -> None:
    body = """
from triton.tools.of_tomorrow import helper

@gluon.jit
def kernel(out):
    gl.of_tomorrow(out)

def test_gap():
    kernel[(1,)](np.zeros(4, np.float32))

def test_host_gap():
    helper(3)
"""
    said = run(tmp_path, body, "--gluon-emulate", "--gluon-modes=late")
    assert "2 skipped" in said, said
    assert "gl.of_tomorrow(out): the emulator does not know triton.experimental.gluon.language.of_tomorrow" in said
    assert "triton.tools.of_tomorrow.helper" in said
    said = run(tmp_path, body, "--gluon-emulate", "--gluon-modes=late", "--gluon-unsupported=fail")
    assert "2 failed" in said, said


@pytest.mark.parametrize(("machine", "passed"), [("h200", "test_hopper"), ("b200", "test_blackwell")])
def test_skips_that_ask_for_a_generation_follow_the_machine(tmp_path: Path, machine: str, passed: str) -> None:
    body = """
@pytest.mark.skipif(not is_hopper(), reason="Hopper")
def test_hopper():
    assert triton.runtime.driver.active.get_current_target().arch == 90

@pytest.mark.skipif(not is_blackwell(), reason="Blackwell")
def test_blackwell():
    assert triton.runtime.driver.active.get_current_target().arch == 100
"""
    said = run(tmp_path, body, "--gluon-emulate", f"--gluon-machine={machine}", "--gluon-modes=late", "-v")
    assert f"{passed}[late] PASSED" in said and "1 passed, 1 skipped" in said, said


def test_tensors_on_cuda_are_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    body = """
import torch

@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_add():
    @gluon.jit
    def add(x, out):
        at = gl.arange(0, 64, layout=FLAT)
        gl.store(out + at, gl.load(x + at) + 1)
    x = torch.randn(64, device="cuda")
    out = torch.empty_like(x)
    assert x.is_cuda and out.cuda().is_cuda
    add[(1,)](x, out)
    torch.testing.assert_close(out, x + 1)
"""
    said = run(tmp_path, body, "--gluon-emulate", "--gluon-modes=late", blocked=())
    assert "1 passed" in said, said


def test_the_fixture_takes_its_modes_and_machine_from_marker_and_ini(tmp_path: Path) -> None:
    (tmp_path / "own_kernels.py").write_text(HEAD + COPY.replace("WAIT", "mbarrier.wait(bar, 0)"))
    (tmp_path / "pytest.ini").write_text("[pytest]\ngluon_modes = random:3\ngluon_machine = h200\n")
    (tmp_path / "test_own.py").write_text(
        """
import pytest

def test_ini(gluon_emulator):
    gluon_emulator("own_kernels.py").test_double()

@pytest.mark.gluon(modes=["late", "random:5"], machine="b200")
def test_marker(gluon_emulator):
    gluon_emulator("own_kernels.py").test_double()
"""
    )
    said = pytest_in(tmp_path, "-v", "--strict-markers")
    for name in ("test_ini[random:3]", "test_marker[late]", "test_marker[random:5]"):
        assert f"{name} PASSED" in said, said


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--gluon-modes=early", "expected late, random or random:SEED, got 'early'"),
        ("--gluon-modes=late:3", "expected late, random or random:SEED, got 'late:3'"),
        ("--gluon-machine=a100", "the emulator has Hopper's and Blackwell's tensor cores"),
        ("--gluon-machine=x9", "x9"),
    ],
)
def test_a_wrong_option_ends_in_one_sentence(tmp_path: Path, option: str, message: str) -> None:
    said = run(tmp_path, "def test_nothing():\n    pass\n", "--gluon-emulate", option)
    assert message in said, said
    assert "Traceback" not in said


def test_unused_it_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(
        """
import sys

def test_imports(request):
    mine = [name for name in sys.modules if name.startswith("tilecast.")]
    assert set(mine) == {"tilecast.emulator", "tilecast.emulator.suites", "tilecast.emulator.suites.pytest_plugin"}
    assert not {"torch", "triton", "numpy", "greenlet"} & set(sys.modules)
    assert request.fixturenames == ["request"]
"""
    )
    said = pytest_in(tmp_path, blocked=())
    assert "1 passed" in said, said
