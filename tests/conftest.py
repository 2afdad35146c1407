"""Shared test options: golden files are rewritten with --update-golden."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# A loaded machine is slow, not wrong: no deadline for examples.
settings.register_profile("tilecast", deadline=None)
settings.load_profile("tilecast")

# Before numpy loads: workers fill the cores, and threads inside the emulator's small products only get in the way.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files in tests/golden")


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """Compare text with a committed file, or rewrite the file when asked to."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path} is missing: run `make golden` and read the diff"
        assert path.read_text(encoding="utf-8") == text, (
            "differs from the golden file: `make golden`, then read the diff"
        )

    return check
