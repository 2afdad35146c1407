"""Sphinx: one offline site from docs/*.md (`make docs`).  The theme brings its fonts, styles and scripts; nothing is fetched."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

project = "tilecast"
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "tilecast"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
# Links of a page to its own and other pages' headings, as a code host makes them.
myst_heading_anchors = 3

_DOCS = Path(__file__).parent
_ROOT = _DOCS.parent
#: Pages whose text stands elsewhere in the repository; what the page itself holds follows that text.
_ELSEWHERE = {
    "index": "README.md",
    "contributing": "CONTRIBUTING.md",
    "shipped-kernels": "kernels/README.md",
    "tables": "data/README.md",
    "published-tables": "data/published/README.md",
}
_LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s:]+)(?=[)#])")


def _read_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Put the text of `_ELSEWHERE` into its page, and turn links between files into links between pages."""
    page = _DOCS / f"{name}.md"
    parts = [(source[0], page)] if name not in _ELSEWHERE or name == "index" else []
    if name in _ELSEWHERE:
        file = _ROOT / _ELSEWHERE[name]
        parts.insert(0, (file.read_text(encoding="utf-8"), file))
    source[0] = "\n".join(_relinked(text, file, page) for text, file in parts)


def _relinked(text: str, file: Path, page: Path) -> str:
    return _LINK.sub(lambda link: _target(link["path"], file.parent, page.parent), text)


def _target(path: str, written_in: Path, page_folder: Path) -> str:
    linked = Path(os.path.normpath(written_in / path))
    for page, file in _ELSEWHERE.items():
        if linked == _ROOT / file:
            linked = _DOCS / f"{page}.md"
    return os.path.relpath(linked, page_folder)


def setup(app: Sphinx) -> None:
    app.connect("source-read", _read_page)
