"""A kernel file that cannot be loaded is one sentence, with what to install where that is the cause."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tilecast.codegen.compiler.compile import CompileError, load_source


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("import no_such_module", "it imports no_such_module, which is not installed$"),
        ("import triton", r"it imports triton, which is not installed: pip install 'tilecast\[gpu\]'$"),
        ("raise SystemExit(3)", r"loading it ends the program \(exit 3\)$"),
        ("1 / 0", "not a kernel that can be loaded: division by zero$"),
        ("x = 1", "expected a file written by 'tilecast generate'"),
    ],
)
def test_what_is_no_kernel_is_refused(
    source: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not there
    file = tmp_path / "k.py"
    file.write_text(source)
    with pytest.raises(CompileError, match=sentence):
        load_source(file)
