"""What the tools share, without a GPU: the table they write, the order of turns, and that each of them can be read."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

TOOLS = ROOT / "tools"


@pytest.fixture(autouse=True)
def tools_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


def _tool(name: str) -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    return importlib.import_module(name)


def test_a_table_has_what_its_rows_share_and_what_is_added_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring = importlib.import_module("measuring")
    facts = {"gpu": "H", "date": "2026-11-27", "driver": "580", "torch": "2", "triton": "3"}
    monkeypatch.setattr(measuring, "measured_on", lambda: facts)
    path, fields = tmp_path / "t.csv", ("gpu", "date", "torch", "case", "us")
    with measuring.csv_table(path, fields) as add:
        add({"case": "a", "us": 1.5})
        assert path.read_text(encoding="utf-8") == "gpu,date,torch,case,us\nH,2026-11-27,2,a,1.5\n"
        with pytest.raises(ValueError, match="fields not in fieldnames: 'ns'"):
            add({"ns": 1})
    with measuring.csv_table(str(path), fields, more=True) as add:
        add({"case": "b"})
    with path.open(encoding="utf-8", newline="") as file:
        assert [(row["gpu"], row["case"], row["us"]) for row in csv.DictReader(file)] == [("H", "a", "1.5"), ("H", "b", "")]  # fmt: skip


def test_turns_go_there_and_back_behind_an_eviction_and_a_filler(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    measuring = importlib.import_module("measuring")
    seen: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0

        def record(self) -> None:
            self.at = len(seen)

        def elapsed_time(self, other: Event) -> int:
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.append(f"wait {cycles}"))
    evict = type("Evict", (), {"zero_": lambda self: seen.append("evict")})()
    runs = [lambda: seen.append("a"), lambda: seen.extend("bb")]
    assert measuring.in_turns(runs, 2, evict, warmup=1, filler=7, back=True) == [[1, 1], [2, 2]]
    before = ["evict", "wait 7"]
    assert seen == ["a", "b", "b", *before, "a", *before, "b", "b", *before, "b", "b", *before, "a"]
    seen.clear()
    measuring.in_turns(runs, 2, evict, warmup=0, filler=0)
    assert "".join(x for x in seen if x != "evict") == "abbabb"


@pytest.mark.parametrize("name", sorted(path.stem for path in TOOLS.glob("*.py") if "measuring" in path.read_text(encoding="utf-8")))  # fmt: skip
def test_tools_that_measure_can_be_read_and_have_columns_for_what_they_say(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU; their tables begin with what all rows share."""
    tool = _tool(name)
    fields = getattr(tool, "FIELDS", ())
    if fields and name not in ("h200_before_after", "measuring"):
        assert tuple(fields[:2]) == ("gpu", "date")
    assert tool.__doc__
    sys.modules.pop(name, None)
