"""Runs of loops at hand are simulated once, by what they depend on and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilecast.model.compiled import forecast as forecasts
from tilecast.model.compiled.code import KernelCode
from tilecast.model.compiled.loops.shelf import loops_at_hand
from tilecast.model.compiled.native import kept_runs
from tilecast.model.compiled.native.kept_runs import sm_facts
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine

H200 = load_machine("h200-sxm")
WORK = Workload(1, 32, 32, 700, 700)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_runs, "cache_folder", lambda name: tmp_path / name)
    _forget()
    yield tmp_path / kept_runs.FOLDER
    _forget()


def _forget() -> None:
    """What another process would not know."""
    for kept in (forecasts._hopper_run, forecasts._hopper_ends, forecasts._hopper_tile, kept_runs._read):
        kept.cache_clear()


def _loop() -> KernelCode:
    return min((loop.code for loop in loops_at_hand(WORK, H200).values()), key=lambda code: code.variant)


def _cycles(machine: Machine = H200) -> float:
    return forecasts.forecast(_loop(), WORK, machine, 1500.0).cycles


def _count(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    asked: list[object] = []
    run = forecasts.run_ctas
    monkeypatch.setattr(forecasts, "run_ctas", lambda *args: asked.append(args) or run(*args))
    return asked


def test_another_process_finds_what_was_simulated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _count(monkeypatch)
    before = _cycles()
    assert asked and [path.stem for path in folder.iterdir()] == [_loop().digest]
    asked.clear()
    _forget()
    assert _cycles() == before and not asked


def test_only_facts_that_a_run_reads_ask_for_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _cycles()
    asked = _count(monkeypatch)
    _cycles(H200.with_facts({"chip.tdp_w": 600.0, "l2.bytes": 1e9}))
    assert not asked
    _cycles(H200.with_facts({"mufu.ex2_per_clk": 32.0}))
    assert asked
    same = sm_facts(_loop(), H200.with_facts({"chip.tdp_w": 600.0}), 1500.0, 1)
    assert same is sm_facts(_loop(), H200, 1500.0, 1) is not sm_facts(_loop(), H200, 1600.0, 1)


@pytest.mark.parametrize("harm", ["half a line", "another simulator", "no text", "full"])
def test_a_harmed_file_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    before = _cycles()
    (path,) = folder.iterdir()
    text = path.read_text()
    if harm == "half a line":
        path.write_text(text[:-5])
    elif harm == "another simulator":
        path.write_text("0123456789abcdef\n" + text.split("\n", 1)[1].replace(" ", " 9", 1))
    elif harm == "no text":
        path.write_bytes(b"\xff\xfe\n")
    else:
        monkeypatch.setattr(kept_runs, "_FULL", len(text))
        _forget()
        assert _cycles(H200.with_facts({"mufu.ex2_per_clk": 32.0})) < before
        assert path.read_text().count("\n") == 1 <= text.count("\n")
        return
    _forget()
    assert _cycles() == before
    _forget()
    asked = _count(monkeypatch)
    assert _cycles() == before and not asked


def test_without_a_cache_it_is_simulated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _cycles()
    nowhere = folder.parent / "file"
    nowhere.write_text("")
    monkeypatch.setattr(kept_runs, "cache_folder", lambda name: nowhere / name)
    _forget()
    assert _cycles() == before


def test_code_that_is_no_loop_at_hand_is_not_kept(folder: Path) -> None:
    from dataclasses import replace

    forecasts.forecast(replace(_loop(), digest=""), WORK, H200, 1500.0)
    assert not folder.exists()
