"""The site builds without a warning and asks the network for nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

#: What a browser fetches by itself: scripts, pictures, frames, style sheets, and what these import.
_FETCHED = (
    re.compile(r"<(?:script|img|iframe|source|video|embed)\b[^>]*?\b(?:src|srcset)\s*=\s*[\"']([^\"']+)"),
    re.compile(
        r"<link\b(?=[^>]*\brel=[\"'](?:stylesheet|icon|preload|preconnect|shortcut icon)[\"'])[^>]*\bhref=[\"']([^\"']+)"
    ),
    re.compile(r"url\(\s*[\"']?([^\"')]+)"),
    re.compile(r"@import\s+[\"']([^\"']+)"),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-b", "html",
         "-d", str(folder / "doctrees"), str(ROOT / "docs"), str(folder / "html")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_the_readme_is_the_first_page(site: Path) -> None:
    first = (site / "index.html").read_text(encoding="utf-8")
    assert "What it prints" in first
    assert 'href="tutorial.html"' in first
    assert 'href="contributing.html"' in first


def test_nothing_is_fetched_from_a_network(site: Path) -> None:
    fetched = {
        f"{file.relative_to(site)}: {target}"
        for kind in ("*.html", "*.css")
        for file in site.rglob(kind)
        for pattern in _FETCHED
        for target in pattern.findall(file.read_text(encoding="utf-8"))
        if target.startswith(("http:", "https:", "//"))
    }
    assert fetched == set()


def test_search_reads_an_index_that_a_file_url_can_load(site: Path) -> None:
    """A script, not a request: browsers refuse requests between files."""
    assert (site / "searchindex.js").read_text(encoding="utf-8").startswith("Search.setIndex(")
    assert 'src="searchindex.js"' in (site / "search.html").read_text(encoding="utf-8")
