"""What the pages say of the repository holds: files they name exist, every page is in the site, the README stays readable."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import documented
from support.paths import ROOT

PAGES = documented.pages()
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
_FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)*/[\w-]+\.(?:py|toml|csv|txt|md|cu|json|j2|html|css)")
#: A path of the repository: its first folder is a room's.
_ROOMS = (
    "base",
    "codegen",
    "data",
    "docs",
    "emulator",
    "explore",
    "kernels",
    "model",
    "tests",
    "tilecast",
    "tools",
    "validation",
)
_PATH = re.compile(rf"(?:{'|'.join(_ROOMS)})(?:/[\w.-]+)*/?")
#: `name` in `file.py`.
_NAMED = re.compile(r"`(\w+)` in\s+`([\w/.-]+\.(?:py|c))`")
_WIDTH = 150


def prose(page: Path) -> str:
    """A page without its fences."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=[*NAMES, "CONTRIBUTING.md"])
def test_files_and_folders_that_a_page_names_exist(page: Path) -> None:
    text = prose(page)
    spans = re.findall(r"`([^`\n]+)`", text)
    named = {span for span in spans if _FILE.fullmatch(span) or ("/" in span and _PATH.fullmatch(span))}
    linked = set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text))
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [link for link in linked if not (page.parent / link).exists()]
    assert sorted(missing) == []


def test_functions_that_a_page_names_are_in_their_files() -> None:
    named = {found for page in (*PAGES, ROOT / "CONTRIBUTING.md") for found in _NAMED.findall(prose(page))}
    assert len(named) > 5
    wrong = []
    for name, file in sorted(named):
        files = [ROOT / file] if "/" in file else sorted((ROOT / "kernels").rglob(file))
        texts = [path.read_text(encoding="utf-8") for path in files if path.exists()]
        if not any(re.search(rf"\b(?:def|class) {name}\b|^{name}\b.*=", text, flags=re.MULTILINE) for text in texts):
            wrong.append(f"{name} in {file}")
    assert wrong == []


def test_the_map_of_the_model_names_its_folders() -> None:
    lines = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    shown = {name for line in lines if line.startswith("    ") for name in re.findall(r"([a-z_]+)/(?= |$)", line[:38])}
    folders = {path.parent.name for path in (ROOT / "model").glob("*/__init__.py")}
    assert shown == folders


def test_a_page_that_a_table_is_for_links_it() -> None:
    """The last column of data/README.md names the pages that show a table; each names one of the row's files."""
    wrong = []
    for row in (ROOT / "data" / "README.md").read_text(encoding="utf-8").splitlines():
        files, _, pages = row.strip("| ").partition(" | ")
        names = re.findall(r"[\w.-]+\.(?:csv|txt|toml)", files)
        for page in re.findall(r"\bdocs/[\w/-]+\.md", pages):
            text = (ROOT / page).read_text(encoding="utf-8")
            wrong += [f"{page}: {', '.join(names)}"] if names and not any(name in text for name in names) else []
    assert wrong == []


def test_the_map_by_reader_reaches_every_page() -> None:
    listed = re.findall(r"\]\(([\w/-]+)\.md\)", (ROOT / "docs" / "index.md").read_text("utf-8"))
    pages = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in PAGES if page.name != "README.md"}
    assert pages - {"index"} == set(listed)


def test_every_page_is_in_the_site() -> None:
    listed = set(
        re.findall(r"^(?:.*<)?([\w/-]+)>?$", (ROOT / "docs" / "index.md").read_text("utf-8"), flags=re.MULTILINE)
    )
    pages = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in PAGES if page.name != "README.md"}
    assert pages - {"index"} == listed


def test_lines_of_the_readme_fit_a_screen() -> None:
    shown = {n for block in documented.blocks(PAGES[0]) for n in range(block.line, block.line + len(block.content) + 1)}
    lines = PAGES[0].read_text(encoding="utf-8").splitlines()
    assert [line for n, line in enumerate(lines) if n not in shown and len(line) > _WIDTH] == []
