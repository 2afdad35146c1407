"""Launches in C: what the driver is told is what Triton's own launches tell it, on the newest Triton and the oldest.

Each runs in a process of its own, whose driver only takes notes (support/native_launches.py says what is checked).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

pytest.importorskip("triton")

SCRIPT = ROOT / "tests" / "support" / "native_launches.py"
OLD = Path(sys.prefix) / "triton-3.6"
CHECKS = re.findall(r"def (check_\w+)", SCRIPT.read_text(encoding="utf-8"))
#: name -> (folder of a Triton in front of the environment's, its release)
TRITONS = {"newest": ((), "3.9"), "oldest": ((str(OLD),), "3.6")}


@pytest.fixture(scope="module", params=TRITONS)
def wrong(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not shutil.which("gcc"):
        pytest.skip("no C compiler")
    before, release = TRITONS[request.param]
    if before and not (OLD / "triton").is_dir():
        pytest.skip(f"no Triton 3.6 in {OLD}: make test installs it")
    folder = tmp_path_factory.mktemp("driver")
    path = os.pathsep.join([*before, str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "support.native_launches", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert not done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not found["triton"].startswith(release):
        pytest.skip(f"Triton {found['triton']}: what launch.c repeats was read in {release}")
    return dict(found["wrong"])


@pytest.mark.parametrize("check", CHECKS)
def test_launches_in_c_are_tritons(wrong: dict[str, str], check: str) -> None:
    assert not wrong[check], wrong[check]
