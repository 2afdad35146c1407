"""The loops that ship are those that the search wants, of the kernels as they are generated now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilecast.base.progress import silent
from tilecast.cli.entry import run, verbs
from tilecast.codegen.compiler.compile import CompileError
from tilecast.codegen.compiler.profile import Profile
from tilecast.codegen.shipping import loops
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.compiled.loops import shelf
from tilecast.model.compiled.loops.shelf import KeptLoop, kept_loop, loop_of, loops_at_hand, shelf_text
from tilecast.model.families import parse_variant
from tilecast.model.forecast.answer import COMPILED
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.variant import Variant, variant_text
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

H200 = load_machine("h200-sxm")


@pytest.mark.parametrize("served", loops.SERVED, ids=lambda served: f"{served[0]} {served[1][0]} {served[2]}")
def test_kernels_are_generated_as_they_were_compiled(served: tuple[str, tuple[int, int], str]) -> None:
    work = loops.problem(*served)
    assert loops_at_hand(work, H200)
    stale = [
        kept.code.variant
        for kept in loops_at_hand(work, H200).values()
        if kept.source_hash != loops.source_hash(work, parse_variant(kept.code.variant))
    ]
    assert not stale, "make data/loops again with the oldest Triton: tilecast ship --loops"


def test_those_that_the_search_wants_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    served = [at for at in loops.SERVED if at[1] == (256, 256)]
    monkeypatch.setattr(loops, "SERVED", served)
    wanted = list(loops.wanted())
    assert {(work.dtype, work.mask) for work, _ in wanted} == {(dtype, mask) for dtype, _, mask in served}
    for at in served:
        work = loops.problem(*at)
        assert set(loops_at_hand(work, H200)) == {loop_of(variant) for job, variant in wanted if job == work}


def test_they_are_of_one_compiler() -> None:
    compilers = {
        kept.code.compiler for served in loops.SERVED for kept in loops_at_hand(loops.problem(*served), H200).values()
    }
    assert compilers == {"triton 3.6.0"}


def test_code_that_cannot_be_read_does_not_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    work = loops.problem("bf16", (128, 128), "none")
    variant = parse_variant(next(iter(loops_at_hand(work, H200).values())).code.variant)
    monkeypatch.setattr(loops, "kept_profile", lambda *args: Profile(168, 0, unread="a loop without products"))
    with pytest.raises(CompileError, match="cannot be read: a loop without products"):
        loops.make((work, variant))


def test_ship_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = loops.problem("bf16", (128, 128), "none")
    kept = next(iter(loops_at_hand(work, H200).values()))
    monkeypatch.setattr(loops, "wanted", lambda: iter([(work, parse_variant(kept.code.variant))]))
    monkeypatch.setattr(loops, "make", lambda job: kept)
    monkeypatch.setattr(loops.write, "__defaults__", (tmp_path / "loops.txt", 1, silent))
    found = CliRunner().invoke(verbs(), ["ship", "--loops"])
    assert found.exit_code == 0, found.output
    assert "wrote 1 loops" in found.output
    assert (tmp_path / "loops.txt").read_text(encoding="utf-8") == shelf_text([kept])


def test_ship_refuses_another_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would compile every loop again, for half an hour, and leave others than forecasts were judged by."""
    work = loops.problem("bf16", (128, 128), "none")
    kept = next(iter(loops_at_hand(work, H200).values()))
    path = tmp_path / "loops.txt"
    compiled: list[loops.Wanted] = []
    path.write_text(shelf_text([kept]), encoding="utf-8")
    monkeypatch.setattr(loops, "wanted", lambda: iter([(work, parse_variant(kept.code.variant))]))

    def make(job: loops.Wanted) -> KeptLoop:
        compiled.append(job)
        return kept

    monkeypatch.setattr(loops, "make", make)
    monkeypatch.setattr(loops.write, "__defaults__", (path, 1, silent))
    monkeypatch.setattr(loops, "compiler_name", lambda: "triton 3.9.0")
    with pytest.raises(SystemExit) as stopped:
        run(["ship", "--loops"])
    assert stopped.value.code == 2 and not compiled and path.read_text(encoding="utf-8") == shelf_text([kept])
    assert capsys.readouterr().err == (
        f"tilecast: {path}: cannot write its loops with another compiler: expected triton 3.6.0, which made them, got triton 3.9.0: put "
        "triton 3.6.0 first on PYTHONPATH, or remove the file to have all of them compiled anew\n"
    )
    # With the compiler that made them, and where there is no file, loops are made.
    monkeypatch.setattr(loops, "compiler_name", lambda: "triton 3.6.0")
    assert CliRunner().invoke(verbs(), ["ship", "--loops"]).exit_code == 0
    path.unlink()
    monkeypatch.setattr(loops, "compiler_name", lambda: "triton 3.9.0")
    assert CliRunner().invoke(verbs(), ["ship", "--loops"]).exit_code == 0


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TILECAST_CACHE", str(tmp_path))
    shelf.forget()
    yield tmp_path
    shelf.forget()


def test_a_loop_compiled_on_demand_is_at_hand_from_then_on(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is not run: what it would read is the code of a kernel that ships, named for another head dimension."""
    shipped = next(iter(loops_at_hand(loops.problem("bf16", (128, 128), "none"), H200).values()))
    work = Workload(4, 16, seqlen_q=4096, head_dim_qk=160, head_dim_v=160)
    asked: list[Variant] = []

    def compiled(family: str, variant: Variant, work: Workload, *args: object) -> Profile:
        asked.append(variant)
        named = replace(shipped.code, head_dim_qk=160, head_dim_v=160, variant=variant_text(variant))
        return Profile(168, 0, code=named)

    monkeypatch.setattr(loops, "kept_profile", compiled)
    with pytest.raises(
        PredictError, match="is at hand: use --level auto or fluid, or compile some with tilecast loops"
    ):
        predict(work, H200, compiler=kept_loop, interval=False)
    made, known, path = loops.add(work, H200, most=2, workers=1)
    assert (len(made), known, len(asked)) == (2, 0, 2) and path == shelf.own_loops()
    assert len(loops_at_hand(work, H200)) == 2
    answer = predict(work, H200, compiler=kept_loop, interval=False)
    assert answer.level == COMPILED and loop_of(answer.variant) in {loop_of(v) for v in asked}
    # What is at hand is not compiled again, and a third one joins the two.
    assert list(loops.add(work, H200, most=2, workers=1)[:2]) == [[], 2]
    assert loops.add(work, H200, most=3, workers=1)[1] == 2
    assert len(loops_at_hand(work, H200)) == 3 and len(asked) == 3
    # Those that ship are still there.
    assert len(loops_at_hand(loops.problem("bf16", (128, 128), "none"), H200)) >= 4


@pytest.mark.parametrize(
    ("machine", "dtype", "words"),
    [
        ("b200", "bf16", "for sm_90a, got bf16 on b200"),
        ("gb300", "fp8", "of bf16, fp16 and fp8 kernels for sm_90a, got fp8 on gb300"),
    ],
)
def test_loops_that_are_not_kept_are_refused(machine: str, dtype: str, words: str) -> None:
    with pytest.raises(PredictError, match=words):
        loops.add(Workload(1, 16, seqlen_q=4096, dtype=dtype), load_machine(machine))


def test_the_verb_says_what_it_compiled(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = next(iter(loops_at_hand(loops.problem("bf16", (128, 128), "none"), H200).values()))
    monkeypatch.setattr(loops, "make", lambda job: kept)
    found = CliRunner().invoke(verbs(), ["loops", "h200", "--head-dim", "160", "--most", "1", "--workers", "1"])
    assert found.exit_code == 0, found.output
    assert "1 loops compiled, 0 were at hand" in found.output and kept.code.variant in found.output
