"""The compiler asked about a kernel, offline and in a process of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support.whole import whole

from tilecast.base.data import SHIPPED_KERNELS
from tilecast.codegen.compiler.complaints import NOT_ASKED, REFUSED, WARNING, checked_by_compiler

NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
HOPPER = SHIPPED_KERNELS / "hopper_ws_d128_full.py"


def changed(tmp_path: Path, old: str, new: str) -> Path:
    text = HOPPER.read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "changed.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


@NEEDS_TRITON
@pytest.mark.parametrize("name", ["hopper_ws_d64_full.py", pytest.param("hopper_ws_d256_full.py", marks=whole)])
def test_a_shipped_kernel_has_no_complaints(name: str) -> None:
    assert checked_by_compiler(HOPPER.with_name(name)) == []


@NEEDS_TRITON
def test_what_the_compiler_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    path = changed(tmp_path, "block_type.shape, desc.layout)", "block_type.shape, gl.NVMMASharedLayout(64, 16, 4))")
    (found,) = checked_by_compiler(path)
    assert found.severity == REFUSED
    assert "does not compile for sm_90a" in found.text


@NEEDS_TRITON
def test_spills_are_a_warning(tmp_path: Path) -> None:
    (found,) = checked_by_compiler(changed(tmp_path, "], [4, 1], [232, 40])", "], [4, 1], [40, 40])"))
    assert found.severity == WARNING
    assert "spills" in found.text and "bytes a thread for sm_90a" in found.text


@NEEDS_TRITON
def test_more_shared_memory_than_a_cta_has_is_refused(tmp_path: Path) -> None:
    found, *_ = checked_by_compiler(changed(tmp_path, "KV_STAGES = gl.constexpr(2)", "KV_STAGES = gl.constexpr(5)"))
    assert found.severity == REFUSED
    assert "bytes of shared memory for sm_90a, a CTA has 232448" in found.text


def test_what_cannot_be_asked_is_no_complaint_about_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "foreign.py"
    path.write_text("x = 1\n")
    assert [found.severity for found in checked_by_compiler(path)] == [NOT_ASKED]
    assert [found.severity for found in checked_by_compiler(tmp_path / "none.py")] == [NOT_ASKED]


@NEEDS_TRITON
def test_host_code_that_wants_a_package_which_is_not_there_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8-bit kernels ask torch for a type; who has Triton alone is told so."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = checked_by_compiler(HOPPER.with_name("hopper_fp8_d64_full.py"))
    assert found.severity == NOT_ASKED
    assert found.text.startswith("compiling needs torch")
