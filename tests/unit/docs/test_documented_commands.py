"""Every command that README.md and docs/ print is run, and prints what the page shows.

`pytest tests/unit/docs --update-golden` writes today's output into the pages; with `--run-minutes` also that of the slow commands.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from pathlib import Path

import pytest
import typer.main
from support import documented
from support.paths import ROOT

from tilecast.base import native
from tilecast.base.files import cache_folder
from tilecast.cli.entry import verbs
from tilecast.codegen.compiler import kept
from tilecast.model.compiled.native import kept_runs

PAGES = documented.pages()
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
#: How many blocks of commands do not run here, by reason: a new one has to be counted.
SKIPPED = {"needs: gpu": 4, "needs: network": 1, "needs: bundle": 1, "takes: half an hour": 1, "takes: minutes": 8}
#: Programs that a plain fence must not hold: their commands belong into a `console` block, where they are run.
PROGRAMS = ("tilecast", "make", "pip", "pytest", "python", "git")
#: Folders of tilecast's cache whose contents are named by a digest of all they depend on: who finds them is sooner done, no more.
SHARED = (native.FOLDER, kept_runs.FOLDER, kept.FOLDER)


def own_cache(folder: Path) -> Path:
    """A cache for one page, with nothing in it that changes an answer."""
    made = folder / "tilecast"
    made.mkdir(parents=True)
    for name in SHARED:
        shared = cache_folder(name)
        shared.mkdir(parents=True, exist_ok=True)
        (made / name).symlink_to(shared)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_print_what_the_page_shows(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("COLUMNS", str(documented.COLUMNS)), ("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TILECAST_CACHE", str(own_cache(tmp_path / "cache")))
    folder = tmp_path / "page"
    documented.make_folder(folder)
    wrong: list[str] = []
    fresh: list[tuple[documented.Command, tuple[str, ...]]] = []
    variables: dict[str, str] = {}
    for block in documented.blocks(page):
        documented.make_files(block, folder)
        slow = block.marks.get("takes") == "minutes" and request.config.getoption("--run-minutes")
        if block.skipped and not slow:
            continue
        for command in block.commands:
            ran = documented.run(documented.expand(command.text, variables), folder)
            where = f"{page.relative_to(ROOT)}:{command.lines[0]}: $ {command.text}"
            if ran.code != int(block.marks.get("exit", 0)):
                wrong.append(f"{where}\nexit code {ran.code}\n" + "\n".join(ran.output[-20:]))
                continue
            shown, printed = documented.settle(command.output), documented.settle(ran.output)
            if shown != printed:
                fresh.append((command, ran.output))
                if not request.config.getoption("--update-golden"):
                    difference = difflib.unified_diff(shown, printed, "the page", "the command", lineterm="", n=1)
                    wrong.append("\n".join([where, *difference]))
    if request.config.getoption("--update-golden"):
        documented.rewrite(page, fresh)
    assert not wrong, "`make golden` writes the output into the page; read the diff\n\n" + "\n\n".join(wrong)


def test_skipped_blocks_are_counted() -> None:
    found = Counter(block.skipped for page in PAGES for block in documented.blocks(page) if block.skipped)
    assert dict(found) == SKIPPED


def test_commands_stand_in_console_blocks() -> None:
    hidden = [
        f"{block.page.relative_to(ROOT)}:{block.line}: {line}"
        for page in PAGES
        if page.parent.name != "examples"  # written by `tilecast report`
        for block in documented.blocks(page)
        if block.kind != "console"
        for line in block.content
        if line.removeprefix("$ ").split(" ")[0] in PROGRAMS
    ]
    indented = [
        f"{page.relative_to(ROOT)}:{number}: {line}"
        for page in PAGES
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if line.startswith("    ") and line.split()[0:1] and line.split()[0] in PROGRAMS
    ]
    assert not hidden + indented


def _unrun(page: Path) -> list[str]:
    """Commands of a page that no test runs: inline code that begins with `tilecast`, and blocks that are skipped."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    variables: dict[str, str] = {}
    in_blocks = [
        (block.skipped, documented.expand(command.text, variables))
        for block in documented.blocks(page)
        for command in block.commands
    ]
    return [" ".join(span.split()) for span in re.findall(r"`(tilecast [^`]+)`", text)] + [
        command for skipped, command in in_blocks if skipped and command.startswith("tilecast ")
    ]


@pytest.fixture(scope="module")
def root():  # type: ignore[no-untyped-def]
    """The command line."""
    return typer.main.get_command(verbs())


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_that_no_test_runs_have_their_verbs_and_options(page: Path, root) -> None:  # type: ignore[no-untyped-def]
    wrong = []
    for span in _unrun(page):
        command, words = root, [word.rstrip(",") for word in span.split()[1:]]
        while words and words[0] in getattr(command, "commands", ()):
            command = command.commands[words.pop(0)]
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        unknown = [word for word in words if re.match(r"--\w", word) and word.split("=")[0] not in {*known, "--help"}]
        if hasattr(command, "commands") and words and not words[0].startswith("-"):
            wrong.append(f"`{span}`: no verb {words[0]!r}")
        elif unknown:
            wrong.append(f"`{span}`: no option {', '.join(unknown)}")
    assert not wrong, "\n".join(wrong)
