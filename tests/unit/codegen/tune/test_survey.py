"""The tuner: every candidate has a fate and a reason, stages only add, measured ties go by the stated rule."""

from __future__ import annotations

import ast
import csv
import json
from dataclasses import replace

import pytest

from tilecast.cli import main
from tilecast.codegen.tune.compiled import CompiledCandidate, Job, compile_candidates, target_of
from tilecast.codegen.tune.render import as_csv
from tilecast.codegen.tune.structure import structure, tile
from tilecast.codegen.tune.survey import by_kept_loops, survey, with_machine_code
from tilecast.codegen.tune.trail import FATES
from tilecast.codegen.tune.tuning import Tuning
from tilecast.model.chip.evaluate import PredictError, evaluate_seconds
from tilecast.model.compiled.loops.choose import looked_at
from tilecast.model.compiled.loops.shelf import kept_loop, loop_at_hand
from tilecast.model.families import find_family, knob_space, legality, writable
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.search.best import best
from tilecast.validation.lab import tuning as subject
from tilecast.validation.lab.measure.records import append
from tilecast.validation.measured.run import TABLE, read

A100, H200 = load_machine("a100"), load_machine("h200-sxm")
WORK = Workload(4, 16, 16, 2048, 2048, 64, 64, "causal")
TRITON, HOPPER = find_family("triton"), find_family("hopper_ws")


@pytest.fixture(scope="module")
def surveyed() -> Tuning:
    return survey(WORK, A100, TRITON, keep=8)


def test_every_variant_of_the_space_has_a_fate_and_a_reason(surveyed: Tuning) -> None:
    space = knob_space("fa2", WORK, A100)
    assert [c.variant for c in surveyed.candidates] == list(space)
    assert all(c.fate in FATES and c.reason for c in surveyed.candidates)
    assert sum(surveyed.counts().values()) == len(space)
    illegal = [c for c in surveyed.candidates if c.fate == "illegal"]
    assert illegal and all(not legality(c.variant, WORK, A100).legal for c in illegal)
    assert any("power of two" in c.reason for c in surveyed.candidates if c.fate == "not writable")


def test_the_winner_of_the_survey_is_the_fastest_that_can_be_written(surveyed: Tuning) -> None:
    written = [v for v in knob_space("fa2", WORK, A100) if writable(v, WORK, A100).legal]
    assert surveyed.winner.forecast_s == pytest.approx(min(evaluate_seconds(WORK, A100, v) for v in written), abs=1e-9)
    assert surveyed.winner.variant == best(WORK, A100, "fa2").variant
    assert surveyed.shortlist[0] is surveyed.winner
    assert len(surveyed.shortlist) == 8
    kinds = [structure(c.variant) for c in surveyed.shortlist]
    assert all(kinds.count(kind) <= 2 for kind in kinds)


def test_of_rings_of_several_depths_the_deepest_goes_on_beside_the_choice_of_the_search() -> None:
    found = survey(Workload(2, 8, 8, 1024, 1024, 256, 256), H200, HOPPER, keep=4)
    shallow = [c for c in found.candidates if c.fate == "fewer stages"]
    alive = {c.variant for c in found.candidates if c.fate in ("floor", "forecast", "winner")}
    for c in shallow[::20]:
        deeper = [replace(c.variant, kv_stages=n) for n in range(c.variant.kv_stages + 1, 5)]
        assert any(v in alive for v in deeper)


def compiled(tuning: Tuning, **by_order: CompiledCandidate) -> Tuning:
    pairs = []
    for n, c in enumerate(tuning.shortlist):
        pairs.append(
            (c, by_order.get(f"n{n}", CompiledCandidate(seconds=2e-3 + 1e-5 * n, registers=168, spill_bytes=0)))
        )
    return with_machine_code(tuning, pairs)


def test_machine_code_overrules_the_forecast_and_the_trail_says_so(surveyed: Tuning) -> None:
    fast = CompiledCandidate(seconds=1e-3, registers=200, spill_bytes=16)
    dead = CompiledCandidate(failure="does not compile: no")
    blind = CompiledCandidate(unread="its machine code cannot be read: why", registers=90, spill_bytes=0)
    found = compiled(surveyed, n3=fast, n0=dead, n1=blind)
    assert found.by == "machine code"
    assert found.winner.variant == surveyed.shortlist[3].variant
    fates = {c.order: (c.fate, c.reason) for c in found.candidates}
    assert fates[surveyed.shortlist[0].order] == ("compile", "does not compile: no")
    assert fates[surveyed.shortlist[1].order] == ("compile", "its machine code cannot be read: why")
    assert fates[surveyed.shortlist[2].order][1].startswith("102.0% slower than the leader from machine code")
    assert len(found.shortlist) == 6
    assert found.counts()["winner"] == 1


def test_without_readable_machine_code_spilling_kernels_go(surveyed: Tuning) -> None:
    made = {f"n{n}": CompiledCandidate(registers=255, spill_bytes=40 if n < 2 else 0) for n in range(8)}
    found = compiled(surveyed, **made)
    assert found.by == "forecast"
    assert found.winner.variant == surveyed.shortlist[2].variant
    assert "spills 40 bytes" in next(c.reason for c in found.candidates if c.order == surveyed.shortlist[0].order)
    all_spill = {f"n{n}": CompiledCandidate(registers=255, spill_bytes=40) for n in range(8)}
    assert compiled(surveyed, **all_spill).winner.variant == surveyed.winner.variant


def test_nothing_compiled_changes_nothing_but_says_so(surveyed: Tuning) -> None:
    found = compiled(surveyed, **{f"n{n}": CompiledCandidate(failure="no") for n in range(8)})
    assert found.candidates == surveyed.candidates
    assert "no candidate could be compiled" in found.notes[-1]


def test_the_timed_are_the_first_with_at_most_two_of_a_tile(surveyed: Tuning) -> None:
    chosen = subject.to_time(surveyed, 5)
    kinds = [tile(c.variant) for c in chosen]
    assert chosen[0] is surveyed.winner and len(chosen) == 5
    assert all(kinds.count(kind) <= 2 for kind in kinds)


def measured(monkeypatch, cycles: list[float], failing: int | None = None) -> list[list[str]]:
    """Stands in for the GPU: rows with these cycles, in the order asked for; returns what was asked for."""
    from tilecast.validation.lab.measure import run

    asked: list[list[str]] = []
    sample = read(TABLE)[1]

    def measure(items, table, options):
        asked.append([item.variant for item in items])
        rows, failures = [], []
        for n, item in enumerate(items):
            if n == failing:
                failures.append(run.Failure(item, "illegal memory access"))
                continue
            w = item.workload
            rows.append(replace(
                sample, kernel=item.kernel, variant=item.variant, source_sha="0", batch=w.batch, heads_q=w.heads_q,
                heads_kv=w.heads_kv, seqlen_q=w.seqlen_q, seqlen_k=w.seqlen_k, head_dim_qk=w.head_dim_qk,
                head_dim_v=w.head_dim_v, mask=w.mask, window_left=-1, window_right=0, cycles=cycles[n],
                cycles_low=cycles[n] - 1, cycles_high=cycles[n] + 1, ms=cycles[n] / 1e6, ms_low=cycles[n] / 1e6,
                ms_high=cycles[n] / 1e6,
            ))  # fmt: skip
        append(table, rows)
        return failures

    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(subject, "_no_gpu", lambda machine: "")
    return asked


def test_on_a_gpu_the_budget_is_timed_and_the_fastest_wins(monkeypatch, tmp_path) -> None:
    asked = measured(monkeypatch, [9e5, 5e5, 7e5, 8e5])
    found = subject.tune(WORK, A100, budget=4, compile=False, table=tmp_path / "t.csv")
    assert len(asked[0]) == 4
    assert found.by == "measured"
    assert variant_text(found.winner.variant) == asked[0][1]
    assert found.winner.measured_s == pytest.approx(5e5 / 1e9)
    reasons = {variant_text(c.variant): c.reason for c in found.candidates}
    assert reasons[asked[0][0]] == "measured 80.0% slower than the winner"
    assert len(found.shortlist) == 4


def test_a_tie_goes_to_the_plainer_kernel(monkeypatch, tmp_path) -> None:
    asked = measured(monkeypatch, [1.0e6, 0.995e6])
    found = subject.tune(WORK, A100, budget=2, compile=False, table=tmp_path / "t.csv")
    first, second = (next(c for c in found.candidates if variant_text(c.variant) == text) for text in asked[0])
    plain = min((first, second), key=lambda c: (c.variant.scheduler != "grid", c.variant.kv_stages, c.order))
    assert found.winner is plain
    assert "2 tie: no spills, fewest registers, plainest, earliest wins" in plain.reason


def test_a_kernel_that_fails_on_the_gpu_is_out(monkeypatch, tmp_path) -> None:
    asked = measured(monkeypatch, [1e5, 9e5, 8e5], failing=0)
    found = subject.tune(WORK, A100, budget=3, compile=False, table=tmp_path / "t.csv")
    assert variant_text(found.winner.variant) == asked[0][2]
    failed = next(c for c in found.candidates if variant_text(c.variant) == asked[0][0])
    assert (failed.fate, failed.reason) == ("compile", "timing failed: illegal memory access")


def test_same_input_same_answer_and_it_says_that_nothing_was_timed() -> None:
    one, other = (subject.tune(WORK, "a100", compile=False) for _ in range(2))
    assert one == other
    assert any("forecast only" in note for note in one.notes)
    assert str(one).startswith("fa2 for bf16 causal attention")


@pytest.mark.parametrize(
    ("more", "message"), [({"budget": -1}, "budget takes 0"), ({"budget": 9, "candidates": 8}, "cannot time 9 of 8")]
)
def test_budgets_that_make_no_sense(more, message) -> None:
    with pytest.raises(PredictError, match=message):
        subject.tune(WORK, "a100", compile=False, **more)


def test_where_nothing_can_be_written_the_first_obstacle_is_named() -> None:
    with pytest.raises(PredictError, match="head_dim_qk must be 32, 64, 128, 256 in e4m3, got 96"):
        survey(replace(WORK, dtype="fp8", head_dim_qk=96, head_dim_v=96), H200, HOPPER)
    with pytest.raises(PredictError, match="wgmma"):
        survey(WORK, A100, HOPPER)


def test_the_audit_trail_is_a_table_with_every_candidate(surveyed: Tuning) -> None:
    rows = list(csv.DictReader(as_csv(surveyed).splitlines()))
    assert len(rows) == len(surveyed.candidates)
    winner = next(row for row in rows if row["fate"] == "winner")
    assert winner["variant"] == variant_text(surveyed.winner.variant)
    assert float(winner["forecast_ms"]) == pytest.approx(1e3 * surveyed.winner.forecast_s, rel=1e-5)


def run(arguments: list[str], capsys) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out = capsys.readouterr()
    return int(stop.value.code or 0), out.out, out.err


SHAPE = ["--machine", "a100", "--seqlen", "2048", "--batch", "4", "--head-dim", "64", "--causal", "--no-compile"]


def test_the_command_writes_kernel_and_trail(tmp_path, capsys) -> None:
    kernel, audit = tmp_path / "k.py", tmp_path / "a.json"
    code, out, _ = run(["tune", *SHAPE, "-o", str(kernel), "--audit", str(audit)], capsys)
    assert code == 0 and "winner (*) by forecast before compilation" in out
    trail = json.loads(audit.read_text())
    tree = ast.parse(kernel.read_text())
    header = next(
        ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "TILECAST"
    )
    assert header["variant"] == trail["winner"]
    assert header["chosen"]["by"] == "forecast" and header["chosen"]["fates"] == trail["counts"]
    assert sum(trail["counts"].values()) == len(trail["candidates"])


def test_mistakes_exit_with_2_and_write_nothing(tmp_path, capsys) -> None:
    kernel = tmp_path / "k.py"
    for arguments, message in (
        (["--audit", str(tmp_path / "a.txt"), "-o", str(kernel)], "expected a name ending in .json or .csv"),
        (["-o", str(tmp_path / "no" / "k.py")], "does not exist"),
        (["--family", "hoper_ws", "-o", str(kernel)], "did you mean hopper_ws"),
        (["--budget", "30", "-o", str(kernel)], "cannot time 30 of 24"),
    ):
        code, out, err = run(["tune", *SHAPE, *arguments], capsys)
        assert code == 2 and message in err and not out
    assert not list(tmp_path.iterdir())


def test_compiling_finds_what_it_kept(tmp_path) -> None:
    pytest.importorskip("triton")
    variant = next(
        v for v in knob_space("fa2", WORK, H200) if (v.tile_m, v.tile_n, v.warps, v.kv_stages) == (64, 64, 4, 2)
    )
    job = Job("triton", variant, WORK, H200, 1700.0, str(tmp_path))
    (fresh,) = compile_candidates([job], 1)
    assert not fresh.failure and not fresh.unread and fresh.seconds > 0 and fresh.registers > 32
    (kept,) = tmp_path.iterdir()
    before = kept.stat().st_mtime_ns
    assert compile_candidates([job], 1) == [fresh]
    assert kept.stat().st_mtime_ns == before
    kept.write_text("{")  # a damaged file is made again
    assert compile_candidates([job], 1) == [fresh]


def test_compiling_in_processes_gives_the_same(tmp_path) -> None:
    pytest.importorskip("triton")
    variants = [v for v in knob_space("fa2", WORK, H200) if (v.tile_m, v.tile_n, v.warps) == (64, 64, 4)][:2]
    jobs = [Job("triton", variant, WORK, H200, 1700.0, str(tmp_path)) for variant in variants]
    counted: list[tuple[object, ...]] = []
    together = compile_candidates(jobs, 2, lambda *at: counted.append(at))
    assert len(together) == 2 and counted == [("compile", done, 2) for done in range(3)]
    assert compile_candidates(jobs, 1) == together


def test_targets_follow_the_machine() -> None:
    assert target_of("hopper_ws", knob_space("fa3", WORK, H200)[0], H200) == "sm_90a"
    with pytest.raises(ValueError, match="is compiled for sm_90a, not for a100"):
        target_of("hopper_ws", knob_space("fa3", WORK, H200)[0], A100)


def test_candidates_are_compared_by_the_loops_at_hand() -> None:
    fluid = survey(WORK, H200, HOPPER)
    found = by_kept_loops(fluid)
    times = dict(looked_at(WORK, H200, "fa3"))
    assert found.by == "machine code" and found.winner.variant == min(times, key=lambda v: times[v])
    assert {c.variant: c.compiled_s for c in found.shortlist} == times
    assert len(found.candidates) == len(fluid.candidates)
    without = [c for c in found.candidates if c.fate == "compile"]
    assert without and all("its loop is not at hand" in c.reason for c in without)
    # Nothing that stands on the forecast before compilation is still in the running.
    assert all(c.compiled_s is not None for c in found.candidates if c.kept)


def test_fixed_knobs_leave_the_loops_that_have_them() -> None:
    fixed = {"ping_pong": False}
    found = by_kept_loops(survey(WORK, H200, HOPPER, fixed=fixed), fixed)
    assert found.shortlist and not any(c.variant.ping_pong for c in found.shortlist)  # type: ignore[union-attr]
    with pytest.raises(PredictError, match=r"no loop of these candidates for .* is at hand: use --level auto or fluid"):
        by_kept_loops(survey(WORK, H200, HOPPER, fixed={"tile_n": 32}), {"tile_n": 32})


def test_where_no_loop_has_the_fixed_knobs_auto_answers_before_compilation() -> None:
    found = subject.tune(WORK, H200, budget=0, compile=False, fixed="tile_n=32", compiler=loop_at_hand)
    assert found.by == "forecast" and found.winner.variant.tile_n == 32  # type: ignore[union-attr]
    with pytest.raises(PredictError, match="no loop of these candidates"):
        subject.tune(WORK, H200, budget=0, compile=False, fixed="tile_n=32", compiler=kept_loop)
