"""``tilecast inspect`` of a Gluon kernel leaves standard error to messages of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT


def test_the_bindings_of_triton_report_no_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # what is compiled already leaks nothing
    kernel = ROOT / "kernels" / "generated" / "hopper_ws_d64_full.py"
    command = [sys.executable, "-m", "tilecast.cli", "inspect", str(kernel), "--arch", "sm_90a"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "registers" in done.stdout
