"""Loops that ship: what a variant finds, what it is told about it, and how close another variant's code comes."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from tilecast.base.data import MEASURED
from tilecast.model.compiled.code import CodeError, KernelCode, load_codes
from tilecast.model.compiled.forecast import forecast
from tilecast.model.compiled.loops import shelf
from tilecast.model.compiled.loops.shelf import KeptLoop, loop_at_hand, loop_of, loops_at_hand, shelf_text
from tilecast.model.families import parse_variant
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.validation.lab.measure.records import read
from tilecast.validation.measured.recorded import generated_runs

H200 = load_machine("h200-sxm")
D128 = Workload(4, 16, seqlen_q=4096)


def first(workload: Workload) -> KeptLoop:
    return next(iter(loops_at_hand(workload, H200).values()))


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "loops.txt"
    monkeypatch.setattr(shelf, "LOOPS", path)
    shelf.forget()
    yield path
    shelf.forget()


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_every_head_dimension_and_mask_has_loops(dims: tuple[int, int], mask: str) -> None:
    work = Workload(4, 16, 16, 4096, 4096, *dims, mask, (1024, 0) if mask == "window" else None)
    found = loops_at_hand(work, H200)
    assert len(found) >= 4
    for loop, kept in found.items():
        assert loop == loop_of(parse_variant(kept.code.variant))
        assert (kept.code.head_dim_qk, kept.code.head_dim_v, kept.code.mask, kept.code.arch) == (*dims, mask, "sm_90a")


def test_a_loop_answers_for_all_stages_and_schedulers() -> None:
    kept = first(D128)
    own = parse_variant(kept.code.variant)
    made = loop_at_hand(D128, H200, own)
    assert made is not None and made.code == kept.code and made.followed == "whole tiles"
    other = replace(own, kv_stages=own.kv_stages + 1, scheduler="longest-first")  # type: ignore[call-arg]
    made = loop_at_hand(D128, H200, other)
    assert made is not None and made.code is not None
    assert made.code.consumers == kept.code.consumers
    assert parse_variant(made.code.variant) == other
    assert made.followed == f"whole tiles, by the code of {kept.code.variant}"


def test_where_no_loop_ships_there_is_none() -> None:
    variant = parse_variant(first(D128).code.variant)
    assert loop_at_hand(D128, load_machine("b200"), variant) is None
    assert loop_at_hand(replace(D128, dtype="fp8"), H200, variant) is None
    assert loop_at_hand(replace(D128, head_dim_qk=80, head_dim_v=80), H200, variant) is None
    assert loop_at_hand(D128, H200, replace(variant, emulated_share=0.515625)) is None  # type: ignore[call-arg]
    assert loop_at_hand(D128, H200, parse_variant("fa2")) is None
    assert loop_at_hand(replace(D128, dtype="fp16"), H200, variant) is not None


def test_what_is_written_is_read(own_file: Path) -> None:
    codes = [c for c in load_codes((MEASURED / "h200_code.txt").read_text(encoding="utf-8")) if c.mask == "none"][:3]
    codes = [c for c in codes if c.family == "hopper_ws"]
    work = replace(D128, head_dim_qk=codes[0].head_dim_qk, head_dim_v=codes[0].head_dim_v)
    own_file.write_text(shelf_text(KeptLoop(f"{i:016x}", code) for i, code in enumerate(codes)), encoding="utf-8")
    found = loops_at_hand(work, H200)
    assert len({kept.code.digest for kept in found.values()}) == len(codes)
    read_again = {kept.source_hash: replace(kept.code, digest="") for kept in found.values()}
    assert read_again == {f"{i:016x}": c for i, c in enumerate(codes)}


def test_a_file_that_is_something_else_is_refused(own_file: Path) -> None:
    own_file.write_text("some text\n", encoding="utf-8")
    with pytest.raises(CodeError, match=r"loops.txt: expected lines of name, hashes and code: make it again"):
        loops_at_hand(D128, H200)


def test_code_of_another_variant_of_the_loop_comes_as_close_as_own_code() -> None:
    """On every third point of the H200's table whose kernel shares its loop: errors of cycles, by own code and by the others'."""
    codes = load_codes((MEASURED / "h200_code.txt").read_text(encoding="utf-8"))
    by_loop: dict[tuple[int, int, str, Variant | None], list[KernelCode]] = {}
    for code in codes:
        if code.family == "hopper_ws":
            key = (code.head_dim_qk, code.head_dim_v, code.mask, loop_of(parse_variant(code.variant)))
            by_loop.setdefault(key, []).append(code)
    own, others = [], []
    for point in generated_runs(read(MEASURED / "h200_points.csv"))[::3]:
        work, variant = point.workload(), parse_variant(point.variant)
        for code in by_loop.get((work.head_dim_qk, work.head_dim_v, work.mask, loop_of(variant)), ()):
            error = (
                forecast(replace(code, variant=point.variant), work, H200, point.effective_mhz).cycles / point.cycles
                - 1
            )
            (own if code.variant == point.variant else others).append(abs(error))
    assert len(own) > 190 and len(others) > 90
    assert statistics.mean(own) < 0.043
    assert statistics.mean(others) < 0.051
