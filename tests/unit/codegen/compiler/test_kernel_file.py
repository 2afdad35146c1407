"""A kernel that a user names: a file, or one that ships; its targets are those of its header."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilecast.base.data import SHIPPED_KERNELS
from tilecast.codegen.compiler.compile import TARGETS, CompileError
from tilecast.codegen.compiler.kernel_file import named_file, written_for


@pytest.mark.parametrize("name", ["hopper_ws_d64_full", "hopper_ws_d64_full.py"])
def test_a_shipped_kernel_may_be_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named_file(name) == str(SHIPPED_KERNELS / "hopper_ws_d64_full.py")
    (tmp_path / name).write_text("")
    assert named_file(name) == name  # a file of that name comes first


@pytest.mark.parametrize("name", ["none", "sub/hopper_ws_d64_full", "kernel.cubin"])
def test_any_other_name_stays(name: str) -> None:
    assert named_file(name) == name


def test_targets_are_those_of_the_header(tmp_path: Path) -> None:
    assert written_for(named_file("hopper_ws_d64_full")) == ("sm_90a",)
    assert written_for(named_file("blackwell_ws_d64_full_pair")) == ("sm_100a", "sm_103a")
    free = tmp_path / "free.py"
    free.write_text("TILECAST = {'family': 'triton'}\n")
    assert written_for(str(free)) == tuple(TARGETS)


def test_what_is_no_generated_file_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text("def f(): ...")
    with pytest.raises(
        CompileError, match=r"other\.py: expected a file written by 'tilecast generate', found no TILECAST"
    ):
        written_for(str(other))
    other.write_text("def f(:")
    with pytest.raises(CompileError, match=r"other\.py: line 1: expected a kernel file, got no Python: invalid syntax"):
        written_for(str(other))
    with pytest.raises(CompileError, match=r"none\.py: cannot read the kernel: No such file or directory"):
        written_for(str(tmp_path / "none.py"))
