"""The keys that docs/json.md documents, and the paths of a JSON value, to hold one against the other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from support.paths import ROOT

PAGE = ROOT / "docs" / "json.md"
_MARK = re.compile(r"<!--\s*(printed by|prepare|takes|needs):\s*(.*?)\s*-->")


@dataclass(frozen=True)
class Section:
    """What the page says of one verb: its keys, and the commands whose output has all of them."""

    verb: str
    keys: tuple[str, ...]
    commands: tuple[str, ...]
    prepare: tuple[str, ...]
    slow: bool


def sections() -> dict[str, Section]:
    """By verb, as in `validate published`."""
    found = {}
    for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        verb = part.splitlines()[0].strip("`").removeprefix("tilecast ")
        cells = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
        marks = _MARK.findall(part)
        found[verb] = Section(
            verb,
            tuple(key for cell in cells for key in re.findall(r"`([^`]+)`", cell)),
            tuple(value for name, value in marks if name == "printed by"),
            tuple(value for name, value in marks if name == "prepare"),
            any(name == "takes" for name, _ in marks),
        )
    return found


def paths(value: Any, path: str = "") -> Iterator[str]:
    """Paths of all leaves, `[]` for list elements; `~` at the end where a list or mapping is empty or a value is null."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, f"{path}.{key.replace('.', '_')}" if path else key.replace(".", "_"))
    elif isinstance(value, list):
        for inner in value:
            yield from paths(inner, f"{path}[]")
    if value is None or value in ({}, []):
        yield f"{path}~"
    elif not isinstance(value, dict | list):
        yield path


def differences(keys: Iterable[str], printed: Iterable[str]) -> list[str]:
    """What is printed and not documented, and what is documented and not printed; empty: the page is right."""
    patterns = {key: _pattern(key) for key in keys}
    seen: set[str] = set()
    wrong = set()
    for path in set(printed):
        bare = path.rstrip("~")
        fits = {key for key, pattern in patterns.items() if pattern.fullmatch(bare)}
        if path.endswith("~"):  # nothing is known of what stands inside
            fits |= {key for key in patterns if _pattern(key.split("[]")[0]).fullmatch(bare) or _begins(key, bare)}
        if not fits:
            wrong.add(f"printed, not documented: {bare}")
        seen |= fits
    return sorted(wrong) + [f"documented, not printed: {key}" for key in patterns if key not in seen]


def _pattern(key: str) -> re.Pattern[str]:
    text = re.escape(key).replace(r"\*\*", ".+").replace(r"\*", r"[^.\[\]]+")
    return re.compile(text)


def _begins(key: str, path: str) -> bool:
    """Whether a documented key lies below the path of an empty value."""
    steps = re.split(r"\.|(?=\[\])", key)
    below = [
        "".join(f".{s}" if n and s != "[]" else s for n, s in enumerate(steps[:end])) for end in range(1, len(steps))
    ]
    return any(_pattern(start).fullmatch(path) for start in below)
