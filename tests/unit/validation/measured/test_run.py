"""`validate measured`: its numbers recomputed from the rows by other means, what it refuses, how it judges choices."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from tilecast.base.data import MEASURED
from tilecast.cli import main
from tilecast.model.compiled.code import CodeError, KernelCode, dump_codes, load_codes
from tilecast.model.compiled.energy import settled_clock
from tilecast.model.compiled.forecast import forecast
from tilecast.model.compiled.loops.shelf import loop_at_hand
from tilecast.model.families import parse_variant
from tilecast.model.forecast.predict import predict
from tilecast.model.machine.machine import load_machine
from tilecast.validation.lab.measure.records import Measured, RecordError, append, read
from tilecast.validation.measured import run as measured_run
from tilecast.validation.measured import settled
from tilecast.validation.measured.kept import picks_of
from tilecast.validation.measured.run import MeasuredReport, run_measured
from tilecast.validation.measured.text import report_dict, report_text

DATA = MEASURED
CODES = DATA / "h200_code.txt"
LEVELS = ("from machine code", "before compilation")


@cache
def twelve() -> tuple[Measured, ...]:
    """Nine rows with both forecasts (two of them held out), a peer's, a sustained one, one without a profile, one too large."""
    rows = [r for r in read(DATA / "h200_points.csv") if r.seqlen_q == r.seqlen_k == 512]
    causal = [r for r in rows if (r.head_dim_qk, r.head_dim_v, r.mask) == (64, 64, "causal")]
    hopper = [r for r in causal if r.kernel == "hopper_ws"][:4]
    triton = [r for r in causal if r.kernel == "triton"][:3]
    held_out = [r for r in rows if (r.kernel, r.head_dim_qk, r.mask) == ("hopper_ws", 128, "none")][:2]
    return (
        *hopper, *triton, *(replace(r, role="held-out") for r in held_out),
        next(r for r in causal if r.kernel == "cudnn"), replace(hopper[0], mode="sustained"),
        replace(triton[0], variant=triton[0].variant.replace("stages=2", "stages=1")),
        replace(triton[0], variant=triton[0].variant.replace("tile_n=128", "tile_n=7")),
    )  # fmt: skip


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measured") / "twelve.csv"
    append(path, twelve())
    return path


@pytest.fixture(scope="module")
def report(table: Path) -> MeasuredReport:
    return run_measured(table, CODES)


def error_of(level: str, row: Measured) -> float:
    """The forecast of a recorded point by other means, over measured, less one."""
    machine, codes = load_machine("h200-sxm"), {c.key(): c for c in load_codes(CODES.read_text())}
    if level == "from machine code":
        cycles = forecast(codes[row.code_key()], row.workload(), machine, row.effective_mhz).cycles
    else:
        answer = predict(row.workload(), machine, parse_variant(row.variant), clock=row.effective_mhz, compiler=None)
        cycles = answer.time_ms * row.effective_mhz * 1e3
    return cycles / row.cycles - 1


def test_headline_numbers_follow_from_the_rows(report: MeasuredReport, table: Path) -> None:
    errors: dict[tuple[str, str], list[float]] = {}
    unprofiled = twelve()[11]
    for row in (*read(table)[:9], unprofiled):
        for level in LEVELS if row != unprofiled else LEVELS[1:]:
            errors.setdefault((level, row.role), []).append(error_of(level, row))
    assert {(level, role) for level, roles in report.headline.items() for role in roles} == set(errors)
    for (level, role), signed in errors.items():
        found, sizes = report.headline[level][role], [abs(e) for e in signed]
        assert found.count == len(signed) == {"build": 7 + (level == LEVELS[1]), "held-out": 2}[role]
        assert found.mean == pytest.approx(statistics.mean(sizes))
        assert found.median == pytest.approx(statistics.median(sizes))
        assert found.worst == pytest.approx(max(sizes))
        assert found.bias == pytest.approx(statistics.mean(signed))
        assert found.mean < 0.6  # a forecast, not a number


def test_groups_split_the_rows_without_losing_any(report: MeasuredReport) -> None:
    assert {name: s.count for name, s in report.groups["kernel"].items()} == {"hopper_ws": 6, "triton": 4}
    assert {name: s.count for name, s in report.groups["kernel, head_dim, mask"].items()} == {
        "hopper_ws 64 causal": 4, "hopper_ws 128 none": 2, "triton 64 causal": 4,
    }  # fmt: skip
    for title, groups in report.groups.items():
        assert sum(s.count for s in groups.values()) == (6 if title.startswith("hopper_ws") else 10)
    overall = sum(s.count * s.mean for s in report.groups["kernel, scheduler"].values())
    assert overall == pytest.approx(sum(abs(r.error(r.level)) for r in report.rows))


def test_a_row_without_a_profile_stands_on_the_forecast_before_compilation(report: MeasuredReport) -> None:
    (row,) = [r for r in report.rows if r.level != LEVELS[0]]
    assert (row.point, set(row.cycles)) == (twelve()[11], {LEVELS[1]})
    assert "1 of 10 rows stand on the forecast before compilation" in report_text(report, rows=False)
    assert len(report.rows) == 10
    assert all(r.point.mode == "short" and r.point.source_sha for r in report.rows)


def test_a_kernel_that_cannot_be_is_refused_with_the_reason(report: MeasuredReport) -> None:
    (row,) = report.refused
    assert row.point == twelve()[12]
    assert "tile_n" in row.refused


def test_a_table_without_any_profile_is_judged_before_compilation(table: Path, tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text(dump_codes([]))
    bare = run_measured(table, tmp_path / "none.txt")
    assert {r.level for r in bare.rows} == {LEVELS[1]} and len(bare.rows) == 10
    assert not bare.headline[LEVELS[0]]
    text = report_text(bare, rows=True)
    assert "10 of 10 rows stand on the forecast before compilation" in text
    assert "By kernel (before compilation, all roles)" in text


def test_text_and_json_say_the_same(report: MeasuredReport) -> None:
    text, answer = report_text(report, rows=True), json.loads(json.dumps(report_dict(report)))
    assert text.startswith("10 measured points of generated kernels (NVIDIA H200; twelve.csv)")
    assert f"1 rows without a forecast, for example: {report.refused[0].refused}" in text
    for level in LEVELS:
        for role, n in (("build", 7 + (level == LEVELS[1])), ("held-out", 2)):
            summary = answer["headline"][level][role]
            assert summary["n"] == n
            (line,) = [row for row in text.splitlines() if row.startswith(f"forecast {level}, {role}")]
            assert f"{summary['mean']:.1%}" in line
            assert f"{summary['bias']:+.1%}" in line
    assert [row["measured_cycles"] for row in answer["rows"]] == [r.cycles for r in (*twelve()[:9], twelve()[11])]
    assert len(answer["refused"]) == 1


def test_settled_clocks_are_told_by_level(report: MeasuredReport) -> None:
    (row,) = report.settled
    code = next(c for c in load_codes(CODES.read_text()) if c.key() == row.point.code_key())
    machine, work = load_machine("h200-sxm"), row.point.workload()
    assert row.mhz == {
        settled.BALANCE: settled_clock(code, work, machine, cycles=row.point.cycles).mhz,
        settled.COMPILED: settled_clock(code, work, machine).mhz,
        settled.BEFORE: predict(
            work, machine, parse_variant(row.point.variant), interval=False, compiler=None
        ).clock_mhz,
    }
    assert row.error(row.forecast) == row.mhz[settled.COMPILED] / row.point.effective_mhz - 1
    text = report_text(report, rows=True)
    for level in settled.LEVELS:
        (line,) = [line for line in text.splitlines() if line.startswith(level)]
        assert f"{abs(row.error(level)):.1%}" in line
        assert line.endswith("1 of 1" if abs(row.error(level)) <= 0.03 else "0 of 1")
    assert report_dict(report)["settled"][0]["predicted_mhz"] == row.mhz
    # Without a profile there is only the forecast made before compilation; peers have none.
    (bare,) = settled.settled_rows([row.point, replace(row.point, source_sha="")], {})
    assert list(bare.mhz) == [bare.forecast] == [settled.BEFORE]


def test_rows_of_the_text_start_with_the_worst(report: MeasuredReport) -> None:
    tail = report_text(report, rows=True).splitlines()[-10:]
    shown = [int(line.split()[0]) for line in tail]
    expected = [round(r.point.cycles) for r in sorted(report.rows, key=lambda r: abs(r.error(r.level)), reverse=True)]
    assert shown == expected


def test_files_of_something_else_are_refused(table: Path, tmp_path: Path) -> None:
    append(tmp_path / "peers.csv", [r for r in twelve() if r.kernel == "cudnn" or r.mode == "sustained"])
    with pytest.raises(RecordError, match="holds no short runs of generated kernels"):
        run_measured(tmp_path / "peers.csv", CODES)
    with pytest.raises(CodeError, match="cannot read the profiles"):
        run_measured(table, tmp_path / "none.txt")
    with pytest.raises(CodeError, match="not a file of machine-code profiles"):
        run_measured(table, table)


@pytest.mark.parametrize(
    "arguments", [["--code", "none.txt"], ["--picture", "x.gif"], ["--machine", "h2000"], ["none.csv"]]
)
def test_the_verb_refuses_in_a_sentence(arguments: list[str], table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["validate", "measured", *([str(table)] if len(arguments) == 2 else []), *arguments])
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert out == ""
    assert err.startswith("tilecast: ")
    assert err.count("\n") == 1
    assert arguments[-1] in err


# --- choices: invented forecasts and times -----------------------------------------------------------------------

VARIANTS = [f"family=fa2,tile_m={m},tile_n={n}" for m in (64, 128) for n in (32, 64)]


def choices(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    shapes: list[tuple[int, list[float], list[float]]],
    role: str = "build",
) -> dict[str, measured_run.Choices]:
    """Level -> choices of shapes given as (seqlen, forecast cycles, measured cycles) by variant."""
    base = next(r for r in twelve() if r.kernel == "triton")
    code = KernelCode("triton", "", 64, 64, "causal", "bf16", "sm_90a", "none", 4, 100, 1024, 0, 0, ())
    points, told = [], {}
    for seqlen, forecasts, times in shapes:
        for variant, cycles, time in zip(VARIANTS, forecasts, times, strict=False):
            points.append(
                replace(
                    base,
                    variant=variant,
                    seqlen_q=seqlen,
                    seqlen_k=seqlen,
                    cycles=time,
                    role=role,
                    effective_mhz=1000.0,
                )
            )
            told[variant, seqlen] = cycles
    append(folder / "t.csv", points)
    (folder / "codes.txt").write_text(dump_codes([replace(code, variant=v) for v in VARIANTS]))
    monkeypatch.setattr(
        measured_run, "forecast", lambda code, work, *_: SimpleNamespace(cycles=told[code.variant, work.seqlen_q])
    )
    # The other level has its order reversed: cycles at 1000 MHz are a millionth in milliseconds.
    by_variant = {parse_variant(v): v for v in VARIANTS}
    monkeypatch.setattr(
        measured_run, "predict",
        lambda work, _, variant, **__: SimpleNamespace(time_ms=1e-6 * (1e6 - told[by_variant[variant], work.seqlen_q])),
    )  # fmt: skip
    found = run_measured(folder / "t.csv", folder / "codes.txt").choices
    return {level: found[level][role] for level in LEVELS}


def test_a_perfect_order_has_no_regret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = choices(monkeypatch, tmp_path, [(512, [10, 20, 30, 40], [1000, 1200, 1300, 1500])])
    (choice,) = found[LEVELS[0]].shapes
    assert (choice.variants, choice.tau, choice.regret) == (4, 1.0, 0.0)
    (reverse,) = found[LEVELS[1]].shapes
    assert reverse.tau == -1.0
    assert reverse.regret == pytest.approx(0.5)


def test_regret_is_what_the_first_pick_loses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # One pair of six in the wrong order, and it is the first two.
    found = choices(monkeypatch, tmp_path, [(512, [10, 11, 30, 40], [1100, 1000, 1300, 1500])])
    (choice,) = found[LEVELS[0]].shapes
    assert choice.tau == pytest.approx((5 - 1) / 6)
    assert choice.regret == pytest.approx(0.1)


def test_shapes_are_judged_apart_and_summed_up_by_median_and_worst(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shapes = [
        (512, [1, 2, 3], [100, 110, 120]),
        (1024, [2, 1, 3], [1000, 1050, 2000]),  # the pick is 5 % behind
        (2048, [3, 2, 1], [10, 11, 14]),  # 40 %
        (4096, [1, 2], [10, 9]),  # two variants are no choice
    ]
    found = choices(monkeypatch, tmp_path, [(n, list(map(float, f)), list(map(float, t))) for n, f, t in shapes])[
        LEVELS[0]
    ]
    assert [c.variants for c in found.shapes] == [3, 3, 3]
    assert found.median_regret == pytest.approx(0.05)
    assert found.worst_regret == pytest.approx(0.4)
    assert found.median_tau == pytest.approx(1 / 3)


def test_no_shape_with_a_choice_gives_zeros(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = choices(monkeypatch, tmp_path, [(512, [1.0, 2.0], [1.0, 2.0])])[LEVELS[0]]
    assert found.shapes == ()
    assert (found.median_tau, found.median_regret, found.worst_regret) == (0.0, 0.0, 0.0)


def test_the_loops_at_hand_answer_in_place_of_profiles(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_run, "picks_of", lambda rows: picks_of(rows, least=2))
    report = run_measured(table, CODES, kept=True)
    followed = [row for row in report.rows if LEVELS[0] in row.cycles]
    assert followed and {row.point.kernel for row in followed} == {"hopper_ws"}
    machine = load_machine("h200-sxm")
    for row in followed:
        work, variant = row.point.workload(), parse_variant(row.point.variant)
        made = loop_at_hand(work, machine, variant)
        assert made is not None and made.code is not None
        assert row.cycles[LEVELS[0]] == forecast(made.code, work, machine, row.point.effective_mhz).cycles
    assert report.same_rows is not None and report.same_rows.count == len(followed)
    for pick in report.picks:
        members = [row for row in report.rows if pick.label == f"{row.point.kernel} {row.point.workload().label()}"]
        chosen = min((r for r in members if r in followed), key=lambda r: r.cycles[LEVELS[0]])
        assert pick.kept == chosen.point.cycles / min(r.point.cycles for r in members) - 1 >= pick.possible
        assert (pick.variants, pick.at_hand) == (len(members), sum(r in followed for r in members))
    text = report_text(report, rows=False)
    assert "rows with a loop" in text and "First pick behind the best of all measured variants" in text
    assert "no loop of theirs is at hand" in text
    assert report_dict(report)["picks"] and not report_dict(run_measured(table, CODES))["picks"]
    with pytest.raises(SystemExit) as end:
        main(["validate", "measured", str(table), "--kept", "--code", str(CODES)])
    assert end.value.code == 2
