"""The table of published ablations: what it holds, what is refused, and its forecast by other means."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean

import pytest

from tilecast.model.families import parse_variant
from tilecast.model.forecast.predict import predict
from tilecast.validation.ablations.published import FREE, ONE_CLOCK, TABLE, AblationError, forecast_cases, load

HEAD, *_ = TABLE.read_text().splitlines()
GOOD = (
    "x,B200,fwd,fp8,128,none,one,no,yes,1.02,1.04,a paper,,speed,b200,fp8,none,1,8,8,2048,,stated,"
    '"fa4:emulated_share=0,cta_group=2","fa4:emulated_share=0.25,cta_group=2",'
)


def table(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "ablations.csv"
    path.write_text("\n".join([HEAD, *lines]) + "\n")
    return path


def test_every_published_row_is_forecast_or_excluded_with_a_reason() -> None:
    lines, excluded = load()
    named, left_out = {line.case for line in lines}, {case.case for case in excluded}
    assert (len(named), len(left_out)) == (15, 13) and not named & left_out
    assert all(case.reason for case in excluded)
    backward = {case.case for case in excluded if case.reason.startswith("backward")}
    assert {name for name in left_out if "bwd" in name or "-det-" in name} == backward


def test_a_row_becomes_workload_machine_and_variants(tmp_path: Path) -> None:
    (line,), _ = load(table(tmp_path, GOOD))
    assert (line.low, line.high, line.machine, line.clock_mhz, line.stated) == (1.02, 1.04, "b200", None, True)
    assert line.workload.label() == "fp8 full attention, batch 1, heads 8, seqlen 2048, head_dim 128"
    assert line.variant_to == parse_variant("fa4:emulated_share=0.25,cta_group=2")


def test_a_ratio_of_time_is_turned_into_one_of_speed(tmp_path: Path) -> None:
    (line,), _ = load(table(tmp_path, GOOD.replace(",speed,", ",time,").replace("1.02,1.04", "0.80,0.90")))
    assert (line.low, line.high) == pytest.approx((1 / 0.9, 1.25))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (",speed,", ",power,", "column 'quantity': expected speed or time, got 'power'"),
        (",stated,", ",known,", "column 'shape_is': expected stated or chosen, got 'known'"),
        ("1.02,1.04", "fast,1.04", "column 'ratio_low': expected a number above 0, got 'fast'"),
        ("1.02,1.04", "1.02,nan", "column 'ratio_high': expected a number above 0, got 'nan'"),
        ("1.02,1.04", "1.05,1.04", "column 'ratio_low': expected at most ratio_high, got 1.05 and 1.04"),
        (",1,8,8,", ",1,8.5,8,", "column 'heads_q': expected a whole number, got '8.5'"),
        (",1,8,8,", ",1,8,3,", "heads"),
        (",fwd,", ",bwd,", "column 'pass': expected fwd, or a reason in 'excluded', got 'bwd'"),
        (",b200,", ",b2000,", "b2000"),
        ("emulated_share=0.25", "emulated=0.25", "has no knob 'emulated'"),
        ('cta_group=2",', 'cta_group=2"', "expected 26 fields"),
    ],
)
def test_a_bad_row_is_named_in_one_sentence(tmp_path: Path, old: str, new: str, told: str) -> None:
    bad = new.join(GOOD.rsplit(old, 1))
    with pytest.raises(AblationError) as refused:
        load(table(tmp_path, GOOD, bad))
    assert "line 3" in str(refused.value) and told in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "id,gpu\nx,B200\n"])
def test_another_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text(text)
    with pytest.raises(AblationError, match="not a table of published ablations"):
        load(path)


def test_a_variant_that_the_machine_cannot_run_is_refused(tmp_path: Path) -> None:
    lines, _ = load(table(tmp_path, GOOD.replace("b200,fp8", "h200-sxm,fp8")))
    with pytest.raises(AblationError, match="ablation x: fa4 cannot run"):
        forecast_cases(lines)


def test_a_case_is_the_geometric_mean_of_its_lines(tmp_path: Path) -> None:
    other = GOOD.replace(",1,8,8,2048,", ",2,16,16,4096,").replace("1.02,1.04", "1.10,1.12")
    lines, _ = load(table(tmp_path, GOOD, other))
    (case,) = forecast_cases(lines)
    assert (case.effect.low, case.effect.high) == pytest.approx(
        (geometric_mean((1.02, 1.10)), geometric_mean((1.04, 1.12)))
    )
    free, fixed = [], []
    for line in lines:
        before, after = (predict(line.workload, "b200", v, clock="short") for v in (line.variant_from, line.variant_to))
        kept = predict(line.workload, "b200", line.variant_to, clock=before.clock_mhz)
        free.append(before.time_ms / after.time_ms)
        fixed.append(before.time_ms / kept.time_ms)
    assert case.effect.forecast == pytest.approx({FREE: geometric_mean(free), ONE_CLOCK: geometric_mean(fixed)})


def test_a_locked_clock_is_a_ceiling(tmp_path: Path) -> None:
    low = GOOD.replace(",2048,,stated", ",2048,600,stated")
    (slow,) = forecast_cases(load(table(tmp_path, low))[0])
    assert slow.effect.forecast[FREE] == pytest.approx(slow.effect.forecast[ONE_CLOCK])
