"""The loops that ship are those that the search wants, of the kernels as they are generated now."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilecast.cli import app
from tilecast.codegen import loops
from tilecast.codegen.compiler.compile import CompileError
from tilecast.codegen.compiler.profile import Profile
from tilecast.model.compiled.loops.shelf import loop_of, loops_at_hand, shelf_text
from tilecast.model.families import parse_variant
from tilecast.model.machine.machine import load_machine

H200 = load_machine("h200-sxm")


@pytest.mark.parametrize("mask", loops.MASKS)
@pytest.mark.parametrize("dims", loops.HEAD_DIMS)
def test_kernels_are_generated_as_they_were_compiled(dims: tuple[int, int], mask: str) -> None:
    work = loops.problem(dims, mask)
    stale = [
        kept.code.variant
        for kept in loops_at_hand(work, H200).values()
        if kept.source_hash != loops.source_hash(work, parse_variant(kept.code.variant))
    ]
    assert not stale, "make data/loops again with the oldest Triton: tilecast ship --loops"


def test_those_that_the_search_wants_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "HEAD_DIMS", ((256, 256),))
    wanted = list(loops.wanted())
    assert {work.mask for work, _ in wanted} == set(loops.MASKS)
    for mask in loops.MASKS:
        found = loops_at_hand(loops.problem((256, 256), mask), H200)
        assert {loop_of(variant) for work, variant in wanted if work.mask == mask} == set(found)


def test_they_are_of_one_compiler() -> None:
    compilers = {
        kept.code.compiler
        for dims in loops.HEAD_DIMS
        for mask in loops.MASKS
        for kept in loops_at_hand(loops.problem(dims, mask), H200).values()
    }
    assert compilers == {"triton 3.6.0"}


def test_code_that_cannot_be_read_does_not_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    work = loops.problem((128, 128), "none")
    variant = parse_variant(next(iter(loops_at_hand(work, H200).values())).code.variant)
    monkeypatch.setattr(loops, "kept_profile", lambda *args: Profile(168, 0, unread="a loop without products"))
    with pytest.raises(CompileError, match="cannot be read: a loop without products"):
        loops.make((work, variant))


def test_ship_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = loops.problem((128, 128), "none")
    kept = next(iter(loops_at_hand(work, H200).values()))
    monkeypatch.setattr(loops, "wanted", lambda: iter([(work, parse_variant(kept.code.variant))]))
    monkeypatch.setattr(loops, "make", lambda job: kept)
    monkeypatch.setattr(loops.write, "__defaults__", (tmp_path / "loops.txt", 1, loops.silent))
    found = CliRunner().invoke(app, ["ship", "--loops"])
    assert found.exit_code == 0, found.output
    assert "wrote 1 loops" in found.output
    assert (tmp_path / "loops.txt").read_text(encoding="utf-8") == shelf_text([(work, kept)])
