"""compute-sanitizer of the CUDA toolkit over a short program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


def assert_memcheck_finds_nothing(code: str) -> None:
    """Run ``code`` by Python under memcheck; it must end, and no access be outside what was allocated.  Skips without the tool.

    PyTorch allocates each tensor by itself: in its usual blocks of megabytes the tool would not see where one ends.
    """
    if not Path(TOOL).exists():
        pytest.skip("needs compute-sanitizer of the CUDA toolkit")
    command = [TOOL, "--tool", "memcheck", sys.executable, "-c", f"{code}\nprint('done')"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "done" in done.stdout and "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr, done.stdout[-2000:]
