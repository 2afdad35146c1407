"""The templates: decisions are Python's, a template writes."""

from __future__ import annotations

import pytest
from support.paths import ROOT

TEMPLATES = sorted((ROOT / "codegen" / "templates").rglob("*.j2"))


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_less_than_15_percent_of_the_lines_are_directives(path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    directives = [line for line in lines if line.lstrip().startswith("{%")]
    assert len(directives) < 0.15 * len(lines)
