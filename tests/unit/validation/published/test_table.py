"""Published points: what is used, how it is converted, and that the statistics mean what they say."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast.base.data import PUBLISHED
from tilecast.validation.published import run
from tilecast.validation.published.points import best_per_shape, load_cycles, load_points, reasons
from tilecast.validation.published.run import headline_points, run_published, run_regimes, share_within
from tilecast.validation.published.text import report_dict, report_text, write_scatter
from tilecast.validation.statistics import grouped, rank_correlation, summarise

POINTS, EXCLUDED = load_points()
RAW = list(csv.DictReader((PUBLISHED / "points.csv").open()))


def test_every_forward_row_is_used_or_excluded_with_a_reason() -> None:
    assert len(RAW) == 2203
    assert sum(row["pass"] == "fwd" for row in RAW) == 1199
    assert len(POINTS) == 1159
    assert reasons(EXCLUDED) == {
        "the source does not give heads_q, heads_kv": 12,
        "no machine file for 'H800'": 12,
        "no machine file for 'H100 PCIe'": 8,
        "the source does not give causal": 6,
        "no machine file for 'Blackwell (model not visible)'": 2,
    }


def test_conventions_reproduce_every_row_that_has_time_and_throughput() -> None:
    checked = 0
    for point in POINTS:
        row = RAW[point.row - 2]
        if row["tflops"] and row["time_ms"]:
            milliseconds, printed = float(row["time_ms"]), float(row["tflops"])
            digits = len(row["time_ms"].partition(".")[2])
            slack = 0.6 * 10**-digits / milliseconds + 0.6 / printed + 2e-3
            assert point.flop / milliseconds / 1e9 == pytest.approx(printed, rel=slack), point.row
            checked += 1
    assert checked > 700


def test_families_and_clocks() -> None:
    kinds = {(p.machine.startswith("h"), p.kernel): p.family for p in POINTS}
    assert kinds[(False, "fa4")] == "fa4"
    assert kinds[(True, "fa4")] == "fa3 by fa4"
    assert kinds[(False, "cudnn")] == ""
    assert {p.clock_mhz for p in POINTS} == {None, 1957.0, 1755.0, 845.0}
    assert all("#488" in p.source for p in POINTS if p.clock_mhz == 845.0)


def test_best_per_shape_keeps_the_fastest() -> None:
    best = best_per_shape(POINTS)
    top = {p.shape: p.tflops for p in best}
    assert all(p.tflops <= top[p.shape] for p in POINTS)
    chosen = headline_points(POINTS, ("gb200",), ("16 bit", "fp8"))
    assert all(p.workload.seqlen_q >= 2048 and p.machine == "gb200" for p in chosen)


def perfect(factor: float):
    def predictor(point, regime):
        return SimpleNamespace(
            time_ms=point.flop / point.tflops / factor / 1e9, clock_mhz=1.0, pipeline=SimpleNamespace(name="fake")
        )

    return predictor


def test_coverage_counts_the_measurements_inside_their_intervals() -> None:
    chosen = headline_points(POINTS, ("gb200",), ("16 bit", "fp8"))

    def predictor(point, regime):
        wide = 1.2 if point.workload.mask == "causal" else 1.05
        made = perfect(1.1)(point, regime)
        return SimpleNamespace(**vars(made), low=1 / wide, high=wide)

    found = run_published("short", predictor, chosen)
    causal = sum(p.workload.mask == "causal" for p in chosen)
    assert 0 < causal < len(chosen)
    assert found.coverage["  gb200"] == causal / len(chosen)
    assert "Inside the forecast's interval, short clock" in report_text(found)
    assert report_dict(found)["coverage"]["gb200"] == causal / len(chosen)
    none = run_published("short", perfect(1.1), chosen)
    assert none.coverage == {} and "Inside the" not in report_text(none)


def test_where_measurements_lie_beside_forecasts_that_are_all_alike() -> None:
    chosen = headline_points(POINTS, ("gb200",), ("16 bit", "fp8"))
    found = run_published("short", perfect(1.25), chosen)
    (name,) = found.held_out
    assert name.startswith("Blackwell, best") and found.held_out[name].count == len(chosen)
    assert (found.held_out[name].low, found.held_out[name].high) == pytest.approx((-0.2, -0.2), abs=1e-6)
    assert "Where 80 % of measurements lie beside the forecast, short clock" in report_text(found)


def test_a_perfect_predictor_has_no_error_and_a_biased_one_its_bias() -> None:
    exact = run_published("short", perfect(1.0), POINTS[:200])
    assert all(abs(row.error) < 1e-12 for row in exact.rows)
    assert exact.tau > 0.99
    high = run_published("short", perfect(1.1), POINTS[:200])
    assert all(s.bias == pytest.approx(0.1) and s.worst == pytest.approx(0.1) for s in high.groups["GPU"].values())


def test_refusals_are_rows_not_crashes() -> None:
    def refuse(point, regime):
        raise ValueError("cannot")

    report = run_published("short", refuse, POINTS[:5])
    assert not report.rows
    assert [r.refused for r in report.refused] == ["cannot"] * 5
    assert "Refused: 5 rows" in report_text(report)


def test_several_clocks_at_once_and_on_all_cores_answer_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [p for p in POINTS if p.family][::60]
    monkeypatch.setattr(run, "_MANY", 1)
    together = run_regimes(("short", "sustained"), points=known)
    monkeypatch.setattr(run, "_MANY", 10_000)
    assert [report.regime for report in together] == ["short", "sustained"]
    assert together == tuple(run_published(regime, points=known) for regime in ("short", "sustained"))
    assert [row.point for row in together[0].rows] == [p for p in known if p in {r.point for r in together[0].rows}]


def test_real_report_renders(tmp_path: Path) -> None:
    report = run_published("short", points=POINTS[::40])
    text = report_text(report, with_rows=True)
    assert "b200 bf16 d128" in text
    data = report_dict(report)
    assert len(data["rows"]) == len(report.rows)
    assert {"headline", "groups", "cycles", "kendall_tau"} <= set(data)
    write_scatter(report, tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"


def test_cycle_rows() -> None:
    rows = load_cycles()
    assert [(r.machine, r.dtype, r.cycles) for r in rows[:4]] == [
        ("b200", "bf16", 1168), ("b200", "fp8", 1174), ("b300", "bf16", 1025), ("b300", "fp8", 928),
    ]  # fmt: skip
    assert rows[0].shares == {"tensor": 87.7, "xu": 71.9, "fma": 20.0, "alu": 31.2, "issue": 49.2}


def test_statistics_of_known_numbers() -> None:
    s = summarise([0.1, -0.2, 0.3])
    assert (s.count, s.median, s.worst) == (3, 0.2, 0.3)
    assert s.mean == pytest.approx(0.2)
    assert s.bias == pytest.approx(0.2 / 3)
    assert summarise([]).count == 0
    assert grouped([1, 2, 3], lambda x: x % 2, float)["1"].count == 2
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == 1.0
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == -1.0
    with pytest.raises(ValueError, match="equal length"):
        rank_correlation([1], [1, 2])


@given(st.lists(st.floats(-0.9, 2), min_size=1, max_size=30))
def test_summary_bounds(errors: list[float]) -> None:
    s = summarise(errors)
    assert abs(s.bias) <= s.mean + 1e-12
    assert s.median <= s.worst + 1e-12
    assert s.p90 <= s.worst + 1e-12


def test_share_within_of_nothing_is_zero() -> None:
    assert share_within((), 6.0) == 0.0
