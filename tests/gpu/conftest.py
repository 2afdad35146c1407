"""Tests that need a CUDA GPU: skipped without one.  ``pytest tests/gpu --record FILE`` keeps the measured errors.

FILE ends in .json or .csv and gets one row per numerics case, each with the date, GPU, driver and versions it was
measured with.  (Record without -n: the workers of pytest-xdist do not share their rows.)
"""

from __future__ import annotations

import csv
import datetime
import json
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_ROWS: list[dict[str, Any]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE", help="write the error table to FILE (.json or .csv)")
    parser.addoption("--writable-samples", type=int, default=48, help="kernels drawn in test_writable_gpu.py")
    parser.addoption("--writable-seed", type=int, default=0, help="seed of that draw")


@pytest.fixture(autouse=True)
def needs_cuda() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture
def record() -> Callable[..., None]:
    """Keep one row of the error table."""

    def keep(**row: Any) -> None:
        _ROWS.append(row)

    return keep


def pytest_sessionfinish(session: pytest.Session) -> None:
    # The option is unknown when pytest found this file only while collecting.
    name = session.config.getoption("--record", default=None)
    if not name or not _ROWS:
        return
    here = _circumstances()
    rows = [row | here for row in _ROWS]
    path = Path(name)
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _circumstances() -> dict[str, str]:
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        driver = "unknown"
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(0),
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
    }
