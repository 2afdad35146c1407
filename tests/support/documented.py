"""The commands that README.md and docs/*.md print: how they are read from a page, run, and written back.

A block of commands is a fence of the kind `console`: a line with `$` is a command (a backslash at its end continues it), the lines
after it are its output.  `$ NAME="words"` sets a shell variable for the later commands of the page.  HTML comments before a fence are its marks, one `<!-- name: value -->` each:

    needs: gpu | network | bundle     the command cannot run in the tests, for this reason
    takes: minutes | half an hour     it runs only with --run-minutes | never
    exit: 2                           its exit code, where that is not 0; its standard error is shown after its output
    file: NAME                        before any fence: its content is a file that later commands of the page read
    prepare: COMMAND                  before any fence: a shell command that makes what later commands read

Every page has a folder of its own, in which its commands run in order; the folders of the checkout appear in it under their names.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.paths import ROOT

#: The width of the terminal that the pages show.
COLUMNS = 120
#: What may differ between machines and runs, and what stands for it in a comparison.
VARYING = (
    (re.compile(r"\d+(\.\d+)? s \(\d+(\.\d+)?/s\)"), "<seconds> s (<rate>/s)"),
    (re.compile(r"\d+(\.\d+)? s\b(?= (of|on|for)\b)"), "<seconds> s"),
    (re.compile(r"solved in \d+ ms"), "solved in <time>"),
    (re.compile(r"\b\d+(\.\d+)? (MB|kB)(?=, opens offline)"), "<size>"),
    (re.compile(r"tilecast \d+\.\d+\.\d+"), "tilecast <version>"),
    (re.compile(r"\bwithin \d\S*e-\d+"), "within <rounding>"),
)

_FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<kind>\S*)\s*$")
_MARK = re.compile(r"^<!--\s*(?P<name>needs|takes|exit|file|prepare):\s*(?P<value>.*?)\s*-->\s*$")
_ASSIGNMENT = re.compile(r"""(?P<name>[A-Z_]+)=(?P<quote>["']?)(?P<value>.*)(?P=quote)""")
_SHARED = ("base", "codegen", "data", "docs", "emulator", "explore", "kernels", "model", "tests", "tools", "validation")


@dataclass(frozen=True)
class Command:
    """One command of a block: `lines` are [first, after last) of its output in the page, counted from 0."""

    text: str
    lines: tuple[int, int]
    output: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """A fence of a page, with its marks."""

    page: Path
    line: int
    kind: str
    content: tuple[str, ...]
    marks: dict[str, str]
    prepare: tuple[str, ...]

    @property
    def skipped(self) -> str:
        """The reason why its commands do not run in the tests; empty where they do."""
        return next((f"{name}: {self.marks[name]}" for name in ("needs", "takes") if name in self.marks), "")

    @property
    def commands(self) -> tuple[Command, ...]:
        return tuple(_commands(self)) if self.kind == "console" else ()


@dataclass(frozen=True)
class Ran:
    """What a command printed, as a terminal shows it, and its exit code."""

    output: tuple[str, ...]
    code: int


def pages() -> tuple[Path, ...]:
    """README.md and every page of docs/, sorted."""
    return (ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts))


def blocks(page: Path) -> tuple[Block, ...]:
    """The fences of a page in order; ValueError for a fence without an end."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    marks: dict[str, str] = {}
    prepare: list[str] = []
    number = 0
    while number < len(lines):
        if fence := _FENCE.match(lines[number]):
            end = next((n for n in range(number + 1, len(lines)) if lines[n].rstrip() == fence["ticks"]), None)
            if end is None:
                raise ValueError(f"{page.name}:{number + 1}: the fence has no end")
            content = tuple(lines[number + 1 : end])
            found.append(Block(page, number + 1, fence["kind"], content, marks, tuple(prepare)))
            marks, prepare, number = {}, [], end
        elif mark := _MARK.match(lines[number]):
            if mark["name"] == "prepare":
                prepare.append(mark["value"])
            else:
                marks[mark["name"]] = mark["value"]
        elif lines[number].strip():
            marks, prepare = {}, []
        number += 1
    return tuple(found)


def _commands(block: Block) -> Iterator[Command]:
    content = block.content
    number = 0
    while number < len(content):
        if not content[number].startswith("$ "):
            raise ValueError(f"{block.page.name}:{block.line + number + 1}: expected a command that begins with '$ '")
        text = content[number][2:]
        while text.endswith("\\"):
            number += 1
            text = text[:-1].rstrip() + " " + content[number].strip()
        first = number + 1
        number = first
        while number < len(content) and not content[number].startswith("$ "):
            number += 1
        yield Command(text, (block.line + first, block.line + number), content[first:number])


def settle(output: Sequence[str]) -> tuple[str, ...]:
    """The lines with what varies between machines replaced, without trailing spaces."""
    settled = []
    for line in output:
        for pattern, replacement in VARYING:
            line = pattern.sub(replacement, line)
        settled.append(line.rstrip())
    return tuple(settled)


def make_folder(folder: Path) -> None:
    """Put the folders of the checkout into `folder` as links, so that paths in commands are those of a clone."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _SHARED:
        (folder / name).symlink_to(ROOT / name)


def make_files(block: Block, folder: Path) -> None:
    """What the marks `prepare` and `file` of a block ask for."""
    for command in block.prepare:
        subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=folder, check=True)
    if "file" in block.marks:
        (folder / block.marks["file"]).write_text("\n".join(block.content) + "\n", encoding="utf-8")


def expand(text: str, variables: dict[str, str]) -> str:
    """The command without its comment, with `$NAME` replaced; an assignment sets a variable and leaves nothing to run."""
    text = text.partition("  #")[0].rstrip()
    if assigned := _ASSIGNMENT.fullmatch(text):
        variables[assigned["name"]] = assigned["value"]
        return ""
    return re.sub(r"\$([A-Z_]+)\b", lambda name: variables[name[1]], text)


def run(text: str, folder: Path) -> Ran:
    """Run an expanded command in `folder`: tilecast in this process, what stands after a pipe or redirection in a shell.

    Standard error is part of the output only where the command fails; a terminal shows progress there otherwise.
    """
    if not text:
        return Ran((), 0)
    if not text.startswith("tilecast "):
        done = subprocess.run(["bash", "-c", text], cwd=folder, capture_output=True, text=True, check=False)
        return Ran(_as_lines(done.stdout + done.stderr * (done.returncode != 0)), done.returncode)
    arguments = shlex.split(text.partition("|")[0].partition(">")[0])[1:]
    with contextlib.chdir(folder):
        out, code = _run_tilecast(arguments)
    rest = re.search(r"[|>].*$", text)
    if rest and code == 0:
        shell = rest[0].lstrip("|") if rest[0].startswith("|") else f"cat {rest[0]}"
        done = subprocess.run(["bash", "-c", shell], cwd=folder, input=out, capture_output=True, text=True, check=False)
        out, code = done.stdout + done.stderr, done.returncode
    return Ran(_as_lines(out), code)


def entry_point() -> tuple[str, str]:
    """Module and function of the `tilecast` command, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["scripts"]["tilecast"].partition(":")
    return module, function


def _run_tilecast(arguments: list[str]) -> tuple[str, int]:
    module, function = entry_point()
    main = getattr(importlib.import_module(module), function)
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as stop:
            code = stop.code or 0
    number = code if isinstance(code, int) else 1
    return out.getvalue() + err.getvalue() * (number != 0), number


def _as_lines(text: str) -> tuple[str, ...]:
    return tuple(line.rstrip() for line in text.rstrip("\n").split("\n")) if text.strip() else ()


def rewrite(page: Path, outputs: Sequence[tuple[Command, Sequence[str]]]) -> None:
    """Replace the outputs of commands in the page, the last first, so that line numbers stay right."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for command, output in sorted(outputs, key=lambda pair: pair[0].lines, reverse=True):
        first, last = command.lines
        lines[first:last] = output
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
