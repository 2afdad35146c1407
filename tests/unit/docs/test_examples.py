"""The rendered design reviews are what the command at their end makes today, but for the digests of what made them.

`pytest tests/unit/docs --update-golden` writes them and their charts again.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from support.paths import ROOT

from tilecast.cli import main

EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.md"))
_COMMAND = re.compile(r"^tilecast (report .*) -o \S+$", flags=re.MULTILINE)
_DIGEST = re.compile(r"sha256 \w+")


@pytest.mark.parametrize("page", EXAMPLES, ids=[page.stem for page in EXAMPLES])
def test_an_example_is_what_its_command_writes(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    shown = page.read_text(encoding="utf-8")
    (command,) = _COMMAND.findall(shown)
    folder = page.parent if request.config.getoption("--update-golden") else tmp_path
    with pytest.raises(SystemExit) as stopped:
        main([*shlex.split(command), "-o", str(folder / page.name)])
    assert not stopped.value.code
    made = (folder / page.name).read_text(encoding="utf-8")
    if folder != page.parent:
        assert _DIGEST.sub("", shown) == _DIGEST.sub("", made), "`make golden` writes it again; read the diff"
    charts = set(re.findall(r"\(([\w-]+\.svg)\)", made))
    assert charts and {path.name for path in page.parent.glob(f"{page.stem}-*.svg")} == charts
