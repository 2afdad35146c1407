"""docs/json.md names exactly the keys that `--json` prints, for every verb that takes it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support import documented, json_keys

from tilecast.cli.entry import verbs
from tilecast.validation.lab.measure import records

SECTIONS = json_keys.sections()


def _verbs_with_json(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from _verbs_with_json(inner, (*path, name))
    elif any("--json" in parameter.opts for parameter in command.params):
        yield " ".join(path)


def test_every_verb_with_json_has_a_section() -> None:
    assert sorted(_verbs_with_json(typer.main.get_command(verbs()))) == sorted(SECTIONS)


@pytest.mark.parametrize("verb", [verb for verb, section in SECTIONS.items() if section.commands])
def test_printed_keys_are_the_documented_ones(verb: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    section = SECTIONS[verb]
    if section.slow and not request.config.getoption("--run-minutes"):
        pytest.skip("takes minutes: --run-minutes")
    documented.make_folder(tmp_path / "page")
    for command in section.prepare:
        subprocess.run(["bash", "-euc", command], cwd=tmp_path / "page", check=True)
    printed: set[str] = set()
    for command in section.commands:
        ran = documented.run(command, tmp_path / "page")
        assert ran.code == 0, "\n".join(ran.output[-5:])
        printed |= set(json_keys.paths(json.loads("\n".join(ran.output))))
    assert json_keys.differences(section.keys, printed) == []


def test_a_measured_row_has_the_documented_keys() -> None:
    assert sorted(SECTIONS["measure"].keys) == sorted(f"[].{column}" for column in records.COLUMNS)


def test_differences_name_both_sides() -> None:
    printed = json_keys.paths({"a": [{"b": 1}], "c": {"x": {"y": 2}}, "d": None, "e": [], "f": 3})
    assert json_keys.differences(["a[].b", "c.*.y", "d.g", "e[].h", "i"], printed) == [
        "printed, not documented: f",
        "documented, not printed: i",
    ]
